"""The parameters of all stages: one frozen model per stage, every default in one place.

The models together form one flat namespace; a name belongs to exactly one stage. A field says what it means, its unit
and range, and, by `when`, under which other settings it matters at all: where it cannot matter it is null in a stage's
identity, so that runs that differ in nothing that counts share their stages. The defaults are those of the demo, which
are also what the notebooks' parameters cells show. This module knows no files but the names of model presets and no
stage's work.
"""

import ast
import codecs
import difflib
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

DATA = Path(__file__).parent / "data"  # shipped presets: data/<preset>/


SCHEMA = ("id", "instruction", "input", "output", "group")  # of a corpus; fedmem.columns says what they hold


class ConfigError(ValueError):
    """A parameter that is unknown, of the wrong type, out of range, or at odds with another one."""


def _field(default: Any, meaning: str, *, when: dict | None = None, identity: bool = True, **bounds: Any) -> Any:
    """A parameter. `when`: {field: values under which it matters}; `identity`: whether it can change bytes."""
    return Field(default, description=meaning, json_schema_extra={"when": when or {}, "identity": identity}, **bounds)


class StageConfig(BaseModel):
    """What every stage's parameters share: strict types, no unknown names, a readable slug, effective values."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    stage: ClassVar[str]
    parent: ClassVar[str | None] = None
    shown: ClassVar[tuple[str, ...]]  # what the notebook's parameters cell shows; the rest goes through `options`

    @property
    def slug(self) -> str:
        """A few words that tell this stage's folder from its neighbours."""
        raise NotImplementedError

    @classmethod
    def create(cls, values: dict[str, Any], origin: dict[str, str] | None = None) -> Self:
        """The model of these values; a ConfigError says where (`origin`: name → file or flag), what and why."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(cls, e, origin or {}) for e in error.errors())) from None

    @classmethod
    def from_notebook(cls, names: dict[str, Any]) -> Self:
        """The parameters that a notebook's first cells have set: `StageConfig.from_notebook(globals())`.

        Read are the shown parameters, what is in `options`, and whatever papermill injected; an injected name that is
        no parameter of this stage is an error (papermill itself only warns).
        """
        options = names.get("options", {})
        if not isinstance(options, dict):
            raise ConfigError(f"options: got {options!r}; allowed is a dict of {cls.stage} parameters, such as {{}}")
        both = sorted(set(options) & set(cls.shown))
        if both:
            raise ConfigError(f"options names {', '.join(both)}, which the parameters cell shows: set it there")
        injected = _injected_names(names.get("In", [])) - {"options", cls.parent}
        values = {name: names[name] for name in (*cls.shown, *sorted(injected)) if name in names}
        return cls.create(values | options)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # lists and mappings have no hash of their own

    def effective(self) -> dict[str, Any]:
        """The parameters that identify the stage's result: those that cannot matter are null, the rest as set."""
        values = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if extra["identity"]:
                matters = all(getattr(self, other) in allowed for other, allowed in extra["when"].items())
                values[name] = getattr(self, name) if matters else None
        return values

    def table(self):
        """The resolved parameters as a notebook shows them: a styled table (parameter, value, matters, meaning)."""
        import pandas as pd

        effective = self.effective()
        rows = [
            (name, str(getattr(self, name)), effective.get(name, "") is not None, field.description)
            for name, field in type(self).model_fields.items()
        ]
        table = pd.DataFrame(rows, columns=["parameter", "value", "matters", "meaning"]).set_index("parameter")
        return table.style.set_uuid("parameters").set_properties(**{"text-align": "left"})


