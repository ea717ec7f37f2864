"""Which of a client's texts a continuation resembles: Lucene's tokens and Lucene's BM25 ranking.

An index ranks the texts that it was built from and answers with their rows. It does not know what a prefix, a client
or a match is; whoever calls it asks an engine for one index for each client and membership. Tokens and query terms are
made here for every engine. The embedded engine is tantivy in this process; `fedmem.elastic` is the other one, imported
only when it is asked for. tantivy adds single-precision numbers in an order that varies, so texts whose scores agree to
a few parts in a million are put in order again here, with Lucene's own arithmetic: ties then go to the lowest row, as
in Lucene.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from itertools import islice
from typing import Any, Protocol

import numpy as np
import regex
import tantivy

K1 = 1.2
B = 0.75
MAX_TOKEN_CHARS = 255  # UTF-16 units, Lucene's default
MAX_QUERY_TERMS = 1024  # the fewest clauses that an Elasticsearch 8 or 9 allows unless its owner lowered them

Hits = list[tuple[int, float]]  # (row, score), best first

_NEAR = 1e-5  # relative: far above single-precision noise, far below the usual distance of two texts
_SPARE = 6  # hits fetched beyond top_n, so that a tie at the cut is seen
_HEAP_BYTES = 64_000_000  # tantivy starts a new segment when it is full; scores do not depend on segments

# UAX #29 for text in ASCII: letters join over . ' :, digits over . , ; ', and underscores join everything
_ASCII_RUN = r"(?:[a-z]+(?:[.':][a-z]+)*|[0-9]+(?:[.,;'][0-9]+)*)+"
_ASCII_WORD = re.compile(rf"_*{_ASCII_RUN}(?:_+{_ASCII_RUN})*_*")


def _word_pattern() -> regex.Pattern:
    """The tokens of UAX #29 as Lucene's StandardTokenizer takes them: words, numbers, ideographs, emoji."""
    extend = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    letter = rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{extend}"
    hebrew = rf"\p{{WB=Hebrew_Letter}}{extend}"
    digit = rf"[\p{{WB=Numeric}}\uFF10-\uFF19]{extend}"
    # the colon and its variants are named: Unicode 15.1 took it from MidLetter, Lucene still has it there
    mid_letter = rf"[\p{{WB=MidLetter}}:\uFE13\uFE55\uFF1A\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{extend}"
    mid_digit = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{extend}"
    hebrew_mark = rf"(?<={hebrew})\p{{WB=Double_Quote}}{extend}(?=\p{{WB=Hebrew_Letter}})"
    letters = rf"{letter}(?:(?:{mid_letter}|{hebrew_mark})?{letter})*(?:(?<={hebrew})\p{{WB=Single_Quote}}{extend})?"
    digits = rf"{digit}(?:(?:{mid_digit})?{digit})*"
    run = rf"(?:(?:{letters}|{digits})+|(?:\p{{WB=Katakana}}{extend})+)"
    joint = rf"(?:\p{{WB=ExtendNumLet}}{extend})"
    word = rf"{joint}*{run}(?:{joint}+{run})*{joint}*"
    south_east_asian = rf"(?:\p{{LB=SA}}{extend})+"
    ideograph = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{extend}"
    keycap = r"[#*]\uFE0F?\u20E3"
    flag = rf"(?:\p{{WB=Regional_Indicator}}{extend}){{2}}"
    emoji = rf"(?![#*0-9]|\p{{WB=Regional_Indicator}})\p{{Emoji}}\p{{Emoji_Modifier}}?{extend}"
    emoji_chain = rf"{emoji}(?:(?<=\u200D){emoji})*"
    return regex.compile("|".join((word, south_east_asian, ideograph, keycap, flag, emoji_chain)))


_WORD = _word_pattern()


def tokens(text: str) -> list[str]:
    """Tokens of `text` as Lucene's StandardAnalyzer gives them: UAX #29 words, lower-cased, none dropped.

    Lower-casing goes code point by code point (İ gives i, Σ gives σ). A token over 255 UTF-16 units is split there.
    Any string is accepted; one without words gives [].
    """
    if text.isascii():
        found = _ASCII_WORD.findall(text.lower())
        if len(text) <= MAX_TOKEN_CHARS or not found or max(map(len, found)) <= MAX_TOKEN_CHARS:
            return found
    return [_lower(token) for token in _unicode_words(text)]


