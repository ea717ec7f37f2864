"""Flower's Grid inside one process: clients train one after another, in order, without Ray and without a network.

The same ServerApp, ClientApp and strategies that a real federation runs are driven here by plain calls. All of
fedmem's imports of Flower stand in this file, because its telemetry must be switched off before the first of them
and because two of them are private (`Run` and `TaskIdentity`; flwr is pinned for their sake). It knows nothing of
models, training or strategies.
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("FLWR_HOME", str(Path(tempfile.gettempdir()) / "fedmem-flower"))  # else ~/.flwr

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx, Result
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from tqdm import tqdm

__all__ = [
    "ArrayRecord",
    "ClientApp",
    "ConfigRecord",
    "Context",
    "FedAvg",
    "FedProx",
    "FederatedError",
    "Grid",
    "InProcessGrid",
    "Message",
    "MetricRecord",
    "RecordDict",
    "Result",
    "ServerApp",
]

RUN_ID = 1
SERVER_NODE = 1_000_000_000  # any id that no client has: clients are 0 … L − 1


class FederatedError(RuntimeError):
    """A federated run that must not go on; the message names the client and the round."""


class InProcessGrid(Grid):
    """One node per client, node id = client id. Messages are answered in client order, whatever order they come in.

    client_app: what every client runs; it finds its id in `context.node_config["partition-id"]`.
    n_clients: the number of clients, ≥ 1. rounds: for the length of the progress bar; None shows no bar.
    A client that raises stops the run with a FederatedError whose cause is the client's own exception.
    """

    def __init__(self, client_app: ClientApp, n_clients: int, rounds: int | None = None):
        self.client_app = client_app
        self.rounds = rounds
        self.contexts = {client: self._context(client, n_clients) for client in range(n_clients)}
        self.replies: dict[str, Message] = {}
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
        """Have each message answered, in client order; return the messages' ids."""
        return [self._answer(message) for message in sorted(messages, key=lambda m: m.metadata.dst_node_id)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to messages, each handed out once."""
        return [self.replies.pop(message_id) for message_id in message_ids if message_id in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push and pull. `timeout` has no meaning here: a call ends when the client has answered."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> str:
        client = message.metadata.dst_node_id
        self.pushed += 1
        message.metadata.__dict__["_message_id"] = str(self.pushed)  # a SuperLink sets it; it has no setter
        try:
            self.replies[str(self.pushed)] = self.client_app(message, self.contexts[client])
        except Exception as error:
            server_round = message.content["config"].get("server-round", "?") if message.has_content() else "?"
            raise FederatedError(
                f"client {client}, round {server_round}: {type(error).__name__}: {error}\n"
                "The run stops here; checkpoints of earlier rounds are whole. The client's traceback is above."
            ) from error
        if self.bar is not None:
            self.bar.update()
        return str(self.pushed)
