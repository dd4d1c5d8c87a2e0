"""Journal entries: read back as written, and refused with line and field where they are anything else."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing

import pytest
import torch

from equipoise.privacy import (
    FullBatch,
    Gaussian,
    Journal,
    JournalError,
    Ledger,
    PrivacyPlan,
    PrivateSearch,
    Release,
    epsilon,
)
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


@pytest.mark.parametrize("whole", [0, 2])
@pytest.mark.parametrize("torn", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_a_torn_last_line_of_any_length_is_not_read_and_is_cut_by_who_writes(tmp_path, whole, torn):
    path, entries = tmp_path / "journal.jsonl", [ENTRIES["release"]] * whole
    with closing(Journal(tmp_path / "one.jsonl")) as journal:
        journal.append(ENTRIES["release"])
    written = (tmp_path / "one.jsonl").read_bytes()
    lines = written * whole
    path.write_bytes(lines + b"x" * torn)
    assert read_journal(path) == entries
    assert path.read_bytes() == lines + b"x" * torn
    with closing(Journal(path)) as journal:
        assert journal.entries() == entries
        journal.append(ENTRIES["release"])
    assert path.read_bytes() == lines + written


def test_a_journal_that_is_only_read_is_not_made(tmp_path):
    with pytest.raises(JournalError):
        read_journal(tmp_path / "journal.jsonl")
    assert not any(tmp_path.iterdir())


def test_what_other_runs_cost_is_asked_for_one_relation_and_unit(tmp_path):
    path = tmp_path / "journal.jsonl"
    assert other_runs(None, "add_or_remove_one") == other_runs(path, "add_or_remove_one") == ()
    assert not any(tmp_path.iterdir())
    plan = PrivacyPlan([Release("gradient", 1.0, Gaussian(3.0))], FullBatch(40, 5))
    first = Ledger(plan, journal=Journal(path))
    lines = path.read_bytes()
    cost = first.record.reserved_event
    assert epsilon(cost, 1e-5).value == plan.epsilon(1e-5).value
    assert other_runs(path, "add_or_remove_one") == (cost,)
    second = Ledger(plan, journal=Journal(path))
    assert other_runs(path, "add_or_remove_one") == (cost, cost)
    assert first.other_runs() == {second.run: cost}
    first.journal.close()
    assert first.other_runs() == {second.run: cost}
    assert path.read_bytes().startswith(lines)
    for relation, unit in (("replace_one", "record"), ("add_or_remove_one", "user")):
        with pytest.raises(JournalError, match=relation if unit == "record" else unit):
            other_runs(path, relation, unit)


def test_what_a_draw_depends_on_is_a_digest_under_the_key_or_given_as_one():
    value, key = {"w": torch.ones(3)}, bytes(32)
    found = as_digest(value, key)
    assert found == as_digest(lambda: value, key) == keyed_digest(value, key, "what a draw depends on")
    assert found != as_digest(value, b"1" * 32)
    given = [as_digest(one, key) for one in (None, "ab", b"\xab", lambda: "ab", lambda: None)]
    assert given == [None, "ab", "ab", "ab", None]
