"""Canaries in a real training: records made to be noticed, each in the data by the toss of a coin.

m training records are chosen at random and make room. In the place of each comes a canary, with probability
1/2, or nobody; nothing else changes, and the public population stays what it is. Which canaries came is the
secret that an audit tries to guess (`one_run`): it lies in the private part of the run folder.

A canary has a random label and an input of its own: a random direction r, turned away from the directions
that the data fill,

    x = lambda (A + lambda I)^-1 r,   A the second moment of some of the inputs,

and as long as the longest of them. So its gradient is hardly like any other record's, and what a step does
along it is the canary's own doing or noise. Inputs that are not real numbers (tokens) stay as they are, with
a wrong label.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from equipoise.data import Records

__all__ = ["CANARIES_FILE", "SCORES_FILE", "InsertedCanaries", "choose_canaries"]

CANARIES_FILE = "private/canaries.safetensors"
SCORES_FILE = "private/canary_scores.json"
LARGEST = 8192
"""Inputs of more entries are turned in the first so many alone: A is a square matrix."""

SOME = 8000
"""Records that A is taken from."""


@dataclass(frozen=True)
class InsertedCanaries:
    """The canaries of a run.

    Attributes:
        numbers: [m], positions among the original training records.
        inputs: [m, ...].
        labels: [m].
        present: [m] bool, the coins.
    """

    numbers: Tensor
    inputs: Tensor
    labels: Tensor
    present: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, records: Records) -> dict[str, Tensor]:
        """All canaries, present or not, as the loss takes them.

        Args:
            records: the original training records, for any further fields.
        """
        return {**records[self.numbers], "input": self.inputs, "label": self.labels}

    def insert(self, records: Records) -> Records:
        """The training records with the present canaries in their places, and nobody for the absent."""
        fields = dict(records.fields)
        for name, values in (("input", self.inputs), ("label", self.labels)):
            fields[name] = fields[name].clone()
            fields[name][self.numbers] = values.to(fields[name].dtype)
        keep = torch.ones(len(records), dtype=torch.bool)
        keep[self.numbers[~self.present]] = False
        return Records(fields).subset(keep.nonzero().flatten())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write them into the private part of a run folder, readable by the owner alone."""
        path = Path(folder) / CANARIES_FILE
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors = {
            "numbers": self.numbers,
            "inputs": self.inputs.contiguous(),
            "labels": self.labels,
            "present": self.present,
        }
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(safetensors.save(tensors))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> InsertedCanaries:
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
            found = cls(content["numbers"], content["inputs"], content["labels"], content["present"].bool())
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error}); restore it from a copy") from error
        if not len(found.numbers) == len(found.inputs) == len(found.labels) == len(found.present) > 0:
            raise ValueError(f"{path} is damaged: its tensors differ in length; restore it from a copy")
        return found


def choose_canaries(
    records: Records, num_classes: int, count: int, *, seed: int, reproducible: bool = False
) -> InsertedCanaries:
    """Choose places, make canaries, and toss their coins.

    Args:
        records: the training records, with the fields `input` and `label`.
        num_classes: labels lie below it.
        count: m.
        seed: of places and canaries, which an attacker may know; the coins are secret.
        reproducible: let the coins follow the seed too, for tests.

    Raises:
        ValueError: more canaries than half of the records.

    Example:
        >>> records = Records({"input": torch.randn(8, 3), "label": torch.arange(8) % 2})
        >>> found = choose_canaries(records, 2, 4, seed=0, reproducible=True)
        >>> len(found.insert(records)) == 8 - int((~found.present).sum())
        True
    """
    if not 1 <= count <= len(records) // 2:
        raise ValueError(
            f"canaries={count}: give at least 1 and at most half of the {len(records)} training records"
        )
    rng = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(len(records), generator=rng)[:count].sort().values
    shift = torch.randint(1, num_classes, (count,), generator=rng)
    labels = (records.fields["label"][numbers] + shift) % num_classes
    inputs = records.fields["input"]
    made = _turned_away(inputs, count, rng) if inputs.is_floating_point() else inputs[numbers].clone()
    coins = torch.Generator().manual_seed(seed + 1 if reproducible else secrets.randbits(63))
    return InsertedCanaries(numbers, made, labels, torch.rand(count, generator=coins) < 0.5)


def _turned_away(inputs: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Random inputs in the directions that the data leave empty, as long as the longest of them."""
    some = inputs[torch.randperm(len(inputs), generator=rng)[:SOME]].flatten(1).float()
    width = min(some.shape[1], LARGEST)
    moment = some[:, :width].T @ some[:, :width] / len(some)
    ridge = 1e-4 * float(moment.diagonal().mean())
    moment.diagonal().add_(max(ridge, 1e-12))
    random = torch.randn(width, count, generator=rng)
    turned = torch.cholesky_solve(random, torch.linalg.cholesky(moment)).T
    turned *= float(some.norm(dim=1).max()) / turned.norm(dim=1, keepdim=True)
    out = torch.zeros(count, some.shape[1])
    out[:, :width] = turned
    return out.view(count, *inputs.shape[1:]).to(inputs.dtype)
