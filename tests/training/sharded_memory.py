"""What each process holds in memory while several train a sharded model."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from small_problems import training
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import equipoise as eq
from equipoise._dtensor import local_part
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.privacy.private import unwrap

WIDTH, LAYERS, RECORDS = 160, 4, 32


def live_bytes() -> int:
    """Of all storages that a tensor holds."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_of(nest: object) -> int:
    """Of the parts of these tensors that this process holds."""
    leaves = torch.utils._pytree.tree_leaves(nest)
    return sum(local_part(unwrap(leaf)).nbytes for leaf in leaves if isinstance(leaf, Tensor))


def shared(how: str) -> nn.Module:
    """A model of layers of one size, without what every process would hold a copy of."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    if how == "sharded":
        for layer in layers:
            fully_shard(layer)
        return fully_shard(model)
    ways = {str(number): (ColwiseParallel, RowwiseParallel)[number % 2]() for number in range(LAYERS)}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), ways)


def held(how: str) -> dict[str, int]:
    """Bytes by what they are for: in the second step, and after it."""
    before = live_bytes()
    model = shared(how)
    run = training(
        model,
        optimizer=torch.optim.AdamW,
        data={"x": torch.randn(RECORDS, WIDTH)},
        loss=lambda model, batch: model(batch["x"]).square().sum(1),
        sampling=eq.WithoutReplacement(8, RECORDS, 4),
        relation="replace_one",
        microbatch_size=8,
        population=RECORDS,
    )
    taken = iter(run)
    next(taken)
    found: dict[str, int] = {}
    release = SharedLedger.release

    def watched(self, draw, sums):
        found["sums"] = bytes_of([dict(bounded.value) for bounded in sums.values()])
        released = release(self, draw, sums)
        found["noised"] = bytes_of(released)
        found["all at the release"] = live_bytes() - before
        return released

    SharedLedger.release = watched
    try:
        next(taken)
    finally:
        SharedLedger.release = release
    found["parameters"] = bytes_of([*model.parameters()])
    found["optimizer"] = bytes_of([v for s in run.optimizer.state.values() for v in s.values() if v.ndim])
    found["all between steps"] = live_bytes() - before
    return found


def work(count: int, rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    torch.save({how: held(how) for how in ("sharded", "cut")}, Path(folder) / f"found{rank}.pt")
    dist.destroy_process_group()
