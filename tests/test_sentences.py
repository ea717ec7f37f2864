"""Sentences say what the figures allow, by hand-made figures."""

import numpy as np
import pandas as pd
import pytest

from fedmem.analyze import sentences as analyze_sentences
from fedmem.analyze.sentences import aggregate, excess_cells, exclusions, extracted, measurable, settling
from fedmem.display.numbers import percent
from fedmem.report import sentences

NAN = float("nan")


def summary(rows, run=None):
    table = pd.DataFrame(rows, columns=["metric", "value", "low", "high"]).assign(counting="verbatim", n=96)
    return table if run is None else table.assign(run=run)


def figures(excess, low, high, run=None):
    return summary(
        [("mr_intra", 0.1 + excess, 0, 1), ("control_intra", 0.1, 0, 1), ("excess_intra", excess, low, high)], run
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.01533, "1.53 %"), (0, "0 %"), (0.5, "50.0 %"), (1, "100 %"), (0.00004, "0.004 %"), (NAN, "n/a")],
)
def test_percent(value, words):
    assert percent(value) == words


@pytest.mark.parametrize(
    ("excess", "verdict"),
    [
        ((0.2, 0.1, 0.3), "more than chance explains."),
        ((0.2, -0.01, 0.3), "indistinguishable from chance."),
        ((-0.2, -0.3, -0.1), "fewer than chance explains."),
    ],
)
def test_a_difference_is_one_only_where_its_interval_leaves_0_out(excess, verdict):
    text = aggregate(figures(*excess), "intra", "verbatim")
    assert text.endswith(verdict)
    assert "Of 96 prefixes" in text
    assert "10.0 % match held-out text" in text
    of, low, high = (f"{100 * value:.{1 if abs(value) >= 0.1 else 2}f}" for value in excess)
    assert f"the excess is {of} percentage points ({low} to {high}): " in text


def test_undefined_figures_are_called_so():
    assert aggregate(figures(NAN, NAN, NAN), "intra", "verbatim").endswith("is not defined here.")
    assert "is not defined" in sentences.over_control(figures(NAN, NAN, NAN, "a"), "intra", "verbatim")


def test_a_missing_control_is_called_so():
    alone = summary([("mr_intra", 0.25, 0.1, 0.4), ("control_intra", NAN, NAN, NAN), ("excess_intra", NAN, NAN, NAN)])
    text = aggregate(alone, "intra", "verbatim")
    assert text.startswith("Of 96 prefixes 25.0 % (10.0 % to 40.0 %) give back a client's own text")
    assert text.endswith("there is no held-out control here, so how much of it is chance is not known.")
    assert "there is no held-out control" in sentences.over_control(alone.assign(run="a"), "intra", "verbatim")


def test_many_names_are_cut():
    table = pd.concat([figures(0.2, 0.1, 0.3, f"run{n}") for n in range(12)])
    text = sentences.over_control(table, "intra", "verbatim")
    assert "`run7` (by 20.0 percentage points) and 4 more." in text
    assert "run8" not in text


def test_runs_are_named_by_what_is_shown_of_them():
    table = pd.concat([figures(0.2, 0.1, 0.3, "fedavg"), figures(0.0, -0.1, 0.1, "none")])
    text = sentences.over_control(table, "intra", "verbatim")
    assert "above its held-out control in `fedavg` (by 20.0 percentage points); " in text
    assert "; it is indistinguishable from it in `none`." in text
    assert "only between seeds" in text
    alone = sentences.over_control(figures(0.0, -0.1, 0.1, "none"), "intra", "verbatim")
    assert "above" not in alone
    own = {"a": {"difference": 0.1, "low": 0.01, "high": 0.2}, "b": {"difference": NAN, "low": NAN, "high": NAN}}
    assert sentences.intra_over_inter(own) == "MR_intra is above MR_inter in `a`."
    assert sentences.intra_over_inter({"b": own["b"]}) == "MR_inter is not defined here."


def test_comparisons_speak_after_holm_alone():
    rows = [("total", "a", "b", 0.1, 0.01, 0.04), ("total", "a", "c", -0.1, 0.03, 0.06), ("total", "b", "c", 0, 1, 1)]
    table = pd.DataFrame(rows, columns=["part", "run", "other", "difference", "p_value", "p_holm"])
    text = sentences.comparison(table)
    assert "`a` +10.0 percentage points against `b`" in text
    assert "`c`" not in text
    assert "2 of 3 comparisons show no difference" in text
    assert sentences.comparison(table.iloc[:0]).startswith("No two runs differ")
    references = table.iloc[:1].assign(reference="untrained", low=0.01)
    assert sentences.over_reference(references, "untrained") == "MR_total is above the untrained model's in `a`."
    assert "missing" in sentences.over_reference(references, "local")


