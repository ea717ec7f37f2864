"""The rule by which private text is shown at all, and texts side by side with what they share marked.

Executed notebooks are shared. So text is shown only when it is synthetic or FEDMEM_SHOW_TEXT=1 is set; otherwise it is
masked by blocks that keep nothing of it, not even its length. Everything is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from itertools import pairwise

import pandas as pd

# The columns that can hold private text. `examples` masks these and no others.
TEXT_COLUMNS = ("instruction", "input", "output", "prefix", "suffix", "continuation", "words")


def may_show(corpus: str) -> bool:
    """Whether the texts of a corpus (`synthetic` or another source) may be shown in a notebook."""
    return corpus == "synthetic" or os.environ.get("FEDMEM_SHOW_TEXT") == "1"


def examples(frame: pd.DataFrame, show: bool, n: int = 3, chars: int = 240) -> pd.DataFrame:
    """The first rows of a table, with long texts cut, and masked unless `show`.

    frame: any table; only its columns in TEXT_COLUMNS are changed.
    show: True shows the text, False masks it (see `may_show`).
    n: number of rows, ≥ 0. chars: length in characters at which a shown text is cut.
    """

    def shown(text):
        if not isinstance(text, str) or not text:  # a missing or empty value reveals nothing
            return text
        return masked(text if len(text) <= chars else text[:chars] + " …", show)

    texts = [name for name in TEXT_COLUMNS if name in frame]
    return frame.head(n).assign(**{name: frame[name].head(n).map(shown) for name in texts})


class Page:
    """HTML that a notebook displays unchanged."""

    def __init__(self, markup: str):
        self.markup = markup

    def _repr_html_(self) -> str:
        return self.markup


Span = tuple[int, int]  # characters of a text: start, end

MASK = "█████"  # the same for every text: a mask of the text's own length would reveal that length

_MARKS = ("#ffe08a", "#b5e3b5", "#b9d7f5", "#f5c2d8", "#d9c7f0")

# pre-wrap, because the offsets count spaces and line breaks that HTML would merge
_CELL = "vertical-align:top; text-align:left; white-space:pre-wrap; width:50%; padding:0.5em"


def side_by_side(
    suspicious: str, source: str, places: Sequence[tuple[Span, Span]], show_text: bool = False, caption: str = ""
) -> str:
    """An HTML table of two texts in which each detection is marked in one colour on both sides.

    suspicious: the training suffix, left. source: the continuation, right.
    places: the detections, as `Alignment.places` has them.
    show_text: True shows the escaped text; False shows masks, on which the marks stay visible.
    caption: plain text above the table.
    """
    cells = (
        _marked(suspicious, [span for span, _ in places], show_text),
        _marked(source, [span for _, span in places], show_text),
    )
    row = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
    head = "<tr><th>suffix of the training text</th><th>continuation by the model</th></tr>"
    return f'<table style="width:100%"><caption>{escape(caption)}</caption>{head}<tr>{row}</tr></table>'


def masked(text: str, show_text: bool) -> str:
    """The text itself if `show_text`, otherwise the mask."""
    return text if show_text else MASK


def _marked(text: str, spans: list[Span], show_text: bool) -> str:
    # Cut at every end of a span: overlapping spans cannot be nested as HTML elements.
    cuts = sorted({0, len(text), *(cut for span in spans for cut in span)})
    parts = []
    for start, end in pairwise(cuts):
        content = escape(masked(text[start:end], show_text))
        inside = [i for i, span in enumerate(spans) if span[0] <= start and end <= span[1]]
        if inside:  # where detections overlap, the colour is that of the first
            title = "detection " + ", ".join(str(i) for i in inside)
            content = f'<mark style="background:{_MARKS[inside[0] % len(_MARKS)]}" title="{title}">{content}</mark>'
        parts.append(content)
    return ("" if show_text else " ").join(parts)
