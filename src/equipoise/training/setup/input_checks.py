"""What is checked before anything is spent: model, optimiser, scheduler, loss, data.

Every check is by what things do, on a few records, and every error names the argument, what is wrong, why,
and what to do.

Public records that are private ones as well are found by their bytes. Every guarantee of a method with
public records assumes that none of them is a private record; a split gone wrong would break it unnoticed.
So the rows are compared, in all tensors that a public batch holds. This looks at private data and can end
the training before it begins, as the validation of the data does: the answer goes to the data owner only,
and what is published afterwards speaks of data sets without such copies.

Equal bytes need not be one person's record: short records of different persons agree by chance. Only the data
owner can know, and then says so (`allow_public_duplicates`); the statement repeats it, found or not.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from equipoise import _validate
from equipoise._tree import leaves, named_leaves
from equipoise.gradients import (
    Buffers,
    ForwardWritesError,
    parameters_restored,
    refuse_max_norm,
)
from equipoise.gradients.capture.attributes import attributes_kept
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.random_numbers import RARE, global_numbers_constant, random_numbers_from
from equipoise.gradients.checks.record_mixing import losses_moved
from equipoise.gradients.checks.record_trials import RecordTrials
from equipoise.gradients.engine_inputs import (
    Loss,
    check_model,
    is_array,
    map_records,
    num_records,
    record_leaves,
    repeat_to,
    run_loss,
    take_records,
    uncompiled,
)
from equipoise.methods import Method
from equipoise.training.assumptions import ALLOWED, NOT_COMPARED
from equipoise.training.randomness import public_randomness
from equipoise.training.record_rows import (
    ARRAY_REMEDY,
    DataError,
    Preparation,
    Source,
    filled,
    moved,
    out_of_memory,
)
from equipoise.training.setup.deep_copies import deep_copy
from equipoise.training.setup.memory_use import available_bytes

__all__ = [
    "Pipeline",
    "check_history",
    "check_loss",
    "check_optimizer",
    "check_pipeline",
    "check_public",
    "check_repeatable",
    "check_scheduler",
    "choose_filler",
    "copy_of",
    "made_up",
    "public_assumptions",
    "trainable",
]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's trainable parameters by name; a shared one appears once.

    Raises:
        TypeError: not a module, or one that cannot be watched (see `check_model`).
        ValueError: nothing to train, or parameters that are not floating point or still without shape.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {_validate.what_is(model)}; give a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"model parameter {name} has no shape yet (a lazy module): run the model once on a batch "
                "before training"
            )
    check_model(model)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(
            "model has no trainable parameter: every parameter has requires_grad=False, or there is none"
        )
    complex_ones = [name for name, p in found.items() if not p.is_floating_point()]
    if complex_ones:
        raise ValueError(
            f"model parameters {complex_ones} are not real floating-point numbers; freeze or convert them"
        )
    return found


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """The optimiser moves exactly the trainable parameters of the model, one gradient per step.

    Raises:
        TypeError: not a torch optimiser, or one that needs to evaluate the loss itself (LBFGS).
        ValueError: it misses trainable parameters or holds foreign ones.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is {_validate.what_is(optimizer)}; give a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.5)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "optimizer is LBFGS, which evaluates the loss several times per step; every evaluation would be "
            "a release of its own. Use an optimiser that takes one gradient per step, such as SGD or Adam."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if id(p) not in held]
    if missing:
        raise ValueError(
            f"optimizer does not hold the trainable parameters {missing}: they would be noised and never "
            "moved. Build it from the model that you give (moving a model to another device can replace its "
            "parameters), or freeze them with requires_grad_(False)."
        )
    foreign = held - {id(p) for p in parameters.values()}
    known_frozen = [
        p for group in optimizer.param_groups for p in group["params"] if id(p) in foreign and p.requires_grad
    ]
    if known_frozen:
        raise ValueError(
            f"optimizer holds {len(known_frozen)} parameters that are not parameters of model: no private "
            "gradient can be computed for them. Build the optimiser from model.parameters()."
        )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """The scheduler follows the step alone and steers this optimiser.

    Raises:
        TypeError: a scheduler that wants a metric, or an object without `step`.
        ValueError: it steers another optimiser.
    """
    if scheduler is None:
        return
    hidden = _plateau_within(scheduler)
    if hidden is not None:
        raise TypeError(
            f"scheduler {hidden} ReduceLROnPlateau, which follows a metric; a metric of private data would "
            "leak through the learning rate. Use a schedule of the step, or lower the rate yourself from a "
            "public metric in the loop."
        )
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"scheduler is a {type(scheduler).__name__} without step(); give a torch.optim.lr_scheduler"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "scheduler steers another optimiser than the one given: build it from the same optimiser"
        )


