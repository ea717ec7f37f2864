"""GPUs for the runner: lists them without torch, and gives each to one job at a time.

A job of the runner locks its GPU until it ends. Locks are files in the temporary folder, so that they also separate
runs of one user on two results folders. The system releases a lock when its process ends.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fedmem.machine.paths import take_lock

DRIVER = Path("/proc/driver/nvidia/gpus")  # NVIDIA's driver keeps a folder for each GPU here


def visible() -> list[str]:
    """Return the names of the CUDA devices that this process may use, in the form of CUDA_VISIBLE_DEVICES.

    The source is CUDA_VISIBLE_DEVICES if set, else nvidia-smi or the driver's folder, read once per process.
    """
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in named.split(",")]
        stop = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
        return names[:stop]  # CUDA, too, ignores everything after the first invalid name
    return [str(number) for number in range(_count())]


@cache
def _count() -> int:
    if shutil.which("nvidia-smi"):
        # a hanging or broken driver must not stop a plan; the driver's folder is the fallback
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
            return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0


@contextlib.contextmanager
def hold(names: list[str]) -> Iterator[str]:
    """Wait until one of these GPUs is free, and yield its name; other callers cannot hold it until the block ends."""
    while True:
        for name in names:
            with _lock_file(name).open("a") as file:
                if take_lock(file):
                    yield name
                    return
        time.sleep(0.5)


def _lock_file(name: str) -> Path:
    # the user's id in the name: another user's file could not be opened for locking
    plain = "".join(c if c.isalnum() or c == "-" else "_" for c in name)
    return Path(tempfile.gettempdir()) / f"fedmem-{os.getuid()}-gpu-{plain}.lock"
