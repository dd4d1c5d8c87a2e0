"""What DP-SVRG, DP-C4 and DP-C4+ share: schedules, plans, splits of the budget, limits."""

from __future__ import annotations

import itertools

import pytest
import torch
from stepping import Follower, Linear, Noiseless, consistent, half_square

import equipoise as eq
from equipoise.methods.anchored import AtRandom, Every
from equipoise.methods.base import Setting
from equipoise.methods.dp_c4 import Constant, Distance, ReleasedNorm
from equipoise.privacy import FullBatch, Poisson, epsilon

BUDGET = eq.Budget(4.0, 1e-5)
SMALL = {"noise_multiplier": 1.0, "anchor_noise_multiplier": 2.0}


def moving(routine, period):
    """The schedule of a routine of the paper."""
    kind = Every if routine in (2, 4) else AtRandom
    return kind(period, takes_next=routine in (3, 4))


def drawn(routine, steps, period, seed=0):
    return moving(routine, period).draw(steps, period, torch.Generator().manual_seed(seed))


def plan(method, sampling, budget=None, relation="add_or_remove_one"):
    return method.plan(Setting(sampling=sampling, budget=budget, relation=relation)).releases


def cost(found):
    """Epsilon to about 2%, where only the order matters."""
    return epsilon(found.event(), 1e-5, found.relation, cross_check=False).value


def test_anchors_move_as_the_routines_say():
    """T = 6, m = 3: renewals after k = 1 and 4; an anchor renewed after the last step would be for nobody."""
    for routine in (2, 4):
        schedule = drawn(routine, 6, 3)
        assert sorted(schedule.renewals) == [1, 4]
        assert schedule.num_anchors == 3
    assert drawn(2, 6, 3).num_coupled == 5
    assert drawn(4, 6, 3).num_coupled == 3
    assert sorted(drawn(2, 5, 3).renewals) == [1]  # k = 4 would be the last of five steps
    assert sorted(drawn(2, 4, 1).renewals) == [0, 1, 2]  # every k is 1 mod 1


def test_an_anchor_at_every_step_is_dp_sgd_bit_by_bit():
    data, _ = consistent(60, 4)
    anchored = eq.DPC4Plus(
        clip_norm=0.7, schedule=moving(4, 1), anchor=Constant(), anchor_batch_size=20, **SMALL
    )
    a = Follower(anchored, Linear(4), half_square, data, Poisson(10, 60, 15)).run()
    plain = eq.DPSGD(clip_norm=0.7, noise_multiplier=2.0)
    b = Follower(plain, Linear(4), half_square, data, Poisson(20, 60, 15)).run()
    assert torch.equal(a.vector, b.vector)
    assert [release.name for release in a.plan.releases] == ["anchor"]
    assert a.plan.epsilon(1e-5).value == b.plan.epsilon(1e-5).value


@pytest.mark.parametrize(
    ("kind", "routine"),
    [*(("dp-c4-plus", routine) for routine in (1, 2, 3, 4)), ("dp-svrg", 1), ("dp-svrg", 4)],
)
def test_without_noise_and_clipping_it_is_svrg(kind, routine):
    data, _ = consistent(60, 4)
    options = {"schedule": moving(routine, 3), "anchor_batch_size": 60, **SMALL}
    plus = eq.DPC4Plus(clip_norm=1e6, coupled=Distance(scale=1e6), anchor=Constant(), **options)
    method = eq.methods.DPSVRG(clip_norm=1e6, **options) if kind == "dp-svrg" else plus
    follower = Follower(method, Linear(4), half_square, data, Poisson(20, 60, 25))
    follower.ledger = Noiseless(follower.plan, secrets=follower.ledger.secrets)
    batches: list[torch.Tensor] = []
    sample = follower.ledger.sample

    def sampled(draw, count):
        ids = sample(draw, count)
        if draw.name == "batch":
            batches.append(ids)
        return ids

    follower.ledger.sample = sampled
    follower.run()

    schedule = follower.method_plan.constants.schedule
    x, y = data["x"], data["y"]
    at = torch.zeros(4, dtype=torch.float64)
    anchor = at.clone()

    def gradients(point, ids):
        return (x[ids] @ point - y[ids])[:, None] * x[ids]

    everybody, drawn = torch.arange(60), iter(batches)
    for k in range(25):
        step = gradients(anchor, everybody).sum(0) / 60
        if not schedule.coincides(k):
            ids = next(drawn)
            step = step + (gradients(at, ids) - gradients(anchor, ids)).sum(0) / 20
        before, at = at, at - 0.1 * step
        if schedule.renews(k):
            anchor = at if routine in (3, 4) else before
    assert next(drawn, None) is None
    torch.testing.assert_close(follower.vector, at, rtol=1e-13, atol=1e-13)


def test_anchor_noise_at_every_step_is_paid_for_at_every_step():
    data, _ = consistent(40, 3)
    options = {"schedule": moving(4, 4), **SMALL}
    once = eq.DPC4Plus(**options)
    often = eq.DPC4Plus(schedule=Every(4, takes_next=True, fresh_noise=True), **SMALL)
    follower = Follower(often, Linear(3), half_square, data, Poisson(10, 40, 14)).run()
    assert follower.released("anchor") == 14
    assert follower.released("anchor_count") == 4
    gradients = [state["gradient"]["weight"] for state in follower.states]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(gradients))
    thresholds = [state["anchor_clip_norm"] for state in follower.states]
    assert len(set(thresholds[2:6])) == 1  # one anchor, one threshold
    assert cost(plan(often, Poisson(10, 40, 14))) > cost(plan(once, Poisson(10, 40, 14)))


def test_each_gradient_of_the_pair_is_clipped_before_they_are_subtracted():
    """A difference that is clipped as one row has the same bound, and is another method."""
    data, _ = consistent(40, 3)
    threshold = 0.3
    method = eq.methods.DPSVRG(clip_norm=threshold, schedule=Every(8), **SMALL)
    follower = Follower(method, Linear(3), half_square, data, FullBatch(40, 4)).run(3)
    points = follower.vector.clone(), follower.states[-1]["anchor"]["weight"]
    follower.step()
    rows = [(data["x"] @ point - data["y"])[:, None] * data["x"] for point in points]
    assert all((row.norm(dim=1) > threshold).sum() > 20 for row in rows)
    at_x, at_w = (row * (threshold / row.norm(dim=1, keepdim=True)).clamp(max=1) for row in rows)
    expected = (at_x - at_w).sum(0)
    torch.testing.assert_close(follower.ledger.sums[-1]["coupled"]["weight"], expected)


def test_all_records_in_an_anchor_and_the_count_beside_it():
    """The toy problem: N = 2000, B = 64, full anchors, m = 16, T = 3000, K = 189."""
    sampling = Poisson(64, 2000, 3000)
    options = {"schedule": Every(16), "anchor_batch_size": 2000}
    noise = {"noise_multiplier": 2.6572, "anchor_noise_multiplier": 22.291}
    bare = plan(eq.DPC4Plus(anchor=ReleasedNorm(), **options, **noise), sampling)
    assert bare["anchor"].count == 189
    assert bare["anchor"].sampling == FullBatch(2000, 189)
    assert bare.epsilon(1e-5).value == pytest.approx(4.0, rel=5e-3)
    counted = plan(eq.DPC4Plus(**options, **noise), sampling)
    assert counted["anchor_count"].noise_multiplier == pytest.approx(200)
    assert counted.epsilon(1e-5).value == pytest.approx(4.013, rel=5e-3)
    calibrated = plan(eq.DPC4Plus(**options), sampling, BUDGET)
    assert 3.96 <= calibrated.epsilon(1e-5).value <= 4.0


def test_parameters_that_someone_else_moved():
    data, _ = consistent(40, 3)
    method = eq.DPC4Plus(schedule=moving(2, 4), **SMALL)
    follower = Follower(method, Linear(3), half_square, data, Poisson(10, 40, 12))
    follower.step()
    moved = {"weight": torch.full((3,), 5.0, dtype=torch.float64)}
    kept = method.rebase(follower.state, moved)
    assert torch.equal(kept["anchor"]["weight"], follower.state["anchor"]["weight"])
    assert kept["gradient"] is follower.state["gradient"]
    follower.step()  # k = 1: the anchor moves, its gradient is yet to come
    assert follower.state["gradient"] is None
    follower.state = method.rebase(follower.state, moved)
    assert torch.equal(follower.state["anchor"]["weight"], moved["weight"])
    moved["weight"].zero_()
    assert float(follower.state["anchor"]["weight"][0]) == 5.0  # a copy
    follower.run(10)
    assert not any(follower.ledger.releases_left.values())


def test_a_decaying_threshold_serves_both_releases():
    """An anchor at steps 0, 2 and 4; coupled terms at 1 and 3, with the threshold of their step."""
    data, decay = consistent(40, 3)[0], eq.methods.ExponentialDecay(1.0, rate=0.5)
    method = eq.methods.DPSVRG(clip_norm=decay, schedule=moving(4, 2), **SMALL)
    follower = Follower(method, Linear(3), half_square, data, Poisson(10, 40, 5)).run()
    lines = [entry for entry in follower.ledger.journal.entries() if entry.kind == "release"]
    names = [("anchor", 1.0), ("coupled", 1.0), ("anchor", 0.25), ("coupled", 0.25), ("anchor", 0.0625)]
    assert [next(iter(entry.bounds.items())) for entry in lines] == names
