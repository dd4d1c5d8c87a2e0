"""Canaries that do not see each other: thousands of independent experiments in one training.

The model is a table of parameters [M, d]; the loss of record i touches only row i. So canary i moves the
released sums in its own coordinates and nowhere else, where all other records contribute nothing: M
experiments "is record i in the data?" run side by side in one training, through the same draws, clips,
noise and optimiser as any other. They are as independent as the coordinates of the noise are (which
`checks` looks at), given the few scalars that a method releases about all records together; those are left
to the attacker as public numbers.

Each canary's gradient is far longer than any clip norm, the worst record of every method that clips:

    linear        loss = A sum(u),             gradient A
    oscillating   loss = A / k sum(sin(k u)),  gradient A cos(k u), whose sign turns as the row moves: for
                  methods that take differences of gradients at two points, where a constant one vanishes
    turning       loss = A sum(sqrt(pi) / k erf(k u) - u), gradient A where the row has not moved and -A
                  where it has: the largest difference between the first point and a later one

Of a method that works in few public directions the canaries may take those themselves: one row of parameters
for all, and record i along direction i. Orthonormal directions keep the experiments apart as rows do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.methods import Context

FAR = 1e4
"""Length of a canary's gradient, in units where clip norms are about 1."""

FREQUENCY = 10.0
TURN = 1e3
"""k of turning gradients, for rows that move by about 1."""

Row = Literal["linear", "oscillating", "turning"]

Directions = Callable[[Context], Tensor]
"""Orthonormal directions of the canaries' gradients, [M, P], from what is public at the first step."""


class Rows(nn.Module):
    """A table of parameters, one row per canary, from zero; or several, for methods that clip each by itself.

    Args:
        canaries: M.
        width: d, parameters per canary in each table.
        tables: how many.
    """

    def __init__(self, canaries: int, width: int = 1, tables: int = 1) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.zeros(canaries, width) for _ in range(tables))

    def forward(self, index: Tensor) -> Tensor:  # [B] to [B, tables * d]
        return torch.cat([nn.functional.embedding(index, table) for table in self.tables], dim=1)


@dataclass(frozen=True)
class canary_loss:
    """loss(model, batch) -> [B] of one kind of canary."""

    kind: Row = "linear"

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        row = model(batch["index"])
        if self.kind == "oscillating":
            row = torch.sin(FREQUENCY * row) / FREQUENCY
        elif self.kind == "turning":
            row = math.sqrt(math.pi) / TURN * torch.erf(TURN * row) - row
        return (batch["scale"] * row).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class CanaryLayout:
    """Where the canaries of a training lie among its parameters, and what their gradients are.

    Attributes:
        width: d, parameters per canary in each table.
        tables: how many, for methods that clip each tensor by itself.
        kind: of the loss.
        along: directions that the canaries take in one row of M * width parameters; None gives each canary
            rows of its own.
    """

    width: int = 1
    tables: int = 1
    kind: Row = "linear"
    along: Directions | None = None

    def model(self, canaries: int) -> Rows:
        """The parameters, from zero."""
        if self.along is not None:
            return Rows(1, canaries * self.width)
        return Rows(canaries, self.width, self.tables)

    def records(
        self, chosen: Tensor, directions: Tensor | None = None, signs: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The canaries with these numbers, [B].

        Args:
            chosen: the numbers.
            directions: [M, P], what `along` gave: the canaries then share the only row of the model.
            signs: [B], turns some of them round.
        """
        if directions is None:
            index, scale = chosen, torch.full((len(chosen), self.width * self.tables), FAR)
        else:
            index, scale = torch.zeros_like(chosen), FAR * directions[chosen]
        return {"index": index, "scale": scale if signs is None else scale * signs[:, None]}


def public_records(canaries: int, width: int = 1) -> dict[str, Tensor]:
    """A public record for each canary, whose gradient lies in the first entry of the canary's row.

    Their lengths differ, so that the principal directions are the coordinates themselves, in this order.
    """
    scale = torch.zeros(canaries, width)
    scale[:, 0] = torch.linspace(2.0, 1.0, canaries)
    return {"index": torch.arange(canaries), "scale": scale}
