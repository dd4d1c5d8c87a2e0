"""Whether records of a batch are mixed: one record is changed to see whether another's loss moves.

A mixture may be hidden from one kind of change: a statistic that a constant does not move, a neighbour on one
side only, a branch that large values take. So several records are changed in several ways, in turn.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from equipoise.gradients.capture.recorder import CallTrace, tensors_in
from equipoise.gradients.engine_inputs import map_records, num_records, perturb_record, take_records
from equipoise.gradients.rules.operation import Layout, record_first

__all__ = [
    "MANY",
    "NOT_USUAL",
    "RecordChange",
    "TracedLosses",
    "changes",
    "exchanged",
    "find_mixing_module",
    "follows_company",
    "infects",
    "is_frozen_norm",
    "losses_moved",
    "mixing_change",
    "other_companies",
]


#: Records of a batch on which mixing is looked for: pairs and small groups show.
MANY = 8

#: How much larger the values of outliers are; the smaller ones where a model refuses the others.
OUTLIERS = (100.0, 10.0, 3.0)

#: What results and gradients of a record become: some guards look for such in the whole batch.
NOT_USUAL = (math.nan, math.inf, 1e30)


@dataclass(frozen=True)
class RecordChange:
    """A batch in which one record has other contents."""

    record: int
    batch: Any


def changes(batch: Any) -> Iterator[RecordChange]:
    """Changes of some records: noise, large and small values, zeros, another record's contents.

    Floating-point values are scaled or noised; other leaves (labels, tokens) get values that some record has
    there or, where all have the same one, lowered by one if it is not zero.

    >>> [change.record for change in changes(torch.eye(4))]
    [0, 3, 1, 2, 0, 3, 0]
    """
    count = num_records(batch)
    last, middle = count - 1, count // 2
    yield RecordChange(0, perturb_record(batch, 0))
    yield RecordChange(last, perturb_record(batch, last))
    yield RecordChange(min(1, last), perturb_record(batch, min(1, last), lambda values: 100 * values))
    yield RecordChange(middle, perturb_record(batch, middle, lambda values: 0 * values))
    yield RecordChange(0, perturb_record(batch, 0, lambda values: -values))
    yield exchanged(batch, last)
    yield RecordChange(0, map_records(_lowered, batch))


def exchanged(batch: Any, record: int) -> RecordChange:
    """A record with the contents of the one behind it, or of the first."""
    index = torch.arange(num_records(batch))
    index[record] = (record + 1) % len(index)
    return RecordChange(record, take_records(batch, index))


Company = tuple[Any, slice]
"""A batch, and which of its records are those that they were."""


def other_companies(batch: Any) -> Iterator[Iterator[Company]]:
    """Batches in which some records stay and the others change, each in several forms, the hardest first.

    Outliers come first. Where a model takes none, one record has the contents of another. Of few records that
    is a company of its own.

    Args:
        batch: two records at least.

    >>> changed, same = next(next(other_companies(torch.full((7, 1), 0.5))))
    >>> changed.squeeze(1).tolist()
    [50.0, 0.5, -50.0, 50.0, 0.0, -50.0, 0.5]
    >>> changed[same].squeeze(1).tolist()
    [0.5, 0.5]
    """
    exchange = exchanged(batch, 0).batch, slice(1, None)
    yield itertools.chain((_among_outliers(batch, size) for size in OUTLIERS), [exchange])
    if num_records(batch) <= MANY:
        yield iter([exchange])


def _among_outliers(batch: Any, size: float) -> Company:
    """Every fifth record stays. The others' values become `size`, 0 or -`size` times as large, zeros as ones.

    Where most records hold only whole numbers or truth values, and where numbers are complex, they become
    those of the record behind: a model need not take any other, and a look-up may read outside its table.
    """
    same = slice(1, None, 5)
    places = torch.arange(num_records(batch))
    times, behind = torch.tensor([size, 0.0, -size])[places % 3], (places + 1) % len(places)
    times[same], behind[same] = math.nan, places[same]

    def holds_whole_numbers(leaf: Tensor) -> bool:
        return bool((leaf == leaf.round())[:, None].flatten(1).all(1).float().mean() > 0.5)

    def changed(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() or holds_whole_numbers(leaf):
            return leaf[behind.to(leaf.device)]
        by = times.to(leaf.device).reshape(-1, *[1] * (leaf.ndim - 1))
        others = torch.where(leaf == 0, 1, leaf) * by
        return torch.where(by.isnan(), leaf, others.to(leaf.dtype))

    return map_records(changed, batch), same


def _lowered(leaf: Tensor) -> Tensor:
    """What all records share, other in the first one: whole numbers lowered by one, truth values reversed."""
    if leaf.is_floating_point() or leaf.is_complex() or not leaf.equal(leaf[:1].expand_as(leaf)):
        return leaf
    if leaf.dtype == torch.bool:
        return torch.cat([~leaf[:1], leaf[1:]])
    return torch.cat([leaf[:1] - (leaf[:1] > 0).to(leaf.dtype), leaf[1:]])


def mixing_change(
    run: Callable[[Any], Tensor], batch: Any, most: int | None = None, before: TracedLosses | None = None
) -> RecordChange | None:
    """The first change that moves the loss of a record other than the changed one, or None.

    Args:
        run: per-record losses [B] of a batch; the same for the same batch.
        batch: two records at least.
        most: how many changes are tried; all by default.
        before: what `run` gives for the batch, where it is known.
    """
    before = before or TracedLosses.of(run, batch)
    for change in itertools.islice(changes(batch), most):
        try:
            after = TracedLosses.of(run, change.batch)
        except Exception:
            continue  # contents that the model does not take tell nothing
        if before.moved(after, change.record):
            return change
    return None


def follows_company(
    run: Callable[[Any], Tensor], batch: Any, together: TracedLosses | None = None
) -> RecordChange | None:
    """The first record whose loss differs between a batch of its own copies and this one, or None.

    Where most records are alike, such as in their length, a change of one may move nothing.

    Args:
        run: per-record losses [B] of a batch; the same for the same batch.
        batch: two records at least.
        together: what `run` gives for the batch, where it is known.
    """
    together, count = together or TracedLosses.of(run, batch), num_records(batch)
    for record in range(count):
        copies = take_records(batch, torch.full((count,), record))
        try:
            own = TracedLosses.of(run, copies)
        except Exception:
            continue
        if own[record : record + 1].moved(together[record : record + 1], record=-1):
            return RecordChange(record, copies)
    return None


def infects(model: nn.Module, run: Callable[[Any], Tensor], batch: Any) -> bool:
    """Whether results of a record that are NaN, or huge, move the loss of another one.

    Guards that look for such losses in the whole batch do that. Results of layers are changed, not records: a
    record that holds NaN never runs, and others become so in the middle of a training.

    Args:
        model: whose layers are changed, while this runs.
        run: per-record losses [B] of a batch; the same for the same batch.
        batch: two records at least.
    """
    layers = [module for module in model.modules() if module._parameters]
    records = num_records(batch)
    # A list that a hook fills would be put back after the forward.
    values: SimpleQueue[Tensor] = SimpleQueue()
    theirs: list[Tensor | None] = []
    level = 0.0

    def watch(module: nn.Module, _: Any, out: Any) -> Any:
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return None
        number = values.qsize()
        values.put(out.detach().clone())
        part = theirs[number] if number < len(theirs) else None
        return None if part is None or part.shape != out.shape else out.masked_fill(part, level)

    handles = [layer.register_forward_hook(watch) for layer in layers]
    try:
        before = TracedLosses.of(run, batch)
        first = _taken(values)
        run(exchanged(batch, 0).batch)
        theirs = [_part_of_first(*pair, records) for pair in zip(first, _taken(values), strict=False)]
        for spoilt in NOT_USUAL:
            level, values = spoilt, SimpleQueue()
            if before.moved(TracedLosses.of(run, batch)):
                return True
    except Exception:
        return False  # results that the model does not take tell nothing
    finally:
        for handle in handles:
            handle.remove()
    return False


def _taken(queue: SimpleQueue[Any]) -> list[Any]:
    """What has been put into it, which is empty then."""
    return [queue.get() for _ in range(queue.qsize())]


def _part_of_first(before: Tensor, after: Tensor, records: int) -> Tensor | None:
    """Where the first record's values are, which alone have changed; None where its part cannot be told."""
    if before.shape != after.shape:
        return None
    changed = _changed(before, after)
    for layout in _layouts(before, records):
        rows = record_first(changed, layout, records)
        if bool(rows[:1].any()) and not bool(rows[1:].any()):
            part = torch.zeros_like(changed)
            record_first(part, layout, records)[:1] = True
            return part if bool(part.any()) else changed
    return None


