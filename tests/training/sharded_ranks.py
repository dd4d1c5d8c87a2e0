"""Trainings of models of which two processes hold parts; what each finds goes into files."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from small_problems import CLASSES, FEATURES, RECORDS, loss, network, records, training
from test_processes import join_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import equipoise as eq
from equipoise._dtensor import local_part
from equipoise.distributed import backend
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.methods import AutoS, ReleasedQuantile
from equipoise.privacy.private import unwrap

NOISE = {"clip_norm": 0.5, "noise_multiplier": 1.0}
#: Draws of two records: one process often gets none.
SPARSE = eq.FixedEpochs(batch_size=2, population=RECORDS, steps=15)

CASES = {
    "adam": {"method": eq.DPSGD(**NOISE), "ema_decay": 0.5},
    "no records": {"method": eq.DPSGD(**NOISE), "sampling": SPARSE},
    "per layer": {"method": eq.DPSGD(per_layer=True, **NOISE)},
    "learned threshold": {"method": eq.DPSGD(clip_norm=ReleasedQuantile(initial=0.5), noise_multiplier=1.0)},
    "shared numbers": {"method": eq.DPSGD(**NOISE), "loss": "dropped layers"},
    "copies": {"method": eq.DPSGD(**NOISE), "shard": {"mesh": (2, 1)}},
    "offload": {"method": eq.DPSGD(**NOISE), "shard": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
}
ANCHORED = {"anchor_noise_multiplier": 1.0, "anchor_batch_size": 24}
#: Methods that ask rows for more than one sum, and those with a state of the size of the model.
ASKING = {
    "two sums": {"method": eq.DiceSGD(**NOISE)},
    "two sums, per layer": {"method": eq.DiceSGD(per_layer=True, **NOISE), "sampling": SPARSE},
    "differences": {"method": eq.DPC4Plus(**ANCHORED, **NOISE)},
    "anchors": {"method": eq.DPC4(**ANCHORED, **NOISE)},
}
CASES |= ASKING | {"empty part": {"method": eq.DPSGD(**NOISE), "ema_decay": 0.5, "width": 1}}
#: Trainings of tensor parallel models, see `cut`.
PARALLEL = {
    "cut": {"method": eq.DPSGD(**NOISE), "ema_decay": 0.5},
    "cut, per layer": {"method": eq.DPSGD(per_layer=True, **NOISE)},
    "cut, learned threshold": CASES["learned threshold"],
    "cut, normalised": {"method": eq.DPSGD(clip_rule=AutoS(), **NOISE)},
    "cut, shared numbers": CASES["shared numbers"],
    **{f"cut, {name}": options for name, options in ASKING.items()},
    "cut, one record in a forward": {"method": eq.DPSGD(**NOISE), "microbatch_size": 1},
}
CASES |= {name: options | {"shard": "cut"} for name, options in PARALLEL.items()}


#: Those that are left and taken up again.
RESUMED = ["adam", "empty part", "two sums", "cut", "cut, two sums", "cut, differences"]


def dropped_layers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A random number that all records of a forward share."""
    factor = 0.5 if torch.rand(()) < 0.5 else 1.0
    return factor * loss(model, batch)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def layers(seed: int = 1) -> nn.Sequential:
    """What `cut` cuts: some parameters by rows, in unequal parts, some by columns, some are copied."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5)]
        return nn.Sequential(*body, nn.Linear(5, CLASSES)).double()


def cut(model: nn.Module) -> nn.Module:
    ways = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), ways)


def values(model: nn.Module) -> Tensor:
    """All parameters in one vector, gathered."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().cpu().flatten() for p in found])


def built(name: str, is_sharded: bool, seed: int = 1) -> nn.Module:
    how, width = CASES[name].get("shard", {}), CASES[name].get("width", 8)
    model = layers(seed) if how == "cut" else network(dtype=torch.float64, seed=seed, width=width)
    if not is_sharded:
        return model
    if how == "cut":
        return cut(model)
    if "mesh" in how:  # parts of which several processes hold copies
        how = {"mesh": init_device_mesh("cpu", how["mesh"], mesh_dim_names=("copies", "parts"))}
    return sharded(model, **how)


def start(name: str, is_sharded: bool, folder: Path | None = None, **more: Any) -> eq.PrivateTraining:
    options = dict(CASES[name])
    model = built(name, is_sharded)
    for key in ("shard", "width"):
        options.pop(key, None)
    if options.get("loss") == "dropped layers":
        options["loss"] = dropped_layers
    usual = {"steps": 6, "batch": 12, "microbatch_size": 4, "learning_rate": 0.1, "folder": folder}
    usual |= {"optimizer": torch.optim.Adam, "data": records(dtype=torch.float64)}
    return training(model, **(usual | options | more))


def trained(name: str, is_sharded: bool) -> Tensor:
    """The parameters at the end, and the norms of the estimates on the way."""
    run = start(name, is_sharded)
    norms = [step.released_norm for step in run]
    return torch.cat([values(run.model), torch.tensor(norms, dtype=torch.float64)])


def resume(folder: Path, model: nn.Module) -> eq.PrivateTraining:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return eq.PrivateTraining.resume(folder, model, optimizer, loss=loss, data=records(dtype=torch.float64))


