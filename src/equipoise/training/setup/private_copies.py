"""Private records that stand where nothing protects them: in what model and loss hold, among public records.

*Tensors that model and loss hold at the start.* Every record's forward may use them, and what the model holds
is published with it: no epsilon covers what they hold of private records. Copies of records are refused by
name. What was computed from records cannot be told from other numbers, so tensors that are as long as the
data are named in the statement.

Numbers that carry little agree by chance or are public: a row of few values, numbers in rising order, and a
row that a hundredth of the records share are no copy.

*Public records.* Every guarantee of a method with public records assumes that none of them is a private
record; a split gone wrong would break it unnoticed. So the rows are compared, in all tensors that a public
batch holds. Equal bytes need not be one person's record: short records of different persons agree by chance.
Whose they are only the data owner can know; a private record that equals a public one can be left out of the
data whoever it is, since that looks at no other record.

Both look at private data and can end the training before it begins, as the validation of the data does: the
answer goes to the data owner only, and what is published afterwards speaks of data sets without such copies.
"""

from __future__ import annotations

import inspect
import math
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise._dtensor import local_part
from equipoise._tree import named_leaves
from equipoise.gradients.capture.attributes import is_own, names_in
from equipoise.gradients.engine_inputs import num_records
from equipoise.methods import Method
from equipoise.privacy.noise.uniform import keyed_hash
from equipoise.training.owners import UserSource, flattened
from equipoise.training.record_source import DataError, RecordSource

FEWEST_VALUES, FEWEST_WHOLE_NUMBERS, SHORTEST_COLUMN = 4, 8, 16
"""Different values that a row needs to count, of fractions and of whole numbers; entries of a column.

Choices: fewer are equal by chance or are public constants, and would be refused; more let short copies
through.
"""

SHARED = 0.01
"""A row that more records share is of a class of them, such as the embedding of its name.

A choice: a smaller share lets copies of repeated records through, a larger one refuses constants of small
classes.
"""

AT_ONCE = 2**16
"""Records that are compared at a time: a choice between memory and calls."""


def check_held(model: nn.Module, loss: Any, source: RecordSource, example: Any, population: int) -> list[str]:
    """Refuse copies of private records among the tensors that model and loss hold.

    Args:
        model, loss: whose parameters, buffers, attributes, variables and arguments are looked at.
        source: the records; all are compared where they lie in memory.
        example: a batch of the records that were read so far, which are compared otherwise.
        population: as stated. The private number of records is not used: which tensors are as long is said.

    Returns:
        Names of the tensors that are as long as the population.

    Raises:
        DataError: naming a tensor that holds private records.
    """
    some = flattened(example) if isinstance(source, UserSource) else example
    records = _fields_of(source.batch() if source.is_scanned else some)
    fields = [one for one in records.values() if one.layout is torch.strided and one.ndim and len(one)]
    named, trained, untrained = set(), {id(p) for p in model.parameters()}, []
    for name, held in held_tensors(model, loss):
        here = local_part(held).detach()
        if held.requires_grad and held.is_leaf and id(held) not in trained:
            untrained.append(name)
        is_copy = here.layout is torch.strided and any(_holds_copy(here, field) for field in fields)
        if is_copy:
            raise DataError(
                f"{name} holds private records: a column or records of data stand there as they are, and no "
                "epsilon covers what a model holds. Give each record its own part as a field of data, and "
                "read it from the batch; records that are public too leave out of data. Nothing was spent."
            )
        if held.ndim and held.shape[0] == population:
            named.add(name)
    if untrained:
        warnings.warn(
            f"{untrained[:3]} want a gradient and are no parameters of the model: this training leaves them "
            "as they are. To train them, put what holds them into the model, nn.ModuleDict({'model': ..., "
            "'loss': ...}), and build the optimizer from it; otherwise freeze them (requires_grad_(False))",
            stacklevel=2,
        )
    return sorted(named)


def held_tensors(model: nn.Module, loss: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that model and loss hold, each under one name.

    Functions and modules that they hold are looked into, other objects are not.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("model", model), ("loss", loss)]
    for name, value in waiting:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            yield name, torch.from_numpy(np.ascontiguousarray(value))
        elif isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)) and (numbers := _numbers(value)) is not None:
            yield name, numbers
        elif isinstance(value, (dict, list, tuple)):
            # Under one name: keys may be private.
            entries = value.values() if isinstance(value, dict) else value
            waiting += [(name, one) for one in entries if isinstance(one, _TENSORS) or callable(one)]
        elif callable(value) and not isinstance(value, type):
            waiting += [(f"{name}.{key}", held) for key, held in _inside(value).items()]


_TENSORS, _OF_TORCH = (Tensor, np.ndarray), frozenset(vars(nn.Module()))


def _numbers(value: Sequence[Any]) -> Tensor | None:
    """A list of numbers, or of lists of them, as `tolist` gives it."""
    first = value[0] if value else None
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    with suppress(Exception):  # lists of other lengths, or of other things
        return torch.tensor(value) if isinstance(first, (int, float, list)) else None
    return None


