"""One session of the runner: the lock of the results, Snakemake over the session's jobs, progress, interruption.

`fedmem.study.plan` determines the jobs and `fedmem.study.execute` runs one. The folder of a session,
`results/.runner/<session>/`, contains its jobs (`jobs.json`), Snakemake's log and bookkeeping, and markers of each job:
`.started` (touched at each attempt), `.done`, `.failed` (an error that would occur again), `.died` (it was ended from
outside, so that another attempt may succeed).
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from fedmem.config.parameter import ConfigError
from fedmem.machine.paths import PACKAGE, hub_home, results_root, take_lock
from fedmem.results.stage import StageError
from fedmem.study import gpus
from fedmem.study.execute import put_copies

GRACE_SECONDS = 30  # time that an interrupted session has to end by itself
SNAKEFILE = PACKAGE / "study" / "Snakefile"
DEFAULTS = {"gpu": 0, "mem_mb": 4000, "runtime": 240, "disk_mb": 1000}  # of a job without an estimate; runtime: minutes
FULL_BYTES = 4_000_000  # a disk with less free space counts as full
LEAST_MB = 2000  # of a submitted job: Snakemake, papermill and a kernel run side by side


# --- the lock of the results ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def results_lock(study: str, wait: bool = False) -> Iterator[TextIO]:
    """Hold the lock of the results while the context is open. Returns the open lock file.

    study: name of the study, written into the lock for other processes to read.
    wait: wait until another runner has ended.
    Raises StageError when another runner holds the lock and `wait` is False.
    """
    path = _lock_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    # flock, not a lock file that is made and removed: the kernel frees the lock when its last process ends, however it
    # ends. "a+": opening must not empty the file, which the holder has written.
    with path.open("a+") as lock:
        if not _locked(lock):
            if not wait:
                raise StageError(
                    f"another `fedmem run` ({_holder()}) works on {results_root()}: wait for it (--wait), show "
                    "its progress (`fedmem status`), or set FEDMEM_RESULTS to another folder"
                )
            print(f"waiting for another `fedmem run` ({_holder()})", file=sys.stderr)
            take_lock(lock, wait=True)
        note_in_lock(lock, study=study, host=socket.gethostname(), front=os.getpid())
        yield lock


def note_in_lock(lock: TextIO, **about: Any) -> None:
    """Write facts about the holder into the lock. `front` begins a new record, other keys are added to the record."""
    lock.seek(0)
    text = lock.read()
    lock.truncate(0)
    lock.write(json.dumps(about if "front" in about else json.loads(text) | about))
    lock.flush()


def current_session() -> dict[str, Any] | None:
    """The record that the holder wrote into the lock (study, host, front, runner, session); None when nothing runs."""
    with contextlib.suppress(FileNotFoundError), _lock_path().open() as lock:
        if not take_lock(lock, shared=True):
            with contextlib.suppress(ValueError):  # read while the holder writes it
                return json.load(lock)
            return {}
    return None


def _lock_path() -> Path:
    return results_root() / ".runner" / "lock"


def _locked(lock: TextIO) -> bool:
    for _ in range(5):  # `current_session` in another process holds a shared lock for a moment
        if take_lock(lock):
            return True
        time.sleep(0.1)
    return False


def _holder() -> str:
    about = current_session() or {}
    processes = " and ".join(str(about[name]) for name in ("front", "runner") if name in about)
    return f"study {about.get('study')}, processes {processes} on {about.get('host')}"


# --- a session ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """The state of a session: ids of its jobs by state, and the running time of those that run."""

    done: list[str]
    failed: list[str]
    running: dict[str, float]  # seconds
    waiting: list[str]

    @classmethod
    def of(cls, folder: Path) -> "Progress":
        """Read the state from the markers in a session's folder."""
        names = [job["id"] for job in json.loads((folder / "jobs.json").read_text(encoding="utf-8"))]
        # one listing instead of several stat calls for each job, twice a second
        marked = {path.name: path for path in folder.iterdir()}
        done = [name for name in names if f"{name}.done" in marked]
        failed = [name for name in names if name not in done and _gave_up(name, marked)]
        running = {}
        for name in names:
            if name not in done and name not in failed and (path := marked.get(f"{name}.started")):
                running[name] = time.time() - path.stat().st_mtime
        return cls(done, failed, running, [n for n in names if n not in {*done, *failed, *running}])


