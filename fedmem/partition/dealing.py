"""The partition of a corpus: which client holds which row, and which rows are held out from training.

First, `assign` gives every row a client. Then `split` divides each client's rows into train, test and held-out rows.
Between the two, duplicates can be dropped. No row is given twice, and rows that belong together (a unit) never are in
two splits or with two clients. Source of the setup: Udsa et al. 2026, section 3 (three clients, non-IID, equal sizes);
the held-out rows are fedmem's own control. `deal` is the whole sequence; notebook 1 shows its steps one by one.
"""

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from fedmem.config.partition import PartitionConfig
from fedmem.config.vocabulary import SPLITS
from fedmem.partition import duplicates
from fedmem.partition.partitioners import NOBODY, PARTITIONERS, PartitionError

DEALT = ("heldout", "test", "train")  # training rows last: the others then stay the same when train_rows grows

COLUMNS = ["row_id", "client", "split", "group", "instruction", "input", "output"]


def quotas(split_rows: Mapping[str, float], n_clients: int, skew: float = 0.0) -> pd.DataFrame:
    """Return the wanted rows of each client: one line for each client, with train, test, heldout and `weight`.

    split_rows: rows of a client by split, all counts (int ≥ 0) or all shares of its rows (float, 0 to 1).
    n_clients: number of clients, ≥ 1.
    skew: exponent ≥ 0; client j's `weight`, its part of all rows, is 1 ∕ (j + 1)^skew over the sum of these terms.
    Counts of training rows follow the weights and have the mean `train`; test and held-out rows are equal for all
    clients. Raises PartitionError when a client would have no training row or a number is negative.
    """
    weight = (1 + np.arange(n_clients)) ** -float(skew)
    weight /= weight.sum()
    table = pd.DataFrame({name: [split_rows[name]] * n_clients for name in SPLITS}).assign(weight=weight)
    if _counted(table):
        total = split_rows["train"] * n_clients
        # differences of rounded cumulative sums: rounding each count alone would change the total
        table["train"] = np.diff(np.round(np.concatenate([[0], weight.cumsum()]) * total)).astype(int)
    if n_clients < 1 or not (table["train"] > 0).all() or (table[list(SPLITS)] < 0).any(axis=None):
        poorest = table["train"].min() if n_clients > 0 else 0
        raise PartitionError(
            f"{n_clients} clients, rows {dict(split_rows)}, skew {skew:g}: a client needs at least one training row "
            "and no number may be negative; "
            f"the poorest has {poorest}: raise train_rows or lower n_clients, quantity_skew"
        )
    return table


