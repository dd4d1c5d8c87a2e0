"""What the start finds out of models that draw random numbers, have rows of zeros, or all rows dense."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.gradients import CoverageError, GradientEngine


class Drawing(nn.Module):
    """Reads a value, so that it has no trace, and draws random numbers."""

    def __init__(self, by_place):
        super().__init__()
        self.linear, self.by_place = nn.Linear(4, 8), by_place

    def forward(self, x):
        y = F.dropout(self.linear(x), 0.3, True)
        float(y.detach().sum())
        return y * self.by_place(len(x))[:, None]


@pytest.mark.parametrize(
    "by_place", [lambda n: torch.arange(1.0, n + 1), lambda n: 1.0 - 2 * (torch.arange(n) % 2)]
)
def test_a_model_that_draws_and_follows_a_records_place_is_refused(by_place):
    with pytest.raises(CoverageError, match="place"):
        GradientEngine(Drawing(by_place), lambda model, x: model(x).mean(1), torch.randn(8, 4))


@pytest.mark.parametrize("scale", [1.0, 255.0])
@pytest.mark.parametrize("is_traced", [True, False])
def test_records_without_a_gradient_move_no_rows(scale, is_traced):
    labels = torch.tensor([-100, 0, 1, 2, -100, 1, 2, 0])

    def loss(model, x):
        outputs = model(x["x"])
        if not is_traced:
            float(outputs.detach().sum())
        return F.cross_entropy(outputs, x["y"], reduction="none", ignore_index=-100)

    torch.manual_seed(0)
    engine = GradientEngine(nn.Linear(64, 3), loss, {"x": torch.rand(8, 64) * scale, "y": labels})
    assert engine.independence.word == ("proved" if is_traced else "compared")
    assert [one.how for one in engine.coverage()] == ["rule", "rule"]


def test_dense_rows_of_a_model_that_draws_are_compared():
    class Sorting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            tokens = x.reshape(-1, 4)
            order = tokens[:, 0].argsort()
            y = self.linear(tokens[order])
            return F.dropout(torch.empty_like(y).index_copy(0, order, y).view(len(x), -1), 0.3, True)

    torch.manual_seed(0)
    engine = GradientEngine(Sorting(), lambda model, x: model(x).square().sum(1), torch.randn(8, 5, 4))
    assert engine.independence.word == "compared"
    assert {one.how for one in engine.coverage()} == {"dense"}


def test_lengths_by_which_a_loss_divides_are_planned_publicly():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.linear = nn.Embedding(20, 8), nn.Linear(8, 3)

        def forward(self, words, count):
            mask = torch.arange(words.shape[1])[None] < count[:, None]
            return self.linear((self.words(words) * mask[..., None]).sum(1) / count[:, None])

    torch.manual_seed(0)
    batch = {"words": torch.randint(0, 20, (8, 5)), "count": torch.randint(1, 6, (8,))}
    engine = GradientEngine(
        Averaging(), lambda m, b: m(b["words"], b["count"]).square().sum(1), batch, publicly=True
    )
    assert engine.is_planned_publicly
    assert engine.independence.word == "proved"
