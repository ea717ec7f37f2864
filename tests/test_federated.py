"""Federation in one process: hand-computed averages, failures that must surface, and checkpoints that load."""

import copy
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pandas as pd
import pytest
import torch
from flwr.app import Error
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import fedmem
from fedmem.config import TrainConfig
from fedmem.federated import (
    POOLED,
    Checkpoints,
    FederatedError,
    History,
    InProcessGrid,
    client_datasets,
    drift,
    get_arrays,
    make_client_app,
    make_server_app,
    make_strategy,
    set_arrays,
    train_central,
)
from fedmem.flower_grid import ArrayRecord, ClientApp, ConfigRecord, Message, MetricRecord, RecordDict
from fedmem.models import load

EOS = "<|endoftext|>"  # the name that a Qwen2 tokenizer would add to the vocabulary if it were missing

SENTENCES = [
    "the patient reports a dull pain in the left knee since monday",
    "blood pressure was measured twice and found to be normal",
    "a course of antibiotics was begun and the fever went down",
    "the cough is dry and worse at night but there is no wheeze",
    "an x ray of the chest showed no sign of infection today",
    "sleep has been poor and the appetite is lower than before",
    "the rash on both arms has faded after the cream was applied",
    "she was told to rest and to drink more water than usual",
    "his heart rate rose during the walk and fell soon after it",
]


def settings(**changes) -> TrainConfig:
    small = {"algorithm": "fedavg", "rounds": 2, "local_epochs": 2, "learning_rate": 1e-3, "batch_size": 2}
    return TrainConfig(**small | {"weight_decay": 0.0, "max_tokens": 64} | changes)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[EOS], initial_alphabet=alphabet)
    raw.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, pad_token=EOS)


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=300, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    ).eval()


@pytest.fixture
def rows() -> pd.DataFrame:
    """3 clients of 2 training rows and 1 test row."""
    frame = pd.DataFrame({"input": SENTENCES, "instruction": "", "output": "noted"})
    return frame.assign(client=[i % 3 for i in range(9)], split=["train"] * 6 + ["test"] * 3)


@pytest.fixture
def train_sets(rows, tokenizer) -> dict:
    return client_datasets(rows, tokenizer, settings())


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def federate(model, datasets, config, folder, tokenizer, test_sets=None) -> History:
    """What notebook 2 does."""
    history = History()
    checkpoints = Checkpoints(folder, model, tokenizer, test_sets or {}, config, history)
    if config.algorithm == "central":
        train_central(model, datasets, config, checkpoints, history)
        return history
    strategy = make_strategy(config, len(datasets), history)
    server_app = make_server_app(config, strategy, get_arrays(model), checkpoints)
    InProcessGrid(make_client_app(model, datasets, config), len(datasets)).serve(server_app)
    return history


def final_bytes(folder: Path, server_round: int = 2) -> bytes:
    return (folder / f"round-{server_round}" / "model.safetensors").read_bytes()


# --- Averaging, on weights that clients answer by rote


def reply(client: int, values=(0.0, 0.0), examples: int = 1, **changes) -> RecordDict:
    figures = {"num-examples": examples, "client": client, "train_loss": 1.0, "penalty": 0.0, "drift": 1.0}
    metrics = MetricRecord(figures | {"tokens": 5, "steps": 1, "seconds": 0.0} | changes)
    return RecordDict({"arrays": ArrayRecord({"w": torch.tensor(values)}), "metrics": metrics})


def rote_app(answers: dict[int, RecordDict | Error | Exception]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message, context):
        answer = answers[context.node_config["partition-id"]]
        if isinstance(answer, Exception):
            raise answer
        return Message(answer, reply_to=message)

    return app


def one_round(answers: dict, grid_class=InProcessGrid, **changes):
    config, history = settings(rounds=1, **changes), History()
    grid = grid_class(rote_app(answers), len(answers))
    start = ArrayRecord({"w": torch.zeros(2)})
    return make_strategy(config, len(answers), history).start(grid, start, num_rounds=1).arrays, history


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
def test_the_average_is_weighted_by_examples(algorithm):
    answers = {0: reply(0, (0.0, 4.0), examples=1), 1: reply(1, (4.0, 8.0), examples=3)}
    arrays, _ = one_round(answers, algorithm=algorithm)
    assert arrays["w"].numpy().tolist() == [3.0, 7.0]  # (1·0 + 3·4) / 4, (1·4 + 3·8) / 4


def test_one_client_alone_is_its_own_average():
    arrays, history = one_round({0: reply(0, (0.1, -7.3), examples=13)})
    assert torch.equal(torch.from_numpy(arrays["w"].numpy()), torch.tensor([0.1, -7.3]))
    assert history.curves().set_index("metric").examples.to_dict() == {"drift": 13, "penalty": 13, "train_loss": 13}


