"""Files of this machine: where package, results and the hub's cache lie, SHA-256 of files and values, locks."""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

PACKAGE = Path(__file__).resolve().parent.parent


def data_file(name: str) -> Path:
    """Return the path of a data file of the package.

    name: its place below fedmem/data, as a literal: the digest of a stage's code finds the files that it reads so.
    """
    return PACKAGE / "data" / name


def results_root() -> Path:
    """Return the results folder: $FEDMEM_RESULTS, else `results` in the checkout with notebooks, else in the cwd."""
    if os.environ.get("FEDMEM_RESULTS"):
        return Path(os.environ["FEDMEM_RESULTS"]).expanduser().resolve()
    checkout = PACKAGE.parent
    return (checkout if (checkout / "notebooks").is_dir() else Path.cwd()) / "results"


def file_digest(path: Path | list[Path]) -> str:
    """Return the SHA-256 of a file's bytes; for a folder or a list, of its files' names and digests.

    Files of a folder are sorted by name; its dotfiles are left out.
    """
    if isinstance(path, list):
        # names only: the same files elsewhere give the same digest; the order of a list matters (one file per client)
        return digest_of([[one.name, file_digest(one)] for one in path])
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        return digest_of({str(p.relative_to(path)): file_digest(p) for p in files})
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty when the file is missing, cannot be read, or holds anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def hub_home() -> Path:
    """Return the cache folder of the hub's libraries."""
    # repeats the rules of the hub's libraries, which planning does not import
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()


def take_lock(file: IO, wait: bool = False, shared: bool = False) -> bool:
    """Take the lock of a file, until it is closed. Returns False when another process holds it.

    The system releases a lock when its last process ends, so that none is ever left behind.
    file: an open file. wait: True waits for the lock instead. shared: True takes a lock that others may share.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
