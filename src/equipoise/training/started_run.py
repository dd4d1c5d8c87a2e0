"""A run that can take steps: folder locked, ledger opened, whole state there; or nothing, where one fails.

From here on the disk is written. Where a start fails nothing was released, so nothing may stand in the way of
another try: folder, lock and reservation go.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from equipoise._dtensor import is_dtensor
from equipoise._files import CheckpointError
from equipoise._version import ENGINE, __version__
from equipoise.distributed.checkpoint import (
    check_parts,
    load_parts,
    save_parts,
    sharded_tensors,
    without_parts,
)
from equipoise.distributed.processes import Processes
from equipoise.distributed.shared_ledger import SharedLedger, own_ledger
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.privacy import Ledger, mark, unmark
from equipoise.privacy.ledger.write_ahead_log import WriteAheadLog
from equipoise.privacy.noise.uniform import KEYS, keyed_integers
from equipoise.statements.assumptions import Assumption
from equipoise.training.folder.checkpoint import collect_state, restore_state
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.forwards import moved
from equipoise.training.metrics import MetricsLog
from equipoise.training.read_items import ReadItems
from equipoise.training.record_source import DataError
from equipoise.training.run_ledger import open_ledger
from equipoise.training.setup.training_setup import TrainingSetup
from equipoise.training.step import StepRunner


@dataclass(frozen=True)
class StartedRun:
    """A run that can take steps.

    Attributes:
        setup: what it is made of.
        folder: locked; None keeps everything in memory.
        ledger: takes the releases.
        steps: takes the steps, from the checkpoint's on.
        metrics: writes them down.
        evaluation: the numbers of the last evaluation before; empty without one.
        best: the best evaluation before, where one is kept.
    """

    setup: TrainingSetup
    folder: RunFolder | None
    ledger: Ledger | SharedLedger
    steps: StepRunner
    metrics: MetricsLog
    evaluation: dict[str, float]
    best: Mapping[str, Any] = field(default_factory=dict)

    def synced_place(self) -> dict[str, Any]:
        """Where the ledger stands; the journal is on its device when this returns."""
        self.steps.settle()
        return self.ledger.synced_place()

    def save_checkpoint(self, evaluation: Mapping[str, float], best: Mapping[str, Any]) -> None:
        """Write the whole state.

        Args:
            evaluation: the numbers of the last one.
            best: as the attribute, by now.

        Raises:
            RuntimeError: the training has no run folder, or was stopped.
            CheckpointError: it could not be written; the checkpoint before is intact.
        """
        setup, folder = self.setup, self.folder
        if folder is None:
            raise RuntimeError("this training has no folder for checkpoints: give it run=...")
        with setup.processes.together():
            self.steps.check()
        average = None if setup.average is None else setup.average.values
        state = collect_state(setup.model, setup.optimizer, setup.run.scheduler) | {
            "average": average,
            "method": mark(self.steps.state),
            "ledger": mark(self.synced_place()),
            "evaluation": dict(evaluation),
            "best": dict(best),
            "processes": setup.processes.count,
        }
        done, processes = self.steps.done, setup.processes
        if setup.is_sharded:
            parts = sharded_tensors(setup.model, setup.optimizer, average, self.steps.state)
            seals = save_parts(folder.checkpoints.parts(done), parts, processes)
            types = {name: str(value.dtype) for name, value in parts.items()}
            state = without_parts(state) | {"parts": {"files": seals, "types": types}}
        processes.first(lambda: folder.checkpoints.save(done, state))


def start_run(
    setup: TrainingSetup,
    folder: RunFolder | None,
    *,
    ledger_class: Callable[..., Ledger] | None,
) -> StartedRun:
    """Begin a run: make its folder, book its plan, write the first checkpoint.

    Args:
        setup: of the training.
        folder: of the run, or None to keep everything in memory.
        ledger_class: of an audit, which looks through it; None for the one that the method names.
    """
    processes = setup.processes
    with ExitStack() as undo:
        if folder is not None:
            processes.first(folder.create)
            processes.first(folder.lock)
            if processes.is_first:
                undo.callback(folder.discard)
                undo.callback(folder.unlock)
        with processes.together():
            if folder is not None:
                day = time.strftime("%Y-%m-%d", time.gmtime())
                begun = {"begun": day, "version": __version__, "engine": ENGINE}
                processes.first(lambda: folder.write_config(setup.config(setup.found) | begun))
            ledger = open_ledger(setup, folder, ledger_class=ledger_class)
            if processes.is_first:
                undo.callback(_give_up, own_ledger(ledger))
            _note_items(setup, folder, ledger)
            steps, metrics = StepRunner(setup, ledger), MetricsLog(setup, folder, done=0)
            run = StartedRun(setup, folder, ledger, steps, metrics, {})
            if folder is not None:
                processes.first(lambda: setup.run.created(folder.path))
                run.save_checkpoint({}, {})
        undo.pop_all()
    return run


def continue_run(
    setup: TrainingSetup,
    folder: RunFolder,
    *,
    ledger_class: Callable[..., Ledger] | None,
) -> StartedRun:
    """Go on with a run from its last whole checkpoint; arguments as for `start_run`.

    Raises:
        CheckpointError: no whole checkpoint is there, or it does not fit.
        DataError: items are assigned to draws by their numbers, and have other ones.
    """
    processes = setup.processes
    with ExitStack() as undo:
        processes.first(folder.lock)
        if processes.is_first:
            undo.callback(folder.unlock)
        with processes.together():
            done, saved = _load(folder, processes)
            if ("parts" in saved) != setup.is_sharded:
                raise CheckpointError(
                    f"the checkpoint of step {done} is that of a model which "
                    + (
                        "processes held in parts: call fully_shard or parallelize_module on this one"
                        if "parts" in saved
                        else "each process held as a whole: leave out fully_shard and parallelize_module"
                    )
                    + " as the run was begun. Nothing was spent."
                )
            if setup.is_sharded:
                saved = _with_parts(setup, folder.checkpoints.parts(done), saved)
            place, state, evaluation = _take_over(setup, done, saved)
            ledger = open_ledger(setup, folder, place=place, resume=True, ledger_class=ledger_class)
            if processes.is_first:
                undo.callback(own_ledger(ledger).journal.close)
            _note_items(setup, folder, ledger, resume=True)
            if processes.first(lambda: _has_other_data(own_ledger(ledger))):
                setup = replace(setup, found=Assumption.of_all([*setup.found, Assumption.OTHER_DATA]))
            if processes.is_first and setup.plan.releases:
                _warn_of_other_processes(own_ledger(ledger), saved.get("processes"), processes.count)
            steps, metrics = StepRunner(setup, ledger, done, state), MetricsLog(setup, folder, done)
            # Before its first release: a run that is killed later keeps what this process found.
            processes.first(lambda: folder.write_assumptions(setup.found))
        undo.pop_all()
    best = moved(saved.get("best", {}), setup.device)
    return StartedRun(setup, folder, ledger, steps, metrics, evaluation, best)


def _note_items(
    setup: TrainingSetup, folder: RunFolder | None, ledger: Ledger | SharedLedger, resume: bool = False
) -> None:
    """Take note of what the run assigns to draws: the records' names, or the items that it reads.

    Raises:
        DataError: the run goes on, and hardly a record is found again, or items have other numbers.
    """
    processes, source, found = setup.processes, setup.rows.source, setup.found
    scheme = type(setup.sampling).__name__
    to_go_on = (
        "a record could be in two draws of an epoch. Give the data as they were. With other records, begin a "
        "new run with this run's journal "
        f"(run=Run(journal={setup.run.journal or str(folder and folder.journal)!r})), which counts "
        "epochs anew and adds what both cost"
    )
    if folder is not None and processes.first(lambda: not _finds_records(folder, own_ledger(ledger))):
        raise DataError(
            "fewer than half of the records that the run had are in data as they were: features that are "
            f"scaled anew, another type of numbers or other ids make new ones of all, and {scheme} would "
            f"assign them to draws anew: {to_go_on}; with ids=... such a run can go on. Nothing was spent."
        )
    is_compared = Assumption.BY_NUMBER in found
    if folder is None or not (is_compared or Assumption.BY_NUMBER_UNCOMPARED in found):
        return
    key = processes.first(lambda: own_ledger(ledger).secrets.stream_key(0, "items that were read"))
    items = ReadItems(folder.items, processes, key, source, is_compared)

    def check() -> None:
        with random_numbers_from(0):
            differ = items.differ()
        if differ:
            raise DataError(
                "data hold more or fewer items than when the run began, or others under numbers that it has "
                f"read, and {scheme} assigns items to draws by their numbers: {to_go_on}; with ids=... such "
                "a run can go on. Nothing was spent."
            )
        if not is_compared:
            warnings.warn(
                "items of data are random, or hold what cannot be compared. So only their count was, and the "
                f"statement assumes that every number is still that of the same record: {scheme} assigns "
                "draws by it. To need no such assumption give ids=... when a run begins.",
                stacklevel=2,
            )

    if resume:
        processes.first(check)
    source.items = items


FEW = 256
"""So many records stand for all: one half of them is found again to three hundredths (the root of 1 / 1024).

