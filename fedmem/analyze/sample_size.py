"""How the estimate settles: the ratio that fewer sampled prefixes, or fewer sampled suffixes, would have given.

More prefixes narrow the interval of the same share; more suffixes raise the share itself, since a continuation can
match only what was sampled. Frames in, frames out; the draws are seeded.
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
    """MR on random parts of the sample: fewer (prefixes | suffixes), share, metric, n, value, low, high.

    Each client's prefixes (member suffixes) are drawn without replacement, `draws` times for every share in 0 … 1;
    n: prefixes (suffixes) that are left in all; value: the mean over draws, low and high: their smallest and largest.
    With fewer suffixes the ones that ranked lower would move up, which is not repeated here: so what is shown for few
    suffixes is a lower bound. NaN where undefined.
    """
    require_columns(suffixes, ["suffix_id", "client", "member"], "suffixes")
    members = suffixes[suffixes["member"].to_numpy(dtype=bool)]
    counts = Counts(matches, prefixes, clients, suffixes)
    counted = (counts.member & counts.flag(counting)).nonzero()[0]
    suffix = pd.Index(members["suffix_id"]).get_indexer(matches["suffix_id"].iloc[counted])
    hits = _Hits(counts, counted, suffix, bool(counts.undefined(counting, True).any()))
    rng, rows = np.random.default_rng(seed), []
    for fewer, owner in (("prefixes", counts.owner), ("suffixes", pd.factorize(members["client"])[0])):
        for share in shares:
            parts = [_part(owner, share, rng) for _ in range(draws if share < 1 else 1)]
            values = pd.DataFrame([hits.ratios(**{fewer: part}) for part in parts])
            n = int(np.mean([part.sum() for part in parts]))
            for metric in PARTS:
                column = values[metric]
                rows.append((fewer, share, f"mr_{metric}", n, column.mean(), column.min(), column.max()))
    return pd.DataFrame(rows, columns=["fewer", "share", "metric", "n", "value", "low", "high"])


def _part(owner: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A random part of everybody's, as booleans: of each owner the same share, one at least."""
    order = np.lexsort((rng.random(len(owner)), owner))
    sizes = np.bincount(owner)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = np.zeros(len(owner), dtype=bool)
    kept[order] = place < np.maximum(np.round(share * sizes), 1)[owner[order]]
    return kept


class _Hits:
    """The counted matches by position, to be counted again on parts of the prefixes or suffixes."""

    def __init__(self, counts: Counts, counted: np.ndarray, suffix: np.ndarray, undefined: bool):
        self.counts, self.suffix, self.undefined = counts, suffix, undefined
        self.prefix, self.target = counts.prefix[counted], counts.target[counted]

    def ratios(self, prefixes: np.ndarray | None = None, suffixes: np.ndarray | None = None) -> dict[str, float]:
        counts, size = self.counts, len(self.counts.clients)
        if self.undefined or not len(counts.owner):
            return dict.fromkeys(PARTS, np.nan)
        sampled = np.ones(len(counts.owner), dtype=bool) if prefixes is None else prefixes
        kept = sampled[self.prefix] if suffixes is None else suffixes[self.suffix]
        hit = np.zeros(len(counts.owner) * size, dtype=bool)
        hit[self.prefix[kept] * size + self.target[kept]] = True
        prefix, target = np.divmod(np.flatnonzero(hit), size)
        own = target == counts.owner[prefix]
        n = np.bincount(counts.owner[sampled], minlength=size)
        with np.errstate(invalid="ignore"):
            intra = np.bincount(counts.owner[prefix[own]], minlength=size) / n
            inter = np.bincount(counts.owner[prefix[~own]], minlength=size) / n / (size - 1 if size > 1 else np.nan)
        held = counts.weights > 0
        total = np.count_nonzero(np.diff(prefix, prepend=-1)) / sampled.sum()
        values = (float((counts.weights * part)[held].sum()) for part in (intra, inter))
        return dict(zip(PARTS, (*values, total), strict=True))
