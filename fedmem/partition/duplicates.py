"""Texts that occur in a corpus more than once, and words that many rows share.

Two inputs are exact copies when they are equal after folding white space and case, and near copies when the Jaccard
similarity of their sets of word 3-grams reaches a threshold. If clients share a text, a continuation that reproduces it
does not show whose it was. So copies are counted per pair of clients, listed, and dropped on request. This module
depends on the texts and their holders, not on how the rows were assigned to clients.

Sources: Broder 1997, "On the resemblance and containment of documents" (MinHash); Lee et al. 2022, "Deduplicating
training data makes language models better".
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from fedmem.corpus.texts import RUN_WORDS, WORD, run_numbers, word_number

NEAR_WORDS = 3
PERMUTATIONS, MISSED = 128, 1e-3  # hash values per text, at most; share of pairs at the threshold that may be missed
MANY_COPIES = 1000  # a text with more copies is paired only with its first row: n copies make n²/2 pairs


@dataclass(frozen=True)
class Duplicates:
    """Result of `find`.

    text: the number of each row's folded text, index: row id. near: pairs of such numbers (one, other, similarity).
    """

    text: pd.Series
    near: pd.DataFrame

    def drop(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return `rows` (with `id`) in their order without copies: no two remaining rows are copies of each other.

        The copy that remains is chosen at random, with a fixed seed, so that no client is favoured.
        """
        neighbours: dict[int, list[int]] = {}
        for one, other in zip(self.near["one"], self.near["other"], strict=True):
            neighbours.setdefault(one, []).append(other)
            neighbours.setdefault(other, []).append(one)
        texts, taken = self.text.loc[rows["id"]].tolist(), set()
        keep = np.zeros(len(rows), bool)
        # greedy in random order: "near" is not transitive, so one row per connected group would drop too many
        for place in np.random.default_rng(0).permutation(len(rows)):
            text = texts[place]
            if text not in taken and taken.isdisjoint(neighbours.get(text, ())):
                keep[place] = True
                taken.add(text)
        return rows[keep].reset_index(drop=True)


def find(rows: pd.DataFrame, threshold: float = 0.8) -> Duplicates:
    """Find the copies among `rows` (id, input): all exact ones, and near ones of similarity >= `threshold` (0 to 1).

    The similarity is the Jaccard similarity of the sets of word 3-grams; a text of fewer than 3 words is a single one.

    Candidates for near copies come from MinHash LSH, with bands such that at most one in a thousand pairs at the
    threshold is missed. Each candidate is verified by its true similarity, so no pair below the threshold is reported.
    Shows a progress bar. Time grows with the number of texts, and with the number of similar pairs.
    """
    # near copies are searched among distinct texts, so that many exact copies do not multiply the pairs
    numbers, texts = pd.factorize(rows["input"].map(fold))
    sets = [_shingles(text, NEAR_WORDS) for text in texts]
    found = []
    for one, other in _candidates(sets, threshold):
        shared = len(np.intersect1d(sets[one], sets[other], assume_unique=True))
        value = shared / (len(sets[one]) + len(sets[other]) - shared)
        if value >= threshold:
            found.append((one, other, value))
    # sorted: the order of candidates is that of the LSH index's sets
    near = pd.DataFrame(sorted(found), columns=["one", "other", "similarity"]).astype({"one": int, "other": int})
    return Duplicates(pd.Series(numbers, index=rows["id"].to_numpy()), near.astype({"similarity": float}))


def fold(text: str) -> str:
    """Return a text case-folded and with single spaces as white space; exact copies have equal folded texts."""
    return " ".join(text.casefold().split())


def pairs(found: Duplicates, rows: pd.DataFrame) -> pd.DataFrame:
    """List the copies among `rows` (the partition table), one row per pair, each pair once.

    Columns: row_id, client, split, other_id, other_client, other_split, kind (exact, near), similarity (0 to 1). For a
    text with more than MANY_COPIES copies, each row is paired only with the first one.
    """
    held = rows[["row_id", "client", "split"]].assign(text=found.text.loc[rows["row_id"]].to_numpy())
    held["place"] = np.arange(len(held))
    copies = held.groupby("text")["place"].transform("size")
    first = held["place"] == held.groupby("text")["place"].transform("min")
    left = held[(copies > 1) & ((copies <= MANY_COPIES) | first)]
    exact = left.merge(held[copies > 1], on="text", suffixes=("", "_other"))
    turned = found.near.rename(columns={"one": "other", "other": "one"})
    near = pd.concat([found.near, turned]).merge(held, left_on="one", right_on="text")
    near = near.merge(held, left_on="other", right_on="text", suffixes=("", "_other"))
    table = pd.concat([exact.assign(kind="exact", similarity=1.0), near.assign(kind="near")], ignore_index=True)
    # the merges give each pair in both orders, and each row with itself
    table = table[table["place"] < table["place_other"]]
    names = {f"{name}_other": f"other_{name.removeprefix('row_')}" for name in ("row_id", "client", "split")}
    columns = ["row_id", "client", "split", *names.values(), "kind", "similarity"]
    table = table.sort_values(["kind", "place", "place_other"], kind="stable").rename(columns=names)[columns]
    return table.astype({"client": int, "other_client": int}).reset_index(drop=True)


