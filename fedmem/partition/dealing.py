"""Rows to clients: who holds which text, and which texts nobody trains on.

First every row gets its client (`assign`), then each client's rows are split into train, test and held-out (`split`);
between the two, duplicates can be dropped. No row is given twice, and rows that belong together (a unit) never straddle
two splits or two clients. This module knows rows, groups and clients; it does not know where the corpus came from, what
training is, nor tokens. Source of the set-up: Udsa et al. 2026, section 3 (three clients, non-IID, equal sizes); the
held-out rows are our control.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from fedmem.config.vocabulary import SPLITS
from fedmem.partition import partitioners
from fedmem.partition.partitioners import NOBODY, PartitionError

DEALT = ("heldout", "test", "train")  # so that these rows stay what they are when train_rows grows

COLUMNS = ["row_id", "client", "split", "group", "instruction", "input", "output"]

PARTITIONERS = ("iid", "natural", "dirichlet", "topic", "quantity")


def quotas(split_rows: Mapping[str, float], n_clients: int, skew: float = 0.0) -> pd.DataFrame:
    """Return what each client shall have: a line a client, with train, test, heldout and `weight`.

    split_rows: rows of a client by split, all counts (int) or all shares of its rows (float, 0 to 1). `weight` is the
    client's part of all rows, 1 ∕ (j + 1)^skew over their sum. Counts of training rows follow the weights, `train`
    being their mean; test and held-out rows are the same for all. Raises PartitionError when a client would train on
    nothing.
    """
    weight = (1 + np.arange(n_clients)) ** -float(skew)
    weight /= weight.sum()
    table = pd.DataFrame({name: [split_rows[name]] * n_clients for name in SPLITS}).assign(weight=weight)
    if _counted(table):
        total = split_rows["train"] * n_clients
        table["train"] = np.diff(np.round(np.concatenate([[0], weight.cumsum()]) * total)).astype(int)
    if n_clients < 1 or not (table["train"] > 0).all() or (table[list(SPLITS)] < 0).any(axis=None):
        poorest = table["train"].min() if n_clients > 0 else 0
        raise PartitionError(
            f"{n_clients} clients, rows {dict(split_rows)}, skew {skew:g}: a client needs at least one training row "
            "and no number may be negative; "
            f"the poorest has {poorest}: raise train_rows or lower n_clients, quantity_skew"
        )
    return table


def assign(
    corpus: pd.DataFrame,
    partitioner: str,
    quotas: pd.DataFrame,
    seed: int,
    *,
    unit: str | None = None,
    client_groups: Sequence | None = None,
    dirichlet_alpha: float = 0.3,
) -> pd.DataFrame:
    """Return the rows that clients may draw from: the corpus's columns, `unit` and `client`, in the order of the deal.

    `corpus` has the columns of `fedmem.corpus.columns.SCHEMA`, `quotas` a line a client. `partitioner`:
    - iid: units at random, in equal numbers;
    - natural: client j holds `client_groups[j]` (a group or a list of groups) alone, or the j-th largest group;
    - dirichlet: each group is divided among the clients by Dir(dirichlet_alpha), until each has what its quotas ask;
    - topic: clusters of like texts, one a client, of equal numbers of rows;
    - quantity: at random, in the sizes that the quotas ask for.
    `unit`: regular expression; rows whose ids it matches alike (its first group, if it has one) stay together. The
    result depends on the seed and on which rows there are, not on their order. Raises PartitionError.
    """
    n_clients = len(quotas)
    pack = corpus.sort_values("id", kind="stable", ignore_index=True)
    pack["unit"] = _unit_names(pack["id"], unit)
    units = pack.groupby("unit", sort=True).agg(rows=("id", "size"), group=("group", "first")).reset_index()
    if len(units) < n_clients:
        what = "rows" if unit is None else f"units of {len(pack)} rows"
        raise PartitionError(f"{n_clients} clients, but the corpus has only {len(units)} {what}: lower n_clients")
    needs = _needs(quotas, units["rows"].max())
    if partitioner == "iid":
        clients = partitioners.iid(units, n_clients, seed)
    elif partitioner == "natural":
        clients = partitioners.natural(units, n_clients, client_groups)
    elif partitioner == "dirichlet":
        clients = partitioners.dirichlet(units, n_clients, dirichlet_alpha, needs, seed)
    elif partitioner == "topic":
        texts = pack.groupby("unit", sort=True)["input"].agg(" ".join)
        clients = partitioners.topic(units.assign(text=texts.to_numpy()), n_clients, seed)
    elif partitioner == "quantity":
        targets = needs if _counted(quotas) else quotas["weight"] * len(pack)
        clients = partitioners.quantity(units, targets, seed)
    else:
        raise PartitionError(f"partitioner {partitioner!r}: allowed are {', '.join(PARTITIONERS)}")
    return _ordered(pack, units["unit"].to_numpy(), clients, n_clients, seed)


def add_heldout(
    dealt_rows: pd.DataFrame, texts: pd.DataFrame, n_clients: int, seed: int, one_each: bool = False
) -> pd.DataFrame:
    """Return `dealt_rows` and, below, `texts` that were never trained on, with the column `heldout`: which are which.

    dealt_rows: the table of `assign`; texts: a corpus of its own, whose ids get "heldout/" before them. `one_each`:
    client j
    gets the texts of the j-th group as they come (a file a client); otherwise all are dealt at random in equal numbers.
    Raises PartitionError when a client gets none.
    """
    pack = texts.assign(id="heldout/" + texts["id"], heldout=True)
    pack["unit"] = pack["id"]
    places = pd.factorize(pack["group"])[0] if one_each else np.arange(len(pack)) % n_clients
    pack["client"] = places if one_each else np.random.default_rng(seed).permutation(places)
    lacking = sorted(set(range(n_clients)) - set(pack["client"]))
    if lacking:
        raise PartitionError(
            f"client {lacking[0]} gets none of the {len(pack)} held-out rows of heldout_path: give every client one"
        )
    return pd.concat([dealt_rows.assign(heldout=False), pack[pack["client"] < n_clients]], ignore_index=True)


def split(dealt_rows: pd.DataFrame, quotas: pd.DataFrame) -> pd.DataFrame:
    """Return the table `rows`: every client's first rows are held out, the next are for testing, the next for training.

    `dealt_rows`: the table of `assign`, or what is left of it; rows that `add_heldout` marks are held out, whatever the
    quotas say, which divide the others. With counts each client gets exactly those rows, and others
    are left over: where a split ends inside a unit, the unit's further rows are. With shares a split ends with its
    unit, and no row is left over if the shares' sum is 1.

    Columns: row_id, client (0 … n_clients − 1), split (train, test, heldout), group, instruction, input, output; sorted
    by client, then split. Raises PartitionError when a client has too few rows.
    """
    parts = []
    given = dealt_rows["heldout"].to_numpy(bool) if "heldout" in dealt_rows else np.zeros(len(dealt_rows), bool)
    apart, dealt_rows = dealt_rows[given], dealt_rows[~given]
    for client, quota in enumerate(quotas.to_dict("records")):
        hand = dealt_rows[dealt_rows["client"] == client]
        wanted = {name: quota[name] for name in SPLITS}
        places = _counts(hand, wanted) if _counted(quotas) else _shares(hand, wanted)
        if places is None:
            raise PartitionError(_too_few(dealt_rows, quotas, client, wanted))
        parts += [hand.iloc[slice(*places[name])].assign(split=name) for name in SPLITS]
        parts.append(apart[apart["client"] == client].assign(split="heldout"))
    return pd.concat(parts).rename(columns={"id": "row_id"})[COLUMNS].reset_index(drop=True)


def check(rows: pd.DataFrame, unit: str | None = None) -> None:
    """Raise PartitionError unless rows are a partition.

    That is: the columns are there, no row_id stands twice, splits are known ones, clients are numbered from 0 without a
    gap, each has training rows, no input is empty, and no unit (see `assign`) is in two splits or with two clients.
    """
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise PartitionError(f"rows lack the column {missing[0]!r}; expected {', '.join(COLUMNS)}")
    _once(rows, rows["row_id"], "row", every=True)
    unknown = sorted(set(rows["split"]) - set(SPLITS))
    if unknown:
        raise PartitionError(f"split {unknown[0]!r}: allowed are {', '.join(SPLITS)}")
    trained = set(rows.loc[rows["split"] == "train", "client"])
    without = sorted(set(range(int(rows["client"].max()) + 1 if len(rows) else 1)) - trained)
    if without:
        raise PartitionError(f"client {without[0]} has no training rows; every client needs at least one")
    if not rows["input"].str.strip().astype(bool).all():
        raise PartitionError("a row's input is empty: there would be nothing to measure")
    _once(rows, pd.Series(_unit_names(rows["row_id"], unit), rows.index), "unit", every=False)


def _once(rows: pd.DataFrame, names: pd.Series, what: str, every: bool) -> None:
    """Each name stands once (`every`), or at least in one split of one client alone."""
    places = rows.assign(name=names)[["name", "client", "split"]]
    places = places if every else places.drop_duplicates()
    twice = places[places["name"].duplicated(keep=False)].sort_values("name", kind="stable")
    if len(twice):
        where = [f"client {client}, {name}" for client, name in zip(twice["client"], twice["split"], strict=True)]
        raise PartitionError(f"{what} {twice['name'].iloc[0]!r} is given more than once: {where[0]}; {where[1]}")


def _unit_names(ids: pd.Series, unit: str | None) -> np.ndarray:
    if unit is None:
        return ids.to_numpy()
    found = [re.search(unit, name) for name in ids]
    if None in found:
        raise PartitionError(f"unit {unit!r} does not match the id {ids.iloc[found.index(None)]!r}; it must match all")
    return np.array([match.group(1 if match.re.groups else 0) for match in found], dtype=object)


def _counted(quotas: pd.DataFrame) -> bool:
    """Whether quotas are counts; otherwise they are shares."""
    return quotas["train"].dtype.kind == "i"


def _needs(quotas: pd.DataFrame, largest_unit: int = 1) -> list[int]:
    """The least rows of each client: all that are counted, or one in each split that shall not be empty.

    The first two splits may end inside a unit, whose further rows nobody gets then.
    """
    parts = quotas[list(SPLITS)]
    least = parts.sum(axis=1) + 2 * (largest_unit - 1) if _counted(quotas) else (parts > 0).sum(axis=1)
    return least.astype(int).tolist()


def _ordered(pack: pd.DataFrame, names: np.ndarray, clients: np.ndarray, n_clients: int, seed: int) -> pd.DataFrame:
    """The rows of each client, its units shuffled by a seed of its own, its rows within a unit by id."""
    rank = np.full(len(names), -1)
    for client in range(n_clients):
        own = np.flatnonzero(clients == client)
        rank[own[np.random.default_rng([seed, client]).permutation(len(own))]] = np.arange(len(own))
    of_row = pd.Index(names).get_indexer(pack["unit"])
    dealt_rows = pack.assign(client=clients[of_row], rank=rank[of_row])
    dealt_rows = dealt_rows[dealt_rows["client"] != NOBODY].sort_values(["client", "rank"], kind="stable")
    return dealt_rows.drop(columns="rank").reset_index(drop=True)


def _begins(hand: pd.DataFrame) -> np.ndarray:
    """Places where a unit begins, and the end."""
    names = hand["unit"].to_numpy()
    return np.append(np.flatnonzero(np.append(True, names[1:] != names[:-1])) if len(names) else [], len(names)).astype(
        int
    )


def _counts(hand: pd.DataFrame, wanted: Mapping[str, int]) -> dict[str, tuple[int, int]] | None:
    """Where each split begins and stops when it has exactly its count; None if the hand is too small."""
    begins, places, start = _begins(hand), {}, 0
    for name in DEALT:
        stop = start + wanted[name]
        if stop > len(hand):
            return None
        places[name] = (start, stop)
        start = int(begins[np.searchsorted(begins, stop)])
    return places


def _shares(hand: pd.DataFrame, wanted: Mapping[str, float]) -> dict[str, tuple[int, int]] | None:
    """Where each split begins and stops when it has its share, up to the end of a unit; None if one would be empty."""
    begins, places, unit = _begins(hand), {}, 0
    left = [name for name in DEALT if wanted[name] > 0]
    whole = abs(sum(wanted.values()) - 1) < 1e-9
    for name in DEALT:
        start = unit
        if name in left:
            left.remove(name)
            least = len(hand) if whole and not left else begins[start] + wanted[name] * len(hand)
            # at least one unit here, and one in each split that is still to come
            unit = min(max(int(np.searchsorted(begins, least - 1e-6)), start + 1), len(begins) - 1 - len(left))
            if unit <= start:
                return None
        places[name] = (int(begins[start]), int(begins[unit]))
    return places


def _too_few(dealt_rows: pd.DataFrame, quotas: pd.DataFrame, client: int, wanted: Mapping[str, float]) -> str:
    hand = dealt_rows[dealt_rows["client"] == client]
    own = sorted(hand["group"].unique())
    whose = f"client {client} (group {own[0]!r})" if len(own) == 1 and own[0] else f"client {client}"
    parts = " + ".join(f"{name} {count:g}" for name, count in wanted.items())
    if not _counted(quotas):
        return (
            f"{whose} has {len(hand)} rows, too few for shares of {parts} with at least one row (and unit) in each: "
            "lower n_clients, or raise the shares"
        )
    needed = sum(wanted.values())
    able = int((dealt_rows.groupby("client").size() >= needed).sum())
    return (
        f"{whose} has {len(hand)} rows and needs {needed} ({parts}); {able} of {len(quotas)} clients have that many: "
        "lower train_rows, test_rows or heldout_rows, lower n_clients"
        + (", or take partitioner 'iid'" if len(dealt_rows) >= _needs(quotas)[client] * len(quotas) else "")
    )
