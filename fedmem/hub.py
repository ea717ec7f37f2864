"""Rows of a hub data set, or of a copy of one in files, in the data set's own layout.

`datasets` does the loading: pinned revision, no code of the data set's author, no conversion of ours. This module knows
how a data set is found and drawn from; it does not know the schema (`fedmem.columns` maps the rows).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fedmem.columns import Column, CorpusError, Record, require
from fedmem.files import files_of, rct_records

__all__ = ["HubSource", "records"]

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class HubSource:
    """Which data set of the hub: its id, configuration, split and revision (a commit), and how many rows at most."""

    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    rows: int | None = None

    def __str__(self) -> str:
        parts = (self.config, self.split, self.revision and f"revision {self.revision}")
        return f"{self.dataset} ({', '.join(part for part in parts if part)})"


def records(source: HubSource, columns: dict[str, Column | None], path: str | None, seed: int) -> Iterator[Record]:
    """Yield (place, row) of the data set, from the hub or, with `path`, from files in the same layout.

    `path`: JSON Lines, CSV or Parquet files, or original RCT text. With `source.rows` that many rows are drawn at
    random by `seed`, and stay in the data set's order. Class labels come by name. Raises CorpusError when the data set
    cannot be loaded, with its own reason and what to do.
    """
    data, name = _dataset(source, path)
    if source.rows is not None and source.rows < len(data):
        import numpy as np

        data = data.select(np.sort(np.random.default_rng(seed).permutation(len(data))[: source.rows]))
    require(columns, data.column_names, name, "hub_columns")
    outer = {name.split(".")[0] for column in columns.values() if column for part in column.parts for name in part}
    data = data.select_columns([column for column in data.column_names if column in outer])
    labels = {column: feature for column, feature in data.features.items() if hasattr(feature, "int2str")}
    for number, row in enumerate(data, 1):
        named = {column: feature.int2str(row[column]) for column, feature in labels.items() if row[column] is not None}
        yield f"{name}, row {number}", row | named


def _dataset(source: HubSource, path: str | None):
    """The loaded data set, and its name for messages."""
    import datasets

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
                f"{path}: allowed is one kind of files in a copy of a data set: {', '.join(BUILDERS)}, .txt"
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
