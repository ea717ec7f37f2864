"""A study's YAML to a graph of notebook runs: the grid, what is done already, what is to do.

A study names a base, fixes parameters and spans a grid; every point of the grid is a run, one path through the stages.
Stages that runs agree on are shared. The whole grid is validated before anything starts. Precedence: task < base <
study < grid < --set. Nothing is executed here but Snakemake, which runs `fedmem.execute` per stage.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmem import runs
from fedmem.config import STAGES, ConfigError, StageConfig, create_all
from fedmem.study_files import points


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
        return runs.study_folder(self.name)

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
                }
                for run in self.runs
            ],
        }


# --- reading --------------------------------------------------------------------------------------------------------


def load(
    path: str | Path, base: str | None = None, overrides: dict[str, Any] | None = None, name: str | None = None
) -> Study:
    """Reads and validates a study and everything it builds on.

    `base` replaces the study's base, `overrides` ({parameter: value}) win over everything, `name` names the result.
    Raises ConfigError with the file, the key, what it got and what is allowed; nothing has been executed then.
    """
    path = Path(path)
    runs.study_folder(name or path.stem)
    content, found_points = points(path, base, overrides or {})
    faults, found, known = [], {}, {}
    for point in found_points:
        try:
            configs = create_all(point.values, point.origin)
            run = Run(point.name, configs, jobs_of(configs, known), point.resources)
            if found.setdefault(point.name, run) != run:
                faults.append(f"{path}: two runs are named {point.name!r}: their grid values read alike")
        except (ConfigError, FileNotFoundError) as error:
            faults += str(error).splitlines()
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return Study(name or path.stem, content.get("title", path.stem), content.get("note", ""), tuple(found.values()))


def jobs_of(configs: dict[str, StageConfig], known: dict) -> dict[str, Job]:
    """The jobs of one run; `known` keeps those made before, so that a file read from outside is digested once."""
    jobs, parent = {}, None
    for stage, config in configs.items():
        if (config, parent) not in known:
            identity = runs.identity(config, parent.identity if parent else None)
            known[config, parent] = Job(stage, runs.stage_folder(config, identity), identity, config, parent)
        parent = jobs[stage] = known[config, parent]
    return jobs


# --- planning -------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What a study still needs: {job id: finished | stale | to do}, and the same for its report."""

    study: Study
    states: dict[str, str]
    report: str
    keep_stale: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def wanted(self, state: str) -> bool:
        return state == "to do" or (state == "stale" and not self.keep_stale)

    @property
    def to_do(self) -> list[Job]:
        """Jobs that are to be executed, parents first."""
        return [job for id_, job in self.study.jobs.items() if self.wanted(self.states[id_])]

    @property
    def report_to_do(self) -> bool:
        return bool(self.to_do) or self.wanted(self.report)


def plan(study: Study, keep_stale: bool = False) -> Plan:
    """States of all stages of a study; reads manifests, executes nothing."""
    code = {stage: runs.code_digest(stage) for stage in (*STAGES, "studies")}
    states, reasons = {}, {}
    for id_, job in study.jobs.items():
        states[id_], reasons[id_] = _state(job, code, states)
    result = Plan(study, states, "to do", keep_stale, reasons)
    try:
        report = runs.open_stage(study.folder)
    except runs.StageError:
        return result
    expected = runs.report_identity({run.name: run.jobs["analyze"].identity for run in study.runs})
    if report.identity == expected:
        stale = report.manifest["code"] != code["studies"] or "stale" in states.values()
        result.report = "stale" if stale else "finished"
    return result


def _state(job: Job, code: dict[str, str], states: dict[str, str]) -> tuple[str, str]:
    """(state, reason). A stage of other code or of another parent than the recorded one is stale."""
    try:
        stage = runs.open_stage(job.folder)
    except runs.StageError:
        return "to do", ""
    if stage.identity != job.identity:
        return "to do", "another stage lies in its folder"
    if name := stage.damaged():
        return "to do", f"its file {name} is missing or changed"
    if stage.manifest["code"] != code[job.stage]:
        return "stale", "the code has changed"
    if job.parent:
        if states[job.parent.id] != "finished":
            return "stale", f"its {job.parent.stage} stage is {states[job.parent.id]}"
        recorded = stage.manifest["parents"][0]["files"]
        if recorded != runs.open_stage(job.parent.folder).files_digest:
            return "stale", f"its {job.parent.stage} stage has other files now"
    return "finished", ""


def session_jobs(plan: Plan) -> list[dict[str, Any]]:
    """The jobs of one session as `fedmem.execute` and the Snakefile read them; the report comes last."""
    names = {job.id for job in plan.to_do}
    entries = [
        _entry(job.id, job.stage, job.folder, job.parameters(), [job.parent.id] if job.parent else [])
        for job in plan.to_do
    ]
    for entry in entries:
        entry["after"] = [name for name in entry["after"] if name in names]
    return [*entries, report_job(plan.study, [e["id"] for e in entries if e["stage"] == "analyze"])]


def report_job(study: Study, after: list[str]) -> dict[str, Any]:
    """The job of a study's report, which covers those runs whose analysis is finished."""
    return report_of(study.name, after)


def report_of(name: str, after: list[str] | None = None) -> dict[str, Any]:
    """The job of the report of a study that has its `study.json` already."""
    return _entry("report", "studies", runs.results_root() / "studies" / name, {"study": name}, after or [])


def _entry(id_: str, stage: str, folder: Path, parameters: dict, after: list[str]) -> dict[str, Any]:
    environment = {"FEDMEM_RESULTS": str(runs.results_root())}
    return {
        "id": id_, "stage": stage, "folder": str(folder), "parameters": parameters, "after": after,
        "environment": environment,
    }  # fmt: skip


def write_description(study: Study) -> None:
    """Writes `study.json`, which the report reads, into the study's folder."""
    study.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(study.describe(), indent=1, ensure_ascii=False)
    (study.folder / "study.json").write_text(text + "\n", encoding="utf-8")
