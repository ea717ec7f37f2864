"""Runs of words that two fragments share word for word.

The verbatim test of the PAN detector (Sanchez-Perez, Gelbukh and Sidorov, CLEF 2015). It compares words, so spaces and
line breaks between them do not matter; case does not either. Knows two fragments; nothing of cases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from fedmem.detect.pan.preparing import Words
from fedmem.detect.pan.splitting import Span


class Run(NamedTuple):
    """Equal consecutive words: their places in both fragments, as the detector counts and as the texts have them."""

    suspicious: Span
    source: Span
    suspicious_original: Span
    source_original: Span


def common_runs(suspicious: Words, source: Words, min_chars: int) -> list[Run]:
    """Maximal common runs of more than `min_chars` characters on the suspicious side, none inside another.

    Quirk Q7: the length is measured on the suspicious side alone, and strictly. Quirk Q6: "inside" is judged on the
    source side alone and against all runs, so two runs at the same place of the source eliminate each other.
    """
    runs = []
    for p, q, words in _ends(suspicious.tokens, source.tokens):
        run = Run(*(_joined(places, end, words) for places, end in _sides(suspicious, source, p, q)))
        if run.suspicious[1] - run.suspicious[0] > min_chars:
            runs.append((_noticed(p, q, len(suspicious.tokens), len(source.tokens)), run))
    runs = [run for _, run in sorted(runs)]
    inside = _nested([run.source for run in runs])
    return [run for run in runs if run.source not in inside]


def _ends(suspicious: list[str], source: list[str]) -> Iterator[tuple[int, int, int]]:
    """(last suspicious word, last source word, number of words) of every maximal run of equal words."""
    positions = defaultdict(list)
    for q, token in enumerate(source):
        positions[token].append(q)
    lengths: dict[int, int] = {}  # source position -> length of the run that ends there in the previous row
    for p, token in enumerate([*suspicious, None]):
        row = {q: lengths.get(q - 1, 0) + 1 for q in positions.get(token, ())}
        yield from ((p - 1, q, words) for q, words in lengths.items() if q + 1 not in row)
        lengths = row


def _noticed(p: int, q: int, suspicious_words: int, source_words: int) -> tuple[int, int]:
    """Where a scan of the word table by rows notices that a run ended at (p, q): the order of detections."""
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
    """Those of the spans that lie inside, or equal, another one of the list."""
    repeated = {span for span, count in Counter(spans).items() if count > 1}
    nested, furthest = set(), -1
    for start, end in sorted(set(spans), key=lambda span: (span[0], -span[1])):
        if end <= furthest:
            nested.add((start, end))
        furthest = max(furthest, end)
    return nested | repeated
