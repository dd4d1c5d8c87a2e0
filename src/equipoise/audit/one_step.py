"""One step of every method under audit, clean and with bugs: an audit that misses a fifth of the noise is
of little use.

Where all records are there at every step the certified epsilon comes close to the claimed one
(`designs.ONE_STEP`). So it must exceed the claim where noise is 0.8 of what is booked, and where a record's
part is 1.25 times what is booked. Numbers about all records together (counts, mean squares) share their noise
among the canaries, and the certificate leaves them out. So the scale of every release's noise is also looked
at, over a long training of few canaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from equipoise.audit.canaries import canary_loss
from equipoise.audit.designs import Design, with_options
from equipoise.audit.method_audit import Audit, audit_method, find_design
from equipoise.audit.noise_checks import Check, noise_scale
from equipoise.audit.rehearsal import InMemoryTraining, whitened
from equipoise.audit.replay import RecordingLedger
from equipoise.privacy import RECORD, Budget, Draw, Unit
from equipoise.privacy.mechanisms.base import Sums

__all__ = ["Probe", "check_noise", "probe_method"]

PROBED_RECORDS, POPULATION = 10, 20_000
"""Canaries of the long training, and its public population."""

LONGEST, NUMBERS = 1500, 1500
"""Its steps, or as many as give so many numbers of every release."""


class Altered(RecordingLedger):
    """Everything that leaves with other noise, or longer sums, than is booked, whatever the mechanism.

    Attributes:
        noise_by, sums_by: factors.
    """

    noise_by, sums_by = 1.0, 1.0

    def release(self, draw: Draw, sums: Mapping[str, Any]) -> Sums:
        out = super().release(draw, sums)
        for name, tensors in out.items():
            for key, value in tensors.items():
                raw = self.sums[-1][name][key]
                altered = self.sums_by * raw + self.noise_by * (value - raw)
                tensors[key] = altered.to(value.dtype)
                self.transcript[-1][name][key] = tensors[key].clone()
        return out


class Quiet(Altered):
    """All noise at 0.8 of its scale."""

    noise_by = 0.8


class Long(Altered):
    """All sums a quarter longer than booked."""

    sums_by = 1.25


@dataclass(frozen=True)
class Probe:
    """A method's step as it is and with bugs.

    Attributes:
        clean: the audit of the step.
        quiet, long: of the step with 0.8 of the noise, and with sums 1.25 times as long; None where nothing
            leaves with noise, or nothing is claimed.
        noise: release -> check of its noise, clean and at 0.8.
    """

    clean: Audit
    quiet: Audit | None
    long: Audit | None
    noise: Mapping[str, tuple[Check, Check]]

    @property
    def holds(self) -> bool:
        """Nothing is wrong with the step as it is."""
        return self.clean.holds and all(clean.passes for clean, _ in self.noise.values())

    @property
    def finds(self) -> bool:
        """What was planted is seen: either bug by the certificate, and every release's noise by its check."""
        planted = (found for found in (self.quiet, self.long) if found is not None)
        return not any(found.holds for found in planted) and not any(
            quiet.passes for _, quiet in self.noise.values()
        )


def probe_method(
    method: str | Design,
    epsilon: float = 2.0,
    delta: float = 1e-5,
    *,
    options: Mapping[str, Any] | None = None,
    relation: str = "add_or_remove_one",
    seed: int = 0,
    confidence: float = 0.99,
    unit: Unit = RECORD,
) -> Probe:
    """Audit one step of a method, and the same step with bugs.

    Args:
        method: a name of `ONE_STEP`, or how to audit a method of your own (`Design(rate=1.0)`).
        epsilon, delta: what the noise is calibrated to.
        options: further arguments of the method.
        relation: of the claim and of the neighbours.
        seed: of canaries and noise.
        confidence: of each certificate.
        unit: of the claim: a record, or a user with so many records.

    Example:
        >>> from dataclasses import replace
        >>> found = probe_method(replace(find_design("dp-sgd", one_step=True), canaries=20_000))
        >>> found.holds, found.finds
        (True, True)
    """
    design = with_options(find_design(method, one_step=True), options or {})

    def audit(ledger: type[RecordingLedger], trainings: int) -> Audit:
        return audit_method(
            design,
            epsilon,
            delta,
            relation=relation,
            seeds=(seed,),
            confidence=confidence,
            trainings=trainings,
            make_ledger=ledger,
            unit=unit,
        )

    clean = audit(RecordingLedger, design.trainings)
    if not clean.claimed:
        return Probe(clean, None, None, {})
    fewer = max(1, design.trainings // 2)
    budget = Budget(epsilon, delta)
    without, planted = (check_noise(design, budget, ledger, seed=seed) for ledger in (RecordingLedger, Quiet))
    return Probe(
        clean,
        audit(Quiet, fewer),
        audit(Long, fewer),
        {name: (without[name], planted[name]) for name in without},
    )


def check_noise(
    design: Design, budget: Budget, make_ledger: type[RecordingLedger] = RecordingLedger, *, seed: int = 0
) -> dict[str, Check]:
    """Is the noise of every release as long as booked? Over many steps, for numbers that are few per step."""
    # Directions need not be those of a first step: the noise is looked at, not the canaries.
    directions = None if design.along is None else torch.eye(PROBED_RECORDS, PROBED_RECORDS * design.width)
    data = design.records(torch.arange(PROBED_RECORDS), directions)
    training = InMemoryTraining.open(
        design.make(PROBED_RECORDS, **design.options),
        design.model(PROBED_RECORDS),
        canary_loss(design.kind),
        data,
        replace(design, rate=1.0, steps=LONGEST).sampling(POPULATION),
        budget,
        seed=seed,
        learning_rate=POPULATION,
        make_ledger=make_ledger,
    )
    ledger = training.ledger
    numbers = {release.name: 0 for release in training.setup.plan.releases}
    while training.steps.done < LONGEST and min(numbers.values()) < NUMBERS:
        seen = len(ledger.transcript)
        training.run(1)
        for released in ledger.transcript[seen:]:
            for name, tensors in released.items():
                numbers[name] += sum(value.numel() for value in tensors.values())
    noises: dict[str, list[torch.Tensor]] = {name: [] for name in numbers}
    left, raw = (whitened(ledger, sums) for sums in (ledger.transcript, ledger.sums))
    for after, before in zip(left, raw, strict=True):
        for name, tensors in after.items():
            noises[name] += [(value - before[name][key]).flatten() for key, value in tensors.items()]
    return {name: noise_scale(torch.cat(parts), 1.0) for name, parts in noises.items()}
