"""What every figure has in common: the house style, its bytes, its caption, the three files that it is kept as.

This module does not know what a figure shows; `fedmem.plots` draws.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PNG_DPI = 130

COUNTINGS = {
    "paper": "paper counting (any kind of match)",
    "strict": "strict counting (verbatim, or a paraphrase whose best sentence pair is identical or scores above 0.5)",
    "verbatim": "verbatim counting",
}
# seaborn's "colorblind" palette, and below matplotlib's copy of its white grid; itself it is imported where it draws
COLOURS = ["#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"]
MEMBER, CONTROL, UNDEFINED = COLOURS[3], "#767676", "#e4e4e4"  # vermilion, and greys
_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "patch.edgecolor": "white",
    "patch.force_edgecolor": True,
    "figure.constrained_layout.use": True,
}
STYLES = ["default", "seaborn-v0_8-whitegrid", _STYLE]


class Picture(Figure):
    """A Figure that every notebook front end shows as it is saved, whatever plotting backend is set."""

    def _repr_png_(self) -> bytes:
        return png(self)


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the house style alone: neither the reader's settings nor the notebook's reach the figure."""

    @functools.wraps(draw)
    def in_style(*args, **kwargs) -> Figure:
        with style.context(STYLES):
            return draw(*args, **kwargs)

    return in_style


def caption(
    what: str,
    counting: str | None = None,
    n: int | pd.Series | None = None,
    confidence: float | None = None,
    method: str = "Wilson",
) -> str:
    """The text under a figure: what it shows, how matches are counted, how many prefixes, what its intervals mean.

    n: sampled prefixes behind a figure's point, or a column of such numbers (given as their range). confidence: the
    intervals' coverage, between 0 and 1; method: whose they are. Raises ValueError for an unknown counting.
    """
    parts = [what.rstrip()]
    if counting is not None:
        parts.append(counting_words(counting).capitalize() + ".")
    if n is not None:
        low, high = int(np.min(n)), int(np.max(n))
        parts.append(f"n = {low:,} sampled prefixes." if low == high else f"n = {low:,} to {high:,} sampled prefixes.")
    if confidence is not None:
        parts.append(
            f"Intervals: {100 * confidence:g} % ({method}). Intervals over prefixes hold for one trained model; "
            "how much training itself varies shows only between seeds."
        )
    return " ".join(parts)


def save(figure: Figure, data: pd.DataFrame, caption: str, folder: str | Path, name: str) -> Path:
    """Write `name`.png, `name`.csv (what is drawn) and `name`.txt (the caption) into `folder`; return the PNG's path.

    The same figure gives the same bytes: no date and no version is written into it.
    """
    if not name or name != Path(name).name:
        raise ValueError(f"name = {name!r}: a file name without folder and suffix is allowed, for example 'matrix'")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    path.write_bytes(png(figure))
    data.to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
    (folder / f"{name}.txt").write_text(caption.rstrip() + "\n", encoding="utf-8")
    return path


def canvas(width: float, height: float) -> Figure:
    figure = Picture(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with style.context(STYLES):
        figure.savefig(buffer, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return buffer.getvalue()


def counting_words(counting: str) -> str:
    if counting not in COUNTINGS:
        raise ValueError(f"counting = {counting!r}: allowed are {', '.join(COUNTINGS)}")
    return COUNTINGS[counting]
