"""The rules that assign texts to clients, one function each.

The rules assign units: rows that belong together. Each rule returns the client of every unit, or NOBODY. It ends in
bounded time, and a request that cannot be met raises an error that says which part of it is too large. Where
flwr-datasets has a suitable partitioner, the rule uses it.

All rules have one signature, `rule(units, rows, quotas, config)`, and `@partitioner` enters them in PARTITIONERS under
their own names, which are the values of the parameter `partitioner`:
    units: DataFrame, one line for each unit, with rows (its size, in rows) and group.
    rows: the corpus, a line for each row, with `unit`; units are sorted by it.
    quotas: DataFrame, one line for each client, with least (rows that it needs) and target (rows that it should get).
    config: the PartitionConfig, for partition_seed and the rule's own parameters.
    Returned is an array with the client of each unit, 0 … len(quotas) − 1 or NOBODY.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd

from fedmem.config.parameter import closest
from fedmem.config.partition import PartitionConfig

Partitioner = Callable[[pd.DataFrame, pd.DataFrame, pd.DataFrame, PartitionConfig], np.ndarray]

PARTITIONERS: dict[str, Partitioner] = {}

NOBODY = -1  # the client of a unit that no client gets
ATTEMPTS = 30  # draws of a Dirichlet division before an error is raised
TOPIC_WORDS, TOPIC_DIMENSIONS, TOPIC_ROUNDS = 20_000, 64, 10


class PartitionError(ValueError):
    """An impossible or invalid partition; the message says which client lacks what, and what to do."""


def partitioner(rule: Partitioner) -> Partitioner:
    """Enter a rule in PARTITIONERS under its own name."""
    PARTITIONERS[rule.__name__] = rule
    return rule


@partitioner
def iid(units: pd.DataFrame, rows: pd.DataFrame, quotas: pd.DataFrame, config: PartitionConfig) -> np.ndarray:
    """Assign shuffled units in equal numbers.

    units, rows, quotas, config: the arguments of every rule, see the top of this module.
    """
    from flwr_datasets.partitioner import IidPartitioner

    # shuffled here, because flwr-datasets' IidPartitioner cuts its table into shards in the given order
    shuffled = np.random.default_rng(config.partition_seed).permutation(len(units))
    clients = np.empty(len(units), dtype=int)
    clients[shuffled] = _by_flower(IidPartitioner(len(quotas)), len(quotas), {"place": range(len(units))})
    return clients


@partitioner
def natural(units: pd.DataFrame, rows: pd.DataFrame, quotas: pd.DataFrame, config: PartitionConfig) -> np.ndarray:
    """Assign whole groups to clients: `client_groups[j]` to client j, or the j-th largest group, ties ordered by name.

    units, rows, quotas, config: the arguments of every rule, see the top of this module.
    Units of other groups get NOBODY. Raises PartitionError when a group is unknown, when there are too few groups, and
    when rows without a group make the largest groups ambiguous.
    """
    sizes = units.groupby("group")["rows"].sum()
    if config.client_groups is None:
        owners = {name: client for client, name in enumerate(_largest(sizes, len(quotas)))}
    else:
        sets = [client if isinstance(client, list | tuple) else [client] for client in config.client_groups]
        owners = {name: client for client, names in enumerate(sets) for name in names}
        for name in owners:
            if name not in sizes.index:
                raise PartitionError(
                    f"client_groups: no row is of group {name!r}{closest(name, sizes.index)} (groups: "
                    f"{', '.join(map(repr, sizes.sort_values(ascending=False).index[:40]))})"
                )
    return units["group"].map(owners).fillna(NOBODY).to_numpy(int)


def _largest(rows: pd.Series, n_clients: int) -> list[str]:
    if "" in rows.index:
        raise PartitionError(
            f"partitioner 'natural' needs a group in every row, and {rows['']} of {rows.sum()} rows have none; fill in "
            "`group`, or take partitioner 'topic' or 'iid'"
        )
    ranked = sorted(rows.index, key=lambda name: (-rows[name], name))
    if len(ranked) < n_clients:
        raise PartitionError(
            f"partitioner 'natural' gives each client a group of its own, but the corpus has {len(ranked)} groups for "
            f"{n_clients} clients; lower n_clients to at most {len(ranked)}, or take partitioner 'dirichlet' or 'iid'"
        )
    return ranked[:n_clients]


@partitioner
def dirichlet(units: pd.DataFrame, rows: pd.DataFrame, quotas: pd.DataFrame, config: PartitionConfig) -> np.ndarray:
    """Divide each group among all clients by proportions from Dir(dirichlet_alpha); a small one makes clients differ.

    Hsu, Qi and Brown 2019, "Measuring the effects of non-identical data distribution".
    units, rows, quotas, config: the arguments of every rule, see the top of this module.
    The division is the first of at most ATTEMPTS draws that gives every client its least rows. Raises PartitionError
    when no draw does, when the corpus is too small, or when no row has a group; the message says which of alpha,
    clients and rows per client is too large or too small.
    """
    from flwr_datasets.partitioner import DirichletPartitioner

    if (units["group"] == "").all():
        raise PartitionError(
            "partitioner 'dirichlet' mixes groups, and no row has one; take 'topic', 'iid' or 'quantity'"
        )
    n_clients, alpha, needs = len(quotas), float(config.dirichlet_alpha), quotas["least"].tolist()
    total, wanted = int(units["rows"].sum()), sum(needs)
    codes = pd.factorize(units["group"], sort=True)[0].tolist()
    best = 0.0
    for attempt in range(ATTEMPTS if wanted <= total else 0):
        clients = _by_flower(
            DirichletPartitioner(
                n_clients,
                partition_by="group",
                alpha=alpha,
                min_partition_size=0,  # it counts units, not rows; the rows are checked below
                self_balancing=False,  # the balancing divides by zero for small alpha
                # independent seeds: `seed + attempt` would repeat the draws of the neighbouring seeds
                seed=int(np.random.SeedSequence([config.partition_seed, attempt]).generate_state(1)[0]),
            ),
            n_clients,
            {"group": codes},
        )
        had = np.bincount(clients, weights=units["rows"], minlength=n_clients)
        if (had >= needs).all():
            return clients
        best = max(best, float((had / np.maximum(needs, 1)).min()))
    asked = (
        f"dirichlet_alpha {alpha:g}, {n_clients} clients, at least {min(needs)} rows each, {total} rows in "
        f"{len(set(codes))} groups"
    )
    if wanted > total:
        raise PartitionError(
            f"{asked}: {n_clients} clients need {wanted} rows together, more than there are, for any alpha; lower "
            "n_clients, or the minimum (train_rows + test_rows + heldout_rows)"
        )
    raise PartitionError(
        f"{asked}: alpha is too small for that minimum: in the best of {ATTEMPTS} draws the poorest client had "
        f"{best:.0%} of its rows; raise dirichlet_alpha, lower n_clients, or lower the minimum (train_rows + test_rows "
        "+ heldout_rows)"
    )


@partitioner
def topic(units: pd.DataFrame, rows: pd.DataFrame, quotas: pd.DataFrame, config: PartitionConfig) -> np.ndarray:
    """Cluster the units' texts into one topic for each client, of equal numbers of rows.

    The method is TF-IDF, truncated SVD and k-means. Then two steps alternate: texts go to the nearest topic with room,
    first those that would lose most in another topic; each topic's centre moves to the mean of its texts.
    units, rows, quotas, config: the arguments of every rule, see the top of this module.
    Raises PartitionError when the texts contain no words.
    """
    from scipy.spatial.distance import cdist
    from sklearn.cluster import KMeans
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize
    from threadpoolctl import threadpool_limits

    words = TfidfVectorizer(sublinear_tf=True, max_features=TOPIC_WORDS, stop_words="english", dtype=np.float32)
    try:
        counts = words.fit_transform(rows.groupby("unit", sort=True)["input"].agg(" ".join))
    except ValueError as error:
        raise PartitionError(f"partitioner 'topic' finds no words in the inputs ({error}); take 'iid'") from None
    state = config.partition_seed % 2**32  # scikit-learn accepts no larger seeds
    dimensions = min(TOPIC_DIMENSIONS, min(counts.shape) - 1)
    with threadpool_limits(1):  # the order of summation, and with it the result, depends on the number of threads
        fewer = (
            TruncatedSVD(dimensions, random_state=state).fit_transform(counts) if dimensions > 1 else counts.toarray()
        )
        places = normalize(fewer)
        centres = KMeans(len(quotas), n_init=4, random_state=state).fit(places).cluster_centers_
        for _ in range(TOPIC_ROUNDS):
            clients = _balanced(cdist(places, centres, "sqeuclidean"), units["rows"].to_numpy())
            for client in set(clients):
                centres[client] = places[clients == client].mean(axis=0)
    return clients


def _balanced(distances: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The nearest topic with room for each unit (distances: units × topics); a topic is full at its equal share."""
    preferred = np.argsort(distances, axis=1, kind="stable")
    ordered = np.take_along_axis(distances, preferred, axis=1)
    loss = ordered[:, -1] - ordered[:, 0]
    room = [int(-(-rows.sum() // distances.shape[1]))] * distances.shape[1]
    clients = np.empty(len(rows), dtype=int)
    for unit in np.argsort(-loss, kind="stable"):
        client = next(topic for topic in preferred[unit] if room[topic] > 0)
        clients[unit], room[client] = client, room[client] - rows[unit]
    return clients


@partitioner
def quantity(units: pd.DataFrame, rows: pd.DataFrame, quotas: pd.DataFrame, config: PartitionConfig) -> np.ndarray:
    """Assign shuffled units in unequal numbers, one client after the other, until each has its target.

    units, rows, quotas, config: the arguments of every rule, see the top of this module.
    Units that remain when every client has its rows get NOBODY.
    """
    shuffled = np.random.default_rng(config.partition_seed).permutation(len(units))
    ends = units["rows"].to_numpy()[shuffled].cumsum()
    clients = np.full(len(units), NOBODY)
    begin, held = 0, 0
    for client, target in enumerate(quotas["target"].tolist()):
        # the small number absorbs rounding in fractional targets, which would add one more unit
        stop = min(int(np.searchsorted(ends, held + target - 1e-6)) + 1, len(units))
        clients[shuffled[begin:stop]] = client
        begin, held = stop, int(ends[stop - 1]) if stop else 0
    return clients


def _by_flower(partitioner, n_clients: int, columns: dict) -> np.ndarray:
    """The client that a partitioner of flwr-datasets gives each line of a table with these columns."""
    from datasets import Dataset

    n_lines = len(next(iter(columns.values())))
    partitioner.dataset = Dataset.from_dict({"line": range(n_lines), **columns})
    clients = np.empty(n_lines, dtype=int)
    for client in range(n_clients):
        clients[np.array(partitioner.load_partition(client)["line"][:], dtype=int)] = client
    return clients
