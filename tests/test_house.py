"""The package's own rules: floors, independent stages, no circles, modules of a readable size."""

import ast
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
MODULES = sorted((REPOSITORY / "fedmem").rglob("*.py"))
MOST_LINES = 400


def lint_imports(checkout):
    """The contract of pyproject.toml, checked in a process of its own, since import-linter imports by name."""
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, env={"PYTHONPATH": str(checkout)})


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(REPOSITORY / "fedmem", tmp_path / "fedmem", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_floors_hold():
    done = lint_imports(REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("models/decoding.py", "fedmem.study.plan"),  # upwards
        ("machine/paths.py", "fedmem.config.vocabulary"),  # from the lowest floor to the one above it
        ("train/weights.py", "fedmem.generate.probes"),  # from one stage to another
        ("retrieval/tokens.py", "fedmem.results.stage"),  # from one half of a floor to the other
    ],
)
def test_an_import_the_wrong_way_breaks_the_contract(copy, module, imported):
    path = copy / "fedmem" / module
    path.write_text(f"{path.read_text()}\n\ndef _lazily():\n    import {imported}\n")  # inside a function, too
    done = lint_imports(copy)
    assert done.returncode == 1
    assert imported in done.stdout


def test_a_package_on_no_floor_breaks_the_contract(copy):
    (copy / "fedmem" / "attic").mkdir()
    (copy / "fedmem" / "attic" / "__init__.py").write_text("")
    done = lint_imports(copy)
    assert done.returncode == 1
    assert "attic" in done.stdout


def test_no_circle_of_modules():
    graph = grimp.build_graph("fedmem", cache_dir=None)
    assert len(graph.modules) == len(MODULES)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_module_explains_itself_and_is_of_a_readable_size(module):
    text = module.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= MOST_LINES
