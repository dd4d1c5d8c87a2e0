"""The clients behind a Flower grid, as an `Exchange`: the driver's rounds over real or simulated nodes.

Nodes introduce themselves with their client's number, once and again whenever a new node appears: a client
whose node died comes back under another node's name and goes on. Who is not there, or answers too late, is
out of the round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from equipoise.federated.flower.wire import ANSWER, read_reply, read_values, write_request
from equipoise.federated.secure_exchange import Request
from equipoise.federated.strategies import Reply
from equipoise.methods.base import Parameters

__all__ = ["GridExchange"]


class GridExchange:
    """An `Exchange` with the nodes of a Flower grid.

    Args:
        grid: of the server app.
        clients: P, how many there are; their numbers are 0 to P - 1.
        timeout: seconds that the clients have for an answer, and new nodes for their introduction; who takes
            longer is out of the round.
    """

    def __init__(self, grid: Grid, clients: int, *, timeout: float = 3600.0) -> None:
        if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
            raise ValueError(f"clients={clients!r}: give a whole number of at least 1")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0")
        self._grid, self._clients, self._timeout = grid, clients, timeout
        self._nodes: dict[int, int] = {}

    def __len__(self) -> int:
        return self._clients

    def wait(self, least: int | None = None, seconds: float = 60.0) -> int:
        """Wait until `least` clients are there (all when None), or the time is over; how many there are."""
        end = time.monotonic() + seconds
        while self._refresh() < (self._clients if least is None else least) and time.monotonic() < end:
            time.sleep(0.2)
        return len(self._nodes)

    def ask(
        self, present: Sequence[int], number: int, params: Parameters, square_limit: float
    ) -> dict[int, Reply | str]:
        """The clients' answers to the radius query."""
        content = write_request(number, params, {"square_limit": square_limit})
        found = self._exchange(self.messages(present, "query.radius", content))
        return {p: r if isinstance(r, Reply | str) else "an answer of another kind" for p, r in found.items()}

    def train(
        self, present: Sequence[int], number: int, params: Parameters, instructions: Mapping[str, Any]
    ) -> dict[int, dict[str, Tensor] | str]:
        """The clients' parameters after the local steps."""
        content = write_request(number, params, instructions)
        found = self._exchange(self.messages(present, "train", content))
        return {p: r if isinstance(r, dict | str) else "an answer of another kind" for p, r in found.items()}

    def relay(self, number: int, requests: Mapping[int, Request]) -> dict[int, dict[str, Any] | str]:
        """The clients' answers to messages of secure sums, each client's its own."""
        self._refresh()
        messages = [
            Message(
                write_request(number, params, values),
                dst_node_id=self._nodes[index],
                message_type="query.secure",
            )
            for index, (params, values) in requests.items()
            if index in self._nodes
        ]
        replies = self._grid.send_and_receive(messages, timeout=self._timeout) if messages else []
        numbers = {node: index for index, node in self._nodes.items()}
        known = [reply for reply in replies if reply.metadata.src_node_id in numbers]
        return {numbers[reply.metadata.src_node_id]: read_values(reply) for reply in known}

    def messages(self, present: Sequence[int], kind: str, content: RecordDict) -> list[Message]:
        """A message to each of these clients that is there."""
        self._refresh()
        return [
            Message(content, dst_node_id=self._nodes[index], message_type=kind)
            for index in present
            if index in self._nodes
        ]

    def answers(self, replies: Sequence[Message]) -> dict[int, Reply | dict[str, Tensor] | str]:
        """client -> its answer, in the order of the clients."""
        numbers = {node: index for index, node in self._nodes.items()}
        found = {
            numbers[reply.metadata.src_node_id]: read_reply(reply)
            for reply in replies
            if reply.metadata.src_node_id in numbers
        }
        return dict(sorted(found.items()))

    def _exchange(self, messages: list[Message]) -> dict[int, Reply | dict[str, Tensor] | str]:
        replies = self._grid.send_and_receive(messages, timeout=self._timeout) if messages else []
        return self.answers(list(replies))

    def _refresh(self) -> int:
        """Forget the nodes that are gone, and let new ones introduce themselves; how many are known."""
        there = set(self._grid.get_node_ids())
        self._nodes = {index: node for index, node in self._nodes.items() if node in there}
        new = sorted(there - set(self._nodes.values()))
        if new:
            hello = [Message(RecordDict(), dst_node_id=node, message_type="query.introduce") for node in new]
            for reply in self._grid.send_and_receive(hello, timeout=self._timeout):
                index = _introduced(reply)
                if index is not None and index < self._clients:
                    self._nodes[index] = reply.metadata.src_node_id
        return len(self._nodes)


def _introduced(reply: Message) -> int | None:
    answer = None if reply.has_error() else reply.content.get(ANSWER)
    number = answer.get("client") if isinstance(answer, ConfigRecord) else None
    return number if isinstance(number, int) and number >= 0 else None
