"""Tensors of which each process of a group holds a part (`torch.distributed.tensor.DTensor`).

The type is looked up among the modules that were imported: who shards nothing never pays for importing it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from operator import is_not
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
    """A tensor in the form of `like`, of which this process holds this part.

    The part may have further axes in front, which the tensor then has too.
    """
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import Shard

    more = part.ndim - like.ndim
    shape = (*part.shape[:more], *like.shape)
    placements = [Shard(one.dim + more) if isinstance(one, Shard) else one for one in like.placements]
    stride = torch.empty(shape, device="meta").stride() if more else like.stride()
    return type(like).from_local(
        part, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
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


def norm_of_all(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The Euclidean norm of all tensors together, in float64; one exchange where processes hold parts.

    Every number is counted once, whoever holds it. Of usual tensors all processes have the same.

    Args:
        tensors: at least one.
        dtype: in which the norm of each is taken; its own when None.
    """
    given = list(tensors)
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in given]
    found = torch._foreach_norm(parts, dtype=dtype)
    if not any(map(is_not, given, parts)) and len({norm.dtype for norm in found}) == 1:
        return torch.linalg.vector_norm(torch.stack(found).detach(), dtype=torch.float64)
    norms = [norm.detach().double() for norm in found]
    if not any(map(is_not, given, parts)):
        return torch.stack(norms).norm()
    own, shared = [], []
    for tensor, norm in zip(given, norms, strict=True):
        if is_dtensor(tensor):
            shared.append(norm.square() / holders_of_a_part(tensor))
        else:
            own.append(norm.square())
    total = torch.stack(shared).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return torch.stack([total, *(square.to(total.device) for square in own)]).sum().sqrt()


def part_like(values: Tensor, like: Tensor) -> Tensor:
    """The part of these values that this process holds of `like`: a gradient may lie in another way.

    Whatever has to be exchanged for it, all processes have to ask.
    """
    if not (is_dtensor(values) and is_dtensor(like)):
        return values
    return values.redistribute(placements=like.placements)._local_tensor


def is_a_copy(tensor: Tensor) -> bool:
    """Whether all processes that know of the tensor hold all of it."""
    return not is_dtensor(tensor) or all(placement.is_replicate() for placement in tensor.placements)


def is_cut_once(tensor: DTensor) -> bool:
    """Whether each process holds one slice of it, along one axis."""
    from torch.distributed.tensor import Shard

    cuts = [placement for placement in tensor.placements if not placement.is_replicate()]
    return len(cuts) == 1 and type(cuts[0]) is Shard


def place_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the local part, and where it begins on every axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def ranges_of(tensor: Tensor) -> Tensor:
    """Where the local part lies among the flattened values: [start, stop) after [start, stop), in its order.

    >>> ranges_of(torch.zeros(2, 3))
    tensor([[0, 6]])
    """
    if not is_dtensor(tensor):
        return torch.tensor([[0, tensor.numel()]])
    shape, offset = place_of(tensor)
    # Axes from `whole` on are here as a whole, so that each index before them gives one range.
    whole = max((axis for axis in range(len(shape)) if shape[axis] != tensor.shape[axis]), default=0)
    starts, stride = torch.zeros(1, dtype=torch.int64), tensor.numel()
    for axis, (begin, size) in enumerate(zip(offset[: whole + 1], shape[: whole + 1], strict=True)):
        stride //= max(1, tensor.shape[axis])
        taken = torch.arange(begin, begin + size) if axis < whole else torch.tensor([begin])
        starts = (starts[:, None] + stride * taken).flatten()
    return torch.stack([starts, starts + math.prod(shape[whole:])], dim=1)
