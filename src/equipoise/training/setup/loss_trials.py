"""Trials of model and loss on a few records, before anything is spent."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import _validate
from equipoise._foreign_errors import cause_of, where_raised
from equipoise._tree import leaves
from equipoise.gradients import (
    Buffers,
    ForwardWritesError,
    GradientEngine,
    parameters_restored,
    refuse_max_norm,
)
from equipoise.gradients.capture.attributes import attributes_kept, watch_writes
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.compare import OWN_GENERATOR, AwayFromZero, losses_moved
from equipoise.gradients.engine_inputs import (
    Loss,
    is_array,
    num_records,
    record_leaves,
    run_loss,
    take_records,
)
from equipoise.training.forwards import moved
from equipoise.training.record_source import (
    ARRAY_REMEDY,
    BatchFormError,
    DataError,
    NoAnswerError,
    RecordSource,
)

__all__ = [
    "SEARCHED",
    "check_gradient",
    "check_history",
    "check_loss",
    "check_repeatable",
    "check_views",
    "copied",
]

SEARCHED = 64
"""How many of the first records are tried, where the very first ones fail."""

STATE = (
    "A record's loss would follow which records came before it, and the guarantee would not hold. Compute it "
    "anew in each forward, make it a parameter that the loss trains, or change it by public or released "
    "numbers in a hook of the optimizer's step (optimizer.register_step_post_hook). If random numbers make "
    "the losses differ, draw them from the global functions (torch.rand, np.random, random)."
)


def check_loss(
    model: nn.Module, loss: Loss, source: RecordSource, device: torch.device, probes: int = 4
) -> tuple[Any, Tensor]:
    """Run the loss forward on a few records, among them those with the smallest and largest numbers.

    Of records that are made on demand, and so were not validated, those that fail are passed over: a bad
    one has weight zero in training too.

    Returns:
        The batch of the records that was used, on `device`: the example for attaching the gradient engine;
        and the records' numbers.

    Raises:
        TypeError: the loss is no function, or does not return a tensor.
        DataError: the forward fails, or the answer is not one finite number per record.
    """
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"loss is {_validate.what_is(loss)}; give a function loss(model, batch) that returns one number "
            "per record, [B]"
        )
    if isinstance(loss, nn.modules.loss._Loss):
        raise TypeError(
            f"loss is {_validate.what_is(loss)}, which takes outputs and targets; loss takes (model, batch) "
            "and gives one number per record. Call it in a function, with reduction='none': "
            "loss=lambda model, batch: criterion(model(batch['input']), batch['label'])"
        )
    refuse_max_norm(model)
    ids = source.probes(probes)
    try:
        example = _checked(model, loss, source, device, ids)
    except DataError:
        if source.is_scanned:
            raise
        first = range(min(SEARCHED, len(source)))
        good = list(itertools.islice(_fine_alone(model, loss, source, device, first), probes))
        if not good:
            raise
        ids = torch.tensor(good)
        example = _checked(model, loss, source, device, ids)
    # One of these that fails has weight zero in the training.
    marked = [*_fine_alone(model, loss, source, device, source.marked())]
    if not set(marked) - set(ids.tolist()):
        return example, ids
    ids = torch.tensor([*ids.tolist(), *sorted(set(marked) - set(ids.tolist()))])
    return _checked(model, loss, source, device, ids), ids


def _fine_alone(
    model: nn.Module, loss: Loss, source: RecordSource, device: torch.device, numbers: Iterable[int]
) -> Iterator[int]:
    """Those of the records that pass the check on their own."""
    for number in numbers:
        try:
            _checked(model, loss, source, device, torch.tensor([number]))
        except DataError:
            continue
        yield number


def _checked(model: nn.Module, loss: Loss, source: RecordSource, device: torch.device, ids: Tensor) -> Any:
    """The batch of these records, whose losses are what they must be."""
    try:
        taken = source.take(ids)
    except Exception as error:
        raise DataError(
            f"the records {ids.tolist()} of data cannot be read: {where_raised(error)}. Items of different "
            "sizes need collate=..., which pads them to one width. Nothing was spent."
        ) from cause_of(error)
    _check_leaves(taken)
    batch = moved(taken, device)
    count = num_records(batch)
    try:
        with (
            torch.enable_grad(),
            undisturbed(model, dropout=True),
            parameters_restored(model),
            attributes_kept(model, loss),
        ):
            values = run_loss(model, loss, batch, None)
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
            f"loss(model, batch) fails on {count} records of the data, among them those with the smallest "
            f"and largest labels (batch: {_shapes(batch)}): {where_raised(error)}.{called}"
            f"{_about_lists(taken)} Check the labels' range against the model's outputs, the shapes and the "
            "types. Batches are of any size: x.view(-1, ...), not x.view(32, ...). Nothing was spent."
        ) from cause_of(error)
    if not isinstance(values, Tensor):
        raise TypeError(f"loss(model, batch) returns a {type(values).__name__}; it must return a tensor [B]")
    if values.shape != (count,):
        hint = " Average or sum what belongs to one record, for instance loss.mean(1) over tokens."
        if values.ndim == 0:
            hint = ' A mean over the batch has no per-record gradients: use reduction="none".'
        elif values.shape == (count, count):
            hint = (
                " Perhaps an output [B, 1] met a target [B], and so every record every other: give both one "
                "shape, for instance output.squeeze(1)."
            )
        raise DataError(
            f"loss(model, batch) returns shape {tuple(values.shape)} for {count} records; it must be "
            f"({count},).{hint}"
        )
    if not bool(torch.isfinite(values).all()):
        raise DataError(
            f"loss(model, batch) is NaN or infinite for {int((~torch.isfinite(values)).sum())} of {count} "
            "records before any training: check the inputs' scale and the initialisation, and divide by "
            "mask.sum(1).clamp(min=1), since a record may be masked altogether. Nothing was spent."
        )
    return batch


def _check_leaves(batch: Any) -> None:
    """A batch holds its records in tensors."""
    arrays = [leaf for leaf in leaves(batch) if is_array(leaf)]
    if arrays:
        raise TypeError(
            f"a batch holds {len(arrays)} {type(arrays[0]).__name__} where tensors are needed: "
            f"{ARRAY_REMEDY}, in the data or in collate"
        )


def _about_lists(batch: Any) -> str:
    """A hint where items held lists of numbers, which `default_collate` turns by 90 degrees."""
    if not (isinstance(batch, Mapping) and any(isinstance(value, list) for value in batch.values())):
        return ""
    return (
        " Items hold lists of numbers, and a batch has one tensor for each place of a list: give tensors "
        'instead. A Hugging Face Dataset does so by data.with_format("torch").'
    )


def _shapes(batch: Any) -> str:
    """Of a batch: a tensor, or what holds several of them."""
    shapes = ", ".join(f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" for leaf in record_leaves(batch))
    return shapes if isinstance(batch, Tensor) else f"a {type(batch).__name__} of {shapes}"


def check_views(model: nn.Module, loss: Loss, whole: Callable[[Loss], Loss], batch: Any, views: int) -> None:
    """See that views of a record that nobody augments get random numbers of their own.

    Args:
        model, loss: they draw them.
        whole: makes the loss of the batch of that of its views.
        batch: a few records, each `views` times.
        views: K.

    Raises:
        ValueError: the views of each record have one loss.
    """
    differ = False

    def watched(model: nn.Module, batch: Any) -> Tensor:
        nonlocal differ
        losses = loss(model, batch)
        each = losses.detach().reshape(-1, views)
        differ |= not torch.allclose(each, each[:, :1].expand_as(each), rtol=1e-3)
        return losses

    for seed in range(3):  # dropout may leave all of a few numbers
        with undisturbed(model, seed, dropout=True), attributes_kept(model, loss), torch.enable_grad():
            run_loss(model, whole(watched), batch, None)
    if not differ:
        raise ValueError(
            f"views={views} without an augmentation averages {views} equal losses: model and loss draw no "
            "random number per row of a batch. Give augmentation=..., draw a number per row in the loss "
            "(torch.rand(len(batch))), or leave views out"
        )


def check_gradient(engine: GradientEngine, trials: AwayFromZero, batch: Any) -> None:
    """Refuse a loss that follows no trainable parameter; warn if no record that was tried has a gradient.

    Args:
        engine: that ran the records.
        trials: of the same model and loss.
        batch: the records.

    Raises:
        DataError: each step would release noise alone.
    """
    if not (engine.rows_vanish or all(one.how == "unused" for one in engine.coverage())):
        return
    if not trials.rows(batch)[1]:
        raise DataError(
            "loss(model, batch) has no gradient, and each step would release noise alone: it is cut off "
            "(detach, item, no_grad), made of whole numbers (argmax, ==), or runs another model or frozen "
            "layers only. Nothing was spent."
        )
    warnings.warn(
        f"the gradients of all {num_records(batch)} records that were tried are zero or not finite, so "
        "that a step would release noise alone: look for round, a factor of 0 or a clamp in the loss, for a "
        "mask that leaves nothing, for ReLUs that are all off at the start, and for a hook that divides by a "
        "statistic of the batch, which a record by itself does not have",
        stacklevel=2,
    )


def check_repeatable(model: nn.Module, loss: Loss, batch: Any, params: Mapping[str, Tensor]) -> list[str]:
    """Run the loss twice from the same random numbers, and once after other records.

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
        own = Buffers(loss).kept() if isinstance(loss, nn.Module) else nullcontext()
        with undisturbed(model), own, torch.enable_grad(), watch_writes(model, loss) as written:
            return run_loss(model, loss, records, params).detach(), written

    def refuse_moved(losses: Tensor, names: list[str]) -> None:
        if losses_moved(first, losses, record=-1):
            why = f"model or loss give other losses each time, {OWN_GENERATOR}"
            if names:
                why = f"losses are others after a forward that wrote to {', '.join(names)}. {STATE}"
            raise ValueError(f"{why} Nothing was spent.")

    # What the model keeps from the first run shows in the second, and is forgotten then.
    with parameters_restored(model), attributes_kept(model, loss):
        (first, begun), (second, written) = run(batch), run(batch)
    refuse_moved(second, written or begun)
    # After the same records a cache of outputs gives the same; after others only one of shapes does.
    with parameters_restored(model), attributes_kept(model, loss):
        try:
            _, begun = run(take_records(batch, torch.zeros(num_records(batch), dtype=torch.long)))
        except Exception:  # it takes no copies of one record
            return written
        third, names = run(batch)
    refuse_moved(third, names or begun)
    return written


