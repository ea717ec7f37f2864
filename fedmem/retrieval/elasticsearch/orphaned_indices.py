"""The marks that fedmem's indices carry on an Elasticsearch server, and what becomes of those that a killed run left.

An index has a name that nothing else has, a tag in its mapping (which run, process and host made it, and when), and an
alias that all of them share: by it they are listed, by an exact name, where a pattern could meet somebody else's. They
go one by one, by exact name and only with the tag. No request here or elsewhere names a wildcard or everything.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from fedmem.machine.processes import process_is_alive
from fedmem.retrieval.elasticsearch.server import Server, Vanished

ALIAS = "fedmem-indices"
NAME = re.compile(r"fedmem-[a-z0-9][a-z0-9-]*")


def tag(run: str) -> dict[str, Any]:
    """The `_meta` of an index's mapping: made now, by this process, for `run`."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"fedmem": {"run": run, "host": socket.gethostname(), "pid": os.getpid(), "created": created}}


def tag_of(server: Server, name: str) -> dict[str, Any] | None:
    """run, host, pid and created of the index of exactly this name; None where fedmem did not make it.

    Raises Vanished where there is no such index.
    """
    call = server.client.indices.get_mapping
    found = server.request(f"reading the tag of {name}", call, index=name, expand_wildcards="none")
    return found.get(name, {}).get("mappings", {}).get("_meta", {}).get("fedmem")


def delete(server: Server, name: str) -> None:
    """Deletes the index of exactly this name; callers have made sure whose it is. One that is gone is no error."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name that fedmem gives: not deleted")
    with suppress(Vanished):
        call = server.client.indices.delete
        server.request(f"deleting {name}", call, server.patience.less(), index=name, expand_wildcards="none")


def leftovers(server: Server) -> list[dict[str, Any]]:
    """fedmem's indices on the server, oldest first: name, run, host, pid, created, in_use (None: another host's)."""
    try:
        names = sorted(server.request("listing", server.client.indices.get_alias, name=ALIAS))
    except Vanished:  # no index has the alias
        return []
    found = []
    for name in filter(NAME.fullmatch, names):
        with suppress(Vanished):  # its run has ended meanwhile
            if (known := tag_of(server, name)) is not None:
                found.append({"name": name} | known | {"in_use": _in_use(known)})
    return sorted(found, key=lambda one: (one["created"], one["name"]))


def remove(server: Server, name: str) -> None:
    """Deletes one leftover by its exact name; ElasticError when it is not there, not fedmem's, or in use."""
    doing, listing = f"removing {name!r}", "`fedmem elasticsearch leftovers` lists the names"
    if not NAME.fullmatch(name):
        raise server.error(doing, "not sent, this is no name that fedmem gives", listing)
    known = tag_of(server, name)
    if known is None:
        raise server.error(doing, "fedmem did not make this index, so it stays", listing)
    if _in_use(known):
        raise server.error(doing, f"process {known['pid']} is using it", "end that run first")
    delete(server, name)


def _in_use(known: Mapping[str, Any]) -> bool | None:
    """Whether the process that made an index lives; None on another host, where that is not to be seen."""
    if known["host"] != socket.gethostname():
        return None
    return process_is_alive(known["pid"])
