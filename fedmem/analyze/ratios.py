"""How much came back, and from whom to whom: the memorization matrix, its aggregates and their intervals.

Frames in, frames out. This module knows matches, prefixes and clients as tables; it knows no model, text or file.

Words (DESIGN, and section 3 of the paper). A prefix of client j hits client k when its continuation matches at least
one sampled suffix of client k; ten matches with the same client are one hit. With n_j sampled prefixes of client j:

    MR(j→k)  = prefixes of j that hit k / n_j
    MR_intra = Σ_j w_j · MR(j→j)                     w_j = n_train_j / Σ n_train
    MR_inter = Σ_j w_j · mean over k ≠ j of MR(j→k)
    MR_total = prefixes that hit any client / Σ n_j

Member suffixes give MR; held-out suffixes, which nobody trained on, give the control in the same way; excess is MR −
control, both on the same prefixes. 0/0 is NaN: the row of a client without prefixes (and with it each aggregate in
which that client has weight), MR_inter of one client.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from fedmem.analyze.counting import Counts, Memorization, check_counting, means_of_others, weighted_sum
from fedmem.analyze.intervals import effective_prefixes, holm, mcnemar, paired_difference, tango, wilson
from fedmem.config.vocabulary import COUNTINGS, KINDS, PARTS

CELLS = ["prefix_client", "suffix_client", "member", "counting", "n", "hits", "ratio", "low", "high"]
EXCESS = [
    "prefix_client", "suffix_client", "counting", "n", "only_member", "only_control", "excess", "low", "high",
    "p_value", "p_holm",
]  # fmt: skip
SUMMARY = ["metric", "counting", "value", "low", "high", "n"]


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

    matches: prefix_id, prefix_client, suffix_client, member, kind; for strict also score, identical_sentence.
    prefixes: prefix_id, client, one row for each sampled prefix (the denominator). clients: client, n_train.
    counting: "paper" any kind that is not null; "verbatim" that kind alone; "strict" verbatim, or a paraphrase
        candidate, recorded or not, whose best sentence pair is identical or scores above 0.5. One candidate of kind
        "paraphrase" (untyped) leaves strict undefined, so everything is NaN.
    member: True counts suffixes that were trained on, False the held-out ones (the control).
    suffixes: client, member; when given, a client without sampled suffixes of that membership gives NaN, not 0.
    Raises MetricsError for a missing column, an unknown counting or client, a match whose prefix was not sampled.
    """
    check_counting(counting)
    return Counts(matches, prefixes, clients, suffixes).memorization(counting, member)


def cells(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    clients: pd.DataFrame,
    confidence: float = 0.95,
    suffixes: pd.DataFrame | None = None,
    countings: Iterable[str] = COUNTINGS,
) -> pd.DataFrame:
    """One row for each prefix client, suffix client, membership and counting: the `cells` table.

    ratio = hits / n with its Wilson interval (Wilson 1927), [low, high] within 0 … 1; hits is NaN where undefined.
    Arguments and errors as in `memorization`; confidence is the interval's coverage, between 0 and 1.
    """
    counts, parts = Counts(matches, prefixes, clients, suffixes), []
    for member in (True, False):
        for counting in countings:
            check_counting(counting)
            parts.append(_cells(counts.memorization(counting, member), confidence))
    return pd.concat(parts, ignore_index=True)


def excess(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    clients: pd.DataFrame,
    confidence: float = 0.95,
    suffixes: pd.DataFrame | None = None,
    countings: Iterable[str] = COUNTINGS,
) -> pd.DataFrame:
    """MR(j→k) − control(j→k), a row for each prefix client, suffix client and counting: columns EXCESS.

    only_member: prefixes of j that hit k's member suffixes and none of its held-out ones; only_control: the reverse.
    excess = (only_member − only_control) / n with Tango's interval (1998), in −1 … 1; p_value: exact McNemar's test
    that there is no excess; p_holm: adjusted by Holm over the cells of one counting. NaN where either is undefined.
    """
    counts, parts = Counts(matches, prefixes, clients, suffixes), []
    for counting in countings:
        check_counting(counting)
        parts.append(_excess_cells(counts, counting, confidence))
    return pd.concat(parts, ignore_index=True)


