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

from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.mechanisms.base import Sums
from equipoise.privacy.plan import PrivacyPlan
from equipoise.privacy.private import Draw, Private, exact
from equipoise.published.ledger import PublishedLedger


class RecordingLedger(PublishedLedger):
    """A ledger that also keeps the raw sums and the releases, for tests.

    Attributes:
        transcript: releases handed out so far.
        sums: raw sums before noise, with the same shape as the transcript. For tests only.
        draws, bounds: the draw of each release of bounded sums, and the bounds that its noise follows.
    """

    def __init__(self, plan: PrivacyPlan, *args: Any, **kwargs: Any) -> None:
        super().__init__(plan, *args, **kwargs)
        self.transcript: list[Sums] = []
        self.sums: list[Sums] = []
        self.draws: list[Draw] = []
        self.bounds: list[dict[str, float]] = []

    def release(self, draw: Draw, sums: Mapping[str, Bounded]) -> Sums:
        """As `Ledger.release`, recorded."""
        out = super().release(draw, sums)
        self.sums.append(_raw_sums(sums))
        self.draws.append(draw)
        self.bounds.append({name: float(bounded.add_remove) for name, bounded in sums.items()})
        self.transcript.append({n: {k: t.clone() for k, t in v.items()} for n, v in out.items()})
        return out

    def release_unproven(
        self, draw: Draw, name: str, value: Mapping[str, Private], std: float, **options: Any
    ) -> dict[str, torch.Tensor]:
        """As `PublishedLedger.release_unproven`, recorded."""
        out = super().release_unproven(draw, name, value, std, **options)
        self.sums.append({name: {k: torch.as_tensor(exact(t)).clone() for k, t in value.items()}})
        self.transcript.append({name: {k: t.clone() for k, t in out.items()}})
        return out


class ReplayLedger(RecordingLedger):
    """A ledger that checks and books as usual, but hands out the releases of a transcript.

    Args:
        transcript: releases of an earlier run, in order.
        plan: the plan of that run.

    Raises:
        IndexError: on release, when the transcript has ended.
        ValueError: on release, when names or shapes differ from the transcript's.
    """

    def __init__(self, transcript: Sequence[Sums], plan: PrivacyPlan, *args: Any, **kwargs: Any) -> None:
        super().__init__(plan, *args, **kwargs)
        self._answers = list(transcript)
        self._next = 0

    def release(self, draw: Draw, sums: Mapping[str, Bounded]) -> Sums:
        """As `Ledger.release`, with the transcript's answer instead of fresh noise."""
        answer = self._answer_to({n: {k: t.shape for k, t in b.value.items()} for n, b in sums.items()})
        super().release(draw, sums)
        return self._handed(answer)

    def release_unproven(
        self, draw: Draw, name: str, value: Mapping[str, Private], std: float, **options: Any
    ) -> dict[str, torch.Tensor]:
        """As `PublishedLedger.release_unproven`, with the transcript's answer instead of fresh noise."""
        answer = self._answer_to({name: {k: t.shape for k, t in value.items()}})
        super().release_unproven(draw, name, value, std, **options)
        return self._handed(answer)[name]

    def _answer_to(self, shapes: Mapping[str, Mapping[str, torch.Size]]) -> Sums:
        if self._next >= len(self._answers):
            raise IndexError(
                f"the transcript holds {len(self._answers)} releases; a further one was asked for"
            )
        answer = self._answers[self._next]
        recorded = {n: {k: t.shape for k, t in v.items()} for n, v in answer.items()}
        if shapes != recorded:
            raise ValueError(f"release {self._next} asks for {shapes}, the transcript holds {recorded}")
        return answer

    def _handed(self, answer: Sums) -> Sums:
        self._next += 1
        self.transcript[-1] = {n: {k: t.clone() for k, t in v.items()} for n, v in answer.items()}
        return {n: {k: t.clone() for k, t in v.items()} for n, v in answer.items()}


def _raw_sums(sums: Mapping[str, Bounded]) -> Sums:
    return {n: {k: torch.as_tensor(exact(t)).clone() for k, t in b.value.items()} for n, b in sums.items()}
