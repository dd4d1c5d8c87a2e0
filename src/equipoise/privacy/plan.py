"""Releases and plans: what will leave the private side, fixed before training from public constants only.

**Releases of one draw** are one vector-valued Gaussian query. Whitened by its own mechanism, sum j moves by
at most s_j = 1 / z_j when one record enters or leaves. So the event is one Gaussian of multiplier

    z = (s_1^2 + s_2^2 + ...)^(-1/2)

taken on the draw's sampling.

**Under replace-one** every sum may move by `replace_ratio` times its add-or-remove bound, to which the noise
is scaled: z_j becomes z_j / replace_ratio_j. For Poisson sampling the ratio is always taken as 2. There the
distance of either record from no record counts too. A sum that a replaced record moves by its bound once is
moved as far by a record that is there or not. With (z_1, z_2) = (1, 3) and ratios (2, 1) the multiplier (4 +
1/9)^(-1/2) = 0.493 would claim too little there. What is claimed is (4 + 4/9)^(-1/2) = 0.474.

**For users** whose records are drawn by themselves, z stays that of one record, and the sampling's event
covers the group (`unit.py`).

**Noise over steps** (a mechanism with `memory`) costs what fresh noise does where a record's parts in
different draws reach no release in common: where the memory is shorter than the sampling's separation.
Elsewhere its event is one Gaussian for the whole run, of multiplier 1 / s, where s depends on how often a
record takes part and at what separation.

**Records held apart.** A record meets either the draws of releases that are `apart`, or all others. Under
add-or-remove the plan costs the larger of the two (`Alternatives`); under replace-one they compose.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import dp_accounting

from equipoise import _validate
from equipoise._lazy import later
from equipoise.privacy.accounting.epsilon import Alternatives, EpsilonResult, check_relation, epsilon
from equipoise.privacy.by_author import OwnMechanism, OwnSampling
from equipoise.privacy.errors import PlanError
from equipoise.privacy.mechanisms import MECHANISMS, Mechanism, mechanism_from
from equipoise.privacy.sampling import SAMPLINGS, Sampling, sampling_from
from equipoise.privacy.unit import RECORD, Unit, unit_from

if TYPE_CHECKING:
    from equipoise.privacy.ledger.run_record import RunRecord

#: What leaves without a proof is planned, booked and added up there; no room below knows more than the name.
published = later("equipoise.published.record")


class Planned:
    """One kind of quantity that is planned to leave: its draw, and how often."""

    name: str
    count: int | None
    draw: str
    sampling: Sampling | None

    def __post_init__(self) -> None:
        for label, value in (("name", self.name), ("draw", self.draw)):
            if not isinstance(value, str) or not value:
                raise TypeError(f"{label} must be a non-empty string, got {value!r}")
        if self.count is not None:
            _validate.count("the number of releases", count=self.count)


@dataclass(frozen=True)
class Release(Planned):
    """One kind of noised quantity.

    Args:
        name: its name in the ledger and the statement.
        max_bound: largest add-or-remove bound that a release of this name may have.
        mechanism: how it gets its noise. Releases that share noise carry one mechanism that names them all.
        count: number of releases; None takes the steps of its sampling.
        draw: name of the draw; releases with one draw name share its draws and are one joint Gaussian event.
        sampling: sampling of the draw; None takes the plan's.
        replace_ratio: largest ratio of the replace-one bound to the add-or-remove bound: 2 for clipped sums,
            1 for sums of values in [0, U].
        apart: its draws hold only records that are held apart from those of all other draws (`Alternatives`).
    """

    name: str
    max_bound: float
    mechanism: Mechanism
    count: int | None = None
    draw: str = "batch"
    sampling: Sampling | None = None
    replace_ratio: float = 2.0
    apart: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(
                f"mechanism={self.mechanism!r} of release {self.name!r} is no mechanism; give "
                "Gaussian(noise_multiplier), or another one of equipoise.privacy"
            )
        if self.max_bound != math.inf:
            _validate.positive(max_bound=self.max_bound)
        if not 1 <= self.replace_ratio <= 2:
            raise ValueError(
                f"replace_ratio={self.replace_ratio} is outside [1, 2]: replacing a record is removing one "
                "and adding another"
            )

    @property
    def noise_multiplier(self) -> float:
        """The mechanism's: the noise over what one record may add."""
        return self.mechanism.noise_multiplier

    def at(self, ordinal: int) -> Mechanism:
        """How the draw of this ordinal gets its noise."""
        return self.mechanism.at(ordinal)

    def scaled(self, factor: float) -> Release:
        """The release with `factor` times the noise."""
        return replace(self, mechanism=self.mechanism.scaled(factor))


