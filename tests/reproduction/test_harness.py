"""Trainings on small problems: the numbers are those of a run by hand, measured where they were asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from equipoise.methods import DPSGD
from equipoise.privacy import Budget, FullBatch, Poisson
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


def test_averages_the_last_iterates(problem: Problem) -> None:
    """Without noise to speak of and with a full batch the average can be made from single runs."""
    points: list[torch.Tensor] = []

    def spy(model: nn.Module) -> float:
        points.append(model.weight.detach().clone())
        return 0.0

    def run(measure_at: list[int], average_last: int | None) -> list[torch.Tensor]:
        points.clear()
        follow(
            DPSGD(clip_norm=1.0, noise_multiplier=0.1),
            dataclasses.replace(problem, error=spy),
            sampling=FullBatch(N, 5),
            learning_rate=0.1,
            seed=0,
            measure_at=measure_at,
            average_last=average_last,
        )
        return list(points)

    iterates = run([1, 2, 3, 4, 5], None)
    second, fifth = run([2, 5], 3)
    torch.testing.assert_close(second, (iterates[0] + iterates[1]) / 2)
    torch.testing.assert_close(fifth, sum(iterates[2:]) / 3)
    assert torch.equal(run([1, 5], 1)[1], iterates[4])


def test_seeds_differ_and_repeat(problem: Problem) -> None:
    def end(seed: int) -> float:
        found = follow(
            DPSGD(clip_norm=1.0), problem, sampling=Poisson(8, N, 5), budget=Budget(2.0, 1e-3),
            learning_rate=0.1, seed=seed, measure_at=[5],
        )  # fmt: skip
        return found[5]

    assert end(0) == end(0) != end(1)


def test_leaves_global_randomness_alone(problem: Problem) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    follow(
        DPSGD(noise_multiplier=1.0),
        problem,
        sampling=Poisson(8, N, 1),
        learning_rate=0.1,
        seed=9,
        measure_at=[1],
    )
    assert torch.equal(torch.rand(2), expected)


def test_takes_another_optimiser(problem: Problem) -> None:
    made = []

    def adam(parameters, rate):
        made.append(rate)
        return torch.optim.Adam(parameters, rate)

    found = follow(
        DPSGD(noise_multiplier=1e-6, clip_norm=100.0), problem, sampling=FullBatch(N, 3), learning_rate=0.01,
        seed=0, measure_at=[0, 1], optimizer=adam,
    )  # fmt: skip
    # the first step of Adam moves every coordinate by its rate, towards the solution here
    assert made == [0.01]
    assert found[0] - found[1] == pytest.approx(0.01 * (1 + 1 + 0.5) / 1.5, rel=0.02)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"measure_at": []}, "measure_at"),
        ({"measure_at": [7]}, "measure_at"),
        ({"sampling": Poisson(8, N + 1, 5)}, "population"),
        ({"average_last": 0}, "average_last"),
    ],
)
def test_refuses_what_cannot_be_measured(problem: Problem, change: dict, words: str) -> None:
    arguments = {"sampling": Poisson(8, N, 5), "learning_rate": 0.1, "seed": 0, "measure_at": [5]} | change
    with pytest.raises(ValueError, match=words):
        follow(DPSGD(noise_multiplier=1.0), problem, **arguments)
