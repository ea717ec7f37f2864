"""The rules by which texts go to clients: at random, by group, by mixtures of groups, by topic, in unequal sizes.

What is dealt are units, rows that belong together. Each rule returns, for every unit, the client that gets it, or
NOBODY; it ends in bounded time, and a request that cannot be met says what of it is too much. This module knows units,
their sizes, groups and texts; it does not know splits. flwr-datasets' partitioners do the dealing where they fit.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedmem.config.parameter import closest

NOBODY = -1
ATTEMPTS = 30  # draws of a Dirichlet division before it is given up
TOPIC_WORDS, TOPIC_DIMENSIONS, TOPIC_ROUNDS = 20_000, 64, 10


class PartitionError(ValueError):
    """A deal that cannot be made, or rows that are none; the message says which client lacks what, and what to do."""


def iid(units: pd.DataFrame, n_clients: int, seed: int) -> np.ndarray:
    """Deal shuffled units in equal numbers (flwr-datasets' IidPartitioner, which cuts what it gets into shards)."""
    from flwr_datasets.partitioner import IidPartitioner

    shuffled = np.random.default_rng(seed).permutation(len(units))
    clients = np.empty(len(units), dtype=int)
    clients[shuffled] = _by_flower(IidPartitioner(n_clients), n_clients, {"place": range(len(units))})
    return clients


def natural(units: pd.DataFrame, n_clients: int, client_groups: Sequence | None) -> np.ndarray:
    """Give client j the units of its groups alone: of those named in `client_groups`, or of the j-th largest group.

    Groups of equal numbers of rows are told apart by name. Raises PartitionError for an unknown group, or too few.
    """
    rows = units.groupby("group")["rows"].sum()
    if client_groups is None:
        owners = {name: client for client, name in enumerate(_largest(rows, n_clients))}
    else:
        sets = [client if isinstance(client, list | tuple) else [client] for client in client_groups]
        owners = {name: client for client, names in enumerate(sets) for name in names}
        for name in owners:
            if name not in rows.index:
                raise PartitionError(
                    f"client_groups: no row is of group {name!r}{closest(name, rows.index)} (groups: "
                    f"{', '.join(map(repr, rows.sort_values(ascending=False).index[:40]))})"
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


def dirichlet(units: pd.DataFrame, n_clients: int, alpha: float, needs: Sequence[int], seed: int) -> np.ndarray:
    """Divide each group among all clients by proportions from Dir(alpha); client j has at least `needs[j]` rows.

    Hsu, Qi and Brown 2019, "Measuring the effects of non-identical data distribution"; flwr-datasets'
    DirichletPartitioner without its balancing, which divides by zero for small alpha. At most ATTEMPTS draws are made,
    the first that gives every client enough is taken. Raises PartitionError, saying which of alpha, clients and rows
    per client is too much.
    """
    from flwr_datasets.partitioner import DirichletPartitioner

    if (units["group"] == "").all():
        raise PartitionError(
            "partitioner 'dirichlet' mixes groups, and no row has one; take 'topic', 'iid' or 'quantity'"
        )
    total, wanted = int(units["rows"].sum()), int(np.sum(needs))
    codes = pd.factorize(units["group"], sort=True)[0].tolist()
    best = 0.0
    for attempt in range(ATTEMPTS if wanted <= total else 0):
        clients = _by_flower(
            DirichletPartitioner(
                n_clients,
                partition_by="group",
                alpha=float(alpha),
                min_partition_size=0,
                self_balancing=False,
                seed=int(np.random.SeedSequence([seed, attempt]).generate_state(1)[0]),
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
            f"{asked}: {n_clients} clients need {wanted} rows together, more than there are, whatever alpha is; lower "
            "n_clients, or the minimum (train_rows + test_rows + heldout_rows)"
        )
    raise PartitionError(
        f"{asked}: alpha is too small for that minimum: in the best of {ATTEMPTS} draws the poorest client had "
        f"{best:.0%} of its rows; raise dirichlet_alpha, lower n_clients, or lower the minimum (train_rows + test_rows "
        "+ heldout_rows)"
    )


def topic(units: pd.DataFrame, n_clients: int, seed: int) -> np.ndarray:
    """Cluster the units' texts into one topic a client, of equal numbers of rows.

    TF-IDF, truncated SVD, k-means; then, in turn, texts go to the nearest topic that has room, those first that lose
    most elsewhere, and topics move to the middle of their texts. One thread, so that sums come out the same anywhere.
    """
    from scipy.spatial.distance import cdist
    from sklearn.cluster import KMeans
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize
    from threadpoolctl import threadpool_limits

    words = TfidfVectorizer(sublinear_tf=True, max_features=TOPIC_WORDS, stop_words="english", dtype=np.float32)
    try:
        counts = words.fit_transform(units["text"])
    except ValueError as error:
        raise PartitionError(f"partitioner 'topic' finds no words in the inputs ({error}); take 'iid'") from None
    state = seed % 2**32
    dimensions = min(TOPIC_DIMENSIONS, min(counts.shape) - 1)
    with threadpool_limits(1):
        fewer = (
            TruncatedSVD(dimensions, random_state=state).fit_transform(counts) if dimensions > 1 else counts.toarray()
        )
        places = normalize(fewer)
        centres = KMeans(n_clients, n_init=4, random_state=state).fit(places).cluster_centers_
        for _ in range(TOPIC_ROUNDS):
            clients = _balanced(cdist(places, centres, "sqeuclidean"), units["rows"].to_numpy())
            for client in set(clients):
                centres[client] = places[clients == client].mean(axis=0)
    return clients


def _balanced(distances: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The nearest topic with room of each unit (distances: units × topics); no topic gets more than its even part."""
    preferred = np.argsort(distances, axis=1, kind="stable")
    ordered = np.take_along_axis(distances, preferred, axis=1)
    loss = ordered[:, -1] - ordered[:, 0]
    room = [int(-(-rows.sum() // distances.shape[1]))] * distances.shape[1]
    clients = np.empty(len(rows), dtype=int)
    for unit in np.argsort(-loss, kind="stable"):
        client = next(topic for topic in preferred[unit] if room[topic] > 0)
        clients[unit], room[client] = client, room[client] - rows[unit]
    return clients


def quantity(units: pd.DataFrame, targets: Sequence[float], seed: int) -> np.ndarray:
    """Deal shuffled units one client after the other, until client j has `targets[j]` rows; the rest goes to NOBODY."""
    shuffled = np.random.default_rng(seed).permutation(len(units))
    ends = units["rows"].to_numpy()[shuffled].cumsum()
    clients = np.full(len(units), NOBODY)
    begin, held = 0, 0
    for client, target in enumerate(targets):
        stop = min(int(np.searchsorted(ends, held + target - 1e-6)) + 1, len(units))
        clients[shuffled[begin:stop]] = client
        begin, held = stop, int(ends[stop - 1]) if stop else 0
    return clients


def _by_flower(partitioner, n_clients: int, columns: dict) -> np.ndarray:
    """The client of each line of a table with these columns, as a partitioner of flwr-datasets divides it."""
    from datasets import Dataset

    n_lines = len(next(iter(columns.values())))
    partitioner.dataset = Dataset.from_dict({"line": range(n_lines), **columns})
    clients = np.empty(n_lines, dtype=int)
    for client in range(n_clients):
        clients[np.array(partitioner.load_partition(client)["line"][:], dtype=int)] = client
    return clients