def _check_known(what: str, value: object, *known: type) -> None:
    """Refuse what a description cannot bring back: it would be taken for the library's class of that name.

    Raises:
        PlanError: naming the class.
    """
    if type(value) not in known and not isinstance(value, OwnMechanism | OwnSampling):
        path = f"{type(value).__module__}:{type(value).__qualname__}"
        raise PlanError(
            f"{what} is {path} and not the library's own: whoever verifies the statement computes epsilon "
            "from a description, and would take another class for it. Give one of "
            f"{', '.join(kind.__name__ for kind in known)}; noise and samplings of your own are subclasses "
            "of OwnMechanism and OwnSampling, and the statement then names their author"
        )


@dataclass(frozen=True)
class Pattern:
    """Releases that share a draw, and how many draws do so.

    Attributes:
        draw: name of the draw.
        names: of the releases.
        count: how many draws release them.
        sampling: of the draw.
        first: ordinal of the first draw that may be one of these.
        stop: ordinal of the first one that may not; None where any later draw may.
    """

    draw: str
    names: frozenset[str]
    count: int
    sampling: Sampling = field(compare=False)
    first: int = 0
    stop: int | None = None

    def holds(self, ordinal: int) -> bool:
        """Whether the draw of this ordinal may be one of these."""
        return self.first <= ordinal and (self.stop is None or ordinal < self.stop)


