"""What of the hub is on this machine already, and whether the hub answers.

Planning asks this, so nothing is downloaded and neither torch nor `datasets` is imported.
"""

import os
import socket
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from fedmem.model_config import read_config

__all__ = ["has_data_set", "has_model", "home", "silent"]

WAIT_SECONDS = 2  # for the hub to answer


def has_model(hub_id: str) -> bool:
    """Whether the configuration of a model, and so most likely the model, lies in the local cache."""
    return read_config(hub_id) is not None


def home() -> Path:
    """Where the hub's libraries keep what they load."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()


def has_data_set(hub_id: str) -> bool:
    """Whether files of a data set lie in the local cache, as downloaded or as prepared by `datasets`."""
    files = Path(os.environ.get("HF_HUB_CACHE", home() / "hub")) / f"datasets--{hub_id.replace('/', '--')}"
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", home() / "datasets")) / hub_id.replace("/", "___")
    return files.is_dir() or prepared.is_dir()


@cache
def silent() -> str:
    """Why the hub cannot be asked; empty when it answers, or may, through a proxy. Asked once, within WAIT_SECONDS."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    if getproxies().keys() & {"https", "all"}:
        return ""
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    answered = threading.Event()

    def knock() -> None:
        try:
            socket.create_connection((address.hostname, address.port or 443), timeout=WAIT_SECONDS).close()
        except OSError:
            return
        answered.set()

    thread = threading.Thread(target=knock, daemon=True)  # a silent name server has no timeout of its own
    thread.start()
    thread.join(WAIT_SECONDS)
    return "" if answered.is_set() else f"{address.hostname} cannot be reached from here"
