"""The heads of `benchmarks.whole_data.second_order`."""

import math

import pytest
import torch

from benchmarks.whole_data.least_squares import rows
from benchmarks.whole_data.second_order import RATE, STEPS, deviations, fit


def clouds(count, classes):
    label = torch.arange(count) % classes
    return rows(30 * torch.eye(3)[label] + torch.randn(count, 3), 1.0).float(), label


@pytest.mark.parametrize("head", STEPS)
def test_without_noise_it_tells_clouds_apart_and_with_much_it_guesses(head):
    classes = 2 if head == "newton" else 3
    x, label = clouds(3000, classes)
    y = torch.nn.functional.one_hot(label, classes).float()

    def hits(noise_multiplier):
        found = fit(head, x, y, noise_multiplier, (1.0, 4.0), seed=0)
        return float(((x.double() @ found).argmax(1) == label).double().mean())

    assert hits(1e-6) == 1
    assert hits(1e6) < 0.9


@pytest.mark.parametrize("head", STEPS)
def test_all_releases_together_cost_what_one_does(head):
    of_curvature, of_gradient = deviations(head, 1.7)
    curvatures = STEPS[head] if head == "newton" else 1
    spent = curvatures / of_curvature**2 + STEPS[head] * 2 / of_gradient**2
    assert spent == pytest.approx(1 / 1.7**2)


@pytest.mark.parametrize("head", STEPS)
def test_every_noise_that_is_drawn_has_its_deviation(head, monkeypatch):
    """Of no records the noise is all that is left."""
    drawn = []
    true = torch.linalg.eigh

    def listened(matrix):
        drawn.append(matrix)
        return true(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", listened)
    for seed in range(400):
        fit(head, torch.zeros(0, 4), torch.zeros(0, 2), 2.0, (1.0, 4.0), seed)
    of_curvature = deviations(head, 2.0)[0] / (4 if head == "newton" else 1)
    assert len(drawn) == 400 * (STEPS[head] if head == "newton" else 1)
    weights = torch.where(torch.eye(4, dtype=torch.bool), 1.0, math.sqrt(2))
    found = float((torch.stack(drawn) * weights).square().mean().sqrt())
    assert found == pytest.approx(of_curvature, rel=0.05)


@pytest.mark.parametrize("head", STEPS)
def test_the_noise_of_gradients_has_its_deviation(head, monkeypatch):
    """Of no records, through a curvature that is the ridge alone."""
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (torch.zeros(4).double(), torch.eye(4).double()))
    found = [fit(head, torch.zeros(0, 4), torch.zeros(0, 2), 2.0, (1.0, 4.0), seed) for seed in range(400)]
    of_curvature, of_gradient = deviations(head, 2.0)
    ridge = math.sqrt(8) * of_curvature / (4 if head == "newton" else 1)
    expected = math.sqrt(STEPS[head]) * of_gradient * 4 * RATE / ridge
    assert float(torch.stack(found).square().mean().sqrt()) == pytest.approx(expected, rel=0.05)
