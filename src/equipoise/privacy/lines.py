"""Do the lines of one run's journal fit together? What a ledger never writes is refused, line by line.

A draw has one index, and one ordinal among the draws of its name; it is released once. An index without a
line is no sign of an edit: a draw may be opened and not released, so that it is told and not refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from equipoise.privacy.errors import JournalError
from equipoise.privacy.plan import Pattern, PrivacyPlan
from equipoise.privacy.restatement import Finding, figure

__all__ = ["COSTLY", "RunLines"]

COSTLY = ("release", "unproven", "hole")
"""The lines by which something left the private side."""
_ROUNDING = 1 + 1e-6


class RunLines:
    """Holds the lines of one run against its plan and against each other, in their order.

    Args:
        plan: of the run.
        data: digest of the records, as the run's first line has it.

    Attributes:
        used: how many releases of each planned pattern were taken.
    """

    def __init__(self, plan: PrivacyPlan, data: object) -> None:
        self.used: Counter[Pattern] = Counter()
        self._plan = plan
        self._data = {data}
        self._draws: dict[int, tuple[object, ...]] = {}  # index -> draw, ordinal and hash
        self._slots: dict[tuple[object, ...], int] = {}  # draw and ordinal -> index
        self._released: set[int] = set()
        self._unproven: set[tuple[str, int]] = set()
        self._asked: Counter[str] = Counter()
        self._closed = False

    def take(self, entry: Mapping[str, Any], number: int) -> None:
        """Look at line `number` of the run.

        Raises:
            JournalError: it is not what a ledger with this plan writes after the lines before.
        """
        kind = entry["type"]
        if kind == "close":
            self._closed = True
        if kind in COSTLY:
            if self._closed:
                raise JournalError(f"line {number} of the run lets something out after the run was closed")
            if kind != "hole" or "index" in entry:
                self._place(entry, number)
        if kind == "release":
            self._release(entry, number)
        elif kind == "unproven":
            self._unproved(entry, number)
        elif kind == "void" and entry["index"] not in self._draws:
            raise JournalError(f"line {number} of the run makes a draw void that it does not hold")

    def findings(self) -> list[Finding]:
        """What the lines leave open once all are taken."""
        found = []
        gaps = max(self._draws, default=-1) + 1 - len(self._draws)
        if gaps:
            detail = f"{gaps} draw(s) before the last have no line: opened and not released, or cut out"
            found.append(Finding("draws", None, detail))
        if len(self._data) > 1:
            detail = f"the lines name {len(self._data)} data sets: the run went on with changed records"
            found.append(Finding("data", None, detail))
        return found

    def _place(self, entry: Mapping[str, Any], number: int) -> None:
        """The draw of a line: one index, one ordinal, one question."""
        index, ordinal = entry["index"], entry["ordinal"]
        if not _counts(index) or not _counts(ordinal):
            raise JournalError(
                f"line {number} of the run has the index {index!r} and the ordinal {ordinal!r}; both count "
                "from 0"
            )
        slot = (entry["draw"], ordinal)
        draw = (*slot, entry["hash"])
        if self._draws.setdefault(index, draw) != draw or self._slots.setdefault(slot, index) != index:
            raise JournalError(
                f"line {number} of the run has the index {index} or the ordinal {ordinal} of another draw"
            )
        self._data.add(entry["data"])

    def _release(self, entry: Mapping[str, Any], number: int) -> None:
        pattern = self._plan.pattern(entry["draw"], entry["pattern"])
        # A ledger books a release of fewer names as a planned pattern that holds them, which costs more.
        if not entry["bounds"] or not set(entry["bounds"]) <= pattern.names:
            raise JournalError(f"line {number} of the run releases what its plan does not hold")
        if set(entry["multipliers"]) != set(entry["bounds"]):
            raise JournalError(
                f"line {number} of the run has noise multipliers for {sorted(entry['multipliers'])} and "
                f"bounds for {sorted(entry['bounds'])}"
            )
        for name, bound in entry["bounds"].items():
            release = self._plan[name]
            if entry["multipliers"][name] != release.noise_multiplier:
                raise JournalError(
                    f"line {number} of the run has the noise multiplier {entry['multipliers'][name]!r} for "
                    f"{name!r}, the plan {release.noise_multiplier!r}"
                )
            size = figure(bound)
            if size is None or not 0 < size <= release.max_bound * _ROUNDING:
                raise JournalError(
                    f"line {number} of the run has the bound {bound!r} for {name!r}, the plan allows "
                    f"{release.max_bound!r}"
                )
        if entry["index"] in self._released:
            raise JournalError(f"line {number} of the run releases the draw {entry['index']} a second time")
        self._released.add(entry["index"])
        self.used[pattern] += 1
        if self.used[pattern] > pattern.count:
            raise JournalError(
                f"it holds more than the {pattern.count} planned releases of {sorted(pattern.names)}"
            )

    def _unproved(self, entry: Mapping[str, Any], number: int) -> None:
        name, draw = entry["name"], entry["draw"]
        planned = [item for item in self._plan.unproven if (item.name, item.draw) == (name, draw)]
        if not planned:
            raise JournalError(f"line {number} of the run lets out {name!r}, which its plan does not hold")
        self._asked[name] += 1
        if (name, entry["index"]) in self._unproven or self._asked[name] > self._plan.count(planned[0]):
            raise JournalError(f"line {number} of the run lets out {name!r} more often than planned")
        self._unproven.add((name, entry["index"]))


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
