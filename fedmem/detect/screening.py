"""Finds, for many suffixes at once, the unit pairs that could become seeds.

A seed needs a Dice coefficient above its threshold, and that takes no weights: the number of stems two units share is
an entry of a sparse product, whatever else is in their texts. A pair of texts without such a unit pair has no seed and
hence no detection, so leaving it out never changes a verdict.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
from scipy.sparse import csr_matrix

from fedmem.detect.preparing import PreparedText
from fedmem.detect.seeding import Seed


class UnitMatrix:
    """The units of many texts as rows, their distinct stems as columns."""

    def __init__(self, texts: list[PreparedText]):
        bags = [unit.bag for text in texts for unit in text.units]
        stems: dict[str, int] = {}
        columns = [stems.setdefault(stem, len(stems)) for bag in bags for stem in bag]
        self._stems = stems
        self._sizes = np.array([len(bag) for bag in bags], dtype=np.int64)
        self._first = np.cumsum([0] + [len(text.units) for text in texts])
        ends = np.concatenate([[0], np.cumsum(self._sizes)])
        ones = np.ones(len(columns), dtype=np.float32)  # float32 counts exactly far beyond any sentence
        self._units = csr_matrix((ones, columns, ends), shape=(len(bags), len(stems)))

    def similar(self, rows: np.ndarray, source: PreparedText, threshold: float) -> dict[int, list[Seed]]:
        """Unit pairs with a Dice coefficient above `threshold`, for those of the texts `rows` that have any.

        rows: distinct positions in the list of texts. The key is the text's position, the value its pairs (unit of that
        text, unit of `source`) in order.
        """
        counts = self._first[rows + 1] - self._first[rows]
        if not counts.sum() or not source.units:
            return {}
        offsets = np.cumsum(counts) - counts
        units = np.arange(counts.sum()) - np.repeat(offsets - self._first[rows], counts)
        shared = self._units[units] @ self._columns(source)
        sizes = self._sizes[units][:, None] + np.array([len(unit.bag) for unit in source.units])
        hits, theirs = np.nonzero(2.0 * shared / sizes > threshold)
        owners = np.repeat(rows, counts)[hits]
        ours = units[hits] - self._first[owners]
        found = zip(owners.tolist(), ours.tolist(), theirs.tolist(), strict=True)
        return {row: [(s, r) for _, s, r in group] for row, group in groupby(found, key=lambda hit: hit[0])}

    def _columns(self, source: PreparedText) -> np.ndarray:
        """The units of `source` as columns over this matrix's stems; stems that it lacks cannot be shared."""
        known = self._stems
        places = [(known[stem], r) for r, unit in enumerate(source.units) for stem in unit.bag if stem in known]
        columns = np.zeros((len(known), len(source.units)), dtype=np.float64)
        if places:
            columns[tuple(zip(*places, strict=True))] = 1
        return columns
