"""Sums as whole numbers of a public unit, whose bits follow neither order nor number of processes.

Floats that are added round by the order in which they come: one record more, in front of four million others,
moved a float32 sum by 5.6 bounds. So the bounded sums of microbatches and of processes are rounded to whole
numbers of a unit u, each once, and added as int64, exactly. One microbatch of one process stays as it is.

**The unit** follows from public numbers alone: the add-or-remove bound C of the sum, and K, the number of
records that a draw may hold (`Sampling.capacity`),

    u = 2^(a + k - 62),     C < 2^a <= 2 C,     K < 2^k <= 2 K.

**No overflow.** A record that enters moves a sum by at most C, from nothing on. So n records make a sum of
norm n C at most, whatever each gives to it, and no entry is larger. With the rounding of up to n
microbatches, u / 2 each, that is K C / u + K / 2 < 2^62 + K / 2 whole numbers: half of int64 is left for the
rounding of float32 products. `Ledger.sample` refuses a draw of more than K records. What is added in between
may wrap around: the total is right all the same.

**What rounding adds.** A microbatch's sum of P entries moves by u sqrt(P) / 2 <= K sqrt(P) C / 2^61: 3e-11 C
for 10^6 entries and K = 2^16. A record in front of all others moves M microbatches, which round anew, by M u
sqrt(P) at most in both sums together; each of the float32 products that they come from rounds by more (1e-7
of C for 78 rows). Entries of float32 from 2^24 u on are whole numbers of u already.

The total is read as float64 (`floats`), whose 53 bits round it by K C / 2^54 at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from equipoise._dtensor import local_part, with_part


def unit_of(bound: float, capacity: int) -> float:
    """u; not below the smallest float32 whose inverse is one too. 0 for a sum without a bound.

    >>> unit_of(1.0, 2**16 - 1) == 2.0 ** (1 + 16 - 62), unit_of(math.inf, 10)
    (True, 0.0)
    """
    if not math.isfinite(bound):
        return 0.0
    return 2.0 ** max(math.frexp(bound)[1] + capacity.bit_length() - 62, -126)


class WholeSum:
    """A raw sum in whole numbers of a unit; one without a bound, for which there is none, in float64.

    Args:
        total: int64 [...], or float64 where the unit is 0.
        unit: u.
        lost: the sum of all entries, which is not finite where one is not: whole numbers cannot tell; [].
    """

    def __init__(self, total: Tensor, unit: float, lost: Tensor) -> None:
        self.total, self.unit, self.lost = total, unit, lost

    @staticmethod
    def of(value: Tensor | WholeSum, unit: float) -> WholeSum:
        """A sum of its own that begins with this one; of a `WholeSum`, in its unit."""
        if isinstance(value, WholeSum) and value.unit:
            return WholeSum(value.total.clone(), value.unit, value.lost.clone())
        raw = value if isinstance(value, Tensor) else value.total
        here = local_part(raw)
        total = torch.empty(here.shape, dtype=torch.int64 if unit else torch.float64, device=here.device)
        lost = torch.zeros((), dtype=torch.float64, device=here.device)
        whole = WholeSum(with_part(total, raw), unit, lost)
        for some, given in whole._pieces(raw):
            some.copy_(given)
        return whole

    def add(self, value: Tensor | WholeSum) -> None:
        """Add the sum of other records."""
        if isinstance(value, WholeSum):
            assert value.unit == self.unit
            self.total += value.total
            self.lost += value.lost
            return
        for some, given in self._pieces(value):
            some += given.long() if self.unit else given

    def _pieces(self, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the total and, in units, of a raw sum: small ones, so that copies take little memory."""
        for some, given in zip(_parts(self.total), _parts(local_part(value).contiguous()), strict=True):
            if not self.unit:
                yield some, given
                continue
            self.lost += given.sum()
            wide = given.to(torch.promote_types(given.dtype, torch.float32))
            yield some, wide.mul(1 / self.unit).round_()

    def is_lost(self) -> Tensor:
        """Whether something that was added was not finite, bool []."""
        return 0 * self.lost != 0

    def floats(self) -> Tensor:
        """The sum in float64, in the memory of the whole numbers, of which nothing is left."""
        if self.unit:
            scale = self.unit + 0 * self.lost
            for some in _parts(self.total):
                some.view(torch.float64).copy_(some.double().mul_(scale))
            self.total = with_part(local_part(self.total).view(torch.float64), self.total)
            self.unit = 0.0
        return self.total

    def __getitem__(self, place: int) -> WholeSum:
        return WholeSum(self.total[place], self.unit, self.lost)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Views of its values, one after the other."""
    here = local_part(tensor).view(-1)
    return torch.split(here, 1 << 18 if here.device.type == "cpu" else 1 << 24)
