"""A training with secret noise, killed at random moments until it has ended, which notes what it draws.

    python killed_noise.py FOLDER PROCESSES SEED WHAT

WHAT is "same", or "changed": then every life from the third on has another loss, so that the sums are others.
With "bands" behind it noise is correlated over steps.
FOLDER/run gets the run, FOLDER/noise-RANK.jsonl a line for each piece of noise and for each release.
"""

import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from small_problems import RECORDS, loss, network, records

import equipoise as eq
from equipoise.distributed.shared_ledger import SharedLedger
from equipoise.privacy import Ledger
from equipoise.privacy.digests import digest
from equipoise.privacy.noise.streams import NormalStream

STEPS, CHECKPOINT_EVERY, KILLS = 72, 4, 6


def kill_after(calls: int) -> None:
    """Let the process kill itself before or after so many calls: places that no load of a machine moves."""
    left = calls

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def note_noise(file: Path, life: int, run: eq.PrivateTraining) -> None:
    """Write down all noise that is drawn, with the question that it answers, and what is released."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    question: dict[str, Any] = {}

    def note(**what: Any) -> None:
        os.write(descriptor, (json.dumps({"life": life, **question, **what}) + "\n").encode())

    def noting(release: Any) -> Any:
        def noted(self: Any, draw: Any, sums: Any, checks: Any) -> Any:
            asked = {name: [float(one.add_remove), dict(one.value)] for name, one in sums.items()}
            question.update(step=run.steps_done, index=draw.index, sums=digest(asked))
            out = release(self, draw, sums, checks)
            note(released=digest(out))
            return out

        return noted

    draw_on = NormalStream.draw_on

    def noted(self: NormalStream, *given: Any) -> Any:
        out = draw_on(self, *given)
        note(numbers=[value.hex() for part in out.values() for value in part.tolist()])
        return out

    NormalStream.draw_on = noted  # type: ignore[method-assign]
    for ledger in (Ledger, SharedLedger):
        ledger.release = noting(ledger.release)  # type: ignore[attr-defined]


def training(folder: Path, life: int, what: str) -> eq.PrivateTraining:
    scale = 1 + life / 100 if life >= 3 and what.startswith("changed") else 1.0
    method: eq.Method = eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0)
    if what.endswith("bands"):
        method = eq.DPMF(clip_norm=0.5, noise_multiplier=1.0, bands=3)
    model = network(dropout=0.3, dtype=torch.float64)
    return eq.PrivateTraining.start_or_resume(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        loss=lambda model, batch: scale * loss(model, batch),
        data=eq.Data(records(dtype=torch.float64), microbatch_size=5),
        sampling=eq.FixedEpochs(12, RECORDS, STEPS),
        method=method,
        run=folder,
    )


def calls_of_a_step(folder: Path, what: str) -> int:
    """How many calls and returns of functions a step has; all is loaded then."""
    counted = 0

    def count(*_: Any) -> None:
        nonlocal counted
        counted += 1

    run = training(folder / "first", 0, what)
    run.take_step()
    sys.setprofile(count)
    run.take_step()
    sys.setprofile(None)
    run.close()
    return counted


def forked(processes: int, work: Callable[[int], None]) -> list[int]:
    """Processes that form a group and each do the work of their rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()  # of a process with one thread, which has loaded all
        if child:
            children.append(child)
            continue
        if processes > 1:
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
        work(rank)
        sys.exit()
    return children


def ended(children: list[int], victim: int, is_last: bool) -> list[int]:
    """How the processes ended. Those that the victim leaves behind are killed too, but for the last life."""
    ends = {victim: os.waitpid(children[victim], 0)[1]}
    for rank, child in enumerate(children):
        if rank != victim:
            if not is_last:  # it waits for the one that was killed, or ended as that one went
                os.kill(child, signal.SIGKILL)
            ends[rank] = os.waitpid(child, 0)[1]
    return [ends[rank] for rank in range(len(children))]


def live(folder: Path, life: int, what: str, calls: Mapping[int, int], rank: int) -> None:
    run = training(folder / "run", life, what)
    note_noise(folder / f"noise-{rank}.jsonl", life, run)
    if rank in calls:
        kill_after(calls[rank])
    run.run(progress=False, checkpoint_every=CHECKPOINT_EVERY)


def main(folder: Path, processes: int, seed: int, what: str) -> None:
    torch.set_num_threads(1)
    a_step, rng = calls_of_a_step(folder, what), random.Random(seed)
    for life in range(KILLS + 1):
        is_last = life == KILLS
        victim = rng.randrange(processes)
        calls = {} if is_last else {victim: rng.randrange(1, 8 * a_step)}
        ends = ended(forked(processes, partial(live, folder, life, what, calls)), victim, is_last)
        assert ends[victim] == (0 if is_last else signal.SIGKILL), (life, ends)
        assert not is_last or set(ends) == {0}, ends


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