With fewer, data of which somewhat more than half is there may be refused, and of which less is there, taken.
"""


def _finds_records(folder: RunFolder, ledger: Ledger) -> bool:
    """Whether data hold at least half of the records, by what assigns them to draws, that they held before.

    Of those the smallest hashes are kept, which are a random part of them.
    """
    if ledger.keys is None:
        return True
    hashed = keyed_integers(KEYS, ledger.keys, ledger.secrets.stream_key(0, "records that are found again"))
    with closing(WriteAheadLog(folder.items, durable=True)) as log:
        before = log.read()[-1:]
        if before and torch.isin(torch.tensor(before[0]["smallest"]), hashed).double().mean() < 0.5:
            return False
        log.write({"smallest": hashed.sort().values[:FEW].tolist()})
    return True


def _load(folder: RunFolder, processes: Processes) -> tuple[int, dict[str, Any]]:
    """The newest whole checkpoint, read by the first process, which keeps the keys of earlier noise."""
    mine: dict[str, Any] = {}

    def check(done: int, saved: Mapping[str, Any]) -> None:
        if "parts" in saved:
            check_parts(folder.checkpoints.parts(done), saved["parts"]["files"])

    def load() -> tuple[int, dict[str, Any]]:
        done, saved = folder.checkpoints.load(check)
        mine.update(saved)
        place = saved.get("ledger")
        return done, saved | {"ledger": {**place, "history": {}} if isinstance(place, dict) else place}

    done, saved = processes.first(load)
    return done, mine or saved


def _with_parts(setup: TrainingSetup, folder: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state with the parts that this process holds."""
    trained = [p for group in setup.optimizer.param_groups for p in group["params"]]
    try:
        parts = load_parts(folder, setup.model, trained, saved["parts"]["types"])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the parts of the checkpoint in {folder.name} do not fit this run ({type(error).__name__}: "
            f"{error}): build model and optimizer as the run was started. Nothing was spent."
        ) from error
    state = {number: dict(entry) for number, entry in saved["optimizer"]["state"].items()}
    average = None if saved["average"] is None else dict(saved["average"])
    model, method = dict(saved["model"]), saved["method"]
    for name, value in parts.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            model[rest] = value
        elif kind == "average" and average is not None:
            average[rest] = value
        elif kind == "method":
            key, _, of = rest.partition(".")
            method[key][of] = value
        elif kind == "optimizer":
            number, _, key = rest.partition(".")
            state[int(number)][key] = value
    return {
        **saved,
        "model": model,
        "average": average,
        "optimizer": {**saved["optimizer"], "state": state},
    }


