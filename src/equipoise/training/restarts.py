"""What a script that is started again finds in the folder of its run.

Nothing; a start that was killed before the first checkpoint, which released nothing; a run to go on with; or
one that has ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors import torch as safetensors
from torch import nn

from equipoise._dtensor import with_values
from equipoise._run_files import RunFolderError, each_row, read_file
from equipoise.distributed.processes import Processes
from equipoise.privacy import Journal
from equipoise.privacy.ledger.journal import CloseEntry, RunEntry, read_journal
from equipoise.privacy.ledger.journal_records import book_end
from equipoise.statements import Statement
from equipoise.training.arguments import Record, Run, TrainingInputs
from equipoise.training.folder.config_file import ARGUMENTS, USUAL, Began, rebuild, settings_of
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.run_ledger import secrets_of
from equipoise.training.stages import Stage
from equipoise.training.step import Result, StepReport
from equipoise.training.traces import loaded

LARGEST_STATEMENT = 1 << 24  # bytes: statements are some KB, and a file that is larger by far is not read


def state_of(folder: RunFolder) -> Literal["empty", "unbegun", "open", "ended"]:
    """What lies in the folder; "unbegun" is a start that was killed before its first checkpoint."""
    if not folder.checkpoints.steps():
        return "unbegun" if folder.config.exists() or folder.journal.exists() else "empty"
    return "ended" if _has_ended(folder) else "open"


def _has_ended(folder: RunFolder) -> bool:
    """Whether what a run publishes at its end is there, and its key gone or its end booked."""
    if not folder.key_is_gone:
        return False
    if folder.has_ended():
        return True
    began = rebuild(folder.read_config()).run
    run = secrets_of(folder, began, existing=True).identity
    entries = read_journal(began.journal or folder.journal)
    return any(isinstance(entry, CloseEntry) and entry.run == run for entry in entries)


def undo_start(folder: RunFolder) -> None:
    """Remove a start that was killed, or refused, before its first release, and give back what it reserved.

    Raises:
        RunFolderError: something was released, or the run has ended, so that it is no such start.
        RuntimeError: another process has the folder.
    """
    folder.lock()
    try:
        began = rebuild(folder.read_config()).run if folder.config.exists() else Run()
        has_key = began.reproducible or (folder.private / "key").exists()
        run = secrets_of(folder, began, existing=True).identity if has_key else None
        # It came to its end, and its releases may be booked in another folder.
        if run is None and folder.checkpoints.steps():
            raise RunFolderError(f"folder={str(folder.path)!r} holds a run that has ended, and is no start.")
        if folder.journal.exists():
            _check_unreleased(folder, read_journal(folder.journal))
        if began.journal is not None and run is not None:
            mine = [entry for entry in read_journal(began.journal) if entry.run == run]
            _check_unreleased(folder, mine)
            # Only a journal of this key is written to: the path may come from elsewhere.
            if mine:
                with closing(Journal(began.journal, existing=True)) as journal:
                    book_end(journal, run, stop_fixed_beforehand=True)
        folder.discard()
    finally:
        folder.unlock()


def _check_unreleased(folder: RunFolder, entries: list[Any]) -> None:
    if any(not isinstance(entry, (RunEntry, CloseEntry)) for entry in entries):
        raise RunFolderError(
            f"folder={str(folder.path)!r} holds no checkpoint, and its journal holds releases: the "
            "checkpoints were removed. Restore them from a copy, or name a new folder; what the run spent "
            "stays spent."
        )


def check_same_run(
    folder: RunFolder, began: Began, given: TrainingInputs, settings: Mapping[str, Any]
) -> None:
    """Refuse to go on with a run under other sampling, budget or settings than it began with.

    Raises:
        ValueError: naming what differs.
    """
    before = {"sampling": began.sampling, "budget": began.budget, **began.settings}
    _check_same(folder, {"sampling": given.sampling, "budget": given.budget, **settings}, before)


def continued(folder: RunFolder, began: Began, given: TrainingInputs) -> TrainingInputs:
    """What is given for a run that goes on, with the settings that it began with.

    Raises:
        ValueError: a setting is given that the run has not.
    """
    stated = {name: value for name, value in settings_of(given).items() if value != USUAL[name]}
    if isinstance(given.unit, Record) and began.settings["unit"] == "user":
        raise ValueError(
            f"the run in folder={str(folder.path)!r} protects users: give unit=Users(owner=..., "
            f"records_per_user={began.settings['records_per_user']}, rows={began.settings['user_rows']!r})"
        )
    path = folder.path if given.run.folder is None else Path(given.run.folder)
    unsaved = {name: getattr(given.run, name) for name in ("scheduler", "writers", "diagnostics")}
    run = replace(began.run, folder=path, **unsaved)
    unit = replace(given.unit, relation=began.settings["relation"])
    data = replace(given.data, **began.of_data)
    kept = {"compile": began.settings["compile"], "stages": [Stage(*one) for one in began.settings["stages"]]}
    found = replace(given, data=data, unit=unit, run=run, **kept)
    before = {"folder": folder.path, "optimizer": began.optimizer, **began.settings}
    now = {"folder": path, "optimizer": type(given.optimizer).__name__}
    _check_same(folder, now | settings_of(found) | stated, before)
    method = json.loads(json.dumps(given.method.config()))
    # An option that the folder does not know has its default, by a later version.
    _check_same(folder, {name: method.get(name) for name in began.method}, began.method)
    return found


def _check_same(folder: RunFolder, given: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    most = "micro_batch_size"  # given is the largest that may be chosen, and the run holds the one that was
    wrong = [name for name in given if given[name] != before[name] and name != most]
    if given.get(most) is not None and given[most] < before[most]:
        wrong.append(most)
    if wrong:
        name = ARGUMENTS.get(wrong[0], wrong[0])
        raise ValueError(
            f"{name}={given[wrong[0]]!r:.80} differs from the {name}={before[wrong[0]]!r:.80} that the run "
            f"in folder={str(folder.path)!r} began with: a run keeps its settings. Give the same, or name a "
            "new folder. Nothing was spent."
        )


class FinishedTraining:
    """A run that has ended, in the place of the training that a restarted script asks for.

    Args:
        folder: of the run.
        model: gets the published parameters.
        processes: the first one reads the files.

    Attributes:
        steps_done: by the run.
    """

    def __init__(self, folder: RunFolder, model: nn.Module, processes: Processes) -> None:
        self.folder, self.model, self.processes = folder, model, processes
        text, content, metadata, self._evaluation = processes.first(self._read)
        self._statement, self.steps_done = Statement.from_json(text), int(metadata["step"])
        # Tensors that share memory were written once. A sharded model takes its parts.
        own, saved = model.state_dict(), safetensors.load(content)
        parts = {name: with_values(value, own[name]) for name, value in saved.items() if name in own}
        model.load_state_dict(saved | parts, strict=False)
        loaded(model, metadata)

    def _read(self) -> tuple[str, bytes, dict[str, str], dict[str, float]]:
        folder = self.folder
        with safe_open(str(folder.model), framework="pt") as file:
            metadata = dict(file.metadata())
        last: dict[str, Any] = {}
        for row in each_row(folder.metrics) if folder.metrics.exists() else ():
            last = {n: v for n, v in row.items() if n.startswith("evaluation.")} or last
        # JSON has no NaN: null stands for it.
        evaluation = {
            n.removeprefix("evaluation."): math.nan if v is None else float(v) for n, v in last.items()
        }
        statement = read_file(folder.statement, LARGEST_STATEMENT).decode()
        return statement, folder.model.read_bytes(), metadata, evaluation

    def close(self) -> None:
        """Nothing is open."""

    def __iter__(self) -> Iterator[StepReport]:
        """No step is left."""
        return iter(())

    def statement(self) -> Statement:
        """As published."""
        return self._statement

    #: Nothing is planned any more: what it did stands in the place of what it will do.
    describe = statement

    def run(self, *_: Any, **__: Any) -> Result:
        """As `PrivateTraining.run`, which has nothing left to do."""
        return self.finish()

    def finish(self, *, stop_fixed_beforehand: bool = False, early: bool = False) -> Result:
        """As `PrivateTraining.finish`; nothing is written."""
        statement = self._statement
        return Result(
            steps=self.steps_done,
            finished=True,
            epsilon=statement.epsilon,
            delta=statement.delta or 0.0,
            evaluation=self._evaluation,
            run_dir=self.folder.path,
            statement=statement,
        )
