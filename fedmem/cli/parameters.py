"""`fedmem parameters`: the table of all parameters."""

import argparse

from fedmem.config.stages import markdown_table


def add_commands(commands) -> None:
    """Adds the command to the parser's."""
    text = "print every parameter: default, what is allowed, meaning"
    commands.add_parser("parameters", help=text, description=text).set_defaults(command=show_parameters)


def show_parameters(options: argparse.Namespace) -> int:
    """Prints the table of all parameters, in Markdown."""
    print(markdown_table())
    return 0
