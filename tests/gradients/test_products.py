"""The product with held rows: that of torch, by whichever library it was computed."""

import pytest
import torch

from equipoise.gradients import numerics as products
from equipoise.gradients.numerics import times_held


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
