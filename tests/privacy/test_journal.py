"""Journal entries: read back as written, and refused with line and field where they are anything else."""

from __future__ import annotations

import dataclasses
import json

import pytest

from equipoise.privacy import (
    FullBatch,
    Gaussian,
    Journal,
    JournalError,
    PrivateSearch,
    Release,
)
from equipoise.privacy.ledger.journal import (
    BookedDraw,
    CloseEntry,
    Entry,
    ReleaseEntry,
    RunEntry,
    SearchEntry,
    VoidEntry,
)
from equipoise.published import PublishedPlan, Unproven
from equipoise.published.record import DisclosureEntry, UnprovenEntry

PLAN = PublishedPlan([Release("sum", 5.0, Gaussian(2.0))], FullBatch(100, 4), unproven=[Unproven("raw")])
DRAW = BookedDraw(index=0, name="batch", ordinal=0, digest="d", data="")
ENTRIES = {
    "run": RunEntry(run="a", plan=PLAN, data="", private=True),
    "release": ReleaseEntry(
        run="a",
        draw=DRAW,
        bounds={"sum": 5.0},
        multipliers={"sum": 2.0},
        pattern=("sum",),
        answer="x",
        joint=None,
    ),
    "unproven": UnprovenEntry(
        run="a", draw=DRAW, name="raw", std=0.0, hole="why", worst_case_multiplier=None, answer="x"
    ),
    "worst case": UnprovenEntry(
        run="a", draw=DRAW, name="raw", std=1.0, hole="why", worst_case_multiplier=3.0, answer="x"
    ),
    "disclosure": DisclosureEntry(run="a", hole="why"),
    "disclosure of a draw": DisclosureEntry(run="a", hole="why", draw=DRAW),
    "void": VoidEntry(run="a", index=0),
    "close": CloseEntry(run="a"),
    "search": SearchEntry(run="a", search=PrivateSearch(10)),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_an_entry_is_read_as_it_was_written(kind, tmp_path):
    entry = ENTRIES[kind]
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(entry)
    (found,) = journal.entries()
    assert type(found) is type(entry)
    assert found.to_json() == entry.to_json()
    if kind != "run":  # a plan that is read names each release's sampling and count
        assert found == entry


@pytest.mark.parametrize("kind", ENTRIES)
def test_no_field_of_an_entry_can_be_left_out_or_added(kind):
    row = ENTRIES[kind].to_json()
    for field in row:
        left = {name: value for name, value in row.items() if name != field}
        with pytest.raises(JournalError, match=f"line 5 .*{field} is missing"):
            Entry.from_json(left, line=5)
    with pytest.raises(JournalError, match=r"line 5 .*'further' is not a field"):
        Entry.from_json(row | {"further": 1}, line=5)


WRONG = [None, True, -1, 1.5, "", "text", [], [1], {}, {"sum": -1.0}, {"sum": True}, 10**400, float("nan")]


def complaint(row) -> str | None:
    try:
        Entry.from_json(row, line=3)
    except JournalError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_field_of_another_type_is_named_or_reads_back(kind):
    row = ENTRIES[kind].to_json()
    for field in row.keys() - {"type"}:
        for value in WRONG:
            changed = row | {field: value}
            text = complaint(changed)
            if text is None:
                assert json.dumps(Entry.from_json(changed, line=3).to_json()) == json.dumps(changed)
            else:
                assert "line 3 " in text
                assert field in text
                assert len(text) < 600


def test_the_noise_of_a_run_is_that_of_its_plan():
    row = ENTRIES["run"].to_json()
    assert row["noise"] == "floating_point"
    with pytest.raises(JournalError, match=r"line 3 .*noise is 'grid', but .* 'floating_point'"):
        Entry.from_json(row | {"noise": "grid"}, line=3)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    for wrong in (
        dataclasses.replace(ENTRIES["release"], bounds={"sum": float("inf")}),
        dataclasses.replace(ENTRIES["worst case"], worst_case_multiplier=0.0),
    ):
        with pytest.raises(JournalError):
            journal.append(wrong)
    assert journal.entries() == []


@pytest.mark.parametrize("kind", [[], {}, 3, None, "another"], ids=repr)
def test_a_line_of_no_known_type_is_named(kind):
    with pytest.raises(JournalError, match=r"line 7 .*type is of the unknown type"):
        Entry.from_json({"type": kind, "run": "a1"}, line=7)
