"""What stages will take, before anything runs: seconds, memory, disk, GPUs.

A rule gives each figure, from a stage's parameters and the model's size, for one CPU core or one GPU. Where stages of
the same kind are finished in results, it is corrected by how far off it was for the nearest of them, the one whose
seconds by the rule differ least in ratio, if that ratio is at most NEAR. These are orders of magnitude, to choose a
machine and an evening by.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from fedmem.config.parameter import StageConfig
from fedmem.machine.paths import results_root
from fedmem.models.config_files import Size, size_of
from fedmem.models.presets.recipes import RECIPES, shipped
from fedmem.results.stage import MANIFEST, Stage, StageError, finished_stages
from fedmem.study import gpus
from fedmem.study.jobs import Job, Study

UNKNOWN_MODEL = Size(10**9, 25, 1600, 400, 130_000)  # assumed for a model of unknown size

TEXT_TOKENS = {"summarization": 260, "dialog": 330, "qa": 380, "classification": 70}  # of a training example

TOKENS_PER_WORD, CHARS_PER_TOKEN = 1.9, 5  # of the synthetic corpus with its small vocabulary; of any text

# Operations per second of one CPU core, and of one GPU of the kind that trains models of 3B parameters. Training takes
# 6 operations per parameter and token, generation 2; a GPU generates no faster than it reads the weights.
TRAINS = {("cpu", "fp32"): 3e10, ("cpu", "bf16"): 1e10, ("gpu", "fp32"): 2e13, ("gpu", "bf16"): 1.5e14}

WRITES = {"cpu": 5e9, "gpu": 1e13}

READS = 1.5e12  # bytes per second, of a GPU's memory

PAIR_SECONDS = 1.5e-4  # to compare a continuation with a suffix, for every 200 tokens of the two

ROW_SECONDS = 2e-3  # to assign a row to a client, including the search for copies

START_SECONDS = {"partition": 8, "train": 12, "generate": 12, "detect": 8, "analyze": 10}  # kernel, imports, page

START_MB = {"partition": 500, "train": 900, "generate": 800, "detect": 500, "analyze": 500}

PAGE_MB = 2  # executed notebook, its page and figures


@dataclass(frozen=True)
class Estimate:
    """Time in seconds; host memory, GPU memory and disk in MB; number of GPUs; and the source of the figures."""

    seconds: float
    mem_mb: float
    gpu_mb: float
    disk_mb: float
    gpu: int
    source: str = "rule"


def estimate_by_rule(configs: Mapping[str, StageConfig], stage: str, gpu: int = 0) -> Estimate:
    """Estimate what a stage takes.

    configs: {stage: its StageConfig} of the stage and its ancestors. stage: a key of RULES.
    gpu: number of GPUs that it has, 0 for none; only whether there is one changes time and memory.
    """
    seconds, mem_mb, gpu_mb, disk_mb = RULES[stage](configs, gpu)
    host = START_MB[stage] + mem_mb
    return Estimate(START_SECONDS[stage] + seconds, host, gpu_mb, PAGE_MB + disk_mb, gpu)


def _partition(configs, gpu):
    rows, tokens = _dealt(configs["partition"]), _tokens(configs["partition"])
    text_mb = rows * tokens * CHARS_PER_TOKEN / 1e6
    return rows * ROW_SECONDS, 8 * text_mb, 0, 1.5 * text_mb


def _train(configs, gpu):
    partition, train = configs["partition"], configs["train"]
    size, kind = size_of(train.model) or UNKNOWN_MODEL, "gpu" if gpu else "cpu"
    rows, clients = _rows(partition, "train"), partition.n_clients
    tokens = min(_tokens(partition), train.max_tokens)
    trains = train.algorithm != "none"
    rounds = train.rounds if trains else 0
    if train.local_steps is not None:
        passes = rounds * train.local_steps * train.batch_size * clients
    else:
        passes = rounds * train.local_epochs * rows
    tested = (rounds + 1) * _rows(partition, "test")
    measured = 2 * 3 * clients * min(train.perplexity_rows, rows / clients)
    answered = 2 * clients * train.utility_rows * train.utility_tokens
    precision = train.precision if trains else "fp32"
    seconds = (6 * passes + 2 * (tested + measured)) * tokens * size.parameters / TRAINS[kind, precision]
    seconds += _writing(size, answered, 16, kind)

    lora = train.finetuning == "lora" and trains
    # rank · (rows + columns) of every linear layer: 8 hidden widths of attention and 12 of the inner layer
    trained = 20 * size.hidden * size.layers * train.lora_rank if lora else size.parameters
    frozen = size.parameters * (2 if precision == "bf16" else 4) if lora else 0
    state = trained * (4 + 4 + 8 + 4 * (train.algorithm == "fedprox")) if trains else 4 * size.parameters
    lines = train.batch_size / train.gradient_accumulation * tokens  # tokens in memory at once
    kept = 2 if train.gradient_checkpointing else 16  # activations of a layer, in hidden widths
    inside = lines * (3 * size.vocabulary + kept * size.layers * size.hidden) * 4 if trains else 0
    sent = 3 * 4 * trained if trains and train.algorithm != "central" else 0  # global weights, sum, one answer
    on_device, on_host = (frozen + state + inside) / 1e6, sent / 1e6
    models = clients if train.algorithm == "local" else 1
    saved = models * (rounds + 1) * (4 * (trained if lora else size.parameters) + 100 * size.vocabulary)
    return seconds, on_host + (4 * size.parameters / 1e6 if gpu else on_device), on_device * bool(gpu), saved / 1e6


def _generate(configs, gpu):
    partition, generate = configs["partition"], configs["generate"]
    size, kind = size_of(configs["train"].model) or UNKNOWN_MODEL, "gpu" if gpu else "cpu"
    prefixes = partition.n_clients * generate.n_prefixes
    written = prefixes * generate.max_new_tokens
    batch = min(generate.generate_batch, prefixes)
    held = batch * (generate.prefix_tokens + generate.max_new_tokens) * size.layers * size.keys * 2 * 4
    model_mb = (4 * size.parameters + held + 2 * 4 * batch * size.vocabulary) / 1e6
    read = _dealt(partition) * _tokens(partition) * CHARS_PER_TOKEN / 1e6
    disk_mb = (written + 3 * prefixes * _tokens(partition)) * CHARS_PER_TOKEN / 1e6
    seconds = _writing(size, written, generate.generate_batch, kind)
    return seconds, 6 * read + (4 * size.parameters / 1e6 if gpu else model_mb), model_mb * bool(gpu), disk_mb


def _detect(configs, gpu):
    generate, detect = configs["generate"], configs["detect"]
    prefixes, clients = configs["partition"].n_clients * generate.n_prefixes, configs["partition"].n_clients
    suffixes = generate.n_suffixes or generate.n_prefixes
    controls = 1 + bool(_rows(configs["partition"], "heldout"))
    pairs = prefixes * clients * min(detect.top_n, suffixes) * controls
    text_mb = clients * suffixes * controls * _tokens(configs["partition"]) * CHARS_PER_TOKEN / 1e6
    length = (_tokens(configs["partition"]) + generate.max_new_tokens) / 200
    seconds = pairs * length * PAIR_SECONDS / detect.detect_workers
    return seconds, 300 * (detect.detect_workers - 1) + 10 * text_mb + pairs * 2e-4, 0, text_mb + pairs * 2e-5


def _analyze(configs, gpu):
    clients = configs["partition"].n_clients
    lines = clients * configs["generate"].n_prefixes * clients  # a prefix and a client that it may hit
    return 5 + lines * 2e-5, lines * 1e-3, 0, lines * 1e-5


RULES = {"partition": _partition, "train": _train, "generate": _generate, "detect": _detect, "analyze": _analyze}


def _writing(size: Size, tokens: float, batch: int, kind: str) -> float:
    """Return the seconds to generate tokens, `batch` texts at once."""
    seconds = 2 * size.parameters * tokens / WRITES[kind]
    return max(seconds, tokens / batch * 4 * size.parameters / READS) if kind == "gpu" else seconds


def _rows(partition: StageConfig, split: str) -> float:
    """Return the rows of all clients in a split."""
    count = partition.split_rows[split]
    return partition.n_clients * count if isinstance(count, int) else count * _dealt(partition)


def _dealt(partition: StageConfig) -> float:
    """Return the rows of all clients together; a guess if the splits are shares and the corpus is not synthetic."""
    counts = partition.split_rows.values()
    if all(isinstance(count, int) for count in counts):
        return partition.n_clients * sum(counts)
    return partition.n_groups * partition.synthetic_rows if partition.synthetic_rows else 1000 * partition.n_clients


def _tokens(partition: StageConfig) -> float:
    """Return the mean number of tokens of a training example."""
    if partition.corpus == "synthetic":
        return 20 + TOKENS_PER_WORD * partition.synthetic_words
    return TEXT_TOKENS[partition.task]


def build_seconds(model: str) -> float:
    """Return the seconds to build a preset on first use; 0 for a model that exists or is no such preset."""
    recipe, kept = RECIPES.get(model), results_root() / "models" / model / MANIFEST
    if recipe is None or shipped(model) or kept.is_file():
        return 0
    rows = recipe.steps * recipe.rows_per_step + recipe.rehearsals * recipe.rehearsed_rows
    tokens = rows * (20 + TOKENS_PER_WORD * 60)
    return 6 * size_of(model).parameters * tokens / TRAINS["cpu", "fp32"]


NEAR = 300  # a finished stage with a larger ratio of seconds is too different to correct an estimate

LARGE = 50_000_000  # parameters; from this size on, `device: auto` requests a GPU if there is one


# --- measured costs of past stages ------------------------------------------------------------------------------------


class Past:
    """The finished stages in results: their measured costs, and the rule's estimates for them."""

    def __init__(self):
        # read once: a plan asks for each of its jobs
        self._known = cache(lambda stage: [pair for one in finished_stages(stage) if (pair := _measured(one))])

    def nearest(self, stage: str, guess: Estimate) -> tuple[Estimate, Estimate] | None:
        """Return (estimate by the rule, measured cost) of the finished stage that is nearest to `guess`, or None."""
        # a stage on a GPU cannot correct an estimate for a CPU, nor the reverse
        known = [pair for pair in self._known(stage) if pair[0].gpu == guess.gpu]
        best = min(known, key=lambda pair: _far(pair[0], guess), default=None)
        return best if best and _far(best[0], guess) <= math.log(NEAR) else None


