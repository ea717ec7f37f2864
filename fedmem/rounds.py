"""Where a training's models lie: which folder of a train stage holds the model that continues a client's prefixes.

    checkpoints/round-0 … round-N              one model for all clients
    checkpoints/client-<j>/round-0 … round-N   algorithm "local": each client's own

It knows names of folders, and by which number the tables of a training mean all clients.
"""

from collections.abc import Iterable
from pathlib import Path

__all__ = ["POOLED", "by_model", "checkpoint_folder", "part_folder"]

POOLED = -1  # in the place of a client's id: all clients together


def part_folder(checkpoints: Path, algorithm: str, client: int) -> Path:
    """The folder of the rounds of the model that `client` (0 … L − 1, or POOLED) takes part in."""
    return Path(checkpoints) / f"client-{client}" if algorithm == "local" else Path(checkpoints)


def checkpoint_folder(checkpoints: Path, algorithm: str, server_round: int, client: int = POOLED) -> Path:
    """The folder of the model that client `client` has after a round; FileNotFoundError if it is not there."""
    folder = part_folder(checkpoints, algorithm, client) / f"round-{server_round}"
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.glob("round-*"))
        raise FileNotFoundError(f"there is no {folder}; there are: {', '.join(known) or 'none'}")
    return folder


def by_model(
    checkpoints: Path, algorithm: str, server_round: int, clients: Iterable[int]
) -> list[tuple[Path, list[int]]]:
    """The models of one round, each with the clients whose it is: one for all clients, or under "local" one each.

    clients: ids, in any order and any number of times each; they come in ascending order.
    """
    groups: dict[Path, list[int]] = {}
    for client in sorted({int(client) for client in clients}):
        groups.setdefault(checkpoint_folder(checkpoints, algorithm, server_round, client), []).append(client)
    return list(groups.items())
