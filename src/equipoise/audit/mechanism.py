"""Audits of the methods' table: a certified lower bound beside the claimed epsilon.

Every method runs, with its default settings, in trainings of canaries (`rehearsal`) calibrated to the claimed
epsilon. The statistic is the log-likelihood ratio of all noised releases; a method that releases nothing
with noise is judged by whether a canary's parameters moved. Half of the canaries choose the threshold, the
other half certify (`bounds`). Under replace-one a canary's neighbour is its opposite (`rehearsal`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

import torch
from torch import Tensor

from equipoise.audit.bounds import Certificate, certify_thresholds
from equipoise.audit.canaries import Row, public_records
from equipoise.audit.rehearsal import Directions, rehearse
from equipoise.methods import (
    DCDPSGD,
    DPC4,
    DPSGD,
    DPSVRG,
    EFSGD,
    GEP,
    METHODS,
    PCDPSGD,
    PDPSGD,
    AdaptiveRMS,
    BiasedGEP,
    ClipSGD,
    Context,
    DiceSGD,
    DPC4Plus,
    Method,
    PublicOnly,
    PublicWarmStart,
    RandomProjection,
    RandomSparsification,
)
from equipoise.methods.subspaces import RandomSource
from equipoise.privacy import Budget, Poisson, PrivacyPlan

__all__ = ["AUDITS", "Audit", "Design", "audit_method"]


class Sizes(TypedDict):
    """How large an audit is."""

    canaries: int
    trainings: int
    steps: int


@dataclass(frozen=True)
class Design:
    """How a method is audited.

    Attributes:
        make: the method, given the number of canaries.
        canaries: a training.
        trainings: an audit.
        width, kind, apart, along: of the canaries, see `canaries` and `rehearse`.
        steps: T.
        rate: q of Poisson sampling.
    """

    make: Callable[[int], Method]
    canaries: int = 50_000
    trainings: int = 2
    width: int = 1
    kind: Row = "linear"
    apart: bool = False
    along: Directions | None = None
    steps: int = 20
    rate: float = 0.25


@dataclass(frozen=True)
class Audit:
    """A certified lower bound on epsilon beside the claimed upper one.

    Attributes:
        method: by its name in the table.
        requested: epsilon that the noise was calibrated to.
        claimed: upper bound of the plan at `delta`; None where nothing is claimed.
        delta: of the claim.
        relation: of the claim, and of the neighbours that were told apart.
        certificates: one a seed.
        confidence: probability that *all* certificates are true.
    """

    method: str
    requested: float
    claimed: float | None
    delta: float
    relation: str
    certificates: tuple[Certificate, ...]
    confidence: float

    @property
    def certified(self) -> float:
        """The largest certified epsilon."""
        return max(found.epsilon for found in self.certificates)

    @property
    def within_request(self) -> bool:
        """Whether the plan claims no more than it was asked for."""
        return self.claimed is None or self.claimed <= self.requested

    @property
    def holds(self) -> bool:
        """Whether the claim is what was asked for, and no certificate contradicts it."""
        return self.within_request and (self.claimed is None or self.certified <= self.claimed)


def _projected(kind: Callable[..., Method], width: int = 1) -> Callable[[int], Method]:
    """A method of public directions, whose public records span the canaries' first parameters."""
    return lambda m: kind(public_records(m, width), clip_norm=1.0, dimension=m, refresh_every=100)


