"""What every figure has in common: the house style, its bytes, its caption, and the parts that several figures draw.

Shares come in as 0 … 1 and are drawn in percent; what is undefined (NaN) is drawn as "n/a", never as 0. pyplot's global
state is never touched. What a figure shows is decided in the package whose tables it draws.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedmem.config.vocabulary import COUNTINGS
from fedmem.display.numbers import half_up
from fedmem.machine.paths import data_file

PNG_DPI = 130

_STRICT = "strict counting (verbatim, or a paraphrase whose best sentence pair is identical or scores above 0.5)"

COUNTING_WORDS = dict(zip(COUNTINGS, ("paper counting (any kind of match)", _STRICT, "verbatim counting"), strict=True))

# seaborn's "colorblind" palette, and in STYLES matplotlib's copy of its white grid: seaborn is imported only to draw
COLOURS = ["#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"]

MEMBER, CONTROL, UNDEFINED = COLOURS[3], "#767676", "#e4e4e4"  # vermilion, and two greys

STYLES = ["default", "seaborn-v0_8-whitegrid", data_file("figures.mplstyle")]


class Picture(Figure):
    """A Figure that every notebook front end displays exactly as it is saved, whatever plotting backend is set."""

    # IPython calls this by name; without it, a display depends on the backend and its resolution
    def _repr_png_(self) -> bytes:
        return png(self)


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a drawing function to use the package's style only, whatever the user's or the notebook's settings."""

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
    """Build the caption of a figure: content, counting of matches, number of prefixes, and meaning of the intervals.

    what: sentences about the content.
    counting: a key of COUNTINGS; None: not mentioned.
    n: number of sampled prefixes behind a point of the figure, or a column of such numbers, shown as their range.
    confidence: coverage of the intervals, between 0 and 1; None: the figure has no intervals.
    method: name of the interval.

    Raises ValueError when counting is unknown.
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
    """Write a figure as `name`.png, `name`.csv (the data) and `name`.txt (the caption); return the path of the PNG.

    figure: a matplotlib Figure; equal figures give equal bytes.
    data: the plotted values.
    caption: the text under the figure.
    folder: created if missing; existing files are replaced.
    name: file name without folder and suffix.

    Raises ValueError when name contains a folder or is empty.
    """
    if not name or name != Path(name).name:
        raise ValueError(f"name: got {name!r}; expected a file name without folder and suffix, for example 'matrix'")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    path.write_bytes(png(figure))
    data.to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
    (folder / f"{name}.txt").write_text(caption.rstrip() + "\n", encoding="utf-8")
    return path


def show_figure(
    folder: str | Path, figure: Figure, data: pd.DataFrame, name: str, about: str, *, remark="", visible=True, **words
) -> None:
    """Save a figure with its data and caption, and display it in a notebook with the caption below.

    folder, name: as in `save_figure`.
    figure: a matplotlib Figure.
    data: the plotted values.
    about: sentences about the content.
    remark: a sentence after the caption, which concerns the runs and not the figure.
    visible: False saves the figure without displaying it: one of many.
    words: counting, n, confidence, method, as in `caption`.

    Raises ValueError as `caption` and `save_figure` do.
    """
    from IPython.display import Markdown, display  # only notebooks display

    text = f"{caption(about, **words)} {remark}".strip()
    save_figure(figure, data, text, folder, name)
    if visible:
        display(figure, Markdown(f"*{text}*"))


def canvas(width: float, height: float) -> Figure:
    """Create an empty Figure of `width` × `height` inches, drawn by Agg whatever backend is set."""
    figure = Picture(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """Return the bytes of a figure's PNG file in the package's style."""
    buffer = io.BytesIO()
    with style.context(STYLES):
        # no version of matplotlib in the file: equal figures have equal bytes
        figure.savefig(buffer, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return buffer.getvalue()


def counting_words(counting: str) -> str:
    """Return the description of a counting; raises ValueError when it is unknown."""
    if counting not in COUNTINGS:
        raise ValueError(f"counting: got {counting!r}; expected one of {', '.join(COUNTINGS)}")
    return COUNTING_WORDS[counting]


READABLE_CLIENTS = 12  # above it, cells have no numbers, lines have no names, and not every client is labelled


def percent_words(value: float) -> str:
    """A value in percent with about two significant digits."""
    digits = 0 if value == 0 or value >= 10 else 1 if value >= 1 else 2
    return f"{half_up(value, digits):.{digits}f}"


def draw_heatmap(axis: Axes, percent: pd.DataFrame, labels: np.ndarray | None, top: float, x: str, y: str) -> None:
    """Draw a heatmap with colours from 0 to `top`; cells that are NaN are grey and labelled "n/a".

    axis: the axes to draw on. percent: the values, one cell for each row and column, usually in percent.
    labels: strings of the same shape; None: no labels. Above READABLE_CLIENTS columns there are none either.
    top: the value at which the colours end, > 0. x, y: the labels of the axes.
    """
    import seaborn  # here, because it takes half a second and most figures have no heatmap

    readable = labels is not None and percent.shape[1] <= READABLE_CLIENTS
    size = 9 if percent.shape[1] <= 6 else 6
    look = {"cmap": "rocket_r", "linewidths": 0.5 if readable else 0, "cbar": False}
    look |= {"annot": labels, "fmt": "", "annot_kws": {"fontsize": size}} if readable else {}
    # seaborn's own ticks are off: they would label every client, however many there are
    seaborn.heatmap(percent, ax=axis, vmin=0, vmax=top, xticklabels=False, yticklabels=False, **look)
    axis.set_facecolor(UNDEFINED)
    axis.grid(False)
    if readable:
        for row, column in np.argwhere(percent.isna().to_numpy()):
            axis.text(column + 0.5, row + 0.5, "n/a", ha="center", va="center", color="#555555", fontsize=size)
    axis.set_xticks(*client_ticks(list(percent.columns), 0.5))
    axis.set_yticks(*client_ticks(list(percent.index), 0.5))
    axis.set(xlabel=x, ylabel=y)


def draw_scale(figure: Figure, axes, words: str, undefined: bool) -> None:
    """Draw one colour bar for several heatmaps.

    figure: the figure. axes: its heatmaps' axes; the first one's colours are shown. words: the label of the bar.
    undefined: True adds to the label that grey cells are undefined.
    """
    bar = figure.colorbar(axes[0].collections[0], ax=list(axes), shrink=0.85, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(words + ("\ngrey: undefined (n/a)" if undefined else ""))


def client_ticks(clients: list, shift: float) -> tuple[np.ndarray, list[str]]:
    """The positions and labels of at most READABLE_CLIENTS ticks.

    clients: the clients in the order of the axis. shift: added to each position; 0.5 is the middle of a heatmap's cell.
    """
    step = -(-len(clients) // READABLE_CLIENTS)
    places = np.arange(0, len(clients), step)
    return places + shift, [str(clients[place]) for place in places]


def draw_intervals(axis: Axes, rows: pd.DataFrame, offset: float, colour: str, marker: str, label: str) -> None:
    """Draw points with intervals, one line of the axis for each row.

    axis: the axes to draw on. rows: value, low, high, in 0 … 1; NaN is drawn as "n/a".
    offset: vertical shift of the points in lines, so that two series do not overlap.
    colour, marker: matplotlib's colour and marker of the points. label: the entry of the legend.
    """
    values, places = 100 * rows["value"].to_numpy(float), np.arange(len(rows)) + offset
    errors = np.abs(100 * rows[["low", "high"]].to_numpy(float).T - values)
    # clip_on=False: a point at 0 would otherwise be cut in half by the axis
    axis.errorbar(
        values, places, xerr=errors, fmt=marker, color=colour, markersize=4.5, capsize=2.5, label=label, clip_on=False
    )
    for place in places[np.isnan(values)]:
        # at the left edge of the axes, whatever the range of the values
        axis.text(0.02, place, "n/a", transform=axis.get_yaxis_transform(), va="center", color=colour, fontsize=8)
