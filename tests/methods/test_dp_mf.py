"""Noise over steps as a method: what it plans, that it resumes exactly, and that audits see its bugs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from table import RECORDS, loss, network, parameters, public_batch, records, training

import equipoise as eq
from equipoise.audit.replay import RecordingLedger
from equipoise.methods import (
    GivenCoefficients,
    LeastError,
    PublicRecords,
    PublicSubspace,
    ReleasedSubspace,
)
from equipoise.methods.base import Plan, Setting
from equipoise.privacy import (
    BandedGaussian,
    Budget,
    CyclicPoisson,
    FixedEpochs,
    FullBatch,
    Gaussian,
    LedgerError,
    PlanError,
    Poisson,
    PrivacyPlan,
    TruncatedPoisson,
    Unit,
    gaussian_epsilon,
    optimal_coefficients,
    prefix_error,
    square_root_coefficients,
)
from equipoise.privacy.mechanisms.toeplitz import squared_sensitivity
from equipoise.report import write_report
from equipoise.testing.checks import noise_scale
from equipoise.testing.designs import AUDITS
from equipoise.testing.method_audit import audit_method
from equipoise.testing.rehearsal import CanaryTraining, rehearse, whitened
from reproduction.noise_checks import repeats

BUDGET = Budget(8.0, 1e-5)
POISSON = Poisson(512, 60_000, 2400)


def planned(sampling, method=None, budget=BUDGET):
    return (method or eq.DPMF()).plan(Setting(sampling=sampling, budget=budget)).releases


# ---- what it plans


RATIOS = [(1.0, 1, 1.0), (3.0, 8, 0.87), (8.0, 32, 0.62), (16.0, 64, 0.47)]


@pytest.mark.parametrize(("epsilon", "bands", "ratio"), RATIOS)
def test_bands_and_noise_in_prefix_sums_against_amplified_dp_sgd(epsilon, bands, ratio):
    budget = Budget(epsilon, 1e-5)
    plan, plain = planned(POISSON, budget=budget), planned(POISSON, eq.DPSGD(), budget)
    # One band is DP-SGD, on its own draws.
    assert plan.sampling_of("batch") == (CyclicPoisson(512, 60_000, 2400, bands) if bands > 1 else POISSON)
    mechanism = plan["gradient"].mechanism
    assert mechanism.coefficients == square_root_coefficients(bands)
    error = mechanism.noise_multiplier * prefix_error(mechanism.coefficients, 2400)
    fresh = plain["gradient"].noise_multiplier * prefix_error([1.0], 2400)
    assert error / fresh == pytest.approx(ratio, abs=0.01)


def test_two_bands_at_epsilon_one():
    budget = Budget(1.0, 1e-5)
    two, one = (planned(POISSON, eq.DPMF(bands=bands), budget)["gradient"].mechanism for bands in (2, 1))
    errors = [m.noise_multiplier * prefix_error(m.coefficients, 2400) for m in (two, one)]
    assert errors[0] / errors[1] == pytest.approx(1.01, abs=0.01)


IN_SLOTS = [(6000, 100, 0.43), (1034, 1160, 0.20), (600, 2000, 0.16), (120, 2000, 0.11)]


@pytest.mark.parametrize(("size", "steps", "ratio"), IN_SLOTS)
def test_noise_without_amplification_against_the_same_without_bands(size, steps, ratio):
    sampling = FixedEpochs(size, 60_000, steps)
    slots = sampling.draws_per_epoch
    plan = planned(sampling, eq.DPMF(bands=slots))
    plain = planned(sampling, eq.DPSGD())
    assert plan.sampling_of("batch") == replace(sampling, same_slots=True)
    mechanism = plan["gradient"].mechanism
    assert mechanism.noise_multiplier == pytest.approx(plain["gradient"].noise_multiplier, rel=1e-3)
    errors = [prefix_error(c, steps) for c in (mechanism.coefficients, [1.0])]
    assert errors[0] / errors[1] == pytest.approx(ratio, abs=0.01)


@dataclass(frozen=True)
class Weekdays(Poisson):
    """Draws of a user's own."""


@dataclass(frozen=True)
class Shifts(FixedEpochs):
    """Slots of a user's own, which need not be the same in every epoch."""


@pytest.mark.parametrize("kind", [Weekdays, Shifts])
def test_a_sampling_of_a_users_own_is_never_replaced(kind):
    with pytest.raises(PlanError, match=f"{kind.__name__} .*not the library's own"):
        planned(kind(512, 60_000, 2400))


