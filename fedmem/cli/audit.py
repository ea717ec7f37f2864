"""`fedmem audit`: measures what a model that was trained elsewhere reproduces of its clients' files."""

import argparse

from fedmem.cli.run import execute, overrides_of, run_options
from fedmem.study.plan import make_plan


def add_commands(commands) -> None:
    """Add the `audit` command to the subparsers of `fedmem`."""
    text = "measure what your own model reproduces of each client's texts; trains nothing"
    sub = commands.add_parser("audit", help=text, description=text)
    sub.set_defaults(command=audit)
    sub.add_argument("--model", required=True, help="folder written by save_pretrained, preset or hub id")
    sub.add_argument(
        "--client",
        action="append",
        required=True,
        metavar="FILE",
        help="a client's training texts; repeat it for each client",
    )
    sub.add_argument(
        "--heldout", action="append", default=[], metavar="FILE",
        help="control texts that the model never saw: one file for all clients, or one for each",
    )  # fmt: skip
    sub.add_argument("--plain-text", action="store_true", help="accept a model without a chat template")
    sub.add_argument("--name", help="name of the result in results/studies (default: audit-MODEL)")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other parameter")
    sub.add_argument("--keep-stale", action="store_true", help="accept stages made by another version of the code")
    run_options(sub)


def audit(options: argparse.Namespace) -> int:
    """Execute the audit's notebooks, from partition to report, and print the note with which the report begins."""
    from fedmem.study.audit import audit_study  # lazy: it imports torch and transformers, which take seconds

    made = audit_study(
        options.model, options.client, options.heldout, options.name, overrides_of(options), options.plain_text
    )
    print(made.note)
    return execute(make_plan(made, options.keep_stale), options)
