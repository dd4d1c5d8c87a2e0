"""Runs that SIGKILL ends at random moments and that are resumed until they end, over five methods.

    python benchmarks/kills.py --runs 60 20 20      # in one process, data parallel in two, sharded over two

Each must end with the parameters of the run that was never killed, bit for bit, and with its journal: every
draw is booked once. A run is killed up to three times. In each life one of its processes is killed, half of
the time after a time that is uniform up to that of the run that was never killed, else after a release of
those to come, up to a step later. Its peers, which wait for it, are killed then, and all are started again.
Of the kills the output says how many came before the first release of the run, and between two. If a run
fails, its folder stays, with what the processes said in `errors`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / room) for room in ("training", "gradients")]

import killed_ranks  # noqa: E402
from killed_noise import ended, forked  # noqa: E402
from killed_ranks import METHODS  # noqa: E402

#: Whether processes hold parts of the model, as `killed_ranks` reads it, and how many there are.
PLACES = {"single": ("", 1), "data parallel": ("", 2), "sharded": ("fully", 2)}
NOT_SHARDED = ["dp-mf"]  # it refuses a model of which processes hold parts
#: A choice: the second and third life begin with what a killed one has left, and each costs a start.
MOST_KILLS = 3
#: So that a time of the run that is drawn has a chance to meet a step: the 12 of the tests are over at once.
STEPS = 60

Wait = Callable[[int], None]  # until the moment to kill, given the process


def live(folder: Path, method: str, place: str, victim: int = 0, wait: Wait | None = None) -> int:
    """Start the run or go on with it, and kill the victim after a wait; how that process ended."""
    how, processes = PLACES[place]
    os.environ |= {"METHOD": method, "SHARDED": how}

    def work(rank: int) -> None:
        os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
        killed_ranks.main(str(folder / "run"))

    children = forked(processes, work)
    if wait is not None:
        wait(children[victim])
        os.kill(children[victim], signal.SIGKILL)  # one that has ended is still there: it is waited for below
    status = ended(children, victim, is_last=wait is None)
    is_right = set(status) == {0} if wait is None else status[victim] in (0, signal.SIGKILL)
    assert is_right, f"{folder}: the processes ended with {status}"
    return status[victim]


def releases(folder: Path) -> int:
    """How many a journal holds, whose last line may be cut."""
    journal = folder / "run" / "private" / "journal.jsonl"
    return journal.read_text().count('"type":"release"') if journal.exists() else 0


def random_wait(folder: Path, most: int, seconds: float, rng: random.Random) -> Wait:
    """Of a run that makes `most` releases in so many seconds."""
    share, delay, by_time = rng.random(), rng.uniform(0, seconds / most), rng.random() < 0.5
    booked = releases(folder)

    def wait(process: int) -> None:
        if by_time:
            time.sleep(share * seconds)
            return
        while releases(folder) < booked + share * (most - booked):
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(0.001)
        time.sleep(delay)

    return wait


def whole(folder: Path, method: str, place: str) -> Path:
    """The folder of a run that is never killed."""
    folder.mkdir()
    live(folder, method, place)
    killed_ranks.check_booked_once(folder)
    return folder


def killed(folder: Path, whole: Path, method: str, place: str, rng: random.Random) -> list[float]:
    """.

    After which share of its releases the kills came; AssertionError if it does not end as the whole one.
    """
    folder.mkdir()
    processes, seconds, most = PLACES[place][1], float((whole / "seconds0").read_text()), releases(whole)
    shares = []
    for _ in range(rng.randint(1, MOST_KILLS)):
        wait = random_wait(folder, most, seconds, rng)
        if live(folder, method, place, rng.randrange(processes), wait):
            shares.append(releases(folder) / most)
    live(folder, method, place)
    killed_ranks.check_booked_once(folder)
    assert killed_ranks.entries(folder) == killed_ranks.entries(whole), f"{folder}: another journal"
    same = torch.equal(killed_ranks.ends(folder, processes), killed_ranks.ends(whole, processes))
    assert same, f"{folder}: other bits"
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--runs", type=int, nargs=3, default=(60, 20, 20), metavar="COUNT", help=", ".join(PLACES)
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    killed_ranks.STEPS = STEPS
    rng, root = random.Random(given.seed), Path(tempfile.mkdtemp(prefix="kills-"))
    for place, count in zip(PLACES, given.runs, strict=True):
        began, shares = time.monotonic(), list[float]()
        methods = [name for name in METHODS if place != "sharded" or name not in NOT_SHARDED][:count]
        wholes = {method: whole(root / f"{place} {method}", method, place) for method in methods}
        for number, method in zip(range(count), itertools.cycle(methods), strict=False):
            folder = root / f"{place} {number}"
            shares += killed(folder, wholes[method], method, place, rng)
            shutil.rmtree(folder)
        between = sum(0 < share < 1 for share in shares)
        where = f"{shares.count(0)} before the first release, {between} between two"
        print(f"{place}: {count} runs of {len(methods)} methods, {len(shares)} kills ({where}):", end=" ")
        print(f"each as the run that was never killed; {time.monotonic() - began:.0f} s", flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
