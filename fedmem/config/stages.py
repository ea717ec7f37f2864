"""The parameters of all stages: one frozen model per stage, every default in one place.

The models together form one flat namespace; a name belongs to exactly one stage. A field says what it means, its unit
and range, and, by `when`, under which other settings it matters at all: where it cannot matter it is null in a stage's
identity, so that runs that differ in nothing that counts share their stages. The defaults are those of the demo, which
are also what the notebooks' parameters cells show. This module reads no file and does not depend on a stage's work.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from fedmem.config.parameter import ConfigError, StageConfig, allowed_words, unknown, where
from fedmem.config.parameter import field as _field
from fedmem.config.partition import PartitionConfig


class _AllBut:
    """The values under which a parameter matters, given by the few under which it does not."""

    def __init__(self, *excluded: str):
        self.excluded = excluded

    def __contains__(self, value: object) -> bool:
        return value not in self.excluded


# values of `when` that several fields share
TRAINS = {"algorithm": _AllBut("none")}

FEDERATES = {"algorithm": _AllBut("none", "central", "local")}

ADAPTS = TRAINS | {"finetuning": ("lora",)}


class TrainConfig(StageConfig):
    """Which model is trained on the clients' rows, and how."""

    stage: ClassVar[str] = "train"
    parent: ClassVar[str] = "partition"
    shown: ClassVar[tuple[str, ...]] = (
        "model", "algorithm", "rounds", "local_epochs", "learning_rate", "batch_size", "proximal_mu", "finetuning",
        "max_tokens", "train_seed",
    )  # fmt: skip

    model: str = _field("tiny-qwen2", "preset, hub id or folder of a causal language model", min_length=1)
    algorithm: Literal[
        "fedavg", "fedprox", "central", "local", "none", "FedAdagrad", "FedAdam", "FedAvgM", "FedMedian",
        "FedTrimmedAvg", "FedYogi", "Krum", "MultiKrum", "Bulyan", "QFedAvg",
    ] = _field(
        "fedavg",
        "how the model is trained; local: each client alone; a capitalized name: that strategy of Flower",
    )  # fmt: skip
    rounds: int = _field(12, "communication rounds", when=TRAINS, ge=1)
    local_epochs: int = _field(2, "passes over a client's rows per round", when=TRAINS | {"local_steps": (None,)}, ge=1)
    local_steps: int | None = _field(
        None, "gradient steps of a client per round; null: local_epochs", when=TRAINS, ge=1
    )
    learning_rate: float = _field(2e-3, "AdamW learning rate, at its maximum in the schedule", when=TRAINS, gt=0, le=1)
    schedule: Literal["constant", "linear", "cosine"] = _field(
        "constant", "shape of the learning rate over the whole run, not over a round", when=TRAINS
    )
    warmup_share: float = _field(
        0.0, "share of the run's steps over which the learning rate rises", when=TRAINS, ge=0, lt=1
    )
    batch_size: int = _field(4, "rows per gradient step", when=TRAINS, ge=1)
    gradient_accumulation: int = _field(
        1, "parts that a batch is computed in, to save memory; a step still has batch_size rows", when=TRAINS, ge=1
    )
    gradient_checkpointing: bool = _field(
        False, "recompute activations instead of storing them: slower, less memory", identity=False
    )
    proximal_mu: float = _field(
        0.1, "μ of FedProx: (μ/2)·‖w − w_t‖² is added to the loss", when={"algorithm": ("fedprox",)}, ge=0
    )
    strategy_options: dict[str, float | int | str | bool] = _field(
        {}, "other arguments of a strategy of Flower, such as {eta: 0.01}", when=FEDERATES
    )
    finetuning: Literal["full", "lora"] = _field("full", "train all weights, or low-rank adapters (LoRA)", when=TRAINS)
    lora_rank: int = _field(8, "rank of the adapters", when=ADAPTS, ge=1)
    lora_alpha: float = _field(
        16.0, "scale of the adapters: their product is multiplied by alpha / rank", when=ADAPTS, gt=0
    )
    lora_dropout: float = _field(0.0, "dropout before the adapters", when=ADAPTS, ge=0, lt=1)
    lora_targets: str | list[str] = _field(
        "all-linear", "modules that get adapters: all-linear, or a list of module names", when=ADAPTS
    )
    precision: Literal["fp32", "bf16"] = _field(
        "fp32",
        "of the computation; under bf16, trained weights stay fp32 and weights that LoRA freezes are bf16",
        when=TRAINS,
    )
    update_clip: float | None = _field(
        None, "norm that a client's update is clipped to; null: no clipping", when=FEDERATES, gt=0
    )
    update_noise: float = _field(
        0.0, "noise multiplier: the average gets Gaussian noise of update_noise · update_clip / n_clients; "
        "clipping and noise, no formal guarantee", when=FEDERATES, ge=0,
    )  # fmt: skip
    max_tokens: int = _field(256, "longest training example, in tokens", ge=8)
    train_seed: int = _field(0, "seed of the order of rows, of adapters and of noise", when=TRAINS, ge=0)
    loss_on: Literal["all", "response"] = _field("all", "tokens that the loss covers", when=TRAINS)
    weight_decay: float = _field(0.0, "AdamW weight decay", when=TRAINS, ge=0, le=1)
    utility_rows: int = _field(
        8, "test rows of each client that the model answers, to score its utility; 0: none", ge=0
    )
    utility_tokens: int = _field(64, "longest such answer, in tokens", ge=1)
    perplexity_rows: int = _field(
        64, "training, test and held-out rows of each client whose perplexity is measured, at most; 0: none", ge=0
    )
    torch_threads: int = _field(1, "CPU threads of torch; another number changes the last bits", ge=1, le=256)
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "where to train and generate", identity=False)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # a ValueError, which pydantic collects with its own; `create` turns all of them into one ConfigError
        if self.batch_size % self.gradient_accumulation:
            raise ValueError(
                f"gradient_accumulation: got {self.gradient_accumulation}; expected a divisor of batch_size = "
                f"{self.batch_size}, so that every part has as many rows"
            )
        if self.update_noise and self.update_clip is None:
            raise ValueError(
                f"update_noise: got {self.update_noise:g}; it needs update_clip, the norm that it is relative to"
            )
        if not self.lora_targets:
            raise ValueError(f"lora_targets: got {self.lora_targets!r}; expected all-linear, or a list of module names")
        return self

    @property
    def federates(self) -> bool:
        """Whether several clients' weights are averaged."""
        return self.algorithm in FEDERATES["algorithm"]

    @property
    def slug(self) -> str:
        model = Path(self.model).name.lower()  # of a hub id or a folder only the last part: slugs are folder names
        return f"{self.algorithm}-{model}" if self.algorithm == "none" else f"{self.algorithm}-{model}-{self.rounds}r"


