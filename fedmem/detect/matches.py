"""The detect stage: applies the detector to all candidate pairs and makes the `matches` table.

One or more processes compare the pairs in blocks of texts. Each process prepares a text once and drops it after its
blocks. The result does not depend on the number of processes or on their order of completion. This module reads the
tables of prefixes and suffixes; it computes no ratios.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from math import nan
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from fedmem.detect.candidates import CANDIDATE_COLUMNS, check_columns
from fedmem.detect.detector import (
    CONTINUATIONS_AT_ONCE,
    SUFFIXES_AT_ONCE,
    Block,
    Detector,
    Found,
    PanDetector,
    by_value,
)
from fedmem.detect.pan.alignment import Alignment
from fedmem.detect.pan.splitting import DetectorError
from fedmem.detect.paraphrase import EntityFinder, PairClassifier, Typing, identical, judge_sentences, sentence_pairs_of

MATCH_COLUMNS = [
    *CANDIDATE_COLUMNS,
    "kind",
    "score",
    "identical_sentence",
    "detections",
    "matched_chars",
    "continuation_share",
    "suffix_share",
]
UNTYPED = "none"  # value of paraphrase_model: candidates keep the kind "paraphrase", an upper bound

_TYPED_AT_ONCE = 500  # candidates whose sentence pairs are scored together


class Texts(NamedTuple):
    """One text for each candidate pair: the text of pair i is distinct[codes[i]]."""

    codes: np.ndarray
    distinct: np.ndarray

    @classmethod
    def of(cls, ids: pd.Series, table: pd.DataFrame, key: str, column: str) -> Texts:
        """The texts of the candidates' ids.

        ids: one id for each candidate pair. table: table of prefixes or suffixes. key: its column of ids. column: its
        column of texts. Raises ValueError when the table lacks a column or an id.
        """
        check_columns(table, [key, column], f"the table of {key}s")
        rows = pd.Index(table[key]).get_indexer(ids)
        if (rows < 0).any():
            raise ValueError(
                f"candidates contain {key} {ids[rows < 0].iloc[0]!r}, which its table lacks: pass the table it is from"
            )
        # by text, not by id: equal texts share their preparation and lie in the same blocks
        codes, distinct = pd.factorize(table[column].to_numpy(dtype=object))
        return cls(codes[rows], distinct)

    def text(self, number: int) -> str:
        return self.distinct[self.codes[number]]


def find_matches(
    candidates: pd.DataFrame,
    prefixes: pd.DataFrame,
    suffixes: pd.DataFrame,
    detector: Detector | None = None,
    paraphrase_model: str = UNTYPED,
    entity_model: str = "en_core_web_sm",
    workers: int = 1,
    progress: bool = True,
    carry_over: bool = True,
) -> pd.DataFrame:
    """Compare every candidate pair and return those with a detection, in the candidates' order (MATCH_COLUMNS).

    candidates: table with CANDIDATE_COLUMNS, as `find_candidates` returns it.
    prefixes: table with prefix_id, continuation. suffixes: table with suffix_id, suffix.
    detector: what compares the pairs (default: `PanDetector` with the settings of the federated-learning study).
    paraphrase_model: hub id or folder of a classifier, which types paraphrase candidates together with `entity_model`;
      "none" leaves their kind "paraphrase", an upper bound.
    entity_model: name of an installed spaCy package, or a folder; not used with paraphrase_model "none".
    workers: number of processes, ≥ 1. Each takes seconds to start, so one is faster for a few thousand pairs. A script
      that uses more needs the usual `if __name__ == "__main__"`.
    progress: whether to show progress bars.
    carry_over: whether a detection inherits the sentence pairs of earlier ones (quirk Q15; True in the study).

    kind is null for candidates without a record of typing. score is the best score of any sentence pair, uncapped, NaN
    if none was scored. detections lists [suffix start, suffix end, continuation start, continuation end], in characters
    of the original texts; matched_chars is the number of the continuation's characters that they cover, and the shares
    are the covered parts of continuation and suffix (0..1).
    Raises DetectorError when a model is missing (before any comparison) or a worker process dies; ValueError when a
    table lacks a column or an id.
    """
    check_columns(candidates, CANDIDATE_COLUMNS, "candidates")
    # The models are loaded first: a missing one must not be noticed only after hours of comparisons.
    typer = None if paraphrase_model == UNTYPED else _Typer(paraphrase_model, entity_model, carry_over)
    continuations = Texts.of(candidates["prefix_id"], prefixes, "prefix_id", "continuation")
    texts = Texts.of(candidates["suffix_id"], suffixes, "suffix_id", "suffix")
    found: list[Found] = []
    detector = detector or PanDetector()
    blocks = _blocks(continuations, texts, workers)
    with (
        _compared(blocks, detector, workers) as results,
        tqdm(desc=detector.name, total=len(candidates), unit="pairs", disable=not progress, mininterval=1) as bar,
    ):
        for block, part in zip(blocks, results, strict=True):
            found += part
            bar.update(len(block.number))
    found.sort(key=lambda item: item[0])  # blocks regroup the pairs
    rows = [(texts.text(number), continuations.text(number), alignment) for number, alignment in found]
    typings = [(alignment.kind, nan) for _, _, alignment in rows] if typer is None else typer(rows, progress)
    described = [_described(*row, *typing) for row, typing in zip(rows, typings, strict=True)]
    matches = candidates.iloc[[number for number, _ in found]][CANDIDATE_COLUMNS].reset_index(drop=True)
    return pd.concat([matches, _as_frame(described)], axis=1)


@contextmanager
def _compared(blocks: list[Block], detector: Detector, workers: int) -> Iterator[Iterable[list[Found]]]:
    if workers == 1 or len(blocks) < 2:
        yield map(detector.comparer(), blocks)
        return
    # spawned, not forked: a fork copies locks that a notebook's threads (torch, the kernel) hold, but not the threads
    pool = ProcessPoolExecutor(min(workers, len(blocks)), get_context("spawn"), _start_worker, (detector,))
    try:
        yield pool.map(_work, blocks)
    except BrokenProcessPool as error:
        raise DetectorError("a worker process died, possibly for lack of memory: lower detect_workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(detector: Detector) -> None:
    # global: a worker's task reaches only module variables, and the cache must last from block to block
    global _compare
    Thread(target=_end_with_parent, daemon=True).start()
    _compare = detector.comparer()


def _end_with_parent() -> None:
    """End the worker when its parent ends: after a kill of the kernel it would wait for its next block for ever."""
    parent_process().join()
    os._exit(1)  # sys.exit() would end this thread only


def _work(block: Block) -> list[Found]:
    return _compare(block)


def _blocks(continuations: Texts, suffixes: Texts, workers: int) -> list[Block]:
    """All candidate pairs in blocks of few distinct texts, small enough to spread over the workers."""
    c, s = continuations.codes, suffixes.codes
    # four blocks per worker and more, so that a slow block does not leave the others idle; at least 64 suffixes each
    shares = 1 if workers == 1 else 4 * workers
    width = min(SUFFIXES_AT_ONCE, max(64, -(-len(suffixes.distinct) // shares)))
    # suffixes first: the blocks of the same suffixes are adjacent, so few processes prepare a suffix
    block = (s // width) * (len(continuations.distinct) // CONTINUATIONS_AT_ONCE + 1) + c // CONTINUATIONS_AT_ONCE
    blocks = []
    for number in by_value(block):
        own_c, local_c = np.unique(c[number], return_inverse=True)
        own_s, local_s = np.unique(s[number], return_inverse=True)
        texts = continuations.distinct[own_c].tolist(), suffixes.distinct[own_s].tolist()
        blocks.append(Block(*texts, local_c, local_s, number))
    return blocks


class _Typer:
    """Types alignments with the two models, many alignments at a time."""

    def __init__(self, paraphrase_model: str, entity_model: str, carry_over: bool):
        self._entities = EntityFinder(entity_model)
        self._classifier = PairClassifier(paraphrase_model)
        self._carry_over = carry_over

    def __call__(self, rows: list[tuple[str, str, Alignment]], progress: bool) -> list[tuple[str | None, float]]:
        """The kind and best score of every row (suffix, continuation, alignment)."""
        typings = []
        starts = range(0, len(rows), _TYPED_AT_ONCE)
        for start in tqdm(starts, unit=f"{_TYPED_AT_ONCE} candidates", disable=not progress, mininterval=1):
            part = rows[start : start + _TYPED_AT_ONCE]
            scores = self._classifier.scores(pair for row in part for pair in _to_score(*row))
            typings += [self._typed(row, scores) for row in part]
        return typings

    def _typed(self, row: tuple[str, str, Alignment], scores: dict) -> tuple[str | None, float]:
        suffix, continuation, alignment = row
        typing: Typing = judge_sentences(
            alignment, suffix, continuation, lambda g, t: scores[g, t], self._entities, self._carry_over
        )
        return typing.kind, typing.score


def _to_score(suffix: str, continuation: str, alignment: Alignment) -> Iterator[tuple[str, str]]:
    if alignment.kind == "paraphrase":
        for pairs in sentence_pairs_of(alignment, suffix, continuation):
            yield from (pair for pair in pairs if not identical(pair))


def _described(suffix: str, continuation: str, alignment: Alignment, kind: str | None, score: float) -> dict:
    sentences = sentence_pairs_of(alignment, suffix, continuation)
    covered = _covered(source for _, source in alignment.places)
    return {
        "kind": kind,
        "score": score,
        "identical_sentence": any(identical(pair) for pairs in sentences for pair in pairs),
        "detections": [[*suspicious, *source] for suspicious, source in alignment.places],
        "matched_chars": covered,
        "continuation_share": covered / len(continuation),
        "suffix_share": _covered(suspicious for suspicious, _ in alignment.places) / len(suffix),
    }


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """The number of characters that lie in at least one of the spans."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _as_frame(described: list[dict]) -> pd.DataFrame:
    # astype: without a match, or with kinds that are all None, pandas would infer other types
    types = {"kind": "str", "score": "float64", "identical_sentence": "bool", "matched_chars": "int64"}
    types |= {"detections": "object", "continuation_share": "float64", "suffix_share": "float64"}
    return pd.DataFrame(described, columns=MATCH_COLUMNS[len(CANDIDATE_COLUMNS) :]).astype(types)