def _drawn_columns(context: Context) -> Tensor:
    """The columns of the first random subspace, [K, P]: the seed that they come from is public."""
    source = RandomSource("per_tensor", sum(value.numel() for value in context.params.values()) // 2)
    (block,) = source.build(context, source.refresh(context, 0)).subspace.blocks
    (columns,) = block.columns.values()
    return columns.flatten(1)


MANY_SMALL: Final = Sizes(canaries=400, trainings=100, steps=5)
"""Methods of public directions: a canary takes a column of its own, and M columns have M times M numbers."""

AUDITS: dict[str, Design] = {
    DPSGD.name: Design(lambda m: DPSGD(clip_norm=1.0), canaries=200_000, trainings=6),
    DPSVRG.name: Design(lambda m: DPSVRG(clip_norm=1.0), kind="oscillating"),
    DPC4.name: Design(lambda m: DPC4(clip_norm=1.0), kind="oscillating"),
    DPC4Plus.name: Design(lambda m: DPC4Plus(clip_norm=1.0), kind="oscillating"),
    DiceSGD.name: Design(lambda m: DiceSGD(clip_norm=1.0), trainings=4),
    ClipSGD.name: Design(lambda m: ClipSGD(1.0)),
    EFSGD.name: Design(lambda m: EFSGD(1.0)),
    PCDPSGD.name: Design(_projected(PCDPSGD), **MANY_SMALL),
    BiasedGEP.name: Design(_projected(BiasedGEP), **MANY_SMALL),
    GEP.name: Design(_projected(GEP, 2), **MANY_SMALL, width=2),
    PDPSGD.name: Design(_projected(PDPSGD), **MANY_SMALL),
    RandomProjection.name: Design(
        lambda m: RandomProjection(clip_norm=1.0, dimension=m, refresh_every=100),
        **MANY_SMALL,
        width=2,
        along=_drawn_columns,
    ),
    # a canary of four coordinates is dropped whole once in 123 steps
    RandomSparsification.name: Design(
        lambda m: RandomSparsification(clip_norm=1.0), canaries=1500, trainings=25, width=4, steps=5
    ),
    DCDPSGD.name: Design(lambda m: DCDPSGD(1.0), trainings=4),
    AdaptiveRMS.name: Design(lambda m: AdaptiveRMS(1.0), trainings=4),
    PublicOnly.name: Design(lambda m: PublicOnly(public_records(m)), canaries=2000),
    PublicWarmStart.name: Design(
        lambda m: PublicWarmStart(public_records(m), warm_steps=2), canaries=20_000, trainings=4
    ),
}
"""One line a method of `METHODS`."""


def audit_method(
    name: str,
    epsilon: float,
    delta: float = 1e-5,
    *,
    relation: str = "add_or_remove_one",
    hardened: bool = False,
    seeds: Sequence[int] = (0,),
    confidence: float = 0.99,
    trainings: int | None = None,
    canaries: int | None = None,
) -> Audit:
    """Audit a method of the table at a claimed (epsilon, delta).

    Args:
        name: of `METHODS`.
        epsilon, delta: what the noise is calibrated to.
        relation: "add_or_remove_one", or "replace_one": each canary against its opposite.
        hardened: noise on a grid of integers, as `PrivateTraining(hardened=True)` makes it.
        seeds: one audit a seed; each gets its share of the error probability.
        confidence: of all certificates together.
        trainings, canaries: other sizes than the design's.

    Raises:
        ValueError: an unknown name or relation, or no seeds.
        LedgerError: `hardened`, and the method's noise has no such form.

    Example:
        >>> found = audit_method("dp-sgd", 2.0, canaries=2000, trainings=1)
        >>> found.holds
        True
    """
    if name not in AUDITS or name not in METHODS:
        raise ValueError(f"method={name!r} is unknown; audits are written for {', '.join(AUDITS)}")
    if not seeds:
        raise ValueError("seeds is empty: give at least one")
    design = AUDITS[name]
    count = canaries or design.canaries
    sampling = Poisson(design.rate * count, count, design.steps)
    budget, each = Budget(epsilon, delta), 1 - (1 - confidence) / len(seeds)
    certificates, claimed = [], None
    for seed in seeds:
        without, with_record = [], []
        for training in range(trainings or design.trainings):
            found = rehearse(
                lambda: design.make(count),
                sampling,
                budget,
                canaries=count,
                seed=1_000_000 * seed + training,
                width=design.width,
                kind=design.kind,
                apart=design.apart,
                along=design.along,
                relation=relation,
                hardened=hardened,
            )
            statistic = found.log_ratios if found.plan.releases else found.moved.double()
            without.append(statistic[~found.present])
            with_record.append(statistic[found.present])
            if claimed is None:
                claimed = _claim(name, found.plan, delta)
        certificates.append(
            certify_thresholds(torch.cat(without).numpy(), torch.cat(with_record).numpy(), delta, each)
        )
    return Audit(name, epsilon, claimed, delta, relation, tuple(certificates), confidence)


def _claim(name: str, plan: PrivacyPlan, delta: float) -> float | None:
    if METHODS[name].card.guarantee == "none":
        return None
    return plan.epsilon(delta).value if plan.releases else 0.0
