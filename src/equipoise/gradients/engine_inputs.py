"""What an engine is given: a batch of records, a loss per record, and values for a model's parameters.

A batch is a tensor or a nest of mappings, tuples and lists of tensors, with the record axis first in every
tensor. Leaves that are no tensors, and tensors without dimensions, belong to all records and pass through
unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from equipoise._dtensor import is_dtensor
from equipoise._tree import leaves, map_leaves
from equipoise.gradients.capture.attributes import attributes_kept
from equipoise.gradients.capture.sharded import (
    SHARDED,
    note_sharding,
    other_values,
    parameters_gathered,
)


def map_records(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """``batch`` with ``function`` applied to every tensor that has a record axis; containers keep their type.

    >>> map_records(lambda t: t[:1], {"x": torch.ones(3, 2), "name": "digits"})
    {'x': tensor([[1., 1.]]), 'name': 'digits'}
    """

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            _refuse_array(leaf)
        elif leaf.ndim:
            return function(leaf)
        return leaf

    return map_leaves(change, batch)


def record_leaves(batch: Any) -> list[Tensor]:
    """The tensors of ``batch`` that have a record axis, in a fixed order."""
    found: list[Tensor] = []
    for leaf in leaves(batch):
        if not isinstance(leaf, Tensor):
            _refuse_array(leaf)
        elif leaf.ndim:
            found.append(leaf)
    return found


def is_array(leaf: Any) -> bool:
    """Whether this is an array that is no tensor, such as NumPy's."""
    return not isinstance(leaf, Tensor) and hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) > 0


def _refuse_array(leaf: Any) -> None:
    if is_array(leaf):
        raise TypeError(
            f"batch holds a {type(leaf).__name__}, which would pass for something that all records share; "
            "give a tensor, for instance torch.from_numpy(array)"
        )


def replace_leaves(batch: Any, leaves: list[Tensor]) -> Any:
    """``batch`` with other record leaves, in the order of ``record_leaves``."""
    source = iter(leaves)
    return map_records(lambda _: next(source), batch)


def num_records(batch: Any) -> int:
    """B, the common first size of the batch's tensors.

    Raises:
        ValueError: no tensor has a record axis, or the first sizes differ.
    """
    leaves = record_leaves(batch)
    if not leaves:
        raise ValueError(
            f"batch={type(batch).__name__} holds no tensor with a record axis; pass a tensor or a dict, "
            "tuple or list of tensors whose first dimension counts the records"
        )
    sizes = [leaf.shape[0] for leaf in leaves]
    if len(set(sizes)) > 1:
        raise ValueError(
            "batch holds tensors of different first sizes, so that records cannot be told apart; give every "
            "tensor the record axis first (move what is shared by all records into the model or the loss)"
        )
    return sizes[0]


def check_batch(batch: Any) -> int:
    """B, as ``num_records``; no record may hide in a list of numbers, which would stay whole.

    Raises:
        ValueError: a list or tuple holds one number per record.
    """
    records = num_records(batch)

    def check(node: Any) -> None:
        if isinstance(node, Mapping):
            for part in node.values():
                check(part)
        elif isinstance(node, (list, tuple)):
            if len(node) == records and all(isinstance(part, (int, float)) for part in node):
                raise ValueError(
                    f"batch holds a {type(node).__name__} of {records} numbers, one per record, which would "
                    "pass for something that all records share: give torch.tensor(numbers). What all records "
                    "share belongs into the model or the loss."
                )
            for part in node:
                check(part)

    if records > 1:
        check(batch)
    return records


def take_records(batch: Any, index: Tensor | slice) -> Any:
    """The chosen records of ``batch``.

    >>> take_records((torch.arange(4), [torch.eye(4)]), slice(1, 2))
    (tensor([1]), [tensor([[0., 1., 0., 0.]])])
    """
    if isinstance(index, slice):
        return map_records(lambda leaf: leaf[index], batch)
    return map_records(lambda leaf: leaf.index_select(0, index.to(leaf.device)), batch)


def repeat_to(batch: Any, count: int) -> Any:
    """The first ``count`` records; where the batch has fewer, they are repeated in turn."""
    size = num_records(batch)
    return take_records(batch, torch.arange(count) % size)


def fillers(batch: Any, count: int) -> Any:
    """Public records in the shape of these: zeros, which can be a number, a label, a token or a mask.

    >>> fillers({"label": torch.tensor([7, 8, 9])}, 2)
    {'label': tensor([0, 0])}
    """
    return map_records(lambda leaf: leaf.new_zeros((count, *leaf.shape[1:])), batch)


def signature(batch: Any) -> tuple:
    """Types and shapes of the record leaves without their record axis: batches that one plan serves."""
    return tuple([(leaf.dtype, leaf.shape[1:]) for leaf in record_leaves(batch)])


#: ``loss(model, batch) -> [B]``
Loss = Callable[[Any, Any], Tensor]


