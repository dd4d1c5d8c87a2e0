"""Checkpoints: the whole state of a training, written so that a crash at any moment loses nothing.

A checkpoint is one file, `checkpoint/step-00000042.pt`: a `torch.save` of tensors, numbers, strings, lists
and dicts. Its SHA-256 lies in a small JSON file next to it. A checkpoint is written under a temporary name,
flushed to the disk and renamed; the last two are kept. `load` takes the newest file whose checksum fits and
falls back to the one before it; it never unpickles code (`weights_only=True`).

The state is private: momentum buffers and the like are functions of releases, but the sampler's position
and the ledger's are not for publication. The folder has mode 0700.

`collect_state` and `restore_state` see to what the user brought: model, optimiser, scheduler.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise._files import CheckpointError, PathLike, write_atomically
from equipoise._run_files import read_file, read_object

_NAME = re.compile(r"step-(\d{8})\.pt")

FORMAT = 1  # of a checkpoint's content; a file of another one is refused
KEPT = 2  # so that a corrupt newest one has a predecessor


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made when the first one is written.

    Example:
        >>> import tempfile
        >>> store = Checkpoints(tempfile.mkdtemp())
        >>> store.save(3, {"weight": torch.ones(2)})
        >>> step, state = store.load()
        >>> step, state["weight"]
        (3, tensor([1., 1.]))
    """

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint file, in rising order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m.group(1)) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name)))

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the state after `step` steps, then drop the oldest ones.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; the checkpoints before are
                untouched.
        """
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, "step": step, "state": dict(state)}, buffer)
        content = buffer.getvalue()
        path = self._path(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The checksum first: a file without one is never taken for whole.
            seal = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            write_atomically(path.with_suffix(".json"), json.dumps(seal).encode())
            write_atomically(path, content)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{error.strerror or error}. It needs {len(content) / 1e6:.1f} MB. Those before it are "
                "intact: free some space, and resume. Steps since then are repeated with the noise they had, "
                "which costs no privacy twice."
            ) from error
        for old in self.steps()[:-KEPT]:
            for stale in (self._path(old), self._path(old).with_suffix(".json")):
                with contextlib.suppress(OSError):
                    stale.unlink()
            shutil.rmtree(self.parts(old), ignore_errors=True)

    def forget_noise(self) -> None:
        """Take the noise that further releases would have used again out of all checkpoints of a run.

        After its end there are none, and whoever reads that noise can take it off what was released.
        """
        for step in self.steps():
            try:
                state = self._read(step)
            except CheckpointError:  # what a damaged one still holds cannot be taken out
                self._path(step).unlink()
                continue
            if state["ledger"]["history"]:
                self.save(step, state | {"ledger": state["ledger"] | {"history": {}}})

    def parts(self, step: int) -> Path:
        """The folder of what several processes hold in parts."""
        return self._path(step).with_suffix(".shards")

    def load(
        self, check: Callable[[int, Mapping[str, Any]], None] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """The newest whole checkpoint: (step, state).

        Args:
            check: check(step, state) raises for a state whose further files are not whole.

        A corrupt newest checkpoint is skipped with a warning that names the file and the reason.

        Raises:
            CheckpointError: no whole checkpoint is there.
        """
        problems = []
        for step in reversed(self.steps()):
            try:
                state = self._read(step, check)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if problems:
                # Safe: the steps since then are booked, and are repeated with the noise they had.
                warnings.warn(
                    f"{problems[0]} Going on from the checkpoint of step {step}; the steps since then are "
                    "repeated with the noise they had and cost no privacy twice.",
                    stacklevel=2,
                )
            return step, state
        raise CheckpointError(
            f"{self.folder} holds no whole checkpoint. {' '.join(problems)} Name the run folder that "
            "contains `checkpoint/`, or start a new run with the journal of this one, run=Run(journal=...): "
            "what this one spent stays spent."
        )

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def _read(
        self, step: int, check: Callable[[int, Mapping[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        path = self._path(step)
        try:
            content = read_file(path)
            seal = read_object(path.with_suffix(".json"))
            if seal["sha256"] != hashlib.sha256(content).hexdigest():
                raise ValueError(f"its checksum is wrong ({len(content)} of {seal['bytes']} bytes)")
            # A checkpoint may come from elsewhere, and a pickle could run code.
            loaded = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
            if loaded["format"] != FORMAT:
                raise ValueError(f"it has format {loaded['format']}, this version reads format {FORMAT}")
            if check is not None:
                check(step, loaded["state"])
            return dict(loaded["state"])
        except Exception as error:
            raise CheckpointError(f"the checkpoint {path} is corrupt: {error}.") from error


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Their state dicts."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }


def _check_optimizer(optimizer: torch.optim.Optimizer, kinds: list[dict[str, type]]) -> None:
    """Look whether the optimiser can go on with what was loaded: torch itself finds out in the next step.

    Args:
        optimizer: with the loaded state.
        kinds: of the settings of its groups before.

    Raises:
        ValueError: a setting of another kind, or a tensor that does not fit its parameter.
    """
    for group, before in zip(optimizer.param_groups, kinds, strict=True):
        for name, kind in before.items():
            value = group.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
            if not (number if kind in (int, float) else isinstance(value, kind)):  # True is an int too
                raise ValueError(f"the optimizer's {name} is {value!r:.80}, not a {kind.__name__}")
    for parameter, entry in optimizer.state.items():
        if not isinstance(entry, dict):
            raise ValueError(f"the optimizer's state of a parameter is a {type(entry).__name__}")
        for name, value in entry.items():
            # of the parameter's shape, or a factor of it
            if isinstance(value, torch.Tensor) and value.ndim == parameter.ndim:
                sizes = zip(value.shape, parameter.shape, strict=True)
                if not all(size in (1, own) for size, own in sizes):
                    raise ValueError(f"the optimizer's {name} has another shape than its parameter")


def restore_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Put the state back.

    Raises:
        ValueError: the pieces are not of the same make.
    """
    try:
        model.load_state_dict(state["model"])
        kinds = [{name: type(value) for name, value in group.items()} for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        _check_optimizer(optimizer, kinds)
        if (scheduler is None) != (state["scheduler"] is None):
            raise ValueError(
                "the run was started with a scheduler" if scheduler is None else "it had no scheduler"
            )
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
    except Exception as error:  # a state that fits badly can fail in almost any way
        raise ValueError(
            f"model, optimizer or scheduler do not fit the checkpoint: {error!s:.400}. Build them as the run "
            "was started. Nothing was spent."
        ) from error
