"""Whitening: features brought to the covariance of public ones.

A clipped and noised step treats every direction alike, so that directions of little variance are learnt late
or never. Whitening makes them equally large. The covariance of private features would cost privacy; that of
pictures the library draws itself costs none, and most of the gain is had from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_AT_ONCE = (
    256  # rows that are solved for together; fewer are filled up, since their number moves the rounding
)


@dataclass(frozen=True, eq=False)
class Whitening:
    """Subtracts a mean, divides by a Cholesky factor of a covariance, and brings each row to one length.

    Every other square root of the covariance gives the same features but for a rotation, which a linear model
    with clipped gradients and isotropic noise does not see.

    Attributes:
        mean: ``[d]``.
        factor: ``[d, d]``, lower triangular.
        length: of each row that comes out, so that no record's gradient is long for its contrast's sake.
    """

    mean: Tensor
    factor: Tensor
    length: float = 4.0

    @staticmethod
    def fit(chunks: Iterable[Tensor], *, ridge: float = 0.01, length: float = 4.0) -> Whitening:
        """The whitening of public features.

        Args:
            chunks: features ``[n_i, d]``.
            ridge: added to the covariance's diagonal, as a share of its mean.
            length: see the class.
        """
        count, total, products = 0, torch.zeros(()), torch.zeros(())
        shift = torch.zeros(())  # the first chunk's mean, which keeps the difference of squares exact
        for number, chunk in enumerate(chunks):
            if number == 0:
                shift = chunk.mean(0)
                total, products = torch.zeros_like(shift), torch.zeros(len(shift), len(shift))
            centred = chunk - shift
            products.addmm_(centred.T, centred)
            total = total + centred.sum(0)
            count += len(chunk)
        if count < 2:
            raise ValueError(f"chunks holds {count} rows; a covariance takes at least 2.")
        mean = total / count
        covariance = products.div_(count).addr_(mean, mean, alpha=-1)
        covariance.diagonal().add_(ridge * covariance.diagonal().mean())
        return Whitening(shift + mean, torch.linalg.cholesky(covariance), length)

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows ``[n, d]`` -> ``[n, d]`` of length `length`; row i depends on row i only, bit for bit."""
        return torch.cat([self._block(block) for block in torch.split(rows, _AT_ONCE)])

    def _block(self, rows: Tensor) -> Tensor:
        filled = F.pad(rows, (0, 0, 0, _AT_ONCE - len(rows)))
        whitened = torch.linalg.solve_triangular(self.factor.T, filled - self.mean, upper=True, left=False)
        return F.normalize(whitened[: len(rows)], dim=1) * self.length
