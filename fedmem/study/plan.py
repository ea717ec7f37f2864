"""What of a study is finished, stale or still to do, and the jobs of the session that does it. Executes nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmem.config.stages import STAGES
from fedmem.machine.paths import digest_of, read_object, results_root
from fedmem.results.code_files import changed_files, code_files
from fedmem.results.stage import MANIFEST, StageError, open_stage
from fedmem.results.studies import report_identity
from fedmem.study import estimates
from fedmem.study.estimates import Estimate
from fedmem.study.jobs import DESCRIPTION, Job, Study

# --- planning -------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The states of a study's jobs: {job id: finished | stale | to do}, and the state of its report.

    keep_stale: stale stages are kept instead of repeated. reasons: {job id, or "report": why it is not finished}.
    """

    study: Study
    states: dict[str, str]
    report: str
    keep_stale: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def wanted(self, state: str) -> bool:
        """Whether a job in this state is executed."""
        return state == "to do" or (state == "stale" and not self.keep_stale)

    @property
    def to_do(self) -> list[Job]:
        """Jobs to execute, parents first."""
        return [job for id_, job in self.study.jobs.items() if self.wanted(self.states[id_])]

    def why(self, id_: str, state: str) -> str:
        """The state of a job, or of the "report", with its reason where there is one."""
        return f"{state}: {self.reasons[id_]}" if self.reasons.get(id_) else state

    @property
    def report_to_do(self) -> bool:
        """Whether the report is written: it is not finished, or a job that it reads is executed."""
        return bool(self.to_do) or self.wanted(self.report)


def make_plan(study: Study, keep_stale: bool = False) -> Plan:
    """Return the states of all stages of a study; reads manifests, executes nothing.

    keep_stale: keep stale stages instead of repeating them.
    """
    # once for each kind of stage: a digest reads source files, and a study may have many jobs
    code = {stage: code_files(stage) for stage in (*STAGES, "studies")}
    states, reasons = {}, {}
    for id_, job in study.jobs.items():
        states[id_], reasons[id_] = _state(job, code, states)
    result = Plan(study, states, "to do", keep_stale, reasons)
    try:
        report = open_stage(study.folder)
    except StageError:
        return result
    expected = report_identity({run.name: run.jobs["analyze"].identity for run in study.runs})
    page = study.folder / "report.html"  # written after the manifest, so a published report may lack it
    if report.identity == expected and page.is_file() and not report.damaged() and _is_described(study):
        result.report = "stale" if "stale" in states.values() else "finished"
        if report.manifest["code"] != digest_of(code["studies"]):
            result.report, then = "stale", report.manifest.get("code_files", {})
            reasons["report"] = "the code has changed" + changed_files(then, code["studies"])
    return result


def _state(job: Job, code: dict[str, dict[str, str]], states: dict[str, str]) -> tuple[str, str]:
    """Return (state, reason) of a job. A stage is stale if the code or its parent changed since it was published.

    states: the states of the jobs before it, its parent's among them.
    """
    try:
        stage = open_stage(job.folder)
    except StageError as error:
        return "to do", str(error) if (job.folder / MANIFEST).exists() else ""
    if stage.identity != job.identity:
        return "to do", "its folder contains another stage"
    if name := stage.damaged():
        return "to do", f"its file {name} is missing or of another size"
    if stage.manifest["code"] != digest_of(code[job.stage]):
        return "stale", "the code has changed" + changed_files(stage.manifest.get("code_files", {}), code[job.stage])
    if job.parent:
        if states[job.parent.id] != "finished":
            return "stale", f"its {job.parent.stage} stage is {states[job.parent.id]}"
        if stage.parent_changed:
            return "stale", f"its {job.parent.stage} stage has changed files"
    return "finished", ""


def session_jobs(plan: Plan, found: Mapping[str, Estimate]) -> list[dict[str, Any]]:
    """Return the jobs of one session in the form that `fedmem.study.execute` and the Snakefile read; the report is
    last.

    found: {job id: estimate}, for the resources that the study's files do not request.
    """
    names, asked = {job.id for job in plan.to_do}, estimates.stated_resources(plan.study)
    entries = [
        _entry(job.id, job.stage, job.folder, job.parameters(), [job.parent.id] if job.parent else [])
        | {"resources": estimates.resources(found[job.id], asked.get(job.id)), "threads": _threads(job)}
        for job in plan.to_do
    ]
    # a finished parent is not part of the session, so no job can wait for it
    for entry in entries:
        entry["after"] = [name for name in entry["after"] if name in names]
    return [*entries, report_job(plan.study.name, [e["id"] for e in entries if e["stage"] == "analyze"])]


def _threads(job: Job) -> int:
    """Return how many processors a job uses at once."""
    if job.stage in ("train", "generate"):
        return job.configs["train"].torch_threads
    return job.config.detect_workers if job.stage == "detect" else 1


def report_job(name: str, after: list[str] | None = None) -> dict[str, Any]:
    """Return the job of a study's report, which covers the runs with a finished analysis and reads `study.json`.

    name: the study's name. after: ids of the jobs that it waits for.
    """
    return _entry("report", "studies", results_root() / "studies" / name, {"study": name}, after or [])


def _entry(id_: str, stage: str, folder: Path, parameters: dict, after: list[str]) -> dict[str, Any]:
    # absolute, since a job may run in another process and folder than the command
    return {
        "id": id_, "stage": stage, "folder": str(folder), "parameters": parameters, "after": after,
        "environment": {"FEDMEM_RESULTS": str(results_root())}, "threads": 1,
    }  # fmt: skip


def description_of(study: Study) -> str:
    return json.dumps(study.describe(), indent=1, ensure_ascii=False) + "\n"


def _is_described(study: Study) -> bool:
    """Whether `study.json` in the study's folder describes this study."""
    # both from JSON: tuples and keys that are not strings compare equal only after a round trip
    return read_object(study.folder / DESCRIPTION) == json.loads(description_of(study))


def write_description(study: Study) -> None:
    """Write `study.json`, which the report reads, into the study's folder."""
    study.folder.mkdir(parents=True, exist_ok=True)
    # renamed when complete, so that a report never reads half a file
    partial = study.folder / f".{DESCRIPTION}"
    partial.write_text(description_of(study), encoding="utf-8")
    partial.replace(study.folder / DESCRIPTION)
