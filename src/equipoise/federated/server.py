"""The server: strategies, and the loop that runs their rounds over any exchange of messages.

A strategy is a generator of requests. It yields a request, is sent the usable replies, and returns the next
global model. `FedAvg` averages the clients' parameters: x' = sum_p w_p y_p / sum_p w_p over those that
answered, with equal weights, or by the public population that each client states. With clients that clip at
a fixed or learned radius this is DP-FedAvg. The server holds released values only; nothing here is private,
and nothing here adds noise.

Each round a public generator picks the clients. Clients that refuse or cannot be reached, before a query or
in the middle of the round, are left out of it, and so are those whose own ledger or folder is broken; the
others' replies make the next model. If none answers the model stays. What a client released before it dropped
out is in its ledger.

With a folder the server's state is on disk after every round. A server that was killed in the middle of a
round asks the same again: clients that had answered give the same replies, and nothing is charged twice.

Source of `FedAvg`: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized
Data".
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from equipoise import _validate
from equipoise._files import PathLike
from equipoise.federated.messages import CLIENT_FAILURES, POPULATION, Refused, Reply, Request, size_in_bytes
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied
from equipoise.training.folder.checkpoint import Checkpoints

_log = logging.getLogger("equipoise.federated")

#: What takes a client out of a round without ending the training.
ABSENT = (Refused, ConnectionError, TimeoutError)

#: The largest report: squares of reports, and sums over clients, stay finite.
LARGEST_REPORT = 1e100

#: Of the largest float: sums over a million replies, and steps of 1e-6 into them, stay finite.
_LARGEST_SHARE = 1e-6

RoundRequests = Generator[Request, Sequence[Reply], Parameters]
"""Yields the requests of a round, is sent the usable replies to each, and returns the next global model."""


# ---- strategies


class Strategy(ABC):
    """The server's side of the training.

    Attributes:
        carried: what it carries from round to round, tensors and plain values by name, always the same names.
    """

    carried: Any = MappingProxyType({})

    @property
    def name(self) -> str:
        """Says in a server's folder which strategy, and which one inside, its rounds are of."""
        return type(self).__name__

    @abstractmethod
    def round(self, number: int, params: Parameters) -> RoundRequests:
        """The requests of round `number`, which begins at the global model `params`.

        A client without a usable reply is out of the round and gets no further request of it. The model stays
        where there are no replies.
        """

    def refusal(self, request: Request, reply: Reply) -> str | None:
        """Why a client's reply cannot be used, or None; such a client is out of the round."""
        for name, value in reply.params.items():
            if value.is_complex() or not bool(torch.isfinite(value).all()):
                return f"it sent numbers for {name!r:.80} that are not finite or not real"
        for name, number in reply.reports.items():
            # Flower's reports may be lists.
            if not isinstance(number, int | float) or not abs(number) <= LARGEST_REPORT:
                return f"it sent no finite number of usual size for {name!r:.80}"
        return None

    def output(self, params: Parameters) -> Parameters:
        """What the training gives after the rounds so far, where it is not the global model `params`."""
        return params

    def metrics(self) -> Mapping[str, float]:
        """Public numbers of the round under way."""
        return {}

    def doubt(self, metrics: Sequence[Mapping[str, float]]) -> str | None:
        """Why to mistrust rounds with these metrics, in words; or None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a server that restarts needs."""
        return dict(self.carried)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: it is another strategy's.
        """
        if set(state) != set(self.carried):
            raise ValueError(
                f"state has {sorted(state)}, but {type(self).__name__} carries {sorted(self.carried)}: the "
                "folder belongs to another strategy"
            )
        self.carried = dict(state)


class FedAvg(Strategy):
    """The mean of the clients' parameters.

    Args:
        server_rate: the step from the global model to the mean; 1 goes all the way.
        weights: "equal", or "size": each client counts as often as the public population that it states. A
            client that states too large a one has too large a say.

    Example:
        >>> replies = [Reply({"w": torch.ones(1)}), Reply({"w": 3 * torch.ones(1)})]
        >>> FedAvg().aggregate({"w": torch.zeros(1)}, replies)["w"].item()
        2.0
    """

    def __init__(self, server_rate: float = 1.0, weights: Literal["equal", "size"] = "equal") -> None:
        _validate.positive(server_rate=server_rate)
        _validate.one_of(("equal", "size"), weights=weights)
        self.server_rate, self.weights = float(server_rate), weights

    def round(self, number: int, params: Parameters) -> RoundRequests:
        replies = yield Request(number, params, self.extras())
        return self.aggregate(params, replies) if replies else params

    def extras(self) -> dict[str, Any]:
        """Numbers and named tensors that are sent with the global model."""
        return {POPULATION: 1.0} if self.weights == "size" else {}

    def received(self, params: Parameters, sent: Parameters) -> Parameters:
        """The parameters of a client, from the tensors that it sent: here they are what it sent."""
        return sent

    def refusal(self, request: Request, reply: Reply) -> str | None:
        """Also where what it sent does not make parameters of the model's names, shapes and finite values."""
        found = super().refusal(request, reply)
        if found is not None or request.kind != "train":
            return found
        try:
            end = self.received(request.params, reply.params)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            return f"what it sent does not fit the model ({type(error).__name__})"
        if self.weights == "size" and not reply.reports.get(POPULATION, 0) >= 1:
            return "it states no population, by which weights='size' would count it"
        return misfit(request.params, end)

    def aggregate(self, params: Parameters, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """The next global model from at least one reply; of one, at rate 1, its parameters bit for bit."""
        if not replies:
            raise ValueError("replies is empty: keep the global model where nobody answered")
        ends = [self.received(params, reply.params) for reply in replies]
        sizes = {reply.reports[POPULATION] for reply in replies} if self.weights == "size" else {1.0}
        if len(ends) == 1:
            mean = {name: ends[0][name].clone() for name in params}
        elif len(sizes) == 1:
            mean = {name: torch.stack([end[name] for end in ends]).mean(0) for name in params}
        else:
            counts = torch.tensor([reply.reports[POPULATION] for reply in replies], dtype=torch.float64)
            shares = counts / counts.sum()
            mean = {
                name: torch.tensordot(shares.to(value), torch.stack([end[name] for end in ends]), 1)
                for name, value in params.items()
            }
        if self.server_rate == 1:
            return mean
        return {name: value + self.server_rate * (mean[name] - value) for name, value in params.items()}


def misfit(params: Parameters, sent: Parameters) -> str | None:
    """Why tensors of a client are no parameters of this model that can be averaged, or None."""
    for name, value in params.items():
        got = sent.get(name)
        if got is None or got.shape != value.shape or got.dtype != value.dtype:
            return f"what it sent for {name!r} has not the model's shape and type"
        if not bool((got.abs() <= _LARGEST_SHARE * torch.finfo(got.dtype).max).all()):
            return f"what it sent for {name!r} is not finite, or so large that sums overflow"
    return None


# ---- exchanges of messages


class Exchange(Protocol):
    """Carries one request to many clients at once."""

    def __len__(self) -> int:
        """The number of clients."""
        ...

    def send(self, request: Request, clients: Sequence[int]) -> Mapping[int, Reply | str]:
        """Each client's reply; a string in place of one says why it is missing."""
        ...


class Participant(Protocol):
    """What the exchange within one process needs of a client; see `Client`."""

    def answer(self, request: Request) -> Reply:
        """Do what is asked, or raise `Refused`."""
        ...


class InProcessExchange:
    """An exchange with clients of this process.

    Args:
        clients: in the order of their numbers.
    """

    def __init__(self, clients: Sequence[Participant]) -> None:
        self._clients = clients

    def __len__(self) -> int:
        return len(self._clients)

    def send(self, request: Request, clients: Sequence[int]) -> dict[int, Reply | str]:
        found: dict[int, Reply | str] = {}
        for index in clients:
            try:
                found[index] = self._clients[index].answer(request)
            except (*ABSENT, *CLIENT_FAILURES) as error:
                found[index] = why_absent(index, error)
        return found


def why_absent(client: int, error: BaseException) -> str:
    """What the server learns of a client that could not answer, while the error is handled."""
    if isinstance(error, ABSENT):
        return f"{type(error).__name__}: {error}"
    # The message of a broken ledger is for the client's own log, not for the server.
    _log.exception("client %s could not answer", client)
    return f"{type(error).__name__}: the client's ledger or folder is broken; its own log says why"


def usable_replies(
    strategy: Strategy, request: Request, clients: Sequence[int], found: Mapping[int, Any]
) -> tuple[dict[int, Reply], dict[int, str]]:
    """The replies that the strategy can use, and why each of the other clients is out of the round."""
    replies, absent = dict[int, Reply](), dict[int, str]()
    for index in clients:
        reply = found.get(index, "no answer")
        why = reply if isinstance(reply, str) else strategy.refusal(request, reply)
        if why is None:
            replies[index] = reply
        else:
            absent[index] = why
    return replies, absent


# ---- rounds


@dataclass(frozen=True)
class RoundReport:
    """What the server saw of a round.

    Attributes:
        number: from 1.
        asked: clients that were picked.
        answered: clients whose replies made the next model.
        absent: client -> why it is not among them.
        metrics: the strategy's public numbers, and those of `evaluate`.
        bytes_down, bytes_up: of tensors and numbers sent to and by the clients.
        scores: client -> the private score of the new model on its records, and the score's error.
    """

    number: int
    asked: tuple[int, ...]
    answered: tuple[int, ...]
    absent: Mapping[int, str]
    metrics: Mapping[str, float]
    bytes_down: int
    bytes_up: int
    scores: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@dataclass
class FederationHistory:
    """The rounds, and the models after the last.

    Attributes:
        params: the global model, from which further rounds go on.
        rounds: in order.
        output: what the training gives: the global model, or what the strategy makes of all rounds.
        strategy: its name, where the rounds were read from a server's folder.
    """

    params: dict[str, Tensor]
    rounds: list[RoundReport] = field(default_factory=list)
    output: Parameters = field(default_factory=dict)
    strategy: str = ""


def simulate(
    strategy: Strategy, clients: Sequence[Participant], params: Parameters, rounds: int, **options: Any
) -> FederationHistory:
    """Run rounds of federated training with clients of this process; arguments as for `run_rounds`."""
    return run_rounds(strategy, InProcessExchange(clients), params, rounds, **options)


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
    on_round: Callable[[RoundReport], None] | None = None,
    folder: PathLike | None = None,
    members: Callable[[int], Iterable[int]] | None = None,
    score_every: int | None = None,
) -> FederationHistory:
    """Run rounds of federated training over any exchange of messages.

    Args:
        strategy: the server's side.
        exchange: reaches the clients.
        params: the global model to begin with.
        rounds: how many; those that `folder` holds already count.
        clients_per_round: picked at random each round; all when None. It amplifies nothing: the server knows
            who took part.
        seed: of the public choice of clients; round r's depends on (seed, r) only.
        first_round: number of the first round, to go on from parameters of an earlier training.
        evaluate: what the training gives so far -> public numbers, from public data.
        on_round: called after every round that is run now, when it is on disk.
        folder: the server's own; model, strategy and rounds lie there after every round, and a folder that
            holds some goes on after the last, also with further clients, whose numbers follow. None keeps
            everything in memory.
        members: round -> the clients that take part in the federation then; all when None. For those that
            join late or leave.
        score_every: so many rounds apart, and after the last, the clients that answered are asked for their
            private score of the new model; never when None.

    Raises:
        ValueError: numbers that make no sense, or a folder of another training.
    """
    _validate.count(rounds=rounds, first_round=first_round, score_every=score_every or 1)
    clients = len(exchange)
    if clients_per_round is not None and not 1 <= clients_per_round <= clients:
        raise ValueError(f"clients_per_round={clients_per_round!r}: give 1 to {clients} or None")
    history, disk = FederationHistory(copied(params)), None
    if folder is not None:
        disk = ServerFolder(folder, {"seed": seed, "first_round": first_round})
        history = disk.load(strategy, params) or history
    history.output = strategy.output(history.params)
    silent = False
    end = first_round + rounds
    for number in range(first_round + len(history.rounds), end):
        there = range(clients) if members is None else sorted(set(members(number)))
        if any(not 0 <= index < clients for index in there):
            raise ValueError(f"members({number}) gives {there}: clients have numbers from 0 to {clients - 1}")
        asked = pick_clients(there, clients_per_round, seed, number)
        history.params, done = _one_round(strategy, exchange, number, asked, history.params)
        if score_every is not None and (number % score_every == 0 or number == end - 1):
            done = _scored(strategy, exchange, done, history.params)
        if done.absent and not done.answered and not silent:
            silent = True
            client, why = next(iter(done.absent.items()))
            warnings.warn(
                f"round {number}: no client answered, so the model stays as it is (client {client}: {why}). "
                "`history.rounds[i].absent` has the reasons of this and later rounds",
                RuntimeWarning,
                stacklevel=2,
            )
        history.output = strategy.output(history.params)
        metrics = dict(strategy.metrics())
        if evaluate is not None:
            metrics |= evaluate(history.output)
        done = replace(done, metrics=metrics)
        history.rounds.append(done)
        if disk is not None:
            # Before anybody hears of the round: a server that restarts does not run it again.
            disk.save(strategy, history)
        if on_round is not None:
            on_round(done)
    return history


