"""Flower's Grid inside one process: clients train one after another, in order, without Ray and without a network.

The same ServerApp, ClientApp and strategies that a real federation runs are driven here by plain calls. What fedmem
uses of Flower is imported in this file, because its telemetry must be switched off before the first import
and because two imports are private (`Run` and `TaskIdentity`; flwr is pinned for their sake). It knows nothing of
models, training or strategies.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("FLWR_HOME", str(Path(tempfile.gettempdir()) / "fedmem-flower"))  # else ~/.flwr

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import Result
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from tqdm import tqdm

__all__ = [
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ConfigRecord",
    "Context",
    "FederatedError",
    "Grid",
    "InProcessGrid",
    "Message",
    "MetricRecord",
    "RecordDict",
    "Result",
    "ServerApp",
    "clipping",
    "named",
    "strategies",
]

RUN_ID = 1
SERVER_NODE = 1_000_000_000  # any id that no client has


class FederatedError(RuntimeError):
    """A federated run that must not go on; the message names the client and the round."""


def named(client: int) -> str:
    """A client in words; a negative id stands for the rows of all clients as those of one."""
    return f"client {client}" if client >= 0 else "all clients' rows as one client"


def clipping(message: Message, context: Context, call_next) -> Message:
    """A mod for `@app.train(mods=[clipping])`: Flower's fixed clipping of the update, where the server asks for it.

    The update w − w_t is scaled to the norm that the server sent, if it is larger (McMahan et al. 2018, "FlatClip").
    """
    asked = any("clipping_norm" in config for config in message.content.config_records.values())
    return fixedclipping_mod(message, context, call_next) if asked else call_next(message, context)


class InProcessGrid(Grid):
    """One node per client, node id = client id. A message is answered when its answer is asked for, in client order.

    So at no time does more than one answer have to exist, if whoever asks lets go of the one before.

    client_app: what every client runs; it finds its id in `context.node_config["partition-id"]`.
    clients: their ids, at least one. rounds: for the length of the progress bar; None shows no bar.
    A client that raises stops the run with a FederatedError whose cause is the client's own exception.
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
        self.set_run(self._run)
        context = Context(run_id=RUN_ID, node_id=SERVER_NODE, node_config={}, state=RecordDict(), run_config={})
        total = self.rounds and self.rounds * len(self.contexts)
        with tqdm(
            total=total, desc="client trainings", unit=" clients", mininterval=1, disable=total is None
        ) as self.bar:
            server_app(self, context)
        self.bar = None

    def set_run(self, run: Run) -> None:
        """Say who sends: Flower refuses to build a Message in a process that has no identity."""
        self._run = run
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run.run_id, SERVER_NODE, 1

    @property
    def run(self) -> Run:
        """The run that the messages belong to."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message from the server to one client."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """All clients: they are always there."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages to be answered; return their ids, in client order."""
        return [self._take(message) for message in sorted(messages, key=lambda m: m.metadata.dst_node_id)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """The answers to messages, one after another: each client trains when its answer is asked for, once."""
        for message_id in message_ids:
            if message_id in self.waiting:
                yield self._answer(self.waiting.pop(message_id))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Push and pull. `timeout` has no meaning here: a call ends when the client has answered."""
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
            self.bar.update((server_round - 1) * len(self.contexts))  # rounds that an interrupted run made
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