def test_averaging_equal_clients_is_identity():
    arrays, _ = one_round({client: reply(client, (0.3, -1.7), examples=client + 1) for client in range(3)})
    assert arrays["w"].numpy().tolist() == pytest.approx([0.3, -1.7], rel=1e-6)


def test_drift_is_the_euclidean_distance_over_all_arrays():
    start = ArrayRecord({"a": torch.zeros(2), "b": torch.ones(1, 1)})
    assert drift(ArrayRecord({"a": torch.tensor([2.0, 3.0]), "b": torch.tensor([[7.0]])}), start) == 7.0  # √(4+9+36)


# --- Failures


class ForgetfulGrid(InProcessGrid):
    def pull_messages(self, message_ids):
        return list(super().pull_messages(message_ids))[:-1]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (reply(1, examples=0), "client 1, round 1: trained on 0 examples"),
        (reply(1, (float("nan"), 0.0)), "client 1, round 1: not finite: w"),
        (reply(1, train_loss=float("inf")), "client 1, round 1: not finite: train_loss"),
        (reply(1, drift=0.0), "client 1, round 1: its weights did not change"),
        (Error(7, "no disk"), "client 1, round 1: failed with code 7: no disk"),
        (KeyError("x"), "client 1, round 1: KeyError: 'x'"),
    ],
)
def test_an_answer_that_cannot_be_averaged_stops_the_run(answer, says):
    with pytest.raises(FederatedError, match=re.escape(says)):
        one_round({0: reply(0), 1: answer, 2: reply(2)})


def test_a_missing_answer_stops_the_run():
    with pytest.raises(FederatedError, match=r"round 1: 2 of 3 clients answered \(\[0, 1\]\)"):
        one_round({client: reply(client) for client in range(3)}, grid_class=ForgetfulGrid)


class FailingInRound2:
    """A client's rows that can be read in its first round, and not in its second."""

    def __init__(self, dataset):
        self.dataset, self.rounds = dataset, 0

    def __len__(self):
        self.rounds += 1
        if self.rounds == 2:
            raise OSError("the disk with the rows is gone")
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


def test_a_client_that_fails_stops_the_run_with_its_id_round_and_traceback(model, train_sets, tokenizer, tmp_path):
    train_sets[1] = FailingInRound2(train_sets[1])
    with pytest.raises(FederatedError, match=r"client 1, round 2: OSError: the disk with the rows is gone") as caught:
        federate(model, train_sets, settings(), tmp_path, tokenizer)
    assert isinstance(caught.value.__cause__, OSError)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert "train_locally" in frames
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-0", "round-1"]


def test_a_client_without_rows_is_refused_by_its_id(rows, tokenizer):
    with pytest.raises(FederatedError, match="client 1 has no training rows"):
        client_datasets(rows[rows.client != 1], tokenizer, settings())
    nothing_left = settings(loss_on="response", max_tokens=8)
    with pytest.raises(FederatedError, match="client 0, train: "):
        client_datasets(rows, tokenizer, nothing_left)


def test_weights_of_another_model_are_refused(model):
    arrays = get_arrays(model)
    del arrays["model.norm.weight"]
    with pytest.raises(FederatedError, match=re.escape("differ in ['model.norm.weight']")):
        set_arrays(model, arrays)
    with pytest.raises(FederatedError, match=r"model.norm.weight has shape \(1,\)"):
        set_arrays(model, ArrayRecord(get_arrays(model).to_torch_state_dict() | {"model.norm.weight": torch.ones(1)}))


def test_a_model_that_is_not_finite_is_never_saved(model, tokenizer, tmp_path):
    model.model.norm.weight.data[3] = float("nan")
    checkpoints = Checkpoints(tmp_path, model, tokenizer, {}, settings(), History())
    with pytest.raises(FederatedError, match=r"round 4: weights not finite: model.norm.weight"):
        checkpoints.save(4)
    assert list(tmp_path.iterdir()) == []


def test_only_federated_algorithms_have_a_strategy():
    with pytest.raises(FederatedError, match="'central' has no strategy; allowed here: fedavg, fedprox"):
        make_strategy(settings(algorithm="central"), 2, History())


# --- Training a tiny Qwen2


def test_one_client_one_round_is_central_training(model, train_sets, tokenizer, tmp_path):
    pooled = {0: train_sets[0].items + train_sets[1].items}
    trained = {}
    for algorithm in ("fedavg", "central"):
        trainee, config = copy.deepcopy(model), settings(algorithm=algorithm, rounds=1)
        federate(trainee, pooled, config, tmp_path / algorithm, tokenizer)
        trained[algorithm] = weights(trainee)
    assert not torch.equal(trained["central"], weights(model))
    torch.testing.assert_close(trained["fedavg"], trained["central"], atol=1e-7, rtol=0)


