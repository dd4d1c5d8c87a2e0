"""A training that kills itself: python killed_run.py RUN_DIR STEP WHERE WHAT.

WHERE is one of forward, update, checkpoint, or "read 2" for the second place where a step waits for a device.
WHAT is one of `RUNS`. Most have a sampling whose epsilon has a closed form: quick.
"""

import os
import signal
import sys

import torch
from flat_arguments import arranged
from small_problems import RECORDS, loss, network, records, updates_of_users

import equipoise as eq
from equipoise._host import read
from equipoise.methods import NoiseStages, ReleasedQuantile
from equipoise.privacy.ledger import ledger as ledger_module
from equipoise.training import step as step_module

STEPS = 12
EPOCHS = eq.FixedEpochs(12, RECORDS, STEPS)
THRESHOLD = eq.DPSGD(clip_norm=ReleasedQuantile(initial=0.5), noise_multiplier=1.0)
BANDS = eq.DPMF(clip_norm=0.5, noise_multiplier=1.0, bands=3)
STAGES = eq.DPSGD(clip_norm=0.5, noise_multiplier=NoiseStages((1.0, 0.5), noise_multiplier=1.0))
RUNS: dict[str, tuple[eq.Method, eq.privacy.Sampling]] = {
    "threshold": (THRESHOLD, EPOCHS),
    "bands": (BANDS, eq.Poisson(12, RECORDS, STEPS)),
    "bands in slots": (BANDS, EPOCHS),
    "stages": (STAGES, EPOCHS),
    "updates of users": (THRESHOLD, EPOCHS),
    "updates of users, bands": (BANDS, EPOCHS),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start(
    run_dir: str, kill_step: int | None = None, where: str = "", what: str = "threshold", resume: bool = False
) -> torch.nn.Module:
    """Train with momentum, dropout, a scheduler; die in step `kill_step` if asked."""
    model = network(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    run: list[eq.PrivateTraining] = []

    def dying_loss(model, batch):
        if where == "forward" and run and run[0].steps_done == kill_step:
            die()
        return loss(model, batch)

    pieces = {"loss": dying_loss, "data": records(), "scheduler": scheduler}
    if what.startswith("updates"):
        pieces |= updates_of_users(dying_loss)
    if resume:
        run.append(eq.PrivateTraining.resume(run_dir, model, optimizer, **arranged(**pieces)))
    else:
        method, sampling = RUNS[what]
        pieces |= {"reproducible": True, "folder": run_dir, "ema_decay": 0.5, "microbatch_size": 5}
        given = arranged(sampling=sampling, method=method, **pieces)
        run.append(eq.PrivateTraining(model, optimizer, **given))
    training = run[0]
    training.engine.never_replay("the loss looks at the step")
    if where.startswith("read"):
        reads = []

        def dying_read(*values, **options):
            if training.steps_done == kill_step:
                reads.append(values)
            if len(reads) == int(where.removeprefix("read ")):
                die()
            read(*values, **options)

        step_module.read = ledger_module.read = dying_read
    if where == "update":
        step = optimizer.step

        def dying_step(*args, **kwargs):
            if training.steps_done == kill_step:
                die()  # the release is booked and out, the parameters have not moved
            return step(*args, **kwargs)

        optimizer.step = dying_step
    if where == "checkpoint":
        save = training.folder.checkpoints.save

        def dying_save(step, state):
            if step > kill_step:
                (training.folder.checkpoints.folder / f".step-{step:08d}.pt.1.tmp").write_bytes(b"half")
                die()
            save(step, state)

        training.folder.checkpoints.save = dying_save
    training.run(progress=False, checkpoint_every=4)
    return model


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
