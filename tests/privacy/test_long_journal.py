"""Journals of many entries, of runs to which everything happens, and those of earlier versions."""

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

from equipoise import privacy as ep
from equipoise.privacy import capped
from equipoise.privacy.ledger.journal_records import JournalRecords
from equipoise.privacy.sampling import FixedEpochs
from equipoise.published import PublishedLedger, PublishedPlan, Unproven
from equipoise.statements import check_with_journal, statement_from_journal

DELTA = 1e-5
PLAN = PublishedPlan(
    [
        ep.Release("gradient", 5.0, ep.Gaussian(2.0)),
        ep.Release("norm", 5.0, ep.Gaussian(6.0), draw="other", count=100),
    ],
    FixedEpochs(10, 100, 400),
    unproven=[Unproven("raw", count=400)],
)


def release(ledger, name="batch", parameters="p", value=1.0):
    draw = ledger.open(name, f"{parameters} {ledger.position}")
    bounded = capped(ep.Private(torch.tensor([value]), draw), upper=5.0)
    (out,) = ledger.release(draw, {"gradient" if name == "batch" else "norm": bounded}).values()
    return out["sum"]


def opened(path, secrets, **options):
    return PublishedLedger(PLAN, journal=ep.Journal(path), secrets=secrets, **options)


def verified(path, run):
    with closing(ep.Journal(path, read_only=True)) as journal:
        statement = json.loads(statement_from_journal(journal, run, DELTA).to_json())
        findings = check_with_journal(statement, journal)
    return [finding.detail for finding in findings if finding.ok is False]


@pytest.mark.parametrize("position", [0, 3, 55])
def test_a_run_goes_on_anywhere(tmp_path, position):
    path, secrets = tmp_path / "journal.jsonl", ep.Secrets()
    ledger = opened(path, secrets)
    first = [release(ledger) for _ in range(60)]
    again = opened(path, secrets, position=position)
    for number in range(position, 60):
        assert torch.equal(release(again), first[number])
    assert again.record.used == ledger.record.used
    release(again)
    assert verified(path, ledger.run) == []
    last = again.journal.entries()[-1]
    for changes in ({"index": 5, "ordinal": 61}, {"index": 61, "ordinal": 5}):  # a draw has one of each
        whole = path.read_bytes()
        again.journal.append(replace(last, draw=replace(last.draw, **changes)))
        with pytest.raises(ep.JournalError, match="another draw"):
            verified(path, ledger.run)
        path.write_bytes(whole)


def act(rng, ledgers, path, secrets):
    """One thing that a run may do; what came out of it."""
    which = rng.randrange(len(secrets))
    ledger = ledgers[which]
    kinds = {
        "release": 8,
        "other": 2,
        "two": 2,
        "unproven": 2,
        "disclose": 1,
        "open": 1,
        "resume": 1,
        "changed": 1,
    }
    kind = rng.choices([*kinds], [*kinds.values()])[0]
    if kind == "resume":
        position = rng.choice([ledger.position, rng.randrange(ledger.position + 1)])
        try:
            ledgers[which] = opened(path, secrets[which], position=position)
        except ep.JournalError as error:
            return str(error)
        return position
    if kind == "open":
        return ledger.open("batch", f"unreleased {ledger.position}").index
    if kind == "two":
        draws, out = [ledger.open("batch", f"{which} {ledger.position}") for which in "ab"], []
        for draw in draws[::-1]:
            sums = {"gradient": capped(ep.Private(torch.tensor([1.0]), draw), upper=5.0)}
            out.append(ledger.release(draw, sums)["gradient"]["sum"].tolist())
        return out
    if kind == "unproven":
        draw = ledger.open("batch", f"u {ledger.position}")
        value = {"x": ep.Private(torch.zeros(2), draw)}
        out = ledger.release_unproven(draw, "raw", value, 1.0, hole="why", worst_case_multiplier=3.0)
        return out["x"].tolist()
    if kind == "disclose":
        draw = ledger.open("batch", f"d {ledger.position}")
        return ledger.disclose(ep.Private(torch.ones(1), draw), hole="a test").tolist()
    try:
        name = "other" if kind == "other" else "batch"
        return release(ledger, name, value=rng.random() if kind == "changed" else 1.0).tolist()
    except ep.ChangedQueryError as error:
        return str(error)


def lived(path, seed):
    """Two runs that share a journal, and whatever happens to them; what came out, and what is booked."""
    rng = random.Random(seed)
    secrets = [ep.Secrets(reproducible_seed=number) for number in (1, 2)]
    ledgers = [opened(path, one) for one in secrets]
    out = [act(rng, ledgers, path, secrets) for _ in range(150)]
    records = [ledger.record for ledger in ledgers]
    assert records == [JournalRecords.of(ledger.journal).runs[ledger.run] for ledger in ledgers]
    with closing(ep.Journal(path, read_only=True)) as journal:
        assert records == list(JournalRecords.of(journal).runs.values())
    assert [verified(path, ledger.run) for ledger in ledgers] == [[], []]
    return out, path.read_text()


@pytest.mark.parametrize("seed", range(2))
def test_lines_of_earlier_versions_change_nothing(tmp_path, monkeypatch, seed):
    """Releases, gaps, disclosures, voids and resumes at any place, of two runs in turn."""
    out, text = lived(tmp_path / "now.jsonl", seed)
    write = ep.Journal.write

    def with_snapshots(journal, row):
        length = write(journal, row)
        return length if length % 5 else write(journal, {"type": "snapshot", "start": 0, "runs": []})

    monkeypatch.setattr(ep.Journal, "write", with_snapshots)
    again, longer = lived(tmp_path / "then.jsonl", seed)
    assert out == again
    assert "snapshot" in longer
    assert text == "".join(line for line in longer.splitlines(True) if "snapshot" not in line)


@pytest.mark.wide
def test_a_journal_of_a_hundred_thousand_steps():
    """What the benchmark prints: seconds and MB by question."""
    script = Path(__file__).parents[2] / "benchmarks/journal.py"
    command = [sys.executable, str(script), "--steps", "100000"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = {row[0]: row for row in (line.split() for line in text.splitlines()[1:])}
    assert float(rows["open"][1]) < 15  # seconds, 2 on a quiet machine; minutes if it grew by the square
    assert max(float(row[3]) for row in rows.values()) < 300
