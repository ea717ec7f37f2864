"""A checkout whose notebooks do next to nothing, to try the runner itself: each publishes its stage within a second.

What a notebook does besides is a file of Python code in the folder `$ACT`, named by its stage. `note(name)` in it adds
a line to `$ACT/notes`: the stage, the name, the time, the GPUs that the kernel may see, the kernel's process id.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import yaml

from fedmem.results.identity import NOTEBOOKS

REPOSITORY = Path(__file__).resolve().parent.parent
PARENTS = {"partition": None, "train": "partition", "generate": "train", "detect": "generate", "analyze": "detect"}
ACT = """
import os
import time
from pathlib import Path

from fedmem.config.stages import STAGES
from fedmem.results.stage import find_stage
from fedmem.results.studies import begin_report, open_study
from fedmem.results.work import begin_stage

def note(name):
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    with Path(os.environ["ACT"], "notes").open("a") as notes:
        notes.write(f"{STAGE} {name} {time.time()} {seen!r} {os.getpid()}\\n")

note("began")
act = Path(os.environ["ACT"], STAGE)
exec(act.read_text() if act.is_file() else "")
"""
PUBLISH = """
parent = globals().get(STAGES[STAGE].parent)
found = find_stage(STAGES[STAGE].parent, parent) if parent else None
work = begin_stage(STAGES[STAGE].from_notebook(globals()), found)
work.save_json("made", {"parent": parent, "text": "x" * 100_000})
work.publish()
note("ended")
"""
REPORT = """
description, analyses = open_study(study)
work = begin_report(description["name"], analyses)
work.save_json("study", description)
figures = [f"{a}_{b}" for a in ("mr_intra", "mr_inter", "mr_total", "control_total") for b in ("verbatim", "paper")]
rows = [",".join(["run", "state", "n", *figures])] + [f"{run},finished,1" + ",0" * len(figures) for run in analyses]
work.path("runs.csv").write_text("\\n".join(rows))
work.publish()
note("ended")
"""


class House:
    """A small checkout in a folder, its study, its results, and the `fedmem` command on them.

    As a context it ends, on leaving, every process that still works in it.
    """

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def __init__(self, folder: Path, **content):
        self.folder, self.results, self.acts, self.home = (folder, *(folder / n for n in ("results", "acts", "home")))
        shutil.copytree(REPOSITORY / "fedmem", folder / "fedmem")
        for part in ("base", "tasks"):
            shutil.copytree(REPOSITORY / "params" / part, folder / "params" / part)
        for made in (folder / "notebooks", self.acts, folder / "params" / "studies", self.home):
            made.mkdir()
        for stage, name in NOTEBOOKS.items():
            self._write_notebook(stage, folder / "notebooks" / f"{name}.ipynb")
        self.study = folder / "params" / "studies" / "small.yaml"
        self.study.write_text(yaml.safe_dump({"base": "small", "parameters": {"n_prefixes": 4}} | content))

    def _write_notebook(self, stage: str, path: Path) -> None:
        given = "study" if stage == "studies" else PARENTS[stage]
        first = (f'{given} = "latest"\n' if given else "") + "options = {}"
        sources = [first, f"STAGE = {stage!r}\nSTUDY = {stage == 'studies'}", ACT]
        if stage == "studies":
            sources[2] = sources[2].replace("from fedmem.config.stages import STAGES\n", "")
        sources.append(REPORT if stage == "studies" else PUBLISH)
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        cells[0].metadata["tags"] = ["parameters"]
        python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=python), path)

    def act(self, stage: str, code: str) -> None:
        """Has a stage's notebook do this, from now on."""
        (self.acts / stage).write_text(code)

    def notes(self) -> list[list[str]]:
        """[stage, name, time, GPUs, process] of every note so far."""
        path = self.acts / "notes"
        return [line.split() for line in path.read_text().splitlines()] if path.is_file() else []

    def begin(self, *arguments, **environment) -> subprocess.Popen:
        """Starts the command in the foreground of nobody, with default signal handlers."""
        settings = os.environ | {
            "FEDMEM_RESULTS": str(self.results), "PYTHONPATH": str(self.folder), "ACT": str(self.acts),
            "HOME": str(self.home), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "fedmem.cli.main", *map(str, arguments)],
            cwd=self.folder, env=settings | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=_default_signals,
        )  # fmt: skip

    def run(self, *arguments, **environment) -> subprocess.CompletedProcess:
        process = self.begin(*arguments, **environment)
        out, err = process.communicate(timeout=1800)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def processes(self) -> dict[int, str]:
        """{process id: command line} of what runs on these results."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"FEDMEM_RESULTS={self.results}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def kernels(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if "ipykernel_launcher" in command]


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until(what, seconds: float = 120) -> None:
    """Waits until what() is true; fails when it does not come to be."""
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends, f"not within {seconds} s"
        time.sleep(0.1)