def _one_round(
    strategy: Strategy, exchange: Exchange, number: int, asked: tuple[int, ...], params: Parameters
) -> tuple[dict[str, Tensor], RoundReport]:
    """The global model after a round with these clients, and what the server saw of it, metrics apart."""
    present, absent = list(asked), dict[int, str]()
    bytes_down = bytes_up = 0
    requests = strategy.round(number, params)
    request = next(requests)
    while True:  # who gives no usable reply to a request gets no further one of the round
        found = exchange.send(request, present)
        bytes_down += len(present) * size_in_bytes(request)
        replies, gone = usable_replies(strategy, request, present, found)
        bytes_up += sum(map(size_in_bytes, replies.values()))
        present, absent = list(replies), absent | gone
        try:
            request = requests.send(list(replies.values()))
        except StopIteration as finished:
            report = RoundReport(number, asked, tuple(present), absent, {}, bytes_down, bytes_up)
            return dict(finished.value), report


def _scored(strategy: Strategy, exchange: Exchange, done: RoundReport, params: Parameters) -> RoundReport:
    """The round with the scores of those that answered; who gives none has none."""
    request = Request(done.number, params, kind="score")
    found = exchange.send(request, done.answered)
    replies, _ = usable_replies(strategy, request, done.answered, found)
    return replace(
        done,
        bytes_down=done.bytes_down + len(done.answered) * size_in_bytes(request),
        bytes_up=done.bytes_up + sum(map(size_in_bytes, replies.values())),
        scores={index: dict(reply.reports) for index, reply in replies.items()},
    )


