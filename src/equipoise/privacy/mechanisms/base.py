"""A mechanism: how sums of a draw get their noise, what that costs, and how it is undone in an audit.

A release is y = x + n, where x is a bounded sum and n is normal noise of a known covariance. Whitening (the
inverse of the covariance's factor) makes the noise independent and standard. What one record adds to the
whitened release has some largest length s. The release is a Gaussian mechanism of multiplier 1 / s.
Everything that the ledger, the accountant and the audits need follows from that:

| asked by | member |
|---|---|
| ledger | `noised`: the sums with their noise, from streams keyed by the release |
| ledger | `check_sums`: can the noise be carried? `question`: what else must key the noise? |
| ledger | `memory`: how many earlier releases' noise it uses again; `noise_over_steps`, `keeps_noise` |
| accountant | `whitened_square`: s^2, of one release or of a run |
| plan | `check_sampling`: what it asks of the sampling; `shared_by`: the releases that share its noise |
| plan, audits | `reach`: how many later releases a record's part reaches |
| plan, ledger | `changes` and `at`: the mechanism of one draw, where noise changes on the way |
| audits | `whitened` |
| journal, statement | `describe`, and `from_description` as its inverse |

**Noise over steps.** A mechanism with `memory` m may use again the noise of up to m releases before it
(`noise_over_steps`), so the ledger keeps it (`NoiseHistory`), or the key that it is made of, and hands it
over. It does so only while draw follows draw without a gap. After a draw that was opened and not released, a
void draw, or another question at a booked index, the noise starts afresh. What is kept is private state and
goes into the checkpoint. Each has the secret key of its release. The keys' digest is part of the next
release's question, so that no noise is mixed in two ways. Whitened, what one record adds to a release must
reach `reach` further ones at most.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from equipoise import _validate
from equipoise.privacy._torch_side import Bounded, ReleaseStreams, keyed, torch
from equipoise.privacy.errors import LedgerError, PlanError
from equipoise.privacy.sampling import Sampling

Sums = dict[str, dict[str, "torch.Tensor"]]
"""Release name -> tensor name -> tensor."""

Past = tuple[Sums, Mapping[str, float]]
"""Of an earlier draw: sums, and their add-or-remove bounds."""


class Mechanism(ABC):
    """What all mechanisms share. A mechanism is a frozen dataclass of plain values.

    Attributes:
        kind: its name in descriptions.
        arithmetic: "floating_point", or "grid" for exact noise on integers.
        keeps_noise: whether the ledger keeps `noise_over_steps` for later releases, or its key alone.
        noise_multiplier: 1 / s of one participation: the noise over what one record may add.
    """

    kind: ClassVar[str]
    arithmetic: ClassVar[str] = "floating_point"
    keeps_noise: ClassVar[bool] = True
    noise_multiplier: float

    def __post_init__(self) -> None:
        _validate.positive(noise_multiplier=self.noise_multiplier)

    @property
    def shared_by(self) -> tuple[str, ...]:
        """The releases that share its noise and leave together; empty where each has noise of its own."""
        return ()

    @property
    def made_for(self) -> str | None:
        """What its sums must have been made for (`Bounded.joint`); None for any bounded sum."""
        return None

    @property
    def memory(self) -> int:
        """How many earlier releases' noise it uses again."""
        return 0

    @property
    def reach(self) -> float:
        """How many later releases the part that a record adds to one reaches, once whitened."""
        return self.memory

    @property
    def changes(self) -> tuple[int, ...]:
        """The ordinals of the draws from which on its noise is of another scale; none where all are alike."""
        return ()

    def at(self, ordinal: int) -> Mechanism:
        """The mechanism of the draw of this ordinal."""
        return self

    def check_sampling(self, sampling: Sampling) -> None:  # noqa: B027 - most ask for nothing
        """Refuse a sampling for which `whitened_square` would not hold.

        Raises:
            PlanError: saying what the mechanism needs.
        """

    def whitened_square(self, participations: int = 1, separation: int = 1, count: int = 1) -> float:
        """The largest squared length, after whitening, of what one record adds to a run.

        A run that ended early, or whose noise started afresh on the way, must have no more.

        Args:
            participations: how often the record may take part.
            separation: how many draws lie at least between two times, 1 for consecutive draws.
            count: releases in the run.
        """
        return participations / self.noise_multiplier**2

    def standard_deviation(self, name: str, bound: float) -> float:
        """Standard deviation of the noise on the sum of this name whose add-or-remove bound is `bound`."""
        return self.noise_multiplier * bound

    def check_sums(self, sums: Mapping[str, Bounded]) -> None:
        """Refuse sums whose noise their types cannot carry, before anything is charged.

        Raises:
            LedgerError: naming the sum.
        """
        for name, bounded in sums.items():
            std = self.standard_deviation(name, bounded.add_remove)
            require_carried(f"sums[{name!r}]", bounded.value, [std])

    def question(self, past: Sequence[bytes]) -> str | None:
        """What keys the noise, in addition to sums, bounds and all that the draw depends on."""
        if not self.memory:
            return self.made_for
        # A ledger without the keys of before takes other noise then, and never mixes the old in another way.
        return hashlib.sha256(b"".join([(self.made_for or "").encode(), *past])).hexdigest()[:32]

    def noise_over_steps(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, past: Sequence[NoiseOverSteps] = ()
    ) -> Sums:
        """The noise of this release that later ones use again; nothing where each has noise of its own.

        Args:
            sums: as for `noised`.
            streams: of this release.
            past: what the releases just before left, newest first; at most `memory`.
        """
        return {}

    @abstractmethod
    def noised(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, over_steps: Sums | None = None
    ) -> Sums:
        """The sums of one draw with their noise, float32 at least.

        Args:
            sums: of one release, or of all releases in `shared_by`.
            streams: of this release.
            over_steps: what `noise_over_steps` gave for this release.
        """

    def whitened(self, values: Sums, bounds: Mapping[str, float], past: Sequence[Past] = ()) -> Sums:
        """Sums in units of their noise, which is then independent and standard.

        As it stands it is that of independent noise; a mechanism that correlates its noise has its own.

        Args:
            values: of one draw, noised or raw.
            bounds: add-or-remove bounds of the sums.
            past: values and bounds of the draws just before, newest first; at most `memory`.
        """
        out: Sums = {}
        for name, tensors in values.items():
            std = self.standard_deviation(name, bounds[name])
            # in float64: audits look for differences far below the noise
            out[name] = {key: value.double() / std for key, value in tensors.items()}
        return out

    def scaled(self, factor: float) -> Self:
        """The same with `factor` times the noise."""
        return replace(self, noise_multiplier=self.noise_multiplier * factor)  # type: ignore[type-var]

    def on_grid(self) -> Mechanism:
        """The same noise, exact and on a grid of integers.

        Raises:
            PlanError: it has no such form.
        """
        raise PlanError(
            f"hardened noise covers independent releases: {self.kind} noise has no form on a grid of "
            "integers. Take the method's variant with independent noise, or leave hardened out"
        )

    def describe(self) -> dict[str, Any]:
        """Plain values for the journal and the statement, with `kind`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **values}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Self:
        """The mechanism that `describe` wrote."""
        values = dict(description)
        if values.pop("kind") != cls.kind:
            raise PlanError(f"a {cls.kind} mechanism has another kind: {description['kind']!r}")
        return cls(**values)


def history_key(streams: ReleaseStreams, name: str) -> bytes:
    """What tells a release's noise from all other, and keys it where it is made again."""
    return streams.key(f"noise over steps of {name}")


