"""`fedmem run`, `audit`, `plan` and `status`: the commands that take a study, its file or, to audit, its data."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from fedmem.config.parameter import ConfigError
from fedmem.config.stages import STAGES
from fedmem.config.yaml_files import parse
from fedmem.display.numbers import half_up
from fedmem.results.stage import MANIFEST
from fedmem.results.studies import study_folder
from fedmem.study import estimates, gpus, preflight
from fedmem.study.estimates import Estimate
from fedmem.study.execute import failed_copy, failure_message
from fedmem.study.jobs import Job
from fedmem.study.loading import load_study
from fedmem.study.plan import Plan, make_plan, report_job, session_jobs, write_description
from fedmem.study.preflight import Problem, find_problems
from fedmem.study.runner import Progress, arguments_of, current_session, results_lock, run_session

# Columns of runs.csv in the table after a run, each in two countings; runs.csv itself has all figures.
SHOWN_FIGURES = ("mr_intra", "mr_inter", "mr_total", "control_total")
HEADINGS = ("stage", "folder", "state", "runs", "time", "memory", "disk", "estimated")
HEADINGS_OF_PROBLEMS = {
    True: "problems that are certain to stop it:",
    False: "problems, if it runs on this machine and network and the estimates are right:",
}


def load_plan(options: argparse.Namespace) -> Plan:
    """The plan of the study that the options name. Raises ConfigError for an error in its files or in the options."""
    loaded = load_study(options.study, options.base, overrides_of(options), options.name)
    return make_plan(loaded, options.keep_stale)


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
    """{parameter: value} of every --set KEY=VALUE. Raises ConfigError for an item that does not have this form."""
    overrides = {}
    for item in options.set:
        key, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"--set {item}: expected KEY=VALUE")
        # parsed like the files, so that a value has one meaning in both places
        overrides[key] = parse(value, f"--set {item}")
    return overrides


# --- run and audit --------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Execute the unfinished stages; print the run table and the report's path. Returns the exit code."""
    return execute(load_plan(options), options)


def audit(options: argparse.Namespace) -> int:
    """Execute the audit's notebooks, from partition to report, and print the note with which the report begins."""
    from fedmem.study.audit import audit_study  # lazy: it imports torch and transformers, which take seconds

    made = audit_study(
        options.model, options.client, options.heldout, options.name, overrides_of(options), options.plain_text
    )
    print(made.note)
    return execute(make_plan(made, options.keep_stale), options)


def execute(plan: Plan, options: argparse.Namespace) -> int:
    """Execute a plan and print its run table and the report's path. Returns the exit code.

    options: `RUN` of the command line, and `snakemake`, the arguments after `--`. Raises ConfigError when the
    study is certain to fail.
    """
    code = 0
    if plan.report_to_do:
        arguments_of(options)  # fails for an unreadable profile before anything is written
        found = estimates.estimate_study(plan.study)
        noticed = find_problems(plan, found)  # before hours of training
        preflight.raise_certain(noticed)
        for problem in noticed:
            print(f"fedmem: {problem}", file=sys.stderr)
        with results_lock(plan.study.name, options.wait) as lock:
            if options.wait:
                plan = make_plan(plan.study, plan.keep_stale)  # the other run may have finished some stages
            if plan.report_to_do:
                code = _run_stages(plan, found, options, lock)
    if not plan.report_to_do:
        print(f"{plan.study.name}: nothing to do, all {len(plan.states)} stages are finished")
    return print_result(plan.study.name) or code


def _run_stages(plan: Plan, found: Mapping[str, Estimate], options: argparse.Namespace, lock: TextIO) -> int:
    write_description(plan.study)
    at_once = f"{options.cores} at once" if options.cores else f"by {options.profile or 'all processors'}"
    print(f"{plan.study.name}: {len(plan.to_do)} of {len(plan.states)} stages to do, {at_once}", flush=True)
    code = run_session(session_jobs(plan, found), options, lock)
    # Snakemake skips the report when a stage has failed; the finished analyses still get one.
    if code and any((r.jobs["analyze"].folder / MANIFEST).is_file() for r in plan.study.runs):
        run_session([report_job(plan.study.name)], options, lock)
    return code


