"""Figures of one run: who gives back whose text, excess, kinds, what is left out, what came back, sample size.

A tidy frame in, a Figure out, in one style that colour-blind readers can read. Shares come in as 0 … 1 and are drawn in
percent; what is undefined (NaN) is drawn as "n/a", never as 0.
"""

from __future__ import annotations

from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmem.config.vocabulary import COUNTINGS, PARTS
from fedmem.display.drawing import (
    COLOURS,
    CONTROL,
    MEMBER,
    READABLE_CLIENTS,
    canvas,
    client_ticks,
    counting_words,
    draw_heatmap,
    draw_intervals,
    draw_scale,
    percent_words,
    styled,
)

INTERVAL_CLIENTS = 8  # above it, a cell of the matrix is too narrow for its interval
PART_WORDS = {part: f"MR_{part}" for part in PARTS}
RATIOS = {  # as `draw_panels` takes them
    "mr": (MEMBER, "o", -0.13, "trained on"),
    "control": (CONTROL, "s", 0.13, "control: held-out"),
}
KIND_LOOK = {  # ordered from dark to light, so that the kinds also differ in greyscale print
    "verbatim": COLOURS[3], "paraphrase_high": COLOURS[0], "paraphrase_low": COLOURS[9], "paraphrase": COLOURS[4],
    "idea": "#c9c9c9",
}  # fmt: skip


@styled
def matrix(cells: pd.DataFrame, counting: str = "paper", top: float | None = None, run: str | None = None) -> Figure:
    """MR(j→k) in percent, and beside it, on the same scale, the control on held-out suffixes.

    cells: the table of `ratios.cells`. Each cell shows its share and its interval; above 8 clients its share only,
        above 12 only its colour.
    counting: paper | strict | verbatim.
    top: the share in 0 … 1 at which the colours end, to be the same for all matrices that are compared; None: the
        largest share in `cells`.
    run: a run's name for the title; None: no name.
    Raises ValueError when the counting is unknown or not in the table.
    """
    title = counting_words(counting).split(" (")[0]
    chosen = cells[cells["counting"] == counting]
    if chosen.empty:
        raise ValueError(f"counting: got {counting!r}; cells has only {', '.join(sorted(set(cells['counting'])))}")
    sides = [("what clients trained on", True), ("control: held-out suffixes", False)]
    tables = {member: chosen[chosen["member"] == member] for _, member in sides}
    n_clients = chosen["prefix_client"].nunique()
    side = float(np.clip(0.95 * n_clients, 2.2, 4.6))
    figure = canvas(2 * side + 1.6, side + 0.9)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    # with a scale of at least 1 %, a matrix of zeros does not look like one full of leaks
    top = max(1.0, 100 * np.nanmax([*chosen["ratio"], np.nan if top is None else top], initial=0))
    for (words, member), axis in zip(sides, axes, strict=True):
        table = tables[member]
        shares = _grid(table, "ratio")
        draw_heatmap(axis, 100 * shares, _cell_labels(table), top, "suffix client k", "prefix client j")
        axis.set_title(words)
        if n_clients > READABLE_CLIENTS:  # two thin lines mark the diagonal, which has no numbers here
            for shift in (0, 1):
                ends = np.array([0, n_clients - 1])
                axis.plot(ends + shift, ends + 1 - shift, color="#8c8c8c", linewidth=0.4)
    if tables[False]["ratio"].isna().all() and tables[True]["ratio"].notna().any():
        axes[1].set_title("control: there are no held-out texts")
    axes[1].set_ylabel("")
    draw_scale(figure, axes, "share of prefixes (%)", undefined=chosen["ratio"].isna().any())
    words = f"MR(j→k), {title}" if run is None else f"{run}: MR(j→k), {title}"
    head(figure, fill(words, int(11 * figure.get_figwidth())))
    return figure


@styled
def aggregates(summary: pd.DataFrame, counting: str | None = None) -> Figure:
    """MR_intra, MR_inter and MR_total with intervals, each beside its held-out control.

    summary: the table of `ratios.summary`. With a column `run` (several runs, concatenated), each run has a line, of
        one counting; without it, each counting has a line.
    counting: paper | strict | verbatim; None: paper with a column `run`, else all countings.
    Raises ValueError when the table has no such rows.
    """
    by = "run" if "run" in summary.columns else "counting"
    if by == "run" or counting is not None:
        counting = counting or "paper"
        summary = summary[summary["counting"] == counting]
    if summary.empty:
        raise ValueError(f"counting: got {counting!r}, which summary lacks; expected one of {', '.join(COUNTINGS)}")
    figure = draw_panels(summary, by, PART_WORDS, RATIOS)
    if by == "run":
        head(figure, counting_words(counting).split(" (")[0])
    return figure


