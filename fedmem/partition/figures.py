"""Figures of a partition: groups by client, what pairs of clients have in common."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedmem.display.drawing import canvas, draw_heatmap, draw_scale, percent_words, styled
from fedmem.display.numbers import half_up

READABLE_GROUPS = 30  # above it, not every group is labelled


@styled
def groups(groups: pd.DataFrame) -> Figure:
    """The shares of the corpus's groups in each client's rows, in percent of the client's rows.

    groups: client, group, rows; one line for each pair that occurs. A missing pair is drawn as 0.
    """
    counts = groups.pivot_table(index="group", columns="client", values="rows", aggfunc="sum", fill_value=0)
    shares = 100 * counts / counts.sum()
    n_groups, n_clients = shares.shape
    if n_groups > READABLE_GROUPS:  # ordered by the client that has most of each group, which makes a pattern visible
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
    """A value for each pair of clients, such as the share of common texts, one cell for each pair.

    table: client, other, and the column named by `value`, in 0 … 1. value: that column's name.
    words: the label of the colour scale. percent: True draws percent, False the value itself.
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
