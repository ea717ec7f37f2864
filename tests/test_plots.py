"""Figures by what is drawn on them: numbers, undefined cells, intervals, files. Not by pixels."""

import io
import struct

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import seaborn
from IPython.core.interactiveshell import InteractiveShell

from fedmem.analyze import figures, ratios
from fedmem.analyze.counting import Counts
from fedmem.display.drawing import COLOURS, READABLE_CLIENTS, caption, save_figure, show_figure
from fedmem.partition import figures as partition_figures


def tables(n_clients, kind="verbatim", without=(), n=50):
    """Clients of n prefixes; the first (j + 2k) % 5 prefixes of j match k, held-out ones the first alone if j = k."""
    owners = [j for j in range(n_clients) if j not in without]
    prefixes = pd.DataFrame([(f"{j}-{i}", j) for j in owners for i in range(n)], columns=["prefix_id", "client"])
    pairs = [(j, k) for j in owners for k in range(n_clients)]
    found = [(f"{j}-{i}", j, k, True, kind) for j, k in pairs for i in range((j + 2 * k) % 5)]
    found += [(f"{j}-0", j, j, False, "verbatim") for j in owners]
    matches = pd.DataFrame(found, columns=["prefix_id", "prefix_client", "suffix_client", "member", "kind"])
    matches = matches.assign(score=np.nan, identical_sentence=False)
    return Counts(matches, prefixes, pd.DataFrame({"client": range(n_clients), "n_train": 1}))


def words(axis):
    return [text.get_text() for text in axis.texts if text.get_text()]


def groups(n_clients):
    rows = [(j, f"topic {g}", g + 1) for j in range(n_clients) for g in range(4) if g != j]
    return pd.DataFrame(rows, columns=["client", "group", "rows"])


def every_figure(n_clients):
    measured = tables(n_clients)
    summary = ratios.summary(measured)
    runs = pd.concat([summary.assign(run=name) for name in ("fedavg", "central")])
    return [
        figures.matrix(ratios.cells(measured)),
        figures.aggregates(summary),
        figures.aggregates(runs, "verbatim"),
        partition_figures.groups(groups(n_clients)),
    ]


def test_every_finite_cell_carries_its_number():
    cells = ratios.cells(tables(3))
    figure = figures.matrix(cells, "paper")
    members, control = figure.axes[:2]
    for axis, member in ((members, True), (control, False)):
        chosen = cells[(cells["counting"] == "paper") & (cells["member"] == member)]
        assert len(words(axis)) == chosen["ratio"].notna().sum() == 9
    # rows 0, 1, 2: 0, 2, 4 / 1, 3, 0 / 2, 4, 1 prefixes of 50: 2 % each
    assert [label.split("\n")[0] for label in words(members)] == [
        "0",
        "4.0",
        "8.0",
        "2.0",
        "6.0",
        "0",
        "4.0",
        "8.0",
        "2.0",
    ]
    assert [label.split("\n")[0] for label in words(control)] == ["2.0", "0", "0", "0", "2.0", "0", "0", "0", "2.0"]
    low, high = words(members)[1].split("\n")[1].split("–")
    cell = cells.query("counting == 'paper' and member and prefix_client == 0 and suffix_client == 1").iloc[0]
    assert (float(low), float(high)) == pytest.approx((100 * cell["low"], 100 * cell["high"]), abs=0.5)


def test_an_undefined_cell_says_so_and_is_not_zero():
    cells = ratios.cells(tables(3, without=[1]))
    labels = words(figures.matrix(cells).axes[0])
    assert labels.count("n/a") == 3
    assert sum(label != "n/a" for label in labels) == 6
    undefined = ratios.cells(tables(3, kind="paraphrase"))
    assert words(figures.matrix(undefined, "strict").axes[0]) == ["n/a"] * 9


def test_members_and_control_share_one_scale():
    figure = figures.matrix(ratios.cells(tables(3)))
    limits = [axis.collections[0].get_clim() for axis in figure.axes[:2]]
    assert limits[0] == limits[1] == pytest.approx((0, 8))
    some = tables(2)
    nothing = some.without(np.ones(len(some.matches)))
    assert figures.matrix(ratios.cells(nothing)).axes[0].collections[0].get_clim() == (0, 1)  # not 0 to 0


