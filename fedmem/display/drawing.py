"""What every figure has in common: the house style, its bytes, its caption, and the parts that several figures draw.

Shares come in as 0 … 1 and are drawn in percent; what is undefined (NaN) is drawn as "n/a", never as 0. pyplot's global
state is never touched. What a figure shows is decided in the package whose tables it draws.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedmem.display.numbers import half_up
from fedmem.machine.idle_imports import without

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


def save_figure(figure: Figure, data: pd.DataFrame, caption: str, folder: str | Path, name: str) -> Path:
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


READABLE_CLIENTS = 12  # beyond it cells carry no numbers, lines no names, and not every client its label


def percent_words(value: float) -> str:
    digits = 0 if value == 0 or value >= 10 else 1 if value >= 1 else 2
    return f"{half_up(value, digits):.{digits}f}"


def draw_heatmap(axis: Axes, percent: pd.DataFrame, labels: np.ndarray | None, top: float, x: str, y: str) -> None:
    """Colours from 0 to `top` with `labels` in the cells; what is NaN is grey and says n/a."""
    readable = labels is not None and percent.shape[1] <= READABLE_CLIENTS
    size = 9 if percent.shape[1] <= 6 else 6
    look = {"cmap": "rocket_r", "linewidths": 0.5 if readable else 0, "cbar": False}
    look |= {"annot": labels, "fmt": "", "annot_kws": {"fontsize": size}} if readable else {}
    _heatmap()(percent, ax=axis, vmin=0, vmax=top, xticklabels=False, yticklabels=False, **look)
    axis.set_facecolor(UNDEFINED)
    axis.grid(False)
    if readable:
        for row, column in np.argwhere(percent.isna().to_numpy()):
            axis.text(column + 0.5, row + 0.5, "n/a", ha="center", va="center", color="#555555", fontsize=size)
    axis.set_xticks(*client_ticks(list(percent.columns), 0.5))
    axis.set_yticks(*client_ticks(list(percent.index), 0.5))
    axis.set(xlabel=x, ylabel=y)


@cache
def _heatmap() -> Callable:
    """seaborn's heatmap, without the second that scipy.stats takes; whoever imports seaborn later gets it whole."""
    if "seaborn" in sys.modules:
        return sys.modules["seaborn"].heatmap
    with without("scipy.stats"):
        from seaborn import heatmap
    for name in [name for name in sys.modules if name.partition(".")[0] == "seaborn"]:
        del sys.modules[name]
    return heatmap


def draw_scale(figure: Figure, axes, words: str, undefined: bool) -> None:
    """One colour bar for all `axes`."""
    bar = figure.colorbar(axes[0].collections[0], ax=list(axes), shrink=0.85, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(words + ("\ngrey: undefined (n/a)" if undefined else ""))


def client_ticks(clients: list, shift: float) -> tuple[np.ndarray, list[str]]:
    """Places and names of at most about a dozen ticks."""
    step = -(-len(clients) // READABLE_CLIENTS)
    places = np.arange(0, len(clients), step)
    return places + shift, [str(clients[place]) for place in places]


def draw_intervals(axis: Axes, rows: pd.DataFrame, offset: float, colour: str, marker: str, label: str) -> None:
    """Points with intervals, a line of the axis for each row; rows: value, low, high."""
    values, places = 100 * rows["value"].to_numpy(float), np.arange(len(rows)) + offset
    errors = np.abs(100 * rows[["low", "high"]].to_numpy(float).T - values)
    axis.errorbar(
        values, places, xerr=errors, fmt=marker, color=colour, markersize=4.5, capsize=2.5, label=label, clip_on=False
    )
    for place in places[np.isnan(values)]:
        # beside the axis' left edge, wherever the values end
        axis.text(0.02, place, "n/a", transform=axis.get_yaxis_transform(), va="center", color=colour, fontsize=8)
