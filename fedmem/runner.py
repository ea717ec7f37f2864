"""One session of the runner: the lock of the results, Snakemake over a session's jobs, progress, a clean end.

Which jobs there are is `fedmem.study`'s matter; what a job does is `fedmem.execute`'s.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fedmem import runs

GRACE_SECONDS = 20  # for an interrupted session to end by itself
SNAKEFILE = runs.PACKAGE / "Snakefile"


@contextlib.contextmanager
def only_runner():
    """Holds the lock of these results; it goes with the processes that hold it, so that none is ever left behind."""
    path = runs.results_root() / ".runner" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise runs.StageError(
                f"another `fedmem run` (processes {lock.read().strip()}) works on {runs.results_root()}: wait for it, "
                "or set FEDMEM_RESULTS to another folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock


def session(jobs: list[dict], options: argparse.Namespace, lock) -> int:
    """One Snakemake invocation over these jobs, in a folder of its own; shows progress, prints failures."""
    folder = runs.results_root() / ".runner" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{len(jobs)}"
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps(jobs, indent=1, ensure_ascii=False), encoding="utf-8")
    command = [
        sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), "--directory", str(folder), "--cores",
        str(options.cores), "--keep-going", "--nocolor", *options.snakemake,
    ]  # fmt: skip
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / "snakemake.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[lock.fileno()],
            start_new_session=True,  # a group of its own, so that an interrupt reaches all of it, and once
        )
        lock.write(f" {process.pid}")  # it outlives a front that is killed, and holds the lock until it ends
        lock.flush()
        try:
            _follow(process, folder, jobs)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)  # kernels notice that their parent is gone
            try:
                process.wait(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
    failed = sorted(folder.glob("*.failed"))
    for message in failed:
        print(f"fedmem: {message.read_text(encoding='utf-8')}", file=sys.stderr)
    if process.returncode and not failed:
        print(f"fedmem: the runner failed; its log is {folder / 'snakemake.log'}", file=sys.stderr)
    return 1 if process.returncode else 0


def _follow(process: subprocess.Popen, folder: Path, jobs: list[dict]) -> None:
    """A progress bar over a session's stages, with those that run now."""
    from tqdm import tqdm

    names, shown = [job["id"] for job in jobs], None
    with tqdm(total=len(names), bar_format="{n_fmt}/{total_fmt} stages, {elapsed} {desc}") as bar:
        while True:
            ended = process.poll() is not None
            over = [n for n in names if (folder / f"{n}.done").exists() or (folder / f"{n}.failed").exists()]
            running = [n for n in names if (folder / f"{n}.started").exists() and n not in over]
            if (over, running) != shown:
                shown, bar.n = (over, running), len(over)
                bar.set_description_str(", ".join(running)[:100])
            if ended:
                return
            time.sleep(0.5)