def evaluate_loss(
    model: nn.Module, loss: Loss, batch: Any, substitute: Mapping[str, Tensor] | None
) -> Tensor:
    """``loss(model, batch)``, [B], with some parameters and buffers exchanged for the call.

    What model and loss keep in attributes and buffers is forgotten afterwards; inside `backward_included`,
    when the next evaluation begins.

    Raises:
        ValueError: the result is not one number per record.
        TypeError: processes hold parts of it.
    """
    scope = _SCOPE.get() or ExitStack()
    with torch._C.DisableTorchFunction():  # whoever watches the evaluation watches the model alone
        scope.close()  # what the evaluation before this one has left
        given = [buffer for name, buffer in model.named_buffers() if name in (substitute or {})]
        scope.enter_context(attributes_kept(model, loss, given))
        sharded = model in SHARDED
        if sharded:  # its backward gathers the values once more
            scope.enter_context(other_values(model, substitute or {}))
    with nullcontext() if scope is _SCOPE.get() else scope:
        if sharded:
            with uncompiled(), parameters_gathered(model):
                losses = loss(model, batch)
        else:
            losses = run_loss(model, loss, batch, substitute)
    records = num_records(batch)
    if is_dtensor(losses):
        raise TypeError(
            f"loss(model, batch) gave a DTensor that lies as {losses.placements}, as under loss_parallel: "
            "each process needs the whole losses. Give the last layer output_layouts=Replicate(), so that "
            "the model gives usual tensors, and compute the loss of those without loss_parallel"
        )
    if not isinstance(losses, Tensor) or losses.shape != (records,):
        found = (
            f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
        )
        raise ValueError(
            f"loss(model, batch) gave {found}, and {records} records need one number each, shape "
            f"({records},); use reduction='none' and average over everything but the records"
        )
    return losses


#: What the last evaluation inside `backward_included` has left to be forgotten.
_SCOPE: ContextVar[ExitStack | None] = ContextVar("backward_included", default=None)


@contextmanager
def backward_included() -> Iterator[None]:
    """Inside, what a forward keeps in attributes is still there in its backward, and forgotten with it.

    A backward of one's own may read it, and a checkpoint runs its forward once more there.
    """
    with ExitStack() as scope:
        token = _SCOPE.set(scope)
        try:
            yield
        finally:
            _SCOPE.reset(token)


@contextmanager
def backward_at(model: nn.Module, values: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Inside, the model has these values in a backward too: a checkpoint runs its forward once more there."""
    if not values or model in SHARDED:  # `evaluate_loss` does so for one that is sharded
        yield
        return
    with _reparametrize_module(model, dict(values), tie_weights=True), backward_included():
        yield


def run_loss(model: nn.Module, loss: Loss, batch: Any, substitute: Mapping[str, Tensor] | None) -> Any:
    """``loss(model, batch)`` as `evaluate_loss`, unchecked; what model and loss keep stays.

    Buffers that the forward binds anew are bound anew in `substitute`, if it is a dict that has them.
    """
    with uncompiled():
        if model in SHARDED:
            with other_values(model, substitute or {}), parameters_gathered(model):
                return loss(model, batch)
        if not substitute:
            return loss(model, batch)
        held = dict(substitute)
        with _reparametrize_module(model, held, tie_weights=True):
            losses = loss(model, batch)
        if isinstance(substitute, dict):
            # Not what a vmap inside of it has left, which is no tensor any more.
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor
            substitute.update((name, value) for name, value in held.items() if not wrapped(value))
        return losses


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, what ``torch.compile`` made runs as it was written: compiled operations cannot be watched."""
    # To import the compiler takes seconds. Where nobody did, nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def check_model(model: nn.Module) -> None:
    """Refuse models whose operations on parameters cannot be seen from Python.

    Raises:
        TypeError: a scripted module, parameters that are sharded over processes, or a wrapper that
            communicates while the model runs.
    """
    for path, module in model.named_modules():
        where = f"at {path!r}" if path else "as a whole"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"model is scripted {where} ({type(module).__name__}): what TorchScript does with a "
                "parameter cannot be watched, so that its per-sample gradients cannot be taken. Give the "
                "Python module that it was made from, and script or trace the trained model afterwards."
            )
        if type(module).__name__ in ("FullyShardedDataParallel", "DistributedDataParallel"):
            raise TypeError(
                f"model is wrapped {where} in {type(module).__name__}, which exchanges gradients between "
                "processes by itself, unclipped. Give the module inside: a training under torchrun shares "
                "the records among the processes and adds their bounded sums."
            )
    names, unknown = note_sharding(model)
    if names:
        raise TypeError(
            f"processes hold parts of the model's parameters {names}, and {unknown}. Give the model as it "
            "was before, and shard it by fully_shard alone or by parallelize_module alone, with "
            "ColwiseParallel and RowwiseParallel over a mesh of one axis"
        )


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient, a shared one under its first name.

    Raises:
        ValueError: there are no such parameters.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(
            f"model={type(model).__name__} has no trainable parameter: requires_grad is False for all "
            f"{sum(1 for _ in model.parameters())}; call requires_grad_(True) on those that are to be trained"
        )
    return found


def check_params(model: nn.Module, params: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """``params`` as a dict, its names and shapes compared with the model's.

    Raises:
        ValueError: a name the model does not have, or another shape.
    """
    if not params:
        return {}
    own = dict(model.named_parameters())
    for name, value in params.items():
        if name not in own or value.shape != own[name].shape:
            of_model = (
                f"has it with shape {tuple(own[name].shape)}" if name in own else "has no such parameter"
            )
            raise ValueError(f"params[{name!r}] has shape {tuple(value.shape)}, and the model {of_model}")
    return dict(params)
