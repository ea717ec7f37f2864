"""The runner on one machine: one run at a time, what is shown meanwhile, retries, GPUs, and how it ends.

The notebooks here do next to nothing, so that kernels, papermill and Snakemake are the real ones and take seconds.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from small_house import House, until

from fedmem.config.partition import PartitionConfig
from fedmem.results.work import begin_stage
from fedmem.study import gpus
from fedmem.study.execute import put_copies
from fedmem.study.runner import Progress, _executor, _limits, current_session, note_in_lock, results_lock

pytestmark = pytest.mark.notebooks
WAIT = """
until = time.time() + 60
while not Path(os.environ["ACT"], "go").exists() and time.time() < until:
    time.sleep(0.1)
"""

UNTIL_TRAINED = ("--", "--until", "train")  # Snakemake's own words: what follows is of no interest


@pytest.fixture
def house(tmp_path):
    with House(tmp_path) as made:
        yield made


def began(house, stage):
    return any(note[:2] == [stage, "began"] for note in house.notes())


# --- one run at a time ----------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_or_waits_and_status_shows_the_first(house):
    house.act("train", WAIT)
    assert "nothing runs" in house.run("status", house.study).stdout
    first = house.begin("run", house.study, "--cores", 1)
    until(lambda: began(house, "train"))
    second = house.run("run", house.study)
    assert second.returncode == 2
    assert f"another `fedmem run` (study small, processes {first.pid} and" in second.stderr
    shown = house.run("status", house.study).stdout
    assert f"running: study small, process {first.pid} on" in shown
    assert "1 done, 0 failed, 1 running, 4 waiting" in shown
    assert "train-" in shown.split("waiting")[1]
    waits = house.begin("run", house.study, "--wait")
    time.sleep(1)
    (house.acts / "go").touch()
    assert first.communicate(timeout=300)[0].endswith("report.html\n")
    out, err = waits.communicate(timeout=300)
    assert "waiting for another `fedmem run`" in err
    assert "nothing to do" in out
    assert waits.returncode == first.returncode == 0
    assert [note[0] for note in house.notes() if note[1] == "began"] == [
        "partition", "train", "generate", "detect", "analyze", "studies",
    ]  # fmt: skip
    assert "nothing runs" in house.run("status", house.study).stdout
    assert not list(house.home.iterdir())  # nothing is written outside results and the temporary folder


def test_the_lock_survives_a_look_and_is_free_once_its_process_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path))
    assert current_session() is None
    with results_lock("a") as lock:
        note_in_lock(lock, session="/there")
        assert current_session() == {
            "study": "a", "host": os.uname().nodename, "front": os.getpid(), "session": "/there",
        }  # fmt: skip
    assert current_session() is None
    (tmp_path / ".runner" / "lock").write_text("999999 half a li")  # whatever a killed process left
    with results_lock("b"):
        assert current_session()["study"] == "b"


# --- an interrupt ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_and_the_next_run_goes_on(house, number):
    house.act("train", WAIT)
    first = house.begin("run", house.study, "--cores", 1)
    until(lambda: began(house, "train"))
    assert len(house.kernels()) == 1
    os.kill(first.pid, number)  # the front alone, as a terminal's Ctrl-C reaches it
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "interrupted" in err
    until(lambda: not house.processes(), 15)  # no kernel is left, nor anything else
    if number == signal.SIGTERM:
        return
    (house.acts / "go").touch()
    house.run("run", house.study, *UNTIL_TRAINED)
    assert [note[:2] for note in house.notes()] == [
        ["partition", "began"], ["partition", "ended"], ["train", "began"], ["train", "began"], ["train", "ended"],
    ]  # fmt: skip


@pytest.mark.parametrize("who", ["runner", "front"])
def test_killed_hard_it_leaves_no_kernel_and_no_lock(house, who):
    house.act("train", WAIT)
    first = house.begin("run", house.study, "--cores", 1)
    until(lambda: began(house, "train"))
    about = json.loads((house.results / ".runner" / "lock").read_text())
    os.kill(about[who], signal.SIGKILL)
    if who == "runner":
        assert first.wait(timeout=60) == 1
        until(lambda: not house.processes(), 15)
        (house.acts / "go").touch()
    else:  # the session goes on without its front, and is seen
        shown = house.run("status", house.study).stdout
        assert "1 running, 4 waiting" in shown
        (house.acts / "go").touch()
    if who == "front":
        done = house.run("run", house.study, "--wait")
        assert done.returncode == 0, done.stderr
        assert "nothing to do" in done.stdout
    else:
        house.run("run", house.study, *UNTIL_TRAINED)
    assert sum(note[:2] == ["train", "ended"] for note in house.notes()) == 1


POOL = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import time
from fedmem.detect import PanDetector
from fedmem.detect.matches import _start_worker

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), _start_worker, (PanDetector(),))
    pool.submit(print, flush=True).result()
    print(*pool._processes, flush=True)
    time.sleep(100)
"""