def _unicode_words(text: str) -> Iterable[str]:
    position = 0
    while match := _WORD.search(text, position):
        if len(match[0].encode("utf-16-le")) > 2 * MAX_TOKEN_CHARS:
            # Lucene reads through a window of 255 units: what follows is read as if the text began there
            match = _WORD.match(text, match.start(), match.start() + _window(text, match.start()))
        yield match[0]
        position = match.end()


def _window(text: str, start: int) -> int:
    """Characters from `start` on that fit in 255 UTF-16 units."""
    units = 0
    for length, char in enumerate(text[start : start + MAX_TOKEN_CHARS]):
        units += 1 + (char > "\uffff")
        if units > MAX_TOKEN_CHARS:
            return length
    return MAX_TOKEN_CHARS


def _lower(token: str) -> str:
    # Python's lower() looks at the whole word for two letters: İ becomes two characters, a final Σ becomes ς
    return token.replace("İ", "i").lower() if "Σ" not in token else "".join(map(_lower_char, token))


def _lower_char(char: str) -> str:
    return "i" if char == "İ" else char.lower()


@cache
def stop_words() -> frozenset[str]:
    """The English stop words that the paper drops from queries (NLTK's list)."""
    return frozenset(files("fedmem").joinpath("data", "stopwords_en.txt").read_text("utf-8").split())


def query_terms(text: str, drop_stop_words: bool = False, max_terms: int | None = MAX_QUERY_TERMS) -> dict[str, int]:
    """Distinct tokens of a query in order of first occurrence, with the times each occurs in the whole text.

    Stop words are dropped after tokenising. Of more than `max_terms` distinct tokens the first ones are kept; None
    keeps all. This is the one place that turns a text into a query, so every engine asks for the same.
    """
    terms = Counter(tokens(text))
    kept = ((term, n) for term, n in terms.items() if not (drop_stop_words and term in stop_words()))
    return dict(islice(kept, max_terms))


class Index(ABC):
    """Texts that can be searched: what every engine's indices have in common."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of texts, those without a token included."""

    @abstractmethod
    def search_terms(self, queries: Iterable[Mapping[str, int]], top_n: int) -> list[Hits]:
        """As `search`, for queries that `query_terms` has prepared: many indices, one tokenisation."""

    def search(self, queries: Sequence[str], top_n: int, drop_stop_words: bool = False) -> list[Hits]:
        """The `top_n` best rows for each query as (row, score), best first; equal scores by row.

        Only texts that share a token with the query are hits (score > 0), so there may be fewer than `top_n`, and none
        for an empty query, a query of stop words alone, or an index without texts. A query counts with its first 1,024
        distinct tokens. Raises ValueError for `top_n` below 1 and TypeError for a query that is no string.
        """
        return self.search_terms([query_terms(query, drop_stop_words) for query in strings(queries, "queries")], top_n)


class Engine(Protocol):
    """What makes indices; `open_engine` returns one."""

    def index(self, texts: Iterable[str], label: str = "texts") -> AbstractContextManager[Index]:
        """An index of `texts` for as long as the context lasts; `label` names it where it can be seen from outside."""

    def check(self) -> dict[str, Any]:
        """Makes sure that the engine can work and says what it is; raises an error that says what to do."""


class Embedded:
    """The engine in this process."""

    @contextmanager
    def index(self, texts: Iterable[str], label: str = "texts") -> Iterator[Index]:
        yield BM25Index.build(texts)

    def check(self) -> dict[str, Any]:
        return {"engine": "embedded", "tantivy": version("tantivy")}


def open_engine(retriever: str, run: str = "none", shards: int = 1, max_query_terms: int = MAX_QUERY_TERMS) -> Engine:
    """The engine called `retriever`: embedded, or elasticsearch, whose server the environment names.

    run: tags what is made on a server, so that leftovers can be told apart. shards: of each index there.
    Raises ValueError for another name, `fedmem.elastic.ElasticError` where the environment does not say enough.
    """
    if retriever == "embedded":
        return Embedded()
    if retriever == "elasticsearch":
        from fedmem.elastic import Connection, Elastic

        return Elastic(Connection.from_environment(), run, shards, max_query_terms)
    raise ValueError(f"retriever: got {retriever!r}; allowed is embedded | elasticsearch")


