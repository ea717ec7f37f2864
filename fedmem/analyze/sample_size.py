"""How the estimate settles: the ratio that fewer sampled prefixes, or fewer sampled suffixes, would have given.

More prefixes narrow the interval of the same share; more suffixes raise the share itself, since a continuation can
match only what was sampled. The draws are seeded.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedmem.analyze.counting import Counts, MetricsError, prefixes_hit, require_columns, weighted_sum
from fedmem.config.vocabulary import PARTS

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
UNKNOWN = (np.nan,) * len(PARTS)


def ratio_by_sample_size(
    counts: Counts, counting: str = "verbatim", shares: tuple[float, ...] = SHARES, draws: int = 20, seed: int = 0
) -> pd.DataFrame:
    """Compute MR on random parts of the sample.

    Each client's prefixes, then its member suffixes, are drawn without replacement. With fewer suffixes, those ranked
    lower would become candidates; the retrieval is not repeated here, so the values for few suffixes are lower bounds.
    counts: the matches of one run, with suffix_id in its tables of matches and suffixes.
    counting: paper, strict or verbatim.
    shares: shares of the sample to keep, each in 0 … 1; at least one of each client's prefixes (suffixes) is kept.
    draws: number of draws for each share below 1, ≥ 1.
    seed: seed of the draws, an integer ≥ 0.
    Returns columns fewer (prefixes | suffixes), share, metric, n (prefixes or suffixes that are kept in all), value
    (the mean over draws), low and high (their smallest and largest); NaN where undefined.
    Raises MetricsError when the suffixes or a column are missing.
    """
    if counts.suffixes is None:
        raise MetricsError("suffixes: got None; expected the `suffixes` table of the generate stage")
    require_columns(counts.suffixes, ["suffix_id", "client", "member"], "suffixes")
    # held-out suffixes belong to the control, which MR does not include
    members = counts.suffixes[counts.suffixes["member"].to_numpy(dtype=bool)]
    counted = counts.without(~(counts.member & counts.flag(counting)))
    suffix = pd.Index(members["suffix_id"]).get_indexer(counted.matches["suffix_id"])
    known = len(counts.owner) and not counts.undefined(counting, True).any()
    every_prefix, rng, rows = np.ones(len(counts.owner), dtype=bool), np.random.default_rng(seed), []
    sides = (("prefixes", counts.owner, counted.prefix), ("suffixes", pd.factorize(members["client"])[0], suffix))
    for fewer, owner, item in sides:
        for share in shares:
            # the whole sample has only one part, so a single draw is exact
            parts = [_part(owner, share, rng) for _ in range(draws if share < 1 else 1)]
            drawn = [
                _ratios(counted, part if fewer == "prefixes" else every_prefix, part[item]) if known else UNKNOWN
                for part in parts
            ]
            values = pd.DataFrame(drawn, columns=PARTS)
            n = int(np.mean([part.sum() for part in parts]))
            for metric in PARTS:
                column = values[metric]
                rows.append((fewer, share, f"mr_{metric}", n, column.mean(), column.min(), column.max()))
    return pd.DataFrame(rows, columns=["fewer", "share", "metric", "n", "value", "low", "high"])


def _part(owner: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the same share of each owner's items, at least one; returns booleans, one per item."""
    # sorted by owner and at random within each: the first places of every owner are its draw, without a loop
    order = np.lexsort((rng.random(len(owner)), owner))
    sizes = np.bincount(owner)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = np.zeros(len(owner), dtype=bool)
    kept[order] = place < np.maximum(np.round(share * sizes), 1)[owner[order]]
    return kept


def _ratios(counts: Counts, sampled: np.ndarray, kept: np.ndarray) -> tuple[float, float, float]:
    """Return intra, inter, total of the `kept` matches, with the `sampled` prefixes as the denominator."""
    size, (prefix, target) = len(counts.clients), counts.distinct_pairs(kept)
    own, n = target == counts.owner[prefix], np.bincount(counts.owner[sampled], minlength=size)
    with np.errstate(invalid="ignore"):
        intra, inter = (np.bincount(counts.owner[prefix[side]], minlength=size) / n for side in (own, ~own))
    inter = inter / (size - 1 if size > 1 else np.nan)
    return *(weighted_sum(part, counts.weights) for part in (intra, inter)), prefixes_hit(prefix) / sampled.sum()
