"""The texts that a study is about, in one schema, wherever they come from.

Whatever the source, every row passes the same gate: five keys of declared types, a text to measure, an id of its own.
A row that fails is an error that names its place; none is dropped. This module knows the sources and the schema; it
does not know clients, splits, tokens, nor what the texts say.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from fedmem.synthetic import make_corpus

__all__ = ["SCHEMA", "CorpusError", "load_corpus"]

SCHEMA = {
    "id": "names the row; unique in the corpus",
    "instruction": "the question or the task in words; may be empty",
    "input": "the private text that is measured; never empty",
    "output": "the answer, title, label or note; may be empty",
    "group": "a natural attribute (topic, speciality, category) that clients can be made of; empty where there is none",
}
NEVER_EMPTY = ("id", "input")
Record = tuple[str, object]  # (the place, for messages, and what was found there)


class CorpusError(ValueError):
    """A corpus that cannot be read as it stands; the message says where, what was found and what is allowed."""


def load_corpus(
    corpus: str,
    task: str,
    path: str | Path | None = None,
    n_groups: int | None = None,
    rows_per_group: int | None = None,
    seed: int = 0,
    repeated_sentences: float = 0.0,
) -> pd.DataFrame:
    """Return a corpus as a frame of the columns of SCHEMA, all strings, in the order of the source.

    `corpus` is synthetic (made by `fedmem.synthetic.make_corpus` from `task` and the last four arguments) or file (JSON
    Lines at `path`, one object a line; `task` and the last four change nothing). Texts stay as they are, white space
    and line breaks included. A null instruction, output or group becomes an empty text; keys beyond the schema are not
    read; lines of white space hold no row.

    Raises CorpusError, with file and line, for a file that is missing, empty or not UTF-8 (a byte order mark is
    accepted), a line that is not a JSON object, a missing or repeated key, a value that is not a string, an empty or
    null id or input, and an id that came before.
    """
    if corpus == "synthetic":
        try:
            made = make_corpus(task, n_groups, rows_per_group, seed, repeated_sentences=repeated_sentences)
        except ValueError as error:
            raise CorpusError(f"synthetic corpus: {error}") from error
        return _gate((f"synthetic corpus, row {n}", row) for n, row in enumerate(made.to_dict("records"), 1))
    if corpus == "file":
        return _gate(_json_lines(_existing(path)), source=str(path))
    raise CorpusError(f"corpus {corpus!r}: allowed are 'synthetic' and 'file'")


def _existing(path: str | Path | None) -> Path:
    if not path:
        raise CorpusError("corpus 'file' needs corpus_path, the path of a JSON Lines file")
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise CorpusError(f"{path}: {what}; corpus_path must name a JSON Lines file (one object a line)")
    return file


def _json_lines(file: Path) -> Iterator[Record]:
    """Yield (place, value) for each line of a JSON Lines file; only a line feed ends a line, as JSON Lines has it."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{file}, line {number}"
            text = _text(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, place)
            if text.strip():
                yield place, _value(text, place)


def _text(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{place}: not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1} of the line); "
            "save the file as UTF-8"
        ) from None


def _value(text: str, place: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, place))
    except CorpusError:
        raise
    except (ValueError, RecursionError) as error:
        # only the parser's own words: the line itself is private text
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "unreadable"
        raise CorpusError(f"{place}: not JSON ({reason}); each line must hold one JSON object") from None


def _object(pairs: list[tuple[str, object]], place: str) -> dict[str, object]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1 and name in SCHEMA})
    if repeated:
        raise CorpusError(f"{place}: key {repeated[0]!r} stands there more than once; which value is meant?")
    return dict(pairs)


def _gate(records: Iterable[Record], source: str = "corpus") -> pd.DataFrame:
    """Return checked records as a frame; raises CorpusError at the first that does not fit, or if there is none."""
    places: dict[str, str] = {}
    rows = []
    for place, record in records:
        row = _row(record, place)
        if row["id"] in places:
            raise CorpusError(f"{place}: id {row['id']!r} was used before, at {places[row['id']]}; ids must be unique")
        places[row["id"]] = place
        rows.append(row)
    if not rows:
        raise CorpusError(f"{source}: holds no rows; expected one JSON object a line with {', '.join(SCHEMA)}")
    return pd.DataFrame(rows, columns=list(SCHEMA), dtype="str")


def _row(record: object, place: str) -> dict[str, str]:
    if not isinstance(record, dict):
        raise CorpusError(f"{place}: holds {_kind(record)}, not an object with the keys {', '.join(SCHEMA)}")
    missing = [name for name in SCHEMA if name not in record]
    if missing:
        raise CorpusError(
            f"{place}: no key {missing[0]!r}; found {', '.join(map(repr, record)) or 'none'}, "
            f"expected {', '.join(SCHEMA)}"
        )
    return {name: _string(record[name], name, place) for name in SCHEMA}


def _string(value: object, name: str, place: str) -> str:
    value = "" if value is None and name not in NEVER_EMPTY else value
    if not isinstance(value, str):
        raise CorpusError(f"{place}: {name!r} is {_kind(value)}; expected a string ({SCHEMA[name]})")
    if name in NEVER_EMPTY and not value.strip():
        raise CorpusError(f"{place}: {name!r} is empty; expected a string ({SCHEMA[name]})")
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise CorpusError(f"{place}: {name!r} holds half a surrogate pair, which is no character; mend the text")
    return value


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