def _gave_up(name: str, marked: dict[str, Path]) -> bool:
    """Whether a job failed, or died and was not started again."""
    died, started = (marked.get(f"{name}.{mark}") for mark in ("died", "started"))
    return f"{name}.failed" in marked or bool(died and died.stat().st_mtime >= started.stat().st_mtime)


def run_session(jobs: list[dict], options: argparse.Namespace, lock: TextIO) -> int:
    """Run Snakemake once over the jobs, in a folder of its own; show progress and print failures.

    jobs: the entries of `plan.session_jobs`.
    options: cores (None: all, or the number in the profile), retries, profile, snakemake (further arguments).
    lock: the open lock of `only_runner`; Snakemake inherits it.
    Returns 0 when all jobs are done, else 1. Raises ConfigError for a profile that cannot be read, and
    KeyboardInterrupt, after Snakemake has ended, when it is interrupted.
    """
    # a killed session leaves executed copies of published stages in its folder
    for former in _lock_path().parent.glob("*/jobs.json"):
        put_copies(former.parent)
    arguments, folder = arguments_of(options), _new_folder()
    jobs = [_placed(job, None if _executor(arguments) != "local" else gpus.visible()) for job in jobs]
    (folder / "jobs.json").write_text(json.dumps(jobs, indent=1, ensure_ascii=False), encoding="utf-8")
    command = [
        sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), "--directory", str(folder), "--keep-going",
        "--nocolor", "--envvars", *_environment(), *_limits(jobs, arguments), *arguments,
    ]  # fmt: skip
    with (folder / "snakemake.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | _environment(),
            pass_fds=[lock.fileno()],  # Snakemake outlives a killed front process and holds the lock until it ends
            start_new_session=True,  # own process group: Ctrl-C does not reach it directly; `_end` signals all of it
            preexec_fn=_hears_interrupts,
        )
        note_in_lock(lock, runner=process.pid, session=str(folder))
        try:
            _follow(process, folder)
        except KeyboardInterrupt:
            _end(process, _executor(arguments))
            raise
    return _outcome(process.returncode, folder)


def _new_folder() -> Path:
    parent, name = results_root() / ".runner", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for number in range(100):  # one process may start two sessions in a second: the stages, then the report
        with contextlib.suppress(FileExistsError):
            folder = parent / (f"{name}-{number}" if number else name)
            folder.mkdir(parents=True)
            return folder
    raise FileExistsError(f"{parent / name}: there are already 100 sessions of this second")


def _environment() -> dict[str, str]:
    """Variables that keep Snakemake and kernels from writing outside results; the hub's cache stays in its place."""
    folder = results_root() / ".runner"
    return {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "MPLCONFIGDIR": str(folder / "cache" / "matplotlib"),
        "IPYTHONDIR": str(folder / "cache" / "ipython"),
        "HF_HOME": str(hub_home()),  # its default lies in XDG_CACHE_HOME, which is moved above
    }


def arguments_of(options: argparse.Namespace) -> list[str]:
    """Snakemake's arguments from the command line. Raises ConfigError for a profile that cannot be read."""
    given = ["--retries", str(options.retries)] if options.retries is not None else []
    if options.profile:
        path = Path(options.profile).expanduser().resolve()
        if not _profile_files(path):
            raise ConfigError(f"--profile {options.profile}: expected a folder with Snakemake's config.yaml")
        _profile(path)
        given += ["--profile", str(path)]
    if options.cores is not None:
        given += ["--cores", str(options.cores)]
    return given + options.snakemake


def _executor(arguments: list[str]) -> str:
    """Where Snakemake's arguments run jobs: "local", or the name of an executor plugin."""
    return _given(arguments, "executor", "-e") or "local"


def _given(arguments: list[str], name: str, short: str = "") -> Any:
    """The value of one of Snakemake's options from the command line, else from its profile; None if neither has it."""
    found = {f"--{name}": None, "--profile": None}
    for position, argument in enumerate(arguments):
        option, sign, value = argument.partition("=")
        if (option := f"--{name}" if option == short else option) in found:
            found[option] = value if sign else next(iter(arguments[position + 1 :]), None)
    if found[f"--{name}"] is None and found["--profile"]:
        return _profile(Path(found["--profile"])).get(name)
    return found[f"--{name}"]


def _profile_files(folder: Path) -> list[Path]:
    """The files of a profile, the one for this version of Snakemake first."""
    return [path for name in ("config.v8+.yaml", "config.yaml") if (path := folder / name).is_file()]


