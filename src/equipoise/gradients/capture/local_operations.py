"""Operations of tensor parallel models as one process runs them.

Such an operation has DTensors for parameters, inputs and output. Each process computes a part of it from the
parts that it holds, and a rule is given that local operation. The factors that it makes are this process'
part of the records' gradients: of a parameter that is cut the columns that are here, of a copied one all.

    linear, weight cut by outputs     inputs copied, outputs and bias cut alike
    linear, weight cut by inputs      inputs cut alike, outputs to be added up, bias copied
    look-up, table cut by columns     indices copied, outputs cut alike
    look-up, table cut by rows        indices copied, outputs to be added up: zero where the row is elsewhere
    any, all parameters copied        inputs copied
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from equipoise._dtensor import is_a_copy, is_dtensor, local_part, place_of
from equipoise._tree import map_leaves
from equipoise.gradients.rules.operation import Operation


def why_not_here(
    func: Callable, args: tuple, kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> str | None:
    """Why the local operation would not give this process' part of the gradients; None if it does.

    Args:
        func, args, kwargs: the operation.
        tensors: its tensors.
    """
    given = [*args, *kwargs.values()]
    table = args[1] if len(args) > 1 else kwargs.get("weight")
    if func is F.linear and is_dtensor(table) and not is_a_copy(table):
        (cut,) = table.placements
        x = args[0] if args else kwargs["input"]
        by_outputs = cut.is_shard(0) and is_a_copy(x)
        by_inputs = cut.is_shard(1) and is_dtensor(x) and x.placements[0].is_shard(x.ndim - 1)
        if by_outputs or by_inputs:
            return None
        return "its inputs lie in another way than ColwiseParallel and RowwiseParallel put them"
    if func is F.embedding and is_dtensor(table):
        index = args[0] if args else kwargs["input"]
        others = [value for value in given if isinstance(value, Tensor) and value is not table]
        return None if is_a_copy(index) and len(others) == 1 else "its look-up gets a part of the indices"
    if all(map(is_a_copy, tensors)):
        return None
    name = getattr(func, "__name__", func)
    return f"{name} sees a part of each record, as in sequence parallel, or of the parameter"


def gradient_here(out: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
    """From the gradient of an operation's output to that of the local one's.

    Args:
        out: nothing of it is kept but how it lies.
        target: whose gradient it is: the output, or what that is a view of.
    """
    shape = local_part(out).shape
    if not is_dtensor(target):
        return lambda b: b.reshape(shape)
    from torch.distributed.tensor import Replicate

    # Each process' term of a sum has the gradient of the sum.
    placements = [Replicate() if one.is_partial() else one for one in target.placements]

    def here(b: Tensor) -> Tensor:
        assert is_dtensor(b)
        return b.redistribute(placements=placements).to_local().reshape(shape)

    return here


def operation_here(op: Operation) -> tuple[Operation, Tensor | None]:
    """The operation on the tensors that are here, and which part of its output's gradient counts there.

    Args:
        op: its output is a DTensor.

    Returns:
        The operation, and truth values that the gradient is multiplied by; None where all of it counts.
    """
    assert is_dtensor(op.out)
    parts = {id(t): t._local_tensor for t in op.tensors if is_dtensor(t)}
    args, kwargs = map_leaves(lambda leaf: parts.get(id(leaf), leaf), (op.args, op.kwargs))
    counting: Tensor | None = None
    table = op.get("input", "weight")[1]
    if op.func is F.embedding and is_dtensor(table) and table.placements[0].is_shard(0):
        index, _, padding, *others = op.get(
            "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"
        )
        (count, *_), (first, *_) = place_of(table)
        own = parts[id(index)] - first
        is_here = (own >= 0) & (own < count)
        if padding is not None:  # PyTorch gives the padding row no gradient
            is_here &= own != padding % table.shape[0] - first
        parts[id(index)] = own.clamp(0, max(0, count - 1))
        args, kwargs = (parts[id(index)], parts[id(table)], None, *others), {}
        counting = is_here.unsqueeze(-1)
    tracked = {id(parts.get(id(t), t)): op.tracked[id(t)] for t in op.tensors if id(t) in op.tracked}
    tensors, out = [parts.get(id(t), t) for t in op.tensors], op.out._local_tensor
    local = Operation(op.func, args, kwargs, out, tracked, tensors, op.layouts, op.out_layout, op.records)
    return local, counting
