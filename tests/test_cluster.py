"""A study on a cluster: what is handed to SLURM, by its real plugin, and one study to the end through submitted jobs.

There is no SLURM here: its commands are stood in for by small programs that note their arguments. The second part runs
every job for real, from a submit command, as any batch system would.
"""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_house import House, until

pytestmark = pytest.mark.notebooks
REPOSITORY = Path(__file__).resolve().parent.parent
SLURM = REPOSITORY / "params" / "profiles" / "slurm"
STAGES = ("partition", "train", "generate", "detect", "analyze")
SBATCH = """
import json, os, re, sys
from pathlib import Path
given = sys.argv[1:]
Path(os.environ["NOTED"], f"{os.getpid()}.json").write_text(json.dumps(given))
session, wrapped = given[given.index("-D") + 1], given[-1]  # what a node is to do, here it is as good as done
Path(session, re.search(r"name=([^ ']+)", wrapped).group(1) + ".done").touch()
print(os.getpid())
"""
SACCT = """
import os
from pathlib import Path
for path in Path(os.environ["NOTED"]).iterdir():
    print(path.stem + "|COMPLETED")
"""
QUIET = "import sys; sys.exit(0)"


def fedmem(*arguments, results, **environment):
    command = [sys.executable, "-m", "fedmem.cli.main", *map(str, arguments)]
    settings = os.environ | {"FEDMEM_RESULTS": str(results)} | environment
    return subprocess.run(command, env=settings, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)


def write_study(folder, **content):
    """A study file beside the shipped bases and tasks: as small as can be, nothing is trained."""
    (folder / "params" / "studies").mkdir(parents=True)
    for part in ("base", "tasks"):
        (folder / "params" / part).symlink_to(REPOSITORY / "params" / part)
    sizes = {"train_rows": 6, "test_rows": 2, "heldout_rows": 6, "n_prefixes": 4, "max_new_tokens": 20}
    content = {"base": "small", "parameters": sizes | {"algorithm": "none", "detect_workers": 3}} | content
    path = folder / "params" / "studies" / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def program(path, source):
    path.write_text(f"#!{sys.executable} -S\n{source}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def submissions(tmp_path_factory):
    """{stage: arguments of its sbatch} of a study of one run with the shipped profile."""
    folder = tmp_path_factory.mktemp("slurm")
    asked = {"train": {"gpu": 1, "mem_mb": 24000, "runtime": 600}, "generate": {"gpu": 1}, "detect": {"mem_mb": 7000}}
    study = write_study(folder, resources=asked)
    (folder / "bin").mkdir()
    (folder / "noted").mkdir()
    for name, source in {"sbatch": SBATCH, "sacct": SACCT}.items():
        program(folder / "bin" / name, source)
    for name in ("squeue", "sacctmgr", "sshare", "scontrol", "sinfo", "scancel"):
        program(folder / "bin" / name, QUIET)
    done = fedmem(
        "run", study, "--profile", SLURM, "--", "--slurm-init-seconds-before-status-checks", 1, "--latency-wait", 5,
        results=folder / "results", PATH=f"{folder / 'bin'}:{os.environ['PATH']}", NOTED=str(folder / "noted"),
    )  # fmt: skip
    log = next((folder / "results" / ".runner").glob("*/snakemake.log")).read_text()
    noted = [json.loads(path.read_text()) for path in (folder / "noted").iterdir()]
    assert noted, done.stdout + done.stderr + log
    return {next(a for a in one if a.startswith("rule_")).split("_")[1]: one for one in noted}


def value(arguments, name):
    return arguments[arguments.index(name) + 1]


def test_every_stage_is_submitted_with_what_the_study_asks_for(submissions):
    assert set(submissions) == {*STAGES, "studies"}
    assert value(submissions["train"], "--mem") == "24000"
    assert value(submissions["train"], "-t") == "600"
    assert value(submissions["detect"], "--mem") == "7000"
    assert [stage for stage in submissions if "--cpus-per-task=3" in submissions[stage]] == ["detect"]  # its workers
    for arguments in submissions.values():
        assert int(value(arguments, "--mem")) > 0
        assert int(value(arguments, "-t")) > 0
        assert "--nodes=1" in arguments


def test_a_gpu_is_asked_for_where_it_is_of_use_and_nowhere_else(submissions):
    with_gpu = {stage for stage, arguments in submissions.items() if "--gpus=1" in " ".join(arguments)}
    assert with_gpu == {"train", "generate"}


def test_a_submitted_job_finds_interpreter_and_session(submissions):
    wrapped = submissions["analyze"][-1]
    assert wrapped.startswith(f"--wrap={sys.executable} -m snakemake")
    assert "/results/.runner/" in value(submissions["analyze"], "-D")


def test_an_interrupt_cancels_what_was_submitted(tmp_path):
    house = House(tmp_path)
    house.act("partition", "time.sleep(100)")
    submit, cancel = '#!/bin/sh\nsetsid sh "$1" > /dev/null 2>&1 < /dev/null &\necho $!\n', '#!/bin/sh\nkill -- "-$1"\n'
    for name, source in {"submit": submit, "cancel": cancel}.items():
        (tmp_path / name).write_text(source)
        (tmp_path / name).chmod(0o755)
    given = ("--executor", "cluster-generic", "--jobs", 2)
    commands = [f"--cluster-generic-{name}-cmd={tmp_path / name}" for name in ("submit", "cancel")]
    front = house.begin("run", house.study, "--", *given, *commands)
    until(lambda: house.notes())
    os.kill(front.pid, signal.SIGINT)
    _, err = front.communicate(timeout=120)
    assert front.returncode == 130, err
    until(lambda: not house.processes(), 20)  # neither Snakemake, nor the job, nor its kernel
