"""Per-sample gradients by the definition: one gradient per record, held densely.

    g_i = grad of loss(model, batch[i:i+1]) with respect to the parameters,

by ``torch.func.vmap(torch.func.grad(...))`` or, where the model cannot be vectorised (control flow that looks
at values, operations without a batching rule), by a loop over single records. It is the measure for the
factored path and the way of parameters that no rule covers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from equipoise._dtensor import local_part, part_like
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.capture.sharded import SHARDED, leaves_told
from equipoise.gradients.engine_inputs import (
    Loss,
    backward_included,
    check_params,
    evaluate_loss,
    record_leaves,
    replace_leaves,
    trainable_parameters,
)
from equipoise.gradients.operator import DenseGradients
from equipoise.gradients.rules.local import over_records

__all__ = ["dense_gradients", "dense_rows", "losses_one_by_one"]


def dense_rows(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    params: Mapping[str, Tensor] | None = None,
    names: Iterable[str] | None = None,
    chunk_size: int | None = None,
    method: Literal["auto", "loop"] = "auto",
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient rows by vmap or, where that fails, by a loop: ``({name: [B, *shape]}, losses [B])``.

    Parameters outside ``names`` are constants. Buffers are left as they were. Random layers draw for every
    record.

    Args:
        model: any module.
        loss: ``loss(model, batch) -> [B]``.
        batch: at least one record.
        params: other values for some parameters.
        names: the parameters to differentiate; by default all trainable ones.
        chunk_size: records at a time for vmap; None takes all at once.
        method: "auto", or "loop" for ordinary autograd on one record after another.
    """
    if model in SHARDED:
        return _sharded_loop(model, loss, batch, params, tuple(names or trainable_parameters(model)))
    values: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    values |= {name: p.detach() for name, p in check_params(model, params).items()}
    names = tuple(trainable_parameters(model) if names is None else names)
    chosen = {name: values.pop(name) for name in names}
    buffers = dict(model.named_buffers())
    leaves = record_leaves(batch)

    def one_loss(chosen: dict[str, Tensor], *record: Tensor) -> tuple[Tensor, Tensor]:
        single = replace_leaves(batch, [leaf.unsqueeze(0) for leaf in record])
        # Fresh copies of the buffers: a forward in training mode may write to them.
        constants = values | {name: b.clone() for name, b in buffers.items()}
        value = evaluate_loss(model, loss, single, constants | chosen)[0]
        return value, value.detach()

    # Fused attention has no rule for vmap.
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        try:
            if method == "loop":
                raise NotImplementedError
            gradient = torch.func.grad(one_loss, has_aux=True)
            rows = over_records(
                gradient,
                in_dims=(None,) + (0,) * len(leaves),
                randomness="different",
                chunk_size=chunk_size,
            )
            with _DataIsKept():
                grads, losses = rows(chosen, *leaves)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError):
            # The other trainable parameters keep their graph here: in-place operations on views need it.
            live = {name: values[name] for name in trainable_parameters(model) if name in values}
            grads, losses = _loop(one_loss, chosen, live, leaves)
    return {name: g.detach() for name, g in grads.items()}, losses.detach()


def _sharded_loop(
    model: nn.Module, loss: Loss, batch: Any, params: Mapping[str, Tensor] | None, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], Tensor]:
    """As `_loop` for a model of whose parameters processes hold parts.

    They are differentiated as operations see them; of one that is cut there too, rows are of the part here.
    """
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    losses, leaves = [], record_leaves(batch)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    stand = torch.get_rng_state().numpy().tobytes()
    for i in range(leaves[0].shape[0]):
        seen: dict[str, Tensor] = {}
        single = replace_leaves(batch, [leaf[i : i + 1] for leaf in leaves])
        with (
            random_numbers_from(_start(stand, i), *{leaf.device for leaf in leaves}),
            torch.enable_grad(),
            backward_included(),
            leaves_told(seen.__setitem__),
        ):
            value = evaluate_loss(model, loss, single, params)[0]
            losses.append(value.detach())
            known = [name for name in names if name in seen] if value.requires_grad else []
            found = torch.autograd.grad(value, [seen[name] for name in known], allow_unused=True)
        gradients = dict(zip(known, found, strict=True))
        for name in names:
            g = gradients.get(name)
            shape = local_part(seen[name]).shape if name in seen else shapes[name]
            zero = torch.zeros(shape, dtype=value.dtype, device=value.device)
            rows[name].append(zero if g is None else part_like(g.detach().to_dense(), seen[name]))
    return {name: torch.stack(found) for name, found in rows.items()}, torch.stack(losses)


