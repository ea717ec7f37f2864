"""`fedmem plan`: prints what a study needs, without executing it."""

import argparse
import os

from fedmem.cli.plan_table import plan_lines
from fedmem.cli.run import load_plan, study_command, whole_number


def add_commands(commands) -> None:
    """Add the `plan` command to the subparsers of `fedmem`."""
    text = "list a study's stages, shared stages, estimates and problems; executes nothing"
    sub = study_command(commands, "plan", show_plan, text)
    sub.add_argument(
        "--cores", type=whole_number(1), default=os.cpu_count() or 1, help="stages at once, for the estimated hours"
    )


def show_plan(options: argparse.Namespace) -> int:
    """Print a study's stages, their estimated cost and the problems that would stop them.

    Returns the exit code: 1 when there is a problem, otherwise 0.
    """
    lines, problems = plan_lines(load_plan(options), options.cores)
    print(*lines, sep="\n")
    return 1 if problems else 0
