"""The choice of an engine by its name: the only place that knows both."""

from __future__ import annotations

from fedmem.retrieval.bm25 import Embedded
from fedmem.retrieval.index import Engine
from fedmem.retrieval.tokens import MAX_QUERY_TERMS


def open_engine(retriever: str, run: str = "none", shards: int = 1, max_query_terms: int = MAX_QUERY_TERMS) -> Engine:
    """The engine called `retriever`: embedded, or elasticsearch, whose server the environment names.

    run: tags what is made on a server, so that leftovers can be told apart. shards: of each index there.
    Raises ValueError for another name, `fedmem.retrieval.elasticsearch.server.ElasticError` where the environment does
    not say enough.
    """
    if retriever == "embedded":
        return Embedded()
    if retriever == "elasticsearch":
        from fedmem.retrieval.elasticsearch.engine import Elastic
        from fedmem.retrieval.elasticsearch.server import Connection

        return Elastic(Connection.from_environment(), run, shards, max_query_terms)
    raise ValueError(f"retriever: got {retriever!r}; allowed is embedded | elasticsearch")
