"""Prepares one text for the detector, once for all pairs that contain it.

A text becomes units (sentences, of which short ones are merged forward), each with a bag of stems; a fragment becomes
words with their places. Neither depends on the other text of a pair; weights do and are computed in `seeding`.
Source: Sanchez-Perez, Gelbukh and Sidorov (CLEF 2014), section "Preprocessing", as adapted by Lee et al. (WWW 2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fedmem.detect.pan.settings import AlignmentSettings
from fedmem.detect.pan.splitting import Span, counted, is_word, split_sentences, split_words, stem
from fedmem.retrieval.tokens import stop_words

Bag = dict[str, int]


class Unit(NamedTuple):
    """One sentence, or several merged: where it starts, its length in characters, its stems in order of appearance."""

    start: int
    length: int
    bag: Bag


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A text, its sentences, its merged units, and for each stem the number of sentences with it."""

    text: str
    sentences: list[Span]
    units: list[Unit]
    frequency: Bag

    def extent(self, first: int, last: int) -> Span:
        """The characters from unit `first` to the end of unit `last`, as the detector measures them (quirk Q2b)."""
        unit = self.units[last]
        return self.units[first].start, unit.start + unit.length


class Words(NamedTuple):
    """The words of a fragment: tokens, their places by the detector's count, and their places in the fragment itself.

    The two differ only after a letter whose lower case has two characters (quirk Q20).
    """

    tokens: list[str]
    places: list[Span]
    original: list[Span]


def prepare(text: str, settings: AlignmentSettings) -> PreparedText:
    """Split, tokenise, stem and merge one text (sections "sentences" and "merging")."""
    clean = text.replace("\0", " ")  # quirk Q21: only here, while the verbatim test sees the original text
    sentences = split_sentences(clean)
    units, frequency = [], {}
    for start, end in sentences:
        bag = _bag(clean[start:end], settings.stem_stop_words)
        if not bag:  # a sentence without a counted word is not a unit, but may lie inside a case
            continue
        units.append(Unit(start, end - start, bag))
        for word in bag:
            frequency[word] = frequency.get(word, 0) + 1
    if settings.drop_short_units:
        units = [u for i, u in enumerate(units) if i == len(units) - 1 or _words(u) >= settings.min_unit_words]
    else:
        units = _merge_short(units, frequency, settings.min_unit_words)
    return PreparedText(text, sentences, units, frequency)


def words_of(fragment: str) -> Words:
    """The words of a fragment, which is split again instead of using the sentences of its text (quirk Q8).

    The first word of a sentence is extended to the sentence's start, the last word so far to its end (quirk Q7).
    """
    words = Words([], [], [])
    for start, end in split_sentences(fragment):
        sentence = fragment[start:end]
        lowered = sentence.lower()
        back = _way_back(sentence, lowered)
        position, first = 0, len(words.tokens)
        for token in filter(is_word, split_words(lowered)):
            # searched from the end of the previous word, because the tokenizer gives no places
            position = lowered.index(token, position)
            stop = position + len(token)
            words.tokens.append(token)
            words.places.append((start + position, start + stop))
            words.original.append((start + back[position], start + back[stop - 1] + 1))
            position = stop
        for places in (words.places, words.original):
            if len(places) > first:
                places[first] = (start, places[first][1])
            if places:
                places[-1] = (places[-1][0], end)
    return words


class Prepared:
    """A cache of prepared texts and fragments, which drops the least recently used ones.

    settings: the detector's settings, on which the prepared texts depend.
    capacity: number of texts kept, and of fragments; each takes about 10 kB per 100 words.
    """

    def __init__(self, settings: AlignmentSettings, capacity: int = 4096):
        self.settings = settings
        self._texts = _Recent(lambda text: prepare(text, settings), capacity)
        self._fragments = _Recent(words_of, capacity)

    def text(self, text: str) -> PreparedText:
        return self._texts.get(text)

    def words(self, fragment: str) -> Words:
        return self._fragments.get(fragment)


class _Recent:
    def __init__(self, make: Callable, capacity: int):
        self._make, self._capacity, self._known = make, capacity, OrderedDict()

    def get(self, key: str):
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        value = self._known[key] = self._make(key)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return value


def _bag(sentence: str, stem_stop_words: bool) -> Bag:
    bag: Bag = {}
    for token in split_words(sentence.lower()):
        if counted(token):
            # quirk Q4: the setting named "remove stop words" does not remove any; it only leaves them unstemmed
            key = stem(token) if stem_stop_words or token not in stop_words() else token
            bag[key] = bag.get(key, 0) + 1
    return bag


def _words(unit: Unit) -> int:
    return sum(unit.bag.values())


def _merge_short(units: list[Unit], frequency: Bag, min_words: int) -> list[Unit]:
    """Merge every short unit into the next one; the last is never merged backwards (quirk Q2)."""
    merged: list[Unit] = []
    pending: Unit | None = None
    for unit in units:
        # a merged unit may still be short and is then merged into the next one
        unit = unit if pending is None else _joined(pending, unit, frequency)
        pending = unit if _words(unit) < min_words else None
        if pending is None:
            merged.append(unit)
    return merged if pending is None else [*merged, pending]


def _joined(short: Unit, unit: Unit, frequency: Bag) -> Unit:
    bag = dict(unit.bag)  # the later unit's stems keep their order and come first
    for key, count in short.bag.items():
        if key in bag:
            frequency[key] -= 1  # quirk Q2c: the number of sentences with this stem falls by one
        bag[key] = bag.get(key, 0) + count
    # quirk Q2b: the characters between the two are not counted, so the unit ends too early
    return Unit(short.start, short.length + unit.length, bag)


def _way_back(sentence: str, lowered: str):
    """For each character of `lowered`, the index of its character in `sentence`."""
    if len(sentence) == len(lowered):
        return range(len(sentence))  # nearly always; a list would take a step per character
    return [i for i, character in enumerate(sentence) for _ in character.lower()]
