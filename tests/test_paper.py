"""The published figures, their tables beside a study's own, and their claims; and the report that shows them."""

import re
import shutil

import pandas as pd
import pytest
import yaml
from faked_runs import finish
from test_roads import REPOSITORY, fedmem

from fedmem.analyze.counting import Counts
from fedmem.report import sentences
from fedmem.report.comparisons import Measured
from fedmem.report.paper import findings, tables
from fedmem.report.paper import published as paper_published
from fedmem.report.paper.tables import TITLES, Runs
from fedmem.study.loading import load_study

STUDIES = REPOSITORY / "params" / "studies"
PAPER = {  # PAPER.md's tables, typed anew: percent
    "main": {"summarization": (0.342, 0.046, 0.558, 0.433, 28.46, 29.88),
             "dialog": (1.533, 1.446, 3.417, 3.992, 19.40, 18.11), "qa": (1.450, 0.813, 2.150, 2.917, 26.66, 28.60),
             "classification": (0, 0, 0, 0, 76.30, 51.22)},
    "decoding": {"temperature": (0.475, 1.267, 1.283), "top_k": (0.342, 1.533, 1.450), "top_p": (0.525, 3.792, 2.567)},
    "prefix_tokens": {"10": (0.508, 2.108, 1.525), "30": (0.342, 1.533, 1.450), "50": (0.425, 1.575, 1.242),
                      "100": (0.208, 1.408, 1.125)},
    "algorithm": {"fedavg": (0.342, 1.533, 1.450), "fedprox": (0.942, 1.892, 3.675)},
    "model": {"Qwen2.5-0.5B": (0.550,), "Qwen2.5-1.5B": (0.992,), "Qwen2.5-3B": (0.342,)},
    "rounds": {"1": (0.433,), "3": (0.342,), "5": (0.467,)},
    "inter_prefix": {"10": (0.188,), "100": (0.004,)},
}  # fmt: skip


def parameters_of(planned):
    """The report's table of parameters for a study that has not been run: its different runs."""
    described = {run["name"]: run["parameters"] for run in planned.describe()["runs"]}
    first = {run.jobs["analyze"].identity: run.name for run in reversed(planned.runs)}
    names = [run.name for run in planned.runs if first[run.jobs["analyze"].identity] == run.name]
    return pd.DataFrame.from_dict({name: described[name] for name in names}, orient="index")


def figures(parameters):
    """A summary in which every run's figures say which run it is: MR_intra 1 ‰, 2 ‰ …, MR_inter a tenth of it."""
    rows = []
    for number, run in enumerate(parameters.index, 1):
        for metric, value in (("mr_intra", number / 1000), ("mr_inter", number / 1e4), ("mr_total", number / 500)):
            rows += [(metric, counting, value, 0.0, 1.0, 60, run) for counting in ("paper", "verbatim")]
    return pd.DataFrame(rows, columns=["metric", "counting", "value", "low", "high", "n", "run"])


@pytest.fixture(scope="module")
def every_table():
    """(parameters, published) of the whole study on the small base."""
    parameters = parameters_of(load_study(STUDIES / "all.yaml", base="small"))
    accuracy = {run: {"utility_accuracy" if task == "classification" else "utility_rouge_l": 0.25}
                for run, task in parameters["task"].items()}  # fmt: skip
    return parameters, tables.tables(parameters, figures(parameters), accuracy)


def test_the_whole_study_has_every_published_table_and_no_place_without_ours(every_table):
    _, published = every_table
    assert list(TITLES) == list(PAPER)
    for name, lines in PAPER.items():
        table = tables.shown(published, name)
        assert list(table.index) == list(lines)
        theirs = table.xs("paper", axis=1, level=1)
        assert [tuple(row) for row in theirs.to_numpy()] == [pytest.approx(line) for line in lines.values()]
        assert table.xs("ours", axis=1, level=1).notna().all(axis=None), name
    assert not published["comparable"].any()
    assert sentences.comparable(published).startswith("Not comparable: ours are of other models and other corpora")