def _far(one: Estimate, other: Estimate) -> float:
    return abs(math.log(one.seconds / other.seconds))


def _measured(stage: Stage) -> tuple[Estimate, Estimate] | None:
    """Return (estimate by the rule, measured cost) of a finished stage; None when its parameters are not readable."""
    try:
        configs = stage.configs
    except (ValueError, StageError):  # parameters of another version of fedmem
        return None
    manifest = stage.manifest
    guess = estimate_by_rule(configs, stage.name, int(manifest.get("device", "cpu").startswith("cuda")))
    took = replace(
        guess,
        seconds=START_SECONDS[stage.name] + manifest["seconds"],
        mem_mb=manifest.get("peak_memory_mb") or guess.mem_mb,
        disk_mb=PAGE_MB + sum(manifest["sizes"].values()) / 1e6,
        source=f"like {stage.name}/{stage.folder.name}",
    )
    return guess, took


# --- jobs -----------------------------------------------------------------------------------------------------------


def estimate(job: Job, stated: Mapping[str, int] | None = None, past: Past | None = None) -> Estimate:
    """Estimate the cost of a job.

    job: a job of a study. stated: resources that the study's files state for it; only `gpu` matters here (0: CPU).
    past: finished stages that correct the estimate; None: the rule alone. Returns an Estimate.
    """
    configs = job.configs
    guess = estimate_by_rule(configs, job.stage, (stated or {}).get("gpu", _wants_gpu(job, configs)))
    nearest = past.nearest(job.stage, guess) if past else None
    # the build of a preset, on first use only, is added after the scaling: the rule does not contain it
    first = build_seconds(configs["train"].model) if job.stage == "train" else 0
    if nearest is None:
        return replace(guess, seconds=guess.seconds + first)
    predicted, took = nearest
    scaled = {
        name: getattr(guess, name) * getattr(took, name) / getattr(predicted, name)
        for name in ("seconds", "mem_mb", "disk_mb")
    }
    return replace(guess, **scaled | {"seconds": scaled["seconds"] + first}, source=took.source)


