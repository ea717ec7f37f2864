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
    """One stage, to be published in `folder`; shared by all runs with the same parameters up to this stage."""

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
        """The parameters of the stage and of its ancestors, by stage, in the order of the stages."""
        return (self.parent.configs if self.parent else {}) | {self.stage: self.config}

    def parameters(self) -> dict[str, Any]:
        """The arguments of the stage's notebook: parent folder, shown parameters, and all others in `options`."""
        values = self.config.model_dump()
        shown = {name: values.pop(name) for name in self.config.shown}
        parent = {self.config.parent: f"{self.parent.stage}/{self.parent.folder.name}"} if self.parent else {}
        return parent | shown | {"options": values}


@dataclass(frozen=True)
class Run:
    """One point of a study's grid: its name, the parameters of every stage, and its jobs in the order of the stages."""

    name: str
    configs: dict[str, StageConfig]
    jobs: dict[str, Job]
    resources: dict[str, dict[str, int]] = field(default_factory=dict)  # by stage, as requested in the files


@dataclass(frozen=True)
class Study:
    """A named set of runs."""

    name: str
    title: str
    note: str  # what a reader must know before the report's figures
    runs: tuple[Run, ...]

    @property
    def folder(self) -> Path:
        return study_folder(self.name)

    @property
    def jobs(self) -> dict[str, Job]:
        """Distinct jobs of all runs by id, parents first."""
        # stage by stage, so that parents precede children; the dict keeps the first of each id
        ordered = [run.jobs[stage] for stage in STAGES for run in self.runs]
        return {job.id: job for job in ordered}

    def shared_by(self, job: Job) -> int:
        """Return how many runs use the job."""
        return sum(run.jobs[job.stage].id == job.id for run in self.runs)

    def describe(self) -> dict[str, Any]:
        """Return the content of `study.json`, which the report reads: each run's parameters, stages and resources."""
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
    """Return the jobs of one run. known: the jobs made before; it is extended, so that a corpus is hashed only once."""
    jobs, parent = {}, None
    for stage, config in configs.items():
        if (config, parent) not in known:
            identity = identity_of(config, parent.identity if parent else None)
            known[config, parent] = Job(stage, stage_folder(config, identity), identity, config, parent)
        parent = jobs[stage] = known[config, parent]
    return jobs
