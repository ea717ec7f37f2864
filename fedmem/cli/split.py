"""`fedmem split`: writes one folder per client of a partition, for the nodes of a real federation."""

import argparse
from pathlib import Path

from fedmem.cli.reports import folder_at
from fedmem.results.stage import find_stage


def add_commands(commands) -> None:
    """Add the `split` command to the subparsers of `fedmem`."""
    text = "write each client's rows into a folder of its own, for the nodes of a real federation"
    sub = commands.add_parser("split", help=text, description=text)
    sub.set_defaults(command=split)
    sub.add_argument("partition", help='folder of a finished partition, or "latest"')
    sub.add_argument("folder", type=Path, metavar="DIR", help="folder in which client-0, client-1 … are created")


def split(options: argparse.Namespace) -> int:
    """Write the folders and print each with the configuration of its node. Returns the exit code 0.

    Raises ConfigError when a file is in the place of the folder.
    """
    from fedmem.train.network.client_folders import split_clients  # lazy: the other commands do not need it

    folder_at(options.folder)
    dealt = find_stage("partition", options.partition)
    folders = split_clients(dealt, options.folder)
    # resolve(): a node is usually started from another folder than this command
    print(f"{dealt}: split for {len(folders)} clients. Give each client its folder and start its node with")
    for client, folder in enumerate(folders):
        print(f"  --node-config 'partition-id={client} num-partitions={len(folders)} data=\"{folder.resolve()}\"'")
    return 0
