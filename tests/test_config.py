"""Parameters: one flat namespace, checked before anything runs."""

import pytest

from fedmem.config.parameter import ConfigError, allowed_words
from fedmem.config.partition import PartitionConfig
from fedmem.config.stages import OWNER, STAGES, GenerateConfig, TrainConfig, create_all


def message(values, origin=None):
    with pytest.raises(ConfigError) as caught:
        create_all(values, origin)
    return str(caught.value)


def test_a_name_belongs_to_one_stage():
    names = [name for model in STAGES.values() for name in model.model_fields]
    assert len(names) == len(set(names)) == len(OWNER)


def test_every_parameter_has_a_meaning_and_says_what_is_allowed():
    for stage, model in STAGES.items():
        for name, field in model.model_fields.items():
            assert field.description, name
            assert "<class" not in allowed_words(STAGES[stage], name), name


def test_unknown_name_gives_the_closest_known_and_where_it_stood():
    text = message({"prefx_tokens": 30}, {"prefx_tokens": "--set"})
    assert "--set" in text
    assert "'prefx_tokens'" in text
    assert "did you mean 'prefix_tokens'?" in text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("prefix_tokens", "ten", "a whole number ≥ 1"),
        ("prefix_tokens", "[10, 30]", "a whole number ≥ 1"),  # papermill -p leaves a list as text (B01)
        ("prefix_tokens", 1.5, "a whole number ≥ 1"),
        ("n_clients", 0, "a whole number ≥ 1 and ≤ 10000"),
        ("n_clients", True, "a whole number ≥ 1 and ≤ 10000"),
        (
            "algorithm",
            "fedsgd",
            "fedavg | fedprox | central | local | none | FedAdagrad | FedAdam | FedAvgM | FedMedian | FedTrimmedAvg | "
            "FedYogi | Krum | MultiKrum | Bulyan | QFedAvg",
        ),
        ("local_steps", 0, "a whole number ≥ 1 or null"),
        ("lora_targets", 3, "a string or a list"),
        ("strategy_options", "eta", "a mapping"),
        ("learning_rate", float("nan"), "a number > 0 and ≤ 1"),
        ("temperature", -1, "a number ≥ 0 and ≤ 100"),
        ("checkpoint_round", "last", "a whole number ≥ 0 or null"),
    ],
)
def test_wrong_values_name_the_parameter_what_it_got_and_what_is_allowed(name, value, said):
    text = message({name: value})
    assert text == f"{name}: got {value!r}; expected {said}"


def test_all_faults_are_told_at_once():
    text = message({"prefix_tokens": "ten", "n_clients": 0, "tpo_k": 3})
    assert len(text.splitlines()) == 3


def test_an_integer_is_accepted_where_a_number_is_wanted():
    assert create_all({"temperature": 2})["generate"].temperature == 2.0  # papermill passes 2 as int (B34)


@pytest.mark.parametrize(
    "values",
    [
        {"corpus": "file"},  # without a path
        {"corpus": "hub"},  # without data set and columns
        {"corpus": "hub", "hub_dataset": "a/b", "hub_columns": {"output": "title"}},  # nothing to measure
        {"column_map": {"text": "note"}},  # no key of the schema
        {"column_map": {"input": None}},
        {"hub_columns": {"input": ["a"]}},
        {"corpus_encoding": "utf-9"},
        {"unit": "("},
        {"client_groups": ["a", "b"]},  # three clients
        {"client_groups": ["a", "b", ["a", "c"]]},
        {"client_groups": ["a", "b", []]},
        {"client_groups": ["a", "b", 3]},
        {"train_rows": 0},
        {"train_rows": 1.5},
        {"test_rows": -1},
        {"train_rows": 0.8, "test_rows": 8, "heldout_rows": 0.1, "synthetic_rows": 50},  # shares and counts
        {"train_rows": 0.8, "test_rows": 0.1, "heldout_rows": 0.2, "synthetic_rows": 50},  # more than all
        {"train_rows": 0.8, "test_rows": 0.1, "heldout_rows": 0.1},  # shares of what?
        {"prefix_tokens": 30, "min_input_tokens": 30},  # no suffix would be left
        {"checkpoint_round": 11, "rounds": 10},
        {"n_prefixes": 41, "train_rows": 40},
        {"n_prefixes": 40, "train_rows": 40, "heldout_rows": 39},  # the control has as many suffixes
        {"n_prefixes": 10, "n_suffixes": 41, "train_rows": 40},
        {"lora_targets": []},
        {"prefix_tokens": 256, "max_tokens": 256},  # training never saw what comes after the prefix
    ],
)
def test_parameters_at_odds_are_refused(values):
    message(values)