@styled
def excess(summary: pd.DataFrame) -> Figure:
    """Excess of the member ratio over the control, with intervals. An interval that contains 0 is not a finding.

    summary: the table of `ratios.summary`. Draws one line for each counting, or one for each run if the table has a
    column `run` (then of one counting).
    """
    by = "run" if "run" in summary.columns else "counting"
    panels = {part: f"excess of {words}" for part, words in PART_WORDS.items()}
    return draw_panels(summary, by, panels, {"excess": (COLOURS[0], "o", 0, "excess")})


@styled
def excluded(summaries: pd.DataFrame, counting: str = "paper") -> Figure:
    """Ratios of members and of the control, with and without the matches that may not be memorization.

    summaries: the table of `exclusions.summaries`; if it has a column `run`, each line names its run. counting: the
    counting that is drawn.
    """
    table = summaries[summaries["counting"] == counting]
    # With several runs, `excluded` alone repeats; a label with the run keeps the index below unique.
    of_runs = "run" in table.columns
    if of_runs:
        left_out = np.where(table["excluded"] == "nothing", ", all matches", ", without " + table["excluded"])
        table = table.assign(excluded=table["run"] + left_out)
    figure = draw_panels(table, "excluded", PART_WORDS, RATIOS, margin=1.5, step=0.36)
    figure.axes[0].set_ylabel("" if of_runs else "left out")
    head(figure, counting_words(counting).split(" (")[0])
    return figure


def draw_panels(
    table: pd.DataFrame, by: str, panels: dict[str, str], series: dict, width=9.0, margin=1.3, step=0.34
) -> Figure:
    """Draw one panel of values with intervals for each part of the metrics, with one line for each value of `by`.

    table: the column `by`, and metric (<series>_<part>), value, low, high, in −1 … 1.
    by: name of the column that names the lines; the table's first line is at the top.
    panels: {part: title of its panel}.
    series: {name: (colour, marker, vertical offset in lines, label)}. A single series is a difference, drawn with a
        line at 0; several are shares, drawn from 0 on with a legend.
    width, margin, step: the figure's width, its height without lines, and the height of a line, in inches.
    """
    lines, shares = list(dict.fromkeys(table[by])), len(series) > 1
    figure = canvas(width, margin + step * len(lines))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (part, title) in zip(axes, panels.items(), strict=True):
        if not shares:
            axis.axvline(0, color="#444444", linewidth=0.8)
        for name, (colour, marker, offset, label) in series.items():
            rows = table[table["metric"] == f"{name}_{part}"].set_index(by).reindex(lines)
            draw_intervals(axis, rows, offset, colour, marker, label)
        axis.set(title=title, xlabel="share of prefixes (%)" if shares else "percentage points")
        if shares:
            axis.set_xlim(left=0)
    axes[0].set_yticks(range(len(lines)), [str(line) for line in lines])
    axes[0].set_ylim(len(lines) - 0.5, -0.5)  # downwards: the first line is at the top
    if shares:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=len(series))
    return figure


def head(figure: Figure, words: str) -> None:
    """Write the title of a whole figure, above its panels."""
    figure.suptitle(words, x=0.01, ha="left", fontsize=11)


