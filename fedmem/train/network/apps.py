"""The two apps of a deployed federation, which `flwr run` starts: a server, and a client on every node.

They use the same functions as notebook 2: the server publishes the same stage as the notebook, from the same partition
and parameters, and a client trains as it does in one process, on the one folder that its node has. What Flower sends to
the nodes names these apps and contains no code, so a node runs the fedmem that is installed there.

Run configuration: `partition`, `parameters` (a mapping of parameters of the train stage in YAML, or the name of a
YAML file), `wait_seconds` (limit for the nodes to connect), `round_seconds` (limit for the answers of a round).
Node configuration: `partition-id` (the client), `num-partitions` (L), `data` (the client's folder), and, if they differ
on that machine, `model` and `device`.
"""

import contextlib
import functools
import json
import traceback
from pathlib import Path

from fedmem.config.parameter import ConfigError
from fedmem.config.stages import TrainConfig
from fedmem.config.yaml_files import parse, read
from fedmem.results.code_files import module_digest
from fedmem.results.identity import outside_digests
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

# one assignment each: Flower reads this file's source for them before it imports it
server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def serve(grid, context: Context) -> None:
    """Find the partition, check that every client is connected, train, and publish the train stage.

    Raises ConfigError when the parameters are not valid, StageError when the partition does not exist, and
    FederatedError when a client is missing, differs from the server, or fails.
    """
    refuse_telemetry()
    settings = context.run_config
    dealt = find_stage("partition", settings["partition"])
    work = begin_stage(read_parameters(settings["parameters"]), dealt)
    config = work.config
    # digests instead of rows: the server checks that each node has its client's rows without reading them from it
    digests = {int(client): rows_digest(own) for client, own in dealt.table("rows").groupby("client")}
    parameters = config.model_dump_json()
    expected = {
        "parameters": parameters,
        "clients": len(digests),
        # nodes run their own installation: different code could give other weights
        "code": module_digest(__name__),
        "model": outside_digests(config).get("model", ""),  # "" for a hub id, which every machine downloads itself
    }
    nodes = wait_for_clients(grid, expected, digests, settings["wait_seconds"])
    log.info("all clients are connected: %s, on nodes %s", sorted(nodes), [nodes[client] for client in sorted(nodes)])
    device = _train(ClientGrid(grid, nodes, parameters, settings["round_seconds"]), context, work, dealt)
    stage = work.publish(device=f"{device}, a federation of {len(nodes)} nodes")
    log.info("published %s", stage)


def _train(grid: ClientGrid, context: Context, work: Work, dealt: Stage) -> str:
    """Run notebook 2's steps on a grid of nodes; return the server's device."""
    import pandas as pd

    from fedmem.models.loading import load_trainable
    from fedmem.train import evaluation
    from fedmem.train.checkpoints import Checkpoints
    from fedmem.train.federation import client_datasets, make_server_app
    from fedmem.train.history import History, with_weighted_means
    from fedmem.train.strategies import make_strategy
    from fedmem.train.weights import get_arrays  # they import torch, which the roll call does not need

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
    """Answer the roll call: this node's client, and digests of its code, model and rows; no text, and no weights."""
    with _named(context):
        refuse_telemetry()
        config = _config(message, context)
        rows = read_client(context.node_config["data"], context.node_config["partition-id"])
        mine = {
            "client": context.node_config["partition-id"],
            "clients": context.node_config["num-partitions"],
            "code": module_digest(__name__),
            "model": outside_digests(config).get("model", ""),
            "rows": rows_digest(rows),
        }
        return Message(RecordDict({"config": ConfigRecord(mine)}), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one round of this node's client on its own rows."""
    with _named(context):
        config, node = _config(message, context), context.node_config
        return _trainer(config.model_dump_json(), node["data"], node["partition-id"])(message, context)


@functools.cache  # once per process (Flower starts one for each message); the cache needs parameters that can be hashed
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
    """Read the train stage's parameters from a mapping in YAML or the name of a YAML file.

    Raises ConfigError when they are not valid, or when their algorithm federates nothing.
    """
    values = read(Path(text).expanduser()) if text.endswith((".yaml", ".yml")) else parse(text, "parameters")
    if not isinstance(values, dict):
        raise ConfigError(f"parameters: got {text!r}; expected a mapping such as '{{rounds: 3}}', or a YAML file")
    config = TrainConfig.create(values)
    if not config.federates:
        raise ConfigError(f"algorithm: got {config.algorithm!r}, which federates nothing: run notebook 2 instead")
    return config


@contextlib.contextmanager
def _named(context: Context):
    """Raise an error inside as a FederatedError that names the client and contains the traceback."""
    # Flower sends only the last line of an error to the server, so the traceback goes into the message
    try:
        yield
    except Exception as error:
        client = context.node_config.get("partition-id", "without a partition-id")
        raise FederatedError(f"client {client}:\n{''.join(traceback.format_exception(error))}") from error


def _config(message: Message, context: Context) -> TrainConfig:
    """Return the parameters that the server sent, with the node's own model and device if it states them."""
    own = {name: context.node_config[name] for name in ("model", "device") if name in context.node_config}
    return TrainConfig.create(json.loads(message.content["config"]["parameters"]) | own)
