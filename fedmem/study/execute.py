"""Executes one notebook with papermill: parameters in; a published stage, its executed copy and an HTML page out.

The runner performs a stage only by executing that stage's notebook. A stage has succeeded when every code cell ran
without error and its folder contains a new manifest; other metadata of the notebook are not considered.
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

import psutil

from fedmem.display.html_page import PARAMETERS_NOTE, to_html
from fedmem.results.identity import notebook_file
from fedmem.results.stage import MANIFEST, StageError, open_stage
from fedmem.study.gpus import hold

START_SECONDS = 300  # limit for a kernel to start; long, because the machine may be busy
# optional formats of jsonschema, and Hadoop file systems: 1.3 of the 1.6 seconds that the import of papermill takes
IDLE_IMPORTS = ("rfc3987_syntax", "isoduration", "pyarrow")
# Markdown above the cells of an executed copy that papermill gave its parameters, by the cell's tag
NOTES = {
    "parameters": "*Defaults; this run used the values of the next cell.*",
    "injected-parameters": "*The parameters of this run:*",
}


class NotebookError(RuntimeError):
    """A notebook did not run to its end, or did not publish its stage."""


class KernelDied(NotebookError):
    """The kernel was ended from outside, or did not start: another attempt may succeed."""


def json_safe(value: Any) -> Any:
    """Convert a parameter to JSON types, which papermill passes on unchanged: tuples become lists, keys strings.

    Raises NotebookError for a value of another type, or NaN.
    """
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in value]
    # value == value excludes NaN, which JSON does not have
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and value == value):
        return value
    raise NotebookError(f"parameter value {value!r} cannot be passed to a notebook; expected a JSON type")


def load_papermill():
    """Import papermill without its slow optional dependencies, and return it."""
    idle = [name for name in IDLE_IMPORTS if name not in sys.modules]
    sys.modules |= dict.fromkeys(idle)  # None makes an import fail at once, which their importers handle
    try:
        import papermill
    finally:
        for name in idle:  # they can be imported as usual from here on
            del sys.modules[name]
    return papermill


def execute(notebook: Path, output: Path, parameters: dict[str, Any]) -> None:
    """Execute a notebook with this interpreter's kernel.

    notebook: the .ipynb file; cells run in its folder. output: file of the executed copy.
    parameters: {name: value} of JSON types, see `json_safe`.

    Raises NotebookError with the error of a cell or the cell that never ran, and KernelDied when the kernel died or
    did not start.
    """
    papermill = load_papermill()
    import nbformat
    from nbclient.exceptions import DeadKernelError

    parameters = json_safe(parameters)
    try:
        papermill.execute_notebook(
            str(notebook), str(output), parameters=parameters, kernel_name="python3",
            progress_bar=False, log_output=False, cwd=str(notebook.parent), start_timeout=START_SECONDS,
            shutdown_kernel="immediate",  # the stage is published by now; an orderly shutdown takes a second
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        raise NotebookError(f"{error.ename}: {error.evalue}") from None
    except DeadKernelError as error:
        raise KernelDied(
            f"the kernel died ({error}): it was ended from outside, often for lack of memory; `--retries 1` tries again"
        ) from None
    except RuntimeError as error:  # raised by nbclient when a kernel does not start
        raise KernelDied(f"the kernel did not start: {error}") from None
    # the executed copy is the evidence: papermill returning does not show that every cell ran without error
    for number, cell in enumerate(nbformat.read(output, as_version=4).cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        if cell.get("execution_count") is None:
            raise NotebookError(f"cell {number} never ran: {cell.source.splitlines()[0]!r}")
        for error in (o for o in cell.outputs if o.output_type == "error"):
            raise NotebookError(f"{error.ename}: {error.evalue}")


def note_parameters(content) -> None:
    """Add Markdown cells to an executed notebook which say that the injected parameters count, not the defaults.

    content: the notebook, as nbformat reads it. It is not changed if it has no injected parameters, or has the notes.
    """
    import nbformat

    tags = [set(cell.metadata.get("tags", ())) for cell in content.cells]
    if not any("injected-parameters" in one for one in tags) or any(PARAMETERS_NOTE in one for one in tags):
        return
    for place, tagged in reversed(list(enumerate(tags))):
        for tag in tagged & NOTES.keys():
            note = nbformat.v4.new_markdown_cell(NOTES[tag], metadata={"tags": [PARAMETERS_NOTE]})
            content.cells.insert(place, note)


def run_job(job: dict[str, Any]) -> None:
    """Execute a job's notebook and move its copy and page into the published folder.

    job: mapping with id, stage, folder (of the stage to be published), parameters. The executed copy of a failed
    notebook is kept as `<folder>.failed.ipynb` (and .html), with the error in `<folder>.failed.json`, until the stage
    succeeds. Raises NotebookError, or KernelDied, when the stage failed.
    """
    folder, begun = Path(job["folder"]), time.time()
    copy = Path(f"{job['id']}.ipynb").resolve()
    try:
        execute(notebook_file(job["stage"]), copy, job["parameters"])
        manifest = folder / MANIFEST
        # one second of tolerance, for file systems with coarse time stamps
        if not manifest.is_file() or manifest.stat().st_mtime < begun - 1:
            raise NotebookError(f"the notebook ran to its end, but published no stage in {folder}")
        open_stage(folder)
    except (NotebookError, StageError) as error:
        _keep_failed(folder, copy, str(error))
        kind = KernelDied if isinstance(error, KernelDied) else NotebookError
        raise kind(f"{job['stage']} failed: {error}\n  executed copy: {failed_copy(folder)}") from None
    _put_copy(job, copy)


def _put_copy(job: dict[str, Any], copy: Path) -> None:
    """Move a finished stage's executed copy and page into its folder, each by an atomic rename."""
    folder = Path(job["folder"])
    page = "report.html" if job["stage"] == "studies" else "notebook.html"  # a report is read without code
    _make_page(copy, show_code=page != "report.html").rename(folder / page)
    copy.rename(folder / "notebook.ipynb")


