"""One client's rows in a folder of its own: all that a node of a real federation may read.

It deals a finished partition out to such folders and reads one of them. It knows nothing of Flower, of models or of
how clients are trained.
"""

import hashlib
from pathlib import Path

import pandas as pd

from fedmem.results.stage import Stage, StageError

ROWS = "rows.parquet"


def split_clients(partition: Stage, folder: str | Path) -> list[Path]:
    """Write `client-0` … `client-<L − 1>` into a folder, each with the rows of one client alone; return their paths.

    partition: a finished partition stage. The rows keep the partition's columns and order; held-out rows, which no
    client may train on, stay behind. StageError where one of these folders is there already.
    """
    rows, folder = partition.table("rows"), Path(folder)
    known = rows[rows["split"] != "heldout"]
    targets = {client: folder / f"client-{client}" for client in range(int(rows["client"].max()) + 1)}
    if there := sorted(folder.glob("client-*")):
        raise StageError(f"{there[0]} is there already: remove the old clients' folders, or name another folder")
    for client, target in targets.items():
        target.mkdir(parents=True)
        known[known["client"] == client].to_parquet(target / ROWS, index=False)
    return list(targets.values())


def read_client(folder: str | Path, client: int) -> pd.DataFrame:
    """The rows (row_id, client, split, …) in one client's folder; StageError where they are missing or another's."""
    path = Path(folder).expanduser() / ROWS
    if not path.is_file():
        raise StageError(f"there is no {path}: `fedmem split PARTITION DIR` writes one folder for each client")
    rows = pd.read_parquet(path)
    if others := sorted(set(rows["client"]) - {client}):
        raise StageError(f"{path} holds rows of clients {others}; this node is client {client}, which may read its own")
    if not (rows["split"] == "train").any():
        raise StageError(f"{path} holds no training rows: a client without any has no weight in an average")
    return rows


def rows_digest(rows: pd.DataFrame) -> str:
    """SHA-256 of the training rows, in their order: the same for a client's folder and for its part of a partition."""
    text = rows.loc[rows["split"] == "train", sorted(rows.columns)].to_json(orient="split", index=False)
    return hashlib.sha256(text.encode()).hexdigest()
