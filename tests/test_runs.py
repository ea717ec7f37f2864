"""Stage folders: identity, publishing, staleness of what they hold."""

import json
import math
import os
import subprocess
import sys

import pandas as pd
import pytest

from fedmem.config.parameter import ConfigError
from fedmem.config.partition import PartitionConfig
from fedmem.config.stages import AnalyzeConfig, DetectConfig, GenerateConfig, TrainConfig
from fedmem.machine.paths import file_digest, results_root
from fedmem.results import studies
from fedmem.results.code_files import code_files
from fedmem.results.identity import identity_of
from fedmem.results.stage import StageError, find_stage, finished_stages, open_stage
from fedmem.results.studies import run_table
from fedmem.results.work import begin_stage


@pytest.fixture(autouse=True)
def _results(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))


def published(config, parent=None, **tables):
    work = begin_stage(config, parent)
    for name, frame in tables.items():
        work.save_table(name, frame)
    return work.publish()


def test_identity_ignores_what_cannot_change_the_result():
    assert identity_of(TrainConfig(proximal_mu=1.0), "p", {}) == identity_of(TrainConfig(proximal_mu=2.0), "p", {})
    assert identity_of(TrainConfig(device="cpu"), "p", {}) == identity_of(TrainConfig(device="cuda"), "p", {})
    assert identity_of(TrainConfig(rounds=3), "p", {}) != identity_of(TrainConfig(rounds=4), "p", {})
    assert identity_of(TrainConfig(), "p", {}) != identity_of(TrainConfig(), "q", {})


def test_identity_follows_the_content_of_a_file_not_its_path(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("{}\n")
    second.write_text("{}\n")
    here, there = (PartitionConfig(corpus="file", corpus_path=str(path)) for path in (first, second))
    assert identity_of(here) == identity_of(there)
    second.write_text("{ }\n")
    assert identity_of(here) != identity_of(there)


def test_a_model_folder_counts_by_content(tmp_path):
    folders = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        folders.append(TrainConfig(model=str(folder)))
    assert identity_of(folders[0], "p") == identity_of(folders[1], "p")
    (tmp_path / "two" / "config.json").write_text('{"a": 1}')
    assert identity_of(folders[0], "p") != identity_of(folders[1], "p")


def test_publish_and_open_again():
    rows = pd.DataFrame({"client": [0, 1]})
    stage = published(PartitionConfig(), rows=rows)
    again = open_stage(stage.folder)
    pd.testing.assert_frame_equal(again.table("rows"), rows)
    assert again.config == PartitionConfig()
    assert set(again.manifest["files"]) == {"rows.parquet"}
    assert {"versions", "commit", "code", "seconds", "device", "parents", "effective"} <= set(again.manifest)
    assert [p.name for p in stage.folder.parent.iterdir()] == [stage.folder.name]  # nothing hidden is left


def test_an_unfinished_folder_is_never_read(tmp_path):
    work = begin_stage(PartitionConfig())
    work.save_table("rows", pd.DataFrame({"client": [0]}))
    assert finished_stages("partition") == []
    with pytest.raises(StageError, match=r"run notebooks/1_partition\.ipynb first"):
        find_stage("partition")
    with pytest.raises(StageError, match="no finished stage"):
        open_stage(work.folder)


def test_running_again_replaces_the_folder_whole():
    first = published(PartitionConfig(), rows=pd.DataFrame({"client": [0]}), more=pd.DataFrame({"x": [1]}))
    second = published(PartitionConfig(), rows=pd.DataFrame({"client": [1]}))
    assert first.folder == second.folder
    assert sorted(p.name for p in second.folder.iterdir()) == ["manifest.json", "rows.parquet"]


def test_a_killed_process_leaves_nothing_that_counts_and_its_folder_is_removed():
    kill = (
        "import os; from fedmem.config.partition import PartitionConfig; from fedmem.results.work import begin_stage\n"
        "work = begin_stage(PartitionConfig()); work.path('rows.parquet').write_bytes(b'half'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", kill], check=False).returncode == 9
    folder = results_root() / "partition"
    assert len(list(folder.iterdir())) == 1
    stage = published(PartitionConfig(), rows=pd.DataFrame({"client": [0]}))
    assert list(folder.iterdir()) == [stage.folder]


def test_latest_is_the_newest_and_ancestors_are_found():
    published(PartitionConfig(n_clients=2))
    newest = published(PartitionConfig(n_clients=4))
    assert find_stage("partition").folder == newest.folder
    train = published(TrainConfig(), find_stage("partition"))
    generate = published(GenerateConfig(), train)
    assert generate.ancestor("partition").config.n_clients == 4
    assert generate.config.checkpoint_round == TrainConfig().rounds  # "last" is recorded as its number
    with pytest.raises(StageError, match="does not descend"):
        train.ancestor("generate")


