"""Federated, central, local and no training of one model on the rows of several clients.

Flower's ServerApp, ClientApp and strategies carry the weights; `fedmem.train.local_training` does each client's step.
Every
algorithm is a federation: central is one of a single client that has all rows, local is one of a single client for
each client. So all of them start every round with fresh moments of the optimizer, and central differs from fedavg in
the averaging alone. Every round's global model becomes a checkpoint folder. This module does not know where rows come
from, nor what is done with the checkpoints.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
from torch.utils.data import ConcatDataset

from fedmem.config.vocabulary import POOLED
from fedmem.models.config_files import ModelError
from fedmem.models.examples import encode
from fedmem.train.checkpoints import Checkpoints, FromRound, restore_state, state_of
from fedmem.train.in_process_grid import (
    ArrayRecord,
    ClientApp,
    ConfigRecord,
    Context,
    FederatedError,
    Grid,
    Message,
    MetricRecord,
    RecordDict,
    ServerApp,
    clipping,
)
from fedmem.train.local_training import LocalResult, derive_seed, quiet_libraries, steps_per_round, train_locally
from fedmem.train.weights import drift, get_arrays, set_arrays


class Pooled(ConcatDataset):
    """The rows of all clients as those of one, in the order of the clients."""

    @property
    def n_clients(self) -> int:
        return len(self.datasets)


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


def federations(datasets: Mapping[int, Sequence], algorithm: str) -> Iterator[dict[int, Sequence]]:
    """The federations that an algorithm consists of, each as {client: training rows}.

    central: one, of the single client POOLED that has the rows of all; local: one a client; none: none; else one of
    all clients.
    """
    if algorithm == "central":
        yield {POOLED: Pooled([datasets[client] for client in sorted(datasets)])}
    elif algorithm == "local":
        yield from ({client: datasets[client]} for client in sorted(datasets))
    elif algorithm != "none":
        yield dict(datasets)


def round_steps(rows: Sequence, config) -> int:
    """Gradient steps of one round on a client's rows; on pooled ones as many as their clients would make together."""
    if config.local_steps is not None:
        return config.local_steps * getattr(rows, "n_clients", 1)
    return steps_per_round(len(rows), config)


def train_client(message: Message, client: int, model, rows: Sequence, config) -> Message:
    """What a client does in a round: load the global weights it was sent, train on its own rows, send its weights back.

    message: "arrays" (w_t) and "config" (server-round, proximal-mu). client: its id, 0 … L − 1 or POOLED, which draws
    as client 0 does, so that central is fedavg where there is one client. model: trained in place; all its trained
    weights are overwritten first. rows: the client's training rows. config: a TrainConfig.
    The reply's metrics: num-examples (rows really used, the weight in the average), client, train_loss, penalty,
    drift, tokens, steps, seconds.
    """
    settings, received, begun = message.content["config"], message.content["arrays"], time.perf_counter()
    server_round, steps = int(settings["server-round"]), round_steps(rows, config)
    set_arrays(model, received)
    result = train_locally(
        model,
        rows,
        config=config,
        seed=derive_seed(config.train_seed, server_round, max(client, 0)),
        proximal_mu=float(settings.get("proximal-mu", 0.0)),
        steps=steps if config.local_steps is not None else None,
        first_step=(server_round - 1) * steps,
        total_steps=config.rounds * steps,
    )
    arrays = get_arrays(model)
    moved = drift(arrays, received)
    if not moved:  # before any mod divides by it
        raise FederatedError("its weights did not change at all. Raise learning_rate or local_epochs.")
    metrics = _reply_metrics(client, result, moved, time.perf_counter() - begun)
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


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


def make_client_app(model, datasets: Mapping[int, Sequence], config) -> ClientApp:
    """The app that every client of a process runs: `train_client` with its own rows, and clipping where it is asked.

    datasets: {client: training rows}; a client touches its own entry only. model: one instance that the clients of a
    process use in turn. config: a TrainConfig.
    """
    app = ClientApp()

    @app.train(mods=[clipping])
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        return train_client(message, client, model, datasets[client], config)

    return app


def serve_rounds(grid: Grid, config, strategy, initial_arrays: ArrayRecord, checkpoints: Checkpoints) -> None:
    """`config.rounds` rounds of a strategy on a grid, a checkpoint before and after each.

    initial_arrays: emptied after the first round, for they are as large as the model (not under "local", where the next
    client starts from them too). Where the checkpoints hold rounds of an interrupted run, it goes on after the last
    whole one, with the weights and the strategy's memory of that round; what follows has the bytes of an uninterrupted
    run. At its end the checkpoints' model holds the last global weights.
    """
    made, arrays = checkpoints.done, initial_arrays
    if made is not None:
        checkpoints.resume(made)
        arrays = get_arrays(checkpoints.model)
        restore_state(strategy, checkpoints.history.kept_arrays())
    done = made or 0

    def after_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        server_round += done
        if server_round == made:
            return None  # it is saved and measured
        if server_round > done and config.algorithm != "local":
            initial_arrays.clear()
        state = state_of(strategy) if 0 < server_round < config.rounds else None
        return checkpoints.evaluate_fn(server_round, arrays, state)

    with quiet_libraries(config.torch_threads):
        FromRound(strategy, done).start(
            grid=grid,
            initial_arrays=arrays,
            num_rounds=config.rounds - done,
            train_config=ConfigRecord(),
            evaluate_fn=after_round,
        )


def make_server_app(config, strategy, initial_arrays: ArrayRecord, checkpoints: Checkpoints) -> ServerApp:
    """The app that the server runs: `serve_rounds`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve_rounds(grid, config, strategy, initial_arrays, checkpoints)

    return app
