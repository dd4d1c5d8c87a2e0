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
from typing import Any, Final

import torch
from torch import Tensor

from equipoise.methods import Context, Method, PublicRecords, find
from equipoise.methods.projected import RandomSubspace
from equipoise.methods.registry import METHODS
from equipoise.privacy import FixedEpochs, FullBatch, Poisson, Sampling
from equipoise.testing.canaries import CanaryLayout, public_records

__all__ = ["AUDITS", "ONE_STEP", "Design", "with_options"]


TABLES: Final = 3
"""Tensors of a canary, where they are clipped one by one."""


@dataclass(frozen=True)
class Design(CanaryLayout):
    """How a method is audited.

    Attributes:
        make: the method, given the number of canaries and `options` by name.
        canaries: per training.
        trainings: per audit.
        width, tables, kind, along: of the canaries, see `CanaryLayout`.
        steps: T.
        rate: q of Poisson sampling; 1 takes every record at every step.
        slots: at rate 1, draws of an epoch that takes every record once; above 1 the canaries of the first
            slot are looked at, by an attacker who knows the assignment.
        options: further arguments of `make`.
        in_turn: the canaries would share what leaves, so each has steps of its own; see `rehearse_in_turn`.
        one_step: what differs from `FULL_BATCH` where every record is there at every step.

    Example:
        >>> design = replace(ONE_STEP["dp-sgd"], options={"clip_rule": "psac"})
        >>> design.make(1, **design.options).clip_rule.kind
        'psac'
    """

    make: Callable[..., Method]
    canaries: int = 50_000
    trainings: int = 2
    steps: int = 20
    rate: float = 0.25
    slots: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    in_turn: bool = False
    one_step: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, count: int) -> Sampling:
        """Of a public population of so many."""
        if self.slots > 1:
            return FixedEpochs(count // self.slots, count, self.steps, same_slots=True)
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


def _made(name: str, /, *, public: int | None = None, **settings: Any) -> Callable[..., Method]:
    """A method with these settings, or with others.

    Args:
        name: of the method.
        public: the width of its public records, which span the canaries' first parameters; None without any.
        settings: as `Method.from_config` takes them.
    """

    def make(m: int, **options: Any) -> Method:
        records = None if public is None else PublicRecords(public_records(m, public))
        made: Method = find(name).from_config({"name": name, **settings, **options}, records)
        return made

    return make


def _projected(name: str, public: int | None = None) -> Callable[..., Method]:
    """A method that projects on as many columns as there are canaries, found once."""
    source = {"source.refresh_every": 100}
    return lambda m, **options: _made(
        name, public=public, clip_norm=1.0, **source, **{"source.dimension": m}
    )(m, **options)


def _entries(context: Context) -> Tensor:
    """The entries of the parameters, [P, P]."""
    return torch.eye(sum(value.numel() for value in context.params.values()))


def _drawn_columns(context: Context) -> Tensor:
    """The columns of the first random subspace, [K, P]: the seed that they come from is public."""
    source = RandomSubspace(dimension=sum(value.numel() for value in context.params.values()) // 2)
    (columns,) = source.build(context, source.refresh(context, 0)).subspace.columns()
    return next(iter(columns.values())).flatten(1)


MANY_SMALL: Final[Mapping[str, Any]] = {
    "canaries": 400, "trainings": 100, "steps": 5, "one_step": {"canaries": 400, "trainings": 100},
}  # fmt: skip
"""Methods of public directions: a canary takes a column of its own, and M columns have M times M numbers."""

TURNING: Final[Mapping[str, Any]] = {"kind": "turning", "steps": 2}
"""Anchored methods: their first coupled sum is at the second step, against where the rows had not moved."""

FULL_BATCH: Final[Mapping[str, Any]] = {"rate": 1.0, "canaries": 200_000, "trainings": 1, "steps": 1}
"""Every record in one step, of so many canaries."""

_SPECIAL: Final[Mapping[str, Design]] = {
    "dp-sgd": Design(_made("dp-sgd", clip_norm=1.0), canaries=200_000, trainings=6),
    # Records in four groups, each taken whole in its turn. Two epochs, so that a record of the first slot
    # meets noise with all of its history, and its parts reach every later step.
    "dp-mf": Design(
        _made("dp-mf", clip_norm=1.0),
        options={"bands": 4},
        trainings=4,
        one_step={"slots": 4, "steps": 8},
    ),
    # Of draws at random, so few experiments would certify nothing.
    "dp-zo": Design(
        _made("dp-zo", clip_norm=1.0),
        canaries=2000,
        trainings=1,
        steps=2,
        rate=1.0,
        in_turn=True,
        one_step={"canaries": 16_000},
    ),
    "dp-svrg": Design(_made("dp-svrg", clip_norm=1.0), kind="oscillating", one_step=TURNING),
    "dp-c4": Design(_made("dp-c4", clip_norm=1.0), kind="oscillating", one_step=TURNING),
    "dp-c4-plus": Design(_made("dp-c4-plus", clip_norm=1.0), kind="oscillating", one_step=TURNING),
    "dice-sgd": Design(_made("dice-sgd", clip_norm=1.0), trainings=4),
    "pcdp-sgd": Design(_projected("pcdp-sgd", 1), **MANY_SMALL),
    "biased-gep": Design(_projected("biased-gep", 1), **MANY_SMALL),
    "gep": Design(_projected("gep", 2), **MANY_SMALL, width=2),
    "pdp": Design(_projected("pdp", 1), **MANY_SMALL),
    "rpdp": Design(_projected("rpdp"), **MANY_SMALL, width=2, along=_drawn_columns),
    # a canary of four coordinates is dropped whole once in 123 steps, one of six once in 1372
    # Scales, centres and filters begin with the second step.
    **{
        name: Design(_made(name, clip_norm=1.0), one_step={"steps": 3})
        for name in ("fitted-rate", "scale-then-privatise", "adaclip", "dp-adam-bc", "disk", "doppler")
    },
    # A canary is an input of one layer, with an entry of the second moment for itself. From the second step
    # on its row is whitened by what all canaries left, and the canaries would see each other.
    "joint-whitening": replace(
        Design(_made("joint-whitening", clip_norm=1.0), **MANY_SMALL, along=_entries), steps=1
    ),
    "rsdp": Design(
        _made("rsdp", clip_norm=1.0),
        canaries=1500,
        trainings=25,
        width=4,
        steps=5,
        one_step={"width": 6, "canaries": 4000, "trainings": 10},
    ),
    "dc-dpsgd": Design(_made("dc-dpsgd", clip_norm=1.0), trainings=4),
    "adaptive-rms": Design(_made("adaptive-rms", clip_norm=1.0), trainings=4),
    "public-only": Design(_made("public-only", public=1), canaries=2000),
    "public-warm-start": Design(
        _made("public-warm-start", public=1, warm_steps=2),
        canaries=20_000,
        trainings=4,
        one_step={"steps": 3},  # two public ones first
    ),
}
"""Methods that are audited with other sizes, records or settings than the usual ones."""

AUDITS: Final[Mapping[str, Design]] = {
    name: _SPECIAL.get(name) or Design(_made(name, clip_norm=1.0)) for name in METHODS
}
"""A design for every method of `METHODS`."""

ONE_STEP: Final[Mapping[str, Design]] = {
    name: replace(design, **{**FULL_BATCH, **design.one_step}) for name, design in AUDITS.items()
}
"""The same methods where the law of the statistic is known: every record at every one of a few steps."""
