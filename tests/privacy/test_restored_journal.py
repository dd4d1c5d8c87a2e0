"""A journal put back from an older copy: the index comes again, and only the same question gets its noise."""

import pytest
import torch

from equipoise import privacy as ep
from equipoise.privacy.bounds.bounded import make_bounded
from equipoise.published import PublishedLedger, PublishedPlan, Unproven

SIZE = 4000
FAR = 5 / SIZE**0.5  # five standard deviations of a correlation of independent numbers


def asked(secrets, kind, parameters="p", bound=1.0, value=0.0):
    """The noise, over its standard deviation, that a ledger with an empty journal answers with."""
    if kind == "unproven":
        plan = PublishedPlan([], ep.FullBatch(10, 2), unproven=[Unproven("sum", "batch")])
    else:
        mechanism = ep.Gaussian(1.0)
        if kind == "joint":
            mechanism = ep.JointGaussian(("sum",), [[bound]], lambda n: n.clamp(max=bound)[:, None], (bound,))
        plan = ep.PrivacyPlan([ep.Release("sum", 2.0, mechanism)], ep.FullBatch(10, 2))
    if kind == "hardened":
        plan = plan.hardened()
    ledger = PublishedLedger(plan, journal=ep.Journal(), secrets=secrets)
    draw = ledger.open("batch", parameters)
    raw = {"w": ep.Private(torch.full((SIZE,), value, dtype=torch.float64), draw)}
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
@pytest.mark.parametrize("other", [{"parameters": "q"}, {"bound": 0.5}, {"value": 0.25}], ids=str)
def test_another_question_at_an_index_that_comes_again_has_noise_of_its_own(kind, other):
    secrets = ep.Secrets()
    first = asked(secrets, kind)
    assert float(first.std()) == pytest.approx(1, rel=0.1)
    assert torch.equal(asked(secrets, kind), first)
    if kind != "joint":  # a bound read back from a file may be a whole number no more
        assert torch.equal(asked(secrets, kind, bound=1), first)
    assert correlation(asked(secrets, kind, **other), first) < FAR
    public = ep.Secrets(reproducible_seed=1)  # follows the index alone, as its statement's NOT PRIVATE allows
    assert correlation(asked(public, kind, **other), asked(public, kind)) > 0.99


def test_another_question_at_an_index_that_comes_again_has_records_and_secrets_of_its_own():
    secrets = ep.Secrets()
    plan = ep.PrivacyPlan([ep.Release("sum", 1.0, ep.Gaussian(1.0))], ep.Poisson(SIZE / 2, SIZE, 2))

    def drawn(parameters):
        ledger = PublishedLedger(plan, journal=ep.Journal(), secrets=secrets)
        draw = ledger.open("batch", parameters)
        mask = torch.zeros(SIZE)
        mask[ledger.sample(draw, SIZE)] = 1
        return mask, draw.secret

    first, again, other = drawn("p"), drawn("p"), drawn("q")
    assert torch.equal(again[0], first[0])
    assert again[1] == first[1] != other[1]
    assert correlation(other[0], first[0]) < FAR
