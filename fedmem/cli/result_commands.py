"""The commands on what exists already: a study's result, a partition, the parameters, the Elasticsearch server."""

import argparse
import sys
from pathlib import Path

from fedmem.cli.study_commands import print_result
from fedmem.config.parameter import ConfigError
from fedmem.config.stages import STAGES, markdown_table
from fedmem.corpus.columns import CorpusError
from fedmem.results.stage import StageError, find_stage
from fedmem.results.studies import open_study
from fedmem.study.plan import report_job
from fedmem.study.runner import results_lock, run_session


def show_parameters(options: argparse.Namespace) -> int:
    """Print the table of all parameters in Markdown. Returns the exit code 0."""
    print(markdown_table())
    return 0


def rebuild_report(options: argparse.Namespace) -> int:
    """Execute notebook 6 over the study's finished analyses; print the run table and the report's path.

    Returns the exit code. Raises StageError when no run of the study is finished.
    """
    description, analyses = open_study(_study_name(options.study))
    if not analyses:
        raise StageError(f"{description['name']}: no run is finished, so there is nothing to report")
    name = description["name"]
    options.cores, options.retries, options.profile = 1, None, None  # of the session, which executes one job
    with results_lock(name) as lock:
        code = run_session([report_job(name)], options, lock)
    return code or print_result(name)


def export_study(options: argparse.Namespace) -> int:
    """Write the shareable copy and print what it contains. Returns the exit code: 1 when the export is refused."""
    from fedmem.report.export import ExportError, export

    open_study(_study_name(options.study))  # fails for an unreadable study before a folder is made
    folder_at(options.folder.expanduser())
    try:
        done = export(_study_name(options.study), options.folder)
    except (ExportError, CorpusError) as error:
        print(f"fedmem: {error}", file=sys.stderr)
        return 1
    print(
        f"{done.folder}: {done.files} files; {done.left_out} outputs left out, because they contain text of the corpus"
    )
    return 0


def folder_at(wanted: Path) -> None:
    """Check that a folder can be made at `wanted`. Raises ConfigError when it or one of its parents is a file."""
    # Checked first: mkdir would fail only later, with an OSError that gives no advice.
    for path in (wanted, *wanted.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"DIR: got {wanted}, but {path} is a file: give a folder, or remove the file first")


def _study_name(given: str) -> str:
    """The name of a study's result; a YAML file is accepted too and gives the result of the same name."""
    return Path(given).stem if given.endswith((".yaml", ".yml")) else given


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


# --- the Elasticsearch server that detect stages may use --------------------------------------------------------------


def look_after_server(options: argparse.Namespace) -> int:
    """Print the server's properties and leftovers, or remove leftovers by name.

    options: action, which is check, leftovers or remove; with remove, names of leftovers.
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
        for name in options.names if options.action == "remove" else ():
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
