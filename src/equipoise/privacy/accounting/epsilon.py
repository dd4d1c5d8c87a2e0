"""Epsilon of an event, by a valid accountant that is named with the number.

| event | relation | accountant | cross-check |
|---|---|---|---|
| Gaussians without sampling | both | closed form (Gaussian DP) | - |
| Poisson-sampled Gaussians, with or without plain ones | add-or-remove | PLD | RDP |
| the same | replace-one | PLD | none available |
| Gaussians on Poisson samples with a cap, with or without the others | both | PLD | none |
| epochs with balls in bins (`allocation.py`), with or without the others | add-or-remove | PLD | none |
| mixtures of Gaussians (users of several records), with or without the others | add-or-remove | PLD | none |
| Gaussians sampled without replacement, with or without plain ones | replace-one | RDP | none available |
| without replacement | add-or-remove | none exists: an error | |
| the best of a random number of runs of one of the above | where RDP has it | RDP | none available |
| one of several of the above (`Alternatives`) | add-or-remove | that of the largest | as its accountant |

**Convention.** Noise multipliers in events are relative to the sensitivity under the stated relation (see
`PrivacyPlan.event`). A replaced record that moves a sum by 2 under noise z has the event of multiplier z / 2.

**Closed form.** A composition of Gaussians of multipliers z_j is mu-GDP with mu^2 = sum 1/z_j^2, and

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu),

solved in the log domain, where it works for any mu. Source: Balle and Wang 2018; Dong, Roth and Su 2022.

**Privacy loss distributions (PLD)** of Poisson-sampled Gaussians are composed in `loss_distribution.py`.
Every value is an upper bound; the discretisation is made finer until the bound moves by less than 0.03%.

**The noise's tail** ends at 9.49 standard deviations. What that adds to delta stands beside epsilon
(`noise_tail.py`): a run is (epsilon, delta + noise_tail)-DP. Of runs that are chosen from each adds its own.

**Parts.** An event is first read as a multiset of Gaussian parts (`parts_of`), which is what results are
cached by, and what both accountants are fed with.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting
import numpy as np
from absl import logging
from dp_accounting import rdp
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent as _Mixture
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent as _Truncated
from scipy import special, stats

from equipoise import _validate
from equipoise._relations import RELATIONS
from equipoise._roots import crossing
from equipoise.privacy.accounting.allocation import BallsInBinsDpEvent
from equipoise.privacy.accounting.loss_distribution import SampledGaussians, composed_epsilon
from equipoise.privacy.accounting.noise_tail import WITHIN, leaves
from equipoise.privacy.errors import PlanError

_Gaussian = dp_accounting.GaussianDpEvent
_Poisson = dp_accounting.PoissonSampledDpEvent
_Subset = dp_accounting.SampledWithoutReplacementDpEvent

Parts = tuple[tuple[dp_accounting.DpEvent, int], ...]
"""A multiset of Gaussians, plain, sampled or mixed, with how often each is there."""


def parts_of(event: dp_accounting.DpEvent) -> Parts | None:
    """The event as a sorted multiset of Gaussian parts; None if it is not private at all.

    Raises:
        PlanError: for an event outside the table of this file.
    """
    counts: dict[dp_accounting.DpEvent, int] = {}
    if not _collect(event, 1, counts):
        return None
    # One order for one multiset: it is the key of the caches, and sums round by their order.
    return tuple(sorted(counts.items(), key=lambda item: (type(item[0]).__name__, repr(item[0]))))


def costs(event: dp_accounting.DpEvent) -> bool:
    """Whether the event tells anything at all.

    >>> costs(dp_accounting.ComposedDpEvent([])), costs(dp_accounting.GaussianDpEvent(1.0))
    (False, True)
    """
    return _holds_search(event) or parts_of(event) != ()


def _collect(event: dp_accounting.DpEvent, count: int, counts: dict[dp_accounting.DpEvent, int]) -> bool:
    """Add `count` times the event to the parts; False if it is not private at all."""
    if count == 0 or isinstance(event, dp_accounting.NoOpDpEvent):
        return True
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return False
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return _collect(event.event, count * event.count, counts)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return all(_collect(e, count, counts) for e in event.events)
    if isinstance(event, _Gaussian):
        part, z = event, event.noise_multiplier
    elif isinstance(event, (_Poisson, _Subset)):
        # Several Gaussians on one sample are one, of multiplier (z_1^-2 + z_2^-2 + ...)^(-1/2).
        together = parts_of(event.event)
        if together is None:
            return False
        if any(not isinstance(one, _Gaussian) for one, _ in together):
            raise PlanError(f"a sampled event must hold Gaussians, got {event!r}")
        z = _inverse_squares(together) ** -0.5
        part = _Gaussian(z)
        if isinstance(event, _Subset) and event.sample_size < event.source_dataset_size:
            part = _Subset(event.source_dataset_size, event.sample_size, part)
        elif isinstance(event, _Poisson) and event.sampling_probability < 1:
            if event.sampling_probability == 0:
                return True
            part = _Poisson(event.sampling_probability, part)
    elif isinstance(event, BallsInBinsDpEvent):
        part, z = event, event.noise_multiplier
        # With so little noise nothing is amplified, and the ratio of the laws has no float64.
        if event.slots == 1 or not 0.05 < z < math.inf:
            part = _Gaussian(z)
    elif isinstance(event, _Mixture):
        part, z = event, event.standard_deviation
    elif isinstance(event, _Truncated):
        part, z = event, event.noise_multiplier
        if pushed_out(event) == 0:  # never cut
            return _collect(_Poisson(event.sampling_probability, _Gaussian(z)), count, counts)
    else:
        raise PlanError(
            f"no accountant for {event!r}: only Gaussians, plain, sampled (Poisson, with or without a "
            "cap, without replacement) or mixed, and their compositions are accounted for"
        )
    counts[part] = counts.get(part, 0) + count
    return bool(z > 0)  # without noise it is not private


def _multiplier(part: dp_accounting.DpEvent) -> float:
    """The noise over the largest move; what chance does is left out."""
    if isinstance(part, _Mixture):
        return float(part.standard_deviation / max(part.sensitivities))
    if isinstance(part, _Truncated):
        return float(part.noise_multiplier / 2)  # where a record pushes another one out
    return float((part.event if isinstance(part, _Poisson | _Subset) else part).noise_multiplier)


def pushed_out(part: _Truncated) -> float:
    """The probability that a record which is drawn pushes another one out, with all records there."""
    others = part.dataset_size - 1
    return float(stats.binom.sf(part.truncated_batch_size - 1, others, part.sampling_probability))


def _inverse_squares(parts: Parts) -> float:
    """mu^2 of the composition as if nothing were sampled: the sum of z^-2."""
    return sum(count / _multiplier(part) ** 2 for part, count in parts)


_NEIGHBORING = {relation: dp_accounting.NeighboringRelation[relation.upper()] for relation in RELATIONS}


# Orders of Renyi divergence. All give upper bounds: fewer make epsilon looser, more take longer. Integer ones
# are the quick ones for sampled Gaussians; `_rdp` goes on in tenths where the best is small.
_INTEGER_ORDERS = (*range(2, 64), 128, 256, 512, 1024)
# Those for searches, with no finer ones: large epsilons need the small fractional orders.
_SEARCH_ORDERS = (1.25, 1.5, 1.75, 2.5, 3.5, 4.5, *_INTEGER_ORDERS)


@dataclass(frozen=True)
class EpsilonResult:
    """Epsilon and how it was found.

    Attributes:
        value: epsilon, an upper bound.
        delta: the delta that it holds at.
        relation: neighbouring relation.
        accountant: "pld", "gdp" (closed form) or "rdp", or "gdp, amplification ignored".
        interval: width of a cell of the loss distribution (PLD only).
        cross_check: epsilon by RDP where it was asked for and accounts for the event, else None.
        noise_tail: what the end of the noise's tail adds to delta; None where nothing is guaranteed.
    """

    value: float
    delta: float
    relation: str
    accountant: str
    interval: float | None = None
    cross_check: float | None = None
    noise_tail: float | None = None

    def __float__(self) -> float:
        return self.value


def check_relation(relation: str) -> str:
    """`relation` if it is known, else a `ValueError` that lists the choices."""
    _validate.one_of(RELATIONS, relation=relation)
    return relation


def check_delta(delta: float) -> float:
    """`delta` if it lies strictly between 0 and 1."""
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ValueError(
            f"delta must lie strictly between 0 and 1, got {delta!r}; a usual choice is below 1/population"
        )
    return float(delta)


class Alternatives(dp_accounting.ComposedDpEvent):
    """Of these events a record, or a user, meets one: releases over records that are held apart.

    The data are split into parts by random numbers that are secret, independent of each other and of what
    records hold. Each release looks at the records of one part, and at whatever was released before.

    *Proof.* Let a data set have record x more than its neighbour. Fix the side of every record. The releases
    of the parts without x are the same functions of what was released before, in both. So the run is the
    adaptive composition of the releases of x's own part alone, and whoever sees all of it learns no more
    than its event says. The run is a mixture over the sides, in which x's side does not change the others',
    and a divergence of mixtures is at most the largest of their parts. So is epsilon, at every delta. QED

    A replaced record leaves one part and another one enters a part that may be a different one: the events
    compose. So they do for an accountant that does not know this class, whose bound then holds as well.
    """


MOST_ALTERNATIVES = 8
"""A choice: three runs of a journal with records held apart have as many, each of which takes some time.

