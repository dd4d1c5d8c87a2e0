"""The rule for any operation that follows the records."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise._tree import leaves, map_leaves
from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.rules.operation import Finish, Layout, Operation, record_first


def over_records(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.func.vmap` without its warning of operations that it takes one by one: no user chose it.

    Args:
        function: of one record.
        options: as for `torch.func.vmap`.
    """
    vectorised = torch.func.vmap(function, **options)

    def run(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop because", UserWarning)
            return vectorised(*args)

    return run


def local(op: Operation) -> Finish | None:
    """The operation's own vector-Jacobian product, vectorised over records: rows [B, *shape] at once."""
    name, records, func = getattr(op.func, "__name__", "_"), op.records, op.func
    # In place, it would write into the inputs that are kept.
    if (name.endswith("_") and not name.startswith("__")) or name.startswith("__i") or name == "__setitem__":
        return None
    # Run again it would draw another dropout than in the forward.
    if (
        func is F.scaled_dot_product_attention
        and op.get("query", "key", "value", "attn_mask", "dropout_p")[4]
    ):
        return None
    given = leaves((op.args, op.kwargs))
    form = map_leaves(lambda _: 0, (op.args, op.kwargs))  # without the tensors, which hold the graph
    targets = {id(t): t for t in given if op.tracks(t)}
    places: dict[int, Layout] = {}
    for i, leaf in enumerate(given):
        layout = op.layout(leaf) if isinstance(leaf, Tensor) else None
        if layout is not None:
            if layout.fold != op.out_layout.fold:  # it reorders positions, or folds them
                return None
            places[i] = layout
    target_of = {i: id(leaf) for i, leaf in enumerate(given) if id(leaf) in targets}
    kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in given]
    values = {key: t.detach() for key, t in targets.items()}
    out_layout = op.out_layout

    def block(tensor: Tensor, layout: Layout) -> Tensor:
        """Records first, and within a record the axis stays (of size 1, or the folded positions)."""
        rows = record_first(tensor, layout, records)
        return rows.unsqueeze(layout.axis + 1) if layout.fold == "none" else rows

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        def one(b_record: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            own = dict(zip(places, inputs, strict=True))

            def run(*live: Tensor) -> Tensor:
                current = dict(zip(values, live, strict=True))
                filled = (
                    current[target_of[i]] if i in target_of else own.get(i, leaf)
                    for i, leaf in enumerate(kept)
                )
                args, kwargs = map_leaves(lambda _: next(filled), form)
                return func(*args, **kwargs)

            return torch.func.vjp(run, *values.values())[1](b_record)

        inputs = [block(kept[i], layout) for i, layout in places.items()]
        rows = over_records(one)(block(b, out_layout), *inputs)
        return [(t, DenseFactor(g)) for t, g in zip(targets.values(), rows, strict=True)]

    return finish
