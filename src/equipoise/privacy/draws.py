"""A draw: one random sample of records, taken for one release."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draw:
    """One draw of records. All sums over it are noised together and booked as one event.

    Attributes:
        name: the draw name of the plan (`Release.draw`).
        index: the ledger's index; it keys the sampling and the noise.
        ordinal: how many draws of this name came before; epochs without amplification are cut by it.
        parameters: digest of everything that the released quantity depends on besides the records and the
            plan.
        replayed: whether the journal already holds a release at this index for the same digest, so that the
            same noise is given again and nothing is charged.
    """

    name: str
    index: int
    ordinal: int = 0
    parameters: str = ""
    replayed: bool = False


def as_draw(draw: Draw | int) -> Draw:
    """`draw` itself, or the draw named "batch" with this index and ordinal."""
    return draw if isinstance(draw, Draw) else Draw("batch", draw, draw)
