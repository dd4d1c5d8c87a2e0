"""What the journal holds of one run: its draws, what was used of the plan, and what was not proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.privacy.epochs import Epochs
from equipoise.privacy.errors import JournalError, LedgerError
from equipoise.privacy.journal import Journal
from equipoise.privacy.releases import Pattern, PrivacyPlan
from equipoise.privacy.statement import Hole


class Books:
    """The entries of a run, as the ledger needs them.

    Args:
        entries: of the journal, this run's alone, in their order.
        plan: of the run.
        position: number of draws opened when the checkpoint that is resumed was written.

    Attributes:
        lines: draw index -> the entry that decides whether the draw may be repeated.
        used: how many releases of each planned pattern are booked.
        epochs: the epochs that they lie in, where sampling does not amplify.
        ordinals: draw name -> how many draws of that name were opened.
        holes: what left without proof, by the sentence that says so.
        unproven_done: (release, index, digest) -> what it was asked.
        unproven_used: how many un-proven releases of each name are booked.

    Raises:
        LedgerError: the journal holds this run with another plan.
        JournalError: the journal lacks draws that the checkpoint has seen.
    """

    def __init__(self, entries: Sequence[dict[str, Any]], plan: PrivacyPlan, position: int) -> None:
        self.lines: dict[int, dict[str, Any]] = {}
        self.used: dict[Pattern, int] = {}
        self.epochs = Epochs(plan)
        self.ordinals: dict[str, int] = {}
        self.holes: dict[str, Hole] = {}
        self.unproven_done: dict[tuple[str, int, str], tuple[Any, ...]] = {}
        self.unproven_used: dict[str, int] = {}
        for entry in entries:
            if entry["type"] == "run" and entry["fingerprint"] != plan.fingerprint():
                raise LedgerError(
                    "the journal holds this run with another plan; a run keeps its plan. Start a new run "
                    "folder (a new key) for the "
                    "new plan: the old one stays charged"
                )
            if entry["type"] == "release":
                self.book_release(entry, plan.pattern(entry["draw"], entry["pattern"]))
            elif entry["type"] == "void":
                self.lines[entry["index"]]["hash"] = "void"
            elif entry["type"] == "unproven":
                self.lines.setdefault(entry["index"], entry)
                self.book_unproven(entry)
            elif entry["type"] == "hole":
                if "index" in entry:
                    self.lines.setdefault(entry["index"], entry)
                self.holes.setdefault(entry["hole"], Hole("disclose", entry["hole"], 0)).count += 1
            if "ordinal" in entry:
                self.ordinals[entry["draw"]] = max(self.ordinals.get(entry["draw"], 0), entry["ordinal"] + 1)
        if position > 0 and position - 1 not in self.lines:
            raise JournalError(
                f"the checkpoint has seen {position} draws of this run, and the journal does not hold "
                "the last of them: it was cut or replaced, and charges are lost. Restore the journal from a "
                "copy, or start a new run and count the old one as spent in full"
            )

    def book_release(self, line: dict[str, Any], pattern: Pattern) -> None:
        """Note a release of this pattern."""
        self.lines[line["index"]] = line
        self.used[pattern] = self.used.get(pattern, 0) + 1
        self.epochs.add(line["draw"], line["ordinal"])

    def book_unproven(self, line: dict[str, Any]) -> None:
        """Note an un-proven release and what its worst case adds to the hole that it is."""
        self.unproven_done[line["name"], line["index"], line["hash"]] = question(line)
        self.unproven_used[line["name"]] = self.unproven_used.get(line["name"], 0) + 1
        hole = self.holes.setdefault(line["hole"], Hole("release_unproven", line["hole"], 0, 0.0))
        hole.count += 1
        multiplier = line["worst_case_multiplier"]
        if multiplier is None or hole.worst_case is None:
            hole.worst_case = None
        else:
            hole.worst_case += multiplier**-2


def question(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an unproven release was asked: with anything else, its noise must not be given again."""
    return line["std"], line["worst_case_multiplier"], line.get("answer")


def book_end(journal: Journal, run: str) -> None:
    """Book that a run has ended, once; it is on the device when this returns."""
    with journal.locked():
        if not any(entry["type"] == "close" and entry.get("run") == run for entry in journal.entries()):
            journal.append({"type": "close", "run": run})
    journal.sync()