def _plateau_within(scheduler: Any) -> str | None:
    """How a ReduceLROnPlateau is there: as the scheduler itself, or inside one that runs others."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return "is"
    waiting, seen = [scheduler], {id(scheduler)}
    while waiting:
        # PyTorch keeps the parts in `_schedulers`; a wrapper of the user's own, wherever it likes
        for part in leaves(list(getattr(waiting.pop(), "__dict__", {}).values())):
            if isinstance(part, ReduceLROnPlateau):
                return f"is a {type(scheduler).__name__} that holds a"
            if isinstance(part, LRScheduler) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return None


def check_loss(
    model: nn.Module, loss: Loss, source: Source, device: torch.device, probes: int = 4
) -> tuple[Any, Tensor]:
    """Run the loss forward on a few records, among them those with the extreme labels and tokens.

    Of records that are made on demand, and so were not validated, those that fail are passed over: a bad
    one has weight zero in training too.

    Returns:
        The batch of the records that was used, on `device`: the example for attaching the gradient engine;
        and the records' numbers.

    Raises:
        TypeError: the loss is no function, or does not answer a tensor.
        DataError: the forward fails, or the answer is not one finite number per record.
    """
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"loss is {_validate.what_is(loss)}; give a function loss(model, batch) that answers one number "
            "per record, [B]"
        )
    refuse_max_norm(model)
    ids = source.probes(probes)
    try:
        return _checked(model, loss, source, device, ids), ids
    except DataError:
        if source.is_scanned:
            raise
        good = _fine_alone(model, loss, source, device, probes)
        if good is None:
            raise
    return _checked(model, loss, source, device, good), good


SEARCHED = 64
"""How many of the first records are tried, where the very first ones fail."""


def _fine_alone(
    model: nn.Module, loss: Loss, source: Source, device: torch.device, wanted: int
) -> Tensor | None:
    """Numbers of the first records that pass the check on their own; None if none does."""
    found: list[int] = []
    for number in range(min(SEARCHED, len(source))):
        try:
            _checked(model, loss, source, device, torch.tensor([number]))
        except DataError:
            continue
        found.append(number)
        if len(found) == wanted:
            break
    return torch.tensor(found) if found else None


def _checked(model: nn.Module, loss: Loss, source: Source, device: torch.device, ids: Tensor) -> Any:
    """The batch of these records, whose losses are what they must be."""
    try:
        taken = source.take(ids)
    except Exception as error:
        raise DataError(
            f"the records {ids.tolist()} of data cannot be read: {type(error).__name__}: {error}. Items of "
            "different sizes need collate=..., which pads them to one width. Nothing was spent."
        ) from error
    _check_leaves(taken)
    batch = moved(taken, device)
    count = num_records(batch)
    try:
        with (
            torch.enable_grad(),
            undisturbed(model, dropout=True),
            parameters_restored(model),
            uncompiled(),
            attributes_kept(model, loss),
        ):
            values = loss(model, batch)
    except ForwardWritesError:
        raise
    except Exception as error:
        shapes, said = _shapes(batch), f"{type(error).__name__}: {error}".rstrip(".")
        called = (
            " It gets model and batch, and runs the model itself." if isinstance(error, TypeError) else ""
        )
        raise DataError(
            f"loss(model, batch) fails on {count} records of the data, among them those with the smallest "
            f"and largest labels (batch: {shapes}): {said}.{called} Check the labels' range against the "
            "model's outputs, the shapes and the types. Nothing was spent."
        ) from error
    if not isinstance(values, Tensor):
        raise TypeError(f"loss(model, batch) answers a {type(values).__name__}; it must answer a tensor [B]")
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
            f"loss(model, batch) answers shape {tuple(values.shape)} for {count} records; it must be "
            f"({count},).{hint}"
        )
    if not bool(torch.isfinite(values).all()):
        raise DataError(
            f"loss(model, batch) is NaN or infinite for {int((~torch.isfinite(values)).sum())} of {count} "
            "records before any training: check the inputs' scale and the initialisation. Nothing was spent."
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


OWN_GENERATOR = (
    "though the global random numbers of torch, NumPy and Python start alike: they keep a random generator "
    "or a state of their own. It would follow which records are drawn, and the guarantee would not hold. "
    "Draw random numbers from the global functions (torch.rand, np.random, random)."
)


@dataclass(frozen=True)
class Pipeline:
    """From the numbers of records to their losses, under numbered randomness.

    Attributes:
        trials: their losses.
        source: reads each item under random numbers of its own, and collates.
        prepare: brings batches to the device and augments them.
        seed: public, of all random numbers.
    """

    trials: RecordTrials
    source: Source
    prepare: Preparation
    seed: int

    def batch(self, ids: Tensor, items: int = 0, rest: int = 0, level: float | None = None) -> Any:
        """The batch of these records: the `items`-th random numbers for each, the `rest`-th for the batch.

        Args:
            ids: the records' numbers.
            items, rest: which random numbers.
            level: a quantile at which they are held instead, to take rare branches.
        """
        randomness = public_randomness(self.seed, "example", rest)
        constant = nullcontext() if level is None else global_numbers_constant(level, generators=True)
        with random_numbers_from(randomness("records"), self.prepare.device), constant:
            batch = self.source.take(ids, public_randomness(self.seed, "example", items))
            return self.prepare(batch, randomness)

    def losses(self, ids: Tensor, items: int = 0, rest: int = 0, level: float | None = None) -> Tensor | None:
        """Their losses [b]; None where one cannot be made or run: it has weight zero in the training too."""
        try:
            return self.trials.losses(self.batch(ids, items, rest, level))
        except Exception:
            return None

    def readable(self, most: int = 9) -> list[int]:
        """Numbers of the first records that have losses."""
        numbers = range(min(SEARCHED, len(self.source)))
        return list(
            itertools.islice((n for n in numbers if self.losses(torch.tensor([n])) is not None), most)
        )


#: How often records are made, with other random numbers each time; then with rare ones, low and high.
ATTEMPTS = (None, None, None, None, RARE, 1 - RARE)


def check_pipeline(pipeline: Pipeline, readable: list[int], size: int) -> bool:
    """Make a batch of some records twice, and again with one of them replaced; see whose loss moves.

    Args:
        pipeline: from numbers to losses.
        readable: numbers of records that have losses.
        size: of a micro-batch.

    Returns:
        Whether all of it could be tried: not with fewer than three records, nor where collating or augmenting
        draws random numbers.

    Raises:
        ValueError: two equal attempts differ, or the loss of a record depends on which others came with it,
            on their number, or on its place.
    """
    of = pipeline.losses
    if len(readable) < 3:
        return False
    *kept, spare = readable
    ids, count = torch.tensor(kept), len(kept)
    first, second = of(ids), of(ids, 0, 1)
    if first is None or second is None:
        return False
    # Whoever joins or augments with random numbers may draw more of them for one record than for another in
    # its place, which deals those behind it other ones. The last one has none behind it.
    random_rest = losses_moved(first, second, record=-1)
    for attempt, level in enumerate(ATTEMPTS):
        before, again = (of(ids, attempt, attempt, level) for _ in range(2))
        if before is None or again is None:
            return False
        if losses_moved(before, again, record=-1):
            raise ValueError(
                f"data, collate or augmentation give other records each time, {OWN_GENERATOR} In an "
                "augmentation, the generator that it is given serves too. Nothing was spent."
            )
        for place in {count - 1} if random_rest else {attempt % count, count - 1 - attempt % count}:
            others = ids.clone()
            others[place] = spare
            after = of(others, attempt, attempt, level)
            # Padding to another length may round differently: a mixture moves losses by far more.
            if after is not None and losses_moved(before, after, place, slack=100):
                raise ValueError(
                    "augmentation, collate or the data set mixes records: with another record beside it, a "
                    "record's loss changed. One record would then move the gradients of several, and the "
                    "privacy guarantee would not hold. Augment every record by itself (no mixup or cutmix "
                    "between records), and mask padding in the model and in the loss. Nothing was spent."
                )
    if random_rest:
        return False  # its random numbers are dealt otherwise where records are fewer or stand elsewhere
    for order in (torch.arange(count - 1), torch.arange(count).flip(0), torch.arange(size) % count):
        found = of(ids[order])
        if found is not None and losses_moved(first[order], found, record=-1, slack=100):
            raise ValueError(
                "with other records in the batch, or in another order, the losses of records change: data, "
                "collate, augmentation or loss use how many records there are or where one stands. Both "
                "follow from which records are drawn, and that is private. Treat every record by itself; the "
                "sum over records is divided by the expected batch size. Nothing was spent."
            )
    return True


def check_history(pipeline: Pipeline, untouched: Pipeline | None, readable: list[int]) -> bool:
    """See whether records come out alike whatever was read, collated and augmented before them.

    Args:
        pipeline: it met records.
        untouched: the same with copies that met none, where there are such.
        readable: numbers of records that have losses.

    Returns:
        Whether copies met other records first, and gave the same losses.

    Raises:
        ValueError: they gave others, or a record came out otherwise after many others; or an item draws
            random numbers when it is first read, and none later.
    """
    if len(readable) < 2:
        return False
    tried = pipeline if untouched is None else untouched
    _check_items(tried.source)
    ids, first = torch.tensor(readable[:-1]), torch.tensor(readable[-1:])
    if untouched is not None:
        untouched.losses(first)
        before, after = pipeline.losses(ids), untouched.losses(ids)
        if before is not None and after is not None and losses_moved(before, after, record=-1):
            raise ValueError(
                "data, collate or augmentation keep something of the first records that they meet: copies "
                "that met others first give other records. It would follow who is drawn first, and move "
                "every record's gradient. Take what all records need from public ones before the training. "
                "Nothing was spent."
            )
    _check_many(tried, readable)
    return untouched is not None


def _check_items(source: Source) -> None:
    """Items that draw random numbers do so each time; the last records are those that nobody read yet."""
    for number in range(len(source))[-3:]:
        try:
            first, second = source.draws_numbers(number), source.draws_numbers(number)
        except Exception:
            continue
        if first and not second:
            raise ValueError(
                "data keeps items that draw random numbers: one drew some when it was first read, and none "
                "when it was read again. A cache that holds fewer items than there are would draw them anew "
                "when others pushed them out: a record's item would follow who else is drawn. Cache what is "
                "read, and draw random numbers after that, at each call. Nothing was spent."
            )


MOST_READS, SECONDS = 1000, 0.5
"""How often, and how long, records are made to see whether they come out alike."""


def _check_many(pipeline: Pipeline, readable: list[int]) -> None:
    """Make records one by one, in a random order."""
    chosen, end = random.Random(0), time.monotonic() + SECONDS
    known: dict[tuple[int, int], Any] = {}
    for _ in range(MOST_READS):
        number, attempt = chosen.choice(readable), chosen.randrange(8)
        try:
            now = pipeline.batch(torch.tensor([number]), attempt, attempt)
            is_alike = _is_alike(known.setdefault((number, attempt), now), now, pipeline.trials)
        except Exception:  # such a record has weight zero in the training too
            return
        if not is_alike:
            raise ValueError(
                "data, collate or augmentation give other records after many reads, though all random "
                "numbers start alike: they keep something of what they read, such as running statistics or a "
                "count. It would follow who is drawn, and the guarantee would not hold. Make each record "
                "from itself and from public numbers. Nothing was spent."
            )
        if time.monotonic() > end:
            return


def _is_alike(before: Any, after: Any, trials: RecordTrials) -> bool:
    """Whether two batches of one record are the same, or have the same loss."""
    leaves = record_leaves(before), record_leaves(after)
    if len(leaves[0]) == len(leaves[1]) and all(
        one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
        for one, other in zip(*leaves, strict=True)
    ):
        return True
    return not losses_moved(trials.losses(before), trials.losses(after), record=-1, slack=100)


def copy_of(model: nn.Module, loss: Loss, device: torch.device) -> tuple[nn.Module, Loss] | None:
    """Copies of model and loss, to meet other records first; None where there are none, or too large ones."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    if sum(t.numel() * t.element_size() for t in tensors) > available_bytes(device) / 4:
        return None
    return deep_copy((model, loss))


