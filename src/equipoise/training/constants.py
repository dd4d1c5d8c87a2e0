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
from equipoise.gradients.capture.attributes import Change, HeldState
from equipoise.statements.assumptions import CHANGED, FIRST_VALUES
from equipoise.training.record_source import DataError

MOST_TRIED = 4
"""So many new values of a name are tried, and one fraction: a counter has another one in every step.

A choice: more make steps of such runs slower, fewer leave later values untried.
"""

MOST_TRIALS = 100
"""In all, a choice: each may take a second, and a collate function may keep what it makes under new names.

With fewer, later changes are not tried.
"""


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
        self._try_again, self._trace_anew = try_again, trace_anew
        self.also: set[str] = set()
        self._trials = 0
        self.changed: set[str] = set()
        self.untried: set[str] = set()
        self._met: dict[tuple[int, str], list[Any]] = {}

        def note() -> None:
            tensors = chain(model.parameters(), model.buffers(), live)
            self._held = HeldState(model, loss, tensors), HeldState(nn.Module(), others)

        self._note = note
        note()

    def check(self, more: Sequence[Change] = ()) -> None:
        """Try the model again if something has a value that it did not have before.

        Args:
            more: what else has changed.

        Raises:
            CrossRecordError, DataError: with the new values records are mixed; it names what changed.
        """
        held, of_others = self._held
        changes = {change.key: change for change in [*more, *of_others.changes(), *held.changes()]}
        if not (more or held.differs or of_others.differs):
            return
        if held.differs:
            self._trace_anew()
        unmet, tried = [], []
        for change in changes.values():
            met = self._met.setdefault(change.key, [change.before])
            if change.now not in met:
                unmet.append(change)
                if len(met) <= (1 if isinstance(change.now, float) else MOST_TRIED):
                    tried.append(change)
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
                return
        for change in tried:
            self._met[change.key].append(change.now)
        self.changed.update(change.name for change in changes.values())
        self.untried.update(change.name for change in unmet if change not in tried)
        self._note()

    @property
    def assumptions(self) -> list[str]:
        """What a statement has to say of them."""
        names = sorted(name + FIRST_VALUES * (name in self.untried) for name in self.changed)
        return [*self.also, *([CHANGED + ", ".join(names)] if names else [])]
