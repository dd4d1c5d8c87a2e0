"""Products: those of torch, whichever library computed them, and nothing larger on the way than they need."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.gradients.numerics import PARTIAL_SUM, contracted


class Largest(TorchDispatchMode):
    """How many numbers the largest new tensor has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("width", [PARTIAL_SUM, 2 * PARTIAL_SUM + 3])
def test_one_matrix_is_not_copied_for_each_record(width):
    g = torch.Generator().manual_seed(width)
    rows, matrix = torch.randn(40, 1, width, generator=g), torch.randn(width, 70, generator=g)
    with Largest() as made:
        product = contracted(rows, matrix)
    assert made.numbers <= 2 * product.numel()
    expected = rows.double() @ matrix.double()
    assert torch.allclose(product.double(), expected, rtol=1e-5, atol=1e-5 * width**0.5)
