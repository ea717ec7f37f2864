"""Figures of one training: learning curves by round, perplexity and utility of each client before and after training.

As in `fedmem.analyze.figures`, each function takes a tidy frame and returns a Figure. Shares in 0 … 1 are drawn
in percent and undefined values as "n/a".
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedmem.config.vocabulary import POOLED
from fedmem.display.drawing import COLOURS, READABLE_CLIENTS, canvas, client_ticks, styled

CURVES = {
    "train_loss": "training loss\n(nats per token)",
    "test_loss": "test loss, after the round\n(nats per token)",
    "penalty": "proximal penalty",
    "drift": "drift ‖w − w_t‖",
}
SPLIT_LOOK = {"train": (COLOURS[0], "o", "training rows"), "test": (COLOURS[1], "s", "test rows")}
SPLIT_LOOK |= {"heldout": (COLOURS[7], "D", "held-out rows")}
UTILITY_WORDS = {"rouge_l": "ROUGE-L F1 (%)", "accuracy": "accuracy (%)", "macro_f1": "macro-F1 (%)"}
UTILITY_COLOUR = COLOURS[2]


@styled
def learning_curves(curves: pd.DataFrame) -> Figure:
    """Each measure of a training by round, with a line for each client.

    curves: columns round, client, metric, value. Client −1 is the data of all clients together (a central model, or the
    pooled test). More than 12 clients are drawn as thin grey lines with their mean. If there are no curves, the figure
    contains a sentence that says so.
    """
    if curves.empty:  # an untrained model without test rows
        figure = canvas(4.5, 0.6)
        figure.text(0.01, 0.5, "nothing was trained, and there are no rows to test on", va="center")
        return figure
    if not curves.loc[curves["metric"] == "penalty", "value"].any():  # no proximal term: the panel would be empty
        curves = curves[curves["metric"] != "penalty"]
    measures = [name for name in CURVES if (curves["metric"] == name).any()]
    measures += sorted(set(curves["metric"]) - set(measures))
    columns = len(measures) if len(measures) <= 3 else 2  # four measures make two rows of two panels
    lines = -(-len(measures) // columns)
    figure = canvas((3.4 if columns <= 2 else 2.7) * columns + 1.2, 2.6 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, measure in zip(axes, measures, strict=False):
        _curve(axis, curves[curves["metric"] == measure])
        axis.set_ylabel(CURVES.get(measure, measure))
        axis.set_xlabel("round")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axis in axes[len(measures) :]:
        axis.remove()
    labelled = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        labelled.update(zip(labels, handles, strict=True))
    figure.legend(labelled.values(), labelled, loc="outside right upper")
    return figure


@styled
def perplexity(table: pd.DataFrame) -> Figure:
    """Perplexity of each split's rows before (open marks) and after training (filled marks), on a log scale.

    table: the table of `utility.with_weighted_means`. Its first and its last round are drawn, the clients' mean at the
    right. The factor below each client is the perplexity of held-out rows ÷ that of training rows after the last round:
    above 1, the model predicts the rows that it was trained on better.
    """
    table = table[table["metric"] == "perplexity"]
    columns = _columns(table)
    figure = canvas(float(np.clip(2.6 + 1.1 * len(columns), 5, 9)), 3.2)
    axis = figure.subplots()
    axis.set_yscale("log")
    for place, split in enumerate(SPLIT_LOOK):
        colour, marker, words = SPLIT_LOOK[split]
        offset = (place - 1) * 0.22
        _before_and_after(axis, table[table["split"] == split], columns, offset, colour, marker, words)
    last = table[table["round"] == table["round"].max()].pivot(index="client", columns="split", values="value")
    ratios = (last["heldout"] / last["train"]).map("× {:.3g}".format).str.replace("nan", "n/a")
    _name_columns(axis, columns, ratios)
    low, high = table["value"].min(), table["value"].max()
    if low < high * 0.999 and np.isfinite(high):
        axis.set_ylim(low / 1.25, high * 1.25)  # an untrained model's splits differ little, and must look so
    # On a range below one decade matplotlib labels minor ticks as 6 × 10⁰; plain numbers at 1, 2, 5 read better.
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("perplexity (log scale)")
    _legend(figure, axis, table)
    return figure


@styled
def utility(table: pd.DataFrame) -> Figure:
    """Utility of each client's test rows before (open marks) and after training (filled marks), with the row counts.

    table: the table of `utility.with_weighted_means`. Its first and its last round are drawn, the clients' mean at the
    right.
    """
    table = table[table["metric"].isin(list(UTILITY_WORDS))]
    metrics, columns = list(dict.fromkeys(table["metric"])), _columns(table)
    figure = canvas(float(np.clip(1.6 + (0.8 * len(columns) + 1) * len(metrics), 4.5, 9)), 2.9)
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        rows = table[table["metric"] == metric]
        _before_and_after(axis, rows.assign(value=100 * rows["value"]), columns, 0, UTILITY_COLOUR, "o", "test rows")
        last = rows[rows["round"] == rows["round"].max()].set_index("client")
        _name_columns(axis, columns, last["n"].map("n = {}".format), len(metrics))
        # fmax, not max: it ignores the NaN of a metric that no client has, and set_ylim refuses NaN
        top = np.fmax(5, 115 * rows["value"].max()) if metric == "rouge_l" else 103
        axis.set(ylabel=UTILITY_WORDS[metric], ylim=(0, top))
    _legend(figure, axes[0], table)
    return figure


def _curve(axis: Axes, rows: pd.DataFrame) -> None:
    table = rows.pivot_table(index="round", columns="client", values="value", aggfunc="mean")
    pooled, clients = [c for c in table if c == POOLED], [c for c in table if c != POOLED]
    many = len(clients) > READABLE_CLIENTS
    for place, client in enumerate(clients):
        look = {"color": "#b5b5b5", "linewidth": 0.7} if many else {"color": COLOURS[place % 10], "marker": "o"}
        label = ("a client" if place == 0 else None) if many else f"client {client}"
        # there are ten colours: clients from 10 on repeat them, dashed
        dashes = "-" if place < 10 or many else "--"
        axis.plot(table.index, table[client], linestyle=dashes, markersize=3.5, label=label, **look)
    if many:
        axis.plot(table.index, table[clients].mean(axis=1), color=COLOURS[0], linewidth=2, label="clients' mean")
    for client in pooled:
        axis.plot(table.index, table[client], color="black", marker="D", markersize=3.5, label="all clients' rows")


def _columns(table: pd.DataFrame) -> list[int]:
    """The ids of the clients in order, then POOLED if the table has a mean."""
    clients = sorted(set(table["client"]) - {POOLED})
    return [*clients, *([POOLED] if (table["client"] == POOLED).any() else [])]


def _before_and_after(
    axis: Axes, rows: pd.DataFrame, columns: list[int], offset: float, colour: str, marker: str, words: str
) -> None:
    """Draw a mark for the first round, a mark for the last one, and a line between them, for each column."""
    places = np.arange(len(columns)) + offset
    first, last = rows["round"].min(), rows["round"].max()
    values = rows.pivot(index="client", columns="round", values="value").reindex(columns)
    size = 5.5 if len(columns) <= READABLE_CLIENTS else 3
    if first != last:
        if len(columns) <= READABLE_CLIENTS:
            axis.vlines(places, values[first], values[last], color=colour, linewidth=0.8)
        # larger than the filled mark, so that it stays visible when the two values are equal
        ring = {"markerfacecolor": "white", "markersize": size + 2.5, "clip_on": False}
        axis.plot(places, values[first], marker, color=colour, **ring)
    axis.plot(places, values[last], marker, color=colour, markersize=size, label=words, clip_on=False)
    for place in places[values[last].isna()]:
        axis.text(place, 0.02, "n/a", transform=axis.get_xaxis_transform(), ha="center", color=colour, fontsize=8)


def _name_columns(axis: Axes, columns: list[int], words: pd.Series, panels: int = 1) -> None:
    """Set the ticks: clients by number, the mean by name, and below each its `words` if the panel has room for them."""
    clients = [client for client in columns if client != POOLED]
    places, names = client_ticks(clients, 0)
    if POOLED in columns:
        axis.axvline(len(clients) - 0.5, color="#b5b5b5", linewidth=0.8)
        free = places <= len(clients) - max(1, len(clients) / READABLE_CLIENTS)  # room for the word "mean"
        places = [*places[free], len(clients)]
        names = [*np.array(names)[free], "mean"]
    if len(columns) * panels <= 11:  # more labels of two lines would overlap
        names = [f"{name}\n{words[column]}" for name, column in zip(names, columns, strict=True)]
    axis.set_xticks(places, names)
    axis.set(xlabel="client", xlim=(-0.5, len(columns) - 0.5))
    axis.grid(axis="x", visible=False)


def _legend(figure: Figure, axis: Axes, table: pd.DataFrame) -> None:
    handles, _ = axis.get_legend_handles_labels()
    first, last = table["round"].min(), table["round"].max()
    if first != last:
        grey = {"color": "#555555", "linestyle": "", "marker": "o"}
        handles += axis.plot([], [], markerfacecolor="white", label="before training", **grey)
        handles += axis.plot([], [], label=f"after round {last}", **grey)
    figure.legend(handles=handles, loc="outside right upper")