@dataclass(frozen=True)
class PrivacyPlan:
    """All releases of a run, their sampling and the neighbouring relation.

    Args:
        releases: the releases; names are unique.
        sampling: sampling of every draw that does not name its own.
        relation: "add_or_remove_one" or "replace_one".
        unit: whose adding, removing or replacing that is: one record's, or one user's.

    Example:
        >>> from equipoise.privacy import Gaussian, Poisson
        >>> plan = PrivacyPlan([Release("gradient", 1.0, Gaussian(1.0))], Poisson(256, 60_000, 4700))
        >>> round(plan.epsilon(1e-5).value, 3)
        1.571
    """

    releases: Sequence[Release]
    sampling: Sampling
    relation: str = "add_or_remove_one"
    unit: Unit = RECORD

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", tuple(self.releases))
        check_relation(self.relation)
        if type(self) is not PrivacyPlan:
            _check_known("the privacy plan", self, PrivacyPlan, published.PublishedPlan)
        _check_known("unit", self.unit, Unit)
        for one in (self.sampling, *(item.sampling for item in self.planned if item.sampling)):
            if not isinstance(one, Sampling):
                raise TypeError(f"sampling must be one of {', '.join(SAMPLINGS)}, got {type(one).__name__}")
            _check_known("sampling", one, *SAMPLINGS.values())
        names = [item.name for item in self.planned]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"release names must be unique; repeated: {twice}")
        for release in self.releases:
            self._check_mechanism(release)
            if type(release.apart) is not bool or release.apart is not self.is_apart(release.draw):
                raise PlanError(
                    f"release {release.name!r} has apart={release.apart!r}, and another one of draw "
                    f"{release.draw!r} has not: the releases of a draw look at the same records"
                )
        self.patterns()  # raises for inconsistent draws

    def _check_mechanism(self, release: Release) -> None:
        _check_known("a release", release, Release)
        mechanism = release.mechanism
        for one in (mechanism, getattr(mechanism, "mechanism", mechanism)):
            _check_known(f"the mechanism of release {release.name!r}", one, *MECHANISMS.values())
        sampling = self.sampling_of(release.draw)
        mechanism.check_sampling(sampling)
        if self.unit.group > 1:
            self._check_group(release, sampling)
        carrying = {other.name for other in self.releases if other.mechanism == mechanism}
        if mechanism.shared_by and carrying != set(mechanism.shared_by):
            raise PlanError(
                f"release {release.name!r} carries noise that {list(mechanism.shared_by)} share, but in the "
                f"plan {sorted(carrying)} carry it: give it to exactly these releases"
            )
        for name in mechanism.shared_by:
            other = self[name]
            if other.draw != release.draw or self.count(other) != self.count(release):
                raise PlanError(
                    f"releases {release.name!r} and {name!r} share noise: they need the same draw and count"
                )

    def _check_group(self, release: Release, sampling: Sampling) -> None:
        """Refuse what is not accounted for where a user's records are drawn by themselves.

        Raises:
            PlanError: saying what, and the remedy.
        """
        if release.mechanism.memory:
            raise PlanError(
                f"release {release.name!r} has noise over steps, which rests on the draws of a unit being "
                f"apart; with records_per_user={self.unit.records} the records of a user are drawn by "
                "themselves. Draw users (rows='mean'; population and batch size then count users), or "
                "take noise that is fresh in every step (dp-sgd, or dp-mf with bands=1)"
            )
        sampling.event(1.0, 1, self.unit.group)
        if self.relation == "replace_one" and sampling.turn_rate < 1:
            raise PlanError(
                f"records_per_user={self.unit.records}: no accountant covers a user who is replaced where "
                "records are sampled. Take relation='add_or_remove_one', or draw users (rows='mean')"
            )

    @property
    def by_author(self) -> list[OwnMechanism | OwnSampling]:
        """Its noise and samplings that are a user's own, each once."""
        samplings = [self.sampling_of(one.draw) for one in self.planned]
        parts = [*(one.mechanism for one in self.releases), *samplings]
        return list(dict.fromkeys(one for one in parts if isinstance(one, OwnMechanism | OwnSampling)))

    @property
    def planned(self) -> tuple[Planned, ...]:
        """All that is planned to leave."""
        return tuple(self.releases)

    @property
    def guarantee(self) -> str:
        """The best that a run of the plan may claim."""
        return "proven"

    def fitting(self, record: RunRecord) -> RunRecord:
        """The record of a run that begins with this plan, as it must be to take the run's lines in."""
        return record

    def __getitem__(self, name: str) -> Release:
        for release in self.releases:
            if release.name == name:
                return release
        raise PlanError(f"the plan holds no release {name!r}; it holds {[r.name for r in self.releases]}")

    def sampling_of(self, draw: str) -> Sampling:
        """The sampling of the draws of this name."""
        found = {item.sampling for item in self.planned if item.draw == draw}
        if not found:
            raise PlanError(
                f"the plan holds no draw {draw!r}; it holds {sorted({item.draw for item in self.planned})}"
            )
        if len(found) > 1:
            raise PlanError(f"releases of draw {draw!r} name different samplings: {sorted(map(repr, found))}")
        return found.pop() or self.sampling

    @property
    def capacity(self) -> int:
        """Records that each of its draws may hold."""
        return max([(one.sampling or self.sampling).capacity for one in self.planned], default=1)

    @property
    def takes_turns(self) -> bool:
        """Whether records are assigned to some of its draws (`Sampling.takes_turns`), or to a side."""
        return any(self.sampling_of(one.draw).takes_turns or self.is_apart(one.draw) for one in self.planned)

    def is_apart(self, draw: str) -> bool:
        """Whether the draws of this name hold records that are in no others."""
        return any(release.apart for release in self.releases if release.draw == draw)

    def count(self, release: Planned) -> int:
        """The number of releases of this kind."""
        return release.count if release.count is not None else self.sampling_of(release.draw).steps

    def patterns(self) -> tuple[Pattern, ...]:
        """Which releases share a draw, and how often.

        Releases of one draw name with different counts are nested: the rarer ones happen on draws of the
        more frequent. Where noise changes on the way, each stage is a pattern of its own draws.
        """
        out = []
        for draw in dict.fromkeys(release.draw for release in self.releases):
            sampling = self.sampling_of(draw)
            members = [release for release in self.releases if release.draw == draw]
            done = 0
            counts = sorted({self.count(release) for release in members})
            if len(counts) > 1 and sampling.takes_turns:
                raise PlanError(
                    f"releases of draw {draw!r} have the counts {counts}: under {type(sampling).__name__} a "
                    "record meets one draw of each epoch, and which releases it meets must not depend on the "
                    "slot. Give them the same count or draws of their own"
                )
            changes = sorted({c for release in members for c in release.mechanism.changes})
            if changes:
                out += self._stages(draw, counts, changes)
                continue
            # The rarest first: its draws release everything, the next ones all but that, and so on.
            for count in counts:
                names = frozenset(release.name for release in members if self.count(release) >= count)
                out.append(Pattern(draw, names, count - done, sampling))
                done = count
        return tuple(out)

    def _stages(self, draw: str, counts: Sequence[int], changes: Sequence[int]) -> list[Pattern]:
        """The patterns of a draw whose releases' noise changes at these ordinals."""
        sampling, names = self.sampling_of(draw), frozenset(r.name for r in self.releases if r.draw == draw)
        if len(counts) > 1:
            raise PlanError(
                f"releases of draw {draw!r} have the counts {counts} and noise in stages: which of them are "
                "in a stage is not fixed. Give them the same count or draws of their own"
            )
        (count,) = counts
        if changes[-1] >= count:
            raise PlanError(
                f"noise of draw {draw!r} changes at draw {changes[-1]}, and {count} are planned: let the "
                "last stage begin before"
            )
        epoch = sampling.draws_per_epoch if sampling.takes_turns else 1
        within = [change for change in changes if change % epoch]
        if within:
            raise PlanError(
                f"noise of draw {draw!r} changes at draw {within[0]}, within an epoch of {epoch} draws of "
                f"{type(sampling).__name__}: what a record meets in an epoch must not depend on its slot. "
                f"Begin stages at multiples of {epoch}"
            )
        ends = [*changes, count]
        return [
            Pattern(draw, names, stop - first, sampling, first, stop)
            for first, stop in zip([0, *changes], ends, strict=True)
        ]

    def groups(self, names: Iterable[str], ordinal: int = 0) -> list[tuple[Mechanism, tuple[str, ...]]]:
        """These releases by the noise that they share: every mechanism with the releases that carry it.

        Args:
            names: of releases of one draw, or of several where none has noise that changes on the way.
            ordinal: of the draw.
        """
        out: dict[tuple[str, ...], Mechanism] = {}
        for name in sorted(names):
            mechanism = self[name].mechanism.at(ordinal)
            out.setdefault(mechanism.shared_by or (name,), mechanism)
        return [(mechanism, members) for members, mechanism in out.items()]

    def _square(self, mechanism: Mechanism, members: Sequence[str], *run: int) -> float:
        """Squared whitened length of what one record moves, under the plan's relation."""
        ratio = 1.0
        if self.relation == "replace_one":
            sampling = self.sampling_of(self[members[0]].draw)
            # What takes a record's place has a slot, or a group, of its own.
            by_itself = sampling.draws_by_itself and (sampling.turn_rate < 1 or sampling.takes_turns)
            # The records of two users need not be in the same draws: what one adds, the other does not undo.
            apart = by_itself or self.unit.group > 1
            ratio = 2.0 if apart else max(self[name].replace_ratio for name in members)
        return ratio**2 * mechanism.whitened_square(*run)

    def combined_multiplier(self, names: frozenset[str], ordinal: int = 0) -> float:
        """The multiplier of the joint event of one draw, relative to the sensitivity under the relation.

        Infinite where a record's parts in different draws overlap: what they cost follows from the whole run.
        """
        total = 0.0
        for mechanism, members in self.groups(names, ordinal):
            if not self._overlaps(mechanism, members):
                # all that one participation reaches
                total += self._square(mechanism, members, 1, 1, int(mechanism.reach) + 1)
        return total**-0.5 if total else math.inf

    def _overlaps(self, mechanism: Mechanism, members: Sequence[str]) -> bool:
        """Whether what a record adds to two draws may reach a release in common, once whitened."""
        return mechanism.reach >= self.sampling_of(self[members[0]].draw).min_separation

    def event(
        self, counts: Mapping[Pattern, int] | None = None, epochs: Mapping[str, int] | None = None
    ) -> dp_accounting.DpEvent:
        """The event of the whole plan, or of the given numbers of draws for each pattern.

        Args:
            counts: draws by pattern; all that are planned when None.
            epochs: by name of draws that take turns, the epochs of these (`RunRecord.epochs`); as many as
                draws without gaps touch when None.
        """
        by_draw: dict[tuple[str, float], int] = {}
        by_name: dict[str, int] = {}
        for pattern in self.patterns():
            made = pattern.count if counts is None else counts.get(pattern, 0)
            if made > 0:
                for name in pattern.names:
                    by_name[name] = by_name.get(name, 0) + made
                sampling = pattern.sampling
                if sampling.takes_turns and epochs is not None:
                    # As many draws as fill these epochs. Gaps between draws touch more epochs, in a stage as
                    # many as it has, and no more than it has releases.
                    touched = min(epochs[pattern.draw], made, sampling.participations(pattern.count))
                    made = touched * sampling.draws_per_epoch
                # Patterns that differ in noise over steps alone have one multiplier and are one event.
                key = (pattern.draw, self.combined_multiplier(pattern.names, pattern.first))
                by_draw[key] = by_draw.get(key, 0) + made
        events: list[tuple[str, dp_accounting.DpEvent]] = []
        # Noise that is fresh in every draw: the draws compose, each amplified by its sampling.
        for (draw, z), made in by_draw.items():
            if math.isfinite(z):
                events.append((draw, self.sampling_of(draw).event(z, made, self.unit.group)))
        # Parts that overlap: one Gaussian for all releases of a run, by how often a record may take part.
        for mechanism, members in self.groups(by_name):
            if self._overlaps(mechanism, members):
                draw, length = self[members[0]].draw, by_name[members[0]]
                sampling = self.sampling_of(draw)
                times = sampling.participations(length)
                if sampling.takes_turns and epochs is not None:
                    # Gaps between draws can spread few releases over more of the run than their number tells:
                    # up to all of these epochs.
                    times = epochs[draw]
                    length = min(times * sampling.draws_per_epoch, self.count(self[members[0]]))
                square = self._square(mechanism, members, times, sampling.min_separation, length)
                events.append((draw, dp_accounting.GaussianDpEvent(square**-0.5)))
        sides = [[event for draw, event in events if self.is_apart(draw) is side] for side in (False, True)]
        composed = [side[0] if len(side) == 1 else dp_accounting.ComposedDpEvent(side) for side in sides]
        if sides[1] and self.relation == "add_or_remove_one":
            return Alternatives(composed)
        return dp_accounting.ComposedDpEvent(composed) if sides[1] else composed[0]

    @property
    def arithmetic(self) -> str:
        """ "grid" where all noise is exact and on a grid of integers, else "floating_point"."""
        kinds = {release.mechanism.arithmetic for release in self.releases}
        return kinds.pop() if len(kinds) == 1 else "floating_point"

    def scaled(self, factor: float) -> PrivacyPlan:
        """The same plan with so many times its noise."""
        releases = [replace(one, mechanism=one.mechanism.scaled(factor)) for one in self.releases]
        return replace(self, releases=tuple(releases))

    def hardened(self) -> PrivacyPlan:
        """The same plan with exact noise on a grid of integers, which resists floating-point attacks.

        Raises:
            PlanError: for noise that has no such form.
        """
        releases = [replace(release, mechanism=release.mechanism.on_grid()) for release in self.releases]
        return replace(self, releases=tuple(releases))

    def protecting(self, unit: Unit) -> PrivacyPlan:
        """The same releases, accounted for this unit of privacy.

        Raises:
            PlanError: no accountant covers them for it.
        """
        return replace(self, unit=unit)

    def epsilon(self, delta: float) -> EpsilonResult:
        """Epsilon of the whole plan at delta."""
        return epsilon(self.event(), delta, self.relation)

    def describe(self) -> dict[str, Any]:
        """The plan as plain data."""
        rows = []
        for release in self.releases:
            sampling = self.sampling_of(release.draw)
            rows.append(
                {
                    "name": release.name,
                    "mechanism": release.mechanism.describe(),
                    "max_bound": None if math.isinf(release.max_bound) else release.max_bound,
                    "count": self.count(release),
                    "draw": release.draw,
                    "sampling": sampling.describe(),
                    "replace_ratio": release.replace_ratio,
                    **({"apart": True} if release.apart else {}),
                }
            )
        described = {
            "relation": self.relation,
            "sampling": self.sampling.describe(),
            "releases": rows,
            "unproven": [],  # a plan of recipes as published has some
        }
        users = self.unit.describe()
        return described if users is None else described | {"users": users}

    @staticmethod
    def from_description(description: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that `describe` wrote."""
        kind = published.PublishedPlan if description["unproven"] else PrivacyPlan
        return kind(**kind._fields_of(description))

    @classmethod
    def _fields_of(cls, description: Mapping[str, Any]) -> dict[str, Any]:
        releases = []
        for row in description["releases"]:
            fields = dict(row)
            fields["sampling"] = sampling_from(fields["sampling"])
            fields["mechanism"] = mechanism_from(fields["mechanism"])
            fields["max_bound"] = math.inf if fields["max_bound"] is None else fields["max_bound"]
            releases.append(Release(**fields))
        return {
            "releases": releases,
            "sampling": sampling_from(description["sampling"]),
            "relation": description["relation"],
            "unit": unit_from(description.get("users")),
        }

    def fingerprint(self) -> str:
        """SHA-256 of everything that the plan fixes."""
        # Of the description, which has every default filled in: two ways to write a plan have one name.
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
