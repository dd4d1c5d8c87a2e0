"""Tensors made only of parameters: a transposed weight, a chunk, a cast, a position table's rows.

An operation with a rule gives factors for the tensor that it was given. If that tensor is an expression of
parameters, the factors are pulled back through it: exactly in form where the expression moves entries only (a
transpose exchanges the two sides of an outer product, a look-up of fixed rows gives an index factor, a slice
pads), and otherwise as rows through the expression's own autograd graph, all records at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor

Pull = Callable[[Factor], Factor]


@dataclass(eq=False)
class Expression:
    """A tracked tensor: a parameter (``parents`` empty) or a tensor computed from tracked tensors.

    ``pull`` turns factors for ``value`` into factors for its single parent, if the step keeps their form.
    """

    value: Tensor
    roots: dict[str, Tensor]  # the parameters behind it, by name
    parent: Expression | None = None
    pull: Pull | None = field(default=None)


def derive(
    func: Callable, args: tuple, kwargs: dict, out: Any, parents: list[Expression]
) -> Iterator[Expression]:
    """The expressions of the output tensors of an operation that saw tracked tensors and no records."""
    roots: dict[str, Tensor] = {}
    for known in parents:
        roots |= known.roots
    outputs = out if isinstance(out, (tuple, list)) else (out,)
    for value in outputs:
        if not isinstance(value, Tensor) or not value.requires_grad:
            continue
        parent: Expression | None = parents[0] if len(parents) == 1 else None
        # With several parents no form survives: the graph from the value to the parameters is used instead.
        pull = None if parent is None else _pull(func, args, kwargs, parent.value, value)
        yield Expression(value, roots, parent if pull is not None else None, pull)


def pull_back(expression: Expression, factor: Factor) -> list[tuple[str, Factor]]:
    """Factors for the parameters behind ``expression`` from a factor for its value."""
    while expression.parent is not None and expression.pull is not None:
        try:
            factor = expression.pull(factor)
        except NotImplementedError:
            break
        expression = expression.parent
    if len(expression.roots) == 1:
        (name, root), *_ = expression.roots.items()
        if root is expression.value:
            return [(name, factor)]
    rows = factor.materialise().to(expression.value.dtype)
    found = _vjp(expression.value, list(expression.roots.values()), rows)
    return [(n, DenseFactor(g)) for n, g in zip(expression.roots, found, strict=True) if g is not None]


def _vjp(value: Tensor, roots: list[Tensor], rows: Tensor) -> list[Tensor | None]:
    """Rows [B, *value.shape] through the graph of ``value`` to each root, [B, *root.shape]."""
    try:
        found = torch.autograd.grad(
            value, roots, rows, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        return list(found)
    except RuntimeError:  # an operation whose derivative cannot be vectorised: a record at a time
        each = [torch.autograd.grad(value, roots, row, retain_graph=True, allow_unused=True) for row in rows]
        return [None if g[0] is None else torch.stack(g) for g in zip(*each, strict=True)]


def _pull(func: Callable, args: tuple, kwargs: dict, parent: Tensor, value: Tensor) -> Pull | None:
    """How factors for ``value`` become factors for ``parent``, where their form survives."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = "transpose" if func in _TRANSPOSED_VIEWS else ""
    if name in CASTS and value.shape == parent.shape:
        return _same
    if name in _TRANSPOSES and parent.ndim == 2:
        # A permutation of two dimensions exchanges them or does nothing; the strides tell which.
        if value.shape == parent.shape and value.stride() == parent.stride():
            return _same
        return _transpose
    if name in _VIEWS and value.numel() == parent.numel() and parent.is_contiguous():
        return _reshape(parent.shape, value.shape)
    if name in _ROWS and value.ndim == parent.ndim and value.shape[1:] == parent.shape[1:]:
        return _pad_rows(parent, value)
    if name == "embedding" and args[1] is parent and not kwargs.get("scale_grad_by_freq"):
        padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
        return _look_up(args[0].detach(), parent.shape[0], padding)
    return None


#: Results that are their input in another type or place.
CASTS = frozenset(
    [
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "clone",
        "contiguous",
        "alias",
        "view_as",
        "cuda",
        "cpu",
        "type_as",
        "identity",
    ]
)


_TRANSPOSES = frozenset(["t", "transpose", "swapaxes", "swapdims", "permute", "adjoint"])


_TRANSPOSED_VIEWS = (torch.Tensor.T.__get__, torch.Tensor.mT.__get__)  # type: ignore[attr-defined]


_VIEWS = frozenset(["view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"])


_ROWS = frozenset(
    ["chunk", "split", "narrow", "__getitem__", "unsafe_chunk", "split_with_sizes", "tensor_split"]
)


def _same(factor: Factor) -> Factor:
    return factor


def _transpose(factor: Factor) -> Factor:
    if isinstance(factor, OuterFactor) and factor.shape == factor.matrix_shape:
        return OuterFactor(factor.b, factor.a)
    if isinstance(factor, DenseFactor):
        return DenseFactor(factor.g.transpose(1, 2))
    raise NotImplementedError


def _reshape(parent: torch.Size, value: torch.Size) -> Pull:
    def pull(factor: Factor) -> Factor:
        if factor.shape != value:
            raise NotImplementedError
        if isinstance(factor, OuterFactor):
            return OuterFactor(factor.a, factor.b, parent)
        if isinstance(factor, DenseFactor):
            return DenseFactor(factor.g.reshape(-1, *parent))
        raise NotImplementedError

    return pull


def _pad_rows(parent: Tensor, value: Tensor) -> Pull | None:
    """Rows start .. stop of the parent, found by where the view's memory begins."""
    # Other strides: a slice with a step, or of another dimension. Broadcast rows share one place in memory.
    if value.stride() != parent.stride() or value.numel() == 0 or parent.stride(0) == 0:
        return None
    offset = int(value.storage_offset()) - int(parent.storage_offset())
    start, rest = divmod(offset, parent.stride(0))
    if rest or value.untyped_storage()._cdata != parent.untyped_storage()._cdata:
        return None
    before, after = start, parent.shape[0] - start - value.shape[0]
    num_rows = parent.shape[0]

    def pull(factor: Factor) -> Factor:
        if isinstance(factor, OuterFactor) and factor.shape == factor.matrix_shape:
            return OuterFactor(factor.a, F.pad(factor.b, (before, after)))
        if isinstance(factor, DenseFactor):
            records, width = factor.g.shape[0], factor.g.shape[1]
            index = torch.arange(start, start + width, device=factor.device).expand(records, width)
            return IndexFactor(index, factor.g, num_rows)
        raise NotImplementedError

    return pull


def _look_up(index: Tensor, num_rows: int, padding: int | None) -> Pull:
    def pull(factor: Factor) -> Factor:
        g = factor.materialise()
        g = g.reshape(g.shape[0], index.numel(), g.shape[-1])
        if padding is not None:
            g = g * (index.reshape(-1, 1) != padding % num_rows)
        return IndexFactor(index.reshape(1, -1).expand(g.shape[0], -1), g, num_rows)

    return pull
