"""Federation in one process: algorithms on a tiny model, clients that fail, what is measured."""

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
from safetensors.torch import load_file
from small_federation import federate, final_bytes, settings, weights, whole

import fedmem
from fedmem.config.vocabulary import POOLED
from fedmem.train import federation
from fedmem.train.checkpoints import by_model, checkpoint_folder
from fedmem.train.federation import client_datasets, make_client_app
from fedmem.train.in_process_grid import ArrayRecord, ConfigRecord, FederatedError, InProcessGrid, RecordDict
from fedmem.train.local_training import train_locally
from fedmem.train.weights import get_arrays, set_arrays

pytest_plugins = ["small_fixtures"]

# --- algorithms, on a tiny Qwen2


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


def test_central_is_fedavg_of_one_client_with_all_rows(model, train_sets, tokenizer, tmp_path):
    pooled = {0: train_sets[0].items + train_sets[1].items + train_sets[2].items}
    central = federate(copy.deepcopy(model), train_sets, settings(algorithm="central"), tmp_path / "c", tokenizer)
    alone = federate(model, pooled, settings(), tmp_path / "f", tokenizer)
    assert whole(tmp_path / "c") == whole(tmp_path / "f")
    curves = central.curves()
    assert curves.client.unique().tolist() == [POOLED]
    pd.testing.assert_frame_equal(curves.drop(columns="client"), alone.curves().drop(columns="client"))


def test_central_makes_the_same_passes(model, train_sets, tokenizer, tmp_path):
    federated = federate(copy.deepcopy(model), train_sets, settings(), tmp_path / "f", tokenizer).curves()
    central = federate(model, train_sets, settings(algorithm="central"), tmp_path / "c", tokenizer).curves()
    for name in ("steps", "tokens", "examples"):
        counts = [f[f.metric == "train_loss"].groupby("round")[name].sum().tolist() for f in (federated, central)]
        assert counts[0] == counts[1]
    assert federated[federated.metric == "train_loss"].steps.tolist() == [2] * 6  # 2 rows × 2 epochs at 2 rows a step


def test_central_makes_as_many_local_steps_as_all_clients_together(model, train_sets, tokenizer, tmp_path):
    config = settings(algorithm="central", local_steps=3)
    curves = federate(model, train_sets, config, tmp_path, tokenizer).curves()
    assert curves[curves.metric == "train_loss"].steps.tolist() == [9, 9]


def test_local_trains_each_client_alone_from_the_initial_weights(model, train_sets, tokenizer, tmp_path):
    start = copy.deepcopy(model)
    history = federate(model, train_sets, settings(algorithm="local"), tmp_path / "all", tokenizer)
    assert history.curves().groupby("client")["round"].max().to_dict() == {0: 2, 1: 2, 2: 2}
    folders = [checkpoint_folder(tmp_path / "all", "local", 2, client) for client in range(3)]
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 3
    assert len({(folder.parent / "round-0/model.safetensors").read_bytes() for folder in folders}) == 1
    # Client 2 as if there were nobody else, with its own seeds:
    alone = federate(copy.deepcopy(start), {2: train_sets[2]}, settings(algorithm="local"), tmp_path / "2", tokenizer)
    assert whole(tmp_path / "2/client-2") == whole(tmp_path / "all/client-2")
    assert alone.curves().equals(history.curves().query("client == 2").reset_index(drop=True))
    assert by_model(tmp_path / "all", "local", 2, [2, 0, 1, 0]) == [(f, [j]) for j, f in enumerate(folders)]


def test_one_model_serves_all_clients_unless_each_has_its_own(tmp_path):
    (tmp_path / "round-1").mkdir()
    assert by_model(tmp_path, "fedavg", 1, [0, 1, 2]) == [(tmp_path / "round-1", [0, 1, 2])]
    with pytest.raises(FileNotFoundError, match=r"there is no .*client-0/round-1; there are: none"):
        checkpoint_folder(tmp_path, "local", 1, 0)


def test_no_training_saves_the_model_as_it_is(model, train_sets, tokenizer, tmp_path):
    federate(model, train_sets, settings(algorithm="none"), tmp_path, tokenizer, test_sets=train_sets)
    assert [path.name for path in tmp_path.iterdir()] == ["round-0"]


