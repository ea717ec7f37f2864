"""Tables that describe a partition: sizes, lengths, groups, and how differently clients write."""

import numpy as np
import pandas as pd

from fedmem.config.vocabulary import SPLITS


def sizes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line per client and split: client, split, rows, median_chars (of the inputs, in characters)."""
    chars = rows.assign(chars=rows["input"].str.len(), split=pd.Categorical(rows["split"], SPLITS))
    table = chars.groupby(["client", "split"], observed=True)["chars"].agg(rows="size", median_chars="median")
    return table.reset_index().astype({"split": "str"})


def lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how long each client's inputs are, in characters.

    Columns: client, shortest, quarter, median, three_quarters, longest.
    """
    chars = rows["input"].str.len().groupby(rows["client"])
    names = ["shortest", "quarter", "median", "three_quarters", "longest"]
    table = chars.quantile([0, 0.25, 0.5, 0.75, 1]).unstack()
    return table.set_axis(names, axis=1).reset_index()


def groups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how many of each client's rows are of which group: client, group, rows, share (of the client's rows)."""
    table = rows.groupby(["client", "group"]).size().rename("rows").reset_index()
    return table.assign(share=table["rows"] / table.groupby("client")["rows"].transform("sum"))


def distances(rows: pd.DataFrame, max_words: int = 20_000) -> pd.DataFrame:
    """Return how differently clients write: the Jensen–Shannon distance of the words of their inputs, pair by pair.

    Columns: client, other, distance (0: the same words as often, 1: no word in common; base 2), by_chance (the same
    when the same rows are dealt at random in the same numbers: what a distance of equal clients looks like). Counted
    are the `max_words` most frequent words (Lin 1991; the distance is the divergence's square root).
    """
    from sklearn.feature_extraction.text import CountVectorizer

    counts = CountVectorizer(max_features=max_words, token_pattern=r"\w+").fit_transform(rows["input"])
    client = rows["client"].to_numpy()
    measured = _word_distances(counts, client)
    chance = _word_distances(counts, np.random.default_rng(0).permutation(client))
    j, k = np.indices(measured.shape)
    values = {"distance": measured.ravel(), "by_chance": chance.ravel()}
    return pd.DataFrame({"client": j.ravel(), "other": k.ravel(), **values})


def _word_distances(counts, client: np.ndarray) -> np.ndarray:
    from scipy.spatial.distance import jensenshannon

    n_clients = client.max() + 1
    words = np.stack([np.asarray(counts[client == one].sum(axis=0)).ravel() for one in range(n_clients)])
    table = np.zeros((n_clients, n_clients))
    for one in range(n_clients):
        for other in range(one):
            table[one, other] = table[other, one] = jensenshannon(words[one], words[other], base=2)
    return table
