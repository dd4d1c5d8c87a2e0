"""DiceSGD as published and its references: numbers by hand, what the statement says, what stays private."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scripted import run
from table import training as train

import equipoise as eq
from equipoise.methods.base import Setting
from equipoise.privacy import Poisson, Private, gaussian_epsilon
from equipoise.privacy.private import PrivateError, unwrap
from equipoise.published import DiceSGD as PublishedDiceSGD
from equipoise.published import dice_sgd as formulas

TWO = torch.tensor([[3.0, 4.0], [0.0, 0.5]], dtype=torch.float64)
NOWHERE = torch.zeros(2).double()


def published(clip_norm=1.0, **options):
    return PublishedDiceSGD(clip_norm=clip_norm, noise_multiplier=1.0, **options)


def memories(out):
    return [unwrap(state["memory"]["x"]) for state in out.states]


# ---- numbers by hand


@pytest.mark.parametrize("method", [published(), eq.methods.EFSGD()], ids=["published", "ef-sgd"])
def test_two_records_by_hand(method):
    out = run(method, lambda x: TWO, NOWHERE, steps=3, rate=0.1)
    for estimate, expected in zip(out.estimates, [(0.3, 0.65), (0.9, 1.45), (0.9, 1.45)], strict=True):
        assert estimate == pytest.approx(torch.tensor(expected))
    for memory, expected in zip(memories(out), [(1.2, 1.6), (1.8, 2.4), (2.4, 3.2)], strict=True):
        assert memory == pytest.approx(torch.tensor(expected))
    assert out.xs[2] == pytest.approx(torch.tensor([-0.12, -0.21]))


def test_algorithm_4_normalises_gradients_and_memory():
    out = run(published(variant="algorithm_4"), lambda x: TWO, NOWHERE, steps=2, rate=0.1)
    body = torch.tensor([0.3, 0.9])
    assert out.estimates[0] == pytest.approx(body)
    memory = torch.tensor([1.5, 2.25]) - body
    assert memories(out)[0] == pytest.approx(memory)
    assert out.estimates[1] == pytest.approx(body + memory / memory.norm())


def test_it_is_the_joint_form_where_the_second_radius_is_out_of_reach_and_there_is_no_noise():
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(40, 3, generator=rng, dtype=torch.float64) + 2
    start = torch.zeros(3).double()
    ours = run(
        eq.DiceSGD(clip_norm=0.5, residual_clip_norm=100.0, noise_multiplier=1.0),
        lambda x: x - z,
        start,
        steps=40,
        rate=0.2,
    )
    for method in (published(0.5), eq.methods.EFSGD(clip_norm=0.5)):
        theirs = run(method, lambda x: x - z, start, steps=40, rate=0.2)
        assert torch.allclose(ours.xs[-1], theirs.xs[-1], atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        published(100.0),
        eq.methods.EFSGD(clip_norm=100.0),
        eq.methods.ClipSGD(clip_norm=100.0),
        eq.methods.ClipSGD(clip_norm=math.inf),
    ],
)
def test_where_nothing_is_clipped_it_is_plain_sgd(method):
    out = run(method, lambda x: TWO + x, NOWHERE, steps=5, rate=0.1)
    x = NOWHERE
    for _ in range(5):
        x = x - 0.1 * (TWO + x).mean(0)
    assert torch.allclose(out.xs[-1], x, atol=1e-7)
    if "memory" in out.states[-1]:
        assert float(memories(out)[-1].norm()) < 1e-6


@pytest.mark.parametrize(("clip_norm", "rest"), [(0.5, -0.75), (1.0, -0.5), (3.0, -0.25)])
def test_the_papers_example_of_bias(clip_norm, rest):
    """C' records at -1 and one at C' = ceil(C) + 1: clipping rests at C / C' - 1, feedback at the mean, 0."""
    count = math.ceil(clip_norm) + 1
    z = torch.tensor([-1.0] * count + [float(count)], dtype=torch.float64)[:, None]
    start = torch.ones(1).double()
    clipped = run(eq.methods.ClipSGD(clip_norm=clip_norm), lambda x: x - z, start, steps=400, rate=0.1)
    assert float(clipped.xs[-1]) == pytest.approx(rest, abs=1e-4)
    fed = run(eq.methods.EFSGD(clip_norm=clip_norm), lambda x: x - z, start, steps=400, rate=0.1)
    assert float(fed.xs[-1]) == pytest.approx(0, abs=1e-4)
    # e = -(mean of the clipped gradients at 0) = -(count min(1, C) - C) / (count + 1)
    expected = -(count * min(1.0, clip_norm) - clip_norm) / (count + 1)
    assert float(memories(fed)[-1]) == pytest.approx(expected, abs=1e-4)


def test_nothing_is_lost():
    rng = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(30, 2, generator=rng, dtype=torch.float64) + 1
    out = run(published(), lambda x: x - z, NOWHERE, steps=25, rate=0.1)
    raw = sum((x - z).mean(0) for x in out.xs[:-1])
    memory = memories(out)[-1]
    assert torch.allclose(sum(out.estimates) + memory, raw, atol=1e-5)
    assert torch.allclose(out.xs[-1] - 0.1 * memory, out.xs[0] - 0.1 * raw, atol=1e-5)


