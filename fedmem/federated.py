"""Federated, central and no training of one model on the rows of several clients.

Flower's ServerApp, ClientApp and strategies carry the weights; `fedmem.training` does each client's step, and the
same step does the central baseline. Every round's global model becomes a checkpoint folder. It does not know where
rows come from, nor what is done with the checkpoints.

In every table here `client` is a client's id, 0 … L − 1, or `POOLED` for the rows of all clients together.
"""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.utils.data import ConcatDataset
from tqdm import tqdm

from fedmem.flower_grid import (
    ArrayRecord,
    ClientApp,
    ConfigRecord,
    Context,
    FedAvg,
    FederatedError,
    FedProx,
    InProcessGrid,
    Message,
    MetricRecord,
    RecordDict,
    ServerApp,
)
from fedmem.models import ModelError, encode
from fedmem.training import LocalResult, Losses, calm, derive_seed, evaluate_loss, train_locally, trained

__all__ = [
    "POOLED",
    "Checkpoints",
    "FederatedError",
    "History",
    "InProcessGrid",
    "client_datasets",
    "get_arrays",
    "make_client_app",
    "make_server_app",
    "make_strategy",
    "set_arrays",
    "train_central",
]

POOLED = -1
CURVES = ["round", "client", "metric", "value", "examples", "tokens", "steps"]


class History:
    """What a run measures as it goes: figures that the seeds determine, and, apart from them, seconds."""

    def __init__(self):
        self._figures: list[tuple] = []
        self._seconds: list[tuple] = []

    def add(
        self, server_round: int, client: int, values: Mapping[str, float], examples: int, tokens: int, steps: int = 0
    ) -> None:
        """Note figures of one client in one round, by metric name; `steps` are optimizer steps."""
        self._figures += [(server_round, client, name, float(v), examples, tokens, steps) for name, v in values.items()]

    def add_seconds(self, server_round: int, client: int, part: str, seconds: float) -> None:
        """Note how long a part (train, checkpoint) took."""
        self._seconds.append((server_round, client, part, seconds))

    def curves(self) -> pd.DataFrame:
        """DataFrame (round, client, metric, value, examples, tokens, steps), one row a figure.

        metric: train_loss (nats per predicted token, mean over the round's steps, without the penalty), penalty
        (mean of (μ/2)·‖w − w_t‖² over the steps), drift (‖w − w_t‖ at the client's end; not for central), test_loss
        (nats per predicted token of the global model after the round; round 0 is the model before training).
        """
        return pd.DataFrame(self._figures, columns=CURVES).sort_values(
            ["round", "client", "metric"], kind="stable", ignore_index=True
        )

    def seconds(self) -> pd.DataFrame:
        """DataFrame (round, client, part, seconds)."""
        return pd.DataFrame(self._seconds, columns=["round", "client", "part", "seconds"])


def client_datasets(rows: pd.DataFrame, tokenizer, config, split: str = "train") -> dict:
    """Encode one split of a partition's rows, client by client: {client: dataset}, clients 0 … L − 1.

    rows: client, split, input, instruction, output. config: max_tokens, loss_on. The datasets' `n_truncated` counts
    rows that max_tokens cut. Raises FederatedError, with the client, where a client has no training rows or one that
    leaves nothing to predict.
    """
    datasets = {}
    for client in range(int(rows["client"].max()) + 1 if len(rows) else 0):
        own = rows[(rows["client"] == client) & (rows["split"] == split)]
        if split == "train" and own.empty:
            raise FederatedError(f"client {client} has no training rows: give it some, or take fewer clients.")
        try:
            datasets[client] = encode(tokenizer, own, config.max_tokens, config.loss_on)
        except ModelError as error:
            raise FederatedError(f"client {client}, {split}: {error}") from error
    return datasets


def get_arrays(model) -> ArrayRecord:
    """The trained parameters as Flower sends them: fp32 on the host, a tied one once."""
    return ArrayRecord({name: p.detach().float().cpu().contiguous() for name, p in trained(model).items()})


@torch.no_grad()
def set_arrays(model, arrays: ArrayRecord) -> None:
    """Write received weights into a model, in place. A missing, unknown or misshapen array is an error."""
    parameters, received = trained(model), arrays.to_torch_state_dict()
    if different := set(parameters) ^ set(received):
        raise FederatedError(f"weights received and the model's differ in {sorted(different)}: not the same model.")
    for name, parameter in parameters.items():
        if parameter.shape != received[name].shape:
            shapes = f"{tuple(received[name].shape)}, the model's {tuple(parameter.shape)}"
            raise FederatedError(f"the received {name} has shape {shapes}: not the same model.")
        parameter.copy_(received[name])


