"""Sums of many micro-batches move by what one record adds, and are rounded after the noise alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.methods.published.dice_sgd import DiceSGD
from equipoise.methods.published.dp_c4 import DPC4
from equipoise.privacy import (
    BandedGaussian,
    Draw,
    FixedEpochs,
    Gaussian,
    JointGaussian,
    Ledger,
    PrivacyPlan,
    Private,
    Release,
    Secrets,
    sums_of,
)
from equipoise.privacy.bounds.bounded import added_over_processes, make_bounded
from equipoise.privacy.private import exact, unwrap

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


def test_the_order_of_micro_batches_changes_next_to_nothing():
    parts = list(torch.randn(1000, 50, generator=torch.Generator().manual_seed(0)).unbind())
    one, other = (
        exact(sums_of({"s": bounded(part)} for part in some)["s"].value["w"]) for some in (parts, parts[::-1])
    )
    assert (one - other).abs().max() < 1e-12


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


def test_processes_add_up_in_float64(tmp_path):
    """One process of a group of one, which goes the way of many."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sums = {"one": bounded(torch.ones(3)), "many": united(rows(200), 50)}
        added = added_over_processes(sums)
    finally:
        torch.distributed.destroy_process_group()
    for name, total in added.items():
        assert total.value["w"].dtype == torch.float32
        assert exact(total.value["w"]).dtype == torch.float64
        assert torch.equal(exact(total.value["w"]), exact(sums[name].value["w"]).double())


def test_a_record_moves_the_sums_of_a_training_by_what_it_adds(monkeypatch):
    g, seen, release = rows(200_001), [], Ledger.release

    def recorded(ledger, draw, sums):
        seen.append(exact(sums["gradient"].value["weight"]).double().flatten())
        return release(ledger, draw, sums)

    monkeypatch.setattr(Ledger, "release", recorded)
    for some in (g, g[1:]):
        training(
            nn.Linear(4, 1, bias=False),
            loss=lambda model, x: model(x).squeeze(1),
            data=2 * some,
            sampling=eq.FullBatch(200_000, 1),
            method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
            micro_batch_size=2000,
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
            micro_batch_size=size,
            allow_public_duplicates=True,
        )
        for _ in range(3):
            run.take_step()
        released.append(parameters(run.model))
    assert torch.allclose(*released, rtol=1e-3, atol=1e-4)
