"""Memorization against cases counted by hand."""

import math
import time

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.proportion import proportion_confint

from fedmem.analyze import ratios
from fedmem.analyze.counting import Counts, MetricsError, training_rows
from fedmem.analyze.intervals import tango
from fedmem.analyze.ratios import CELLS, EXCESS, SUMMARY, memorization

NAN = float("nan")


def frames(n_prefixes, n_train, found):
    """found: (prefix client, prefix number, suffix client, kind[, member[, score, identical sentence]])."""
    prefixes = [{"prefix_id": f"{j}-{i}", "client": j} for j, n in enumerate(n_prefixes) for i in range(n)]
    matches = []
    for row, (j, i, k, kind, *more) in enumerate(found):
        member, score, identical = (*more, *(True, NAN, False)[len(more) :])
        matches.append((f"{j}-{i}", j, f"s{row}", k, member, row % 10 + 1, 9.5, kind, score, identical))
    columns = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "rank", "bm25", "kind", "score"]
    matches = pd.DataFrame(matches, columns=[*columns, "identical_sentence"])
    return matches, pd.DataFrame(prefixes), pd.DataFrame({"client": range(len(n_train)), "n_train": n_train})


@pytest.fixture
def three():
    """3 clients with 4, 2 and 5 prefixes, 60, 30 and 10 training rows."""
    return frames(
        [4, 2, 5],
        [60, 30, 10],
        [
            (0, 0, 0, "verbatim"),
            (0, 0, 0, "paraphrase_low"),  # the same prefix and client again: one hit
            (0, 1, 0, "idea"),
            (0, 1, 1, "paraphrase_high"),
            (0, 3, 1, None),  # a candidate that typing gave no record
            (1, 0, 1, "verbatim"),
            (1, 0, 2, "verbatim"),
            (1, 1, 1, "paraphrase_high"),
            (2, 4, 0, "idea"),
            (2, 0, 2, "verbatim", False),  # held-out: control only
        ],
    )


def test_paper_counting_by_hand(three):
    result = memorization(*three)
    # client 0: prefixes 0, 1 hit client 0 (2/4), prefix 1 hits client 1 (1/4); client 1: both hit 1 (2/2), one hits 2
    # (1/2); client 2: prefix 4 hits client 0 (1/5)
    np.testing.assert_allclose(result.matrix, [[0.5, 0.25, 0], [0, 1, 0.5], [0.2, 0, 0]])
    assert result.intra == pytest.approx(0.6 * 0.5 + 0.3 * 1 + 0.1 * 0)
    assert result.inter == pytest.approx(0.6 * (0.25 / 2) + 0.3 * (0.5 / 2) + 0.1 * (0.2 / 2))
    assert result.total == pytest.approx(5 / 11)  # prefixes 0-0, 0-1, 1-0, 1-1, 2-4
    assert result.clients == (0, 1, 2)


def test_verbatim_counting_by_hand(three):
    result = memorization(*three, counting="verbatim")
    np.testing.assert_allclose(result.matrix, [[0.25, 0, 0], [0, 0.5, 0.5], [0, 0, 0]])
    assert (result.intra, result.total) == (pytest.approx(0.6 * 0.25 + 0.3 * 0.5), pytest.approx(2 / 11))


def test_control_counts_held_out_suffixes_alone(three):
    result = memorization(*three, member=False)
    np.testing.assert_allclose(result.matrix, [[0, 0, 0], [0, 0, 0], [0, 0, 0.2]])
    assert (result.intra, result.inter, result.total) == (pytest.approx(0.02), 0, pytest.approx(1 / 11))


@pytest.mark.parametrize(
    ("kind", "score", "identical", "strict"),
    [
        ("verbatim", NAN, False, 1),
        ("paraphrase_high", 0.7, False, 1),
        ("paraphrase_low", 0.2, False, 0),
        ("paraphrase_low", 0.2, True, 1),
        ("paraphrase_low", 0.7, False, 1),  # its best pair failed the entity test
        (None, 0.995, False, 1),  # above the paper's cap: no record, yet strict
        (None, 0.5, False, 0),
        ("idea", NAN, True, 0),
        (None, NAN, None, 0),
    ],
)
def test_strict_counting(kind, score, identical, strict):
    tables = frames([1], [1], [(0, 0, 0, kind, True, score, identical)])
    assert memorization(*tables, counting="strict").total == strict
    assert memorization(*tables, counting="paper").total == (kind is not None)