Of further runs those with equally many releases of each kind are bounded by one (`_fewer`).
"""


def alternatives_of(event: dp_accounting.DpEvent) -> list[dp_accounting.DpEvent]:
    """Events without alternatives, of which a record meets one.

    >>> one, two, both = (dp_accounting.GaussianDpEvent(z) for z in (1.0, 2.0, 3.0))
    >>> len(alternatives_of(dp_accounting.ComposedDpEvent([Alternatives([one, two]), both])))
    2
    >>> len(alternatives_of(dp_accounting.SelfComposedDpEvent(Alternatives([one, two]), 52)))
    53
    """
    return [
        dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(*row) for row in way])
        for way in _ways(event)
    ]


def _ways(event: dp_accounting.DpEvent) -> list[Parts]:
    """The parts of each alternative; equal ones are one."""
    if isinstance(event, Alternatives):
        return list(dict.fromkeys(way for one in event.events for way in _ways(one)))
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        ways = _ways(event.event)
        if len(ways) == 1:
            return [tuple((part, event.count * count) for part, count in ways[0])]
        return _products([ways] * event.count)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return _products([_ways(one) for one in event.events])
    parts = parts_of(event)
    return [((dp_accounting.NonPrivateDpEvent(), 1),) if parts is None else parts]


def _products(of_events: Sequence[list[Parts]]) -> list[Parts]:
    """One way of each event, in every combination."""
    found: tuple[Parts, ...] = ((),)
    # As many as equal events with two sides have.
    for number, ways in enumerate(of_events, 2):
        found = _joined(found, tuple(ways), max(MOST_ALTERNATIVES, number))
    return list(found)


@functools.lru_cache(maxsize=1024)  # a calibration asks for those of the other runs again and again
def _joined(found: tuple[Parts, ...], ways: tuple[Parts, ...], most: int) -> tuple[Parts, ...]:
    sums = [Counter(dict(met)) + Counter(dict(way)) for met, way in itertools.product(found, ways)]
    joined = list(dict.fromkeys(tuple(sorted(one.items(), key=repr)) for one in sums))
    return tuple(joined if len(joined) <= most else _fewer(joined))


def _fewer(ways: list[Parts]) -> list[Parts]:
    """Of those that differ in their noise alone, one with no more than any has.

    Sorted by noise, its parts have the least that stands at their place in one of them. So each of them is
    it with more noise added, and costs no more. The composition of all alternatives costs as much or more.
    """
    least: dict[tuple, dict[dp_accounting.DpEvent, Any]] = {}
    for way in ways:
        noise: dict[dp_accounting.DpEvent, list[float]] = {}
        for part, count in way:
            z = _multiplier(part) if isinstance(part, _Gaussian | _Poisson) else 1.0
            noise.setdefault(_with_noise(part, 1.0), []).extend([z] * count)
        shape = tuple((kind, len(noise[kind])) for kind in sorted(noise, key=repr))
        found = {kind: np.sort(values) for kind, values in noise.items()}
        before = least.setdefault(shape, found)
        least[shape] = {kind: np.minimum(values, before[kind]) for kind, values in found.items()}
    return [
        tuple(
            (_with_noise(kind, float(z)), int(count))
            for kind, values in one.items()
            for z, count in zip(*np.unique(values, return_counts=True), strict=True)
        )
        for one in least.values()
    ]


def _with_noise(part: dp_accounting.DpEvent, z: float) -> dp_accounting.DpEvent:
    """A Gaussian, plain or sampled, of this noise multiplier; other parts as they are."""
    if isinstance(part, _Poisson):
        return _Poisson(part.sampling_probability, _Gaussian(z))
    return _Gaussian(z) if isinstance(part, _Gaussian) else part


# ---- closed form
def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """ln delta(epsilon) of a mu-GDP mechanism, without overflow for any mu."""
    a = float(special.log_ndtr(mu / 2 - epsilon / mu))
    b = epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu))
    if b >= a:  # the difference is below the last digit of its terms
        return -math.inf
    return a + math.log(-math.expm1(b - a))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon >= 0 for which a mu-GDP mechanism is (epsilon, delta)-DP, rounded up."""
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return math.inf
    target = math.log(delta)
    if gaussian_log_delta(0.0, mu) <= target:
        return 0.0
    # The privacy loss is normal with mean mu^2 / 2 and deviation mu; its tail beyond `high` is below delta.
    high = mu * mu / 2 + mu * math.sqrt(-2 * target) + 1.0
    # Of the two sides of the crossing the one where delta is small enough: rounded up, never down.
    _, enough = crossing(
        lambda epsilon: gaussian_log_delta(epsilon, mu) - target, 0.0, high, tolerance=1e-12 * high
    )
    return enough


