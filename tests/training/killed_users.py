"""A training of users that kills itself in its fifth step: python killed_users.py RUN_DIR [mean]."""

from __future__ import annotations

import os
import signal
import sys

import torch
from flat_arguments import arranged
from small_problems import RECORDS, loss, network, records

import equipoise as eq

STEPS, MOST = 8, 3


def owners() -> list[str]:
    """Users with 1, 2, 3, ... records."""
    return [f"user {k}" for k in range(RECORDS) for _ in range(k + 1)][:RECORDS]


def start(
    run_dir: str, kill: bool = False, resume: bool = False, rows: str | None = None
) -> eq.PrivateTraining:
    model = network(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    pieces = {"loss": loss, "data": records(dtype=torch.float64), "owner": owners()}
    pieces |= {"records_per_user": MOST, "rows": rows}
    if resume:
        training = eq.PrivateTraining.resume(run_dir, model, optimizer, **arranged(**pieces))
    else:
        training = eq.PrivateTraining(
            model,
            optimizer,
            **arranged(
                sampling=eq.Poisson(20 if rows is None else 5, RECORDS, STEPS),
                method=eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0),
                reproducible=True,
                folder=run_dir,
                **pieces,
            ),
        )
    step = optimizer.step

    def dying_step(*args, **kwargs):
        if kill and training.steps_done == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **kwargs)

    optimizer.step = dying_step
    training.run(progress=False, checkpoint_every=3)
    return training


if __name__ == "__main__":
    start(sys.argv[1], kill=True, rows=sys.argv[2] if len(sys.argv) > 2 else None)
