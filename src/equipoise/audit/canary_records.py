"""Canaries in a real training: records made to be noticed, each in the data at random.

m made-up records are put behind the training records, each with probability 1/2; nothing else changes, and
the public population stays what it is. Which canaries came is the secret that an audit tries to guess
(`one_run`): it lies in the private part of the run folder.

Every canary is a function of the seed and of the test records, which no guarantee covers; whether it is in is
a function of nothing at all. Whoever is among the training records, the same canaries are in. So one
training record more, less, or replaced moves a sum only by its own part, and what is proved for the records
holds with canaries as well.

A canary has a random label and an input of its own: a random direction r, turned away from the directions
that the test records fill,

    x = lambda (A + lambda I)^-1 r,   A the second moment of some of their inputs,

and as long as the longest of them. So its gradient is hardly like any other record's, and what a step does
along it is the canary's own doing or noise. Inputs that are not real numbers (tokens) are those of a test
record, with a wrong label.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from equipoise._files import PathLike, write_atomically
from equipoise.data import Records

CANARIES_FILE = "private/canaries.safetensors"


SCORES_FILE = "private/canary_scores.json"


TURNED_ENTRIES = 8192
"""Inputs of more entries are turned only in the first so many: A is a square matrix."""


SOME = 8000
"""Test records that A is taken from."""


FIELD = "field."
"""Fields have this before their names in the file."""


@dataclass(frozen=True)
class InsertedCanaries:
    """The canaries of a run.

    Attributes:
        fields: name -> [m, ...], all canaries, present or not, as the loss takes them.
        present: [m] bool, the random assignment.
    """

    fields: Mapping[str, Tensor]
    present: Tensor

    def __len__(self) -> int:
        return len(self.present)

    def check(self, records: Records) -> None:
        """Refuse canaries that could not lie among these records.

        Raises:
            ValueError: other fields, shapes or types than the records'.
            DataFileError: labels that the records could not have.
        """
        ours = {name: (value.shape[1:], value.dtype) for name, value in self.fields.items()}
        theirs = {name: (value.shape[1:], value.dtype) for name, value in records.fields.items()}
        if ours != theirs:
            raise ValueError(
                f"the canaries have fields {_described(ours)} and the training records {_described(theirs)}: "
                "take the data that the run was started with, or a test set of the same fields"
            )
        Records(self.fields, num_classes=records.num_classes, check_finite=False)

    def insert(self, records: Records) -> Records:
        """The training records, and behind them the canaries that are present; checked."""
        self.check(records)
        fields = {
            name: torch.cat([value, self.fields[name][self.present]])
            for name, value in records.fields.items()
        }
        return Records(fields, num_classes=records.num_classes, check_finite=False)

    def save(self, folder: PathLike) -> None:
        """Write them into the private part of a run folder, readable only by the owner."""
        path = Path(folder) / CANARIES_FILE
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors = {FIELD + name: value.contiguous() for name, value in self.fields.items()}
        write_atomically(path, safetensors.save({**tensors, "present": self.present}))

    @classmethod
    def load(cls, folder: PathLike) -> InsertedCanaries:
        """Read them back.

        Raises:
            FileNotFoundError: the run was not trained with canaries.
            ValueError: the file is damaged.
        """
        path = Path(folder) / CANARIES_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no {CANARIES_FILE}: the run was not trained with canaries. Train one with "
                "`equipoise train ... --canaries 1000`"
            )
        try:
            content = safetensors.load(path.read_bytes())
            present = content.pop("present")
            fields = {name.removeprefix(FIELD): value for name, value in content.items()}
            lengths = {len(value) for value in fields.values()}
            if present.dtype != torch.bool or present.ndim != 1 or lengths != {len(present)} or 0 in lengths:
                raise ValueError("it needs a random assignment, and fields of the same length")
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); restore it from a copy") from error
        return cls(fields, present)


def _described(fields: Mapping[str, tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(
        f"{name}: {str(dtype)[6:]}{list(shape)}" for name, (shape, dtype) in sorted(fields.items())
    )


def choose_canaries(
    test: Records, num_classes: int, count: int, *, seed: int, reproducible: bool = False
) -> InsertedCanaries:
    """Make canaries, and assign each at random.

    Args:
        test: records that no guarantee covers, with the fields `input` and `label`; no private record may be
            asked.
        num_classes: labels lie below it.
        count: m.
        seed: of the canaries, which an attacker may know; who is in is secret.
        reproducible: let the assignment follow the seed too, for tests.

    Example:
        >>> records = Records({"input": torch.randn(8, 3), "label": torch.arange(8) % 2})
        >>> found = choose_canaries(records, 2, 4, seed=0, reproducible=True)
        >>> len(found.insert(records)) == 8 + int(found.present.sum())
        True
    """
    rng = torch.Generator().manual_seed(seed)
    fields = test[torch.randint(len(test), (count,), generator=rng)]
    shift = torch.randint(1, num_classes, (count,), generator=rng)
    fields["label"] = ((fields["label"] + shift) % num_classes).to(fields["label"].dtype)
    if fields["input"].is_floating_point():
        fields["input"] = _turned_away(test.fields["input"], count, rng)
    assignment = torch.Generator().manual_seed(seed + 1 if reproducible else secrets.randbits(63))
    return InsertedCanaries(fields, torch.rand(count, generator=assignment) < 0.5)


def _turned_away(inputs: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Random inputs in the directions that these leave empty, as long as the longest of them."""
    some = inputs[torch.randperm(len(inputs), generator=rng)[:SOME]].flatten(1).float()
    width = min(some.shape[1], TURNED_ENTRIES)
    moment = some[:, :width].T @ some[:, :width] / len(some)
    ridge = 1e-4 * float(moment.diagonal().mean())
    moment.diagonal().add_(max(ridge, 1e-12))
    random = torch.randn(width, count, generator=rng)
    turned = torch.cholesky_solve(random, torch.linalg.cholesky(moment)).T
    turned *= float(some.norm(dim=1).max()) / turned.norm(dim=1, keepdim=True)
    out = torch.zeros(count, some.shape[1])
    out[:, :width] = turned
    return out.view(count, *inputs.shape[1:]).to(inputs.dtype)