# ---- the front door
def epsilon(
    event: dp_accounting.DpEvent,
    delta: float,
    relation: str = "add_or_remove_one",
    *,
    cross_check: bool = True,
) -> EpsilonResult:
    """Epsilon of `event` at `delta`.

    Args:
        event: Gaussian events; multipliers relative to the sensitivity under `relation`.
        delta: in (0, 1).
        relation: "add_or_remove_one" or "replace_one".
        cross_check: compute it by RDP too, which takes longer than epsilon itself.

    Raises:
        PlanError: if no valid accountant exists for the event under the relation.

    Example:
        >>> event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(10.0), 100)
        >>> result = epsilon(event, 1e-5)
        >>> result.accountant, round(result.value, 3)
        ('gdp', 4.377)
    """
    delta, relation = check_delta(delta), check_relation(relation)
    if _holds_search(event):
        found = EpsilonResult(_search_epsilon(event, delta, relation), delta, relation, "rdp")
        return replace(found, noise_tail=_search_tail(event, delta))
    if relation != "add_or_remove_one":
        return _epsilon_of(event, delta, relation, cross_check)
    met = [_epsilon_of(one, delta, relation, cross_check) for one in alternatives_of(event)]
    most = max(met, key=float)
    if most.cross_check is not None:
        most = replace(
            most, cross_check=max(most.cross_check, *(one.cross_check or one.value for one in met))
        )
    tails = [one.noise_tail for one in met if one.noise_tail is not None]
    return replace(most, noise_tail=max(tails) if len(tails) == len(met) else None)


