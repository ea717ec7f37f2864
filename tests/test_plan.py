"""The shipped studies as they are planned: what is shared, and what stays the same on either base."""

import json
from pathlib import Path

import pytest

from fedmem.cli import main
from fedmem.config.stages import STAGES
from fedmem.study.loading import load_study

STUDIES = Path(__file__).resolve().parent.parent / "params" / "studies"
PAPER = ("main", "fl_vs_cl", "decoding", "prefix_length", "algorithm", "model_size", "model_family", "rounds",
         "suffix_client")  # fmt: skip
BEYOND = ("defences", "clients", "seeds", "local_baseline")


@pytest.fixture(autouse=True)
def _results(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "results"))


def stages(loaded, stage):
    return [job for job in loaded.jobs.values() if job.stage == stage]


@pytest.mark.parametrize("base", ["paper", "small"])
def test_all_holds_every_run_of_the_papers_studies(base):
    everything = load_study(STUDIES / "all.yaml", base=base)
    apart = [f"{name}/{run.name}" for name in PAPER for run in load_study(STUDIES / f"{name}.yaml", base=base).runs]
    assert [run.name for run in everything.runs] == apart


def test_all_on_the_papers_base_trains_what_the_paper_trained_and_no_more():
    loaded = load_study(STUDIES / "all.yaml")
    # 8 main + 8 fl_vs_cl + 9 decoding + 12 prefix_length + 8 algorithm + 3 + 3 models + 3 rounds + 1 matrix
    assert len(loaded.runs) == 55
    # 4 tasks by fedavg, fedprox, central and none, two more sizes, two more families, and one of five rounds
    assert len(stages(loaded, "train")) == 4 * 4 + 2 + 2 + 1
    assert len(stages(loaded, "partition")) == 4
    # those 21 once, the last of them (rounds) three times, 2 more decodings and 4 lengths of 3 tasks
    assert len(stages(loaded, "generate")) == 20 + 3 + 3 * 2 + 3 * 4
    assert len(loaded.jobs) < len(loaded.runs) * len(STAGES) * 0.6


@pytest.mark.parametrize("base", ["paper", "small"])
def test_no_two_trainings_have_equal_effective_parameters(base):
    loaded = load_study(STUDIES / "all.yaml", base=base)
    seen = [
        json.dumps([job.parent.config.effective(), job.config.effective()], sort_keys=True)
        for job in stages(loaded, "train")
    ]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("base", ["paper", "small"])
def test_prefixes_of_all_lengths_are_of_the_same_rows(base):
    loaded = load_study(STUDIES / "prefix_length.yaml", base=base)
    by_task = {}
    for run in loaded.runs:
        generate = run.configs["generate"]
        drawn = (run.jobs["train"].id, generate.n_prefixes, generate.sample_seed, generate.min_input_tokens)
        by_task.setdefault(run.configs["partition"].task, set()).add(drawn)
        assert generate.prefix_tokens + 20 <= generate.min_input_tokens
    assert [len(drawn) for drawn in by_task.values()] == [1, 1, 1]


def test_the_small_bases_texts_are_long_enough_for_every_prefix():
    from fedmem.corpus.loading import load_corpus
    from fedmem.models.loading import load_tokenizer

    for run in load_study(STUDIES / "prefix_length.yaml", base="small").runs[::4]:
        partition = run.configs["partition"]
        inputs = load_corpus(partition.corpus, partition.task, **partition.source)["input"].tolist()
        lengths = map(len, load_tokenizer(run.configs["train"].model)(inputs)["input_ids"])
        assert min(lengths) >= run.configs["generate"].min_input_tokens


def test_rounds_are_checkpoints_of_one_training():
    loaded = load_study(STUDIES / "rounds.yaml")
    assert len(stages(loaded, "train")) == 1
    assert [run.configs["generate"].checkpoint_round for run in loaded.runs] == [1, 3, 5]


@pytest.mark.parametrize("base", ["paper", "small"])
@pytest.mark.parametrize("name", [*PAPER, *BEYOND])
def test_every_study_stands_on_both_bases(name, base):
    loaded = load_study(STUDIES / f"{name}.yaml", base=base)
    assert loaded.title.endswith("?")
    corpora = {run.configs["partition"].corpus for run in loaded.runs}
    assert corpora == {"hub" if base == "paper" else "synthetic"}


def test_a_defence_differs_from_none_in_what_it_is_about():
    points = {run.name.rsplit("-", 1)[1]: run.configs for run in load_study(STUDIES / "defences.yaml").runs}
    plain = {name: value for config in points["none"].values() for name, value in config.model_dump().items()}
    changed = {
        point: {n for config in configs.values() for n, v in config.model_dump().items() if v != plain[n]}
        for point, configs in points.items()
    }
    assert changed == {
        "none": set(), "lora": {"finetuning"}, "fedprox": {"algorithm", "proximal_mu"}, "deduplicated": {"duplicates"},
        "clipped": {"update_clip"}, "clipped_noisy": {"update_clip", "update_noise"},
    }  # fmt: skip


@pytest.mark.parametrize("base", ["paper", "small"])
def test_clients_hold_as_many_rows_however_many_they_are(base):
    configs = [run.configs["partition"] for run in load_study(STUDIES / "clients.yaml", base=base).runs]
    assert [config.n_clients for config in configs] == [3, 10, 30, 100]
    assert len({tuple(config.split_rows.values()) for config in configs}) == 1


def test_results_that_are_a_file_are_refused_by_every_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDMEM_RESULTS", str(tmp_path / "file"))
    for command in (["plan", str(STUDIES / "demo.yaml")], ["status", str(STUDIES / "demo.yaml")], ["parameters"]):
        assert main.main(command) == 2
        assert f"{tmp_path / 'file'} is a file: name a folder in FEDMEM_RESULTS" in capsys.readouterr().err