@dataclass(frozen=True)
class NoiseOverSteps:
    """What a release left to later ones.

    Attributes:
        key: `history_key` of the release.
        shapes: of the tensors of each sum, with their types.
        noise: `Mechanism.noise_over_steps` of it, as `Private` tensors, if its mechanism keeps it.
    """

    key: bytes
    shapes: Mapping[str, Mapping[str, str]]
    noise: Sums


Value = TypeVar("Value")


class NoiseHistory(Generic[Value]):
    """What the latest releases of each name left, as far as draw followed draw without a gap.

    Example:
        >>> history = NoiseHistory()
        >>> for ordinal in (0, 1, 3, 4):
        ...     history.add("gradient", ordinal, f"noise {ordinal}", memory=2)
        >>> history.before("gradient", 5, memory=2), history.before("gradient", 6, memory=2)
        (('noise 4', 'noise 3'), ())
    """

    def __init__(self, values: Mapping[str, Sequence[tuple[int, Value]]] | None = None) -> None:
        self.values = {name: [(int(o), value) for o, value in rows] for name, rows in (values or {}).items()}

    def before(self, name: str, ordinal: int, memory: float) -> tuple[Value, ...]:
        """Of the releases just before the draw of this ordinal, newest first; at most `memory`."""
        found: list[Value] = []
        for earlier, value in reversed(self.values.get(name, [])):
            if len(found) == memory or earlier != ordinal - 1 - len(found):
                break
            found.append(value)
        return tuple(found)

    def add(self, name: str, ordinal: int, value: Value, memory: float) -> None:
        """Note what the draw of this ordinal left, for as many draws as the memory is long."""
        if memory:
            # What does not lead up to this draw without a gap is never asked for again.
            rows = self.values.get(name, []) if self.before(name, ordinal, 1) else []
            self.values[name] = [*rows, (ordinal, value)][-int(min(memory, len(rows) + 1)) :]


def require_carried(what: str, value: Mapping[str, torch.Tensor], stds: Sequence[float]) -> None:
    """Refuse standard deviations beyond the range of the types that the named tensors are released in.

    Raises:
        LedgerError: saying which.
    """
    for dtype, tensors in keyed.names_by_released_type(value).items():
        wrong = [std for std in stds if not keyed.carries(dtype, std)]
        if wrong:
            raise LedgerError(
                f"{what}[{tensors[-1]!r}] would get noise of standard deviation {wrong[0]:.3g}, which "
                f"{dtype} cannot carry: the noise would vanish or overflow. Keep the threshold away from the "
                "ends of the type's range (a floor for one that shrinks), or compute in float64. Nothing was "
                "released"
            )