def _epsilon_of(
    event: dp_accounting.DpEvent, delta: float, relation: str, cross_check: bool
) -> EpsilonResult:
    """Epsilon of an event whose parts compose."""
    parts = parts_of(event)
    if parts is None:
        return EpsilonResult(math.inf, delta, relation, "none")
    found = replace(_epsilon(parts, delta, relation), noise_tail=noise_tail(parts, delta))
    # dp-accounting has no Renyi divergence of Poisson sampling under replace-one, of mixtures and of samples
    # with a cap.
    kinds = {type(part) for part, _ in parts}
    known = _Poisson in kinds and not kinds & {_Mixture, _Truncated, BallsInBinsDpEvent}
    if cross_check and relation == "add_or_remove_one" and known:
        found = replace(found, cross_check=_rdp(parts, delta, relation))
    return found


def noise_tail(parts: Parts, delta: float) -> float:
    """What the end of the noise's tail adds to delta: beta of `noise_tail.py`.

    Multipliers are relative to the distance of neighbouring sums. Noise on a grid has no end, and is counted
    alike.
    """
    draws = sum(times * getattr(part, "slots", 1) for part, times in parts)
    scaled = delta * math.expm1(min(1.0, 2 * WITHIN * draws))
    return min(1.0, scaled + math.fsum(times * _tail(part) for part, times in parts))


