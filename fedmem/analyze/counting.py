"""The tables of one measurement, checked once and turned into positions, so that every count is a few array operations.

What a match is under each counting is defined here, which prefix hit which client, and how hits become the matrix and
its aggregates; intervals and tables made of that are in `fedmem.analyze.ratios` and its neighbours. This module sees no
text and draws nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedmem.config.vocabulary import COUNTINGS, KINDS

UNTYPED = "paraphrase"

STRICT_SCORE = 0.5  # a higher classifier score means a paraphrase


class MetricsError(ValueError):
    """Tables that do not fit together, or an unknown counting."""


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


def is_match(matches: pd.DataFrame, counting: str = "paper") -> pd.Series:
    """Return which rows of `matches` count, as booleans in their order; an untyped candidate never counts as strict.

    matches: kind; for strict also score, identical_sentence. counting: paper, strict or verbatim.
    Raises MetricsError for an unknown counting or kind, or a missing column.
    """
    if counting not in COUNTINGS:
        raise MetricsError(f"counting: got {counting!r}; expected one of {', '.join(COUNTINGS)}")
    require_columns(matches, ["kind", *(["score", "identical_sentence"] if counting == "strict" else [])], "matches")
    codes, known = pd.factorize(matches["kind"])  # −1: null
    unknown = sorted(set(known) - set(KINDS))
    if unknown:
        raise MetricsError(f"matches, column kind: got {unknown}; expected one of {', '.join(KINDS)}, or null")

    def of_kind(*kinds: str) -> np.ndarray:
        return np.isin(codes, np.flatnonzero(np.isin(known.astype(object), kinds)))

    found = codes >= 0 if counting == "paper" else of_kind("verbatim")
    if counting == "strict":
        # score is null unless the row was classified; NaN compares as False
        score = pd.to_numeric(matches["score"]).to_numpy(float)
        same = matches["identical_sentence"].eq(True).fillna(False).to_numpy(bool) | (score > STRICT_SCORE)
        found = found | (same & ~of_kind("idea", UNTYPED))
    return pd.Series(found, index=matches.index)


class Counts:
    """One run's matches by position: which sampled prefix hit which client, under any counting.

    Every table of an analysis is made from one Counts, so that its tables are checked once.

    matches: prefix_id, prefix_client, suffix_client, member, kind; for strict also score, identical_sentence.
    prefixes: prefix_id, client; one row for each sampled prefix (the denominator).
    clients: client, n_train (training rows, ≥ 0); one row for each client, as `training_rows` returns it.
    suffixes: client, member; when given, a client without sampled suffixes of a membership has no count of it, not 0.

    Attributes: the tables; clients, in ascending order; weights, their shares of all training rows; owner, the position
    of each prefix's client; n, the number of prefixes of each client; of each match: prefix and target, the positions
    of its prefix and of its suffix client, member, and untyped.
    Raises MetricsError when a column is missing, a client or prefix is unknown or doubled, or a value is not valid.
    """

    def __init__(
        self,
        matches: pd.DataFrame,
        prefixes: pd.DataFrame,
        clients: pd.DataFrame,
        suffixes: pd.DataFrame | None = None,
    ) -> None:
        require_columns(matches, ["prefix_id", "prefix_client", "suffix_client", "member", "kind"], "matches")
        require_columns(prefixes, ["prefix_id", "client"], "prefixes")
        self.clients, self.weights = _client_weights(clients)
        self.matches, self.prefixes, self.suffixes = matches, prefixes, suffixes
        self.owner = _positions(prefixes["client"], self.clients, "prefixes, column client")
        self.n = np.bincount(self.owner, minlength=len(self.clients))
        # only checked: the prefix determines its client
        _positions(matches["prefix_client"], self.clients, "matches, column prefix_client")
        self.target = _positions(matches["suffix_client"], self.clients, "matches, column suffix_client")
        self.prefix = _sampled(matches, prefixes)
        if matches["member"].isna().any():
            raise MetricsError("matches, column member: a value is missing; expected True or False")
        self.member = matches["member"].to_numpy(dtype=bool)
        self.untyped = matches["kind"].isin([UNTYPED]).to_numpy()
        self._probed = {side: self._clients_with_suffixes(side) for side in (True, False)}
        # caches: the tables and intervals of one measurement use the same counting many times
        self._flags: dict[str, np.ndarray] = {}
        self._pairs: dict[tuple[str, bool], tuple[np.ndarray, np.ndarray]] = {}

    def without(self, left_out: np.ndarray) -> Counts:
        """Return the counts of fewer matches; prefixes (the denominator), clients and suffixes stay.

        left_out: booleans, one for each row of `matches`. Raises MetricsError when they are of another number.
        """
        if len(left_out) != len(self.matches):
            expected = f"expected one for each of the {len(self.matches)} matches, in their order"
            raise MetricsError(f"left_out: got {len(left_out)} values; {expected}")
        kept, fewer = ~np.asarray(left_out, dtype=bool), copy.copy(self)
        fewer.matches = self.matches[kept]
        for name in ("prefix", "target", "member", "untyped"):
            setattr(fewer, name, getattr(self, name)[kept])
        fewer._flags, fewer._pairs = {name: flag[kept] for name, flag in self._flags.items()}, {}
        return fewer

    def flag(self, counting: str) -> np.ndarray:
        """Return which matches count, as `is_match`."""
        if counting not in self._flags:
            self._flags[counting] = is_match(self.matches, counting).to_numpy()
        return self._flags[counting]

    def pairs(self, counting: str, member: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (prefix, suffix client) of every hit, by position, in order of prefix."""
        if (counting, member) not in self._pairs:
            self._pairs[counting, member] = self.distinct_pairs((self.member == member) & self.flag(counting))
        return self._pairs[counting, member]

    def distinct_pairs(self, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (prefix, suffix client) of the matches that are `counted`, each pair once: ten matches are one hit."""
        hit, size = np.zeros(len(self.owner) * len(self.clients), dtype=bool), len(self.clients)
        # one flag per pair removes repeats and sorts by prefix, without a sort
        hit[self.prefix[counted] * size + self.target[counted]] = True
        return np.divmod(np.flatnonzero(hit), size)

    def undefined(self, counting: str, member: bool) -> np.ndarray:
        """Return which suffix clients have no count: those without sampled suffixes, or all of them.

        All have none under strict when a candidate is untyped.
        """
        # an untyped candidate may or may not be a strict match, so no ratio is known
        everywhere = counting == "strict" and bool((self.untyped & (self.member == member)).any())
        return ~self._probed[member] | everywhere

    def memorization(self, counting: str = "paper", member: bool = True) -> Memorization:
        """Return the memorization matrix and its aggregates, as `ratios.memorization`."""
        prefix, target = self.pairs(counting, member)
        return self.of_hits(prefix, target, prefixes_hit(prefix), counting, member)

    def of_hits(self, prefix: np.ndarray, target: np.ndarray, n_hit: int, counting: str, member: bool) -> Memorization:
        """Return the matrix and the aggregates of some of the hits.

        prefix, target: positions of the prefix and of the suffix client of each hit, each pair once.
        n_hit: number of prefixes that count in the total. counting, member: where these hits come from.
        """
        size, undefined = len(self.clients), self.undefined(counting, member)
        hits = np.bincount(self.owner[prefix] * size + target, minlength=size * size).reshape(size, size)
        with np.errstate(invalid="ignore"):
            matrix = hits / self.n[:, None]  # 0/0 is NaN; a client without prefixes has no hits
        matrix[:, undefined] = np.nan
        total = np.nan if undefined.all() or not len(self.owner) else n_hit / len(self.owner)
        intra, inter = (weighted_sum(part, self.weights) for part in (np.diag(matrix), means_of_others(matrix)))
        return Memorization(matrix, intra, inter, total, hits, self.n, self.clients, counting, member)

    def by_prefix(self, counting: str, member: bool) -> dict[str, np.ndarray]:
        """Return each prefix's value in intra (own client hit), inter (share of others hit), total (any hit): 0 … 1.

        The weighted means over the prefixes of each client are the aggregates. NaN where these are undefined.
        """
        prefix, target = self.pairs(counting, member)
        own = target == self.owner[prefix]
        size, undefined = len(self.clients), self.undefined(counting, member)
        parts = {
            "intra": np.bincount(prefix[own], minlength=len(self.owner)).astype(float),
            "inter": np.bincount(prefix[~own], minlength=len(self.owner)) / max(size - 1, 1),
            "total": np.minimum(np.bincount(prefix, minlength=len(self.owner)), 1).astype(float),
        }
        parts["intra"][undefined[self.owner]] = np.nan
        parts["inter"][(undefined.sum() - undefined[self.owner]) > 0 if size > 1 else slice(None)] = np.nan
        parts["total"][slice(None) if undefined.all() else slice(0)] = np.nan
        return parts

    def client_means(self, values: np.ndarray) -> np.ndarray:
        """Return each client's mean of one value per prefix; NaN for a client without prefixes."""
        with np.errstate(invalid="ignore"):
            return np.bincount(self.owner, weights=values, minlength=len(self.clients)) / self.n

    def weights_of(self, part: str) -> np.ndarray:
        """Return the weight of each client in an aggregate: its share of training rows, or of prefixes in `total`."""
        return self.n / self.n.sum() if part == "total" and self.n.sum() else self.weights

    def _clients_with_suffixes(self, member: bool) -> np.ndarray:
        """Return which clients have suffixes of this membership; all of them without the table."""
        if self.suffixes is None:
            return np.ones(len(self.clients), dtype=bool)
        require_columns(self.suffixes, ["client", "member"], "suffixes")
        side = self.suffixes.loc[self.suffixes["member"].to_numpy(dtype=bool) == member, "client"]
        return np.bincount(_positions(side, self.clients, "suffixes, column client"), minlength=len(self.clients)) > 0


def training_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Count each client's training rows: client, n_train. rows: the partition table, with client and split."""
    return rows[rows["split"] == "train"].groupby("client").size().rename("n_train").reset_index()


def prefixes_hit(prefix: np.ndarray) -> int:
    """Return the number of different prefixes among those of hits, which are in order of prefix."""
    return np.count_nonzero(np.diff(prefix, prepend=-1))


def means_of_others(matrix: np.ndarray) -> np.ndarray:
    """Return for each row the mean of the values off the diagonal; NaN for a 1 × 1 matrix."""
    size = len(matrix)
    if size < 2:
        return np.full(size, np.nan)
    return matrix[~np.eye(size, dtype=bool)].reshape(size, size - 1).mean(axis=1)


def weighted_sum(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted sum; NaN if all weights are 0. A value of weight 0 adds nothing, even if it is NaN."""
    # a client without training rows often has no prefixes, so its share is 0/0; 0 · NaN would spoil the sum
    return float(np.sum(weights[weights > 0] * values[weights > 0])) if (weights > 0).any() else np.nan


def _client_weights(clients: pd.DataFrame) -> tuple[tuple, np.ndarray]:
    """Return the clients in ascending order, and the share of each in all training rows."""
    require_columns(clients, ["client", "n_train"], "clients")
    ordered = clients.sort_values("client")
    if ordered["client"].duplicated().any():
        double = ordered.loc[ordered["client"].duplicated(), "client"].tolist()
        raise MetricsError(f"clients: client {double[0]!r} occurs twice; give one row per client")
    rows = ordered["n_train"].to_numpy(dtype=float)
    if not (rows >= 0).all():  # in this form NaN fails as well
        raise MetricsError("clients, column n_train: a value is not a number >= 0; expected numbers of training rows")
    return tuple(ordered["client"].tolist()), rows / rows.sum() if rows.sum() else np.zeros(len(rows))


def _positions(values: pd.Series, clients: tuple, where: str) -> np.ndarray:
    positions = pd.Index(clients).get_indexer(values)
    if (positions < 0).any():
        strangers = values[positions < 0].unique().tolist()
        raise MetricsError(f"{where}: got {strangers[:5]}, not among the clients {list(clients)[:10]}; add them there")
    return positions.astype(np.int64)


def _sampled(matches: pd.DataFrame, prefixes: pd.DataFrame) -> np.ndarray:
    """Return for each match the position of its prefix; a prefix_id is unique only within a client."""
    ids = pd.Index(prefixes["prefix_id"])
    if ids.is_unique:  # the usual case, and much faster than looking up pairs
        positions = ids.get_indexer(matches["prefix_id"])
        # position −1 (not found) takes the last prefix here, but keeps its −1 either way
        same = prefixes["client"].to_numpy()[positions] == matches["prefix_client"].to_numpy()
        positions = np.where(same, positions, -1)
    else:
        known = pd.MultiIndex.from_frame(prefixes[["client", "prefix_id"]])
        if not known.is_unique:
            client, prefix = known[known.duplicated()][0]
            raise MetricsError(f"prefixes: prefix {prefix} of client {client} occurs twice; give one row per prefix")
        positions = known.get_indexer(pd.MultiIndex.from_frame(matches[["prefix_client", "prefix_id"]]))
    if (positions < 0).any():
        client, prefix = matches.loc[positions < 0, ["prefix_client", "prefix_id"]].iloc[0]
        raise MetricsError(
            f"matches: prefix {prefix} of client {client} is not among the sampled prefixes; "
            "give the `prefixes` table of the same generate stage"
        )
    return positions.astype(np.int64)


def require_columns(frame: pd.DataFrame, columns: list[str], name: str) -> None:
    """Raise MetricsError when a frame lacks a column.

    frame: the table. columns: names that it must have. name: the table's name, for the message.
    """
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise MetricsError(
            f"{name}: column {', '.join(missing)} is missing; it has {', '.join(map(str, frame.columns))}"
        )