def pick_clients(there: Sequence[int], count: int | None, seed: int, number: int) -> tuple[int, ...]:
    """The clients of round `number`, of those that are there: at most `count` of them, by the public seed.

    Example:
        >>> [pick_clients(range(5), 2, seed=0, number=r) for r in (1, 2)]
        [(0, 4), (3, 4)]
    """
    if count is None or count >= len(there):
        return tuple(there)
    # A generator for each round: a server that restarts picks the same clients without the rounds before.
    rng = torch.Generator().manual_seed((seed << 20) ^ number)
    return tuple(sorted(there[i] for i in torch.randperm(len(there), generator=rng)[:count].tolist()))


class ServerFolder:
    """The state of a server after its last round, in `checkpoint/` of its folder.

    Everything in it is made of what clients released. A file is written under another name, synced and
    renamed, so that a kill at any moment leaves the last whole round.

    Args:
        path: the folder; made when the first round is saved.
        settings: the public settings of the rounds; a folder goes on only under the same.
    """

    def __init__(self, path: PathLike, settings: Mapping[str, Any]) -> None:
        self._store, self._path = Checkpoints(Path(path) / "checkpoint"), Path(path)
        self._settings = dict(settings)

    def _plan(self, strategy: Strategy, params: Parameters) -> dict[str, Any]:
        shapes = {name: list(value.shape) for name, value in params.items()}
        return {**self._settings, "strategy": strategy.name, "model": shapes}

    def save(self, strategy: Strategy, history: FederationHistory) -> None:
        state = {
            "plan": self._plan(strategy, history.params),
            "params": history.params,
            "strategy": strategy.state_dict(),
            "rounds": [
                asdict(done) | {"asked": list(done.asked), "answered": list(done.answered)}
                for done in history.rounds
            ],
        }
        self._store.save(history.rounds[-1].number, state)

    def load(self, strategy: Strategy, params: Parameters) -> FederationHistory | None:
        """The rounds so far, with the strategy's state loaded; None where there are none.

        Args:
            strategy: takes over its state.
            params: what the model looks like.

        Raises:
            ValueError: the folder holds another training.
        """
        if not self._store.steps():
            return None
        _, state = self._store.load()
        now = self._plan(strategy, params)
        different = [f"{name}={now[name]!r}" for name in now if state["plan"].get(name) != now[name]]
        if different:
            raise ValueError(
                f"folder={str(self._path)!r} holds rounds under {state['plan']}, and now "
                f"{', '.join(different)} is asked for. Give the model and the settings that they were begun "
                "with, or another folder."
            )
        strategy.load_state_dict(state["strategy"])
        return _history(state)

    @staticmethod
    def read(path: PathLike) -> FederationHistory:
        """The rounds in a server's folder, whatever their strategy.

        Raises:
            ValueError: it holds none.
        """
        store = Checkpoints(Path(path) / "checkpoint")
        if not store.steps():
            raise ValueError(f"folder={str(path)!r} holds no rounds: name the server's folder of run_rounds")
        return _history(store.load()[1])


def _history(state: Mapping[str, Any]) -> FederationHistory:
    rounds = [
        RoundReport(**{**values, "asked": tuple(values["asked"]), "answered": tuple(values["answered"])})
        for values in state["rounds"]
    ]
    return FederationHistory(dict(state["params"]), rounds, strategy=state["plan"]["strategy"])
