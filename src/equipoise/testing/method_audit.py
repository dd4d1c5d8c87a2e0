"""Audits of methods: a certified lower bound and the claimed epsilon.

Every method runs, with its default settings or with others, in trainings of canaries (`rehearsal`) calibrated
to the claimed epsilon. The statistic is the log-likelihood ratio of all noised releases; a method that
releases nothing with noise is judged by whether a canary's parameters moved. Where records are sampled, half
of the canaries choose the threshold and the other half certify, against all of the plan's trade-off if the
plan is proven; where all are there at every step, the ratio is normal and its law is fitted (`bounds`). Under
replace-one a canary's neighbour is its opposite (`rehearsal`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from equipoise.audit.bounds import Certificate, certify_gaussian, certify_plan, certify_thresholds, spent_by
from equipoise.audit.replay import RecordingLedger
from equipoise.methods import Method
from equipoise.privacy import RECORD, Budget, PrivacyPlan, Unit
from equipoise.testing.designs import AUDITS, ONE_STEP, Design, with_options
from equipoise.testing.rehearsal import CanaryTraining, rehearse, rehearse_in_turn

__all__ = ["Audit", "audit_method", "find_design"]


@dataclass(frozen=True)
class Audit:
    """A certified lower bound on epsilon, and the claimed upper one.

    Attributes:
        method: by its name in the table.
        requested: epsilon that the noise was calibrated to.
        claimed: upper bound of the plan at `delta`; None where nothing is claimed.
        delta: of the claim.
        relation: of the claim, and of the neighbours that were told apart.
        unit: of the claim: what the neighbours differ by.
        certificates: one per seed.
        confidence: probability that *all* certificates are true.
    """

    method: str
    requested: float
    claimed: float | None
    delta: float
    relation: str
    certificates: tuple[Certificate, ...]
    confidence: float
    unit: Unit = RECORD

    @property
    def certified(self) -> float:
        return max(found.epsilon for found in self.certificates)

    @property
    def within_request(self) -> bool:
        """Whether the plan claims no more than it was asked for."""
        return self.claimed is None or self.claimed <= self.requested

    @property
    def holds(self) -> bool:
        """Whether the claim is what was asked for, and no certificate contradicts it."""
        return self.within_request and (self.claimed is None or self.certified <= self.claimed)


def audit_method(
    method: str | Design,
    epsilon: float,
    delta: float = 1e-5,
    *,
    one_step: bool = False,
    options: Mapping[str, Any] | None = None,
    relation: str = "add_or_remove_one",
    hardened: bool = False,
    seeds: Sequence[int] = (0,),
    confidence: float = 0.99,
    trainings: int | None = None,
    canaries: int | None = None,
    make_ledger: Callable[..., RecordingLedger] = RecordingLedger,
    unit: Unit = RECORD,
) -> Audit:
    """Audit a method at a claimed (epsilon, delta).

    Args:
        method: a name of `AUDITS`, or how to audit a method of your own.
        epsilon, delta: what the noise is calibrated to.
        one_step: with a name, the design of `ONE_STEP`: every record at every one of a few steps.
        options: further arguments of the method.
        relation: "add_or_remove_one", or "replace_one": each canary against its opposite.
        hardened: noise on a grid of integers, as `PrivateTraining(hardened=True)` makes it.
        seeds: one audit per seed; each gets its share of the error probability.
        confidence: of all certificates together.
        trainings, canaries: other sizes than the design's.
        make_ledger: a kind of `RecordingLedger`; audits of planted bugs give their own.
        unit: of the claim; of users, each canary is one with as many records as the unit has.

    Raises:
        ValueError: an unknown name or relation, or no seeds.
        TypeError: an option that the method does not have.
        LedgerError: `hardened`, and the method's noise has no such form.

    Example:
        >>> found = audit_method("dp-sgd", 2.0, canaries=2000, trainings=1)
        >>> found.holds
        True
    """
    if not seeds:
        raise ValueError("seeds is empty: give at least one")
    design = with_options(find_design(method, one_step=one_step), options or {})
    count = canaries or design.canaries
    together = 1 if design.in_turn else count
    sampling, budget = design.sampling(together * unit.group), Budget(epsilon, delta)
    each = 1 - (1 - confidence) / len(seeds)

    def make() -> Method:
        return design.make(together, **design.options)

    certificates, plan = [], None
    for seed in seeds:
        without, with_record = [], []
        for number in range(trainings or design.trainings):
            training = CanaryTraining(
                make_method=make,
                sampling=sampling,
                budget=budget,
                canaries=together,
                layout=design,
                seed=1_000_000 * seed + number,
                relation=relation,
                hardened=hardened,
                unit=unit,
                knows_deal=design.slots > 1,
            )
            if design.in_turn:
                found = rehearse_in_turn(training, count, make_ledger=make_ledger)
            else:
                found = rehearse(training, make_ledger=make_ledger)
            plan = plan or found.plan
            statistic, present = found.log_ratios, found.present
            if not found.plan.releases:
                # How far a row moved may depend on its place (public records come in an order), and the
                # halves that choose and that certify must be alike.
                order = torch.randperm(count, generator=torch.Generator().manual_seed(number))
                statistic, present = found.moved.double()[order], present[order]
            without.append(statistic[~present])
            with_record.append(statistic[present])
        assert plan is not None
        claimed = _claim(make(), plan, delta)
        if _is_normal(plan, design):
            certify: Callable[..., Certificate] = certify_gaussian
        elif claimed:
            certify = partial(certify_plan, spent=spent_by(plan))
        else:
            certify = certify_thresholds
        samples = (torch.cat(without).numpy(), torch.cat(with_record).numpy())
        certificates.append(certify(*samples, delta=delta, confidence=each))
    assert plan is not None
    made = make()
    return Audit(made.name, epsilon, claimed, delta, relation, tuple(certificates), confidence, unit)


def find_design(method: str | Design, *, one_step: bool = False) -> Design:
    """The design of a name, or the one that was given.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(method, Design):
        return method
    if method not in AUDITS:
        raise ValueError(f"method={method!r} is unknown; audits are written for {', '.join(AUDITS)}")
    return (ONE_STEP if one_step else AUDITS)[method]


def _is_normal(plan: PrivacyPlan, design: Design) -> bool:
    """Whether a canary is in every draw that it may be in, which the attacker knows, with normal noise."""
    samplings = [plan.sampling_of(release.draw) for release in plan.releases]
    rates = [s.sampling_rate if design.slots == 1 else s.turn_rate for s in samplings]
    return bool(rates) and min(rates) >= 1


def _claim(method: Method, plan: PrivacyPlan, delta: float) -> float | None:
    if plan.guarantee != "proven" or method.card.guarantee == "none":
        return None
    return plan.epsilon(delta).value if plan.releases else 0.0
