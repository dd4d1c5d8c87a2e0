"""Rounds in one process: a server and its clients without a network, for tests and small runs.

Each round a public generator picks the clients. Those that refuse or cannot be reached, before the query or
in the middle of the round, are left out of it; the others' answers make the next model. If none answers the
model stays. What a client released before it dropped out is in its ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.federated.errors import Refused
from equipoise.federated.strategies import Reply, Strategy
from equipoise.methods.base import Parameters

__all__ = ["History", "Participant", "Round", "simulate"]

# What takes a client out of a round without ending the training.
ABSENT = (Refused, ConnectionError, TimeoutError)


class Participant(Protocol):
    """What the driver needs of a client; see `Client`."""

    @property
    def radius_noise(self) -> float:
        """Standard deviation of an answer of `ask`."""
        ...

    def ask(self, round_number: int, params: Parameters, square_limit: float) -> float:
        """The noised mean square."""
        ...

    def train(
        self, round_number: int, params: Parameters, clip_norm: float | None = None
    ) -> dict[str, Tensor]:
        """The parameters after the local steps."""
        ...


@dataclass(frozen=True)
class Round:
    """What the server saw of a round.

    Attributes:
        number: from 1.
        asked: clients that were picked.
        answered: clients whose parameters made the next model.
        absent: client -> why it is not among them.
        metrics: the strategy's public numbers, and those of `evaluate`.
        bytes_down, bytes_up: of parameters and numbers sent to and by the clients.
    """

    number: int
    asked: tuple[int, ...]
    answered: tuple[int, ...]
    absent: Mapping[int, str]
    metrics: Mapping[str, float]
    bytes_down: int
    bytes_up: int


@dataclass
class History:
    """The rounds, and the global model after the last.

    Attributes:
        params: named tensors.
        rounds: in order.
    """

    params: dict[str, Tensor]
    rounds: list[Round] = field(default_factory=list)


def simulate(
    strategy: Strategy,
    clients: Sequence[Participant],
    params: Parameters,
    rounds: int,
    *,
    clients_per_round: int | None = None,
    seed: int = 0,
    first_round: int = 1,
    evaluate: Callable[[Parameters], Mapping[str, float]] | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> History:
    """Run rounds of federated training.

    Args:
        strategy: the server's side.
        clients: the data owners.
        params: the global model to begin with.
        rounds: how many.
        clients_per_round: picked at random each round; all when None. It amplifies nothing: the server knows
            who took part.
        seed: of the public choice of clients; round r's depends on (seed, r) alone.
        first_round: number of the first round, to go on after a restart.
        evaluate: params -> public numbers, from public data.
        on_round: called after every round.

    Raises:
        ValueError: numbers that make no sense.
    """
    for name, value in (("rounds", rounds), ("first_round", first_round)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
    count = len(clients) if clients_per_round is None else clients_per_round
    if not 1 <= count <= len(clients):
        raise ValueError(f"clients_per_round={clients_per_round!r}: give 1 to {len(clients)} or None")
    history = History({name: value.detach().clone() for name, value in params.items()})
    size = sum(value.numel() * value.element_size() for value in params.values())
    for number in range(first_round, first_round + rounds):
        asked = _pick(len(clients), count, seed, number)
        exchange = _Exchange(clients, asked, number, history.params, size)
        instructions = strategy.instructions(exchange.ask)
        answers = exchange.train(instructions)
        if answers:
            history.params = strategy.aggregate(history.params, list(answers.values()))
        metrics = dict(strategy.metrics())
        if evaluate is not None:
            metrics |= evaluate(history.params)
        done = Round(
            number, asked, tuple(answers), exchange.absent, metrics, exchange.bytes_down, exchange.bytes_up
        )
        history.rounds.append(done)
        if on_round is not None:
            on_round(done)
    return history


class _Exchange:
    """The messages of one round."""

    def __init__(
        self, clients: Sequence[Participant], asked: Sequence[int], number: int, params: Parameters, size: int
    ) -> None:
        self._clients, self._present = clients, list(asked)
        self._number, self._params, self._size = number, params, size
        self.absent: dict[int, str] = {}
        self.bytes_down = self.bytes_up = 0

    def ask(self, square_limit: float) -> list[Reply]:
        def one(client: Participant) -> Reply:
            answer = client.ask(self._number, self._params, square_limit)
            self.bytes_up += 8
            return Reply(answer, client.radius_noise)

        return list(self._each(one).values())

    def train(self, instructions: Mapping[str, Any]) -> dict[int, dict[str, Tensor]]:
        def one(client: Participant) -> dict[str, Tensor]:
            answer = client.train(self._number, self._params, **instructions)
            self.bytes_up += self._size
            return answer

        return self._each(one)

    def _each(self, one: Callable[[Participant], Any]) -> dict[int, Any]:
        """The answers of those that are still there; who fails is out of the rest of the round."""
        answers = {}
        for index in list(self._present):
            self.bytes_down += self._size + 8
            try:
                answers[index] = one(self._clients[index])
            except ABSENT as error:
                self.absent[index] = f"{type(error).__name__}: {error}"
                self._present.remove(index)
        return answers


def _pick(clients: int, count: int, seed: int, number: int) -> tuple[int, ...]:
    """The clients of a round, sorted."""
    if count == clients:
        return tuple(range(clients))
    rng = torch.Generator().manual_seed((seed << 20) ^ number)
    return tuple(sorted(torch.randperm(clients, generator=rng)[:count].tolist()))
