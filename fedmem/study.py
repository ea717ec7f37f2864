"""A study's YAML, or the description of one in results, to a graph of notebook runs: what is done, what is to do.

A study names a base, fixes parameters and spans a grid; every point of the grid is a run, one path through the stages.
Stages that runs agree on are shared. The whole grid is validated before anything starts. How files say it is
`fedmem.study_files`'s matter. Nothing is executed here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmem import estimates, runs
from fedmem.config import STAGES, ConfigError, StageConfig, create_all
from fedmem.study_files import Point, absolute, points

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
                    "resources": run.resources,
                }
                for run in self.runs
            ],
        }


# --- reading --------------------------------------------------------------------------------------------------------


def load(
    path: str | Path, base: str | None = None, overrides: dict[str, Any] | None = None, name: str | None = None
) -> Study:
    """Reads and validates a study and everything it builds on.

    path: a study's YAML file; or a study in results, its folder or `study.json`, whose runs are taken as they were,
    parameter by parameter. `base` replaces the study's base, `overrides` ({parameter: value}) win over everything,
    `name` names the result. Raises ConfigError with the file, the key, what it got and what is allowed; nothing has
    been executed then.
    """
    path = Path(path)
    path = path / DESCRIPTION if path.is_dir() else path
    if path.name == DESCRIPTION:
        content, found_points = _described(path, base, overrides or {})
    else:
        content, found_points = points(path, base, overrides or {})
    name = name or content.get("name", path.stem)
    runs.check_study_name(name, f"{path}: name of a study")
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
    return Study(name, content.get("title", path.stem), content.get("note", ""), tuple(found.values()))


def _described(path: Path, base: str | None, overrides: dict[str, Any]) -> tuple[dict[str, Any], list[Point]]:
    """(description, Points) of a study that `Study.describe` wrote; every parameter is the file's or an override."""
    if base is not None:
        raise ConfigError(
            f"{path}: --base: got {base!r}; its runs say every parameter themselves: use --set, or the YAML"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        described = [(run["name"], run["parameters"], run.get("resources", {})) for run in content["runs"]]
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; a study's folder in results holds one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no description of a study ({type(error).__name__}: {error})") from None
    found = []
    for run, parameters, asked in described:
        origin = dict.fromkeys(parameters, f"{path}: {run}") | dict.fromkeys(overrides, "--set")
        found.append(Point(run, absolute(parameters | overrides), origin, asked))
    return content, found


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
    page = study.folder / "report.html"  # it comes after the rest
    if report.identity == expected and page.is_file() and not report.damaged() and _is_described(study):
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
        return "to do", f"its file {name} is missing or of another size"
    if stage.manifest["code"] != code[job.stage]:
        return "stale", "the code has changed"
    if job.parent:
        if states[job.parent.id] != "finished":
            return "stale", f"its {job.parent.stage} stage is {states[job.parent.id]}"
        if stage.parent_changed:
            return "stale", f"its {job.parent.stage} stage has other files now"
    return "finished", ""


def session_jobs(plan: Plan, found: Mapping[str, estimates.Estimate]) -> list[dict[str, Any]]:
    """The jobs of one session as `fedmem.execute` and the Snakefile read them; the report comes last.

    Each states its resources: what the study's files ask for, the rest by its estimate, `found` by its id.
    """
    names, asked = {job.id for job in plan.to_do}, estimates.asked(plan.study)
    entries = [
        _entry(job.id, job.stage, job.folder, job.parameters(), [job.parent.id] if job.parent else [])
        | {"resources": estimates.resources(found[job.id], asked.get(job.id)), "threads": _threads(job)}
        for job in plan.to_do
    ]
    for entry in entries:
        entry["after"] = [name for name in entry["after"] if name in names]
    return [*entries, report_job(plan.study.name, [e["id"] for e in entries if e["stage"] == "analyze"])]


def _threads(job: Job) -> int:
    """Processors that a job uses at once."""
    if job.stage in ("train", "generate"):
        return job.configs["train"].torch_threads
    return job.config.detect_workers if job.stage == "detect" else 1


def report_job(name: str, after: list[str] | None = None) -> dict[str, Any]:
    """The job of a study's report, which covers those runs whose analysis is finished; it needs the `study.json`."""
    return _entry("report", "studies", runs.results_root() / "studies" / name, {"study": name}, after or [])


def _entry(id_: str, stage: str, folder: Path, parameters: dict, after: list[str]) -> dict[str, Any]:
    environment = {"FEDMEM_RESULTS": str(runs.results_root())}
    return {
        "id": id_, "stage": stage, "folder": str(folder), "parameters": parameters, "after": after,
        "environment": environment, "threads": 1,
    }  # fmt: skip


def _description(study: Study) -> str:
    return json.dumps(study.describe(), indent=1, ensure_ascii=False) + "\n"


def _is_described(study: Study) -> bool:
    """Whether `study.json` in the study's folder says what the study is."""
    try:
        told = json.loads((study.folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return told == json.loads(_description(study))


def write_description(study: Study) -> None:
    """Writes `study.json`, which the report reads, into the study's folder."""
    study.folder.mkdir(parents=True, exist_ok=True)
    partial = study.folder / f".{DESCRIPTION}"
    partial.write_text(_description(study), encoding="utf-8")
    partial.replace(study.folder / DESCRIPTION)