def test_matrices_beside_each_other_share_a_top_and_say_whose_they_are():
    cells = ratios.cells(tables(3))
    figure = figures.matrix(cells, "verbatim", top=0.94, run="central")
    assert [axis.collections[0].get_clim() for axis in figure.axes[:2]] == [(0, 94), (0, 94)]
    assert figure.get_suptitle() == "central: MR(j→k), verbatim counting"
    assert figures.matrix(cells, "verbatim").get_suptitle() == "MR(j→k), verbatim counting"
    assert figures.matrix(cells, top=np.nan).axes[0].collections[0].get_clim() == pytest.approx((0, 8))
    long = figures.matrix(cells, run=", ".join(f"parameter_{n}=value" for n in range(9)))
    assert max(map(len, long.get_suptitle().splitlines())) < 90  # broken into lines, not cut by the figure's edge


@pytest.mark.parametrize("n_clients", [READABLE_CLIENTS, READABLE_CLIENTS + 1, 100])
def test_a_large_matrix_stays_readable(n_clients):
    axis = figures.matrix(ratios.cells(tables(n_clients, n=5))).axes[0]
    assert len(words(axis)) == (n_clients**2 if n_clients <= READABLE_CLIENTS else 0)
    assert not any("–" in label for label in words(axis))  # too narrow for intervals
    assert len(axis.get_xticklabels()) <= READABLE_CLIENTS
    assert len(axis.lines) == (2 if n_clients > READABLE_CLIENTS else 0)  # along the diagonal, where no numbers are
    assert max(axis.figure.get_size_inches()) < 11


