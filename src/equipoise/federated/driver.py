"""Rounds: the server's loop over any exchange of messages, and the exchange within one process.

Each round a public generator picks the clients. Those that refuse or cannot be reached, before the query or
in the middle of the round, are left out of it, and so are those whose own ledger or folder is broken; the
others' answers make the next model. If none answers the model stays. What a client released before it dropped
out is in its ledger.

With a folder the server's state is on disk after every round. A server that was killed in the middle of a
round asks the same again: clients that had answered give the same answers, and nothing is charged twice.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from equipoise.federated.errors import BROKEN_BOOKS, Refused
from equipoise.federated.history import History, Round, ServerFolder, size_in_bytes
from equipoise.federated.secure_client import SecureClient
from equipoise.federated.secure_exchange import Request, SecureExchange, check_secure
from equipoise.federated.secure_sum import SecureSum
from equipoise.federated.strategies import Reply, Strategy
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied

__all__ = ["Exchange", "Participant", "pick_clients", "run_rounds", "simulate"]

_log = logging.getLogger("equipoise.federated")

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
        self,
        round_number: int,
        params: Parameters,
        clip_norm: float | None = None,
        control: Parameters | None = None,
        square_limit: float | None = None,
    ) -> dict[str, Tensor]:
        """The parameters after the local steps, or what is sent in their place."""
        ...


class Exchange(Protocol):
    """Messages to many clients at once; a string in place of an answer says why there is none."""

    def __len__(self) -> int:
        """The number of clients."""
        ...

    def ask(
        self, present: Sequence[int], number: int, params: Parameters, square_limit: float
    ) -> Mapping[int, Reply | str]:
        """The clients' answers to the radius query of round `number`."""
        ...

    def train(
        self, present: Sequence[int], number: int, params: Parameters, instructions: Mapping[str, Any]
    ) -> Mapping[int, dict[str, Tensor] | str]:
        """The clients' parameters after the local steps of round `number`."""
        ...


def simulate(
    strategy: Strategy,
    clients: Sequence[Participant] | Sequence[SecureClient],
    params: Parameters,
    rounds: int,
    *,
    secure: SecureSum | None = None,
    **options: Any,
) -> History:
    """Run rounds of federated training with clients of this process; `options` as for `run_rounds`.

    Args:
        strategy, params, rounds: as for `run_rounds`.
        clients: in the order of their numbers; each a `SecureClient` with `secure`.
        secure: let the server learn sums alone (experimental).

    Raises:
        ValueError: as `run_rounds`, or a strategy that needs more than sums.
    """
    if secure is None:
        exchange: Exchange = _InProcess(cast("Sequence[Participant]", clients))
    else:
        check_secure(strategy)
        exchange = SecureExchange(_Relay(cast("Sequence[SecureClient]", clients)), secure)
    return run_rounds(strategy, exchange, params, rounds, **options)