@pytest.mark.parametrize("name", ["FedAdam", "FedMedian"])
def test_a_strategy_of_flower_trains_the_model(name, model, train_sets, tokenizer, tmp_path):
    before = weights(model)
    history = federate(model, train_sets, settings(algorithm=name), tmp_path, tokenizer, test_sets=train_sets)
    assert not torch.equal(weights(model), before)
    assert history.curves().query("metric == 'test_loss'").groupby("round").value.mean().is_monotonic_decreasing


def test_the_learning_rate_falls_over_the_whole_run_and_does_not_start_again(
    model, train_sets, tokenizer, tmp_path, monkeypatch
):
    rates, original = [], train_locally

    def noting(*args, **kwargs):
        result = original(*args, **kwargs)
        rates.append([step.learning_rate for step in result.course])
        return result

    monkeypatch.setattr(federation, "train_locally", noting)
    config = settings(schedule="linear", learning_rate=4e-3)  # 2 rounds of 2 steps
    federate(model, {0: train_sets[0]}, config, tmp_path, tokenizer)
    assert [rate for made in rates for rate in made] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])


def test_clipped_and_noisy_runs_repeat(model, train_sets, tokenizer, tmp_path):
    config = settings(update_clip=0.05, update_noise=0.1)
    history = federate(copy.deepcopy(model), train_sets, config, tmp_path / "a", tokenizer)
    federate(copy.deepcopy(model), train_sets, config, tmp_path / "b", tokenizer)
    assert whole(tmp_path / "a") == whole(tmp_path / "b")
    assert (history.curves().query("metric == 'drift'").value > 0.05).all()
    after = load_file(tmp_path / "a/round-1/model.safetensors")
    moved = torch.cat([(after[name] - p.detach()).flatten() for name, p in model.named_parameters()]).norm()
    noise = 0.1 * 0.05 / 3 * weights(model).numel() ** 0.5
    assert 0.5 * noise < moved < 0.05 + 2 * noise


def test_same_seeds_same_bytes_twice(model, train_sets, tokenizer, tmp_path):
    runs = {}
    for name, seed in {"first": 3, "again": 3, "other": 4}.items():
        torch.rand(len(name))  # whatever was drawn before must not matter
        trainee, config = copy.deepcopy(model), settings(algorithm="fedprox", train_seed=seed)
        history = federate(trainee, train_sets, config, tmp_path / name, tokenizer, test_sets=train_sets)
        runs[name] = whole(tmp_path / name), history.curves()
    assert len(runs["first"][0]) >= 3 * 4  # weights, config, tokenizer and its config, in each of three rounds
    assert runs["first"][0] == runs["again"][0] != runs["other"][0]
    pd.testing.assert_frame_equal(runs["first"][1], runs["again"][1], check_exact=True)


def test_a_clients_answer_does_not_depend_on_who_trained_before_it(model, train_sets):
    config, start = settings(), get_arrays(model)
    app = make_client_app(model, train_sets, config)

    def answers(order: tuple[int, ...]) -> dict:
        grid = InProcessGrid(app, range(3))
        content = RecordDict({"arrays": start, "config": ConfigRecord({"server-round": 2})})
        replies = {}
        for client in order:
            message = grid.create_message(content, "train", client, "2")
            (replies[client],) = grid.send_and_receive([message])
        return {client: replies[client].content["arrays"].object_id for client in sorted(replies)}  # a hash

    assert answers((0, 1, 2)) == answers((2, 0, 1))


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


# --- clients


class FailingInRound2:
    """A client's rows that can be read in its first round, and not in its second."""

    def __init__(self, dataset):
        self.dataset, self.rounds = dataset, 0

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        self.rounds += index == 0
        if self.rounds == 2:
            raise OSError("the disk with the rows is gone")
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
    assert set(importing) <= {"in_process_grid.py", "nodes.py"}  # the latter asks Flower whether telemetry is off


def test_flower_sends_no_telemetry_and_writes_nothing_at_home(tmp_path):
    script = (
        "import os, fedmem.train.in_process_grid as grid\n"
        "from flwr.supercore.utils import get_flwr_home\n"
        "print(os.environ['FLWR_TELEMETRY_ENABLED'], get_flwr_home())\n"
        "grid.InProcessGrid(grid.ClientApp(), range(2))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLWR")} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    telemetry, home = done.stdout.split()
    assert telemetry == "0"
    assert not Path(home).is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []
