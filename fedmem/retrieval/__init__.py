"""Which of a client's texts a continuation resembles: Lucene's tokens and BM25 ranking, embedded or by
Elasticsearch."""

from fedmem.retrieval.bm25 import BM25Index, Embedded
from fedmem.retrieval.index import Engine
from fedmem.retrieval.tokens import MAX_QUERY_TERMS, query_terms, stop_words

__all__ = ["BM25Index", "open_engine", "query_terms", "stop_words"]


def open_engine(retriever: str, run: str = "none", shards: int = 1, max_query_terms: int = MAX_QUERY_TERMS) -> Engine:
    """Open the search engine that `retriever` names.

    retriever: "embedded" (in this process) or "elasticsearch" (a server that the environment names).
    run: tag of the indices on a server, by which leftovers are attributed to a run.
    shards: number of shards of each index on a server, at least 1.
    max_query_terms: distinct tokens of a query that a server accepts; the embedded engine has no such limit.
    Raises ValueError for another name and `fedmem.retrieval.elasticsearch.server.ElasticError` when the environment is
    incomplete.
    """
    if retriever == "embedded":
        return Embedded()
    if retriever == "elasticsearch":
        # Imported here, because the client library is needed by this engine only.
        from fedmem.retrieval.elasticsearch.engine import Elastic
        from fedmem.retrieval.elasticsearch.server import Connection

        return Elastic(Connection.from_environment(), run, shards, max_query_terms)
    raise ValueError(f"retriever: got {retriever!r}; expected embedded | elasticsearch")
