"""Losses of a model before its training, where nothing that mixes records can hide.

At the parameters that a model begins with, a mixture often moves nothing: behind a gate or a head of zeros
(ReZero, LayerScale, adaptive layer norms, low-rank updates). So records are compared at parameters that are
nowhere zero, under random numbers that are held constant at several quantiles.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._dtensor import all_values, with_values
from equipoise.gradients.capture.isolation import Buffers, undisturbed
from equipoise.gradients.capture.random_numbers import MIDDLE, RARE, Asked
from equipoise.gradients.capture.sharded import SHARDED, leaves_told
from equipoise.gradients.checks.errors import CrossRecordError
from equipoise.gradients.checks.record_mixing import (
    RecordChange,
    TracedLosses,
    find_mixing_module,
    follows_company,
    infects,
    mixing_change,
)
from equipoise.gradients.checks.row_comparison import length
from equipoise.gradients.engine_inputs import (
    Loss,
    backward_at,
    backward_included,
    evaluate_loss,
    map_records,
    num_records,
    record_leaves,
    trainable_parameters,
)

__all__ = [
    "RecordTrials",
    "away_from_zero",
    "follows_unseen_numbers",
    "may_follow_numbers",
    "random_numbers_that_matter",
]


HeldNumbers = tuple[float | None, int]
"""Quantile and seed of the random numbers under which records are compared."""

#: Torch's common functions, Python and NumPy give the quantile: a branch that one in a thousand calls takes
#: is met. Other functions follow the seed.
HELD: tuple[HeldNumbers, ...] = ((RARE, 1), (1 - RARE, 2), (0.1, 3), (0.5, 4), (0.7, 5), (0.9, 6))

#: All of them random, for a mixture of the random numbers themselves, and for those that cannot be held.
FREE: tuple[HeldNumbers, ...] = tuple((None, seed) for seed in range(7, 13))

#: Changes of a record under each of these after the first ones.
FEW_CHANGES = 2


class RecordTrials:
    """Per-record losses of a model, and whether they follow other records.

    Args:
        model: it is left as it was.
        loss: per-record losses, [B].
        batch: a few records that the model takes.

    Attributes:
        params: the trainable parameters away from zero.
    """

    def __init__(self, model: nn.Module, loss: Loss, batch: Any) -> None:
        self._model, self._loss = model, loss
        self.params = away_from_zero(model, loss, batch)

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold a part of the model each."""
        return self._model in SHARDED

    def losses(
        self, batch: Any, level: float | None = MIDDLE, seed: int = 0, *, at_start: bool = False
    ) -> Tensor:
        """Per-record losses [B], without dropout.

        Args:
            batch: records.
            level: the quantile at which random numbers are held; None leaves them random, dropout too.
            seed: of the random numbers that cannot be held.
            at_start: at the parameters that the model has.
        """
        with undisturbed(self._model, seed, dropout=level is None, level=level or MIDDLE):
            return self.evaluate(batch, at_start=at_start)

    @torch.enable_grad()  # as in a step: a loss may take gradients itself
    def evaluate(self, batch: Any, *, at_start: bool = False) -> Tensor:
        """Per-record losses [B] under the random numbers of the caller."""
        with Buffers(self._model).kept():
            return evaluate_loss(self._model, self._loss, batch, None if at_start else self.params).detach()

    @torch.enable_grad()
    @backward_included()
    def gradient(self, batch: Any, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Per-record losses [B], and the gradient of their weighted sum, at `params`.

        Args:
            batch: records.
            weights: of their losses, [B].
        """
        seen = dict(self.params)

        def hear(name: str, tensor: Tensor) -> None:
            if name in seen:
                seen[name] = tensor

        with Buffers(self._model).kept(), leaves_told(hear), backward_at(self._model, self.params):
            losses = evaluate_loss(self._model, self._loss, batch, self.params)
            if not losses.requires_grad:
                return losses, []
            found = torch.autograd.grad(losses, [*seen.values()], weights.to(losses), allow_unused=True)
        # Look-ups may give sparse ones.
        return losses.detach(), [g.detach().to_dense() for g in found if g is not None]

    def row(self, batch: Any, count: int = 1) -> list[Tensor]:
        """The sum of the first records' gradient rows at `params`, by parameter, as `losses` are made."""
        with undisturbed(self._model):
            return self.gradient(batch, (torch.arange(num_records(batch)) < count).float())[1]

    def refuse_mixing(self, batch: Any, most: int | None = None) -> None:
        """Change several records in several ways, under several random numbers where they change anything.

        Args:
            batch: at least two records.
            most: how many changes are tried; all by default.

        Raises:
            CrossRecordError: the loss of another record moved.
        """
        for number, ((level, seed), before) in enumerate(self._random_numbers(batch)):

            def losses(records: Any, level: float | None = level, seed: int = seed) -> Tensor:
                return self.losses(records, level, seed)

            few = FEW_CHANGES if number > 3 else most
            self._refuse(losses, batch, mixing_change(losses, batch, few, before))
            if number or most is not None:
                continue
            self._refuse(losses, batch, follows_company(losses, batch, before))
            if infects(*self._on_host(batch)):
                raise CrossRecordError(*find_mixing_module(self._model, losses, batch))

            def at_start(records: Any) -> Tensor:
                return self.losses(records, at_start=True)

            self._refuse(at_start, batch, mixing_change(at_start, batch, FEW_CHANGES))

    def _refuse(self, losses: Callable[[Any], Tensor], batch: Any, change: RecordChange | None) -> None:
        if change is not None:
            raise CrossRecordError(*find_mixing_module(self._model, losses, batch, change))

    def _on_host(self, batch: Any) -> tuple[nn.Module, Callable[[Any], Tensor], Any]:
        """Model, losses and batch on the CPU: NaN in a kernel of a GPU may end the process there."""
        if self._model in SHARDED or not any(leaf.is_cuda for leaf in record_leaves(batch)):
            return self._model, self.losses, batch
        host = RecordTrials.__new__(RecordTrials)
        host._model, host._loss = copy.deepcopy(self._model).cpu(), self._loss
        host.params = {name: p.detach().cpu().requires_grad_() for name, p in self.params.items()}
        return host._model, host.losses, map_records(Tensor.cpu, batch)

    def follow_unseen_numbers(self, batch: Any) -> bool:
        """Whether random numbers change losses, though none were seen to be asked for."""
        return follows_unseen_numbers(lambda *numbers: self._measured(batch, *numbers)[1:])

    def _measured(self, batch: Any, level: float | None, seed: int) -> tuple[TracedLosses, Tensor, Asked]:
        asked = Asked()

        def run(records: Any) -> Tensor:
            nonlocal asked
            with undisturbed(self._model, seed, dropout=level is None, level=level or MIDDLE) as asked:
                return self.evaluate(records)

        losses = TracedLosses.of(run, batch)
        return losses, losses.values, asked

    def _random_numbers(self, batch: Any) -> Iterator[tuple[HeldNumbers, TracedLosses]]:
        """Those under which losses are others than under the first ones, and the losses."""
        found: dict[HeldNumbers, TracedLosses] = {}

        def measured(level: float | None, seed: int) -> tuple[Tensor, Asked]:
            found[level, seed], values, asked = self._measured(batch, level, seed)
            return values, asked

        for numbers in random_numbers_that_matter(measured):
            if numbers not in found:
                measured(*numbers)
            yield numbers, found[numbers]


MeasuredUnder = Callable[[float | None, int], tuple[Tensor, Asked]]
"""Measures something of records under random numbers of a quantile and a seed, and what was asked for."""


def random_numbers_that_matter(measured: MeasuredUnder) -> Iterator[HeldNumbers]:
    """Quantile and seed of the random numbers to compare records under.

    Args:
        measured: called with a quantile and a seed.

    Yields:
        The middle ones, and those under which other things are measured.
    """
    usual, asked = measured(MIDDLE, 0)
    yield MIDDLE, 0
    if not (asked.dropout or _may_follow(measured, usual, asked)):
        return
    differ = [numbers for numbers in HELD if _differs(measured, usual, numbers)]
    yield from differ
    yield from FREE if differ or _differs(measured, usual, (MIDDLE, 1)) else FREE[:1]


def may_follow_numbers(measured: MeasuredUnder) -> bool:
    """Whether other random numbers may change what is measured; dropout aside."""
    return _may_follow(measured, *measured(MIDDLE, 0))


def follows_unseen_numbers(measured: MeasuredUnder) -> bool:
    """Whether random numbers change what is measured, though none were seen to be asked for."""
    usual, asked = measured(MIDDLE, 0)
    return not asked.numbers and _may_follow(measured, usual, asked)


def _may_follow(measured: MeasuredUnder, usual: Tensor, asked: Asked) -> bool:
    # Numbers of a generator that is copied, or put back, are asked for unseen: try two of every model.
    return asked.numbers or any(_differs(measured, usual, numbers) for numbers in HELD[:2])


def _differs(measured: MeasuredUnder, usual: Tensor, numbers: HeldNumbers) -> bool:
    try:
        return not torch.equal(measured(*numbers)[0], usual)
    except Exception:  # numbers that the model does not take, such as those that drop all tokens
        return False


def away_from_zero(model: nn.Module, loss: Loss, batch: Any) -> dict[str, Tensor]:
    """The trainable parameters with public noise, of the size that a usual layer begins with.

    Args:
        model, loss: some loss at these parameters is finite.
        batch: a few records that the model takes.

    Returns:
        New values that require gradients; the model's own where no noise leaves any loss finite.
    """
    own = trainable_parameters(model)
    for share in (0.5, 0.05):
        generator = torch.Generator().manual_seed(21)
        noised = {
            name: with_values(_noised(all_values(p), share, generator), p).requires_grad_()
            for name, p in own.items()
        }
        try:
            with torch.enable_grad(), undisturbed(model):
                if bool(torch.isfinite(evaluate_loss(model, loss, batch, noised)).any()):
                    return noised
        except Exception:  # such as a probability that has to stay within its range
            continue
    return {name: p.detach().clone().requires_grad_() for name, p in own.items()}


def _noised(values: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """With noise of this share of their root mean square, and of 1/sqrt(inputs per output) at least."""
    inputs = values[0].numel() if values.ndim > 1 and len(values) else 1
    usual = float(length(values)) / math.sqrt(max(1, values.numel()))
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float32)  # the same on all devices
    scale = share * max(usual, 1 / math.sqrt(max(1, inputs)))
    return noise.to(values).mul_(scale).add_(values)
