"""The comparison that every layer and every model goes through: engine against dense oracle, all queries."""

import torch
from torch import nn

from equipoise.gradients import GradientEngine, dense_gradients

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Filling(nn.Module):
    """A branch that few records take."""

    def __init__(self):
        super().__init__()
        self.missing, self.layer = nn.Parameter(torch.zeros(())), nn.Linear(3, 2)

    def forward(self, x):
        gone = x == -9
        return self.layer(torch.where(gone, self.missing, x) if gone.any() else x)


def close(found, expected, tolerance):
    """Relative to the largest entry of what is expected."""
    assert found.shape == expected.shape
    error = float((found.double() - expected.double()).norm())
    assert error <= tolerance * float(expected.double().norm()) + tolerance**2, error


def moved(model, scale=0.1):
    """Another parameter point near the model's."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: p.detach() + scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in model.named_parameters()
    }


def compare(model, loss, batch, how=None):
    """Norms, sums, cross-Gram, inner products, differences; returns the engine."""
    dtype = next(model.parameters()).dtype
    tolerance, engine = TOLERANCE[dtype], GradientEngine(model, loss, batch)
    G, D = engine(batch), dense_gradients(model, loss, batch)
    assert G.names == D.names
    other = moved(model)
    H, E = engine(batch, params=other), dense_gradients(model, loss, batch, params=other)
    close(G.losses, D.losses, tolerance)
    for fast, dense in ((G, D), (H, E)):
        close(fast.row_norms(), dense.row_norms(), tolerance)
        close(fast.materialise().matrix(), dense.matrix(), tolerance)
    C = torch.randn(G.num_records, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sums, expected = G.weighted_sums(C.to(dtype)), D.weighted_sums(C.to(dtype))
    for name in D.names:
        close(sums[name], expected[name], 4 * tolerance)
    close(G.cross_gram(H), D.cross_gram(E), 4 * tolerance)
    close(G.inner(H), D.inner(E), 4 * tolerance)
    close((G - H).row_norms(), (D.matrix() - E.matrix()).norm(dim=1), 10 * tolerance)
    if how is not None:
        assert {c.how for c in engine.coverage()} == {how}, engine.coverage()
    return engine
