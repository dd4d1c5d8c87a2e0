"""The heads of `benchmarks.whole_data`, which do not train: what a record moves, and each noise drawn."""

import math

import pytest
import torch

from benchmarks.whole_data.least_squares import Moments, rows
from benchmarks.whole_data.second_order import RATE, STEPS, deviations, fit


def clouds(count, classes=3):
    label = torch.arange(count) % classes
    return {"input": 30 * torch.eye(3)[label] + torch.randn(count, 3), "label": label}


@pytest.mark.parametrize(("length", "weight"), [(1.0, 1.0), (40.0, 0.25), (40.0, 1.0)])
def test_a_record_moves_the_sums_by_its_bound(length, weight):
    data = clouds(30)
    more = {name: torch.cat([values, values[:1]]) for name, values in data.items()}
    whole, one_more = Moments(data, data, 3, length), Moments(more, more, 3, length)
    second, cross = one_more.second - whole.second, one_more.cross - whole.cross
    moved = math.sqrt(float(second.square().sum() + weight**2 * cross.square().sum()))
    assert 0 < moved <= math.sqrt(1 + weight**2) + 1e-12


@pytest.fixture
def drawn(monkeypatch):
    """Matrices of which eigenvectors are asked: of no records, the noise is all that is left."""
    found, true = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: found.append(matrix) or true(matrix))
    return found


def size_of(matrices):
    """The deviation on the diagonal; beside it the entries have sqrt(2) times less."""
    weights = torch.where(torch.eye(4, dtype=torch.bool), 1.0, math.sqrt(2))
    return float((torch.stack(matrices) * weights).square().mean().sqrt())


def test_the_noise_of_least_squares_has_the_scale_of_the_bound(drawn):
    nobody = {"input": torch.zeros(0, 3), "label": torch.zeros(0, dtype=torch.long)}
    moments = Moments(nobody, clouds(3), 3, 1.0)
    for seed in range(400):
        moments.accuracies(2.0, 1.0, seed)
    assert size_of(drawn) == pytest.approx(2 * math.sqrt(2), rel=0.05)


def nothing(head, seed):
    return fit(head, torch.zeros(0, 4), torch.zeros(0, 2), 2.0, (1.0, 4.0), seed)


@pytest.mark.parametrize("head", STEPS)
def test_every_noise_that_is_drawn_has_its_deviation(head, drawn, monkeypatch):
    """And all releases together cost what one does."""
    curvatures, share = (STEPS[head], 4) if head == "newton" else (1, 1)
    of_curvature, of_gradient = deviations(head, 2.0)
    assert curvatures / of_curvature**2 + STEPS[head] * 2 / of_gradient**2 == pytest.approx(1 / 2.0**2)
    for seed in range(400):
        nothing(head, seed)
    assert len(drawn) == 400 * curvatures
    assert size_of(drawn) == pytest.approx(of_curvature / share, rel=0.05)
    # Through a curvature that is the ridge alone, the noise of gradients is left.
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (torch.zeros(4).double(), torch.eye(4).double()))
    found = torch.stack([nothing(head, seed) for seed in range(400)])
    expected = math.sqrt(STEPS[head]) * of_gradient * 4 * RATE / (math.sqrt(8) * of_curvature / share)
    assert float(found.square().mean().sqrt()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("head", STEPS)
def test_without_noise_it_tells_clouds_apart_and_with_much_it_guesses(head):
    data = clouds(3000, 2 if head == "newton" else 3)
    x, label = rows(data["input"], 1.0).float(), data["label"]
    for noise, least, most in ((1e-6, 1, 1), (1e6, 0, 0.9)):
        found = fit(head, x, torch.nn.functional.one_hot(label).float(), noise, (1.0, 4.0), seed=0)
        assert least <= float(((x.double() @ found).argmax(1) == label).double().mean()) <= most