def drift(arrays: ArrayRecord, start: ArrayRecord) -> float:
    """‖w − w_t‖, the Euclidean distance over all arrays together, summed in double precision."""
    pairs = ((arrays[name].numpy(), start[name].numpy()) for name in start)
    return float(np.sqrt(sum(np.square(w - w_t, dtype=np.float64).sum() for w, w_t in pairs)))


def make_client_app(model, datasets: Mapping[int, Sequence], config) -> ClientApp:
    """The app that every client runs: load the global weights, train on its own rows, send the weights back.

    datasets: {client: training rows}; a client touches its own entry only. model: one instance that the clients of a
    process use in turn (each overwrites all its weights first). config: a TrainConfig.
    The reply's metrics: num-examples (rows really used, the weight in the average), client, train_loss, penalty,
    drift, tokens, steps, seconds.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        settings, received = message.content["config"], message.content["arrays"]
        client, begun = int(context.node_config["partition-id"]), time.perf_counter()
        set_arrays(model, received)
        result = train_locally(
            model,
            datasets[client],
            config=config,
            epochs=config.local_epochs,
            seed=derive_seed(config.train_seed, int(settings["server-round"]), client),
            proximal_mu=float(settings.get("proximal-mu", 0.0)),
        )
        arrays = get_arrays(model)
        metrics = _reply_metrics(client, result, drift(arrays, received), time.perf_counter() - begun)
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def _reply_metrics(client: int, result: LocalResult, moved: float, seconds: float) -> MetricRecord:
    return MetricRecord(
        {
            "num-examples": result.n_examples,
            "client": client,
            "train_loss": result.loss,
            "penalty": result.penalty,
            "drift": moved,
            "tokens": result.tokens,
            "steps": result.steps,
            "seconds": seconds,
        }
    )


class _Demanding:
    """Put before a Flower strategy: every client must answer every round, with something that can be averaged.

    Flower itself averages whoever answered, and keeps the old weights when nobody did. The aggregation that follows
    the checks is the strategy's own.
    """

    n_clients: int
    history: History

    def aggregate_train(self, server_round, replies):
        replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        for reply in replies:
            self._check(server_round, reply)
            self._note(server_round, reply.content["metrics"])
        if len(replies) != self.n_clients:
            answered = [reply.metadata.src_node_id for reply in replies]
            raise FederatedError(
                f"round {server_round}: {len(replies)} of {self.n_clients} clients answered ({answered}); a round "
                "counts only with all of them. See the log of the missing ones."
            )
        return super().aggregate_train(server_round, replies)

    def _check(self, server_round: int, reply: Message) -> None:
        where = f"client {reply.metadata.src_node_id}, round {server_round}"
        if reply.has_error():
            raise FederatedError(f"{where}: failed with code {reply.error.code}: {reply.error.reason}")
        metrics, arrays = reply.content["metrics"], reply.content["arrays"]
        if metrics["num-examples"] <= 0:
            raise FederatedError(f"{where}: trained on 0 examples, so it has no weight in an average. Give it rows.")
        wrong = [name for name, value in metrics.items() if not np.isfinite(value)]
        wrong += [name for name, array in arrays.items() if not np.isfinite(array.numpy()).all()]
        if wrong:
            raise FederatedError(f"{where}: not finite: {', '.join(wrong[:5])}. Lower learning_rate or proximal_mu.")
        if metrics["drift"] == 0:
            raise FederatedError(f"{where}: its weights did not change at all. Raise learning_rate or local_epochs.")

    def _note(self, server_round: int, metrics: MetricRecord) -> None:
        client, values = metrics["client"], {name: metrics[name] for name in ("train_loss", "penalty", "drift")}
        self.history.add(server_round, client, values, metrics["num-examples"], metrics["tokens"], metrics["steps"])
        self.history.add_seconds(server_round, client, "train", metrics["seconds"])


class DemandingFedAvg(_Demanding, FedAvg):
    """Flower's FedAvg, all clients every round, weighted by the examples really used (McMahan et al. 2017)."""


class DemandingFedProx(_Demanding, FedProx):
    """Flower's FedProx: the same average, and μ sent to the clients, who add the term (Li et al. 2020)."""


def make_strategy(config, n_clients: int, history: History) -> FedAvg:
    """Flower's strategy for `config.algorithm`: fedavg or fedprox (with `config.proximal_mu`).

    All `n_clients` (≥ 1) train in every round. A client that fails, is missing, has no examples, sends what is not
    finite or did not move stops the run with a FederatedError. What the clients report goes into `history`.
    """
    everyone = {"min_train_nodes": n_clients, "min_available_nodes": n_clients}
    no_evaluation = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}  # the checkpoints measure the global model
    with calm():
        if config.algorithm == "fedavg":
            strategy = DemandingFedAvg(**everyone, **no_evaluation)
        elif config.algorithm == "fedprox":
            strategy = DemandingFedProx(**everyone, **no_evaluation, proximal_mu=config.proximal_mu)
        else:
            raise FederatedError(f"algorithm {config.algorithm!r} has no strategy; allowed here: fedavg, fedprox.")
    strategy.n_clients, strategy.history = n_clients, history
    return strategy


