"""`fedmem status`: how a study stands."""

import argparse

from fedmem.commands.run import load_plan, study_command
from fedmem.execute import failed_copy, failure


def add_commands(commands) -> None:
    """Adds the command to the parser's."""
    study_command(commands, "status", show_status, "list a study's runs and what failed; executes nothing")


def show_status(options: argparse.Namespace) -> int:
    """Prints each run's state and names what failed; exit code 1 when something has."""
    plan = load_plan(options)
    failed = 0
    for one in plan.study.runs:
        faults = {stage: error for stage, job in one.jobs.items() if (error := failure(job.folder))}
        done = sum(plan.states[job.id] == "finished" for job in one.jobs.values())
        state = "finished" if done == len(one.jobs) else f"{done} of {len(one.jobs)} stages finished"
        state = "failed" if faults else state
        print(f"{one.name:<32} {state}")
        for stage, error in faults.items():
            print(f"  {stage}: {error}\n  executed copy: {failed_copy(one.jobs[stage].folder)}")
        failed += bool(faults)
    print(f"report: {plan.report}")
    return 1 if failed else 0
