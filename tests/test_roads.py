"""The three ways to run the notebooks, for real: by the runner, by papermill, by hand; and what goes wrong on the way.

One tiny study is executed once and looked at by many tests. The models here learn next to nothing: figures are checked
by schema and meaning, not by size.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import yaml

from fedmem.display.html_page import to_html
from fedmem.machine.paths import file_digest
from fedmem.results.identity import NOTEBOOKS, notebook_file
from fedmem.results.stage import find_stage, finished_stages
from fedmem.study.execute import NOTES, NotebookError, execute, json_safe

pytestmark = pytest.mark.notebooks
REPOSITORY = Path(__file__).resolve().parent.parent
TINY = {
    "train_rows": 6, "test_rows": 2, "heldout_rows": 6, "rounds": 1, "local_epochs": 1, "n_prefixes": 4,
    "max_new_tokens": 30,
}  # fmt: skip
TABLES = {
    "partition": {"rows": "row_id client split group instruction input output"},
    "train": {"curves": "round client metric value examples tokens steps"},
    "generate": {
        "prefixes": "prefix_id client row_id prefix continuation new_tokens finished decoding",
        "suffixes": "suffix_id client row_id member suffix",
    },
    "detect": {
        "matches": "prefix_id prefix_client suffix_id suffix_client member rank bm25 kind score identical_sentence "
        "detections matched_chars continuation_share suffix_share"
    },
    "analyze": {
        "cells": "prefix_client suffix_client member counting n hits ratio low high",
        "summary": "metric counting value low high n",
    },
}


def fedmem(*arguments, results, checkout=REPOSITORY, **environment):
    """Runs the command in a process of its own; returns it, with its output."""
    settings = os.environ | {"FEDMEM_RESULTS": str(results), "PYTHONPATH": str(checkout)} | environment
    command = [sys.executable, "-m", "fedmem.cli.main", *map(str, arguments)]
    return subprocess.run(command, env=settings, cwd=checkout, capture_output=True, text=True, timeout=900)


def write_study(folder, **content):
    """A study file beside the shipped bases and tasks."""
    if not (folder / "params").is_dir():
        shutil.copytree(REPOSITORY / "params", folder / "params")
    path = folder / "params" / "studies" / "tiny.yaml"
    path.write_text(yaml.safe_dump({"base": "small", "parameters": TINY} | content))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(study file, results) of an executed study of two runs."""
    folder = tmp_path_factory.mktemp("tiny")
    study = write_study(
        folder, title="Tiny?", note="Too small to mean anything.", grid={"algorithm": ["fedavg", "none"]}
    )
    done = fedmem("run", study, "--cores", 2, results=folder / "results")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report.html" in done.stdout
    return study, folder / "results"


@pytest.fixture
def results(tiny, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tiny[1]))
    return tiny[1]


def digests(results):
    """{file: digest} of everything that must not depend on when and how it was made."""
    files = [
        *results.glob("[a-z]*/*/*.parquet"),
        *results.glob("[a-z]*/*/mr.json"),
        *results.glob("[a-z]*/*/**/*.safetensors"),
    ]
    return {str(path.relative_to(results)): file_digest(path) for path in files}


# --- by the runner --------------------------------------------------------------------------------------------------


def test_every_stage_publishes_its_tables(results):
    for stage, tables in TABLES.items():
        found = finished_stages(stage)
        assert len(found) == (1 if stage == "partition" else 2)
        for one in found:
            for name, columns in tables.items():
                assert list(one.table(name).columns) == columns.split(), (stage, name)


def test_every_stage_has_its_executed_copy_and_page(results):
    for stage in TABLES:
        for one in finished_stages(stage):
            copy = nbformat.read(one.folder / "notebook.ipynb", as_version=4)
            nbformat.validate(copy)
            assert (one.folder / "notebook.html").stat().st_size > 5_000
            # which of the two cells of parameters counts
            notes = [cell.source for cell in copy.cells if "parameters-note" in cell.metadata.get("tags", ())]
            assert notes == list(NOTES.values())
            assert all(note.strip("*") in (one.folder / "notebook.html").read_text() for note in notes)
            assert "notebook.ipynb" not in one.manifest["files"]
    assert (results / "studies/tiny/report.html").is_file()