def test_strict_is_undefined_for_untyped_candidates_of_the_same_side():
    tables = frames([2, 2], [1, 1], [(0, 0, 0, "verbatim"), (1, 0, 0, "paraphrase", False)])
    assert memorization(*tables, counting="strict").total == 0.25
    control = memorization(*tables, counting="strict", member=False)
    assert np.isnan(control.matrix).all()
    assert all(math.isnan(value) for value in (control.intra, control.inter, control.total))
    assert memorization(*tables, counting="paper", member=False).total == 0.25


def test_no_match_at_all_is_zero_and_every_match_is_one():
    nothing = memorization(*frames([3, 3], [1, 1], []))
    assert (nothing.intra, nothing.inter, nothing.total) == (0, 0, 0)
    assert not nothing.matrix.any()
    everything = [(j, i, k, "idea") for j in range(2) for i in range(3) for k in range(2)]
    full = memorization(*frames([3, 3], [1, 1], everything))
    assert (full.intra, full.inter, full.total) == (1, 1, 1)


def test_one_client_has_no_inter():
    result = memorization(*frames([2], [5], [(0, 0, 0, "idea")]))
    assert (result.intra, result.total) == (0.5, 0.5)
    assert math.isnan(result.inter)


def test_a_client_without_prefixes_is_undefined_not_zero():
    tables = frames([2, 0], [5, 5], [(0, 0, 1, "idea")])
    result = memorization(*tables)
    np.testing.assert_array_equal(result.matrix, [[0, 0.5], [NAN, NAN]])
    assert math.isnan(result.intra)
    assert result.total == 0.5
    tables[2]["n_train"] = [5, 0]  # a client without weight does not matter
    assert (memorization(*tables).intra, memorization(*tables).inter) == (0, 0.5)
    tables[2]["n_train"] = 0  # no weights at all: 0/0
    assert math.isnan(memorization(*tables).intra)


def test_no_prefix_at_all_is_undefined():
    tables = frames([0, 0], [5, 5], [])
    prefixes = pd.DataFrame({"prefix_id": [], "client": []})
    assert math.isnan(memorization(tables[0], prefixes, tables[2]).total)


def test_a_client_without_suffixes_is_undefined_when_the_suffixes_are_known(three):
    suffixes = pd.DataFrame({"client": [0, 1, 2, 0], "member": [True, True, True, False]})
    assert np.isfinite(memorization(*three, suffixes=suffixes).matrix).all()
    control = memorization(*three, member=False, suffixes=suffixes)
    np.testing.assert_array_equal(np.isnan(control.matrix), [[False, True, True]] * 3)
    none = memorization(*three, member=False, suffixes=suffixes[suffixes["member"]])
    assert math.isnan(none.total)


def test_order_and_labels_of_rows_do_not_matter(three):
    shuffled = [table.sample(frac=1, random_state=3).set_index(np.arange(len(table)) * 7) for table in three]
    first, second = memorization(*three), memorization(*shuffled)
    np.testing.assert_array_equal(first.matrix, second.matrix)
    assert (first.intra, first.inter, first.total) == (second.intra, second.inter, second.total)


def test_prefix_ids_need_only_be_unique_within_a_client():
    matches, prefixes, clients = frames([2, 2], [1, 1], [(0, 0, 0, "idea"), (1, 0, 0, "idea")])
    matches["prefix_id"], prefixes["prefix_id"] = matches["prefix_id"].str[-1], prefixes["prefix_id"].str[-1]
    assert memorization(matches, prefixes, clients).total == 0.5


