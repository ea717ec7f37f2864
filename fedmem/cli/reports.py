"""`fedmem report` and `fedmem export`: the commands that take the name of a study that has been run."""

import argparse
import sys
from pathlib import Path

from fedmem.cli.run import print_result
from fedmem.config.parameter import ConfigError
from fedmem.corpus.columns import CorpusError
from fedmem.results.stage import StageError
from fedmem.results.studies import open_study
from fedmem.study.plan import report_job
from fedmem.study.runner import results_lock, run_session


def add_commands(commands) -> None:
    """Add the `report` and `export` commands to the subparsers of `fedmem`."""
    text = "rebuild a study's report from its finished analyses: notebook 6 and its page"
    sub = commands.add_parser("report", help=text, description=text)
    # `session` reads these options, which this command does not offer: it executes one job
    sub.set_defaults(command=rebuild_report, cores=1, retries=None, profile=None)
    sub.add_argument("study", help="name of a study in results/studies")
    text = "copy the shareable part of a study: pages, tables of figures, figures, manifests; no text, ids or weights"
    sub = commands.add_parser("export", help=text, description=text)
    sub.set_defaults(command=export_study)
    sub.add_argument("study", help="name of a study in results/studies")
    sub.add_argument("folder", type=Path, metavar="DIR", help="folder of the copy; must not exist yet")


def rebuild_report(options: argparse.Namespace) -> int:
    """Execute notebook 6 over the study's finished analyses; print the run table and the report's path.

    Returns the exit code. Raises StageError when no run of the study is finished.
    """
    description, analyses = open_study(_study_name(options.study))
    if not analyses:
        raise StageError(f"{description['name']}: no run is finished, so there is nothing to report")
    name = description["name"]
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
