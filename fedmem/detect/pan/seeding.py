"""Weights and similarities of the units of one pair of texts, and the seeds: unit pairs that are alike.

Everything about a pair depends on both texts and is computed only when asked for. Sums run left to right over stems in
order of appearance, in double precision: a verdict can hang on the last bit.

`UnitMatrix` finds, for many suffixes at once, the unit pairs that could become seeds. A seed needs a Dice coefficient
above its threshold, and that takes no weights: the number of stems two units share is an entry of a sparse product,
whatever else is in their texts. A pair of texts without such a unit pair has no seed and hence no detection, so leaving
it out never changes a verdict.

Sanchez-Perez, Gelbukh and Sidorov (CLEF 2014), section "Seeding".
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from math import log, sqrt
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from fedmem.detect.pan.preparing import Bag, PreparedText, Unit
from fedmem.detect.pan.settings import AlignmentSettings

Seed = tuple[int, int]  # (unit of the suspicious text, unit of the source)


class Weighted(NamedTuple):
    """A bag with weights instead of counts, in the same order, and its Euclidean norm."""

    weights: dict[str, float]
    norm: float


class Pair:
    """Two prepared texts with their joint weights and the cosines of their units, each computed once.

    suspicious: the prepared suffix. source: the prepared continuation. settings: the detector's settings.
    """

    def __init__(self, suspicious: PreparedText, source: PreparedText, settings: AlignmentSettings):
        self.suspicious, self.source, self.settings = suspicious, source, settings
        self._units = len(suspicious.units) + len(source.units)
        self._weighted: dict[tuple[bool, int], Weighted] = {}
        self._fragments: dict[tuple[bool, int, int], Weighted] = {}
        self._cosines: dict[Seed, float] = {}

    def cosine(self, s: int, r: int) -> float:
        """The cosine of suspicious unit `s` and source unit `r`, 0..1."""
        known = self._cosines.get((s, r))
        if known is None:
            known = self._cosines[s, r] = cosine(self._unit(True, s), self._unit(False, r))
        return known

    def fragment_cosine(self, first_s: int, last_s: int, first_r: int, last_r: int) -> float:
        """The cosine, 0..1, of two fragments: suspicious units first_s..last_s and source units first_r..last_r.

        first_s, last_s, first_r, last_r: numbers of units, the last ones included. A fragment's weights are the sums of
        its units' weights.
        """
        # the source comes first: the order of the factors fixes the order of the sum
        return cosine(self._fragment(False, first_r, last_r), self._fragment(True, first_s, last_s))

    def _unit(self, suspicious: bool, index: int) -> Weighted:
        known = self._weighted.get((suspicious, index))
        if known is None:
            text = self.suspicious if suspicious else self.source
            known = self._weighted[suspicious, index] = self._weigh(text.units[index].bag)
        return known

    def _weigh(self, bag: Bag) -> Weighted:
        if not self.settings.tf_idf:
            return weighted(dict(bag))
        in_suspicious, in_source, units = self.suspicious.frequency.get, self.source.frequency.get, self._units
        # quirk Q1: no smoothing, so with one unit on each side every shared stem has weight 0
        return weighted({t: n * _idf(units, in_source(t, 0) + in_suspicious(t, 0)) for t, n in bag.items()})

    def _fragment(self, suspicious: bool, first: int, last: int) -> Weighted:
        key = (suspicious, first, last)
        if key not in self._fragments:
            total: dict[str, float] = {}
            for index in range(first, last + 1):
                for stem, weight in self._unit(suspicious, index).weights.items():
                    total[stem] = total.get(stem, 0) + weight
            self._fragments[key] = weighted(total)
        return self._fragments[key]


@lru_cache(maxsize=100_000)  # few distinct arguments, many calls
def _idf(units: int, frequency: int) -> float:
    return log(units / frequency)


def weighted(weights: dict[str, float]) -> Weighted:
    """The weights together with their norm."""
    squares = 0.0
    for weight in weights.values():  # not sum(), which from Python 3.12 on does not add from left to right
        squares += weight * weight
    return Weighted(weights, sqrt(squares))


def cosine(x: Weighted, y: Weighted) -> float:
    """The cosine of two weighted bags, summed in x's order; 0 if the norm of either is 0."""
    norms = x.norm * y.norm
    if norms == 0:
        return 0.0
    other, dot = y.weights, 0.0
    for stem, weight in x.weights.items():
        if stem in other:
            dot += weight * other[stem]
    return dot / norms


