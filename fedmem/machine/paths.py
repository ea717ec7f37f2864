"""Where things lie and what identifies their bytes: package, results, the hub's cache, SHA-256 of files and values."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent


def results_root() -> Path:
    """The results folder: $FEDMEM_RESULTS, else `results` of the checkout that holds the notebooks, else of the cwd."""
    if os.environ.get("FEDMEM_RESULTS"):
        return Path(os.environ["FEDMEM_RESULTS"]).expanduser().resolve()
    checkout = PACKAGE.parent
    return (checkout if (checkout / "notebooks").is_dir() else Path.cwd()) / "results"


def file_digest(path: Path | list[Path]) -> str:
    """SHA-256 of a file's bytes; of a folder or a list: of its files' names and digests, a folder's sorted by name.

    Caches and dotfiles of a folder are left out.
    """
    if isinstance(path, list):
        return digest_of([[one.name, file_digest(one)] for one in path])
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        return digest_of({str(p.relative_to(path)): file_digest(p) for p in files})
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 of a value as JSON, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def hub_home() -> Path:
    """Where the hub's libraries keep what they load."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()
