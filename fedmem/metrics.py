"""How much came back, and from whom to whom: the memorization matrix, its aggregates and their intervals.

Frames in, frames out. This module knows matches, prefixes and clients as tables; it knows no model, text or file.

Words (DESIGN, and section 3 of the paper). A prefix of client j hits client k when its continuation matches at least
one sampled suffix of client k; ten matches with the same client are one hit. With n_j sampled prefixes of client j:

    MR(j→k)  = prefixes of j that hit k / n_j
    MR_intra = Σ_j w_j · MR(j→j)                     w_j = n_train_j / Σ n_train
    MR_inter = Σ_j w_j · mean over k ≠ j of MR(j→k)
    MR_total = prefixes that hit any client / Σ n_j

Member suffixes give MR; held-out suffixes, which nobody trained on, give the control in the same way. 0/0 is NaN: the
row of a client without prefixes (and with it each aggregate in which that client has weight), MR_inter of one client.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedmem.intervals import effective_prefixes, wilson

COUNTINGS = ("paper", "strict", "verbatim")
KINDS = ("verbatim", "paraphrase_high", "paraphrase_low", "paraphrase", "idea")
UNTYPED = "paraphrase"
STRICT_SCORE = 0.5  # a classifier score above it calls two sentences the same

CELLS = ["prefix_client", "suffix_client", "member", "counting", "n", "hits", "ratio", "low", "high"]
SUMMARY = ["metric", "counting", "value", "low", "high", "n"]


class MetricsError(ValueError):
    """Tables that do not fit together, or a counting that does not exist."""


@dataclass(frozen=True, eq=False)
class Memorization:
    """Shares in 0 … 1 of one run under one counting.

    matrix: L × L, row = prefix client j, column = suffix client k, in the order of `clients`. NaN where undefined.
    intra, inter, total: the aggregates. hits, n: the matrix's numerators (L × L) and denominators (L).
    """

    matrix: np.ndarray
    intra: float
    inter: float
    total: float
    hits: np.ndarray
    n: np.ndarray
    clients: tuple
    counting: str
    member: bool


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
    _check_counting(counting)
    return _Counts(matches, prefixes, clients, suffixes).memorization(counting, member)


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
    counts, parts = _Counts(matches, prefixes, clients, suffixes), []
    for member in (True, False):
        for counting in countings:
            _check_counting(counting)
            parts.append(_cells(counts.memorization(counting, member), confidence))
    return pd.concat(parts, ignore_index=True)


def summary(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    clients: pd.DataFrame,
    confidence: float = 0.95,
    suffixes: pd.DataFrame | None = None,
    countings: Iterable[str] = COUNTINGS,
) -> pd.DataFrame:
    """One row for each aggregate and counting: mr_intra, mr_inter, mr_total, and control_… on held-out suffixes.

    n is the number of sampled prefixes. The interval is Wilson's with an effective number of prefixes, see
    `intervals.effective_prefixes`, so it keeps a width at 0 hits. It speaks of sampled prefixes for one trained model;
    how training varies shows only between seeds. Arguments and errors as in `cells`.
    """
    counts, rows = _Counts(matches, prefixes, clients, suffixes), []
    for counting in countings:
        _check_counting(counting)
        for name, member in (("mr", True), ("control", False)):
            rows += _aggregates(counts, counts.memorization(counting, member), name, confidence)
    return pd.DataFrame(rows, columns=SUMMARY)


def as_record(summary: pd.DataFrame) -> dict[str, float | None]:
    """The summary's values in one flat record, {"mr_intra_paper": 0.12, …}; None where undefined, as JSON wants it."""
    named = zip(summary["metric"] + "_" + summary["counting"], summary["value"], strict=True)
    return {name: None if pd.isna(value) else float(value) for name, value in named}


def is_match(matches: pd.DataFrame, counting: str = "paper") -> pd.Series:
    """Which rows of `matches` count, as booleans in their order. An untyped candidate is never counted as strict."""
    _check_counting(counting)
    _need(matches, ["kind", *(["score", "identical_sentence"] if counting == "strict" else [])], "matches")
    kind = matches["kind"].astype(object).where(matches["kind"].notna(), None)
    unknown = sorted(set(kind.dropna().unique()) - set(KINDS))
    if unknown:
        raise MetricsError(f"matches, column kind: got {unknown}; allowed are {', '.join(KINDS)}, or null")
    if counting == "paper":
        return kind.notna()
    verbatim = kind == "verbatim"
    if counting == "verbatim":
        return verbatim
    same = matches["identical_sentence"].eq(True) | pd.to_numeric(matches["score"]).gt(STRICT_SCORE)
    return verbatim | (same.fillna(False).astype(bool) & ~kind.isin(["idea", UNTYPED]))


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


def _aggregates(counts: _Counts, result: Memorization, name: str, confidence: float) -> list[tuple]:
    everybody = result.n.sum()
    effective = {
        "intra": effective_prefixes(np.diag(result.matrix), counts.weights, result.n),
        "inter": effective_prefixes(_others(result.matrix), counts.weights, result.n),
        "total": everybody,
    }
    rows = []
    for part, n in effective.items():
        value = getattr(result, part)
        low, high = wilson(value, n, confidence)
        rows.append((f"{name}_{part}", result.counting, value, float(low), float(high), int(everybody)))
    return rows


def _others(matrix: np.ndarray) -> np.ndarray:
    """For each row the mean of what is not on the diagonal; NaN for a 1 × 1 matrix."""
    size = len(matrix)
    if size < 2:
        return np.full(size, np.nan)
    return matrix[~np.eye(size, dtype=bool)].reshape(size, size - 1).mean(axis=1)


