"""One figure for each question: a tidy frame in, a Figure out, in one style that colour-blind readers can read.

Nothing is measured here and pyplot's global state is never touched: a notebook shows the Figure that it gets, and
`save` writes it with its data and its caption. Shares come in as 0 … 1 and are drawn in percent; what is undefined
(NaN) is drawn as "n/a", never as 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmem.figures import COLOURS, CONTROL, COUNTINGS, MEMBER, UNDEFINED, canvas, caption, counting_words, save, styled
from fedmem.idle_imports import without
from fedmem.rounding import half_up

__all__ = ["aggregates", "between_clients", "caption", "groups", "matrix", "save", "sizes"]

INTERVAL_CLIENTS = 8  # beyond it a cell of the matrix is too narrow for its interval
READABLE_GROUPS = 30  # beyond it not every group has its name
READABLE_CLIENTS = 12  # beyond it cells carry no numbers, lines no names, and not every client its label


@styled
def matrix(cells: pd.DataFrame, counting: str = "paper", top: float | None = None, run: str | None = None) -> Figure:
    """MR(j→k) in percent, and beside it, on the same scale, the control on held-out suffixes.

    cells: the table of `metrics.cells`. Each cell carries its share and its interval; above 8 clients its share
    alone, above 12 only colour. top: the share at which the colours end (default: the largest one here), the same for
    all matrices that stand beside each other. run: a name for the title, where several runs are drawn.
    Raises ValueError for a counting that is unknown or not in the table.
    """
    title = counting_words(counting).split(" (")[0]
    chosen = cells[cells["counting"] == counting]
    if chosen.empty:
        raise ValueError(f"counting = {counting!r}: cells has only {', '.join(sorted(set(cells['counting'])))}")
    sides = [("what clients trained on", True), ("control: held-out suffixes", False)]
    tables = {member: chosen[chosen["member"] == member] for _, member in sides}
    n_clients = chosen["prefix_client"].nunique()
    side = float(np.clip(0.95 * n_clients, 2.2, 4.6))
    figure = canvas(2 * side + 1.6, side + 0.9)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    # a scale of at least 1 % keeps a matrix of zeros from looking like one full of leaks
    top = max(1.0, 100 * np.nanmax([*chosen["ratio"], np.nan if top is None else top], initial=0))
    for (words, member), axis in zip(sides, axes, strict=True):
        table = tables[member]
        shares = _grid(table, "ratio")
        draw_heatmap(axis, 100 * shares, _cell_labels(table), top, "suffix client k", "prefix client j")
        axis.set_title(words)
        if n_clients > READABLE_CLIENTS:  # the diagonal between two thin lines: no numbers lead to it
            for shift in (0, 1):
                ends = np.array([0, n_clients - 1])
                axis.plot(ends + shift, ends + 1 - shift, color="#8c8c8c", linewidth=0.4)
    if tables[False]["ratio"].isna().all() and tables[True]["ratio"].notna().any():
        axes[1].set_title("control: there are no held-out texts")
    axes[1].set_ylabel("")
    draw_scale(figure, axes, "share of prefixes (%)", undefined=chosen["ratio"].isna().any())
    words = f"MR(j→k), {title}" if run is None else f"{run}: MR(j→k), {title}"
    figure.suptitle(fill(words, int(11 * figure.get_figwidth())), x=0.01, ha="left", fontsize=11)
    return figure


@styled
def aggregates(summary: pd.DataFrame, counting: str | None = None) -> Figure:
    """MR_intra, MR_inter and MR_total with intervals, each beside its held-out control.

    summary: the table of `metrics.summary`. With a column `run` (several runs, concatenated) there is a line for each
    run and one `counting` ("paper" unless said); without, a line for each counting.
    """
    by = "run" if "run" in summary.columns else "counting"
    if by == "run" or counting is not None:
        counting = counting or "paper"
        summary = summary[summary["counting"] == counting]
    lines = list(dict.fromkeys(summary[by]))
    if not lines:
        raise ValueError(f"counting = {counting!r}: summary has no such rows; allowed are {', '.join(COUNTINGS)}")
    figure = canvas(9, 1.3 + 0.34 * len(lines))
    axes = figure.subplots(1, 3, sharey=True)
    for axis, part in zip(axes, ("intra", "inter", "total"), strict=True):
        for name, colour, marker, offset in (("mr", MEMBER, "o", -0.13), ("control", CONTROL, "s", 0.13)):
            rows = summary[summary["metric"] == f"{name}_{part}"].set_index(by).reindex(lines)
            draw_intervals(axis, rows, offset, colour, marker, "trained on" if name == "mr" else "control: held-out")
        axis.set_title(f"MR_{part}")
        axis.set_xlabel("share of prefixes (%)")
        axis.set_xlim(left=0)
    axes[0].set_yticks(range(len(lines)), [str(line) for line in lines])
    axes[0].set_ylim(len(lines) - 0.5, -0.5)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower left", ncols=2)
    if by == "run":
        figure.suptitle(counting_words(counting).split(" (")[0], x=0.01, ha="left", fontsize=11)
    return figure


@styled
def sizes(sizes: pd.DataFrame) -> Figure:
    """Rows of each client by split (train, test, heldout). sizes: client, split, rows."""
    clients, splits = sorted(sizes["client"].unique()), list(dict.fromkeys(sizes["split"]))
    figure = canvas(float(np.clip(2.5 + 0.7 * len(clients), 4.5, 9)), 2.8)
    axis = figure.subplots()
    width = 0.8 / len(splits)
    for place, split in enumerate(splits):
        rows = sizes[sizes["split"] == split].groupby("client")["rows"].sum().reindex(clients, fill_value=0)
        offset = (place - (len(splits) - 1) / 2) * width
        colour = COLOURS[[0, 1, 7][place % 3]]
        axis.bar(np.arange(len(clients)) + offset, rows, width, color=colour, label=split, linewidth=0)
    axis.set_xticks(*client_ticks(clients, 0))
    axis.set(xlabel="client", ylabel="rows")
    axis.grid(axis="x", visible=False)
    figure.legend(loc="outside right upper")
    return figure


@styled
def groups(groups: pd.DataFrame) -> Figure:
    """How each client's rows divide among the corpus's groups, in percent of the client's rows.

    groups: client, group, rows (one line a pair that occurs). A pair without rows is 0.
    """
    counts = groups.pivot_table(index="group", columns="client", values="rows", aggfunc="sum", fill_value=0)
    shares = 100 * counts / counts.sum()
    n_groups, n_clients = shares.shape
    if n_groups > READABLE_GROUPS:  # by the client that has most of each, so that a pattern shows
        shares = shares.loc[shares.T.idxmax().sort_values(kind="stable").index]
    figure = canvas(float(np.clip(3.4 + 0.5 * n_clients, 4.5, 9)), float(np.clip(1.3 + 0.24 * n_groups, 2.2, 9)))
    axis = figure.subplots()
    words = shares.map(lambda share: f"{half_up(share, 0):.0f}").where(shares > 0, "")
    labels = words.to_numpy() if n_groups <= READABLE_GROUPS else None
    draw_heatmap(axis, shares, labels, 100.0, "client", "group")
    places = np.arange(0, n_groups, -(-n_groups // READABLE_GROUPS))
    axis.set_yticks(places + 0.5, [str(shares.index[place]) for place in places], rotation=0)
    draw_scale(figure, [axis], "share of the client's rows (%)", undefined=False)
    return figure


@styled
def between_clients(table: pd.DataFrame, value: str, words: str, percent: bool = False) -> Figure:
    """What each pair of clients has in common, a cell a pair.

    table: client, other, and a column `value` of 0 to 1, which `words` explain; drawn in percent on request.
    """
    grid = table.pivot(index="client", columns="other", values=value) * (100 if percent else 1)
    side = float(np.clip(0.75 * len(grid), 2.2, 5.5))
    figure = canvas(side + 1.9, side + 0.6)
    axis = figure.subplots()
    labels = grid.map(percent_words if percent else "{:.2f}".format).to_numpy()
    top = max(1.0, np.nanmax(grid, initial=0)) if percent else float(np.nanmax(grid, initial=0)) or 1.0
    draw_heatmap(axis, grid, labels, top, "other client", "client")
    draw_scale(figure, [axis], words, undefined=grid.isna().any(axis=None))
    return figure


def _grid(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.pivot(index="prefix_client", columns="suffix_client", values=column)


def _cell_labels(table: pd.DataFrame) -> np.ndarray:
    value, low, high = (100 * _grid(table, column).to_numpy() for column in ("ratio", "low", "high"))
    labels = np.empty(value.shape, dtype=object)
    for cell in np.ndindex(value.shape):
        interval = f"\n{percent_words(low[cell])}–{percent_words(high[cell])}" if len(value) <= INTERVAL_CLIENTS else ""
        labels[cell] = percent_words(value[cell]) + interval
    return labels


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
