"""`fedmem plan`: what a study needs, before anything is executed."""

import argparse
import os

from fedmem.cli.plan_table import plan_lines
from fedmem.cli.run import load_plan, study_command, whole_number


def add_commands(commands) -> None:
    """Adds the command to the parser's."""
    text = "list a study's stages, what sharing saves, estimates and problems; executes nothing"
    sub = study_command(commands, "plan", show_plan, text)
    sub.add_argument("--cores", type=whole_number(1), default=os.cpu_count() or 1, help="stages at once, for the hours")


def show_plan(options: argparse.Namespace) -> int:
    """Prints a study's stages, what they will take, and what would stop them; exit code 1 when something would."""
    lines, problems = plan_lines(load_plan(options), options.cores)
    print(*lines, sep="\n")
    return 1 if problems else 0
