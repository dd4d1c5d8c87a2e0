"""Per-sample gradients by the definition: one gradient a record, held densely.

    g_i = grad of loss(model, batch[i:i+1]) with respect to the parameters,

by ``torch.func.vmap(torch.func.grad(...))`` or, where the model cannot be vectorised (control flow that looks
at values, operations without a batching rule), by a loop over single records. It is the measure for the
factored path and the way of parameters that no rule covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise.gradients.batches import num_records, record_leaves, replace_leaves
from equipoise.gradients.operator import DenseGradients

__all__ = ["Loss", "dense_gradients", "dense_rows", "evaluate_loss", "trainable_parameters"]


#: ``loss(model, batch) -> [B]``
Loss = Callable[[Any, Any], Tensor]


class _LossModule(nn.Module):
    """``loss(model, batch)`` as a module, so that parameters can be exchanged for one call (functional "
    "call)."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.training = model.training

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient, a shared one under its first name.

    Raises:
        ValueError: there is none.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(
            f"model={type(model).__name__} has no trainable parameter: requires_grad is False for all "
            f"{sum(1 for _ in model.parameters())}; call requires_grad_(True) on those that are to be trained"
        )
    return found


def check_params(model: nn.Module, params: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """``params`` as a dict, its names and shapes compared with the model's.

    Raises:
        TypeError: not a mapping.
        ValueError: a name the model does not have, or another shape.
    """
    own = dict(model.named_parameters())
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(
            f"params is a {type(params).__name__}; pass a mapping from name to tensor, such as "
            "dict(model.named_parameters())"
        )
    for name, value in (params or {}).items():
        if name not in own:
            close = ", ".join(list(own)[:5])
            raise ValueError(
                f"params has the name {name!r}, which the model does not; its names begin {close}"
            )
        if value.shape != own[name].shape:
            raise ValueError(
                f"params[{name!r}] has shape {tuple(value.shape)} and the model's parameter "
                f"{tuple(own[name].shape)}"
            )
    return dict(params or {})


def evaluate_loss(
    model: nn.Module, loss: Loss, batch: Any, substitute: Mapping[str, Tensor] | None
) -> Tensor:
    """``loss(model, batch)``, [B], with some parameters and buffers exchanged for the call.

    Raises:
        ValueError: the result is not one number a record.
    """
    if substitute:
        named = {f"model.{name}": value for name, value in substitute.items()}
        losses = torch.func.functional_call(_LossModule(model, loss), named, (batch,))
    else:
        losses = loss(model, batch)
    records = num_records(batch)
    if not isinstance(losses, Tensor) or losses.shape != (records,):
        found = (
            f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
        )
        raise ValueError(
            f"loss(model, batch) gave {found}, and {records} records need one number each, shape "
            f"({records},); "
            "use reduction='none' and average over everything but the records"
        )
    return losses


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

    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        try:
            if method == "loop":
                raise NotImplementedError
            gradient = torch.func.grad(one_loss, has_aux=True)
            rows = torch.func.vmap(
                gradient,
                in_dims=(None,) + (0,) * len(leaves),
                randomness="different",
                chunk_size=chunk_size,
            )
            grads, losses = rows(chosen, *leaves)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError):
            # The other trainable parameters keep their graph here: in-place operations on views need it.
            live = {name: values[name] for name in trainable_parameters(model) if name in values}
            grads, losses = _loop(one_loss, chosen, live, leaves)
    return {name: g.detach() for name, g in grads.items()}, losses.detach()


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


def _loop(
    one_loss: Callable[..., tuple[Tensor, Tensor]],
    chosen: dict[str, Tensor],
    others: dict[str, Tensor],
    leaves: list[Tensor],
) -> tuple[dict[str, Tensor], Tensor]:
    """The same rows, a record at a time, with ordinary autograd."""
    rows: dict[str, list[Tensor]] = {name: [] for name in chosen}
    losses = []
    for i in range(leaves[0].shape[0]):
        live = {name: p.detach().requires_grad_() for name, p in (chosen | others).items()}
        value, _ = one_loss(live, *(leaf[i] for leaf in leaves))
        losses.append(value.detach())
        wanted = [live[name] for name in chosen]
        found: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if value.requires_grad:
            found = torch.autograd.grad(value, wanted, allow_unused=True)
        for name, p, g in zip(chosen, wanted, found, strict=True):
            rows[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(found) for name, found in rows.items()}, torch.stack(losses)
