"""`fedmem parameters`: prints the table of all parameters."""

import argparse

from fedmem.config.stages import markdown_table


def add_commands(commands) -> None:
    """Add the `parameters` command to the subparsers of `fedmem`."""
    text = "print every parameter: default, allowed values, meaning"
    commands.add_parser("parameters", help=text, description=text).set_defaults(command=show_parameters)


def show_parameters(options: argparse.Namespace) -> int:
    """Print the table of all parameters in Markdown. Returns the exit code 0."""
    print(markdown_table())
    return 0