class PartitionConfig(StageConfig):
    """Which texts, and which client holds which."""

    stage: ClassVar[str] = "partition"
    shown: ClassVar[tuple[str, ...]] = (
        "task", "corpus", "corpus_path", "partitioner", "n_clients", "train_rows", "test_rows", "heldout_rows",
        "partition_seed",
    )  # fmt: skip

    task: Literal["summarization", "dialog", "qa", "classification"] = _field(
        "summarization", "task whose shape the rows have"
    )
    corpus: Literal["synthetic", "file", "hub"] = _field("synthetic", "where the rows come from")
    corpus_path: str | None = _field(
        None,
        "JSON Lines, CSV or Parquet file, or a folder of them, one a client; with hub: files in the data set's layout",
        when={"corpus": ("file", "hub")},
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
        "rows of each group of the synthetic corpus (one group a client); null: what a client needs, four times that "
        "where clients need not be groups",
        when={"corpus": ("synthetic",)},
        ge=1,
    )
    repeated_sentences: float = _field(
        0.0, "share of rows that carry a sentence of another row, 0 to 1", when={"corpus": ("synthetic",)}, ge=0, le=1
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
        "natural", "rows to clients: at random, by group, mixtures of groups, by topic, at random in unequal sizes"
    )
    client_groups: list | None = _field(
        None, "groups of each client, [[a], [b, c]]; null: the n_clients largest", when={"partitioner": ("natural",)}
    )
    dirichlet_alpha: float = _field(
        0.3, "concentration: small makes clients differ", when={"partitioner": ("dirichlet",)}, gt=0, le=1e6
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

    @model_validator(mode="after")
    def _source_given(self) -> Self:
        if self.corpus == "file" and not self.corpus_path:
            raise ValueError("corpus_path: got nothing; with corpus = file it must name a file or a folder of files")
        if self.corpus == "hub" and not (self.hub_dataset and self.hub_columns.get("input")):
            raise ValueError(
                "hub_dataset: with corpus = hub, hub_dataset and hub_columns (input at least) must be given; a study "
                "takes them from params/tasks/<task>.yaml"
            )
        for name in ("column_map", "hub_columns"):
            for key, value in getattr(self, name).items():
                if key not in SCHEMA or not (isinstance(value, str) or (value is None and key != "input")):
                    raise ValueError(
                        f"{name}: got {{{key!r}: {value!r}}}; allowed are texts for {', '.join(SCHEMA)}"
                        + ", and null for all but input"
                    )
        try:
            codecs.lookup(self.corpus_encoding)
        except LookupError:
            raise ValueError(
                f"corpus_encoding: got {self.corpus_encoding!r}; allowed is an encoding that Python knows, such as "
                "utf-8, cp1252 or utf-16"
            ) from None
        return self

    @model_validator(mode="after")
    def _clients_possible(self) -> Self:
        groups = self.client_groups
        if groups is not None:
            named = [name for client in groups for name in (client if isinstance(client, list) else [client])]
            if not all(isinstance(name, str) for name in named) or [] in groups:
                raise ValueError(f"client_groups: got {groups!r}; allowed is a list of names or of lists of names")
            if len(set(named)) < len(named) or len(groups) != self.n_clients:
                raise ValueError(
                    f"client_groups: got {groups!r}; allowed is one entry for each of the n_clients = {self.n_clients} "
                    "clients, and no group twice"
                )
        try:
            re.compile(self.unit or "")
        except re.error as error:
            raise ValueError(f"unit: got {self.unit!r}; allowed is a regular expression ({error})") from None
        return self

    @model_validator(mode="after")
    def _rows_possible(self) -> Self:
        rows = self.split_rows
        shares = any(isinstance(count, float) and count for count in rows.values())
        for split, count in rows.items():
            least = 0 if split != "train" else 1e-9 if shares else 1
            if count < least or (shares and (count > 1 or (isinstance(count, int) and count))):
                allowed_ = "a share, as the others are: > 0 and ≤ 1" if shares else f"a whole number ≥ {least}"
                raise ValueError(f"{split}_rows: got {count!r}; allowed is {allowed_}")
        if shares and sum(rows.values()) > 1 + 1e-9:
            raise ValueError(
                f"train_rows: got {' + '.join(map(str, rows.values()))} as shares of train, test and held-out; allowed is "
                "a sum of at most 1"
            )
        if shares and self.corpus == "synthetic" and self.synthetic_rows is None:
            raise ValueError(
                "synthetic_rows: got nothing; where train_rows is a share it must say how many rows there are"
            )
        return self

    @property
    def split_rows(self) -> dict[str, int | float]:
        """Rows of each client by split: all counts, or all shares."""
        return {"train": self.train_rows, "test": self.test_rows, "heldout": self.heldout_rows}

    @property
    def rows_per_group(self) -> int:
        """Rows of each group of the synthetic corpus."""
        if self.synthetic_rows is not None:
            return self.synthetic_rows
        return sum(self.split_rows.values()) * (1 if self.partitioner in ("natural", "iid") else 4)

    @property
    def slug(self) -> str:
        return f"{self.task}-{self.corpus}-{self.partitioner}-{self.n_clients}x{self.train_rows}"


class TrainConfig(StageConfig):
    """Which model learns the clients' rows, and how."""

    stage: ClassVar[str] = "train"
    parent: ClassVar[str] = "partition"
    shown: ClassVar[tuple[str, ...]] = (
        "model", "algorithm", "rounds", "local_epochs", "learning_rate", "batch_size", "proximal_mu", "max_tokens",
        "train_seed",
    )  # fmt: skip

    model: str = _field("tiny-qwen2", "preset, hub id or folder of a causal language model", min_length=1)
    algorithm: Literal["fedavg", "fedprox", "central", "none"] = _field("fedavg", "how the clients' rows are learnt")
    rounds: int = _field(10, "communication rounds", when={"algorithm": ("fedavg", "fedprox", "central")}, ge=1)
    local_epochs: int = _field(
        4, "passes over a client's rows per round", when={"algorithm": ("fedavg", "fedprox", "central")}, ge=1
    )
    learning_rate: float = _field(
        2e-3, "constant AdamW learning rate", when={"algorithm": ("fedavg", "fedprox", "central")}, gt=0, le=1
    )
    batch_size: int = _field(4, "rows per gradient step", when={"algorithm": ("fedavg", "fedprox", "central")}, ge=1)
    proximal_mu: float = _field(
        0.1, "μ of FedProx: (μ/2)·‖w − w_t‖² is added to the loss", when={"algorithm": ("fedprox",)}, ge=0
    )
    max_tokens: int = _field(256, "longest training example, in tokens", ge=8)
    train_seed: int = _field(0, "seed of the order of rows", when={"algorithm": ("fedavg", "fedprox", "central")}, ge=0)
    loss_on: Literal["all", "response"] = _field(
        "all", "tokens that the loss covers", when={"algorithm": ("fedavg", "fedprox", "central")}
    )
    weight_decay: float = _field(
        0.0, "AdamW weight decay", when={"algorithm": ("fedavg", "fedprox", "central")}, ge=0, le=1
    )
    torch_threads: int = _field(1, "CPU threads of torch; another number gives other last bits", ge=1, le=256)
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "where to train and generate", identity=False)

    @property
    def slug(self) -> str:
        model = Path(self.model).name.lower()
        return f"{self.algorithm}-{model}" if self.algorithm == "none" else f"{self.algorithm}-{model}-{self.rounds}r"


