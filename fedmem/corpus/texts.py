"""Texts as numbers: which are long enough to be matched at all, and their runs of consecutive words.

A run of RUN_WORDS words that several rows hold is boilerplate or a shared passage: copies, boilerplate and what clients
share are all found by such runs, whose numbers make the search a comparison of arrays.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import pandas as pd

RUN_WORDS = 8
WORD = re.compile(r"\w+")

# Odd multipliers, so that each product is a bijection modulo 2^64; one for each position in a run.
_ODD = np.random.default_rng(8).integers(0, 2**63, RUN_WORDS + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


@lru_cache(maxsize=2**20)
def word_number(word: str) -> int:
    """Return 64 bits that are equal on every machine; Python's own `hash` of a string changes with each process."""
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest())


def run_numbers(words: list[str], n: int = RUN_WORDS) -> np.ndarray:
    """Return a 64-bit number for each run of n words: equal for equal runs, almost surely different for others.

    words: as they are compared, folded. n: 1 to RUN_WORDS + 1. Fewer than n words give an empty array.
    """
    hashes = np.fromiter(map(word_number, words), np.uint64, len(words))
    n_runs = max(len(words) - n + 1, 0)
    mixed = sum((hashes[place : place + n_runs] * _ODD[place] for place in range(n)), np.zeros(n_runs, np.uint64))
    return mixed ^ (mixed >> np.uint64(31))


def measurable(prefixes: pd.DataFrame, suffixes: pd.DataFrame, min_match_chars: int = 50) -> pd.DataFrame:
    """Count the texts that can match at all: a text shorter than `min_match_chars` characters never matches.

    prefixes: DataFrame with client, continuation. suffixes: DataFrame with client, member, suffix.
    min_match_chars: shortest match of the detector, in characters, >= 1.

    Returns a DataFrame with client, text (continuation | member suffix | held-out suffix), n, long_enough (how many
    reach the length), share (0 … 1), median_chars. A client without such texts has no line. Raises KeyError when a
    column is missing.
    """
    member = np.where(suffixes["member"].to_numpy(dtype=bool), "member suffix", "held-out suffix")
    parts = [
        pd.DataFrame({"client": suffixes["client"], "text": member, "chars": suffixes["suffix"].str.len()}),
        pd.DataFrame(
            {"client": prefixes["client"], "text": "continuation", "chars": prefixes["continuation"].str.len()}
        ),
    ]
    texts = pd.concat(parts, ignore_index=True)
    texts["enough"] = texts["chars"] >= min_match_chars
    table = texts.groupby(["client", "text"], as_index=False).agg(
        n=("chars", "size"), long_enough=("enough", "sum"), share=("enough", "mean"), median_chars=("chars", "median")
    )
    return table.astype({"long_enough": int})
