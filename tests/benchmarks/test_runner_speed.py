"""What the runner adds to a notebook's own work, part by part. Run: pytest tests/benchmarks --benchmark-only

Seconds are of processors: what a part takes where nothing else runs (busy neighbours double them). A stage's
notebook is cut down to its imports, with seaborn where it draws a heatmap: there, that is imported at the first one.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from fedmem.results.code_files import code_files
from fedmem.results.identity import NOTEBOOKS, notebook_file

MOST_SECONDS = 4.0  # for a stage that needs no torch: process, papermill, kernel, imports, page
HEATMAPS = ("partition", "analyze", "studies")
SESSION = "import snakemake.cli, snakemake.api, snakemake.executors.local"  # once a session, not a notebook
JOB = """
import json, sys, time
from pathlib import Path
from fedmem.study.execute import execute
from fedmem.display.html_page import to_html

made, moments = Path(sys.argv[2]), [time.process_time()]
execute(Path(sys.argv[1]), made, {})
moments.append(time.process_time())
made.with_suffix(".html").write_text(to_html(made))
print(json.dumps([*moments, time.process_time()]))
"""
TIMED = "import time\nbefore = time.process_time()\n{}\nprint(before, time.process_time())"


def spent(folder: Path, code: str, *arguments: str) -> tuple[float, str]:
    """Processor seconds of a Python process that runs the code, with its children, and what it printed."""
    settings = {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder / "mpl"), "IPYTHONDIR": str(folder / "ipython")}
    command = [sys.executable, "-c", code, *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | settings)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("speed")


@pytest.mark.parametrize("stage", ["no imports", "partition", "detect", "analyze", "studies"])
def test_a_notebook_that_only_imports(benchmark, folder, stage):
    """The runner's way with a stage, from process to page."""
    given, made = folder / "given.ipynb", folder / "made.ipynb"
    source = TIMED.format("" if stage == "no imports" else imports_of(stage))
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)], metadata=python), given)
    found = []

    def run():
        total, printed = spent(folder, JOB, str(given), str(made))
        process, executed, page = json.loads(printed)
        cells = nbformat.read(made, as_version=4).cells
        kernel, imported = map(float, cells[-1].outputs[0].text.split())
        found.append(
            {
                "cpu_s": total, "process": process, "papermill": executed - process, "kernel": kernel,
                "imports": imported - kernel, "page": page - executed,
            }
        )  # fmt: skip

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)  # matplotlib lists the fonts at its first import ever
    best = min(found, key=lambda one: one["cpu_s"])
    benchmark.extra_info |= {part: round(seconds, 2) for part, seconds in best.items()}
    assert best["cpu_s"] <= MOST_SECONDS


def test_a_session(benchmark, folder):
    """Snakemake itself, once for all the stages of a `fedmem run`."""
    found = []
    benchmark.pedantic(lambda: found.append(spent(folder, SESSION)[0]), rounds=3, warmup_rounds=1)
    benchmark.extra_info |= {"cpu_s": round(min(found), 2)}


def imports_of(stage: str) -> str:
    """The cell of a stage's notebook that imports."""
    cells = json.loads(notebook_file(stage).read_text(encoding="utf-8"))["cells"]
    code = next(code for cell in cells if "from fedmem." in (code := "".join(cell["source"])))
    return f"{code}\nimport seaborn" if stage in HEATMAPS else code


def test_what_code_all_stages_use(benchmark):
    """The static closures of the six notebooks, with the digests of their files: at most a second for all."""
    found = benchmark.pedantic(lambda: {stage: code_files(stage) for stage in NOTEBOOKS}, rounds=5, warmup_rounds=1)
    assert all(found.values())
    benchmark.extra_info |= {stage: len(files) for stage, files in found.items()}
    assert benchmark.stats.stats.max <= 1
