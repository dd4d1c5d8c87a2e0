"""A training of several processes that may kill one of them: torchrun ... killed_ranks.py RUN_DIR.

The environment says what goes wrong, in the first life of the processes alone:
KILL_RANK, and KILL_AFTER (seconds) or KILL_STEP (between its release and the move of the parameters).
SHARDED says how processes hold parts of the model: "fully", or "cut"; METHOD is one of `METHODS`.
"""

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from sharded_ranks import cut, layers, sharded, values
from small_problems import RECORDS, lines, loss, network, owners, records, releases

import equipoise as eq

STEPS, CHECKPOINT_EVERY = 12, 4
NOISE = {"clip_norm": 0.5, "noise_multiplier": 1.0}
METHODS: dict[str, eq.Method] = {
    "dp-sgd": eq.DPSGD(**NOISE),
    "dp-mf": eq.DPMF(bands=3, **NOISE),
    "dice-sgd": eq.DiceSGD(**NOISE),
    "dp-c4": eq.DPC4(anchor_noise_multiplier=1.0, anchor_batch_size=24, **NOISE),
    "users": eq.DPSGD(**NOISE),
}
"""What `benchmarks/kills.py` trains."""


def entries(folder: Path) -> list[dict]:
    return lines(folder / "run" / "private" / "journal.jsonl")


def ends(folder: Path, processes: int = 2) -> torch.Tensor:
    """The parameters at the end, which all processes share."""
    first, *others = (torch.load(folder / f"end{rank}.pt") for rank in range(processes))
    assert all(torch.equal(first, other) for other in others)
    return first


def check_booked_once(folder: Path) -> None:
    """Each draw is charged once, none is void, no index serves two answers, each step is reported once."""
    kinds = [entry["type"] for entry in entries(folder)]
    assert releases(folder / "run") == list(range(kinds.count("release")))
    released = {(e["draw"], e["ordinal"]) for e in entries(folder) if e["type"] == "release"}
    assert len(released) == kinds.count("release") >= STEPS
    assert "void" not in kinds
    assert kinds.count("run") == kinds.count("close") == 1
    assert [row["step"] for row in lines(folder / "run" / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert eq.verify_run(folder / "run").consistent


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tell_open_group(folder: Path) -> None:
    if torch.distributed.is_initialized():
        (folder / "group-left-open").touch()


def main(run_dir: str) -> None:
    torch.set_num_threads(1)
    life = int(os.environ.get("LIFE", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    rank = int(os.environ.get("RANK", "0"))
    is_mine = life == 0 and os.environ.get("KILL_RANK") == str(rank)
    if is_mine and "KILL_AFTER" in os.environ:
        threading.Timer(float(os.environ["KILL_AFTER"]), die).start()
    began = time.monotonic()
    how = os.environ.get("SHARDED") or None
    if how is None:  # else the script makes the group, and an error of it leaves that open
        # What is registered first is called last.
        atexit.register(tell_open_group, Path(run_dir).parent)
    model = layers().float() if how == "cut" else network(dropout=0.3)
    if how is not None:
        torch.distributed.init_process_group("gloo")
        model = cut(model) if how == "cut" else sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    method = os.environ.get("METHOD", "dp-sgd")
    training = eq.PrivateTraining.start_or_resume(
        model,
        optimizer,
        loss=loss,
        data=eq.Data(records(), microbatch_size=5),
        sampling=eq.FixedEpochs(12, RECORDS, STEPS),
        method=METHODS[method],
        unit=eq.Users(owners(), records_per_user=3) if method == "users" else "record",
        run=eq.Run(run_dir, reproducible=True),
    )
    if is_mine and "KILL_STEP" in os.environ:
        step = optimizer.step

        def dying_step(*args, **kwargs):
            if training.steps_done == int(os.environ["KILL_STEP"]):
                die()
            return step(*args, **kwargs)

        optimizer.step = dying_step
    result = training.run(progress=False, checkpoint_every=CHECKPOINT_EVERY)
    assert result.finished, result
    folder = Path(run_dir).parent
    torch.save(values(model), folder / f"end{rank}.pt")
    (folder / f"seconds{rank}").write_text(str(time.monotonic() - began))
    if how is not None:
        torch.distributed.destroy_process_group()
        # Meshes keep gloo's threads alive. One that lets go of a tensor while Python ends aborts the process
        # now and then (pytorch/pytorch#179291).
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
