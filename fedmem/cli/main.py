"""The `fedmem` command: runs studies. `run` executes the stages that are missing; `plan` and `status` only read."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedmem.cli.result_commands import export_study, look_after_server, rebuild_report, show_parameters, split
from fedmem.cli.study_commands import audit, run, show_plan, show_status
from fedmem.config.parameter import ConfigError
from fedmem.machine.paths import results_root
from fedmem.results.stage import StageError


class Command(NamedTuple):
    """A command of the table below.

    text: its help. does: the function from the parsed options to the exit code, or the table of its actions. options:
    arguments of `add_argument`, in the order of the help. epilog: the last line of the help.
    """

    text: str
    does: Callable[[argparse.Namespace], int] | Mapping[str, "Command"]
    options: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = ()
    epilog: str | None = None


def option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments of `add_argument`, kept for later."""
    return names, settings


def whole_number(least: int) -> Callable[[str], int]:
    """The argparse type of a whole number ≥ `least`. It raises ArgumentTypeError for any other string."""

    def read(text: str) -> int:
        # isdecimal: int() also accepts "1_0", " 1" and signs
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number ≥ {least}")
        return int(text)

    return read


KEEP_STALE = option("--keep-stale", action="store_true", help="accept stages made by another version of the code")
STUDY = (  # options that `load_plan` reads
    option("study", type=Path, help="a study's YAML file, such as params/studies/demo.yaml"),
    option("--base", help="base that replaces the study's own: a file name in params/base, without .yaml"),
    option("--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter that overrides all files"),
    option("--name", help="name of the result in results/studies (default: the file's name)"),
    KEEP_STALE,
)
RUN = (  # options that `execute` reads
    # no default for cores: a cluster profile may set it, and the command line overrides a profile
    option("--cores", type=whole_number(1), help="stages at once (default: the number of processors)"),
    option("--retries", type=whole_number(0), help="further attempts at a stage that died (default: 0)"),
    option("--profile", help="a folder with Snakemake's config.yaml, such as params/profiles/slurm"),
    option("--wait", action="store_true", help="wait until another run on the same results has ended"),
)
FILES = {"action": "append", "metavar": "FILE"}
AUDIT = (
    option("--model", required=True, help="folder written by save_pretrained, preset or hub id"),
    option("--client", required=True, help="a client's training texts; repeat it for each client", **FILES),
    option(
        "--heldout", default=[], **FILES,
        help="control texts that the model never saw: one file for all clients, or one for each",
    ),
    option("--plain-text", action="store_true", help="accept a model without a chat template"),
    option("--name", help="name of the result in results/studies (default: audit-MODEL)"),
    option("--set", action="append", default=[], metavar="KEY=VALUE", help="any other parameter"),
    KEEP_STALE,
)  # fmt: skip
PLANNED_CORES = {"default": os.cpu_count() or 1, "help": "stages at once, for the estimated hours"}
RESULT = option("study", help="name of a study in results/studies")
PARTITION = option("partition", help='folder of a finished partition, or "latest"')
FOLDER = {"type": Path, "metavar": "DIR"}
TO_SNAKEMAKE = "Arguments after -- are passed to Snakemake."

COMMANDS = {
    "run": Command("execute a study's unfinished stages, then its report", run, STUDY + RUN, TO_SNAKEMAKE),
    "audit": Command(
        "measure what your own model reproduces of each client's texts; trains nothing",
        audit, AUDIT + RUN, TO_SNAKEMAKE,
    ),
    "plan": Command(
        "list a study's stages, shared stages, estimates and problems; executes nothing",
        show_plan, (*STUDY, option("--cores", type=whole_number(1), **PLANNED_CORES)),
    ),
    "status": Command("list a study's runs, running stages and failures; executes nothing", show_status, STUDY),
    "parameters": Command("print every parameter: default, allowed values, meaning", show_parameters),
    "report": Command(
        "rebuild a study's report from its finished analyses: notebook 6 and its page", rebuild_report, (RESULT,)
    ),
    "export": Command(
        "copy the shareable part of a study: pages, tables of figures, figures, manifests; no text, ids or weights",
        export_study, (RESULT, option("folder", help="folder of the copy; must not exist yet", **FOLDER)),
    ),
    "split": Command(
        "write each client's rows into a folder of its own, for the nodes of a real federation",
        split, (PARTITION, option("folder", help="folder in which client-0, client-1 … are created", **FOLDER)),
    ),
    "elasticsearch": Command(
        "check and clean up the Elasticsearch server at FEDMEM_ES_URL",
        {
            "check": Command(
                "check whether the server is suitable, and print what to change if it is not", look_after_server
            ),
            "leftovers": Command(
                "list the indices that fedmem created there and that still exist", look_after_server
            ),
            "remove": Command(
                "delete leftovers, each by its exact name",
                look_after_server, (option("names", nargs="+", metavar="NAME"),),
            ),
        },
    ),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 success, 1 a stage failed, 2 a wrong parameter, 130 interrupted.

    arguments: without the program's name; None: those of the process. What follows `--` is passed to Snakemake.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:end])
    options.snakemake = arguments[end + 1 :]
    if (results := results_root()).exists() and not results.is_dir():
        print(f"fedmem: {results} is a file: name a folder in FEDMEM_RESULTS", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's stop is handled like Ctrl-C
    try:
        return options.command(options)
    except (ConfigError, FileNotFoundError, StageError) as error:
        print(f"fedmem: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; /dev/null avoids a second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        within = str(error.filename or results).startswith(str(results))
        where = f" (results are in {results}; FEDMEM_RESULTS names another folder)" if within else ""
        print(f"fedmem: {error}{where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedmem: interrupted; finished stages are kept; run the same command to continue", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedmem", description=__doc__)
    _add(parser, COMMANDS, "COMMAND")
    return parser


def _add(parser: argparse.ArgumentParser, table: Mapping[str, Command], metavar: str) -> None:
    """Add the commands of `table` to a parser, which then requires one of them; `metavar` is their name in its help."""
    commands = parser.add_subparsers(required=True, metavar=metavar, dest="action")
    for name, command in table.items():
        sub = commands.add_parser(name, help=command.text, description=command.text, epilog=command.epilog)
        for names, settings in command.options:
            sub.add_argument(*names, **settings)
        if isinstance(command.does, Mapping):
            _add(sub, command.does, "ACTION")
        else:
            sub.set_defaults(command=command.does)


if __name__ == "__main__":
    sys.exit(main())
