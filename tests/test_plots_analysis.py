"""Figures of one run and of a study by what is drawn on them; not by pixels."""

import numpy as np
import pandas as pd
import pytest

from fedmem.analyze import exclusions, extracted_text, figures, ratios
from fedmem.analyze.counting import Counts
from fedmem.analyze.exclusions import EXCLUSIONS
from fedmem.corpus.texts import measurable
from fedmem.report import figures as report_figures
from fedmem.report.paper import published as paper_published
from fedmem.report.paper.published import SOURCE

NAN = float("nan")


@pytest.fixture(scope="module")
def counts():
    """Three clients of 20 prefixes; the first 5 of each match its own suffixes verbatim, 2 of client 0 client 1's."""
    ids = [(j, i) for j in range(3) for i in range(20)]
    prefixes = pd.DataFrame(
        [(f"p{j}-{i}", j, "z" * 80) for j, i in ids], columns=["prefix_id", "client", "continuation"]
    )
    suffixes = pd.DataFrame(
        [(f"s{j}-{i}", f"r{j}-{i}", j, member, "x" * 100) for j, i in ids for member in (True,)],
        columns=["suffix_id", "row_id", "client", "member", "suffix"],
    )
    held = suffixes.assign(suffix_id="h" + suffixes["suffix_id"], member=False)
    found = [(f"p{j}-{i}", j, f"s{j}-{i}", j, True, "verbatim", [[0, 60, 0, 60]]) for j, i in ids if i < 5]
    found += [(f"p0-{i}", 0, f"s1-{i}", 1, True, "idea", [[0, 50, 0, 60]]) for i in range(2)]
    columns = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "kind", "detections"]
    matches = pd.DataFrame(found, columns=columns).assign(score=NAN, identical_sentence=False)
    clients = pd.DataFrame({"client": range(3), "n_train": 1})
    return Counts(matches, prefixes, clients, pd.concat([suffixes, held], ignore_index=True))


def words(axis):
    return [text.get_text() for text in axis.texts if text.get_text()]


def test_excess_is_drawn_with_its_interval_and_a_line_at_0(counts):
    summary = ratios.summary(counts)
    axes = figures.excess(summary).axes
    rows = summary[summary["metric"] == "excess_intra"]
    bars = axes[0].containers[0]
    np.testing.assert_allclose(bars.lines[0].get_xdata(), 100 * rows["value"])
    np.testing.assert_allclose([s[:, 0] for s in bars.lines[2][0].get_segments()], 100 * rows[["low", "high"]])
    assert any(list(line.get_xdata()) == [0, 0] for line in axes[0].lines)
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["paper", "strict", "verbatim"]


def test_kinds_are_stacked_and_undefined_ones_say_so(counts):
    table = ratios.kinds(counts)
    axis = figures.kinds(table).axes[0]
    verbatim, idea = axis.containers
    # verbatim 5 of 20 each; idea 2 of 20 of client 0 with one of two others: ⅓ · 0.1 · ½
    assert verbatim[0].get_width() == pytest.approx(25)
    assert [bar.get_width() for bar in idea][2] == pytest.approx(100 / 60)
    assert [label.get_text() for label in axis.get_yticklabels()][:2] == ["MR_intra", "MR_intra, control"]
    undefined = table.assign(value=table["value"].where(table["metric"] != "mr_inter"))
    assert words(figures.kinds(undefined).axes[0]) == ["n/a"]
    runs = pd.concat([table.assign(run=run) for run in ("b", "a")])
    labels = [label.get_text() for label in figures.kinds(runs).axes[0].get_yticklabels()]
    assert labels == ["b", "b, control", "a", "a, control"]


def test_every_finite_cell_of_the_extracted_matrix_carries_its_number(counts):  # B13
    table = extracted_text.extracted(counts.matches, counts.suffixes)
    axis = figures.extracted(table).axes[0]
    # 5 suffixes of 20, 60 of 100 characters each: 15 %
    assert words(axis) == ["15", "0", "0", "0", "15", "0", "0", "0", "15"]
    holes = table.assign(share=table["share"].where(table["suffix_client"] != 2))
    assert words(figures.extracted(holes).axes[0]).count("n/a") == 3


def test_exclusions_and_settling_are_drawn(counts):
    marked = counts.matches.assign(own=True, shared=False, incoherent=False)
    summaries = exclusions.summaries(counts, marked)
    axis = figures.excluded(summaries).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == list(EXCLUSIONS)
    assert axis.get_ylabel() == "left out"
    assert list(axis.containers[0].lines[0].get_xdata()) == pytest.approx([25, 0, 25, 25, 25])
    of_runs = pd.concat([summaries.assign(run=run) for run in ("fedprox", "central")])
    of_runs = of_runs[of_runs["excluded"].isin(["nothing", "own suffix"])]
    axis = figures.excluded(of_runs).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "fedprox, all matches", "fedprox, without own suffix", "central, all matches", "central, without own suffix",
    ]  # fmt: skip
    assert axis.get_ylabel() == ""