def test_pages_are_self_contained(results):
    pages = [*results.glob("*/*/notebook.html"), results / "studies/tiny/report.html"]
    assert len(pages) == 10
    for page in pages:
        text = page.read_text()
        assert "<script" not in text.lower()
        assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", text), page
        assert not re.search(r"@import|url\((?!['\"]?data:)", text)
    report = pages[-1].read_text()
    assert "data:image/png;base64" in report
    assert "Too small to mean anything." in report
    assert "import pandas" not in report  # a report is read without its code
    assert not any(note.strip("*") in report for note in NOTES.values())


def test_the_shared_partition_was_executed_once(results):
    first, second = finished_stages("train")
    assert first.parent.folder == second.parent.folder


def test_manifests_say_what_was_done(results):
    analysis = finished_stages("analyze")[0]
    for stage in TABLES:
        manifest = analysis.ancestor(stage).manifest
        assert manifest["versions"]["torch"]
        assert manifest["seconds"] > 0
        assert set(manifest["parameters"]) >= set(manifest["effective"])
        for name, digest in manifest["files"].items():
            assert file_digest(analysis.ancestor(stage).folder / name) == digest


def test_runs_csv_has_a_row_a_run_with_parameters_and_figures(results):
    table = pd.read_csv(results / "studies/tiny/runs.csv", index_col="run")
    assert list(table.index) == ["fedavg", "none"]
    wanted = {f"{kind}_{part}_{counting}" for kind in ("mr", "control") for part in ("intra", "inter", "total")
              for counting in ("paper", "strict", "verbatim")}  # fmt: skip
    wanted |= {f"seconds_{stage}" for stage in TABLES} | {"n", "state", "train_seed", "decode_seed", "prefix_tokens"}
    assert wanted <= set(table.columns)
    assert (table["n"] == 12).all()  # 3 clients × 4 prefixes
    assert table["mr_total_verbatim"].between(0, 1).all()


def test_the_controls_are_held_out_rows(results):
    stage = finished_stages("generate")[0]
    rows = stage.ancestor("partition").table("rows").set_index("row_id")["split"]
    suffixes = stage.table("suffixes")
    assert set(rows[suffixes.loc[suffixes["member"], "row_id"]]) == {"train"}
    assert set(rows[suffixes.loc[~suffixes["member"], "row_id"]]) == {"heldout"}
    assert suffixes.groupby(["client", "member"]).size().eq(4).all()


def test_a_second_run_executes_nothing(tiny):
    study, results = tiny
    before = {p: p.stat().st_mtime_ns for p in results.rglob("manifest.json")}
    done = fedmem("run", study, results=results)
    assert done.returncode == 0
    assert "nothing to do" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in results.rglob("manifest.json")} == before


def test_another_decoding_needs_no_partition_and_no_training(tiny):
    study, results = tiny
    done = fedmem("plan", study, "--set", "decoding=top_p", results=results)
    states = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert "finished" in states["partition"]
    assert "finished" in states["train"]
    assert "to do" in states["generate"]


def test_cores_and_order_change_no_byte(tiny, tmp_path):
    study, results = tiny
    done = fedmem("run", study, "--cores", 1, "--name", "again", results=tmp_path / "results")
    assert done.returncode == 0, done.stdout + done.stderr
    again = {name.replace("studies/again", "studies/tiny"): d for name, d in digests(tmp_path / "results").items()}
    assert again == digests(results)
    assert len(again) > 15


def test_jobs_submitted_to_a_cluster_change_no_byte(tiny, tmp_path):
    """Through Snakemake's executor for any batch system; a submitted job inherits nothing of this environment."""
    study, results = tiny
    submit = tmp_path / "submit"
    submit.write_text(
        '#!/bin/sh\nenv -i HOME="$HOME" PATH="$PATH" setsid sh "$1" > "$1.log" 2>&1 < /dev/null &\necho $!\n'
    )
    submit.chmod(0o755)
    profile = {
        "executor": "cluster-generic", "cluster-generic-submit-cmd": str(submit), "jobs": 2, "latency-wait": 20,
    }  # fmt: skip
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "config.yaml").write_text(yaml.safe_dump(profile))
    given = ("--set", "algorithm=none", "--profile", tmp_path / "profile")
    done = fedmem("run", study, *given, results=tmp_path / "results")
    assert done.returncode == 0, done.stdout + done.stderr
    submitted, here = digests(tmp_path / "results"), digests(results)
    stages = {name for name in submitted if not name.startswith("studies/")}
    assert {name.split("/")[0] for name in stages} == set(TABLES)
    assert {name: submitted[name] for name in stages} == {name: here[name] for name in stages}