def test_a_parent_of_the_wrong_stage_is_refused():
    stage = published(PartitionConfig())
    with pytest.raises(StageError, match="is a partition stage; expected a train stage"):
        find_stage("train", str(stage.folder))


def test_parameters_are_checked_against_the_ancestors_before_anything_is_written():
    train = published(TrainConfig(rounds=3), published(PartitionConfig()))
    with pytest.raises(ConfigError, match="checkpoint_round: got 4; expected 0 to rounds = 3"):
        begin_stage(GenerateConfig(checkpoint_round=4), train)
    assert not (results_root() / "generate").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("parents", {}), ("stage", None), ("stage", "abc"), ("parameters", "abc"), ("device", None), ("finished", None),
     ("seconds", "abc"), ("sizes", None)],
)  # fmt: skip
def test_an_edited_manifest_is_an_error_that_names_its_key(key, value):
    stage = published(PartitionConfig())
    (stage.folder / "manifest.json").write_text(json.dumps(stage.manifest | {key: value}))
    with pytest.raises(StageError, match=f"manifest.json is not a stage's manifest: got .* as its '{key}'; run the"):
        open_stage(stage.folder)
    assert finished_stages("partition") == []


def test_a_stage_is_found_by_its_name_alone():
    stage = published(PartitionConfig())
    assert find_stage("partition", stage.folder.name) == stage
    with pytest.raises(StageError, match=r"there is no folder nosuch; expected one in .*partition, by path or by name"):
        find_stage("partition", "nosuch")


def test_a_missing_corpus_is_an_error_that_names_it():
    with pytest.raises(FileNotFoundError, match=r"corpus_path: there is no file .nowhere\.jsonl."):
        begin_stage(PartitionConfig(corpus="file", corpus_path="nowhere.jsonl"))


def test_a_foreign_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("FEDMEM_PYTHON", "/usr/bin/another-python")
    with pytest.raises(StageError, match="another kernel named python3"):
        begin_stage(PartitionConfig())


def test_json_has_null_for_nan_and_texts_for_keys():
    work = begin_stage(PartitionConfig())
    work.save_json("mr", {1: math.nan, "m": pd.DataFrame({"a": [1.5, math.nan]}).to_numpy()})
    assert json.loads(work.path("mr.json").read_text()) == {"1": None, "m": [[1.5], [None]]}


def test_the_digest_of_a_folder_covers_names_and_bytes(tmp_path):
    (tmp_path / "a").write_text("x")
    before = file_digest(tmp_path)
    os.rename(tmp_path / "a", tmp_path / "b")
    assert file_digest(tmp_path) != before


def test_an_entity_model_counts_by_content_and_only_where_candidates_are_typed(tmp_path):
    folder = tmp_path / "entities"
    folder.mkdir()
    (folder / "meta.json").write_text("{}")
    typed = {"paraphrase_model": "some/classifier"}
    first = identity_of(DetectConfig(entity_model=str(folder), **typed))
    moved = folder.rename(tmp_path / "elsewhere")
    assert identity_of(DetectConfig(entity_model=str(moved), **typed)) == first
    (moved / "meta.json").write_text('{"trained": "again"}')
    assert identity_of(DetectConfig(entity_model=str(moved), **typed)) != first
    assert identity_of(DetectConfig(entity_model=str(moved))) == identity_of(DetectConfig())


def test_the_table_of_runs_says_which_were_made_by_other_code_or_of_other_files(monkeypatch):
    stage = None
    for config in (PartitionConfig(), TrainConfig(), GenerateConfig(), DetectConfig(), AnalyzeConfig()):
        stage = begin_stage(config, stage).publish()
    description = {"runs": [{"name": name, "parameters": {}} for name in ("one", "missing")]}

    def states():
        analysis = open_stage(stage.folder)
        return run_table(description, {"one": analysis})["state"].to_dict()

    assert states() == {"one": "finished", "missing": "to do"}
    (results_root() / "train").mkdir(exist_ok=True)
    (results_root() / "train" / "gone.failed.json").write_text('{"error": "no"}')
    description["runs"][1]["stages"] = {"train": "train/gone"}
    assert states()["missing"] == "failed"
    with monkeypatch.context() as patch:
        patch.setattr(studies, "code_files", lambda stage: {} if stage == "generate" else code_files(stage))
        assert states()["one"] == "stale"
    work = begin_stage(PartitionConfig())
    work.save_json("note", 1)
    work.publish()
    assert states()["one"] == "stale"


def test_a_stage_that_succeeds_has_no_failure_any_more():
    work = begin_stage(PartitionConfig())
    record = work.target.with_name(f"{work.target.name}.failed.json")
    record.write_text('{"error": "of an attempt before"}')
    work.publish()
    assert not record.exists()