def test_measurable_and_rows_have_a_bar_each(counts):
    shares = measurable(counts.prefixes, counts.suffixes, min_match_chars=90)
    groups = figures.measurable(shares).axes[0].containers
    assert [[bar.get_height() for bar in group] for group in groups] == [[0] * 3, [100] * 3, [100] * 3]
    rows = extracted_text.by_row(counts.matches, counts.suffixes)
    own, others = figures.by_row(rows).axes[0].containers
    assert [bar.get_height() for bar in own] == [15]
    assert [bar.get_height() for bar in others] == [0]
    assert figures.by_row(rows.iloc[:0]).axes


def settings(values, line="", metric="mr_intra"):
    table = pd.DataFrame({"setting": values, "value": [0.1, NAN, 0.3][: len(values)]})
    return table.assign(low=table["value"] - 0.05, high=table["value"] + 0.05, line=line, metric=metric)


def test_a_numbers_effect_is_a_curve_with_the_papers_points():
    points = paper_published.points("dialog", "prefix_tokens")
    axes = report_figures.by_parameter(settings([100, 10, 30]), "prefix_tokens", "paper", points).axes
    intra = next(bars for bars in axes[0].containers if bars.get_label() == "trained on").lines[0]
    assert intra.get_xdata().tolist() == [30, 100]  # sorted, and 10 is undefined
    assert intra.get_ydata().tolist() == [30, 10]
    published = [line for line in axes[0].lines if line.get_label() == SOURCE]
    assert published[0].get_xdata().tolist() == [10, 30, 50, 100]
    assert published[0].get_ydata().tolist() == pytest.approx([2.108, 1.533, 1.575, 1.408])
    assert not [line for line in axes[1].lines if line.get_label() == SOURCE]  # no MR_inter of dialog


def test_a_names_effect_is_points_and_lines_tell_other_parameters_apart():
    table = pd.concat([settings(["fedavg", "fedprox"], line) for line in ("dialog", "qa")])
    points = pd.concat([paper_published.points(task, "algorithm").assign(task=task) for task in ("dialog", "qa")])
    axes = report_figures.by_parameter(table, "algorithm", "paper", points).axes
    published = {line.get_label(): line for line in axes[0].lines if line.get_label().startswith(SOURCE)}
    assert list(published) == [f"{SOURCE} dialog", f"{SOURCE} qa"]
    assert published[f"{SOURCE} qa"].get_ydata().tolist() == pytest.approx([1.45, 3.675])
    assert len({line.get_color() for line in published.values()}) == 2
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["fedavg", "fedprox"]
    labels = {bars.get_label() for bars in axes[0].containers}
    assert {"dialog", "qa"} <= labels


def test_suffix_clients_have_a_mark_for_each_prefix_client(counts):
    cells = ratios.cells(counts)
    axis = report_figures.suffix_clients(cells, "paper").axes[0]
    assert len(axis.containers) == 9
    heights = sorted(float(bars.lines[0].get_ydata()[0]) for bars in axis.containers)
    assert heights == pytest.approx([0] * 5 + [10, 25, 25, 25])
    holes = cells.assign(ratio=cells["ratio"].where(cells["prefix_client"] != 1))
    assert words(report_figures.suffix_clients(holes, "paper").axes[0]) == ["n/a"] * 3


def test_differences_and_gaps_are_drawn_per_run():
    table = pd.DataFrame(
        {"label": ["a − b", "a − c"], "part": "total", "difference": [0.1, NAN], "low": 0.0, "high": 0.2}
    )
    axis = report_figures.differences(table, "run − other").axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a − b", "a − c"]
    assert words(axis) == ["n/a"]
    assert (axis.get_title(loc="left"), axis.get_xlabel()) == ("MR_total", "percentage points")
    named = report_figures.differences(table.assign(part="intra"), "within each run", title="MR_intra − MR_inter")
    assert named.axes[0].get_title(loc="left") == "MR_intra − MR_inter"
    gaps = pd.DataFrame({"run": ["a", "none"], "gap": [3.0, NAN], "value": 0.2, "low": 0.1, "high": 0.3})
    axis = report_figures.perplexity_gap(gaps).axes[0]
    assert [bars.get_label() for bars in axis.containers] == ["a"]
    assert report_figures.perplexity_gap(gaps.iloc[1:]).axes  # nothing to draw is no fault