def test_cells_hold_the_matrix_with_wilson_intervals(three):
    table = ratios.cells(Counts(*three), confidence=0.9)
    assert list(table.columns) == CELLS
    assert len(table) == 2 * 3 * 9
    cell = table.query("prefix_client == 0 and suffix_client == 1 and member and counting == 'paper'").iloc[0]
    assert (cell["n"], cell["hits"], cell["ratio"]) == (4, 1, 0.25)
    assert (cell["low"], cell["high"]) == pytest.approx(proportion_confint(1, 4, alpha=0.1, method="wilson"))
    paper = table.query("member and counting == 'paper'").pivot(
        index="prefix_client", columns="suffix_client", values="ratio"
    )
    np.testing.assert_array_equal(paper.to_numpy(), memorization(*three).matrix)
    assert table.query("hits == 0")["high"].gt(0).all()
    assert table["low"].le(table["ratio"]).all()
    assert table["ratio"].le(table["high"]).all()


def test_cells_are_nan_where_strict_is_undefined():
    table = ratios.cells(Counts(*frames([2], [1], [(0, 0, 0, "paraphrase")])))
    strict = table.query("member and counting == 'strict'")
    assert strict[["hits", "ratio", "low", "high"]].isna().all(axis=None)
    assert strict["n"].tolist() == [2]


def test_summary_and_its_record(three):
    table = ratios.summary(Counts(*three))
    assert list(table.columns) == SUMMARY
    assert set(table["metric"]) == {
        f"{a}_{b}" for a in ("mr", "control", "excess") for b in ("intra", "inter", "total")
    }
    assert table["n"].eq(11).all()
    values = table.set_index(["metric", "counting"])["value"]
    assert values["mr_intra", "paper"] == memorization(*three).intra
    assert values["control_total", "verbatim"] == memorization(*three, counting="verbatim", member=False).total
    assert (table["low"].le(table["value"]) & table["value"].le(table["high"])).all()
    assert table["high"].gt(0).all()  # 0 hits do not mean 0 risk
    record = ratios.as_record(ratios.summary(Counts(*frames([2], [5], [(0, 0, 0, "idea")]))))
    assert record["mr_intra_paper"] == 0.5
    assert record["mr_inter_paper"] is None


def test_a_summary_is_read_side_by_side_in_percent(three):
    table = ratios.side_by_side(ratios.summary(Counts(*three)))
    assert table.columns.tolist() == ["mr", "control", "excess"]
    assert table.index.tolist()[:4] == [*(("paper", part) for part in ("intra", "inter", "total")), ("strict", "intra")]
    # as in the paper counting by hand: 0.6 · 2/4 + 0.3 · 2/2, and 0.1 · 1/5
    assert table.loc[("paper", "intra")].tolist() == pytest.approx([60, 2, 58])
    untyped = ratios.summary(Counts(*frames([2], [1], [(0, 0, 0, "paraphrase"), (0, 0, 0, "paraphrase", False)])))
    runs = pd.concat([untyped.assign(run="b"), ratios.summary(Counts(*three)).assign(run="a")])
    lines = ratios.side_by_side(runs).index.droplevel("MR").unique().tolist()
    assert lines == [("paper", "b"), ("paper", "a"), ("strict", "a"), ("verbatim", "b"), ("verbatim", "a")]


def test_excess_is_what_members_have_more_than_the_control(three):
    table = ratios.summary(Counts(*three)).set_index(["metric", "counting"])
    # intra: 0.6·(2/4 − 0) + 0.3·(2/2 − 0) + 0.1·(0 − 1/5); total: (5 − 1)/11, as 2-0 hits the control alone
    assert table.loc[("excess_intra", "paper"), "value"] == pytest.approx(0.58)
    assert table.loc[("excess_total", "paper"), "value"] == pytest.approx(4 / 11)
    low, high = map(float, tango(5, 1, 11))
    assert table.loc[("excess_total", "paper"), ["low", "high"]].tolist() == pytest.approx([low, high])
    inter = table.loc[("mr_inter", "paper"), "value"] - table.loc[("control_inter", "paper"), "value"]
    assert table.loc[("excess_inter", "paper"), "value"] == pytest.approx(inter)