def _make_page(copy: Path, show_code: bool = True) -> Path:
    """Add the notes on parameters to an executed copy, and return the path of its HTML page, beside it."""
    import nbformat

    content, noted, page = nbformat.read(copy, as_version=4), copy.with_suffix(".noted"), copy.with_suffix(".html")
    note_parameters(content)
    nbformat.write(content, noted)
    noted.rename(copy)  # atomic: a session that is killed here leaves a whole copy
    page.write_text(to_html(copy, show_code), encoding="utf-8")
    return page


def put_copies(session: Path) -> None:
    """Finish the work of a killed session: move executed copies of published stages into the stages' folders.

    session: the session's folder. A copy is removed instead when it is incomplete or did not publish the present stage.
    """
    for copy in session.glob("*.ipynb"):
        jobs = json.loads((session / "jobs.json").read_text(encoding="utf-8"))
        for job in jobs:
            if job["id"] == copy.stem and _made(copy, session / f"{copy.stem}.started", Path(job["folder"])):
                _put_copy(job, copy)
        copy.unlink(missing_ok=True)


def _made(copy: Path, started: Path, folder: Path) -> bool:
    """Whether the attempt that left this executed copy published the stage in `folder`."""
    try:
        begun = datetime.fromisoformat(open_stage(folder).manifest["started"]).timestamp()
        json.loads(copy.read_text(encoding="utf-8"))
    except (StageError, ValueError):
        return False
    # another session may have published the stage before this attempt started or after its copy was written
    return started.stat().st_mtime <= begun <= copy.stat().st_mtime


def failed_copy(folder: Path) -> Path:
    """Return the path of the executed copy of a failed notebook."""
    return folder.with_name(f"{folder.name}.failed.ipynb")


def failure_message(folder: Path) -> str | None:
    """Return the error of a stage's last execution if that failed, else None."""
    record = folder.with_name(f"{folder.name}.failed.json")
    return json.loads(record.read_text(encoding="utf-8"))["error"] if record.is_file() else None


def _keep_failed(folder: Path, copy: Path, error: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if copy.is_file():
        _make_page(copy).rename(failed_copy(folder).with_suffix(".html"))
        copy.rename(failed_copy(folder))
    failed_copy(folder).with_suffix(".json").write_text(json.dumps({"error": error}) + "\n", encoding="utf-8")


def main() -> int:
    """Run one job, and record in the session folder, for the runner, that it started and how it failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("jobs", type=Path, help="jobs.json of a session")
    parser.add_argument("name", help="id of the job to run")
    parser.add_argument("--runner", type=int, help="process id; this process ends when that one does")
    arguments = parser.parse_args()
    job = next(j for j in json.loads(arguments.jobs.read_text(encoding="utf-8")) if j["id"] == arguments.name)
    started, failed, died = (Path(f"{job['id']}.{state}") for state in ("started", "failed", "died"))
    if failed.exists():  # Snakemake retries every failure; only a job whose kernel died runs again
        return 1
    if arguments.runner:
        Thread(target=_end_with, args=(arguments.runner,), daemon=True).start()
    died.unlink(missing_ok=True)  # of the attempt before this one
    with contextlib.ExitStack() as held:
        environment = job["environment"] | {
            "FEDMEM_PYTHON": sys.executable,
            "JUPYTER_PREFER_ENV_PATH": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        if job.get("gpus"):
            # set before the kernel starts: it inherits the variable, and CUDA reads it once
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
    """End this process, and with it its kernel, within a second after the runner ended."""
    while psutil.pid_exists(runner):
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as for the kernel: an orderly exit takes time and has nothing left to do
