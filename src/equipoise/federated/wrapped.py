"""A method around another one: it changes the noised estimate or the answer, and releases nothing itself."""

from __future__ import annotations

from equipoise.federated.hooks import RoundHooks
from equipoise.methods import Context, State
from equipoise.methods.base import Parameters
from equipoise.methods.named_tensors import copied
from equipoise.methods.wrapper import MethodWrapper

__all__ = ["Wrapped"]


class Wrapped(RoundHooks, MethodWrapper):
    """The inner method's plan, cost, claims and state, and the point where the server put the client.

    Args:
        inner: what estimates the gradient.
    """

    def init(self, context: Context) -> State:
        """The inner state, and the point where the round begins."""
        return {**super().init(context), "start": copied(context.params)}

    def rebase(self, state: State, params: Parameters) -> State:
        """The round begins where the server put the parameters."""
        return {**super().rebase(state, params), "start": copied(params)}