def _inside(value: Any) -> dict[str, Any]:
    """What a module, a function or another callable object holds, by name."""
    if isinstance(value, nn.Module):
        inside = dict(value.named_parameters()) | dict(value.named_buffers())
        for path, module in value.named_modules():
            own = vars(module) | {"forward": type(module).forward}
            inside |= {f"{path}.{key}".strip("."): one for key, one in own.items() if key not in _OF_TORCH}
        return inside
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, **value.keywords}
    if isinstance(value, MethodType):
        return {"self": value.__self__, "func": value.__func__}
    if not isinstance(value, FunctionType):
        return getattr(value, "__dict__", {}) | {"__call__": type(value).__call__}
    if not is_own(value.__module__):
        return {}
    parameters = inspect.signature(value, follow_wrapped=False).parameters.values()
    inside = {parameter.name: parameter.default for parameter in parameters}
    # Not by `inspect.getclosurevars`, which takes the attribute `self.model` for the global variable `model`.
    scope, code = value.__globals__, value.__code__
    inside |= {name: scope[name] for name in names_in(code, ("_GLOBAL",)) if name in scope}
    for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable of a function around it has no value yet
            inside[name] = cell.cell_contents
    return inside


def _holds_copy(held: Tensor, field: Tensor) -> bool:
    """Whether the column, or records of it, stand in a tensor of any shape."""
    is_rounded = held.is_floating_point()
    kind = held.dtype if is_rounded else torch.promote_types(held.dtype, field.dtype)
    size = field[0].numel()
    if not size or kind.is_complex:
        return False
    if held.numel() == field.numel() >= SHORTEST_COLUMN:
        column = held.cpu().reshape(-1).to(kind)
        if torch.equal(column, field.cpu().reshape(-1).to(kind)) and not bool(_are_ordered(column)):
            return True
    if size < FEWEST_VALUES or size not in {math.prod(held.shape[axis:]) for axis in range(held.ndim)}:
        return False
    mine = held.cpu().reshape(-1, size).to(kind)
    are_whole = (mine == mine.round()).all(1) if is_rounded else torch.ones(len(mine), dtype=torch.bool)
    ordered = mine.sort(1).values
    values = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    tell = values >= torch.where(are_whole, FEWEST_WHOLE_NUMBERS, FEWEST_VALUES)
    if is_rounded and not field.is_floating_point():  # no fraction is a pixel: spares a copy of all records
        tell &= are_whole
    mine = mine[tell & ~_are_ordered(mine)]
    if not len(mine):
        return False
    # Most rows differ in their first value, which takes a fraction of a hash's time.
    parts = (part.cpu().reshape(len(part), size).to(kind) for part in torch.split(field, AT_ONCE))
    near = torch.cat([part[torch.isin(part[:, 0], mine[:, 0])] for part in parts])
    key = secrets.token_bytes(32)
    there = keyed_hash([near], key)
    _, times = np.unique(there[torch.isin(there, keyed_hash([mine], key))], return_counts=True)
    return bool((times <= max(2, SHARED * len(field))).any())


def _are_ordered(rows: Tensor) -> Tensor:
    """Of each row, whether its numbers rise or fall."""
    behind, ahead = rows[..., 1:], rows[..., :-1]
    return (behind >= ahead).all(-1) | (behind <= ahead).all(-1)


def check_public(source: RecordSource, method: Method) -> None:
    """Refuse public records that are private ones.

    Args:
        source: the private records.
        method: whose public records are looked at.

    Raises:
        DataError: a public record equals a private one in every byte.
    """
    if not source.is_scanned:
        return
    for public in method.public_batches():
        found = int(are_copies(source.batch(), public.batch).sum())
        if found:
            raise DataError(
                f"{found} records of data equal some of the {len(public)} public ones, and a public record "
                "gets no protection. Leave them out of data, whoever's they are: that looks at "
                "no other record, and the guarantee stays. Nothing was spent."
            )


def are_copies(private: Any, public: Any) -> Tensor:
    """Of each private record, whether it equals a public one in the fields that the public batch has, [n].

    >>> are_copies({"x": torch.tensor([2.0, 3.0]), "y": torch.zeros(2)}, {"x": torch.tensor([1.0, 2.0])})
    tensor([ True, False])
    """
    there, wanted = _fields_of(private), _fields_of(public)
    if not set(wanted) <= set(there) or any(
        wanted[name].shape[1:] != there[name].shape[1:] for name in wanted
    ):
        return torch.zeros(num_records(private), dtype=torch.bool)  # of another make: no row can be the same
    key = secrets.token_bytes(32)
    rows = keyed_hash([there[name] for name in wanted], key)
    found = keyed_hash([wanted[name].to(there[name].dtype) for name in wanted], key)
    return torch.from_numpy(np.isin(rows, found))


def _fields_of(batch: Any) -> Mapping[str, Tensor]:
    """The tensors of a batch by their place in it."""
    return {name: leaf for name, leaf in named_leaves(batch).items() if isinstance(leaf, Tensor)}
