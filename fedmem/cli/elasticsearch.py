"""`fedmem elasticsearch`: look after the server that detect stages may ask."""

import argparse
import sys

from fedmem.config.stages import STAGES


def add_commands(commands) -> None:
    """Adds the command and its actions to the parser's."""
    text = "look after the Elasticsearch server at FEDMEM_ES_URL"
    actions = commands.add_parser("elasticsearch", help=text, description=text).add_subparsers(
        required=True, metavar="ACTION"
    )
    about = {
        "check": "say whether the server will do, and what to change where it will not",
        "leftovers": "list the indices that fedmem made there and that are still there",
        "remove": "delete leftovers, each by its exact name",
    }
    for action, text in about.items():
        sub = actions.add_parser(action, help=text, description=text)
        sub.set_defaults(command=look_after_server, action=action, names=[])
    actions.choices["remove"].add_argument("names", nargs="+", metavar="NAME")


def look_after_server(options: argparse.Namespace) -> int:
    """Prints what the server is and its leftovers, or removes some by name; 1 where server or name will not do."""
    from fedmem.retrieval.elasticsearch import orphaned_indices
    from fedmem.retrieval.elasticsearch.server import Connection, ElasticError, Server

    try:
        server = Server(Connection.from_environment())
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
    states = {True: "in use", False: "left behind", None: "made on another host, may be in use"}
    for one in found:
        print(f"{one['name']}  run {one['run'][:8]}, {one['host']} process {one['pid']}, {one['created']}: ", end="")
        print(states[one["in_use"]])
    print("no index of fedmem's is there" if not found else "remove one: fedmem elasticsearch remove NAME")
