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
from torch.utils.weak import WeakTensorKeyDictionary

from equipoise._host import host_waits
from equipoise.gradients.capture.random_numbers import SeenOperations, random_numbers_from
from equipoise.gradients.engine_inputs import (
    Loss,
    backward_at,
    check_params,
    evaluate_loss,
    record_leaves,
    replace_leaves,
    trainable_parameters,
)
from equipoise.gradients.factors import DenseFactor, Factor, OuterFactor
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
    values: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    values |= {name: p.detach() for name, p in check_params(model, params).items()}
    trainable = tuple(trainable_parameters(model))
    chosen = {name: values.pop(name) for name in (trainable if names is None else names)}
    buffers, leaves = dict(model.named_buffers()), record_leaves(batch)

    def one_loss(chosen: dict[str, Tensor], *record: Tensor) -> tuple[Tensor, Tensor]:
        single = replace_leaves(batch, [leaf.unsqueeze(0) for leaf in record])
        # Fresh copies of the buffers: a forward in training mode may write to them.
        constants = values | {name: b.clone() for name, b in buffers.items()}
        value = evaluate_loss(model, loss, single, constants | chosen)[0]
        return value, value.detach()

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
            live = {name: values[name] for name in trainable if name in values}
            grads, losses = _loop(model, one_loss, chosen, live, leaves)
    return {name: g.detach() for name, g in grads.items()}, losses.detach()


#: How many sums what these return adds up.
_ADDED = {f"aten.{name}.default": 1 for name in ("view", "_unsafe_view", "detach")} | {"aten.add.Tensor": 2}


class SumsOfProducts(SeenOperations):  # type: ignore[no-untyped-call]
    """Inside, each result that is a sum of matrix products of records is noted as these products.

    So rows that vmap adds up from products need not be formed, and a trace leaves them out. To form those of
    a gradient penalty takes up to 97% of a step (`benchmarks/gradient_penalty.py`, 784-128-1).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._terms = WeakTensorKeyDictionary()

    def factor(self, rows: Tensor) -> Factor:
        """Of rows [B, *shape]; they themselves, where they are no such sum."""
        if rows not in self._terms:
            return DenseFactor(rows)
        left, right = zip(*self._terms[rows], strict=True)
        return OuterFactor(torch.cat(right, 1), torch.cat([part.mT for part in left], 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), str(func)
        given = [one for one in args if isinstance(one, Tensor)]
        if func._schema.is_mutable:  # it may write to a product, or to what one is of
            self._terms.clear()
        elif name == "aten.bmm.default":
            self._terms[out] = [args]
        elif given and not kwargs and all(one in self._terms for one in given):
            if len(given) == _ADDED.get(name) and all(one.shape == out.shape for one in given):
                self._terms[out] = [term for one in given for term in self._terms[one]]
            elif name == "aten.transpose.int" and args[1:] == (1, 2):
                self._terms[out] = [(right.mT, left.mT) for left, right in self._terms[args[0]]]
        return out


#: A trace has the operations of each record that is computed alone: 0.1 s for a small network. A choice: more
#: make the start longer; a micro-batch of more has no trace, and is compared instead of proved.
MOST_TRACED_ROWS = 32


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
    one_loss: Callable[..., tuple[Tensor, Tensor]],
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