def test_strategies():
    assert planned(POISSON, eq.DPMF(strategy=LeastError(), bands=8))["gradient"].mechanism.coefficients == (
        optimal_coefficients(8, 2400)
    )
    given = planned(POISSON, eq.DPMF(strategy=GivenCoefficients((2.0, 1.0, 0.5))))
    assert given["gradient"].mechanism.coefficients == (1.0, 0.5, 0.25)
    assert given.sampling_of("batch").bands == 3
    in_groups = planned(CyclicPoisson(512, 60_000, 2400, 12))
    assert len(in_groups["gradient"].mechanism.coefficients) == 12


def test_coefficients_from_a_file_are_kept_and_the_path_is_not(tmp_path):
    path = tmp_path / "coefficients.json"
    path.write_text("[1.0, 0.5, 0.25]")
    method = eq.DPMF.from_config({"name": "dp-mf", "strategy": "given", "strategy.values": str(path)})
    assert method.strategy == GivenCoefficients((1.0, 0.5, 0.25))
    path.unlink()
    assert eq.DPMF.from_config(json.loads(json.dumps(method.config()))) == method


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GivenCoefficients("nowhere.json"), "values='nowhere.json' is no JSON file"),
        (lambda: GivenCoefficients((1.0, "a")), "list of numbers"),
        (lambda: eq.DPMF(strategy=GivenCoefficients((1.0, 0.5)), bands=3), "bands=3 differs from the 2"),
        (lambda: eq.DPMF(bands=0), "bands"),
        (lambda: planned(POISSON, eq.DPMF(noise_multiplier=1.0)), "give bands too"),
        (
            lambda: GivenCoefficients((0.5, 1.0)),
            r"^values=\(0.5, 1.0\) .*Give .* such as \(1.0, 0.5, 0.375\)",
        ),
        (lambda: GivenCoefficients(1.0), r"values=1.0 is no list of numbers; give \(1.0, 0.5, 0.375\)"),
        (lambda: planned(TruncatedPoisson(5, 100, 5), eq.DPMF(bands=2)), "Take Poisson or .*, or bands=1"),
        (lambda: planned(CyclicPoisson(5, 100, 5, 2), eq.DPMF(bands=3)), "overlap"),
    ],
)
def test_what_cannot_be_planned_is_refused(make, message):
    with pytest.raises((ValueError, PlanError), match=message):
        make()


def test_hardened_noise_is_refused_and_one_band_is_the_remedy():
    with pytest.raises(PlanError, match=r"hardened noise is fresh in every step, .* over 3: .*bands=1"):
        training(eq.DPMF(bands=3), hardened=True)
    assert training(eq.DPMF(bands=1), hardened=True).plan["gradient"].mechanism.kind == "grid_gaussian"


SAMPLINGS_OF_USERS = [
    POISSON,
    FixedEpochs(600, 60_000, 200),
    FullBatch(60_000, 20),
    TruncatedPoisson(512, 60_000, 20),
]


@pytest.mark.parametrize("sampling", SAMPLINGS_OF_USERS, ids=lambda sampling: type(sampling).__name__)
def test_remedies_for_users_of_several_records(sampling):
    """Their records drawn by themselves, noise over steps has no proof here; what the error offers has."""

    def of_users(method, rows=None, by=sampling):
        unit = Unit("user", 4, rows)
        return method.plan(Setting(sampling=by, budget=BUDGET, unit=unit)).releases["gradient"].mechanism

    with pytest.raises(PlanError, match=r"Draw users \(rows='mean'.* bands=1|bands=2 with|no accountant"):
        of_users(eq.DPMF(bands=2))
    assert of_users(eq.DPMF(), "mean").noise_multiplier > 0
    by = POISSON if isinstance(sampling, TruncatedPoisson) else sampling  # what that one's error offers
    assert of_users(eq.DPMF(bands=1), by=by) == BandedGaussian(
        (1.0,), of_users(eq.DPSGD(), by=by).noise_multiplier
    )


# ---- what it does


def end_of(method, **options):
    model = network()
    run = training(method, model=model, **options)
    list(run)
    return parameters(model), run


@pytest.mark.parametrize("sampling", [Poisson(20, RECORDS, 8), FixedEpochs(15, RECORDS, 8)])
def test_one_band_is_dp_sgd_bit_for_bit(sampling):
    given = {"sampling": sampling, "budget": None}
    ours, run = end_of(eq.DPMF(clip_norm=0.5, bands=1, noise_multiplier=1.5), **given)
    theirs, plain = end_of(eq.DPSGD(clip_norm=0.5, noise_multiplier=1.5), **given)
    assert torch.equal(ours, theirs)
    assert run.plan.event() == plain.plan.event()


