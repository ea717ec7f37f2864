"""The embedded engine: Lucene's BM25 ranking by tantivy in this process.

tantivy adds single-precision numbers in an order that varies, so texts whose scores agree to a few parts in a million
are put in order again here, with Lucene's own arithmetic: ties then go to the lowest row, as in Lucene.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Self

import numpy as np
import tantivy

from fedmem.retrieval.index import K1, B, Hits, Index
from fedmem.retrieval.tokens import strings, tokens

_NEAR = 1e-5  # relative: far above single-precision noise, far below the usual score difference of two texts

_SPARE = 6  # hits fetched beyond top_n to detect a tie at the cut

_HEAP_BYTES = 64_000_000  # tantivy starts a new segment when the heap is full; scores do not depend on segments


class Embedded:
    """The engine in this process."""

    @contextmanager
    def index(self, texts: Iterable[str], label: str = "texts") -> Iterator[Index]:
        yield BM25Index.build(texts)

    def check(self) -> dict[str, Any]:
        return {"engine": "embedded", "tantivy": version("tantivy")}


class BM25Index(Index):
    """Texts ranked by BM25 as Lucene computes it (k1 = 1.2, b = 0.75, idf = ln(1 + (N − n + 0.5) / (n + 0.5))).

    Text lengths are rounded to four significant bits, as in Lucene. Texts without a token count neither in N nor in the
    mean length. Scores are Lucene's; those of Elasticsearch are k1 + 1 times larger. The index exists in memory only.
    """

    def __init__(self, texts: list[str], index: tantivy.Index) -> None:
        """Used by `build`. texts: the tokens of each row joined by spaces. index: contains those with tokens."""
        self._texts = texts
        self._searcher, self._schema = index.searcher(), index.schema
        lengths = [len(text.split()) for text in texts if text]
        mean = np.float32(sum(lengths) / len(lengths)) if lengths else np.float32(1)
        self._n = len(lengths)
        kept = {length: np.float32(_kept_length(length)) for length in set(lengths)}
        # single precision throughout, as in Lucene: in double precision the last digits of scores would differ
        b, k1, one = np.float32(B), np.float32(K1), np.float32(1)
        self._inverse_norm = {length: one / (k1 * ((one - b) + b * value / mean)) for length, value in kept.items()}

    @classmethod
    def build(cls, texts: Iterable[str]) -> Self:
        """Index `texts`; the row of a hit is its position. Raises TypeError for a single string or another type."""
        texts = [" ".join(tokens(text)) for text in strings(texts, "texts")]
        schema = tantivy.SchemaBuilder().add_integer_field("row", stored=False, fast=True)
        schema = schema.add_text_field("text", tokenizer_name="whitespace", index_option="freq").build()
        index = tantivy.Index(schema)
        writer = index.writer(heap_size=_HEAP_BYTES, num_threads=1)
        for row, text in enumerate(texts):
            if text:
                writer.add_document(tantivy.Document(row=row, text=text))
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        return cls(texts, index)

    def __len__(self) -> int:
        return len(self._texts)

    def search_terms(self, queries: Iterable[Mapping[str, int]], top_n: int) -> list[Hits]:
        if top_n < 1:
            raise ValueError(f"top_n: got {top_n}; expected a whole number ≥ 1")
        return [self._best(terms, top_n) for terms in queries]

    def _best(self, terms: Mapping[str, int], top_n: int) -> Hits:
        if not terms or not self._n:
            return []
        groups = _near_ties(self._hits(terms, top_n))
        settled = [hit for group in groups for hit in (self._settled(group, terms) if len(group) > 1 else group)]
        return sorted(settled, key=lambda hit: (-hit[1], hit[0]))[:top_n]

    def _hits(self, terms: Mapping[str, int], top_n: int) -> Hits:
        """At least `top_n` hits, if there are as many, and all hits that nearly tie with the last of them."""
        query = self._query(terms)
        limit = min(top_n, self._n) + _SPARE
        while True:
            found = self._searcher.search(query, limit=limit, count=False).hits
            if len(found) < limit or found[-1][0] < found[top_n - 1][0] * (1 - _NEAR):
                rows = self._searcher.fast_field_values("row", [address for _, address in found])
                return [(row, score / (K1 + 1)) for row, (score, _) in zip(rows, found, strict=True)]
            limit *= 2

    def _settled(self, group: Hits, terms: Mapping[str, int]) -> Hits:
        texts = {self._texts[row] for row, _ in group}  # copies of a text are scored only once
        scores = {text: self._score(text, terms) for text in texts}
        return [(row, scores[self._texts[row]]) for row, _ in group]

    def _query(self, terms: Mapping[str, int]) -> tantivy.Query:
        clauses = []
        for term, n in terms.items():
            query = tantivy.Query.term_query(self._schema, "text", term)
            clauses.append((tantivy.Occur.Should, tantivy.Query.boost_query(query, n) if n > 1 else query))
        return tantivy.Query.boolean_query(clauses)

    def _score(self, text: str, terms: Mapping[str, int]) -> float:
        """Lucene's score of one text up to the last bit: single precision for a term, double for the sum."""
        counts = Counter(text.split())
        inverse = self._inverse_norm[counts.total()]
        one, total = np.float32(1), 0.0
        for term, n in terms.items():
            if term in counts:
                weight = np.float32(n) * self._idf(term)
                total += float(weight - weight / (one + np.float32(counts[term]) * inverse))
        return float(np.float32(total))

    def _idf(self, term: str) -> np.float32:
        n = self._searcher.doc_freq("text", term)
        return np.float32(math.log(1 + (self._n - n + 0.5) / (n + 0.5)))


def _near_ties(hits: Hits) -> Iterable[Hits]:
    """`hits`, best first, in groups whose neighbours differ by no more than rounding noise (_NEAR)."""
    group = hits[:1]
    for hit in hits[1:]:
        if hit[1] < group[-1][1] * (1 - _NEAR):
            yield group
            group = []
        group.append(hit)
    yield group


def _kept_length(length: int) -> int:
    """The length that Lucene's one-byte norm stores: exact up to 39 tokens, then four significant bits above 24."""
    excess = length - 24
    shift = max(excess.bit_length() - 4, 0) if excess > 0 else 0
    return length if shift == 0 else 24 + (excess >> shift << shift)
