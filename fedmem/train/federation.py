"""Federated, central, local and no training of one model on the rows of several clients.

Flower's ServerApp, ClientApp and strategies exchange the weights; `fedmem.train.local_training` does each client's
local training.
Every algorithm is a federation: central has a single client with all rows, local is a separate federation of one client
for each client. So all algorithms start every round with fresh moments of the optimizer, and central differs from
fedavg only in the averaging. The global model of every round becomes a checkpoint folder. This module does not depend
on the source of the rows or on the use of the checkpoints.
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
from fedmem.train.local_training import derive_seed, quiet_libraries, steps_per_round, train_locally
from fedmem.train.weights import drift, get_arrays, set_arrays


class Pooled(ConcatDataset):
    """The rows of all clients as the rows of one, in the order of the clients."""

    @property
    def n_clients(self) -> int:
        """Number of clients whose rows are pooled."""
        return len(self.datasets)


def client_datasets(rows: pd.DataFrame, tokenizer, config, split: str = "train") -> dict:
    """Encode one split of a partition's rows, client by client.

    rows: DataFrame with client, split, input, instruction, output.
    tokenizer: the model's.
    config: settings max_tokens, loss_on.
    split: train, test or heldout.

    Returns {client: dataset} for clients 0 … L − 1; a dataset's `n_truncated` counts the rows cut at max_tokens. Raises
    FederatedError, which names the client, when a client has no training rows or a row without a token to predict.
    """
    datasets = {}
    # by number, not by the numbers present: a client without rows must fail here, not be skipped
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
    """Yield the federations of an algorithm, each as {client: training rows}.

    central: one, with the single client POOLED that has the rows of all clients; local: one per client; none: no
    federation; every other algorithm: one of all clients.
    """
    if algorithm == "central":
        yield {POOLED: Pooled([datasets[client] for client in sorted(datasets)])}
    elif algorithm == "local":
        yield from ({client: datasets[client]} for client in sorted(datasets))
    elif algorithm != "none":
        yield dict(datasets)


def round_steps(rows: Sequence, config) -> int:
    """Return the gradient steps of one round on a client's rows; pooled rows get the steps of all clients together."""
    # central would otherwise train on L times fewer rows than fedavg, and the two could not be compared
    if config.local_steps is not None:
        return config.local_steps * getattr(rows, "n_clients", 1)
    return steps_per_round(len(rows), config)


def train_client(message: Message, client: int, model, rows: Sequence, config) -> Message:
    """Do a client's work of one round: load the received global weights, train on the own rows, return the weights.

    message: records "arrays" (w_t) and "config" (server-round, proximal-mu).
    client: id of the client, 0 … L − 1, or POOLED.
    model: trained in place; all its trained weights are overwritten first.
    rows: the client's training rows.
    config: a TrainConfig.

    Returns the reply, whose metrics are num-examples (rows used, the weight in the average), client, train_loss,
    penalty, drift, tokens, steps, seconds. Raises FederatedError when training did not change the weights.
    """
    settings, received, begun = message.content["config"], message.content["arrays"], time.perf_counter()
    server_round, steps = int(settings["server-round"]), round_steps(rows, config)
    set_arrays(model, received)
    result = train_locally(
        model,
        rows,
        config=config,
        # POOLED is negative: it draws as client 0 does, so that central equals fedavg with one client
        seed=derive_seed(config.train_seed, server_round, max(client, 0)),
        proximal_mu=float(settings.get("proximal-mu", 0.0)),
        steps=steps if config.local_steps is not None else None,
        # the learning rate follows one schedule over all rounds
        first_step=(server_round - 1) * steps,
        total_steps=config.rounds * steps,
    )
    arrays = get_arrays(model)
    moved = drift(arrays, received)
    if not moved:  # checked here because clipping divides by it
        raise FederatedError("its weights did not change at all. Raise learning_rate or local_epochs.")
    metrics = MetricRecord(
        {
            "num-examples": result.n_examples,
            "client": client,
            "train_loss": result.loss,
            "penalty": result.penalty,
            "drift": moved,
            "tokens": result.tokens,
            "steps": result.steps,
            "seconds": time.perf_counter() - begun,
        }
    )
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def make_client_app(model, datasets: Mapping[int, Sequence], config) -> ClientApp:
    """Build the app that every client of a process runs: `train_client` on its own rows, and clipping if requested.

    model: one instance that the clients of a process use in turn.
    datasets: {client: training rows}; a client reads its own entry only.
    config: a TrainConfig.
    """
    app = ClientApp()

    @app.train(mods=[clipping])
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        return train_client(message, client, model, datasets[client], config)

    return app


def serve_rounds(grid: Grid, config, strategy, initial_arrays: ArrayRecord, checkpoints: Checkpoints) -> None:
    """Run `config.rounds` rounds of a strategy on a grid, with a checkpoint before the first and after each.

    grid: Flower's Grid with all clients.
    config: a TrainConfig.
    strategy: from `make_strategy`.
    initial_arrays: the weights before round 1; emptied after it, except under "local".
    checkpoints: where rounds are saved and measured. If they hold rounds of an interrupted run, training continues
        after the last complete one, with its weights and the strategy's state; the result is identical, byte by byte,
        to that of an uninterrupted run.

    At the end, the model of `checkpoints` holds the last global weights. Raises FederatedError when a client fails.
    """
    made, arrays = checkpoints.done, initial_arrays
    if made is not None:
        checkpoints.resume(made)
        arrays = get_arrays(checkpoints.model)
        restore_state(strategy, checkpoints.history.kept_arrays())
    done = made or 0

    def after_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        server_round += done  # Flower counts from 0 in a continued run too
        if server_round == made:
            return None  # Flower evaluates before its first round; this round is saved and measured already
        # frees as much memory as the model; under "local", the next client starts from the same arrays
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
    """Build the app that the server runs.

    config, strategy, initial_arrays, checkpoints: as for `serve_rounds`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve_rounds(grid, config, strategy, initial_arrays, checkpoints)

    return app
