"""The parameters of the partition stage: names, ranges, and checks across parameters.

A part of `fedmem.config.stages`, in a separate file because of its length. No corpus is read here.
"""

import codecs
import re
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from fedmem.config.parameter import StageConfig
from fedmem.config.parameter import field as _field
from fedmem.config.vocabulary import SCHEMA, SPLITS, TASKS

SYNTHETIC_GROUPS = 12  # the number of groups in the synthetic corpus


class PartitionConfig(StageConfig):
    """The parameters of the partition stage: the corpus, and its division among the clients."""

    stage: ClassVar[str] = "partition"
    shown: ClassVar[tuple[str, ...]] = (
        "task", "corpus", "corpus_path", "partitioner", "n_clients", "train_rows", "test_rows", "heldout_rows",
        "duplicates", "partition_seed",
    )  # fmt: skip

    task: Literal[*TASKS] = _field("summarization", "task whose shape the rows have")
    corpus: Literal["synthetic", "file", "hub"] = _field("synthetic", "where the rows come from")
    corpus_path: str | list[str] | None = _field(
        None,
        "JSON Lines, CSV or Parquet file, or a folder or list of them, one a client; with hub: files in the data set's "
        "layout",
        when={"corpus": ("file", "hub")},
        identity=False,
    )
    heldout_path: str | list[str] | None = _field(
        None,
        "file of texts that were never trained on, dealt to all clients, or a list of files, one a client; null: "
        "heldout_rows are dealt from the corpus",
        when={"corpus": ("file",)},
        identity=False,
    )
    column_map: dict = _field(
        {},
        "the file's own names: {input: text, group: ward, id: null}; null: no such column",
        when={"corpus": ("file",)},
    )
    corpus_encoding: str = _field("utf-8", "encoding of text files", when={"corpus": ("file",)}, min_length=1)
    hub_dataset: str | None = _field(None, "id of the data set on the hub", when={"corpus": ("hub",)})
    hub_config: str | None = _field(None, "its configuration; null: the default one", when={"corpus": ("hub",)})
    hub_split: str = _field("train", "its split that rows are taken from", when={"corpus": ("hub",)}, min_length=1)
    hub_revision: str | None = _field(None, "its commit; null: the newest", when={"corpus": ("hub",)})
    hub_columns: dict = _field(
        {},
        "its columns, as params/tasks/*.yaml write them: {input: abstract, output: title}",
        when={"corpus": ("hub",)},
    )
    hub_rows: int | None = _field(
        None, "rows drawn from it at random before anything else; null: all", when={"corpus": ("hub",)}, ge=1
    )
    synthetic_rows: int | None = _field(
        None,
        "rows of each group of the synthetic corpus (one group a client, 12 at most); null: what clients need, four "
        "times that where clients need not be groups",
        when={"corpus": ("synthetic",)},
        ge=1,
    )
    repeated_sentences: float = _field(
        0.0, "share of rows that carry a sentence of another row, 0 to 1", when={"corpus": ("synthetic",)}, ge=0, le=1
    )
    repeated_texts: float = _field(
        0.0, "share of rows that are copies of another row, 0 to 1", when={"corpus": ("synthetic",)}, ge=0, le=1
    )
    synthetic_words: int = _field(
        60,
        "minimum words of an input of the synthetic corpus; the longest inputs have about 50 % more",
        when={"corpus": ("synthetic",)},
        ge=10,
        le=2000,
    )
    unit: str | None = _field(
        None,
        "regular expression; rows whose ids it matches alike stay in one split of one client; null: each row alone",
    )
    duplicates: Literal["keep", "drop"] = _field("keep", "second copies of a text, exact or near, before the split")
    near_duplicate: float = _field(
        0.8, "Jaccard similarity of word 3-grams from which two texts are near copies, 0.5 to 1", ge=0.5, le=1
    )
    boilerplate_share: float = _field(
        0.05, "share of a partition's rows above which a common run of 8 words is boilerplate, 0 to 1", gt=0, lt=1
    )
    partitioner: Literal["iid", "natural", "dirichlet", "topic", "quantity"] = _field(
        "natural", "the rule that deals the rows to clients"
    )
    client_groups: list | None = _field(
        None, "groups of each client, [[a], [b, c]]; null: the n_clients largest", when={"partitioner": ("natural",)}
    )
    dirichlet_alpha: float = _field(
        0.3, "concentration: a small value makes clients differ", when={"partitioner": ("dirichlet",)}, gt=0, le=1e6
    )
    quantity_skew: float = _field(
        1.0, "client j's training rows fall as 1 ∕ (j + 1)^skew", when={"partitioner": ("quantity",)}, ge=0, le=10
    )
    n_clients: int = _field(3, "number of clients", ge=1, le=10_000)
    train_rows: int | float = _field(32, "training rows of each client (quantity: their mean), or a share below 1")
    test_rows: int | float = _field(8, "test rows of each client, or a share below 1")
    heldout_rows: int | float = _field(
        32, "rows of each client that are never trained on: the control; or a share below 1"
    )
    partition_seed: int = _field(0, "seed of the synthetic corpus and of the deal", ge=0)

    # Each message opens with the parameter's name: `parameter._explain` puts the file or flag in front of it.
    @model_validator(mode="after")
    def _source_given(self) -> Self:
        if self.corpus == "file" and not self.corpus_path:
            raise ValueError("corpus_path: got nothing; with corpus = file it must name a file or a folder of files")
        if self.corpus == "synthetic" and self.corpus_path:
            raise ValueError(
                f"corpus_path: got {self.corpus_path!r}, but corpus = synthetic reads no file; set corpus to file"
            )
        if self.corpus == "hub" and isinstance(self.corpus_path, list):
            raise ValueError(f"corpus_path: got {self.corpus_path!r}; with corpus = hub it is one file or folder")
        if self.heldout_path and (self.corpus != "file" or self.heldout_rows):
            raise ValueError(
                f"heldout_path: got {self.heldout_path!r}, but corpus = {self.corpus} and heldout_rows = "
                f"{self.heldout_rows}; expected corpus = file and heldout_rows = 0, because the rows of heldout_path "
                "are the held-out ones"
            )
        if isinstance(self.heldout_path, list) and len(self.heldout_path) != self.n_clients:
            raise ValueError(
                f"heldout_path: got {len(self.heldout_path)} files; expected one file for all clients, or a list of "
                f"n_clients = {self.n_clients}, one a client"
            )
        if self.corpus == "hub" and not (self.hub_dataset and self.hub_columns.get("input")):
            raise ValueError(
                "hub_dataset: with corpus = hub, hub_dataset and hub_columns (input at least) must be given; a study "
                "takes them from params/tasks/<task>.yaml"
            )
        for name in ("column_map", "hub_columns"):
            for key, value in getattr(self, name).items():
                # input is the measured text: it cannot be left out, as the other columns can
                if key not in SCHEMA or not (isinstance(value, str) or (value is None and key != "input")):
                    raise ValueError(
                        f"{name}: got {{{key!r}: {value!r}}}; expected strings for {', '.join(SCHEMA)}"
                        + ", and null for all but input"
                    )
        # checked here, because otherwise the error would appear only when a stage reads the file
        try:
            codecs.lookup(self.corpus_encoding)
        except LookupError:
            raise ValueError(
                f"corpus_encoding: got {self.corpus_encoding!r}; expected an encoding that Python supports, such as "
                "utf-8, cp1252 or utf-16"
            ) from None
        return self

    @model_validator(mode="after")
    def _clients_possible(self) -> Self:
        if self.corpus == "synthetic" and self.partitioner == "natural" and self.n_clients > SYNTHETIC_GROUPS:
            raise ValueError(
                f"n_clients: got {self.n_clients}; partitioner natural gives each client a group, and the synthetic "
                f"corpus has {SYNTHETIC_GROUPS} groups: expected at most that many clients, or partitioner topic, "
                "dirichlet or iid"
            )
        groups = self.client_groups
        if groups is not None:
            named = [name for client in groups for name in (client if isinstance(client, list) else [client])]
            if not all(isinstance(name, str) for name in named) or [] in groups:
                raise ValueError(f"client_groups: got {groups!r}; expected a list of names or of lists of names")
            if len(set(named)) < len(named) or len(groups) != self.n_clients:
                raise ValueError(
                    f"client_groups: got {groups!r}; expected one entry for each of the n_clients = {self.n_clients} "
                    "clients, and no group twice"
                )
        try:
            re.compile(self.unit or "")
        except re.error as error:
            raise ValueError(f"unit: got {self.unit!r}; expected a regular expression ({error})") from None
        return self

    @model_validator(mode="after")
    def _rows_possible(self) -> Self:
        rows = self.split_rows
        # 0 counts as neither: 0 test rows may be beside shares as well as beside counts
        shares = any(isinstance(count, float) and count for count in rows.values())
        for split, count in rows.items():
            least = 0 if split != "train" else 1e-9 if shares else 1
            if count < least or (shares and (count > 1 or (isinstance(count, int) and count))):
                expected = "a share, as the others are: > 0 and ≤ 1" if shares else f"a whole number ≥ {least}"
                raise ValueError(f"{split}_rows: got {count!r}; expected {expected}")
        if shares and sum(rows.values()) > 1 + 1e-9:  # shares such as 0.7 + 0.2 + 0.1 do not sum to exactly 1
            raise ValueError(
                f"train_rows: got {' + '.join(map(str, rows.values()))} as shares of all splits; expected a sum of at "
                "most 1"
            )
        if shares and self.corpus == "synthetic" and self.synthetic_rows is None:
            raise ValueError(
                "synthetic_rows: got nothing; when train_rows is a share, it must give the number of rows of each group"
            )
        return self

    @property
    def split_rows(self) -> dict[str, int | float]:
        """Rows of each client by split: all counts, or all shares."""
        return {split: getattr(self, f"{split}_rows") for split in SPLITS}

    @property
    def skew(self) -> float:
        """The exponent by which the clients' numbers of training rows fall; 0: equal numbers."""
        return self.quantity_skew if self.partitioner == "quantity" else 0.0

    @property
    def source(self) -> dict[str, Any]:
        """The arguments of `fedmem.corpus.loading.load_corpus` for this corpus."""
        if self.corpus == "file":
            return {"path": self.corpus_path, "column_map": self.column_map, "encoding": self.corpus_encoding}
        if self.corpus == "hub":
            names = ("dataset", "config", "split", "revision", "rows")
            hub = {name: getattr(self, f"hub_{name}") for name in names}
            return {"path": self.corpus_path, "column_map": self.hub_columns, "hub": hub, "seed": self.partition_seed}
        return {
            "n_groups": self.n_groups,
            "rows_per_group": self.rows_per_group,
            "seed": self.partition_seed,
            "repeated_sentences": self.repeated_sentences,
            "repeated_texts": self.repeated_texts,
            "input_words": self.synthetic_words,
        }

    @property
    def heldout_source(self) -> dict[str, Any]:
        """The arguments of `fedmem.corpus.loading.load_corpus` for the held-out texts."""
        return {"path": self.heldout_path, "column_map": self.column_map, "encoding": self.corpus_encoding}

    @property
    def n_groups(self) -> int:
        """The number of groups of the synthetic corpus: one for each client, at most SYNTHETIC_GROUPS."""
        return min(self.n_clients, SYNTHETIC_GROUPS)

    @property
    def rows_per_group(self) -> int:
        """The number of rows of each group of the synthetic corpus."""
        if self.synthetic_rows is not None:
            return self.synthetic_rows
        needed = sum(self.split_rows.values()) * (1 if self.partitioner in ("natural", "iid") else 4)
        # rounded up, in whole numbers; the factor 4 leaves clients room to take unequal parts of the groups
        return -(-needed * self.n_clients // self.n_groups)

    @property
    def slug(self) -> str:
        return f"{self.task}-{self.corpus}-{self.partitioner}-{self.n_clients}x{self.train_rows}"