def _profile(folder: Path) -> dict[str, Any]:
    """The options in a profile. Raises ConfigError if it is not a YAML mapping."""
    for path in _profile_files(folder):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: got {type(content).__name__}; expected a mapping of Snakemake's options")
        return content
    return {}


def _placed(job: dict[str, Any], devices: list[str] | None) -> dict[str, Any]:
    """The job with its resources, the environment of its process, and the GPUs from which it may take one.

    devices: the GPUs of this machine; None when the job runs on a cluster, which assigns its own. A job that requests
    no GPU sees none, so that no two jobs share a GPU.
    """
    resources = DEFAULTS | job.get("resources", {})
    environment = job["environment"] | _environment()
    if devices is not None:
        # without a GPU the job runs on the processors; Snakemake would wait forever for a resource that does not exist
        resources["gpu"] = min(resources["gpu"], 1, len(devices))
        if not resources["gpu"]:
            environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        resources["mem_mb"] = max(resources["mem_mb"], LEAST_MB)
    given_gpus = devices if resources["gpu"] and devices else []
    return job | {"resources": resources, "environment": environment, "gpus": given_gpus}


def _limits(jobs: list[dict], arguments: list[str]) -> list[str]:
    """Arguments that limit Snakemake to this machine's processors, memory and GPUs; none on a cluster."""
    if _executor(arguments) != "local":
        return []
    cores = [] if _given(arguments, "cores", "-c") else ["--cores", "all"]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    devices = max((len(job["gpus"]) for job in jobs), default=0)
    limits = [] if _given(arguments, "resources") else ["--resources", f"gpu={devices}", f"mem_mb={memory}"]
    return [*cores, *limits]


def _hears_interrupts() -> None:
    """Restore the default of SIGINT: a process started in a script's background inherits that it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _follow(process: subprocess.Popen, folder: Path) -> None:
    """Show a progress bar over a session's stages with the running ones until Snakemake ends."""
    from tqdm import tqdm

    shown, total = None, len(json.loads((folder / "jobs.json").read_text(encoding="utf-8")))
    with tqdm(total=total, bar_format="{n_fmt}/{total_fmt} stages, {elapsed} {desc}") as bar:
        while True:
            # poll first: the markers read after the end are complete
            ended, now = process.poll() is not None, Progress.of(folder)
            over = len(now.done) + len(now.failed)
            if (over, list(now.running)) != shown:
                shown, bar.n = (over, list(now.running)), over
                bar.set_description_str(", ".join(now.running)[:100])
            if ended:
                return
            time.sleep(0.5)


def _end(process: subprocess.Popen, executor: str) -> None:
    """End a session: local jobs are terminated at once, jobs on a cluster are cancelled by Snakemake.

    Kernels end when they notice that their parent is gone. After GRACE_SECONDS, or at a second interrupt, all
    processes are killed.
    """
    try:
        if executor == "local":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=GRACE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(code: int, folder: Path) -> int:
    """Print the errors of failed jobs and the last output of jobs that died. Returns 0 when all is done, else 1."""
    if not code:
        return 0
    if (free := shutil.disk_usage(folder).free) < FULL_BYTES:  # markers and logs may be missing then
        print(
            f"fedmem: No space left: {free // 1024} KB are free at {results_root()}; free some space, "
            "or set FEDMEM_RESULTS to another disk; the same command continues from here",
            file=sys.stderr,
        )
    marks = [*sorted(folder.glob("*.failed")), *sorted(folder.glob("*.died"))]
    # a job that is done has nothing to report, whatever an earlier attempt left
    reasons = {path: path.read_text(encoding="utf-8") for path in marks if not path.with_suffix(".done").exists()}
    for text in filter(None, reasons.values()):
        print(f"fedmem: {text}", file=sys.stderr)
    # killed so abruptly that not even `.died` was written: by the memory killer, or by a cluster's limits
    silent = [name for name in Progress.of(folder).running if not (folder / f"{name}.died").exists()]
    if silent or not reasons:
        log = folder / "snakemake.log"
        text = log.read_text(encoding="utf-8")
        messages = re.findall(r"^ +message: (?!None)(.*)$", text, re.MULTILINE)
        last = [line for line in text.splitlines() if line.strip()][-3:]
        for line in dict.fromkeys(messages or last):  # the cluster's messages, else the end of Snakemake's output
            print(f"fedmem: {line}", file=sys.stderr)
        about = f"{', '.join(silent)} ended without a message" if silent else "the runner failed"
        print(f"fedmem: {about}; the log is {log}", file=sys.stderr)
    return 1