class _DataIsKept(TorchFunctionMode):
    """Nobody sets a tensor's ``data``: inside vmap that may crash the process.

    A forward does it where it casts one of its layers, as the routers of Switch Transformers do.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise NotImplementedError("the data of a tensor are set inside vmap")
        return func(*args, **(kwargs or {}))


def dense_gradients(
    model: nn.Module, loss: Loss, batch: Any, params: Mapping[str, Tensor] | None = None
) -> DenseGradients:
    """The per-sample gradient matrix with every row formed, [B, *shape] for each trainable parameter.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> dense_gradients(model, lambda m, x: m(x).squeeze(1), torch.eye(2)).tensors["weight"].squeeze(1)
    tensor([[1., 0.],
            [0., 1.]])
    """
    rows, losses = dense_rows(model, loss, batch, params)
    return DenseGradients(rows, losses)


def losses_one_by_one(
    model: nn.Module, loss: Loss, batch: Any, params: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Losses [B] of forwards of one record each, with random numbers of the record's own; as in `_loop`."""
    losses, leaves = [], record_leaves(batch)
    devices = {leaf.device for leaf in leaves}
    stand = torch.get_rng_state().numpy().tobytes()
    for i in range(leaves[0].shape[0]):
        single = replace_leaves(batch, [leaf[i : i + 1] for leaf in leaves])
        with random_numbers_from(_start(stand, i), *devices), torch.enable_grad():
            losses.append(evaluate_loss(model, loss, single, params).detach())
    return torch.cat(losses)


def _start(stand: bytes, record: int) -> int:
    """Where a record's random numbers start."""
    return int.from_bytes(hashlib.blake2b(stand + record.to_bytes(8, "big"), digest_size=7).digest(), "big")


def _loop(
    one_loss: Callable[..., tuple[Tensor, Tensor]],
    chosen: dict[str, Tensor],
    others: dict[str, Tensor],
    leaves: list[Tensor],
) -> tuple[dict[str, Tensor], Tensor]:
    """The same rows, a record at a time, with ordinary autograd.

    Each record has a start of its own for its random numbers: how many one takes changes no other's.
    """
    rows: dict[str, list[Tensor]] = {name: [] for name in chosen}
    losses = []
    devices = {leaf.device for leaf in leaves}
    # From where torch's generator stands, which does not move.
    stand = torch.get_rng_state().numpy().tobytes()
    for i in range(leaves[0].shape[0]):
        live = {name: p.detach().requires_grad_() for name, p in (chosen | others).items()}
        with random_numbers_from(_start(stand, i), *devices):
            value, _ = one_loss(live, *(leaf[i] for leaf in leaves))
            losses.append(value.detach())
            wanted = [live[name] for name in chosen]
            found: tuple[Tensor | None, ...] = (None,) * len(wanted)
            if value.requires_grad:
                found = torch.autograd.grad(value, wanted, allow_unused=True)
        for name, p, g in zip(chosen, wanted, found, strict=True):
            rows[name].append(
                torch.zeros_like(p) if g is None else g.to_dense()
            )  # look-ups may give sparse ones
    return {name: torch.stack(found) for name, found in rows.items()}, torch.stack(losses)
