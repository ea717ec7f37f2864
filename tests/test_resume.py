"""A killed training goes on at the next round and ends with the bytes of an uninterrupted one."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import killed_training
import psutil
import pytest
from killed_training import train
from small_federation import settings, whole

from fedmem.config.partition import PartitionConfig
from fedmem.config.stages import TrainConfig
from fedmem.results import progress as results_progress
from fedmem.results import work as results_work
from fedmem.results import work as stage_work
from fedmem.results.identity import notebook_file
from fedmem.results.progress import DEAD_SECONDS, KEPT, Progress, _beat, _host, resume_or_create
from fedmem.results.stage import MANIFEST, StageError, find_stage
from fedmem.results.work import begin_stage
from fedmem.train.in_process_grid import FederatedError

pytest_plugins = ["small_fixtures"]

CASES = {
    "fedavg": ({}, "checkpoints", "after"),
    "fedprox, killed before the round is noted": ({"algorithm": "fedprox"}, "checkpoints", "before"),
    "central": ({"algorithm": "central"}, "checkpoints", "after"),
    "local": ({"algorithm": "local"}, "client-1", "after"),
    "FedAdam, which has moments": ({"algorithm": "FedAdam"}, "checkpoints", "after"),
    "FedAvgM, clipped and with noise": (
        {
            "algorithm": "FedAvgM",
            "strategy_options": {"server_momentum": 0.5},
            "update_clip": 0.05,
            "update_noise": 0.1,
        },
        "checkpoints",
        "after",
    ),
    "adapters, a schedule": ({"finetuning": "lora", "schedule": "cosine", "warmup_share": 0.2}, "checkpoints", "after"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, new_model, tokenizer, rows):
    """A folder with a model, a published partition in `results`, and what killed trainings of all cases left there."""
    place = tmp_path_factory.mktemp("resume")
    new_model().save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDMEM_RESULTS", str(place / "results"))
        work = begin_stage(PartitionConfig())
        work.save_table("rows", rows)
        work.publish()
    kills = [
        (parameters(place, changes), {"part": part, "round": 2, "when": when}) for changes, part, when in CASES.values()
    ]
    command = [sys.executable, str(Path(__file__).with_name("killed_training.py")), json.dumps(kills)]
    environment = os.environ | {"FEDMEM_RESULTS": str(place / "results")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["9"] * len(CASES), done.stderr
    return place


def parameters(place: Path, changes: dict) -> dict:
    return settings(model=str(place / "model"), rounds=3, **changes).model_dump()


@pytest.fixture
def results(place, monkeypatch):
    monkeypatch.setattr(stage_work, "code_files", killed_training.code_files)
    monkeypatch.setenv("FEDMEM_RESULTS", str(place / "results"))
    return place / "results"


def undisturbed(place, tmp_path, monkeypatch, case) -> dict[str, bytes]:
    """The bytes of a training that nobody killed, made in results of its own."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results/partition").symlink_to(place / "results/partition")
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    stage = train(parameters(place, CASES[case][0]))
    return {name: content for name, content in whole(stage.folder).items() if name != "manifest.json"}


@pytest.mark.parametrize("case", CASES)
def test_killed_after_round_2_of_3_and_resumed_has_the_same_bytes(place, results, tmp_path, monkeypatch, case):
    trained = []
    monkeypatch.setattr("fedmem.train.federation.train_locally", noting(trained))
    stage = train(parameters(place, CASES[case][0]))
    resumed = {name: content for name, content in whole(stage.folder).items() if name != "manifest.json"}
    expected = {"local": 4, "central": 1}.get(case, 3)  # local: a round of client 1 and three of client 2
    if case.startswith("fedprox"):
        expected = 6  # round 2 was on disk but not noted: it is made again
    assert len(trained) == expected
    assert resumed == undisturbed(place, tmp_path, monkeypatch, case)
    assert {"curves.parquet", f"{'checkpoints/client-1' if case == 'local' else 'checkpoints'}/round-3/"} <= {
        name if name == "curves.parquet" else f"{Path(name).parent}/" for name in resumed
    }
    assert set(stage.manifest["files"]) == set(resumed)  # nothing of what was kept is published


