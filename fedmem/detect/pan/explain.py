"""The steps of one alignment as tables, and both texts side by side with what matches marked.

For people who want to see why the detector decided as it did; nothing is decided here. Text is masked unless the caller
may show it. The tables' offsets and counts stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fedmem.config.yaml_files import read
from fedmem.detect.pan.alignment import Alignment, judge
from fedmem.detect.pan.cases import Case, find_cases
from fedmem.detect.pan.preparing import Prepared, PreparedText
from fedmem.detect.pan.seeding import Pair, Seed, dice, find_seeds, similar_units
from fedmem.detect.pan.settings import AlignmentSettings
from fedmem.display.private_text import masked, side_by_side
from fedmem.machine.paths import data_file


def example_texts() -> dict[str, str]:
    """Return the made-up texts of notebook 4: training_text, and the continuations copied, reworded and unrelated."""
    return read(data_file("detector_examples.yaml"))


@dataclass(frozen=True)
class Explanation:
    """The steps of one pair's alignment, in the detector's order; offsets are characters of the texts.

    sentences: side, sentence, start, end, text. units: side, unit, start, end (the detector's), words, text.
    seeds: suspicious_unit, source_unit, cosine, dice. cases: search (gap | summary_gap), first and last unit and first
    and last character on both sides, cosine. alignment: the result, as `align` returns it. html: the texts side by
    side, with the verdict as caption.
    """

    sentences: pd.DataFrame
    units: pd.DataFrame
    seeds: pd.DataFrame
    cases: pd.DataFrame
    alignment: Alignment
    html: str

    def _repr_html_(self) -> str:
        return self.html


def explain(
    suspicious: str, source: str, settings: AlignmentSettings | None = None, show_text: bool = False
) -> Explanation:
    """Align a suffix with a continuation, as `align` does, and return the steps.

    suspicious: the training suffix. source: the continuation. settings: the detector's settings (default: the study's).
    show_text: whether the tables and the HTML show the text (default: masked).
    Raises DetectorError when NLTK or its sentence model is not installed.
    """
    settings = settings or AlignmentSettings()
    prepared = Prepared(settings)
    pair = Pair(prepared.text(suspicious), prepared.text(source), settings)
    seeds = find_seeds(pair, similar_units(pair.suspicious.units, pair.source.units, settings.seed_dice))
    alignment = judge(pair, seeds, prepared)
    sides = (("suspicious", pair.suspicious), ("source", pair.source))
    return Explanation(
        pd.concat([_sentences(side, text, show_text) for side, text in sides], ignore_index=True),
        pd.concat([_units(side, text, show_text) for side, text in sides], ignore_index=True),
        _seeds(pair, seeds),
        _cases(pair, seeds),
        alignment,
        side_by_side(suspicious, source, alignment.places, show_text, caption=f"verdict: {alignment.kind}"),
    )


def _sentences(side: str, text: PreparedText, show_text: bool) -> pd.DataFrame:
    rows = [(side, i, *span, masked(text.text[slice(*span)], show_text)) for i, span in enumerate(text.sentences)]
    return pd.DataFrame(rows, columns=["side", "sentence", "start", "end", "text"])


def _units(side: str, text: PreparedText, show_text: bool) -> pd.DataFrame:
    rows = []
    for i, unit in enumerate(text.units):
        start, end = text.extent(i, i)  # the detector's extent, which may end too early (quirk Q2b)
        rows.append((side, i, start, end, sum(unit.bag.values()), masked(text.text[start:end], show_text)))
    return pd.DataFrame(rows, columns=["side", "unit", "start", "end", "words", "text"])


def _seeds(pair: Pair, seeds: list[Seed]) -> pd.DataFrame:
    suspicious, source = pair.suspicious.units, pair.source.units
    rows = [(s, r, pair.cosine(s, r), dice(suspicious[s].bag, source[r].bag)) for s, r in seeds]
    return pd.DataFrame(rows, columns=["suspicious_unit", "source_unit", "cosine", "dice"])


def _cases(pair: Pair, seeds: list[Seed]) -> pd.DataFrame:
    settings = pair.settings
    searches = {"gap": (settings.suspicious_gap, settings.source_gap)}
    if settings.find_summary:
        searches["summary_gap"] = (settings.summary_gap, settings.summary_gap)
    rows = [(name, *_case(pair, case)) for name, gaps in searches.items() for case in find_cases(pair, seeds, *gaps)]
    sides = [f"{side}_{end}" for side in ("suspicious", "source") for end in ("first", "last", "start", "end")]
    return pd.DataFrame(rows, columns=["search", *sides, "cosine"])


def _case(pair: Pair, case: Case) -> tuple:
    suspicious = (case.first_s, case.last_s)
    source = (case.first_r, case.last_r)
    extents = pair.suspicious.extent(*suspicious), pair.source.extent(*source)
    return *suspicious, *extents[0], *source, *extents[1], pair.fragment_cosine(*case)