def _search_tail(event: dp_accounting.DpEvent, delta: float) -> float:
    """As `noise_tail`, with a choice among runs: each of the expected number of runs adds its own."""
    if not _holds_search(event):
        return noise_tail(parts_of(event) or (), delta)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return min(1.0, math.fsum(_search_tail(one, delta) for one in event.events))
    times = event.count if isinstance(event, dp_accounting.SelfComposedDpEvent) else event.mean
    return min(1.0, times * _search_tail(event.event, delta))


def _tail(part: dp_accounting.DpEvent) -> float:
    if isinstance(part, _Mixture):
        moves = zip(part.sensitivities, part.sampling_probs, strict=True)
        return math.fsum(p * leaves(c / part.standard_deviation) for c, p in moves if c > 0)
    rate = 1.0
    if isinstance(part, _Poisson | _Truncated):
        rate = part.sampling_probability
    elif isinstance(part, _Subset):
        rate = part.sample_size / part.source_dataset_size
    return rate * leaves(1 / _multiplier(part))


def _events_of(event: dp_accounting.DpEvent) -> list[dp_accounting.DpEvent]:
    """The event and all events that it is made of."""
    inner = list(getattr(event, "events", ())) or [getattr(event, "event", None)]
    return [event, *(e for child in inner if child is not None for e in _events_of(child))]


def _holds_search(event: dp_accounting.DpEvent) -> bool:
    return any(isinstance(e, dp_accounting.dp_event.RepeatAndSelectDpEvent) for e in _events_of(event))


def check_accounted(event: dp_accounting.DpEvent, relation: str) -> None:
    """Refuse an event that `epsilon` has no accountant for, without computing anything.

    Raises:
        PlanError: saying which part has none.
    """
    if _holds_search(event):
        _search_accountant(event, relation)
    elif parts := parts_of(event):
        _check_parts(parts, relation)


def _search_epsilon(event: dp_accounting.DpEvent, delta: float, relation: str) -> float:
    """Epsilon of an event with a choice among runs; the accountant of that choice is RDP."""
    if any(isinstance(e, dp_accounting.NonPrivateDpEvent) for e in _events_of(event)):
        return math.inf
    return float(_search_accountant(event, relation).compose(event).get_epsilon(delta))


class _OfAlternatives(rdp.RdpAccountant):
    """Of alternatives a record meets one: a mixture, whose divergence is at most the largest of its parts'.

    So it is at each order, of a run and of runs that are chosen among.
    """

    def _maybe_compose(self, event: dp_accounting.DpEvent, count: int, do_compose: bool) -> Any:
        if not isinstance(event, Alternatives) or not do_compose:
            return super()._maybe_compose(event, count, do_compose)
        before: np.ndarray = self._rdp  # type: ignore[has-type]
        most = np.zeros_like(before)
        for one in event.events:
            self._rdp = np.zeros_like(before)
            super()._maybe_compose(one, count, do_compose)
            most = np.maximum(most, self._rdp)
        self._rdp = before + most
        return None


