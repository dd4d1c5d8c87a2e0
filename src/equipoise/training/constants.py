"""What the start read as constants, and whether the training loop has changed it since.

The checks before a training run the model as it is then. A switch that the loop sets later (a warm-up that
ends, a phase, another activation) makes another model, which nobody tried. So before each step the plain
values that model, loss, augmentation and collate function hold are compared with those of the last one; with
a new value all of them are tried again before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from equipoise.gradients import CrossRecordError, ForwardWritesError
from equipoise.gradients.capture.attributes import HeldState
from equipoise.training.assumptions import CHANGED, FIRST_VALUES
from equipoise.training.record_source import DataError

__all__ = ["Constants"]

MOST_TRIED = 4
"""So many new values of a name are tried, and one fraction: a counter has another one in every step."""

MOST_TRIALS = 100
"""In all: each may take a second, and a collate function may keep what it makes under ever new names."""


class Constants:
    """The plain values that model and functions of the user hold, as they were before the last step.

    Args:
        model, loss: of the training.
        others: its augmentation and collate function.
        try_again: tries them as they are now, and gives what else a statement has to say.
        trace_anew: called if model or loss hold another thing than before.
        live: tensors, beside parameters and buffers, that hold other values in each step.

    Attributes:
        changed: names of what was changed since the start.
        untried: those of them that took more values than are tried.
        also: what else a statement has to say of what happened since.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        others: tuple[Any, ...],
        try_again: Callable[[], Sequence[str]],
        trace_anew: Callable[[], None],
        live: Sequence[Tensor] = (),
    ) -> None:
        self._model, self._loss, self._others = model, loss, others
        self._try_again, self._live = try_again, live
        self._trace_anew = trace_anew
        self.also: set[str] = set()
        self._trials = 0
        self.changed: set[str] = set()
        self.untried: set[str] = set()
        self._met: dict[tuple[int, str], list[Any]] = {}
        self._note()

    def _note(self) -> None:
        live = chain(self._model.parameters(), self._model.buffers(), self._live)
        self._held = HeldState(self._model, self._loss, live)
        self._held_by_others = HeldState(nn.Module(), self._others)

    def check(self) -> bool:
        """Try the model again if something has a value that it did not have before.

        Returns:
            Whether something has changed.

        Raises:
            CrossRecordError, DataError: with the new values records are mixed; it names what changed.
        """
        found = [*self._held_by_others.changes(), *self._held.changes()]
        changes = list({change.key: change for change in found}.values())
        if self._held.differs:
            self._trace_anew()
        if not changes:
            if self._held.differs:
                self._note()
            return False
        for change in changes:
            self._met.setdefault(change.key, [change.before])
        unmet = [change for change in changes if change.now not in self._met[change.key]]
        tried = [
            change
            for change in unmet
            if len(self._met[change.key]) <= (1 if isinstance(change.now, float) else MOST_TRIED)
        ]
        self._trials += bool(tried)
        tried = tried if self._trials <= MOST_TRIALS else []
        if tried:
            try:
                self.also.update(self._try_again())
            except (CrossRecordError, DataError) as error:
                names = ", ".join(sorted({change.name for change in tried}))
                reason = str(error).removesuffix(" Nothing was spent.")
                error.args = (
                    f"the training loop changed {names} after the start, and with that {reason} Nothing was "
                    "drawn for this step. Set it back, and the training goes on",
                )
                raise
            except ForwardWritesError:
                raise
            except Exception:  # the step fails in the same way, and tells the other processes as ever
                return True
        for change in tried:
            self._met[change.key].append(change.now)
        self.changed.update(change.name for change in changes)
        self.untried.update(change.name for change in unmet if change not in tried)
        self._note()
        return True

    @property
    def assumptions(self) -> list[str]:
        """What a statement has to say of them."""
        names = sorted(name + FIRST_VALUES * (name in self.untried) for name in self.changed)
        return [*self.also, *([CHANGED + ", ".join(names)] if names else [])]