def copied(model: nn.Module) -> nn.Module | None:
    """A copy of a model that has not run yet, which shares its parameters; None if it holds, say, a lock."""
    with suppress(Exception):
        return copy.deepcopy(model, {id(p): p for p in model.parameters()})
    return None


def check_history(
    model: nn.Module, untouched: nn.Module | None, loss: Loss, batch: Any, params: Mapping[str, Tensor]
) -> bool:
    """Compare losses with those of a copy that met other records first, for a model that is not proved.

    Args:
        model, loss: they ran on records of the data.
        untouched: a copy of the model from before it did.
        batch: a few records.
        params: at which losses are compared.

    Returns:
        False if there is no copy, or it takes no copies of one record.

    Raises:
        ValueError: they differ.
    """

    def losses(model: nn.Module, records: Any) -> Tensor:
        with undisturbed(model), torch.enable_grad():
            return run_loss(model, loss, records, params).detach()

    if untouched is None:
        return False
    with parameters_restored(model), attributes_kept(model, loss):
        expected = losses(model, batch)
        try:
            losses(untouched, take_records(batch, torch.zeros(num_records(batch), dtype=torch.long)))
            found = losses(untouched, batch)
        except Exception:
            return False
    if losses_moved(expected, found, record=-1):
        raise ValueError(
            "model or loss keep something of the first records that they meet: a copy that met others first "
            "gives other losses. What they keep would be published without noise, and would move every "
            "record's gradient. Initialise them on public records before the training. Nothing was spent."
        )
    return True
