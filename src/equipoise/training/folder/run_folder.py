"""The folder of a run: what lies where, and who may see it.

statement.json statement.sig.json metrics.jsonl model.safetensors report.html config.json   may be published
checkpoint/ private/                                                                        may not

The trained model as a safetensors file: tensors and names only, nothing that could run code.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import nn

from equipoise._dtensor import all_values, is_dtensor, local_part
from equipoise._files import PathLike, explained, make_folder, write_atomically, write_json
from equipoise._run_files import RunFolderError, read_file, read_object
from equipoise.statements.assumptions import Assumption
from equipoise.training.folder.checkpoint import Checkpoints
from equipoise.training.traces import loaded

LARGEST_PATH = 4096  # bytes, of Linux: a longer file holds no path, and is not read

LOAD = "equipoise.load_model(model, {!r}) gives its model"
BOTH = (
    "PrivateTraining.start_or_resume(...) serves a new, a stopped and a finished run, by the same arguments"
)


class RunFolder:
    """The paths of one run, and its settings file.

    Args:
        path: the folder; made, with its private part closed to others, by `create`.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self.private = self.path / "private"
        self.checkpoints = Checkpoints(self.path / "checkpoint")
        self.statement = self.path / "statement.json"
        self.signature = self.path / "statement.sig.json"
        self.metrics = self.path / "metrics.jsonl"
        self.model = self.path / "model.safetensors"
        self.config = self.path / "config.json"
        self.page = self.path / "report.html"
        self.journal = self.private / "journal.jsonl"
        self.diagnostics = self.private / "diagnostics.jsonl"
        self.items = self.private / "items.jsonl"
        self._lock: weakref.finalize[..., RunFolder] | None = None

    @property
    def key_is_gone(self) -> bool:
        """Whether what a run publishes is there and its key is not: it has ended, or it never had a key."""
        there = self.statement.exists() and self.model.exists()
        return there and not (self.private / "key").exists()

    def has_ended(self) -> bool:
        """Whether a run lies here that cannot go on. A reproducible one always can: its key is its seed."""
        is_whole = self.private.is_dir()  # not a copy of what may be published
        return is_whole and self.key_is_gone and not self.read_config()["settings"].get("reproducible", False)

    def create(self) -> None:
        """Make the folder.

        Raises:
            FileExistsError: it holds a run already.
            OSError: the folder cannot be made; the message says why and what to do.
        """
        make_folder(self.path, "folder")
        if self.config.exists() or self.journal.exists() or self.checkpoints.steps():
            ended = self.config.exists() and self.has_ended()
            state = "which is finished" if ended else "not finished yet"
            ways = f"{LOAD.format(str(self.model))}, and {BOTH}" if ended else f"to go on, {BOTH}"
            raise FileExistsError(
                f"folder={str(self.path)!r} holds a run already, {state}: {ways}. Or name a new folder; "
                "what the old run spent stays spent."
            )
        try:
            self.private.mkdir(exist_ok=True, mode=0o700)
            self.private.chmod(0o700)
        except OSError as error:
            raise explained(error, f"folder={str(self.path)!r}") from error

    def lock(self) -> None:
        """Keep others off this run, in this process too, until `unlock` or the end of the process.

        Raises:
            RunFolderError: a file of the run is a link, a pipe or a device.
            RuntimeError: another one has it.
        """
        self._check_own()
        lock = os.open(self.private / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
        self._lock = weakref.finalize(self, os.close, lock)  # a training that is dropped lets the run go, too
        try:
            # A lock of this opening of the file. One by `lockf` belongs to the process: it would not keep out
            # this one, and would go with any descriptor of the file that is closed. NFS keeps both kinds.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.unlock()
            raise RuntimeError(
                f"folder={str(self.path)!r} is being trained by another process, or by another training of "
                "this one: each would count only its own releases. Wait for it, stop it, or close() that "
                "training; nothing was spent."
            ) from None

    def unlock(self) -> None:
        """Let others have the run."""
        if self._lock is not None:
            self._lock()
            self._lock = None

    def _check_own(self) -> None:
        """A link would let a folder from elsewhere have other files written; a pipe would be waited for."""
        folders = (self.private, self.checkpoints.folder)
        within = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
        for path in (*folders, self.metrics, self.config, self.statement, *within):
            if not os.path.lexists(path):
                continue
            mode = path.lstat().st_mode
            if not (stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and path not in folders)):
                raise RunFolderError(
                    f"{path} is a link, a pipe or a device: a run reads and writes only files of its own "
                    "folder. Put the file itself there. Nothing was spent."
                )

    def discard(self) -> None:
        """Remove what a start left that came to nothing, so that the folder can be tried again.

        Only files of this library go; a folder goes if nothing else is in it. The settings go last: where
        they are gone nothing is left to discard.
        """
        private = [self.private / name for name in ("lock", "key", "ledger_file", "items.jsonl")]
        steps = list(self.checkpoints.folder.glob("step-*")) if self.checkpoints.folder.is_dir() else []
        settings = self.checkpoints.folder / "settings.json"  # the command line's
        for step in self.checkpoints.steps():
            shutil.rmtree(self.checkpoints.parts(step), ignore_errors=True)
        for path in (self.metrics, self.diagnostics, self.journal, settings, *private, *steps, self.config):
            path.unlink(missing_ok=True)
        for folder in (self.private, self.checkpoints.folder, self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the public settings; where a shared ledger lies is for the data owner only."""
        settings = dict(config["settings"])
        ledger_file = settings.pop("ledger_file", None)
        if ledger_file is not None:
            write_atomically(self.private / "ledger_file", os.fsencode(ledger_file), mode=0o600)
        public = {**config, "settings": settings}
        write_json(self.config, public)

    def write_assumptions(self, found: Iterable[str]) -> None:
        """Put what is assumed by now into the public settings."""
        self.write_config(self.read_config() | {"assumptions": [str(one) for one in found]})

    def add_assumptions(self, found: Iterable[str]) -> None:
        """Put into the public settings what is assumed in addition."""
        self.write_assumptions(Assumption.of_all([*self.read_config()["assumptions"], *found]))

    def write_early_end(self, steps: int) -> None:
        """Put into the public settings that the run ended after so many steps, fewer than planned."""
        self.write_config(self.read_config() | {"ended_after": steps})

    def read_config(self) -> dict[str, Any]:
        """The settings of the run.

        Raises:
            FileNotFoundError: no run lies here.
            ValueError: the file is damaged.
        """
        if not self.config.exists():
            raise FileNotFoundError(
                f"folder={str(self.path)!r} holds no config.json: no run of equipoise lies here. Name the "
                "folder that the run was started with."
            )
        config = read_object(self.config)
        if not isinstance(config.get("settings"), dict):
            raise ValueError(f"{self.config} is damaged: it holds no settings. Restore it from a copy.")
        settings = dict(config["settings"])
        # The published file names no place on the disk: only the data owner's does.
        settings.pop("ledger_file", None)
        ledger_file = self.private / "ledger_file"
        if ledger_file.exists():
            settings["ledger_file"] = os.fsdecode(read_file(ledger_file, LARGEST_PATH))
        return {**config, "settings": settings}


def save_model(
    model: nn.Module, path: PathLike, metadata: Mapping[str, str] | None = None, *, writes: bool = True
) -> None:
    """Write all parameters and persistent buffers; tensors that share memory are written once.

    Nothing else of the `state_dict`: what a module adds to it by itself (`get_extra_state`, hooks) may hold
    private records, since nobody watches it while it runs on them.

    Args:
        model: any module.
        path: the file; written atomically, readable by others (it is post-processing of releases).
        metadata: strings that go into the file's header.
        writes: False on the processes that only help the first one to gather a sharded model.
    """
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    tensors: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name in model.state_dict():  # it leaves out the buffers that are not persistent
        if name not in own:
            continue
        tensor = own[name]
        # Whatever part a process holds, an empty one too: all have to come to the same answer.
        place = id(tensor) if is_dtensor(tensor) else tensor.data_ptr()
        key = (place, int(local_part(tensor).storage_offset()), tuple(tensor.shape))
        if key in seen and tensor.numel():
            continue
        seen.add(key)
        # Of a sharded model every process has to gather each of them.
        values = all_values(tensor)
        if writes:
            tensors[name] = values.cpu().contiguous()
    if writes:
        write_atomically(path, safetensors.save(tensors, dict(metadata or {})), mode=0o644)


def load_model(model: nn.Module, path: PathLike) -> nn.Module:
    """Load a file of `save_model`, or the one in a run's folder, into a model of the same architecture.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names or shapes do not fit the model, or the file is damaged.
    """
    if Path(path).is_dir():  # of a run
        path = Path(path) / "model.safetensors"
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: name the model.safetensors of a finished run")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
        missing, unexpected = safetensors.load_model(model, str(path), strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state")]  # never saved
        if missing or unexpected:
            norms = any(name.endswith("running_mean") for name in missing)
            remedy = ". Give the model that eq.replace_batch_norm makes" if norms else ""
            raise RuntimeError(f"it lacks {sorted(missing)} and holds {sorted(unexpected)}{remedy}")
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{path} is damaged or does not fit the model ({type(model).__name__}): {error}"
        ) from error
    loaded(model, metadata)
    return model