def run_rounds(
    strategy: Strategy,
    exchange: Exchange,
    params: Parameters,
    rounds: int,
    *,
    clients_per_round: int | None = None,
    seed: int = 0,
    first_round: int = 1,
    evaluate: Callable[[Parameters], Mapping[str, float]] | None = None,
    on_round: Callable[[Round], None] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> History:
    """Run rounds of federated training over any exchange of messages.

    Args:
        strategy: the server's side.
        exchange: reaches the clients.
        params: the global model to begin with.
        rounds: how many; those that `folder` holds already count.
        clients_per_round: picked at random each round; all when None. It amplifies nothing: the server knows
            who took part.
        seed: of the public choice of clients; round r's depends on (seed, r) alone.
        first_round: number of the first round, to go on from parameters of an earlier training.
        evaluate: params -> public numbers, from public data.
        on_round: called after every round that is run now, when it is on disk.
        folder: the server's own; model, strategy and rounds lie there after every round, and a folder that
            holds some goes on after the last. None keeps everything in memory.

    Raises:
        ValueError: numbers that make no sense, or a folder of another training.
    """
    for name, value in (("rounds", rounds), ("first_round", first_round)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
    count = len(exchange) if clients_per_round is None else clients_per_round
    if not 1 <= count <= len(exchange):
        raise ValueError(f"clients_per_round={clients_per_round!r}: give 1 to {len(exchange)} or None")
    history = History(copied(params))
    disk = None
    if folder is not None:
        plan = {
            "clients": len(exchange),
            "clients_per_round": count,
            "seed": seed,
            "first_round": first_round,
        }
        disk = ServerFolder(folder, plan)
        history = disk.load(strategy, params) or history
    silent = False
    for number in range(first_round + len(history.rounds), first_round + rounds):
        asked = pick_clients(len(exchange), count, seed, number)
        messages = _Messages(exchange, asked, number, history.params)
        answers = messages.train(strategy.instructions(messages.ask), strategy.refusal)
        if not answers and not silent:
            silent = True
            who, why = next(iter(messages.absent.items()), (asked[0], "too few for a sum"))
            warnings.warn(
                f"round {number}: no client answered, so the model stays as it is (client {who}: {why}). "
                "`history.rounds[i].absent` has the reasons of this and later rounds",
                RuntimeWarning,
                stacklevel=2,
            )
        if answers:
            history.params = strategy.aggregate(history.params, list(answers.values()))
        metrics = dict(strategy.metrics())
        if evaluate is not None:
            metrics |= evaluate(history.params)
        down, up = messages.bytes_down, messages.bytes_up
        if isinstance(exchange, SecureExchange):
            down, up = exchange.sent()
        done = Round(number, asked, tuple(answers), messages.absent, metrics, down, up)
        history.rounds.append(done)
        if disk is not None:
            disk.save(strategy, history)
        if on_round is not None:
            on_round(done)
    return history


class _Messages:
    """The messages of one round: who is out of it, and how much was sent."""

    def __init__(self, exchange: Exchange, asked: Sequence[int], number: int, params: Parameters) -> None:
        self._exchange, self._present = exchange, list(asked)
        self._number, self._params = number, params
        self._size = size_in_bytes(params)
        self.absent: dict[int, str] = {}
        self.bytes_down = self.bytes_up = 0

    def ask(self, square_limit: float) -> list[Reply]:
        """The answers to a query, in the order of the clients."""
        found = self._exchange.ask(self._present, self._number, self._params, square_limit)
        return list(self._kept(found, 8, _not_a_reply).values())  # the limit U beside the parameters

    def train(
        self, instructions: Mapping[str, Any], refusal: Callable[[Parameters, Any], str | None]
    ) -> dict[int, dict[str, Tensor]]:
        """The parameters of those whose answers can be used, in the order of the clients."""
        found = self._exchange.train(self._present, self._number, self._params, instructions)
        beside = sum(map(size_in_bytes, instructions.values()))
        return self._kept(found, beside, lambda answer: refusal(self._params, answer))

    def _kept(
        self, found: Mapping[int, Any], beside: int, refusal: Callable[[Any], str | None]
    ) -> dict[int, Any]:
        """What is an answer; who fails is out of the round. `beside`: bytes sent beside the model."""
        self.bytes_down += len(self._present) * (self._size + beside)
        answers = {}
        for index in list(self._present):
            answer = found.get(index, "no answer")
            why = answer if isinstance(answer, str) else refusal(answer)
            if why is not None:
                self.absent[index] = why
                self._present.remove(index)
            else:
                answers[index] = answer
                self.bytes_up += size_in_bytes(answer)
        return answers


class _InProcess:
    """An exchange with clients of this process."""

    def __init__(self, clients: Sequence[Participant]) -> None:
        self._clients = clients

    def __len__(self) -> int:
        return len(self._clients)

    def ask(
        self, present: Sequence[int], number: int, params: Parameters, square_limit: float
    ) -> dict[int, Reply | str]:
        def one(client: Participant) -> Reply:
            return Reply(client.ask(number, params, square_limit), client.radius_noise)

        return {index: self._tried(index, one) for index in present}

    def train(
        self, present: Sequence[int], number: int, params: Parameters, instructions: Mapping[str, Any]
    ) -> dict[int, dict[str, Tensor] | str]:
        def one(client: Participant) -> dict[str, Tensor]:
            return client.train(number, params, **instructions)

        return {index: self._tried(index, one) for index in present}

    def _tried(self, index: int, one: Callable[[Participant], Any]) -> Any:
        return _tried(index, lambda: one(self._clients[index]))


class _Relay:
    """Messages of secure sums to clients of this process."""

    def __init__(self, clients: Sequence[SecureClient]) -> None:
        self._clients = clients

    def __len__(self) -> int:
        return len(self._clients)

    def relay(self, number: int, requests: Mapping[int, Request]) -> dict[int, dict[str, Any] | str]:
        return {
            index: _tried(index, partial(self._clients[index].answer, number, params, values))
            for index, (params, values) in requests.items()
        }


def _tried(index: int, answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except ABSENT as error:
        return f"{type(error).__name__}: {error}"
    except BROKEN_BOOKS as error:  # its words are the client's own, and not the server's
        _log.exception("client %s could not answer", index)
        return f"{type(error).__name__}: the client's ledger or folder is broken; its own log says why"


def _not_a_reply(answer: Any) -> str | None:
    """Why the answer to a query cannot be used."""
    if not isinstance(answer, Reply):
        return f"it sent a {type(answer).__name__} for a released number"
    return answer.refusal()


def pick_clients(clients: int, count: int, seed: int, number: int) -> tuple[int, ...]:
    """The clients of round `number`, sorted: `count` of them, by the public seed.

    Example:
        >>> [pick_clients(5, 2, seed=0, number=r) for r in (1, 2)]
        [(0, 4), (3, 4)]
    """
    if count == clients:
        return tuple(range(clients))
    rng = torch.Generator().manual_seed((seed << 20) ^ number)
    return tuple(sorted(torch.randperm(clients, generator=rng)[:count].tolist()))
