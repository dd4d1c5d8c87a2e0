"""Ledgers that are given who is in their draws, so that two sides differ by one record or one user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.audit.replay import RecordingLedger, ReplayLedger
from equipoise.privacy import Draw, WithoutReplacement
from equipoise.privacy.mechanisms.base import Sums

__all__ = ["ChosenDraws", "ChosenDrawsLedger", "ChosenDrawsReplayLedger"]


@dataclass(frozen=True)
class ChosenDraws:
    """Who is in the draws of one side of a pair.

    Attributes:
        others: the records with numbers below this are drawn by the sampling.
        old: those of them that are in no draw by themselves: one, or all of a user.
        audited: those that are audited, in every draw: one, or all of a user; none on the side without.
        place: where they stand among the others, as a share of their number; 1 for the end.
    """

    others: int
    old: tuple[int, ...]
    audited: tuple[int, ...] = ()
    place: float = 1.0


class ChosenDrawsLedger(RecordingLedger):
    """A ledger that draws these records.

    Attributes:
        stood_at: position of the first audited record in the first draw.
    """

    def __init__(self, drawn: ChosenDraws, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._drawn, self.stood_at = drawn, 0

    def sample(self, draw: Draw, num_records: int) -> Tensor:
        drawn, sampling = self._drawn, self.plan.sampling_of(draw.name)
        # From the number of others, which is the same on either side.
        ids = sampling.sample(self.secrets, draw, drawn.others).tolist()
        kept = [i for i in ids if i not in drawn.old]
        if drawn.audited:
            if isinstance(sampling, WithoutReplacement):
                kept = kept[: sampling.batch_size - len(drawn.audited)]
            place = round(drawn.place * len(kept))
            if not self.transcript:
                self.stood_at = place
            kept[place:place] = drawn.audited
        return torch.tensor(kept, dtype=torch.long)


class ChosenDrawsReplayLedger(ChosenDrawsLedger, ReplayLedger):
    """The same, with the releases of the other side."""

    def __init__(self, drawn: ChosenDraws, transcript: Sequence[Sums], *args: Any, **options: Any) -> None:
        # `ChosenDrawsLedger` hands on what it does not know, so the transcript comes first there.
        super().__init__(drawn, transcript, *args, **options)
