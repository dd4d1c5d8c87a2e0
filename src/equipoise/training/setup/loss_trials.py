"""Trials of model and loss on a few records, before anything is spent."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import _validate
from equipoise._foreign_errors import cause_of, where_raised
from equipoise._tree import leaves
from equipoise.gradients import ForwardWritesError, GradientEngine, parameters_restored
from equipoise.gradients.capture.attributes import HeldState, attributes_kept
from equipoise.gradients.capture.isolation import buffers_kept, undisturbed, write_mark
from equipoise.gradients.checks.errors import BufferWritesError
from equipoise.gradients.compare import OWN_GENERATOR, losses_moved
from equipoise.gradients.engine_inputs import (
    Loss,
    map_records,
    num_records,
    record_leaves,
    run_loss,
    take_records,
)
from equipoise.training.forwards import moved
from equipoise.training.record_source import BatchFormError, DataError, NoAnswerError, RecordSource

SEARCHED = 64
"""How many of the first records are tried, where the very first ones fail.

A choice: of more, a start whose loss always fails says so later; of fewer, some bad records in front end it.
"""

REMEDIES = (
    "Running statistics: give the layer track_running_stats=False. A codebook or an average: make it a "
    "parameter that the loss trains, or change it by public numbers in a hook of the optimizer's step "
    "(optimizer.register_step_post_hook), as a count of steps. What is written in training mode alone stays "
    "as it is after .eval() of its module. A log: run(evaluate=...) on public records."
)
MOST = 8  # names in the warning; describe() lists all

STATE = (
    "A record's loss would follow which records came before it. Compute it from the record's own entries, or "
    "from public records before the training; make it a parameter that the loss trains; or change it by "
    "public or released numbers in a hook (optimizer.register_step_post_hook). Draw random numbers by "
    "torch.rand, np.random or random."
)


def check_loss(
    model: nn.Module, loss: Loss, source: RecordSource, device: torch.device, probes: int = 4
) -> tuple[Any, Tensor]:
    """Run the loss forward on a few records, among them those with the smallest and largest labels.

    Of records that are made on demand, and so were not validated, those that fail are passed over: a bad
    one has weight zero in training too.

    Returns:
        The batch of the records that was used, on `device`: the example for attaching the gradient engine;
        and the records' numbers.

    Raises:
        TypeError: the loss is no function, or does not return a tensor.
        DataError: the forward fails, or the answer is not one finite number per record.
    """
    if not callable(loss) or isinstance(loss, (type, nn.modules.loss._Loss)):
        raise TypeError(
            f"loss is {_validate.what_is(loss)}; give a function loss(model, batch) that returns one number "
            "per record, [B], such as lambda model, batch: criterion(model(batch['input']), batch['label']) "
            "with a criterion of reduction='none'"
        )
    ids = source.probes(probes)
    try:
        return _checked(model, loss, source, device, ids), ids
    except DataError:
        if source.is_scanned:
            raise
        good: list[int] = []
        for number in range(min(SEARCHED, len(source))):
            with suppress(DataError):
                _checked(model, loss, source, device, torch.tensor([number]))
                good.append(number)
        if not good:
            raise
    ids = torch.tensor(good[:probes])
    return _checked(model, loss, source, device, ids), ids


def _checked(model: nn.Module, loss: Loss, source: RecordSource, device: torch.device, ids: Tensor) -> Any:
    """The batch of these records, whose losses are what they must be."""
    try:
        taken = source.take(ids)
    except Exception as error:
        raise DataError(
            f"the records {ids.tolist()} of data cannot be read: {where_raised(error)}. Items of different "
            "sizes need Data(..., collate=...), which pads them to one width. Nothing was spent."
        ) from cause_of(error)
    batch = moved(taken, device)
    count = num_records(batch)

    def losses(records: Any) -> Any:
        with (
            torch.enable_grad(),
            undisturbed(model, dropout=True),
            parameters_restored(model),
            attributes_kept(model, loss),
        ):
            return run_loss(model, loss, records, None)

    if not source.is_elsewhere:
        # A cache that Python fills in the first forward, and that nobody looks into, holds public numbers.
        for whole in (0, 1):  # classes and tokens from 0 on, or from 1
            with suppress(Exception):  # it takes no such records
                losses(map_records(partial(_made_up, whole), batch))
                break
    try:
        values = losses(batch)
    except (ForwardWritesError, BatchFormError, NoAnswerError):  # their texts are ours
        raise
    except Exception as error:
        called = {
            TypeError: " It gets model and batch, and runs the model itself.",
            KeyError: " A column named by owner or ids leaves the batch: owner=its values keeps it.",
        }.get(type(error), "")
        if "more than 1 value per channel" in str(error):  # torch's text
            called = " BatchNorm mixes records: equipoise.replace_batch_norm makes it GroupNorm."
        raise DataError(
            f"loss(model, batch) fails on {count} records (batch: {_shapes(batch)}): {where_raised(error)}."
            f"{called} Check the labels' range, the shapes and the types (of a Hugging Face Dataset give "
            'data.with_format("torch")). Batches are of any size: x.view(-1, ...). Nothing was spent.'
        ) from cause_of(error)
    if not isinstance(values, Tensor):
        raise TypeError(f"loss(model, batch) returns a {type(values).__name__}; it must return a tensor [B]")
    if values.shape != (count,):
        hint = " Average or sum what belongs to one record, for instance loss.mean(1) over tokens."
        if values.ndim == 0:
            hint = ' A mean over the batch has no per-record gradients: use reduction="none".'
        elif values.shape == (count, count):
            hint = " Perhaps an output [B, 1] met a target [B]: give both one shape (output.squeeze(1))."
        raise DataError(
            f"loss(model, batch) returns shape {tuple(values.shape)} for {count} records; it must be "
            f"({count},).{hint}"
        )
    if not bool(torch.isfinite(values).all()):
        raise DataError(
            f"loss(model, batch) is NaN or infinite for {int((~torch.isfinite(values)).sum())} of {count} "
            "records: check the inputs' scale and the initialisation, and divide by mask.sum(1).clamp(min=1)"
        )
    return batch


def _made_up(whole: int, leaf: Tensor) -> Tensor:
    """Public numbers in the form of private ones: between 0 and 1, or this class, token or mark."""
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return torch.full_like(leaf, whole)
    return torch.rand(leaf.shape, generator=torch.Generator().manual_seed(0)).to(leaf)


def _shapes(batch: Any) -> str:
    """Of a batch: a tensor, or what holds several of them."""
    shapes = ", ".join(f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" for leaf in record_leaves(batch))
    return shapes if isinstance(batch, Tensor) else f"a {type(batch).__name__} of {shapes}"


def check_gradient(engine: GradientEngine, batch: Any) -> None:
    """Refuse a loss that follows no trainable parameter; warn if no record that was tried has a gradient.

    Args:
        engine: that ran the records.
        batch: the records.

    Raises:
        DataError: each step would release noise alone.
    """
    if not (engine.trials.rows_vanish or all(one.how == "unused" for one in engine.coverage())):
        return
    with undisturbed(engine.model):
        _, reached = engine.gradient(batch)
    if not reached:
        raise DataError(
            "loss(model, batch) has no gradient: it is cut off (detach, item, no_grad), made of whole "
            "numbers (argmax, ==), or runs another model or frozen layers only. Nothing was spent."
        )
    warnings.warn(
        f"the gradients of all {num_records(batch)} records that were tried are zero or not finite: noise "
        "alone would move the model. Look for round, a factor of 0 or a clamp in the loss, for a mask that "
        "leaves nothing, for ReLUs that are all off, and for a hook that divides by a statistic of the batch",
        stacklevel=2,
    )


def check_repeatable(model: nn.Module, loss: Loss, batch: Any, params: Mapping[str, Tensor]) -> list[str]:
    """Run the loss from the same random numbers before and after other records.

    Args:
        model, loss: they ran on records of the data.
        batch: a few records.
        params: at which losses are compared.

    Returns:
        The names of what a forward gives another value each time, which is thrown away.

    Raises:
        ValueError: the losses differ: model or loss keep a random generator or a state of their own.
        ForwardWritesError: the model writes to its parameters.
    """

    def run(records: Any) -> tuple[Tensor, list[str]]:
        own = buffers_kept(loss.modules()) if isinstance(loss, nn.Module) else nullcontext()
        held = HeldState(model, loss)
        with undisturbed(model), own, torch.enable_grad():
            losses = run_loss(model, loss, records, params).detach()
            return losses, [*dict.fromkeys(held.written())]

    # What the model keeps from one run shows in the next, and is forgotten then.
    with parameters_restored(model), attributes_kept(model, loss):
        first, begun = run(batch)
    with parameters_restored(model), attributes_kept(model, loss):
        with suppress(Exception):  # it takes no copies of one record
            run(take_records(batch, torch.zeros(num_records(batch), dtype=torch.long)))
        again, changed = run(batch)
        _, written = run(batch)
    if losses_moved(first, again):
        why = f"model or loss give other losses each time, {OWN_GENERATOR}"
        if names := written or changed or begun:
            why = f"losses are others after a forward that wrote to {', '.join(names)}. {STATE}"
        raise ValueError(f"{why} Nothing was spent.")
    return written


def refuse_followed(names: Sequence[str]) -> None:
    """Refuse buffers that a forward reads and to which it writes what comes of records.

    They could neither hold private numbers nor stay as they were.

    Raises:
        BufferWritesError: naming them, with the remedies.
    """
    if names:
        raise BufferWritesError(names, "by what comes of records, and it reads them", REMEDIES)


@contextmanager
def settings_kept(optimizer: torch.optim.Optimizer, scheduler: Any) -> Iterator[None]:
    """Inside, model and loss are tried: what they set in optimizer or scheduler is put back, and refused.

    Raises:
        ValueError: a rate that follows the loss of private records would move every later step.
    """
    holders = [*optimizer.param_groups, *([] if scheduler is None else [vars(scheduler)])]
    plain = (bool, int, float, str, tuple)

    def values() -> dict[tuple[int, str], Any]:
        found: dict[tuple[int, str], Any] = {
            (number, key): write_mark(value) if isinstance(value, Tensor) else value
            for number, holder in enumerate(holders)
            for key, value in holder.items()
            if isinstance(value, (*plain, Tensor))
        }
        state = [leaf for leaf in leaves([*optimizer.state.values()]) if isinstance(leaf, Tensor)]
        return found | {(len(holders), "state"): [*map(write_mark, state)]}

    before = values()
    try:
        yield
    finally:
        after = values()
        changed = [place for place in {**before, **after} if before.get(place) != after.get(place)]
        for number, key in changed:
            if number < len(holders) and isinstance(old := before.get((number, key)), plain):
                holders[number][key] = old
    if changed:
        raise ValueError(
            f"model or loss set {sorted({key for _, key in changed})} of optimizer or scheduler while "
            "they were tried: what a loss sets there follows private records, and would move every later "
            "step without noise. Set rates between steps, from public numbers or from what was released: by "
            "a scheduler, or in optimizer.register_step_post_hook. Nothing was spent."
        )


def warn_of_writes(names: Sequence[str]) -> None:
    """Name paths of buffers, attributes and variables that nothing reads but their own update."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    warnings.warn(
        f"what a forward writes to {', '.join(names[:MOST])}{more} is thrown away, since it would hold "
        f"private numbers without noise: each stays as it was at the start. {REMEDIES}",
        stacklevel=2,
    )
