"""Adding microbatches costs no sensitivity: a record before a million others moves the sum by its part."""

import pytest
import torch

from equipoise.privacy import (
    Draw,
    FullBatch,
    Gaussian,
    Ledger,
    PrivacyPlan,
    Release,
    Secrets,
)
from equipoise.privacy.bounds import bounded
from equipoise.privacy.bounds.bounded import Bounded, make_bounded
from equipoise.privacy.noise.streams import released_type
from equipoise.privacy.private import Private, unwrap

DRAW = Draw("batch", 0, 0)


def part(values: torch.Tensor) -> Bounded:
    """What a query gives for a microbatch: a sum in its own type."""
    return make_bounded({"w": Private(values, DRAW)}, 1.0, 2.0, DRAW)


def total(parts) -> torch.Tensor:
    return unwrap(Bounded.union(map(part, parts)).value["w"])


def test_a_record_in_front_of_a_million_moves_the_sum_by_one_bound():
    # Rows of length up to 1 along one coordinate, in microbatches of 78
    sums = list((78 * torch.rand(12_821, 1, generator=torch.Generator().manual_seed(0))).unbind())
    record = torch.tensor([0.987])
    assert abs(float(total([record, *sums]) - total(sums))) <= 0.987 * 1.0001
    summed, moved = torch.zeros(1), record.clone()
    for each in sums:
        summed += each
        moved += each
    assert float(moved - summed) > 0.987 * 1.0001  # what adding in float32 did


def test_the_order_of_microbatches_changes_next_to_nothing():
    parts = list(torch.randn(1000, 50, generator=torch.Generator().manual_seed(0)).unbind())
    assert (total(parts) - total(parts[::-1])).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_is_released_in_the_type_of_its_parts(dtype):
    values = torch.ones(3, dtype=dtype)
    expected = released_type(values)
    united = Bounded.union([part(values), part(values)])
    for one in (united, united * 2.0, united + united, united - united):
        raw = unwrap(one.value["w"])
        assert raw.dtype == torch.float64
        assert released_type(raw) == expected
    assert released_type(unwrap(part(values).value["w"])) == expected


def test_noise_is_the_same_for_one_microbatch_and_for_many():
    """Only the sum's rounding differs: the number of microbatches must not choose another stream."""

    def released(parts):
        plan = PrivacyPlan([Release("gradient", 1.0, Gaussian(1.0))], FullBatch(10, 1))
        ledger = Ledger(plan, secrets=Secrets(reproducible_seed=3))
        draw = ledger.open("batch", "here")
        ledger.sample(draw, 10)
        bounded = [make_bounded({"w": Private(one, draw)}, 1.0, 2.0, draw) for one in parts]
        return ledger.release(draw, {"gradient": Bounded.union(bounded)})["gradient"]["w"]

    whole, halves = torch.full((40,), 0.5), [torch.full((40,), 0.25)] * 2
    one, many = released([whole]), released([half.clone() for half in halves])
    assert one.dtype == many.dtype == torch.float32
    assert torch.equal(one, many)


def test_processes_are_added_in_double(monkeypatch):
    met = []
    monkeypatch.setattr(bounded, "all_reduced", lambda raws, group: met.extend(raws) or raws)
    values = torch.ones(3)
    raw = unwrap(part(values).all_reduce().value["w"])
    assert [one.dtype for one in met] == [torch.float64]
    assert released_type(raw) == torch.float32
