"""A journal put back from an older copy: the index comes again, and only the same question gets its noise."""

import pytest
import torch

from equipoise.privacy import (
    FullBatch,
    Gaussian,
    JointGaussian,
    Journal,
    Poisson,
    PrivacyPlan,
    Private,
    Release,
    Secrets,
)
from equipoise.privacy.bounds.bounded import make_bounded
from equipoise.published import PublishedLedger, PublishedPlan, Unproven

SIZE = 4000
FAR = 5 / SIZE**0.5  # five standard deviations of a correlation of independent numbers


def asked(secrets, kind, parameters="p", bound=1.0, value=0.0):
    """The noise, over its standard deviation, that a ledger with an empty journal answers with."""
    if kind == "unproven":
        plan = PublishedPlan([], FullBatch(10, 2), unproven=[Unproven("sum", "batch")])
    else:
        mechanism = Gaussian(1.0)
        if kind == "joint":
            mechanism = JointGaussian(("sum",), [[bound]], lambda n: n.clamp(max=bound)[:, None], (bound,))
        plan = PrivacyPlan([Release("sum", 2.0, mechanism)], FullBatch(10, 2))
    if kind == "hardened":
        plan = plan.hardened()
    ledger = PublishedLedger(plan, journal=Journal(), secrets=secrets)
    draw = ledger.open("batch", parameters)
    raw = {"w": Private(torch.full((SIZE,), value, dtype=torch.float64), draw)}
    if kind == "unproven":
        out = ledger.release_unproven(draw, "sum", raw, bound, hole="a test")["w"]
    else:
        joint = plan["sum"].mechanism.made_for
        out = ledger.release(draw, {"sum": make_bounded(raw, bound, 2 * bound, draw, joint=joint)})
        out = out["sum"]["w"]
    return (out - value) / bound


def correlation(a, b):
    return abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1]))


@pytest.mark.parametrize("kind", ["floating point", "hardened", "joint", "unproven"])
@pytest.mark.parametrize(
    "other",
    [{"parameters": "q"}, {"bound": 0.5}, {"value": 0.25}],
    ids=["other parameters", "another bound", "other sums"],
)
def test_another_question_at_an_index_that_comes_again_has_noise_of_its_own(kind, other):
    secrets = Secrets()
    first = asked(secrets, kind)
    assert float(first.std()) == pytest.approx(1, rel=0.1)
    assert torch.equal(asked(secrets, kind), first)
    assert correlation(asked(secrets, kind, **other), first) < FAR
    public = Secrets(reproducible_seed=1)  # follows the index alone, as its statement's NOT PRIVATE allows
    assert correlation(asked(public, kind, **other), asked(public, kind)) > 0.99


def test_another_question_at_an_index_that_comes_again_has_records_and_secrets_of_its_own():
    secrets = Secrets()
    plan = PrivacyPlan([Release("sum", 1.0, Gaussian(1.0))], Poisson(SIZE / 2, SIZE, 2))

    def drawn(parameters):
        ledger = PublishedLedger(plan, journal=Journal(), secrets=secrets)
        draw = ledger.open("batch", parameters)
        mask = torch.zeros(SIZE)
        mask[ledger.sample(draw, SIZE)] = 1
        return mask, draw.secret

    first, again, other = drawn("p"), drawn("p"), drawn("q")
    assert torch.equal(again[0], first[0])
    assert again[1] == first[1] != other[1]
    assert correlation(other[0], first[0]) < FAR


def test_whole_and_real_bounds_are_one_question():
    """A bound read back from a file may be a whole number no more; its noise was given, so it stays."""
    secrets = Secrets()
    assert torch.equal(asked(secrets, "floating point", bound=1), asked(secrets, "floating point", bound=1.0))
    assert torch.equal(asked(secrets, "unproven", bound=1), asked(secrets, "unproven", bound=1.0))
