"""A small problem that the tests of this room share: twelve features, three classes, made-up records."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flat_arguments import arranged
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.federated import LocalUpdates
from equipoise.privacy import Ledger
from equipoise.privacy.private import unwrap

RECORDS, FEATURES, CLASSES = 60, 12, 3


class MeanBackward(torch.autograd.Function):
    """Its backward mixes records: it takes off the mean of their gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


def records(count: int = RECORDS, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Gaussian clouds around three centres."""
    rng = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=rng)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=rng, dtype=torch.float64)
    noise = torch.randn(count, FEATURES, generator=rng, dtype=torch.float64)
    return {"input": (centres[label] + noise).to(dtype), "label": label}


class ListeningLedger(Ledger):
    """Keeps the raw sums."""

    def _noised(self, mechanism, sums, *rest):
        for bounded in sums.values():
            self.heard = torch.cat([unwrap(t).double().flatten() for t in bounded.value.values()])
        return super()._noised(mechanism, sums, *rest)


class Listening(eq.PrivateTraining):
    ledger_class = ListeningLedger


class OnDemand(torch.utils.data.Dataset):
    """Records that are made one by one, which nobody looks at beforehand."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: values[i] for name, values in self.data.items()}


def network(
    dropout: float = 0.0, dtype: torch.dtype = torch.float32, seed: int = 1, width: int = 8
) -> nn.Sequential:
    """A small tanh network with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(FEATURES, width), nn.Tanh()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(width, CLASSES))
        return nn.Sequential(*layers).to(dtype)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def weighted_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch) * batch["weight"]


def with_overflow(record: int = 30) -> dict[str, Tensor]:
    """Records: the loss of this one is a finite number, and its gradient is none."""
    data = records() | {"weight": torch.ones(RECORDS)}
    data["weight"][record], data["input"][record] = 1e38, 100 * data["input"][record]
    return data


def updates_of_users(
    own_loss: Callable[..., Tensor] = loss, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Loss and data where a row is what local training does to the model on up to three records of a user."""
    places = 3
    users = {n: v.unflatten(0, (RECORDS, places)) for n, v in records(RECORDS * places, dtype).items()}
    users["there"] = torch.arange(places) < (torch.arange(RECORDS) % (places + 1))[:, None]
    local = LocalUpdates(own_loss, steps=3, batch_size=2, learning_rate=0.3, present="there")
    return {"loss": local, "data": users}


def owners() -> list[str]:
    """Users with 1, 2, 3, ... records."""
    return [f"user {k}" for k in range(RECORDS) for _ in range(k + 1)][:RECORDS]


def training(
    model: nn.Module | None = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    steps: int = 50,
    batch: float = 12,
    method: Any = None,
    data: Any = None,
    learning_rate: float = 0.3,
    population: int = RECORDS,
    sampling: Any = None,
    **options: Any,
) -> eq.PrivateTraining:
    """A reproducible training without a budget, so that nothing needs to be calibrated."""
    model = model if model is not None else network()
    options = {"reproducible": True, "loss": loss} | options
    return eq.PrivateTraining(
        model,
        optimizer(model.parameters(), lr=learning_rate),
        **arranged(
            data=records() if data is None else data,
            sampling=eq.Poisson(batch, population, steps) if sampling is None else sampling,
            method=eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0) if method is None else method,
            **options,
        ),
    )


def saved(run: eq.PrivateTraining, steps: int = 1) -> eq.PrivateTraining:
    """The run, which was left after so many further steps and a checkpoint."""
    for _ in range(steps):
        run.take_step()
    run.save_checkpoint()
    run.close()
    return run


def resumed(
    folder: Any,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> eq.PrivateTraining:
    """The run of a folder, which goes on with a model of the same make."""
    model = model if model is not None else network(seed=2)
    given = arranged(**{"loss": loss, "data": records()} | options)
    return eq.PrivateTraining.resume(folder, model, optimizer(model.parameters(), lr=0.3), **given)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def releases(folder: Path) -> list[int]:
    """The numbers of the releases that are booked in a run's own journal."""
    return [e["index"] for e in lines(folder / "private" / "journal.jsonl") if e["type"] == "release"]


def check_named(folder: Path, *assumptions: str) -> None:
    """The statement verifies, and would not without one of these assumptions."""
    assert eq.verify_run(folder).consistent
    path = folder / "statement.json"
    whole = path.read_text()
    for one in assumptions:
        statement = json.loads(whole)
        statement["assumptions"].remove(one)
        path.write_text(json.dumps(statement))
        assert [f.subject for f in eq.verify_run(folder).findings if f.ok is False] == ["assumptions"]
    path.write_text(whole)


def parameters(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def relative_difference(a: nn.Module, b: nn.Module) -> float:
    x, y = parameters(a).double(), parameters(b).double()
    return float((x - y).norm() / y.norm())
