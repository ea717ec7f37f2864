"""`fedmem plan`: what a study needs, before anything is executed."""

import argparse

from fedmem.commands.run import load_plan, study_command
from fedmem.config import STAGES


def add_commands(commands) -> None:
    """Adds the command to the parser's."""
    study_command(commands, "plan", show_plan, "list a study's stages: finished, stale, to do; executes nothing")


def show_plan(options: argparse.Namespace) -> int:
    """Prints a study's stages and how many executions sharing saves."""
    plan = load_plan(options)
    for id_, job in plan.study.jobs.items():
        reason = f" ({plan.reasons[id_]})" if plan.reasons[id_] else ""
        shared = plan.study.shared_by(job)
        print(f"{job.stage:<10} {job.folder.name:<48} {plan.states[id_]}{reason}, {shared} run{'s' * (shared > 1)}")
    naive = len(plan.study.runs) * len(STAGES)
    print(f"{'report':<10} {plan.study.name:<48} {plan.report}")
    print(f"{len(plan.study.runs)} runs; {naive} stages one by one, {len(plan.states)} shared, {len(plan.to_do)} to do")
    return 0