@dataclass(frozen=True)
class TracedLosses:
    """Per-record losses [B], and what was called for them."""

    values: Tensor
    trace: CallTrace

    @classmethod
    def of(cls, run: Callable[[Any], Tensor], batch: Any) -> TracedLosses:
        with CallTrace(sees_through=False) as trace:
            return cls(run(batch), trace)

    def __getitem__(self, records: Tensor | slice) -> TracedLosses:
        return TracedLosses(self.values[records], self.trace)

    def moved(self, after: TracedLosses, record: int = 0, slack: float = 1.0) -> bool:
        """As `losses_moved`. Half precision rounds anew in other shapes, such as those of trimmed batches."""
        low_precision = self.trace.low_precision or after.trace.low_precision
        is_reshaped = self.trace.shapes() != after.trace.shapes()
        return losses_moved(self.values, after.values, record, slack, low_precision and is_reshaped)


#: Relative rounding of losses by their type, and of those that come of half precision.
LOSSES_ROUND, LOW_PRECISION_LOSSES_ROUND = {torch.float64: 1e-9, torch.float32: 1e-5}, 2e-2


def losses_moved(
    before: Tensor, after: Tensor, record: int = 0, slack: float = 1.0, low_precision: bool = False
) -> bool:
    """Whether losses of records other than ``record`` moved by more than rounding.

    Rounding is relative to the largest loss, but to 1 at most: losses may all be tiny.

    Args:
        before, after: losses [B] of the same records.
        record: whose loss may move; -1 for nobody's.
        slack: times rounding, where the batches had different shapes, and the parts of a tiny loss round by
            more than its own size. Half precision has room for that.
        low_precision: whether losses in a longer type come of half precision.
    """
    if before.shape != after.shape:
        return True
    others = torch.arange(len(before), device=before.device) != record
    wide = before.detach()[others].double(), after.detach()[others].double()
    rounding = None if low_precision else LOSSES_ROUND.get(before.dtype)
    tolerance = LOW_PRECISION_LOSSES_ROUND if rounding is None else slack * rounding
    largest = float(wide[0].nan_to_num(posinf=1.0, neginf=1.0).abs().max()) if len(wide[0]) else 0.0
    absolute = tolerance * min(1.0, largest)
    if slack > 1:
        absolute = max(absolute, 1e-5)
    return not torch.allclose(*wide, rtol=tolerance, atol=absolute, equal_nan=True)