# ---- what may be claimed


def test_the_statement_has_the_worst_case_the_claim_and_the_hole():
    training = train(PublishedDiceSGD(clip_norm=0.1))
    assert len(list(training)) == 6
    statement = training.statement()
    assert statement.recipe == "as_published"
    assert statement.guarantee == "worst_case"
    assert statement.epsilon_claimed == pytest.approx(8.0)
    std = formulas.published_noise_std(8.0, 1e-3, clip_norm=0.1, radius=0.1, population=60, steps=6)
    multiplier = std / (0.1 / 20 + 2 * 0.1)
    assert statement.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(6) / multiplier, 1e-3), rel=1e-6)
    assert statement.epsilon > 100
    assert "memory" in statement.holes[0]["reason"]


def test_noise_of_the_worst_case_meets_the_budget():
    training = train(PublishedDiceSGD(clip_norm=0.1, noise="worst_case"))
    assert len(list(training)) == 6
    assert training.statement().epsilon == pytest.approx(8.0, rel=1e-3)


def test_the_theorems_noise_is_larger_and_claims_the_same():
    sampling, budget = Poisson(20, 60, 6), eq.Budget(8.0, 1e-3)
    found = {}
    for noise in ("algorithm_4", "theorem"):
        method = PublishedDiceSGD(clip_norm=0.1, noise=noise)
        plan = method.plan(Setting(sampling=sampling, budget=budget))
        assert method.claimed_epsilon(plan, 1e-3) == pytest.approx(8.0)
        found[noise] = method.worst_case_multiplier(plan)
    assert found["theorem"] / found["algorithm_4"] == pytest.approx(math.sqrt((1 + 2 * 20**2) / 3))


def test_the_raw_memory_is_private_and_its_size_is_not_told():
    training = train(PublishedDiceSGD(clip_norm=0.1))
    training.take_step()
    memory = training.method_state["memory"]
    assert all(isinstance(value, Private) for value in memory.values())
    with pytest.raises(PrivateError):
        float(next(iter(memory.values())).norm())
    assert training.method.metrics(training.method_state) == {}
    ours = train(eq.DiceSGD(clip_norm=0.1))
    ours.take_step()
    told = ours.method.metrics(ours.method_state)
    assert told["memory_norm"] == pytest.approx(
        float(torch.cat([v.flatten() for v in ours.method_state["memory"].values()]).norm())
    )


@pytest.mark.parametrize("method", [eq.methods.ClipSGD(clip_norm=0.1), eq.methods.EFSGD(clip_norm=0.1)])
def test_references_claim_nothing(method):
    training = train(method)
    assert len(list(training)) == 6
    assert training.statement().guarantee == "none"
    assert training.statement().epsilon is None


# ---- the attack that refutes the published claim


def certified_epsilon(here: np.ndarray, there: np.ndarray, delta: float) -> float:
    """A lower bound on epsilon at 95% from one statistic: thresholds on half the runs, counts on the rest."""
    half = len(here) // 2
    candidates = np.quantile(np.concatenate([here[:half], there[:half]]), np.linspace(0.001, 0.999, 400))

    def bound(p: float, q: float) -> float:
        return math.log((p - delta) / q) if p > delta and q > 0 else -math.inf

    best = max(
        candidates, key=lambda t: bound((there[:half] > t).mean(), max((here[:half] > t).mean(), 1 / half))
    )
    count = half
    true, false = int((there[half:] > best).sum()), int((here[half:] > best).sum())
    low = stats.beta.ppf(0.025, true, count - true + 1) if true else 0.0
    high = stats.beta.ppf(0.975, false + 1, count - false)
    return bound(low, high)


def attack(runs: int, *, claim: float, population=2000, batch=40, steps=200, delta=1e-5) -> float:
    """One far record among zeros: its residual is fed back at every later step, drawn or not.

    The gradient is -C1 in the far world where it is clipped, with a residual that lasts to the end. The
    attacker adds up the updates of all steps.
    """
    rng = np.random.default_rng(0)
    std = formulas.published_noise_std(
        claim, delta, clip_norm=1.0, radius=float(batch), population=population, steps=steps
    )
    memory, total = np.zeros(runs), np.zeros(runs)
    raw = 4.0 * batch * steps  # the gradient of a Huber loss with this slope
    for _ in range(steps):
        drawn = rng.random(runs) < batch / population
        fed = np.clip(memory, -1, 1)
        update = drawn / batch + fed
        total += update
        memory += drawn * raw / batch - update
    noise = std * math.sqrt(steps)
    return certified_epsilon(rng.normal(0, noise, runs), total + rng.normal(0, noise, runs), delta)


@pytest.mark.parametrize(("runs", "least"), [(20_000, 3), pytest.param(200_000, 4, marks=pytest.mark.slow)])
def test_a_simple_attack_certifies_more_than_the_theorem_claims(runs, least):
    assert attack(runs, claim=2.0) > least
