"""Whether a model gives one answer whatever the input: it learned nothing, or its numbers are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

ENOUGH = 20
"""A choice: fewer records may well have one class by chance; with more, small evaluations are passed over."""


class Answers:
    """What a model's forwards returned, as far as it tells whether the answers differ."""

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None
        self._count, self._differ = 0, False

    @property
    def are_one(self) -> bool:
        """Whether all records met had the same answer."""
        return self._count >= ENOUGH and not self._differ

    def take(self, outputs: object) -> None:
        """Compare the outputs of a forward, [B] or [B, classes], with the first one; others tell nothing."""
        if not isinstance(outputs, torch.Tensor) or outputs.ndim not in (1, 2) or not len(outputs):
            self._differ = True
            return
        is_choice = outputs.ndim == 2 and outputs.shape[1] > 1
        answers = outputs.detach().argmax(1) if is_choice else outputs.detach().flatten()
        self._first = answers[0] if self._first is None else self._first
        self._differ |= not torch.equal(answers, self._first.expand_as(answers).to(answers))
        self._count += len(answers)


@contextmanager
def watch_answers(model: nn.Module) -> Iterator[Answers]:
    """Look at what the model's forwards return inside."""
    answers = Answers()
    hook = model.register_forward_hook(lambda _, inputs, outputs: answers.take(outputs))
    try:
        yield answers
    finally:
        hook.remove()
