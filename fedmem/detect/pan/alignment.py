"""Decides whether one text reproduces another: the PAN text-alignment detector, settings and quirks included.

Sanchez-Perez, Gelbukh and Sidorov (CLEF 2014, CLEF 2015), as adapted for text that language models write by Lee et al.
(WWW 2023), here called the reference. Its quirks decide verdicts and are kept; each is a comment with its number, from
Q1 to Q24, at the place where it acts. Three leave no trace here: a second run on the same object would differ (Q11,
settings are never written here), defaults shared between calls (Q13), and two branches that cannot be reached (Q22).
Not symmetric: the suspicious text is the training suffix, the source is the continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedmem.detect.pan.cases import Case, find_cases
from fedmem.detect.pan.preparing import Prepared, PreparedText
from fedmem.detect.pan.seeding import Pair, Seed, find_seeds, similar_units
from fedmem.detect.pan.settings import AlignmentSettings
from fedmem.detect.pan.splitting import Span
from fedmem.detect.pan.verbatim import common_runs

Detection = tuple[Span, Span]
SUMMARY_FACTOR = 3  # a summary's source side is at least so many times as long


@dataclass(frozen=True, slots=True)
class Alignment:
    """What one text has of another.

    detections: ((start, end) in the suspicious text, (start, end) in the source), in the detector's order and with
      the detector's offsets.
    places: the same on the original texts; different only after letters such as İ, whose lower case is longer (Q20).
    verbatim, summary: what the detections are, if one of the two; at most one is True.
    """

    detections: list[Detection]
    places: list[Detection]
    verbatim: bool = False
    summary: bool = False

    @property
    def kind(self) -> Literal["none", "verbatim", "idea", "paraphrase"]:
        """The verdict; "paraphrase" is a candidate that `type_candidates` has still to judge."""
        if self.verbatim:
            return "verbatim"
        if self.summary:
            return "idea"
        return "paraphrase" if self.detections else "none"


NOTHING = Alignment([], [])


def align(suspicious: str, source: str, settings: AlignmentSettings | None = None) -> Alignment:
    """Align a training suffix (`suspicious`) with a continuation (`source`).

    Any two strings do; no text of the pair is kept. For many pairs of the same texts use `find_matches`.
    """
    prepared = Prepared(settings or AlignmentSettings())
    return align_prepared(prepared.text(suspicious), prepared.text(source), prepared)


def align_prepared(
    suspicious: PreparedText, source: PreparedText, prepared: Prepared, similar: Sequence[Seed] | None = None
) -> Alignment:
    """Align two prepared texts.

    prepared: holds the settings and the fragments' words.
    similar: the unit pairs above the Dice threshold where they are known already (see `screening`).
    """
    settings = prepared.settings
    if similar is None:
        similar = similar_units(suspicious.units, source.units, settings.seed_dice)
    pair = Pair(suspicious, source, settings)
    seeds = find_seeds(pair, similar)
    return judge(pair, seeds, prepared) if seeds else NOTHING


def judge(pair: Pair, seeds: list[Seed], prepared: Prepared) -> Alignment:
    """Verdict on a pair from its seeds: verbatim runs before a summary before whatever cases there are."""
    settings = pair.settings
    cases = find_cases(pair, seeds, settings.suspicious_gap, settings.source_gap)
    if settings.find_verbatim:
        detections, places = _verbatim(pair, cases, prepared)
        if detections:  # quirk Q14: cases without a run vanish as soon as one case has one
            return Alignment(detections, places, verbatim=True)
    extents = [_extents(pair, case) for case in cases]
    if settings.find_summary:
        # quirk Q5: the summary gap of the source serves both sides
        wide = [_extents(pair, c) for c in find_cases(pair, seeds, settings.summary_gap, settings.summary_gap)]
        if _is_summary(wide):
            return Alignment(wide, wide, summary=True)
    return Alignment(extents, extents)


def _extents(pair: Pair, case: Case) -> Detection:
    return pair.suspicious.extent(case.first_s, case.last_s), pair.source.extent(case.first_r, case.last_r)


def _verbatim(pair: Pair, cases: list[Case], prepared: Prepared) -> tuple[list[Detection], list[Detection]]:
    detections, places = [], []
    for case in cases:
        suspicious, source = _extents(pair, case)
        # quirk Q21: the texts as they are, while the bags saw a space in place of each U+0000
        words = prepared.words(pair.suspicious.text[slice(*suspicious)])
        others = prepared.words(pair.source.text[slice(*source)])
        for run in common_runs(words, others, pair.settings.min_verbatim_chars):
            detections.append((_moved(run.suspicious, suspicious[0]), _moved(run.source, source[0])))
            places.append((_moved(run.suspicious_original, suspicious[0]), _moved(run.source_original, source[0])))
    return detections, places


def _is_summary(detections: list[Detection]) -> bool:
    """Quirk Q10: only a source longer than the suspicious text counts, never the other way round."""
    suspicious = sum(end - start for (start, end), _ in detections)
    source = sum(end - start for _, (start, end) in detections)
    return source != 0 and source >= SUMMARY_FACTOR * suspicious


def _moved(span: Span, offset: int) -> Span:
    return span[0] + offset, span[1] + offset
