"""The step of a Wasserstein critic with its penalty: rows together, a record at a time, and without privacy.

    OMP_NUM_THREADS=1 python benchmarks/gradient_penalty.py   # a minute, docs/how-to/synthetic-data.md

Critics with tanh, medians of the processor time of ten steps on all of 256 records. "A record at a time" is
what PyTorch does without `vmap`. Nobody forms the rows of a weight: each is a sum of four outer products,
which are kept. Formed, those of 784-128-1 are 100 MB, several times over, of new memory in every step: it
took 427 ms, 320 of them the system's for new pages.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import equipoise as eq

STEPS, RECORDS = 10, 256


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of each record, with a penalty of ten times the slope's squared distance from 1."""
    between = (batch["share"] * batch["x"] + (1 - batch["share"]) * batch["fake"]).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return (model(batch["fake"]) - model(batch["x"])).squeeze(1) + 10 * (slope.norm(dim=1) - 1).square()


def milliseconds(step: Callable[[], object]) -> float:
    """The median processor time of a step, after two that are not counted."""
    times = []
    for _ in range(STEPS + 2):
        began = time.process_time()  # of a processor that others may use, too
        step()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times[2:])


def measured(inputs: int, hidden: int) -> dict[str, float]:
    """Milliseconds of a step of a critic of this size."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    batch = {name: torch.rand(RECORDS, inputs) for name in ("x", "fake")}
    batch["share"] = torch.rand(RECORDS, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)

    def plain() -> None:
        optimizer.zero_grad()
        loss(critic, batch).mean().backward()
        optimizer.step()

    found = {
        "plain": milliseconds(plain),
        "a record at a time": milliseconds(lambda: one_by_one(critic, batch)),
    }
    training = eq.PrivateTraining(
        critic,
        optimizer,
        loss=loss,
        data=batch,
        sampling=eq.FullBatch(RECORDS, steps=STEPS + 2),
        method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
        run=eq.Run(reproducible=True, starts_from="public"),
    )
    return found | {"private, together": milliseconds(training.take_step)}


def one_by_one(critic: nn.Module, batch: dict[str, Tensor]) -> None:
    """Each record's gradient by itself."""
    for number in range(len(batch["x"])):
        one = {name: value[number : number + 1] for name, value in batch.items()}
        torch.autograd.grad(loss(critic, one).sum(), [*critic.parameters()])


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the runs are reproducible, and not private
    for inputs, hidden in ((64, 64), (784, 128), (784, 256)):
        times = ", ".join(f"{name} {value:.0f} ms" for name, value in measured(inputs, hidden).items())
        print(f"{inputs}-{hidden}-1: {times}", flush=True)
