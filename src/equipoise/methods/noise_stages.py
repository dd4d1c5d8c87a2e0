"""Noise that changes over the run, by factors that are fixed before it.

What is spent is that of all steps together, each with its own multiplier. So noise that falls towards the end
costs less noise at the beginning, at the same epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equipoise import _validate
from equipoise.methods.configuration import Noise, Option
from equipoise.privacy import Mechanism, Sampling, Staged


@dataclass(frozen=True)
class NoiseStages(Option):
    """Stages of equal length, each with noise of its own; whole epochs where records take turns.

    Args:
        factors: the noise multipliers of the stages over the first one's, such as (1.0, 0.8, 0.6).
        noise_multiplier: of the first stage; all are calibrated to the budget together when None.

    Example:
        >>> from equipoise.privacy import Gaussian, Poisson
        >>> noise = NoiseStages((1.0, 0.5)).over(Gaussian(2.0), Poisson(10, 100, steps=30))
        >>> noise.at(14).noise_multiplier, noise.at(15).noise_multiplier
        (2.0, 1.0)
    """

    kind: ClassVar[str] = "stages"
    factors: tuple[float, ...] = (1.0,)
    noise_multiplier: Noise = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.factors, list | tuple) or not self.factors:
            raise TypeError(
                f"factors={self.factors!r} holds no numbers; give one per stage, as (1.0, 0.8, 0.6)"
            )
        for factor in self.factors:
            _validate.positive("one per stage, relative to the first", factors=factor)
        object.__setattr__(self, "factors", tuple(map(float, self.factors)))

    def over(self, mechanism: Mechanism, sampling: Sampling) -> Mechanism:
        """The noise of a run of these draws, where `mechanism` is that of the first stage."""
        epoch = sampling.draws_per_epoch if sampling.takes_turns else 1
        stages, parts = len(self.factors), sampling.steps / epoch
        starts = tuple(epoch * round(stage * parts / stages) for stage in range(stages))
        if len(set(starts)) < stages or starts[-1] >= sampling.steps:
            unit = f"epochs of {epoch} draws" if sampling.takes_turns else "steps"
            raise ValueError(
                f"factors={self.factors!r:.80} are {stages} stages, and the run has {parts:g} {unit}; give "
                "fewer factors or more steps"
            )
        return mechanism if stages == 1 else Staged(mechanism, starts, self.factors)
