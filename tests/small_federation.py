"""A federation small enough for tests, as notebook 2 makes it, and clients that answer by rote."""

from pathlib import Path

import torch
from flwr.app import Error

from fedmem.config.stages import TrainConfig
from fedmem.train.checkpoints import Checkpoints, part_folder
from fedmem.train.federation import federations, make_client_app, make_server_app
from fedmem.train.history import History
from fedmem.train.in_process_grid import (
    ArrayRecord,
    ClientApp,
    InProcessGrid,
    Message,
    MetricRecord,
    RecordDict,
    clipping,
)
from fedmem.train.strategies import make_strategy
from fedmem.train.weights import get_arrays


def settings(**changes) -> TrainConfig:
    small = {"algorithm": "fedavg", "rounds": 2, "local_epochs": 2, "learning_rate": 1e-3, "batch_size": 2}
    return TrainConfig(**small | {"weight_decay": 0.0, "max_tokens": 64} | changes)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def federate(model, datasets, config, folder, tokenizer, test_sets=None, progress=None) -> History:
    """What notebook 2 does."""
    history, start = History(progress), get_arrays(model)
    if config.algorithm == "none":
        Checkpoints(folder, model, tokenizer, test_sets or {}, config, history).save(0)
    for clients in federations(datasets, config.algorithm):
        place = part_folder(folder, config.algorithm, min(clients))
        checkpoints = Checkpoints(place, model, tokenizer, test_sets or {}, config, history)
        strategy = make_strategy(config, clients, history)
        server_app = make_server_app(config, strategy, start, checkpoints)
        InProcessGrid(make_client_app(model, clients, config), clients).serve(server_app)
    return history


def whole(folder: Path) -> dict[str, bytes]:
    """All files below a folder: {name: bytes}."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def final_bytes(folder: Path, server_round: int = 2) -> bytes:
    return (folder / f"round-{server_round}" / "model.safetensors").read_bytes()


# --- clients that answer by rote


def reply(client: int, values=(0.0, 0.0), examples: int = 1, **changes) -> RecordDict:
    figures = {"num-examples": examples, "client": client, "train_loss": 1.0, "penalty": 0.0, "drift": 1.0}
    metrics = MetricRecord(figures | {"tokens": 5, "steps": 1, "seconds": 0.0} | changes)
    return RecordDict({"arrays": ArrayRecord({"w": torch.tensor(values)}), "metrics": metrics})


def rote_app(answers: dict, mods=(clipping,)) -> ClientApp:
    """answers: {client: what it sends, or raises, or a function of the round and the weights that makes it}."""
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message, context):
        answer = answers[context.node_config["partition-id"]]
        if callable(answer):
            answer = answer(message.content["config"]["server-round"], message.content["arrays"]["w"].numpy())
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Error):
            return Message(answer, reply_to=message)
        arrays = ArrayRecord(dict(answer["arrays"]))  # whoever averages them takes them out
        return Message(RecordDict({"arrays": arrays, "metrics": answer["metrics"]}), reply_to=message)

    return app


def rote_run(answers: dict, grid_class=InProcessGrid, rounds: int = 1, mods=(clipping,), start=(0.0, 0.0), **changes):
    """The weights after some rounds of a two-parameter model, and the history."""
    config, history = settings(rounds=rounds, **changes), History()
    grid = grid_class(rote_app(answers, mods), sorted(answers))
    strategy = make_strategy(config, sorted(answers), history)
    result = strategy.start(grid, ArrayRecord({"w": torch.tensor(start)}), num_rounds=rounds)
    return result.arrays["w"].numpy(), history
