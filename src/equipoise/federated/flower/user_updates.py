"""Updates of users whose records stay at Flower's nodes: the server adds the noise (central privacy).

`FlowerUpdates` is the loss of a `PrivateTraining` at the server, whose gradient rows are what the nodes
answer: a record is a user, a row is an update, a step is a round. Draws, clipping, noise, ledger and methods
are those of any training. `user_app` is the other end.

**Who is protected, and from whom.** A user from the other users and nodes, and from whoever sees the model.
A node sees when its own users are drawn, and that leaves the other users' draws as random as they were. The
server, a user's own node and the way between them see the user's updates.

**A row follows from nobody else's records.** A node computes each user by itself, on copies of model and
loss, under random numbers that follow from a secret number of the draw and the user's number. They are the
same at all parameters at which a draw is asked for. What fails for one user leaves out only that user.

Where a node does not answer, or memory runs out there, or the grid fails, the step ends, and can be taken
again. To go on without its users would let the records of one, by ending a process, take out the others.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from equipoise import _validate
from equipoise._foreign_errors import cause_of, where_raised
from equipoise.distributed.backend import out_of_memory
from equipoise.federated.flower.forward import introduction_app
from equipoise.federated.flower.grid import GridExchange
from equipoise.federated.flower.node import answered
from equipoise.federated.flower.wire import (
    MESSAGE_TYPES,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from equipoise.federated.local_updates import losses_with_updates
from equipoise.federated.messages import Refused, Reply, Request
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.engine_inputs import Loss, map_records
from equipoise.privacy import digest
from equipoise.training.randomness import derive_seed
from equipoise.training.record_source import BatchFormError, NoAnswerError, RecordPlaces

_log = logging.getLogger("equipoise.federated")

USERS, SEEDS, MODES, LOSSES = "users", "seeds", "training", "losses"  # names in requests and replies

#: Nodes count from here in a place: fillers of a forward hold 0, and are nobody's.
FIRST_NODE = 2

#: What to do where a step has ended.
AGAIN = (
    "The step is not finished. Taken again, also by a resumed run, it asks for the same users and costs "
    "nothing more"
)

#: Characters of a node's text that an error shows.
LONGEST_REASON = 300

Place = tuple[int, int]
"""Of a user: the node, from `FIRST_NODE` on, and the user's number there."""

Update = tuple[dict[str, Tensor], float]
"""Of a user, by parameter; and the user's loss."""


# ---- at a node


