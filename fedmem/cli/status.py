"""`fedmem status`: prints the state of a study's runs, and what runs at the moment."""

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

from fedmem.cli.run import load_plan, study_command
from fedmem.study.execute import failed_copy, failure_message
from fedmem.study.runner import Progress, current_session


def add_commands(commands) -> None:
    """Add the `status` command to the subparsers of `fedmem`."""
    study_command(commands, "status", show_status, "list a study's runs, running stages and failures; executes nothing")


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
    print(f"report: {plan.report}")
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