def find_mixing_module(
    model: nn.Module, run: Callable[[Any], Tensor], batch: Any, change: RecordChange | None = None
) -> tuple[str | None, str | None, bool]:
    """The first module whose input or output for other records moves with the changed one.

    Not one inside a module whose output is clean: experts sort the tokens of all records, and sort them back.
    Watches through hooks that live for two runs.

    Returns:
        Its path, None outside of the model; its type; and whether it is its input.
    """
    change = change or RecordChange(0, perturb_record(batch, 0))
    names: Mapping[nn.Module, str] = {module: name for name, module in model.named_modules()}
    seen: SimpleQueue[tuple[nn.Module, bool, list[Tensor]]] = SimpleQueue()  # as in `infects`

    def keep(module: nn.Module, is_input: bool, values: Any) -> None:
        # Under vmap a module has one record, in a wrapper that nobody can look into afterwards.
        # One around the model is its loss, which is no place.
        is_around = module not in names and model in module.modules()
        if not (is_around or torch._C._are_functorch_transforms_active()):
            seen.put((module, is_input, [t.detach().clone() for t in tensors_in(values)]))

    handles = [  # of all modules: a loss may hold some that are not the model's
        register_module_forward_pre_hook(lambda module, args: keep(module, True, args)),
        register_module_forward_hook(lambda module, _, out: keep(module, False, out)),
    ]
    try:
        with warnings.catch_warnings():  # compiled parts warn of hooks that are gone in a moment
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            run(batch)
            before = _taken(seen)
            run(change.batch)
    finally:
        for handle in handles:
            handle.remove()
    records = run(batch).shape[0]
    mixed: list[tuple[nn.Module, bool]] = []
    starts: list[int] = []  # how many there were when the modules began that have not ended
    after: dict[tuple[nn.Module, bool], list[list[Tensor]]] = {}
    for module, is_input, tensors in reversed(_taken(seen)):
        after.setdefault((module, is_input), []).append(tensors)
    for module, is_input, tensors in before:
        calls = after.get((module, is_input))
        others = calls.pop() if calls else []
        is_mixed = any(_mixed(a, b, records, change.record) for a, b in zip(tensors, others, strict=False))
        if not is_input:
            start = starts.pop()
            if not is_mixed:
                del mixed[start:]
        if is_mixed:
            mixed.append((module, is_input))
        if is_input:
            starts.append(len(mixed))
    if not mixed:
        return None, None, False
    module, is_input = mixed[0]
    return names.get(module), f"{'frozen ' * is_frozen_norm(module)}{type(module).__name__}", is_input


def is_frozen_norm(module: nn.Module) -> bool:
    """Whether it is a BatchNorm without trainable parameters that has running statistics to use."""
    return (
        isinstance(module, _BatchNorm)
        and module.track_running_stats
        and not any(p.requires_grad for p in module.parameters())
    )


def _mixed(before: Tensor, after: Tensor, records: int, record: int) -> bool:
    """Whether no way to read records off the axes confines the change to one record."""
    if before.shape != after.shape:
        return True
    if not before.is_floating_point():
        return False
    changed = _changed(before, after)
    if not bool(changed.any()):
        return False
    for layout in _layouts(before, records):
        rows = record_first(changed, layout, records)
        if not bool(rows[:record].any()) and not bool(rows[record + 1 :].any()):
            return False
    return True


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Entries that differ by more than rounding."""
    size = before.detach().double().abs().amax() if before.numel() else torch.tensor(0.0)
    tolerance = 1e-10 if before.dtype == torch.float64 else 1e-5
    return (before.double() - after.double()).abs() > tolerance * size


def _layouts(tensor: Tensor, records: int) -> Iterator[Layout]:
    """The ways to read records off its axes."""
    for axis, length in enumerate(tensor.shape):
        if length % records == 0:
            yield Layout(axis, "major")
            yield Layout(axis, "minor")
