"""A study as a graph of stages: runs, and the jobs that they share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmem.config.parameter import StageConfig
from fedmem.config.stages import STAGES
from fedmem.results.identity import identity_of, stage_folder
from fedmem.results.studies import study_folder

DESCRIPTION = "study.json"  # of a study in results: every run with all its parameters


@dataclass(frozen=True)
class Job:
    """One stage to be published in `folder`; shared by all runs whose parameters agree up to here."""

    stage: str
    folder: Path
    identity: str
    config: StageConfig
    parent: "Job | None"

    @property
    def id(self) -> str:
        return f"{self.stage}-{self.folder.name}"

    @property
    def configs(self) -> dict[str, StageConfig]:
        """The parameters of the stage and of its ancestors by stage, a partition's first."""
        return (self.parent.configs if self.parent else {}) | {self.stage: self.config}

    def parameters(self) -> dict[str, Any]:
        """What the stage's notebook is given: its shown parameters, the others as options, and its parent's folder."""
        values = self.config.model_dump()
        shown = {name: values.pop(name) for name in self.config.shown}
        parent = {self.config.parent: f"{self.parent.stage}/{self.parent.folder.name}"} if self.parent else {}
        return parent | shown | {"options": values}


@dataclass(frozen=True)
class Run:
    """One point of a study's grid: a name, resolved parameters of every stage, and its jobs in order."""

    name: str
    configs: dict[str, StageConfig]
    jobs: dict[str, Job]
    resources: dict[str, dict[str, int]] = field(default_factory=dict)  # asked for by stage, as the files say


@dataclass(frozen=True)
class Study:
    """A named set of runs."""

    name: str
    title: str
    note: str  # what a reader of the report must know before its figures
    runs: tuple[Run, ...]

    @property
    def folder(self) -> Path:
        return study_folder(self.name)

    @property
    def jobs(self) -> dict[str, Job]:
        """Distinct jobs of all runs by id, parents first."""
        ordered = [run.jobs[stage] for stage in STAGES for run in self.runs]
        return {job.id: job for job in ordered}

    def shared_by(self, job: Job) -> int:
        """How many runs use a job."""
        return sum(run.jobs[job.stage].id == job.id for run in self.runs)

    def describe(self) -> dict[str, Any]:
        """The study as its report reads it: every run's resolved parameters and stage folders."""
        return {
            "name": self.name,
            "title": self.title,
            "note": self.note,
            "runs": [
                {
                    "name": run.name,
                    "parameters": {k: v for config in run.configs.values() for k, v in config.model_dump().items()},
                    "stages": {stage: f"{stage}/{job.folder.name}" for stage, job in run.jobs.items()},
                    "resources": run.resources,
                }
                for run in self.runs
            ],
        }


def jobs_of(configs: dict[str, StageConfig], known: dict) -> dict[str, Job]:
    """The jobs of one run; `known` keeps those made before, so that a file read from outside is digested once."""
    jobs, parent = {}, None
    for stage, config in configs.items():
        if (config, parent) not in known:
            identity = identity_of(config, parent.identity if parent else None)
            known[config, parent] = Job(stage, stage_folder(config, identity), identity, config, parent)
        parent = jobs[stage] = known[config, parent]
    return jobs
