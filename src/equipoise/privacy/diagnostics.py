"""Private diagnostics for the data owner: never published, not covered by the guarantee.

The file is written with mode 0600 and belongs into a run's private folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from equipoise.privacy.private import unwrap


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
