"""Long journals: opened at their last snapshot, verified whole, and the same with snapshots as without."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise.privacy import (
    ChangedQueryError,
    Gaussian,
    Journal,
    JournalError,
    Ledger,
    LedgerError,
    PrivacyPlan,
    Private,
    Release,
    Secrets,
    Unproven,
    capped,
)
from equipoise.privacy.ledger import journal_records
from equipoise.privacy.ledger import ledger as ledger_module
from equipoise.privacy.ledger.journal import Entry, Snapshot
from equipoise.privacy.ledger.journal_records import JournalRecords, folded
from equipoise.privacy.sampling import FixedEpochs
from equipoise.statements import check_with_journal, statement_from_journal

DELTA = 1e-5
PLAN = PrivacyPlan(
    [Release("gradient", 5.0, Gaussian(2.0)), Release("norm", 5.0, Gaussian(6.0), draw="other", count=100)],
    FixedEpochs(10, 100, 400),
    unproven=[Unproven("raw", count=400)],
)


@pytest.fixture
def snapshots(monkeypatch):
    """Snapshots after a few lines, and draws that are forgotten soon."""
    monkeypatch.setattr(journal_records, "SNAPSHOT_BYTES", 4000)
    monkeypatch.setattr(journal_records, "SNAPSHOT_SHARE", 1)
    monkeypatch.setattr(journal_records, "FORGET_EVERY", 7)
    monkeypatch.setattr(ledger_module, "KEPT_DRAWS", 4)


def release(ledger, name="batch", parameters="p", value=1.0):
    draw = ledger.open(name, f"{parameters} {ledger.position}")
    sums = {
        ("gradient" if name == "batch" else "norm"): capped(Private(torch.tensor([value]), draw), upper=5.0)
    }
    (out,) = ledger.release(draw, sums).values()
    return out["sum"]


def opened(path, secrets, **options):
    return Ledger(PLAN, journal=Journal(path), secrets=secrets, **options)


def places(path):
    with closing(Journal(path, read_only=True)) as journal:
        return [line.start for line in journal if isinstance(line, Snapshot)]


def read_whole(path):
    """The records by every line, with nothing forgotten."""
    with closing(Journal(path, read_only=True)) as journal:
        records = JournalRecords()
        for line in journal:
            records.take(line)
    return records.runs


def verified(path, run):
    with closing(Journal(path, read_only=True)) as journal:
        statement = json.loads(statement_from_journal(journal, run, DELTA).to_json())
        findings = check_with_journal(statement, journal)
    return [finding.detail for finding in findings if finding.ok is False]


def test_a_journal_is_opened_at_its_last_snapshot(tmp_path, snapshots, monkeypatch):
    path, secrets = tmp_path / "journal.jsonl", Secrets()
    ledger = opened(path, secrets)
    for _ in range(200):
        release(ledger)
    assert len(places(path)) > 4
    parsed = []
    from_json = Entry.from_json
    monkeypatch.setattr(
        Entry, "from_json", staticmethod(lambda row, line: parsed.append(line) or from_json(row, line))
    )
    again = opened(path, secrets, position=200)
    assert len(parsed) < 40
    assert again.record.state() == ledger.record.state() == read_whole(path)[ledger.run].state()
    assert again.spent(DELTA) == ledger.spent(DELTA)
    release(again)
    assert sum(again.record.used.values()) == 201


def test_neither_ledger_nor_verification_holds_every_draw(tmp_path, snapshots):
    path = tmp_path / "journal.jsonl"
    ledger = opened(path, Secrets())
    for _ in range(200):
        release(ledger)
    assert len(ledger.record.draws) < 60
    assert len(ledger._state.unreleased) < 60
    with closing(Journal(path, read_only=True)) as journal:
        records = folded(lambda records: [records.take(line) for line in journal] and records)
    assert len(records.runs[ledger.run].draws) <= 7
    assert records.runs[ledger.run].num_draws == 200
    assert verified(path, ledger.run) == []


@pytest.mark.parametrize("position", [0, 3, 100, 150])
def test_a_run_goes_on_before_the_last_snapshot(tmp_path, snapshots, position):
    path, secrets = tmp_path / "journal.jsonl", Secrets()
    ledger = opened(path, secrets)
    first = [release(ledger) for _ in range(160)]
    again = opened(path, secrets, position=position)
    for number in range(position, 160):
        assert torch.equal(release(again), first[number])
    assert again.record.used == ledger.record.used
    release(again)
    assert verified(path, ledger.run) == []


def test_a_draw_before_the_last_snapshot_becomes_void(tmp_path, snapshots):
    """Who opens the journal then begins further back, and who verifies it forgets nothing."""
    path, secrets = tmp_path / "journal.jsonl", Secrets()
    ledger = opened(path, secrets)
    for _ in range(160):
        release(ledger)
    again = opened(path, secrets, position=20)
    with pytest.raises(ChangedQueryError):
        release(again, value=2.0)
    for position in (20, 160):
        record = opened(path, secrets, position=position).record
        assert record.state() == read_whole(path)[ledger.run].state()
    assert opened(path, secrets, position=20).record.draws[20].void
    assert verified(path, ledger.run) == []


def test_a_forgotten_draw_is_no_new_one(tmp_path, snapshots):
    """Its index, or its ordinal, comes again in the file: that is found as if nothing were forgotten."""
    path = tmp_path / "journal.jsonl"
    ledger = opened(path, Secrets())
    for _ in range(60):
        release(ledger)
    last = ledger.journal.entries()[-1]
    for changes in ({"index": 5, "ordinal": 60}, {"index": 60, "ordinal": 5}):
        whole = path.read_bytes()
        ledger.journal.append(replace(last, draw=replace(last.draw, **changes)))
        with (
            closing(Journal(path, read_only=True)) as journal,
            pytest.raises(JournalError, match="another draw"),
        ):
            statement_from_journal(journal, ledger.run, DELTA)
        path.write_bytes(whole)


def act(rng, ledgers, path, secrets):
    """One thing that a run may do; what came out of it."""
    which = rng.randrange(len(secrets))
    ledger = ledgers[which]
    kind = rng.choices(
        ["release", "other", "two", "unproven", "disclose", "open", "resume", "changed"],
        [8, 2, 2, 2, 1, 1, 1, 1],
    )[0]
    if kind == "resume":
        position = rng.choice([ledger.position, rng.randrange(ledger.position + 1)])
        try:
            ledgers[which] = opened(path, secrets[which], position=position)
        except JournalError as error:
            return str(error)
        return position
    if kind == "open":
        return ledger.open("batch", f"unreleased {ledger.position}").index
    if kind == "two":
        first, second = (
            ledger.open("batch", f"a {ledger.position}"),
            ledger.open("batch", f"b {ledger.position}"),
        )
        out = []
        for draw in (second, first):
            sums = {"gradient": capped(Private(torch.tensor([1.0]), draw), upper=5.0)}
            out.append(ledger.release(draw, sums)["gradient"]["sum"].tolist())
        return out
    if kind == "unproven":
        draw = ledger.open("batch", f"u {ledger.position}")
        value = {"x": Private(torch.zeros(2), draw)}
        return ledger.release_unproven(draw, "raw", value, 1.0, hole="why", worst_case_multiplier=3.0)[
            "x"
        ].tolist()
    if kind == "disclose":
        draw = ledger.open("batch", f"d {ledger.position}")
        return ledger.disclose(Private(torch.ones(1), draw), hole="a test").tolist()
    try:
        name = "other" if kind == "other" else "batch"
        return release(ledger, name, value=rng.random() if kind == "changed" else 1.0).tolist()
    except ChangedQueryError as error:
        return str(error)


def lived(path, seed):
    """Two runs that share a journal, and whatever happens to them; what came out, and what is booked."""
    rng = random.Random(seed)
    secrets = [Secrets(reproducible_seed=number) for number in (1, 2)]
    ledgers = [opened(path, one) for one in secrets]
    out = [act(rng, ledgers, path, secrets) for _ in range(150)]
    states = [ledger.record.state() for ledger in ledgers]
    spent = [JournalRecords.of(ledger.journal).runs[ledger.run].state() for ledger in ledgers]
    assert states == spent == [record.state() for record in read_whole(path).values()]
    assert [verified(path, ledger.run) for ledger in ledgers] == [[], []]
    return out, states


@pytest.mark.parametrize("seed", range(12))
def test_snapshots_change_nothing(tmp_path, snapshots, monkeypatch, seed):
    """Releases, gaps, disclosures, voids and resumes at any place, of two runs in turn."""
    with_snapshots = lived(tmp_path / "with.jsonl", seed)
    assert len(places(tmp_path / "with.jsonl")) > 2
    monkeypatch.setattr(journal_records, "SNAPSHOT_BYTES", 1 << 40)
    without = lived(tmp_path / "without.jsonl", seed)
    assert not places(tmp_path / "without.jsonl")
    assert json.dumps(with_snapshots) == json.dumps(without)


def test_a_long_journal_without_snapshots_gets_one(tmp_path, snapshots, monkeypatch):
    path, secrets = tmp_path / "journal.jsonl", Secrets()
    with monkeypatch.context() as patch:
        patch.setattr(journal_records, "SNAPSHOT_BYTES", 1 << 40)
        ledger = opened(path, secrets)
        for _ in range(50):
            release(ledger)
    assert not places(path)
    again = opened(path, secrets, position=50)
    release(again)
    assert len(places(path)) == 1
    assert opened(path, secrets, position=51).record.state() == read_whole(path)[ledger.run].state()


def edited(path, change, keep_seals=False):
    """The journal with changed rows; the seals are made anew unless they are kept."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.unlink()
    with closing(Journal(path)) as journal:
        previous = None
        for number, row in enumerate(rows):
            if row["type"] == "snapshot" and not keep_seals:
                previous = journal.seal(number, previous, row["runs"]).start
            else:
                journal.write(row)


