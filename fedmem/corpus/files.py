"""Rows of text files as they stand: JSON Lines, CSV, Parquet, and the original PubMed RCT files.

Every reader yields (place, row), a row being a mapping of the file's own columns; nothing is converted, guessed or left
out, fields may be of any length. This module knows formats and encodings; it does not know the schema.
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedmem.corpus.columns import CorpusError, Record, shown_names


def files_of(path: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Return the corpus's files: the one at `path`, those of the folder, sorted by name, or those of a list as it is.

    Raises CorpusError for what is not there or of another suffix, and for a folder in a list.
    """
    kinds = ", ".join(READERS)
    if not path:
        raise CorpusError(f"corpus_path: got nothing; allowed is a file ({kinds}) or a folder of them, one a client")
    if isinstance(path, str | Path):
        place = Path(path).expanduser()
        if not place.exists():
            raise CorpusError(f"{path}: does not exist; corpus_path must name a file ({kinds}) or a folder of them")
        files = [place] if place.is_file() else sorted(f for f in place.iterdir() if not f.name.startswith("."))
        if not files:
            raise CorpusError(f"{path}: is a folder without files; allowed are files of {kinds}")
    else:
        files = [Path(file).expanduser() for file in path]
    for file in files:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "does not exist"
            raise CorpusError(f"{file}: {what}; allowed are files of {kinds}")
        if file.suffix.lower() not in READERS:
            raise CorpusError(f"{file}: {file.suffix or 'no'} suffix; allowed are {kinds}")
    return files


def names_of(files: Sequence[Path]) -> list[str]:
    """Return a name for each of several files: without folder and suffix, or with its folder's name to tell them apart.

    Raises CorpusError when that is not enough.
    """
    places = [file.resolve() for file in files]
    for names in ([place.stem for place in places], [f"{place.parent.name}-{place.stem}" for place in places]):
        if len(set(names)) == len(names):
            return names
    twice = next(name for name in names if names.count(name) > 1)
    raise CorpusError(
        f"two files are both called {twice!r}, by their folders' names too: rename one, or give each once"
    )


def read(file: Path, encoding: str = "utf-8") -> Iterator[Record]:
    """Yield (place, row) for each row of a file of a suffix in READERS. Raises CorpusError with file and line."""
    try:
        yield from READERS[file.suffix.lower()](file, encoding)
    except UnicodeError:
        raise CorpusError(_undecodable(file, encoding)) from None


def _json_lines(file: Path, encoding: str) -> Iterator[Record]:
    """One object a line; only a line feed ends a line, as JSON Lines has it; lines of white space hold no row."""
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
    except (ValueError, RecursionError) as error:
        # only the parser's own words: the line itself is private text
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "unreadable"
        raise CorpusError(f"{place}: not JSON ({reason}); each line must hold one JSON object") from None


def _object(pairs: list[tuple[str, object]], place: str) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise CorpusError(f"{place}: key {shown_names([repeated])} stands there more than once; which is meant?")
    return row


def _csv(file: Path, encoding: str, delimiter: str = ",") -> Iterator[Record]:
    """A header, then as many cells a row; every cell is a text, so that NA and null stay what they are."""
    with _opened(file, encoding, newline="") as text, _any_length():
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise CorpusError(
                    f"{file}, line 1: column {shown_names([twice])} stands there more than once; rename one"
                )
            line = reader.line_num + 1
            for cells in reader:
                place, line = f"{file}, line {line}", reader.line_num + 1
                if cells and len(cells) != len(header):
                    raise CorpusError(f"{place}: has {len(cells)} cells, but the header has {len(header)} columns")
                if cells:
                    yield place, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise CorpusError(f"{file}, line {reader.line_num}: not CSV ({error}); mend the quotes there") from None


def _tsv(file: Path, encoding: str) -> Iterator[Record]:
    return _csv(file, encoding, delimiter="\t")


@contextmanager
def _any_length() -> Iterator[None]:
    """Python's csv refuses cells of more than 131,072 characters, by a limit of the whole process: put back after."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _parquet(file: Path, encoding: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        content = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{file}: not Parquet ({error})") from None
    number = 0
    for batch in content.iter_batches(batch_size=10_000):
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


def rct_records(file: Path, encoding: str = "utf-8") -> Iterator[Record]:
    """Yield the sentences of an original PubMed RCT file: abstract_id, label, text, sentence_id.

    An abstract opens with `###<id>`; its lines are LABEL, tab, sentence, and an empty line ends it (Dernoncourt and Lee
    2017, "PubMed 200k RCT").
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


def _rct(file: Path, encoding: str) -> Iterator[Record]:
    return rct_records(file, encoding)


READERS = {
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
    ".txt": _rct,
}


def _opened(file: Path, encoding: str, newline: str):
    """A byte order mark of UTF-8 is no part of the text."""
    return file.open(encoding="utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding, newline=newline)


def _undecodable(file: Path, encoding: str) -> str:
    """Where a file leaves its encoding; read once more, because a decoder of a stream counts from its own block."""
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
