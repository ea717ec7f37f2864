"""The retrieval engine on an Elasticsearch server, through its official client, with the embedded engine's ranking.

Texts are sent as the tokens that `fedmem.retrieval.bm25` makes, so that the result does not depend on the server's
Unicode
tables, and only the inverted index keeps them. An index belongs to one run, is tagged as
`fedmem.retrieval.elasticsearch.orphaned_indices`
describes, exists while it is searched, and is deleted by its exact name. This module does not depend on prefixes,
clients or matches.
"""

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
_TEXTS_AT_ONCE, _QUERIES_AT_ONCE = 1000, 64  # in one request
_CHARS_AT_ONCE = 5_000_000  # of one request; a server accepts 100 MB by default
_CHARS_OF_CLAUSE = 50  # of one query term in a request, roughly


class Elastic:
    """The engine on one server. It sends nothing before the first call, which checks the server.

    connection: address and credentials of the server. run: a tag for the indices.
    shards: of each index, at least 1; with more than one, frequencies are counted per shard, which changes the ranking
        (20 shards changed 14 % of a top 10).
    max_query_terms: longest query, in distinct tokens, that the server must accept.
    patience: timeouts and retries.
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
        """Return the server's and the client's version and the health; raises ElasticError for an unsuitable server."""
        self._found = self._found or self.server.check(self._max_query_terms)
        return self._found

    @contextmanager
    def index(self, texts: Iterable[str], label: str = "texts") -> Iterator["ElasticIndex"]:
        """Build an index of `texts`; delete it when the context ends, even after an error.

        Raises ElasticError when a text could not be indexed: a partial index is never searched.
        """
        self.check()
        index = ElasticIndex(self, [" ".join(tokens(text)) for text in strings(texts, "texts")], label)
        try:  # around the build as well: an index that was only partly filled must be deleted too
            index.build()
            yield index
        finally:
            index.drop()

    # --- one index ---------------------------------------------------------------------------------------------------

    def new_name(self, label: str) -> str:
        """Return a unique index name: lower-case, with run and label."""
        name = "-".join(("fedmem", self._run[:8], label[:80], uuid.uuid4().hex[:16]))
        name = re.sub("[^a-z0-9-]", "-", name.lower())
        self._created.add(name)
        return name

    def create(self, name: str) -> None:
        """Create an empty, tagged index, with every setting that the ranking depends on set explicitly."""
        # no replicas: the index exists only while it is searched; no refresh until `fill` has sent everything
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
                raise  # otherwise an earlier attempt created it, and its answer was lost
        else:
            if not answer["shards_acknowledged"]:
                raise Busy(503)  # no node has started the shards yet: retried like a 503

    def fill(self, name: str, texts: Mapping[int, str]) -> None:
        """Send all texts, refresh and count; raises ElasticError with the rows that failed, never with their text."""
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
            problem = f"{count} of {len(texts)} texts indexed" + (
                f"; {len(failed)} failed, rows {rows}" if rows else ""
            )
            raise self.server.error(doing, problem, "nothing was searched; find the cause in its log, then run again")
        # a bulk request to a deleted index creates another one, with a guessed mapping and without the tag
        if tag_of(self.server, name) is None:
            raise self.server.error(doing, "the index was replaced", "run again", Vanished)

    def _bulk(self, **arguments: Any) -> dict[int, str]:
        """Send one batch; return {row: kind of error} of the rows that are refused for good.

        It can be repeated: a row overwrites itself.
        """
        results = [item["index"] for item in self.server.client.bulk(**arguments)["items"]]
        for result in results:
            if result["status"] in PASSING:
                raise Busy(result["status"])
        failed = (result for result in results if result["status"] >= 300)
        return {int(result["_id"]): result["error"]["type"] for result in failed}

    def search(self, name: str, queries: Sequence[Mapping[str, int]], size: int) -> list[Hits]:
        """Return the best rows for each query, from one request.

        name: the index. queries: {token: count} of each query. size: number of hits per query, at least 1.
        Returns for each query [(row, score), …], best first. Raises Vanished when the index no longer exists, and
        ElasticError when the server refuses a query.
        """
        searches = [part for terms in queries for part in ({}, _search_body(terms, size))]
        answer = self.server.request(f"searching {name}", self._msearch, index=name, searches=searches)
        for response in answer:
            if "error" in response:
                raise self._refusal(name, response)
        # the server's scores have a factor K1 + 1 that the embedded engine's do not have
        return [
            [(int(hit["_id"]), hit["sort"][0] / (K1 + 1)) for hit in response["hits"]["hits"]] for response in answer
        ]

    def _msearch(self, **arguments: Any) -> list[dict]:
        responses = self.server.client.msearch(**arguments)["responses"]
        for response in responses:
            if response["status"] in PASSING:
                raise Busy(response["status"])
            if "error" not in response and (response["timed_out"] or response["_shards"]["failed"]):
                raise Busy(503)  # an answer of only some of the shards is incomplete
        return responses

    def _refusal(self, name: str, response: dict) -> ElasticError:
        kinds = error_kinds(response)
        advice = "set max_query_terms lower" if any("too_many" in kind for kind in kinds) else "its log says more"
        kind = Vanished if "index_not_found_exception" in kinds else ElasticError
        return self.server.error(f"searching {name}", f"status {response['status']}, {', '.join(kinds)}", advice, kind)

    def delete(self, name: str) -> None:
        """Delete one index that this engine created; raises ValueError, without a request, for any other name."""
        if name not in self._created or not NAME.fullmatch(name):
            raise ValueError(f"{name!r} was not created here; only exact names that this run created are deleted")
        orphaned_indices.delete(self.server, name)
        self._created.discard(name)


class ElasticIndex(Index):
    """Texts in one index on the server. If the index disappears during use, it is rebuilt, once."""

    def __init__(self, engine: Elastic, texts: list[str], label: str) -> None:
        """Called by `Elastic.index`.

        engine: creates, fills and searches the index. texts: the tokens of each row, joined by spaces; rows without
        tokens are not sent. label: part of the index name.
        """
        self._engine, self._label, self._n = engine, label, len(texts)
        self._texts = {row: text for row, text in enumerate(texts) if text}
        self._names: list[str] = []

    def __len__(self) -> int:
        return self._n

    def build(self) -> None:
        """Create and fill the index; without a token in any text, no index is created."""
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
        # once only: an index that disappears twice is being deleted by something, which a third try would not stop
        if len(self._names) > 1:
            advice = "find out what deletes indices there, then run again: all indices are rebuilt"
            raise self._engine.server.error(
                f"using {self._names[-1]}", "the index vanished, and so did its successor", advice
            )
        self._fill()

    def search_terms(self, queries: Iterable[Mapping[str, int]], top_n: int) -> list[Hits]:
        if top_n < 1:
            raise ValueError(f"top_n: got {top_n}; expected a whole number >= 1")
        queries, size = list(queries), min(top_n, len(self._texts))
        if size > _WINDOW:
            raise ValueError(f"top_n: got {top_n}; expected at most {_WINDOW}, Elasticsearch's limit of hits")
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
        """Delete the indices; when that fails, a warning says how to do it later."""
        for name in self._names:
            try:
                self._engine.delete(name)
            except ElasticError as error:  # a warning: an exception here would hide the one that ended the context
                warnings.warn(f"{error}. Later: fedmem elasticsearch remove {name}", stacklevel=2)
        self._names.clear()


def _search_body(terms: Mapping[str, int], size: int) -> dict[str, Any]:
    """Return a search with one clause per distinct token, its count as boost; equal scores are ordered by row."""
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
    """Yield `items` in order, in lists of at most `count` items and _CHARS_AT_ONCE characters.

    chars: number of characters of an item. An item with more characters than that is a list of its own.
    """
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
