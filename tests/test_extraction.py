"""Characters, runs and rows that came back, and how estimates settle, counted by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from fedmem.analyze.counting import Counts, MetricsError
from fedmem.analyze.extracted_text import by_row, extracted
from fedmem.analyze.ratios import ratio_by_sample_size
from fedmem.config.vocabulary import POOLED
from fedmem.corpus.texts import measurable


@pytest.fixture
def tables():
    """Two clients; suffixes of 100 characters, a third of client 0 of 50; spans of suffixes (continuations: alike)."""
    suffixes = pd.DataFrame(
        {"suffix_id": ["a", "b", "c", "h"], "client": [0, 1, 0, 0], "row_id": ["A", "B", "C", "H"],
         "member": [True, True, True, False], "suffix": ["x" * 100, "y" * 100, "z" * 50, "h" * 80]}
    )  # fmt: skip
    found = [
        ("p", 0, "a", 0, True, "verbatim", [[0, 60, 0, 60]]),
        ("q", 0, "a", 0, True, "verbatim", [[40, 70, 0, 30], [80, 90, 0, 10]]),
        ("r", 1, "a", 0, True, "verbatim", [[0, 10, 0, 10]]),
        ("r", 1, "c", 0, True, "paraphrase", [[0, 50, 0, 50]]),
        ("p", 0, "h", 0, False, "verbatim", [[10, 20, 0, 10]]),
    ]
    columns = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "kind", "detections"]
    return pd.DataFrame(found, columns=columns), suffixes


def test_characters_that_came_back_are_counted_once(tables):
    table = extracted(*tables).set_index(["suffix_client", "member", "prefix_client"])
    # a: 0–70 and 80–90 by client 0, 0–10 by client 1; available of client 0: 100 + 50
    assert table.loc[(0, True, 0), ["chars", "available", "longest"]].tolist() == [80, 150, 60]
    assert table.loc[(0, True, 1), ["chars", "longest"]].tolist() == [10, 10]
    assert table.loc[(0, True, POOLED), "share"] == pytest.approx(80 / 150)
    assert table.loc[(0, False, 0), "share"] == pytest.approx(10 / 80)
    assert table.loc[(1, True, POOLED), ["chars", "available", "share", "longest"]].tolist() == [0, 100, 0, 0]
    paper = extracted(*tables, counting="paper").set_index(["suffix_client", "member", "prefix_client"])
    assert paper.loc[(0, True, 1), "chars"] == 60
    assert len(table) == 3 * 3  # membership of each client that has suffixes of it


def test_rows_say_whose_prefixes_pull_them_out(tables):
    table = by_row(*tables).set_index("row_id")
    assert list(table.index) == ["A", "H"]
    assert table.loc["A", ["prefixes", "own", "others", "clients", "longest"]].tolist() == [3, 2, 1, 2, 60]
    assert by_row(*tables, counting="paper")["row_id"].tolist() == ["A", "C", "H"]
    assert by_row(tables[0].iloc[:0], tables[1]).empty


def test_measurable_is_why_short_texts_never_match(tables):
    prefixes = pd.DataFrame({"client": [0, 0, 1], "continuation": ["x" * 49, "x" * 50, ""]})
    table = measurable(prefixes, tables[1]).set_index(["client", "text"])
    assert table.loc[(0, "continuation"), ["n", "long_enough", "share", "median_chars"]].tolist() == [2, 1, 0.5, 49.5]
    assert table.loc[(1, "continuation"), "share"] == 0
    assert table.loc[(0, "member suffix"), "share"] == 1
    assert table.loc[(0, "held-out suffix"), "n"] == 1
    assert (1, "held-out suffix") not in table.index
    short = measurable(prefixes, tables[1], min_match_chars=81).set_index(["client", "text"])
    assert short.loc[(0, "member suffix"), "long_enough"] == 1


def sampled(n, hits):
    """Two clients of n prefixes and suffixes; the first `hits` prefixes of each match their own suffix alone."""
    ids = [(j, i) for j in range(2) for i in range(n)]
    prefixes = pd.DataFrame([(f"p{j}-{i}", j) for j, i in ids], columns=["prefix_id", "client"])
    suffixes = pd.DataFrame([(f"s{j}-{i}", j, True) for j, i in ids], columns=["suffix_id", "client", "member"])
    found = [(f"p{j}-{i}", j, f"s{j}-{i}", j, True, "verbatim") for j, i in ids if i < hits]
    columns = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "kind"]
    clients = pd.DataFrame({"client": [0, 1], "n_train": [1, 3]})
    return pd.DataFrame(found, columns=columns), prefixes, clients, suffixes


def test_fewer_prefixes_keep_the_share_and_fewer_suffixes_lower_it():
    table = ratio_by_sample_size(Counts(*sampled(100, 40)), draws=50).set_index(["fewer", "metric", "share"])
    for fewer in ("prefixes", "suffixes"):
        assert table.loc[(fewer, "mr_intra", 1.0), ["value", "low", "high"]].tolist() == pytest.approx([0.4] * 3)
        assert table.loc[(fewer, "mr_intra", 0.25), "n"] == 50
    half = table.loc[("prefixes", "mr_intra", 0.5)]
    assert half["value"] == pytest.approx(0.4, abs=0.03)
    assert half["low"] < 0.4 < half["high"]
    # a prefix matches its one suffix only while that is sampled: 0.4 · ½
    assert table.loc[("suffixes", "mr_intra", 0.5), "value"] == pytest.approx(0.2, abs=0.03)
    assert table.loc[("suffixes", "mr_total", 1.0), "value"] == pytest.approx(0.4)
    assert (table.xs("mr_inter", level="metric")["value"] == 0).all()


def test_settling_is_seeded_and_undefined_stays_undefined():
    first, second = (ratio_by_sample_size(Counts(*sampled(20, 5))) for _ in range(2))
    pd.testing.assert_frame_equal(first, second)
    matches, prefixes, clients, suffixes = sampled(20, 5)
    untyped = matches.assign(kind="paraphrase", score=np.nan, identical_sentence=False)
    assert ratio_by_sample_size(Counts(untyped, prefixes, clients, suffixes), counting="strict")["value"].isna().all()
    alone = ratio_by_sample_size(Counts(matches, prefixes, clients, suffixes)).query("metric == 'mr_inter'")["value"]
    assert not math.isnan(alone.iloc[0])
    with pytest.raises(MetricsError, match="suffixes: got None; expected the `suffixes` table"):
        ratio_by_sample_size(Counts(matches, prefixes, clients))
