"""The head in one release of `benchmarks.whole_data.least_squares`."""

import math

import pytest
import torch

from benchmarks.whole_data.least_squares import Moments


def clouds(count):
    label = torch.arange(count) % 3
    return {"input": 30 * torch.eye(3)[label] + torch.randn(count, 3), "label": label}


@pytest.mark.parametrize("length", [1.0, 40.0])
@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_a_record_moves_the_sums_by_its_bound(length, weight):
    data = clouds(30)
    more = {name: torch.cat([values, values[:1]]) for name, values in data.items()}
    whole, one_more = Moments(data, data, 3, length), Moments(more, more, 3, length)
    second, cross = one_more.second - whole.second, one_more.cross - whole.cross
    moved = math.sqrt(float(second.square().sum() + weight**2 * cross.square().sum()))
    assert 0 < moved <= math.sqrt(1 + weight**2) + 1e-12


def test_the_noise_has_the_scale_of_the_bound():
    """Of no records the noise of the second moments is all that is left."""
    nobody = {"input": torch.zeros(0, 3), "label": torch.zeros(0, dtype=torch.long)}
    moments = Moments(nobody, clouds(3), 3, 1.0)
    drawn = []
    true = torch.linalg.eigh

    def listened(matrix):
        drawn.append(matrix)
        return true(matrix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", listened)
        for seed in range(400):
            moments.accuracies(2.0, 1.0, seed)
    noise = torch.stack(drawn)
    weights = torch.where(torch.eye(4, dtype=torch.bool), 1.0, math.sqrt(2))
    # On the diagonal and sqrt(2) times beside it the deviation is 2 sqrt(1 + 1).
    scale = float((noise * weights).square().mean().sqrt() / (2 * math.sqrt(2)))
    assert 0.95 < scale < 1.05
