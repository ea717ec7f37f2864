"""The texts that a study is about, in one schema, wherever they come from.

Whatever the source, every row passes the same gate: five keys of declared types, a text to measure, an id of its own.
A row that fails is an error that names its place. This module knows the sources; it does not know clients, splits,
tokens, nor what the texts say.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedmem import hub as hub_sets
from fedmem.columns import SCHEMA, Column, CorpusError, Record, checked, exact_columns, mapped, parsed_columns
from fedmem.files import files_of, names_of, read
from fedmem.hub import HubSource
from fedmem.synthetic import make_corpus

__all__ = ["SCHEMA", "CorpusError", "HubSource", "load_corpus"]

Files = str | Path | Sequence[str | Path] | None


def load_corpus(
    corpus: str,
    task: str,
    path: Files = None,
    n_groups: int | None = None,
    rows_per_group: int | None = None,
    seed: int = 0,
    repeated_sentences: float = 0.0,
    column_map: Mapping[str, str | None] | None = None,
    encoding: str = "utf-8",
    hub: Mapping[str, object] | None = None,
    repeated_texts: float = 0.0,
    input_words: int = 60,
) -> pd.DataFrame:
    """Return a corpus as a frame of the columns of SCHEMA, all strings, in the order of the source.

    `corpus` is one of
    - synthetic: made by `fedmem.synthetic.make_corpus` from `task`, `n_groups`, `rows_per_group`, `seed`,
      `repeated_sentences`, `repeated_texts` and `input_words`;
    - file: JSON Lines, CSV, TSV or Parquet at `path`, or a folder or list of such files, one a client: then a row's
      group is its file's name (`fedmem.files.names_of`), which also precedes its id. `column_map` ({key of SCHEMA: the
      file's column, or None}) names columns that are called otherwise; `encoding` is that of text files (a byte order
      mark of UTF-8 is accepted);
    - hub: the data set `hub` (the fields of `fedmem.hub.HubSource`), or files at `path` in its layout; `column_map` is
      a table as `parsed_columns` explains, `seed` draws `hub["rows"]` rows.
      Rows whose input is empty are left out and listed in the frame's attrs["empty"].

    Texts stay as they are, white space and line breaks included. A null instruction, output or group becomes an empty
    text; other columns are not read. Raises CorpusError, with file and line, for whatever does not fit.
    """
    if corpus == "synthetic":
        try:
            made = make_corpus(task, n_groups, rows_per_group, seed, repeated_sentences, repeated_texts, input_words)
        except ValueError as error:
            raise CorpusError(f"synthetic corpus: {error}") from error
        return _gate((f"synthetic corpus, row {n}", row) for n, row in enumerate(made.to_dict("records"), 1))
    if corpus == "file":
        columns = exact_columns(column_map or {})
        return _gate(_file_rows(path, columns, encoding), columns, source=_source(path))
    if corpus == "hub":
        if hub is None:
            raise CorpusError("corpus 'hub' needs hub_dataset and hub_columns; params/tasks/*.yaml have them")
        columns, empty = parsed_columns(column_map or {}), []
        source = HubSource(**hub)
        rows = mapped(hub_sets.records(source, columns, path and str(path), seed), columns, "hub_columns")
        frame = _gate(_not_empty(rows, empty), columns, source=str(path or source))
        frame.attrs["empty"] = empty
        return frame
    raise CorpusError(f"corpus {corpus!r}: allowed are 'synthetic', 'file' and 'hub'")


def _source(path: Files) -> str:
    return ", ".join(map(str, path)) if isinstance(path, list | tuple) else str(path)


def _file_rows(path: Files, columns: Mapping[str, Column | None], encoding: str) -> Iterator[Record]:
    files = files_of(path)
    if isinstance(path, str | Path) and files == [Path(path).expanduser()]:
        yield from mapped(read(files[0], encoding), columns, "column_map")
        return
    for file, name in zip(files, names_of(files), strict=True):
        empty = True
        for place, row in mapped(read(file, encoding), {**columns, "group": Column(text=name)}, "column_map"):
            empty = False
            yield place, {**row, "id": f"{name}/{row['id']}" if row["id"] else row["id"]}
        if empty:
            raise CorpusError(f"{file}: holds no rows, and it is one client's file: fill it or leave it out")


def _not_empty(records: Iterable[Record], empty: list[str]) -> Iterator[Record]:
    for place, row in records:
        if row["input"] is None or (isinstance(row["input"], str) and not row["input"].strip()):
            empty.append(place)
        else:
            yield place, row


def _gate(
    records: Iterable[Record], columns: Mapping[str, Column | None] | None = None, source: str = "corpus"
) -> pd.DataFrame:
    """Return checked records as a frame; raises CorpusError at the first that does not fit, or if there is none."""
    places: dict[str, str] = {}
    values: dict[str, list[str]] = {key: [] for key in SCHEMA}
    for place, record in records:
        row = checked(record, place, columns or {})
        if row["id"] in places:
            raise CorpusError(f"{place}: id {row['id']!r} was used before, at {places[row['id']]}; ids must be unique")
        places[row["id"]] = place
        for key, value in row.items():
            values[key].append(value)
    if not places:
        raise CorpusError(f"{source}: holds no rows; expected rows with {', '.join(SCHEMA)}")
    return pd.DataFrame(values, dtype="str")
