"""Stage folders: identity, publishing, staleness of what they hold."""

import json
import math
import os
import subprocess
import sys

import pandas as pd
import pytest

from fedmem import runs
from fedmem.config import AnalyzeConfig, ConfigError, DetectConfig, GenerateConfig, PartitionConfig, TrainConfig
from fedmem.identity import code_digest


@pytest.fixture(autouse=True)
def _results(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))


def published(config, parent=None, **tables):
    work = runs.begin(config, parent)
    for name, frame in tables.items():
        work.save_table(name, frame)
    return work.publish()


def test_identity_ignores_what_cannot_change_the_result():
    assert runs.identity(TrainConfig(proximal_mu=1.0), "p", {}) == runs.identity(TrainConfig(proximal_mu=2.0), "p", {})
    assert runs.identity(TrainConfig(device="cpu"), "p", {}) == runs.identity(TrainConfig(device="cuda"), "p", {})
    assert runs.identity(TrainConfig(rounds=3), "p", {}) != runs.identity(TrainConfig(rounds=4), "p", {})
    assert runs.identity(TrainConfig(), "p", {}) != runs.identity(TrainConfig(), "q", {})


def test_identity_follows_the_content_of_a_file_not_its_path(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("{}\n")
    second.write_text("{}\n")
    here, there = (PartitionConfig(corpus="file", corpus_path=str(path)) for path in (first, second))
    assert runs.identity(here) == runs.identity(there)
    second.write_text("{ }\n")
    assert runs.identity(here) != runs.identity(there)


def test_a_model_folder_counts_by_content(tmp_path):
    folders = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        folders.append(TrainConfig(model=str(folder)))
    assert runs.identity(folders[0], "p") == runs.identity(folders[1], "p")
    (tmp_path / "two" / "config.json").write_text('{"a": 1}')
    assert runs.identity(folders[0], "p") != runs.identity(folders[1], "p")


def test_publish_and_open_again():
    rows = pd.DataFrame({"client": [0, 1]})
    stage = published(PartitionConfig(), rows=rows)
    again = runs.open_stage(stage.folder)
    pd.testing.assert_frame_equal(again.table("rows"), rows)
    assert again.config == PartitionConfig()
    assert set(again.manifest["files"]) == {"rows.parquet"}
    assert {"versions", "commit", "code", "seconds", "device", "parents", "effective"} <= set(again.manifest)
    assert [p.name for p in stage.folder.parent.iterdir()] == [stage.folder.name]  # nothing hidden is left


def test_an_unfinished_folder_is_never_read(tmp_path):
    work = runs.begin(PartitionConfig())
    work.save_table("rows", pd.DataFrame({"client": [0]}))
    assert runs.finished("partition") == []
    with pytest.raises(runs.StageError, match=r"run notebooks/1_partition\.ipynb first"):
        runs.find("partition")
    with pytest.raises(runs.StageError, match="no finished stage"):
        runs.open_stage(work.folder)


def test_running_again_replaces_the_folder_whole():
    first = published(PartitionConfig(), rows=pd.DataFrame({"client": [0]}), more=pd.DataFrame({"x": [1]}))
    second = published(PartitionConfig(), rows=pd.DataFrame({"client": [1]}))
    assert first.folder == second.folder
    assert sorted(p.name for p in second.folder.iterdir()) == ["manifest.json", "rows.parquet"]


def test_a_killed_process_leaves_nothing_that_counts_and_its_folder_is_removed():
    kill = (
        "import os; from fedmem import runs; from fedmem.config import PartitionConfig\n"
        "work = runs.begin(PartitionConfig()); work.path('rows.parquet').write_bytes(b'half'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", kill], check=False).returncode == 9
    folder = runs.results_root() / "partition"
    assert len(list(folder.iterdir())) == 1
    stage = published(PartitionConfig(), rows=pd.DataFrame({"client": [0]}))
    assert list(folder.iterdir()) == [stage.folder]


def test_latest_is_the_newest_and_ancestors_are_found():
    published(PartitionConfig(n_clients=2))
    newest = published(PartitionConfig(n_clients=4))
    assert runs.find("partition").folder == newest.folder
    train = published(TrainConfig(), runs.find("partition"))
    generate = published(GenerateConfig(), train)
    assert generate.ancestor("partition").config.n_clients == 4
    assert generate.config.checkpoint_round == TrainConfig().rounds  # "last" is recorded as its number
    with pytest.raises(runs.StageError, match="does not descend"):
        train.ancestor("generate")


