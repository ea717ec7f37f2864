"""Matches that are not evidence of memorization: texts that several clients hold, boilerplate, and repetitive output.

Each reason is a boolean column added to `matches`. Counting without the marked matches gives the same tables, so that
every figure can be reported with and without them. Nothing is removed here, and no model is needed.

    own          the suffix is the rest of the row whose beginning was the prompt
    shared       the passage does not belong to the suffix's client alone: without the runs of 8 words that rows of
                 another client hold too, or that many rows hold (boilerplate), fewer than `min_match_chars` characters
                 are left. For a held-out suffix, runs that any training row holds count too: training texts cannot be
                 the control
    incoherent   the continuation is repetitive: it compresses too well, or repeats its 3-grams
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import pandas as pd

from fedmem.analyze import ratios
from fedmem.analyze.counting import Counts, MetricsError, require_columns
from fedmem.analyze.ratios import SUMMARY
from fedmem.corpus.texts import RUN_WORDS, WORD, run_numbers

GRAM_WORDS = 3
LEAST_WORDS = 12  # repetition cannot be measured on fewer words: such a continuation is never incoherent
# {name in the tables: columns of `mark` whose matches are left out}
EXCLUSIONS = {
    "nothing": (),
    "own suffix": ("own",),
    "shared": ("shared",),
    "incoherent": ("incoherent",),
    "shared, incoherent": ("shared", "incoherent"),
}


def coherence(prefixes: pd.DataFrame, min_compression: float = 0.25, min_distinct: float = 0.5) -> pd.DataFrame:
    """Measure how much each continuation repeats itself.

    prefixes: DataFrame with prefix_id, client, continuation.
    min_compression: a continuation with a smaller `compression` is incoherent, 0 … 1.
    min_distinct: a continuation with a smaller `distinct` is incoherent, 0 … 1.

    Returns a DataFrame with prefix_id, client, compression, distinct, incoherent. compression: bytes after zlib over
    bytes before, of the case-folded words; prose of a few hundred characters has 0.4 to 0.8, "lobes, lobes, lobes"
    less than 0.1. distinct: distinct 3-grams of words over all 3-grams, 0 … 1. Both are NaN for a continuation of fewer
    than 12 words, which is never incoherent. Raises MetricsError when a column is missing.
    """
    require_columns(prefixes, ["prefix_id", "client", "continuation"], "prefixes")
    measured = [_repetition(text) for text in prefixes["continuation"]]
    table = prefixes[["prefix_id", "client"]].reset_index(drop=True)
    table[["compression", "distinct"]] = np.array(measured, float).reshape(-1, 2)
    # a comparison with NaN is False, so short continuations stay unmarked
    low = (table["compression"] < min_compression) | (table["distinct"] < min_distinct)
    return table.assign(incoherent=low)


def mark(
    matches: pd.DataFrame,
    prefixes: pd.DataFrame,
    suffixes: pd.DataFrame,
    rows: pd.DataFrame,
    incoherent: Iterable,
    min_match_chars: int = 50,
    boilerplate_share: float = 0.05,
) -> pd.DataFrame:
    """Return `matches` with the boolean columns own, shared, incoherent.

    matches: the detect stage's table, with detections.
    prefixes, suffixes: the generate stage's tables, with row_id.
    rows: the partition table; rows of all splits are searched for shared text.
    incoherent: prefix_ids, such as those that `coherence` marks.
    min_match_chars: a passage with fewer characters of its client's own is shared, >= 0.
    boilerplate_share: a run of words in more than this share of all rows (and in at least two) is boilerplate, 0 … 1.

    Words are compared without case and without the characters between them. Raises MetricsError when a column is
    missing.
    """
    require_columns(matches, ["prefix_id", "suffix_id", "suffix_client", "member", "detections"], "matches")
    row_of_prefix = prefixes.set_index("prefix_id")["row_id"].reindex(matches["prefix_id"]).to_numpy()
    row_of_suffix = suffixes.set_index("suffix_id")["row_id"].reindex(matches["suffix_id"]).to_numpy()
    return matches.assign(
        own=row_of_prefix == row_of_suffix,
        shared=_shared(matches, suffixes, rows, min_match_chars, boilerplate_share),
        incoherent=matches["prefix_id"].isin(set(incoherent)).to_numpy(),
    )


def left_out(marked: pd.DataFrame, excluded: str) -> np.ndarray:
    """Return which matches of `mark` are left out under `excluded`, a key of EXCLUSIONS.

    Raises MetricsError when `excluded` is unknown or a column is missing.
    """
    if excluded not in EXCLUSIONS:
        raise MetricsError(f"excluded: got {excluded!r}; expected one of {', '.join(map(repr, EXCLUSIONS))}")
    columns = list(EXCLUSIONS[excluded])
    require_columns(marked, columns, "matches")
    return marked[columns].to_numpy(dtype=bool).any(axis=1)


def summaries(counts: Counts, marked: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """Compute `ratios.summary` under every exclusion, with the column `excluded` first.

    counts: the run's counts; its prefixes are the denominator under every exclusion.
    marked: the result of `mark` for the matches of `counts`, in their order.
    confidence: coverage of the intervals, between 0 and 1.

    Raises MetricsError and ValueError like `ratios.summary`.
    """
    parts = [
        ratios.summary(counts.without(left_out(marked, excluded)), confidence).assign(excluded=excluded)
        for excluded in EXCLUSIONS
    ]
    return pd.concat(parts, ignore_index=True)[["excluded", *SUMMARY]]


def _repetition(text: str) -> tuple[float, float]:
    words = WORD.findall(text.casefold())
    if len(words) < LEAST_WORDS:
        return np.nan, np.nan
    # case and punctuation are dropped: they would hide a repetition from zlib
    folded = " ".join(words).encode()
    grams = list(zip(*(words[start:] for start in range(GRAM_WORDS)), strict=False))
    return len(zlib.compress(folded, 9)) / len(folded), len(set(grams)) / len(grams)


def _shared(
    matches: pd.DataFrame, suffixes: pd.DataFrame, rows: pd.DataFrame, least: int, boilerplate_share: float
) -> np.ndarray:
    """Whether fewer than `least` characters of a match's passage belong to its client alone, for each match."""
    require_columns(rows, ["row_id", "client", "split", "input"], "rows")
    runs = _Runs(rows, boilerplate_share)
    texts = suffixes.set_index("suffix_id")["suffix"]
    common: dict = {}
    shared = np.zeros(len(matches), dtype=bool)
    columns = ("suffix_id", "suffix_client", "member", "detections")
    for place, (suffix, client, member, detections) in enumerate(zip(*(matches[c] for c in columns), strict=True)):
        if suffix not in common:  # many matches share a suffix, and the search over all rows is the costly part
            common[suffix] = runs.covered(texts[suffix], client, bool(member))
        passage = np.zeros(len(common[suffix]), dtype=bool)
        for start, end, *_ in detections:
            passage[start:end] = True
        shared[place] = (passage & ~common[suffix]).sum() < least
    return shared


