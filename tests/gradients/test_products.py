"""Products: those of torch, whichever library computed them, and nothing larger on the way than they need."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.gradients import numerics as products
from equipoise.gradients.numerics import PARTIAL_SUM, contracted, times_held


@pytest.mark.parametrize(("n", "m", "p"), [(3, 20, 1 << 16), (16, 100, 12_345), (20, 5, 1 << 18), (2, 3, 7)])
@pytest.mark.parametrize("part", [False, True])
def test_held_rows_are_multiplied_as_torch_does(n, m, p, part):
    g = torch.Generator().manual_seed(p)
    rows, held = torch.randn(n, p, generator=g), torch.randn(m, p, generator=g)
    if part:
        rows, held = rows[:, 3:], held[:, 3:]
    expected = rows.double() @ held.double().t()
    assert torch.allclose(times_held(rows, held).double(), expected, rtol=1e-4, atol=1e-5 * p**0.5)
    exact = times_held(rows.double(), held.double())
    assert torch.allclose(exact, expected, rtol=1e-12, atol=1e-12 * p**0.5)


def test_a_bad_row_stays_alone():
    rows, held = torch.randn(4, 1 << 16), torch.randn(20, 1 << 16)
    rows[1, 5] = torch.nan
    product = times_held(rows, held)
    assert torch.isnan(product[1]).all()
    assert torch.isfinite(product[[0, 2, 3]]).all()


def test_without_the_operator_torch_multiplies(monkeypatch):
    rows, held = torch.randn(4, 1 << 16), torch.randn(20, 1 << 16)
    found = times_held(rows, held)
    monkeypatch.setattr(products, "_linear", lambda: None)
    assert torch.allclose(times_held(rows, held), found, rtol=1e-4, atol=1e-3)


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
