"""`fedmem run`, and the functions shared by all commands that take a study's YAML file."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedmem.config.parameter import ConfigError
from fedmem.config.yaml_files import parse
from fedmem.display.numbers import half_up
from fedmem.results.stage import MANIFEST
from fedmem.results.studies import study_folder
from fedmem.study import estimates, preflight
from fedmem.study.estimates import Estimate
from fedmem.study.loading import load_study
from fedmem.study.plan import Plan, make_plan, report_job, session_jobs, write_description
from fedmem.study.runner import arguments_of, results_lock, run_session

# Columns of runs.csv in the table after a run, each in two countings; runs.csv itself has all figures.
SHOWN_FIGURES = ("mr_intra", "mr_inter", "mr_total", "control_total")


def add_commands(commands) -> None:
    """Add the `run` command to the subparsers of `fedmem`."""
    sub = study_command(commands, "run", run, "execute a study's unfinished stages, then its report")
    run_options(sub)


def study_command(commands, name: str, command: Callable, text: str) -> argparse.ArgumentParser:
    """Add a command that takes a study's file and the options that `load_plan` reads. Returns the new parser.

    commands: the subparsers of `fedmem`. name: name of the command. command: function from the parsed options to the
    exit code. text: description for the help.
    """
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(command=command)
    sub.add_argument("study", type=Path, help="a study's YAML file, such as params/studies/demo.yaml")
    sub.add_argument("--base", help="base that replaces the study's own: a file name in params/base, without .yaml")
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter that overrides all files"
    )
    sub.add_argument("--name", help="name of the result in results/studies (default: the file's name)")
    sub.add_argument("--keep-stale", action="store_true", help="accept stages made by another version of the code")
    return sub


def run_options(sub: argparse.ArgumentParser) -> None:
    """Add the options that `execute` reads to the parser `sub`."""
    # no default for cores: a cluster profile may set it, and the command line overrides a profile
    sub.add_argument("--cores", type=whole_number(1), help="stages at once (default: the number of processors)")
    sub.add_argument("--retries", type=whole_number(0), help="further attempts at a stage that died (default: 0)")
    sub.add_argument("--profile", help="a folder with Snakemake's config.yaml, such as params/profiles/slurm")
    sub.add_argument("--wait", action="store_true", help="wait until another run on the same results has ended")
    sub.epilog = "Arguments after -- are passed to Snakemake."


def whole_number(least: int) -> Callable[[str], int]:
    """The argparse type of a whole number ≥ `least`. It raises ArgumentTypeError for any other string."""

    def read(text: str) -> int:
        # isdecimal: int() also accepts "1_0", " 1" and signs
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number ≥ {least}")
        return int(text)

    return read


def load_plan(options: argparse.Namespace) -> Plan:
    """The plan of the study that the options name. Raises ConfigError for an error in its files or in the options."""
    loaded = load_study(options.study, options.base, overrides_of(options), options.name)
    return make_plan(loaded, options.keep_stale)


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
    """{parameter: value} of every --set KEY=VALUE. Raises ConfigError for an item that does not have this form."""
    overrides = {}
    for item in options.set:
        key, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"--set {item}: expected KEY=VALUE")
        # parsed like the files, so that a value has one meaning in both places
        overrides[key] = parse(value, f"--set {item}")
    return overrides


# --- run ------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Execute the unfinished stages; print the run table and the report's path. Returns the exit code."""
    return execute(load_plan(options), options)


def execute(plan: Plan, options: argparse.Namespace) -> int:
    """Execute a plan and print its run table and the report's path. Returns the exit code.

    options: those of `run_options`, and `snakemake`, the arguments after `--`. Raises ConfigError when the study is
    certain to fail.
    """
    if not plan.report_to_do:
        return _nothing_to_do(plan)
    arguments_of(options)  # fails for an unreadable profile before anything is written
    found = estimates.estimate_study(plan.study)
    _refuse_or_warn(plan, found)
    with results_lock(plan.study.name, options.wait) as lock:
        if options.wait:
            plan = make_plan(plan.study, plan.keep_stale)  # the other run may have finished some stages
            if not plan.report_to_do:
                return _nothing_to_do(plan)
        write_description(plan.study)
        at_once = f"{options.cores} at once" if options.cores else f"by {options.profile or 'all processors'}"
        print(f"{plan.study.name}: {len(plan.to_do)} of {len(plan.states)} stages to do, {at_once}", flush=True)
        code = run_session(session_jobs(plan, found), options, lock)
        # Snakemake skips the report when a stage has failed; the finished analyses still get one.
        if code and any((r.jobs["analyze"].folder / MANIFEST).is_file() for r in plan.study.runs):
            run_session([report_job(plan.study.name)], options, lock)
    return print_result(plan.study.name) or code


def _nothing_to_do(plan: Plan) -> int:
    print(f"{plan.study.name}: nothing to do, all {len(plan.states)} stages are finished")
    return print_result(plan.study.name)


def _refuse_or_warn(plan: Plan, found: Mapping[str, Estimate]) -> None:
    """Raise ConfigError for a problem that certainly stops the study; print a warning for one that may.

    This runs before hours of training.
    """
    noticed = preflight.find_problems(plan, found)
    preflight.raise_certain(noticed)
    for problem in noticed:
        print(f"fedmem: {problem}", file=sys.stderr)


def print_result(name: str) -> int:
    """Print a study's run table and its report's path. Returns the exit code: 1 when there is no report."""
    folder = study_folder(name)
    table = folder / "runs.csv"
    if not table.is_file():
        print(f"fedmem: {name} has no report", file=sys.stderr)
        return 1
    import pandas as pd  # lazy: most commands end without a table

    frame = pd.read_csv(table)
    shown = [f"{figure}_{counting}" for counting in ("verbatim", "paper") for figure in SHOWN_FIGURES]
    print(frame[["run", "state", "n", *shown]].to_string(index=False, float_format=lambda x: f"{half_up(x, 3):.3f}"))
    print(f"report: {folder / 'report.html'}")
    return 0
