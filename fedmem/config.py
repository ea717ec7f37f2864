"""The parameters of all stages: one frozen model per stage, every default in one place.

The models together form one flat namespace; a name belongs to exactly one stage. A field says what it means, its unit
and range, and, by `when`, under which other settings it matters at all: where it cannot matter it is null in a stage's
identity, so that runs that differ in nothing that counts share their stages. The defaults are those of the demo, which
are also what the notebooks' parameters cells show. This module knows no files but the names of model presets and no
stage's work.
"""

import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from fedmem.parameters import ConfigError, StageConfig, allowed_words, closest, unknown, where
from fedmem.parameters import field as _field
from fedmem.partition_config import PartitionConfig

__all__ = [
    "OWNER", "STAGES", "AnalyzeConfig", "ConfigError", "DetectConfig", "GenerateConfig", "PartitionConfig",
    "StageConfig", "TrainConfig", "allowed", "check_together", "closest", "create_all", "markdown_table",
    "model_folder",
]  # fmt: skip

DATA = Path(__file__).parent / "data"  # shipped presets: data/<preset>/


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
    rounds: int = _field(12, "communication rounds", when={"algorithm": ("fedavg", "fedprox", "central")}, ge=1)
    local_epochs: int = _field(
        2, "passes over a client's rows per round", when={"algorithm": ("fedavg", "fedprox", "central")}, ge=1
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
    shown: ClassVar[tuple[str, ...]] = ("confidence", "min_compression", "min_distinct")

    confidence: float = _field(0.95, "coverage of the intervals, (0, 1)", gt=0, lt=1)
    min_compression: float = _field(
        0.25, "a continuation that zlib compresses to less than this share is incoherent; 0: none is", ge=0, le=1
    )
    min_distinct: float = _field(
        0.5, "a continuation of fewer different 3-grams among its 3-grams is incoherent; 0: none is", ge=0, le=1
    )

    @property
    def slug(self) -> str:
        return f"interval{self.confidence:g}"


STAGES: dict[str, type[StageConfig]] = {
    model.stage: model for model in (PartitionConfig, TrainConfig, GenerateConfig, DetectConfig, AnalyzeConfig)
}
OWNER: dict[str, str] = StageConfig.owner


def create_all(values: dict[str, Any], origin: dict[str, str] | None = None) -> dict[str, StageConfig]:
    """All stages' models from one flat namespace, checked together; raises ConfigError with every fault found."""
    origin = origin or {}
    faults = [unknown(name, OWNER, origin) for name in values if name not in OWNER]
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
            f"{where('checkpoint_round', origin)}checkpoint_round: got {meant}; allowed is 0 to rounds = {last}"
        )
    n_suffixes = generate.n_suffixes or generate.n_prefixes
    for name, wanted, had in (
        ("n_prefixes", generate.n_prefixes, "train_rows"),
        ("n_suffixes", n_suffixes, "train_rows"),
        ("n_suffixes", n_suffixes, "heldout_rows"),  # the control has as many suffixes as what was trained on
    ):
        if isinstance(getattr(partition, had), int) and wanted > getattr(partition, had):
            raise ConfigError(
                f"{where(name, origin)}{name}: got {wanted}; a client has only {had} = {getattr(partition, had)} "
                f"rows to sample from: lower {name} or raise {had}"
            )
    if generate.prefix_tokens >= train.max_tokens:
        raise ConfigError(
            f"{where('prefix_tokens', origin)}prefix_tokens: got {generate.prefix_tokens}; training examples are cut "
            f"at max_tokens = {train.max_tokens}: allowed is less than that"
        )
    return configs | {"generate": generate.model_copy(update={"checkpoint_round": min(meant, last)})}


def model_folder(name: str) -> Path | None:
    """The folder of a shipped preset or of a local model; None for a hub id. ConfigError for all else."""
    if (DATA / name / "config.json").is_file():
        return DATA / name
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        return None
    presets = ", ".join(sorted(p.name for p in DATA.iterdir() if p.is_dir()))
    raise ConfigError(
        f"model: got {name!r}; allowed is a preset ({presets}), an existing folder, or a hub id, which reads owner/name"
    )


def allowed(stage: str, name: str) -> str:
    """What a parameter of a stage may be, in words."""
    return allowed_words(STAGES[stage], name)


def markdown_table() -> str:
    """All parameters as the README shows them: stage, name, default, what is allowed, meaning."""
    lines = ["| stage | parameter | default | allowed | meaning |", "|---|---|---|---|---|"]
    for stage, model in STAGES.items():
        for name, field in model.model_fields.items():
            default = f"{field.default:g}" if isinstance(field.default, float) else field.default
            default = "null" if default is None else default
            cells = (stage, f"`{name}`", default, allowed(stage, name), field.description)
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
