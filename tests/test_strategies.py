"""What the server makes of clients' answers: averages by hand, every strategy, clipping, what must not pass."""

import gc
import re
import tracemalloc
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from flwr.app import Error
from flwr.serverapp import strategy as flower
from safetensors.numpy import load_file, save_file
from small_federation import reply, rote_app, rote_run, settings

from fedmem.config.stages import TrainConfig
from fedmem.train.checkpoints import FromRound, restore_state, state_of
from fedmem.train.federation import serve_rounds
from fedmem.train.history import History
from fedmem.train.in_process_grid import (
    Array,
    ArrayRecord,
    ClientApp,
    ConfigRecord,
    FederatedError,
    InProcessGrid,
    Message,
    MetricRecord,
    RecordDict,
    clipping,
)
from fedmem.train.strategies import FORMULAS, describe, make_strategy, strategy_names
from fedmem.train.weights import drift

ALGORITHMS = get_args(TrainConfig.model_fields["algorithm"].annotation)
FLOWERS = [name for name in ALGORITHMS if name[0].isupper()]
NEEDED = {"QFedAvg": {"client_learning_rate": 0.1}}


def walk(client: int, examples: int = 1, by=(1.0, -2.0)):
    """A client that moves the weights that it gets by client + 1 times `by`."""

    def answer(server_round, weights):
        return reply(client, (weights + np.float32(client + 1) * np.float32(by)).tolist(), examples)

    return answer


@pytest.fixture(autouse=True)
def _nothing_to_collect():
    gc.freeze()  # some strategies collect garbage several times a round, which takes long in a process of tests
    yield
    gc.unfreeze()


# --- averages


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
def test_the_average_is_weighted_by_examples(algorithm):
    answers = {0: reply(0, (0.0, 4.0), examples=1), 1: reply(1, (4.0, 8.0), examples=3)}
    weights, _ = rote_run(answers, algorithm=algorithm)
    assert weights.tolist() == [3.0, 7.0]  # (1·0 + 3·4) / 4, (1·4 + 3·8) / 4


def test_the_running_mean_is_the_weighted_mean():
    generator = np.random.default_rng(0)
    sent, examples = generator.normal(size=(7, 2)).astype("float32"), generator.integers(1, 99, 7)
    answers = {j: reply(j, sent[j].tolist(), int(examples[j])) for j in range(7)}
    weights, _ = rote_run(answers)
    np.testing.assert_allclose(weights, np.average(sent.astype("float64"), axis=0, weights=examples), rtol=3e-7)


def test_one_client_alone_is_its_own_average():
    weights, history = rote_run({0: reply(0, (0.1, -7.3), examples=13)})
    assert torch.equal(torch.from_numpy(weights), torch.tensor([0.1, -7.3]))
    assert history.curves().set_index("metric").examples.to_dict() == {"drift": 13, "penalty": 13, "train_loss": 13}


def test_averaging_equal_clients_is_identity():
    weights, _ = rote_run({client: reply(client, (0.3, -1.7), examples=client + 1) for client in range(3)})
    assert weights.tolist() == np.float32([0.3, -1.7]).tolist()


def test_drift_is_the_euclidean_distance_over_all_arrays():
    start = ArrayRecord({"a": torch.zeros(2), "b": torch.ones(1, 1)})
    assert drift(ArrayRecord({"a": torch.tensor([2.0, 3.0]), "b": torch.tensor([[7.0]])}), start) == 7.0  # √(4+9+36)


def large_app() -> ClientApp:
    app = ClientApp()

    @app.train(mods=[clipping])
    def train(message, context):
        client = context.node_config["partition-id"]
        received = message.content["arrays"]
        arrays = ArrayRecord()
        for name in received:
            arrays[name] = Array(received[name].numpy() + np.float32(client + 1))
        metrics = MetricRecord(dict(reply(client)["metrics"]))
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def peak_of(run, n_arrays=16, size=2**16, clients=5) -> float:
    """The highest memory of a run of two rounds, the global model included, in units of the model's bytes."""
    tracemalloc.start()
    try:
        start = ArrayRecord({str(index): Array(np.zeros(size, dtype="float32")) for index in range(n_arrays)})
        tracemalloc.reset_peak()
        run(InProcessGrid(large_app(), range(clients)), start)
        return tracemalloc.get_traced_memory()[1] / (n_arrays * size * 4)
    finally:
        tracemalloc.stop()


