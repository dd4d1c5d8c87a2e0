"""Tensors that model and loss hold at the start are compared with the private records.

Every record's forward may use them, and what the model holds is published with it: no epsilon covers what
they hold of private records. Copies of records are refused by name. What was computed from records cannot be
told from other numbers, so tensors that are as long as the data are named in the statement.

Numbers that carry little agree by chance or are public: a row of few values, numbers in rising order, and a
row that a hundredth of the records share are no copy.
"""

from __future__ import annotations

import dis
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import suppress
from functools import partial
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise._dtensor import local_part
from equipoise.gradients.capture.attributes import is_own
from equipoise.training.owners import UserSource, flattened
from equipoise.training.record_source import DataError, RecordSource
from equipoise.training.setup.public_copies import fields_of, row_digests

__all__ = ["check_held"]

FEWEST_VALUES, FEWEST_WHOLE_NUMBERS, SHORTEST_COLUMN = 4, 8, 16
"""Different values that a row needs to count, of fractions and of whole numbers; entries of a column."""

SHARED = 0.01
"""A row that more records share is of a class of them, such as the embedding of its name."""

AT_ONCE = 2**16
"""Records that are compared at a time."""


def check_held(
    model: nn.Module, loss: Any, source: RecordSource, example: Any, lengths: Set[int], allowed: bool
) -> list[str]:
    """Refuse copies of private records among the tensors that model and loss hold; warn of untrained ones.

    Args:
        model, loss: whose parameters, buffers, attributes, variables and arguments are looked at.
        source: the records; all are compared where they lie in memory.
        example: a batch of the records that were read so far, which are compared otherwise.
        lengths: how long the data are.
        allowed: records that are public too; copies are named.

    Returns:
        Names of the tensors that are as long as the data, and of allowed copies.

    Raises:
        DataError: naming a tensor that holds private records.
    """
    some = flattened(example) if isinstance(source, UserSource) else example
    records = fields_of(source.batch() if source.is_scanned else some)
    fields = [one for one in records.values() if one.layout is torch.strided and one.ndim and len(one)]
    named, trained, untrained = set(), {id(p) for p in model.parameters()}, []
    for name, held in held_tensors(model, loss):
        here = local_part(held).detach()
        if held.requires_grad and held.is_leaf and id(held) not in trained:
            untrained.append(name)
        is_copy = here.layout is torch.strided and any(_holds_copy(here, field) for field in fields)
        if is_copy and not allowed:
            raise DataError(
                f"{name} holds private records: a column or records of data stand there as they are. Every "
                "record's gradient would follow them, and what a model holds is published with it; no "
                "epsilon covers that. Give each record its own part as a field of data, and read it from the "
                "batch. If only its length or width is needed, read that before, as a number. If these "
                "records are public too, give allow_public_duplicates=True: the statement then names the "
                "tensor. Nothing was spent."
            )
        if is_copy or (held.ndim and held.shape[0] in lengths):
            named.add(name)
    if untrained:
        warnings.warn(
            f"{untrained[:3]} want a gradient and are no parameters of the model: this training leaves them "
            "as they are. To train them, put what holds them into the model, nn.ModuleDict({'model': ..., "
            "'loss': ...}), and build the optimizer from it; otherwise freeze them (requires_grad_(False)), "
            "or leave them, if another optimizer trains them",
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
        inside: dict[str, Any] = {}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            yield name, torch.from_numpy(np.ascontiguousarray(value))
        elif isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (dict, list, tuple)):
            # Under one name: keys may be private.
            entries = value.values() if isinstance(value, dict) else value
            waiting += [(name, one) for one in entries if isinstance(one, _TENSORS) or callable(one)]
        elif isinstance(value, nn.Module):
            inside = dict(chain(value.named_parameters(), value.named_buffers()))
            for path, module in value.named_modules():
                own = vars(module) | {"forward": type(module).forward}
                inside |= {
                    f"{path}.{key}".strip("."): held for key, held in own.items() if key not in _OF_TORCH
                }
        elif isinstance(value, partial):
            inside = {"func": value.func, "args": value.args, **value.keywords}
        elif isinstance(value, MethodType):
            waiting += [(name, value.__self__), (name, value.__func__)]
        elif isinstance(value, FunctionType):
            inside = _variables(value) if is_own(value.__module__) else {}
        elif callable(value) and not isinstance(value, type):
            inside = getattr(value, "__dict__", {}) | {"__call__": type(value).__call__}
        waiting += [(f"{name}.{key}", held) for key, held in inside.items()]


_TENSORS, _OF_TORCH = (Tensor, np.ndarray), frozenset(vars(nn.Module()))


def _variables(function: FunctionType) -> dict[str, Any]:
    """What a function reads by name: globals, defaults, variables of the functions around it."""
    scope, found = function.__globals__, {}
    for name in _globals(function.__code__) & scope.keys():
        found[name] = scope[name]
    for parameter in inspect.signature(function, follow_wrapped=False).parameters.values():
        found[parameter.name] = parameter.default
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


def _globals(code: CodeType) -> set[str]:
    """The globals that a function and those inside it read."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals(one) for one in code.co_consts if isinstance(one, CodeType)))


def _holds_copy(held: Tensor, field: Tensor) -> bool:
    """Whether the column, or records of it, stand in a tensor of any shape."""
    is_rounded = held.is_floating_point()
    kind = held.dtype if is_rounded else torch.promote_types(held.dtype, field.dtype)
    size = field[0].numel()
    if not size or kind.is_complex:
        return False
    if held.numel() == field.numel() >= SHORTEST_COLUMN:
        column = held.cpu().reshape(-1).to(kind)
        if torch.equal(column, field.cpu().reshape(-1).to(kind)) and not _is_ordered(column):
            return True
    if size < FEWEST_VALUES or size not in {math.prod(held.shape[axis:]) for axis in range(held.ndim)}:
        return False
    mine = held.cpu().reshape(-1, size).to(kind)
    if is_rounded and not field.is_floating_point():  # no fraction is a pixel: spares a copy of all records
        mine = mine[(mine == mine.round()).all(1)]
    if not len(mine):
        return False
    # Equal rows have equal sums of their bits, which take a fraction of a digest's time.
    sums = _sums(mine)
    some = (part.cpu().reshape(len(part), size).to(kind) for part in torch.split(field, AT_ONCE))
    near = torch.cat([part[torch.isin(_sums(part), sums)] for part in some])
    if not len(near):
        return False
    there = Counter(row_digests([near]))
    mine = mine[torch.isin(sums, _sums(near))]
    return any(
        0 < there[digest] <= max(2, SHARED * len(field)) and _tells(row)
        for row, digest in zip(mine, row_digests([mine]), strict=True)
    )


def _sums(rows: Tensor) -> Tensor:
    """For each row the sum of its bits, read as whole numbers."""
    whole = rows.contiguous()
    bits = (whole.clone() if whole.storage_offset() else whole).view(
        torch.uint8
    )  # of four bytes from the start
    return bits.view(torch.int32 if bits.shape[1] % 4 == 0 else torch.uint8).sum(1, dtype=torch.int64)


def _tells(row: Tensor) -> bool:
    """Whether others would hardly hold the same numbers by chance."""
    values = set(row.tolist())
    is_whole = all(float(value).is_integer() for value in values)
    return len(values) >= (FEWEST_WHOLE_NUMBERS if is_whole else FEWEST_VALUES) and not _is_ordered(row)


def _is_ordered(values: Tensor) -> bool:
    return bool((values[1:] >= values[:-1]).all() or (values[1:] <= values[:-1]).all())
