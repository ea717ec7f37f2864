"""Unfinished stages: their hidden folders, which process may resume one, and the progress that is kept in it.

A hidden folder `.<stage folder>.<host>-<process id>` beside the stages belongs to one process of one machine. On that
machine, the process id and its start time show whether the process still runs. Several machines may share the folder
(as on a cluster): each process then touches a heartbeat file every half minute. A process of another machine counts as
dead when its heartbeat is ten minutes old by the file system's clock; if its work can be resumed, it also counts as
dead when the heartbeat does not change while this process watches it for two minutes.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from fedmem.machine.paths import read_object

KEPT = ".progress"  # the heartbeat and the progress; never published with the stage

BEAT_SECONDS, DEAD_SECONDS = 30, 600

WATCHED_BEATS = 4  # a shared file system may show a new heartbeat a minute late


class Progress:
    """The progress of an unfinished stage: a JSON value and arrays, kept in its hidden folder, never published.

    value: what was kept last, by this process or an interrupted one; {} if nothing was. seconds: the run time up to
    then, over all processes that worked on the stage.
    """

    def __init__(self, folder: Path, made: Mapping[str, str]):
        self.folder, self.made = folder / KEPT, dict(made)
        record = _record(folder)
        fits = record.get("made") == self.made  # progress of another identity or of other code is ignored
        self.value: dict[str, Any] = record["value"] if fits else {}
        self.seconds: float = record["seconds"] if fits else 0.0
        self._arrays: str | None = record["arrays"] if fits else None
        self._clock = time.perf_counter() - self.seconds

    def keep(self, value: Mapping[str, Any], arrays: Mapping | None = None) -> None:
        """Replace what is kept, atomically. value: a mapping of JSON types. arrays: numpy arrays by name, or None."""
        name = None
        if arrays:
            from safetensors.numpy import save_file  # imported here because most stages keep no arrays

            # a new name each time: the record on disk must refer to its own arrays until it is replaced
            name = f"arrays-{time.time_ns()}.safetensors"
            save_file(dict(arrays), self.folder / name)
        seconds = time.perf_counter() - self._clock
        record = {"made": self.made, "value": dict(value), "arrays": name, "seconds": seconds}
        text, partial = json.dumps(record, allow_nan=False), self.folder / "record.json.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.folder / "record.json")
        self.value, self.seconds, self._arrays = json.loads(text)["value"], seconds, name
        for old in self.folder.glob("arrays-*"):
            if old.name != name:
                old.unlink()

    def forget(self) -> None:
        """Remove what is kept: the next process starts from scratch."""
        (self.folder / "record.json").unlink(missing_ok=True)
        self.value, self._arrays = {}, None

    def arrays(self) -> dict:
        """The arrays that were kept last, by name; {} if there are none."""
        from safetensors.numpy import load_file

        return load_file(self.folder / self._arrays) if self._arrays else {}


def resume_or_create(target: Path, made: Mapping[str, str]) -> tuple[Path, Progress]:
    """The hidden folder in which this process builds a stage, and the stage's progress.

    target: the stage's folder. made: what the stage is built from (its identity, the code's digest).
    A folder that a dead process left is taken over with its contents if its `made` is the same; the most recent one is
    preferred. Other folders of dead processes are removed; those of running processes stay. When another machine left
    a folder less than ten minutes ago, this waits up to two minutes to see whether its process still works.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    own = target.parent / f".{target.name}.{_host()}-{os.getpid()}"
    leftovers = sorted(target.parent.glob(f".{target.name}.*"), key=_worked_on, reverse=True)
    dead = [folder for folder in leftovers if folder == own or not _alive(folder, target, made)]
    fitting = [folder for folder in dead if _fits(folder, made)]
    for folder in set(dead) - set(fitting):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in fitting:
        with contextlib.suppress(OSError):  # another process took it, or `own` exists already
            os.replace(folder, own)
    for folder in set(fitting) - {own}:
        shutil.rmtree(folder, ignore_errors=True)
    (own / KEPT).mkdir(parents=True, exist_ok=True)
    # the start time is stored because the operating system reuses process ids
    (own / KEPT / "alive").write_text(str(psutil.Process().create_time()))
    threading.Thread(target=_beat, args=(own / KEPT / "alive",), daemon=True).start()
    return own, Progress(own, made)


def _beat(sign: Path) -> None:
    """Touch the heartbeat file until it is gone; publishing the stage removes it."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(BEAT_SECONDS)
            os.utime(sign)


def _host() -> str:
    return re.sub(r"[^\w.]", "_", platform.node()) or "localhost"


def _alive(folder: Path, target: Path, made: Mapping[str, str]) -> bool:
    host, _, pid = folder.name.removeprefix(f".{target.name}.").rpartition("-")
    if host == _host() and pid.isdigit():
        return psutil.pid_exists(int(pid)) and _is_the_one(folder, int(pid))
    if not host:
        return False  # a former version of the stage that was set aside while publishing
    # a new file gets the file system's time; the clocks of two machines may differ
    with tempfile.NamedTemporaryFile(dir=folder.parent, prefix=".now-") as now:
        if os.fstat(now.fileno()).st_mtime - _worked_on(folder) >= DEAD_SECONDS:
            return False
    return not _fits(folder, made) or _gives_signs(folder, host)


def _is_the_one(folder: Path, pid: int) -> bool:
    """Whether the process with this id is the one that owns the folder. Ids are reused, above all after a restart."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        return abs(psutil.Process(pid).create_time() - float((folder / KEPT / "alive").read_text())) < 2
    return True  # unknown: better to leave a folder alone than to take it from a running process


def _gives_signs(folder: Path, host: str) -> bool:
    """Whether a folder's process touches its heartbeat while this process watches."""
    print(f"watching for two minutes whether {host} still builds this stage", file=sys.stderr)
    last, end = _worked_on(folder), time.monotonic() + WATCHED_BEATS * BEAT_SECONDS
    while time.monotonic() < end:
        time.sleep(BEAT_SECONDS / 10)
        if _worked_on(folder) != last:
            return True
    return False


def _fits(folder: Path, made: Mapping[str, str]) -> bool:
    return _record(folder).get("made") == dict(made)


def _worked_on(folder: Path) -> float:
    """The time of the last heartbeat, else of the folder itself, in seconds since the epoch."""
    for path in (folder / KEPT / "alive", folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _record(folder: Path) -> dict:
    record = read_object(folder / KEPT / "record.json")
    return record if {"made", "value", "arrays", "seconds"} <= record.keys() else {}