def test_aggregation_holds_three_times_the_model_at_most():
    last = {}
    checkpoints = SimpleNamespace(done=None, evaluate_fn=lambda r, arrays, state: last.update({r: arrays["3"].numpy()}))
    strategy, config = make_strategy(settings(), 5, History()), settings(rounds=2)
    assert (
        peak_of(lambda grid, start: serve_rounds(grid, config, strategy, start, checkpoints)) < 3.5
    )  # 3 and some arrays
    assert np.allclose(last[2], 6.0)  # twice the mean of 1 … 5
    stock = flower.FedAvg(fraction_evaluate=0.0)
    assert peak_of(lambda grid, start: stock.start(grid, start, num_rounds=2)) > 6  # all five answers at once


# --- every strategy of Flower


def test_the_algorithms_are_flowers_own_and_all_of_them():
    assert set(FLOWERS) == set(strategy_names()) - {"FedAvg", "FedProx"}  # those two are fedavg and fedprox
    assert set(FORMULAS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", FLOWERS)
def test_every_strategy_runs_and_demands_every_client(name):
    options = {"algorithm": name, "strategy_options": NEEDED.get(name, {})}
    weights, history = rote_run({j: walk(j) for j in range(5)}, rounds=2, **options)
    assert weights.dtype == np.float32
    assert np.isfinite(weights).all()
    assert weights[0] > 0 > weights[1]  # where the clients went
    assert history.curves().groupby(["metric", "round"]).client.apply(list).map(len).eq(5).all()
    with pytest.raises(FederatedError, match="client 3, round 2: trained on 0 examples"):
        rote_run({j: walk(j) for j in range(5)} | {3: lambda r, w: reply(3, examples=2 - r)}, rounds=2, **options)


def test_fedadam_makes_the_step_computed_by_hand():
    # From w_t = [1, 2]: mean (1·[2, 2] + 3·[2, 6]) / 4 = [2, 5], d = [1, 3], m = 0.1·d, v = 0.01·d², √v = [0.1, 0.3];
    # eta · √(1 − 0.99²) / (1 − 0.9²) = 0.1 · √0.0199 / 0.19, for Flower counts rounds from 1 and adds one.
    answers = {0: reply(0, (2.0, 2.0), examples=1), 1: reply(1, (2.0, 6.0), examples=3)}
    options = {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
    weights, _ = rote_run(answers, start=(1.0, 2.0), algorithm="FedAdam", strategy_options=options)
    rate = 0.1 * 0.0199**0.5 / 0.19
    np.testing.assert_allclose(weights, [1 + rate * 0.1 / 0.101, 2 + rate * 0.3 / 0.301], rtol=1e-6)


def test_median_trimmed_mean_and_momentum_computed_by_hand():
    sent = {j: reply(j, value) for j, value in enumerate([(0.0, 9.0), (1.0, 1.0), (5.0, 2.0), (6.0, 3.0), (99.0, 4.0)])}
    assert rote_run(dict(sent), algorithm="FedMedian")[0].tolist() == [5.0, 3.0]
    sent = {j: reply(j, value) for j, value in enumerate([(0.0, 9.0), (1.0, 1.0), (5.0, 2.0), (6.0, 3.0), (99.0, 4.0)])}
    trimmed, _ = rote_run(sent, algorithm="FedTrimmedAvg", strategy_options={"beta": 0.2})
    assert trimmed.tolist() == [4.0, 3.0]  # (1 + 5 + 6) / 3, (2 + 3 + 4) / 3
    options = {"server_learning_rate": 0.5, "server_momentum": 0.5}
    # d = −1 in both rounds: v = −1, then −1.5; w = 0.5, then 0.5 + 0.75
    moved, _ = rote_run({0: walk(0, by=(1.0, 1.0))}, rounds=2, algorithm="FedAvgM", strategy_options=options)
    assert moved.tolist() == [1.25, 1.25]


@pytest.mark.parametrize(
    ("algorithm", "options", "says"),
    [
        (
            "FedAdam",
            {"eat": 0.1},
            "FedAdam has no option 'eat'; did you mean 'eta'?; expected options: "
            "eta (default 0.1), eta_l (default 0.1), beta_1",
        ),
        ("FedAdam", {"eta": "large"}, "eta: got 'large'; expected a number"),
        ("Krum", {"num_malicious_nodes": 0.5}, "num_malicious_nodes: got 0.5; expected a whole number"),
        ("FedTrimmedAvg", {"beta": 0.7}, "strategy_options of FedTrimmedAvg: `beta` must be in the range [0, 0.5)"),
        ("FedAdam", {"fraction_train": 0.5}, "no option 'fraction_train'"),
        ("fedavg", {"eta": 1.0}, "fedavg has no option 'eta'; expected options: none"),
        ("QFedAvg", {}, "QFedAvg needs client_learning_rate"),
        ("QFedAvg", {"client_learning_rate": 0}, "client_learning_rate: got 0; expected a number > 0"),
        ("FedAdam", {"eta": -0.1}, "eta: got -0.1; expected a number > 0"),
        ("FedYogi", {"eta_l": 0}, "eta_l: got 0; expected a number > 0"),
        ("FedAvgM", {"server_learning_rate": 0.0}, "server_learning_rate: got 0.0; expected a number > 0"),
        ("Krum", {"num_malicious_nodes": -1}, "num_malicious_nodes: got -1; expected a whole number ≥ 0"),
    ],
)
def test_options_that_a_strategy_does_not_have_are_refused(algorithm, options, says):
    config = settings(algorithm=algorithm, strategy_options=options)
    with pytest.raises(FederatedError, match=re.escape(says)):
        make_strategy(config, 3, History())


def test_a_strategy_that_makes_nothing_of_the_answers_stops_the_run():
    strategy = make_strategy(settings(algorithm="Bulyan"), 5, History())
    strategy.num_malicious_nodes = 1  # it wants 4 · 1 + 3 clients, as is said beforehand otherwise
    grid = InProcessGrid(rote_app({j: walk(j) for j in range(5)}), range(5))
    with pytest.raises(FederatedError, match="round 1: Bulyan computed no weights from 5 clients' answers"):
        strategy.start(grid, ArrayRecord({"w": torch.zeros(2)}), num_rounds=1)


@pytest.mark.parametrize(("algorithm", "enough"), [("Krum", 5), ("MultiKrum", 5), ("Bulyan", 7)])
def test_too_few_clients_for_so_many_malicious_ones_are_refused(algorithm, enough):
    config = settings(algorithm=algorithm, strategy_options={"num_malicious_nodes": 1})
    make_strategy(config, enough, History())
    said = f"{algorithm} with num_malicious_nodes = 1 needs {enough} clients"
    with pytest.raises(FederatedError, match=re.escape(said)):
        make_strategy(config, enough - 1, History())


def test_no_training_has_no_strategy():
    with pytest.raises(FederatedError, match="'none' has no strategy; expected one of fedavg, fedprox, central, local"):
        make_strategy(settings(algorithm="none"), 2, History())


@pytest.mark.parametrize("name", FLOWERS)
def test_what_a_strategy_remembers_can_be_put_into_a_new_one(name, tmp_path):
    config = settings(algorithm=name, strategy_options=NEEDED.get(name, {}))
    start = ArrayRecord({"z": torch.zeros(2), "a": torch.ones(3)})  # files of arrays keep no order
    old, new = (make_strategy(config, 5, History()) for _ in range(2))
    arrays = old.start(InProcessGrid(large_app(), range(5)), start, num_rounds=1).arrays
    if state := state_of(old):
        save_file(state, tmp_path / "state.safetensors")
        restore_state(new, load_file(tmp_path / "state.safetensors"))
    went_on, again = (
        FromRound(strategy, 1).start(InProcessGrid(large_app(), range(5)), ArrayRecord(dict(arrays)), num_rounds=1)
        for strategy in (old, new)
    )
    assert [a.numpy().tobytes() for a in again.arrays.values()] == [
        a.numpy().tobytes() for a in went_on.arrays.values()
    ]
    assert bool(state) == (name in {"FedAdagrad", "FedAdam", "FedAvgM", "FedYogi"})


# --- clipping and noise


def test_an_update_is_clipped_to_its_norm():
    clipped, history = rote_run({0: reply(0, (3.0, 4.0), drift=5.0)}, update_clip=2.0)
    np.testing.assert_allclose(clipped, [1.2, 1.6], rtol=1e-6)  # [3, 4] · 2 / 5
    kept, _ = rote_run({0: reply(0, (3.0, 4.0))}, update_clip=6.0)
    assert kept.tolist() == [3.0, 4.0]
    assert history.curves().query("metric == 'drift'").value.tolist() == [5.0]  # before clipping


@pytest.mark.parametrize("algorithm", ["fedavg", "FedAdam"])
def test_a_client_without_the_mod_is_an_error(algorithm):
    answers = {j: reply(j, (0.0, 1.0)) for j in range(2)} | {2: reply(2, (3.0, 4.0))}
    with pytest.raises(FederatedError, match=r"client 2, round 1: its update has norm 5, more than update_clip = 2"):
        rote_run(answers, mods=(), update_clip=2.0, algorithm=algorithm)


def test_noise_has_its_deviation_and_repeats():
    app, n_clients, size = large_app(), 4, 20_000

    def run(seed: int) -> np.ndarray:
        np.random.rand(3)  # whatever was drawn before must not matter
        config = settings(update_clip=8.0, update_noise=0.5, train_seed=seed)
        start = ArrayRecord({"w": torch.zeros(size)})
        strategy = make_strategy(config, n_clients, History())
        return strategy.start(InProcessGrid(app, range(n_clients)), start, num_rounds=1).arrays["w"].numpy()

    first, again, other = run(1), run(1), run(2)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.std() == pytest.approx(0.5 * 8.0 / 4, rel=0.03)  # update_noise · update_clip / n_clients


def test_a_failed_client_stops_a_clipped_run_too():
    answers = {0: reply(0, (1.0, 1.0)), 1: Error(7, "no disk")}
    with pytest.raises(FederatedError, match="client 1, round 1: failed with code 7: no disk"):
        rote_run(answers, update_clip=2.0)


def test_clipping_and_noise_claim_no_guarantee():
    text = describe(settings(update_clip=2.0, update_noise=0.5))
    assert text.count("clipping and noise, no formal guarantee") == 2
    assert "guarantee" not in describe(settings())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_described_with_its_settings(name):
    options = {} if name == "none" else {"strategy_options": NEEDED.get(name, {})}
    text = describe(settings(algorithm=name, proximal_mu=0.25, **options))
    assert text.startswith(f"**{name}**")
    assert ("μ = 0.25" in text) == (name == "fedprox")
    assert ("2 rounds" in text) == (name != "none")
    assert "$" not in text


# --- answers that must not be averaged


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
        (reply(1, (1.0, 2.0, 3.0)), "client 1, round 1: its arrays are not those that it was sent"),
        (reply(2), "round 1: 3 of 3 clients answered ([0, 2, 2])"),
        (Error(7, "no disk"), "client 1, round 1: failed with code 7: no disk"),
        (KeyError("x"), "client 1, round 1: KeyError: 'x'"),
    ],
)
@pytest.mark.parametrize("algorithm", ["fedavg", "FedMedian"])
def test_an_answer_that_cannot_be_averaged_stops_the_run(answer, says, algorithm):
    with pytest.raises(FederatedError, match=re.escape(says)):
        rote_run({0: reply(0), 1: answer, 2: reply(2)}, algorithm=algorithm)