# --- what an edit makes stale ---------------------------------------------------------------------------------------

ALL = ("partition", "train", "generate", "detect", "analyze", "studies")


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("fedmem/train/local_training.py", ALL[1:]),
        ("fedmem/models/presets/cache.py", ALL[1:]),  # imported inside a function of models/loading
        ("fedmem/generate/probes.py", ALL[2:]),
        ("fedmem/detect/pan/cases.py", ALL[3:]),
        ("fedmem/analyze/ratios.py", ALL[4:]),
        ("fedmem/results/work.py", ALL),
        ("fedmem/train/figures.py", ALL[5:]),  # the report draws learning curves, too
        ("fedmem/analyze/figures.py", ALL[4:]),
        ("fedmem/analyze/sentences.py", ALL[4:]),
        ("fedmem/display/drawing.py", ALL[4:]),
        ("fedmem/report/comparisons.py", ALL[5:]),
        ("fedmem/report/paper/tables.py", ALL[5:]),
        ("fedmem/study/runner.py", ()),
        ("fedmem/cli/main.py", ()),
        ("fedmem/data/synthetic_corpus.yaml", ALL),
        ("fedmem/data/formulas.yaml", ALL[1:]),
        ("fedmem/data/stopwords_en.txt", ALL[3:]),
        ("fedmem/data/published_figures.yaml", ALL[5:]),
    ],
)
def test_an_edit_makes_stale_what_it_can_change(tiny, tmp_path, file, stale):
    assert set(planned(tiny, tmp_path).values()) == {"finished"}
    edit(tmp_path / "checkout" / file)
    states = planned(tiny, tmp_path)
    assert {stage for stage, state in states.items() if state == "stale"} == set(stale)
    assert {state for stage, state in states.items() if stage not in stale} <= {"finished"}


def test_a_notebooks_code_counts_and_its_text_does_not(tiny, tmp_path):
    planned(tiny, tmp_path)
    notebook = tmp_path / "checkout" / "notebooks" / "3_generate.ipynb"
    content = nbformat.read(notebook, as_version=4)
    content.cells.append(nbformat.v4.new_markdown_cell("A remark."))
    nbformat.write(content, notebook)
    assert set(planned(tiny, tmp_path).values()) == {"finished"}
    content.cells.append(nbformat.v4.new_code_cell("remark = 1"))
    nbformat.write(content, notebook)
    states = planned(tiny, tmp_path)
    assert {stage for stage, state in states.items() if state == "stale"} == set(ALL[2:])


def test_the_plan_names_what_has_changed(tiny, tmp_path):
    planned(tiny, tmp_path)
    edit(tmp_path / "checkout" / "fedmem" / "detect" / "pan" / "cases.py")
    plan = fedmem("plan", tiny[0], results=tiny[1], checkout=tmp_path / "checkout")
    assert "stale: the code has changed: detect/pan/cases.py" in plan.stdout
    edit(tmp_path / "checkout" / "fedmem" / "report" / "comparisons.py")
    plan = fedmem("plan", tiny[0], results=tiny[1], checkout=tmp_path / "checkout")
    assert re.search(r"^report .* stale: the code has changed: report/comparisons\.py", plan.stdout, re.MULTILINE)


def test_code_that_cannot_be_read_is_named(tiny, tmp_path):
    planned(tiny, tmp_path)
    checkout = tmp_path / "checkout"
    notebook, module = checkout / "notebooks" / "2_train.ipynb", checkout / "fedmem" / "report" / "comparisons.py"
    before = notebook.read_text()
    notebook.write_text("{")
    plan = fedmem("plan", tiny[0], results=tiny[1], checkout=checkout)
    assert plan.returncode == 2
    assert "notebooks/2_train.ipynb: cannot be read as a notebook" in plan.stderr
    notebook.write_text(before)
    with module.open("a") as edited:
        edited.write("def x(:\n")
    plan = fedmem("plan", tiny[0], results=tiny[1], checkout=checkout)
    assert plan.returncode == 2
    assert "comparisons.py" in plan.stderr
    assert "Traceback" not in plan.stderr


