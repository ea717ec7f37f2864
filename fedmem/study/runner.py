"""One session of the runner: the lock of the results, Snakemake over a session's jobs, its progress, a clean end.

Which jobs there are is `fedmem.study.plan`'s matter; what a job does is `fedmem.study.execute`'s. A session's folder,
`results/.runner/<session>/`, holds its jobs (`jobs.json`), Snakemake's log and bookkeeping, and a marker for each job:
`.started` (touched at each attempt), `.done`, `.failed` (an error that would come again), `.died` (what ended it from
outside, so that another attempt may do).
"""

import argparse
import contextlib
import fcntl
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
from fedmem.machine.paths import PACKAGE, hub_home, results_root
from fedmem.results.stage import StageError
from fedmem.study import gpus
from fedmem.study.execute import put_copies

GRACE_SECONDS = 30  # for an interrupted session to end by itself
SNAKEFILE = PACKAGE / "study" / "Snakefile"
DEFAULTS = {"gpu": 0, "mem_mb": 4000, "runtime": 240, "disk_mb": 1000}  # of a job that states none; runtime: minutes
FULL_BYTES = 4_000_000  # a disk with less is full
LEAST_MB = 2000  # of a submitted job: Snakemake, papermill and a kernel side by side


# --- the lock of the results ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def results_lock(study: str, wait: bool = False) -> Iterator[TextIO]:
    """Holds the lock of these results; it goes with the processes that hold it, so that none is ever left behind.

    study: whose session this is, for those who look. wait: until another runner has ended; StageError otherwise.
    """
    path = _lock_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        if not _locked(lock):
            if not wait:
                raise StageError(
                    f"another `fedmem run` ({_holder()}) works on {results_root()}: wait for it (--wait does), "
                    "look at it (`fedmem status`), or set FEDMEM_RESULTS to another folder"
                )
            print(f"waits for another `fedmem run` ({_holder()})", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        note_in_lock(lock, study=study, host=socket.gethostname(), front=os.getpid())
        yield lock


def note_in_lock(lock: TextIO, **about: Any) -> None:
    """Writes into the lock who holds it."""
    lock.seek(0)
    text = lock.read()
    lock.truncate(0)
    lock.write(json.dumps(about if "front" in about else json.loads(text) | about))
    lock.flush()


def current_session() -> dict[str, Any] | None:
    """What the holder of the lock wrote into it (study, host, front, runner, session); None when nothing runs."""
    with contextlib.suppress(FileNotFoundError), _lock_path().open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(ValueError):  # it is being written
                return json.load(lock)
            return {}
    return None


def _lock_path() -> Path:
    return results_root() / ".runner" / "lock"


def _locked(lock: TextIO) -> bool:
    for _ in range(5):  # whoever asks whether something runs holds it for a moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """How a session stands: ids of its jobs, and how long those that run have been running."""

    done: list[str]
    failed: list[str]
    running: dict[str, float]  # seconds
    waiting: list[str]

    @classmethod
    def of(cls, folder: Path) -> "Progress":
        """Read from a session's markers."""
        names = [job["id"] for job in json.loads((folder / "jobs.json").read_text(encoding="utf-8"))]
        marked = {path.name: path for path in folder.iterdir()}
        done = [name for name in names if f"{name}.done" in marked]
        failed = [name for name in names if name not in done and _gave_up(name, marked)]
        running = {}
        for name in names:
            if name not in done and name not in failed and (path := marked.get(f"{name}.started")):
                running[name] = time.time() - path.stat().st_mtime
        return cls(done, failed, running, [n for n in names if n not in {*done, *failed, *running}])


def _gave_up(name: str, marked: dict[str, Path]) -> bool:
    """Whether a job has failed, or died and was not begun again."""
    died, started = (marked.get(f"{name}.{mark}") for mark in ("died", "started"))
    return f"{name}.failed" in marked or bool(died and died.stat().st_mtime >= started.stat().st_mtime)


def run_session(jobs: list[dict], options: argparse.Namespace, lock: TextIO) -> int:
    """One Snakemake invocation over these jobs, in a folder of its own; shows progress, prints failures.

    options: cores (None: all, or as many as the profile says), retries, profile, snakemake (more arguments).
    Returns 0 when all jobs are done, else 1.
    """
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
            pass_fds=[lock.fileno()],  # it outlives a front that is killed, and holds the lock until it ends
            start_new_session=True,  # a group of its own, so that an interrupt reaches all of it, and once
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
    for number in range(100):
        with contextlib.suppress(FileExistsError):
            folder = parent / (f"{name}-{number}" if number else name)
            folder.mkdir(parents=True)
            return folder
    raise FileExistsError(f"{parent / name}: there are 100 sessions of this second")


def _environment() -> dict[str, str]:
    """What keeps Snakemake and kernels from writing outside results; models of the hub stay where the hub puts them."""
    folder = results_root() / ".runner"
    return {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "MPLCONFIGDIR": str(folder / "cache" / "matplotlib"),
        "IPYTHONDIR": str(folder / "cache" / "ipython"),
        "HF_HOME": str(hub_home()),
    }


def arguments_of(options: argparse.Namespace) -> list[str]:
    """The command line's part of Snakemake's arguments; ConfigError for a profile that cannot be read."""
    given = ["--retries", str(options.retries)] if options.retries is not None else []
    if options.profile:
        path = Path(options.profile).expanduser().resolve()
        if not _profile_files(path):
            raise ConfigError(f"--profile {options.profile}: allowed is a folder that holds Snakemake's config.yaml")
        _profile(path)
        given += ["--profile", str(path)]
    if options.cores is not None:
        given += ["--cores", str(options.cores)]
    return given + options.snakemake


def _executor(arguments: list[str]) -> str:
    """Where jobs run, by Snakemake's arguments: "local", or the name of an executor plugin."""
    return _given(arguments, "executor", "-e") or "local"


def _given(arguments: list[str], name: str, short: str = "") -> Any:
    """The value of one of Snakemake's options, from the command line or else from its profile; None: neither has it."""
    found = {f"--{name}": None, "--profile": None}
    for position, argument in enumerate(arguments):
        option, sign, value = argument.partition("=")
        if (option := f"--{name}" if option == short else option) in found:
            found[option] = value if sign else next(iter(arguments[position + 1 :]), None)
    if found[f"--{name}"] is None and found["--profile"]:
        return _profile(Path(found["--profile"])).get(name)
    return found[f"--{name}"]


def _profile_files(folder: Path) -> list[Path]:
    """A profile's file, that for this Snakemake first."""
    return [path for name in ("config.v8+.yaml", "config.yaml") if (path := folder / name).is_file()]


def _profile(folder: Path) -> dict[str, Any]:
    """What a profile says, by option; ConfigError where it is no YAML mapping."""
    for path in _profile_files(folder):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: got {type(content).__name__}; allowed is a mapping of Snakemake's options")
        return content
    return {}


def _placed(job: dict[str, Any], devices: list[str] | None) -> dict[str, Any]:
    """A job with its resources and threads, the environment of its process, and the GPUs that it may take one of.

    devices: this machine's GPUs; None when the job runs on a cluster, which deals its own. A job that asks for no GPU
    sees none, so that each is one job's alone.
    """
    resources = DEFAULTS | job.get("resources", {})
    environment = job["environment"] | _environment()
    if devices is not None:
        resources["gpu"] = min(resources["gpu"], 1, len(devices))
        if not resources["gpu"]:
            environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        resources["mem_mb"] = max(resources["mem_mb"], LEAST_MB)
    given_gpus = devices if resources["gpu"] and devices else []
    return job | {"resources": resources, "environment": environment, "gpus": given_gpus}


def _limits(jobs: list[dict], arguments: list[str]) -> list[str]:
    """What this machine has, for Snakemake to keep jobs within; nothing on a cluster."""
    if _executor(arguments) != "local":
        return []
    cores = [] if _given(arguments, "cores", "-c") else ["--cores", "all"]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    devices = max((len(job["gpus"]) for job in jobs), default=0)
    limits = [] if _given(arguments, "resources") else ["--resources", f"gpu={devices}", f"mem_mb={memory}"]
    return [*cores, *limits]


def _hears_interrupts() -> None:
    """Started from a script's background, a process would ignore SIGINT for ever."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _follow(process: subprocess.Popen, folder: Path) -> None:
    """A progress bar over a session's stages, with those that run now."""
    from tqdm import tqdm

    shown, total = None, len(json.loads((folder / "jobs.json").read_text(encoding="utf-8")))
    with tqdm(total=total, bar_format="{n_fmt}/{total_fmt} stages, {elapsed} {desc}") as bar:
        while True:
            ended, now = process.poll() is not None, Progress.of(folder)
            over = len(now.done) + len(now.failed)
            if (over, list(now.running)) != shown:
                shown, bar.n = (over, list(now.running)), over
                bar.set_description_str(", ".join(now.running)[:100])
            if ended:
                return
            time.sleep(0.5)


def _end(process: subprocess.Popen, executor: str) -> None:
    """Ends a session: at once where its jobs are its own processes, by Snakemake's cancelling where a cluster has them.

    Kernels end as soon as they see that their parent is gone. A second interrupt, or time, ends it hard.
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
    """Prints what failed, and what a job that died said; 0 when all is done, else 1."""
    if not code:
        return 0
    if (free := shutil.disk_usage(folder).free) < FULL_BYTES:  # then even what failed may be told nowhere else
        print(
            f"fedmem: No space left: {free // 1024} KB are free at {results_root()}; make room, or set "
            "FEDMEM_RESULTS to another disk; the same command goes on from here",
            file=sys.stderr,
        )
    marks = [*sorted(folder.glob("*.failed")), *sorted(folder.glob("*.died"))]
    said = {path: path.read_text(encoding="utf-8") for path in marks if not path.with_suffix(".done").exists()}
    for text in filter(None, said.values()):
        print(f"fedmem: {text}", file=sys.stderr)
    speechless = [name for name in Progress.of(folder).running if not (folder / f"{name}.died").exists()]
    if speechless or not said:
        log = folder / "snakemake.log"
        text = log.read_text(encoding="utf-8")
        told = re.findall(r"^ +message: (?!None)(.*)$", text, re.MULTILINE)
        last = [line for line in text.splitlines() if line.strip()][-3:]
        for line in dict.fromkeys(told or last):  # what the cluster said, or Snakemake itself
            print(f"fedmem: {line}", file=sys.stderr)
        about = f"{', '.join(speechless)} ended without a word" if speechless else "the runner failed"
        print(f"fedmem: {about}; the log is {log}", file=sys.stderr)
    return 1
