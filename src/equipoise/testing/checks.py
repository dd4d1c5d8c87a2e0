"""Does a method keep what it claims? For authors of methods, as scikit-learn's `check_estimator`.

Where all records are there at every step the certified epsilon comes close to the claimed one
(`designs.ONE_STEP`). Numbers about all records together (counts, mean squares) share their noise among the
canaries, and the certificate leaves them out. So the scale of every release's noise is also looked at, over a
long training of few canaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise._rounding import plain
from equipoise.audit.replay import RecordingLedger
from equipoise.methods import Method
from equipoise.privacy import RECORD, Budget, Unit
from equipoise.testing.canaries import canary_loss
from equipoise.testing.designs import FULL_BATCH, Design, with_options
from equipoise.testing.method_audit import Audit, audit_method, find_design
from equipoise.testing.rehearsal import InMemoryTraining, whitened

__all__ = ["LIMIT", "Check", "check_method", "check_noise", "noise_scale"]

PROBED_RECORDS, POPULATION = 10, 20_000
"""Canaries of the long training, and its public population."""

LONGEST, NUMBERS = 1500, 1500
"""Its steps, or as many as give so many numbers of every release."""

LIMIT = 6.0
"""Deviations: a sound step is accused once in half a billion checks."""


@dataclass(frozen=True)
class Check:
    """A statistic and its limit.

    Attributes:
        name: of the check.
        statistic: standard score; its size is compared.
        limit: beyond which something is wrong.
    """

    name: str
    statistic: float
    limit: float = LIMIT

    @property
    def passes(self) -> bool:
        """Whether nothing is wrong, as far as this check sees."""
        return abs(self.statistic) <= self.limit


def noise_scale(noise: Tensor, std: float) -> Check:
    """Is the deviation of this noise what it should be?

    Args:
        noise: release minus raw sum, [n].
        std: as planned.

    Example:
        >>> import torch
        >>> rng = torch.Generator().manual_seed(0)
        >>> noise = torch.randn(10_000, generator=rng)
        >>> noise_scale(noise, 1.0).passes, noise_scale(0.8 * noise, 1.0).passes
        (True, False)
    """
    n = noise.numel()
    mean_square = noise.double().square().mean().item() / std**2
    return Check("noise scale", (mean_square - 1) * math.sqrt(n / 2))


def check_method(
    method: Method | str | Design,
    epsilon: float = 2.0,
    delta: float = 1e-5,
    *,
    options: Mapping[str, Any] | None = None,
    relation: str = "add_or_remove_one",
    unit: Unit = RECORD,
    seed: int = 0,
    confidence: float = 0.99,
) -> Audit:
    """See that a method keeps what it claims, by trainings on canaries.

    Its plan must claim no more than the budget, its state must follow from what was released (the attacker
    replays every training), the noise of every release must be as long as booked, and the certified lower
    bound on epsilon must not exceed the claim. A method that passes is not proved to be private.

    Args:
        method: with its settings, to be calibrated; or a name of `ONE_STEP`, or a `Design`, where other
            canaries suit the method.
        epsilon, delta: what the noise is calibrated to.
        options: further arguments, of a name or design.
        relation: of the claim and of the neighbours.
        unit: of the claim: a record, or a user with so many records.
        seed: of canaries and noise.
        confidence: of the certificate.

    Returns:
        The audit, with what was certified and claimed.

    Raises:
        AssertionError: naming what the method does not keep.
        RuntimeError: its state is not a function of what was released.

    Example:
        >>> from dataclasses import replace
        >>> found = check_method(replace(find_design("dp-sgd", one_step=True), canaries=20_000))
        >>> 1.5 < found.certified <= found.claimed <= 2
        True
    """
    if isinstance(method, Method):
        own = method
        method = Design(lambda canaries: own, **FULL_BATCH)
    design = with_options(find_design(method, one_step=True), options or {})
    found = audit_method(
        design, epsilon, delta, relation=relation, unit=unit, seeds=(seed,), confidence=confidence
    )
    if not found.within_request:
        raise AssertionError(f"{found.method} was asked for epsilon {epsilon} and plans {found.claimed:.4g}")
    if not found.holds:
        raise AssertionError(
            f"{found.method} claims epsilon {found.claimed:.4g} at delta {plain(delta)}. With confidence "
            f"{confidence:g} at least {found.certified:.4g} is certified: it leaks more than its plan says"
        )
    if found.claimed:
        for name, check in check_noise(design, Budget(epsilon, delta), seed=seed).items():
            if not check.passes:
                raise AssertionError(
                    f"{found.method} books other noise for {name!r} than it adds: its mean square is "
                    f"{check.statistic:.1f} deviations from the booked one"
                )
    return found


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
