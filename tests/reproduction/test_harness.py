"""Trainings on small problems: the numbers are those of a run by hand, measured where they were asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.methods import DPSGD
from equipoise.privacy import Poisson
from equipoise.training import PrivateTraining, Run
from reproduction.harness import Problem, follow

N, D = 40, 3


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, D, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight).squeeze(1)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return 0.5 * (model(batch["x"]) - batch["y"]) ** 2


@pytest.fixture
def problem() -> Problem:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=rng, dtype=torch.float64)
    solution = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    return Problem(
        "interp",
        Linear,
        loss,
        {"x": x, "y": x @ solution},
        N,
        lambda model: float((model.weight.detach() - solution).norm()),
    )


def test_numbers_are_those_of_the_training(problem: Problem) -> None:
    """The same steps through PrivateTraining by hand, with a changing learning rate."""
    sampling, method = Poisson(8, N, 6), DPSGD(clip_norm=1.0, noise_multiplier=0.5)
    found = follow(
        method,
        problem,
        sampling=sampling,
        learning_rate=lambda k: 0.3 / (1 + k),
        seed=4,
        measure_at=[0, 2, 6],
    )
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    training = PrivateTraining(
        model,
        optimizer,
        loss=loss,
        data=dict(problem.data),
        sampling=sampling,
        method=DPSGD(clip_norm=1.0, noise_multiplier=0.5),
        run=Run(
            seed=4,
            reproducible=True,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k)),
        ),
    )
    by_hand = {0: problem.error(model)}
    for step in training:
        by_hand[step.step] = problem.error(model)
    assert list(found) == [0, 2, 6]
    assert found == pytest.approx({k: by_hand[k] for k in found}, rel=1e-12)
