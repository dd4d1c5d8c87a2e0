"""The second way: rows of records compared, where no proof says that they do not mix.

A model whose operations cannot be traced, or have no rule, runs at the size of a step next to other records:
large ones, zeros, NaN, copies of itself. No row may move by more than rounding, at the model's parameters and
at others that are nowhere zero (a mixture behind a gate of zeros moves nothing), under several seeds. What
only other values or rarer random numbers would show is not seen: a statement says "compared".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise._dtensor import all_values, device_of, with_values
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.random_numbers import GlobalState
from equipoise.gradients.checks.errors import CrossRecordError
from equipoise.gradients.engine_inputs import (
    Loss,
    evaluate_loss,
    map_records,
    num_records,
    take_records,
    trainable_parameters,
)
from equipoise.gradients.numerics import length

#: Under so many seeds rows are compared, and losses of a few records: a branch that one forward in five takes
#: is missed with 3% by rows, of one in twenty with 4% by losses, of one in fifty with 27%. Choices: each seed
#: costs four runs at least, of all rows or of the losses of the few.
SEEDS, LOSS_SEEDS, FEW = 16, 64, 8

#: Kernels compute rows in tiles of so many, and those of an incomplete tile in another order of additions: a
#: record's row would round otherwise with its place, which follows the others. At a kink that moves a sum by
#: many clip norms (a linear layer of 1,000 inputs, in microbatches of 7: by 11). Kernels with larger tiles
#: would need a larger one; larger ones fill small draws with more filler rows.
ROW_TILE = 4

#: What the gradient of a record becomes: some hooks look for such in the whole batch. 1e30 is finite and has
#: a square beyond float32; a hook that looks for a kind that is missing here is not met.
NOT_USUAL = (math.nan, math.inf, 1e30)

#: How much larger the values of others are; the smaller ones if a model refuses the larger. Choices: by less,
#: a weak dependence on others drowns in rounding; by more, more models overflow.
LARGER = (100.0, 10.0, 3.0)


@dataclass(frozen=True)
class Independence:
    """Whether a record's gradient depends on that record alone.

    Attributes:
        word: "proved" for all values of the records; "compared" on a few of them; "unchecked".
        reason: why it is not proved.
    """

    word: Literal["proved", "compared", "unchecked"]
    reason: str = ""

    def __str__(self) -> str:
        if self.word == "proved":
            return "proved, for all values of the records"
        return self.word + f" ({self.reason})" * bool(self.reason)

    @classmethod
    def of(cls, text: str) -> Independence:
        """What `str` made this text of.

        >>> Independence.of("compared (a value is read (line 3))")
        Independence(word='compared', reason='a value is read (line 3)')
        """
        found, _, reason = text.partition(" (")
        word: Any = found.partition(",")[0]
        return cls(word, reason.removesuffix(")"))


#: So many records stand among copies of themselves: next to longer ones, some may be trimmed less. A choice:
#: each costs a run of all rows, and of a larger batch the records between are not compared so.
MOST_COPIED = 8

Changed = tuple[Any, slice]
"""A batch, and which of its records are those that they were."""


def with_others(batch: Any) -> Iterator[Iterator[Changed]]:
    """Batches in which some records stay and the others change, each in several forms, the hardest first.

    Floating-point values become others; whole numbers and truth values those of the record behind or, if all
    records share them, lower ones: a model need not take any other.

    Args:
        batch: two records at least.

    >>> changed, same = next(next(with_others(torch.full((7, 1), 0.5))))
    >>> changed.squeeze(1).tolist(), changed[same].squeeze(1).tolist()
    ([50.0, 0.5, -50.0, 50.0, 0.0, -50.0, 0.5], [0.5, 0.5])
    """
    count = num_records(batch)
    few, most = slice(1, None, 5), slice(1, None)
    yield ((_next_to(batch, few, size), few) for size in LARGER)
    yield iter([(_next_to(batch, most), most)])
    yield iter([(_next_to(batch, few, math.nan), few)])
    for place in range(0, count, -(-count // MOST_COPIED)):
        yield iter([(take_records(batch, torch.full((count,), place)), slice(place, place + 1))])


def _next_to(batch: Any, same: slice, size: float | None = None) -> Any:
    """Other records next to the same ones: `size`, 0 and -`size` times as large, in turn, zeros as ones.

    With no size, and where most records hold only whole numbers, they hold those of the record behind.
    """
    places = torch.arange(num_records(batch))
    behind, times = (places + 1) % len(places), torch.tensor([size or 0.0, 0.0, -(size or 0.0)])[places % 3]
    if size is not None and math.isnan(size):
        times.fill_(math.nan)
    behind[same], times[same] = places[same], 1.0

    def holds_whole_numbers(leaf: Tensor) -> bool:
        return bool((leaf == leaf.round())[:, None].flatten(1).all(1).float().mean() > 0.5)

    def changed(leaf: Tensor) -> Tensor:
        own = (behind == places).to(leaf.device).reshape(-1, *[1] * (leaf.ndim - 1))
        if leaf.is_floating_point() and size is not None and not holds_whole_numbers(leaf):
            by = times.to(leaf.device).reshape(own.shape)
            return torch.where(own, leaf, (torch.where(leaf == 0, 1, leaf) * by).to(leaf.dtype))
        others = leaf[behind.to(leaf.device)]
        if leaf.is_floating_point() or leaf.is_complex() or not leaf.equal(leaf[:1].expand_as(leaf)):
            return others
        lower = ~leaf if leaf.dtype == torch.bool else leaf - (leaf > 0).to(leaf.dtype)
        return torch.where(own, leaf, lower)

    return map_records(changed, batch)


def compare(
    model: nn.Module,
    run: Callable[..., Any],
    moved: Callable[[Any, Any], list[str]],
    batch: Any,
    others: Mapping[str, Tensor],
    not_usual: Sequence[float] = NOT_USUAL,
    seeds: Sequence[int] = range(SEEDS),
) -> bool:
    """Refuse a model in which a record's row moves with the records next to it.

    Args:
        model: that is run.
        run: run(batch, params, upstream) gives the rows of records, at the model's parameters (None) or
            others, of losses whose gradients are `upstream` (None: 1).
        moved: of which parameters the rows of the same records differ by more than rounding.
        batch: records, as many as in a step.
        others: parameters that are nowhere zero.
        not_usual: what the gradient of the first loss becomes, in turn.
        seeds: of the random numbers; those behind the first only if random numbers are asked for.

    Returns:
        Whether random numbers are asked for.

    Raises:
        CrossRecordError: a row moved.
        ValueError: with the same random numbers rows are others each time.
    """
    draws, count = False, num_records(batch)

    def rows(seed: int, batch: Any, params: Any, upstream: Tensor | None = None) -> Any:
        nonlocal draws
        with undisturbed(model, seed, dropout=True), torch.enable_grad():
            start = GlobalState(device_of(next(model.parameters())))
            found = run(batch, params, upstream)
            draws |= bool(start.moved())
        return found

    for params in (None, others):
        for seed in seeds:
            is_first = seed == seeds[0]
            if not (is_first or draws):
                break
            before = rows(seed, batch, params)
            if is_first and moved(before, rows(seed, batch, params)):
                raise ValueError(f"model or loss give other losses or gradients each time, {OWN_GENERATOR}")
            for one in with_others(batch) if is_first else [next(with_others(batch))]:
                for changed, same in one:
                    try:
                        after = rows(seed, changed, params).rows(same)
                    except Exception:  # it does not take such records
                        continue
                    _refuse(moved(before.rows(same), after))
                    break
            # A record that draws gets the numbers of another place; where tiles are cut it rounds otherwise.
            if not draws and count % ROW_TILE == 0:
                order = torch.arange(count).roll(ROW_TILE)
                after = rows(seed, take_records(batch, order), params)
                _refuse(moved(before.rows(order), after), "at another place in the batch")
            for number in not_usual if is_first else ():
                upstream = torch.cat([torch.tensor([number]), torch.ones(count - 1)])
                try:
                    with torch.autograd.set_detect_anomaly(False):  # it stops at NaN
                        after = rows(seed, batch, params, upstream)
                except Exception:  # a backward that refuses such tells nothing
                    continue
                _refuse(moved(before.rows(slice(1, None)), after.rows(slice(1, None))))
    return draws


def _refuse(names: list[str], where: str = "next to other records") -> None:
    if names:
        raise CrossRecordError(
            f"{where}, a record's loss or gradient is another one ({', '.join(names[:3])})"
        )


OWN_GENERATOR = (
    "though the global random numbers of torch, NumPy and Python start alike: they keep a random generator "
    "or a state of their own, or compare records. It would follow which records are drawn, and the "
    "guarantee would not hold. Draw random numbers from the global functions (torch.rand, np.random, random)."
)


#: Relative rounding of losses by their type, and of those that come of half precision (bfloat16 has an eps of
#: 8e-3). Choices: tighter ones refuse models for their rounding, wider ones overlook a dependence that small.
LOSSES_ROUND, LOW_PRECISION_LOSSES_ROUND = {torch.float64: 1e-9, torch.float32: 1e-5}, 2e-2


def losses_moved(before: Tensor, after: Tensor, slack: float = 1.0, low_precision: bool = False) -> bool:
    """Whether losses moved by more than rounding.

    Rounding is relative to the largest loss, but to 1 at most: losses may all be tiny.

    Args:
        before, after: losses [B] of the same records.
        slack: times rounding, where the batches had different shapes, and the parts of a tiny loss round by
            more than its own size. Half precision has room for that.
        low_precision: whether losses in a longer type come of half precision.
    """
    if before.shape != after.shape:
        return True
    wide = before.detach().double(), after.detach().double()
    rounding = None if low_precision else LOSSES_ROUND.get(before.dtype)
    tolerance = LOW_PRECISION_LOSSES_ROUND if rounding is None else slack * rounding
    largest = float(wide[0].nan_to_num(posinf=1.0, neginf=1.0).abs().max()) if len(wide[0]) else 0.0
    absolute = tolerance * min(1.0, largest)
    if slack > 1:
        absolute = max(absolute, 1e-5)
    return not torch.allclose(*wide, rtol=tolerance, atol=absolute, equal_nan=True)


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