def print_result(name: str) -> int:
    """Print a study's run table and its report's path. Returns the exit code: 1 when there is no report."""
    folder = study_folder(name)
    table = folder / "runs.csv"
    if not table.is_file():
        print(f"fedmem: {name} has no report", file=sys.stderr)
        return 1
    import pandas as pd  # lazy: most commands end without a table

    frame = pd.read_csv(table)
    shown = [f"{figure}_{counting}" for counting in ("verbatim", "paper") for figure in SHOWN_FIGURES]
    print(frame[["run", "state", "n", *shown]].to_string(index=False, float_format=lambda x: f"{half_up(x, 3):.3f}"))
    print(f"report: {folder / 'report.html'}")
    return 0


# --- plan -----------------------------------------------------------------------------------------------------------


def show_plan(options: argparse.Namespace) -> int:
    """Print a study's stages, their estimated cost and the problems that would stop them.

    Returns the exit code: 1 when there is a problem, otherwise 0.
    """
    lines, problems = plan_lines(load_plan(options), options.cores)
    print(*lines, sep="\n")
    return 1 if problems else 0


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
        state, one = plan.states[job.id], found[job.id]
        memory = size(one.mem_mb) + (f" + GPU {size(one.gpu_mb)}" if one.gpu else "")
        cost = (duration(one.seconds), memory, size(one.disk_mb), one.source) if plan.wanted(state) else [""] * 4
        rows.append((job.stage, job.folder.name, plan.why(job.id, state), str(plan.study.shared_by(job)), *cost))
    report = estimates.report_estimate(len(plan.study.runs))
    timed = duration(report.seconds) if plan.report_to_do else ""
    rows.append(
        ("report", plan.study.name, plan.why("report", plan.report), str(len(plan.study.runs)), timed, "", "", "")
    )
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
    notebooks = f"{to_do} notebook" + "s" * (to_do != 1)
    yield f"to do: {notebooks}" + (f", {stale} of them stale" if stale and not plan.keep_stale else "")


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


def duration(seconds: float) -> str:
    """A duration in seconds as text, in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def size(megabytes: float) -> str:
    """A size in megabytes as text, in MB or GB."""
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"


# --- status ---------------------------------------------------------------------------------------------------------


def show_status(options: argparse.Namespace) -> int:
    """Print each run's state, its failed stages, and the progress of the session.

    Returns the exit code: 1 when a stage has failed, otherwise 0.
    """
    plan = load_plan(options)
    failed = 0  # counts runs: a shared stage that failed appears under each of its runs
    for one in plan.study.runs:
        faults = {stage: error for stage, job in one.jobs.items() if (error := failure_message(job.folder))}
        done = sum(plan.states[job.id] == "finished" for job in one.jobs.values())
        state = "finished" if done == len(one.jobs) else f"{done} of {len(one.jobs)} stages finished"
        state = "failed" if faults else state
        print(f"{one.name:<32} {state}")
        for stage, error in faults.items():
            print(f"  {stage}: {error}\n  executed copy: {failed_copy(one.jobs[stage].folder)}")
        failed += bool(faults)
    stale = plan.report == "stale" or "stale" in plan.states.values()
    print(f"report: {plan.report}" + (" (`fedmem plan` says what changed)" if stale else ""))
    _print_session(current_session())
    return 1 if failed else 0


def _print_session(about: dict[str, Any] | None) -> None:
    """Print what the runner does now; `about` is the content of its lock, None when nothing runs."""
    if about is None:
        print("nothing runs")
    elif "session" not in about:  # the lock is taken before the session's folder exists
        print(f"running: study {about.get('study')}, about to begin")
    else:
        now = Progress.of(Path(about["session"]))
        counts = (
            f"{len(now.done)} done, {len(now.failed)} failed, {len(now.running)} running, {len(now.waiting)} waiting"
        )
        print(f"running: study {about['study']}, process {about['front']} on {about['host']}: {counts}")
        for name, seconds in now.running.items():
            print(f"  {name} for {timedelta(seconds=int(seconds))}")
        for name in now.failed:
            print(f"  {name} failed")