@dataclass(frozen=True)
class NodeUsers:
    """What a node answers with.

    Args:
        model: of the same make as the server's; its values are overwritten, and so is which of its modules
            are in training mode.
        loss: loss(model, batch) -> [B], whose gradients are updates of users, such as `LocalUpdates`.
        users: users[n] holds the records of user n, tensors [G, ...]; G may be another one for each user. A
            number that is not there is a user without an update.

    Each user meets copies of model and loss. What a function keeps outside of itself, and what `users` keeps,
    is shared by the users of a message: keep nothing there that follows from a user.

    Raises:
        TypeError: the users are the tensors of all.
    """

    model: nn.Module
    loss: Loss
    users: Any

    def __post_init__(self) -> None:
        if isinstance(self.users, Mapping) and any(isinstance(name, str) for name in self.users):
            raise TypeError("users holds tensors by name; give a list with an item of records for each user")

    def answer(self, request: Request) -> Reply:
        """The updates of the users that are asked for, [b, ...], and their losses.

        Raises:
            Refused: a request that makes no sense, or is for another model.
        """
        numbers, seeds = (_counts(request.extras.get(name)) for name in (USERS, SEEDS))
        if not len(numbers) == len(seeds) > 0:
            raise Refused("the request names no users, or not a seed for each")
        mine, modes = {name: value.shape for name, value in _values(self.model).items()}, _modes(self.model)
        sent = request.extras.get(MODES)
        if (
            mine != {name: value.shape for name, value in request.params.items()}
            or not isinstance(sent, list)
            or [*map(type, sent)] != [*map(type, modes)]
        ):
            raise Refused(
                "the model of the request has other names, shapes or modules than this node's: build the "
                "same model at the server and at every node"
            )
        rows = {
            name: p.new_full((len(numbers), *p.shape), torch.nan, requires_grad=False)
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        losses = [
            self._update(request.params, sent, *one, {name: row[place] for name, row in rows.items()})
            for place, one in enumerate(zip(numbers, seeds, strict=True))
        ]
        return Reply(rows, {LOSSES: losses})  # type: ignore[dict-item]

    def _update(
        self, params: Mapping[str, Tensor], modes: list[bool], number: int, seed: int, row: dict[str, Tensor]
    ) -> float:
        """Write that of one user into its row, and answer the loss; where it fails, the row is left.

        Raises:
            MemoryError, RuntimeError: memory ran out. That follows who else is asked for.
        """
        model, own_loss = copy.deepcopy((self.model, self.loss))  # no user meets what another one left there
        with torch.no_grad():
            for name, value in _values(model).items():
                value.copy_(params[name])
        for module, is_training in zip(model.modules(), modes, strict=True):
            module.training = is_training
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        try:
            with torch.enable_grad(), random_numbers_from(seed, *{p.device for p in trained.values()}):
                batch = map_records(lambda leaf: leaf[None], self.users[number])
                (loss,) = own_loss(model, batch)
                found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
            updates = [0 if update is None else update.to_dense() for update in found]
            for name, update in zip(trained, updates, strict=True):
                row[name].copy_(update) if isinstance(update, Tensor) else row[name].zero_()
            return float(loss.detach())
        except Exception as error:  # its message could hold a record
            if out_of_memory(error):
                raise
            _log.exception("user %d of this node has no update, and is left out of this step", number)
            return math.nan


def user_app(build: Callable[[Context], NodeUsers]) -> ClientApp:
    """An app that answers `FlowerUpdates`.

    Args:
        build: makes what a node answers with; called for every message. A user must keep the number for the
            whole run. It must be picklable where Flower's simulation runs it.

    Returns:
        An app with `train` and `query.introduce`.
    """
    app = introduction_app()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def work() -> RecordDict:
            return write_reply(build(context).answer(read_request(message.content, "train")))

        return Message(answered(work, context.node_config.get("partition-id")), reply_to=message)

    return app


# ---- at the server


class FlowerUpdates:
    """Losses [B] of B users at the nodes of a grid, whose gradients are what the nodes answer.

    The loss of a `PrivateTraining` at the server, with `data=updates.users`. A node is asked once for all of
    its users in a draw, so that it sees nothing of who else is drawn; the server holds the updates of a draw.

    Args:
        grid: of the server app.
        users: how many users each node has, by its number (`partition-id`, from 0). Public: you state it.
            Users keep their numbers for the whole run.
        timeout: seconds that the nodes have for an answer.
        wait: seconds for which a node that is not there, or gave no answer, is asked again. They count from
            the first such failure.

    Attributes:
        users: the data of the training.

    Raises:
        ValueError: no node, or one without users.

    The guarantee is `proven` where that of the method is, for users. The statement names what it rests on:
    nodes compute an update only from one user's records, and the server is trusted.
    """

    def __init__(
        self, grid: Grid, users: Sequence[int], *, timeout: float = 3600.0, wait: float = 60.0
    ) -> None:
        counts = _counts([*users]) if isinstance(users, Sequence) else []
        if not counts or 0 in counts:
            raise ValueError(
                f"users={users!r:.80}: give how many users each node has, a list of whole numbers of at "
                "least 1, such as [1] * 100"
            )
        _validate.non_negative(wait=wait)
        places = [(node + FIRST_NODE, user) for node, count in enumerate(counts) for user in range(count)]
        self.users = self.records_elsewhere = RecordPlaces(torch.tensor(places))
        self._exchange, self._wait = GridExchange(grid, len(counts), timeout=timeout), wait
        self._asked = 0

    def __deepcopy__(self, memo: Any) -> FlowerUpdates:
        raise TypeError("FlowerUpdates belongs to a grid, and cannot be copied")

    def __call__(self, model: nn.Module, places: Any) -> Tensor:
        """One number per user, [B].

        Raises:
            NoAnswerError: a node does not answer, or not as it must, or the grid fails.
            BatchFormError: the data are not `users`, a parameter is of a type that does not travel, a module
                keeps running statistics, or no user has an update at the start.
        """
        if not (isinstance(places, Tensor) and places.ndim == 2 and places.shape[1] == 2):
            raise BatchFormError(
                "the loss FlowerUpdates is given other records than its users: give data=updates.users, and "
                "a method without public records"
            )
        _refuse_statistics(model)
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Whoever watches this process compute watches none of what follows.
        with torch._C.DisableTorchFunction():
            state = {name: value.detach().cpu() for name, value in _values(model).items()}
            point = _Point(state, {name: state[name] for name in params}, _modes(model))
            nobody = {name: torch.zeros_like(value) for name, value in point.trained.items()}, 0.0
            wanted = _as_places(places)
            known = self._answers(point, {place for place in wanted if place[0] >= FIRST_NODE})
            found = [known.get(place, nobody) for place in wanted]
            updates = {
                name: torch.stack([update[name] for update, _ in found]).to(p) for name, p in params.items()
            }
            losses = next(iter(updates.values())).new_tensor([loss for _, loss in found])
        return losses_with_updates(params, updates, losses)

    def _answers(self, point: _Point, wanted: set[Place]) -> Mapping[Place, Update]:
        """Those of the users wanted, and of all others of the draw under way."""
        if not wanted:
            return {}
        users, at = self.users, point.digest()
        if users.draw is None and at not in users.kept and len(users.kept) > 1:
            users.kept.clear()  # the start goes back and forth between two points
        known: dict[Place, Update] = users.kept.setdefault(at, {})
        if wanted - known.keys():
            by_node = defaultdict(list)
            for node, user in sorted((wanted | {*_as_places(users.announced)}) - known.keys()):
                by_node[node - FIRST_NODE].append(user)
            self._ask(by_node, point, known)
        if users.draw is None and all(math.isnan(loss) for _, loss in known.values()):
            raise BatchFormError(
                f"none of the {len(known)} users that the start asks for has an update: model or loss fail "
                "at the nodes, whose logs say why, or there are no users with these numbers. Nothing was "
                "spent"
            )
        return known

    def _ask(self, by_node: Mapping[int, list[int]], point: _Point, known: dict[Place, Update]) -> None:
        """Ask nodes for these users, until each has answered or the time is over.

        Args:
            by_node: the users' numbers.
            point: where.
            known: takes the answers, as they come.
        """
        self._asked += 1
        after = "Nothing was spent" if self.users.draw is None else AGAIN
        waiting: dict[int, RecordDict] = {}
        for node, users in by_node.items():
            seeds = [derive_seed(self.users.draw or 0, "update", node, user) for user in users]
            extras = {USERS: users, SEEDS: seeds, MODES: point.modes}
            try:
                waiting[node] = write_request(Request(self._asked, point.state, extras))
            except TypeError as error:  # its text names a parameter and its type
                raise BatchFormError(str(error)) from None
        end: float | None = None
        while True:
            failed: Exception | None = None
            try:
                received = self._exchange.receive(self._exchange.address(MESSAGE_TYPES["train"], waiting))
                for node, message in sorted(received.items()):
                    if node in waiting and not message.has_error():  # else a process of Flower's has failed
                        known |= _read(message, node, by_node[node], point.trained, after)
                        del waiting[node]
            except NoAnswerError:
                raise
            except Exception as error:  # of the grid, or of an answer: of no user, whatever it is
                failed = error
            if not waiting:
                return
            end = time.monotonic() + self._wait if end is None else end
            if time.monotonic() >= end:
                why = "" if failed is None else f" ({where_raised(failed)})"
                raise NoAnswerError(
                    f"no answer of node {min(waiting)}{why}; {len(waiting)} of the {len(by_node)} nodes that "
                    f"were asked gave none. {after}"
                ) from (failed and cause_of(failed))
            time.sleep(min(1.0, self._wait))


@dataclass(frozen=True)
class _Point:
    """At what updates are asked for.

    Attributes:
        state: parameters and buffers.
        trained: the trainable parameters.
        modes: whether each module is in training mode.
    """

    state: Mapping[str, Tensor]
    trained: Mapping[str, Tensor]
    modes: list[bool]

    def digest(self) -> str:
        return digest({**self.state, "": torch.tensor(self.modes)})


def _read(
    message: Message, node: int, users: Sequence[int], trained: Mapping[str, Tensor], after: str
) -> dict[Place, Update]:
    """The updates of these users in a node's message; `after` says how things stand without them.

    Raises:
        NoAnswerError: it holds something else.
    """
    reply = read_reply(message)
    if isinstance(reply, str):
        raise NoAnswerError(f"node {node} gives no updates: {reply[:LONGEST_REASON]!r}. {after}")
    expected = {name: (value.dtype, (len(users), *value.shape)) for name, value in trained.items()}
    losses = reply.reports.get(LOSSES)
    if (
        expected != {name: (value.dtype, tuple(value.shape)) for name, value in reply.params.items()}
        or not isinstance(losses, list)
        or len(losses) != len(users)
    ):
        raise NoAnswerError(
            f"node {node} answers other tensors than one update per user of {len(trained)} parameters: build "
            f"the same model, with the same parameters trainable, at the server and at every node. {after}"
        )
    return {
        (node + FIRST_NODE, user): (
            {name: value[i] for name, value in reply.params.items()},
            float(losses[i]),
        )
        for i, user in enumerate(users)
    }


def _as_places(places: Tensor) -> list[Place]:
    return [(int(node), int(user)) for node, user in places.tolist()]


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def _refuse_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            raise BatchFormError(
                f"the module {name!r} ({type(module).__name__}) keeps running statistics, which no update "
                "of a user moves: take GroupNorm, or put the module into evaluation mode"
            )


def _counts(values: Any) -> list[int]:
    """A list of whole numbers from 0 on; empty for anything else."""
    fine = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    return values if fine else []
