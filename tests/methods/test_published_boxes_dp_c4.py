"""Algorithms 2, 3 and 4 of DP-C4's paper, written down from its boxes in NumPy, hold `equipoise.published`.

Samples, coins and standard normal noise are given to both. The transcriptions use nothing of the library.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stepping import Follower, Linear, half_square

from equipoise import published
from equipoise.audit.replay import RecordingLedger
from equipoise.methods import AtRandom, Every, LinearDecay
from equipoise.privacy import WithoutReplacement
from equipoise.privacy.private import exact

RECORDS, FEATURES, BATCH, STEPS, PERIOD, RATE = 30, 3, 8, 14, 4, 0.05
Z1, Z2 = 0.4, 1.5
RNG = np.random.default_rng(5)
A, B = RNG.standard_normal((RECORDS, FEATURES)), RNG.standard_normal(RECORDS)
SAMPLES = [np.sort(RNG.choice(RECORDS, BATCH, replace=False)) for _ in range(STEPS)]
NORMALS = {name: RNG.standard_normal((STEPS, FEATURES)) for name in ("coupled", "anchor", "at_x", "at_w")}


def gradients(x):
    """Of (a_i . x - b_i)^2 / 2, one row a record."""
    return (A @ x - B)[:, None] * A


def clip(rows, threshold):
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, np.divide(threshold, norms, out=np.ones_like(norms), where=norms > 0))


def moved(routine, k, coin, x, following, w):
    """Lines 13 to 17 of Algorithm 4: w^{k+1}."""
    renew = coin if routine in (1, 3) else k % PERIOD == 1 % PERIOD
    return (x if routine in (1, 2) else following) if renew else w


def algorithm_3_and_4(plus, routine, coins, c, c1, c2, *, text=False, shift="one_step"):
    """Algorithm 3, or 4 if `plus`.

    text: as Section 3.2 says, C_2k, g_2 and its noise are made when the anchor moves, and kept.
    shift: "one_anchor" takes the anchor before the present one for w^{k-1}.
    """
    sigma1, sigma2 = Z1 / BATCH, Z2 / RECORDS
    x = w = np.zeros(FEATURES)
    before = last = None  # w^{-1}: its C_2 ||grad f|| is C
    path = []
    for k in range(STEPS):
        s = SAMPLES[k]
        difference = gradients(x)[s] - gradients(w)[s]
        size = np.linalg.norm(x - w) if plus else np.linalg.norm(difference.mean(0))
        c1k = min(c(k), c1(k) * size)
        g1 = clip(difference, c1k).mean(0)
        n1 = sigma1 * c1k * NORMALS["coupled"][k]
        at = w
        if plus:
            at = before if shift == "one_anchor" else last
        c2k = c(k) if at is None else min(c(k), c2(k) * np.linalg.norm(gradients(at).mean(0)))
        if not text or k == 0 or last is not w:
            anchor = clip(gradients(w), c2k).mean(0) + sigma2 * c2k * NORMALS["anchor"][k]
        following = x - RATE * (g1 + n1 + anchor)
        renewed = moved(routine, k, coins[k], x, following, w)
        last = w
        if renewed is not w:
            before = w
        x, w = following, renewed
        path.append(x)
    return path


def noised(point, records, c, z, normal):
    """Lines 4 to 6 of Algorithm 2: the noise of a sum, in equal parts on its records."""
    return (clip(gradients(point)[records], c) + z * c * normal / len(records)).mean(0)


def algorithm_2(coins, c):
    x = w = np.zeros(FEATURES)
    path = []
    for k in range(STEPS):
        s, everybody = SAMPLES[k], np.arange(RECORDS)
        estimate = noised(w, everybody, c(k), Z2, NORMALS["anchor"][k])
        if k:  # in the box the two noises are there at k = 0, too, where x and w are one point
            estimate += noised(x, s, c(k), Z1, NORMALS["at_x"][k])
            estimate -= noised(w, s, c(k), Z1, NORMALS["at_w"][k])
        x, w = x - RATE * estimate, moved(1, k, coins[k], x, None, w)
        path.append(x)
    return path


class Given(RecordingLedger):
    """Samples and noise that a test gives."""

    def sample(self, draw, count):
        super().sample(draw, count)
        return torch.arange(RECORDS) if draw.name == "anchor" else torch.from_numpy(SAMPLES[self.now()])

    def _noised(self, mechanism, sums, *rest):
        out = {}
        for name, one in sums.items():
            normal = torch.from_numpy(NORMALS[name][self.now()])
            noise = mechanism.noise_multiplier * one.add_remove * normal
            out[name] = {key: exact(value) + noise for key, value in one.value.items()}
        return out


def path_of(method):
    model, data = Linear(FEATURES), {"x": torch.from_numpy(A), "y": torch.from_numpy(B)}
    sampling = WithoutReplacement(BATCH, RECORDS, STEPS)
    follower = Follower(
        method, model, half_square, data, sampling, learning_rate=RATE, relation="replace_one", seed=3
    )
    follower.ledger = Given(follower.plan, secrets=follower.ledger.secrets)
    follower.ledger.now = lambda: follower.steps_done
    found = [(follower.step(), follower.vector.numpy().copy())[1] for _ in range(STEPS)]
    schedule = follower.method_plan.constants.schedule
    return found, [schedule.renews(k) for k in range(STEPS)]


def renewal(routine, **options):
    kind = Every if routine in (2, 4) else AtRandom
    return kind(PERIOD, takes_next=routine in (3, 4), **options)


NOISE = {"noise_multiplier": Z1, "anchor_noise_multiplier": Z2}
C2 = LinearDecay(0.5, final=4.0, steps=STEPS)


def rising(k):
    return 0.5 + 3.5 * k / (STEPS - 1)


def agree(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.abs(np.diff(expected, axis=0)).min(initial=1) > 1e-6


@pytest.mark.parametrize(
    ("kind", "routine"),
    [*((published.DPC4Plus, routine) for routine in (1, 2, 3, 4)), (published.DPC4, 1), (published.DPC4, 4)],
)
def test_algorithms_3_and_4_line_by_line(kind, routine):
    schedule = renewal(routine, fresh_noise=True)
    method = kind(clip_norm=2.0, coupled_scale=3.0, anchor_scale=C2, schedule=schedule, **NOISE)
    found, coins = path_of(method)
    assert 2 < sum(coins) < STEPS - 2
    plus = kind is published.DPC4Plus
    agree(found, algorithm_3_and_4(plus, routine, coins, lambda k: 2.0, lambda k: 3.0, rising))


@pytest.mark.parametrize("kind", [published.DPC4, published.DPC4Plus])
def test_the_text_makes_an_anchor_gradient_once(kind):
    """And C falls as the schedule says."""
    c = LinearDecay(4.0, final=0.5, steps=STEPS)
    method = kind(clip_norm=c, coupled_scale=3.0, anchor_scale=C2, schedule=renewal(2), **NOISE)
    found, coins = path_of(method)
    falling = [4.0 - 3.5 * k / (STEPS - 1) for k in range(STEPS)]
    plus = kind is published.DPC4Plus
    agree(found, algorithm_3_and_4(plus, 2, coins, falling.__getitem__, lambda k: 3.0, rising, text=True))


def test_the_two_readings_of_line_7_differ_from_the_second_step_after_a_change():
    options = {"clip_norm": 2.0, "schedule": renewal(2, fresh_noise=True), **NOISE}
    paths = {}
    for shift in ("one_step", "one_anchor"):
        paths[shift], coins = path_of(published.DPC4Plus(shift=shift, **options))
        scales = (lambda k: 2.0, lambda k: 1.0, lambda k: 1.0)
        agree(paths[shift], algorithm_3_and_4(True, 2, coins, *scales, shift=shift))
    apart = np.linalg.norm(np.subtract(*paths.values()), axis=1)
    # w^2 = x^1 is new at k = 2, which takes w^1 = w^0 by both readings; w^0 is at rest until then
    assert apart[0] == 0
    assert apart[-1] > 1e-4


def test_algorithm_2_line_by_line():
    found, coins = path_of(
        published.DPSVRG(clip_norm=C2, schedule=AtRandom(PERIOD, fresh_noise=True), **NOISE)
    )
    agree(found, algorithm_2(coins, rising))
