"""Figures of a study: effect of a parameter beside the paper's points, suffix clients, differences, perplexity gap.

As in `fedmem.analyze.figures`, each function takes a tidy frame and returns a Figure. Shares in 0 … 1 are drawn in
percent and undefined values as "n/a".
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmem.analyze.figures import draw_panels, head
from fedmem.config.vocabulary import PARTS
from fedmem.display.drawing import (
    COLOURS,
    CONTROL,
    MEMBER,
    READABLE_CLIENTS,
    canvas,
    client_ticks,
    counting_words,
    styled,
)
from fedmem.report.paper.published import SOURCE


@styled
def by_parameter(table: pd.DataFrame, parameter: str, counting: str, points: pd.DataFrame | None = None) -> Figure:
    """MR_intra, MR_inter and MR_total against one parameter: curves for numbers, points for names.

    table: columns setting, metric (mr_… and control_…), value, low, high, and line, which groups runs that differ only
    in the parameter; the colours repeat after ten lines.
    parameter: name of the parameter, the label of the x axis.
    counting: name of the counting, shown in the title.
    points: published values as `published.points` returns them (setting, metric, value), or None. They are drawn in
    black; if there is a column task, in the colour of the line that lists this task in its name.
    """
    settings = list(dict.fromkeys(table["setting"]))
    # bool is a subclass of int, but True and False are drawn as names
    numbers = all(isinstance(value, int | float | np.number) and not isinstance(value, bool) for value in settings)
    settings = sorted(settings) if numbers else settings
    figure = canvas(9.5, 3.1)
    lines = list(dict.fromkeys(table["line"]))
    for axis, part in zip(figure.subplots(1, 3), PARTS, strict=True):
        for place, line in enumerate(lines):
            rows = table[table["line"] == line]
            # Names: the lines are drawn side by side. Numbers: an x position is a value and must not move.
            shift = 0 if numbers else (place - (len(lines) - 1) / 2) * min(0.2, 0.6 / len(lines))
            for name, colour in (("control", CONTROL), ("mr", COLOURS[place % 10] if len(lines) > 1 else MEMBER)):
                chosen = rows[rows["metric"] == f"{name}_{part}"].set_index("setting").reindex(settings)
                words = "control: held-out" if name == "control" else str(line) if len(lines) > 1 else "trained on"
                _points(axis, chosen, numbers, shift, colour, "s" if name == "control" else "o", words)
        if points is not None:
            _published(axis, points[points["metric"] == f"mr_{part}"], settings, numbers, lines)
        if not numbers:
            axis.set_xticks(range(len(settings)), [str(s) for s in settings], rotation=20 if len(settings) > 3 else 0)
            axis.set_xlim(-0.5, len(settings) - 0.5)
        axis.set(title=f"MR_{part}", xlabel=parameter, ylim=(0, None))
    figure.axes[0].set_ylabel("share of prefixes (%)")
    labelled = {}  # one legend for three panels: each label once
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labelled.setdefault(label, handle)
    figure.legend(labelled.values(), labelled, loc="outside lower left", ncols=3)
    head(figure, counting_words(counting).split(" (")[0])
    return figure


@styled
def suffix_clients(cells: pd.DataFrame, counting: str = "paper") -> Figure:
    """MR(j→k) by suffix client k, with a mark for each prefix client j: are some clients' suffixes easier to extract?

    cells: the table of `ratios.cells`. Marks of a client's own prefixes are filled, those of other clients are open.
    The control's mean is a grey line. With more than 12 clients, only the mean over the other clients' prefixes is
    drawn for each client.
    counting: the counting that is drawn.
    """
    table = cells[cells["counting"] == counting]
    clients = sorted(table["suffix_client"].unique())
    many = len(clients) > READABLE_CLIENTS
    figure = canvas(float(np.clip(3.5 + 0.8 * len(clients), 5.5, 9)), 3)
    axis = figure.subplots()
    for place, client in enumerate(clients):
        rows = table[(table["suffix_client"] == client) & table["member"]].sort_values("prefix_client")
        if many:
            away = rows[rows["prefix_client"] != client]
            axis.plot(place, 100 * away["ratio"].mean(), "o", color=COLOURS[0], markersize=3)
        for step, row in enumerate(rows.itertuples() if not many else ()):
            own = row.prefix_client == client
            offset = (step - (len(rows) - 1) / 2) * 0.6 / len(rows)
            _mark(axis, place + offset, row, COLOURS[row.prefix_client % 10], own)
        control = table[(table["suffix_client"] == client) & ~table["member"]]["ratio"].mean()
        axis.plot([place - 0.35, place + 0.35], [100 * control] * 2, color=CONTROL, linewidth=2)
    axis.set_xticks(*client_ticks(clients, 0))
    axis.set(xlabel="suffix client k", ylabel="MR(j→k) (%)", ylim=(0, None))
    axis.grid(axis="x", visible=False)
    names = [] if many else clients
    handles = [  # empty plots: the marks above differ in fill, the legend explains the colours only
        axis.plot([], [], "o", color=COLOURS[name % 10], label=f"prefixes of client {name}")[0] for name in names
    ]
    handles.append(axis.plot([], [], color=CONTROL, linewidth=2, label="control: held-out, mean")[0])
    figure.legend(handles=handles, loc="outside right upper")
    return figure


@styled
def differences(table: pd.DataFrame, words: str, title: str | None = None) -> Figure:
    """Differences with intervals and a line at 0, one panel for each part.

    table: columns label, part (intra, inter, total), difference, low, high. The first 40 labels are drawn.
    words: what is subtracted from what; the title of the figure.
    title: title of every panel, None: MR_<part>. It is needed when the two values are of different parts.
    """
    labels = list(dict.fromkeys(table["label"]))[:40]  # 40 lines are 14 inches: more do not fit on a page
    panels = {part: title or f"MR_{part}" for part in PARTS if (table["part"] == part).any()}
    drawn = table[table["label"].isin(labels)].rename(columns={"difference": "value"})
    drawn = drawn.assign(metric="difference_" + drawn["part"])
    series = {"difference": (COLOURS[0], "o", 0, words)}
    figure = draw_panels(drawn, "label", panels, series, 2.2 + 2.6 * len(panels), margin=1.4, step=0.32)
    head(figure, words)
    return figure


@styled
def perplexity_gap(table: pd.DataFrame) -> Figure:
    """MR_intra against the perplexity gap between test rows and training rows, with a mark for each run.

    table: columns run, gap (perplexity on test rows − perplexity on training rows), and value, low, high of MR_intra.
    """
    figure = canvas(6.5, 3.2)
    axis = figure.subplots()
    for place, row in enumerate(table.dropna(subset=["gap", "value"]).itertuples()):
        # too many runs for a legend: one colour without labels
        label = str(row.run) if len(table) <= READABLE_CLIENTS else None
        error = [[100 * (row.value - row.low)], [100 * (row.high - row.value)]]
        colour = COLOURS[place % 10] if label else COLOURS[0]
        marker = "osD^v<>Ph*"[place % 10]
        axis.errorbar(row.gap, 100 * row.value, yerr=error, fmt=marker, color=colour, capsize=2.5, label=label)
    axis.set(xlabel="perplexity gap: test rows − training rows", ylabel="MR_intra (%)", ylim=(0, None))
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper")
    return figure


def _points(axis: Axes, rows: pd.DataFrame, numbers: bool, shift: float, colour: str, marker: str, label: str) -> None:
    values = 100 * rows["value"].to_numpy(float)
    # 0.08: over names, a control (square) is drawn beside the ratio that it belongs to, not on top of it
    places = rows.index.to_numpy(float) if numbers else np.arange(len(rows)) + shift + (0.08 if marker == "s" else 0)
    # abs: low − value is negative, and errorbar takes lengths only
    errors = np.abs(100 * rows[["low", "high"]].to_numpy(float).T - values)
    known = np.isfinite(values)
    axis.errorbar(
        places[known], values[known], yerr=errors[:, known], fmt=marker + ("-" if numbers else ""), color=colour,
        markersize=4.5, capsize=2.5, linewidth=1.2, label=label, clip_on=False,
    )  # fmt: skip
    for place in places[~known] if not known.any() else ():
        axis.text(place, 0.02, "n/a", transform=axis.get_xaxis_transform(), ha="center", color=colour, fontsize=8)


def _published(axis: Axes, points: pd.DataFrame, settings: list, numbers: bool, lines: list) -> None:
    # Names have positions only where this study has the setting.
    points = points if numbers else points[points["setting"].isin(settings)]
    tasks = points["task"] if "task" in points else pd.Series("", index=points.index)
    for task, chosen in points.groupby(tasks):
        places = chosen["setting"] if numbers else [settings.index(setting) for setting in chosen["setting"]]
        own = [place for place, line in enumerate(lines) if task in str(line).split(", ")]
        colour = COLOURS[own[0] % 10] if own and len(lines) > 1 else "black"
        values = 100 * chosen["value"]
        axis.plot(places, values, "D", color=colour, fillstyle="none", markersize=6, label=f"{SOURCE} {task}".strip())


def _mark(axis: Axes, place: float, row, colour: str, own: bool) -> None:
    if np.isnan(row.ratio):
        axis.text(place, 0.02, "n/a", transform=axis.get_xaxis_transform(), ha="center", color=colour, fontsize=8)
        return
    error = [[100 * (row.ratio - row.low)], [100 * (row.high - row.ratio)]]
    fill = colour if own else "white"
    axis.errorbar(place, 100 * row.ratio, yerr=error, fmt="o", color=colour, markerfacecolor=fill, capsize=2)
