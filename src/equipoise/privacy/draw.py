"""Draws: the samples of records that sums are computed from. One draw is released once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


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
        coins: 32 secret bytes that key what else is random about each record of this draw: its dropout
            masks, its augmentation, its lots. Public coins would be tied to a record's place in the batch,
            which shifts when another record enters.
    """

    name: str
    index: int
    ordinal: int = 0
    parameters: str = ""
    replayed: bool = False
    coins: bytes = field(default=b"", repr=False, compare=False)

    def number(self, *purpose: object) -> int:
        """A secret 63-bit number of this draw and purpose, for coins of single records."""
        return int.from_bytes(self.bytes_for(8, *purpose), "little") >> 1

    def bytes_for(self, count: int, *purpose: object) -> bytes:
        """`count` secret bytes of this draw and purpose."""
        text = "/".join(map(str, purpose)).encode()
        return hashlib.shake_256(b"equipoise coins" + self.coins + text).digest(count)


def as_draw(draw: Draw | int) -> Draw:
    """`draw` itself, or the draw named "batch" with this index and ordinal."""
    return draw if isinstance(draw, Draw) else Draw("batch", draw, draw)
