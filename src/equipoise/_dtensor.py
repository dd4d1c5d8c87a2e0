"""Tensors of which each process of a group holds a part (`torch.distributed.tensor.DTensor`).

The type is looked up among the modules that were imported: who shards nothing never pays for importing it.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "all_values",
    "device_of",
    "holders_of_a_part",
    "is_dtensor",
    "local_part",
    "range_of",
    "with_part",
    "with_values",
]


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a process holds a part of this tensor, or a copy of what others hold too."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """The part that this process holds, sharing its memory; any other tensor as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def device_of(tensor: Tensor) -> torch.device:
    """Where operations on the tensor run: that of its mesh, also where the parts wait on the host."""
    if not is_dtensor(tensor):
        return tensor.device
    kind = tensor.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def all_values(tensor: Tensor) -> Tensor:
    """All values, gathered from the processes, which all have to ask; detached."""
    found = tensor.detach()
    if not is_dtensor(found):
        return found
    kind = found.device_mesh.device_type
    return cast("DTensor", found.to(kind)).full_tensor()


def with_part(part: Tensor, like: Tensor) -> Tensor:
    """A tensor in the form of `like`, of which this process holds this part."""
    if not is_dtensor(like):
        return part
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def with_values(values: Tensor, like: Tensor) -> Tensor:
    """These values, which every process has, in the form of `like`; nothing is sent."""
    if not is_dtensor(like):
        return values
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    placed = distribute_tensor(values.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    return with_part(placed._local_tensor.detach().clone().to(like._local_tensor.device), like)


def holders_of_a_part(tensor: DTensor) -> int:
    """How many processes hold the same part."""
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def range_of(tensor: DTensor) -> tuple[int, int]:
    """Where the local part lies among the flattened values: [start, stop), in its own order.

    Raises:
        NotImplementedError: it is cut along another axis than its first.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape[1:]) != tuple(tensor.shape[1:]) or any(offset[1:]):
        raise NotImplementedError(
            f"a tensor of shape {tuple(tensor.shape)} is placed as {tensor.placements}: shard parameters "
            "along their first axis, as fully_shard does by itself"
        )
    start = offset[0] * math.prod(tensor.shape[1:]) if offset else 0
    return start, start + tensor._local_tensor.numel()
