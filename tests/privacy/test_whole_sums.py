"""Sums of microbatches have the same bits in any order, move by what one record adds, and never overflow."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.privacy import (
    BandedGaussian,
    Draw,
    FixedEpochs,
    FullBatch,
    Gaussian,
    JointGaussian,
    Ledger,
    LedgerError,
    PrivacyPlan,
    Private,
    Release,
    Secrets,
    sums_of,
)
from equipoise.privacy.bounds.bounded import added_over_processes, make_bounded
from equipoise.privacy.private import exact, unwrap
from equipoise.privacy.whole_sums import WholeSum, unit_of
from equipoise.published.dice_sgd import DiceSGD
from equipoise.published.dp_c4 import DPC4

sys.path.append(str(Path(__file__).parents[1] / "training"))
from small_problems import parameters, training

DRAW = Draw("batch", 0)


def bounded(value: torch.Tensor, draw: Draw = DRAW, joint: str | None = None):
    return make_bounded({"w": Private(value, draw)}, 1.0, 2.0, draw, joint=joint)


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


def test_a_record_that_comes_first_moves_a_million_others_by_no_more_than_its_bound():
    g = rows(1_000_001)
    with_it, without = (exact(united(some, 78).value["w"]).double() for some in (g, g[1:]))
    assert float((with_it - without).norm()) <= 1.0001  # 2.05 where float32 adds
    assert float((with_it - without - g[0]).norm()) <= 1e-3


def test_the_order_of_microbatches_changes_no_bit():
    sizes = torch.logspace(-12, 3, 50)  # most entries have more places than the unit
    parts = list((torch.randn(1000, 50, generator=torch.Generator().manual_seed(0)) * sizes).unbind())
    found = [
        exact(sums_of({"s": bounded(part)} for part in some)["s"].value["w"])
        for some in (parts, parts[::-1], sorted(parts, key=lambda part: float(part[0])))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.allclose(
        found[0], torch.stack(parts).double().sum(0), rtol=0, atol=1000 * unit_of(1.0, 1 << 22)
    )


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
    plan = PrivacyPlan([Release("a", 1.0, Gaussian(1.0))], FullBatch(20_000, 2))
    ledger = Ledger(plan)
    draw = ledger.open("batch", "question")
    assert draw.capacity == 80_000
    assert len(ledger.sample(draw, 80_000)) == 80_000
    with pytest.raises(LedgerError, match="population"):
        ledger.sample(draw, 80_001)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("places", [(0, 1), (2, 3)])
def test_what_is_not_finite_in_a_microbatch_is_refused(bad, places):
    """Whole numbers cannot hold it; two that are lost in one entry would add up to zero."""
    plan = PrivacyPlan([Release("a", 1.0, Gaussian(1.0))], FixedEpochs(5, 10, 2))
    ledger = Ledger(plan)
    draw = ledger.open("batch", "question")
    parts = [torch.ones(3) for _ in range(4)]
    for place in places:
        parts[place][1] = bad
    with pytest.raises(LedgerError, match="not finite"):
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


def mechanisms():
    def flat(norms: torch.Tensor) -> torch.Tensor:
        return torch.stack([norms.clamp(max=1.0)] * 2, dim=1)

    joint = JointGaussian(("a", "b"), [[2.0, 0.0], [1.0, 2.0]], flat, (1.0,), noise_multiplier=256.0)
    return {
        "independent": Gaussian(256.0),
        "over steps": BandedGaussian((1.0, 0.5), 256.0),
        "shared": joint,
        "grid": Gaussian(256.0).on_grid(),
    }


@pytest.mark.parametrize("name", ["independent", "over steps", "shared", "grid"])
def test_the_noise_is_added_before_the_sum_is_rounded(name):
    """A unit more among floats that are four apart shows in a quarter of the coordinates, not in none."""
    mechanism = mechanisms()[name]
    names = mechanism.shared_by or ("a",)
    released = []
    for more in (0.0, 1.0):
        plan = PrivacyPlan(
            [Release(n, 1.0, mechanism) for n in names], FixedEpochs(5, 10, 2, same_slots=True)
        )
        ledger = Ledger(plan, secrets=Secrets(reproducible_seed=1))
        draw = ledger.open("batch", "question")
        parts = [torch.full((4000,), 2.0**25), torch.full((4000,), more)]
        sums = {
            n: sums_of({"s": bounded(part, draw, mechanism.made_for)} for part in parts)["s"] for n in names
        }
        released.append(ledger.release(draw, sums)[names[-1]]["w"])
    assert released[0].dtype == torch.float32
    assert 0.8 < float((released[1].double() - released[0].double()).mean()) < 1.2


def test_noise_is_the_same_for_one_micro_batch_and_for_many():
    """Only the sum's rounding differs: the number of micro-batches must not choose another stream."""
    released = []
    for parts in ([torch.full((40,), 0.5)], [torch.full((40,), 0.25)] * 2):
        plan = PrivacyPlan([Release("a", 1.0, Gaussian(1.0))], FixedEpochs(5, 10, 2))
        ledger = Ledger(plan, secrets=Secrets(reproducible_seed=3))
        draw = ledger.open("batch", "question")
        sums = {"a": sums_of({"s": bounded(part.clone(), draw)} for part in parts)["s"]}
        released.append(ledger.release(draw, sums)["a"]["w"])
    assert torch.equal(*released)


def test_other_exact_sums_get_other_noise():
    """Also where they round to the same floats: one noise for both would show how they differ."""
    released = []
    for more in (0.0, 1.0):
        plan = PrivacyPlan([Release("a", 1.0, Gaussian(8.0))], FixedEpochs(5, 10, 2))
        secrets = Secrets()
        secrets._key = bytes(32)
        ledger = Ledger(plan, secrets=secrets)
        draw = ledger.open("batch", "question")
        parts = [torch.full((4000,), 2.0**25), torch.full((4000,), more)]
        sums = {"a": sums_of({"s": bounded(part, draw)} for part in parts)["s"]}
        released.append(ledger.release(draw, sums)["a"]["w"].double())
    assert float((released[1] - released[0]).std()) > 8


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


def test_a_record_moves_the_sums_of_a_training_by_what_it_adds(monkeypatch):
    g, seen, release = rows(200_001), [], Ledger.release

    def recorded(ledger, draw, sums, checks):
        seen.append(exact(sums["gradient"].value["weight"]).double().flatten())
        return release(ledger, draw, sums, checks)

    monkeypatch.setattr(Ledger, "release", recorded)
    for some in (g, g[1:]):
        training(
            nn.Linear(4, 1, bias=False),
            loss=lambda model, x: model(x).squeeze(1),
            data=2 * some,
            sampling=eq.FullBatch(200_000, 1),
            method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
            microbatch_size=2000,
        ).take_step()
    assert float((seen[0] - seen[1] - g[0]).norm()) <= 2e-3  # 0.05 where float32 adds


@pytest.mark.parametrize("method", [DiceSGD, DPC4])
def test_what_a_paper_prints_has_the_same_noise_in_one_micro_batch_and_in_many(method):
    """These recipes compute with sums before they are noised, which must not make another type of them."""
    released = []
    for size in (6, 60):
        run = training(
            method=method(),
            budget=eq.Budget(3.0, 1e-3),
            microbatch_size=size,
        )
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
    whole.add(torch.tensor([math.nan, 0.0]))
    assert bool(whole[1].is_lost()) == (unit > 0)
