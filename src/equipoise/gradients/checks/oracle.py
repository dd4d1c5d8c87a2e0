"""Per-sample gradients by the definition: one gradient per record, held densely.

    g_i = grad of loss(model, batch[i:i+1]) with respect to the parameters,

by ``torch.func.vmap(torch.func.grad(...))`` or, where the model cannot be vectorised (control flow that looks
at values, operations without a batching rule), by a loop over single records. It is the measure for the
factored path and the way of parameters that no rule covers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from equipoise._host import host_waits
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.engine_inputs import (
    Loss,
    backward_at,
    check_params,
    evaluate_loss,
    record_leaves,
    replace_leaves,
    trainable_parameters,
)
from equipoise.gradients.operator import DenseGradients
from equipoise.gradients.rules.local import over_records


def dense_rows(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    params: Mapping[str, Tensor] | None = None,
    names: Iterable[str] | None = None,
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
    """
    chosen, values, one_loss = _of_one_record(model, loss, batch, params, names)
    leaves = record_leaves(batch)

    # Fused attention has no rule for vmap.
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        try:
            gradient = torch.func.grad(one_loss, has_aux=True)
            in_dims = (None,) + (0,) * len(leaves)
            rows = over_records(gradient, in_dims=in_dims, randomness="different")
            with _InsideVmap():
                grads, losses = rows(chosen, *leaves)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError):
            # The other trainable parameters keep their graph: in-place operations on views need it.
            live = {name: values[name] for name in trainable_parameters(model) if name in values}
            grads, losses = _loop(model, one_loss, chosen, live, leaves)
    return {name: g.detach() for name, g in grads.items()}, losses.detach()


#: A trace has the operations of each record that is computed alone: 0.1 s for a small network. A choice: more
#: make the start longer; a micro-batch of more has no trace, and is compared instead of proved.
MOST_TRACED_ROWS = 32

OneLoss = Callable[..., tuple[Tensor, Tensor]]


def _of_one_record(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    params: Mapping[str, Tensor] | None,
    names: Iterable[str] | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], OneLoss]:
    """The parameters to differentiate, the others, and the loss of a record as a function of the first."""
    values: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    values |= {name: p.detach() for name, p in check_params(model, params).items()}
    chosen = {
        name: values.pop(name) for name in tuple(trainable_parameters(model) if names is None else names)
    }
    buffers = dict(model.named_buffers())

    def one_loss(chosen: dict[str, Tensor], *record: Tensor) -> tuple[Tensor, Tensor]:
        single = replace_leaves(batch, [leaf.unsqueeze(0) for leaf in record])
        # Fresh copies of the buffers: a forward in training mode may write to them.
        constants = values | {name: b.clone() for name, b in buffers.items()}
        value = evaluate_loss(model, loss, single, constants | chosen)[0]
        return value, value.detach()

    return chosen, values, one_loss


class _InsideVmap(TorchFunctionMode):
    """What a model or loss does that functorch crashes on, or refuses.

    Nobody sets a tensor's ``data``: that may crash the process. A forward does it where it casts one of its
    layers, as the routers of Switch Transformers do.

    A loss that differentiates (a gradient penalty) asks for gradients of what it has computed, by
    ``requires_grad_`` and ``torch.autograd.grad``. functorch refuses that unless it is told to allow it; the
    rows are compared with those of single records like all others.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise NotImplementedError("the data of a tensor are set inside vmap")
        if func in (Tensor.requires_grad_, Tensor.requires_grad.__set__):  # type: ignore[attr-defined]
            with enable_inplace_requires_grad(True):
                return func(*args, **(kwargs or {}))
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
    numbers_of = _own_numbers(leaves)
    for i in range(leaves[0].shape[0]):
        single = replace_leaves(batch, [leaf[i : i + 1] for leaf in leaves])
        with numbers_of(i), torch.enable_grad():
            losses.append(evaluate_loss(model, loss, single, params).detach())
    return torch.cat(losses)


def _own_numbers(leaves: Sequence[Tensor]) -> Callable[[int], AbstractContextManager[None]]:
    """Inside what it returns, a record has a start of its own for its random numbers.

    It follows from where torch's generator stands, which does not move. A trace has no such state: what draws
    there is refused where rows are dense.
    """
    if host_waits(torch.device("cpu")):
        if len(leaves[0]) > MOST_TRACED_ROWS:
            raise RuntimeError(
                f"some rows are computed record by record, and a trace of {len(leaves[0])} records is long; "
                f"choose microbatch_size so that there are at most {MOST_TRACED_ROWS}"
            )
        return lambda record: nullcontext()
    stand, devices = torch.get_rng_state().numpy().tobytes(), {leaf.device for leaf in leaves}

    def of(record: int) -> AbstractContextManager[None]:
        digest = hashlib.blake2b(stand + record.to_bytes(8, "big"), digest_size=7).digest()
        return random_numbers_from(int.from_bytes(digest, "big"), *devices)

    return of


def _loop(
    model: nn.Module,
    one_loss: OneLoss,
    chosen: dict[str, Tensor],
    others: dict[str, Tensor],
    leaves: list[Tensor],
) -> tuple[dict[str, Tensor], Tensor]:
    """The same rows, a record at a time, with ordinary autograd.

    Each record has a start of its own for its random numbers: how many one takes changes no other's.
    """
    losses, numbers_of = [], _own_numbers(leaves)
    rows: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for i in range(leaves[0].shape[0]):
        live = {name: p.detach().requires_grad_() for name, p in (chosen | others).items()}
        wanted = [live[name] for name in chosen]
        with numbers_of(i), backward_at(model, live):
            value, _ = one_loss(live, *(leaf[i] for leaf in leaves))
            losses.append(value.detach())
            found: Sequence[Tensor | None] = [None] * len(wanted)
            if value.requires_grad:
                found = torch.autograd.grad(value, wanted, allow_unused=True)
        for name, g in zip(chosen, found, strict=True):
            # Look-ups may give sparse ones.
            rows[name].append(torch.zeros_like(live[name]) if g is None else g.to_dense())
    return {name: torch.stack(of) for name, of in rows.items()}, torch.stack(losses)