def test_short_texts_make_a_ratio_of_0_say_nothing():
    table = pd.DataFrame({"text": ["continuation", "member suffix"], "n": [10, 10], "long_enough": [0, 10]})
    assert "0 % of the continuations, 100 % of the member suffixes" in measurable(table, 50)
    assert "says nothing about memorization" in measurable(table, 50)
    assert "lower bound" in measurable(table.assign(long_enough=[5, 10]), 50)
    assert "not be an artefact" in measurable(table.assign(long_enough=10), 50)


def test_what_stays_without_copies_and_babble():
    rows = [("nothing", 0.4), ("own suffix", 0.1), ("shared", 0.3), ("incoherent", 0.2), ("shared, incoherent", 0.1)]
    table = pd.DataFrame(rows, columns=["excluded", "value"]).assign(metric="mr_total", counting="paper")
    text = exclusions(table)
    assert "is 40.0 %; it falls to 10.0 %" in text
    assert "(10.0 percentage points by shared passages, 20.0 percentage points by babble)" in text
    hardly = exclusions(table.assign(value=[0.4, 0.1, 0.3, 0.2, 0.39999]))
    assert "is 40.0 %; it stays at 40.0 % when both" in hardly
    assert "nothing to leave out" in exclusions(table.assign(value=0.0))


def test_few_runs_show_no_law_and_one_seed_no_spread():
    table = pd.DataFrame({"gap": [1.0, 2.0, 3.0], "value": [0.1, 0.2, 0.3]})
    assert "correlate by 1.00" in sentences.gap(table)
    assert "its relation to memorization cannot be assessed" in sentences.gap(table.iloc[:2])
    none = pd.DataFrame(columns=["run", "seeds", "metric", "counting", "mean", "sd"])
    assert "trained once" in sentences.seeds(none)
    row = {"run": "a", "seeds": 3, "metric": "mr_intra", "counting": "verbatim", "mean": 0.2, "sd": 0.01}
    assert "`a` 20.0 % ± 1.00 % (n = 3 seeds)" in sentences.seeds(pd.DataFrame([row]))


def test_text_that_came_back_is_counted_and_crossed_named():
    rows = [(0, -1, 80, 100, 60), (0, 0, 70, 100, 60), (0, 1, 10, 100, 10)]
    table = pd.DataFrame(rows, columns=["suffix_client", "prefix_client", "chars", "available", "longest"])
    text = extracted(table.assign(member=True))
    assert "80 of 100 characters" in text
    assert "longest passage 60" in text
    assert text.endswith("10 came to another client's prompts.")
    assert "No run of words" in extracted(table.assign(member=True, chars=0))


def test_settling_says_whether_suffixes_still_raise_it():
    halves = [("suffixes", 0.5, 0.2), ("suffixes", 1.0, 0.4), ("prefixes", 0.5, 0.4), ("prefixes", 1.0, 0.4)]
    rows = [(fewer, share, "mr_total", value) for fewer, share, value in halves]
    table = pd.DataFrame(rows, columns=["fewer", "share", "metric", "value"])
    assert "still rises" in settling(table)
    assert "hardly rises" in settling(table.assign(value=[0.39, 0.4, 0.4, 0.4]))
    assert "not defined" in settling(table.assign(value=np.nan))


def test_suffix_clients_and_kinds_and_cells():
    rows = [(0, 0, 9, 10), (0, 1, 1, 10), (1, 0, 3, 10), (1, 1, 8, 10)]
    cells = pd.DataFrame(rows, columns=["prefix_client", "suffix_client", "hits", "n"])
    text = sentences.suffix_clients(cells.assign(counting="paper", member=True), "paper")
    assert "client 0 comes back most often (30.0 %)" in text
    assert "client 1 least (10.0 %)" in text
    kinds = pd.DataFrame({"metric": "mr_total", "kind": ["verbatim", "paraphrase"], "value": [0.1, 0.2]})
    assert "10.0 % verbatim, 20.0 % paraphrase" in analyze_sentences.kinds(kinds)
    assert "upper bound" in analyze_sentences.kinds(kinds)
    assert analyze_sentences.kinds(kinds.assign(value=0)).startswith("Nothing")
    excess = pd.DataFrame(
        {"prefix_client": [0, 0], "suffix_client": [0, 1], "excess": [0.3, 0.1], "p_holm": [0.01, 0.2]}
    )
    text = excess_cells(excess.assign(counting="paper"), "paper")
    assert text.startswith("Of 2 pairs of clients 1 show more than their control")
    assert "(1 of them a client with itself, 0 one" in text