def check_repeatable(
    model: nn.Module,
    loss: Loss,
    others: tuple[nn.Module, Loss] | None,
    batch: Any,
    params: Mapping[str, Tensor],
) -> bool:
    """Run the loss twice from the same random numbers, and on a model that met other records first.

    Args:
        model, loss: they ran on records of the data.
        others: copies from before they ran; None leaves the second check out.
        batch: a few records.
        params: at which losses are compared; no zero hides what is kept.

    Returns:
        Whether the second check was made.

    Raises:
        ValueError: the losses differ: model or loss keep a random generator or a state of their own.
        ForwardWritesError: the model writes to its parameters.
    """

    def run(model: nn.Module, loss: Loss, records: Any) -> Tensor:
        own = Buffers(loss).kept() if isinstance(loss, nn.Module) else nullcontext()
        with undisturbed(model), own, torch.enable_grad():
            return run_loss(model, loss, records, params).detach()

    # What the model keeps from the first run shows in the second, and is forgotten then.
    with parameters_restored(model), attributes_kept(model, loss):
        first, second = run(model, loss, batch), run(model, loss, batch)
    if losses_moved(first, second, record=-1):
        raise ValueError(f"model or loss give other losses each time, {OWN_GENERATOR} Nothing was spent.")
    if others is None:
        return False
    with attributes_kept(*others):  # a function's variables are not copied with it
        try:
            run(*others, map_records(_altered, batch))
        except Exception:  # such records may not exist; then nothing can be told
            return False
        after_others = run(*others, batch)
    if losses_moved(first, after_others, record=-1):
        raise ValueError(
            "model or loss keep something of the first records that they meet: copies that met others first "
            "give other losses. What they keep would be published without noise, and would move every "
            "record's gradient. Initialise them on public records before the training. Nothing was spent."
        )
    return True