def test_aggregates_draw_values_and_intervals_of_member_and_control():
    measured = tables(3)
    summary = ratios.summary(measured)
    figure = figures.aggregates(summary)
    assert [axis.get_title("left") for axis in figure.axes] == ["MR_intra", "MR_inter", "MR_total"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["paper", "strict", "verbatim"]
    for axis, part in zip(figure.axes, ("intra", "inter", "total"), strict=True):
        for bars, name in zip(axis.containers, ("mr", "control"), strict=True):
            rows = summary[summary["metric"] == f"{name}_{part}"]
            np.testing.assert_allclose(bars.lines[0].get_xdata(), 100 * rows["value"])
            ends = [segment[:, 0] for segment in bars.lines[2][0].get_segments()]
            np.testing.assert_allclose(ends, 100 * rows[["low", "high"]])


def test_aggregates_of_runs_show_one_counting_and_name_what_is_undefined():
    summary = ratios.summary(tables(1))  # one client: no inter
    runs = pd.concat([summary.assign(run="fedavg"), summary.assign(run="central")])
    figure = figures.aggregates(runs, "verbatim")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["fedavg", "central"]
    assert [words(axis) for axis in figure.axes] == [[], ["n/a"] * 4, []]
    assert figure.get_suptitle() == "verbatim counting"


def test_groups_draw_every_client():
    labels = words(partition_figures.groups(groups(2)).axes[0])
    # client 0 has 2, 3, 4 rows of 9 (22, 33, 44 %), client 1 has 1, 3, 4 of 8 (12.5, 38, 50 %); absent pairs are blank
    assert labels == ["13", "22", "33", "38", "44", "50"]


def test_many_groups_stand_in_their_clients_order_with_a_name_here_and_there():
    names = [f"topic {j}" for j in range(100)]  # by name, topic 10 would follow topic 1
    table = pd.DataFrame({"client": range(100), "group": names, "rows": 8})
    axis = partition_figures.groups(table).axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == names[::4]
    assert not words(axis)
    assert max(axis.figure.get_size_inches()) < 10


def test_a_missing_control_says_so():
    some, clients = tables(3), pd.DataFrame({"client": range(3), "n_train": 1})
    suffixes = pd.DataFrame({"client": range(3), "member": True})
    axes = figures.matrix(ratios.cells(Counts(some.matches[some.member], some.prefixes, clients, suffixes))).axes
    assert axes[1].get_title("left") == "control: there are no held-out texts"
    assert words(axes[1]) == ["n/a"] * 9
    assert "n/a" not in words(axes[0])


def test_figures_do_not_touch_pyplot_nor_its_settings():
    before = dict(mpl.rcParams)
    every_figure(3)
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == before


def test_same_data_same_bytes_whatever_the_readers_settings(tmp_path):
    def written(name):
        return [
            save_figure(figure, groups(2), "Text.", tmp_path / name, f"figure{i}").read_bytes()
            for i, figure in enumerate(every_figure(3))
        ]

    first = written("a")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black", "savefig.dpi": 20, "savefig.bbox": "tight"}):
        assert written("b") == first
    assert sum(map(len, first)) < 1_000_000  # a report of six figures


def chunks(png):
    stream = io.BytesIO(png[8:])
    while head := stream.read(8):
        length, kind = struct.unpack(">I4s", head)
        yield kind
        stream.seek(length + 4, 1)


def test_save_writes_picture_data_and_caption(tmp_path):
    data = groups(2)
    path = save_figure(partition_figures.groups(data), data, "Rows of each client.", tmp_path / "figures", "groups")
    assert path == tmp_path / "figures" / "groups.png"
    assert set(chunks(path.read_bytes())) == {b"IHDR", b"pHYs", b"IDAT", b"IEND"}  # no date, no version
    pd.testing.assert_frame_equal(pd.read_csv(path.with_suffix(".csv")), data)
    assert path.with_suffix(".txt").read_text("utf-8") == "Rows of each client.\n"
    with pytest.raises(ValueError, match=r"name: got '\.\./groups'; expected a file name without folder"):
        save_figure(partition_figures.groups(data), data, "", tmp_path, "../groups")


def test_a_notebook_shows_the_figure_itself():
    shown, _ = InteractiveShell.instance().display_formatter.format(partition_figures.groups(groups(2)))
    assert shown["image/png"].startswith(b"\x89PNG")


def test_a_shown_figure_is_saved_and_displayed_with_its_caption(tmp_path, monkeypatch):
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda *outputs: displayed.extend(outputs))
    data = groups(2)
    for visible in (False, True):
        figure = partition_figures.groups(data)
        show_figure(tmp_path, figure, data, f"s{visible}", "Rows.", remark="Of two.", visible=visible, n=5)
        assert (tmp_path / f"s{visible}.txt").read_text("utf-8") == "Rows. n = 5 sampled prefixes. Of two.\n"
    assert displayed[0] is figure
    assert [output.data for output in displayed[1:]] == ["*Rows. n = 5 sampled prefixes. Of two.*"]


def test_captions_say_counting_n_and_what_intervals_mean():
    text = caption("MR(j→k).", counting="verbatim", n=pd.Series([90, 120]), confidence=0.95)
    assert text == (
        "MR(j→k). Verbatim counting. n = 90 to 120 sampled prefixes. Intervals: 95 % (Wilson). Intervals over prefixes "
        "hold for one trained model; how much training itself varies shows only between seeds."
    )
    assert caption("Rows.", n=5) == "Rows. n = 5 sampled prefixes."
    with pytest.raises(ValueError, match="counting: got 'loose'; expected one of paper, strict, verbatim"):
        caption("x", counting="loose")


def test_the_colours_are_seaborns():
    assert list(COLOURS) == seaborn.color_palette("colorblind").as_hex()


def test_clear_errors():
    cells = ratios.cells(tables(2), countings=["verbatim"])
    with pytest.raises(ValueError, match="counting: got 'paper'; cells has only verbatim"):
        figures.matrix(cells)
    with pytest.raises(ValueError, match="counting: got 'loose'"):
        figures.matrix(cells, "loose")
    with pytest.raises(ValueError, match="counting: got 'loose', which summary lacks; expected one of"):
        figures.aggregates(ratios.summary(tables(2)), "loose")
