"""What methods hold beyond DP-SGD, counted in copies of the parameters on a model that has little else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.methods import PublicRecords, PublicSubspace
from equipoise.methods.anchored import Every
from equipoise.methods.two_thresholds import Trace, TwoChannel

FEATURES, CLASSES = 800, 4
NOISE = {"noise_multiplier": 1.0}


def records(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=rng)
    return {"x": x, "y": torch.randint(CLASSES, (count,), generator=rng)}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def highest(work) -> int:
    """Bytes that tensors took at most beyond what they took before, by the allocator's own log."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        work()
    log = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(log, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def copies(method) -> tuple[float, float]:
    """The state between steps and the most that a step adds, in copies of the parameters."""
    model = nn.Sequential(
        nn.Linear(FEATURES, 1000, bias=False), nn.Tanh(), nn.Linear(1000, CLASSES, bias=False)
    )
    run = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"),
        data=records(8),
        sampling=eq.FullBatch(8, 20),
        method=method,
        run=eq.Run(reproducible=True),
    )
    run.take_step()
    run.take_step()
    size = sum(value.numel() * value.element_size() for value in model.parameters())
    peaks, states = [], []
    for _ in range(4):
        peaks.append(highest(run.take_step))
        states.append(sum(value.numel() * value.element_size() for value in tensors(run._steps.state)))
    return max(states) / size, max(peaks) / size


# State: e; w and the released gradient; the point of the public gradients. A step: as measured, rounded up.
COUNTS = {
    "dp-sgd": (lambda: eq.DPSGD(**NOISE), 0, 2.2),
    "dice-sgd": (lambda: eq.DiceSGD(**NOISE), 1, 6.1),
    "dc-dpsgd": (lambda: eq.DCDPSGD(**NOISE), 0, 3.1),
    "dc-dpsgd, trace": (lambda: eq.DCDPSGD(score=Trace(dimension=20), **NOISE), 0, 3.1),
    "dc-dpsgd, two channels": (lambda: eq.DCDPSGD(variant=TwoChannel(), **NOISE), 0, 7.1),
    "dp-c4-plus": (lambda: eq.DPC4Plus(anchor_noise_multiplier=1.0, schedule=Every(3), **NOISE), 2, 6.1),
    "pcdp-sgd, rows kept as factors": (
        lambda: eq.PCDPSGD(
            source=PublicSubspace(PublicRecords(records(10, 9)), basis="kernel", refresh_every=2),
            **NOISE,
        ),
        1,
        3.1,
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", COUNTS)
def test_memory_is_what_the_pages_say(name):
    make, state, step = COUNTS[name]
    held, added = copies(make())
    assert held == pytest.approx(state, abs=1e-6)
    assert step - 0.3 < added <= step