def choose_filler(run: Callable[[Any], Any], example: Any, size: int) -> float | None:
    """What fills up a micro-batch: zeros or ones, if the model takes such; None for a record's copies.

    Args:
        run: run(batch) -> gradients; it augments.
        example: a few records that the model takes.
        size: of a micro-batch.
    """
    one = take_records(example, slice(1))
    for value in (0.0, 1.0):  # a length or a mask of zero is often refused
        try:
            losses = run(filled(one, size, value)).losses
        except Exception as error:
            if out_of_memory(error):
                raise
            continue
        if bool(torch.isfinite(losses).all()):
            return value
    return None


def made_up(losses: Callable[[Any], Tensor], batch: Any) -> Any:
    """Public records in the shape of these, for what is measured and published.

    Args:
        losses: of records.
        batch: a few records that the model takes.

    Returns:
        Four records: uniform numbers from 0 to 1, and ones or zeros where only whole numbers go. The batch
        itself where the model fails on such.
    """
    rng = torch.Generator().manual_seed(0)
    for whole in (1, 0):

        def made(leaf: Tensor, whole: int = whole) -> Tensor:
            if leaf.is_floating_point():
                return torch.rand(leaf.shape, generator=rng).to(leaf)
            return torch.full_like(leaf, whole)

        records = map_records(made, repeat_to(batch, 4))
        try:
            if bool(torch.isfinite(losses(records)).all()):
                return records
        except Exception as error:
            if out_of_memory(error):
                raise
    return batch


