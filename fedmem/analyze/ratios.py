"""The memorization matrix, its aggregates and their intervals, also of parts of the sample.

The functions take the counts of one run (`fedmem.analyze.counting.Counts`) and return data frames.

Definitions (DESIGN, and section 3 of the paper). A prefix of client j hits client k when its continuation matches at
least one sampled suffix of client k; ten matches with the same client are one hit. With n_j sampled prefixes of client
j:

    MR(j→k)  = prefixes of j that hit k / n_j
    MR_intra = Σ_j w_j · MR(j→j)                     w_j = n_train_j / Σ n_train
    MR_inter = Σ_j w_j · mean over k ≠ j of MR(j→k)
    MR_total = prefixes that hit any client / Σ n_j

Member suffixes give MR. Held-out suffixes, which no client trained on, give the control in the same way. The excess is
MR − control, both on the same prefixes. 0/0 is NaN: the row of a client without prefixes (and therefore each aggregate
in which that client has weight), and MR_inter of a single client.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from fedmem.analyze.counting import (
    Counts,
    Memorization,
    MetricsError,
    means_of_others,
    prefixes_hit,
    require_columns,
    weighted_sum,
)  # fmt: skip
from fedmem.analyze.intervals import effective_prefixes, holm, mcnemar, paired_difference, tango, wilson
from fedmem.config.vocabulary import COUNTINGS, KINDS, PARTS

# The columns of the published tables, in their order on disk.
CELLS = ["prefix_client", "suffix_client", "member", "counting", "n", "hits", "ratio", "low", "high"]
EXCESS = [
    "prefix_client", "suffix_client", "counting", "n", "only_member", "only_control", "excess", "low", "high",
    "p_value", "p_holm",
]  # fmt: skip
SUMMARY = ["metric", "counting", "value", "low", "high", "n"]
MEASURES = {"mr": True, "control": False}  # name: whether its suffixes were trained on
# the metrics of a summary, in the order of every table that shows them
METRICS = [f"{name}_{part}" for name in (*MEASURES, "excess") for part in PARTS]
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the sample
UNKNOWN = (np.nan,) * len(PARTS)


def memorization(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    clients: pd.DataFrame,
    counting: str = "paper",
    *,
    member: bool = True,
    suffixes: pd.DataFrame | None = None,
) -> Memorization:
    """The memorization matrix and its aggregates.

    matches, prefixes, clients, suffixes: the tables of one measurement, as `Counts` takes them.
    counting: "paper" counts any kind that is not null; "verbatim" that kind alone; "strict" verbatim matches, and
        paraphrase candidates, recorded or not, whose best sentence pair is identical or scores above 0.5. A single
        candidate of kind "paraphrase" (untyped) leaves strict undefined, so all values are NaN.
    member: True counts suffixes that were trained on, False the held-out ones (the control).
    Raises MetricsError when a column is missing, a counting or client is unknown, or a match's prefix was not sampled.
    """
    return Counts(matches, prefixes, clients, suffixes).memorization(counting, member)


def cells(counts: Counts, confidence: float = 0.95, countings: Iterable[str] = COUNTINGS) -> pd.DataFrame:
    """One row for each prefix client, suffix client, membership and counting: the `cells` table.

    ratio = hits / n with its Wilson interval (Wilson 1927), [low, high] within 0 … 1; hits is NaN where undefined.
    counts: the matches of one run.
    confidence: coverage of the intervals, between 0 and 1.
    countings: the countings to compute, among COUNTINGS.
    Raises MetricsError when a counting is unknown or strict lacks its columns.
    """
    parts = [
        _cells(counts.memorization(counting, member), confidence) for member in (True, False) for counting in countings
    ]
    return pd.concat(parts, ignore_index=True)


def excess(counts: Counts, confidence: float = 0.95, countings: Iterable[str] = COUNTINGS) -> pd.DataFrame:
    """MR(j→k) − control(j→k), a row for each prefix client, suffix client and counting: columns EXCESS.

    only_member: prefixes of j that hit k's member suffixes and none of its held-out ones; only_control: the reverse.
    excess = (only_member − only_control) / n with Tango's interval (1998), in −1 … 1; p_value: McNemar's exact test of
    the hypothesis of no excess; p_holm: the p-value adjusted by Holm over the cells of one counting. All are NaN where
    MR or control is undefined.
    counts, confidence, countings: as in `cells`.
    Raises MetricsError as `cells` does.
    """
    return pd.concat([_excess_cells(counts, counting, confidence) for counting in countings], ignore_index=True)


def summary(counts: Counts, confidence: float = 0.95, countings: Iterable[str] = COUNTINGS) -> pd.DataFrame:
    """One row for each aggregate and counting: mr_…, control_… (held-out suffixes), excess_… (their difference).

    n is the number of sampled prefixes. The intervals of mr and control are Wilson's with an effective number of
    prefixes (`intervals.effective_prefixes`), those of excess Tango's (`intervals.paired_difference`): all keep a
    positive width at 0 hits. They cover the sampling of prefixes for one trained model; the variation between trainings
    shows only between seeds.
    counts, confidence, countings: as in `cells`.
    Raises MetricsError as `cells` does.
    """
    rows = []
    for counting in countings:
        for name, member in MEASURES.items():
            rows += _aggregates(counts, counts.memorization(counting, member), name, confidence)
        rows += _excesses(counts, counting, confidence)
    return pd.DataFrame(rows, columns=SUMMARY)


def kinds(counts: Counts) -> pd.DataFrame:
    """The hits by kind: metric (mr_intra … control_total), kind, value (share of prefixes), n.

    A prefix counts once for a client (for total: once), as the first of verbatim, paraphrase_high, paraphrase_low,
    paraphrase (untyped), idea among its matches there. The kinds therefore sum to the ratio of paper counting.
    counts: the matches of one run.
    """
    rows, size = [], len(counts.clients)
    for name, member in MEASURES.items():
        # KINDS is in order of precedence, so the least index is the kind that counts
        first = _first_kinds(counts, member)
        best = first.min(axis=1, initial=len(KINDS))
        shares = [
            counts.of_hits(*np.divmod(np.flatnonzero(first == place), size), (best == place).sum(), "paper", member)
            for place in range(len(KINDS))
        ]
        for part in PARTS:
            # total is not intra + inter: a prefix counts once, however many clients it hits
            values = [getattr(share, part) for share in shares]
            rows += [
                (f"{name}_{part}", kind, value, len(counts.owner)) for kind, value in zip(KINDS, values, strict=True)
            ]
    return pd.DataFrame(rows, columns=["metric", "kind", "value", "n"])


def side_by_side(summary: pd.DataFrame) -> pd.DataFrame:
    """The summary's values in percent, for reading: mr, control and excess beside each other, a line for each part.

    summary: as `summary` returns it, of several runs with a column run. Lines: counting, run, MR (intra, inter, total).
    A run without any value under a counting has no lines there.
    """
    names = summary["metric"].str.split("_", expand=True)
    long = summary.assign(value=100 * summary["value"], measure=names[0], MR=names[1])
    lines = ["counting", "run", "MR"] if "run" in summary else ["counting", "MR"]
    order = pd.MultiIndex.from_frame(long[lines].drop_duplicates().sort_values("counting", kind="stable"))
    table = long.pivot(index=lines, columns="measure", values="value").loc[order, [*MEASURES, "excess"]]
    return table[table.notna().any(axis=1).groupby(level=lines[:-1]).transform("any")].rename_axis(columns=None)


def as_record(summary: pd.DataFrame) -> dict[str, float | None]:
    """The summary's values as a flat record, {"mr_intra_paper": 0.12, …}; None where undefined: JSON has no NaN."""
    named = zip(summary["metric"] + "_" + summary["counting"], summary["value"], strict=True)
    return {name: None if pd.isna(value) else float(value) for name, value in named}