def summary(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    clients: pd.DataFrame,
    confidence: float = 0.95,
    suffixes: pd.DataFrame | None = None,
    countings: Iterable[str] = COUNTINGS,
) -> pd.DataFrame:
    """One row for each aggregate and counting: mr_…, control_… (held-out suffixes), excess_… (their difference).

    n is the number of sampled prefixes. The intervals of mr and control are Wilson's with an effective number of
    prefixes (`intervals.effective_prefixes`), those of excess Tango's (`intervals.paired_difference`): all keep a width
    at 0 hits. They speak of sampled prefixes for one trained model; how training varies shows only between seeds.
    Arguments and errors as in `cells`.
    """
    counts, rows = Counts(matches, prefixes, clients, suffixes), []
    for counting in countings:
        check_counting(counting)
        for name, member in (("mr", True), ("control", False)):
            rows += _aggregates(counts, counts.memorization(counting, member), name, confidence)
        rows += _excesses(counts, counting, confidence)
    return pd.DataFrame(rows, columns=SUMMARY)


def kinds(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    clients: pd.DataFrame,
    suffixes: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Of what kinds the hits are: metric (mr_intra … control_total), kind, value (share of prefixes), n.

    A prefix counts once for a client (for total: once), as the first of verbatim, paraphrase_high, paraphrase_low,
    paraphrase (untyped), idea among its matches there; so the kinds sum to the ratio of paper counting.
    """
    counts, rows = Counts(matches, prefixes, clients, suffixes), []
    for name, member in (("mr", True), ("control", False)):
        first = _first_kinds(counts, member)
        best = first.min(axis=1, initial=len(KINDS))
        values = {kind: _shares(counts, first == place, best == place, member) for place, kind in enumerate(KINDS)}
        rows += [(f"{name}_{part}", kind, values[kind][part], int(counts.n.sum())) for part in PARTS for kind in KINDS]
    return pd.DataFrame(rows, columns=["metric", "kind", "value", "n"])


def as_record(summary: pd.DataFrame) -> dict[str, float | None]:
    """The summary's values in one flat record, {"mr_intra_paper": 0.12, …}; None where undefined, as JSON wants it."""
    named = zip(summary["metric"] + "_" + summary["counting"], summary["value"], strict=True)
    return {name: None if pd.isna(value) else float(value) for name, value in named}


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
        "hits": np.where(np.isfinite(ratio), result.hits.ravel(), np.nan),
        "ratio": ratio,
        "low": low,
        "high": high,
    }
    return pd.DataFrame(columns, columns=CELLS)


def _excess_cells(counts: Counts, counting: str, confidence: float) -> pd.DataFrame:
    size = len(counts.clients)
    sides = [prefix * size + target for prefix, target in (counts.pairs(counting, side) for side in (True, False))]
    only = []
    for one, other in (sides, sides[::-1]):
        prefix, target = np.divmod(np.setdiff1d(one, other, assume_unique=True), size)
        only.append(np.bincount(counts.owner[prefix] * size + target, minlength=size * size).astype(float))
    undefined = counts.undefined(counting, True) | counts.undefined(counting, False)
    n = np.repeat(counts.n, size)
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
        sides = (counts.client_means(np.maximum(sign * difference, 0)) for sign in (1, -1))
        value, low, high = paired_difference(*sides, counts.weights_of(part), counts.n, confidence)
        rows.append((f"excess_{part}", counting, float(value), float(low), float(high), int(counts.n.sum())))
    return rows


def _first_kinds(counts: Counts, member: bool) -> np.ndarray:
    """Prefixes × suffix clients: the place in KINDS of the first kind among the matches there, len(KINDS) without."""
    order, size = pd.Index(KINDS).get_indexer(counts.matches["kind"]), len(counts.clients)
    chosen = (counts.member == member) & counts.flag("paper")
    first = np.full(len(counts.owner) * size, len(KINDS), dtype=np.int8)
    np.minimum.at(first, counts.prefix[chosen] * size + counts.target[chosen], order[chosen].astype(np.int8))
    return first.reshape(len(counts.owner), size)


def _shares(counts: Counts, hit: np.ndarray, any_hit: np.ndarray, member: bool) -> dict[str, float]:
    """intra and inter of the pairs of prefix and client in `hit`, total of the prefixes in `any_hit`."""
    size = len(counts.clients)
    with np.errstate(invalid="ignore"):
        matrix = np.stack([np.bincount(counts.owner, column, size) for column in hit.T], axis=1) / counts.n[:, None]
    undefined = counts.undefined("paper", member)
    matrix[:, undefined] = np.nan
    total = np.nan if undefined.all() or not len(hit) else float(any_hit.mean())
    inter = weighted_sum(means_of_others(matrix), counts.weights)
    return {"intra": weighted_sum(np.diag(matrix), counts.weights), "inter": inter, "total": total}
