"""`fedmem elasticsearch`: checks the server that detect stages may use, and removes leftover indices."""

import argparse
import sys

from fedmem.config.stages import STAGES


def add_commands(commands) -> None:
    """Add the `elasticsearch` command and its actions to the subparsers of `fedmem`."""
    text = "check and clean up the Elasticsearch server at FEDMEM_ES_URL"
    actions = commands.add_parser("elasticsearch", help=text, description=text).add_subparsers(
        required=True, metavar="ACTION"
    )
    about = {
        "check": "check whether the server is suitable, and print what to change if it is not",
        "leftovers": "list the indices that fedmem created there and that still exist",
        "remove": "delete leftovers, each by its exact name",
    }
    for action, text in about.items():
        sub = actions.add_parser(action, help=text, description=text)
        # names: every action has it, so that one function serves all three
        sub.set_defaults(command=look_after_server, action=action, names=[])
    actions.choices["remove"].add_argument("names", nargs="+", metavar="NAME")


def look_after_server(options: argparse.Namespace) -> int:
    """Print the server's properties and leftovers, or remove leftovers by name.

    Returns the exit code: 1 when the server is unsuitable or a name is not a leftover, otherwise 0.
    """
    # lazy: the other commands do not need the Elasticsearch client
    from fedmem.retrieval.elasticsearch import orphaned_indices
    from fedmem.retrieval.elasticsearch.server import Connection, ElasticError, Server

    try:
        server = Server(Connection.from_environment())
        # Every action checks first: an unreachable or unsuitable server gives the same message in all of them.
        about = server.check(STAGES["detect"].model_fields["max_query_terms"].default)
        print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
        if options.action == "leftovers":
            _print_leftovers(orphaned_indices.leftovers(server))
        for name in options.names:
            orphaned_indices.remove(server, name)
            print(f"removed {name}")
    except ElasticError as error:
        print(f"fedmem: {error}", file=sys.stderr)
        return 1
    return 0


def _print_leftovers(found: list[dict]) -> None:
    # None: whether a process runs can be seen on its own host only
    states = {True: "in use", False: "left behind", None: "created on another host, may be in use"}
    for one in found:
        print(f"{one['name']}  run {one['run'][:8]}, {one['host']} process {one['pid']}, {one['created']}: ", end="")
        print(states[one["in_use"]])
    print("there is no index of fedmem" if not found else "to remove one: fedmem elasticsearch remove NAME")
