"""The rows of each client in its own folder: all that a node of a real federation may read.

This module splits a finished partition into such folders, and reads one of them. It does not depend on Flower, on
models or on how clients are trained.
"""

import hashlib
from pathlib import Path

import pandas as pd

from fedmem.results.stage import Stage, StageError

ROWS = "rows.parquet"


def split_clients(partition: Stage, folder: str | Path) -> list[Path]:
    """Write the folders `client-0` … `client-<L − 1>`, each with the rows of one client; return their paths.

    partition: a finished partition stage. folder: where the folders are written.
    The rows keep the partition's columns and order. Held-out rows, which no client may train on, are left out.
    Raises StageError when `folder` already has a folder of a client.
    """
    rows, folder = partition.table("rows"), Path(folder)
    known = rows[rows["split"] != "heldout"]
    targets = {client: folder / f"client-{client}" for client in range(int(rows["client"].max()) + 1)}
    # not overwritten: folders of an older partition with more clients would stay among the new ones
    if there := sorted(folder.glob("client-*")):
        raise StageError(f"{there[0]} exists already: remove the old clients' folders, or name another folder")
    for client, target in targets.items():
        target.mkdir(parents=True)
        known[known["client"] == client].to_parquet(target / ROWS, index=False)
    return list(targets.values())


def read_client(folder: str | Path, client: int) -> pd.DataFrame:
    """Return the rows (row_id, client, split, …) in one client's folder.

    Raises StageError when the file is missing, holds rows of another client, or holds no training rows.
    """
    path = Path(folder).expanduser() / ROWS
    if not path.is_file():
        raise StageError(f"there is no {path}: `fedmem split PARTITION DIR` writes one folder for each client")
    rows = pd.read_parquet(path)
    if others := sorted(set(rows["client"]) - {client}):
        raise StageError(
            f"{path} holds rows of clients {others}; this node is client {client}, which may only read its own rows"
        )
    if not (rows["split"] == "train").any():
        raise StageError(f"{path} holds no training rows: a client without any has no weight in an average")
    return rows


def rows_digest(rows: pd.DataFrame) -> str:
    """Return the SHA-256 of the training rows, in their order: equal for a client's folder and its part of a partition.

    rows: at least the column split; rows of other splits do not count.
    """
    # JSON, not the Parquet bytes, which change with the version of the writer
    text = rows.loc[rows["split"] == "train", sorted(rows.columns)].to_json(orient="split", index=False)
    return hashlib.sha256(text.encode()).hexdigest()