def test_identical_clients_one_step_each_is_one_central_step_of_one(model, train_sets, tokenizer, tmp_path):
    config = settings(rounds=1, local_epochs=1, batch_size=8)
    together, alone = copy.deepcopy(model), copy.deepcopy(model)
    federate(together, dict.fromkeys(range(3), train_sets[0]), config, tmp_path / "three", tokenizer)
    central = settings(algorithm="central", rounds=1, local_epochs=1, batch_size=8)
    federate(alone, {0: train_sets[0]}, central, tmp_path / "one", tokenizer)
    # A step moves each weight by about 1e-3; rows in another order within the batch give other last bits.
    torch.testing.assert_close(weights(together), weights(alone), atol=2e-5, rtol=0)


def test_central_makes_the_same_passes_in_one_run(model, train_sets, tokenizer, tmp_path):
    federated = federate(copy.deepcopy(model), train_sets, settings(), tmp_path / "f", tokenizer).curves()
    central = federate(model, train_sets, settings(algorithm="central"), tmp_path / "c", tokenizer).curves()
    steps, tokens = (
        [frame[frame.metric == "train_loss"].groupby("round")[name].sum().tolist() for frame in (federated, central)]
        for name in ("steps", "tokens")
    )
    assert steps == [[6, 6], [6, 6]]  # 3 clients × 2 rows × 2 epochs at 2 rows a step
    assert tokens[0] == tokens[1]
    assert central.client.unique().tolist() == [POOLED]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["round-0", "round-1", "round-2"]
    assert final_bytes(tmp_path / "c", 1) != final_bytes(tmp_path / "c", 2)


def test_central_rounds_are_those_of_an_uninterrupted_training(model, train_sets, tokenizer, tmp_path):
    twice = copy.deepcopy(model)
    federate(model, train_sets, settings(algorithm="central"), tmp_path / "a", tokenizer, test_sets=train_sets)
    federate(twice, train_sets, settings(algorithm="central", rounds=1, local_epochs=4), tmp_path / "b", tokenizer)
    assert torch.equal(weights(model), weights(twice))  # measuring and saving between rounds changes nothing


def test_same_seeds_same_bytes_twice(model, train_sets, tokenizer, tmp_path):
    runs = {}
    for name, seed in {"first": 3, "again": 3, "other": 4}.items():
        torch.rand(len(name))  # whatever was drawn before must not matter
        trainee, config = copy.deepcopy(model), settings(algorithm="fedprox", train_seed=seed)
        history = federate(trainee, train_sets, config, tmp_path / name, tokenizer, test_sets=train_sets)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        whole = {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}
        runs[name] = whole, history.curves()
    assert len(runs["first"][0]) >= 3 * 4  # weights, config, tokenizer and its config, in each of three rounds
    assert runs["first"][0] == runs["again"][0] != runs["other"][0]
    pd.testing.assert_frame_equal(runs["first"][1], runs["again"][1], check_exact=True)


def test_a_clients_answer_does_not_depend_on_who_trained_before_it(model, train_sets):
    config, start = settings(), get_arrays(model)
    app = make_client_app(model, train_sets, config)

    def answers(order: tuple[int, ...]) -> dict:
        grid = InProcessGrid(app, 3)
        content = RecordDict({"arrays": start, "config": ConfigRecord({"server-round": 2})})
        replies = {}
        for client in order:
            message = grid.create_message(content, "train", client, "2")
            (replies[client],) = grid.send_and_receive([message])
        return {client: replies[client].content["arrays"].object_id for client in sorted(replies)}  # a hash

    assert answers((0, 1, 2)) == answers((2, 0, 1))


def test_replies_come_in_client_order_whatever_the_order_of_messages():
    grid = InProcessGrid(rote_app({client: reply(client) for client in range(4)}), 4)
    content = RecordDict({"config": ConfigRecord({})})
    messages = [grid.create_message(content, "train", client, "1") for client in (2, 0, 3, 1)]
    assert [r.metadata.src_node_id for r in grid.send_and_receive(messages)] == [0, 1, 2, 3]


def test_mu_0_is_fedavg_to_the_bit_and_larger_mu_drifts_less(model, train_sets, tokenizer, tmp_path):
    runs = {"fedavg": settings()}
    runs |= {mu: settings(algorithm="fedprox", proximal_mu=mu) for mu in (0.0, 1.0, 30.0)}
    curves = {
        name: federate(copy.deepcopy(model), train_sets, config, tmp_path / str(name), tokenizer).curves()
        for name, config in runs.items()
    }
    last = {name: frame[frame["round"] == 2].groupby("metric").value.mean() for name, frame in curves.items()}
    assert final_bytes(tmp_path / "fedavg") == final_bytes(tmp_path / "0.0") != final_bytes(tmp_path / "1.0")
    assert last[0.0].drift > last[1.0].drift > last[30.0].drift > 0
    assert last[0.0].penalty == 0 < last[1.0].penalty