def _search_accountant(event: dp_accounting.DpEvent, relation: str) -> rdp.RdpAccountant:
    inside = _events_of(event)
    poisson = any(isinstance(e, dp_accounting.PoissonSampledDpEvent) for e in inside)
    if poisson and relation != "add_or_remove_one":
        raise PlanError(
            "a search over runs with Poisson sampling is accounted for by RDP, which covers it only "
            "under add_or_remove_one; use that relation"
        )
    kind = _OfAlternatives if relation == "add_or_remove_one" else rdp.RdpAccountant
    accountant = kind(_SEARCH_ORDERS, neighboring_relation=_NEIGHBORING[relation])
    if not accountant.supports(event):
        raise PlanError(
            f"no accountant covers a search over these runs under {relation}; without replacement needs "
            "replace_one, and balls in bins have none"
        )
    return accountant


def _check_parts(parts: Parts, relation: str) -> None:
    """Refuse parts that no accountant covers under the relation."""
    kinds = {type(part) for part, _ in parts}
    if _Mixture in kinds and relation != "add_or_remove_one":
        raise PlanError(
            "no accountant covers a user of several sampled records under replace_one; use "
            "relation='add_or_remove_one'"
        )
    if BallsInBinsDpEvent in kinds and relation != "add_or_remove_one":
        raise PlanError(
            "no accountant covers balls in bins under replace_one, where a record and its replacement have "
            "draws of their own; use relation='add_or_remove_one', or Poisson or FixedEpochs"
        )
    if _Subset in kinds:
        if relation != "replace_one":
            raise PlanError(
                "sampling without replacement has no valid accountant under add_or_remove_one (a subset of "
                "fixed size reveals the number of records); use relation='replace_one', or Poisson sampling"
            )
        if kinds & {_Poisson, _Truncated}:
            raise PlanError(
                "no accountant covers Poisson sampling and sampling without replacement in one plan: the "
                "first needs PLD, the second RDP, under replace_one; use one scheme for all draws"
            )


@functools.lru_cache(maxsize=4096)
def _epsilon(parts: Parts, delta: float, relation: str) -> EpsilonResult:
    _check_parts(parts, relation)
    kinds = {type(part) for part, _ in parts}
    mu = math.sqrt(_inverse_squares(parts))
    if kinds <= {_Gaussian}:
        return EpsilonResult(gaussian_epsilon(mu, delta), delta, relation, "gdp")
    if _Subset in kinds:
        return EpsilonResult(_rdp(parts, delta, relation), delta, relation, "rdp")
    # Whoever knows who was drawn meets a plain Gaussian or none. So the cost without amplification is a bound
    # too, and the better one where hardly anything is amplified.
    unamplified = gaussian_epsilon(mu, delta)
    value, interval = _by_loss_distribution(parts, delta, relation)
    if value > unamplified:
        return EpsilonResult(unamplified, delta, relation, "gdp, amplification ignored")
    return EpsilonResult(value, delta, relation, "pld", interval)


_FINENESS = (16, 32, 64, 128)
"""Cells per deviation of a step's loss that are tried; the error falls with the square.

All give upper bounds: it ends where two agree to 3e-4. Without the finer ones some epsilons stay looser.
"""


def _by_loss_distribution(parts: Parts, delta: float, relation: str) -> tuple[float, float]:
    """Epsilon and the width of a cell."""
    # The laws of a replaced record lie at -1 and 1, twice the sensitivity that multipliers are relative to.
    scale, directions = (2.0, ("replace",)) if relation == "replace_one" else (1.0, ("remove", "add"))
    plain = tuple(row for row in parts if isinstance(row[0], _Gaussian))
    # n Gaussians of multiplier z are one of multiplier z / sqrt(n).
    rows = [SampledGaussians(scale * _inverse_squares(plain) ** -0.5, 1.0, 1)] if plain else []
    rows += [
        SampledGaussians(scale * _multiplier(part), part.sampling_probability, count)
        for part, count in parts
        if isinstance(part, _Poisson)
    ]
    rows += [
        SampledGaussians(part.noise_multiplier, 1.0, count, slots=part.slots)
        for part, count in parts
        if isinstance(part, BallsInBinsDpEvent)
    ]
    rows += [_mixture(part, count) for part, count in parts if isinstance(part, _Mixture)]
    rows += [
        SampledGaussians(
            scale * part.noise_multiplier, part.sampling_probability, count, pushed=pushed_out(part)
        )
        for part, count in parts
        if isinstance(part, _Truncated)
    ]
    if any(row.sigma < 1e-3 for row in rows):
        return math.inf, math.inf  # epsilon is in the hundred thousands, whatever is amplified
    found: list[tuple[float, float]] = []
    for fineness in _FINENESS:
        found.append(max(composed_epsilon(rows, delta, direction, fineness) for direction in directions))
        # All are upper bounds: to stop early is safe.
        if len(found) > 1 and abs(found[-2][0] - found[-1][0]) <= 3e-4 * found[-1][0]:
            break
    return min(found)


