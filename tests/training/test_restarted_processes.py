"""Several processes, one of which is killed: what was booked stays, nothing is booked or noised twice."""

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flat_arguments import arranged
from killed_ranks import STEPS, check_booked_once, ends, entries
from small_problems import lines, loss, network, records

import equipoise as eq
from equipoise.report import RunFolderError, read_run

SCRIPT = Path(__file__).with_name("killed_ranks.py")


def launch(folder: Path, processes: int = 2, restarts: int = 0, check: bool = True, **told: object) -> str:
    """Run the script under torchrun until it ends; with restarts, torchrun starts it again after a kill.

    Returns:
        What it printed on standard error.
    """
    environment = os.environ | {name: str(value) for name, value in told.items()}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    command += [str(processes), "--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    options = {"env": environment, "check": False, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*command, SCRIPT, folder / "run"], **options)
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
        assert not (folder / "group-left-open").exists()
    else:
        assert done.returncode != 0
    return done.stderr


#: How the processes share the model, and what its script then needs.
SHARED = {
    "whole": {},
    "fully": {"SHARDED": "fully", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    "cut": {"SHARDED": "cut", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[str], Path]:
    """The folders of runs that nobody disturbs, by how the processes share the model."""

    @functools.cache
    def made(how: str) -> Path:
        folder = tmp_path_factory.mktemp(how)
        launch(folder, **SHARED[how])
        check_booked_once(folder)
        return folder

    return made


@pytest.mark.parametrize(("how", "rank"), [("whole", 0), ("fully", 1), ("cut", 1)])
def test_processes_go_on_exactly_after_a_kill(tmp_path, undisturbed, how, rank):
    launch(tmp_path, restarts=1, KILL_RANK=rank, KILL_STEP=6, **SHARED[how])
    check_booked_once(tmp_path)
    assert torch.equal(ends(tmp_path), ends(undisturbed(how)))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on_and_is_charged_by_the_rules(tmp_path, before, after):
    launch(tmp_path, before, check=False, KILL_RANK=before - 1, KILL_STEP=6)
    said = launch(tmp_path, after, LIFE=1)
    assert f"goes on in {after} process{'es' * (after > 1)}, its checkpoint is of {before}" in said
    assert "so up to 3 draws since the checkpoint are charged again" in said
    assert f"ended after {STEPS - 3} of its {STEPS} steps" in said
    released = [entry for entry in entries(tmp_path) if entry["type"] == "release"]
    # Three steps since the checkpoint were booked. They are asked in another way: other noise, a new charge.
    assert [entry["index"] for entry in released] == list(range(STEPS))
    assert len({entry["answer"] for entry in released}) == STEPS
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, STEPS + 1 - 3))
    assert eq.verify_run(tmp_path / "run").consistent
    assert not read_run(tmp_path / "run").is_unfinished
    ends(tmp_path, after)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(10))
@pytest.mark.parametrize("how", SHARED)
def test_torchrun_restarts_a_run_killed_at_ten_random_moments(tmp_path, undisturbed, how, trial):
    rng, whole = random.Random(f"{how} {trial}"), undisturbed(how)
    rank = rng.randrange(2)
    after = rng.random() * float((whole / f"seconds{rank}").read_text())
    launch(tmp_path, restarts=1, KILL_RANK=rank, KILL_AFTER=after, **SHARED[how])
    check_booked_once(tmp_path)
    assert torch.equal(ends(tmp_path), ends(whole))


def script(folder: Path, model=None, **options):
    """What a script calls each time that it is started."""
    model = model or network()
    usual = {"folder": folder, "loss": loss, "data": records(), "sampling": eq.Poisson(12, 60, 6)}
    usual["method"] = eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return eq.PrivateTraining.start_or_resume(model, optimizer, **arranged(**(usual | options)))


def test_a_script_starts_goes_on_and_finds_its_end(tmp_path):
    first = script(tmp_path / "run")
    first.take_step()
    first.save_checkpoint()
    first.close()
    second = script(tmp_path / "run")
    assert second.steps_done == 1
    result = second.run(progress=False)
    model = network()
    third = script(tmp_path / "run", model)
    assert list(third) == []
    assert third.run(progress=False).statement == result.statement
    assert third.steps_done == third.finish().steps == 6
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_a_script_with_other_settings_is_refused_by_name(tmp_path):
    script(tmp_path / "run").close()
    with pytest.raises(ValueError, match=r"seed=3 differs from the seed=0.*new folder"):
        script(tmp_path / "run", seed=3)
    with pytest.raises(ValueError, match=r"sampling=Poisson\(.*differs from"):
        script(tmp_path / "run", sampling=eq.Poisson(12, 60, 7))


def test_a_start_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    options = {"journal": tmp_path / "shared.jsonl"}
    killed = script(tmp_path / "run", **options)
    killed.close()
    for file in (tmp_path / "run" / "checkpoint").iterdir():
        file.unlink()
    again = script(tmp_path / "run", **options)
    assert again.steps_done == 0
    again.run(progress=False)
    assert [line["type"] for line in lines(tmp_path / "shared.jsonl")] == [
        "run",
        "close",
        "run",
        *["release"] * 6,
        "close",
    ]


def test_releases_without_a_checkpoint_are_no_start_that_came_to_nothing(tmp_path):
    run = script(tmp_path / "run")
    run.take_step()
    run.close()
    for file in (tmp_path / "run" / "checkpoint").iterdir():
        file.unlink()
    with pytest.raises(RunFolderError, match="its journal holds releases"):
        script(tmp_path / "run")