def test_runs_are_found_by_their_parameters(every_table):
    parameters, published = every_table
    for row in published.to_dict("records"):
        run = parameters.loc[row["run"]]
        assert run["task"] == row["task"]
        changed = {"prefix_tokens": "prefix_tokens", "decoding": "decoding", "algorithm": "algorithm"}.get(
            row["parameter"]
        )
        if changed:
            assert str(run[changed]) == row["setting"]
        if row["parameter"] == "rounds":
            assert (run["rounds"], str(run["checkpoint_round"])) == (5, row["setting"])  # one training, several rounds
        central = row["figure"] in ("TotalCL", "utility CL")
        assert run["algorithm"] == (row["setting"] if changed == "algorithm" else "central" if central else "fedavg")
    models = published[published["table"] == "model"].set_index("setting")["run"].map(parameters["model"])
    assert models.to_dict() == {
        "Qwen2.5-0.5B": "tiny-qwen2-quarter", "Qwen2.5-1.5B": "tiny-qwen2-half", "Qwen2.5-3B": "tiny-qwen2"
    }  # fmt: skip
    lengths = published[published["table"] == "prefix_tokens"]
    assert (lengths["run"].map(parameters["min_input_tokens"]) == 120).all()  # the same rows for all lengths
    dialog = published.query("table == 'main' and task == 'dialog'").set_index("figure")
    assert dialog.at["TotalCL", "ours"] == pytest.approx(
        (parameters.index.get_loc(dialog.at["TotalCL", "run"]) + 1) / 500
    )
    assert dialog.at["utility FL", "ours"] == 0.25


def test_on_the_papers_base_figures_are_comparable():
    parameters = parameters_of(load_study(STUDIES / "main.yaml"))
    published = tables.tables(parameters, figures(parameters), {})
    assert published.loc[published["run"].notna(), "comparable"].all()
    assert "not comparable" not in sentences.comparable(published).lower()
    table = tables.shown(published, "main")
    assert table["TotalCL", "ours"].isna().all()  # this study has no central run: the place is there, empty
    assert table["utility FL", "ours"].isna().all()
    assert set(published["table"]) == {"main"}


def test_a_study_without_a_place_has_no_table():
    parameters = parameters_of(load_study(STUDIES / "demo.yaml", overrides={"algorithm": "none"}))
    assert tables.tables(parameters, figures(parameters), {}).empty
    assert "No run of this study corresponds to a place" in sentences.comparable(
        tables.tables(parameters, figures(parameters), {})
    )


def test_the_largest_family_that_is_otherwise_as_usual_is_taken():
    rows = {
        "a": ("qa", "fedavg", 10, 0), "b": ("qa", "fedavg", 30, 0), "c": ("qa", "fedavg", 10, 9),
        "d": ("qa", "fedavg", 30, 9), "e": ("qa", "fedavg", 50, 9), "f": ("dialog", "fedavg", 30, 0),
    }  # fmt: skip
    columns = ["task", "algorithm", "prefix_tokens", "min_input_tokens"]
    runs = Runs(pd.DataFrame.from_dict(rows, orient="index", columns=columns))
    assert runs.family("prefix_tokens", task="qa") == {10: "c", 30: "d", 50: "e"}
    assert runs.find(task="qa", algorithm="fedavg") in ("b", "d")  # both have three usual values of four
    assert runs.find(task="dialog") == "f"
    assert runs.find(task="classification") is None
    assert runs.family("prefix_tokens", task="classification") == {}


def measured(hits, n=40, prompted=(0, 1)):
    """A run of two clients: the first `hits` of client 0's prefixes match its own text."""
    prefixes = pd.DataFrame([(f"p{j}-{i}", j) for j in prompted for i in range(n)], columns=["prefix_id", "client"])
    found = [(f"p0-{i}", 0, 0, True, "verbatim") for i in range(hits)]
    matches = pd.DataFrame(found, columns=["prefix_id", "prefix_client", "suffix_client", "member", "kind"])
    return Measured.of(Counts(matches, prefixes, pd.DataFrame({"client": [0, 1], "n_train": 1})))