def last_snapshot(rows):
    return max(number for number, row in enumerate(rows) if row["type"] == "snapshot")


def test_whoever_verifies_finds_what_was_edited(tmp_path, snapshots):
    path, secrets = tmp_path / "journal.jsonl", Secrets()
    ledger = opened(path, secrets)
    for _ in range(100):
        release(ledger)
    statement = json.loads(statement_from_journal(ledger.journal, ledger.run, DELTA).to_json())
    whole = path.read_bytes()

    def found():
        with closing(Journal(path, read_only=True)) as journal:
            findings = check_with_journal(statement, journal)
        path.write_bytes(whole)
        return [finding.detail for finding in findings if finding.ok is False]

    def fewer(rows):
        for row in rows:
            if row["type"] == "snapshot":
                row["runs"][0]["used"][0] -= 1

    def cut(rows):
        del rows[20]

    def other_answer(rows):
        rows[20]["answer"] = "f" * 64

    assert found() == []
    for change in (other_answer, cut, fewer):
        edited(path, change, keep_seals=True)
        assert any("seal" in text for text in found())
    for change in (cut, fewer):  # by somebody who seals anew
        edited(path, change)
        assert any("does not say what the lines before it add up to" in text for text in found())
    edited(path, lambda rows: None)
    assert path.read_bytes() == whole


