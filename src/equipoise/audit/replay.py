"""A ledger that answers with recorded releases: for tests that change the data while forcing the same
releases.

Two runs over neighbouring data that are forced to the same transcript have the same public state at every
step. What still differs is private, and must lie within the bounds; this is how a test compares bounded sums
step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equipoise._tree import map_leaves
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.ledger.ledger import Check
from equipoise.privacy.mechanisms.base import Sums
from equipoise.privacy.plan import PrivacyPlan
from equipoise.privacy.private import Draw, Private, exact
from equipoise.published.ledger import PublishedLedger


class RecordingLedger(PublishedLedger):
    """A ledger that also keeps the raw sums and the releases, for tests.

    Args:
        plan: as for every ledger, with the arguments that follow.
        replayed: releases of an earlier run of this plan, in order: they are handed out in place of fresh
            ones. The ledger checks and books as usual.

    Raises:
        IndexError: on release, when the replayed ones have ended.
        ValueError: on release, when names or shapes differ from theirs.

    Attributes:
        transcript: releases handed out so far.
        sums: raw sums before noise, with the same shape as the transcript. For tests only.
        draws, bounds: the draw of each release of bounded sums, and the bounds that its noise follows.
    """

    def __init__(
        self, plan: PrivacyPlan, *args: Any, replayed: Sequence[Sums] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(plan, *args, **kwargs)
        self._replayed = replayed
        self.transcript: list[Sums] = []
        self.sums: list[Sums] = []
        self.draws: list[Draw] = []
        self.bounds: list[dict[str, float]] = []

    def release(self, draw: Draw, sums: Mapping[str, Bounded], checks: Sequence[Check] = ()) -> Sums:
        """As `Ledger.release`, recorded."""
        out = self._handed(super().release(draw, sums, checks))
        self.sums.append(_raw_sums({name: bounded.value for name, bounded in sums.items()}))
        self.draws.append(draw)
        self.bounds.append({name: float(bounded.add_remove) for name, bounded in sums.items()})
        return out

    def release_unproven(
        self, draw: Draw, name: str, value: Mapping[str, Private], std: float, **options: Any
    ) -> dict[str, torch.Tensor]:
        """As `PublishedLedger.release_unproven`, recorded."""
        out = self._handed({name: super().release_unproven(draw, name, value, std, **options)})
        self.sums.append(_raw_sums({name: value}))
        return out[name]

    def _handed(self, fresh: Sums) -> Sums:
        """The release that is handed out; a copy of it is kept."""
        if self._replayed is not None:
            number = len(self.transcript)
            if number >= len(self._replayed):
                raise IndexError(f"the transcript holds {number} releases; a further one was asked for")
            asked, held = (map_leaves(lambda t: t.shape, sums) for sums in (fresh, self._replayed[number]))
            if asked != held:
                raise ValueError(f"release {number} asks for {asked}, the transcript holds {held}")
            fresh = map_leaves(torch.clone, self._replayed[number])
        self.transcript.append(map_leaves(torch.clone, fresh))
        return fresh


def _raw_sums(sums: Mapping[str, Mapping[str, Private]]) -> Sums:
    found: Sums = map_leaves(lambda t: torch.as_tensor(exact(t)).clone(), sums)
    return found