def cells(easier):
    """Others' prefixes bring back client 1's text `easier` times of 40, client 0's never."""
    rows = [(0, 1, True, "paper", 40, easier), (1, 0, True, "paper", 40, 0), (0, 0, True, "paper", 40, 40)]
    return pd.DataFrame(rows, columns=["prefix_client", "suffix_client", "member", "counting", "n", "hits"])


def test_a_claim_holds_where_its_interval_says_so():
    rows = {
        "avg": ("qa", "fedavg", "top_k"), "prox": ("qa", "fedprox", "top_k"), "central": ("qa", "central", "top_k"),
        "p": ("qa", "fedavg", "top_p"), "t": ("qa", "fedavg", "temperature"),
    }  # fmt: skip
    parameters = pd.DataFrame.from_dict(rows, orient="index", columns=["task", "algorithm", "decoding"])
    parameters = parameters.assign(prefix_tokens=30, model="m", rounds=3, checkpoint_round=3)
    runs = {"avg": measured(20), "prox": measured(0), "central": measured(0), "p": measured(30), "t": measured(19)}
    table = findings.findings(parameters, runs, dict.fromkeys(runs, cells(20))).set_index("finding")
    assert table["here"].to_dict() == {
        "MR_intra is above MR_inter": "holds",  # 20 of 80 weighted prefixes against none
        "some clients' suffixes come back more easily": "holds",
        "FL does not memorize less than CL (MR_total)": "holds",  # 20 of 80 against none
        "top-k raises MR_intra against temperature": "open",  # one prefix more
        "top-p raises MR_intra against temperature": "holds",
        "FedProx raises MR_intra against FedAvg": "does not hold",
    }
    assert table.at["FL does not memorize less than CL (MR_total)", "difference"] == pytest.approx(20 / 80)
    assert sentences.findings(table).startswith(
        "Of 6 comparisons behind the published findings 4 go the same way here, 1"
    )
    alike = findings.findings(parameters, runs, dict.fromkeys(runs, cells(0)))
    assert "some clients' suffixes come back more easily" not in set(alike["finding"])


def test_whose_suffixes_come_back_more_easily_is_asked_at_the_studys_confidence():
    columns = ["task", "algorithm", "decoding", "prefix_tokens", "model", "rounds", "checkpoint_round"]
    parameters = pd.DataFrame([("qa", "fedavg", "top_k", 30, "m", 3, 3)], index=["avg"], columns=columns)

    def said(confidence):
        table = findings.findings(parameters, {"avg": measured(20)}, {"avg": cells(6)}, confidence)
        return table.set_index("finding").at["some clients' suffixes come back more easily", "here"]

    # Wilson of 6 of 40 and of 0 of 40: from 7.1 % and to 8.8 % at 0.95, from 9.2 % and to 3.9 % at 0.8
    assert (said(0.95), said(0.8)) == ("open", "holds")


def test_a_trend_is_one_way_and_its_ends_differ():
    base = ("summarization", "fedavg", "top_k", 30, "m", 5)
    rows = {f"r{round_}": (*base, round_) for round_ in (1, 3, 5)}
    columns = ["task", "algorithm", "decoding", "prefix_tokens", "model", "rounds", "checkpoint_round"]
    parameters = pd.DataFrame.from_dict(rows, orient="index", columns=columns)

    def said(*hits, without=None):
        runs = dict(zip(rows, map(measured, hits), strict=True))
        if without:  # a run that no prefix of client 1 was put to
            runs[without] = measured(hits[list(rows).index(without)], prompted=[0])
        table = findings.findings(parameters, runs, dict.fromkeys(runs, cells(0))).set_index("finding")
        return table.at["no clear trend with rounds", "here"]

    assert said(0, 10, 30) == "does not hold"  # up and up, by far
    assert said(10, 30, 5) == "holds"
    assert said(10, 11, 12) == "open"  # up, but two prefixes may be chance
    for hits in ((0, 10, 30), (10, 30, 5), (30, 10, 5)):  # one way or not: a share that is undefined shows no step
        assert {said(*hits, without=run) for run in rows} == {"open"}


def test_clipping_is_called_what_it_is():
    parameters = pd.DataFrame({"update_clip": [None, 1.0]}, index=["plain", "clipped"])
    assert sentences.clipped(parameters) == "`clipped`: clipping and noise, no formal guarantee."
    assert sentences.clipped(parameters.loc[["plain"]]) == ""


