"""Whether the sums of a draw have the same bits when another number of processes shares it.

Records, their clipping and their micro-batches are computed in one process, in the order that one, or two,
would have: as today, where each process cuts its slice into micro-batches of its own; and with the
micro-batches of one process, dealt in turn.

    python benchmarks/split_of_draws.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.gradients import GradientEngine, PerSampleGradients

RECORDS, EXPECTED, SIZE, PUBLIC, DRAWS = 2000, 64, 8, 2, 40
Sums = dict[str, Tensor]


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    """A dense network and the shape of its records."""
    layers = (nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10))
    return nn.Sequential(*layers), (64,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    """A convolutional network and the shape of its records."""
    first = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(256, 10)), (1, 16, 16)


def total(parts: Sequence[Sums]) -> Sums:
    """The sum, from the first on."""
    out = dict(parts[0])
    for part in parts[1:]:
        out = {name: value + part[name] for name, value in out.items()}
    return out


def same(one: Sums, other: Sums) -> bool:
    """Whether all bits agree."""
    return all(torch.equal(value, other[name]) for name, value in one.items())


def measure(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A row of the table."""
    model = model.to(dtype)
    x, y = torch.randn(RECORDS, *shape, dtype=dtype), torch.randint(10, (RECORDS,))
    public = torch.randn(SIZE + PUBLIC, *shape, dtype=dtype), torch.randint(10, (SIZE + PUBLIC,))

    def batch(ids: Tensor) -> dict[str, Tensor]:
        """The records in a forward of fixed shape, public ones behind them."""
        return {n: torch.cat([v[ids], f[len(ids) :]]) for n, v, f in zip("xy", (x, y), public, strict=True)}

    engine = GradientEngine(
        model,
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"),
        batch(torch.arange(SIZE)),
        check=False,
    )

    def computed(ids: Tensor) -> tuple[list[PerSampleGradients], list[Sums]]:
        """Rows and clipped sums of each micro-batch."""
        rows, sums = [], []
        for part in torch.split(ids, SIZE):
            rows.append(engine(batch(part)))
            weights = (1 / rows[-1].row_norms()).clamp(max=1.0).clone()
            weights[len(part) :] = 0
            sums.append({name: value.clone() for name, value in rows[-1].weighted_sums(weights).items()})
        return rows, sums

    def matrix(rows: Sequence[PerSampleGradients], ids: Tensor) -> Tensor:
        parts = zip(rows, torch.split(ids, SIZE), strict=True)
        return torch.cat([of.materialise().matrix()[: len(part)] for of, part in parts])

    equal = {"rows": 0, "rows in all": 0, "sliced": 0, "again": 0, "dealt": 0}
    for draw in range(DRAWS):
        rng = torch.Generator().manual_seed(draw)
        size = EXPECTED + int(torch.randint(-8, 9, (), generator=rng))
        ids = torch.randperm(RECORDS, generator=rng)[:size].sort().values
        rows, sums = computed(ids)
        slices = ids.tensor_split(2)
        halves = [computed(part) for part in slices]
        if draw < 4:
            others = [matrix(of, part) for (of, _), part in zip(halves, slices, strict=True)]
            equal["rows"] += int((matrix(rows, ids) == torch.cat(others)).all(1).sum())
            equal["rows in all"] += size
        equal["sliced"] += same(total(sums), total([total(part) for _, part in halves]))
        equal["again"] += all(map(same, computed(ids)[1], sums))
        equal["dealt"] += same(total(sums), total([total(sums[0::2]), total(sums[1::2])]))
    counts = [f"{equal['rows']} of {equal['rows in all']}"]
    counts += [f"{equal[name]} of {DRAWS}" for name in ("again", "sliced", "dealt")]
    return " | ".join(counts)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(
        "| network | rows alike | micro-batches again | draws, sliced | draws, dealt |\n|---|---|---|---|---|"
    )
    for make in (mlp, cnn):
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(0)
            model, shape = make()
            kind = str(dtype).removeprefix("torch.")
            print(f"| {make.__name__}, {kind} | {measure(model, shape, dtype)} |", flush=True)


if __name__ == "__main__":
    main()
