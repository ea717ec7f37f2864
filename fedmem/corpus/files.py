"""Reads rows of text files without conversion: JSON Lines, CSV, Parquet, and the original PubMed RCT files.

Every reader yields (place, row), where a row is a mapping of the file's own columns and place names file and line for
messages. Nothing is converted, guessed or left out; fields may have any length. This module handles formats and
encodings; it does not depend on the schema (see `fedmem.corpus.columns`).
"""

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fedmem.corpus.columns import CorpusError, Record, shown_names


def files_of(path: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Return the files of a corpus: the file `path`, the files of the folder `path` sorted by name, or the given list.

    Raises CorpusError when path is empty, when a file is missing or has a suffix not in READERS, or when a list
    contains a folder.
    """
    kinds = ", ".join(READERS)
    if not path:
        raise CorpusError(f"corpus_path: got nothing; expected a file ({kinds}) or a folder of them, one per client")
    if isinstance(path, str | Path):
        place = Path(path).expanduser()
        if not place.exists():
            raise CorpusError(f"{path}: does not exist; corpus_path must name a file ({kinds}) or a folder of them")
        # sorted, because the order of a folder's listing differs between file systems
        files = [place] if place.is_file() else sorted(f for f in place.iterdir() if not f.name.startswith("."))
        if not files:
            raise CorpusError(f"{path}: is a folder without files; expected files of {kinds}")
    else:
        files = [Path(file).expanduser() for file in path]
    for file in files:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "does not exist"
            raise CorpusError(f"{file}: {what}; expected a file of {kinds}")
        if file.suffix.lower() not in READERS:
            raise CorpusError(f"{file}: {file.suffix or 'no'} suffix; expected one of {kinds}")
    return files


def names_of(files: Sequence[Path]) -> list[str]:
    """Return a distinct name for each of several files: its name without suffix, or folder and name if needed.

    Raises CorpusError when two files still have the same name.
    """
    places = [file.resolve() for file in files]
    for names in ([place.stem for place in places], [f"{place.parent.name}-{place.stem}" for place in places]):
        if not (twice := _repeated(names)):
            return names
    raise CorpusError(
        f"two files are both called {twice[0]!r}, even with their folders' names: rename one, or give each once"
    )


def _repeated(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, in the order of their first occurrence."""
    return [name for name, count in Counter(names).items() if count > 1]


def read(file: Path, encoding: str = "utf-8") -> Iterator[Record]:
    """Yield (place, row) for each row of a file with a suffix in READERS.

    Raises CorpusError, with file and line, when a row cannot be read or decoded.
    """
    try:
        yield from READERS[file.suffix.lower()](file, encoding)
    except UnicodeError:
        raise CorpusError(_undecodable(file, encoding)) from None


def _json_lines(file: Path, encoding: str) -> Iterator[Record]:
    """Yield one JSON value per line; lines of white space are skipped."""
    # newline: JSON Lines ends a line with a line feed only, while Python would also split at a lone \r
    with _opened(file, encoding, newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{file}, line {number}"
                yield place, _value(line, place)


def _value(text: str, place: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, place))
    except CorpusError:
        raise
    except (ValueError, RecursionError) as error:  # deep nesting exceeds the parser's recursion
        # only the parser's own words: the line itself is private text
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "unreadable"
        raise CorpusError(f"{place}: not JSON ({reason}); each line must hold one JSON object") from None


def _object(pairs: list[tuple[str, object]], place: str) -> dict[str, object]:
    # dict() keeps the last of two equal keys, silently
    for repeated in _repeated(name for name, _ in pairs):
        raise CorpusError(f"{place}: key {shown_names([repeated])} appears more than once; keep one of them")
    return dict(pairs)


def _csv(file: Path, encoding: str, delimiter: str = ",") -> Iterator[Record]:
    """Yield rows below a header; every cell is a string, so that "NA" and "null" remain text."""
    # newline="": csv finds line ends itself, because a quoted cell may contain some
    with _opened(file, encoding, newline="") as text, _any_length():
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            for twice in _repeated(header):
                raise CorpusError(f"{file}, line 1: column {shown_names([twice])} appears more than once; rename one")
            # a row with line feeds in its cells spans several lines: its place is the first of them
            line = reader.line_num + 1
            for cells in reader:
                place, line = f"{file}, line {line}", reader.line_num + 1
                if cells and len(cells) != len(header):
                    raise CorpusError(f"{place}: has {len(cells)} cells, but the header has {len(header)} columns")
                if cells:
                    yield place, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise CorpusError(f"{file}, line {reader.line_num}: not CSV ({error}); correct the quotes there") from None


@contextmanager
def _any_length() -> Iterator[None]:
    """Lift csv's limit of 131,072 characters per cell, and restore it afterwards: it is global to the process."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _parquet(file: Path, encoding: str) -> Iterator[Record]:
    import pyarrow  # here, because only Parquet files need it
    import pyarrow.parquet

    try:
        content = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{file}: not Parquet ({error})") from None
    number = 0
    # in batches: a whole table of Python objects takes several times the file's memory
    for batch in content.iter_batches(batch_size=10_000):
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


def rct_records(file: Path, encoding: str = "utf-8") -> Iterator[Record]:
    """Yield (place, row) for the sentences of an original PubMed RCT file: abstract_id, label, text, sentence_id.

    An abstract begins with a line `###<id>`, followed by lines of LABEL, tab, sentence, and ends with an empty line
    (Dernoncourt and Lee 2017, "PubMed 200k RCT"). Raises CorpusError when a line has another form.
    """
    abstract, sentence = None, 0
    with _opened(file, encoding, newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            place, line = f"{file}, line {number}", line.rstrip("\r\n")
            label, tab, text = line.partition("\t")
            if line.startswith("###"):
                abstract, sentence = line[3:].strip(), 0
            elif tab and abstract:
                yield place, {"abstract_id": abstract, "label": label, "text": text, "sentence_id": sentence}
                sentence += 1
            elif line.strip():
                raise CorpusError(f"{place}: neither ###<abstract id> nor LABEL<tab>sentence below one")


READERS = {
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
    ".txt": rct_records,
}


def _opened(file: Path, encoding: str, newline: str):
    # utf-8-sig drops a byte order mark, which would become part of the first column's name
    return file.open(encoding="utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding, newline=newline)


def _undecodable(file: Path, encoding: str) -> str:
    """Describe where a file cannot be decoded, and what to do."""
    # the whole file is read again: the error of a stream counts bytes from the start of its current block
    try:
        file.read_bytes().decode(encoding)
    except UnicodeDecodeError as error:
        data, begin = error.object, error.start
        line = data.count(b"\n", 0, begin) + 1
        position = begin - data.rfind(b"\n", 0, begin)
        where = f", line {line}: not {encoding.upper()} (byte 0x{data[begin]:02x} at position {position} of the line)"
    except UnicodeError as error:
        where = f": not {encoding.upper()} ({error})"
    else:
        where = f": not {encoding.upper()}"
    return f"{file}{where}; save the file as UTF-8, or name its encoding in corpus_encoding (for example cp1252)"