def ratio_by_sample_size(
    counts: Counts, counting: str = "verbatim", shares: tuple[float, ...] = SHARES, draws: int = 20, seed: int = 0
) -> pd.DataFrame:
    """Compute MR on random parts of the sample: what fewer sampled prefixes, or fewer suffixes, would have given.

    More prefixes narrow the interval of the same share; more suffixes raise the share itself, since a continuation can
    match only what was sampled.
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


def _cells(result: Memorization, confidence: float) -> pd.DataFrame:
    size = len(result.clients)
    n = np.repeat(result.n, size)
    ratio = result.matrix.ravel()
    low, high = wilson(ratio, n, confidence)
    columns = {
        "prefix_client": np.repeat(result.clients, size),
        "suffix_client": np.tile(result.clients, size),
        "member": result.member,
        "counting": result.counting,
        "n": n,
        # hits are counted even in an undefined cell; a number there would read as a measurement
        "hits": np.where(np.isfinite(ratio), result.hits.ravel(), np.nan),
        "ratio": ratio,
        "low": low,
        "high": high,
    }
    return pd.DataFrame(columns, columns=CELLS)


def _excess_cells(counts: Counts, counting: str, confidence: float) -> pd.DataFrame:
    size = len(counts.clients)
    # a pair of prefix and client as one integer, which numpy's set operations compare fast
    sides = [prefix * size + target for prefix, target in (counts.pairs(counting, side) for side in (True, False))]
    only = []
    for one, other in (sides, sides[::-1]):
        prefix, target = np.divmod(np.setdiff1d(one, other, assume_unique=True), size)
        only.append(np.bincount(counts.owner[prefix] * size + target, minlength=size * size).astype(float))
    undefined = counts.undefined(counting, True) | counts.undefined(counting, False)
    n = np.repeat(counts.n, size)
    # bincount gives 0 where nothing was sampled, but such a cell has no measurement
    gone = np.tile(undefined, size) | (n == 0)
    only = [np.where(gone, np.nan, part) for part in only]
    low, high = tango(*only, n, confidence)
    p_value = mcnemar(*only)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = (only[0] - only[1]) / n
    columns = {
        "prefix_client": np.repeat(counts.clients, size),
        "suffix_client": np.tile(counts.clients, size),
        "counting": counting,
        "n": n,
        "only_member": only[0],
        "only_control": only[1],
        "excess": value,
        "low": low,
        "high": high,
        "p_value": p_value,
        "p_holm": holm(p_value),
    }
    return pd.DataFrame(columns, columns=EXCESS)


def _aggregates(counts: Counts, result: Memorization, name: str, confidence: float) -> list[tuple]:
    everybody = result.n.sum()
    # intra and inter are weighted means over clients, so their variance is not that of one binomial proportion
    effective = {
        "intra": effective_prefixes(np.diag(result.matrix), counts.weights, result.n),
        "inter": effective_prefixes(means_of_others(result.matrix), counts.weights, result.n),
        "total": everybody,
    }
    rows = []
    for part, n in effective.items():
        value = getattr(result, part)
        low, high = wilson(value, n, confidence)
        rows.append((f"{name}_{part}", result.counting, value, float(low), float(high), int(everybody)))
    return rows


def _excesses(counts: Counts, counting: str, confidence: float) -> list[tuple]:
    member, control = (counts.by_prefix(counting, side) for side in (True, False))
    rows = []
    for part in PARTS:
        difference = member[part] - control[part]
        # the parts of the difference in favour of MR and of the control, which Tango's interval takes separately
        sides = (counts.client_means(np.maximum(sign * difference, 0)) for sign in (1, -1))
        value, low, high = paired_difference(*sides, counts.weights_of(part), counts.n, confidence)
        rows.append((f"excess_{part}", counting, float(value), float(low), float(high), int(counts.n.sum())))
    return rows


def _first_kinds(counts: Counts, member: bool) -> np.ndarray:
    """Prefixes × suffix clients: the index in KINDS of the first kind among the matches there, else len(KINDS)."""
    order, size = pd.Index(KINDS).get_indexer(counts.matches["kind"]), len(counts.clients)
    chosen = (counts.member == member) & counts.flag("paper")
    first = np.full(len(counts.owner) * size, len(KINDS), dtype=np.int8)
    # ufunc.at, because a pair occurs several times and plain indexed assignment would keep only the last
    np.minimum.at(first, counts.prefix[chosen] * size + counts.target[chosen], order[chosen].astype(np.int8))
    return first.reshape(len(counts.owner), size)


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