def test_the_detectors_processes_end_with_a_kernel_that_is_killed(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    kernel = subprocess.Popen([sys.executable, tmp_path / "pool.py"], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in kernel.stdout.read(1) and kernel.stdout.readline().split()]
    assert workers
    kernel.kill()
    kernel.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 15)


# --- retries --------------------------------------------------------------------------------------------------------

DIES_ONCE = """
import signal
again = Path(os.environ["ACT"], "again")
if not again.exists():
    again.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stage_that_died_is_tried_again_when_asked(house):
    house.act("train", DIES_ONCE)
    failed = house.run("run", house.study, *UNTIL_TRAINED)
    assert failed.returncode == 1
    assert "train failed: the kernel died" in failed.stderr
    (house.acts / "again").unlink()
    done = house.run("run", house.study, "--retries", 1, *UNTIL_TRAINED)
    assert "died" not in done.stderr
    assert [note[0] for note in house.notes()].count("train") == 4  # began three times, ended once


def test_an_error_in_a_cell_is_not_tried_again(house):
    house.act("train", "raise ValueError('as ever')")
    done = house.run("run", house.study, "--retries", 2)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: as ever") == 1
    assert [note[0] for note in house.notes()] == ["partition", "partition", "train"]


# --- GPUs -----------------------------------------------------------------------------------------------------------


def test_two_trainings_never_share_a_gpu(tmp_path):
    house = House(tmp_path, grid={"train_seed": [0, 1]}, resources={"train": {"gpu": 1}, "generate": {"gpu": 0}})
    house.act("train", "time.sleep(1)")
    house.run("run", house.study, "--cores", 2, *UNTIL_TRAINED, CUDA_VISIBLE_DEVICES="7")
    trained = [note for note in house.notes() if note[0] == "train"]
    assert [note[1] for note in trained] == ["began", "ended", "began", "ended"]  # one after the other
    assert {note[3] for note in trained} == {"'7'"}
    assert {note[3] for note in house.notes() if note[0] != "train"} == {"''"}  # the others see none


def test_each_of_two_trainings_has_a_gpu_of_its_own(tmp_path):
    house = House(tmp_path, grid={"train_seed": [0, 1]}, resources={"train": {"gpu": 1}})
    ends = "[line for line in Path(os.environ['ACT'], 'notes').read_text().splitlines() if 'train began' in line]"
    house.act("train", f"until = time.time() + 60\nwhile len({ends}) < 2 and time.time() < until:\n    time.sleep(0.1)")
    house.run("run", house.study, "--cores", 2, *UNTIL_TRAINED, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b")
    trained = [note for note in house.notes() if note[0] == "train"]
    assert [note[1] for note in trained] == ["began", "began", "ended", "ended"]  # side by side
    assert {note[3] for note in trained} == {"'GPU-a'", "'GPU-b'"}


@pytest.mark.parametrize(
    ("given", "names"),
    [("0,1", ["0", "1"]), ("", []), ("-1", []), ("1,-1,0", ["1"]), ("GPU-8f, MIG-2", ["GPU-8f", "MIG-2"])],
)
def test_gpus_are_read_as_cuda_reads_them(monkeypatch, given, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert gpus.visible() == names


def test_gpus_are_counted_without_torch(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    gpus._count.cache_clear()
    assert gpus.visible() == []
    (tmp_path / "bin").mkdir()
    listed = tmp_path / "bin" / "nvidia-smi"
    listed.write_text(
        "#!/bin/sh\necho 'GPU 0: A (UUID: GPU-1)'\necho '  MIG 1g: (UUID: MIG-1)'\necho 'GPU 1: A (UUID: x)'\n"
    )
    listed.chmod(0o755)
    gpus._count.cache_clear()
    assert gpus.visible() == ["0", "1"]
    gpus._count.cache_clear()
    imported = [sys.executable, "-c", "import fedmem.cli, sys; print(*sys.modules)"]
    assert "torch" not in subprocess.run(imported, capture_output=True, text=True, check=True).stdout.split()


def test_a_gpu_in_use_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    with gpus.hold(["0", "1"]) as first, gpus.hold(["0", "1"]) as second:
        assert [first, second] == ["0", "1"]
        with (tmp_path / f"fedmem-{os.getuid()}-gpu-1.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with gpus.hold(["1"]) as again:
        assert again == "1"


# --- what Snakemake is told -----------------------------------------------------------------------------------------


def test_a_session_stands_as_its_markers_say(tmp_path):
    (tmp_path / "jobs.json").write_text(json.dumps([{"id": name} for name in "abcd"]))
    for name in ("a.started", "a.done", "b.started", "b.failed", "c.started"):
        (tmp_path / name).touch()
    now = Progress.of(tmp_path)
    assert (now.done, now.failed, list(now.running), now.waiting) == (["a"], ["b"], ["c"], ["d"])
    assert 0 <= now.running["c"] < 60
    time.sleep(0.02)
    (tmp_path / "c.died").touch()
    assert Progress.of(tmp_path).failed == ["b", "c"]
    time.sleep(0.02)
    (tmp_path / "c.started").touch()  # tried again
    assert list(Progress.of(tmp_path).running) == ["c"]


def test_the_executor_is_read_from_profile_and_arguments(tmp_path):
    (tmp_path / "config.yaml").write_text("executor: slurm\n")
    assert _executor([]) == "local"
    assert _executor(["--profile", str(tmp_path)]) == "slurm"
    assert _executor(["--profile", str(tmp_path), "--executor=local"]) == "local"
    assert _executor(["-e", "cluster-generic"]) == "cluster-generic"


def test_a_profile_that_is_none_is_an_error(house):
    done = house.run("run", house.study, "--profile", house.folder)
    assert done.returncode == 2
    assert "expected a folder with Snakemake's config.yaml" in done.stderr
    for content, said in ((b"executor: [", "is not YAML"), (b"- slurm", "got list"), (b"\xff\xfe", "is not YAML")):
        (house.folder / "config.yaml").write_bytes(content)
        done = house.run("run", house.study, "--profile", house.folder)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not Path(house.acts, "notes").exists()
    assert not list(house.results.glob("studies/*/study.json"))  # the description of what is there stays


@pytest.mark.parametrize(("old", "torn"), [(True, False), (False, True), (False, False)])
def test_only_the_copy_that_made_the_stage_is_put_into_it(tmp_path, monkeypatch, old, torn):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    session = tmp_path / "results" / ".runner" / "killed"
    session.mkdir(parents=True)
    (session / "job.started").touch()
    copy = session / "job.ipynb"
    copy.write_text('{"cells": [' if torn else json.dumps(nbformat.v4.new_notebook()))
    time.sleep(0.02)
    stage = begin_stage(PartitionConfig()).publish()
    (stage.folder / "notebook.ipynb").write_text("of the session that made it")
    time.sleep(0.02)
    if not old:  # papermill writes its copy again after the last cell
        copy.touch()
    (session / "jobs.json").write_text(
        json.dumps([{"id": "job", "stage": "partition", "folder": str(stage.folder)}, {"id": "other", "folder": "x"}])
    )
    put_copies(session)
    assert not copy.exists()
    assert ((stage.folder / "notebook.ipynb").read_text() == "of the session that made it") is (old or torn)


def test_a_local_profile_limits_itself(tmp_path):
    assert _limits([], [])[:3] == ["--cores", "all", "--resources"]
    (tmp_path / "config.yaml").write_text("cores: 1\nresources:\n  - mem_mb=1000\n")
    assert _limits([], ["--profile", str(tmp_path)]) == []
    assert _limits([], ["--profile", str(tmp_path), "--cores", "2"]) == []
    (tmp_path / "config.yaml").write_text("keep-going: true\n")
    assert _limits([], ["-c", "2", "--profile", str(tmp_path)])[0] == "--resources"
