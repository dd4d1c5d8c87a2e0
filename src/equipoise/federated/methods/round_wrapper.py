"""A method around another one: it changes the noised estimate or the answer, and releases nothing itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from equipoise.federated.round_protocol import RoundProtocol
from equipoise.methods import Context, Method, State
from equipoise.methods.base import Parameters, Plan
from equipoise.methods.named_tensors import copied
from equipoise.methods.wrapper import MethodWrapper

__all__ = ["Wrapped", "check_passed_on", "innermost"]


class Wrapped(RoundProtocol, MethodWrapper):
    """The inner method's plan, cost, claims, state and hooks, and the point where the server put the client.

    Around a method that follows the server's clip norm or answers its query, it does so too.

    Args:
        inner: what estimates the gradient.
    """

    def init(self, context: Context) -> State:
        """The inner state, and the point where the round begins."""
        return {**super().init(context), "start": copied(context.params)}

    def rebase(self, state: State, params: Parameters) -> State:
        """The round begins where the server put the parameters."""
        return {**super().rebase(state, params), "start": copied(params)}

    @property
    def _hooks(self) -> RoundProtocol:
        return self.inner if isinstance(self.inner, RoundProtocol) else RoundProtocol()

    @property
    def follows_clip_norm(self) -> bool:
        """As the inner method."""
        return self._hooks.follows_clip_norm

    @property
    def follows_limit(self) -> bool:
        """As the inner method."""
        return self._hooks.follows_limit

    @property
    def follows_control(self) -> bool:
        """As the inner method."""
        return self._hooks.follows_control

    @property
    def answers_query(self) -> bool:
        """As the inner method."""
        return self._hooks.answers_query

    def radius_noise(self, plan: Plan) -> float:
        """The inner method's; see `ServerRMS`."""
        return float(self._server_rms.radius_noise(plan))

    @property
    def _server_rms(self) -> Any:
        if not self.answers_query:
            raise TypeError(f"method {self.name!r} is around {self.inner.name!r}, which answers no query")
        return self.inner

    def ask(self, context: Context, state: State) -> float:
        """The inner method's answer to the query; see `ServerRMS`."""
        return float(self._server_rms.ask(context, state["inner"]))

    def with_limit(self, state: State, square_limit: float) -> State:
        """The inner state with the scale of the squares."""
        return {**state, "inner": self._hooks.with_limit(state.get("inner", {}), square_limit)}

    def with_radius(self, state: State, clip_norm: float) -> State:
        """The inner state with the server's clip norm."""
        return {**state, "inner": self._hooks.with_radius(state.get("inner", {}), clip_norm)}

    def with_control(self, state: State, control: Parameters | None) -> State:
        """The inner state with the server's control variate."""
        return {**state, "inner": self._hooks.with_control(state["inner"], control)}

    def end_round(self, state: State, end: Parameters) -> State:
        """The inner state after the round."""
        return {**state, "inner": self._hooks.end_round(state["inner"], end)}

    def answer(self, state: State, start: Parameters, end: Parameters) -> dict[str, Tensor]:
        """The inner method's."""
        return self._hooks.answer(state["inner"], start, end)


def check_passed_on(method: Method) -> None:
    """See that the server reaches every method inside that takes part in the rounds.

    Raises:
        ValueError: one of them is inside a method that passes nothing of a round on.
    """
    while isinstance(method, MethodWrapper):
        outer, method = method, method.inner
        if isinstance(method, RoundProtocol) and not isinstance(outer, RoundProtocol):
            raise ValueError(
                f"method {outer.name!r} is around {method.name!r}, which takes part in the server's rounds, "
                f"and passes nothing of them on. Leave {outer.name!r} out, put it inside where "
                f"{method.name!r} takes a method, or derive it from "
                "equipoise.federated.methods.round_wrapper.Wrapped. Nothing was spent"
            )


def innermost(method: Method) -> Method:
    """The method inside all others."""
    while isinstance(method, MethodWrapper):
        method = method.inner
    return method
