"""The paper's base with every task, and the small one: what a study resolves to, before anything is loaded."""

import shutil
from pathlib import Path

import pytest

from fedmem import study

PARAMS = Path(__file__).resolve().parent.parent / "params"
TASKS = ("summarization", "dialog", "qa", "classification")


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    shutil.copytree(PARAMS, tmp_path / "params")
    path = tmp_path / "params/studies/tasks.yaml"
    path.write_text(f"base: small\ngrid: {{task: [{', '.join(TASKS)}]}}\n")
    return lambda **options: {run.name: run for run in study.load(path, **options).runs}


def test_the_papers_sizes_and_sources(load):
    runs = load(base="paper")
    assert list(runs) == list(TASKS)
    for run in runs.values():
        partition, generate = run.configs["partition"], run.configs["generate"]
        assert partition.split_rows == {"train": 27_000, "test": 3_000, "heldout": 4_000}
        assert (partition.n_clients, partition.corpus) == (3, "hub")
        assert (generate.n_prefixes, generate.prefix_tokens, generate.decoding) == (4_000, 30, "top_k")
        assert run.configs["train"].rounds == 3
    sources = {task: run.configs["partition"].hub_dataset for task, run in runs.items()}
    assert sources == {
        "summarization": "gfissore/arxiv-abstracts-2021",
        "dialog": "lavita/ChatDoctor-HealthCareMagic-100k",
        "qa": "qiaojin/PubMedQA",
        "classification": "pietrolesci/pubmed-200k-rct",
    }
    dealt = {task: run.configs["partition"].partitioner for task, run in runs.items()}
    assert dealt == {"summarization": "natural", "dialog": "topic", "qa": "natural", "classification": "topic"}


def test_a_copy_of_the_data_set_takes_the_hubs_place_and_identity_by_content(load, tmp_path, shared):
    layout = shared / "data/hub_layout/qa.jsonl"
    copy = tmp_path / "elsewhere.jsonl"
    shutil.copy(layout, copy)
    overrides = {"task": "qa", "corpus": "hub", "train_rows": 10, "test_rows": 2, "heldout_rows": 10, "n_prefixes": 5}
    runs = [load(overrides=overrides | {"corpus_path": str(path)}) for path in (layout, copy)]
    one, other = (run.jobs["partition"] for (run,) in (named.values() for named in runs))
    assert one.folder == other.folder
    copy.write_text(layout.read_text(encoding="utf-8").replace("a", "e"), encoding="utf-8")
    (edited,) = load(overrides=overrides | {"corpus_path": str(copy)}).values()
    assert edited.jobs["partition"].folder != one.folder


def test_the_small_base_keeps_synthetic_text_and_its_groups(load):
    for run in load().values():
        partition = run.configs["partition"]
        assert (partition.corpus, partition.partitioner) == ("synthetic", "natural")
        assert partition.effective()["hub_dataset"] is None
