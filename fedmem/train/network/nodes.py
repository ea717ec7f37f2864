"""A Grid for a real federation in which nodes have their client's id, every client takes part, and rows are verified.

Flower draws a node's id at random and averages the answers of the nodes that are present. Here the server first asks
each node which client it is. It starts only when every client is present exactly once, with the server's code, model
and rows. Then it addresses nodes as the in-process Grid does: by client, in client order. This module does not depend
on models, strategies or stage folders.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping

from fedmem.train.in_process_grid import ConfigRecord, FederatedError, Grid, Message, RecordDict, ServerGrid

log = logging.getLogger("flwr.fedmem")  # shown by `flwr run --stream`
log.setLevel(logging.INFO)  # a level of its own, because Flower's logger is silenced during training

POLL_SECONDS = 0.5  # between requests for answers; short beside a round, long beside a request
ABSENT = (3, 4, 5)  # Flower's error codes for a message or a node that is gone
SAME = ("code", "model", "clients")  # values of a node's answer that must equal the server's


def refuse_telemetry() -> None:
    """Raise FederatedError when Flower was imported with telemetry on, before fedmem could switch it off.

    This happens when one of Flower's own commands starts the process.
    """
    from flwr.supercore.telemetry import FLWR_TELEMETRY_ENABLED

    if FLWR_TELEMETRY_ENABLED == "1":
        raise FederatedError("Flower's telemetry is on: set FLWR_TELEMETRY_ENABLED=0 before Flower's commands start.")


def wait_for_clients(grid: Grid, expected: Mapping, rows: Mapping[int, str], seconds: float) -> dict[int, int]:
    """Ask every node which client it is until all clients are present; return {client: node id}, clients 0 … L − 1.

    grid: Flower's Grid of the run.
    expected: what all nodes must answer, `code` (the package's digest), `model` (its digest, "" for a hub id) and
        `clients` (L), and the `parameters` that they are sent.
    rows: {client: digest of its training rows}, for all L clients.
    seconds: how long to wait for all of them.
    Raises FederatedError when clients are missing after that time, and at once when two nodes have the same client, a
    client is not one of these, or a node has other code, another model or other rows.
    """
    asked, nodes, seen, end = {}, {}, set(), time.monotonic() + seconds
    question = RecordDict({"config": ConfigRecord(dict(expected))})
    while len(nodes) < len(rows):
        if time.monotonic() > end:
            missing = ", ".join(str(client) for client in rows if client not in nodes)
            raise FederatedError(
                f"clients that did not answer within {seconds:g} s: {missing} (present: {sorted(nodes)}; connected "
                f"nodes: {len(seen)}). Start the missing nodes, or raise wait_seconds."
            )
        # each node is asked once; the list grows, since nodes may connect while the server waits
        new = [node for node in grid.get_node_ids() if node not in seen]
        asked |= zip(grid.push_messages([Message(question, node, "query") for node in new]), new, strict=True)
        seen |= set(new)
        for reply in grid.pull_messages(list(asked)) if asked else ():
            node = asked.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.error.code in ABSENT:
                continue  # a node that went away: its client is missing unless another node is that client
            client = _client(node, reply, expected, rows)
            if client in nodes:
                raise FederatedError(f"client {client}: two nodes claim to be this client; stop one of them.")
            nodes[client] = node
        time.sleep(POLL_SECONDS)
    return nodes


def _client(node: int, reply: Message, expected: Mapping, rows: Mapping[int, str]) -> int:
    """Return the client of a node; raises FederatedError when the node may not take part."""
    if reply.has_error():
        raise FederatedError(f"node {node} failed before the first round: {reply.error.reason}")
    answer = reply.content["config"]
    client = answer["client"]
    if client not in rows:
        raise FederatedError(f"partition-id: got {client}; the partition has clients 0 to {len(rows) - 1}")
    for name in SAME:
        if answer[name] != expected[name]:
            raise FederatedError(
                f"client {client}: its {name} is {answer[name]}, the server's {expected[name]}; "
                "install the same fedmem and the same model everywhere, and set the same number of clients."
            )
    if answer["rows"] != rows[client]:
        raise FederatedError(
            f"client {client}: its training rows are not those of the partition: `fedmem split` that partition again."
        )
    return client


class ClientGrid(ServerGrid):
    """A deployment's Grid in which a node's id is its client's id, as in the in-process Grid.

    grid: Flower's own. nodes: {client: node id}. parameters: sent with every message, under that name.
    seconds: how long to wait for all answers of a round. A client that fails, or does not answer in that time, stops
    the run with a FederatedError that names it.
    """

    def __init__(self, grid: Grid, nodes: Mapping[int, int], parameters: str, seconds: float):
        self.grid, self.nodes = grid, nodes
        self.parameters, self.seconds = parameters, seconds
        self.asked: dict[str, int] = {}
        self.server_round = 0

    def set_run(self, run) -> None:
        """Set the run that messages belong to."""
        self.grid.set_run(run)

    @property
    def run(self):
        """The run that the messages belong to."""
        return self.grid.run

    def get_node_ids(self) -> Iterable[int]:
        """Return all clients. One that has disconnected since the roll call is noticed when it does not answer."""
        return sorted(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to the clients' nodes; return the messages' ids."""
        messages = list(messages)
        clients = [message.metadata.dst_node_id for message in messages]
        for message, client in zip(messages, clients, strict=True):
            message.metadata.dst_node_id = self.nodes[client]
            message.content["config"]["parameters"] = self.parameters
            self.server_round = message.content["config"].get("server-round", self.server_round)
        ids = list(self.grid.push_messages(messages))
        if len(ids) != len(clients) or None in ids:
            raise FederatedError(f"messages to clients {clients} could not be sent. See the SuperLink's log.")
        self.asked |= zip(ids, clients, strict=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers that have arrived, each once, with the client's id as sender.

        Raises FederatedError when a client has failed.
        """
        replies = list(self.grid.pull_messages(list(message_ids)))
        for reply in replies:
            client = self.asked.pop(reply.metadata.reply_to_message_id)
            reply.metadata.__dict__["_src_node_id"] = client  # it has no setter
            if reply.has_error():
                raise FederatedError(
                    f"client {client}, round {self.server_round}: failed with Flower's code {reply.error.code}: "
                    f"{reply.error.reason}\nThe run stops here; see the log of that client's node as well."
                )
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Push messages, then yield the answers in client order.

        timeout: ignored; it is Flower's default of an hour, and the grid has its own `seconds`.
        Answers are fetched as they arrive, so that a failed client ends the run at once, even if other clients are
        still training. Raises FederatedError when a client fails or does not answer in time.
        """
        order, end = list(self.push_messages(messages)), time.monotonic() + self.seconds
        order.sort(key=self.asked.get)  # a sum of floats depends on its order: always by client
        waiting, come = set(order), {}
        for message_id in order:
            while message_id in waiting:
                for reply in self.pull_messages(waiting):
                    come[reply.metadata.reply_to_message_id] = reply
                    log.info("round %s: client %s has answered", self.server_round, reply.metadata.src_node_id)
                waiting -= come.keys()
                if message_id in waiting:
                    self._check_time(end, waiting)
                    time.sleep(POLL_SECONDS)
            yield come.pop(message_id)

    def _check_time(self, end: float, waiting: set[str]) -> None:
        if time.monotonic() > end:
            late = ", ".join(str(client) for client in sorted(self.asked[message_id] for message_id in waiting))
            raise FederatedError(
                f"round {self.server_round}: no answer within {self.seconds:g} s from clients: {late}. See the logs of "
                "their nodes, or raise round_seconds."
            )
