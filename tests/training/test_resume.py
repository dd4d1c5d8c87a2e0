"""A killed run that is resumed ends where the uninterrupted one ends, and pays once."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from killed_run import STEPS, start
from small_problems import (
    OnDemand,
    check_named,
    lines,
    parameters,
    records,
    releases,
    resumed,
    saved,
    training,
)

import equipoise as eq
from equipoise.app.run_checks import is_finished
from equipoise.privacy import Secrets
from equipoise.report import read_run
from equipoise.statements.assumptions import Assumption
from equipoise.training import CheckpointError
from equipoise.training.setup import micro_batches


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], Path]:
    """The folders of runs that nothing interrupts, by what they train."""

    @functools.cache
    def made(what: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        torch.save(parameters(start(str(folder), what=what)), folder.parent / "parameters.pt")
        return folder

    return made


def end_of(folder: Path) -> torch.Tensor:
    return torch.load(folder.parent / "parameters.pt", weights_only=True)


def kill_and_resume(folder: Path, step: int, where: str, what: str = "threshold") -> torch.Tensor:
    script = Path(__file__).with_name("killed_run.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, folder, str(step), where, what]
    done = subprocess.run(command, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    return parameters(start(str(folder), what=what, resume=True))


def check(folder: Path, got: torch.Tensor, uninterrupted: torch.Tensor) -> None:
    assert torch.equal(got, uninterrupted)
    assert releases(folder) == list(range(STEPS))  # nothing charged twice
    assert [row["step"] for row in lines(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))


#: The host waits for a device ("read") before the draw, before the booking and after the release.
#: The host waits for a device ("read") before the draw, before the booking and after the release.
KILLED = [("threshold", 6, "update"), ("bands in slots", 9, "forward"), ("updates of users", 6, "read 2")]
#: In the first stage; the checkpoint before is four steps back.
WIDE = [("stages", 5, "update"), ("threshold", 7, "checkpoint"), ("threshold", 5, "read 1")]
WIDE += [("bands", 6, "update"), ("updates of users, bands", 6, "update")]
KILLED += [pytest.param(*case, marks=pytest.mark.wide) for case in WIDE]


@pytest.mark.parametrize(("what", "step", "where"), KILLED)
def test_killed_and_resumed(tmp_path, whole, what, step, where):
    """What the noise goes on from is in the checkpoint: it ends at the same bits and the same epsilon."""
    folder = tmp_path / "run"
    check(folder, kill_and_resume(folder, step, where, what), end_of(whole(what)))
    mine, other = (json.loads((run / "statement.json").read_text()) for run in (folder, whole(what)))
    assert (mine["epsilon"], mine["guarantee"]) == (other["epsilon"], "proven")
    assert eq.verify_run(folder).consistent


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(10))
def test_killed_at_ten_random_places(tmp_path, whole, trial):
    """Before the last checkpoint, which comes after the last step: a later death is no interruption."""
    rng, folder = random.Random(trial), tmp_path / "run"
    where = rng.choice(["forward", "update", "checkpoint"])
    check(folder, kill_and_resume(folder, rng.randrange(STEPS - 1), where), end_of(whole("threshold")))


def begin(folder: Path, steps: int, take: int, **options):
    """A run of `steps` steps whose first `take` are done and saved."""
    run = training(steps=steps, folder=folder, **options)
    for _ in range(take):
        run.take_step()
    run.save_checkpoint()
    return run


def changed():
    data = records()
    data["input"][0] += 1
    return data


def test_a_corrupt_checkpoint_falls_back_to_the_one_before(tmp_path):
    run = begin(tmp_path / "run", 6, 2)
    saved(run)
    newest = tmp_path / "run" / "checkpoint" / "step-00000003.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"step-00000003.pt is corrupt: its checksum is wrong"):
        again = resumed(tmp_path / "run")
    assert again.steps_done == again.describe().steps_done == 2
    list(again)
    whole = training(steps=6)
    list(whole)
    assert torch.equal(parameters(again.model), parameters(whole.model))


def test_a_run_keeps_its_microbatches(tmp_path, monkeypatch):
    """Also if another size would be chosen now: other shapes would be another question."""
    run = begin(tmp_path / "run", 4, 1)
    size = run.config()["settings"]["micro_batch_size"]
    run.close()
    with pytest.raises(ValueError, match="microbatch_size"):
        resumed(tmp_path / "run", microbatch_size=size - 1)
    monkeypatch.setattr(micro_batches, "micro_batch_sizes", lambda *given: [size + 4])
    assert resumed(tmp_path / "run").config()["settings"]["micro_batch_size"] == size


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    run = begin(tmp_path / "run", 4, 1)
    run.take_step()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="free some space"):
            run.save_checkpoint()
    run.close()
    assert not list((tmp_path / "run" / "checkpoint").glob(".*tmp"))
    resumed(tmp_path / "run").close()
    for path in (tmp_path / "run" / "checkpoint").glob("*.pt"):
        path.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        resumed(tmp_path / "run")


def test_the_journal_is_on_the_device_before_a_checkpoint_that_counts_on_it(tmp_path, monkeypatch):
    run, seen = begin(tmp_path / "run", 4, 1), []
    journal = (tmp_path / "run" / "private" / "journal.jsonl").stat().st_ino

    def noting(name, note):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given: (seen.append(note(*given)), real(*given))[1])

    for name in ("fsync", "fdatasync"):
        noting(name, lambda file: "journal" if os.fstat(file).st_ino == journal else "other")
    noting("replace", lambda source, target: Path(target).suffix)
    run.take_step()
    run.save_checkpoint()
    assert "journal" in seen[: seen.index(".pt")]


def test_changed_data_get_fresh_noise_and_are_charged(tmp_path):
    run = begin(tmp_path / "run", 6, 2)
    run.take_step()  # booked, but not in a checkpoint
    run.close()
    with pytest.warns(UserWarning, match="other records than those that this run began with"):
        again = resumed(tmp_path / "run", data=changed())
    again.take_step()
    assert again.ledger.releases_left == {"batch": 2}
    assert Assumption.OTHER_DATA in again.statement().assumptions
    assert Assumption.OTHER_DATA in json.loads((tmp_path / "run/config.json").read_text())["assumptions"]
    again.close()
    same = resumed(tmp_path / "run")
    same.take_step()
    assert same.ledger.releases_left == {"batch": 2}


def test_a_statement_names_what_any_process_of_its_run_assumed(tmp_path, monkeypatch):
    folder, sampling = tmp_path / "run", eq.FullBatch(60, 5)
    run = begin(folder, 5, 2, sampling=sampling)
    assert Assumption.SCANNED in run.statement().assumptions
    run.close()
    # What this process found stays, though it is killed before its first checkpoint.
    run = resumed(folder, data=OnDemand(records()))
    run.take_step()
    run.close()
    with monkeypatch.context() as patch:
        patch.setenv("EQUIPOISE_EAGER", "1")
        run = resumed(folder)
        run.take_step()
    run.close()
    resumed(folder).run(progress=False)
    assert Assumption.SCANNED not in (folder / "statement.json").read_text()
    check_named(folder, Assumption.TRUSTED, Assumption.SHAPES_ALIKE, Assumption.KEEPS_NOTHING)


def test_a_plan_that_is_used_up_early_ends_the_run(tmp_path):
    sampling = eq.FixedEpochs(12, 60, 6)
    run = begin(tmp_path / "run", 6, 2, sampling=sampling)
    run.take_step()  # booked, then repeated with other data: charged twice
    run.close()
    again = resumed(tmp_path / "run", data=changed())
    with pytest.warns(UserWarning, match="ended after 5 of its 6 steps"):
        result = again.run(progress=False)
    assert result.finished
    assert result.steps == 5
    found = read_run(tmp_path / "run")
    assert (found.steps_in_words, found.ended_early, found.is_unfinished) == ("5 of 6", True, False)
    assert is_finished(str(tmp_path / "run"))


def test_a_stop_among_steps_that_are_repeated_is_no_end(tmp_path):
    run = begin(tmp_path / "run", 6, 4)
    for _ in range(2):
        run.take_step()
    run.close()
    again = resumed(tmp_path / "run")
    again.take_step()
    result = again.finish()
    assert all(one["used"] == one["count"] for one in json.loads(result.statement.to_json())["releases"])
    assert not result.finished
    assert read_run(tmp_path / "run").is_unfinished


def test_what_does_not_fit_is_named(tmp_path):
    folder = tmp_path / "run"
    begin(folder, 4, 1)
    noise = {"clip_norm": 0.5, "noise_multiplier": 0.5}
    for given, words in (
        ({"model": torch.nn.Linear(12, 3)}, r"do not fit the checkpoint.*Linear"),
        ({"optimizer": torch.optim.Adam}, "optimizer='Adam' differs from the optimizer='SGD'"),
        ({"method": eq.DPSGD(**noise)}, r"noise_multiplier=0\.5"),
        ({"method": eq.DPMF(bands=2, **noise)}, "method='dp-mf'"),
    ):
        with pytest.raises(ValueError, match=words):
            resumed(folder, **given)
    with pytest.raises(FileNotFoundError, match="no run"):
        resumed(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="start_or_resume"):
        training(folder=folder)
    config = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"assumptions": ["nothing is assumed"]}, "nothing is assumed.*version that began the run"),
        ({"method": config["method"] | {"old_gamma": 1}}, "old_gamma"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=words):
            resumed(folder)


def test_killed_before_its_key_goes_it_repeats_and_releases_nothing_more(tmp_path, monkeypatch):
    """Its end is booked, another run has begun since: the last steps are repeated, and the key goes."""
    shared = {"journal": tmp_path / "ledger.jsonl", "reproducible": False}
    sampling = eq.FixedEpochs(12, 60, 4)  # in closed form: quick
    plan = training(sampling=sampling).plan.epsilon(1e-3).value
    budget = eq.Budget(1.05 * plan, 1e-3)
    run = begin(tmp_path / "a", 4, 2, sampling=sampling, budget=budget, **shared)
    last = [run.take_step() for _ in range(2)][-1]

    def die(self):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Secrets, "delete", die)
        with pytest.raises(SystemExit):
            run.finish()
    run.close()
    training(sampling=sampling, budget=eq.Budget(50.0, 1e-3), folder=tmp_path / "b", **shared)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    again = resumed(tmp_path / "a")
    result = again.run(progress=False)
    assert (result.finished, result.steps) == (True, last.step)
    assert torch.equal(parameters(again.model), parameters(run.model))
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    assert not (tmp_path / "a" / "private" / "key").exists()


def test_a_run_belongs_to_one_training_at_a_time(tmp_path):
    run = begin(tmp_path / "run", 6, 2)
    with pytest.raises(RuntimeError, match="another training of this one"):
        resumed(tmp_path / "run")
    lock = tmp_path / "run" / "private" / "lock"
    command = [sys.executable, "-c", "import fcntl, sys; fcntl.flock(open(sys.argv[1]), 6)", lock]
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode  # another process, too
    run.take_step()
    run.close()
    for closed in (run.take_step, run.finish, run.save_checkpoint):
        with pytest.raises(RuntimeError, match=r"was closed: .*resume"):
            closed()
    run = resumed(tmp_path / "run")
    assert run.run(progress=False).steps == 6
    assert resumed(tmp_path / "run").steps_done == 6  # one that has finished has let go of the folder
