"""Figures of a partition: rows by split, groups by client, what pairs of clients have in common."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedmem.display.drawing import COLOURS, canvas, client_ticks, draw_heatmap, draw_scale, percent_words, styled
from fedmem.display.numbers import half_up

READABLE_GROUPS = 30  # beyond it not every group has its name


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
