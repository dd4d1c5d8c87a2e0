"""How a client's method takes part in rounds: follow the server, note the round's end, shape the reply.

Everything here works on public values: what the server sent, and what the client's ledger released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.federated.messages import Reply
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import Context, Method, State
from equipoise.methods.base import Parameters, Plan
from equipoise.methods.named_tensors import copied
from equipoise.methods.wrapper import MethodWrapper


@dataclass(frozen=True)
class Extra:
    """An entry of a request's `extras` that a method takes.

    Attributes:
        check: (what was sent, the client's parameters) -> the value to use. It raises `Refused` where the
            value makes no sense or lies outside of what was agreed.
        required: whether a request without it is refused.
    """

    check: Callable[[Any, Parameters], Any]
    required: bool = True


class RoundProtocol:
    """A mixin of client methods; by itself it takes no extras and sends the parameters."""

    @property
    def client_loss(self) -> Loss | None:
        """The loss that the client must train on; None where its own will do."""
        return None

    def takes(self, kind: str) -> Mapping[str, Extra] | None:
        """Which extras a request of this kind may hold; None if the method answers no such request."""
        return {} if kind == "train" else None

    def check_local_steps(self, local_steps: int) -> None:
        """Refuse, by ValueError, a number of local steps that the method was not made for."""

    def follow(self, state: State, extras: Mapping[str, Any]) -> State:
        """The state with the server's extras, which have been checked."""
        return state

    def query(self, context: Context, state: State) -> dict[str, float]:
        """The reports that answer a query at the global model; they come from the client's ledger."""
        raise NotImplementedError

    def end_round(self, state: State, end: Parameters) -> State:
        """The state after the last local step of a round, which led to `end`."""
        return state

    def report_noise(self, plan: Plan) -> float | None:
        """Standard deviation of the noise in the number that is reported; None where none is."""
        return None

    def reply(self, state: State, start: Parameters, end: Parameters) -> Reply:
        """What is sent: by default the parameters at the end.

        Args:
            state: after `end_round`.
            start: where the server put the client.
            end: where the local steps led.
        """
        return Reply(copied(end))


def protocol_of(method: Method) -> RoundProtocol:
    """The method, if it takes part in rounds, or a protocol that adds nothing."""
    return method if isinstance(method, RoundProtocol) else RoundProtocol()


class RoundWrapper(RoundProtocol, MethodWrapper):
    """A method around another one that changes the noised estimate or the reply, and releases nothing itself.

    It has the inner method's plan, cost, claims and protocol. Its state also holds, under `start`, the point
    where the server put the client.

    Args:
        inner: estimates the gradient.
    """

    @property
    def _protocol(self) -> RoundProtocol:
        return protocol_of(self.inner)

    @property
    def client_loss(self) -> Loss | None:
        return self._protocol.client_loss

    def init(self, context: Context) -> State:
        return {**super().init(context), "start": copied(context.params)}

    def rebase(self, state: State, params: Parameters) -> State:
        return {**super().rebase(state, params), "start": copied(params)}

    def takes(self, kind: str) -> Mapping[str, Extra] | None:
        return self._protocol.takes(kind)

    def check_local_steps(self, local_steps: int) -> None:
        self._protocol.check_local_steps(local_steps)

    def follow(self, state: State, extras: Mapping[str, Any]) -> State:
        return {**state, "inner": self._protocol.follow(state["inner"], extras)}

    def query(self, context: Context, state: State) -> dict[str, float]:
        return self._protocol.query(context, state["inner"])

    def end_round(self, state: State, end: Parameters) -> State:
        return {**state, "inner": self._protocol.end_round(state["inner"], end)}

    def report_noise(self, plan: Plan) -> float | None:
        return self._protocol.report_noise(plan)

    def reply(self, state: State, start: Parameters, end: Parameters) -> Reply:
        return self._protocol.reply(state["inner"], start, end)


def check_passed_on(method: Method) -> None:
    """See that the server reaches every inner method that takes part in the rounds.

    Raises:
        ValueError: one of them is inside a method that does not pass requests on.
    """
    while isinstance(method, MethodWrapper):
        outer, method = method, method.inner
        if isinstance(method, RoundProtocol) and not isinstance(outer, RoundProtocol):
            raise ValueError(
                f"method {outer.name!r} is around {method.name!r}, which takes part in the server's rounds, "
                f"and passes no requests on to it. Leave {outer.name!r} out, put it inside where "
                f"{method.name!r} takes a method, or derive it from equipoise.federated.RoundWrapper. "
                "Nothing was spent"
            )
