"""Runs of consecutive words as numbers, so that texts that share some are found by comparing arrays.

A run of RUN_WORDS words that several rows hold is boilerplate or a shared passage: copies, boilerplate and what clients
share are all found by such runs.
"""

import re
from functools import lru_cache
from hashlib import blake2b

import numpy as np

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