def matrix(listed: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Count for each pair of clients the rows of one that have a copy at the other (diagonal: another row of its own).

    `listed`: the table of `pairs`. Columns: client, other, rows, share (of the client's rows, 0 to 1).
    """
    there = listed[["row_id", "client", "other_client"]].set_axis(["row_id", "client", "other"], axis=1)
    back = listed[["other_id", "other_client", "client"]].set_axis(["row_id", "client", "other"], axis=1)
    # a row with several copies at the same client counts once
    had = pd.concat([there, back]).drop_duplicates().groupby(["client", "other"]).size()
    clients = range(rows["client"].max() + 1)
    every = pd.MultiIndex.from_product([clients, clients], names=["client", "other"])
    table = had.reindex(every, fill_value=0).rename("rows").reset_index()
    return table.assign(share=table["rows"] / table["client"].map(rows["client"].value_counts()))


def counts(listed: pd.DataFrame) -> pd.DataFrame:
    """Count the pairs of `pairs` by kind, where (within a client or across clients) and the two splits."""
    where = np.where(listed["client"] == listed["other_client"], "within a client", "across clients")
    splits = [" and ".join(sorted(two)) for two in zip(listed["split"], listed["other_split"], strict=True)]
    table = listed.assign(where=where, splits=splits).groupby(["kind", "where", "splits"]).size()
    return table.rename("pairs").reset_index()


def boilerplate(texts: Iterable[str], share: float = 0.05) -> pd.DataFrame:
    """Return the runs of 8 words that occur in more than `share` of the texts and in at least two, most frequent first.

    Columns: words (folded), rows, share (of the texts, 0 to 1).
    """
    texts = list(texts)
    sets = [_shingles(fold(text), RUN_WORDS, short=False) for text in texts]
    every = np.concatenate([*sets, np.empty(0, np.uint64)])
    del sets  # frees as much memory as `every` takes
    runs, rows = np.unique(every, return_counts=True)
    often = rows > max(share * len(texts), 1)
    wanted, words = dict(zip(runs[often].tolist(), rows[often].tolist(), strict=True)), {}
    # a second pass finds the words of the few frequent runs; keeping the words of all runs would take far more memory
    for text in texts:
        if len(words) == len(wanted):
            break
        own = WORD.findall(fold(text))
        for place, run in enumerate(run_numbers(own).tolist()):
            if run in wanted:
                words[run] = " ".join(own[place : place + RUN_WORDS])
    table = pd.DataFrame({"words": [words[run] for run in wanted], "rows": list(wanted.values())}).astype({"rows": int})
    table = table.assign(share=table["rows"] / max(len(texts), 1))
    return table.sort_values(["rows", "words"], ascending=[False, True], kind="stable", ignore_index=True)


def covered(texts: pd.Series, found: pd.DataFrame) -> pd.Series:
    """Return the share, 0 to 1, of each text's words that lie in the runs of `boilerplate`."""
    wanted = {tuple(words.split()) for words in found["words"]}

    def part(text: str) -> float:
        own = WORD.findall(fold(text))
        inside = np.zeros(len(own), bool)
        for place in range(len(own) - RUN_WORDS + 1):
            if tuple(own[place : place + RUN_WORDS]) in wanted:
                inside[place : place + RUN_WORDS] = True
        return float(inside.mean()) if own else 0.0

    return texts.map(part).astype(float)


def _shingles(text: str, n: int, short: bool = True) -> np.ndarray:
    """Return the distinct runs of n words of a folded text, sorted; if `short`, a shorter text counts as one run."""
    words = WORD.findall(text)
    if len(words) >= n:
        return np.unique(run_numbers(words, n))
    # "\n" cannot occur in a word, so a short text never equals a run of a longer one
    return np.array([word_number("\n" + (" ".join(words) or text))] if short else [], np.uint64)


def _candidates(sets: list[np.ndarray], threshold: float) -> Iterator[tuple[int, int]]:
    """Yield pairs of places (the earlier first) of sets that may be similar."""
    from datasketch import MinHash, MinHashLSH  # imported only here: other stages use `fold` alone

    bands, rows = _bands(threshold)
    index = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
    hashes = MinHash.generator(sets, num_perm=bands * rows, seed=1, hashfunc=int, scheme="affine64")
    for place, value in enumerate(tqdm(hashes, desc="duplicates", total=len(sets), unit="text", mininterval=1)):
        for other in index.query(value):
            yield other, place
        index.insert(place, value, check_duplication=False)


def _bands(threshold: float) -> tuple[int, int]:
    """Return (bands, rows per band): the longest bands with at most PERMUTATIONS values and MISSED at the threshold.

    A pair of similarity s agrees in all r rows of some of b bands with probability 1 − (1 − s^r)^b.
    """
    rows = max(r for r in range(1, PERMUTATIONS // 2 + 1) if (1 - threshold**r) ** (PERMUTATIONS // r) <= MISSED)
    return next(b for b in range(2, PERMUTATIONS + 1) if (1 - threshold**rows) ** b <= MISSED), rows
