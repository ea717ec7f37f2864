"""Speed of the embedded index on real text and on made-up words. Run: pytest tests/benchmarks --benchmark-only

Texts are as long as a study's; queries of 200 words keep their stop words, which is the dear case. Building counts
tokenisation in; searching counts from tokenised queries on. Time is the processor's, all threads together, which is
what one core takes with nothing else running; the table that is written at the end says how busy the machine was.
"""

import json
import os
import random
import resource
import time

import pandas as pd
import pytest

from fedmem.detect import find_candidates
from fedmem.retrieval.bm25 import BM25Index
from fedmem.retrieval.tokens import query_terms

SUFFIXES, QUERIES, QUERY_WORDS = 4000, 200, 200

pytestmark = pytest.mark.benchmark(timer=time.process_time)


@pytest.fixture(scope="module")
def table(request):
    """Rows of (what, number, unit, seconds, remark), written to the terminal when the module is done."""
    rows = []
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nload {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for what, number, unit, took, remark in rows:
            print(f"{what:<48} {number:>9,} {unit:<8} {took:>8.2f} s {number / took:>9,.0f} {unit}/s  {remark}")


@pytest.fixture(scope="module", params=["made-up", "real"])
def texts(request):
    """4,000 texts of 60 to 200 words, then 200 queries of 200 words; and what words they are."""
    rng = random.Random(7)
    lengths = [rng.randint(60, 200) for _ in range(SUFFIXES)] + [QUERY_WORDS] * QUERIES
    if request.param == "made-up":  # 20,000 words with frequencies like those of English (Zipf)
        vocabulary = [
            f"{a}{b}{i}" for i in range(200) for a in ("pro", "con", "in", "de", "re") for b in "abcdefghijklmnopqrst"
        ]
        weights = [1 / rank for rank in range(1, len(vocabulary) + 1)]
        return request.param, [" ".join(rng.choices(vocabulary, weights, k=length)) for length in lengths]
    return request.param, pieces(real_words(request.getfixturevalue("shared")), lengths)


def real_words(shared):
    rows = [json.loads(line)["input"] for name in ("summarization", "qa", "classification", "dialog")
            for line in (shared / "data" / f"{name}.jsonl").read_text("utf-8").splitlines()]  # fmt: skip
    random.Random(0).shuffle(rows)
    return " ".join(rows).split(" ")


def pieces(words, lengths):
    """Texts of these many words, one after the other; from the beginning again when the words are used up."""
    found, start = [], 0
    for length in lengths:
        start = start if start + length <= len(words) else 0
        found.append(" ".join(words[start : start + length]))
        start += length
    return found


def test_build(benchmark, texts, table):
    kind, texts = texts
    index = benchmark.pedantic(BM25Index.build, (texts[:SUFFIXES],), rounds=3)
    table.append((f"build, {kind} words", SUFFIXES, "texts", benchmark.stats["min"], "tokenised, one core"))
    assert len(index) == SUFFIXES
    assert SUFFIXES / benchmark.stats["min"] >= 4000


def test_search_tokenised(benchmark, texts, table):
    kind, texts = texts
    index = BM25Index.build(texts[:SUFFIXES])
    queries = [query_terms(text) for text in texts[SUFFIXES:]]
    found = benchmark.pedantic(index.search_terms, (queries, 10), rounds=5)
    words = sum(map(len, queries)) / QUERIES
    remark = f"top 10 of {SUFFIXES:,}, {words:.0f} distinct words each"
    table.append((f"search, {kind} words", QUERIES, "queries", benchmark.stats["min"], remark))
    assert all(len(hits) == 10 for hits in found)
    assert QUERIES / benchmark.stats["min"] >= 1000


def test_hundred_clients(benchmark, shared, table):
    """100 clients with 200 suffixes each, 10,000 continuations of 100 words against all of them: 1,000,000 searches."""
    texts = pieces(real_words(shared), [100] * 30_000)
    suffixes = pd.DataFrame({"suffix_id": [f"s{i}" for i in range(20_000)], "suffix": texts[:20_000], "member": True})
    suffixes["client"] = [i // 200 for i in range(20_000)]
    prefixes = pd.DataFrame({"prefix_id": [f"p{i}" for i in range(10_000)], "continuation": texts[20_000:]})
    prefixes["client"] = [i // 100 for i in range(10_000)]
    before = peak_megabytes()
    found = benchmark.pedantic(find_candidates, (prefixes, suffixes, 10), rounds=1)
    remark = f"{len(found):,} candidates, peak {peak_megabytes():,} MB, {before:,} MB of it before"
    table.append(("100 clients × 200, 10,000 continuations", 1_000_000, "queries", benchmark.stats["min"], remark))
    assert found.groupby("suffix_client").size().min() > 0.9 * 100_000


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # kilobytes on Linux
