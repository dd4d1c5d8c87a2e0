"""A run folder from elsewhere makes and changes nothing outside of itself."""

import json
import os
import shutil
import signal
from contextlib import nullcontext

import pytest
from small_problems import resumed, saved, training

import equipoise as eq
import equipoise.training
from equipoise.privacy import JournalError
from equipoise.report import RunFolderError, read_run
from equipoise.statements.assumptions import ALLOWED, DATA, MODEL, ROUNDED


@pytest.fixture
def begun(tmp_path):
    """A run that was left after its first step, booked in a ledger of its own."""
    ledger = tmp_path / "ledger.jsonl"
    run = training(steps=3, folder=tmp_path / "run", journal=ledger)
    saved(run)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    training(steps=2, folder=folder).run(progress=False)
    return folder


OTHER_RUN = b'{"type":"run","run":"0123456789abcdef"}\n'


@pytest.mark.parametrize(
    ("content", "place"),
    [(None, "new/deep/there"), (b"a line without an end", "there"), (OTHER_RUN, "there")],
)
def test_a_ledger_file_is_neither_made_nor_changed(begun, tmp_path, content, place):
    there = tmp_path / place
    if content is not None:
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    (begun / "private" / "ledger_file").write_text(str(there))
    with pytest.raises(JournalError):
        resumed(begun).close()
    assert sorted(tmp_path.iterdir()) == before
    assert not there.exists() if content is None else there.read_bytes() == content


def test_the_ledger_that_the_run_was_booked_in_may_have_moved_and_is_not_begun_anew(begun, tmp_path):
    (tmp_path / "ledger.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(JournalError, match="name the journal that the run was booked in"):
        resumed(begun).close()
    assert not (tmp_path / "ledger.jsonl").exists()
    (begun / "private" / "ledger_file").write_text(str(tmp_path / "moved.jsonl"))
    resumed(begun).close()
    (begun / "private" / "ledger_file").unlink()
    with pytest.raises(JournalError, match="cannot be opened"):
        resumed(begun).close()
    assert not (begun / "private" / "journal.jsonl").exists()


@pytest.fixture
def soon():
    """A pipe that is waited for ends the test instead of the patience."""

    def late(*_):
        raise AssertionError("it waits")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)


WRITTEN = ["private", "checkpoint", "metrics.jsonl", "private/lock", "private/key", "private/journal.jsonl"]
READ = ["private/journal.jsonl", "checkpoint/step-00000001.pt", "config.json"]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "link") for name in WRITTEN), *((name, "pipe") for name in READ)]
)
def test_a_run_goes_on_with_files_of_its_own_alone(begun, tmp_path, soon, name, kind):
    path, outside = begun / name, tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("of somebody else\n")
    mode, content = outside.stat().st_mode, outside.read_bytes() if outside.is_file() else None
    if kind == "link":
        path.symlink_to(outside)
    else:
        os.mkfifo(path)
    with pytest.raises((eq.training.CheckpointError, eq.privacy.JournalError, ValueError, OSError)):
        resumed(begun).close()
    assert outside.stat().st_mode == mode
    assert content is None or outside.read_bytes() == content


@pytest.mark.parametrize(
    "name", ["statement.json", "config.json", "model.safetensors", "private/journal.jsonl"]
)
def test_no_reader_waits_for_a_pipe(finished, tmp_path, soon, name):
    folder = shutil.copytree(finished, tmp_path / "copy")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused = pytest.raises(RunFolderError, match=name) if name == "statement.json" else nullcontext()
    for read in (eq.verify_run, read_run):
        with refused:  # the others count as not there
            read(folder)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def before_numbers(config):
    del config["engine"], config["version"]


def test_an_unfinished_run_of_an_earlier_engine_names_who_resumes_it(tmp_path):
    folder = tmp_path / "run"
    saved(training(steps=3, folder=folder))
    edit(folder / "config.json", lambda config: config.update(version="0.0.7"))
    resumed(folder).close()
    before = (folder / "private" / "journal.jsonl").read_bytes()
    for change, named in (
        (lambda config: config.update(engine=1), "equipoise==0.0.7"),
        (before_numbers, "the version that began it"),
    ):
        edit(folder / "config.json", change)
        with pytest.raises(ValueError, match=named):
            resumed(folder).close()
        assert (folder / "private" / "journal.jsonl").read_bytes() == before


def test_a_finished_run_of_an_earlier_version_verifies(tmp_path):
    folder = tmp_path / "run"
    training(steps=2, folder=folder).run(progress=False)

    def earlier(held):
        kept = [t for t in held["assumptions"] if t != ROUNDED and not t.startswith((MODEL, DATA))]
        held["assumptions"] = [*kept, ALLOWED, "rounding is not counted, said in other words"]
        for name in ("independence", "noise_tail"):
            held.pop(name, None)

    def edited():
        return [finding.subject for finding in eq.verify_run(folder).findings if finding.ok is False]

    edit(folder / "statement.json", earlier)
    edit(folder / "config.json", lambda config: config.update(assumptions=[]))
    assert edited() == ["assumptions"]  # of this version it would be
    edit(folder / "config.json", before_numbers)
    assert edited() == []