def killed_and_resumed(name: str, folder: Path) -> dict[str, Any]:
    """Of a whole run, and of one that is left and taken up by fresh objects."""
    whole = start(name, True, folder / "whole")
    public = records(dtype=torch.float64)["input"][:4]
    # A forward without a backward leaves what `fully_shard` gathered of the outermost layers.
    whole.run(evaluate=lambda model: float(model(public).sum()), evaluate_every=2, progress=False)
    left_behind(name, folder / "left")
    again = resume(folder / "left", built(name, True, seed=4))
    begun_at = again.steps_done
    again.run(progress=False)
    ended = built(name, True, seed=5)
    given = {"loss": loss, "data": records(dtype=torch.float64), "sampling": whole.sampling}
    optimizer = torch.optim.Adam(ended.parameters())
    found = eq.PrivateTraining.start_or_resume(ended, optimizer, run=folder / "whole", **given)
    return {
        "whole": values(whole.model),
        "resumed": values(again.model),
        "ended": values(ended) if found.run().finished else None,
        "begun at": begun_at,
    }


def left_behind(name: str, folder: Path) -> None:
    """A run that is left two steps behind its checkpoint."""
    run = start(name, True, folder)
    for step in run:
        if step.step == 3:
            run.save_checkpoint()
        if step.step == 5:
            break
    run.close()


def weights_apart() -> None:
    """The copies of a parameter differ."""
    model = built("cut", True)
    with torch.no_grad():
        model[3].weight.add_(dist.get_rank())
    training(model, data=records(dtype=torch.float64))


def refused(folder: Path) -> dict[str, str]:
    def said(make: Callable[[], Any]) -> str:
        try:
            make()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return {
        "method": said(lambda: start("adam", True, method=eq.AdaptiveRMS())),
        "describe": said(lambda: start("adam", True).describe()),
        "cut, method": said(lambda: start("cut", True, method=eq.AdaptiveRMS())),
        "cut, hardened": said(lambda: start("cut", True, hardened=True)),
        "cut, whole": said(lambda: resume(folder / "cut" / "whole", layers())),
        "cut, weights apart": said(weights_apart),
    }


def memory(name: str) -> dict[str, int]:
    """Numbers that a process keeps between two steps, and those of sums and noise on the way."""
    run = start(name, True)
    found: dict[str, int] = {}
    release = SharedLedger.release

    def held(nest: Any) -> int:
        leaves = torch.utils._pytree.tree_leaves(nest)
        return sum(local_part(unwrap(leaf)).numel() for leaf in leaves if isinstance(leaf, Tensor))

    def watched(self: Any, draw: Any, sums: Any, checks: Any) -> Any:
        found["sums"] = held([dict(bounded.value) for bounded in sums.values()])
        released = release(self, draw, sums, checks)
        found["noised"] = held(released)
        return released

    with patch.object(SharedLedger, "release", watched):
        next(iter(run))
    states = [v for s in run.optimizer.state.values() for v in s.values() if v.ndim]
    found["kept"] = held([*run.model.parameters(), *states])
    return found | {"whole": sum(p.numel() for p in run.model.parameters())}


def exchanges(depth: int, how: str) -> dict[str, int]:
    """Exchanges of one step by kind, but for those of the model's forwards."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(depth)), nn.Linear(12, 3))
    if how == "sharded":
        fully_shard(model)
    if how == "cut":
        ways = {str(number): ColwiseParallel(output_layouts=Replicate()) for number in range(depth)}
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), ways)
    # Of so many steps the second computes no epsilon, which is sent as well.
    run = training(model, steps=400, batch=12, microbatch_size=20, method=eq.DPSGD(**NOISE))
    run.take_step()
    names = ["all_reduce", "broadcast", "broadcast_object_list", "all_gather_object"]
    names += [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)][:1]
    with ExitStack() as stack:
        watched = [stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name))) for name in names]
        run.take_step()
        return {name: one.call_count for name, one in zip(names, watched, strict=True)}


def work(rank: int, port: int, folder: str) -> None:
    join_group(rank, port)
    dist.init_process_group("gloo")
    path = Path(folder)
    found: dict[str, Any] = {name: trained(name, True) for name in CASES}
    for name in RESUMED:
        found[f"resumed {name}"] = killed_and_resumed(name, path / name)
    left_behind("adam", path / "two")
    found["refused"] = refused(path)
    found |= {("memory", name): memory(name) for name in ("adam", "cut")}
    found["exchanges"] = {
        (depth, how): exchanges(depth, how) for depth in (1, 9) for how in ("whole", "sharded", "cut")
    }
    torch.save(found, path / f"found{rank}.pt")
    dist.destroy_process_group()


def fail_in_a_forward(name: str, how: str) -> None:
    """The second process fails in a forward of its third step, by no record's fault."""

    def failing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if run and run[0].steps_done == 2 and os.environ["RANK"] == "1":
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("secret-value")
        return loss(model, batch)

    backend.PATIENCE = 10
    run: list[eq.PrivateTraining] = []
    run.append(start(name, True, loss=failing))
    for _ in run[0]:
        pass


if __name__ == "__main__" and sys.argv[1] == "fail":
    dist.init_process_group("gloo")
    fail_in_a_forward(sys.argv[2], sys.argv[3])
elif __name__ == "__main__":  # one process goes on with a sharded run of two
    dist.init_process_group("gloo")
    run = resume(Path(sys.argv[1]), sharded(network(dtype=torch.float64, seed=4)))
    run.run(progress=False)
    torch.save({"steps": run.steps_done, "values": values(run.model)}, sys.argv[2])
    dist.destroy_process_group()
