"""GPUs as the runner deals them: which there are, found without torch, and one job at a time on each.

A job of the runner holds a lock on its GPU as long as it lives. Locks are files in the temporary folder, so that runs
on two results folders of one user keep apart as well; a lock goes with its process.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, where NVIDIA's driver runs


def visible() -> list[str]:
    """Names of the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES writes them; none: an empty list.

    CUDA_VISIBLE_DEVICES where it is set, else what nvidia-smi or the driver's own folder lists, asked once a process.
    """
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in named.split(",")]
        stop = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
        return names[:stop]  # CUDA, too, stops at the first name that is none
    return [str(number) for number in range(_count())]


@cache
def _count() -> int:
    if shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
            return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0


@contextlib.contextmanager
def hold(names: list[str]) -> Iterator[str]:
    """Waits until one of these GPUs is free and yields its name; it is this process's until the block is left."""
    while True:
        for name in names:
            with _lock_file(name).open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield name
                return
        time.sleep(0.5)


def _lock_file(name: str) -> Path:
    plain = "".join(c if c.isalnum() or c == "-" else "_" for c in name)
    return Path(tempfile.gettempdir()) / f"fedmem-{os.getuid()}-gpu-{plain}.lock"
