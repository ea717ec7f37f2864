"""Texts without what may not leave a machine: passages of private rows, row ids, absolute paths.

A passage is a run of at least 40 characters that also stands in some row's input or output; shorter ones are ordinary
language. This module knows strings and rows; it does not know where the strings come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import unescape

MASK = "█████"
PASSAGE_CHARS = 40
_BLOCK = PASSAGE_CHARS // 2  # any 40 characters hold a whole one of the blocks that lie 20 apart in the row
LEAST_ID_CHARS = 4  # a shorter id is found only in the forms that fedmem gives it (p0-7, s0-7)
# two names at least, and not the end of a tag, a fraction, a URL or an Arrow of types
_PATH = re.compile(r"(?<![\w.:/<&~)\]}])(?:~|[A-Za-z]:)?[/\\](?:[\w.@+~-]+[/\\])+[\w.@+~-]*")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SPACE = re.compile(r"(?:\s|\\n|\\t|\\r)+")  # as it stands, and as repr writes it
_TOKEN = re.compile(r"[^\s\"'`,;()\[\]{}<>=|]+")


class Scrubber:
    """Takes out of strings what belongs to rows: `rows` is the partition table (row_id, input, output, instruction)."""

    def __init__(self, ids: Iterable[str], texts: Iterable[str], home: Iterable[str] = ()):
        """ids: row ids. texts: what no 40 characters may remain of. home: folders whose paths are taken out as well."""
        self._ids = {str(one) for one in ids}
        self._odd = [one for one in self._ids if len(one) >= LEAST_ID_CHARS and not _TOKEN.fullmatch(one)]
        self._home = sorted((str(place) for place in home if len(str(place)) > 1), key=len, reverse=True)
        self._texts = [folded for text in texts if len(folded := _fold(text)) >= PASSAGE_CHARS]
        self._blocks: dict[str, list[tuple[int, int]]] = {}
        for number, text in enumerate(self._texts):
            for start in range(0, len(text) - _BLOCK + 1, _BLOCK):
                places = self._blocks.setdefault(text[start : start + _BLOCK], [])
                if len(places) < 50:  # boilerplate: its first places suffice to find it
                    places.append((number, start))

    def holds_passage(self, text: str) -> bool:
        """Whether 40 characters of some row stand in the text: as it is, unescaped, without terminal colours."""
        plain = _ANSI.sub("", text)
        return any(self._found(_fold(form)) for form in {plain, unescape(plain), _untagged(plain)})

    def names(self, text: str) -> str:
        """The text without row ids and absolute paths, which become blocks and the path's last name."""
        text = _PATH.sub(lambda match: "…/" + re.split(r"[/\\]", match.group().rstrip("/\\"))[-1], text)
        for place in self._home:  # one of a single name, or with odd characters
            text = text.replace(place, "…")
        for one in self._odd:
            text = text.replace(one, MASK)
        return _TOKEN.sub(lambda match: self._without_id(match.group()), text)

    def plain(self, text: str) -> str:
        """The text without terminal colours, ids and paths, its lines that hold a passage left out."""
        text = self.names(_ANSI.sub("", text))
        if not self.holds_passage(text):
            return text
        kept = [MASK if self.holds_passage(line) else line for line in text.split("\n")]
        joined = "\n".join(kept)
        return MASK if self.holds_passage(joined) else joined

    def _without_id(self, token: str) -> str:
        bare = token.strip(".:!?…")
        if bare in self._ids and (len(bare) >= LEAST_ID_CHARS):
            return token.replace(bare, MASK)
        probe = re.fullmatch(r"([ps]\d+-)(.+)", bare)  # the generate stage's names of prefixes and suffixes
        return token.replace(bare, probe.group(1) + MASK) if probe and probe.group(2) in self._ids else token

    def _found(self, text: str) -> bool:
        for start in range(len(text) - _BLOCK + 1):
            for number, place in self._blocks.get(text[start : start + _BLOCK], ()):
                if _common(self._texts[number], place, text, start) >= PASSAGE_CHARS:
                    return True
        return False


def _common(one: str, i: int, other: str, j: int) -> int:
    """Length of the run around equal blocks at i and j."""
    left = 0
    while left < min(i, j, PASSAGE_CHARS) and one[i - left - 1] == other[j - left - 1]:
        left += 1
    right = 0
    while (
        right < PASSAGE_CHARS and i + right < len(one) and j + right < len(other) and one[i + right] == other[j + right]
    ):
        right += 1
    return left + right


def _fold(text: str) -> str:
    """With single spaces, so that no line break hides a passage."""
    return _SPACE.sub(" ", text or "")


def _untagged(text: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", text))
