"""An engine on models that `fully_shard` shards over two processes, next to one on the whole model.

Each case gives the largest errors, relative to the largest value, into FOLDER/NAME.RANK.pt.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import parallel_engine
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from zoo import Net

from equipoise.gradients import GradientEngine


class Blocks(nn.Module):
    """Residual blocks with a norm, whose widths two processes do not share evenly."""

    def __init__(self, checkpointed: bool = False, width: int = 7):
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, 3)
        self.checkpointed = checkpointed

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + (checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h))
        return self.head(h)


def tied():
    """A language model whose look-up table is its head."""

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.table(tokens))))

    parts = {"table": nn.Embedding(11, 6), "mix": nn.Linear(6, 6), "head": nn.Linear(6, 11, bias=False)}
    model = Net(forward, **parts)
    model.head.weight = model.table.weight
    return model


def squares(model: nn.Module, x: Tensor):
    return model(x).square().flatten(1).sum(1)


def next_token(model: nn.Module, tokens: Tensor):
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)[:, :-1]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2).double(), tokens[:, 1:], reduction="none")
    return losses.sum(1)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 10, "vocab_size": 13, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()


def numbers(count: int):
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def tokens(count: int):
    return torch.randint(11, (count, 6), generator=torch.Generator().manual_seed(3))


@dataclass
class Case:
    """A model, its loss and records, and how it is sharded."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor] = squares
    records: Callable[[int], Tensor] = numbers
    layers: Callable[[nn.Module], list] = lambda model: [*model.blocks]
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "uneven": Case(Blocks),
    "empty part": Case(lambda: Blocks(width=1)),
    "checkpointed": Case(lambda: Blocks(checkpointed=True)),
    "offload": Case(Blocks, options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "never resharded": Case(Blocks, options={"reshard_after_forward": False}),
    "tied": Case(tied, next_token, tokens, lambda model: [model.mix]),
}
if find_spec("transformers"):
    CASES["gpt2"] = Case(gpt2, next_token, tokens, lambda model: [*model.transformer.h])


def built(case: Case):
    torch.manual_seed(1)
    return case.build().double()


def shard(model: nn.Module, case: Case, **options: Any):
    for layer in case.layers(model):
        fully_shard(layer, **case.options, **options)
    return fully_shard(model, **case.options, **options)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max()) if expected.numel() else 0.0


def measure(case: Case, rank: int) -> dict[str, Any]:
    """Errors of norms and weighted sums, and whether the plans are equal."""
    count = 8
    batch = case.records(count)
    mine = slice(0, 5) if rank == 0 else slice(5, count)
    plain, sharded = built(case), shard(built(case), case)
    one, engine = GradientEngine(plain, case.loss, batch[:4]), GradientEngine(sharded, case.loss, batch[:4])
    expected, found = one(batch), engine(batch[mine])
    weights = torch.rand(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sums, local = expected.weighted_sums(weights), found.weighted_sums(weights[mine])
    errors = {"norms": error(found.row_norms(), expected.row_norms()[mine])}
    for name, value in sums.items():
        total = local[name].clone()
        dist.all_reduce(total)
        errors[name] = error(total, value)
    still = all(type(p).__name__ == "DTensor" for p in sharded.parameters())
    return {
        "error": max(errors.values()),
        "same plan": one.latest == engine.latest,
        "covered": one.coverage() == engine.coverage(),
        "still sharded": still,
    }


def refusals() -> dict[str, str]:
    """What the engine says of sharded models that it does not take."""

    found = {}
    try:
        scaled = Net(lambda self, x: x @ self.weight.square(), weight=nn.Parameter(torch.randn(5, 3)))
        GradientEngine(fully_shard(scaled), squares, numbers(4).float())
    except Exception as error:
        found["values"] = f"{type(error).__name__}: {error}"
    return found


def bf16() -> float:
    """How far a neighbouring record moves a sum of clipped rows, in clip norms, in mixed precision."""
    case, worst = CASES["uneven"], 0.0
    model = shard(built(case).float(), case, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    engine = GradientEngine(model, squares, numbers(4).float())
    batch = numbers(4096).float()
    gradients = engine(batch)
    weights = 1 / gradients.row_norms()
    sums = gradients.weighted_sums(weights)
    assert all(value.dtype == torch.float32 for value in sums.values())
    for record in (0, 17, 4095):
        # The same batch, in which a record has weight zero: what its absence changes.
        without = weights.clone()
        without[record] = 0
        others = gradients.weighted_sums(without)
        moved = torch.stack([(sums[name] - others[name]).double().norm() for name in sums]).norm()
        worst = max(worst, float(moved))
    return worst


def work(rank: int, port: int, folder: str):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = measure(case, rank)
        except Exception:
            found[name] = {"raised": traceback.format_exc()}
            break
    else:
        found["refusals"] = refusals()
        found["parallel"] = parallel_engine.measured()
        found["bf16"] = bf16()
    torch.save(found, Path(folder) / f"found{rank}.pt")
    dist.destroy_process_group()
