"""Lucene's tokens, and the terms of a query: made here for every engine, so that all of them rank alike."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import islice

import regex

from fedmem.machine.paths import data_file

MAX_TOKEN_CHARS = 255  # UTF-16 units, Lucene's default

MAX_QUERY_TERMS = 1024  # smallest limit on clauses in Elasticsearch 8 and 9, unless an administrator lowered it

# UAX #29 for text in ASCII: letters join over . ' :, digits over . , ; ', and underscores join everything
_ASCII_RUN = r"(?:[a-z]+(?:[.':][a-z]+)*|[0-9]+(?:[.,;'][0-9]+)*)+"

_ASCII_WORD = re.compile(rf"_*{_ASCII_RUN}(?:_+{_ASCII_RUN})*_*")


def _word_pattern() -> regex.Pattern:
    """The pattern of UAX #29 tokens as Lucene's StandardTokenizer finds them: words, numbers, ideographs, emoji."""
    extend = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    letter = rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{extend}"
    hebrew = rf"\p{{WB=Hebrew_Letter}}{extend}"
    digit = rf"[\p{{WB=Numeric}}\uFF10-\uFF19]{extend}"
    # the colon and its variants are listed: Unicode 15.1 removed them from MidLetter, Lucene still has them there
    mid_letter = rf"[\p{{WB=MidLetter}}:\uFE13\uFE55\uFF1A\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{extend}"
    mid_digit = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{extend}"
    hebrew_mark = rf"(?<={hebrew})\p{{WB=Double_Quote}}{extend}(?=\p{{WB=Hebrew_Letter}})"
    letters = rf"{letter}(?:(?:{mid_letter}|{hebrew_mark})?{letter})*(?:(?<={hebrew})\p{{WB=Single_Quote}}{extend})?"
    digits = rf"{digit}(?:(?:{mid_digit})?{digit})*"
    run = rf"(?:(?:{letters}|{digits})+|(?:\p{{WB=Katakana}}{extend})+)"
    joint = rf"(?:\p{{WB=ExtendNumLet}}{extend})"
    word = rf"{joint}*{run}(?:{joint}+{run})*{joint}*"
    south_east_asian = rf"(?:\p{{LB=SA}}{extend})+"
    ideograph = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{extend}"
    keycap = r"[#*]\uFE0F?\u20E3"
    flag = rf"(?:\p{{WB=Regional_Indicator}}{extend}){{2}}"
    emoji = rf"(?![#*0-9]|\p{{WB=Regional_Indicator}})\p{{Emoji}}\p{{Emoji_Modifier}}?{extend}"
    emoji_chain = rf"{emoji}(?:(?<=\u200D){emoji})*"
    return regex.compile("|".join((word, south_east_asian, ideograph, keycap, flag, emoji_chain)))


_WORD = _word_pattern()


def tokens(text: str) -> list[str]:
    """Tokens of `text` as Lucene's StandardAnalyzer gives them: UAX #29 words, lower-cased, none dropped.

    Lower-casing is done for each code point (İ gives i, Σ gives σ). Tokens are split after 255 UTF-16 units. Any string
    is accepted; a string without words gives [].
    """
    if text.isascii():  # the short pattern gives the same tokens for ASCII and is much faster
        found = _ASCII_WORD.findall(text.lower())
        if len(text) <= MAX_TOKEN_CHARS or not found or max(map(len, found)) <= MAX_TOKEN_CHARS:
            return found
    return [_lower(token) for token in _unicode_words(text)]


def _unicode_words(text: str) -> Iterable[str]:
    position = 0
    while match := _WORD.search(text, position):
        if len(match[0].encode("utf-16-le")) > 2 * MAX_TOKEN_CHARS:
            # Lucene reads through a window of 255 units and reads the rest as if the text began there
            units = match[0].encode("utf-16-le")[: 2 * MAX_TOKEN_CHARS]
            window = len(units.decode("utf-16-le", errors="ignore"))  # without half a surrogate pair at the end
            match = _WORD.match(text, match.start(), match.start() + window)
        yield match[0]
        position = match.end()


def _lower(token: str) -> str:
    # Python's lower() differs for two letters: İ becomes two characters, and a Σ at the end of a word becomes ς
    token = token.replace("İ", "i")
    return token.lower() if "Σ" not in token else "".join(map(str.lower, token))


@cache
def stop_words() -> frozenset[str]:
    """The English stop words that the paper drops from queries (NLTK's list)."""
    return frozenset(data_file("stopwords_en.txt").read_text("utf-8").split())


def query_terms(text: str, drop_stop_words: bool = False, max_terms: int | None = MAX_QUERY_TERMS) -> dict[str, int]:
    """Distinct tokens of a query in order of first occurrence, with the number of occurrences in the whole text.

    text: the query. drop_stop_words: leave out `stop_words()`, after tokenising. max_terms: keep at most that many
    distinct tokens, the first ones; None keeps all. Every engine gets its queries from here, so all send the same ones.
    """
    terms = Counter(tokens(text))
    kept = ((term, n) for term, n in terms.items() if not (drop_stop_words and term in stop_words()))
    return dict(islice(kept, max_terms))


def strings(values: Iterable[str], name: str) -> list[str]:
    """`values` as a list; `name` is used in errors. Raises TypeError for a single string or a value of another type."""
    if isinstance(values, str):
        raise TypeError(f"{name}: got one string; give a list of strings, [text] for a single one")
    values = list(values)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise TypeError(f"{name}, row {row}: got {type(value).__name__}, not a string; drop or fill it first")
    return values
