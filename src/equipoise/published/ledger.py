"""A ledger that also lets out what no proof covers, and claims no more for it than can be shown.

Recipes as published, and the references without noise, name it as their `ledger_class`. Their steps ask it by
`disclose` and `release_unproven`, which reach the ledger on the process that keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from equipoise.methods.base import Context
from equipoise.privacy import Ledger, LedgerError, PlanUsedUpError
from equipoise.privacy.ledger.journal import BookedDraw
from equipoise.privacy.mechanisms.base import require_carried
from equipoise.privacy.noise.streams import add_normals
from equipoise.privacy.private import Draw, Private, unwrap
from equipoise.published.record import DisclosureEntry, PublishedPlan, PublishedRecord, UnprovenEntry


class PublishedLedger(Ledger):
    """A `Ledger` whose runs may also hand out raw values, and values with noise of any scale."""

    def disclose(self, value: Any, hole: str) -> Any:
        """Hand out a private value as it is. The run's guarantee is lost, and the statement says why.

        Args:
            value: a `Private` tensor or a mapping of them.
            hole: why, in a sentence for the statement.
        """
        _check_reason("disclose", hole)
        self._check_open()
        leaves = list(value.values()) if isinstance(value, Mapping) else [value]
        # Booked with its draws: their indices are taken then, and another question gets other records.
        draws = {leaf.draw for leaf in leaves if isinstance(leaf, Private)} & self._state.unreleased.keys()
        for draw in draws or {None}:
            booked = None if draw is None else BookedDraw.of(draw, self.data_fingerprint)
            self._book(DisclosureEntry(run=self.run, hole=hole, draw=booked))
        if isinstance(value, Mapping):
            return {name: unwrap(tensor) for name, tensor in value.items()}
        return unwrap(value)

    def release_unproven(
        self,
        draw: Draw,
        name: str,
        value: Mapping[str, Private],
        std: float,
        *,
        hole: str,
        worst_case_multiplier: float | None = None,
    ) -> dict[str, Tensor]:
        """Add noise of a scale that no proof covers, and hand out. The guarantee becomes `none`, or
        `worst_case`.

        Args:
            draw: an open draw; may also hold a proven release.
            name: as planned (`PublishedPlan.unproven`); once per draw.
            value: named private tensors.
            std: noise standard deviation.
            hole: what is not proved, in a sentence for the statement.
            worst_case_multiplier: std over a proved worst-case change of the value, under the plan's
                relation, given all earlier releases, without amplification. With it the statement reports a
                worst-case epsilon.
        """
        _check_reason("release_unproven", hole)
        self._check_draw(draw)
        if not math.isfinite(std) or std < 0:
            raise LedgerError(f"std of unproven release {name!r} must be finite and not negative, got {std}")
        # Noise without a claim may vanish in its type; noise that a worst case rests on must not.
        if worst_case_multiplier is not None:
            require_carried(f"unproven release {name!r}", value, [std])
            # Of one record: a user who owns several moves it as often.
            worst_case_multiplier = float(worst_case_multiplier) / self.plan.unit.group
        entry = UnprovenEntry(
            run=self.run,
            draw=BookedDraw.of(draw, self.data_fingerprint),
            name=name,
            std=float(std),
            hole=hole,
            worst_case_multiplier=worst_case_multiplier,
            answer=self._digest_of_sums({name: value}).value(),
        )
        record = self.record
        booked = record.unproven.get((name, draw.index)) if isinstance(record, PublishedRecord) else None
        if booked is None:
            self._check_open()
            self._check_planned(draw, name)
            self._book(entry)
        elif booked.question != entry.question:
            self._void(draw)
        return add_normals(
            self._streams(draw, draw.parameters, entry.question), value, std, f"unproven noise {name}"
        )

    def _check_planned(self, draw: Draw, name: str) -> None:
        """Refuse an unproven release that the plan does not hold, or of which none is left."""
        items = self.plan.unproven if isinstance(self.plan, PublishedPlan) else ()
        planned = [item for item in items if (item.name, item.draw) == (name, draw.name)]
        if not planned:
            raise LedgerError(
                f"the plan holds no unproven release {name!r} on draw {draw.name!r}; it holds "
                f"{[(item.name, item.draw) for item in items]}"
            )
        assert isinstance(self.record, PublishedRecord)
        if self.record.unproven_used[name] >= self.plan.count(planned[0]):
            raise PlanUsedUpError(
                f"the plan's {self.plan.count(planned[0])} unproven releases of {name!r} are used up"
            )


def _check_reason(what: str, hole: str) -> None:
    if not isinstance(hole, str) or not hole.strip():
        raise LedgerError(f"{what} needs `hole`: a sentence that says what is not proved")


def disclose(context: Context, value: Any, hole: str) -> Any:
    """As `PublishedLedger.disclose`, in a method's step."""
    return context.ledger.call("disclose", value, hole)


def release_unproven(
    context: Context, draw: Any, name: str, value: Mapping[str, Any], std: float, **options: Any
) -> dict[str, Tensor]:
    """As `PublishedLedger.release_unproven`, in a method's step."""
    found: dict[str, Tensor] = context.ledger.call("release_unproven", draw, name, value, std=std, **options)
    return found
