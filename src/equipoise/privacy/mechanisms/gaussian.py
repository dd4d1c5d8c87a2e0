"""The Gaussian mechanism: every coordinate of a sum of bound C gets independent noise of deviation z C.

One record adds a vector of at most C, which is 1 / z in units of the noise: one Gaussian of multiplier z per
release. Releases of one draw are one Gaussian on one sample (`PrivacyPlan.event`).

Source: Dwork and Roth 2014, "The algorithmic foundations of differential privacy", appendix A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from equipoise.privacy._torch_side import Bounded, ReleaseStreams, keyed
from equipoise.privacy.mechanisms.base import Mechanism, Sums
from equipoise.privacy.mechanisms.grid_gaussian import GridGaussian


@final
@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Independent normal noise.

    Args:
        noise_multiplier: z, the noise's standard deviation over the add-or-remove bound of the sum.

    Example:
        >>> Gaussian(2.0).whitened_square(participations=3)
        0.75
    """

    noise_multiplier: float
    kind: ClassVar[str] = "gaussian"

    def noised(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, over_steps: Sums | None = None
    ) -> Sums:
        return {
            name: keyed.add_normals(streams, bounded.value, self.standard_deviation(name, bounded.add_remove))
            for name, bounded in sums.items()
        }

    def on_grid(self) -> GridGaussian:
        return GridGaussian(self.noise_multiplier)
