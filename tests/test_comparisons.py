"""Runs against each other, counted by hand; and the published figures."""

import numpy as np
import pandas as pd
import pytest
from test_roads import REPOSITORY

from fedmem.analyze.counting import Counts
from fedmem.analyze.intervals import independent_difference, mcnemar, tango
from fedmem.config.partition import PartitionConfig
from fedmem.config.stages import STAGES
from fedmem.config.vocabulary import PARTS
from fedmem.report import comparisons
from fedmem.report.comparisons import IDLE, Measured, compare, difference, intra_over_inter, pairs, reference, seeds
from fedmem.report.paper import published
from fedmem.report.paper.tables import Runs
from fedmem.results.identity import outside_files
from fedmem.study.loading import load_study

NAN = float("nan")


def run(hits, n=10, n_clients=2, names="p"):
    """hits: (client, prefix number, suffix client)."""
    prefixes = pd.DataFrame([(f"{names}{j}-{i}", j) for j in range(n_clients) for i in range(n)])
    prefixes.columns = ["prefix_id", "client"]
    found = [(f"{names}{j}-{i}", j, k, True, "verbatim") for j, i, k in hits]
    matches = pd.DataFrame(found, columns=["prefix_id", "prefix_client", "suffix_client", "member", "kind"])
    clients = pd.DataFrame({"client": range(n_clients), "n_train": [3, 1, 1][:n_clients]})
    return Measured.of(Counts(matches, prefixes, clients), "verbatim")


def test_runs_on_the_same_prefixes_are_compared_prefix_by_prefix():
    first = run([(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 1), (1, 5, 0)])
    second = run([(0, 0, 0), (1, 3, 1)])
    table = difference(first, second).set_index("part")
    assert table["paired"].all()
    # intra, weights ¾ and ¼: first ¾·3/10 + ¼·1/10, second ¾·1/10 + ¼·1/10
    assert table.loc["intra", ["first", "second", "difference"]].tolist() == pytest.approx([0.25, 0.1, 0.15])
    assert table.loc["intra", ["more", "less"]].tolist() == [3, 1]  # 0-1, 0-2, 1-0 against 1-3
    assert table.loc["intra", "p_value"] == pytest.approx(mcnemar(3, 1))
    # total: 5 of 20 against 2 of 20; only in the first: 0-1, 0-2, 1-0, 1-5, only in the second: 1-3
    assert table.loc["total", ["difference", "more", "less", "n"]].tolist() == pytest.approx([3 / 20, 4, 1, 20])
    assert table.loc["total", ["low", "high"]].tolist() == pytest.approx([float(b) for b in tango(4, 1, 20)])
    assert table.loc["inter", "difference"] == pytest.approx(0.25 * 0.1)


def test_runs_on_other_prefixes_are_compared_by_their_shares():
    table = difference(run([(0, 0, 0)]), run([(0, 0, 0), (0, 1, 0)], names="q")).set_index("part")
    assert not table["paired"].any()
    assert table["p_value"].isna().all()
    assert table.loc["total", "difference"] == pytest.approx(-0.05)
    expected = [float(bound) for bound in independent_difference(0.05, 20, 0.1, 20)]
    assert table.loc["total", ["low", "high"]].tolist() == pytest.approx(expected)


def test_a_caption_names_the_intervals_that_a_table_has():
    paired, unpaired = difference(run([]), run([(0, 0, 0)])), difference(run([]), run([], names="q"))
    assert comparisons.interval_method(paired) == "Tango"
    assert comparisons.interval_method(unpaired) == "Miettinen-Nurminen"
    both = comparisons.interval_method(pd.concat([unpaired, paired]))
    assert both == "Tango where two runs continued the same prefixes, Miettinen-Nurminen elsewhere"


def test_undefined_shares_have_no_difference():
    one = run([(0, 0, 0)], n_clients=1)
    table = difference(one, one).set_index("part")
    assert np.isnan(table.loc["inter", ["first", "difference", "low", "p_value"]].astype(float)).all()
    assert table.loc["intra", "difference"] == 0
    assert table.loc["intra", "high"] > 0