@pytest.mark.parametrize("sampling", [Poisson(20, RECORDS, 12), FixedEpochs(15, RECORDS, 12)])
def test_closed_after_any_step_and_resumed_exactly(sampling, tmp_path):
    """The history of the noise is in the checkpoint: steps after it are the same, bit for bit, and free."""
    method = eq.DPMF(clip_norm=0.5, bands=3)
    whole, reference = end_of(method, sampling=sampling)
    assert reference.plan["gradient"].mechanism.memory == 2
    for kept in (1, 4):
        folder = tmp_path / str(kept)
        first = training(method, sampling=sampling, folder=folder)
        for step in first:
            if step.step == kept:
                first.save_checkpoint()
            if step.step == kept + 4:
                break
        first.close()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        again = eq.PrivateTraining.resume(folder, model, optimizer, loss=loss, data=records(), method=method)
        assert again.steps_done == kept
        list(again)
        assert torch.equal(parameters(model), whole)
        statement = again.finish().statement
        assert statement.epsilon == reference.statement().epsilon
        assert statement.guarantee == "proven"
        assert eq.verify_run(folder).consistent


@pytest.mark.parametrize(
    ("sampling", "scheme"),
    [(Poisson(6, RECORDS, 12), "CyclicPoisson"), (FixedEpochs(15, RECORDS, 12), "FixedEpochs")],
)
def test_people_read_of_the_draws_and_bands_that_were_planned(sampling, scheme, tmp_path):
    run = training(eq.DPMF(clip_norm=0.5, bands=4), sampling=sampling, folder=tmp_path / "run")
    described = run.describe()
    assert described.sampling == scheme
    assert described.expected_batch_size == sampling.expected_size
    words = "correlated over 4 steps by 1, 0.5, 0.375, 0.312"
    assert f"{words} (sums of steps have 0." in " ".join(str(described).split())
    assert words in repr(run)
    list(run)
    statement = run.finish().statement
    assert f"{words}, bound" in " ".join(str(statement).split())
    assert words in write_report(tmp_path / "run").read_text()
    least = training(eq.DPMF(clip_norm=0.5, bands=4, strategy=LeastError()), sampling=sampling)
    assert "correlated over 4 steps by 1, 0.5" in " ".join(str(least.describe()).split())
    assert words not in " ".join(str(least.describe()).split())
    plain = training(eq.DPSGD(clip_norm=0.5))
    assert "correlated" not in str(plain.describe()) + str(plain.statement())
    one = training(eq.DPMF(clip_norm=0.5, bands=1), sampling=sampling)
    assert one.describe().sampling == type(sampling).__name__
    assert "one band: fresh in every step as in dp-sgd" in " ".join(str(one.describe()).split())


def test_whole_batches_cost_the_sensitivity_of_the_run_and_verify(tmp_path):
    method = eq.DPMF(clip_norm=0.5, bands=3)
    _, run = end_of(method, sampling=FullBatch(RECORDS, 12), folder=tmp_path / "run")
    coefficients, z = square_root_coefficients(3), run.plan["gradient"].noise_multiplier
    square = squared_sensitivity(coefficients, 12, 1, 12) / sum(c * c for c in coefficients)
    statement = run.finish().statement
    assert statement.guarantee == "proven"
    assert statement.epsilon == pytest.approx(gaussian_epsilon(square**0.5 / z, 1e-3))
    assert eq.verify_run(tmp_path / "run").consistent


# ---- audits


class Forgetful(RecordingLedger):
    """The history of the noise is not kept: what is white only with it is not."""

    def release(self, draw, sums):
        self._state.history.values.clear()
        return super().release(draw, sums)


class Reversed(RecordingLedger):
    """The noise of the steps before enters in reverse order."""

    def release(self, draw, sums):
        for name, rows in self._state.history.values.items():
            noises = [left for _, left in rows][::-1]
            self._state.history.values[name] = [(o, left) for (o, _), left in zip(rows, noises, strict=True)]
        return super().release(draw, sums)


class SameNoise(RecordingLedger):
    """Fresh noise alone is drawn, of the length of the first step's."""

    def _noised(self, mechanism, sums, streams, over_steps):
        return Gaussian(mechanism.noise_multiplier).noised(sums, streams)


def looked_at(ledger_class, bands=4):
    """The white noise of twelve steps of a wide release: its scale, and whether any is like another."""
    model = torch.nn.Linear(2000, 2, bias=False)
    data = {"input": torch.zeros(40, 2000)}
    made = type("Audited", (eq.PrivateTraining,), {"ledger_class": ledger_class})(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch["input"]).sum(1),
        data=data,
        sampling=FixedEpochs(5, 40, 12),
        method=eq.DPMF(bands=bands, noise_multiplier=1.0),
        run=eq.Run(reproducible=True),
    )
    list(made)
    ledger = made.ledger
    rows = [white["gradient"]["weight"].flatten() for white in whitened(ledger, ledger.transcript)]
    noise = torch.stack(rows)
    return noise_scale(noise.flatten(), 1.0), repeats(noise)


def test_white_noise_passes():
    assert all(check.passes for check in looked_at(RecordingLedger))


