"""Decides whether one text reproduces another: the PAN text-alignment detector, including its settings and quirks.

The method is that of Sanchez-Perez, Gelbukh and Sidorov (CLEF 2014, CLEF 2015), as adapted by Lee et al. (WWW 2023) to
text written by language models; their code is called the reference. Its quirks affect verdicts and are kept. Each has a
number from Q1 to Q24 in a comment at the place where it applies. Three have no counterpart in this code: a second run
on the same object gives another result (Q11; here settings are never written), defaults are shared between calls (Q13),
and two branches are unreachable (Q22).
The comparison is not symmetric: the suspicious text is the training suffix, the source is the continuation.
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
SUMMARY_FACTOR = 3  # the source side of a summary is at least this many times as long as its suspicious side


@dataclass(frozen=True, slots=True)
class Alignment:
    """The passages of one text that another text reproduces.

    detections: ((start, end) in the suspicious text, (start, end) in the source), in the detector's order and with
      the detector's offsets.
    places: the same with offsets of the original texts. They differ only after letters such as İ, whose lower case is
      longer (Q20).
    verbatim, summary: whether the detections are verbatim runs or a summary; at most one is True.
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
    """Align a training suffix with a continuation and return the Alignment.

    suspicious: the training suffix, any string. source: the continuation, any string.
    settings: the detector's settings (default: those of the federated-learning study).

    Nothing is cached between calls. For many pairs of the same texts use `find_matches`, which prepares a text once.
    Raises DetectorError when NLTK or its sentence model is not installed.
    """
    prepared = Prepared(settings or AlignmentSettings())
    return align_prepared(prepared.text(suspicious), prepared.text(source), prepared)


def align_prepared(
    suspicious: PreparedText, source: PreparedText, prepared: Prepared, similar: Sequence[Seed] | None = None
) -> Alignment:
    """Align two prepared texts and return the Alignment.

    suspicious, source: the prepared suffix and the prepared continuation.
    prepared: the settings and the cache of fragments' words.
    similar: the unit pairs above the Dice threshold, if they are known already (see `screening`); None computes them.
    """
    settings = prepared.settings
    if similar is None:
        similar = similar_units(suspicious.units, source.units, settings.seed_dice)
    pair = Pair(suspicious, source, settings)
    seeds = find_seeds(pair, similar)
    return judge(pair, seeds, prepared) if seeds else NOTHING


def judge(pair: Pair, seeds: list[Seed], prepared: Prepared) -> Alignment:
    """The alignment of a pair from its seeds: verbatim runs if any, else a summary, else the plain cases.

    pair: the two texts with their settings. seeds: unit pairs, at least one. prepared: the cache of fragments' words.
    """
    settings = pair.settings
    cases = find_cases(pair, seeds, settings.suspicious_gap, settings.source_gap)
    if settings.find_verbatim:
        detections, places = _verbatim(pair, cases, prepared)
        if detections:  # quirk Q14: cases without a run are dropped as soon as one case has a run
            return Alignment(detections, places, verbatim=True)
    extents = [_extents(pair, case) for case in cases]
    if settings.find_summary:
        # quirk Q5: the source's summary gap is used for both sides
        wide = [_extents(pair, c) for c in find_cases(pair, seeds, settings.summary_gap, settings.summary_gap)]
        if _is_summary(wide):
            return Alignment(wide, wide, summary=True)
    return Alignment(extents, extents)


def _extents(pair: Pair, case: Case) -> Detection:
    return pair.suspicious.extent(case.first_s, case.last_s), pair.source.extent(case.first_r, case.last_r)


def _verbatim(pair: Pair, cases: list[Case], prepared: Prepared) -> tuple[list[Detection], list[Detection]]:
    detections, places = [], []
    for case in cases:
        suspicious, source = _extents(pair, case)  # runs are searched within a case, so none crosses its border
        # quirk Q21: these are the original texts, whereas the bags were made with a space in place of each U+0000
        words = prepared.words(pair.suspicious.text[slice(*suspicious)])
        others = prepared.words(pair.source.text[slice(*source)])
        for run in common_runs(words, others, pair.settings.min_verbatim_chars):
            detections.append((_moved(run.suspicious, suspicious[0]), _moved(run.source, source[0])))
            places.append((_moved(run.suspicious_original, suspicious[0]), _moved(run.source_original, source[0])))
    return detections, places


def _is_summary(detections: list[Detection]) -> bool:
    """Quirk Q10: only a longer source counts as a summary, not a longer suspicious text."""
    suspicious = sum(end - start for (start, end), _ in detections)
    source = sum(end - start for _, (start, end) in detections)
    return source != 0 and source >= SUMMARY_FACTOR * suspicious


def _moved(span: Span, offset: int) -> Span:
    return span[0] + offset, span[1] + offset
