"""The retrieval engine on an Elasticsearch server, through its official client: the embedded engine's ranking.

Texts arrive as the tokens that `fedmem.retrieval.bm25` makes, so that no server's Unicode tables matter, and only the
inverted index keeps them. An index belongs to one run, is marked as `fedmem.retrieval.elasticsearch.orphaned_indices`
says, lives while it is
searched and is deleted by its exact name. Knows no prefix, client or match.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from elasticsearch import BadRequestError

from fedmem.retrieval.elasticsearch import orphaned_indices
from fedmem.retrieval.elasticsearch.orphaned_indices import ALIAS, NAME, tag, tag_of
from fedmem.retrieval.elasticsearch.server import (
    PASSING,
    Busy,
    Connection,
    ElasticError,
    Patience,
    Server,
    Vanished,
    error_kinds,
)
from fedmem.retrieval.index import K1, B, Hits, Index
from fedmem.retrieval.tokens import MAX_QUERY_TERMS, strings, tokens

_WINDOW = 10_000  # hits of one search: the server's default limit
_TEXTS_AT_ONCE, _QUERIES_AT_ONCE = 1000, 64
_CHARS_AT_ONCE = 5_000_000  # of one request; a server takes 100 MB unless told otherwise
_CHARS_OF_CLAUSE = 50


class Elastic:
    """The engine on the server of a connection. It sends nothing before the first call, and checks the server first.

    run: tags the indices. shards: of each index; with more than one, frequencies are counted shard by shard, which
    changes the ranking (20 shards changed 14 % of a top 10).
    """

    def __init__(
        self,
        connection: Connection,
        run: str = "none",
        shards: int = 1,
        max_query_terms: int = MAX_QUERY_TERMS,
        patience: Patience = Patience(),  # noqa: B008 - immutable
    ) -> None:
        self.server = Server(connection, patience)
        self._run, self._shards, self._max_query_terms = run, shards, max_query_terms
        self._found: dict[str, Any] = {}
        self._created: set[str] = set()

    def check(self) -> dict[str, Any]:
        """The server's and the client's version and the health; ElasticError says why this server will not do."""
        self._found = self._found or self.server.check(self._max_query_terms)
        return self._found

    @contextmanager
    def index(self, texts: Iterable[str], label: str = "texts") -> Iterator[ElasticIndex]:
        """An index of `texts`, deleted when the context ends, however it ends.

        Raises ElasticError where not every text got in: a partial index is never searched.
        """
        self.check()
        index = ElasticIndex(self, [" ".join(tokens(text)) for text in strings(texts, "texts")], label)
        try:
            index.build()
            yield index
        finally:
            index.drop()

    # --- one index ---------------------------------------------------------------------------------------------------

    def new_name(self, label: str) -> str:
        """A name that nothing else has: lower-case, tagged with run and label."""
        name = "-".join(("fedmem", self._run[:8], label[:80], uuid.uuid4().hex[:16]))
        name = re.sub("[^a-z0-9-]", "-", name.lower())
        self._created.add(name)
        return name

    def create(self, name: str) -> None:
        """Makes an empty index, tagged, with every setting that ranking depends on stated."""
        settings = {
            "number_of_shards": self._shards,
            "number_of_replicas": 0,
            "refresh_interval": -1,
            "similarity": {"default": {"type": "BM25", "k1": K1, "b": B}},
        }
        mappings = {
            "dynamic": "strict",
            "_source": {"enabled": False},
            "_meta": tag(self._run),
            "properties": {
                "row": {"type": "integer"},
                "text": {"type": "text", "analyzer": "whitespace", "index_options": "freqs"},
            },
        }
        self.server.request(f"creating {name}", self._create, index=name, settings=settings, mappings=mappings)

    def _create(self, **arguments: Any) -> None:
        try:
            answer = self.server.client.indices.create(aliases={ALIAS: {}}, **arguments)
        except BadRequestError as error:
            if "resource_already_exists_exception" not in error_kinds(error.body):
                raise  # otherwise an earlier attempt has made it, and its answer got lost
        else:
            if not answer["shards_acknowledged"]:
                raise Busy(503)  # no node has taken it yet

    def fill(self, name: str, texts: Mapping[int, str]) -> None:
        """Sends all texts, refreshes and counts; ElasticError names the rows that failed, never their text."""
        client, doing, failed = self.server.client, f"filling {name}", {}
        for rows in _batches(texts, lambda row: len(texts[row]), _TEXTS_AT_ONCE):
            operations = [
                line for row in rows for line in ({"index": {"_id": str(row)}}, {"row": row, "text": texts[row]})
            ]
            failed |= self.server.request(doing, self._bulk, index=name, operations=operations)
        self.server.request(doing, client.indices.refresh, index=name)
        count = self.server.request(doing, client.count, index=name)["count"]
        if failed or count != len(texts):
            rows = ", ".join(f"{row} ({kind})" for row, kind in sorted(failed.items())[:10])
            problem = f"{count} of {len(texts)} texts got in" + (f"; {len(failed)} failed, rows {rows}" if rows else "")
            raise self.server.error(doing, problem, "nothing was searched; find the cause in its log, then run again")
        if (
            tag_of(self.server, name) is None
        ):  # a bulk request to an index that vanished makes another one, with a guessed mapping
            raise self.server.error(doing, "the index was replaced", "run again", Vanished)

    def _bulk(self, **arguments: Any) -> dict[int, str]:
        """Sends one batch; {row: kind of error} of what is refused for good. A row overwrites itself: repeatable."""
        results = [item["index"] for item in self.server.client.bulk(**arguments)["items"]]
        for result in results:
            if result["status"] in PASSING:
                raise Busy(result["status"])
        failed = (result for result in results if result["status"] >= 300)
        return {int(result["_id"]): result["error"]["type"] for result in failed}

    def search(self, name: str, queries: Sequence[Mapping[str, int]], size: int) -> list[Hits]:
        """The best `size` rows for each query, in one request; raises Vanished where the index is gone."""
        searches = [part for terms in queries for part in ({}, _search_body(terms, size))]
        answer = self.server.request(f"searching {name}", self._msearch, index=name, searches=searches)
        for response in answer:
            if "error" in response:
                raise self._refusal(name, response)
        return [
            [(int(hit["_id"]), hit["sort"][0] / (K1 + 1)) for hit in response["hits"]["hits"]] for response in answer
        ]

    def _msearch(self, **arguments: Any) -> list[dict]:
        responses = self.server.client.msearch(**arguments)["responses"]
        for response in responses:
            if response["status"] in PASSING:
                raise Busy(response["status"])
            if "error" not in response and (response["timed_out"] or response["_shards"]["failed"]):
                raise Busy(503)  # the answer of some shards only is none
        return responses

    def _refusal(self, name: str, response: dict) -> ElasticError:
        kinds = error_kinds(response)
        advice = "set max_query_terms lower" if any("too_many" in kind for kind in kinds) else "its log says more"
        kind = Vanished if "index_not_found_exception" in kinds else ElasticError
        return self.server.error(f"searching {name}", f"status {response['status']}, {', '.join(kinds)}", advice, kind)

    def delete(self, name: str) -> None:
        """Deletes one index that this engine named; for any other name a ValueError, and no request."""
        if name not in self._created or not NAME.fullmatch(name):
            raise ValueError(f"{name!r} was not made here; only exact names that this run created are deleted")
        orphaned_indices.delete(self.server, name)
        self._created.discard(name)


class ElasticIndex(Index):
    """Texts in one index on the server. Should it vanish while it is in use, it is built anew, once."""

    def __init__(self, engine: Elastic, texts: list[str], label: str) -> None:
        """For `Elastic.index`: `texts` are the tokens of each row joined by spaces; those without any are not sent."""
        self._engine, self._label, self._n = engine, label, len(texts)
        self._texts = {row: text for row, text in enumerate(texts) if text}
        self._names: list[str] = []

    def __len__(self) -> int:
        return self._n

    def build(self) -> None:
        """Makes and fills the index; none is made where no text has a token."""
        if self._texts:
            try:
                self._fill()
            except Vanished:
                self._fill_once_more()

    def _fill(self) -> None:
        self._names.append(self._engine.new_name(self._label))
        self._engine.create(self._names[-1])
        self._engine.fill(self._names[-1], self._texts)

    def _fill_once_more(self) -> None:
        if len(self._names) > 1:
            advice = "find out what deletes indices there, then run again: all indices are built anew"
            raise self._engine.server.error(
                f"using {self._names[-1]}", "the index vanished, and so did its successor", advice
            )
        self._fill()

    def search_terms(self, queries: Iterable[Mapping[str, int]], top_n: int) -> list[Hits]:
        if top_n < 1:
            raise ValueError(f"top_n = {top_n}: at least 1 hit must be asked for")
        queries, size = list(queries), min(top_n, len(self._texts))
        if size > _WINDOW:
            raise ValueError(f"top_n = {top_n}: Elasticsearch gives at most {_WINDOW} hits")
        found: list[Hits] = [[] for _ in queries]
        asked = [i for i, terms in enumerate(queries) if terms and size]
        for batch in _batches(asked, lambda i: _CHARS_OF_CLAUSE * len(queries[i]), _QUERIES_AT_ONCE):
            for i, hits in zip(batch, self._search([queries[i] for i in batch], size), strict=True):
                found[i] = hits
        return found

    def _search(self, queries: Sequence[Mapping[str, int]], size: int) -> list[Hits]:
        try:
            return self._engine.search(self._names[-1], queries, size)
        except Vanished:
            self._fill_once_more()
            return self._search(queries, size)

    def drop(self) -> None:
        """Deletes what was made; where that fails, a warning says how to do it later."""
        for name in self._names:
            try:
                self._engine.delete(name)
            except ElasticError as error:
                warnings.warn(f"{error}. Later: fedmem elasticsearch remove {name}", stacklevel=2)
        self._names.clear()


def _search_body(terms: Mapping[str, int], size: int) -> dict[str, Any]:
    """One clause for each distinct token, its count as boost; equal scores by row."""
    clauses = [{"term": {"text": {"value": term, "boost": n}}} for term, n in terms.items()]
    order = [{"_score": "desc"}, {"row": "asc"}]
    return {
        "query": {"bool": {"should": clauses}},
        "size": size,
        "_source": False,
        "sort": order,
        "track_total_hits": False,
    }


def _batches(items: Iterable[int], chars: Callable[[int], int], count: int) -> Iterator[list[int]]:
    """`items` in order, in lists of at most `count`, and of at most so many characters unless one alone has more."""
    batch, total = [], 0
    for item in items:
        size = chars(item)
        if batch and (len(batch) == count or total + size > _CHARS_AT_ONCE):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