def test_a_penalty_is_there_from_the_second_step_on(model, train_sets, tokenizer, tmp_path):
    one_step = settings(algorithm="fedprox", proximal_mu=1.0, rounds=1, local_epochs=1, batch_size=8)
    two_steps = settings(algorithm="fedprox", proximal_mu=1.0, rounds=1, local_epochs=1, batch_size=1)
    penalties = []
    for config in (one_step, two_steps):
        curves = federate(copy.deepcopy(model), train_sets, config, tmp_path, tokenizer).curves()
        penalties.append(curves[curves.metric == "penalty"].value.tolist())
    assert penalties[0] == [0.0, 0.0, 0.0]  # the only step starts at the anchor
    assert all(value > 0 for value in penalties[1])


# --- Checkpoints and curves


def test_every_rounds_checkpoint_loads_and_is_that_rounds_model(model, train_sets, tokenizer, tmp_path):
    initial, config = copy.deepcopy(model), settings()
    federate(model, train_sets, config, tmp_path, tokenizer)
    source = str(tmp_path / "round-0")  # a folder like any model's
    probe = torch.tensor([[5, 9, 120, 44]])
    for server_round, expected in {0: initial, 2: model}.items():
        loaded, its_tokenizer = load(source, device="cpu", checkpoint=tmp_path / f"round-{server_round}")
        assert torch.equal(loaded(probe).logits, expected(probe).logits)
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        assert its_tokenizer.get_vocab() == tokenizer.get_vocab()
        assert loaded.config.use_cache
    saved = load_file(tmp_path / "round-2" / "model.safetensors")
    assert "lm_head.weight" not in saved
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert final_bytes(tmp_path, 0) != final_bytes(tmp_path, 1) != final_bytes(tmp_path, 2)


def test_a_bf16_model_travels_as_fp32_and_comes_back(model):
    model = model.to(torch.bfloat16)
    arrays, before = get_arrays(model), weights(model)
    assert {array.dtype for array in arrays.values()} == {"float32"}
    for parameter in model.parameters():
        parameter.data.zero_()
    set_arrays(model, arrays)
    assert torch.equal(weights(model), before)


def test_curves_hold_each_client_and_round_and_no_seconds(model, rows, train_sets, tokenizer, tmp_path):
    test_sets = client_datasets(rows, tokenizer, settings(), split="test")
    history = federate(model, train_sets, settings(), tmp_path, tokenizer, test_sets)
    curves = history.curves()
    assert list(curves) == ["round", "client", "metric", "value", "examples", "tokens", "steps"]
    counts = curves.groupby(["metric", "round"]).client.apply(list).to_dict()
    assert counts.keys() == {("test_loss", 0), ("test_loss", 1), ("test_loss", 2)} | {
        (metric, server_round) for metric in ("train_loss", "penalty", "drift") for server_round in (1, 2)
    }
    assert all(clients == [0, 1, 2] for clients in counts.values())
    assert curves.value.notna().all()
    assert curves[curves.metric == "test_loss"].examples.tolist() == [1] * 9
    seconds = history.seconds()
    assert seconds.part.value_counts().to_dict() == {"train": 6, "checkpoint": 3}
    assert (seconds.seconds > 0).all()


def test_nothing_floods_the_notebook(model, train_sets, tokenizer, tmp_path, capfd):
    federate(model, train_sets, settings(algorithm="fedprox", proximal_mu=0.0), tmp_path, tokenizer)
    assert "".join(capfd.readouterr()) == ""  # the progress bar comes with `rounds`


# --- Flower itself


def test_flower_is_imported_in_one_file_only():
    importing = [path.name for path in Path(fedmem.__file__).parent.rglob("*.py") if re.search(
        r"^\s*(from|import) flwr\b", path.read_text(encoding="utf-8"), re.MULTILINE)]  # fmt: skip
    assert importing == ["flower_grid.py"]


def test_flower_sends_no_telemetry_and_writes_nothing_at_home(tmp_path):
    script = (
        "import os, fedmem.flower_grid as grid\n"
        "from flwr.supercore.utils import get_flwr_home\n"
        "print(os.environ['FLWR_TELEMETRY_ENABLED'], get_flwr_home())\n"
        "grid.InProcessGrid(grid.ClientApp(), 2)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLWR")} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    telemetry, home = done.stdout.split()
    assert telemetry == "0"
    assert not Path(home).is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []
