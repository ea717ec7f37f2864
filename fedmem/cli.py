"""The `fedmem` command: a thin front to studies. `run` executes what is missing, `plan` and `status` only look."""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fedmem import runs, study
from fedmem.config import STAGES, ConfigError, markdown_table
from fedmem.execute import failed_copy, failure
from fedmem.study_files import parse

GRACE_SECONDS = 20  # for an interrupted session to end by itself
SNAKEFILE = runs.PACKAGE / "Snakefile"
SHOWN_FIGURES = ("mr_intra", "mr_inter", "mr_total", "control_total")  # of runs.csv, in the table after a run


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 a stage failed, 2 a wrong parameter, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    own, passed_on = arguments, []
    if "--" in arguments:
        own, passed_on = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    options = _parser().parse_args(own)
    options.snakemake = passed_on
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside as by Ctrl-C
    try:
        return options.command(options)
    except (ConfigError, FileNotFoundError, runs.StageError) as error:
        print(f"fedmem: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"fedmem: {error} (results are in {runs.results_root()}, from FEDMEM_RESULTS)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedmem: interrupted; finished stages are kept, the same command goes on from there", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedmem", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = {
        "run": (run, "execute what a study still needs, then its report"),
        "plan": (show_plan, "list a study's stages: finished, stale, to do; executes nothing"),
        "status": (show_status, "list a study's runs and what failed; executes nothing"),
    }
    for name, (command, text) in about.items():
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        sub.add_argument("study", type=Path, help="a study's YAML file, such as params/studies/demo.yaml")
        sub.add_argument("--base", help="another base than the study's own: a file name in params/base, without .yaml")
        sub.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter that wins over all"
        )
        sub.add_argument("--name", help="name of the result in results/studies (default: the file's name)")
        sub.add_argument("--keep-stale", action="store_true", help="take stages made by other code as they are")
    text = "print every parameter: default, what is allowed, meaning"
    commands.add_parser("parameters", help=text, description=text).set_defaults(command=show_parameters)
    _add_reports(commands)
    _add_elasticsearch(commands)
    commands.choices["run"].add_argument("--cores", type=_cores, default=os.cpu_count() or 1, help="stages at once")
    commands.choices["run"].epilog = "What follows -- goes to Snakemake."
    return parser


def _add_reports(commands) -> None:
    text = "rebuild a study's report from its finished analyses: notebook 6 and its page"
    sub = commands.add_parser("report", help=text, description=text)
    sub.set_defaults(command=rebuild_report, cores=1, snakemake=[])
    sub.add_argument("study", help="name of a study in results/studies")
    text = "copy what may be shared of a study: pages, tables of figures, figures, manifests; no text, ids or weights"
    sub = commands.add_parser("export", help=text, description=text)
    sub.set_defaults(command=export_study)
    sub.add_argument("study", help="name of a study in results/studies")
    sub.add_argument("folder", type=Path, metavar="DIR", help="where to; must not be there yet")


def _add_elasticsearch(commands) -> None:
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


def _cores(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is a whole number ≥ 1")
    return int(text)


def _load(options: argparse.Namespace) -> study.Plan:
    overrides = {}
    for item in options.set:
        key, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"--set {item}: allowed is KEY=VALUE")
        overrides[key] = parse(value, f"--set {item}")
    loaded = study.load(options.study, options.base, overrides, options.name)
    return study.plan(loaded, options.keep_stale)


# --- run ------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Executes what is to do and prints the run table and the report's path."""
    plan = _load(options)
    if not plan.report_to_do:
        print(f"{plan.study.name}: nothing to do, all {len(plan.states)} stages are finished")
        return _print_result(plan.study.name)
    _check_server_is_named(plan)
    with _only_runner() as lock:
        study.write_description(plan.study)
        print(f"{plan.study.name}: {len(plan.to_do)} of {len(plan.states)} stages to do, {options.cores} at once")
        code = _session(study.session_jobs(plan), options, lock)
        if code and any(_is_finished(r.jobs["analyze"]) for r in plan.study.runs):
            _session([study.report_job(plan.study, [])], options, lock)
    return _print_result(plan.study.name) or code


def _check_server_is_named(plan: study.Plan) -> None:
    """Before hours of training: does the environment say which Elasticsearch server the detect stages shall ask?"""
    if any(getattr(job.config, "retriever", "") == "elasticsearch" for job in plan.to_do):
        from fedmem.elastic_server import Connection, ElasticError

        try:
            Connection.from_environment()
        except ElasticError as error:
            raise ConfigError(f"retriever: got 'elasticsearch', but {error}") from None


@contextlib.contextmanager
def _only_runner():
    """Holds the lock of these results; it goes with the processes that hold it, so that none is ever left behind."""
    path = runs.results_root() / ".runner" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise runs.StageError(
                f"another `fedmem run` (processes {lock.read().strip()}) works on {runs.results_root()}: wait for it, "
                "or set FEDMEM_RESULTS to another folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock


def _session(jobs: list[dict], options: argparse.Namespace, lock) -> int:
    """One Snakemake invocation over these jobs, in a folder of its own; shows progress, prints failures."""
    folder = runs.results_root() / ".runner" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{len(jobs)}"
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps(jobs, indent=1, ensure_ascii=False), encoding="utf-8")
    command = [
        sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), "--directory", str(folder), "--cores",
        str(options.cores), "--keep-going", "--nocolor", *options.snakemake,
    ]  # fmt: skip
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / "snakemake.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[lock.fileno()],
            start_new_session=True,  # a group of its own, so that an interrupt reaches all of it, and once
        )
        lock.write(f" {process.pid}")  # it outlives a front that is killed, and holds the lock until it ends
        lock.flush()
        try:
            _follow(process, folder, jobs)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)  # kernels notice that their parent is gone
            try:
                process.wait(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
    failed = sorted(folder.glob("*.failed"))
    for message in failed:
        print(f"fedmem: {message.read_text(encoding='utf-8')}", file=sys.stderr)
    if process.returncode and not failed:
        print(f"fedmem: the runner failed; its log is {folder / 'snakemake.log'}", file=sys.stderr)
    return 1 if process.returncode else 0


def _follow(process: subprocess.Popen, folder: Path, jobs: list[dict]) -> None:
    """A progress bar over a session's stages, with those that run now."""
    from tqdm import tqdm

    names, shown = [job["id"] for job in jobs], None
    with tqdm(total=len(names), bar_format="{n_fmt}/{total_fmt} stages, {elapsed} {desc}") as bar:
        while True:
            ended = process.poll() is not None
            over = [n for n in names if (folder / f"{n}.done").exists() or (folder / f"{n}.failed").exists()]
            running = [n for n in names if (folder / f"{n}.started").exists() and n not in over]
            if (over, running) != shown:
                shown, bar.n = (over, running), len(over)
                bar.set_description_str(", ".join(running)[:100])
            if ended:
                return
            time.sleep(0.5)


def _print_result(name: str) -> int:
    """Prints a study's run table and its report's path; 1 when there is no report."""
    folder = runs.study_folder(name)
    table = folder / "runs.csv"
    if not table.is_file():
        print(f"fedmem: {name} has no report", file=sys.stderr)
        return 1
    import pandas as pd

    frame = pd.read_csv(table)
    shown = [f"{figure}_{counting}" for counting in ("verbatim", "paper") for figure in SHOWN_FIGURES]
    print(frame[["run", "state", "n", *shown]].to_string(index=False, float_format=lambda x: f"{x:.3f}"))
    print(f"report: {folder / 'report.html'}")
    return 0


# --- plan and status ------------------------------------------------------------------------------------------------


def _is_finished(job: study.Job) -> bool:
    return (job.folder / runs.MANIFEST).is_file()


def show_plan(options: argparse.Namespace) -> int:
    """Prints a study's stages and how many executions sharing saves."""
    plan = _load(options)
    for id_, job in plan.study.jobs.items():
        reason = f" ({plan.reasons[id_]})" if plan.reasons[id_] else ""
        shared = plan.study.shared_by(job)
        print(f"{job.stage:<10} {job.folder.name:<48} {plan.states[id_]}{reason}, {shared} run{'s' * (shared > 1)}")
    naive = len(plan.study.runs) * len(STAGES)
    print(f"{'report':<10} {plan.study.name:<48} {plan.report}")
    print(f"{len(plan.study.runs)} runs; {naive} stages one by one, {len(plan.states)} shared, {len(plan.to_do)} to do")
    return 0


def show_status(options: argparse.Namespace) -> int:
    """Prints each run's state and names what failed; exit code 1 when something has."""
    plan = _load(options)
    failed = 0
    for one in plan.study.runs:
        faults = {stage: error for stage, job in one.jobs.items() if (error := failure(job.folder))}
        done = sum(plan.states[job.id] == "finished" for job in one.jobs.values())
        state = "finished" if done == len(one.jobs) else f"{done} of {len(one.jobs)} stages finished"
        state = "failed" if faults else state
        print(f"{one.name:<32} {state}")
        for stage, error in faults.items():
            print(f"  {stage}: {error}\n  executed copy: {failed_copy(one.jobs[stage].folder)}")
        failed += bool(faults)
    print(f"report: {plan.report}")
    return 1 if failed else 0


def show_parameters(options: argparse.Namespace) -> int:
    """Prints the table of all parameters, in Markdown."""
    print(markdown_table())
    return 0


# --- report and export ----------------------------------------------------------------------------------------------


def rebuild_report(options: argparse.Namespace) -> int:
    """Executes notebook 6 over the study's finished analyses and prints the run table and the report's path."""
    description, analyses = runs.open_study(_study_name(options.study))
    if not analyses:
        raise runs.StageError(f"{description['name']}: none of its runs is finished, so there is nothing to report")
    name = description["name"]
    with _only_runner() as lock:
        code = _session([study.report_of(name)], options, lock)
    return code or _print_result(name)


def export_study(options: argparse.Namespace) -> int:
    """Writes the shareable copy and says what it holds."""
    from fedmem.export import ExportError, export

    try:
        done = export(_study_name(options.study), options.folder)
    except ExportError as error:
        print(f"fedmem: {error}", file=sys.stderr)
        return 1
    print(f"{done.folder}: {done.files} files; {done.left_out} outputs left out, for they held text of the corpus")
    return 0


def _study_name(given: str) -> str:
    """A study's name; its YAML file stands for the result of the same name."""
    return Path(given).stem if given.endswith((".yaml", ".yml")) else given


# --- elasticsearch --------------------------------------------------------------------------------------------------


def look_after_server(options: argparse.Namespace) -> int:
    """Prints what the server is and its leftovers, or removes some by name; 1 where server or name will not do."""
    from fedmem import elastic_leftovers
    from fedmem.elastic_server import Connection, ElasticError, Server

    try:
        server = Server(Connection.from_environment())
        about = server.check(STAGES["detect"].model_fields["max_query_terms"].default)
        print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
        if options.action == "leftovers":
            _print_leftovers(elastic_leftovers.leftovers(server))
        for name in options.names:
            elastic_leftovers.remove(server, name)
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


if __name__ == "__main__":
    sys.exit(main())
