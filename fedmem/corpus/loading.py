"""The texts of a study in one schema, wherever they come from: synthetic, files, or a data set of the hub.

Whatever the source, every row passes the same gate: five keys of declared types, a text to measure, an id of its own.
A row that fails is an error that names its place. `datasets` loads what comes from the hub: pinned revision, no code of
the data set's author, no conversion of ours. This module does not depend on clients, splits, tokens, or what the texts
say.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedmem.config.vocabulary import SCHEMA
from fedmem.corpus.columns import (
    Column,
    CorpusError,
    Record,
    checked,
    exact_columns,
    mapped,
    parsed_columns,
    require,
)
from fedmem.corpus.files import files_of, names_of, rct_records, read
from fedmem.corpus.synthetic import make_corpus

# suffix: builder of `datasets`; .txt is missing, because `rct_records` reads it
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class HubSource:
    """A data set of the hub: its id, configuration, split and revision (a commit), and the largest number of rows."""

    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    rows: int | None = None

    def __str__(self) -> str:
        parts = (self.config, self.split, self.revision and f"revision {self.revision}")
        return f"{self.dataset} ({', '.join(part for part in parts if part)})"


def records(source: HubSource, columns: dict[str, Column | None], path: str | None, seed: int) -> Iterator[Record]:
    """Yield (place, row) of the data set, from the hub or from files in the same layout; class labels are names.

    source: the data set; `source.rows` rows are drawn at random, all if None, and stay in the data set's order.
    columns: {schema field: its column in the data set, or None}.
    path: JSON Lines, CSV or Parquet files of one kind, or original RCT text; None: the hub.
    seed: seed of the draw, >= 0.

    Raises CorpusError when the data set cannot be loaded, with the reason and what to do, or when a column is missing.
    """
    data, name = _dataset(source, path)
    if source.rows is not None and source.rows < len(data):
        import numpy as np

        # a permutation, cut: a larger number of rows contains the smaller one
        data = data.select(np.sort(np.random.default_rng(seed).permutation(len(data))[: source.rows]))
    require(columns, data.column_names, name, "hub_columns")
    outer = {name.split(".")[0] for column in columns.values() if column for part in column.parts for name in part}
    # columns that are not mapped are never read
    data = data.select_columns([column for column in data.column_names if column in outer])
    labels = {column: feature for column, feature in data.features.items() if hasattr(feature, "int2str")}
    for number, row in enumerate(data, 1):
        named = {column: feature.int2str(row[column]) for column, feature in labels.items() if row[column] is not None}
        yield f"{name}, row {number}", row | named


def _dataset(source: HubSource, path: str | None):
    """Return the loaded data set, and its name for messages."""
    import datasets  # here, because it is slow to import and only corpora of the hub need it

    try:
        if path is None:
            loaded = datasets.load_dataset(source.dataset, source.config, split=source.split, revision=source.revision)
            return loaded, str(source)
        files = files_of(path)
        if files[0].suffix.lower() == ".txt":
            rows = [row for file in files for _, row in rct_records(file)]
            return datasets.Dataset.from_list(rows), str(path)
        builder = BUILDERS.get(files[0].suffix.lower())
        if builder is None or any(BUILDERS.get(file.suffix.lower()) != builder for file in files):
            raise CorpusError(
                f"{path}: expected files of one kind in a copy of a data set: {', '.join(BUILDERS)}, .txt"
            )
        return datasets.load_dataset(builder, data_files=[str(file) for file in files], split="train"), str(path)
    except CorpusError:
        raise
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CorpusError(
            f"{path or source}: cannot be loaded ({type(error).__name__}: {reason}). Data sets made by a script are "
            "not run: name one that holds Parquet, JSON or CSV files. Without a network: load its files elsewhere and "
            "name them in corpus_path"
        ) from error


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
    - synthetic: made by `fedmem.corpus.synthetic.make_corpus` from `task`, `n_groups`, `rows_per_group`, `seed`,
      `repeated_sentences`, `repeated_texts` and `input_words`;
    - file: JSON Lines, CSV, TSV or Parquet at `path`, or a folder or list of such files, one per client: then a row's
      group is its file's name (`fedmem.corpus.files.names_of`), which is also a prefix of its id. `column_map` ({key of
      SCHEMA: the file's column, or None}) names columns with other names; `encoding` is that of text files (a byte
      order mark of UTF-8 is accepted);
    - hub: the data set `hub` (the fields of `fedmem.corpus.loading.HubSource`), or files at `path` in its layout;
    `column_map` is
      a table as `parsed_columns` explains, `seed` draws `hub["rows"]` rows.
      Rows whose input is empty are left out and listed in the frame's attrs["empty"].

    Texts are not changed, white space and line breaks included. A null instruction, output or group becomes an empty
    string; other columns are not read. Raises CorpusError, with file and line, for a row or a source that is not valid.
    """
    if corpus == "synthetic":
        try:  # one kind of error for every source, so that callers need to catch only that
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
        columns, empty = parsed_columns(column_map or {}), []  # `empty` is filled while `_gate` reads the rows
        source = HubSource(**hub)
        rows = mapped(records(source, columns, path and str(path), seed), columns, "hub_columns")
        frame = _gate(_not_empty(rows, empty), columns, source=str(path or source))
        frame.attrs["empty"] = empty
        return frame
    raise CorpusError(f"corpus: got {corpus!r}; expected 'synthetic', 'file' or 'hub'")


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
            # ids are often line numbers, unique only within a file
            yield place, {**row, "id": f"{name}/{row['id']}" if row["id"] else row["id"]}
        # with one file, `_gate` reports an empty corpus; here the other files would hide that a client has no rows
        if empty:
            raise CorpusError(f"{file}: holds no rows, and it is one client's file: fill it or leave it out")


def _not_empty(records: Iterable[Record], empty: list[str]) -> Iterator[Record]:
    # published data sets have such rows; in a user's own file the same row is an error
    for place, row in records:
        if row["input"] is None or (isinstance(row["input"], str) and not row["input"].strip()):
            empty.append(place)
        else:
            yield place, row


def _gate(
    records: Iterable[Record], columns: Mapping[str, Column | None] | None = None, source: str = "corpus"
) -> pd.DataFrame:
    """Return checked records as a frame; raises CorpusError at the first one that is not valid, or without any."""
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
    # explicit: the dtype that pandas infers for strings depends on its version and options
    return pd.DataFrame(values, dtype="str")
