"""Canaries that do not see each other: thousands of independent experiments in one training.

The model is a table of parameters [M, d]; the loss of record i touches row i alone. So canary i moves the
released sums in its own coordinates and nowhere else, where all other records contribute nothing: M
experiments "is record i in the data?" run side by side in one training, through the same draws, clips,
noise and optimiser as any other. They are as independent as the coordinates of the noise are (which
`checks` looks at), given the few scalars that a method releases about all records together; those are left
to the attacker as public numbers.

Each canary's gradient is far longer than any clip norm, the worst record of every method that clips:

    linear        loss = A sum(u),             gradient A
    oscillating   loss = A / k sum(sin(k u)),  gradient A cos(k u), whose sign turns as the row moves: for
                  methods that take differences of gradients at two points, where a constant one vanishes

Of a method that works in few public directions the canaries may take those themselves: one row of parameters
for all, and record i along direction i. Orthonormal directions keep the experiments apart as rows do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["FAR", "Row", "Rows", "canary_loss", "canary_records", "directed_records", "public_records"]

FAR = 1e4
"""Length of a canary's gradient, in units where clip norms are about 1."""

FREQUENCY = 10.0
Row = Literal["linear", "oscillating"]


class Rows(nn.Module):
    """A table of parameters, one row a canary, from zero; or a parameter of its own for each.

    Args:
        canaries: M.
        width: d, parameters a canary.
        apart: one parameter tensor a canary, for methods that treat every tensor by itself.
    """

    def __init__(self, canaries: int, width: int = 1, apart: bool = False) -> None:
        super().__init__()
        self.table = None if apart else nn.Parameter(torch.zeros(canaries, width))
        self.rows = nn.ParameterList(torch.zeros(width) for _ in range(canaries if apart else 0))

    def forward(self, index: Tensor) -> Tensor:
        """Rows of the table, [B, d]."""
        table = torch.stack(list(self.rows)) if self.table is None else self.table
        return nn.functional.embedding(index, table)


@dataclass(frozen=True)
class canary_loss:
    """loss(model, batch) -> [B] of one kind of canary."""

    kind: Row = "linear"

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """One number a record."""
        row = model(batch["index"])
        if self.kind == "oscillating":
            row = torch.sin(FREQUENCY * row) / FREQUENCY
        return (batch["scale"] * row).sum(dim=1)


def canary_records(index: Tensor, width: int = 1, signs: Tensor | None = None) -> dict[str, Tensor]:
    """The records of the canaries with these numbers; `signs` [B] turns some of them round."""
    scale = torch.full((len(index), width), FAR)
    return {"index": index, "scale": scale if signs is None else scale * signs[:, None]}


def directed_records(directions: Tensor, signs: Tensor | None = None) -> dict[str, Tensor]:
    """A record along each of these directions, [B, P], of the only row of `Rows(1, P)`."""
    scale = FAR * directions
    index = torch.zeros(len(directions), dtype=torch.long)
    return {"index": index, "scale": scale if signs is None else scale * signs[:, None]}


def public_records(canaries: int, width: int = 1) -> dict[str, Tensor]:
    """A public record a canary, whose gradient lies in the first entry of the canary's row.

    Their lengths differ, so that the principal directions are the coordinates themselves, in this order.
    """
    scale = torch.zeros(canaries, width)
    scale[:, 0] = torch.linspace(2.0, 1.0, canaries)
    return {"index": torch.arange(canaries), "scale": scale}
