"""`fedmem audit`: what a model that was trained elsewhere gives back of its clients' files."""

import argparse

from fedmem.cli.run import execute, overrides_of, run_options
from fedmem.study.plan import make_plan


def add_commands(commands) -> None:
    """Adds the command to the parser's."""
    text = "ask a model of your own what it gives back of each client's texts; trains nothing"
    sub = commands.add_parser("audit", help=text, description=text)
    sub.set_defaults(command=audit)
    sub.add_argument("--model", required=True, help="folder that save_pretrained wrote, preset or hub id")
    sub.add_argument(
        "--client", action="append", required=True, metavar="FILE", help="a client's training texts; once a client"
    )
    sub.add_argument(
        "--heldout", action="append", default=[], metavar="FILE",
        help="texts that the model never saw, the control: one file for all clients, or one for each",
    )  # fmt: skip
    sub.add_argument("--plain-text", action="store_true", help="go on with a model that has no chat template")
    sub.add_argument("--name", help="name of the result in results/studies (default: audit-MODEL)")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other parameter")
    sub.add_argument("--keep-stale", action="store_true", help="take stages made by other code as they are")
    run_options(sub)


def audit(options: argparse.Namespace) -> int:
    """Executes the audit's notebooks, one path from partition to report, and prints what the report says first."""
    from fedmem.study.audit import (
        audit_study,  # torch and transformers take seconds to import, which no other command needs
    )

    made = audit_study(
        options.model, options.client, options.heldout, options.name, overrides_of(options), options.plain_text
    )
    print(made.note)
    return execute(make_plan(made, options.keep_stale), options)