class BM25Index(Index):
    """Texts ranked by BM25 as Lucene computes it (k1 = 1.2, b = 0.75, idf = ln(1 + (N − n + 0.5) / (n + 0.5))).

    Text lengths are kept with four significant bits, as Lucene keeps them; texts without a token count nowhere.
    Scores are Lucene's; Elasticsearch's are those times k1 + 1. One index lives in memory and is never written.
    """

    def __init__(self, texts: list[str], index: tantivy.Index) -> None:
        """For `build`: `texts` are the tokens of each row joined by spaces, `index` holds those that have any."""
        self._texts = texts
        self._searcher, self._schema = index.searcher(), index.schema
        lengths = [len(text.split()) for text in texts if text]
        mean = np.float32(sum(lengths) / len(lengths)) if lengths else np.float32(1)
        self._n = len(lengths)
        kept = {length: np.float32(_kept_length(length)) for length in set(lengths)}
        b, k1, one = np.float32(B), np.float32(K1), np.float32(1)
        self._inverse_norm = {length: one / (k1 * ((one - b) + b * value / mean)) for length, value in kept.items()}

    @classmethod
    def build(cls, texts: Iterable[str]) -> BM25Index:
        """Index `texts`; a hit's row is the position here. Raises TypeError for one string, or a text that is none."""
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
            raise ValueError(f"top_n = {top_n}: at least 1 hit must be asked for")
        return [self._best(terms, top_n) for terms in queries]

    def _best(self, terms: Mapping[str, int], top_n: int) -> Hits:
        if not terms or not self._n:
            return []
        hits = self._hits(terms, top_n)
        settled = []
        for group in _near_ties(hits):
            settled += self._settled(group, terms) if len(group) > 1 else group
        return sorted(settled, key=lambda hit: (-hit[1], hit[0]))[:top_n]

    def _hits(self, terms: Mapping[str, int], top_n: int) -> Hits:
        """At least `top_n` hits where there are as many, and all those that tie with the last of them."""
        query = self._query(terms)
        limit = min(top_n, self._n) + _SPARE
        while True:
            found = self._searcher.search(query, limit=limit, count=False).hits
            if len(found) < limit or found[-1][0] < found[top_n - 1][0] * (1 - _NEAR):
                rows = self._searcher.fast_field_values("row", [address for _, address in found])
                return [(row, score / (K1 + 1)) for row, (score, _) in zip(rows, found, strict=True)]
            limit *= 2

    def _settled(self, group: Hits, terms: Mapping[str, int]) -> Hits:
        texts = {self._texts[row] for row, _ in group}  # copies of a text are scored once
        scores = {text: self._score(text, terms) for text in texts}
        return [(row, scores[self._texts[row]]) for row, _ in group]

    def _query(self, terms: Mapping[str, int]) -> tantivy.Query:
        clauses = []
        for term, n in terms.items():
            query = tantivy.Query.term_query(self._schema, "text", term)
            clauses.append((tantivy.Occur.Should, tantivy.Query.boost_query(query, n) if n > 1 else query))
        return tantivy.Query.boolean_query(clauses)

    def _score(self, text: str, terms: Mapping[str, int]) -> float:
        """Lucene's score of one text, but for the last bit: single precision a term, double for their sum."""
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
    """`hits`, best first, in groups whose neighbours differ by less than noise could explain."""
    group = hits[:1]
    for hit in hits[1:]:
        if hit[1] < group[-1][1] * (1 - _NEAR):
            yield group
            group = []
        group.append(hit)
    yield group


def _kept_length(length: int) -> int:
    """The length that Lucene's one-byte norm remembers: exact to 39 tokens, then four significant bits above 24."""
    excess = length - 24
    shift = max(excess.bit_length() - 4, 0) if excess > 0 else 0
    return length if shift == 0 else 24 + (excess >> shift << shift)


def strings(values: Iterable[str], name: str) -> list[str]:
    if isinstance(values, str):
        raise TypeError(f"{name}: got one string; give a list of strings, [text] for a single one")
    values = list(values)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise TypeError(f"{name}, row {row}: got {type(value).__name__}, not a string; drop or fill it first")
    return values
