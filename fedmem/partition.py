"""Rows to clients: who holds which text, and which texts nobody trains on.

Every client gets exactly the rows that were asked for, split into train, test and held-out, and no row is given twice.
This module knows rows, groups and clients; it does not know where the corpus came from, what training is, nor tokens.
Source of the set-up: Udsa et al. 2026, section 3 (three clients, non-IID, equal sizes); held-out rows are our control.
"""

import numpy as np
import pandas as pd

__all__ = ["SPLITS", "PartitionError", "check", "deal", "groups", "sizes"]

SPLITS = ("train", "test", "heldout")
COLUMNS = ["row_id", "client", "split", "group", "instruction", "input", "output"]


class PartitionError(ValueError):
    """A deal that cannot be made, or rows that are none; the message says which client lacks what, and what to do."""


def deal(
    corpus: pd.DataFrame,
    partitioner: str,
    n_clients: int,
    train_rows: int,
    test_rows: int,
    heldout_rows: int,
    seed: int,
) -> pd.DataFrame:
    """Return the table `rows`: the corpus's rows that each of `n_clients` clients holds, and in which split.

    `corpus` has the columns of `fedmem.corpora.SCHEMA`. `partitioner` is iid (rows dealt like cards from one shuffled
    pack) or natural (client j holds rows of the j-th largest group alone; equal sizes are told apart by name). Each
    client gets exactly `train_rows` (≥ 1), `test_rows` and `heldout_rows` (≥ 0) rows; others are left over. The result
    depends on the seed and on which rows there are, not on their order; a client's held-out and test rows stay what
    they are when `train_rows` grows.

    Columns: row_id, client (0 … n_clients − 1), split (train, test, heldout), group, instruction, input, output; sorted
    by client, then split. Raises PartitionError when the corpus has too few groups, or a client too few rows.
    """
    counts = {"train": train_rows, "test": test_rows, "heldout": heldout_rows}
    if n_clients < 1 or train_rows < 1 or min(counts.values()) < 0:
        raise PartitionError(
            f"n_clients = {n_clients}, train_rows = {train_rows}, test_rows = {test_rows}, heldout_rows = "
            f"{heldout_rows}: a client needs at least one training row, and no number may be negative"
        )
    pack = corpus.sort_values("id", kind="stable", ignore_index=True)
    hands = _hands(pack, partitioner, n_clients, seed)
    _enough(hands, counts, pack, partitioner)
    return pd.concat([_split(hand, client, counts) for client, hand in enumerate(hands)], ignore_index=True)


def sizes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line per client and split: client, split, rows, median_chars (of the inputs, in characters)."""
    chars = rows.assign(chars=rows["input"].str.len(), split=pd.Categorical(rows["split"], SPLITS))
    table = chars.groupby(["client", "split"], observed=True)["chars"].agg(rows="size", median_chars="median")
    return table.reset_index().astype({"split": "str"})


def groups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how many of each client's rows are of which group: client, group, rows, share (of the client's rows)."""
    table = rows.groupby(["client", "group"]).size().rename("rows").reset_index()
    return table.assign(share=table["rows"] / table.groupby("client")["rows"].transform("sum"))


def check(rows: pd.DataFrame) -> None:
    """Raise PartitionError unless rows are a partition.

    That is: the columns are there, no row_id stands twice, splits are known ones, clients are numbered from 0 without a
    gap, each has training rows, and no input is empty.
    """
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise PartitionError(f"rows lack the column {missing[0]!r}; expected {', '.join(COLUMNS)}")
    twice = rows[rows["row_id"].duplicated(keep=False)].sort_values("row_id", kind="stable")
    if len(twice):
        where = [f"client {client}, {split}" for client, split in zip(twice["client"], twice["split"], strict=True)]
        raise PartitionError(f"row {twice['row_id'].iloc[0]!r} is given more than once: {where[0]}; {where[1]}")
    unknown = sorted(set(rows["split"]) - set(SPLITS))
    if unknown:
        raise PartitionError(f"split {unknown[0]!r}: allowed are {', '.join(SPLITS)}")
    trained = set(rows.loc[rows["split"] == "train", "client"])
    without = sorted(set(range(int(rows["client"].max()) + 1 if len(rows) else 1)) - trained)
    if without:
        raise PartitionError(f"client {without[0]} has no training rows; every client needs at least one")
    if not rows["input"].str.strip().astype(bool).all():
        raise PartitionError("a row's input is empty: there would be nothing to measure")


def _hands(pack: pd.DataFrame, partitioner: str, n_clients: int, seed: int) -> list[pd.DataFrame]:
    """All rows that each client may draw from, shuffled."""
    if partitioner == "iid":
        shuffled = np.random.default_rng(seed).permutation(len(pack))
        return [pack.iloc[shuffled[client::n_clients]] for client in range(n_clients)]
    if partitioner == "natural":
        members = [pack[pack["group"] == name] for name in _largest(pack["group"], n_clients)]
        return [
            rows.iloc[np.random.default_rng([seed, client]).permutation(len(rows))]
            for client, rows in enumerate(members)
        ]
    raise PartitionError(f"partitioner {partitioner!r}: allowed are 'iid' and 'natural'")


def _largest(group: pd.Series, n_clients: int) -> list[str]:
    if (group == "").any():
        raise PartitionError(
            f"partitioner 'natural' needs a group in every row, and {(group == '').sum()} of {len(group)} rows have "
            "none; fill in `group`, or take partitioner 'iid'"
        )
    counts = group.value_counts()
    ranked = sorted(counts.index, key=lambda name: (-counts[name], name))
    if len(ranked) < n_clients:
        raise PartitionError(
            f"partitioner 'natural' gives each client a group of its own, but the corpus has {len(ranked)} groups for "
            f"{n_clients} clients; lower n_clients to at most {len(ranked)}, or take partitioner 'iid'"
        )
    return ranked[:n_clients]


def _enough(hands: list[pd.DataFrame], counts: dict[str, int], pack: pd.DataFrame, partitioner: str) -> None:
    needed = sum(counts.values())
    for client, hand in enumerate(hands):
        if len(hand) < needed:
            natural = partitioner == "natural"
            whose = f"client {client} (group {hand['group'].iloc[0]!r})" if natural else f"client {client}"
            wide = int((pack["group"].value_counts() >= needed).sum()) if natural else len(pack) // needed
            parts = " + ".join(f"{split} {count}" for split, count in counts.items())
            raise PartitionError(
                f"{whose} has {len(hand)} rows and needs {needed} ({parts}); the corpus can serve {wide} clients of "
                f"that size: lower train_rows, test_rows or heldout_rows, lower n_clients"
                + (", or take partitioner 'iid'" if natural and len(pack) >= needed * len(hands) else "")
            )


def _split(hand: pd.DataFrame, client: int, counts: dict[str, int]) -> pd.DataFrame:
    """The first rows of a hand are held out, the next are for testing, the next for training."""
    ends = np.cumsum([counts["heldout"], counts["test"], counts["train"]])
    parts = {
        "train": hand.iloc[ends[1] : ends[2]],
        "test": hand.iloc[ends[0] : ends[1]],
        "heldout": hand.iloc[: ends[0]],
    }
    dealt = pd.concat([part.assign(client=client, split=split) for split, part in parts.items()])
    return dealt.rename(columns={"id": "row_id"})[COLUMNS].reset_index(drop=True)
