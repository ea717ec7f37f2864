"""How the estimate settles: the ratio that fewer sampled prefixes, or fewer sampled suffixes, would have given.

More prefixes narrow the interval of the same share; more suffixes raise the share itself, since a continuation can
match only what was sampled. Functions take and return tables; the draws are seeded.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedmem.analyze.counting import Counts, require_columns
from fedmem.config.vocabulary import PARTS

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


def ratio_by_sample_size(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    clients: pd.DataFrame,
    suffixes: pd.DataFrame,
    counting: str = "verbatim",
    shares: tuple[float, ...] = SHARES,
    draws: int = 20,
    seed: int = 0,
) -> pd.DataFrame:
    """Compute MR on random parts of the sample.

    Each client's prefixes, then its member suffixes, are drawn without replacement. With fewer suffixes, those ranked
    lower would become candidates; the retrieval is not repeated here, so the values for few suffixes are lower bounds.
    matches, prefixes, clients: as in `ratios.memorization`.
    suffixes: suffix_id, client, member; a row per sampled suffix.
    counting: paper, strict or verbatim.
    shares: shares of the sample to keep, each in 0 … 1; at least one of each client's prefixes (suffixes) is kept.
    draws: number of draws for each share below 1, ≥ 1.
    seed: seed of the draws, an integer ≥ 0.
    Returns columns fewer (prefixes | suffixes), share, metric, n (prefixes or suffixes that are kept in all), value
    (the mean over draws), low and high (their smallest and largest); NaN where undefined.
    Raises MetricsError when a column is missing or tables do not fit together.
    """
    require_columns(suffixes, ["suffix_id", "client", "member"], "suffixes")
    # held-out suffixes belong to the control, which MR does not include
    members = suffixes[suffixes["member"].to_numpy(dtype=bool)]
    counts = Counts(matches, prefixes, clients, suffixes)
    counted = (counts.member & counts.flag(counting)).nonzero()[0]
    suffix = pd.Index(members["suffix_id"]).get_indexer(matches["suffix_id"].iloc[counted])
    hits = _Hits(counts, counted, suffix, bool(counts.undefined(counting, True).any()))
    # One generator for all parts in a fixed order: the result depends on the seed and on `shares` as a whole.
    rng, rows = np.random.default_rng(seed), []
    for fewer, owner in (("prefixes", counts.owner), ("suffixes", pd.factorize(members["client"])[0])):
        for share in shares:
            # the whole sample has only one part, so a single draw is exact
            parts = [_part(owner, share, rng) for _ in range(draws if share < 1 else 1)]
            values = pd.DataFrame([hits.ratios(**{fewer: part}) for part in parts])
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


class _Hits:
    """The counted matches by position, so that each draw is counted with a few array operations."""

    def __init__(self, counts: Counts, counted: np.ndarray, suffix: np.ndarray, undefined: bool):
        self.counts, self.suffix, self.undefined = counts, suffix, undefined
        self.prefix, self.target = counts.prefix[counted], counts.target[counted]

    def ratios(self, prefixes: np.ndarray | None = None, suffixes: np.ndarray | None = None) -> dict[str, float]:
        counts, size = self.counts, len(self.counts.clients)
        if self.undefined or not len(counts.owner):
            return dict.fromkeys(PARTS, np.nan)
        sampled = np.ones(len(counts.owner), dtype=bool) if prefixes is None else prefixes
        kept = sampled[self.prefix] if suffixes is None else suffixes[self.suffix]
        # one flag for each (prefix, client): several matches of a pair are one hit
        hit = np.zeros(len(counts.owner) * size, dtype=bool)
        hit[self.prefix[kept] * size + self.target[kept]] = True
        prefix, target = np.divmod(np.flatnonzero(hit), size)
        own = target == counts.owner[prefix]
        n = np.bincount(counts.owner[sampled], minlength=size)
        with np.errstate(invalid="ignore"):  # 0 ∕ 0: a client without sampled prefixes
            intra = np.bincount(counts.owner[prefix[own]], minlength=size) / n
            inter = np.bincount(counts.owner[prefix[~own]], minlength=size) / n / (size - 1 if size > 1 else np.nan)
        # a client without rows has weight 0 and may have no prefixes; NaN · 0 would make the sum NaN
        held = counts.weights > 0
        # prefixes are in ascending order: every change is another prefix with a hit
        total = np.count_nonzero(np.diff(prefix, prepend=-1)) / sampled.sum()
        values = (float((counts.weights * part)[held].sum()) for part in (intra, inter))
        return dict(zip(PARTS, (*values, total), strict=True))
