"""Figures of a training by what is drawn on them: values, undefined ones, names, files. Not by pixels."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from fedmem.config.vocabulary import POOLED
from fedmem.display.drawing import READABLE_CLIENTS, save_figure
from fedmem.train import figures
from fedmem.train.history import UTILITY, with_weighted_means


def table(n_clients=3, metrics=("rouge_l",), rounds=(0, 12), undefined=()) -> pd.DataFrame:
    """Perplexity of train 30 + j, then 2 + j; of test and heldout 40 + j, then 8 + j; utility 0.1 + j/100, then 0.5."""
    lines = []
    for server_round in rounds:
        for j in range(n_clients):
            value = np.nan if j in undefined else 0.5 if server_round else 0.1 + j / 100
            lines += [(server_round, j, metric, "test", value, 8 - j % 3, 99, 0, 0) for metric in metrics]
            for split, before, after in (("train", 30, 2), ("test", 40, 8), ("heldout", 40, 8)):
                value = (after if server_round else before) + j
                lines.append((server_round, j, "perplexity", split, value, 9, 99, 0, 0))
    rows = pd.DataFrame({"client": range(n_clients), "split": "train"})
    return with_weighted_means(pd.DataFrame(lines, columns=UTILITY), rows)


def curves(n_clients):
    rows = [(r, j, "train_loss", 3 - r - j / 100) for r in (1, 2) for j in range(n_clients)]
    rows += [(r, j, "test_loss", 3 - r) for r in (0, 1, 2) for j in (-1, *range(n_clients))]
    return pd.DataFrame(rows, columns=["round", "client", "metric", "value"])


def marks(axis, filled=True) -> list[list[float]]:
    """The heights of the filled (after) or open (before) marks, a list for each series."""
    lines = [line for line in axis.lines if line.get_marker() != "None" and len(line.get_xdata())]
    return [line.get_ydata().tolist() for line in lines if (line.get_markerfacecolor() != "white") == filled]


def names(axis) -> list[str]:
    return [label.get_text() for label in axis.get_xticklabels()]


def test_learning_curves_have_a_line_for_each_client_and_the_pool():
    train, test = figures.learning_curves(curves(3)).axes
    assert [line.get_label() for line in train.lines] == ["client 0", "client 1", "client 2"]
    assert train.lines[1].get_ydata().tolist() == [1.99, 0.99]
    assert [line.get_label() for line in test.lines][-1] == "all clients' rows"
    assert test.lines[0].get_xdata().tolist() == [0, 1, 2]
    many = figures.learning_curves(curves(30)).axes[0]
    assert [line.get_label() for line in many.lines if not line.get_label().startswith("_")] == [
        "a client",
        "clients' mean",
    ]
    assert many.lines[-1].get_ydata() == pytest.approx([2 - 0.145, 1 - 0.145])


def test_perplexities_before_and_after_by_client_and_split_with_their_ratio():
    axis = figures.perplexity(table()).axes[0]
    assert axis.get_yscale() == "log"
    before, after = marks(axis, filled=False), marks(axis)
    assert [series[:3] for series in after] == [[2, 3, 4], [8, 9, 10], [8, 9, 10]]
    assert [series[:3] for series in before] == [[30, 31, 32], [40, 41, 42], [40, 41, 42]]
    assert after[0][3] == pytest.approx(24 ** (1 / 3))  # the mean of equal clients: the geometric one of 2, 3, 4
    # 8/2, 9/3, 10/4, and (8·9·10 / (2·3·4))^(1/3) = 30^(1/3)
    assert names(axis) == ["0\n× 4", "1\n× 3", "2\n× 2.5", "mean\n× 3.11"]
    low, high = axis.get_ylim()
    assert low < 2
    assert high > 42


def test_an_untrained_model_has_one_mark_for_each_and_no_after():
    figure = figures.perplexity(table(rounds=(0,)))
    assert [series[:3] for series in marks(figure.axes[0])] == [[30, 31, 32], [40, 41, 42], [40, 41, 42]]
    assert marks(figure.axes[0], filled=False) == []
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["training rows", "test rows", "held-out rows"]


def test_utility_is_drawn_in_percent_with_the_rows_behind_it():
    figure = figures.utility(table(metrics=("accuracy", "macro_f1")))
    assert [axis.get_ylabel() for axis in figure.axes] == ["accuracy (%)", "macro-F1 (%)"]
    for axis in figure.axes:
        assert marks(axis) == [pytest.approx([50, 50, 50, 50])]
        assert marks(axis, filled=False) == [pytest.approx([10, 11, 12, 11])]
        assert names(axis) == ["0\nn = 8", "1\nn = 7", "2\nn = 6", "mean\nn = 21"]
        assert axis.get_ylim()[0] == 0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "test rows",
        "before training",
        "after round 12",
    ]


def test_what_is_undefined_says_so_and_is_not_zero():
    axis = figures.utility(table(undefined=[1])).axes[0]
    assert [text.get_text() for text in axis.texts] == ["n/a"] * 2  # client 1, and with it the mean
    assert np.isnan(marks(axis)[0][1])
    nothing = table()
    nothing["value"] = np.nan
    for draw in (figures.perplexity, figures.utility):
        assert "n/a" in [text.get_text() for text in draw(nothing).axes[0].texts]


@pytest.mark.parametrize("n_clients", [1, READABLE_CLIENTS, READABLE_CLIENTS + 1, 100])
def test_many_clients_stay_readable(n_clients):
    for draw in (figures.perplexity, figures.utility):
        axis = draw(table(n_clients)).axes[0]
        assert len(names(axis)) <= READABLE_CLIENTS + 1
        assert names(axis)[-1].startswith("mean")
        assert len(marks(axis)[0]) == n_clients + 1
        assert any("\n" in name for name in names(axis)) == (n_clients < READABLE_CLIENTS - 1)


def test_a_table_without_the_mean_and_bytes_that_stay_the_same(tmp_path):
    clients = table().query("client != @POOLED", local_dict={"POOLED": POOLED})
    for draw in (figures.perplexity, figures.utility):
        assert not any(name.startswith("mean") for name in names(draw(clients).axes[0]))
        paths = [save_figure(draw(table()), table(), "x", tmp_path / place, "f") for place in ("a", "b")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    assert plt.get_fignums() == []
