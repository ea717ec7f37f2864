"""Mapping from a source's own columns to the schema: what a row must hold, and which columns fill it.

A table of columns maps each key of the schema to the column that holds its value in the source. This module handles
keys, values and the rules that transform values; files, hubs and clients are handled elsewhere. All errors name the
place of the row.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from fedmem.config.vocabulary import SCHEMA
from fedmem.config.yaml_files import read
from fedmem.machine.paths import data_file

NEVER_EMPTY = ("id", "input")
Record = tuple[str, object]  # (the place, for messages, and what was found there)
MISSING = object()  # unlike None, which is a value (null) that a row may hold


class CorpusError(ValueError):
    """A corpus that cannot be read; the message says where, what was found and what is expected."""


@dataclass(frozen=True)
class Column:
    """Where the value of one key of the schema comes from.

    parts: one tuple of column names per part; in a part the first name that exists counts, and several parts are joined
    by "-". rule: a name in RULES, applied to the value. text: a fixed value for every row; parts and rule do not count.
    """

    parts: tuple[tuple[str, ...], ...] = ()
    rule: str | None = None
    text: str | None = None
    nested: bool = field(default=False, kw_only=True)  # whether "a.b" may mean b inside a

    def __str__(self) -> str:
        return " + ".join(" or ".join(names) for names in self.parts)

    def value(self, row: Mapping[str, object]) -> object:
        """Return the value in a row, after the rule; MISSING when the row has none of the names."""
        if self.text is not None:
            return self.text
        found = [self._first(row, names) for names in self.parts]
        if any(value is MISSING for value in found):
            return MISSING
        # a joined id with a null part would be "None-3", which looks valid
        if len(found) > 1 and None in found:
            return None
        whole = found[0] if len(found) == 1 else "-".join(map(str, found))
        return RULES[self.rule](whole) if self.rule and whole is not None else whole

    def _first(self, row: Mapping[str, object], names: tuple[str, ...]) -> object:
        for name in names:
            if name in row:  # first: a column's own name may contain a dot
                return row[name]
            outer, dot, inner = name.partition(".")
            if self.nested and dot and isinstance(row.get(outer), Mapping) and inner in row[outer]:
                return row[outer][inner]
        return MISSING


def exact_columns(column_map: Mapping[str, str | None]) -> dict[str, Column | None]:
    """Return the table of a file: each key of SCHEMA with the column in `column_map`, by default the key's own name.

    column_map: {key of SCHEMA: the file's column}. Names are taken literally, without the syntax of `parsed_columns`.
    None: the file has no such column (ids are then numbers, other values empty).
    """
    names = {key: column_map.get(key, key) for key in SCHEMA}
    return {key: None if name is None else Column(((name,),)) for key, name in names.items()}


def parsed_columns(table: Mapping[str, str | None]) -> dict[str, Column | None]:
    """Return the table of a hub data set, from one string per key, in the syntax of params/tasks/*.yaml.

    `abstract`: a column; `context.contexts`: a field inside a column; `label or labels`: the first that exists;
    `abstract_id + sentence_id`: both, joined by "-"; `title | unwrap`: with a rule of RULES; `= Some words.`: these
    words in every row. A key that is left out or null has no column. Raises CorpusError for any other syntax.
    """
    return {key: _parsed(key, table[key]) if table.get(key) is not None else None for key in SCHEMA}


def _parsed(key: str, text: str) -> Column:
    if text.startswith("="):
        return Column(text=text[1:].strip())
    # "or" and "+" separate names only between spaces, so that column names may contain them
    names, bar, rule = (part.strip() for part in text.partition("|"))
    parts = tuple(
        tuple(name.strip() for name in re.split(r"(?:^|\s)or(?:\s|$)", part))
        for part in re.split(r"(?:^|\s)\+(?:\s|$)", names)
    )
    if not all(name for part in parts for name in part) or (bar and rule not in RULES):
        raise CorpusError(
            f"hub_columns: {key}: got {text!r}; expected 'column', 'column.field', 'one or other', 'one + other', "
            f"each with '| RULE' where RULE is one of {', '.join(RULES)}, or '= fixed words'"
        )
    return Column(parts, rule or None, nested=True)


def mapped(records: Iterable[Record], columns: Mapping[str, Column | None], parameter: str) -> Iterator[Record]:
    """Yield (place, row of the schema) for each record.

    records: (place, row of the source), in order. columns: {key of SCHEMA: its Column, or None for no column}.
    parameter: name of the parameter that sets the table, for messages.

    A key that a row lacks is null in that row. Raises CorpusError, with the found and the expected columns, at the
    first row without id or input, and after the last row when no row has one of the columns.
    """
    # optional keys may be absent from some rows (JSON Lines), so only the end shows that a column never occurs
    unseen = {key: column for key, column in columns.items() if column is not None}
    found: dict[str, None] = {}
    place = ""
    for number, (place, row) in enumerate(records, 1):
        if not isinstance(row, Mapping):
            raise CorpusError(f"{place}: holds {kind_of_value(row)}, not an object with the keys {', '.join(SCHEMA)}")
        values = {key: None if column is None else column.value(row) for key, column in columns.items()}
        if unseen:
            found.update(dict.fromkeys(row))  # a dict, not a set: messages list the columns in file order
            unseen = {key: column for key, column in unseen.items() if values[key] is MISSING}
        for key in NEVER_EMPTY:
            if values[key] is MISSING:
                raise CorpusError(f"{place}: {_absent(key, columns, row, parameter)}")
        if columns["id"] is None:
            values["id"] = str(number)
        yield place, {key: None if value is MISSING else value for key, value in values.items()}
    for key in unseen if place else ():
        raise CorpusError(f"{place.rpartition(', ')[0]}: {_absent(key, columns, found, parameter)}")


def require(columns: Mapping[str, Column | None], found: Iterable[str], where: str, parameter: str) -> None:
    """Raise CorpusError, with the found and the expected columns, when a column of the table does not exist.

    columns: {key of SCHEMA: its Column, or None}. found: names of the source's columns. where: the source, for the
    message. parameter: name of the parameter that sets the table, for the message.
    """
    for key, column in columns.items():
        for names in column.parts if column is not None else ():
            if not any(name in found or name.split(".")[0] in found for name in names):
                raise CorpusError(f"{where}: {_absent(key, columns, found, parameter)}")


def shown_names(found: Iterable[str]) -> str:
    """Return column names as a message may show them, or only their number when they look like text."""
    # a file without a header has private texts in place of names, and messages must not repeat them
    names = [str(name) for name in found]
    if all(re.fullmatch(r"[^\W\d][\w.-]{0,39}", name) for name in names):
        return ", ".join(map(repr, names)) or "none"
    return f"{len(names)} columns whose names read like text and are not shown (a header? this delimiter?)"


def _absent(key: str, columns: Mapping[str, Column | None], found: Iterable[str], parameter: str) -> str:
    expected = ", ".join(repr(str(column)) for column in columns.values() if column is not None and column.parts)
    return (
        f"no column {str(columns[key])!r} for {key!r}; found {shown_names(found)}, "
        f"expected {expected}; set in {parameter} which column holds what (null: no such column)"
    )


def checked(row: Mapping[str, object], place: str, columns: Mapping[str, Column | None]) -> dict[str, str]:
    """Return a mapped row with all values as strings.

    row: a row from `mapped`. place: where it comes from, for messages. columns: {key: its Column}, for messages.
    A null instruction, output or group becomes an empty string, and a whole number as id its digits; nothing else is
    converted. Raises CorpusError, with place, key and column, for any other value, and for an empty id or input.
    """
    return {key: _string(row[key], key, place, columns.get(key)) for key in SCHEMA}


def _string(value: object, key: str, place: str, column: Column | None) -> str:
    if value is None and key not in NEVER_EMPTY:
        return ""
    if key == "id" and isinstance(value, int) and not isinstance(value, bool):  # a bool is an int in Python
        return str(value)
    own = str(column) if column is not None and column.parts else key
    name = repr(key) if own == key else f"{key!r} (column {own!r})"
    if not isinstance(value, str):
        raise CorpusError(f"{place}: {name} is {kind_of_value(value)}; expected a string ({SCHEMA[key]})")
    if key in NEVER_EMPTY and not value.strip():
        raise CorpusError(f"{place}: {name} is empty; expected a string ({SCHEMA[key]})")
    try:
        value.encode()  # here rather than in the tokenizer or the Parquet writer, where the row is no longer known
    except UnicodeEncodeError:
        raise CorpusError(
            f"{place}: {name} holds half a surrogate pair, which is not a character; correct the text"
        ) from None
    return value


def kind_of_value(value: object) -> str:
    """Describe the type of a value for a message, without repeating its (private) content."""
    names = {type(None): "null", bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return names.get(type(value), f"a {type(value).__name__}")


# --- rules that a column of a hub data set may use ----------------------------------------------------------------


def _join(value: object) -> object:
    """Join a list of strings with spaces."""
    return " ".join(value) if isinstance(value, list) and all(isinstance(part, str) for part in value) else value


def _unwrap(value: object) -> object:
    """Remove the line breaks of a text that was wrapped into short lines."""
    return " ".join(value.split()) if isinstance(value, str) else value


def _first_word(value: object) -> object:
    """Return the first word of a string, or of a list's first string: the primary category of an arXiv paper."""
    words = _join(value)
    return next(iter(words.split()), "") if isinstance(words, str) else words


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _mesh_topic(value: object) -> object:
    """Return the topic (data/mesh_topics.yaml) of most MeSH terms; the first of equals; "other" if none fits."""
    if not isinstance(value, list):
        return value  # not an error here: `checked` reports it with its place, as for every rule
    terms = [str(term).lower().replace(" ", "-") for term in value]
    hits = {topic: sum(any(stem in term for stem in stems) for term in terms) for topic, stems in _topics().items()}
    best = max(hits, key=hits.__getitem__)
    return best if hits[best] else "other"


@cache
def _topics() -> dict[str, list[str]]:
    return {topic: stems.split() for topic, stems in read(data_file("mesh_topics.yaml")).items()}


RULES = {"join": _join, "unwrap": _unwrap, "first_word": _first_word, "lower": _lower, "mesh_topic": _mesh_topic}
