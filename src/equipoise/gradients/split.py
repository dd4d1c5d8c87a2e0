"""Per-sample gradients of a tensor parallel model: each process has the same rows, and some of their columns.

Squared norms and dot products are added up over the processes. For a parameter that all of them hold, the
first one's count. So every process has the same bits, and what follows from norms is alike everywhere:
weights, cuts, branches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise._dtensor import all_values, is_a_copy, with_part
from equipoise.gradients.numerics import GUARD, full_precision
from equipoise.gradients.operator import DenseGradients, FactoredGradients, PerSampleGradients, checked_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SplitGradients(PerSampleGradients):
    """Rows of which this process has some columns; every operation is one of all processes together.

    Sums are DTensors where the parameters are. What has no form of its own here is computed from whole rows.

    Args:
        here: the columns of this process.
        params: the parameters by name.
        mesh: the processes.
    """

    def __init__(self, here: FactoredGradients, params: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        self.here, self._params, self._mesh = here, params, mesh
        self.shapes = {name: params[name].shape for name in here.names}
        self.num_records, self.dtype, self.device = here.num_records, here.dtype, here.device
        self.losses = here.losses
        # Of a difference, what it was taken from.
        self._operands: tuple[SplitGradients, ...] | None = None

    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        columns = [self.names] if groups is None else [checked_names(names, self.shapes) for names in groups]
        squares = self._added([self._summed(self._squares, names) for names in columns])
        norms = (squares.T if groups is not None else squares[0]).sqrt().to(self.dtype)
        if self._operands is None:
            return norms
        sizes = torch.stack([operand.row_norms(groups).to(self.dtype) for operand in self._operands]).sum(0)
        return norms.add_(sizes, alpha=GUARD * torch.finfo(self.dtype).eps)

    def _squares(self, names: Sequence[str]) -> Tensor:
        with full_precision(self.device):
            zeros = torch.zeros(self.num_records, dtype=torch.float64, device=self.device)
            return torch.stack([zeros, *(self.here._squares(name) for name in names)]).sum(0)

    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = self.here.weighted_sums(weights)
        return {name: with_part(total, self._params[name]) for name, total in found.items()}

    def cross_gram(self, other: PerSampleGradients, per_tensor: bool = False) -> Tensor | dict[str, Tensor]:
        right = self._like(other)

        def products(names: Sequence[str]) -> Tensor:
            found = self.here.select(names).cross_gram(right.here.select(names))
            assert isinstance(found, Tensor)
            return found

        if not per_tensor:
            return self._added([self._summed(products, self.names)])[0]
        found = self._added([self._summed(products, [name]) for name in self.names])
        return dict(zip(self.names, found.unbind(0), strict=True))

    def inner(self, other: PerSampleGradients) -> Tensor:
        right = self._like(other)

        def products(names: Sequence[str]) -> Tensor:
            return self.here.select(names).inner(right.here.select(names))

        return self._added([self._summed(products, self.names)])[0]

    def _summed(self, of: Callable[[Sequence[str]], Tensor], names: Sequence[str]) -> Tensor:
        """A sum over these parameters, of the columns that this process answers for."""
        is_first = self._mesh.get_local_rank() == 0
        return of([name for name in names if is_first or not is_a_copy(self._params[name])])

    def _added(self, parts: Sequence[Tensor]) -> Tensor:
        """One after another, added up over the processes in one exchange."""
        total = torch.stack(list(parts)) if parts else torch.zeros(0, self.num_records, device=self.device)
        dist.all_reduce(total, group=self._mesh.get_group())
        return total

    def _like(self, other: PerSampleGradients) -> SplitGradients:
        if not isinstance(other, SplitGradients):
            raise TypeError(
                f"other is a {type(other).__name__}, and these are rows of a tensor parallel model: take "
                "both from that model, or materialise() both"
            )
        return other

    def __sub__(self, other: PerSampleGradients) -> SplitGradients:
        right = self._like(other)
        out = self._new(self.here - right.here)
        out._operands = (self, right)
        return out

    def rows(self, index: Tensor | slice) -> SplitGradients:
        return self._changed(lambda G: G.rows(index))

    def select(self, names: Sequence[str]) -> SplitGradients:
        return self._changed(lambda G: G.select(names))

    def _changed(self, change: Callable[[Any], Any]) -> SplitGradients:
        """Of a difference, what it was taken from is changed alike."""
        out = self._new(change(self.here))
        if self._operands is not None:
            out._operands = tuple(map(change, self._operands))
        return out

    def materialise(self) -> DenseGradients:
        parts = self.here.materialise().tensors
        whole = {name: all_values(with_part(rows, self._params[name])) for name, rows in parts.items()}
        return DenseGradients(whole, self.losses, num_records=self.num_records, device=self.device)

    def _new(self, here: FactoredGradients) -> SplitGradients:
        return SplitGradients(here, self._params, self._mesh)
