"""Secret noise of a run killed at random moments: one question keeps its noise, and shares it with none."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from killed_noise import KILLS, STEPS
from small_problems import lines, releases

import equipoise as eq

SCRIPT = Path(__file__).with_name("killed_noise.py")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def check_noise(noted: list[dict]) -> None:
    """A question that comes again gets the same bits and is booked once; no number serves two questions."""
    answers = defaultdict(list)  # by question, each time that it was answered
    for line in noted:
        kind = "numbers" if "numbers" in line else "released"
        answers[kind, line["step"], line["sums"], line["index"]].append(line[kind])
    for given in answers.values():
        assert all(one == given[0] for one in given)
    assert any(len(given) > 1 for given in answers.values())
    asked = {question[1:]: set(given[0]) for question, given in answers.items() if question[0] == "numbers"}
    # Of 63 random bits each: no two are equal by chance.
    assert len(set().union(*asked.values())) == sum(map(len, asked.values()))
    assert len(asked) == len({index for *_, index in asked}) == len({tuple(same) for *same, _ in asked})


def check_killed(folder: Path, processes: int, seed: int, what: str) -> None:
    command = [sys.executable, SCRIPT, folder, str(processes), str(seed), what]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    noted = [lines(folder / f"noise-{rank}.jsonl") for rank in range(processes)]
    for of_rank in noted:
        check_noise(of_rank)
    of_ranks = [{number for line in of_rank for number in line.get("numbers", ())} for of_rank in noted]
    assert len(set().union(*of_ranks)) == sum(map(len, of_ranks))  # each draws numbers of its own
    assert {line["life"] for line in noted[0]} >= {0, KILLS}
    assert releases(folder / "run") == list(range(STEPS))
    assert {line["index"] for line in noted[0]} <= set(range(STEPS))
    entries = lines(folder / "run" / "private" / "journal.jsonl")
    steps = len(lines(folder / "run" / "metrics.jsonl"))
    assert {line["step"] for line in noted[0]} == set(range(steps))
    if what.startswith("same"):
        assert steps == STEPS
    else:
        # Fewer where a kill fell between a release and its step, which random moments may miss.
        assert (steps < STEPS) == ("void" in {entry["type"] for entry in entries})
    assert eq.verify_run(folder / "run").consistent


def test_no_noise_is_reused_in_a_run_killed_at_random_moments(tmp_path):
    check_killed(tmp_path, 1, 0, "changed")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_no_noise_is_reused_whatever_is_killed(tmp_path, seed):
    whats = ["same", "same bands", "changed bands", "same", "changed", "changed bands"]
    check_killed(tmp_path, 1 + (seed > 3), seed, whats[seed - 1])
