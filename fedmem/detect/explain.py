"""The steps of one alignment as tables, and both texts side by side with what matches marked.

For people who want to see why the detector decided as it did; nothing is decided here. Text is masked unless the caller
may show it: the blocks are the same for every text. The tables' offsets and counts stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import pandas as pd

from fedmem.detect.alignment import Alignment, Detection, judge
from fedmem.detect.cases import Case, find_cases
from fedmem.detect.preparing import Prepared, PreparedText
from fedmem.detect.seeding import Pair, Seed, dice, find_seeds, similar_units
from fedmem.detect.settings import AlignmentSettings
from fedmem.detect.splitting import Span

MASK = "█████"
_MARKS = ("#ffe08a", "#b5e3b5", "#b9d7f5", "#f5c2d8", "#d9c7f0")
_CELL = "vertical-align:top; text-align:left; white-space:pre-wrap; width:50%; padding:0.5em"


@dataclass(frozen=True)
class Explanation:
    """One pair's steps, in the detector's order; offsets are characters of the texts.

    sentences: side, sentence, start, end, text. units: side, unit, start, end (the detector's), words, text.
    seeds: suspicious_unit, source_unit, cosine, dice. cases: search (gap | summary_gap), first and last unit and first
    and last character on both sides, cosine. html: the texts side by side, the verdict as caption.
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
    """Align a suffix with a continuation, as `align` does, and keep the steps; text is masked unless `show_text`."""
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


def side_by_side(
    suspicious: str, source: str, places: Sequence[Detection], show_text: bool = False, caption: str = ""
) -> str:
    """HTML table of two texts with the `places` of detections marked, each detection in one colour on both sides.

    Text is escaped, or masked where `show_text` is False; what is marked stays visible as marked blocks.
    """
    cells = (
        _marked(suspicious, [span for span, _ in places], show_text),
        _marked(source, [span for _, span in places], show_text),
    )
    row = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
    head = "<tr><th>suffix of the training text</th><th>continuation by the model</th></tr>"
    return f'<table style="width:100%"><caption>{escape(caption)}</caption>{head}<tr>{row}</tr></table>'


def masked(text: str, show_text: bool) -> str:
    """The text itself, or blocks that are the same for every text."""
    return text if show_text else MASK


def _marked(text: str, spans: list[Span], show_text: bool) -> str:
    cuts = sorted({0, len(text), *(cut for span in spans for cut in span)})
    parts = []
    for start, end in pairwise(cuts):
        content = escape(masked(text[start:end], show_text))
        inside = [i for i, span in enumerate(spans) if span[0] <= start and end <= span[1]]
        if inside:  # where detections overlap, the first one's colour shows
            title = "detection " + ", ".join(str(i) for i in inside)
            content = f'<mark style="background:{_MARKS[inside[0] % len(_MARKS)]}" title="{title}">{content}</mark>'
        parts.append(content)
    return ("" if show_text else " ").join(parts)


def _sentences(side: str, text: PreparedText, show_text: bool) -> pd.DataFrame:
    rows = [(side, i, *span, masked(text.text[slice(*span)], show_text)) for i, span in enumerate(text.sentences)]
    return pd.DataFrame(rows, columns=["side", "sentence", "start", "end", "text"])


def _units(side: str, text: PreparedText, show_text: bool) -> pd.DataFrame:
    rows = []
    for i, unit in enumerate(text.units):
        start, end = text.extent(i, i)
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
