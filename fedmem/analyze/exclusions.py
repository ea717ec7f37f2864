"""What may pass for memorization and is none: texts that others hold too, boilerplate, and babble.

Marks are added to `matches`, a column each; whoever counts leaves the marked ones out and gets the same tables again,
so that every figure can stand with and without. Nothing is removed here, and this module knows no model.

    own          the suffix is the rest of the very row whose beginning was the prompt
    shared       the passage is not the suffix client's alone: without the runs of 8 words that rows of another client
                 hold too, or that many rows hold (boilerplate), fewer than `min_match_chars` characters are left. Of a
                 held-out suffix also what any training row holds: a control that was trained on is none
    incoherent   the continuation is babble: it compresses too well, or repeats its 3-grams
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

import numpy as np
import pandas as pd

from fedmem.analyze import ratios
from fedmem.analyze.counting import MetricsError, require_columns
from fedmem.analyze.ratios import SUMMARY

RUN_WORDS, GRAM_WORDS = 8, 3
LEAST_WORDS = 12  # a continuation of fewer words shows no repetition: it is never called incoherent
# what is left out, by the name under which tables show it
EXCLUSIONS = {
    "nothing": (),
    "own suffix": ("own",),
    "shared": ("shared",),
    "incoherent": ("incoherent",),
    "shared, incoherent": ("shared", "incoherent"),
}
_WORD = re.compile(r"\w+")


def coherence(prefixes: pd.DataFrame, min_compression: float = 0.25, min_distinct: float = 0.5) -> pd.DataFrame:
    """How much each continuation repeats itself: prefix_id, client, compression, distinct, incoherent.

    compression: bytes after zlib over bytes before, of the folded text; prose of some hundred characters is at 0.4 to
    0.8, "lobes, lobes, lobes" below 0.1. distinct: different 3-grams of words over all 3-grams, 0 … 1. incoherent: one
    of them is below its threshold. A continuation of fewer than 12 words has neither (NaN) and is never incoherent.
    """
    require_columns(prefixes, ["prefix_id", "client", "continuation"], "prefixes")
    measured = [_repetition(text) for text in prefixes["continuation"]]
    table = prefixes[["prefix_id", "client"]].reset_index(drop=True)
    table[["compression", "distinct"]] = np.array(measured, float).reshape(-1, 2)
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
    """`matches` with the columns own, shared, incoherent (booleans).

    matches: the detect stage's table, with detections. prefixes, suffixes: with row_id. rows: the partition table;
    rows of any split are searched for what is shared. incoherent: prefix_ids, such as `coherence` marks.
    boilerplate_share: a run of words in more than this share of all rows (two at least) is nobody's own. Words are
    compared without case, and without what stands between them.
    """
    require_columns(matches, ["prefix_id", "suffix_id", "suffix_client", "member", "detections"], "matches")
    row_of_prefix = prefixes.set_index("prefix_id")["row_id"].reindex(matches["prefix_id"]).to_numpy()
    row_of_suffix = suffixes.set_index("suffix_id")["row_id"].reindex(matches["suffix_id"]).to_numpy()
    return matches.assign(
        own=row_of_prefix == row_of_suffix,
        shared=_shared(matches, suffixes, rows, min_match_chars, boilerplate_share),
        incoherent=matches["prefix_id"].isin(set(incoherent)).to_numpy(),
    )


def without(marked: pd.DataFrame, excluded: str) -> pd.DataFrame:
    """The matches of `mark` that one of EXCLUSIONS leaves; an unknown one raises MetricsError."""
    if excluded not in EXCLUSIONS:
        raise MetricsError(f"excluded = {excluded!r}: allowed are {', '.join(map(repr, EXCLUSIONS))}")
    require_columns(marked, EXCLUSIONS[excluded], "matches")
    gone = np.zeros(len(marked), dtype=bool)
    for column in EXCLUSIONS[excluded]:
        gone |= marked[column].to_numpy(dtype=bool)
    return marked[~gone]


def summaries(
    marked: pd.DataFrame,
    prefixes: pd.DataFrame,
    clients: pd.DataFrame,
    confidence: float = 0.95,
    suffixes: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """`ratios.summary` under every exclusion, the column `excluded` first. The denominator stays: all prefixes."""
    parts = [
        ratios.summary(without(marked, excluded), prefixes, clients, confidence, suffixes).assign(excluded=excluded)
        for excluded in EXCLUSIONS
    ]
    table = pd.concat(parts, ignore_index=True)
    return table[["excluded", *SUMMARY]]


def _repetition(text: str) -> tuple[float, float]:
    words = _WORD.findall(text.casefold())
    if len(words) < LEAST_WORDS:
        return np.nan, np.nan
    folded = " ".join(words).encode()
    grams = list(zip(*(words[start:] for start in range(GRAM_WORDS)), strict=False))
    return len(zlib.compress(folded, 9)) / len(folded), len(set(grams)) / len(grams)


def _shared(
    matches: pd.DataFrame, suffixes: pd.DataFrame, rows: pd.DataFrame, least: int, boilerplate_share: float
) -> np.ndarray:
    """Whether fewer than `least` characters of a match's passage are its client's alone."""
    require_columns(rows, ["row_id", "client", "split", "input"], "rows")
    runs = _Runs(rows, boilerplate_share)
    texts = suffixes.set_index("suffix_id")["suffix"]
    common: dict = {}
    shared = np.zeros(len(matches), dtype=bool)
    columns = ("suffix_id", "suffix_client", "member", "detections")
    for place, (suffix, client, member, detections) in enumerate(zip(*(matches[c] for c in columns), strict=True)):
        if suffix not in common:
            common[suffix] = runs.covered(texts[suffix], client, bool(member))
        passage = np.zeros(len(common[suffix]), dtype=bool)
        for start, end, *_ in detections:
            passage[start:end] = True
        shared[place] = (passage & ~common[suffix]).sum() < least
    return shared


class _Runs:
    """Runs of 8 words of all rows: who holds each, and which are boilerplate."""

    def __init__(self, rows: pd.DataFrame, boilerplate_share: float):
        self._numbers: dict[str, int] = {}
        clients = pd.Index(sorted(rows["client"].unique()))
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
        self._holder = np.where(first == last, first, -1)  # −1: several clients
        self._trained = np.bincount(place, weights=trained, minlength=len(self.known)) > 0
        self._boilerplate = often > max(boilerplate_share * len(rows), 1)

    def covered(self, text: str, client, member: bool) -> np.ndarray:
        """Which characters of a client's text lie in runs that are not its own alone."""
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
        """A number for every run of 8 words, and the words' spans; equal runs have equal numbers, others hardly."""
        words = [(match.group().casefold(), match.span()) for match in _WORD.finditer(text)]
        numbers = [self._numbers.setdefault(word, len(self._numbers)) for word, _ in words]
        if len(numbers) < RUN_WORDS:
            return np.empty(0, np.uint64), []
        windows = np.lib.stride_tricks.sliding_window_view(np.array(numbers, np.uint64) + np.uint64(1), RUN_WORDS)
        mixed = (windows * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)
        return mixed ^ (mixed >> np.uint64(29)), [span for _, span in words]


_MULTIPLIERS = np.random.default_rng(8).integers(1, 2**63, RUN_WORDS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
