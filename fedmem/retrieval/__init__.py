"""Which of a client's texts a continuation resembles: Lucene's tokens and BM25 ranking, embedded or by
Elasticsearch."""

from fedmem.retrieval.bm25 import BM25Index
from fedmem.retrieval.engines import open_engine
from fedmem.retrieval.tokens import query_terms, stop_words

__all__ = ["BM25Index", "open_engine", "query_terms", "stop_words"]