def test_excess_of_cells_counts_prefixes_that_differ():
    # client 0: prefixes 0, 1, 2 hit members of client 1, 2 and 3 its held-out ones: 2 against 1 of 5
    found = [(0, i, 1, "idea") for i in (0, 1, 2)] + [(0, i, 1, "verbatim", False) for i in (2, 3)]
    table = ratios.excess(Counts(*frames([5, 0], [1, 1], found)))
    assert list(table.columns) == EXCESS
    cell = table.query("counting == 'paper' and prefix_client == 0 and suffix_client == 1").iloc[0]
    assert (cell["n"], cell["only_member"], cell["only_control"]) == (5, 2, 1)
    assert cell["excess"] == pytest.approx(0.2)
    assert (cell["low"], cell["high"]) == pytest.approx([float(bound) for bound in tango(2, 1, 5)])
    assert cell["p_value"] == pytest.approx(1)  # two heads of three, either way
    assert table.query("prefix_client == 1")[["excess", "low", "p_value"]].isna().all(axis=None)
    untyped = ratios.excess(Counts(*frames([5], [1], [(0, 0, 0, "paraphrase", False)])))
    assert untyped.query("counting == 'strict'")["excess"].isna().all()
    assert untyped.query("counting == 'paper'")["excess"].tolist() == [-0.2]


def test_holm_is_over_the_cells_of_one_counting():
    found = [(j, i, 0, "verbatim") for j in range(2) for i in range(10)]
    table = ratios.excess(Counts(*frames([10, 10], [1, 1], found))).query("counting == 'verbatim'")
    # ten of ten, either way: 2/2¹⁰, twice; the other two cells are 1: ·4 for the first, ·3 for the second, never less
    assert table["p_value"].tolist() == pytest.approx([2 / 1024, 1, 2 / 1024, 1])
    assert table["p_holm"].tolist() == pytest.approx([8 / 1024, 1, 8 / 1024, 1])


def test_a_prefix_counts_once_as_its_first_kind(three):
    table = ratios.kinds(Counts(*three)).set_index(["metric", "kind"])["value"]
    # own client: 0-0 verbatim (and paraphrase_low), 0-1 idea, 1-0 verbatim, 1-1 paraphrase_high
    assert table["mr_intra"].to_dict() == pytest.approx(
        {
            "verbatim": 0.6 / 4 + 0.3 / 2,
            "paraphrase_high": 0.3 / 2,
            "paraphrase_low": 0,
            "paraphrase": 0,
            "idea": 0.6 / 4,
        }
    )
    # any client: 0-1 is paraphrase_high (with client 1) before idea, 2-4 idea
    assert table["mr_total"].to_dict() == pytest.approx(
        {"verbatim": 2 / 11, "paraphrase_high": 2 / 11, "paraphrase_low": 0, "paraphrase": 0, "idea": 1 / 11}
    )
    paper = ratios.summary(Counts(*three)).query("counting == 'paper'").set_index("metric")["value"]
    for metric in ("mr_intra", "mr_inter", "mr_total", "control_intra", "control_inter", "control_total"):
        assert table[metric].sum() == pytest.approx(paper[metric])
    assert ratios.kinds(Counts(*frames([1, 0], [1, 1], [])))["value"].isna().sum() == 20  # 0/0 of intra and inter


def test_tables_do_not_depend_on_the_order_of_the_rows(three):
    shuffled = [table.sample(frac=1, random_state=1) for table in three]
    pd.testing.assert_frame_equal(ratios.cells(Counts(*three)), ratios.cells(Counts(*shuffled)))
    pd.testing.assert_frame_equal(ratios.summary(Counts(*three)), ratios.summary(Counts(*shuffled)))