def planned(tiny, folder):
    """{stage: state} of the executed study, as a copy of this checkout in the folder sees it; made on the first call.

    State of a stage: of all runs' stages of that kind together, which an edit concerns alike.
    """
    checkout = folder / "checkout"
    for part in ("fedmem", "notebooks"):
        if not (checkout / part).is_dir():
            shutil.copytree(REPOSITORY / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import json, sys; from fedmem.study.loading import load_study; from fedmem.study.plan import make_plan; "
        "plan = make_plan(load_study(sys.argv[1])); "
        "print(json.dumps({job.stage: plan.states[job.id] for job in plan.study.jobs.values()} "
        "| {'studies': plan.report}))"
    )
    settings = os.environ | {"FEDMEM_RESULTS": str(tiny[1]), "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", code, str(tiny[0])]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True, cwd=folder)
    return json.loads(done.stdout)


def edit(path):
    """Adds a comment."""
    with path.open("a") as edited:
        edited.write("\n# edited\n")


# --- a visible call is what runs ------------------------------------------------------------------------------------


def test_a_call_changed_in_notebook_3_changes_the_runs_result(tiny, tmp_path):
    study, results = tiny
    checkout = tmp_path / "checkout"
    for part in ("fedmem", "notebooks"):
        shutil.copytree(REPOSITORY / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(results, tmp_path / "results")
    notebook = checkout / "notebooks" / "3_generate.ipynb"
    source = notebook.read_text()
    assert source.count("seed=config.sample_seed)") == 1
    notebook.write_text(source.replace("seed=config.sample_seed)", "seed=config.sample_seed + 1)"))

    plan = fedmem("plan", study, results=tmp_path / "results", checkout=checkout)
    assert re.search(r"generate .* stale: the code has changed", plan.stdout)
    assert re.search(r"train .* finished", plan.stdout)
    done = fedmem("run", study, results=tmp_path / "results", checkout=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = digests(results), digests(tmp_path / "results")
    changed = {name.split("/")[0] for name in before if before[name] != after[name]}
    assert "generate" in changed
    assert not changed & {"partition", "train"}


# --- by papermill, by hand ------------------------------------------------------------------------------------------


def test_notebooks_in_order_follow_the_first_one(tmp_path, monkeypatch):
    """Only n_clients is changed, in notebook 1; training is cut short, all else is the notebooks' own defaults."""
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    given = {"partition": {"n_clients": 4}, "train": {"rounds": 1, "local_epochs": 1}}
    for stage in NOTEBOOKS:
        execute(notebook_file(stage), tmp_path / f"{stage}.ipynb", given.get(stage, {}))
    matrix = json.loads((find_stage("analyze").folder / "mr.json").read_text())["verbatim"]["matrix"]
    assert [len(row) for row in matrix] == [4] * 4
    assert (tmp_path / "results/studies/latest/runs.csv").is_file()


def test_a_parameter_that_nobody_reads_is_refused(results, tmp_path):
    with pytest.raises(NotebookError, match="unknown parameter 'prefx_tokens'; did you mean 'prefix_tokens'"):
        execute(notebook_file("generate"), tmp_path / "out.ipynb", {"prefx_tokens": 50})  # B02


def test_a_list_left_as_text_is_refused(results, tmp_path):
    with pytest.raises(NotebookError, match=r"confidence: got .0\.9.; expected a number"):
        execute(notebook_file("analyze"), tmp_path / "out.ipynb", {"confidence": "0.9"})  # B01


def test_parameters_are_handed_on_as_json():
    assert json_safe({"a": (2, 3), 1: [None, True, 1.5]}) == {"a": [2, 3], "1": [None, True, 1.5]}  # B01
    for value in (float("nan"), {"x": object()}, b"bytes"):
        with pytest.raises(NotebookError, match="cannot be passed to a notebook"):
            json_safe(value)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_one_failing_run_leaves_the_others_and_is_named(tmp_path):
    broken = tmp_path / "broken-model"
    broken.mkdir()
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "fedmem/data/tiny-qwen2" / file, broken)
    (broken / "config.json").write_text('{"model_type": "no-such-type"}')  # which only loading tells
    study = write_study(tmp_path, grid={"model": [str(broken), "tiny-qwen2"]}, parameters=TINY | {"algorithm": "none"})
    done = fedmem("run", study, results=tmp_path / "results")
    assert done.returncode == 1
    assert "cannot be loaded" in done.stderr
    (copy,) = (tmp_path / "results/train").glob("*.failed.ipynb")
    assert str(copy) in done.stderr
    errors = [
        o for c in nbformat.read(copy, as_version=4).cells for o in c.get("outputs", []) if o.output_type == "error"
    ]
    assert errors
    assert errors[0].traceback
    table = pd.read_csv(tmp_path / "results/studies/tiny/runs.csv", index_col="run")
    assert table["state"].to_dict() == {"broken-model": "failed", "tiny-qwen2": "finished"}
    status = fedmem("status", study, results=tmp_path / "results")
    assert status.returncode == 1
    assert re.search(r"broken-model +failed", status.stdout)
    assert "cannot be loaded" in status.stdout
    assert str(copy) in status.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", r"line 2: .*JSON"),
        ('{"id": "b", "instruction": "", "input": null, "output": "", "group": "g"}', r"line 2: .*input"),
        (None, r"client 2"),  # three clients, two groups: a client left without rows
    ],
)
def test_a_bad_corpus_stops_in_notebook_1(tmp_path, monkeypatch, line, said):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    row = {"instruction": "", "input": "A text of some words.", "output": "", "group": "g"}
    rows = [json.dumps(row | {"id": str(i), "group": "abb"[i]}) for i in range(3)]
    if line is not None:
        rows[1] = line
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(rows) + "\n")
    given = {"corpus": "file", "corpus_path": str(corpus), "train_rows": 1, "test_rows": 0, "heldout_rows": 0}
    with pytest.raises(NotebookError, match=said if line is not None else "2 groups for 3 clients"):
        execute(notebook_file("partition"), tmp_path / "out.ipynb", given)
    assert not list((tmp_path / "results").glob("partition/[!.]*"))


