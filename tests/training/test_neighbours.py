"""One record more, and nothing else may move: sums of neighbouring data sets, before their noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise.privacy import Ledger
from equipoise.privacy.private import unwrap

SLACK = 1e-5  # rounding of the sum itself, in clip norms


class ListeningLedger(Ledger):
    """Keeps the raw sums."""

    def _noised(self, mechanism, sums, *rest):
        for bounded in sums.values():
            self.heard = torch.cat([unwrap(t).double().flatten() for t in bounded.value.values()])
        return super()._noised(mechanism, sums, *rest)


class Listening(eq.PrivateTraining):
    ledger_class = ListeningLedger


def raw_sum(model: nn.Module, loss: Callable, data: dict[str, Tensor], **options) -> Tensor:
    """The sum of one step over all records, at C = 1."""
    run = Listening(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loss=loss,
        data=data,
        sampling=eq.FullBatch(len(data["y"]), 1),
        method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
        **options,
    )
    run.take_step()
    return run.ledger.heard


def with_one_more(data: dict[str, Tensor], record: dict[str, Tensor], place: int) -> dict[str, Tensor]:
    """The data set with the record at this place."""
    return {
        name: torch.cat([values[:place], record[name][None], values[place:]]) for name, values in data.items()
    }


def hinge(model, batch):
    return F.relu(1 - batch["y"] * model(batch["x"]).squeeze(1))


def at_the_kink(count: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Records whose margin is 1 up to rounding: kinks of the loss, on or off by their place in a batch."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(1000, 1)
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, 1000, generator=generator))
        model.bias.zero_()
        x = torch.randn(count, 1000, generator=generator)
        for _ in range(3):
            x -= ((model(x) - 1) / model.weight.square().sum()) * model.weight
        x[:14] *= 0.5  # the first ones, on which the engine is tried, are not at the kink
    return model, {"x": x, "y": torch.ones(count)}


@pytest.mark.parametrize("options", [{"micro_batch_size": 7}, {}, {"micro_batch_size": 7, "hardened": True}])
def test_one_record_more_does_not_round_the_others(options):
    """A record whose own gradient is zero enters. In micro-batches of 7 and 6 the sum moved 143 C."""
    model, data = at_the_kink(420)
    weight = model.weight.detach()[0]
    far = {"x": 5 * weight / weight.square().sum(), "y": torch.tensor(1.0)}
    before = raw_sum(model, hinge, data, **options)
    after = raw_sum(model, hinge, with_one_more(data, far, 0), **options)
    assert (after - before).norm() <= SLACK
