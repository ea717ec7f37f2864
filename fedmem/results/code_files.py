"""What code a stage is made by: its notebook, the modules that this imports, and the data files that these read.

The imports are read statically, those inside functions included, and followed to their end (grimp). So an edit makes
stale what it can change, and nothing else. Modules that only show results (`fedmem.display`, and every package's
figures and sentences) do not count for the stages before the analysis: a new caption must not cost a GPU training.
"""

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path

import grimp
from grimp.exceptions import SourceSyntaxError

from fedmem.config.parameter import ConfigError
from fedmem.machine.paths import PACKAGE, data_file, digest_of, file_digest
from fedmem.results.identity import notebook_file

COMPUTING = ("partition", "train", "generate", "detect")  # stages whose pictures are not what later stages read
SHOWING = re.compile(r"fedmem\.display(\..+)?|fedmem\.\w+\.(figures|sentences)")
MAGIC = re.compile(r"^\s*[%!].*$", re.MULTILINE)  # IPython's own lines in a notebook that somebody edits


def code_files(stage: str) -> dict[str, str]:
    """Return {file as seen from the package: SHA-256} of all that a stage's notebook uses, and of its own code cells.

    stage: a name of config.stages.STAGES, or "studies" (the report). Outputs and Markdown of the notebook do not count:
    executing or explaining a notebook does not change its code.
    """
    graph, cells = _graph(), _cells(stage)
    roots = {name for cell in cells for name in _imported(cell, graph.modules)}
    files = _digests(_closure(graph, roots, without_pictures=stage in COMPUTING))
    return files | {notebook_file(stage).name: digest_of(cells)}


def module_digest(module: str) -> str:
    """Return the digest of a module and of all that it imports; module: its full name, fedmem.train.network.apps."""
    return digest_of(_digests(_closure(_graph(), {module})))


def changed_files(then: dict[str, str], now: dict[str, str]) -> str:
    """Return which of two `code_files` differ, as the end of a sentence: ": a.py, b.py and 3 more", or nothing."""
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f": {', '.join(names[:3])}{more}" if then and names else ""


def _digests(modules: Iterable[str]) -> dict[str, str]:
    """{file as seen from the package: SHA-256} of modules and of the data files that they name to `data_file`."""
    files = {path for module in modules for path in (_source(module), *_data(_source(module)))}
    return {str(path.relative_to(PACKAGE)): file_digest(path) for path in sorted(files)}


def _graph() -> grimp.ImportGraph:
    """The package's imports as its files are now: kernels live long, and somebody may edit the package meanwhile."""
    try:
        return grimp.build_graph("fedmem", cache_dir=None)
    except SourceSyntaxError as error:
        raise ConfigError(f"{error}; mend the file first: the code of a stage is found by its imports") from None


def _closure(graph: grimp.ImportGraph, roots: set[str], without_pictures: bool = False) -> set[str]:
    found, waiting = set(), set(roots)
    while waiting:
        module = waiting.pop()
        if without_pictures and SHOWING.fullmatch(module):
            continue
        found.add(module)
        parent = module.rpartition(".")[0]  # importing a module runs its packages' __init__ first
        waiting |= ({parent} if parent else set()) | graph.find_modules_directly_imported_by(module)
        waiting -= found
    return found


def _cells(stage: str) -> list[str]:
    path = notebook_file(stage)
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"notebooks/{path.name}: cannot be read as a notebook ({error}); `git checkout notebooks/{path.name}` "
            "restores it"
        ) from None


def _imported(code: str, modules: set[str]) -> set[str]:
    """The package's modules that a cell imports; all of them for a cell that is not Python."""
    try:
        tree = ast.parse(MAGIC.sub("", code))
    except SyntaxError:
        return set(modules)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & modules


def _source(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _data(source: Path) -> set[Path]:
    """The files under fedmem/data that a module names, as literal arguments of `data_file`."""
    text = source.read_text(encoding="utf-8")
    if data_file.__name__ not in text:
        return set()
    return {
        data_file(node.args[0].value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == data_file.__name__
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