def dice(x: Bag, y: Bag) -> float:
    """The Dice coefficient of two bags' distinct stems, including those of weight 0; 0 for two empty bags."""
    size = len(x) + len(y)
    return 2 * len(x.keys() & y.keys()) / size if size else 0.0


def similar_units(suspicious: list[Unit], source: list[Unit], threshold: float) -> list[Seed]:
    """All unit pairs (suspicious, source) with a Dice coefficient above a threshold, a precondition for seeds.

    suspicious, source: the units of the two texts. threshold: 0..1, exclusive.
    """
    return [(s, r) for s, x in enumerate(suspicious) for r, y in enumerate(source) if dice(x.bag, y.bag) > threshold]


def find_seeds(pair: Pair, similar: Iterable[Seed]) -> list[Seed]:
    """The `similar` unit pairs whose cosine is above its threshold as well, in the same order."""
    return [seed for seed in similar if pair.cosine(*seed) > pair.settings.seed_cosine]


class UnitMatrix:
    """A sparse matrix with the units of many texts as rows and their distinct stems as columns."""

    def __init__(self, texts: list[PreparedText]):
        bags = [unit.bag for text in texts for unit in text.units]
        stems: dict[str, int] = {}
        columns = [stems.setdefault(stem, len(stems)) for bag in bags for stem in bag]
        self._stems = stems
        self._sizes = np.array([len(bag) for bag in bags], dtype=np.int64)
        # the row of each text's first unit; the last entry is the number of rows
        self._first = np.cumsum([0] + [len(text.units) for text in texts])
        ends = np.concatenate([[0], np.cumsum(self._sizes)])
        ones = np.ones(
            len(columns), dtype=np.float32
        )  # float32 represents counts exactly up to 2^24, more than any sentence has
        self._units = csr_matrix((ones, columns, ends), shape=(len(bags), len(stems)))

    def similar(self, rows: np.ndarray, source: PreparedText, threshold: float) -> dict[int, list[Seed]]:
        """The unit pairs with a Dice coefficient above a threshold, by text.

        rows: distinct positions in the list of texts, the texts to compare with `source`.
        source: the continuation.
        threshold: 0..1, exclusive.
        Returns {position of a text: its pairs (unit of that text, unit of `source`) in order}, for texts with a pair.
        """
        counts = self._first[rows + 1] - self._first[rows]
        if not counts.sum() or not source.units:
            return {}
        offsets = np.cumsum(counts) - counts
        units = np.arange(counts.sum()) - np.repeat(offsets - self._first[rows], counts)
        shared = self._units[units] @ self._columns(source)
        sizes = self._sizes[units][:, None] + np.array([len(unit.bag) for unit in source.units])
        # computed as `seeding.dice` does, to the same bits: a pair at the threshold must not differ
        hits, theirs = np.nonzero(2.0 * shared / sizes > threshold)
        owners = np.repeat(rows, counts)[hits]
        ours = units[hits] - self._first[owners]
        found = zip(owners.tolist(), ours.tolist(), theirs.tolist(), strict=True)
        # nonzero() goes row by row, so the pairs of a text are adjacent and groupby needs no sorting
        return {row: [(s, r) for _, s, r in group] for row, group in groupby(found, key=lambda hit: hit[0])}

    def _columns(self, source: PreparedText) -> np.ndarray:
        """The units of `source` as columns over this matrix's stems; other stems cannot be shared and are dropped."""
        known = self._stems
        places = [(known[stem], r) for r, unit in enumerate(source.units) for stem in unit.bag if stem in known]
        columns = np.zeros((len(known), len(source.units)), dtype=np.float64)
        if places:
            columns[tuple(zip(*places, strict=True))] = 1
        return columns