def test_intra_over_inter_by_hand():
    # ¾·(2/10 − 1/10) + ¼·(0 − 0); prefixes 0-0 and 0-1 hit their own client, 0-2 the other one
    found = intra_over_inter(run([(0, 0, 0), (0, 1, 0), (0, 2, 1)]))
    assert found["difference"] == pytest.approx(0.075)
    assert (found["more"], found["less"]) == (2, 1)
    assert found["low"] < 0 < found["high"]


@pytest.fixture
def parameters():
    rows = {
        "fedavg": ("fedavg", 30, 0, 3, "dialog", 1.0),
        "fedavg-1": ("fedavg", 30, 1, 3, "dialog", 2.0),
        "prox": ("fedprox", 30, 0, 3, "dialog", 3.0),
        "long": ("fedavg", 100, 0, 3, "dialog", 4.0),
        "none": ("none", 30, 0, 0, "dialog", 5.0),
        "qa-prox": ("fedprox", 30, 0, 3, "qa", 6.0),
    }
    columns = ["algorithm", "prefix_tokens", "train_seed", "checkpoint_round", "task", "seconds_train"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    return table.assign(
        rounds=3, corpus_path=None, client_groups=[[["a"]]] * len(table)
    )  # null and lists are values too


def test_pairs_differ_in_one_parameter(parameters):
    early = parameters.loc[["fedavg"]].assign(checkpoint_round=1, rounds=5).rename(index={"fedavg": "early"})
    assert pairs(pd.concat([parameters.loc[["fedavg"]], early])) == []  # round 1 of 5 against round 3 of 3
    longer = early.assign(checkpoint_round=5)
    assert pairs(pd.concat([parameters.loc[["fedavg"]], longer])) == [("fedavg", "early", "rounds")]
    assert pairs(parameters) == [
        ("fedavg", "prox", "algorithm"),
        ("fedavg", "long", "prefix_tokens"),
        ("fedavg", "none", "algorithm"),  # its round 0 follows from the algorithm
        ("fedavg-1", "none", "algorithm"),  # no seed of training is the untrained model's
        ("prox", "none", "algorithm"),
        ("prox", "qa-prox", "task"),
    ]
    texts = comparisons.comparable_parameters(parameters)
    assert reference(texts, "fedavg", "none") == "none"
    assert reference(texts, "long", "none") is None  # other prefixes
    assert reference(texts, "qa-prox", "none") is None
    assert reference(texts, "none", "local") is None
    models = parameters.loc[["none", "fedavg"]].assign(model=["tiny-qwen2", "tiny-llama"])
    # what another model writes untrained says nothing
    assert reference(comparisons.comparable_parameters(models), "fedavg", "none") is None


def test_what_has_no_meaning_for_one_of_two_runs_is_no_difference(parameters):
    told = parameters.loc[["fedavg", "prox"]].assign(
        proximal_mu=[0.1, 1.0],
        finetuning="full",
        lora_rank=[8, 16],
        retriever="embedded",
        shards=[1, 2],
        local_steps=None,
    )
    assert pairs(told) == [("fedavg", "prox", "algorithm")]
    stronger = pd.concat([told, told.loc[["prox"]].assign(proximal_mu=2.0).set_axis(["stronger"])])
    assert pairs(stronger) == [
        ("fedavg", "prox", "algorithm"), ("fedavg", "stronger", "algorithm"), ("prox", "stronger", "proximal_mu")
    ]  # fmt: skip
    assert comparisons.families(comparisons.comparable_parameters(stronger), "algorithm") == [
        ["fedavg", "prox"],
        ["fedavg", "stronger"],
    ]
    assert pairs(told.assign(finetuning="lora")) == []  # there the rank is a second difference
    assert pairs(told.assign(local_epochs=[1, 2])) == []
    assert pairs(told.assign(local_epochs=[1, 2], local_steps=[5.0, 5.0])) == [("fedavg", "prox", "algorithm")]


@pytest.mark.parametrize("base", [None, "small"])
def test_fedprox_is_compared_among_the_defences(base):
    described = load_study(REPOSITORY / "params/studies/defences.yaml", base=base).describe()["runs"]
    parameters = pd.DataFrame.from_dict({run["name"]: run["parameters"] for run in described}, orient="index")
    against = {other: parameter for run, other, parameter in pairs(parameters) if run == "summarization-none"}
    assert against == {
        "summarization-lora": "finetuning", "summarization-fedprox": "algorithm",
        "summarization-deduplicated": "duplicates", "summarization-clipped": "update_clip",
    }  # fmt: skip
    found = Runs(parameters).family("algorithm", task="summarization")
    assert found == {"fedavg": "summarization-none", "fedprox": "summarization-fedprox"}


def test_what_changes_only_speed_is_no_parameter_but_files_are():
    unidentifying = {
        name for model in STAGES.values() for name in model.model_fields if name not in model().effective()
    }
    files = {"corpus_path", "heldout_path"}
    assert unidentifying - files | {"torch_threads", "confidence"} == IDLE
    assert "gradient_checkpointing" in IDLE
    # whatever else is in no identity must not be a path, for of that the identity has the file's digest
    config = PartitionConfig(corpus="file", corpus_path=__file__, heldout_path=__file__, heldout_rows=0)
    assert set(outside_files(config)) == files
    two = pd.DataFrame({"corpus": "file", "corpus_path": ["a", "b"], "gradient_checkpointing": [True, False]})
    assert pairs(two.set_axis(["one", "other"])) == [("one", "other", "corpus_path")]


def test_compare_adjusts_over_the_table(parameters):
    measured = {"fedavg": run([(0, i, 0) for i in range(8)]), "prox": run([]), "none": run([])}
    table = compare(measured, parameters).query("part == 'total'").set_index(["run", "other"])
    # eight of eight heads, either way: 2/2⁸, thrice by Holm for the smallest, twice for the next, never less
    assert table["p_value"].to_dict() == pytest.approx(
        {("fedavg", "prox"): 2 / 256, ("fedavg", "none"): 2 / 256, ("prox", "none"): 1}
    )
    assert table.loc[("fedavg", "prox"), "p_holm"] == pytest.approx(6 / 256)
    assert table.loc[("prox", "none"), "p_holm"] == 1
    assert compare({}, parameters).empty


def test_seeds_give_mean_and_spread(parameters):
    values = pd.DataFrame(
        [(name, "mr_intra", "paper", value) for name, value in (("fedavg", 0.1), ("fedavg-1", 0.3), ("prox", 0.5))],
        columns=["run", "metric", "counting", "value"],
    )
    table = seeds(values, parameters)
    assert table["run"].tolist() == ["fedavg"]
    again = pd.concat([parameters, parameters.loc[["fedavg", "prox"]].set_axis(["fast", "prox-fast"])])
    again = again.assign(confidence=[0.95] * 6 + [0.9] * 2, torch_threads=[1] * 6 + [2] * 2)
    more = values.loc[values["run"] != "fedavg-1"].replace({"fedavg": "fast", "prox": "prox-fast"})
    pd.testing.assert_frame_equal(seeds(pd.concat([values, more]), again), table)  # a seed counts once
    # (0.1 + 0.3)/2; √((0.1² + 0.1²)/1)
    assert table.loc[0, ["seeds", "mean", "sd", "lowest", "highest"]].tolist() == pytest.approx(
        [2, 0.2, 0.02**0.5, 0.1, 0.3]
    )


def test_references_are_models_that_cannot_have_learnt_it(parameters):
    local = parameters.loc[["none"]].assign(algorithm="local").rename(index={"none": "local"})
    table = pd.concat([parameters, local])
    hits = {"fedavg": run([(0, i, 0) for i in range(4)]), "none": run([]), "local": run([(0, 0, 1)]), "long": run([])}
    found = comparisons.over_references(hits, table).set_index(["run", "reference", "part"])
    assert set(found.index) == {("fedavg", "untrained", part) for part in ("intra", "inter", "total")} | {
        ("fedavg", "local", "inter")  # of its own client a local model did see the rows
    }
    assert found.loc[("fedavg", "untrained", "total"), "difference"] == pytest.approx(4 / 20)
    assert found.loc[("fedavg", "local", "inter"), "difference"] == pytest.approx(-0.75 / 10)
    assert comparisons.over_references({"fedavg": hits["fedavg"]}, table).empty


def test_runs_that_differ_in_one_parameter_share_a_line(parameters):
    summary = pd.DataFrame({"run": list(parameters.index), "value": 0.1})
    table = comparisons.by_setting(summary, parameters, "algorithm").set_index("run")
    lines = {line: rows["setting"].to_dict() for line, rows in table.groupby("line")}
    assert lines == {  # by seed of training, which the untrained model has none of; "long", "qa-prox" share with none
        "0": {"fedavg": "fedavg", "prox": "fedprox", "none": "none"}, "1": {"fedavg-1": "fedavg", "none": "none"}
    }  # fmt: skip
    surer = pd.concat([parameters, parameters.add_prefix("surer-", axis=0)]).assign(confidence=[0.9] * 6 + [0.95] * 6)
    again = comparisons.by_setting(pd.DataFrame({"run": surer.index, "value": 0.1}), surer, "algorithm")
    pd.testing.assert_frame_equal(again.set_index("run"), table)  # no setting twice in a line
    by_task = comparisons.by_setting(summary, parameters, "task").set_index("run")
    assert by_task["setting"].to_dict() == {"prox": "dialog", "qa-prox": "qa"}
    assert set(by_task["line"]) == {""}  # nothing else varies among them
    each = parameters.assign(prefix_tokens=[30, 30, 100, 100, 30, 30], algorithm="fedavg", train_seed=0)
    each = each.assign(
        task=["qa", "dialog"] * 3, hub_dataset=["a", "b"] * 3
    )  # what follows from the task names no line
    lines = comparisons.by_setting(summary, each, "prefix_tokens").set_index("run")["line"]
    assert set(lines) == {"qa", "dialog"}
    longer = parameters.assign(
        prefix_tokens=[30, 30, 100, 100, 30, 30], algorithm="fedavg", train_seed=[0, 1, 0, 1, 5, 6]
    )
    lines = comparisons.by_setting(summary, longer.assign(task="qa"), "prefix_tokens").set_index("run")["line"]
    assert lines.to_dict() == {"fedavg": "0", "prox": "0", "fedavg-1": "1", "long": "1"}


def test_perplexity_gap_by_hand():
    rows = [(2, 0, "test_loss", 2.0, 10), (2, 1, "test_loss", 3.0, 30), (2, -1, "test_loss", 9.0, 40),
            (2, 0, "train_loss", 1.0, 10), (2, 1, "train_loss", 1.0, 10), (1, 0, "train_loss", 5.0, 10)]  # fmt: skip
    curves = pd.DataFrame(rows, columns=["round", "client", "metric", "value", "tokens"])
    # e^((2·10 + 3·30)/40) − e^1
    assert comparisons.perplexity_gap(curves, 2) == pytest.approx(np.exp(2.75) - np.e)
    assert np.isnan(comparisons.perplexity_gap(curves[curves["metric"] == "test_loss"], 2))  # never trained
    central = curves.assign(client=-1)
    assert comparisons.perplexity_gap(central[central["value"] < 9], 2) == pytest.approx(np.exp(2.75) - np.e)


def test_published_figures():
    prefix = published.points("summarization", "prefix_tokens").set_index(["metric", "setting"])["value"]
    assert prefix["mr_inter", 100] == pytest.approx(0.00004)
    assert prefix["mr_intra", 10] == pytest.approx(0.00508)
    assert published.points("summarization", "checkpoint_round")["setting"].tolist() == [1, 3, 5]
    assert published.points("dialog", "rounds").empty
    # the main table's MR_inter of dialog is the mean over the matrix's cells beside the diagonal, its MR_intra over it
    cells = published.dialog_matrix()
    own = cells["prefix_client"] == cells["suffix_client"]
    assert cells.loc[own, "ratio"].mean() == pytest.approx(0.01533, abs=1e-5)
    assert cells.loc[~own, "ratio"].mean() == pytest.approx(0.01446, abs=1e-5)
    assert published.utility().set_index("task").loc["classification"].tolist() == [76.30, 51.22]
    assert set(PARTS) == {"intra", "inter", "total"}
