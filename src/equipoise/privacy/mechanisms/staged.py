"""Another mechanism whose noise changes at steps that are fixed beforehand.

Stage j holds the draws from ordinal `starts[j]` on and has `factors[j]` times the noise. A draw's release is
that of the mechanism `at` its ordinal, so noise, whitening and check are those. The plan takes every stage as
releases of their own (`Pattern.first`, `Pattern.stop`): a run is the composition of its stages, each with its
multiplier and its number of draws, and nothing is averaged. The factors are public constants; what they
follow from must be no result of the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from equipoise import _validate
from equipoise.privacy._torch_side import Bounded, ReleaseStreams
from equipoise.privacy.errors import PlanError
from equipoise.privacy.mechanisms.base import Mechanism, Sums


@final
@dataclass(frozen=True)
class Staged(Mechanism):
    """A mechanism with other noise in every stage of a run.

    Args:
        mechanism: of the first stage; without memory.
        starts: the ordinal of each stage's first draw, 0 for the first, rising.
        factors: of the noise of each stage; only their ratios to the first matter, which is kept as 1.

    Example:
        >>> from equipoise.privacy import Gaussian
        >>> noise = Staged(Gaussian(2.0), starts=(0, 100), factors=(1.0, 0.5))
        >>> noise.at(99).noise_multiplier, noise.at(100).noise_multiplier
        (2.0, 1.0)
    """

    mechanism: Mechanism
    starts: tuple[int, ...]
    factors: tuple[float, ...]
    kind: ClassVar[str] = "staged"

    def __post_init__(self) -> None:
        _validate.instance(Mechanism, "Gaussian(1.0)", mechanism=self.mechanism)
        if self.mechanism.memory or self.mechanism.changes:
            raise PlanError(
                f"{self.mechanism.kind} noise cannot change in stages: it goes over steps, or has stages. "
                "Give a mechanism whose noise is fresh in every step, such as Gaussian(noise_multiplier)"
            )
        starts = tuple(self.starts)
        rising = all(type(start) is int for start in starts) and sorted(set(starts)) == list(starts)
        if not rising or starts[:1] != (0,) or len(starts) != len(self.factors):
            raise ValueError(
                f"starts={starts!r:.80} must be rising whole numbers from 0 on, as many as the "
                f"{len(self.factors)} factors"
            )
        for factor in self.factors:
            _validate.positive(factors=factor)
        object.__setattr__(self, "starts", starts)
        first = float(self.factors[0])
        object.__setattr__(self, "factors", tuple(float(factor) / first for factor in self.factors))

    @property
    def noise_multiplier(self) -> float:  # type: ignore[override]
        """That of the first stage."""
        return self.mechanism.noise_multiplier

    @property
    def arithmetic(self) -> str:  # type: ignore[override]
        return self.mechanism.arithmetic

    @property
    def shared_by(self) -> tuple[str, ...]:
        return self.mechanism.shared_by

    @property
    def made_for(self) -> str | None:
        return self.mechanism.made_for

    @property
    def changes(self) -> tuple[int, ...]:
        return self.starts[1:]

    def at(self, ordinal: int) -> Mechanism:
        return self.mechanism.scaled(self.factors[bisect_right(self.starts, ordinal) - 1])

    def whitened_square(self, participations: int = 1, separation: int = 1, count: int = 1) -> float:
        """As if all participations were in the stage of least noise."""
        square = self.mechanism.whitened_square(participations, separation, count)
        return square / min(self.factors) ** 2

    def noised(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, over_steps: Sums | None = None
    ) -> Sums:
        raise PlanError(f"{self.kind} noise is that of a stage: take the mechanism `at` the draw's ordinal")

    def scaled(self, factor: float) -> Staged:
        return replace(self, mechanism=self.mechanism.scaled(factor))

    def on_grid(self) -> Staged:
        return replace(self, mechanism=self.mechanism.on_grid())

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "noise_multiplier": self.noise_multiplier,
            "mechanism": self.mechanism.describe(),
            "starts": list(self.starts),
            "factors": list(self.factors),
        }

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Staged:
        values = {key: value for key, value in description.items() if key != "noise_multiplier"}
        found = super().from_description(values)
        if description.get("noise_multiplier") != found.noise_multiplier:
            raise PlanError(
                f"noise_multiplier={description.get('noise_multiplier')!r} is not the first stage's, "
                f"{found.noise_multiplier!r}"
            )
        return found
