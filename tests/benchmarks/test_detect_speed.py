"""How many pairs of real text the detector compares in a second. Run: pytest tests/benchmarks --benchmark-only

Continuations are texts that nobody trained on, as a model that leaks nothing would write them; with leaks, a fifth of
them carries half a suffix, word for word or reworded by turns. Preparing the texts is counted in, loading NLTK is not,
starting worker processes is. The figures asserted are those asked of a machine with nothing else running.
"""

import contextlib
import json
import os
import random
import threading
import time
from itertools import islice

import pandas as pd
import psutil
import pytest

from fedmem.detect import AlignmentSettings, PanDetector, align, find_candidates, find_matches
from fedmem.detect.pan.alignment import align_prepared
from fedmem.detect.pan.preparing import Prepared
from fedmem.detect.pan.splitting import split_sentences, split_words, stem

PREFIX_WORDS = 20
SETTINGS = AlignmentSettings()
PLAIN_PAIRS = 300  # the plain path is slow: a sample does


@pytest.fixture(scope="module")
def table(request):
    """Rows of (what, pairs, seconds, remark), written to the terminal when the module is done."""
    rows = []
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nload {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for what, pairs, took, remark in rows:
            print(f"{what:<40} {pairs:>9,} pairs {took:>8.2f} s {pairs / took:>9,.0f} pairs/s  {remark}")


def texts(shared, words: int) -> list[str]:
    """Suffixes of `words` words: rows of one group joined where one is too short, their prefixes cut off."""
    found = []
    for name in ("summarization", "qa"):
        groups: dict[str, list[str]] = {}
        for line in (shared / "data" / f"{name}.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            joined = groups.get(row["group"], []) + row["input"].split(" ")
            if len(joined) >= PREFIX_WORDS + words:
                found.append(" ".join(joined[PREFIX_WORDS : PREFIX_WORDS + words]))
                joined = []
            groups[row["group"]] = joined
    random.Random(0).shuffle(found)
    return found


def tables(shared, words: int, n_clients: int, n_suffixes: int, n_prefixes: int, leaks: float = 0.0):
    """Suffixes and prefixes dealt to clients; `leaks` is the share of continuations with half a suffix in them."""
    source = iter(texts(shared, words))
    suffixes = list(islice(source, n_suffixes))
    continuations = list(islice(source, n_prefixes))
    assert len(continuations) == n_prefixes, "not enough text"
    draw = random.Random(1)
    for i in range(int(leaks * n_prefixes)):
        leak = draw.choice(suffixes).split(" ")[: words // 2]
        if i % 2:
            leak = [word for word in leak if draw.random() > 0.15]
        continuations[i] = " ".join(leak + continuations[i].split(" ")[len(leak) :])
    prefixes = pd.DataFrame({"prefix_id": [f"p{i}" for i in range(n_prefixes)], "continuation": continuations})
    table = pd.DataFrame({"suffix_id": [f"s{i}" for i in range(n_suffixes)], "member": True, "suffix": suffixes})
    return prefixes.assign(client=prefixes.index % n_clients), table.assign(client=table.index % n_clients)


def seconds(work, *arguments, **keywords) -> float:
    """Wall-clock time with the stems forgotten and NLTK loaded."""
    split_words("load the tokenizer")
    split_sentences("Load the splitter.")
    stem.cache_clear()
    start = time.perf_counter()
    work(*arguments, **keywords)
    return time.perf_counter() - start


def plain(pairs) -> None:
    for suffix, continuation in pairs:
        align(suffix, continuation, SETTINGS)


def with_prepared(pairs) -> None:
    prepared = Prepared(SETTINGS)
    for suffix, continuation in pairs:
        align_prepared(prepared.text(suffix), prepared.text(continuation), prepared)


@pytest.mark.parametrize(
    ("words", "leaks", "least"), [(100, 0, 3000), (300, 0, 1500), (100, 0.2, 1000), (300, 0.2, 500)]
)
def test_pairs_per_second(benchmark, shared, table, words, leaks, least):
    """200 continuations, each against the top 10 of 3 clients with 200 suffixes each, on one core."""
    prefixes, suffixes = tables(shared, words, 3, 600, 200, leaks)
    candidates = find_candidates(prefixes, suffixes, 10)
    pairs = list(
        zip(
            suffixes.set_index("suffix_id")["suffix"][candidates["suffix_id"]],
            prefixes.set_index("prefix_id")["continuation"][candidates["prefix_id"]],
            strict=True,
        )
    )
    what = f"{words} words, {leaks:.0%} leaks"
    sample = pairs[:: len(pairs) // PLAIN_PAIRS]
    table.append((f"{what}: plain", len(sample), seconds(plain, sample), "sample"))
    table.append((f"{what}: prepared", len(pairs), seconds(with_prepared, pairs), ""))
    stage = (candidates, prefixes, suffixes, PanDetector(SETTINGS))
    took = benchmark.pedantic(lambda: seconds(find_matches, *stage, progress=False), rounds=1)
    table.append((f"{what}: prepared, early exit", len(pairs), took, f"at least {least:,}"))
    table.append((f"{what}: two workers", len(pairs), seconds(find_matches, *stage, workers=2, progress=False), ""))
    assert len(pairs) > 5900
    assert len(pairs) / took >= least


class PeakMemory:
    """Largest sum of resident megabytes of this process and its children, sampled ten times a second."""

    def __enter__(self):
        self.here = self._resident()  # BM25's tables and pytest itself are in it
        self.megabytes, self._done = self.here, threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()
        return self

    def __exit__(self, *failure):
        self._done.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._done.wait(0.1):
            self.megabytes = max(self.megabytes, self._resident())

    def _resident(self) -> int:
        total = 0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total // 2**20


@pytest.mark.parametrize("n_clients", [10, 100])
def test_many_clients(benchmark, shared, table, n_clients):
    """10 prefixes of each client against the top 10 of every client: 100 pairs for each pair of clients."""
    prefixes, suffixes = tables(shared, 100, n_clients, 15 * n_clients, 10 * n_clients)
    start = time.perf_counter()
    candidates = find_candidates(prefixes, suffixes, 10)
    table.append((f"{n_clients} clients: BM25 candidates", len(candidates), time.perf_counter() - start, "one core"))
    stage = (candidates, prefixes, suffixes, PanDetector(SETTINGS))
    for workers in (1, 2):
        with PeakMemory() as peak:
            took = seconds(find_matches, *stage, workers=workers, progress=False)
        remark = f"peak {peak.megabytes:,} MB in all, {peak.here:,} MB of it before"
        table.append((f"{n_clients} clients: matches, workers {workers}", len(candidates), took, remark))
    benchmark.pedantic(lambda: seconds(find_matches, *stage, progress=False), rounds=1)
    assert len(candidates) > 90 * n_clients**2