@pytest.mark.parametrize("planted", [Forgetful, Reversed, SameNoise])
def test_planted_bugs_are_seen(planted):
    assert not all(check.passes for check in looked_at(planted))


def test_the_audit_stays_below_the_claim_and_finds_a_part_of_it():
    design = replace(AUDITS["dp-mf"], canaries=20_000, trainings=2)
    found = audit_method(design, 4.0, 1e-5, seeds=(0,))
    assert found.certified < found.claimed <= 4.0
    assert found.certified > 1.0


def test_the_log_ratio_is_that_of_the_plan():
    """E[exp(L)] is 1 over absent canaries, and E[exp(-L)] over present ones."""
    found = rehearse(
        CanaryTraining(
            make_method=lambda: eq.DPMF(clip_norm=1.0, bands=4),
            sampling=Poisson(2000, 20_000, 20),
            budget=Budget(2.0, 1e-5),
            canaries=20_000,
            seed=3,
        )
    )
    for chosen, sign in ((~found.present, 1.0), (found.present, -1.0)):
        values = (sign * found.log_ratios[chosen]).exp()
        assert abs(float(values.mean()) - 1) < 5 * float(values.std()) / math.sqrt(len(values))


# ---- what it is not combined with


@pytest.mark.parametrize("method", [eq.DPC4(), eq.DPC4Plus(), eq.methods.DPSVRG()])
def test_methods_with_anchors_refuse_turns_of_records(method):
    """Where they are not whole draws: an anchor of all records needs no turns, and takes none."""
    cyclic = CyclicPoisson(512, 60_000, 2400, bands=8)
    with pytest.raises(
        TypeError, match=r"CyclicPoisson.*TruncatedPoisson.*noise over steps \(dp-mf\).*take Poisson"
    ):
        method.plan(Setting(sampling=cyclic, budget=BUDGET))


@dataclass(frozen=True, kw_only=True)
class CoordinatesOverSteps(eq.PCDPSGD):
    """PCDP-SGD whose coordinates get noise over three steps."""

    name = "coordinates-over-steps"

    def plan(self, setting):
        of_source = partial(self.subspace.releases, setting.sampling)
        return Plan(self.calibrated(setting, partial(BandedGaussian, (1.0, 0.5, 0.3)), others=of_source))


def over_coordinates(source=None):
    public = PublicSubspace(PublicRecords(public_batch()), dimension=4, refresh_every=100)
    return CoordinatesOverSteps(source=source or public, clip_norm=0.5)


@pytest.mark.parametrize(
    "sampling", [FixedEpochs(15, RECORDS, 12, same_slots=True), CyclicPoisson(10, RECORDS, 12, bands=4)]
)
def test_coordinates_of_a_subspace_take_noise_over_steps(sampling, tmp_path):
    """A sum of clipped coordinates is a bounded sum like any other: cost, resuming, statement."""
    method = over_coordinates()
    mine, theirs = planned(sampling, method), planned(sampling, eq.DPMF(clip_norm=0.5, bands=3))
    z = mine["gradient"].noise_multiplier
    assert z == pytest.approx(theirs["gradient"].noise_multiplier, rel=1e-3)
    whole, reference = end_of(method, sampling=sampling)
    folder = tmp_path / "run"
    first = training(method, sampling=sampling, folder=folder)
    for step in first:
        if step.step == 4:
            first.save_checkpoint()
        if step.step == 7:
            break
    first.close()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    again = eq.PrivateTraining.resume(folder, model, optimizer, loss=loss, data=records(), method=method)
    list(again)
    assert torch.equal(parameters(model), whole)
    statement = again.finish().statement
    assert (statement.guarantee, statement.epsilon) == ("proven", reference.statement().epsilon)


def test_noise_does_not_go_on_from_coordinates_to_whole_gradients():
    method = over_coordinates(ReleasedSubspace(dimension=4, history=2, explore_every=2))
    with pytest.raises(LedgerError, match="goes on between releases of the same tensors"):
        end_of(method, sampling=FixedEpochs(15, RECORDS, 12, same_slots=True))


def test_noise_over_steps_is_no_part_of_a_joint_release():
    """DiceSGD's two sums share their noise; one of them with noise of its own would not hide its records."""
    made = eq.DiceSGD(clip_norm=1.0).plan(Setting(sampling=POISSON, budget=BUDGET)).releases
    cyclic = CyclicPoisson(512, 60_000, 2400, bands=2)
    over_steps = BandedGaussian((1.0, 0.5), 1.0)
    for name in ("body", "total"):
        releases = [replace(r, mechanism=over_steps) if r.name == name else r for r in made.releases]
        with pytest.raises(PlanError, match=r"carries noise that \['body', 'total'\] share"):
            PrivacyPlan(releases, cyclic)
