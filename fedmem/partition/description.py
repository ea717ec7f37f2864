"""Tables that describe a partition: sizes, lengths, groups, and how differently clients write."""

import numpy as np
import pandas as pd

from fedmem.config.vocabulary import SPLITS


def sizes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line per client and split: client, split, rows, median_chars (of the inputs, in characters)."""
    # categorical, so that the splits are sorted as in SPLITS and not by name
    chars = rows.assign(chars=rows["input"].str.len(), split=pd.Categorical(rows["split"], SPLITS))
    table = chars.groupby(["client", "split"], observed=True)["chars"].agg(rows="size", median_chars="median")
    return table.reset_index().astype({"split": "str"})


def lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the quartiles of the lengths of each client's inputs, in characters.

    Columns: client, shortest, quarter, median, three_quarters, longest.
    """
    chars = rows["input"].str.len().groupby(rows["client"])
    names = ["shortest", "quarter", "median", "three_quarters", "longest"]
    table = chars.quantile([0, 0.25, 0.5, 0.75, 1]).unstack()
    return table.set_axis(names, axis=1).reset_index()


def groups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each client by group: client, group, rows, share (of the client's rows)."""
    table = rows.groupby(["client", "group"]).size().rename("rows").reset_index()
    return table.assign(share=table["rows"] / table.groupby("client")["rows"].transform("sum"))


def distances(rows: pd.DataFrame, max_words: int = 20_000) -> pd.DataFrame:
    """Return the Jensen–Shannon distance between the word distributions of each pair of clients.

    rows: the table of `split`. max_words: only this many most frequent words are counted, ≥ 1.
    Columns: client, other, distance (0: equal frequencies, 1: no common word; base 2), by_chance (the distance when the
    same rows are dealt at random in the same numbers: the value to expect for clients that do not differ). The distance
    is the square root of the divergence (Lin 1991).
    """
    # imported here because only this description of a partition needs scikit-learn
    from sklearn.feature_extraction.text import CountVectorizer

    counts = CountVectorizer(max_features=max_words, token_pattern=r"\w+").fit_transform(rows["input"])
    client = rows["client"].to_numpy()
    measured = _word_distances(counts, client)
    # a fixed seed: the baseline must not change between two views of the same partition
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