def _has_other_data(ledger: Ledger) -> bool:
    """Whether the run began, or went on, with other records than it has now; says it if so."""
    if ledger.record.data == {ledger.data_fingerprint}:
        return False
    # Seen by the data owner alone, like the checks of the data.
    warnings.warn(
        "data hold other records than those that this run began with. Its epsilon holds only where the "
        "change followed from nothing that the run released, and the statement says so; names in owner or "
        "ids must be those of the start, and no ranks. Resume with the same records, or begin a new run with "
        "the same journal for the others.",
        stacklevel=2,
    )
    return True


def _warn_of_other_processes(ledger: Ledger, before: object, now: int) -> None:
    """Say what it costs to go on with another number of processes than the checkpoint's."""
    booked = ledger.record.next_index - ledger.position
    if before in (None, now) or not booked:
        return
    warnings.warn(
        f"the run goes on in {now} process{'es' * (now != 1)}, its checkpoint is of {before}. Sums then "
        f"round otherwise, so up to {booked} draws since the checkpoint are charged again, with new records "
        "and new noise. The plan stays: the run ends that many draws early. With as many processes as before "
        "nothing is charged again.",
        stacklevel=2,
    )


def _give_up(ledger: Ledger) -> None:
    """Close the ledger of a run that did not begin: it reserves nothing any more."""
    ledger.close(stop_fixed_beforehand=True)
    ledger.journal.close()


def _take_over(
    setup: TrainingSetup, done: int, saved: Mapping[str, Any]
) -> tuple[dict[str, Any], Any, dict[str, float]]:
    """Put a saved state into model, optimiser and the rest.

    Returns:
        The ledger's place, the method's state and the last evaluation.
    """
    restore_state(saved, setup.model, setup.optimizer, setup.run.scheduler)
    try:
        if setup.average is not None:
            values = saved["average"].items()
            setup.average.values = {n: v if is_dtensor(v) else v.to(setup.device) for n, v in values}
        evaluation = {name: float(value) for name, value in saved["evaluation"].items()}
        state = unmark(moved(saved["method"], setup.device))
        place = {"position": int(saved["ledger"]["position"]), "history": dict(saved["ledger"]["history"])}
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint of step {done} does not fit this run ({type(error).__name__}: {error}): it was "
            "edited, or another version wrote it. Nothing was spent."
        ) from error
    return place, state, evaluation