def test_damage_near_the_end_is_found_at_the_opening(tmp_path, snapshots):
    path, secrets = tmp_path / "journal.jsonl", Secrets()
    ledger = opened(path, secrets)
    for _ in range(100):
        release(ledger)

    def in_the_snapshot(rows):
        rows[last_snapshot(rows)]["runs"][0]["used"][0] -= 1

    def before_the_snapshot(rows):
        rows[last_snapshot(rows) - 1]["answer"] = "f" * 64

    def nonsense(rows):
        rows[last_snapshot(rows)]["runs"][0].pop("plan")

    whole = path.read_bytes()
    for change in (in_the_snapshot, before_the_snapshot):
        edited(path, change, keep_seals=True)
        with pytest.raises(JournalError, match=r"seal does not fit the lines before it"):
            opened(path, secrets, position=100)
        path.write_bytes(whole)
    edited(path, nonsense)
    with pytest.raises(JournalError, match="does not say what the lines before it add up to"):
        opened(path, secrets, position=100)


def test_a_draw_of_long_ago_is_not_released_any_more(tmp_path, snapshots):
    ledger = opened(tmp_path / "journal.jsonl", Secrets())
    draw = ledger.open("batch")
    for _ in range(60):
        release(ledger)
    with pytest.raises(LedgerError, match="not opened by this ledger, or more than"):
        ledger.release(draw, {"gradient": capped(Private(torch.ones(1), draw), upper=5.0)})


def measured(steps):
    """What the benchmark prints: seconds and MB by question."""
    script = Path(__file__).parents[2] / "benchmarks/journal.py"
    command = [sys.executable, str(script), "--steps", str(steps)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in text.splitlines()[1:]]
    return {name: (float(seconds), float(megabytes)) for name, seconds, _, megabytes, _ in rows}


@pytest.mark.wide
def test_a_journal_of_twenty_thousand_steps(tmp_path):
    found = measured(20_000)
    assert found["open"][0] < 2
    assert found["open"][1] < 60
    assert found["verify"][1] < 200


@pytest.mark.slow
def test_a_journal_of_a_million_steps(tmp_path):
    found = measured(1_000_000)
    assert found["open"][0] < 1
    assert found["spent"][0] < 2
    assert found["verify"][0] < 60
    assert max(megabytes for _, megabytes in found.values()) < 200
