"""Sums of microbatches have the same bits in any order, move by what one record adds, and never overflow."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise import privacy as ep
from equipoise.privacy import sums_of
from equipoise.privacy.bounds.bounded import added_over_processes, make_bounded
from equipoise.privacy.private import exact, unwrap
from equipoise.privacy.whole_sums import WholeSum, unit_of
from equipoise.published.dice_sgd import DiceSGD
from equipoise.published.dp_c4 import DPC4

sys.path.append(str(Path(__file__).parents[1] / "training"))
from small_problems import parameters, training

DRAW = ep.Draw("batch", 0)


def bounded(value: torch.Tensor, draw: ep.Draw = DRAW, joint: str | None = None):
    return make_bounded({"w": ep.Private(value, draw)}, 1.0, 2.0, draw, joint=joint)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Of length 1 and more or less of one direction, so that their sum is nearly as long as it can be."""
    found = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) + 0.5
    return found / found.norm(dim=1, keepdim=True)


def united(g: torch.Tensor, size: int):
    """The sum of all rows by micro-batches of this size."""
    whole = len(g) // size * size
    products = torch.bmm(torch.ones(whole // size, 1, size), g[:whole].view(-1, size, g.shape[1]))[:, 0]
    parts = [*products, torch.ones(len(g) - whole) @ g[whole:]]
    return sums_of({"s": bounded(part)} for part in parts)["s"]


def test_a_record_that_comes_first_moves_many_others_by_no_more_than_its_bound():
    g = rows(200_001)
    with_it, without = (exact(united(some, 78).value["w"]).double() for some in (g, g[1:]))
    assert float((with_it - without).norm()) <= 1.0001
    assert float((with_it - without - g[0]).norm()) <= 1e-3  # 0.01 where float32 adds


def test_the_order_of_microbatches_changes_no_bit():
    sizes = torch.logspace(-12, 3, 50)  # most entries have more places than the unit
    parts = list((torch.randn(1000, 50, generator=torch.Generator().manual_seed(0)) * sizes).unbind())
    orders = parts, parts[::-1], sorted(parts, key=lambda part: float(part[0]))
    found = [exact(sums_of({"s": bounded(part)} for part in some)["s"].value["w"]) for some in orders]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    plain = torch.stack(parts).double().sum(0)
    assert torch.allclose(found[0], plain, rtol=0, atol=1000 * unit_of(1.0, 1 << 22))


def keeps_the_law(unit, bound: float, capacity: int) -> bool:
    """Sums of `capacity` records of the largest length, in any order: exact but for rounding."""
    longest = bound * torch.tensor([1.0, -1.0, 1e-9])
    parts = [capacity // 2 * longest, (capacity - capacity // 2 - 1) * longest, longest / 3]
    expected = sum(part.double() for part in parts)
    found = []
    for order in itertools.permutations(parts):
        total = WholeSum.of(order[0], unit(order))
        for part in order[1:]:
            total.add(part)
        found.append(total.floats())
    # Half a unit each, and of what is read the last place of float64.
    allowed = 1.5 * bound * capacity * 2.0**-60 + expected.abs() * 2.0**-53
    is_right = bool(((found[0] - expected).abs() <= allowed).all())
    return is_right and all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("bound", [1.0, 0.7, 1e6, 3e-9, 1.999])
@pytest.mark.parametrize("capacity", [1 << 16, (1 << 22) - 1, 10**9])
def test_a_full_draw_of_the_longest_records_does_not_overflow(bound, capacity):
    assert keeps_the_law(lambda parts: unit_of(bound, capacity), bound, capacity)


def test_a_wrong_unit_breaks_the_law():
    bound, capacity = 0.9, 1 << 16
    right = unit_of(bound, capacity)
    wrong = {
        "too small: the sums overflow": lambda parts: right / 8,
        "too large: rounding shows": lambda parts: right * 16,
        "of the values": lambda parts: float(parts[0].abs().max()) * 2.0**-45,
    }
    kept = {name: keeps_the_law(unit, bound, capacity) for name, unit in wrong.items()}
    assert not any(kept.values()), kept


def test_a_draw_of_more_records_than_its_sums_have_room_for_is_refused():
    plan = ep.PrivacyPlan([ep.Release("a", 1.0, ep.Gaussian(1.0))], ep.FullBatch(20_000, 2))
    ledger = ep.Ledger(plan)
    draw = ledger.open("batch", "question")
    assert draw.capacity == 80_000
    assert len(ledger.sample(draw, 80_000)) == 80_000
    with pytest.raises(ep.LedgerError, match="population"):
        ledger.sample(draw, 80_001)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("places", [(0, 1), (2, 3)])
def test_what_is_not_finite_in_a_microbatch_is_refused(bad, places):
    """Whole numbers cannot hold it; two that are lost in one entry would add up to zero."""
    plan = ep.PrivacyPlan([ep.Release("a", 1.0, ep.Gaussian(1.0))], ep.FixedEpochs(5, 10, 2))
    ledger = ep.Ledger(plan)
    draw = ledger.open("batch", "question")
    parts = [torch.ones(3) for _ in range(4)]
    for place in places:
        parts[place][1] = bad
    with pytest.raises(ep.LedgerError, match="not finite"):
        ledger.release(draw, sums_of({"a": bounded(part, draw)} for part in parts))


def test_a_sum_counts_as_float32_and_one_micro_batch_is_not_copied():
    one = bounded(torch.ones(3))
    assert sums_of([{"s": one}])["s"] is one
    several = sums_of([{"s": bounded(torch.full((3,), 2.0**24))}, {"s": bounded(torch.ones(3))}])["s"]
    value = several.value["w"]
    assert (value.dtype, unwrap(value).dtype, exact(value).dtype) == (*[torch.float32] * 2, torch.float64)
    for scaled, factor in ((several * 2, 2), (several + several, 2), (several - several * 3, -2)):
        assert scaled.value["w"].dtype == torch.float32
        assert exact(scaled.value["w"]).tolist() == [factor * (2.0**24 + 1)] * 3


SHARED = ep.JointGaussian(
    ("a", "b"), [[2.0, 0.0], [1.0, 2.0]], lambda n: torch.stack([n.clamp(max=1.0)] * 2, 1), (1.0,)
)
MECHANISMS = {
    "independent": ep.Gaussian(256.0),
    "over steps": ep.BandedGaussian((1.0, 0.5), 256.0),
    "shared": SHARED.scaled(256.0),
    "grid": ep.Gaussian(256.0).on_grid(),
}


def released(mechanism, parts, key=None):
    """The last release of the sum of micro-batches."""
    names, secrets = (
        mechanism.shared_by or ("a",),
        ep.Secrets(reproducible_seed=1) if key is None else ep.Secrets(),
    )
    if key is not None:
        secrets._key = key
    plan = ep.PrivacyPlan(
        [ep.Release(n, 1.0, mechanism) for n in names], ep.FixedEpochs(5, 10, 2, same_slots=True)
    )
    ledger = ep.Ledger(plan, secrets=secrets)
    draw = ledger.open("batch", "question")
    sums = {
        n: sums_of({"s": bounded(part.clone(), draw, mechanism.made_for)} for part in parts)["s"]
        for n in names
    }
    return ledger.release(draw, sums)[names[-1]]["w"]


def one_more(mechanism, key=None):
    """What a unit more among floats that are four apart moves."""
    two = [
        released(mechanism, [torch.full((4000,), 2.0**25), torch.full((4000,), more)], key)
        for more in (0.0, 1.0)
    ]
    assert two[0].dtype == torch.float32
    return two[1].double() - two[0].double()


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_noise_is_added_before_the_sum_is_rounded(name):
    """A unit more shows in a quarter of the coordinates, not in none."""
    assert 0.8 < float(one_more(MECHANISMS[name]).mean()) < 1.2


def test_noise_follows_the_exact_sum_and_no_number_of_micro_batches():
    """Other sums that round to the same floats have other noise: one for both would show how they differ."""
    assert float(one_more(ep.Gaussian(8.0), bytes(32)).std()) > 8
    halves, quarters = [torch.full((40,), 0.5)], [torch.full((40,), 0.25)] * 2
    assert torch.equal(*(released(ep.Gaussian(1.0), parts) for parts in (halves, quarters)))


def test_processes_add_up_whole_numbers(tmp_path):
    """One process of a group of one, which goes the way of many; it leaves the sums as they were."""
    g = rows(200)
    g[0] *= 1e-12  # less than a unit
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sums = {"one": bounded(g[0]), "many": united(g, 50)}
        added = [added_over_processes(sums) for _ in range(2)]
        lost = added_over_processes({"s": bounded(torch.tensor([math.nan]))})
    finally:
        torch.distributed.destroy_process_group()
    unit = unit_of(1.0, DRAW.capacity)
    for name, total in added[0].items():
        value = exact(total.value["w"])
        assert total.value["w"].dtype == torch.float32
        assert torch.equal(value, value.div(unit).round() * unit)
        assert torch.allclose(value, exact(sums[name].value["w"]).double(), rtol=0, atol=unit / 2)
        assert torch.equal(value, exact(added[1][name].value["w"]))
    assert bool(exact(lost["s"].value["w"]).isnan())


@pytest.mark.parametrize("method", [DiceSGD, DPC4])
def test_what_a_paper_prints_has_the_same_noise_in_one_micro_batch_and_in_many(method):
    released = []
    for size in (6, 60):
        run = training(method=method(), budget=eq.Budget(3.0, 1e-3), microbatch_size=size)
        for _ in range(3):
            run.take_step()
        released.append(parameters(run.model))
    assert torch.allclose(*released, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("unit", [2.0**-20, 0.0])
def test_a_part_of_a_sum_is_a_sum_of_the_same_unit(unit):
    whole = WholeSum.of(torch.tensor([1.0, 2.0]), unit)
    whole.add(torch.tensor([0.5, 0.25]))
    assert [float(whole[place].floats()) for place in (0, 1)] == [1.5, 2.25]
    assert not whole[0].is_lost()
    rounded = WholeSum.of(unit * torch.tensor([0.75, -0.75, 0.25]), unit).floats()
    assert unit == 0 or (rounded / unit).tolist() == [1, -1, 0]
    whole.add(torch.tensor([math.nan, 0.0]))
    assert bool(whole[1].is_lost()) == (unit > 0)
