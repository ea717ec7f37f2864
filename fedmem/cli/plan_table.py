"""The output of `fedmem plan`: the table of stages, the savings by sharing, the estimated cost, and the problems."""

from collections.abc import Iterator, Mapping

from fedmem.config.stages import STAGES
from fedmem.study import estimates, gpus
from fedmem.study.estimates import Estimate
from fedmem.study.jobs import Job
from fedmem.study.plan import Plan
from fedmem.study.preflight import Problem, find_problems

HEADINGS = ("stage", "folder", "state", "runs", "time", "memory", "disk", "estimated")
HEADINGS_OF_PROBLEMS = {
    True: "problems that are certain to stop it:",
    False: "problems, if it runs on this machine and network and the estimates are right:",
}


def plan_lines(plan: Plan, cores: int = 1) -> tuple[list[str], list[Problem]]:
    """The lines to print, and the problems found.

    plan: the plan of a study. cores: stages that run at the same time, ≥ 1; the estimated hours depend on it. The GPUs
    are those of this machine, at least one.
    """
    jobs = list(plan.study.jobs.values())
    found = estimates.estimate_study(plan.study)
    problems = find_problems(plan, found)
    lines = [*_table(plan, jobs, found), "", *_sharing(plan, jobs), *_totals(plan, found, cores)]
    for certain, heading in HEADINGS_OF_PROBLEMS.items():
        listed = [f"  {problem}" for problem in problems if problem.certain is certain]
        lines += ["", heading, *listed] if listed else []
    return lines, problems


def _table(plan: Plan, jobs: list[Job], found: Mapping[str, Estimate]) -> list[str]:
    rows = [HEADINGS]
    for job in jobs:
        state, reason, one = plan.states[job.id], plan.reasons[job.id], found[job.id]
        wanted = plan.wanted(state)
        rows.append(
            (job.stage, job.folder.name, f"{state}: {reason}" if reason else state, str(plan.study.shared_by(job)))
            + ((duration(one.seconds), *_sizes(one), one.source) if wanted else ("", "", "", ""))
        )
    report = estimates.report_estimate(len(plan.study.runs))
    timed = duration(report.seconds) if plan.report_to_do else ""
    rows.append(("report", plan.study.name, plan.report, str(len(plan.study.runs)), timed, "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _sharing(plan: Plan, jobs: list[Job]) -> Iterator[str]:
    runs = len(plan.study.runs)
    naive = runs * len(STAGES) + 1  # the report is one notebook more
    by_stage = ", ".join(f"{sum(job.stage == stage for job in jobs)} {stage}" for stage in STAGES)
    shared = f"{len(jobs) + 1} where runs share stages ({by_stage}, the report)"
    yield f"{runs} run{'s' * (runs > 1)}: {naive} notebooks one by one, {shared}"
    to_do = len(plan.to_do) + plan.report_to_do
    stale = sum(state == "stale" for state in plan.states.values())
    yield f"to do: {to_do} notebooks" + (f", {stale} of them stale" if stale and not plan.keep_stale else "")


def _totals(plan: Plan, found: Mapping[str, Estimate], cores: int) -> Iterator[str]:
    to_do = plan.to_do
    if not to_do:
        return
    devices = max(1, len(gpus.visible()))  # at least one: the machine that plans may have no GPU
    hours = estimates.least_hours(to_do, found, cores, devices)
    with_gpu = [found[job.id].gpu_mb for job in to_do if found[job.id].gpu]
    at_once = f"{cores} at once" + f" on {devices} GPU" * bool(with_gpu)
    memory = size(max(found[job.id].mem_mb for job in to_do))
    # disk adds up over all stages; memory is that of the largest one
    disk = size(sum(found[job.id].disk_mb for job in to_do))
    on_gpu = f", {size(max(with_gpu))} on a GPU" if with_gpu else ""
    yield f"about {duration(3600 * hours)}, {at_once}; {disk} of disk; {memory} of memory a stage at most{on_gpu}"
    known = sum(found[job.id].source != "rule" for job in to_do)
    yield (
        f"estimates: {known} of {len(to_do)} stages by the nearest finished one, scaled; the others by rule "
        "(fedmem/study/estimates.py): orders of magnitude"
    )


def _sizes(one: Estimate) -> tuple[str, str]:
    return size(one.mem_mb) + (f" + GPU {size(one.gpu_mb)}" if one.gpu else ""), size(one.disk_mb)


def duration(seconds: float) -> str:
    """A duration in seconds as text, in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def size(megabytes: float) -> str:
    """A size in megabytes as text, in MB or GB."""
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"
