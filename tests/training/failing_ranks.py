"""Trainings of models of which two processes hold parts, in which records fail at some place of a forward."""

from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from sharded_ranks import values
from small_problems import CLASSES, FEATURES, RECORDS, OnDemand, records, training
from test_processes import join_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from equipoise.training.record_source import RecordSource

WAYS = ["unreadable", "inside", "loss", "backward", "not finite"]
WAYS += ["other operation", "skips a part", "a part twice"]
#: Their rows need other parts than planned: where processes share the forwards they have weight zero.
OTHER_PARTS = WAYS[-2:]
SEVERAL = {5: "inside", 17: "unreadable", 20: "not finite", 40: "skips a part", 41: "loss"}
SEVERAL |= {44: "other operation"}
CASES: dict[str, dict[int, str]] = {way: {41: way} for way in WAYS} | {"several": SEVERAL}
#: Of a tensor parallel model; a usual tensor times a parameter of it is an error of PyTorch's.
CUT: dict[str, dict[int, str]] = {f"cut, {way}": CASES[way] for way in ("several", "a part twice")}


def number(way: str) -> int:
    """What stands in a record that fails so; made-up records hold zeros and ones."""
    return 10 + WAYS.index(way)


_spread = RecordSource.spread


def _readable(self: RecordSource, count: int) -> Tensor:
    return torch.tensor([i for i in _spread(self, count).tolist() if i not in SEVERAL])


class Part(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh())

    def forward(self, h: Tensor, ways: Tensor) -> Tensor:
        fail(ways, "inside")
        return super().forward(h)


class Fragile(nn.Module):
    """It looks at what each record says of itself."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, ways: Tensor) -> Tensor:
        h = self.first(x)
        for place, part in enumerate(self.parts):
            if place == 1 and has(ways, "skips a part"):
                continue
            if place == 1 and has(ways, "a part twice"):
                h = part(h, ways)
            more = checkpoint(part, h, ways, use_reentrant=False) if self.checkpointed else part(h, ways)
            h = h + more
        if has(ways, "backward"):
            h.register_hook(lambda _: fail(ways, "backward"))
        if has(ways, "other operation"):
            return h @ self.head.weight.T + self.head.bias
        return self.head(h)


def has(ways: Tensor, way: str) -> bool:
    return bool((ways == number(way)).any())


def fail(ways: Tensor, way: str) -> None:
    if has(ways, way):
        raise ValueError(f"a record fails: {way}")


def cut(model: Fragile) -> nn.Module:
    whole = ColwiseParallel(output_layouts=Replicate())
    ways = {"first": whole, "head": RowwiseParallel(input_layouts=Replicate())}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, ways | {f"parts.{number}.0": whole for number in range(3)})


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input"], batch["way"])
    fail(batch["way"], "loss")
    return nn.functional.cross_entropy(logits, batch["label"], reduction="none")


class Marked(OnDemand):
    """Records that say how they fail."""

    def __init__(self, ways: dict[int, str]) -> None:
        super().__init__(records(dtype=torch.float64))
        self.ways = ways

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        way = self.ways.get(i)
        if way == "unreadable":
            raise OSError("a record cannot be read")
        found = super().__getitem__(i) | {"way": torch.tensor(0 if way is None else number(way))}
        return found | ({"input": found["input"] * torch.nan} if way == "not finite" else {})


def trained(ways: dict[int, str], how: str = "whole", checkpointed: bool = False) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Fragile(checkpointed).double()
    if how == "cut":
        cut(model)
    elif how == "sharded":
        for part in model.parts:
            fully_shard(part)
        fully_shard(model)
    # A start refuses most of the failing records if it meets them; here a step does.
    given = {
        "data": Marked(ways),
        "loss": losses,
        "sampling": eq.FullBatch(RECORDS, 2),
        "microbatch_size": 16,
    }
    with patch.object(RecordSource, "spread", _readable):
        run = training(model, method=eq.DPSGD(clip_norm=0.5, noise_multiplier=0.1), **given)
    norms = [step.released_norm for step in run]
    return torch.cat([values(run.model), torch.tensor(norms, dtype=torch.float64)])


def work(rank: int, port: int, folder: str) -> None:
    join_group(rank, port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {name: trained(ways, "sharded") for name, ways in CASES.items()}
    found["checkpointed"] = trained(SEVERAL, "sharded", checkpointed=True)
    found |= {name: trained(ways, "cut") for name, ways in CUT.items()}
    torch.save(found, Path(folder) / f"found{rank}.pt")
    dist.destroy_process_group()
