"""One notebook through papermill: parameters in, a published stage, its executed copy and a self-contained page out.

The runner's only way to do a stage is to execute that stage's notebook. A stage has succeeded when every code cell ran
without error and a new manifest lies in its folder; whatever else the notebook's metadata say is not asked.
`python -m fedmem.study.execute jobs.json NAME` runs one job of a session; `fedmem.study.plan` writes the jobs.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any

from fedmem.display.html_page import to_html
from fedmem.machine.idle_imports import without
from fedmem.machine.processes import process_is_alive
from fedmem.results.identity import notebook_file
from fedmem.results.stage import MANIFEST, StageError, open_stage
from fedmem.study.gpus import hold

START_SECONDS = 300  # for a kernel to answer, on a machine that is busy
IDLE_IMPORTS = ("rfc3987_syntax", "isoduration", "pyarrow")  # formats of jsonschema (IRIs: two seconds), Hadoop's files


class NotebookError(RuntimeError):
    """A notebook that did not run to its end, or did not publish its stage."""


class KernelDied(NotebookError):
    """A notebook whose kernel was ended from outside, or never began: another attempt may do."""


def json_safe(value: Any) -> Any:
    """A parameter as papermill passes it on faithfully: tuples become lists, keys texts; the rest is refused."""
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and value == value):
        return value
    raise NotebookError(f"parameter value {value!r} cannot be handed to a notebook; allowed are JSON's types")


def load_papermill():
    """papermill, imported without what is idle in it."""
    with without(*IDLE_IMPORTS):
        import papermill
    return papermill


def execute(notebook: Path, output: Path, parameters: dict[str, Any]) -> None:
    """Executes a notebook with this interpreter's kernel; NotebookError names the error or the cell that never ran."""
    papermill = load_papermill()
    import nbformat
    from nbclient.exceptions import DeadKernelError

    parameters = json_safe(parameters)
    try:
        papermill.execute_notebook(
            str(notebook), str(output), parameters=parameters, kernel_name="python3",
            progress_bar=False, log_output=False, cwd=str(notebook.parent), start_timeout=START_SECONDS,
            shutdown_kernel="immediate",  # its work is published; a second to take modules down serves nobody
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        raise NotebookError(f"{error.ename}: {error.evalue}") from None
    except DeadKernelError as error:
        raise KernelDied(
            f"the kernel died ({error}): it was ended from outside, often for want of memory; `--retries 1` tries again"
        ) from None
    except RuntimeError as error:  # as nbclient says that a kernel did not start
        raise KernelDied(f"the kernel did not start: {error}") from None
    for number, cell in enumerate(nbformat.read(output, as_version=4).cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        if cell.get("execution_count") is None:
            raise NotebookError(f"cell {number} never ran: {cell.source.splitlines()[0]!r}")
        for error in (o for o in cell.outputs if o.output_type == "error"):
            raise NotebookError(f"{error.ename}: {error.evalue}")


def run_job(job: dict[str, Any]) -> None:
    """Executes a job's notebook and puts copy and page into the published folder; NotebookError when it failed.

    job: id, stage, folder (where the stage is to appear), parameters. The executed copy of a failed notebook stays
    as `<folder>.failed.ipynb` (and .html), with the error in `<folder>.failed.json`, until the stage succeeds.
    """
    folder, begun = Path(job["folder"]), time.time()
    copy = Path(f"{job['id']}.ipynb").resolve()
    try:
        execute(notebook_file(job["stage"]), copy, job["parameters"])
        manifest = folder / MANIFEST
        if not manifest.is_file() or manifest.stat().st_mtime < begun - 1:
            raise NotebookError(f"the notebook ran to its end, but published no stage in {folder}")
        open_stage(folder)
    except (NotebookError, StageError) as error:
        _keep_failed(folder, copy, str(error))
        kind = KernelDied if isinstance(error, KernelDied) else NotebookError
        raise kind(f"{job['stage']} failed: {error}\n  executed copy: {failed_copy(folder)}") from None
    _put_copy(job, copy)


def _put_copy(job: dict[str, Any], copy: Path) -> None:
    """Puts a finished stage's executed copy and page into its folder, each whole or not at all."""
    folder = Path(job["folder"])
    page = "report.html" if job["stage"] == "studies" else "notebook.html"  # a report is read without its code
    made = copy.with_suffix(".html")
    made.write_text(to_html(copy, show_code=page != "report.html"), encoding="utf-8")
    made.rename(folder / page)
    copy.rename(folder / "notebook.ipynb")


def put_copies(session: Path) -> None:
    """Does for a session that was killed what it did not come to: a stage was published, its copy still lies here.

    A copy that did not make the stage that is there now, or that is torn, is removed.
    """
    for copy in session.glob("*.ipynb"):
        jobs = json.loads((session / "jobs.json").read_text(encoding="utf-8"))
        for job in jobs:
            if job["id"] == copy.stem and _made(copy, session / f"{copy.stem}.started", Path(job["folder"])):
                _put_copy(job, copy)
        copy.unlink(missing_ok=True)


def _made(copy: Path, started: Path, folder: Path) -> bool:
    """Whether the attempt of a session that left this executed copy is what published the stage in a folder."""
    try:
        begun = datetime.fromisoformat(open_stage(folder).manifest["started"]).timestamp()
        json.loads(copy.read_text(encoding="utf-8"))
    except (StageError, ValueError):
        return False
    return started.stat().st_mtime <= begun <= copy.stat().st_mtime


def failed_copy(folder: Path) -> Path:
    """Where the executed copy of a failed notebook lies."""
    return folder.with_name(f"{folder.name}.failed.ipynb")


def failure_message(folder: Path) -> str | None:
    """The error of a stage's last, failed execution; None when there is none."""
    record = folder.with_name(f"{folder.name}.failed.json")
    return json.loads(record.read_text(encoding="utf-8"))["error"] if record.is_file() else None


def _keep_failed(folder: Path, copy: Path, error: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if copy.is_file():
        failed_copy(folder).with_suffix(".html").write_text(to_html(copy), encoding="utf-8")
        copy.rename(failed_copy(folder))
    failed_copy(folder).with_suffix(".json").write_text(json.dumps({"error": error}) + "\n", encoding="utf-8")


def main() -> int:
    """Runs one job; marks in the session folder that it began and how it failed, for the front."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("jobs", type=Path, help="jobs.json of a session")
    parser.add_argument("name", help="id of the job to run")
    parser.add_argument("--runner", type=int, help="process that this one shall not outlive")
    arguments = parser.parse_args()
    job = next(j for j in json.loads(arguments.jobs.read_text(encoding="utf-8")) if j["id"] == arguments.name)
    started, failed, died = (Path(f"{job['id']}.{state}") for state in ("started", "failed", "died"))
    if failed.exists():  # tried again by Snakemake's retries, which are for jobs that died
        return 1
    if arguments.runner:
        Thread(target=_end_with, args=(arguments.runner,), daemon=True).start()
    died.unlink(missing_ok=True)
    with contextlib.ExitStack() as held:
        environment = job["environment"] | {
            "FEDMEM_PYTHON": sys.executable,
            "JUPYTER_PREFER_ENV_PATH": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        if job.get("gpus"):
            environment["CUDA_VISIBLE_DEVICES"] = held.enter_context(hold(job["gpus"]))
        os.environ |= environment
        started.touch()
        try:
            run_job(job)
        except (NotebookError, OSError) as error:
            (died if isinstance(error, KernelDied) else failed).write_text(str(error), encoding="utf-8")
            print(error, file=sys.stderr)
            return 1
    return 0


def _end_with(runner: int) -> None:
    """Ends this process, and so its kernel, as soon as the runner is gone."""
    while process_is_alive(runner):
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as with the kernel: nothing is left to be done
