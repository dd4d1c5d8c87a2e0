"""The clients behind a Flower grid, as an `Exchange`: the driver's rounds over real or simulated nodes.

Nodes introduce themselves with their client's number, once and again while a client is missing: one whose
node died comes back under another node's name and goes on. Nodes that nobody needs are not waited for.
Clients that are not there, or answer too late, are out of the round.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from equipoise import _validate
from equipoise.federated.flower.forward import CLIENT, NUMBER
from equipoise.federated.flower.wire import MESSAGE_TYPES, read_reply, write_request
from equipoise.federated.messages import Reply, Request
from equipoise.federated.server import FederationHistory, Strategy, run_rounds
from equipoise.methods.base import Parameters
from equipoise.training.record_source import NoAnswerError

#: Seconds that nodes have at most to introduce themselves.
INTRODUCTION = 60.0


class GridExchange:
    """An `Exchange` with the nodes of a Flower grid.

    Args:
        grid: of the server app.
        clients: P, how many there are; their numbers are 0 to P - 1.
        timeout: seconds that the clients have for an answer; new nodes have a minute at most for their
            introduction. Clients that take longer are out of the round.

    Sending raises `NoAnswerError` where two nodes say that they are the same client.
    """

    def __init__(self, grid: Grid, clients: int, *, timeout: float = 3600.0) -> None:
        _validate.count(clients=clients)
        _validate.positive("in seconds", timeout=timeout)
        self._grid, self._clients, self._timeout = grid, clients, timeout
        self._nodes: dict[int, int] = {}

    def __len__(self) -> int:
        return self._clients

    def wait(self, seconds: float = 60.0, clients: Iterable[int] | None = None) -> None:
        """Wait until these clients, all by default, are there, or the time is over."""
        end, needed = time.monotonic() + seconds, range(self._clients) if clients is None else list(clients)
        while not self._are_known(needed) and time.monotonic() < end:
            time.sleep(0.2)

    def send(self, request: Request, clients: Sequence[int]) -> dict[int, Reply | str]:
        """Each client's reply; clients that did not answer are not in it."""
        contents = dict.fromkeys(clients, write_request(request))
        replies = self.receive(self.address(MESSAGE_TYPES[request.kind], contents))
        return {index: read_reply(message) for index, message in replies.items()}

    def address(self, message_type: str, contents: Mapping[int, RecordDict]) -> list[Message]:
        """A message to each of these clients that is there."""
        self._are_known(contents)
        return [
            Message(content, dst_node_id=self._nodes[index], message_type=message_type)
            for index, content in contents.items()
            if index in self._nodes
        ]

    def receive(self, messages: Sequence[Message]) -> dict[int, Message]:
        """Send messages and wait: client -> its answer."""
        answers = self._grid.send_and_receive(messages, timeout=self._timeout) if messages else []
        numbers = {node: index for index, node in self._nodes.items()}
        senders = ((numbers.get(answer.metadata.src_node_id), answer) for answer in answers)
        return {index: answer for index, answer in senders if index is not None}

    def _are_known(self, needed: Iterable[int]) -> bool:
        """Forget the nodes that are gone, and look for these clients among new ones; whether all are known.

        Raises:
            NoAnswerError: two nodes say that they are the same client.
        """
        there = set(self._grid.get_node_ids())
        self._nodes = {index: node for index, node in self._nodes.items() if node in there}
        if all(index in self._nodes for index in needed):
            return True
        found = self._introductions(there - set(self._nodes.values()))
        # A node that died is listed for a while: whoever had a number that a new one names answers again.
        had = {self._nodes[index] for index in found.values() if index in self._nodes}
        found |= self._introductions(had)
        nodes = {index: node for node, index in found.items()}
        for node, index in found.items():
            if nodes[index] != node:
                first, second = sorted((node, nodes[index]))
                raise NoAnswerError(
                    f"the nodes {first} and {second} both say that they are client {index}: give each "
                    "a partition-id of its own"
                )
        self._nodes |= nodes
        return all(index in self._nodes for index in needed)

    def _introductions(self, nodes: Iterable[int]) -> dict[int, int]:
        """node -> its client, of those that answer."""
        hello = [
            Message(RecordDict(), dst_node_id=node, message_type="query.introduce") for node in sorted(nodes)
        ]
        limit = min(self._timeout, INTRODUCTION)
        replies = self._grid.send_and_receive(hello, timeout=limit) if hello else []
        found = {reply.metadata.src_node_id: _introduced(reply) for reply in replies}
        return {node: index for node, index in found.items() if index is not None and index < self._clients}


def _introduced(reply: Message) -> int | None:
    record = None if reply.has_error() else reply.content.get(CLIENT)
    number = record.get(NUMBER) if isinstance(record, ConfigRecord) else None
    return number if isinstance(number, int) and number >= 0 else None


def serve(
    grid: Grid,
    strategy: Strategy,
    clients: int,
    params: Parameters,
    rounds: int,
    *,
    timeout: float = 3600.0,
    wait: float = 60.0,
    **options: Any,
) -> FederationHistory:
    """Run the rounds over a grid, in the main function of a server app.

    Args:
        grid: of the server app.
        strategy, params, rounds: as for `run_rounds`.
        clients: P.
        timeout: seconds that clients have for an answer.
        wait: seconds to wait for the clients of the first round here; then it goes on with those there.
            Later rounds begin with whoever is there: to wait for one that joins, block in `on_round`.
        options: further arguments of `run_rounds`; a server that restarts with its `folder` goes on after its
            last round.

    Raises:
        ValueError: as `run_rounds`.
    """
    nodes = GridExchange(grid, clients, timeout=timeout)
    members, has_begun = options.pop("members", None), False

    def there(number: int) -> Iterable[int]:
        nonlocal has_begun
        found = list(range(clients) if members is None else members(number))
        if not has_begun:  # a server that goes on begins with another round than the first
            nodes.wait(wait, found)
            has_begun = True
        return found

    return run_rounds(strategy, nodes, params, rounds, members=there, **options)
