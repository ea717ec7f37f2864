"""The notebooks as files: order, parameters, style. What they do when executed is in test_roads.py."""

import ast
import re
import statistics

import nbformat
import pytest

from fedmem.config.stages import STAGES
from fedmem.results.identity import NOTEBOOKS, notebook_file

FILES = {stage: notebook_file(stage) for stage in NOTEBOOKS}


@pytest.fixture(params=list(FILES), scope="module")
def notebook(request):
    """One shipped notebook, with the stage's name in `.stage`."""
    content = nbformat.read(FILES[request.param], as_version=4)
    nbformat.validate(content)
    content.stage = request.param
    return content


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def literals(cell):
    """{name: value} of a cell of plain assignments; anything else raises."""
    return {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cell.source).body}


def test_it_opens_with_its_question(notebook):
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.splitlines()[0].startswith("# ")
    assert "?" in first.source.splitlines()[0]
    for word in ("reads", "writes", "takes"):
        assert f"| {word} |" in first.source


def test_it_is_stripped_and_names_the_plain_kernel(notebook):
    assert notebook.metadata.kernelspec.name == "python3"  # not an author's own (B03)
    assert "widgets" not in notebook.metadata  # B11
    for cell in code(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


def test_shown_parameters_are_those_of_config(notebook):
    (cell,) = [cell for cell in code(notebook) if "parameters" in cell.metadata.get("tags", [])]
    assert cell is code(notebook)[0]
    shown = literals(cell)
    model = STAGES.get(notebook.stage)
    if model is None:  # the report reads stages, it has no parameters of its own
        assert shown == {"study": "latest"}
        return
    if model.parent:
        assert shown.pop(model.parent) == "latest"
    assert shown.pop("options") == {}
    assert shown == {name: model.model_fields[name].default for name in model.shown}
    assert len(shown) <= 11


def test_every_parameter_is_commented(notebook):
    cell = code(notebook)[0]
    for line in cell.source.splitlines():
        assert re.search(r"\S  # \S", line), line


def test_cells_are_short_and_narrated(notebook):
    lines = sorted(len(cell.source.splitlines()) for cell in code(notebook))
    assert statistics.median(lines) <= 6
    assert lines[int(0.9 * (len(lines) - 1))] <= 20
    markdown = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    assert len(markdown) >= 0.5 * len(lines)
    assert sum(cell.source.count("\n## ") + cell.source.startswith("## ") for cell in markdown) >= 3
    assert notebook.cells[-1].source.startswith("## What next") or notebook.stage == "studies"


def test_it_defines_no_classes_and_no_shell_escapes(notebook):
    for cell in code(notebook):
        assert not cell.source.lstrip().startswith(("!", "%"))  # `!false` fails without an error (B07)
        assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(cell.source)))


def test_formulas_are_readable_without_a_renderer(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert "$" not in cell.source
            assert "\\(" not in cell.source


def test_it_asserts_something(notebook):
    assert any("assert " in cell.source for cell in code(notebook))