@pytest.mark.parametrize("algorithm", ["fedavg", "local"])
def test_the_training_cell_run_again_after_an_interrupt_goes_on(place, tmp_path, monkeypatch, algorithm):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/partition").symlink_to(place / "results/partition")
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    notebook = json.loads(notebook_file("train").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (training,) = (number for number, cell in enumerate(cells) if cell.startswith("history ="))

    def run(session: dict, cells: list[str]) -> dict:
        for cell in cells:
            exec(cell, session)
            if cell.startswith("partition ="):
                session["options"] = parameters(
                    place, {"algorithm": algorithm, "utility_rows": 0, "perplexity_rows": 0}
                )
                for name in session.keys() & session["options"].keys():
                    session[name] = session["options"].pop(name)
        return session

    whole_session = run({}, cells[: training + 1])
    undisturbed = whole(whole_session["work"].folder)
    shutil.rmtree(whole_session["work"].folder)

    session, steps = run({}, cells[:training]), []
    with monkeypatch.context() as patch:
        patch.setattr("fedmem.train.federation.train_locally", interrupted_after(steps, 4))
        with pytest.raises(KeyboardInterrupt):
            run(session, [cells[training]])
    run(session, [cells[training]])
    again = whole(session["work"].folder)
    assert {name: again[name] for name in again if not name.startswith(KEPT)} == {
        name: undisturbed[name] for name in undisturbed if not name.startswith(KEPT)
    }
    assert len(session["after"]) == len(whole_session["after"])
    assert session["history"].curves().equals(whole_session["history"].curves())


def test_a_round_that_cannot_be_read_is_forgotten_and_the_next_run_begins_anew(place, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/partition").symlink_to(place / "results/partition")
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    with monkeypatch.context() as patch:
        patch.setattr("fedmem.train.federation.train_locally", interrupted_after([], 4))
        with pytest.raises(KeyboardInterrupt):
            train(parameters(place, {}))
    (weights,) = (tmp_path / "results/train").glob(".*/checkpoints/round-1/model.safetensors")
    os.truncate(weights, 1000)  # as a power loss may leave it
    with pytest.raises(
        FederatedError, match=r"(?s)round 1 of the interrupted training cannot be read: .*starts from the beginning"
    ):
        train(parameters(place, {}))
    stage = train(parameters(place, {}))
    assert whole(stage.folder)["checkpoints/round-3/model.safetensors"] == undisturbed_weights(place, monkeypatch)


def undisturbed_weights(place, monkeypatch) -> bytes:
    monkeypatch.setenv("FEDMEM_RESULTS", str(place / "results"))
    return whole(train(parameters(place, {})).folder)["checkpoints/round-3/model.safetensors"]


def interrupted_after(steps: list, number: int):
    from fedmem.train.local_training import train_locally

    def train(model, *args, **kwargs):
        result = train_locally(model, *args, **kwargs)
        steps.append(result)
        if len(steps) > number:
            raise KeyboardInterrupt  # with the model's weights half trained
        return result

    return train


def noting(trained: list):
    from fedmem.train.local_training import train_locally

    def train_and_note(*args, **kwargs):
        trained.append(kwargs["first_step"])
        return train_locally(*args, **kwargs)

    return train_and_note


# --- what may be taken up, and by whom


@pytest.fixture
def target(tmp_path):
    return tmp_path / "train" / "fedavg-abc"


MADE = {"identity": "i", "code": "c"}


def left(target: Path, name: str, made=MADE, rounds: int = 2) -> Path:
    """A folder as a process leaves it that was killed after some rounds."""
    folder = target.parent / f".{target.name}.{name}"
    (folder / KEPT).mkdir(parents=True)
    (folder / KEPT / "alive").touch()
    Progress(folder, made).keep({"rounds": rounds})
    (folder / "round-2").mkdir()
    return folder


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def here(pid: int) -> str:
    return f"{_host()}-{pid}"


def test_a_dead_process_folder_is_taken_over_whole(target):
    folder = left(target, here(dead_pid()))
    own, progress = resume_or_create(target, MADE)
    assert progress.value == {"rounds": 2}
    assert (own / "round-2").is_dir()
    assert not folder.exists()
    assert own.name.endswith(f"-{os.getpid()}")


@pytest.mark.parametrize("made", [{"identity": "j", "code": "c"}, {"identity": "i", "code": "d"}])
def test_what_was_made_of_something_else_is_removed_and_never_taken_up(target, made):
    folder = left(target, here(dead_pid()), made)
    own, progress = resume_or_create(target, MADE)
    assert progress.value == {}
    assert not folder.exists()
    assert not (own / "round-2").exists()


def test_a_living_process_keeps_its_folder(target):
    folder = left(target, here(os.getppid()))
    _, progress = resume_or_create(target, MADE)
    assert progress.value == {}
    assert (folder / "round-2").is_dir()


def test_a_process_that_only_has_the_id_of_the_dead_one_keeps_nothing(target):
    folder = left(target, here(os.getppid()))
    (folder / KEPT / "alive").write_text(str(psutil.Process(os.getppid()).create_time() - 60))
    _, progress = resume_or_create(target, MADE)
    assert progress.value == {"rounds": 2}
    assert not folder.exists()


def test_a_folder_of_another_machine_is_left_alone_while_it_gives_signs_of_life(target, monkeypatch):
    monkeypatch.setattr(results_progress, "BEAT_SECONDS", 0.5)
    folder = left(target, f"elsewhere-{dead_pid()}")
    sign = folder / KEPT / "alive"
    threading.Thread(target=_beat, args=(sign,), daemon=True).start()
    _, progress = resume_or_create(target, MADE)
    assert progress.value == {}
    assert (folder / "round-2").is_dir()


def test_a_folder_of_another_machine_is_taken_when_nobody_renews_its_sign(target, monkeypatch, capsys):
    monkeypatch.setattr(results_progress, "BEAT_SECONDS", 0.1)
    folder = left(target, f"elsewhere-{dead_pid()}")
    _, progress = resume_or_create(target, MADE)
    assert progress.value == {"rounds": 2}
    assert not folder.exists()
    assert "watching for two minutes whether elsewhere still builds this stage" in capsys.readouterr().err


def test_an_old_sign_of_another_machine_is_not_watched(target):
    folder = left(target, f"elsewhere-{dead_pid()}")
    old = (folder / KEPT / "alive").stat().st_mtime - DEAD_SECONDS - 1
    os.utime(folder / KEPT / "alive", (old, old))
    _, progress = resume_or_create(target, MADE)
    assert progress.value == {"rounds": 2}
    assert not folder.exists()


def test_a_process_that_begins_again_goes_on_with_its_own_folder(target):
    own, progress = resume_or_create(target, MADE)
    progress.keep({"rounds": 1})
    assert progress.value == {"rounds": 1}
    again, progress = resume_or_create(target, MADE)
    assert again == own
    assert progress.value == {"rounds": 1}
    assert progress.seconds > 0
    _, other = resume_or_create(target, MADE | {"code": "d"})
    assert other.value == {}


def test_of_several_the_one_worked_on_last_goes_on(target):
    older, newer = left(target, here(dead_pid()), rounds=1), left(target, f"elsewhere-{dead_pid()}", rounds=2)
    for age, folder in ((3000, older), (2000, newer)):
        sign = folder / KEPT / "alive"
        moment = sign.stat().st_mtime - age
        os.utime(sign, (moment, moment))
    _, progress = resume_or_create(target, MADE)
    assert progress.value == {"rounds": 2}
    assert len(list(target.parent.iterdir())) == 1


def test_a_torn_record_counts_as_none(target):
    folder = left(target, here(dead_pid()))
    (folder / KEPT / "record.json").write_text('{"made": ')
    assert resume_or_create(target, MADE)[1].value == {}


def test_a_publishing_that_is_interrupted_has_cost_nothing(results, monkeypatch):
    work = begin_stage(TrainConfig(rounds=7), find_stage("partition"))
    work.path("weights").write_text("of the last round")
    work.progress.keep({"rounds": 2})
    with monkeypatch.context() as patch:
        patch.setattr(results_work, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work.publish()
    (work.folder / MANIFEST).write_text("{}")  # as one that was interrupted a moment later leaves it
    again = begin_stage(TrainConfig(rounds=7), find_stage("partition"))
    assert again.progress.value == {"rounds": 2}
    assert again.publish().manifest["files"].keys() == {"weights"}
    assert not (again.target / KEPT).exists()


def interrupted():
    raise KeyboardInterrupt


def test_a_folder_that_was_taken_over_is_not_published(results):
    work = begin_stage(TrainConfig(rounds=2), find_stage("partition"))
    work.folder.rename(work.folder.with_name(".taken"))
    work.path("late.txt").write_text("written after another process took the folder over")
    with pytest.raises(StageError, match="another process considered this one dead"):
        work.publish()
    assert not work.target.exists()