class GenerateConfig(StageConfig):
    """Which beginnings of training texts the model continues, and how."""

    stage: ClassVar[str] = "generate"
    parent: ClassVar[str] = "train"
    shown: ClassVar[tuple[str, ...]] = (
        "checkpoint_round", "n_prefixes", "prefix_tokens", "decoding", "temperature", "top_k", "top_p",
        "max_new_tokens", "sample_seed", "decode_seed",
    )  # fmt: skip

    checkpoint_round: int | None = _field(None, "round whose global model continues; None: the last", ge=0)
    n_prefixes: int = _field(32, "prefixes sampled from each client's training rows", ge=1)
    n_suffixes: int | None = _field(
        None, "suffixes looked up per client, of member and of held-out rows each; None: as many as prefixes", ge=1
    )
    prefix_tokens: int = _field(30, "length of a prefix, in tokens", ge=1)
    min_input_tokens: int | None = _field(
        None, "shortest input that is sampled, in tokens; None: prefix_tokens + 20", ge=2
    )
    decoding: Literal["greedy", "temperature", "top_k", "top_p"] = _field("top_k", "how the next token is chosen")
    temperature: float = _field(
        1.0, "divides the logits; 0 is greedy", when={"decoding": ("temperature", "top_k", "top_p")}, ge=0, le=100
    )
    top_k: int = _field(40, "tokens that top_k draws from", when={"decoding": ("top_k",)}, ge=1)
    top_p: float = _field(
        0.95, "probability mass that top_p draws from, (0, 1]", when={"decoding": ("top_p",)}, gt=0, le=1
    )
    max_new_tokens: int = _field(100, "longest continuation, in tokens", ge=1)
    sample_seed: int = _field(0, "seed of which rows are probed", ge=0)
    decode_seed: int = _field(0, "seed of the drawn tokens", when={"decoding": ("temperature", "top_k", "top_p")}, ge=0)
    generate_batch: int = _field(128, "prefixes continued at once; changes speed alone", identity=False, ge=1)

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.min_input_tokens is not None and self.min_input_tokens <= self.prefix_tokens:
            raise ValueError(
                f"min_input_tokens: got {self.min_input_tokens}; allowed is more than prefix_tokens = "
                f"{self.prefix_tokens}, so that a suffix is left"
            )
        return self

    @property
    def slug(self) -> str:
        return f"{self.decoding}-prefix{self.prefix_tokens}-{self.n_prefixes}"


