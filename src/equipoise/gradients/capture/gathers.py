"""The order in which FSDP gathers the parameters of a sharded model in a forward and its backward.

Every gather is an exchange of all processes, which take part in it at the same place of the same order. A
forward that fails on one process would leave the others waiting. One that uses other modules than planned
would join parts of different parameters into one. Both are kept from it here: only what is next in the order
is gathered, and what a forward left out is gathered after it, so that the others find what they wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.capture.sharded import fsdp_groups, resharded


class GatherError(RuntimeError):
    """Parameters could not be gathered: another process ended, or the connection to it."""


class GatherOrder:
    """What a forward and its backward gather, in this order.

    Args:
        model: sharded by `fully_shard`, and has run before.

    Attributes:
        planned: groups of parameters by number, as noted; None before.

    Raises:
        NotImplementedError: a part is gathered from some of the processes only in the backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._groups = model, fsdp_groups(model)
        if any(group._use_post_forward_mesh for group in self._groups):
            raise NotImplementedError(
                "fully_shard(reshard_after_forward=N) of the model keeps parts between forward and backward "
                "that a failing record would lose: give reshard_after_forward=True or False"
            )
        self.planned: tuple[int, ...] | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, a forward and its backward run; what they gather is the order from then on."""
        found: list[int] = []
        with self._asked(found.append):
            yield
        self.planned = tuple(found)

    @contextmanager
    def kept(self, times: int = 1) -> Iterator[None]:
        """Inside, so many forwards run; whether or not one fails, all gathers of the order have been made.

        Raises:
            PlanMismatch: something else was to be gathered; it was not.
            GatherError: an exchange failed.
        """
        assert self.planned is not None
        waiting = deque(self.planned * times)
        mismatch = PlanMismatch("it uses the parts of the sharded model in another order")
        refused: list[int] = []

        def ask(number: int) -> None:
            if not waiting or waiting[0] != number:
                refused.append(number)
                raise mismatch
            waiting.popleft()

        with self._asked(ask):
            try:
                yield
            finally:
                if waiting:
                    self._gather(tuple(waiting))
        if refused:  # and the model caught the error
            raise mismatch

    @torch.no_grad()
    def _gather(self, numbers: tuple[int, ...]) -> None:
        """Take part in these gathers; what comes of them is thrown away."""
        try:
            resharded(self._model)
            for number in numbers:
                self._groups[number].unshard()
                self._groups[number]._reset_iter_state()
        except GatherError:
            raise
        except Exception as error:  # such as a want of memory: the others wait
            raise GatherError(
                f"what a failed forward left out could not be gathered ({error}): another process has ended, "
                "or memory is short."
            ) from error

    @contextmanager
    def _asked(self, ask: Callable[[int], None]) -> Iterator[None]:
        """Inside, `ask(number)` is called before a group is gathered; what it raises prevents that."""
        own = [group._all_gather_comm for group in self._groups]
        for number, group in enumerate(self._groups):
            group._all_gather_comm = _AskedGather(own[number], number, ask)
        try:
            yield
        finally:
            for group, gather in zip(self._groups, own, strict=True):
                group._all_gather_comm = gather


class _AskedGather:
    """A group's gather, which asks first."""

    def __init__(self, own: Any, number: int, ask: Callable[[int], None]) -> None:
        self._own, self._number, self._ask = own, number, ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._ask(self._number)
        try:
            return self._own(*args, **kwargs)
        except Exception as error:
            raise GatherError(
                f"the parameters of a sharded model could not be gathered ({error}): another process has "
                "ended, or memory is short."
            ) from error
