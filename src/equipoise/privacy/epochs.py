"""Epochs without amplification: which of them the booked draws lie in.

With `Unamplified` sampling a record is in one draw of each epoch, which is cut by the draws' ordinals. Draws
that were opened and not released leave gaps, so that a few releases may lie in many epochs, and a record
meets a Gaussian in each.
"""

from __future__ import annotations

from collections import Counter

from equipoise.privacy.releases import PrivacyPlan
from equipoise.privacy.sampling import Unamplified

__all__ = ["Epochs"]


class Epochs:
    """Counts, by draw name, how often a record may have met a release.

    Args:
        plan: of the run.

    Example:
        >>> from equipoise.privacy import Release
        >>> epochs = Epochs(PrivacyPlan([Release("gradient", 1.0, 1.0)], Unamplified(10, 100, 20)))
        >>> for ordinal in (0, 4, 15):
        ...     epochs.add("batch", ordinal)
        >>> epochs.met
        {'batch': 2}
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        samplings = {release.draw: plan.sampling_of(release.draw) for release in plan.releases}
        self._length = {
            draw: sampling.draws_per_epoch
            for draw, sampling in samplings.items()
            if isinstance(sampling, Unamplified)
        }
        self._times: Counter[tuple[str, int]] = Counter()
        self._most: Counter[tuple[str, int]] = Counter()
        self.met: dict[str, int] = dict.fromkeys(self._length, 0)

    def add(self, draw: str, ordinal: int) -> None:
        """Note a release on the draw of this name and ordinal; a slot released twice counts twice."""
        if draw not in self._length:
            return
        slot, epoch = (draw, ordinal), (draw, ordinal // self._length[draw])
        self._times[slot] += 1
        if self._times[slot] > self._most[epoch]:
            self._most[epoch] += 1
            self.met[draw] += 1
