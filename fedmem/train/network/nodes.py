"""A real federation as strategies see it: nodes that go by their client's id, all of them there, each with its rows.

Flower draws a node's id at random and averages whoever answers. Here the server asks first who is there, refuses to
begin unless every client is, once, with the server's code, model and rows, and then speaks to nodes as the in-process
Grid does: by client, in client order. It knows nothing of models, strategies or stage folders.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping

from fedmem.train.in_process_grid import ConfigRecord, FederatedError, Grid, Message, RecordDict

log = logging.getLogger("flwr.fedmem")  # shown by `flwr run --stream`
log.setLevel(logging.INFO)  # of its own, for Flower is silenced while it trains

POLL_SECONDS = 0.5
ABSENT = (3, 4, 5)  # Flower's error codes for a message or a node that is gone
SAME = ("code", "model", "clients")  # what a node must answer as the server would


def refuse_telemetry() -> None:
    """FederatedError where one of Flower's own commands imported it, before fedmem could switch its telemetry off."""
    from flwr.supercore.telemetry import FLWR_TELEMETRY_ENABLED

    if FLWR_TELEMETRY_ENABLED == "1":
        raise FederatedError("Flower's telemetry is on: set FLWR_TELEMETRY_ENABLED=0 before Flower's commands start.")


def wait_for_clients(grid: Grid, expected: Mapping, rows: Mapping[int, str], seconds: float) -> dict[int, int]:
    """Ask every node who it is until all clients are there: {client: node id}, clients 0 … L − 1.

    expected: what all nodes must answer, `code` (the package's digest), `model` (its digest, "" for a hub id) and
    `clients` (L), besides `parameters`, which they are sent. rows: {client: digest of its training rows}.
    seconds: how long to wait for them. FederatedError names the clients that are missing after that, and at once a
    client that is claimed twice, is not one of these, or has other code, another model or other rows.
    """
    asked, nodes, seen, end = {}, {}, set(), time.monotonic() + seconds
    question = RecordDict({"config": ConfigRecord(dict(expected))})
    while len(nodes) < len(rows):
        if time.monotonic() > end:
            missing = ", ".join(str(client) for client in rows if client not in nodes)
            raise FederatedError(
                f"clients that did not answer within {seconds:g} s: {missing} (there are: {sorted(nodes)}; nodes that "
                f"are connected: {len(seen)}). Start the missing nodes, or raise wait_seconds."
            )
        new = [node for node in grid.get_node_ids() if node not in seen]
        asked |= zip(grid.push_messages([Message(question, node, "query") for node in new]), new, strict=True)
        seen |= set(new)
        for reply in grid.pull_messages(list(asked)) if asked else ():
            node = asked.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.error.code in ABSENT:
                continue  # a node that went away: its client is missing unless another node is that client
            client = _client(node, reply, expected, rows)
            if client in nodes:
                raise FederatedError(f"client {client}: two nodes say they are it; end one of them.")
            nodes[client] = node
        time.sleep(POLL_SECONDS)
    return nodes


def _client(node: int, reply: Message, expected: Mapping, rows: Mapping[int, str]) -> int:
    """Who a node is; FederatedError where it may not take part."""
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
                "install the same fedmem and the same model everywhere, and count the same clients."
            )
    if answer["rows"] != rows[client]:
        raise FederatedError(
            f"client {client}: its training rows are not those of the partition: `fedmem split` that partition again."
        )
    return client


class ClientGrid(Grid):
    """A deployment's Grid in which a node's id is its client's id, as in the in-process one.

    grid: Flower's own. nodes: {client: node id}. parameters: sent with every message, under that name.
    seconds: how long to wait for all answers of a round. A client that fails, or that does not answer in that time,
    stops the run with a FederatedError that names it.
    """

    def __init__(self, grid: Grid, nodes: Mapping[int, int], parameters: str, seconds: float):
        self.grid, self.nodes = grid, nodes
        self.parameters, self.seconds = parameters, seconds
        self.asked: dict[str, int] = {}
        self.server_round = 0

    def set_run(self, run) -> None:
        """The run that messages belong to."""
        self.grid.set_run(run)

    @property
    def run(self):
        """The run that the messages belong to."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message from the server to one client."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """All clients. One that has gone since the roll call is found out when it does not answer."""
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
        """The answers that have come, each handed out once, as from the client's id."""
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
        """Push, then the answers in client order. They are fetched as they come, so that a failed client ends the run
        at once, whoever else is still training.

        `timeout` is Flower's guess, an hour, and is not heeded: the time is the grid's own.
        """
        order, end = list(self.push_messages(messages)), time.monotonic() + self.seconds
        order.sort(key=self.asked.get)
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
