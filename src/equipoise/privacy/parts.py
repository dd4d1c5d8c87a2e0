"""The Gaussian parts of an event as plain data, and the events back from them."""

from __future__ import annotations

from dataclasses import dataclass

import dp_accounting

from equipoise.privacy.errors import PlanError

__all__ = ["Part", "Parts", "events_of", "parts_of"]


@dataclass(frozen=True)
class Part:
    """A kind of Gaussian event ("gaussian", "poisson" or "subset") with its multiplier and sampling."""

    kind: str
    multiplier: float
    rate: float = 1.0
    size: int = 0
    population: int = 0


Parts = tuple[tuple[Part, int], ...]
"""A multiset of parts, with how often each is there."""


def parts_of(event: dp_accounting.DpEvent) -> Parts | None:
    """The event as a sorted multiset of Gaussian parts; None if it is not private at all.

    Raises:
        PlanError: for an event outside the table of `accounting.py`.
    """
    counts: dict[Part, int] = {}
    if not _collect(event, 1, counts):
        return None
    return tuple(sorted(counts.items(), key=lambda item: repr(item[0])))


def _collect(event: dp_accounting.DpEvent, count: int, counts: dict[Part, int]) -> bool:
    def add(part: Part) -> bool:
        counts[part] = counts.get(part, 0) + count
        return True

    if count == 0 or isinstance(event, dp_accounting.NoOpDpEvent):
        return True
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return False
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return _collect(event.event, count * event.count, counts)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return all(_collect(e, count, counts) for e in event.events)
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return event.noise_multiplier > 0 and add(Part("gaussian", event.noise_multiplier))
    if isinstance(
        event, (dp_accounting.PoissonSampledDpEvent, dp_accounting.SampledWithoutReplacementDpEvent)
    ):
        z = _joint_multiplier(event.event)
        if z <= 0:
            return False
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            rate = event.sampling_probability
            if rate == 0:
                return True
            return add(Part("gaussian", z) if rate >= 1 else Part("poisson", z, rate))
        size, population = event.sample_size, event.source_dataset_size
        if size == population:
            return add(Part("gaussian", z))
        return add(Part("subset", z, size / population, size, population))
    raise PlanError(
        f"no accountant for {event!r}: only Gaussians, plain or sampled (Poisson, without replacement), "
        "and their "
        "compositions are accounted for"
    )


def _joint_multiplier(event: dp_accounting.DpEvent) -> float:
    """The multiplier of the Gaussian, or of several on one sample: (z_1^-2 + z_2^-2 + ...)^(-1/2)."""
    counts: dict[Part, int] = {}
    if not _collect(event, 1, counts):
        return 0.0
    if any(part.kind != "gaussian" for part in counts):
        raise PlanError(f"a sampled event must hold Gaussians, got {event!r}")
    return sum(n / part.multiplier**2 for part, n in counts.items()) ** -0.5


def events_of(parts: Parts) -> list[tuple[dp_accounting.DpEvent, int]]:
    """The events that the parts describe, each with its count."""
    out: list[tuple[dp_accounting.DpEvent, int]] = []
    for part, count in parts:
        gaussian = dp_accounting.GaussianDpEvent(part.multiplier)
        if part.kind == "poisson":
            out.append((dp_accounting.PoissonSampledDpEvent(part.rate, gaussian), count))
        elif part.kind == "subset":
            event = dp_accounting.SampledWithoutReplacementDpEvent(part.population, part.size, gaussian)
            out.append((event, count))
        else:
            out.append((gaussian, count))
    return out
