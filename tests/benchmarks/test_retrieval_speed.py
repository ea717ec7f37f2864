"""Speed of the embedded index on texts as long as a study's. Run: pytest tests/benchmarks --benchmark-only"""

import random

import pytest

from fedmem.retrieval import BM25Index, query_terms

SUFFIXES, QUERIES, QUERY_WORDS = 4000, 200, 200


@pytest.fixture(scope="module")
def texts():
    """4,000 texts of 60 to 200 words from 20,000 words with frequencies like those of English (Zipf)."""
    rng = random.Random(7)
    vocabulary = [
        f"{a}{b}{i}" for i in range(200) for a in ("pro", "con", "in", "de", "re") for b in "abcdefghijklmnopqrst"
    ]
    weights = [1 / rank for rank in range(1, len(vocabulary) + 1)]
    lengths = [rng.randint(60, 200) for _ in range(SUFFIXES)] + [QUERY_WORDS] * QUERIES
    return [" ".join(rng.choices(vocabulary, weights, k=length)) for length in lengths]


def test_build(benchmark, texts):
    index = benchmark.pedantic(BM25Index.build, (texts[:SUFFIXES],), rounds=3)
    benchmark.extra_info["texts_per_s"] = SUFFIXES / benchmark.stats["min"]
    assert len(index) == SUFFIXES


def test_search_tokenised(benchmark, texts):
    index = BM25Index.build(texts[:SUFFIXES])
    queries = [query_terms(text) for text in texts[SUFFIXES:]]
    found = benchmark.pedantic(index.search_terms, (queries, 10), rounds=3)
    benchmark.extra_info["queries_per_s"] = QUERIES / benchmark.stats["min"]
    assert all(len(hits) == 10 for hits in found)
