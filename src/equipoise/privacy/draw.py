"""A draw of records: what the bounded sums of a release have in common."""

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
        parameters: digest of everything that the released quantity depends on, except the records and the
            plan.
        replayed: whether the journal already holds a release at this index for the same digest. Then the same
            noise is given again and nothing is charged.
        capacity: records that it may hold (`Sampling.capacity`).
        secret: 32 secret bytes that key what else is random about each record of this draw: its dropout
            masks, its augmentation, its random labels. Public numbers would be tied to a record's place in
            the batch, which shifts when another record enters.
    """

    name: str
    index: int
    ordinal: int = 0
    parameters: str = ""
    replayed: bool = False
    capacity: int = field(default=1 << 22, compare=False)
    secret: bytes = field(default=b"", repr=False, compare=False)

    def number(self, *purpose: object) -> int:
        """A secret 63-bit number of this draw and purpose."""
        return int.from_bytes(self.secret_bytes(8, *purpose), "little") >> 1

    def secret_bytes(self, count: int, *purpose: object) -> bytes:
        """`count` secret bytes of this draw and purpose."""
        text = "/".join(map(str, purpose)).encode()
        return hashlib.shake_256(b"equipoise coins" + self.secret + text).digest(count)