def _wants_gpu(job: Job, configs: Mapping[str, StageConfig]) -> int:
    if job.stage not in ("train", "generate") or configs["train"].device == "cpu":
        return 0
    if configs["train"].device == "cuda":
        return 1
    size = size_of(configs["train"].model) or UNKNOWN_MODEL
    return int(size.parameters >= LARGE and bool(gpus.visible()))


def stated_resources(study: Study) -> dict[str, dict[str, int]]:
    """Return the resources that the study's files state, by job id; for a job that runs share, the largest."""
    found: dict[str, dict[str, int]] = {}
    for run in study.runs:
        for stage, job in run.jobs.items():
            for name, amount in run.resources.get(stage, {}).items():
                mine = found.setdefault(job.id, {})
                mine[name] = max(amount, mine.get(name, 0))
    return found


def resources(guess: Estimate, stated: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the resources that a job requests from a machine or a cluster: mem_mb, runtime (minutes), disk_mb, gpu.

    They are the estimate plus a margin: memory and disk × 1.25, time × 3 plus ten minutes. Values in `stated` win.
    """
    own = {
        "mem_mb": math.ceil(guess.mem_mb * 1.25),
        "runtime": math.ceil(guess.seconds * 3 / 60) + 10,
        "disk_mb": math.ceil(guess.disk_mb * 1.25),
        "gpu": guess.gpu,
    }
    return own | dict(stated or {})


def report_estimate(n_runs: int) -> Estimate:
    """Estimate the cost of the report of a study of `n_runs` runs."""
    return Estimate(20 + 1.0 * n_runs, 800 + 2.0 * n_runs, 0, 3 + 0.2 * n_runs, 0)


def least_hours(jobs: list[Job], found: Mapping[str, Estimate], cores: int, devices: int) -> float:
    """Return a lower bound of the hours that jobs take together: the largest of three bounds.

    The bounds are the longest path, all seconds over all cores, and GPU seconds over GPUs.
    jobs: parents before children. found: estimates by job id. cores, devices: numbers of CPU cores and GPUs, >= 0.
    """
    longest: dict[str, float] = {}
    for job in jobs:
        longest[job.id] = found[job.id].seconds + (longest.get(job.parent.id, 0) if job.parent else 0)
    everything = sum(found[job.id].seconds for job in jobs) / max(1, cores)
    on_gpus = sum(found[job.id].seconds for job in jobs if found[job.id].gpu) / max(1, devices)
    return max([everything, on_gpus, *longest.values()], default=0.0) / 3600


def estimate_study(study: Study) -> dict[str, Estimate]:
    """Return the estimates of a study's jobs, by id."""
    stated, past = stated_resources(study), Past()
    return {job.id: estimate(job, stated.get(job.id), past) for job in study.jobs.values()}
