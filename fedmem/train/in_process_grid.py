"""Flower's Grid inside one process: clients train one after another, in order, without Ray and without a network.

It runs the same ServerApp, ClientApp and strategies as a deployed federation, by plain calls. All imports of Flower in
fedmem are in this file, because its telemetry must be disabled before the first import and because two imports are
private (`Run` and `TaskIdentity`; flwr is pinned for them). This module does not depend on models, training or
strategies.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

# set before the imports below: telemetry is decided when flwr is imported
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("FLWR_HOME", str(Path(tempfile.gettempdir()) / "fedmem-flower"))  # else ~/.flwr

# unused names are imported for the other modules of fedmem
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: F401
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies  # noqa: F401
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from tqdm import tqdm

RUN_ID = 1
SERVER_NODE = 1_000_000_000  # any id that no client has


class FederatedError(RuntimeError):
    """A federated run cannot continue; the message names the client and the round."""


def named(client: int) -> str:
    """Describe a client for messages; a negative id means the pooled rows of all clients."""
    return f"client {client}" if client >= 0 else "all clients' rows as one client"


def clipping(message: Message, context: Context, call_next) -> Message:
    """Clip the client's update if the server requests it; a mod for `@app.train(mods=[clipping])`.

    An update w − w_t with a norm above the one that the server sent is scaled down to it (McMahan et al. 2018,
    "FlatClip"), by Flower's fixed clipping.
    message: the server's; clipping is requested by `clipping_norm` in one of its config records.
    context: the client's. call_next: the app or the next mod, (message, context) -> reply.
    """
    asked = any("clipping_norm" in config for config in message.content.config_records.values())
    return fixedclipping_mod(message, context, call_next) if asked else call_next(message, context)


class ServerGrid(Grid):
    """What fedmem's two Grids have in common: who a message is from and to."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message from the server to one client.

        content: its records. message_type: Flower's type, such as "train". dst_node_id: the client's id.
        group_id: the round, as Flower writes it. ttl: seconds until it expires; None: Flower's default.
        """
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)


class InProcessGrid(ServerGrid):
    """A grid with one node per client, node id = client id, that answers messages lazily, in client order.

    A client trains when its answer is requested, so only one answer, as large as the model, exists at a time if the
    caller drops the one before.

    client_app: the app of every client; it finds its id in `context.node_config["partition-id"]`.
    clients: ids of the clients, at least one.
    rounds: number of rounds, >= 1, for the progress bar; None: no bar.

    A client that raises stops the run with a FederatedError whose cause is the client's exception.
    """

    def __init__(self, client_app: ClientApp, clients: Iterable[int], rounds: int | None = None):
        self.client_app = client_app
        self.rounds = rounds
        clients = list(clients)
        self.contexts = {client: self._context(client, len(clients)) for client in clients}
        self.waiting: dict[str, Message] = {}
        self.pushed = 0
        self.bar: tqdm | None = None
        self.set_run(Run.create_empty(RUN_ID))

    @staticmethod
    def _context(client: int, n_clients: int) -> Context:
        node = {"partition-id": client, "num-partitions": n_clients}
        return Context(run_id=RUN_ID, node_id=client, node_config=node, state=RecordDict(), run_config={})

    def serve(self, server_app: ServerApp) -> None:
        """Run a ServerApp to its end on this grid."""
        # again: another grid of this process may have set its own identity since
        self.set_run(self._run)
        context = Context(run_id=RUN_ID, node_id=SERVER_NODE, node_config={}, state=RecordDict(), run_config={})
        total = self.rounds and self.rounds * len(self.contexts)
        with tqdm(
            total=total, desc="client trainings", unit=" clients", mininterval=1, disable=total is None
        ) as self.bar:
            server_app(self, context)
        self.bar = None

    def set_run(self, run: Run) -> None:
        """Set the run and the sender of messages."""
        # Flower refuses to build a Message in a process without an identity
        self._run = run
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run.run_id, SERVER_NODE, 1

    @property
    def run(self) -> Run:
        """The run that the messages belong to."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all clients, which are always connected."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept messages and return their ids, in client order."""
        # sorted: strategies sample clients in random order, and floating-point sums depend on the order of answers
        return [self._take(message) for message in sorted(messages, key=lambda m: m.metadata.dst_node_id)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the answers to messages one by one: each client trains once, when its answer is requested."""
        for message_id in message_ids:
            if message_id in self.waiting:
                yield self._answer(self.waiting.pop(message_id))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Push messages and yield their answers; `timeout` is ignored, because a call ends with the client's answer."""
        return self.pull_messages(self.push_messages(messages))

    def _take(self, message: Message) -> str:
        self.pushed += 1
        message.metadata.__dict__["_message_id"] = str(self.pushed)  # a SuperLink sets it; it has no setter
        self.waiting[str(self.pushed)] = message
        return str(self.pushed)

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id
        server_round = message.content["config"].get("server-round", "?") if message.has_content() else "?"
        if self.bar is not None and not self.bar.n and server_round != "?":
            self.bar.update((server_round - 1) * len(self.contexts))  # rounds that an interrupted run has completed
        # raised instead of sent as an error reply: Flower's strategies would average the other clients' answers
        try:
            reply = self.client_app(message, self.contexts[client])
        except Exception as error:
            raise FederatedError(
                f"{named(client)}, round {server_round}: {type(error).__name__}: {error}\n"
                "The run stops here; checkpoints of earlier rounds are whole. The client's traceback is above."
            ) from error
        if self.bar is not None:
            self.bar.update()
        return reply
