"""How each method of the table is audited: canaries that its releases answer to most, and how many.

`AUDITS` samples records as a training does. `ONE_STEP` takes all records at every step, one step where the
method's first holds all of its releases, and as few as hold them otherwise: then a canary's log-likelihood
ratio is normal, since its contribution has the same length in units of the noise whatever was released
before, and a fit of normal laws certifies nearly all of epsilon (`bounds.certify_gaussian`).

Options of a method go to its constructor: `replace(AUDITS["dice-sgd"], options={"variant": Independent()})`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypedDict

from torch import Tensor

from equipoise.audit.canaries import Row, public_records
from equipoise.audit.rehearsal import Directions
from equipoise.methods import (
    DCDPSGD,
    DPC4,
    DPSGD,
    DPSVRG,
    EFSGD,
    GEP,
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
from equipoise.methods.projected.sources import RandomSource
from equipoise.privacy import FullBatch, Poisson, Sampling

__all__ = ["AUDITS", "ONE_STEP", "Design", "with_options"]


TABLES: Final = 3
"""Tensors of a canary, where they are clipped one by one."""


class Sizes(TypedDict):
    """How large an audit is."""

    canaries: int
    trainings: int
    steps: int


@dataclass(frozen=True)
class Design:
    """How a method is audited.

    Attributes:
        make: the method, given the number of canaries and `options` by name.
        canaries: a training.
        trainings: an audit.
        width, tables, kind, along: of the canaries, see `canaries` and `rehearse`.
        steps: T.
        rate: q of Poisson sampling; 1 takes every record at every step.
        options: further arguments of `make`.

    Example:
        >>> design = replace(ONE_STEP["dp-sgd"], options={"clip_rule": "psac"})
        >>> design.make(1, **design.options).clip_rule.name
        'psac'
    """

    make: Callable[..., Method]
    canaries: int = 50_000
    trainings: int = 2
    width: int = 1
    tables: int = 1
    kind: Row = "linear"
    along: Directions | None = None
    steps: int = 20
    rate: float = 0.25
    options: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, count: int) -> Sampling:
        """Of a public population of so many."""
        if self.rate >= 1:
            return FullBatch(count, self.steps)
        return Poisson(self.rate * count, count, self.steps)


def with_options(design: Design, options: Mapping[str, Any]) -> Design:
    """The design of a method with further settings.

    A canary lies in several tables where every tensor is clipped by itself, so that its whole row is as
    long as the bound.
    """
    tables = TABLES if options.get("per_layer") else design.tables
    return replace(design, options={**design.options, **options}, tables=tables)


def _made(kind: Callable[..., Method], **settings: Any) -> Callable[..., Method]:
    """A method with these settings, or with others."""
    return lambda m, **options: kind(**{**settings, **options})


def _of_public(kind: Callable[..., Method], **settings: Any) -> Callable[..., Method]:
    """A method that trains on public records."""
    return lambda m, **options: kind(public_records(m), **{**settings, **options})


def _projected(kind: Callable[..., Method], width: int = 1) -> Callable[..., Method]:
    """A method of public directions, whose public records span the canaries' first parameters."""

    def make(m: int, **options: Any) -> Method:
        settings = {"clip_norm": 1.0, "dimension": m, "refresh_every": 100}
        return kind(public_records(m, width), **{**settings, **options})

    return make


def _random_projection(m: int, **options: Any) -> Method:
    return RandomProjection(**{"clip_norm": 1.0, "dimension": m, "refresh_every": 100, **options})


def _drawn_columns(context: Context) -> Tensor:
    """The columns of the first random subspace, [K, P]: the seed that they come from is public."""
    source = RandomSource("per_tensor", sum(value.numel() for value in context.params.values()) // 2)
    (block,) = source.build(context, source.refresh(context, 0)).subspace.blocks
    (columns,) = block.columns.values()
    return columns.flatten(1)


MANY_SMALL: Final = Sizes(canaries=400, trainings=100, steps=5)
"""Methods of public directions: a canary takes a column of its own, and M columns have M times M numbers."""

AUDITS: Final[Mapping[str, Design]] = {
    DPSGD.name: Design(_made(DPSGD, clip_norm=1.0), canaries=200_000, trainings=6),
    DPSVRG.name: Design(_made(DPSVRG, clip_norm=1.0), kind="oscillating"),
    DPC4.name: Design(_made(DPC4, clip_norm=1.0), kind="oscillating"),
    DPC4Plus.name: Design(_made(DPC4Plus, clip_norm=1.0), kind="oscillating"),
    DiceSGD.name: Design(_made(DiceSGD, clip_norm=1.0), trainings=4),
    ClipSGD.name: Design(_made(ClipSGD, clip_norm=1.0)),
    EFSGD.name: Design(_made(EFSGD, clip_norm=1.0)),
    PCDPSGD.name: Design(_projected(PCDPSGD), **MANY_SMALL),
    BiasedGEP.name: Design(_projected(BiasedGEP), **MANY_SMALL),
    GEP.name: Design(_projected(GEP, 2), **MANY_SMALL, width=2),
    PDPSGD.name: Design(_projected(PDPSGD), **MANY_SMALL),
    RandomProjection.name: Design(_random_projection, **MANY_SMALL, width=2, along=_drawn_columns),
    # a canary of four coordinates is dropped whole once in 123 steps
    RandomSparsification.name: Design(
        _made(RandomSparsification, clip_norm=1.0), canaries=1500, trainings=25, width=4, steps=5
    ),
    DCDPSGD.name: Design(_made(DCDPSGD, clip_norm=1.0), trainings=4),
    AdaptiveRMS.name: Design(_made(AdaptiveRMS, clip_norm=1.0), trainings=4),
    PublicOnly.name: Design(_of_public(PublicOnly), canaries=2000),
    PublicWarmStart.name: Design(_of_public(PublicWarmStart, warm_steps=2), canaries=20_000, trainings=4),
}
"""One line a method of `METHODS`."""

ANCHORED: Final = ("dp-svrg", "dp-c4", "dp-c4-plus")
"""Their first coupled sum is at the second step, against the anchor where the rows had not moved."""


def _full_batch(name: str, design: Design) -> Design:
    """The design with every record at every step."""
    if name in ANCHORED:
        return replace(design, rate=1.0, kind="turning", canaries=200_000, trainings=1, steps=2)
    steps = 3 if name == PublicWarmStart.name else 1  # two public steps
    if design.canaries == MANY_SMALL["canaries"]:
        return replace(design, rate=1.0, steps=steps)
    if name == RandomSparsification.name:  # dropped whole once in 1372
        return replace(design, rate=1.0, width=6, canaries=4000, trainings=10, steps=steps)
    return replace(design, rate=1.0, canaries=200_000, trainings=1, steps=steps)


ONE_STEP: Final[Mapping[str, Design]] = {name: _full_batch(name, line) for name, line in AUDITS.items()}
"""The same methods where the law of the statistic is known: every record at every one of a few steps."""
