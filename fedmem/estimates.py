"""What stages will take: seconds, memory, disk, GPUs; before anything runs.

A rule (`fedmem.cost_rules`) gives each figure. Where stages of the same kind are finished in results, it is corrected
by how far off it was for the nearest of them, the one whose seconds by the rule differ least in ratio, if that ratio is
at most NEAR. These are orders of magnitude, to choose a machine and an evening by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fedmem import gpus, runs
from fedmem.config import StageConfig
from fedmem.cost_rules import PAGE_MB, START_SECONDS, UNKNOWN_MODEL, Estimate, building, rule
from fedmem.model_sizes import size_of

if TYPE_CHECKING:
    from fedmem.study import Job, Study

__all__ = ["Estimate", "Past", "asked", "estimate", "hours", "of", "report_estimate", "resources", "rule"]

NEAR = 300  # a finished stage this many times larger or smaller says nothing
LARGE = 50_000_000  # parameters from which `device: auto` asks for a GPU where there is one


# --- what past stages took ------------------------------------------------------------------------------------------


class Past:
    """The finished stages of results, and what the rule would have said of them."""

    def __init__(self):
        self._known: dict[str, list[tuple[Estimate, Estimate]]] = {}

    def nearest(self, stage: str, guess: Estimate) -> tuple[Estimate, Estimate] | None:
        """(by the rule, measured) of the finished stage of this kind that is nearest to a guess; None: none is near."""
        known = [pair for pair in self._of(stage) if pair[0].gpu == guess.gpu]
        best = min(known, key=lambda pair: _far(pair[0], guess), default=None)
        return best if best and _far(best[0], guess) <= math.log(NEAR) else None

    def _of(self, stage: str) -> list[tuple[Estimate, Estimate]]:
        if stage not in self._known:
            self._known[stage] = [pair for one in runs.finished(stage) if (pair := _measured(one))]
        return self._known[stage]


def _far(one: Estimate, other: Estimate) -> float:
    return abs(math.log(one.seconds / other.seconds))


def _measured(stage: runs.Stage) -> tuple[Estimate, Estimate] | None:
    """What the rule says of a finished stage, and what it took; None when its parameters are of other code."""
    try:
        configs = stage.configs
    except (ValueError, runs.StageError):
        return None
    manifest = stage.manifest
    said = rule(configs, stage.name, int(manifest.get("device", "cpu").startswith("cuda")))
    took = replace(
        said,
        seconds=START_SECONDS[stage.name] + manifest["seconds"],
        mem_mb=manifest.get("peak_memory_mb") or said.mem_mb,
        disk_mb=PAGE_MB + sum(manifest["sizes"].values()) / 1e6,
        source=f"like {stage.name}/{stage.folder.name}",
    )
    return said, took


# --- jobs -----------------------------------------------------------------------------------------------------------


def estimate(job: Job, stated: Mapping[str, int] | None = None, past: Past | None = None) -> Estimate:
    """What a job will take. stated: resources that files state for it (gpu decides here where it computes)."""
    configs = job.configs
    guess = rule(configs, job.stage, (stated or {}).get("gpu", _wants_gpu(job, configs)))
    nearest = past.nearest(job.stage, guess) if past else None
    first = building(configs["train"].model) if job.stage == "train" else 0
    if nearest is None:
        return replace(guess, seconds=guess.seconds + first)
    said, took = nearest
    scaled = {
        name: getattr(guess, name) * getattr(took, name) / getattr(said, name)
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


def asked(study: Study) -> dict[str, dict[str, int]]:
    """Resources that the study's files state, by job; of runs that share a job, the largest."""
    found: dict[str, dict[str, int]] = {}
    for run in study.runs:
        for stage, job in run.jobs.items():
            for name, amount in run.resources.get(stage, {}).items():
                mine = found.setdefault(job.id, {})
                mine[name] = max(amount, mine.get(name, 0))
    return found


def resources(guess: Estimate, stated: Mapping[str, int] | None = None) -> dict[str, int]:
    """What a job asks of a machine or a cluster: mem_mb, runtime (minutes), disk_mb, gpu.

    Its estimate with room (memory a quarter more, time three times and ten minutes), unless files state it (`stated`).
    """
    own = {
        "mem_mb": math.ceil(guess.mem_mb * 1.25),
        "runtime": math.ceil(guess.seconds * 3 / 60) + 10,
        "disk_mb": math.ceil(guess.disk_mb * 1.25),
        "gpu": guess.gpu,
    }
    return own | dict(stated or {})


def report_estimate(n_runs: int) -> Estimate:
    """What a study's report takes."""
    return Estimate(20 + 1.0 * n_runs, 800 + 2.0 * n_runs, 0, 3 + 0.2 * n_runs, 0)


def hours(jobs: list[Job], found: Mapping[str, Estimate], cores: int, devices: int) -> float:
    """Hours that jobs take at the least: the longest path, or all seconds over all cores, or GPU seconds over GPUs."""
    longest: dict[str, float] = {}
    for job in jobs:
        longest[job.id] = found[job.id].seconds + (longest.get(job.parent.id, 0) if job.parent else 0)
    everything = sum(found[job.id].seconds for job in jobs) / max(1, cores)
    on_gpus = sum(found[job.id].seconds for job in jobs if found[job.id].gpu) / max(1, devices)
    return max([everything, on_gpus, *longest.values()], default=0.0) / 3600


def of(study: Study) -> dict[str, Estimate]:
    """Estimates of a study's jobs, by id."""
    stated, past = asked(study), Past()
    return {job.id: estimate(job, stated.get(job.id), past) for job in study.jobs.values()}