def test_counts_without_some_matches_are_those_of_the_other_matches(three):
    matches, prefixes, clients = three
    first = np.arange(len(matches)) < 5
    counts = Counts(*three)
    counts.flag("strict")  # what was computed of all matches is taken over
    fewer, other = counts.without(first), Counts(matches[~first], prefixes, clients)
    pd.testing.assert_frame_equal(ratios.summary(fewer), ratios.summary(other))
    pd.testing.assert_frame_equal(ratios.kinds(fewer), ratios.kinds(other))
    assert ratios.summary(counts).equals(ratios.summary(Counts(*three)))  # the counts of all are as they were
    untyped = Counts(*frames([2], [1], [(0, 0, 0, "paraphrase"), (0, 1, 0, "verbatim")]))
    assert np.isnan(untyped.memorization("strict").total)
    assert untyped.without([True, False]).memorization("strict").total == 0.5
    with pytest.raises(MetricsError, match="left_out: got 2 values; expected one for each of the 10 matches"):
        counts.without([True, False])


def test_clients_and_their_training_rows_are_counted_from_the_partition():
    rows = pd.DataFrame({"client": [1, 0, 1, 0, 2], "split": ["train", "train", "train", "test", "train"]})
    assert training_rows(rows).to_dict("list") == {"client": [0, 1, 2], "n_train": [1, 2, 1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, p, c: (m.drop(columns="kind"), p, c), "matches: column kind is missing"),
        (lambda m, p, c: (m, p.drop(columns="client"), c), "prefixes: column client is missing"),
        (lambda m, p, c: (m, p, c.drop(columns="n_train")), "clients: column n_train is missing"),
        (lambda m, p, c: (m, p, c[c["client"] < 2]), r"prefixes, column client: got \[2\], not among the clients"),
        (lambda m, p, c: (m.assign(suffix_client=9), p, c), r"suffix_client: got \[9\], not among the clients"),
        (lambda m, p, c: (m, p.iloc[1:], c), "prefix 0-0 of client 0 is not among the sampled prefixes"),
        (lambda m, p, c: (m, pd.concat([p, p]), c), "prefix 0-0 of client 0 occurs twice"),
        (lambda m, p, c: (m, p, pd.concat([c, c])), "client 0 occurs twice"),
        (lambda m, p, c: (m, p, c.assign(n_train=-1)), "n_train"),
        (lambda m, p, c: (m.assign(kind="summary"), p, c), r"kind: got \['summary'\]; expected one of verbatim"),
    ],
)
def test_clear_errors(three, change, message):
    with pytest.raises(MetricsError, match=message):
        memorization(*change(*three))


def test_clear_error_for_countings_and_confidence(three):
    for compute in (memorization, lambda *tables, counting: ratios.cells(Counts(*tables), countings=[counting])):
        with pytest.raises(MetricsError, match="counting: got 'loose'; expected one of paper, strict, verbatim"):
            compute(*three, counting="loose")
    with pytest.raises(ValueError, match="confidence: got 95"):
        ratios.cells(Counts(*three), confidence=95)
    with pytest.raises(MetricsError, match="column score, identical_sentence is missing"):
        memorization(three[0].drop(columns=["score", "identical_sentence"]), *three[1:], counting="strict")


def test_large_tables_are_quick():
    # a tenth of 100 clients × 4,000 prefixes × 10 matches, which took 14 s (cells) and 8 s (summary)
    rng, n_clients, n = np.random.default_rng(5), 100, 400
    ids = np.arange(n_clients * n)
    prefixes = pd.DataFrame({"prefix_id": ids, "client": ids // n})
    matches = pd.DataFrame(
        {
            "prefix_id": np.repeat(ids, 10),
            "prefix_client": np.repeat(ids // n, 10),
            "suffix_client": rng.integers(0, n_clients, 10 * len(ids)),
            "member": rng.random(10 * len(ids)) < 0.5,
            "kind": rng.choice(["verbatim", "paraphrase_high", "idea", None], 10 * len(ids)),
            "score": rng.random(10 * len(ids)),
            "identical_sentence": False,
        }
    )
    clients = pd.DataFrame({"client": range(n_clients), "n_train": 1})
    start = time.perf_counter()
    assert len(ratios.cells(Counts(matches, prefixes, clients))) == 6 * n_clients**2
    assert time.perf_counter() - start < 20