def _altered(leaf: Tensor) -> Tensor:
    """The first record in all places; if it has floating-point numbers, at another scale."""
    alike = leaf[:1].expand_as(leaf)
    return 2 * alike + 1 if leaf.is_floating_point() else alike.clone()


def _shapes(batch: Any) -> str:
    return ", ".join(f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" for leaf in record_leaves(batch))


def check_public(source: Source, method: Method, allowed: bool) -> None:
    """Refuse public records that are private ones.

    Args:
        source: the private records.
        method: whose public records are looked at.
        allowed: equal records are those of different persons; nothing is compared.

    Raises:
        DataError: a public record equals a private one in every byte.
    """
    if allowed or not source.is_scanned:
        return
    for public in method.public_batches():
        found = _copies(public.batch, source.batch())
        if found:
            raise DataError(
                f"{found} of the {len(public)} public records equal private records of data, byte for byte. "
                "A record that is used as public gets no protection. Take them out of data or out of the "
                "public records; if they are other persons' records that happen to be equal, give "
                "allow_public_duplicates=True, which the statement then names as an assumption. Nothing was "
                "spent."
            )


def public_assumptions(is_scanned: bool, method: Method, allowed: bool) -> list[str]:
    """What the statement says of the comparison; it follows from the settings, not from the records."""
    if not method.public_batches():
        return []
    if allowed:
        return [ALLOWED]
    return [] if is_scanned else [NOT_COMPARED]


def _copies(public: Any, private: Any) -> int:
    """How many public records are among the private ones, in the fields that the public batch has.

    >>> _copies({"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([2.0, 3.0]), "y": torch.zeros(2)})
    1
    """
    there, wanted = _fields(private), _fields(public)
    if not set(wanted) <= set(there) or any(
        wanted[name].shape[1:] != there[name].shape[1:] for name in wanted
    ):
        return 0  # of another make: no row can be the same
    same_type = [wanted[name].to(there[name].dtype) for name in wanted]
    rows = set(_rows([there[name] for name in wanted]))
    return sum(row in rows for row in _rows(same_type))


def _fields(batch: Any) -> Mapping[str, Tensor]:
    return {name: leaf for name, leaf in named_leaves(batch).items() if isinstance(leaf, Tensor)}


def _rows(tensors: list[Tensor]) -> Iterator[bytes]:
    """One digest per record."""
    flat = []
    for leaf in tensors:
        rows = leaf.detach().cpu().reshape(len(leaf), leaf[0].numel()).contiguous()
        flat.append(rows.view(torch.uint8).numpy() if rows.numel() else rows.to(torch.uint8).numpy())
    for number in range(len(flat[0])):
        state = hashlib.blake2b(digest_size=16)
        for field in flat:
            state.update(field[number])
        yield state.digest()