class GenerateConfig(StageConfig):
    """Which prefixes of training texts the model continues, and how."""

    stage: ClassVar[str] = "generate"
    parent: ClassVar[str] = "train"
    shown: ClassVar[tuple[str, ...]] = (
        "checkpoint_round", "n_prefixes", "prefix_tokens", "decoding", "temperature", "top_k", "top_p",
        "max_new_tokens", "sample_seed", "decode_seed",
    )  # fmt: skip

    checkpoint_round: int | None = _field(None, "round whose global model is probed; None: the last", ge=0)
    n_prefixes: int = _field(32, "prefixes sampled from each client's training rows", ge=1)
    n_suffixes: int | None = _field(
        None, "suffixes searched per client, of member and of held-out rows each; None: as many as prefixes", ge=1
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
    generate_batch: int = _field(128, "prefixes continued at once; affects only speed", identity=False, ge=1)

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.min_input_tokens is not None and self.min_input_tokens <= self.prefix_tokens:
            raise ValueError(
                f"min_input_tokens: got {self.min_input_tokens}; expected more than prefix_tokens = "
                f"{self.prefix_tokens}, so that a suffix is left"
            )
        return self

    @property
    def least_input_tokens(self) -> int:
        """The length of the shortest input that is sampled, in tokens: min_input_tokens, or the paper's rule."""
        return self.min_input_tokens or self.prefix_tokens + 20

    def beyond_context(self, context: int | None, prompt_tokens: int) -> str:
        """Return why a prompt and its continuation exceed a model's context, and what to do; empty if they fit.

        context: tokens that the model's context holds; None: any number. prompt_tokens: of template and prefix.
        """
        total = prompt_tokens + self.max_new_tokens
        if context is None or total <= context:
            return ""
        left = context - prompt_tokens
        return (
            f"a prompt of {prompt_tokens} tokens (template and prefix_tokens = {self.prefix_tokens}) and "
            f"max_new_tokens = {self.max_new_tokens} are {total} tokens, and the model's context holds {context}: "
            + (f"lower max_new_tokens to at most {left}, or prefix_tokens" if left > 0 else "lower prefix_tokens")
        )

    @property
    def slug(self) -> str:
        return f"{self.decoding}-prefix{self.prefix_tokens}-{self.n_prefixes}"


class DetectConfig(StageConfig):
    """How continuations are searched for among the clients' texts, and what counts as the same text."""

    stage: ClassVar[str] = "detect"
    parent: ClassVar[str] = "generate"
    shown: ClassVar[tuple[str, ...]] = ("retriever", "top_n", "min_match_chars", "paraphrase_model")

    retriever: Literal["embedded", "elasticsearch"] = _field(
        "embedded", "search engine; embedded: tantivy in this process, elasticsearch: the server at FEDMEM_ES_URL"
    )
    top_n: int = _field(10, "suffixes of each client that a continuation is compared with", ge=1, le=10_000)
    max_query_terms: int = _field(
        1024, "distinct words that a query keeps, the first ones; a server accepts 1024 or more", ge=1, le=1024
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
        "en_core_web_sm", "spaCy model of the entity test, name or folder, where candidates are typed",
        when={"paraphrase_model": _AllBut("none")}, min_length=1,
    )  # fmt: skip
    detect_workers: int = _field(1, "processes that compare texts; affects only speed", identity=False, ge=1, le=256)

    @property
    def slug(self) -> str:
        return f"{self.retriever}-top{self.top_n}-{self.min_match_chars}chars"


class AnalyzeConfig(StageConfig):
    """Coverage of the intervals, and which continuations count as incoherent."""

    stage: ClassVar[str] = "analyze"
    parent: ClassVar[str] = "detect"
    shown: ClassVar[tuple[str, ...]] = ("confidence", "min_compression", "min_distinct")

    confidence: float = _field(0.95, "coverage of the intervals, (0, 1)", gt=0, lt=1)
    min_compression: float = _field(
        0.25, "a continuation that zlib compresses to less than this share is incoherent; 0: no test", ge=0, le=1
    )
    min_distinct: float = _field(
        0.5, "a continuation with a lower share of distinct 3-grams is incoherent; 0: no test", ge=0, le=1
    )

    @property
    def slug(self) -> str:
        return f"interval{self.confidence:g}"


# in the order of the pipeline
STAGES: dict[str, type[StageConfig]] = {
    model.stage: model for model in (PartitionConfig, TrainConfig, GenerateConfig, DetectConfig, AnalyzeConfig)
}

OWNER: dict[str, str] = StageConfig.owner  # filled by StageConfig whenever a subclass is defined


def create_all(values: dict[str, Any], origin: dict[str, str] | None = None) -> dict[str, StageConfig]:
    """Return all stages' models from one flat namespace, checked together.

    values: {parameter: value}; missing ones have their defaults. origin: {parameter: file or flag}, for messages.
    Raises ConfigError with every fault found.
    """
    origin = origin or {}
    # faults are collected, so that one run shows all of them
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
    """Check parameters across stages and return the models with derived values filled in.

    configs: {stage: model} of the first stages in order; without generate there is nothing to check.
    origin: {parameter: file or flag}, for messages.
    checkpoint_round becomes the number of the round, so that "the last" and its number identify the same stage.
    Raises ConfigError at the first values that do not fit together.
    """
    origin = origin or {}
    if "generate" not in configs:
        return configs
    partition, train, generate = (configs[stage] for stage in ("partition", "train", "generate"))
    last = 0 if train.algorithm == "none" else train.rounds  # round 0 is the model before training
    meant = last if generate.checkpoint_round is None else generate.checkpoint_round
    # not an error for the untrained model, whose only round is 0: a grid over algorithms may give all the same round
    if meant > last and train.algorithm != "none":
        raise ConfigError(
            f"{where('checkpoint_round', origin)}checkpoint_round: got {meant}; expected 0 to rounds = {last}"
        )
    # found here, from numbers alone: otherwise generation would fail only after the training
    n_suffixes = generate.n_suffixes or generate.n_prefixes
    for name, wanted, had in (
        ("n_prefixes", generate.n_prefixes, "train_rows"),
        ("n_suffixes", n_suffixes, "train_rows"),
        ("n_suffixes", n_suffixes, "heldout_rows"),  # the control has as many suffixes as the training rows
    ):
        rows = getattr(partition, had)
        # shares are known only when the rows are; heldout_rows 0: no control, or one from heldout_path
        if isinstance(rows, int) and rows and wanted > rows:
            raise ConfigError(
                f"{where(name, origin)}{name}: got {wanted}; a client has only {had} = {rows} "
                f"rows to sample from: lower {name} or raise {had}"
            )
    # a longer prefix would reach into text that the model has never seen
    if generate.prefix_tokens >= train.max_tokens:
        raise ConfigError(
            f"{where('prefix_tokens', origin)}prefix_tokens: got {generate.prefix_tokens}; training examples are cut "
            f"at max_tokens = {train.max_tokens}: expected less than that"
        )
    return configs | {"generate": generate.model_copy(update={"checkpoint_round": min(meant, last)})}


def markdown_table() -> str:
    """Return the README's table of all parameters: stage, parameter, default, allowed values, meaning."""
    lines = ["| stage | parameter | default | allowed | meaning |", "|---|---|---|---|---|"]
    for stage, model in STAGES.items():
        for name, field in model.model_fields.items():
            # :g, so that a whole float such as 1.0 reads 1
            default = f"{field.default:g}" if isinstance(field.default, float) else field.default
            default = "null" if default is None else default
            cells = (stage, f"`{name}`", default, allowed_words(model, name), field.description)
            # a bar in a cell would end it
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
