"""Our strategies as strategies of Flower's message API, for a server that runs Flower's own loop.

`strategy.start(grid, initial_arrays, num_rounds)` of Flower calls `configure_train` and `aggregate_train` in
turn. `serve` is the alternative: this library's own loop over the grid, with the server's state on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as Base

from equipoise.federated.flower.grid import GridExchange
from equipoise.federated.flower.wire import read_params, read_reply, to_record
from equipoise.federated.messages import Request
from equipoise.federated.server import (
    Exchange,
    FederationHistory,
    RoundRequests,
    Strategy,
    pick_clients,
    picked_per_round,
    run_rounds,
    usable_replies,
)
from equipoise.methods.base import Parameters

__all__ = ["FlowerStrategy", "serve"]


class FlowerStrategy(Base):
    """A strategy of this library in Flower's loop. Weights are equal; clients are never evaluated.

    Args:
        strategy: the server's arithmetic.
        clients: P, how many there are.
        clients_per_round: picked at random each round; all when None.
        seed: of that choice.
        timeout: seconds that the clients have for a query; Flower's loop has a `timeout` of its own
            for the training.
    """

    def __init__(
        self,
        strategy: Strategy,
        clients: int,
        *,
        clients_per_round: int | None = None,
        seed: int = 0,
        timeout: float = 3600.0,
    ) -> None:
        self.strategy, self._clients = strategy, clients
        self._count = picked_per_round(clients, clients_per_round)
        self._seed, self._timeout = seed, timeout
        self._exchange: GridExchange | None = None
        # Between `configure_train` and `aggregate_train`: the round under way, and what it has asked.
        self._under_way: tuple[RoundRequests, Request] | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round; queries the round's clients first where the strategy does."""
        if self._exchange is None:
            self._exchange = GridExchange(grid, self._clients, timeout=self._timeout)
            self._exchange.wait()
        clients = list(pick_clients(self._clients, self._count, self._seed, server_round))
        requests = self.strategy.round(server_round, read_params(arrays))
        request = next(requests)
        while request.kind != "train":
            found = self._exchange.send(request, clients)
            replies, _ = usable_replies(self.strategy, request, clients, found)
            clients = list(replies)
            request = requests.send(list(replies.values()))
        self._under_way = requests, request
        return self._exchange.messages(request, clients)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next global model from those that answered; None, that is the old one, if nobody did."""
        assert self._exchange is not None
        assert self._under_way is not None
        requests, request = self._under_way
        answers = self._exchange.by_client(replies)
        found = {index: read_reply(message) for index, message in answers.items()}
        usable, _ = usable_replies(self.strategy, request, sorted(found), found)
        try:
            requests.send(list(usable.values()))
        except StopIteration as finished:
            params = finished.value
        else:
            raise TypeError(
                f"strategy={type(self.strategy).__name__} sends a request after the training of its round, "
                "which Flower's loop cannot carry: run it with serve"
            )
        metrics = MetricRecord({**self.strategy.metrics(), "answered": len(usable)})
        return (to_record(params) if usable else None), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []  # a client's accuracy on its private records would be a release

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        """Nothing to add to what Flower says."""


def serve(
    grid: Grid,
    strategy: Strategy,
    clients: int,
    params: Parameters,
    rounds: int,
    *,
    timeout: float = 3600.0,
    wait: float = 60.0,
    make_exchange: Callable[[GridExchange], Exchange] = lambda nodes: nodes,
    **options: Any,
) -> FederationHistory:
    """Run the rounds over a grid, in the main function of a server app.

    Args:
        grid: of the server app.
        strategy, params, rounds: as for `run_rounds`.
        clients: P.
        timeout: seconds that clients have for an answer.
        wait: seconds to wait for the clients before the first round; then it goes on with those that are
            there.
        make_exchange: what the rounds run over, made of the grid's; the grid's itself by default.
        options: further arguments of `run_rounds`; a server that restarts with its `folder` goes on after its
            last round.

    Raises:
        ValueError: as `run_rounds`.
    """
    nodes = GridExchange(grid, clients, timeout=timeout)
    nodes.wait(seconds=wait)
    return run_rounds(strategy, make_exchange(nodes), params, rounds, **options)