def test_effective_parameters_are_null_where_they_cannot_matter():
    assert create_all({"proximal_mu": 5.0})["train"].effective()["proximal_mu"] is None  # fedavg
    assert create_all({"proximal_mu": 5.0, "algorithm": "fedprox"})["train"].effective()["proximal_mu"] == 5.0
    generate = create_all({"decoding": "temperature"})["generate"].effective()
    assert generate["top_k"] is generate["top_p"] is None
    none = create_all({"algorithm": "none"})["train"].effective()
    assert none["rounds"] is none["learning_rate"] is None
    assert "device" not in none
    assert "corpus_path" not in create_all({})["partition"].effective()


def test_the_last_round_and_its_number_are_the_same_stage():
    last = create_all({"rounds": 5})["generate"]
    assert last == create_all({"rounds": 5, "checkpoint_round": 5})["generate"]
    assert last.checkpoint_round == 5
    assert create_all({"algorithm": "none"})["generate"].checkpoint_round == 0


def notebook(**names):
    shown = {name: TrainConfig.model_fields[name].default for name in TrainConfig.shown}
    return {"In": [""], "options": {}, "partition": "latest", **shown, **names}


def test_a_notebook_gives_shown_parameters_and_options():
    config = TrainConfig.from_notebook(notebook(rounds=5, options={"weight_decay": 0.1}))
    assert (config.rounds, config.weight_decay) == (5, 0.1)


def test_a_notebook_refuses_what_papermill_injects_and_nobody_reads():
    injected = "# Parameters\nrounds = 5\nprefx_len = 50\n"  # papermill only logs "Passed unknown parameter" (B02)
    with pytest.raises(ConfigError, match="unknown parameter 'prefx_len'"):
        TrainConfig.from_notebook(notebook(In=["", injected], rounds=5, prefx_len=50))


def test_a_notebook_says_which_stage_owns_a_parameter():
    with pytest.raises(ConfigError, match="'top_k' is a parameter of the generate stage"):
        TrainConfig.from_notebook(notebook(options={"top_k": 5}))


def test_a_notebook_takes_an_injected_field_that_its_cell_does_not_show():
    injected = "# Parameters\nweight_decay = 0.1\npartition = 'x'\noptions = {}\n"
    config = TrainConfig.from_notebook(notebook(In=["", injected], weight_decay=0.1))
    assert config.weight_decay == 0.1


def test_options_must_be_a_mapping_and_not_repeat_the_cell():
    with pytest.raises(ConfigError, match="options: got"):
        TrainConfig.from_notebook(notebook(options="{'rounds': 3}"))
    with pytest.raises(ConfigError, match="which the parameters cell shows"):
        TrainConfig.from_notebook(notebook(options={"rounds": 3}))


def test_models_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        PartitionConfig().n_clients = 4


def test_the_table_shows_every_parameter_and_whether_it_matters():
    table = GenerateConfig(decoding="greedy").table().data
    assert list(table.index) == list(GenerateConfig.model_fields)
    assert not table.loc["top_k", "matters"]
    assert table.loc["prefix_tokens", "matters"]


def test_rows_may_be_shares():
    shares = {"train_rows": 0.75, "test_rows": 0, "heldout_rows": 0.25, "synthetic_rows": 50}
    partition = create_all(shares | {"n_prefixes": 500})["partition"]  # how many rows a client has is not known yet
    assert partition.split_rows == {"train": 0.75, "test": 0, "heldout": 0.25}
    assert create_all({"train_rows": 1.0, "test_rows": 0, "heldout_rows": 0.0, "synthetic_rows": 9, "n_suffixes": 3})


def test_a_partition_says_what_its_source_needs():
    made = create_all({"partitioner": "topic"})["partition"].source
    assert made["rows_per_group"] == 4 * (32 + 8 + 32)  # clients are no groups: leave them room
    assert create_all({"synthetic_rows": 90})["partition"].source["rows_per_group"] == 90
    columns = {"id": None, "input": "text"}
    hub = PartitionConfig(corpus="hub", hub_dataset="a/b", hub_revision="c", hub_columns=columns, corpus_path="x")
    assert hub.source == {
        "path": "x",
        "column_map": columns,
        "hub": {"dataset": "a/b", "config": None, "split": "train", "revision": "c", "rows": None},
        "seed": 0,
    }
    assert PartitionConfig(quantity_skew=2.0).skew == 0.0
    assert PartitionConfig(quantity_skew=2.0, partitioner="quantity").skew == 2.0


def test_models_with_lists_and_mappings_can_be_compared_and_hashed():
    one, other = (PartitionConfig(client_groups=["a", ["b", "c"], "d"], column_map={"id": None}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert hash(one) != hash(PartitionConfig())


def test_what_cannot_matter_is_at_its_default_once_settled():
    given = create_all(
        {"algorithm": "none", "loss_on": "response", "finetuning": "lora", "lora_rank": 4, "max_tokens": 64}
    )
    settled = given["train"].settled()
    assert (settled.loss_on, settled.finetuning, settled.lora_rank, settled.max_tokens) == ("all", "full", 8, 64)
    assert settled.effective() == given["train"].effective()
    assert given["train"].slug == settled.slug