def test_a_missing_answer_stops_the_run():
    with pytest.raises(FederatedError, match=r"round 1: 2 of 3 clients answered \(\[0, 1\]\)"):
        rote_run({client: reply(client) for client in range(3)}, grid_class=ForgetfulGrid)


# --- the Grid


def test_replies_come_in_client_order_whatever_the_order_of_messages():
    grid = InProcessGrid(rote_app({client: reply(client) for client in range(4)}), range(4))
    content = RecordDict({"config": ConfigRecord({})})
    messages = [grid.create_message(content, "train", client, "1") for client in (2, 0, 3, 1)]
    assert [r.metadata.src_node_id for r in grid.send_and_receive(messages)] == [0, 1, 2, 3]


def test_a_client_trains_when_its_answer_is_asked_for():
    trained = []

    def noting(client):
        return lambda r, w: trained.append(client) or reply(client)

    grid = InProcessGrid(rote_app({client: noting(client) for client in range(3)}), range(3))
    content = RecordDict({"arrays": ArrayRecord({"w": torch.zeros(2)}), "config": ConfigRecord({"server-round": 1})})
    replies = grid.send_and_receive([grid.create_message(content, "train", client, "1") for client in range(3)])
    assert trained == []
    next(replies)
    assert trained == [0]


def test_answers_from_a_network_are_averaged_in_client_order():
    class Network(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return list(super().send_and_receive(messages))[::-1]

    sent = {j: (0.1 * 3**j, 1.0 / (j + 1)) for j in range(4)}
    here, _ = rote_run({j: reply(j, values, j + 1) for j, values in sent.items()})
    there, _ = rote_run({j: reply(j, values, j + 1) for j, values in sent.items()}, grid_class=Network)
    assert here.tobytes() == there.tobytes()


def test_clipping_does_nothing_unless_the_server_asks():
    grid = InProcessGrid(rote_app({0: reply(0, (3.0, 4.0))}, mods=(clipping,)), [0])
    content = RecordDict({"arrays": ArrayRecord({"w": torch.zeros(2)}), "config": ConfigRecord({"server-round": 1})})
    (answer,) = grid.send_and_receive([grid.create_message(content, "train", 0, "1")])
    assert answer.content["arrays"]["w"].numpy().tolist() == [3.0, 4.0]
