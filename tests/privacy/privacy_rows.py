"""Dense rows with the operations of a per-sample gradient matrix, and clip rules."""

from __future__ import annotations

import torch


class DenseRows:
    """Rows of named tensors, {name: [B, *shape]}."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        first = next(iter(tensors.values()))
        self.names = tuple(tensors)
        self.shapes = {name: t.shape[1:] for name, t in tensors.items()}
        self.num_records = first.shape[0]
        self.num_parameters = sum(s.numel() for s in self.shapes.values())
        self.shape = (self.num_records, self.num_parameters)
        self.dtype, self.device, self.losses = first.dtype, first.device, None

    def matrix(self) -> torch.Tensor:
        return torch.cat([t.flatten(1) for t in self.tensors.values()], dim=1)

    def row_norms(self, groups=None) -> torch.Tensor:
        if groups is None:
            return self.matrix().norm(dim=1)
        return torch.stack([self.select(group).row_norms() for group in groups], dim=1)

    def weighted_sums(self, weights) -> dict[str, torch.Tensor]:
        def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
            w = weights[name] if isinstance(weights, dict) else weights
            w = w.to(tensor.dtype)
            if w.ndim == 1:
                return torch.tensordot(w, tensor, dims=1)
            return torch.tensordot(w.T, tensor, dims=1)

        return {name: one(name, tensor) for name, tensor in self.tensors.items()}

    def inner(self, other) -> torch.Tensor:
        return (self.matrix() * other.matrix()).sum(dim=1)

    def cross_gram(self, other, per_tensor=False):
        return self.matrix() @ other.matrix().T

    def __sub__(self, other) -> DenseRows:
        return DenseRows({name: t - other.tensors[name] for name, t in self.tensors.items()})

    def rows(self, index) -> DenseRows:
        return DenseRows({name: t[index] for name, t in self.tensors.items()})

    def select(self, names) -> DenseRows:
        return DenseRows({name: self.tensors[name] for name in names})

    def materialise(self) -> DenseRows:
        return self


class Flat:
    """Abadi's rule: min(1, C / norm)."""

    def weights(self, norms, threshold):
        return (threshold / norms).clamp(max=1.0)


class Greedy:
    """A broken rule that asks for too much."""

    def weights(self, norms, threshold):
        return norms * 0 + 1e3


def rows(*records, dtype=torch.float32) -> DenseRows:
    return DenseRows({"w": torch.tensor(records, dtype=dtype).reshape(len(records), -1)})
