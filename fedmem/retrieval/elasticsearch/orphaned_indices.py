"""How fedmem marks its indices on an Elasticsearch server, and how the indices of a killed run are listed and removed.

Every index has a unique name, a tag in its mapping (the run, process and host that created it, and when), and an alias
that all of fedmem's indices share. The alias lists them by an exact name; a pattern could match indices of others.
Indices are deleted one by one, by exact name, and only with the tag. No request uses a wildcard or `_all`.
"""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psutil

from fedmem.retrieval.elasticsearch.server import Server, Vanished

ALIAS = "fedmem-indices"
NAME = re.compile(r"fedmem-[a-z0-9][a-z0-9-]*")  # no comma and no wildcard: the server would read several names


def tag(run: str) -> dict[str, Any]:
    """Return the `_meta` of an index's mapping: created now, by this process, for `run`."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"fedmem": {"run": run, "host": socket.gethostname(), "pid": os.getpid(), "created": created}}


def tag_of(server: Server, name: str) -> dict[str, Any] | None:
    """Return run, host, pid and created of the index with exactly this name; None when fedmem did not create it.

    Raises Vanished when there is no such index.
    """
    call = server.client.indices.get_mapping
    found = server.request(f"reading the tag of {name}", call, index=name, expand_wildcards="none")
    return found.get(name, {}).get("mappings", {}).get("_meta", {}).get("fedmem")


def delete(server: Server, name: str) -> None:
    """Delete the index with exactly this name; the caller has checked that it is fedmem's. A missing index is no error.

    Raises ValueError when the name does not have the form of fedmem's names, and ElasticError when the server refuses.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name that fedmem gives: not deleted")
    with suppress(Vanished):
        # the shorter patience: an index that stays is listed by `leftovers` and can be removed later
        call = server.client.indices.delete
        server.request(f"deleting {name}", call, server.patience.less(), index=name, expand_wildcards="none")


def leftovers(server: Server) -> list[dict[str, Any]]:
    """List fedmem's indices, oldest first: name, run, host, pid, created, in_use (None: created on another host)."""
    try:
        names = sorted(server.request("listing", server.client.indices.get_alias, name=ALIAS))
    except Vanished:  # no index has the alias
        return []
    found = []
    for name in filter(NAME.fullmatch, names):
        with suppress(Vanished):  # its run deleted it after the listing
            if (known := tag_of(server, name)) is not None:
                found.append({"name": name} | known | {"in_use": _in_use(known)})
    return sorted(found, key=lambda one: (one["created"], one["name"]))


def remove(server: Server, name: str) -> None:
    """Delete one leftover by its exact name; raises ElasticError when it is missing, not fedmem's, or in use."""
    doing, listing = f"removing {name!r}", "`fedmem elasticsearch leftovers` lists the names"
    if not NAME.fullmatch(name):
        raise server.error(doing, "not sent, this is not a name that fedmem gives", listing)
    known = tag_of(server, name)
    if known is None:
        raise server.error(doing, "fedmem did not create this index, so it is not deleted", listing)
    if _in_use(known):
        raise server.error(doing, f"process {known['pid']} is using it", "end that run first")
    delete(server, name)


def _in_use(known: Mapping[str, Any]) -> bool | None:
    """Whether the process that created an index is running; None for another host, where it cannot be checked."""
    return psutil.pid_exists(known["pid"]) if known["host"] == socket.gethostname() else None