def test_every_point_of_the_paper_is_drawn_by_some_parameter():
    assert set(paper_published.ablations()["parameter"]) == {
        "decoding",
        "prefix_tokens",
        "algorithm",
        "model",
        "rounds",
    }


@pytest.mark.notebooks
def test_the_report_shows_the_tables_its_claims_and_what_clipping_is(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    shutil.copytree(REPOSITORY / "params", tmp_path / "params")
    studies = tmp_path / "params" / "studies"
    points = {"plain": {}, "clipped": {"update_clip": 1.0}, "more": {"n_clients": 4}, "none": {"algorithm": "none"}}
    own = {"base": "small", "parameters": {"task": "dialog"}, "points": points}
    (studies / "own.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
    two = {"base": "small", "parameters": {"task": "dialog"}, "grid": {"algorithm": ["fedavg", "central"]}}
    (studies / "two.yaml").write_text(yaml.safe_dump(two | {"title": "Two?"}))
    (studies / "both.yaml").write_text(yaml.safe_dump({"title": "Both?", "include": ["own", "two"]}))
    planned = load_study(studies / "both.yaml")
    finish(planned, lambda parameters: (0.5, 0.1) if parameters["algorithm"] == "fedavg" else (0.2, 0.0))
    done = fedmem("report", "both", results=tmp_path / "results")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "results" / "studies" / "both"
    page = (folder / "report.html").read_text()
    for words in ("not comparable", "TotalCL", "1.446", "no formal guarantee", "same_as", "MR_intra is above MR_inter"):
        assert words in page, words
    assert "MR_intra by model size" not in page  # nothing here has a place in it
    for words in ("(by 50.0 percentage points)", "it stays at 50.0 %", "colours as in the other runs"):
        assert words in page, words
    (shown,) = (table for table in re.findall(r"<table.*?</table>", page, re.DOTALL) if "<th>control</th>" in table)
    assert re.findall(r"<th>(mr|control|excess)</th>", shown) == ["mr", "control", "excess"]
    parts = re.findall(r">(intra|inter|total)<", shown)
    assert parts == ["intra", "inter", "total"] * (len(parts) // 3)  # as the published tables have them
    assert len(parts) == 3 * 3 * 5  # countings, parts, different runs
    names = re.findall(r">(own/\w+|two/\w+)<", shown)
    assert names == 3 * ["own/plain", "own/clipped", "own/more", "own/none", "two/central"]  # in the study's order
    published = pd.read_parquet(folder / "published.parquet")
    main = published[published["table"] == "main"].set_index("figure")["ours"]
    # own: 10 of 20; inter: 2 of 20; total: the same first ten prefixes; central: 4 of 20
    assert main.loc[["MR_intra", "MR_inter", "TotalFL", "TotalCL"]].tolist() == pytest.approx([0.5, 0.1, 0.5, 0.2])
    assert main["utility FL"] == pytest.approx(0.25)
    listed = pd.read_csv(folder / "runs.csv").set_index("run")
    assert listed["same_as"].to_dict() == {
        "own/plain": "own/plain", "own/clipped": "own/clipped", "own/more": "own/more", "own/none": "own/none",
        "two/fedavg": "own/plain", "two/central": "two/central",
    }  # fmt: skip
    assert listed.loc["two/fedavg", "mr_intra_paper"] == pytest.approx(0.5)
    assert listed["utility_rouge_l"].notna().all()
    captions = {name: (folder / "figures" / f"{name}.txt").read_text() for name in ("references", "comparisons")}
    assert "(Tango)" in captions["references"]  # the untrained model continues the same prefixes
    assert "(Tango where two runs continued the same prefixes, Miettinen-Nurminen elsewhere)" in captions["comparisons"]
    for figure in (folder / "figures").glob("*.txt"):
        shows_runs = figure.name.startswith(("aggregates", "excess", "kinds", "comparisons", "matrix-own-clipped"))
        if shows_runs:
            assert "`own/clipped`: clipping and noise, no formal guarantee" in figure.read_text(), figure.name