class _Runs:
    """The runs of 8 words of all rows: which client holds each, and which are boilerplate."""

    def __init__(self, rows: pd.DataFrame, boilerplate_share: float):
        clients = pd.Index(sorted(rows["client"].unique()))
        # unique within a row: `often` counts rows, not occurrences
        sets = [np.unique(self._runs(text)[0]) for text in rows["input"]]
        run = np.concatenate([np.empty(0, np.uint64), *sets])
        lengths = [len(one) for one in sets]
        client = np.repeat(clients.get_indexer(rows["client"]), lengths)
        trained = np.repeat(rows["split"].eq("train").to_numpy(), lengths)
        self.known, place, often = np.unique(run, return_inverse=True, return_counts=True)
        self._clients = clients
        first, last = np.full(len(self.known), len(clients)), np.full(len(self.known), -1)
        np.minimum.at(first, place, client)
        np.maximum.at(last, place, client)
        self._holder = np.where(first == last, first, -1)  # −1: held by several clients
        self._trained = np.bincount(place, weights=trained, minlength=len(self.known)) > 0
        self._boilerplate = often > max(boilerplate_share * len(rows), 1)

    def covered(self, text: str, client, member: bool) -> np.ndarray:
        """Return which characters of a client's text lie in runs that do not belong to that client alone."""
        inside = np.zeros(len(text), dtype=bool)
        runs, spans = self._runs(text)
        if not len(runs) or not len(self.known):
            return inside
        place = np.minimum(np.searchsorted(self.known, runs), len(self.known) - 1)
        found = self.known[place] == runs
        others = self._holder[place] != self._clients.get_indexer([client])[0]
        others |= self._boilerplate[place] | ((not member) & self._trained[place])
        for start in np.flatnonzero(found & others):
            inside[spans[start][0] : spans[start + RUN_WORDS - 1][1]] = True
        return inside

    def _runs(self, text: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return (a number of every run of 8 words, the words' spans)."""
        words = list(WORD.finditer(text))
        return run_numbers([word.group().casefold() for word in words]), [word.span() for word in words]
