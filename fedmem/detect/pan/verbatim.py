"""Finds runs of words that two fragments share.

This is the verbatim test of the PAN detector (Sanchez-Perez, Gelbukh and Sidorov, CLEF 2015). It compares lower-cased
words, so case, spaces and line breaks do not matter. It does not depend on cases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from fedmem.detect.pan.preparing import Words
from fedmem.detect.pan.splitting import Span


class Run(NamedTuple):
    """Equal consecutive words: their places in both fragments, by the detector's count and in the original texts."""

    suspicious: Span
    source: Span
    suspicious_original: Span
    source_original: Span


def common_runs(suspicious: Words, source: Words, min_chars: int) -> list[Run]:
    """The maximal common runs of more than `min_chars` characters on the suspicious side, without nested ones.

    suspicious, source: the words of the two fragments. min_chars: length in characters, ≥ 0, exclusive.

    Quirk Q7: the length is measured on the suspicious side alone, and must exceed the limit. Quirk Q6: nesting is
    judged on the source side alone and against all runs, so two runs at the same place of the source eliminate each
    other.
    """
    runs = []
    for p, q, words in _ends(suspicious.tokens, source.tokens):
        run = Run(*(_joined(places, end, words) for places, end in _sides(suspicious, source, p, q)))
        if run.suspicious[1] - run.suspicious[0] > min_chars:
            runs.append((_noticed(p, q, len(suspicious.tokens), len(source.tokens)), run))
    runs = [run for _, run in sorted(runs)]  # the reference's order, in which the detections are listed
    inside = _nested([run.source for run in runs])
    return [run for run in runs if run.source not in inside]


def _ends(suspicious: list[str], source: list[str]) -> Iterator[tuple[int, int, int]]:
    """(last suspicious word, last source word, number of words) of every maximal run of equal words."""
    # The table of run lengths is mostly zeros: only the previous row's entries are kept, by source position.
    positions = defaultdict(list)
    for q, token in enumerate(source):
        positions[token].append(q)
    lengths: dict[int, int] = {}  # source position -> length of the run that ends there in the previous row
    for p, token in enumerate([*suspicious, None]):  # None equals no word and ends the runs at the last one
        row = {q: lengths.get(q - 1, 0) + 1 for q in positions.get(token, ())}
        yield from ((p - 1, q, words) for q, words in lengths.items() if q + 1 not in row)
        lengths = row


def _noticed(p: int, q: int, suspicious_words: int, source_words: int) -> tuple[int, int]:
    """The place where a row-wise scan of the word table notices that a run ended at (p, q): the order of detections."""
    if q == source_words - 1:
        return p, source_words + 1
    if p == suspicious_words - 1:
        return suspicious_words + 1, q
    return p + 1, q + 1


def _sides(suspicious: Words, source: Words, p: int, q: int):
    return (suspicious.places, p), (source.places, q), (suspicious.original, p), (source.original, q)


def _joined(places: list[Span], last: int, words: int) -> Span:
    return places[last - words + 1][0], places[last][1]


def _nested(spans: list[Span]) -> set[Span]:
    """The spans that lie inside, or are equal to, another span of the list."""
    repeated = {span for span, count in Counter(spans).items() if count > 1}
    nested, furthest = set(), -1
    # Of spans with one start the longest comes first, so a span is nested if an earlier one reaches its end.
    for start, end in sorted(set(spans), key=lambda span: (span[0], -span[1])):
        if end <= furthest:
            nested.add((start, end))
        furthest = max(furthest, end)
    return nested | repeated