def small_notebook(path, *sources):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nb.metadata.kernelspec = {"name": "some_env", "display_name": "an author's own", "language": "python"}
    nbformat.write(nb, path)
    return path


def test_a_dead_kernel_is_a_failure(tmp_path):
    notebook = small_notebook(tmp_path / "dies.ipynb", "import os", "os._exit(0)", "print('never')")
    with pytest.raises(NotebookError, match="the kernel died"):
        execute(notebook, tmp_path / "out.ipynb", {})


def test_the_kernel_is_this_interpreter_whatever_the_notebook_names(tmp_path):
    notebook = small_notebook(tmp_path / "who.ipynb", "import sys; print(sys.executable)")  # B03
    execute(notebook, tmp_path / "out.ipynb", {})
    outputs = [c.outputs for c in nbformat.read(tmp_path / "out.ipynb", as_version=4).cells if c.cell_type == "code"]
    assert outputs[-1][0].text.strip() == sys.executable


def test_a_notebook_that_publishes_nothing_is_a_failure(tmp_path, monkeypatch):
    from fedmem.study import execute as study_execute
    from fedmem.study.execute import failure_message, run_job

    notebook = small_notebook(tmp_path / "idle.ipynb", "1 + 1")
    monkeypatch.setattr(study_execute, "notebook_file", lambda stage: notebook)
    monkeypatch.chdir(tmp_path)
    job = {"id": "x", "stage": "train", "folder": str(tmp_path / "results/train/x"), "parameters": {}}
    with pytest.raises(NotebookError, match="published no stage"):
        run_job(job)
    assert failure_message(tmp_path / "results/train/x")
    assert (tmp_path / "results/train/x.failed.html").is_file()


def test_widget_metadata_without_state_still_makes_a_page(tmp_path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title <b>")])
    nb.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {}}  # B11
    nbformat.write(nb, tmp_path / "w.ipynb")
    page = to_html(tmp_path / "w.ipynb")
    assert "<title>Title &lt;b&gt;</title>" in page
