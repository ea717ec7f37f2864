"""How a notebook is executed and what its copy and its page show."""

import copy
import importlib
import re
import subprocess
import sys

import nbformat
import pandas as pd
import pytest

from fedmem.display.html_page import to_html
from fedmem.study import execute as study_execute
from fedmem.study.execute import (
    IDLE_IMPORTS,
    NOTES,
    NotebookError,
    execute,
    failed_copy,
    load_papermill,
    note_parameters,
    run_job,
)


def test_what_papermill_does_without_is_not_imported_and_can_be_afterwards():
    code = (
        "import json, sys; from fedmem.study.execute import IDLE_IMPORTS, load_papermill; "
        "print(load_papermill().__name__, sorted({*IDLE_IMPORTS} & {*sys.modules})); "
        "import isoduration, pyarrow; print(isoduration.__name__, pyarrow.array([1])[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["papermill []", "isoduration 1", ""]


def test_after_an_error_it_can_be_imported_too(monkeypatch):
    for name in IDLE_IMPORTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "papermill", None)  # importing it fails
    with pytest.raises(ImportError):
        load_papermill()
    assert not {*IDLE_IMPORTS} & {*sys.modules}
    assert importlib.import_module("isoduration").__name__ == "isoduration"


def test_a_module_that_is_imported_already_stays(monkeypatch):
    import pyarrow

    assert load_papermill().__name__ == "papermill"
    assert sys.modules["pyarrow"] is pyarrow


# --- notes on parameters, and the page ------------------------------------------------------------------------------


def cell(source, *tags, kind="code"):
    return getattr(nbformat.v4, f"new_{kind}_cell")(source, metadata={"tags": list(tags)} if tags else {})


def injected():
    """A notebook as papermill leaves it: its title, defaults, the parameters of the run, a cell."""
    title = cell("# Title <b>", kind="markdown")
    defaults, given = cell("n = 1  # how many", "parameters"), cell("# Parameters\nn = 2", "injected-parameters")
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=[title, defaults, given, cell("n + 1")], metadata=python)


def test_an_executed_notebook_says_which_parameters_count():
    content = injected()
    note_parameters(content)
    nbformat.validate(content)
    assert [one.source.splitlines()[0] for one in content.cells] == [
        "# Title <b>", "*Defaults; this run used the values of the next cell.*", "n = 1  # how many",
        "*The parameters of this run:*", "# Parameters", "n + 1",
    ]  # fmt: skip
    before = copy.deepcopy(content)
    note_parameters(content)  # a copy that is executed again
    assert content == before


def test_a_notebook_that_ran_on_its_defaults_has_no_note():
    content = injected()
    del content.cells[2]
    before = copy.deepcopy(content)
    note_parameters(content)
    assert content == before


def test_the_page_greys_defaults_and_a_page_without_code_has_no_notes(tmp_path):
    content, path = injected(), tmp_path / "copy.ipynb"
    note_parameters(content)
    nbformat.write(content, path)
    page = to_html(path)
    notes = [page.index(note.strip("*")) for note in NOTES.values()]
    assert notes[0] < page.index("how many") < notes[1] < page.index("# Parameters")
    assert re.search(r'class="[^"]* celltag_parameters-note"', page)
    assert ".celltag_parameters-note + .celltag_parameters { opacity" in page
    assert "<title>Title &lt;b&gt;</title>" in page
    assert not any(note.strip("*") in to_html(path, show_code=False) for note in NOTES.values())


@pytest.mark.notebooks
def test_the_executed_copy_of_a_failed_notebook_has_the_notes_and_can_be_executed_again(tmp_path, monkeypatch):
    content = injected()
    del content.cells[2]
    nbformat.write(content, tmp_path / "given.ipynb")
    monkeypatch.setattr(study_execute, "notebook_file", lambda stage: tmp_path / "given.ipynb")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results/train/x"
    with pytest.raises(NotebookError, match="published no stage"):
        run_job({"id": "x", "stage": "train", "folder": str(folder), "parameters": {"n": 2}})
    made = nbformat.read(failed_copy(folder), as_version=4)
    nbformat.validate(made)
    assert [one.source for one in made.cells if one.cell_type == "markdown"][1:] == list(NOTES.values())
    assert made.cells[-1].outputs[0].data["text/plain"] == "3"
    assert NOTES["parameters"].strip("*") in failed_copy(folder).with_suffix(".html").read_text()
    execute(failed_copy(folder), tmp_path / "again.ipynb", {"n": 5})
    again = nbformat.read(tmp_path / "again.ipynb", as_version=4)
    note_parameters(again)
    assert [one.source for one in again.cells if one.cell_type == "markdown"][1:] == list(NOTES.values())
    assert again.cells[-1].outputs[0].data["text/plain"] == "6"


def test_tables_have_horizontal_rules_only(tmp_path):
    with pd.option_context("display.html.border", 1):
        table = nbformat.v4.new_output("display_data", {"text/html": pd.DataFrame({"a": [1]}).to_html()})
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[table])])
    nbformat.write(content, tmp_path / "table.ipynb")
    page = to_html(tmp_path / "table.ipynb")
    assert 'border="1"' in page
    assert re.search(r"^table, th, td \{ border: 0; \}", page, flags=re.MULTILINE)
    assert "border-right" not in page
