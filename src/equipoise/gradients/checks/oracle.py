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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from equipoise._dtensor import local_part, part_like
from equipoise._host import host_waits
from equipoise.gradients.capture.random_numbers import random_numbers_from
from equipoise.gradients.capture.sharded import SHARDED, leaves_told
from equipoise.gradients.checks.row_comparison import each_gradient
from equipoise.gradients.engine_inputs import (
    Loss,
    backward_at,
    backward_included,
    check_params,
    evaluate_loss,
    record_leaves,
    replace_leaves,
    trainable_parameters,
)
from equipoise.gradients.operator import DenseGradients
from equipoise.gradients.rules.local import over_records

__all__ = ["dense_gradients", "dense_rows", "losses_one_by_one", "visit_rows"]


def dense_rows(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    params: Mapping[str, Tensor] | None = None,
    names: Iterable[str] | None = None,
    chunk_size: int | None = None,
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
    """
    if model in SHARDED:
        return _sharded_loop(model, loss, batch, params, tuple(names or trainable_parameters(model)))
    chosen, values, one_loss = _of_one_record(model, loss, batch, params, names)
    leaves = record_leaves(batch)

    # Fused attention has no rule for vmap.
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        try:
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
            found: dict[str, list[Tensor]] = {name: [] for name in chosen}
            losses = _loop(
                model, one_loss, chosen, _live(model, values), leaves, lambda name, g: found[name].append(g)
            )
            grads = {name: torch.stack(rows_of) for name, rows_of in found.items()}
    return {name: g.detach() for name, g in grads.items()}, losses.detach()


def visit_rows(model: nn.Module, loss: Loss, batch: Any, visit: Callable[[str, Tensor], None]) -> None:
    """Hand each gradient row to `visit(name, row)`, a record after another, by ordinary autograd.

    No row is kept: of a large model three of them are more than its training holds.

    Args:
        model, loss, batch: as in `dense_rows`.
        visit: called once for each trainable parameter and record.
    """
    if model in SHARDED:
        rows, _ = _sharded_loop(model, loss, batch, None, tuple(trainable_parameters(model)))
        for record in range(record_leaves(batch)[0].shape[0]):
            for name, found in rows.items():
                visit(name, found[record])
        return
    chosen, values, one_loss = _of_one_record(model, loss, batch, None, None)
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        _loop(model, one_loss, chosen, _live(model, values), record_leaves(batch), visit)


#: A trace has the operations of each record that is computed alone: 0.1 s for a small network.
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


def _live(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other trainable parameters keep their graph in a loop: in-place operations on views need it."""
    return {name: values[name] for name in trainable_parameters(model) if name in values}


def _sharded_loop(
    model: nn.Module, loss: Loss, batch: Any, params: Mapping[str, Tensor] | None, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], Tensor]:
    """As `_loop` for a model of whose parameters processes hold parts.

    They are differentiated as operations see them; of one that is cut there too, rows are of the part here.
    """
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    losses, leaves = [], record_leaves(batch)
    shapes, numbers_of = {name: p.shape for name, p in model.named_parameters()}, _own_numbers(leaves)
    for i in range(leaves[0].shape[0]):
        seen: dict[str, Tensor] = {}
        single = replace_leaves(batch, [leaf[i : i + 1] for leaf in leaves])
        with (
            numbers_of(i),
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
                f"choose micro_batch_size so that there are at most {MOST_TRACED_ROWS}"
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
    visit: Callable[[str, Tensor], None],
) -> Tensor:
    """The same rows, a record at a time, with ordinary autograd: each is handed to `visit(name, row)`.

    Each record has a start of its own for its random numbers: how many one takes changes no other's.
    """
    losses, numbers_of = [], _own_numbers(leaves)
    for i in range(leaves[0].shape[0]):
        live = {name: p.detach().requires_grad_() for name, p in (chosen | others).items()}
        wanted = {name: live[name] for name in chosen}

        def hand_on(name: str, g: Tensor | None, wanted: dict[str, Tensor] = wanted) -> None:
            # Look-ups may give sparse ones.
            visit(name, torch.zeros_like(wanted[name]) if g is None else g.to_dense())

        with numbers_of(i), backward_at(model, live):
            value, _ = one_loss(live, *(leaf[i] for leaf in leaves))
            losses.append(value.detach())
            if value.requires_grad:
                each_gradient(value, wanted, hand_on)
            else:
                for name in wanted:
                    hand_on(name, None)
    return torch.stack(losses)