class DetectConfig(StageConfig):
    """Where continuations are looked up, and what counts as the same text."""

    stage: ClassVar[str] = "detect"
    parent: ClassVar[str] = "generate"
    shown: ClassVar[tuple[str, ...]] = ("retriever", "top_n", "min_match_chars", "paraphrase_model")

    retriever: Literal["embedded", "elasticsearch"] = _field(
        "embedded", "search engine; embedded: tantivy in this process, elasticsearch: the server at FEDMEM_ES_URL"
    )
    top_n: int = _field(10, "suffixes of each client that a continuation is compared with", ge=1, le=10_000)
    max_query_terms: int = _field(
        1024, "distinct words that a query keeps, the first ones; a server allows 1024 or more", ge=1, le=1024
    )
    shards: int = _field(
        1, "parts of each Elasticsearch index; more than one changes the ranking",
        when={"retriever": ("elasticsearch",)}, ge=1, le=1024,
    )  # fmt: skip
    min_match_chars: int = _field(50, "shortest case and verbatim run of the detector, in characters", ge=1)
    paraphrase_model: str = _field(
        "none", "classifier of sentence pairs, hub id or folder; none: paraphrase candidates stay untyped", min_length=1
    )
    entity_model: str = _field(
        "en_core_web_sm", "spaCy model of the entity test, where candidates are typed", min_length=1
    )
    detect_workers: int = _field(1, "processes that compare texts; changes speed alone", identity=False, ge=1, le=256)

    @property
    def slug(self) -> str:
        return f"{self.retriever}-top{self.top_n}-{self.min_match_chars}chars"


class AnalyzeConfig(StageConfig):
    """How sure the figures are."""

    stage: ClassVar[str] = "analyze"
    parent: ClassVar[str] = "detect"
    shown: ClassVar[tuple[str, ...]] = ("confidence",)

    confidence: float = _field(0.95, "coverage of the intervals, (0, 1)", gt=0, lt=1)

    @property
    def slug(self) -> str:
        return f"interval{self.confidence:g}"


STAGES: dict[str, type[StageConfig]] = {
    model.stage: model for model in (PartitionConfig, TrainConfig, GenerateConfig, DetectConfig, AnalyzeConfig)
}
OWNER: dict[str, str] = {name: stage for stage, model in STAGES.items() for name in model.model_fields}


def create_all(values: dict[str, Any], origin: dict[str, str] | None = None) -> dict[str, StageConfig]:
    """All stages' models from one flat namespace, checked together; raises ConfigError with every fault found."""
    origin = origin or {}
    faults = [_unknown(name, OWNER, origin) for name in values if name not in OWNER]
    configs = {}
    for stage, model in STAGES.items():
        try:
            configs[stage] = model.create({k: v for k, v in values.items() if OWNER.get(k) == stage}, origin)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return check_together(configs, origin)


