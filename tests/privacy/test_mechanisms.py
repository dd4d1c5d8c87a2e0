"""The laws of mechanisms, the same for all: a new mechanism is a case here."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from scipy import stats

from equipoise import privacy as ep
from equipoise.audit.replay import RecordingLedger
from equipoise.privacy import MECHANISMS, digest, epsilon, gaussian_epsilon, mark, mechanism_from
from equipoise.privacy.bounds.bounded import make_bounded
from equipoise.privacy.mechanisms.base import NoiseHistory, Past

SIZE = 20_000
DELTA = 1e-5


def dice(scale: float = 1.0) -> ep.JointGaussian:
    def lengths(norms: torch.Tensor) -> torch.Tensor:
        return torch.stack([norms.clamp(max=3.0), norms.clamp(max=1.0)], dim=1)

    b = math.sqrt(2 / 4)
    return ep.JointGaussian(("a", "b"), [[3.0, 0.0], [1.0, b]], lengths, (1.0, 3.0), noise_multiplier=scale)


EPOCHS = ep.FixedEpochs(10, 40, 8, same_slots=True)  # four draws an epoch, two epochs


def geometric_length(steps) -> float:
    """What a record in these of eight steps adds, of columns 1, 1/2, 1/4, ... brought to length 1."""
    columns = [[0.5 ** (t - s) if t >= s else 0.0 for t in range(8)] for s in steps]
    return math.sqrt(0.75 * sum(sum(row) ** 2 for row in zip(*columns, strict=True)))


@dataclass(frozen=True)
class Case:
    """A mechanism of multiplier z, the releases that carry it with their bounds, and worked epsilons.

    Attributes:
        worked: sampling -> epsilon of the whole plan at delta 1e-5, for `make(1.0)`.
        known: noise of multiplier 2 under the seed 1: the first number of each release at draws 0 and 5.
    """

    make: Callable[[float], ep.Mechanism]
    bounds: dict[str, float]
    worked: tuple
    known: tuple[float, ...]

    def plan(self, z: float = 2.0, sampling=EPOCHS) -> ep.PrivacyPlan:
        mechanism = self.make(z)
        return ep.PrivacyPlan([ep.Release(name, 5.0, mechanism) for name in self.bounds], sampling)


def costs(of_epochs, of_whole_batches):
    return tuple(
        (s, gaussian_epsilon(mu, DELTA))
        for s, mu in ((EPOCHS, of_epochs), (ep.FullBatch(40, 8), of_whole_batches))
    )


# Of one Gaussian per draw, multiplier 1: the closed form, and the worked number of DP-SGD.
FRESH = (*costs(2**0.5, 8**0.5), (ep.Poisson(256, 60_000, 4700), 1.571))
CASES = {
    "gaussian": Case(ep.Gaussian, {"a": 1.5}, FRESH, (-0.715003, -1.536175)),
    "grid_gaussian": Case(ep.GridGaussian, {"a": 1.5}, FRESH, (-1.221063, 1.12888)),
    "joint_gaussian": Case(dice, {"a": 3.0, "b": 1.0}, FRESH, (-1.430005, -0.120177, -3.072349, 0.988604)),
    # Two bands, and the draws of a record are four apart: what fresh noise costs.
    "banded_gaussian": Case(
        partial(ep.BandedGaussian, (1.0, 0.5)), {"a": 1.5}, FRESH[:1], (-0.799397, -4.027673)
    ),
    # Its draws overlap: the length of the sum of a record's columns of the dense strategy.
    "one_step_gaussian": Case(
        partial(ep.OneStepGaussian, 0.5),
        {"a": 1.5},
        costs(geometric_length([0, 4]), geometric_length(range(8))),
        (-4.786584, -1.303716),
    ),
    # Half the noise from the fifth draw on, which is the second epoch: 1 + 4, and 4 + 4 * 4 of eight draws.
    "staged": Case(
        lambda z: ep.Staged(ep.Gaussian(z), (0, 4), (1.0, 0.5)),
        {"a": 1.5},
        costs(5**0.5, 20**0.5),
        (-0.715003, -0.768087),
    ),
}
assert CASES.keys() == MECHANISMS.keys()
every_mechanism = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def take(ledger, parameters="p", value=0.0, size=SIZE, share=1.0):
    """One draw, released: the same sum for every name of the plan."""
    draw = ledger.open("batch", parameters)
    sums = {}
    for release in ledger.plan.releases:
        bound = CASES[release.mechanism.kind].bounds[release.name] * share
        raw = {"w": ep.Private(torch.full((size,), value, dtype=torch.float64), draw)}
        sums[release.name] = make_bounded(raw, bound, 2 * bound, draw, joint=release.mechanism.made_for)
    return ledger.release(draw, sums)


def whitened_run(ledger, mechanism, case, steps):
    """Whitened noise of some steps, one row per step and release."""
    past: NoiseHistory[Past] = NoiseHistory()
    rows = []
    for ordinal in range(steps):
        earlier = past.before("all", ordinal, mechanism.reach)
        noise = take(ledger, f"p{ordinal}")
        past.add("all", ordinal, (noise, case.bounds), mechanism.reach)
        at = mechanism.at(ordinal)
        rows += [at.whitened(noise, case.bounds, earlier)[name]["w"] for name in case.bounds]
    return torch.stack(rows)


@every_mechanism
def test_whitening_makes_the_noise_white_and_of_scale_one(case):
    white = whitened_run(
        ep.Ledger(case.plan(), secrets=ep.Secrets(reproducible_seed=1)), case.make(2.0), case, 6
    )
    for row in white:
        assert stats.kstest(row.numpy(), "norm").pvalue > 1e-4
    correlations = torch.corrcoef(white) - torch.eye(len(white))
    assert float(correlations.abs().max()) < 5 / SIZE**0.5
    ledger = ep.Ledger(case.plan(2.0 / 1.1), secrets=ep.Secrets(reproducible_seed=1))
    for row in whitened_run(ledger, case.make(2.0), case, 2):
        assert stats.kstest(row.numpy(), "norm").pvalue < 1e-8


@every_mechanism
def test_noise_of_a_key_stays_as_it_is_and_is_as_long_as_it_says(case):
    """A run that an older version began goes on with the noise that it had."""
    ledger = ep.Ledger(case.plan(), secrets=ep.Secrets(reproducible_seed=1))
    taken = [take(ledger, f"p{step}", size=3) for step in range(6)]
    found = [float(taken[step][name]["w"][0]) for step in (0, 5) for name in case.bounds]
    assert found == pytest.approx(case.known, abs=1e-5)
    mechanism, ledger = case.make(2.0), ep.Ledger(case.plan(), secrets=ep.Secrets(reproducible_seed=2))
    for step in range(8 if mechanism.memory else 1):  # noise over steps grows to its full size
        out = take(ledger, f"p{step}")
    for name, bound in case.bounds.items():
        std = mechanism.standard_deviation(name, bound)
        assert float(out[name]["w"].std()) == pytest.approx(std, rel=0.03)


@every_mechanism
def test_the_event_gives_the_worked_epsilons(case):
    for sampling, worked in case.worked:
        assert case.plan(1.0, sampling).epsilon(DELTA).value == pytest.approx(worked, rel=0.005)
    mechanism, once = case.make(2.0), case.make(1.0)
    assert once.scaled(2.0) == mechanism
    assert mechanism.whitened_square(2, 4, 8) == pytest.approx(once.whitened_square(2, 4, 8) / 4)
    # If noise is fresh in every draw: so many times the largest square of one draw, in whatever stage.
    one = max(mechanism.at(ordinal).whitened_square() for ordinal in range(8))
    assert mechanism.whitened_square() == pytest.approx(one)
    for times in () if mechanism.memory else (2, 5):
        assert mechanism.whitened_square(times, 1, 8) == pytest.approx(times * one)
    # A replaced record moves a clipped sum twice as far.
    replaced = ep.PrivacyPlan(case.plan(4.0).releases, EPOCHS, "replace_one").epsilon(DELTA).value
    assert replaced == pytest.approx(case.plan().epsilon(DELTA).value, rel=1e-9)


@every_mechanism
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_a_part_of_a_run_costs_no_more_than_the_whole(case, relation):
    plan = ep.PrivacyPlan(case.plan().releases, EPOCHS, relation)

    def cost(count, epochs=None):
        made = {p: min(p.count, max(0, count - p.first)) for p in plan.patterns()}  # the first so many draws
        event = plan.event(made, None if epochs is None else {"batch": epochs})
        return epsilon(event, DELTA, relation).value

    costs = [cost(count) for count in range(1, 9)]
    assert costs == sorted(costs)
    assert costs[-1] == plan.epsilon(DELTA).value
    # Draws with gaps between them lie in more epochs than their number tells.
    assert cost(2, 1) < cost(2, 2) <= costs[-1] or case.make(1.0).changes  # a stage of one epoch


@every_mechanism
def test_descriptions_round_trip_through_json(case):
    mechanism = case.make(1.7)
    text = json.dumps(mechanism.describe())
    again = mechanism_from(json.loads(text))
    assert again == mechanism
    assert json.dumps(again.describe()) == text
    plan = case.plan(1.7)
    read = ep.PrivacyPlan.from_description(json.loads(json.dumps(plan.describe())))
    assert (read.fingerprint(), read.event()) == (plan.fingerprint(), plan.event())


@every_mechanism
def test_the_same_question_has_the_same_noise_and_another_has_its_own(case):
    secrets, plan = ep.Secrets(), case.plan()
    first, again, *others = (
        take(ep.Ledger(plan, journal=ep.Journal(), secrets=secrets), *question)
        for question in (("p", 0.0), ("p", 0.0), ("q", 0.0), ("p", 1.0), ("p", 0.0, SIZE, 0.5))
    )
    for name in case.bounds:
        assert torch.equal(first[name]["w"], again[name]["w"])
        for other in (
            others if case.bounds.keys() == {"a"} else others[:2]
        ):  # radii of shared noise are the plan's
            pair = torch.stack([first[name]["w"], other[name]["w"]])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / SIZE**0.5


def in_a_checkpoint(history):
    file = io.BytesIO()
    torch.save(mark(history), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@every_mechanism
def test_a_resumed_run_gives_the_same_noise_without_a_charge(case, tmp_path):
    secrets, path, plan = ep.Secrets(tmp_path), tmp_path / "journal", case.plan()
    ledger = ep.Ledger(plan, journal=ep.Journal(path), secrets=secrets)
    take(ledger, "p0")
    position, history = ledger.position, in_a_checkpoint(ledger.history)
    outs = [take(ledger, f"p{step}") for step in (1, 2)]
    spent = ledger.spent(DELTA).value
    again = ep.Ledger(plan, journal=ep.Journal(path), secrets=secrets, position=position, history=history)
    for step, out in zip((1, 2), outs, strict=True):
        repeated = take(again, f"p{step}")
        assert all(torch.equal(repeated[name]["w"], out[name]["w"]) for name in case.bounds)
    assert again.spent(DELTA).value == spent
    assert digest(again.history) == digest(ledger.history)


BANDED = CASES["banded_gaussian"]
over_steps = pytest.mark.parametrize("case", [BANDED, CASES["one_step_gaussian"]], ids=["banded", "one step"])


@over_steps
def test_a_voided_step_starts_the_noise_afresh_and_its_z_is_not_used_again(tmp_path, case):
    secrets, path, plan = ep.Secrets(tmp_path), tmp_path / "journal", case.plan()
    ledger = ep.Ledger(plan, journal=ep.Journal(path), secrets=secrets)
    zero = take(ledger, "p0")["a"]["w"]
    saved = ledger.position, ledger.history
    one = take(ledger, "p1")["a"]["w"]
    again = ep.Ledger(plan, journal=ep.Journal(path), secrets=secrets, position=saved[0], history=saved[1])
    with pytest.raises(ep.ChangedQueryError):
        take(again, "p1", value=1.0)
    new, after = (take(again, p, value=1.0)["a"]["w"] - 1.0 for p in ("p1", "p2"))
    pairs = [(new, zero), (new, one), (after, zero), (after, one)]
    assert max(abs(float(torch.corrcoef(torch.stack(p))[0, 1])) for p in pairs) < 5 / SIZE**0.5
    # its own noise alone: the history is empty
    length = math.hypot(*case.make(2.0).first_coefficients(50))
    assert float(new.std()) == pytest.approx(2.0 * 1.5 * length, rel=0.02)
    assert float(torch.corrcoef(torch.stack([new, after]))[0, 1]) == pytest.approx(
        -0.5 / math.hypot(1, 0.5), abs=0.03
    )
    assert again.spent(DELTA).value <= plan.epsilon(DELTA).value


@over_steps
def test_a_draw_that_is_not_released_starts_the_noise_afresh(case):
    ledger = ep.Ledger(case.plan(), secrets=ep.Secrets(reproducible_seed=3))
    before = take(ledger, "p0")["a"]["w"]
    ledger.open("batch", "skipped")
    after = take(ledger, "p2")["a"]["w"]
    assert abs(float(torch.corrcoef(torch.stack([before, after]))[0, 1])) < 5 / SIZE**0.5


@over_steps
def test_a_ledger_without_its_history_does_not_mix_the_old_noise_in_another_way(tmp_path, case):
    """y - y' would be the raw noise of the step before; so the digest of the history keys the noise."""
    secrets, path, plan = ep.Secrets(tmp_path), tmp_path / "journal", case.plan()
    ledger = ep.Ledger(plan, journal=ep.Journal(path), secrets=secrets)
    take(ledger, "p0")
    position = ledger.position
    one = take(ledger, "p1")["a"]["w"]
    lost = ep.Ledger(plan, journal=ep.Journal(path), secrets=secrets, position=position)
    with pytest.raises(ep.ChangedQueryError):
        take(lost, "p1")
    # Also where the journal was lost with the history, and cannot tell.
    forgetful = ep.Ledger(plan, journal=ep.Journal(), secrets=secrets)
    forgetful.open("batch", "p0")
    other = take(forgetful, "p1")["a"]["w"]
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / SIZE**0.5


