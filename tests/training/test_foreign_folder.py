"""A run folder from elsewhere makes and changes nothing outside of itself."""

from __future__ import annotations

import pytest
import torch
from small_problems import loss, network, records, training

import equipoise as eq
from equipoise.privacy import JournalError


@pytest.fixture
def begun(tmp_path):
    """A run that was left after its first step, booked in a ledger of its own."""
    ledger = tmp_path / "ledger.jsonl"
    run = training(steps=3, run_dir=tmp_path / "run", ledger_file=ledger)
    run.take_step()
    run.save_checkpoint()
    run.desk.ledger.journal.close()
    run.folder.unlock()
    return tmp_path / "run"


def resume(folder):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found = eq.PrivateTraining.resume(folder, model, optimizer, loss=loss, data=records())
    found.desk.ledger.journal.close()
    found.folder.unlock()


OTHER_RUN = b'{"type":"run","run":"0123456789abcdef"}\n'


@pytest.mark.parametrize("content", [None, b"", b"a line without an end", b"{}\n", OTHER_RUN, b"[" * 10**5])
@pytest.mark.parametrize("place", ["there", "new/deep/there"])
def test_a_ledger_file_is_neither_made_nor_changed(begun, tmp_path, content, place):
    there = tmp_path / place
    if content is not None:
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    (begun / "private" / "ledger_file").write_text(str(there))
    with pytest.raises(JournalError):
        resume(begun)
    assert sorted(tmp_path.iterdir()) == before
    assert not there.exists() if content is None else there.read_bytes() == content


def test_the_ledger_that_the_run_was_booked_in_may_have_moved(begun, tmp_path):
    (tmp_path / "ledger.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(JournalError, match="name the journal that the run was booked in"):
        resume(begun)
    assert not (tmp_path / "ledger.jsonl").exists()
    (begun / "private" / "ledger_file").write_text(str(tmp_path / "moved.jsonl"))
    resume(begun)


def test_a_lost_journal_is_not_begun_anew(begun):
    (begun / "private" / "ledger_file").unlink()
    with pytest.raises(JournalError, match="cannot be opened"):
        resume(begun)
    assert not (begun / "private" / "journal.jsonl").exists()
