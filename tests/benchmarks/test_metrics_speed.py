"""How long counting takes: 100 clients × 4,000 prefixes × 10 matches, every table of one analysis that counts."""

import resource

import numpy as np
import pandas as pd
import pytest

from fedmem.analyze import extracted_text, ratios
from fedmem.analyze.counting import Counts
from fedmem.analyze.ratios import SHARES

CLIENTS, PREFIXES, MATCHES = 100, 4000, 10
KINDS = ["verbatim", "paraphrase_high", "paraphrase_low", "idea"]


@pytest.fixture(scope="module")
def tables():
    """A synthetic frame of 4,000,000 matches: half of them of held-out suffixes, most with other clients."""
    rng, n = np.random.default_rng(5), CLIENTS * PREFIXES
    ids = np.arange(n)
    prefixes = pd.DataFrame({"prefix_id": ids, "client": ids // PREFIXES})
    target, member = rng.integers(0, CLIENTS, MATCHES * n), rng.random(MATCHES * n) < 0.5
    matches = pd.DataFrame(
        {
            "prefix_id": np.repeat(ids, MATCHES),
            "prefix_client": np.repeat(ids // PREFIXES, MATCHES),
            "suffix_id": (target * PREFIXES + rng.integers(0, PREFIXES, MATCHES * n)) * 2 + member,
            "suffix_client": target,
            "member": member,
            "kind": pd.Categorical.from_codes(rng.integers(0, len(KINDS), MATCHES * n), KINDS).astype("str"),
            "score": rng.random(MATCHES * n),
            "identical_sentence": False,
        }
    )
    suffixes = pd.DataFrame(
        {"suffix_id": np.arange(2 * n), "client": np.repeat(ids // PREFIXES, 2), "member": np.tile([False, True], n)}
    )
    return matches, prefixes, pd.DataFrame({"client": range(CLIENTS), "n_train": PREFIXES}), suffixes


def count(matches, prefixes, clients, suffixes):
    """What notebook 5 counts of the whole sample."""
    counts = Counts(matches, prefixes, clients, suffixes)
    return ratios.cells(counts), ratios.excess(counts), ratios.summary(counts), ratios.kinds(counts)


def test_counting_100_clients(benchmark, tables):
    cells, excess, summary, kinds = benchmark.pedantic(count, args=tables, rounds=1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    benchmark.extra_info |= {"matches": len(tables[0]), "peak_gb": round(peak, 2)}
    assert (len(cells), len(excess), len(summary), len(kinds)) == (6 * CLIENTS**2, 3 * CLIENTS**2, 27, 30)
    assert benchmark.stats["max"] < 60
    assert peak < 4


def test_settling_of_100_clients(benchmark, tables):
    settled = benchmark.pedantic(lambda: ratios.ratio_by_sample_size(Counts(*tables), draws=3), rounds=1)
    assert len(settled) == 2 * len(SHARES) * 3


def test_extraction_of_12_clients(benchmark):
    rng, n = np.random.default_rng(6), 12 * PREFIXES
    suffix = rng.integers(0, n, 3 * n)
    start = rng.integers(0, 200, 3 * n)
    matches = pd.DataFrame(
        {
            "prefix_id": np.repeat(np.arange(n), 3), "prefix_client": np.repeat(np.arange(n) // PREFIXES, 3),
            "suffix_id": suffix, "suffix_client": suffix // PREFIXES, "member": True, "kind": "verbatim",
            "detections": [[[s, s + 60, 0, 60]] for s in start],
        }
    )  # fmt: skip
    suffixes = pd.DataFrame({"suffix_id": np.arange(n), "client": np.arange(n) // PREFIXES, "member": True})
    table = benchmark.pedantic(extracted_text.extracted, args=(matches, suffixes.assign(suffix="x" * 300)), rounds=1)
    assert table["chars"].max() > 0
