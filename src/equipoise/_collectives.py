"""Exchanges between processes whose number follows the bytes that are sent, not the number of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise._dtensor import is_dtensor, with_part

BUCKET = 1 << 24
"""Numbers that are sent at once: enough to fill a link, few enough to be a small part of a model."""


def add_up(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Each tensor becomes its sum over the processes."""
    for places in _buckets(tensors, [tensor.dtype for tensor in tensors]):
        if len(places) == 1:
            dist.all_reduce(tensors[places[0]], group=group)
            continue
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        dist.all_reduce(flat, group=group)
        sizes = [tensors[place].numel() for place in places]
        for place, piece in zip(places, torch.split(flat, sizes), strict=True):
            tensors[place].copy_(piece.view(tensors[place].shape))


def sent_by_first(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """The first process' values of each tensor.

    Args:
        tensors: on the first process; elsewhere any of the same shapes, types and devices.
        group: of processes.
    """
    out: list[Tensor | None] = [None] * len(tensors)
    for places in _buckets(tensors, [tensor.dtype for tensor in tensors]):
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        dist.broadcast(flat, src=0, group=group)
        _cut(flat, places, tensors, out)
    return [one for one in out if one is not None]


def reduce_scattered(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The sums of each tensor over the processes, of which each process gets the part that it holds.

    Args:
        tensors: whole ones, of this process; they are let go as far as nobody else holds them.
        like: DTensors whose placements the sums get.
    """
    waiting = list(tensors)
    out: list[Tensor] = []
    while waiting:
        first = like[len(out)]
        assert is_dtensor(first)
        if not _by_rows(first):
            out.append(_redistributed(waiting.pop(0), first))
            continue
        count, size = 1, _padded(first)
        while count < len(waiting):
            following = like[len(out) + count]
            alike = waiting[count].dtype == waiting[0].dtype and _by_rows(following)
            same_mesh = is_dtensor(following) and following.device_mesh == first.device_mesh
            size += _padded(following)
            if not (alike and same_mesh) or size * first.device_mesh.size() > BUCKET:
                break
            count += 1
        bucket, waiting = waiting[:count], waiting[count:]
        out += _scattered(bucket, like[len(out) : len(out) + count])
    return out


def _scattered(tensors: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """One reduce-scatter of tensors that are cut along their first axis."""
    first = like[0]
    assert is_dtensor(first)
    processes = first.device_mesh.size()
    sizes = [_padded(one) for one in like]
    flat = torch.empty(processes, sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        rows = tensor.reshape(-1)
        for rank in range(processes):
            part = rows[rank * size : (rank + 1) * size]
            flat[rank, start : start + len(part)] = part
            flat[rank, start + len(part) : start + size] = 0
        start += size
    mine = torch.empty(sum(sizes), dtype=flat.dtype, device=flat.device)
    # Its name in newer versions of PyTorch, and that in older ones.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(mine, flat.view(-1), group=first.device_mesh.get_group())
    found = []
    for piece, one in zip(torch.split(mine, sizes), like, strict=True):
        assert is_dtensor(one)
        local = one._local_tensor
        found.append(with_part(piece[: local.numel()].view(local.shape), one))
    return found


def _by_rows(tensor: Tensor) -> bool:
    """Whether it is cut along its first axis, over one axis of processes."""
    if not is_dtensor(tensor) or tensor.device_mesh.ndim != 1:
        return False
    (placement,) = tensor.placements
    return placement.is_shard(0)


def _padded(tensor: Tensor) -> int:
    """Numbers in the largest part."""
    assert is_dtensor(tensor)
    return math.ceil(len(tensor) / tensor.device_mesh.size()) * math.prod(tensor.shape[1:])


def _redistributed(tensor: Tensor, like: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial

    assert is_dtensor(like)
    mesh = like.device_mesh
    summed = DTensor.from_local(tensor, mesh, [Partial()] * mesh.ndim, run_check=False)
    return summed.redistribute(placements=like.placements).contiguous()


def _buckets(tensors: Sequence[Tensor], types: Sequence[torch.dtype]) -> Iterator[list[int]]:
    """Numbers of tensors that are sent together: in one type, from one device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, (tensor, dtype) in enumerate(zip(tensors, types, strict=True)):
        kinds.setdefault((dtype, tensor.device), []).append(place)
    for places in kinds.values():
        bucket: list[int] = []
        size = 0
        for place in places:
            if bucket and size + tensors[place].numel() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(place)
            size += tensors[place].numel()
        yield bucket


def _cut(flat: Tensor, places: list[int], tensors: Sequence[Tensor], out: list[Tensor | None]) -> None:
    sizes = [tensors[place].numel() for place in places]
    for place, piece in zip(places, torch.split(flat, sizes), strict=True):
        out[place] = piece.view(tensors[place].shape)
