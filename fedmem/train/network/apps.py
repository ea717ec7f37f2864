"""The two apps of a real federation, which `flwr run` starts: a server that trains, and a client for every node.

They are made of the same parts as notebook 2: the server publishes the stage that the notebook would, from the same
partition and parameters, and a client trains as in-process, on the one folder that its node was given. What Flower
sends to the nodes names these apps and holds no code, so a node runs the fedmem that is installed there.

Run configuration: `partition`, `parameters` (a mapping of parameters of the train stage in YAML, or the name of a
YAML file of them), `wait_seconds` (for the nodes to come), `round_seconds` (for the clients' answers in a round).
Node configuration: `partition-id` (the client), `num-partitions` (L), `data` (the client's folder), and where they
differ on that machine, `model` and `device`.
"""

import contextlib
import functools
import json
import traceback
from pathlib import Path

from fedmem.config.parameter import ConfigError
from fedmem.config.stages import TrainConfig
from fedmem.config.yaml_files import parse, read
from fedmem.results.identity import outside_digests, package_digest
from fedmem.results.stage import Stage, find_stage
from fedmem.results.work import Work, begin_stage
from fedmem.train.in_process_grid import (
    ClientApp,
    ConfigRecord,
    Context,
    FederatedError,
    Message,
    RecordDict,
    ServerApp,
)
from fedmem.train.network.client_folders import read_client, rows_digest
from fedmem.train.network.nodes import ClientGrid, log, refuse_telemetry, wait_for_clients

__all__ = ["client_app", "server_app"]

server_app, client_app = ServerApp(), ClientApp()


@server_app.main()
def serve(grid, context: Context) -> None:
    """Find the partition, see that every client is there, train, and publish the train stage."""
    refuse_telemetry()
    settings = context.run_config
    dealt = find_stage("partition", settings["partition"])
    work = begin_stage(read_parameters(settings["parameters"]), dealt)
    config = work.config
    digests = {int(client): rows_digest(own) for client, own in dealt.table("rows").groupby("client")}
    parameters = config.model_dump_json()
    expected = {
        "parameters": parameters,
        "clients": len(digests),
        "code": package_digest(),
        "model": _model(config),
    }
    nodes = wait_for_clients(grid, expected, digests, settings["wait_seconds"])
    log.info("all clients are there: %s, on nodes %s", sorted(nodes), [nodes[client] for client in sorted(nodes)])
    device = _train(ClientGrid(grid, nodes, parameters, settings["round_seconds"]), context, work, dealt)
    stage = work.publish(device=f"{device}, a federation of {len(nodes)} nodes")
    log.info("published %s", stage)


def _train(grid: ClientGrid, context: Context, work: Work, dealt: Stage) -> str:
    """Notebook 2's steps, on a grid of nodes; returns the server's device."""
    import pandas as pd

    from fedmem.models.loading import load_trainable
    from fedmem.train import evaluation
    from fedmem.train.checkpoints import Checkpoints
    from fedmem.train.federation import client_datasets, make_server_app
    from fedmem.train.history import History
    from fedmem.train.strategies import make_strategy
    from fedmem.train.utility import with_weighted_means
    from fedmem.train.weights import get_arrays  # torch, which the roll call does without

    config, rows, task = work.config, dealt.table("rows"), dealt.config.task
    model, tokenizer = load_trainable(config)
    test_sets, history = client_datasets(rows, tokenizer, config, "test"), History(work.progress)
    measured = [evaluation.measure(model, tokenizer, rows, config, task, server_round=0)]
    checkpoints = Checkpoints(work.path("checkpoints"), model, tokenizer, test_sets, config, history)
    strategy = make_strategy(config, sorted(grid.nodes), history)
    make_server_app(config, strategy, get_arrays(model), checkpoints)(grid, context)
    measured.append(evaluation.measure(model, tokenizer, rows, config, task, config.rounds))
    work.save_table("curves", history.curves())
    work.save_table("utility", with_weighted_means(pd.concat(measured), rows))
    return str(model.device)


@client_app.query()
def answer(message: Message, context: Context) -> Message:
    """Who this node is, and digests of what it would train: no text, and no weights."""
    with _named(context):
        refuse_telemetry()
        config = _config(message, context)
        rows = read_client(context.node_config["data"], context.node_config["partition-id"])
        mine = {
            "client": context.node_config["partition-id"],
            "clients": context.node_config["num-partitions"],
            "code": package_digest(),
            "model": _model(config),
            "rows": rows_digest(rows),
        }
        return Message(RecordDict({"config": ConfigRecord(mine)}), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One round of this node's client, on its own rows."""
    with _named(context):
        config, node = _config(message, context), context.node_config
        return _trainer(config.model_dump_json(), node["data"], node["partition-id"])(message, context)


@functools.cache  # once a process; Flower starts one for each message
def _trainer(parameters: str, folder: str, client: int) -> ClientApp:
    from fedmem.models.examples import encode
    from fedmem.models.loading import load_trainable
    from fedmem.train.federation import make_client_app

    config = TrainConfig.create(json.loads(parameters))
    model, tokenizer = load_trainable(config)
    rows = read_client(folder, client)
    own = rows[rows["split"] == "train"]
    return make_client_app(model, {client: encode(tokenizer, own, config.max_tokens, config.loss_on)}, config)


def read_parameters(text: str) -> TrainConfig:
    """The train stage's parameters from a mapping in YAML or from a YAML file; ConfigError says what is wrong."""
    values = read(Path(text).expanduser()) if text.endswith((".yaml", ".yml")) else parse(text, "parameters")
    if not isinstance(values, dict):
        raise ConfigError(f"parameters: got {text!r}; allowed is a mapping such as '{{rounds: 3}}', or a YAML file")
    config = TrainConfig.create(values)
    if not config.federates:
        raise ConfigError(f"algorithm: got {config.algorithm!r}, which federates nothing: run notebook 2 instead")
    return config


@contextlib.contextmanager
def _named(context: Context):
    """Errors inside name the client and bring their traceback to the server: Flower itself sends the last line."""
    try:
        yield
    except Exception as error:
        client = context.node_config.get("partition-id", "without a partition-id")
        raise FederatedError(f"client {client}:\n{''.join(traceback.format_exception(error))}") from error


def _config(message: Message, context: Context) -> TrainConfig:
    """The parameters that the server sent, with this machine's own model and device where the node names them."""
    own = {name: context.node_config[name] for name in ("model", "device") if name in context.node_config}
    return TrainConfig.create(json.loads(message.content["config"]["parameters"]) | own)


def _model(config: TrainConfig) -> str:
    """Digest of the model's folder here; "" for a hub id, which every machine fetches for itself."""
    digests = outside_digests(config)
    return digests.get("model", "")
