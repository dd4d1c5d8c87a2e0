"""An engine on models that `parallelize_module` cuts over two processes, next to one on the whole model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import Net

from equipoise._dtensor import all_values, is_a_copy, local_part
from equipoise.gradients import GradientEngine

WORDS = 11


class Attention(nn.Module):
    """Self-attention by heads: each process computes those whose queries it has."""

    def __init__(self, width: int, head: int):
        super().__init__()
        self.head = head
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 8, checkpointed: bool = False):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        if self.checkpointed:
            return x + checkpoint(lambda x: self.down(F.gelu(self.up(x))), x, use_reentrant=False)
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    """A small language model."""

    def __init__(self, checkpointed: bool = False, tied: bool = False, padding: int | None = None):
        super().__init__()
        self.table = nn.Embedding(WORDS, 8, padding_idx=padding)
        self.block = Block(checkpointed=checkpointed)
        self.head = nn.Linear(8, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.block(self.table(tokens)))


def next_token(model: nn.Module, tokens: Tensor):
    return F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none").sum(1)


def squares(model: nn.Module, x: Tensor):
    return model(x).square().sum(1)


def tokens(count: int):
    return torch.randint(WORDS, (count, 6), generator=torch.Generator().manual_seed(3))


def numbers(count: int):
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def plan(**more: Any) -> dict[str, Any]:
    """By which styles the layers of `Language` are cut."""
    attention = dict.fromkeys(("query", "key", "value"), ColwiseParallel()) | {"out": RowwiseParallel()}
    found = {f"block.attention.{name}": style for name, style in attention.items()}
    return found | {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()} | more


BY_ROWS = RowwiseParallel(input_layouts=Replicate())
BY_COLUMNS = ColwiseParallel(output_layouts=Replicate())


@dataclass
class Case:
    """A model, its loss and records, how its layers are cut, and the whole model, where that is another."""

    build: Callable[[], nn.Module] = Language
    plan: Callable[[], dict[str, Any]] = plan
    loss: Callable[[nn.Module, Any], Tensor] = next_token
    records: Callable[[int], Tensor] = tokens
    whole: Callable[[], nn.Module] | None = None


CASES = {
    "block": Case(),
    "table by rows": Case(lambda: Language(padding=7), lambda: plan(table=BY_ROWS)),
    "table by columns": Case(lambda: Language(padding=7), lambda: plan(table=BY_COLUMNS, head=BY_COLUMNS)),
    # Next to one that is not: what a checkpoint runs once more has the model's own values.
    "checkpointed": Case(lambda: Language(checkpointed=True), whole=Language),
    "tied and checkpointed": Case(
        lambda: Language(checkpointed=True, tied=True),
        lambda: plan(table=BY_ROWS, head=BY_COLUMNS),
        whole=lambda: Language(tied=True),
    ),
    "inputs cut by the layer": Case(
        lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)),
        lambda: {"0": BY_ROWS},
        squares,
        numbers,
    ),
}


def built(case: Case, mesh: DeviceMesh | None = None):
    torch.manual_seed(1)
    model = (case.build if mesh is not None else case.whole or case.build)().double()
    if mesh is not None:
        tied = hasattr(model, "head") and model.head.weight is model.table.weight
        model = parallelize_module(model, mesh, case.plan())
        if tied:
            model.head.weight = model.table.weight
    return model


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest value; what vanishes, as the gradient of a key's bias, holds rounding alone."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=0.1))


def measure(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    """The largest errors by what is asked, and whether plans are equal and copies alike."""
    batch = case.records(8)
    engines = [GradientEngine(built(case, where), case.loss, batch[:4]) for where in (None, mesh)]
    generator = torch.Generator().manual_seed(5)
    one, many = (torch.rand(*size, generator=generator, dtype=torch.float64) for size in ((8,), (8, 2)))
    names = [name for name, _ in engines[0].model.named_parameters()]
    groups = [names[::2], names[1::2]]
    moved = {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in engines[0].model.named_parameters()
    }
    answers: list[dict[str, Tensor]] = []
    for engine in engines:
        rows = engine(batch)
        other = engine(batch, params=moved)
        difference = rows - other
        some = rows.rows(torch.tensor([5, 0, 2])).select(groups[0])
        answer = {
            "norms": rows.row_norms(),
            "norms by group": rows.row_norms(groups),
            "norms elsewhere": other.row_norms(),
            "norms of differences": difference.row_norms(),
            "norms of some differences": difference.rows(slice(2, 5)).select(groups[1]).row_norms(),
            "norms of some": some.row_norms(),
            "products": rows.inner(other),
            "gram": rows.cross_gram(other.rows(slice(3))),
            "rows": rows.materialise().matrix(),
            "scaled": rows.scaled(2.0).row_norms(),
            "alone": engine.alone(batch, place=3).materialise().matrix(),
            "planned": engine.by_plan(batch[:3]).row_norms(),
            "losses": rows.losses,
        }
        by_tensor = rows.cross_gram(rows, per_tensor=True)
        assert isinstance(by_tensor, dict)
        answer |= {f"gram of {name}": value for name, value in by_tensor.items()}
        weights = {name: one * number for number, name in enumerate(names)}
        for kind, given in (("sum", one), ("sums", many), ("by name", weights)):
            sums = rows.weighted_sums(given)
            answer |= {f"{kind} {name}": all_values(value) for name, value in sums.items()}
        answers.append(answer)
    expected, found = answers
    sums = engines[1](batch).weighted_sums(one)
    params = dict(engines[1].model.named_parameters())
    copies = torch.cat([local_part(sums[name]).flatten() for name in sums if is_a_copy(params[name])])
    norms = [torch.zeros(8, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, found["norms"])
    return {
        "errors": {name: error(found[name], expected[name]) for name in expected},
        "same plan": engines[0].latest == engines[1].latest,
        "covered": engines[0].coverage() == engines[1].coverage(),
        "same norms": torch.equal(*norms),
        "placed": all(
            getattr(sums[name], "placements", None) == getattr(p, "placements", None)
            for name, p in params.items()
        ),
        "copies": copies,
    }


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """What the engine says of models that it does not take."""

    def sequence():
        cut = {
            name: ColwiseParallel(input_layouts=Shard(1))
            if isinstance(style, ColwiseParallel)
            else RowwiseParallel(output_layouts=Shard(1))
            for name, style in plan().items()
        }
        cut["table"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        cut["block.norm"] = SequenceParallel()
        cut["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        return GradientEngine(built(Case(plan=lambda: cut), mesh), next_token, tokens(4))

    def of_loss():
        def loss(model: nn.Module, tokens: Tensor):
            with loss_parallel():
                losses = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
                return losses.unflatten(0, tokens.shape).sum(1)

        cut = plan(head=ColwiseParallel(use_local_output=False))
        return GradientEngine(built(Case(plan=lambda: cut), mesh), loss, tokens(4))

    def values():
        whole = Net(lambda self, x: F.linear(x, self.layer.weight.full_tensor()), layer=nn.Linear(5, 4))
        model = parallelize_module(whole.double(), mesh, {"layer": ColwiseParallel()})
        return GradientEngine(model, squares, numbers(4))

    found = {}
    for make in (sequence, of_loss, values):
        try:
            make()
            found[make.__name__] = "nothing"
        except Exception as error:
            found[make.__name__] = f"{type(error).__name__}: {error}"
    return found


def measured() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {name: measure(case, mesh) for name, case in CASES.items()}
    return found | {"refusals": refusals(mesh)}
