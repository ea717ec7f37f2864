"""`fedmem split`: a partition in one folder for each client, to hand to the nodes of a real federation."""

import argparse
from pathlib import Path

from fedmem.cli.reports import folder_at
from fedmem.results.stage import find_stage


def add_commands(commands) -> None:
    """Adds the command to the parser's."""
    text = "write each client's rows into a folder of its own, for the nodes of a real federation"
    sub = commands.add_parser("split", help=text, description=text)
    sub.set_defaults(command=split)
    sub.add_argument("partition", help='folder of a finished partition, or "latest"')
    sub.add_argument("folder", type=Path, metavar="DIR", help="where to; client-0, client-1 … are made in it")


def split(options: argparse.Namespace) -> int:
    """Writes the folders and prints each with the configuration of its node."""
    from fedmem.train.network.client_folders import split_clients

    folder_at(options.folder)
    dealt = find_stage("partition", options.partition)
    folders = split_clients(dealt, options.folder)
    print(f"{dealt} to {len(folders)} clients; hand each its own folder, and start its node with")
    for client, folder in enumerate(folders):
        print(f"  --node-config 'partition-id={client} num-partitions={len(folders)} data=\"{folder.resolve()}\"'")
    return 0
