"""The private side's own files: diagnostics for the data's keeper, and private parts of checkpoints.

Both are written with mode 0600 and belong into a run's private folders. Neither is covered by the guarantee.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from equipoise.privacy.private import Private, unwrap

_MARK = "__private__"


class Diagnostics:
    """A JSON-lines file of private numbers (training loss, clip fraction, bad records). Never publish it.

    Args:
        path: the file; None keeps nothing.

    Writing gives nothing back, so that a diagnostic cannot steer the run.
    """

    def __init__(self, path: str | os.PathLike | None) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line: the step and the values, scalars or short vectors."""
        if self.path is None:
            return
        row: dict[str, Any] = {"step": step}
        for name, value in values.items():
            row[name] = unwrap(value).detach().cpu().tolist() if isinstance(value, torch.Tensor) else value
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a") as file:
            file.write(json.dumps(row) + "\n")


def save_private(path: str | os.PathLike, state: Any) -> None:
    """Write a nest of tensors, `Private` tensors and plain values to a file of mode 0600, atomically.

    Args:
        path: the file; written beside it and moved into place, so that a crash leaves the old one.
        state: mappings, lists and tuples of tensors and plain values.
    """
    target = Path(path)
    buffer = io.BytesIO()
    torch.save(_pack(state), buffer)
    temporary = target.with_name(target.name + ".part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def load_private(path: str | os.PathLike, map_location: Any = "cpu") -> Any:
    """The state that `save_private` wrote, its `Private` tensors private again."""
    return _unpack(torch.load(path, map_location=map_location, weights_only=True))


def _pack(value: Any) -> Any:
    if isinstance(value, Private):
        return {_MARK: unwrap(value).clone()}
    if isinstance(value, Mapping):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_pack(item) for item in value)
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_MARK}:
            return Private(value[_MARK])
        return {key: _unpack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_unpack(item) for item in value)
    return value
