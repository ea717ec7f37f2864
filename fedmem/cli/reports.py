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
    """Adds the two commands to the parser's."""
    text = "rebuild a study's report from its finished analyses: notebook 6 and its page"
    sub = commands.add_parser("report", help=text, description=text)
    sub.set_defaults(command=rebuild_report, cores=1, retries=None, profile=None)
    sub.add_argument("study", help="name of a study in results/studies")
    text = "copy what may be shared of a study: pages, tables of figures, figures, manifests; no text, ids or weights"
    sub = commands.add_parser("export", help=text, description=text)
    sub.set_defaults(command=export_study)
    sub.add_argument("study", help="name of a study in results/studies")
    sub.add_argument("folder", type=Path, metavar="DIR", help="where to; must not be there yet")


def rebuild_report(options: argparse.Namespace) -> int:
    """Executes notebook 6 over the study's finished analyses and prints the run table and the report's path."""
    description, analyses = open_study(_study_name(options.study))
    if not analyses:
        raise StageError(f"{description['name']}: none of its runs is finished, so there is nothing to report")
    name = description["name"]
    with results_lock(name) as lock:
        code = run_session([report_job(name)], options, lock)
    return code or print_result(name)


def export_study(options: argparse.Namespace) -> int:
    """Writes the shareable copy and says what it holds."""
    from fedmem.report.export import ExportError, export

    open_study(_study_name(options.study))  # an unreadable one is told before anything is made
    folder_at(options.folder.expanduser())
    try:
        done = export(_study_name(options.study), options.folder)
    except (ExportError, CorpusError) as error:
        print(f"fedmem: {error}", file=sys.stderr)
        return 1
    print(f"{done.folder}: {done.files} files; {done.left_out} outputs left out, for they held text of the corpus")
    return 0


def folder_at(wanted: Path) -> None:
    """ConfigError where a file stands in the way of a folder that is to be made."""
    for path in (wanted, *wanted.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"DIR: got {wanted}, but {path} is a file: give a folder, or remove the file first")


def _study_name(given: str) -> str:
    """A study's name; its YAML file stands for the result of the same name."""
    return Path(given).stem if given.endswith((".yaml", ".yml")) else given
