"""The `fedmem` command: runs studies. `run` executes the stages that are missing; `plan` and `status` only read."""

import argparse
import os
import signal
import sys

from fedmem.cli import audit, elasticsearch, parameters, plan, reports, run, split, status
from fedmem.config.parameter import ConfigError
from fedmem.machine.paths import results_root
from fedmem.results.stage import StageError

COMMANDS = (run, audit, plan, status, parameters, reports, split, elasticsearch)  # each has `add_commands(commands)`


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 success, 1 a stage failed, 2 a wrong parameter, 130 interrupted.

    arguments: without the program's name; None: those of the process. What follows `--` is passed to Snakemake.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    own, passed_on = arguments, []
    if "--" in arguments:
        own, passed_on = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    options = _parser().parse_args(own)
    options.snakemake = passed_on
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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