def _weighted(values: np.ndarray, weights: np.ndarray) -> float:
    # a client of weight 0 adds nothing, even where its share is NaN; no weights at all leave nothing defined
    return float(np.sum(weights[weights > 0] * values[weights > 0])) if (weights > 0).any() else np.nan


class _Counts:
    """The tables, checked once and turned into positions, so that every counting is a few array operations."""

    def __init__(
        self, matches: pd.DataFrame, prefixes: pd.DataFrame, clients: pd.DataFrame, suffixes: pd.DataFrame | None
    ) -> None:
        _need(matches, ["prefix_id", "prefix_client", "suffix_client", "member", "kind"], "matches")
        _need(prefixes, ["prefix_id", "client"], "prefixes")
        self.clients, self.weights = _client_weights(clients)
        self.owner = _positions(prefixes["client"], self.clients, "prefixes, column client")
        self.n = np.bincount(self.owner, minlength=len(self.clients))
        self.matches = matches
        _positions(matches["prefix_client"], self.clients, "matches, column prefix_client")
        self.target = _positions(matches["suffix_client"], self.clients, "matches, column suffix_client")
        self.prefix = _sampled(matches, prefixes)
        if matches["member"].isna().any():
            raise MetricsError("matches, column member: a value is missing; allowed are True and False")
        self.member = matches["member"].to_numpy(dtype=bool)
        self.untyped = matches["kind"].isin([UNTYPED]).to_numpy()
        self.probed = {side: self._probed(suffixes, side) for side in (True, False)}
        self._flags: dict[str, np.ndarray] = {}

    def memorization(self, counting: str, member: bool) -> Memorization:
        side, size = self.member == member, len(self.clients)
        counted = side & self._flag(counting)
        pairs = np.unique(self.prefix[counted] * size + self.target[counted])  # one prefix counts once for a client
        prefix, target = np.divmod(pairs, size)
        hits = np.bincount(self.owner[prefix] * size + target, minlength=size * size).reshape(size, size)
        with np.errstate(invalid="ignore"):
            matrix = hits / self.n[:, None]  # 0/0 is NaN, and hits without prefixes cannot be
        matrix[:, ~self.probed[member]] = np.nan
        undefined = not len(self.owner) or not self.probed[member].any()
        if counting == "strict" and (self.untyped & side).any():
            matrix[:], undefined = np.nan, True
        total = np.nan if undefined else len(np.unique(prefix)) / len(self.owner)
        intra, inter = (_weighted(part, self.weights) for part in (np.diag(matrix), _others(matrix)))
        return Memorization(matrix, intra, inter, total, hits, self.n, self.clients, counting, member)

    def _flag(self, counting: str) -> np.ndarray:
        if counting not in self._flags:
            self._flags[counting] = is_match(self.matches, counting).to_numpy()
        return self._flags[counting]

    def _probed(self, suffixes: pd.DataFrame | None, member: bool) -> np.ndarray:
        """Which clients have suffixes of this membership; all of them when the table is not given."""
        if suffixes is None:
            return np.ones(len(self.clients), dtype=bool)
        _need(suffixes, ["client", "member"], "suffixes")
        side = suffixes.loc[suffixes["member"].to_numpy(dtype=bool) == member, "client"]
        return np.bincount(_positions(side, self.clients, "suffixes, column client"), minlength=len(self.clients)) > 0


def _client_weights(clients: pd.DataFrame) -> tuple[tuple, np.ndarray]:
    """Clients in ascending order, and each one's share of all training rows."""
    _need(clients, ["client", "n_train"], "clients")
    ordered = clients.sort_values("client")
    if ordered["client"].duplicated().any():
        double = ordered.loc[ordered["client"].duplicated(), "client"].tolist()
        raise MetricsError(f"clients: client {double[0]!r} stands there twice; give one row a client")
    rows = ordered["n_train"].to_numpy(dtype=float)
    if not (rows >= 0).all():
        raise MetricsError("clients, column n_train: numbers of training rows, 0 or more, are allowed")
    return tuple(ordered["client"].tolist()), rows / rows.sum() if rows.sum() else np.zeros(len(rows))


def _positions(values: pd.Series, clients: tuple, where: str) -> np.ndarray:
    positions = pd.Index(clients).get_indexer(values)
    if (positions < 0).any():
        strangers = values[positions < 0].unique().tolist()
        raise MetricsError(f"{where}: got {strangers[:5]}, not among the clients {list(clients)[:10]}; add them there")
    return positions.astype(np.int64)


def _sampled(matches: pd.DataFrame, prefixes: pd.DataFrame) -> np.ndarray:
    """For each match the position of its prefix; identities hold within a client."""
    known = pd.MultiIndex.from_frame(prefixes[["client", "prefix_id"]])
    if not known.is_unique:
        client, prefix = known[known.duplicated()][0]
        raise MetricsError(f"prefixes: prefix {prefix} of client {client} stands there twice; give each one row")
    positions = known.get_indexer(pd.MultiIndex.from_frame(matches[["prefix_client", "prefix_id"]]))
    if (positions < 0).any():
        client, prefix = matches.loc[positions < 0, ["prefix_client", "prefix_id"]].iloc[0]
        raise MetricsError(
            f"matches: prefix {prefix} of client {client} is not among the sampled prefixes; "
            "give the `prefixes` table of the same generate stage"
        )
    return positions.astype(np.int64)


def _check_counting(counting: str) -> None:
    if counting not in COUNTINGS:
        raise MetricsError(f"counting = {counting!r}: allowed are {', '.join(COUNTINGS)}")


def _need(frame: pd.DataFrame, columns: list[str], name: str) -> None:
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise MetricsError(
            f"{name}: column {', '.join(missing)} is missing; it has {', '.join(map(str, frame.columns))}"
        )
