"""What a detector is: an object with a name that compares blocks of text pairs; and the one of the study.

`find_matches` hands the candidate pairs to a detector in blocks, in one or more processes, and makes the table of
matches from the alignments. Another detector is another class here (or in a package of its own, as `pan`) with the two
members of `Detector`; notebook 4 passes it to `find_matches`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from fedmem.detect.pan.alignment import Alignment, align_prepared
from fedmem.detect.pan.preparing import Prepared
from fedmem.detect.pan.seeding import UnitMatrix
from fedmem.detect.pan.settings import AlignmentSettings

# The texts of a block; together with the previous block's suffixes they bound what a comparer keeps.
CONTINUATIONS_AT_ONCE = 2048
SUFFIXES_AT_ONCE = 1024

Found = tuple[int, Alignment]  # (row of the candidate, its alignment: kind, detections, places)


class Block(NamedTuple):
    """Pairs of a few texts: pair i is continuations[c[i]] with suffixes[s[i]], row number[i] of the candidates."""

    continuations: list[str]
    suffixes: list[str]
    c: np.ndarray
    s: np.ndarray
    number: np.ndarray


class Detector(Protocol):
    """A detector, as `find_matches` uses it; it is sent to spawned processes, so it must be picklable."""

    name: str

    def comparer(self) -> Callable[[Block], list[Found]]:
        """Return a function that compares the pairs of a block and returns those with a detection.

        It is made once for each process and may keep prepared texts from block to block.
        """


@dataclass(frozen=True)
class PanDetector:
    """The PAN text-alignment detector of `fedmem.detect.pan`; it compares only pairs that share enough stems."""

    settings: AlignmentSettings = field(default_factory=AlignmentSettings)
    name: ClassVar[str] = "PAN"

    def comparer(self) -> Callable[[Block], list[Found]]:
        """Return a function that compares the pairs of a block, and keeps a cache of prepared texts."""
        prepared = Prepared(self.settings, capacity=CONTINUATIONS_AT_ONCE + 2 * SUFFIXES_AT_ONCE)
        return lambda block: _aligned(block, prepared)


def _aligned(block: Block, prepared: Prepared) -> list[Found]:
    suffixes = [prepared.text(text) for text in block.suffixes]
    matrix, threshold = UnitMatrix(suffixes), prepared.settings.seed_dice
    found = []
    for pairs in by_value(block.c):
        source = prepared.text(block.continuations[block.c[pairs[0]]])
        similar = matrix.similar(np.unique(block.s[pairs]), source, threshold)
        for pair in pairs if similar else ():
            s = int(block.s[pair])
            if s in similar:
                alignment = align_prepared(suffixes[s], source, prepared, similar[s])
                if alignment.detections:
                    found.append((int(block.number[pair]), alignment))
    return found


def by_value(values: np.ndarray) -> list[np.ndarray]:
    """The positions of each distinct value, in ascending order of the values."""
    if not len(values):
        return []
    order = np.argsort(values, kind="stable")  # stable: positions of equal values stay in order
    return np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
