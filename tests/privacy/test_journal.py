"""Journal entries: read back as written, and refused with line and field where they are anything else."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing

import pytest
import torch

from equipoise import privacy as ep
from equipoise.privacy import epsilon
from equipoise.privacy.digests import as_digest, keyed_digest
from equipoise.privacy.ledger.journal import (
    BookedDraw,
    CloseEntry,
    Entry,
    ReleaseEntry,
    RunEntry,
    SearchEntry,
    VoidEntry,
    read_journal,
)
from equipoise.privacy.ledger.journal_records import other_runs
from equipoise.published import PublishedPlan, Unproven
from equipoise.published.record import DisclosureEntry, UnprovenEntry

PLAN = PublishedPlan(
    [ep.Release("sum", 5.0, ep.Gaussian(2.0))], ep.FullBatch(100, 4), unproven=[Unproven("raw")]
)
DRAW = BookedDraw(index=0, name="batch", ordinal=0, digest="d", data="")
OF_DRAW = {"run": "a", "draw": DRAW, "answer": "x"}
ENTRIES = {
    "run": RunEntry(run="a", plan=PLAN, data="", private=True),
    "release": ReleaseEntry(
        **OF_DRAW, bounds={"sum": 5.0}, multipliers={"sum": 2.0}, pattern=("sum",), joint=None
    ),
    "unproven": UnprovenEntry(**OF_DRAW, name="raw", std=0.0, hole="why", worst_case_multiplier=None),
    "worst case": UnprovenEntry(**OF_DRAW, name="raw", std=1.0, hole="why", worst_case_multiplier=3.0),
    "disclosure": DisclosureEntry(run="a", hole="why"),
    "disclosure of a draw": DisclosureEntry(run="a", hole="why", draw=DRAW),
    "void": VoidEntry(run="a", index=0),
    "close": CloseEntry(run="a"),
    "search": SearchEntry(run="a", search=ep.PrivateSearch(10)),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_an_entry_is_read_as_it_was_written(kind, tmp_path):
    entry = ENTRIES[kind]
    journal = ep.Journal(tmp_path / "journal.jsonl")
    journal.append(entry)
    (found,) = journal.entries()
    assert type(found) is type(entry)
    assert found.to_json() == entry.to_json()
    if kind != "run":  # a plan that is read names each release's sampling and count
        assert found == entry
    row = entry.to_json()
    for field in row:
        left = {name: value for name, value in row.items() if name != field}
        with pytest.raises(ep.JournalError, match=f"line 5 .*{field} is missing"):
            Entry.from_json(left, line=5)
    with pytest.raises(ep.JournalError, match=r"line 5 .*'further' is not a field"):
        Entry.from_json(row | {"further": 1}, line=5)
    for unknown in ([], 3, None, "another"):
        with pytest.raises(ep.JournalError, match=r"line 7 .*type is of the unknown type"):
            Entry.from_json(row | {"type": unknown}, line=7)
    if kind == "run":
        assert row["noise"] == "floating_point"
        with pytest.raises(ep.JournalError, match=r"line 3 .*noise is 'grid', but .* 'floating_point'"):
            Entry.from_json(row | {"noise": "grid"}, line=3)


WRONG = [None, True, -1, 1.5, "", "text", [], [1], {}, {"sum": -1.0}, {"sum": True}, 10**400, float("nan")]


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_field_of_another_type_is_named_or_reads_back(kind):
    row = ENTRIES[kind].to_json()
    for field in row.keys() - {"type"}:
        for value in WRONG:
            changed = row | {field: value}
            try:
                text = json.dumps(Entry.from_json(changed, line=3).to_json())
            except ep.JournalError as error:
                text = f"{error}"
            told = "line 3 " in text and field in text and len(text) < 600
            assert told or text == json.dumps(changed)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    journal = ep.Journal(tmp_path / "journal.jsonl")
    for wrong in (
        dataclasses.replace(ENTRIES["release"], bounds={"sum": float("inf")}),
        dataclasses.replace(ENTRIES["worst case"], worst_case_multiplier=0.0),
    ):
        with pytest.raises(ep.JournalError):
            journal.append(wrong)
    assert journal.entries() == []


@pytest.mark.parametrize("whole", [0, 2])
@pytest.mark.parametrize("torn", [0, 1, 65_536, 200_000])
def test_a_torn_last_line_of_any_length_is_not_read_and_is_cut_by_who_writes(tmp_path, whole, torn):
    path, entries = tmp_path / "journal.jsonl", [ENTRIES["release"]] * whole
    with closing(ep.Journal(tmp_path / "one.jsonl")) as journal:
        journal.append(ENTRIES["release"])
    written = (tmp_path / "one.jsonl").read_bytes()
    lines = written * whole
    path.write_bytes(lines + b"x" * torn)
    assert read_journal(path) == entries
    assert path.read_bytes() == lines + b"x" * torn
    with closing(ep.Journal(path)) as journal:
        assert journal.entries() == entries
        journal.append(ENTRIES["release"])
    assert path.read_bytes() == lines + written


def test_what_other_runs_cost_is_asked_for_one_relation_and_unit(tmp_path):
    path = tmp_path / "journal.jsonl"
    with pytest.raises(ep.JournalError):
        read_journal(path)
    assert other_runs(None, "add_or_remove_one") == other_runs(path, "add_or_remove_one") == ()
    assert not any(tmp_path.iterdir())
    plan = ep.PrivacyPlan([ep.Release("gradient", 1.0, ep.Gaussian(3.0))], ep.FullBatch(40, 5))
    first = ep.Ledger(plan, journal=ep.Journal(path))
    lines = path.read_bytes()
    cost = first.record.reserved_event
    assert epsilon(cost, 1e-5).value == plan.epsilon(1e-5).value
    assert other_runs(path, "add_or_remove_one") == (cost,)
    second = ep.Ledger(plan, journal=ep.Journal(path))
    assert other_runs(path, "add_or_remove_one") == (cost, cost)
    assert first.other_runs() == {second.run: cost}
    first.journal.close()
    assert first.other_runs() == {second.run: cost}
    assert path.read_bytes().startswith(lines)
    for relation, unit in (("replace_one", "record"), ("add_or_remove_one", "user")):
        with pytest.raises(ep.JournalError, match=relation if unit == "record" else unit):
            other_runs(path, relation, unit)


def test_what_a_draw_depends_on_is_a_digest_under_the_key_or_given_as_one():
    value, key = {"w": torch.ones(3)}, bytes(32)
    found = as_digest(value, key)
    assert found == as_digest(lambda: value, key) == keyed_digest(value, key, "what a draw depends on")
    assert found != as_digest(value, b"1" * 32)
    given = [as_digest(one, key) for one in (None, "ab", b"\xab", lambda: "ab", lambda: None)]
    assert given == [None, "ab", "ab", "ab", None]