def _mixture(part: _Mixture, count: int) -> SampledGaussians:
    """A mixture, read as: with some probability it moves, and then by one of these lengths."""
    moved = [(c, p) for c, p in zip(part.sensitivities, part.sampling_probs, strict=True) if c > 0 and p > 0]
    rate = math.fsum(p for _, p in moved)
    lengths, shares = tuple(c for c, _ in moved), tuple(p / rate for _, p in moved)
    return SampledGaussians(part.standard_deviation, rate, count, lengths, shares)


def rdp_epsilon(event: dp_accounting.DpEvent, delta: float, relation: str = "add_or_remove_one") -> float:
    """Epsilon by Renyi differential privacy alone, as many publications state it: looser than `epsilon`.

    Example:
        >>> event = dp_accounting.PoissonSampledDpEvent(256 / 60_000, dp_accounting.GaussianDpEvent(1.0))
        >>> round(rdp_epsilon(dp_accounting.SelfComposedDpEvent(event, 4687), 1e-5), 3)
        1.759
    """
    parts = parts_of(event)
    if any(isinstance(part, BallsInBinsDpEvent) for part, _ in parts or ()):
        raise PlanError("balls in bins have no Renyi divergence here: take Poisson sampling, or `epsilon`")
    return math.inf if parts is None else _rdp(parts, check_delta(delta), check_relation(relation))


@functools.lru_cache(maxsize=4096)
def _rdp(parts: Parts, delta: float, relation: str) -> float:
    """Epsilon by Renyi differential privacy. Any set of orders gives a valid bound.

    Fractional orders of a Poisson-sampled Gaussian are slow to compute, and the bound has one minimum over
    the orders: integers first, then tenths next to the best of them.
    """
    level = logging.get_verbosity()
    # Orders whose series fails to converge are left out with a warning each: a valid, looser bound.
    logging.set_verbosity(logging.ERROR)
    try:
        if any(isinstance(part, _Subset) for part, _ in parts):
            return _rdp_at(parts, delta, relation, None)[0]
        value, best = _rdp_at(parts, delta, relation, _INTEGER_ORDERS)
        if best > 11:
            return value
        tenths = [t / 10 for t in range(max(11, round(10 * best) - 9), round(10 * best) + 10) if t % 10]
        return min(value, _rdp_at(parts, delta, relation, tenths)[0])
    finally:
        logging.set_verbosity(level)


def _rdp_at(parts: Parts, delta: float, relation: str, orders: Sequence[float] | None) -> tuple[float, float]:
    """Epsilon and the best of the orders (None: dp-accounting's own)."""
    accountant = rdp.RdpAccountant(orders, neighboring_relation=_NEIGHBORING[relation])
    for event, count in parts:
        accountant.compose(event, count)
    value, best = accountant.get_epsilon_and_optimal_order(delta)
    return float(value), float(best)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP implies (epsilon, delta)-DP."""
    target = math.log(check_delta(delta))
    # The side where delta is still small enough: the answer is a promise of that epsilon.
    largest, _ = crossing(
        lambda mu: target - gaussian_log_delta(epsilon, mu), 1.0, 1.0, least=1e-12, tolerance=1e-14
    )
    return largest