def deal(config: PartitionConfig, texts: pd.DataFrame, heldout_texts: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the table `rows` that notebook 1 publishes for this corpus, in one call.

    config: the stage's parameters. texts: the corpus. heldout_texts: the texts of `heldout_path`; None: there are none.
    Raises PartitionError as the steps do.
    """
    wanted = quotas(config.split_rows, config.n_clients, config.skew)
    dealt_rows = assign(texts, wanted, config)
    if heldout_texts is not None:
        dealt_rows = add_heldout(dealt_rows, heldout_texts, config)
    if config.duplicates == "drop":
        dealt_rows = duplicates.find(dealt_rows, config.near_duplicate).drop(dealt_rows)
    return split(dealt_rows, wanted)


def assign(corpus: pd.DataFrame, quotas: pd.DataFrame, config: PartitionConfig) -> pd.DataFrame:
    """Return the rows with the client of each: the corpus's columns, `unit` and `client`, in the order of assignment.

    corpus: a frame with the columns of `fedmem.config.vocabulary.SCHEMA`.
    quotas: the table of `quotas`, one line for each client.
    config: partitioner (a rule of PARTITIONERS) with its own parameters, partition_seed, and `unit`: a regular
        expression; rows whose ids give the same match (its first group, if it has one) stay together; None: each row
        alone.
    The result depends on the seed and on the set of rows, not on their order. Raises PartitionError when the
    partitioner is unknown or the corpus cannot be divided as asked.
    """
    if config.partitioner not in PARTITIONERS:
        raise PartitionError(f"partitioner: got {config.partitioner!r}; expected one of {', '.join(PARTITIONERS)}")
    n_clients = len(quotas)
    # sorted by id, so that the result does not depend on the order of the rows in the file
    pack = corpus.sort_values("id", kind="stable", ignore_index=True)
    pack["unit"] = _unit_names(pack["id"], config.unit)
    units = pack.groupby("unit", sort=True).agg(rows=("id", "size"), group=("group", "first")).reset_index()
    if len(units) < n_clients:
        what = "rows" if config.unit is None else f"units of {len(pack)} rows"
        raise PartitionError(f"{n_clients} clients, but the corpus has only {len(units)} {what}: lower n_clients")
    least = _needs(quotas, units["rows"].max())
    asked = quotas.assign(least=least, target=least if _counted(quotas) else quotas["weight"] * len(pack))
    clients = PARTITIONERS[config.partitioner](units, pack, asked, config)
    return _ordered(pack, units["unit"].to_numpy(), clients, n_clients, config.partition_seed)


def add_heldout(dealt_rows: pd.DataFrame, texts: pd.DataFrame, config: PartitionConfig) -> pd.DataFrame:
    """Return the assigned rows followed by held-out texts from another source; the column `heldout` marks the latter.

    dealt_rows: the table of `assign`.
    texts: a corpus in the same schema that was never trained on; its ids get the prefix "heldout/".
    config: n_clients, partition_seed, and heldout_path: a list of files gives client j the j-th group in order of
        appearance (one file for each client), one path deals all texts at random in equal numbers.
    Raises PartitionError when a client gets no text.
    """
    one_each, n_clients = isinstance(config.heldout_path, list), config.n_clients
    # the prefix keeps the ids distinct from the corpus's, which may number its rows in the same way
    pack = texts.assign(id="heldout/" + texts["id"], heldout=True)
    pack["unit"] = pack["id"]
    places = pd.factorize(pack["group"])[0] if one_each else np.arange(len(pack)) % n_clients
    pack["client"] = places if one_each else np.random.default_rng(config.partition_seed).permutation(places)
    lacking = sorted(set(range(n_clients)) - set(pack["client"]))
    if lacking:
        raise PartitionError(
            f"client {lacking[0]} gets none of the {len(pack)} held-out rows of heldout_path: give every client one"
        )
    return pd.concat([dealt_rows.assign(heldout=False), pack[pack["client"] < n_clients]], ignore_index=True)


def split(dealt_rows: pd.DataFrame, quotas: pd.DataFrame) -> pd.DataFrame:
    """Return the table `rows`: each client's first rows are held out, the next are test rows, the next training rows.

    dealt_rows: the table of `assign`, or a part of it. Rows that `add_heldout` marked are always held out; the quotas
    divide
        the others.
    quotas: the table of `quotas`. With counts, each client gets exactly these numbers of rows; when a split ends inside
        a unit, the unit's remaining rows are not used. With shares, a split ends at the end of a unit, and every row is
        used if the shares sum to 1.

    Columns: row_id, client (0 … n_clients − 1), split (train, test, heldout), group, instruction, input, output; sorted
    by client, then split. Raises PartitionError when a client has too few rows.
    """
    parts = []
    given = dealt_rows["heldout"].to_numpy(bool) if "heldout" in dealt_rows else np.zeros(len(dealt_rows), bool)
    apart, dealt_rows = dealt_rows[given], dealt_rows[~given]
    for client, quota in enumerate(quotas.to_dict("records")):
        held = dealt_rows[dealt_rows["client"] == client]
        wanted = {name: quota[name] for name in SPLITS}
        places = _counts(held, wanted) if _counted(quotas) else _shares(held, wanted)
        if places is None:
            raise PartitionError(_too_few(dealt_rows, quotas, client, wanted))
        parts += [held.iloc[slice(*places[name])].assign(split=name) for name in SPLITS]
        parts.append(apart[apart["client"] == client].assign(split="heldout"))
    return pd.concat(parts).rename(columns={"id": "row_id"})[COLUMNS].reset_index(drop=True)


def check(rows: pd.DataFrame, unit: str | None = None) -> None:
    """Raise PartitionError unless `rows` is a valid partition.

    In a valid partition, all columns exist, row_ids are unique, splits are known, clients are numbered from 0 without a
    gap, each client has training rows, no input is empty, and no unit (see `assign`) is in two splits or with two
    clients.
    """
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise PartitionError(f"rows lack the column {missing[0]!r}; expected {', '.join(COLUMNS)}")
    _once(rows, rows["row_id"], "row", every=True)
    unknown = sorted(set(rows["split"]) - set(SPLITS))
    if unknown:
        raise PartitionError(f"split: got {unknown[0]!r}; expected one of {', '.join(SPLITS)}")
    trained = set(rows.loc[rows["split"] == "train", "client"])
    # a gap in the numbering is a client without training rows, too
    without = sorted(set(range(int(rows["client"].max()) + 1 if len(rows) else 1)) - trained)
    if without:
        raise PartitionError(f"client {without[0]} has no training rows; every client needs at least one")
    if not rows["input"].str.strip().astype(bool).all():
        raise PartitionError("a row's input is empty: there would be nothing to measure")
    _once(rows, pd.Series(_unit_names(rows["row_id"], unit), rows.index), "unit", every=False)


def _once(rows: pd.DataFrame, names: pd.Series, what: str, every: bool) -> None:
    """Raise PartitionError unless each name occurs once (`every`), or in a single split of a single client."""
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
    """The minimum rows of each client: the sum of its counts, or one row for each split with a share above 0.

    With counts, each of the first two splits may end inside a unit and leave up to `largest_unit` − 1 rows unused.
    """
    parts = quotas[list(SPLITS)]
    least = parts.sum(axis=1) + 2 * (largest_unit - 1) if _counted(quotas) else (parts > 0).sum(axis=1)
    return least.astype(int).tolist()


def _ordered(pack: pd.DataFrame, names: np.ndarray, clients: np.ndarray, n_clients: int, seed: int) -> pd.DataFrame:
    """The rows of each client: units in random order, rows within a unit by id."""
    rank = np.full(len(names), -1)
    for client in range(n_clients):
        own = np.flatnonzero(clients == client)
        # one generator for each client, so that its order does not depend on the number of other clients
        rank[own[np.random.default_rng([seed, client]).permutation(len(own))]] = np.arange(len(own))
    of_row = pd.Index(names).get_indexer(pack["unit"])
    dealt_rows = pack.assign(client=clients[of_row], rank=rank[of_row])
    dealt_rows = dealt_rows[dealt_rows["client"] != NOBODY].sort_values(["client", "rank"], kind="stable")
    return dealt_rows.drop(columns="rank").reset_index(drop=True)


def _begins(held: pd.DataFrame) -> np.ndarray:
    """The positions where a unit begins, and the end."""
    names = held["unit"].to_numpy()
    return np.append(np.flatnonzero(np.append(True, names[1:] != names[:-1])) if len(names) else [], len(names)).astype(
        int
    )


def _counts(held: pd.DataFrame, wanted: Mapping[str, int]) -> dict[str, tuple[int, int]] | None:
    """The (start, stop) of each split with exactly its count; None if the client has too few rows."""
    begins, places, start = _begins(held), {}, 0
    for name in DEALT:
        stop = start + wanted[name]
        if stop > len(held):
            return None
        places[name] = (start, stop)
        start = int(begins[np.searchsorted(begins, stop)])  # the next split starts with a new unit
    return places


def _shares(held: pd.DataFrame, wanted: Mapping[str, float]) -> dict[str, tuple[int, int]] | None:
    """The (start, stop) of each split with its share, rounded up to whole units; None if one would be empty."""
    begins, places, unit = _begins(held), {}, 0
    left = [name for name in DEALT if wanted[name] > 0]
    # shares that sum to 1, up to rounding: the last split takes all remaining rows
    whole = abs(sum(wanted.values()) - 1) < 1e-9
    for name in DEALT:
        start = unit
        if name in left:
            left.remove(name)
            least = len(held) if whole and not left else begins[start] + wanted[name] * len(held)
            # at least one unit for this split, and one left for each of the following ones
            unit = min(max(int(np.searchsorted(begins, least - 1e-6)), start + 1), len(begins) - 1 - len(left))
            if unit <= start:
                return None
        places[name] = (int(begins[start]), int(begins[unit]))
    return places


def _too_few(dealt_rows: pd.DataFrame, quotas: pd.DataFrame, client: int, wanted: Mapping[str, float]) -> str:
    held = dealt_rows[dealt_rows["client"] == client]
    own = sorted(held["group"].unique())
    whose = f"client {client} (group {own[0]!r})" if len(own) == 1 and own[0] else f"client {client}"
    parts = " + ".join(f"{name} {count:g}" for name, count in wanted.items())
    if not _counted(quotas):
        return (
            f"{whose} has {len(held)} rows, too few for shares of {parts} with at least one row (and unit) in each: "
            "lower n_clients, or raise the shares"
        )
    needed = sum(wanted.values())
    able = int((dealt_rows.groupby("client").size() >= needed).sum())
    return (
        f"{whose} has {len(held)} rows and needs {needed} ({parts}); {able} of {len(quotas)} clients have that many: "
        "lower train_rows, test_rows or heldout_rows, lower n_clients"
        # advised only when the corpus as a whole has enough rows
        + (", or take partitioner 'iid'" if len(dealt_rows) >= _needs(quotas)[client] * len(quotas) else "")
    )
