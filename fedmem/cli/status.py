"""`fedmem status`: how a study stands, and what runs at this moment."""

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

from fedmem.cli.run import load_plan, study_command
from fedmem.study.execute import failed_copy, failure_message
from fedmem.study.runner import Progress, current_session


def add_commands(commands) -> None:
    """Adds the command to the parser's."""
    study_command(commands, "status", show_status, "list a study's runs, what runs now, what failed; executes nothing")


def show_status(options: argparse.Namespace) -> int:
    """Prints each run's state, names what failed, and the progress of the session; 1 when something has failed."""
    plan = load_plan(options)
    failed = 0
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
    """What the runner does now; about: what it wrote into its lock."""
    if about is None:
        print("nothing runs")
    elif "session" not in about:
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