class Checkpoints:
    """The global model of every round as a folder `round-0` … `round-N` that `from_pretrained` loads.

    folder: where they go, made at need. model, tokenizer: what is saved (safetensors, in the model's dtype).
    test_sets: {client: rows} on which each global model's loss is measured; may be empty. history: takes the losses.
    A folder appears whole or not at all, and a model that is not finite is never saved.
    """

    def __init__(self, folder: str | Path, model, tokenizer, test_sets: Mapping[int, Sequence], config, history):
        self.folder = Path(folder)
        self.model, self.tokenizer, self.test_sets = model, tokenizer, test_sets
        self.config, self.history = config, history

    def path(self, server_round: int) -> Path:
        """The folder of one round's model."""
        return self.folder / f"round-{server_round}"

    def evaluate_fn(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """What Flower's `Strategy.start` calls for rounds 0 … N: load the global weights, save, measure."""
        set_arrays(self.model, arrays)
        losses = self.save(server_round)
        return MetricRecord({f"test_loss_{client}": loss for client, loss in losses.items()})

    def save(self, server_round: int) -> dict[int, float]:
        """Save the model as it is now as this round's checkpoint; return the test loss by client."""
        begun = time.perf_counter()
        wrong = [name for name, p in self.model.named_parameters() if not torch.isfinite(p).all()]
        if wrong:
            raise FederatedError(f"round {server_round}: weights not finite: {', '.join(wrong[:5])}. Nothing is saved.")
        with calm(self.config.torch_threads):
            self._write(self.path(server_round))
            losses = {client: self._measure(server_round, client) for client in sorted(self.test_sets)}
        self.history.add_seconds(server_round, POOLED, "checkpoint", time.perf_counter() - begun)
        return losses

    def _write(self, target: Path) -> None:
        partial = target.with_name(f".{target.name}.partial")
        for old in (partial, target):
            shutil.rmtree(old, ignore_errors=True)
        self.model.save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        os.replace(partial, target)

    def _measure(self, server_round: int, client: int) -> float:
        rows = self.test_sets[client]
        loss, tokens = evaluate_loss(self.model, rows, self.config.batch_size)
        if tokens:
            self.history.add(server_round, client, {"test_loss": loss}, len(rows), tokens)
        return loss


def make_server_app(config, strategy: FedAvg, initial_arrays: ArrayRecord, checkpoints: Checkpoints) -> ServerApp:
    """The app that the server runs: `config.rounds` rounds of a strategy, a checkpoint before and after each.

    At its end the checkpoints' model holds the last global weights.
    """
    app = ServerApp()

    @app.main()
    def main(grid, context: Context) -> None:
        with calm(config.torch_threads):
            strategy.start(
                grid=grid,
                initial_arrays=initial_arrays,
                num_rounds=config.rounds,
                train_config=ConfigRecord(),
                evaluate_fn=checkpoints.evaluate_fn,
            )

    return app


def train_central(model, datasets: Mapping[int, Sequence], config, checkpoints: Checkpoints, history: History) -> None:
    """The baseline: one training on the rows of all clients together, never interrupted, never averaged.

    It passes `rounds`·`local_epochs` times over every row, as a federated run does, at the same batch size, and a
    checkpoint after every `local_epochs` passes stands for that round. With one client and one round it is the
    federated run: the same rows in the same order.
    """
    pooled, curve = ConcatDataset([datasets[client] for client in sorted(datasets)]), []
    checkpoints.save(0)
    with tqdm(total=config.rounds, desc="rounds", unit=" rounds", mininterval=1) as bar:
        clock = [time.perf_counter()]

        def on_epoch(losses: Losses) -> None:
            curve.append(losses)
            server_round, left = divmod(len(curve), config.local_epochs)
            if left:
                return
            part = Losses.joined(curve[-config.local_epochs :])
            values = {"train_loss": part.loss, "penalty": part.penalty}
            history.add(server_round, POOLED, values, len(pooled), part.tokens, part.steps)
            history.add_seconds(server_round, POOLED, "train", time.perf_counter() - clock[0])
            checkpoints.save(server_round)
            clock[0] = time.perf_counter()
            bar.update()

        epochs = config.rounds * config.local_epochs
        seed = derive_seed(config.train_seed, 1, 0)
        train_locally(model, pooled, config=config, epochs=epochs, seed=seed, on_epoch=on_epoch)
