"""The end of a training: statement, model and report are written, and the key is deleted."""

from __future__ import annotations

from contextlib import nullcontext

from equipoise.report import write_report
from equipoise.statements import Statement
from equipoise.training.checkpoint import write_atomically
from equipoise.training.consistency import SCANNED, TRUSTED
from equipoise.training.input_checks import public_assumptions
from equipoise.training.run_folder import RunFolder, save_model
from equipoise.training.setup import TrainingSetup
from equipoise.training.shared_ledger import SharedLedger
from equipoise.training.step import Result

__all__ = ["finish", "state_privacy"]


def state_privacy(pieces: TrainingSetup, desk: SharedLedger) -> Statement:
    """What may be claimed about the privacy of what was released so far."""
    method, source = pieces.method, pieces.rows.source
    claimed = method.claimed_epsilon(pieces.method_plan, pieces.delta)
    return desk.statement(
        delta=pieces.delta,
        recipe=method.recipe,
        epsilon_claimed=claimed,
        assumptions=[
            SCANNED if source.is_scanned else TRUSTED,
            *method.assumptions(pieces.method_plan),
            *public_assumptions(source, method, pieces.settings.allow_public_duplicates),
        ],
    )


def finish(
    pieces: TrainingSetup,
    desk: SharedLedger,
    folder: RunFolder | None,
    steps: int,
    evaluation: dict[str, float],
) -> Result:
    """Write what may be published; after the last step also delete the key, and move the average in.

    Args:
        pieces: of the training.
        desk: where its releases were booked.
        folder: of the run, or None.
        steps: steps done.
        evaluation: the last one.
    """
    finished = steps >= pieces.sampling.steps or not desk.can_go_on()
    statement = state_privacy(pieces, desk)
    average = pieces.average
    if finished and average is not None:
        average.move_in()
    if folder is not None and pieces.processes.is_first:
        write_atomically(folder.statement, (statement.to_json() + "\n").encode(), mode=0o644)
        with average.swapped_in() if average is not None else nullcontext():
            save_model(pieces.model, folder.model, {"step": str(steps)})
        write_report(folder.path)
    if finished:
        desk.close()
    return Result(
        steps=steps,
        finished=finished,
        epsilon=statement.epsilon,
        delta=pieces.delta,
        evaluation=evaluation,
        run_dir=None if folder is None else folder.path,
        statement=statement,
    )