def test_what_is_no_mechanism_is_refused():
    with pytest.raises(TypeError, match=r"mechanism=2\.0"):
        ep.Release("a", 1.0, 2.0)
    with pytest.raises(ep.PlanError, match="unknown"):
        mechanism_from({"kind": "laplace", "noise_multiplier": 1.0})
    with pytest.raises(ep.PlanError, match="hardened noise is fresh in every step"):
        BANDED.plan().hardened()
    for case in (BANDED, CASES["one_step_gaussian"]):
        with pytest.raises(ep.PlanError, match="min_separation=1"):
            case.plan(sampling=ep.Poisson(10, 40, 8))
    BANDED.plan(sampling=replace(EPOCHS, same_slots=False))  # nothing to amplify


@pytest.mark.parametrize(
    ("mechanism", "kept"),
    [
        (ep.BandedGaussian((1.0, 0.5, 0.25), 2.0), [2, 3]),
        (ep.OneStepGaussian(0.9, 2.0), [3]),
        (ep.Gaussian(2.0), []),
    ],
)
def test_history_is_kept_as_long_as_it_is_needed(mechanism, kept):
    ledger = RecordingLedger(ep.PrivacyPlan([ep.Release("a", 5.0, mechanism)], EPOCHS))
    for step in range(4):
        take(ledger, f"p{step}", size=3)
    assert [row["ordinal"] for row in ledger.history.get("a", [])] == kept
    held = NoiseHistory({"a": [(ordinal, ordinal) for ordinal in (0, 2, 3, 4)]})
    found = [held.before("a", ordinal, memory) for ordinal, memory in ((5, 2), (5, 9), (6, 1))]
    assert found == [(4, 3), (4, 3, 2), ()]
