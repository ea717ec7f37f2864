"""What a stage in the making leaves when its process dies, who may take it up, and how far it had come.

A hidden folder `.<stage folder>.<host>-<process id>` beside the stages belongs to one process of one machine. On that
machine the process id and the moment it began say whether it still lives. Several machines may share the folder (a
cluster's do): there, a process renews a sign of life every half minute, and is taken for dead when the sign is ten
minutes old by the file system's own clock, or, where its work could be gone on with, when it is not renewed before our
eyes. This module does not know what stages do.
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

from fedmem.machine.processes import process_is_alive

KEPT = ".progress"  # what is never published: the sign of life, and how far the stage has come

BEAT_SECONDS, DEAD_SECONDS = 30, 600

WATCHED_BEATS = 4  # a shared file system may show a new sign a minute late


class Progress:
    """How far the making of a stage has come: a JSON value and arrays, kept in its hidden folder, never published.

    value: what was kept last, by this process or an interrupted one; {} where there is none. seconds: how long the
    making had taken by then.
    """

    def __init__(self, folder: Path, made: Mapping[str, str]):
        self.folder, self.made = folder / KEPT, dict(made)
        record = _record(folder)
        fits = record.get("made") == self.made
        self.value: dict[str, Any] = record["value"] if fits else {}
        self.seconds: float = record["seconds"] if fits else 0.0
        self._arrays: str | None = record["arrays"] if fits else None
        self._clock = time.perf_counter() - self.seconds

    def keep(self, value: Mapping[str, Any], arrays: Mapping | None = None) -> None:
        """Replace what is kept, at once or not at all. value: JSON's own types; arrays: numpy arrays by name."""
        name = None
        if arrays:
            from safetensors.numpy import save_file  # most stages keep none

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
        """Remove what is kept: the next process begins anew."""
        (self.folder / "record.json").unlink(missing_ok=True)
        self.value, self._arrays = {}, None

    def arrays(self) -> dict:
        """The arrays that were kept last, by name."""
        from safetensors.numpy import load_file

        return load_file(self.folder / self._arrays) if self._arrays else {}


def resume_or_create(target: Path, made: Mapping[str, str]) -> tuple[Path, Progress]:
    """The hidden folder in which this process makes a stage, and how far the stage has come.

    target: the stage's folder. made: what the stage is made of (its identity, the code's digest). A folder that a dead
    process left is taken over with all it holds if it was made of the same, the one that was worked on last first;
    other dead ones are removed. Folders of living processes stay. Where another machine left one a moment ago, this
    waits two minutes to see whether it still works.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    own = target.parent / f".{target.name}.{_host()}-{os.getpid()}"
    leftovers = sorted(target.parent.glob(f".{target.name}.*"), key=_worked_on, reverse=True)
    dead = [folder for folder in leftovers if folder == own or not _alive(folder, target, made)]
    fitting = [folder for folder in dead if _fits(folder, made)]
    for folder in set(dead) - set(fitting):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in fitting:
        with contextlib.suppress(OSError):  # taken by another process, or the place is
            os.replace(folder, own)
    for folder in set(fitting) - {own}:
        shutil.rmtree(folder, ignore_errors=True)
    (own / KEPT).mkdir(parents=True, exist_ok=True)
    (own / KEPT / "alive").write_text(str(psutil.Process().create_time()))
    threading.Thread(target=_beat, args=(own / KEPT / "alive",), daemon=True).start()
    return own, Progress(own, made)


def _beat(sign: Path) -> None:
    """Renew the sign of life until it is gone, which it is once the stage is published."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(BEAT_SECONDS)
            os.utime(sign)


def _host() -> str:
    return re.sub(r"[^\w.]", "_", platform.node()) or "localhost"


def _alive(folder: Path, target: Path, made: Mapping[str, str]) -> bool:
    host, _, pid = folder.name.removeprefix(f".{target.name}.").rpartition("-")
    if host == _host() and pid.isdigit():
        return process_is_alive(int(pid)) and _is_the_one(folder, int(pid))
    if not host:
        return False  # what was set aside in the moment of publishing
    with tempfile.NamedTemporaryFile(dir=folder.parent, prefix=".now-") as now:
        if os.fstat(now.fileno()).st_mtime - _worked_on(folder) >= DEAD_SECONDS:
            return False
    return not _fits(folder, made) or _gives_signs(folder, host)


def _is_the_one(folder: Path, pid: int) -> bool:
    """Whether the process of this id is the one that left the folder: ids come again, after a restart above all."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        return abs(psutil.Process(pid).create_time() - float((folder / KEPT / "alive").read_text())) < 2
    return True  # it cannot be told


def _gives_signs(folder: Path, host: str) -> bool:
    """Whether a folder's process renews its sign of life while this one watches."""
    print(f"watches for two minutes whether {host} still makes this stage", file=sys.stderr)
    last, end = _worked_on(folder), time.monotonic() + WATCHED_BEATS * BEAT_SECONDS
    while time.monotonic() < end:
        time.sleep(BEAT_SECONDS / 10)
        if _worked_on(folder) != last:
            return True
    return False


def _fits(folder: Path, made: Mapping[str, str]) -> bool:
    return _record(folder).get("made") == dict(made)


def _worked_on(folder: Path) -> float:
    """When a folder's process last gave a sign of life."""
    for path in (folder / KEPT / "alive", folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _record(folder: Path) -> dict:
    try:
        record = json.loads((folder / KEPT / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and {"made", "value", "arrays", "seconds"} <= record.keys() else {}