def test_a_parent_of_the_wrong_stage_is_refused():
    stage = published(PartitionConfig())
    with pytest.raises(runs.StageError, match="is a partition stage; wanted is a train stage"):
        runs.find("train", str(stage.folder))


def test_parameters_are_checked_against_the_ancestors_before_anything_is_written():
    train = published(TrainConfig(rounds=3), published(PartitionConfig()))
    with pytest.raises(ConfigError, match="checkpoint_round: got 4; allowed is 0 to rounds = 3"):
        runs.begin(GenerateConfig(checkpoint_round=4), train)
    assert not (runs.results_root() / "generate").exists()


def test_a_missing_corpus_is_an_error_that_names_it():
    with pytest.raises(FileNotFoundError, match=r"corpus_path: there is no file .nowhere\.jsonl."):
        runs.begin(PartitionConfig(corpus="file", corpus_path="nowhere.jsonl"))


def test_a_foreign_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("FEDMEM_PYTHON", "/usr/bin/another-python")
    with pytest.raises(runs.StageError, match="another kernel named python3"):
        runs.begin(PartitionConfig())


def test_json_has_null_for_nan_and_texts_for_keys():
    work = runs.begin(PartitionConfig())
    work.save_json("mr", {1: math.nan, "m": pd.DataFrame({"a": [1.5, math.nan]}).to_numpy()})
    assert json.loads(work.path("mr.json").read_text()) == {"1": None, "m": [[1.5], [None]]}


def test_the_digest_of_a_folder_covers_names_and_bytes(tmp_path):
    (tmp_path / "a").write_text("x")
    before = runs.file_digest(tmp_path)
    os.rename(tmp_path / "a", tmp_path / "b")
    assert runs.file_digest(tmp_path) != before


def test_an_entity_model_counts_by_content_and_only_where_candidates_are_typed(tmp_path):
    folder = tmp_path / "entities"
    folder.mkdir()
    (folder / "meta.json").write_text("{}")
    typed = {"paraphrase_model": "some/classifier"}
    first = runs.identity(DetectConfig(entity_model=str(folder), **typed))
    moved = folder.rename(tmp_path / "elsewhere")
    assert runs.identity(DetectConfig(entity_model=str(moved), **typed)) == first
    (moved / "meta.json").write_text('{"trained": "again"}')
    assert runs.identity(DetectConfig(entity_model=str(moved), **typed)) != first
    assert runs.identity(DetectConfig(entity_model=str(moved))) == runs.identity(DetectConfig())


def test_the_table_of_runs_says_which_were_made_by_other_code_or_of_other_files(monkeypatch):
    stage = None
    for config in (PartitionConfig(), TrainConfig(), GenerateConfig(), DetectConfig(), AnalyzeConfig()):
        stage = runs.begin(config, stage).publish()
    description = {"runs": [{"name": name, "parameters": {}} for name in ("one", "missing")]}

    def states():
        analysis = runs.open_stage(stage.folder)
        return runs.run_table(description, {"one": analysis})["state"].to_dict()

    assert states() == {"one": "finished", "missing": "to do"}
    (runs.results_root() / "train").mkdir(exist_ok=True)
    (runs.results_root() / "train" / "gone.failed.json").write_text('{"error": "no"}')
    description["runs"][1]["stages"] = {"train": "train/gone"}
    assert states()["missing"] == "failed"
    with monkeypatch.context() as patch:
        patch.setattr(runs, "code_digest", lambda stage: "other" if stage == "generate" else code_digest(stage))
        assert states()["one"] == "stale"
    work = runs.begin(PartitionConfig())
    work.save_json("note", 1)
    work.publish()
    assert states()["one"] == "stale"


def test_a_stage_that_succeeds_has_no_failure_any_more():
    work = runs.begin(PartitionConfig())
    record = work.target.with_name(f"{work.target.name}.failed.json")
    record.write_text('{"error": "of an attempt before"}')
    work.publish()
    assert not record.exists()
