"""Trainings of models of which two processes hold parts; what each finds goes into files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import parallel_engine
import torch
import torch.distributed as dist
from small_problems import CLASSES, FEATURES, RECORDS, loss, network, records, training
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

CASES: dict[str, dict[str, Any]] = {
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
ASKING: dict[str, dict[str, Any]] = {
    "two sums": {"method": eq.DiceSGD(**NOISE)},
    "two sums, per layer": {"method": eq.DiceSGD(per_layer=True, **NOISE), "sampling": SPARSE},
    "differences": {"method": eq.DPC4Plus(**ANCHORED, **NOISE)},
    "anchors": {"method": eq.DPC4(**ANCHORED, **NOISE)},
}
CASES |= ASKING | {"empty part": {"method": eq.DPSGD(**NOISE), "ema_decay": 0.5, "width": 1}}
#: Trainings of tensor parallel models, see `cut`.
PARALLEL: dict[str, dict[str, Any]] = {
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
    data = records(dtype=torch.float64)
    defaults = {"steps": 6, "batch": 12, "microbatch_size": 4, "learning_rate": 0.1}
    return training(
        model,
        optimizer=torch.optim.Adam,
        data=data,
        folder=folder,
        **(defaults | options | more),
    )


def trained(name: str, is_sharded: bool) -> Tensor:
    """The parameters at the end, and the norms of the estimates on the way."""
    run = start(name, is_sharded)
    norms = [step.released_norm for step in run]
    return torch.cat([values(run.model), torch.tensor(norms, dtype=torch.float64)])


def resume(folder: Path, model: nn.Module) -> eq.PrivateTraining:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return eq.PrivateTraining.resume(folder, model, optimizer, loss=loss, data=records(dtype=torch.float64))


def killed_and_resumed(name: str, folder: Path) -> dict[str, Any]:
    """A run that is left two steps behind its checkpoint and taken up by fresh processes' objects."""
    whole = start(name, True, folder / "whole")
    public = records(dtype=torch.float64)["input"][:4]
    # A forward without a backward leaves what `fully_shard` gathered of the outermost layers.
    result = whole.run(evaluate=lambda model: float(model(public).sum()), evaluate_every=2, progress=False)
    run = start(name, True, folder / "left")
    for step in run:
        if step.step == 3:
            run.save_checkpoint()
        if step.step == 5:
            break
    run.close()
    again = resume(folder / "left", built(name, True, seed=4))
    begun_at = again.steps_done
    again.run(progress=False)
    ended = built(name, True, seed=5)
    found = eq.PrivateTraining.start_or_resume(
        ended,
        torch.optim.Adam(ended.parameters()),
        loss=loss,
        data=records(dtype=torch.float64),
        sampling=whole.sampling,
        run=folder / "whole",
    )
    return {
        "whole": values(whole.model),
        "resumed": values(again.model),
        "ended": values(ended) if found.run().finished else None,
        "begun at": begun_at,
        "epsilon": result.statement is not None,
    }


def left_for_one(folder: Path) -> None:
    """A run of two processes, for one that is not sharded over them any more."""
    run = start("adam", True, folder / "two")
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
    layers = [nn.Linear(12, 12) for _ in range(depth)]
    model = nn.Sequential(*layers, nn.Linear(12, 3))
    if how == "sharded":
        fully_shard(model)
    if how == "cut":
        ways = {str(number): ColwiseParallel(output_layouts=Replicate()) for number in range(depth)}
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), ways)
    # Of so many steps the second computes no epsilon, which is sent as well.
    run = training(model, steps=400, batch=12, microbatch_size=20, method=eq.DPSGD(**NOISE))
    taken = iter(run)
    next(taken)
    names = ["all_reduce", "broadcast", "broadcast_object_list", "all_gather_object"]
    names += [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)][:1]
    counts, own = dict.fromkeys(names, 0), {name: getattr(dist, name) for name in names}
    inside = [False]

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, inside[0] = inside[0], True
            counts[name] += not outer
            try:
                return own[name](*args, **kwargs)
            finally:
                inside[0] = outer

        return call

    for name in names:
        setattr(dist, name, counted(name))
    try:
        next(taken)
    finally:
        for name in names:
            setattr(dist, name, own[name])
    return counts


def gpt2(folder: Path) -> dict[str, Any]:
    """A small GPT-2, whole and by low-rank updates of a sharded frozen base."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 10, "vocab_size": 13, "n_positions": 8}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = torch.randint(13, (RECORDS, 6), generator=torch.Generator().manual_seed(0))

    def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"]).logits[:, :-1].transpose(1, 2)
        return nn.functional.cross_entropy(logits, batch["tokens"][:, 1:], reduction="none").sum(1)

    def made(is_sharded: bool, with_lora: bool) -> Tensor:
        torch.manual_seed(2)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **quiet)).double()
        blocks = [*model.transformer.h]
        if with_lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
            model = get_peft_model(model, config).double()
        if is_sharded:
            for block in blocks:
                fully_shard(block)
            fully_shard(model)
        run = training(
            model,
            optimizer=torch.optim.AdamW,
            data={"tokens": tokens},
            loss=next_token,
            steps=3,
            batch=8,
            microbatch_size=4,
            method=eq.DPSGD(**NOISE),
        )
        for _ in run:
            pass
        return values(model)

    return {
        f"{lora}": (made(is_sharded, lora))
        for lora in (False, True)
        for is_sharded in [dist.is_initialized()]
    }


def tied_and_checkpointed(is_cut: bool) -> Tensor:
    """A language model, trained; its look-up and its head share a weight, which is cut by words."""
    case = parallel_engine.CASES["tied and checkpointed"]
    words = case.records(RECORDS)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if is_cut else None
    model = parallel_engine.built(case, mesh)
    run = training(
        model,
        optimizer=torch.optim.Adam,
        learning_rate=0.1,
        data={"words": words},
        loss=lambda model, batch: case.loss(model, batch["words"]),
        steps=4,
        batch=8,
        microbatch_size=4,
        method=eq.DPSGD(**NOISE),
    )
    norms = [step.released_norm for step in run]
    return torch.cat([values(model), torch.tensor(norms, dtype=torch.float64)])


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    path = Path(folder)
    found: dict[str, Any] = {name: trained(name, True) for name in CASES}
    for name in RESUMED:
        found[f"resumed {name}"] = killed_and_resumed(name, path / name)
    left_for_one(path)
    found["refused"] = refused(path)
    found |= {("memory", name): memory(name) for name in ("adam", "cut")}
    found["exchanges"] = {
        (depth, how): exchanges(depth, how) for depth in (1, 9) for how in ("whole", "sharded", "cut")
    }
    if find_spec("transformers"):
        found["gpt2"] = gpt2(path)
    found["tied and checkpointed"] = tied_and_checkpointed(is_cut=True)
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