def _grid(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.pivot(index="prefix_client", columns="suffix_client", values=column)


def _cell_labels(table: pd.DataFrame) -> np.ndarray:
    value, low, high = (100 * _grid(table, column).to_numpy() for column in ("ratio", "low", "high"))
    labels = np.empty(value.shape, dtype=object)
    for cell in np.ndindex(value.shape):
        interval = f"\n{percent_words(low[cell])}–{percent_words(high[cell])}" if len(value) <= INTERVAL_CLIENTS else ""
        labels[cell] = percent_words(value[cell]) + interval
    return labels


@styled
def kinds(table: pd.DataFrame) -> Figure:
    """Kinds of the hits as stacked bars: one bar for each aggregate and its control, or for each run and its control.

    table: the table of `ratios.kinds`; if it has a column `run`, mr_total and control_total of each run are drawn.
    """
    if "run" in table.columns:
        table = table[table["metric"].str.endswith("_total")]
        table = table.assign(bar=table["run"] + np.where(table["metric"].str.startswith("mr_"), "", ", control"))
    else:
        words = table["metric"].str.split("_").str
        table = table.assign(bar="MR_" + words[1] + np.where(words[0] == "mr", "", ", control"))
    # Each control directly follows its bar, whatever the order of the table's rows; sorted() is stable.
    first = list(dict.fromkeys(bar.removesuffix(", control") for bar in table["bar"]))
    bars = sorted(dict.fromkeys(table["bar"]), key=lambda bar: first.index(bar.removesuffix(", control")))
    figure = canvas(7.5, 1.2 + 0.3 * len(bars))
    axis = figure.subplots()
    left = np.zeros(len(bars))
    for kind, colour in KIND_LOOK.items():
        values = 100 * table[table["kind"] == kind].set_index("bar")["value"].reindex(bars).to_numpy(float)
        if np.nansum(values) > 0:  # a kind without hits gets no entry in the legend
            axis.barh(bars, values, left=left, color=colour, label=kind.replace("_", ", "), linewidth=0)
            left = left + np.nan_to_num(values)
    undefined = table.groupby("bar")["value"].apply(lambda values: values.isna().all())
    for place, bar in enumerate(bars):
        if undefined[bar]:
            axis.text(0.02, place, "n/a", transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.set_ylim(len(bars) - 0.5, -0.5)
    # At least 1 % wide: matplotlib warns about an axis without extent when nothing matched.
    axis.set(xlabel="share of prefixes (%)", xlim=(0, max(1.0, 1.05 * left.max(initial=0))))
    axis.grid(axis="y", visible=False)
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper")
    return figure


@styled
def measurable(table: pd.DataFrame) -> Figure:
    """Share of each client's texts that are long enough to be matched. table: that of `lengths.measurable`."""
    texts = ["continuation", "member suffix", "held-out suffix"]
    clients = sorted(table["client"].unique())
    figure = canvas(float(np.clip(3.5 + 0.7 * len(clients), 5, 9)), 2.6)
    axis = figure.subplots()
    for place, text in enumerate(texts):
        shares = table[table["text"] == text].set_index("client")["share"].reindex(clients)
        offset = (place - 1) * 0.27
        axis.bar(np.arange(len(clients)) + offset, 100 * shares, 0.25, color=COLOURS[[0, 1, 7][place]], label=text)
    axis.set_xticks(*client_ticks(clients, 0))
    axis.set(xlabel="client", ylabel="long enough (%)", ylim=(0, 105))
    axis.grid(axis="x", visible=False)
    figure.legend(loc="outside right upper")
    return figure


@styled
def extracted(table: pd.DataFrame) -> Figure:
    """Share of each client's characters that came back, by prefix client. table: that of `extracted_text.extracted`."""
    # prefix_client −1 means the prefixes of all clients together, which have no row in the matrix
    table = table[table["member"] & (table["prefix_client"] >= 0)]
    shares = 100 * table.pivot(index="prefix_client", columns="suffix_client", values="share")
    side = float(np.clip(0.8 * len(shares), 2.2, 5))
    figure = canvas(side + 2.2, side + 0.5)
    axis = figure.subplots()
    top = max(1.0, float(np.nanmax(shares, initial=0)))
    draw_heatmap(axis, shares, shares.map(percent_words).to_numpy(), top, "suffix client k", "prefix client j")
    draw_scale(figure, [axis], "share of k's characters (%)", undefined=shares.isna().any(axis=None))
    return figure


@styled
def settling(table: pd.DataFrame) -> Figure:
    """Ratios on parts of the sample: fewer prefixes, and fewer suffixes. table: that of
    `ratios.ratio_by_sample_size`."""
    figure = canvas(8, 2.9)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, fewer in zip(axes, ("prefixes", "suffixes"), strict=True):
        for place, (part, words) in enumerate(PART_WORDS.items()):
            rows = table[(table["fewer"] == fewer) & (table["metric"] == f"mr_{part}")].sort_values("share")
            _band(axis, rows, COLOURS[[0, 1, 2][place]], "os^"[place], words)
        axis.set(xlabel=f"sampled {fewer}", xlim=(0, None), ylim=(0, None))
    axes[0].set_ylabel("share of prefixes (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


@styled
def by_row(rows: pd.DataFrame) -> Figure:
    """Number of extracted rows by the number of prefixes that extract them. rows: the table of `extracted_text.by_row`.

    The bars are split into rows extracted by their own client's prefixes only and rows that others extract too.
    """
    figure = canvas(6, 2.6)
    axis = figure.subplots()
    member = rows[rows["member"]]
    most = int(member["prefixes"].max()) if len(member) else 1
    groups = (("own client's prefixes alone", member["others"] == 0), ("other clients' too", member["others"] > 0))
    below = np.zeros(most)
    for (words, chosen), colour in zip(groups, (COLOURS[0], MEMBER), strict=True):
        heights = np.bincount(member.loc[chosen, "prefixes"], minlength=most + 1)[1:]  # [0]: not extracted
        axis.bar(np.arange(1, most + 1), heights, bottom=below, color=colour, label=words, linewidth=0)
        below = below + heights
    axis.set(xlabel="prefixes that pull a row out", ylabel="rows", xlim=(0.4, max(most, 5) + 0.6))
    step = max(1, most // READABLE_CLIENTS)  # more tick labels would overlap
    axis.set_xticks(np.arange(1, most + 1, step))
    axis.grid(axis="x", visible=False)
    figure.legend(loc="outside right upper")
    return figure


def _band(axis: Axes, rows: pd.DataFrame, colour: str, marker: str, label: str) -> None:
    axis.plot(rows["n"], 100 * rows["value"], color=colour, marker=marker, markersize=4, label=label, clip_on=False)
    axis.fill_between(rows["n"], 100 * rows["low"], 100 * rows["high"], color=colour, alpha=0.18, linewidth=0)