def check_together(configs: dict[str, StageConfig], origin: dict[str, str] | None = None) -> dict[str, StageConfig]:
    """Checks across stages, for as many of them as are given in order; returns them with derived values filled in.

    checkpoint_round becomes the number of the round that is meant, so that "the last" and its number are one stage.
    """
    origin = origin or {}
    if "generate" not in configs:
        return configs
    partition, train, generate = (configs[stage] for stage in ("partition", "train", "generate"))
    last = 0 if train.algorithm == "none" else train.rounds
    meant = last if generate.checkpoint_round is None else generate.checkpoint_round
    if meant > last and train.algorithm != "none":
        raise ConfigError(
            f"{_where('checkpoint_round', origin)}checkpoint_round: got {meant}; allowed is 0 to rounds = {last}"
        )
    n_suffixes = generate.n_suffixes or generate.n_prefixes
    for name, wanted, had in (
        ("n_prefixes", generate.n_prefixes, "train_rows"),
        ("n_suffixes", n_suffixes, "train_rows"),
        ("n_suffixes", n_suffixes, "heldout_rows"),  # the control has as many suffixes as what was trained on
    ):
        if isinstance(getattr(partition, had), int) and wanted > getattr(partition, had):
            raise ConfigError(
                f"{_where(name, origin)}{name}: got {wanted}; a client has only {had} = {getattr(partition, had)} "
                f"rows to sample from: lower {name} or raise {had}"
            )
    if generate.prefix_tokens >= train.max_tokens:
        raise ConfigError(
            f"{_where('prefix_tokens', origin)}prefix_tokens: got {generate.prefix_tokens}; training examples are cut "
            f"at max_tokens = {train.max_tokens}: allowed is less than that"
        )
    return configs | {"generate": generate.model_copy(update={"checkpoint_round": min(meant, last)})}


def model_folder(name: str) -> Path | None:
    """The folder of a shipped preset or of a local model; None for a hub id."""
    for folder in (DATA / name, Path(name).expanduser()):
        if (folder / "config.json").is_file():
            return folder
    return None


def allowed(stage: str, name: str) -> str:
    """What a parameter may be, in words."""
    field = STAGES[stage].model_fields[name]
    options = get_args(field.annotation)
    if options and all(isinstance(option, str) for option in options):
        return " | ".join(options)
    kinds = [kind for kind in (options or (field.annotation,)) if kind is not type(None)]
    words = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        dict: "a mapping",
        list: "a list",
    }
    text = " or ".join(words.get(kind, str(kind)) for kind in kinds)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[k]} {getattr(m, k)}" for m in field.metadata for k in signs if getattr(m, k, None) is not None]
    return text + (" " + " and ".join(bounds) if bounds else "") + (" or null" if type(None) in options else "")


def markdown_table() -> str:
    """All parameters as the README shows them: stage, name, default, what is allowed, meaning."""
    lines = ["| stage | parameter | default | allowed | meaning |", "|---|---|---|---|---|"]
    for stage, model in STAGES.items():
        for name, field in model.model_fields.items():
            default = (
                "null"
                if field.default is None
                else f"{field.default:g}"
                if isinstance(field.default, float)
                else field.default
            )
            cells = (stage, f"`{name}`", default, allowed(stage, name), field.description)
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def closest(name: str, known) -> str:
    """`; did you mean 'x'?` for the known name that is most like it, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def _where(name: str, origin: dict[str, str]) -> str:
    return f"{origin[name]}: " if name in origin else ""


def _unknown(name: str, known, origin: dict[str, str]) -> str:
    return (
        f"{_where(name, origin)}unknown parameter {name!r}{closest(name, known)} (allowed: {', '.join(sorted(known))})"
    )


def _explain(model: type[StageConfig], error: dict, origin: dict[str, str]) -> str:
    """One pydantic error in the project's words: where, what, got, allowed, and whose name it may be instead."""
    name = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        owner = OWNER.get(name)
        hint = f"{name!r} is a parameter of the {owner} stage, not of {model.stage}: set it in that stage's notebook"
        return _where(name, origin) + hint if owner else _unknown(name, model.model_fields, origin)
    if not name:  # a check across fields: its message opens with the field's name
        message = error["msg"].removeprefix("Value error, ")
        return _where(message.split(":")[0], origin) + message
    return f"{_where(name, origin)}{name}: got {error['input']!r}; allowed is {allowed(model.stage, name)}"


def _injected_names(history: list[str]) -> set[str]:
    """Names that papermill's injected cell binds, read from the kernel's input history.

    Papermill opens that cell with a comment of its own ("# Parameters"), which no cell of ours begins with.
    """
    names = set()
    for source in history:
        if source.startswith("# Parameters\n"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names
