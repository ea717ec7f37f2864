"""What the runner adds to a notebook's own work, part by part. Run: pytest tests/benchmarks --benchmark-only

Seconds are of processors: what a part takes where nothing else runs. A stage's notebook is cut down to its imports.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from fedmem import runs

MOST_SECONDS = 4.0  # for a stage that needs no torch: process, papermill, kernel, imports, page
PARTS = {
    "process": "import fedmem.execute",
    "papermill": "import fedmem.execute as e; e.load_papermill()",
    "snakemake": "import snakemake.cli, snakemake.api, snakemake.executors.local",  # once a session
    "pandas": "import pandas",
    "scipy.stats": "import scipy.stats",
    "seaborn": "import seaborn",
}
JOB = """
import sys
from pathlib import Path
from fedmem.execute import execute
from fedmem.pages import to_html

execute(Path(sys.argv[1]), Path(sys.argv[2]), {})
Path(sys.argv[2]).with_suffix(".html").write_text(to_html(Path(sys.argv[2])))
"""


def cpu_seconds(folder: Path, code: str, *arguments: str) -> float:
    """Processor seconds of a Python process that runs the code, and of its children."""
    settings = {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder / "mpl"), "IPYTHONDIR": str(folder / "ipython")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, env=os.environ | settings)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("speed")


@pytest.mark.parametrize("part", PARTS)
def test_part(benchmark, folder, part):
    started = min(cpu_seconds(folder, "pass") for _ in range(3))
    found = []
    benchmark.pedantic(lambda: found.append(cpu_seconds(folder, PARTS[part]) - started), rounds=3, warmup_rounds=1)
    benchmark.extra_info |= {"cpu_s": round(min(found), 2)}


@pytest.mark.parametrize("stage", ["empty", "partition", "detect", "analyze", "studies"])
def test_a_notebook_that_only_imports(benchmark, folder, stage):
    """The runner's way with a stage from process to page; empty: a notebook without imports."""
    given = folder / f"{stage}.ipynb"
    cells = [nbformat.v4.new_code_cell("pass" if stage == "empty" else imports_of(stage))]
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=python), given)
    found = []

    def run():
        found.append(cpu_seconds(folder, JOB, str(given), str(folder / f"{stage}-made.ipynb")))

    benchmark.pedantic(run, rounds=3, warmup_rounds=1)  # matplotlib lists the fonts at its first import ever
    benchmark.extra_info |= {"cpu_s": round(min(found), 2)}
    assert min(found) <= MOST_SECONDS


def imports_of(stage: str) -> str:
    """The cell of a stage's notebook that imports."""
    cells = json.loads(runs.notebook_file(stage).read_text(encoding="utf-8"))["cells"]
    return next(code for cell in cells if "from fedmem import" in (code := "".join(cell["source"])))
