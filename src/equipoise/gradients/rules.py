"""Rules: from an operation, its inputs and its output gradient to the factors of the parameters it used.

    rule(operation) -> finish or None;    finish(b) -> [(tracked tensor, factor), ...]

A rule looks at the operation when it has just run, keeps the inputs it will need (detached, not copied) and
returns the function that turns the gradient ``b`` of the operation's output into factors. None means "not in
this form".
Rules are for operations, not for modules: a layer is served because of what it computes. An operation without
a rule of its own, whose output follows the records, is served by ``local``: the vector-Jacobian product of
that operation alone, vectorised over records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from equipoise.gradients.base import DenseFactor, Factor, accumulation_dtype
from equipoise.gradients.conv import ConvFactor, ConvGeometry
from equipoise.gradients.index import IndexFactor
from equipoise.gradients.layouts import Layout, record_first, sum_to_shape
from equipoise.gradients.outer import OuterFactor

__all__ = ["MATRIX_RULES", "RULES", "Finish", "Operation", "Rule", "local", "rule_for"]

Finish = Callable[[Tensor], list[tuple[Tensor, Factor]]]
Rule = Callable[["Operation"], "Finish | None"]


class Operation:
    """One call of a torch function that saw a tracked tensor, with the layouts of its tensors."""

    __slots__ = ("args", "func", "kwargs", "layouts", "out", "out_layout", "records", "tensors", "tracked")

    def __init__(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        out: Tensor,
        tracked: dict[int, Any],
        tensors: Sequence[Tensor],  # all tensor arguments in order
        layouts: Sequence[Layout | None],  # theirs
        out_layout: Layout,
        records: int,
    ) -> None:
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out
        self.tracked, self.tensors, self.layouts = tracked, tensors, layouts
        self.out_layout, self.records = out_layout, records

    def get(self, *names: str) -> list[Any]:
        """Arguments by position or keyword; None for those not given."""
        args, count = self.args, len(self.args)
        return [args[i] if i < count else self.kwargs.get(name) for i, name in enumerate(names)]

    def tracks(self, value: Any) -> bool:
        """Whether ``value`` is a trainable parameter or an expression of some."""
        return id(value) in self.tracked

    def layout(self, value: Any) -> Layout | None:
        """The layout of an argument; None for one that does not follow the records."""
        for tensor, layout in zip(self.tensors, self.layouts, strict=True):
            if tensor is value:
                return layout
        return None


def _flat(tensor: Tensor, layout: Layout, records: int) -> Tensor:
    """[B, S, d]: records first, the last dimension kept, everything between them flattened."""
    return record_first(tensor, layout, records).reshape(records, -1, tensor.shape[-1])


def _sum(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum in the accumulation type."""
    return tensor.sum(tuple(dims), dtype=accumulation_dtype(tensor.dtype)) if dims else tensor


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Elementwise product in the accumulation type."""
    wide = accumulation_dtype(torch.promote_types(left.dtype, right.dtype))
    return left.to(wide) * right.to(wide)


# -------------------- products of matrices


def _matrix_product(
    op: Operation, x: Tensor, weight: Any, bias: Any, transposed: bool, scale: float = 1.0
) -> Finish | None:
    """``x W^T + bias`` (``transposed``) or ``x W + bias`` with a matrix W and x [..., d_in]."""
    layout, records = op.layout(x), op.records
    if layout is None or layout.axis == x.ndim - 1 or op.tracks(x) or op.out.ndim != x.ndim:
        return None
    kept = x.detach() if op.tracks(weight) else None
    bias = bias if op.tracks(bias) else None
    if bias is not None and bias.shape != op.out.shape[-1:]:
        return None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        b = _flat(b, layout, records)
        found: list[tuple[Tensor, Factor]] = []
        if kept is not None:
            a, scaled = _flat(kept, layout, records), b if scale == 1.0 else b * scale
            found.append((weight, OuterFactor(a, scaled) if transposed else OuterFactor(scaled, a)))
        if bias is not None:
            found.append((bias, DenseFactor(b.squeeze(1) if b.shape[1] == 1 else _sum(b, (1,)))))
        return found

    return finish


def linear(op: Operation) -> Finish | None:
    x, weight, bias = op.get("input", "weight", "bias")
    return _matrix_product(op, x, weight, bias, transposed=True) if weight.ndim == 2 else None


def addmm(op: Operation) -> Finish | None:
    bias, x, weight = op.get("input", "mat1", "mat2")
    if op.kwargs.get("beta", 1) != 1 and op.tracks(bias):
        return None
    return _matrix_product(op, x, weight, bias, transposed=False, scale=op.kwargs.get("alpha", 1))


def matmul(op: Operation) -> Finish | None:
    x, weight = op.args if len(op.args) == 2 else op.get("input", "other" if "other" in op.kwargs else "mat2")
    if not op.tracks(weight) or op.tracks(x):
        return None
    return _matrix_product(op, x, weight, None, transposed=False) if weight.ndim == 2 else None


def einsum(op: Operation) -> Finish | None:
    """``x[record, S, in], W[in, out] -> [record, S, out]`` in any order of letters, without batched "
    "weights."""
    equation, *operands = op.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    left, result = equation.replace(" ", "").split("->")
    letters = left.split(",")
    if op.tracks(operands[0]):
        letters, operands = letters[::-1], operands[::-1]
    (x_letters, w_letters), (x, weight) = letters, operands
    layout, records = op.layout(x), op.records
    if layout is None or layout.fold != "none" or not op.tracks(weight) or op.tracks(x):
        return None
    inner = [c for c in w_letters if c in x_letters]
    outer = [c for c in w_letters if c in result]
    record = x_letters[layout.axis]
    shared = [c for c in x_letters if c != record and c not in inner]
    if (
        set(inner) & set(outer)
        or len(inner) + len(outer) != len(w_letters)
        or set(result) != {record, *shared, *outer}
        or any(len(set(word)) != len(word) for word in (x_letters, w_letters, result))
    ):
        return None
    in_first = list(w_letters) == inner + outer
    if not in_first and list(w_letters) != outer + inner:
        return None
    kept, shape = x.detach(), weight.shape

    def arrange(tensor: Tensor, word: str, last: list[str]) -> Tensor:
        order = [record, *shared, *last]
        sizes = dict(zip(word, tensor.shape, strict=True))
        width = torch.Size(sizes[c] for c in last).numel()
        return tensor.permute([word.index(c) for c in order]).reshape(records, -1, width)

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        a, b = arrange(kept, x_letters, inner), arrange(b, result, outer)
        return [(weight, OuterFactor(b, a, shape) if in_first else OuterFactor(a, b, shape))]

    return finish


# -------------------- convolutions


def _convolution(op: Operation, transposed: bool) -> Finish | None:
    names: tuple[str, ...] = ("input", "weight", "bias", "stride", "padding")
    names += ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    given = dict(zip(names, op.get(*names), strict=True))
    x, weight, bias = given["input"], given["weight"], given["bias"]
    layout, records = op.layout(x), op.records
    if layout is None or op.tracks(x) or layout.axis != 0 or x.ndim != weight.ndim:
        return None
    kept = x.detach() if op.tracks(weight) else None
    geometry = ConvGeometry.of(
        weight.shape[2:],
        **{
            name: given[name]
            for name in ("stride", "padding", "dilation", "groups")
            if given[name] is not None
        },
    )
    bias = bias if op.tracks(bias) else None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        found: list[tuple[Tensor, Factor]] = []
        if kept is not None:
            x, y = record_first(kept, layout, records), record_first(b, layout, records)
            # A transposed convolution is the adjoint: what came in and what came back change places.
            found.append((weight, ConvFactor(y, x, geometry) if transposed else ConvFactor(x, y, geometry)))
        if bias is not None:
            found.append((bias, DenseFactor(_channel_sum(b, layout, records))))
        return found

    return finish


def _channel_sum(product: Tensor, layout: Layout, records: int) -> Tensor:
    """[N, C, ...] -> [B, C]; the folded part of the record axis is summed too."""
    by_channel = _sum(product, tuple(range(2, product.ndim)))
    rows = record_first(by_channel, layout, records).reshape(records, -1, product.shape[1])
    return rows.squeeze(1) if rows.shape[1] == 1 else _sum(rows, (1,))


def conv(op: Operation) -> Finish | None:
    return _convolution(op, transposed=False)


def conv_transpose(op: Operation) -> Finish | None:
    return _convolution(op, transposed=True)


# -------------------- look-ups


def embedding(op: Operation) -> Finish | None:
    index, weight, padding, max_norm = op.get("input", "weight", "padding_idx", "max_norm")
    by_frequency = op.get(*["input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"])[
        5
    ]
    if max_norm is not None or by_frequency:
        return None
    return _look_up(op, weight, index, padding)


def get_item(op: Operation) -> Finish | None:
    """``table[index]`` with one integer tensor that follows the records."""
    weight, index = op.args
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        return None
    return _look_up(op, weight, index % weight.shape[0], None, layout_of=index)


def _look_up(
    op: Operation, weight: Tensor, index: Tensor, padding: int | None, layout_of: Tensor | None = None
) -> Finish | None:
    layout, records, num_rows = (
        op.layout(index if layout_of is None else layout_of),
        op.records,
        weight.shape[0],
    )
    if layout is None or not op.tracks(weight):
        return None
    tail = tuple(weight.shape[1:])
    flat = record_first(index.detach(), layout, records).reshape(records, -1)

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        b = record_first(b, layout, records).reshape(*flat.shape, *tail)
        if padding is not None:
            b = b * (flat != padding % num_rows).view(*flat.shape, *(1,) * len(tail))
        return [(weight, IndexFactor(flat, b, num_rows))]

    return finish


def embedding_bag(op: Operation) -> Finish | None:
    names = "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights"
    index, weight, offsets, max_norm, _, by_frequency, mode, _, scales, _, padding = op.get(
        *names.split(), "include_last_offset", "padding_idx"
    )
    layout, records, mode = op.layout(index), op.records, mode or "mean"
    if (
        layout is None
        or index.ndim != 2
        or layout != Layout(0)
        or offsets is not None
        or max_norm is not None
        or by_frequency
        or mode == "max"
        or op.tracks(scales)
    ):
        return None
    index, num_rows = index.detach(), weight.shape[0]
    parts = torch.ones(index.shape, dtype=accumulation_dtype(weight.dtype), device=index.device)
    if padding is not None:
        parts = parts * (index != padding % num_rows)
    if mode == "mean":
        parts = parts / parts.sum(1, keepdim=True).clamp(min=1)
    if scales is not None:
        parts = parts * scales.detach()

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        return [(weight, IndexFactor(index.view(records, -1), b.unsqueeze(1) * parts.unsqueeze(2), num_rows))]

    return finish


# -------------------- normalisation and scales


def layer_norm(op: Operation) -> Finish | None:
    x, shape, weight, bias, eps = op.get("input", "normalized_shape", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    return _trailing_norm(op, x, tuple(shape), weight, bias, lambda t: F.layer_norm(t, shape, eps=eps))


def rms_norm(op: Operation) -> Finish | None:
    x, shape, weight, eps = op.get("input", "normalized_shape", "weight", "eps")
    return _trailing_norm(op, x, tuple(shape), weight, None, lambda t: F.rms_norm(t, shape, eps=eps))


def _trailing_norm(
    op: Operation, x: Tensor, shape: tuple[int, ...], weight: Any, bias: Any, normalise: Callable
) -> Finish | None:
    layout, records = op.layout(x), op.records
    if layout is None or op.tracks(x) or layout.axis >= x.ndim - len(shape):
        return None
    kept = x.detach() if op.tracks(weight) else None
    bias = bias if op.tracks(bias) else None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        found: list[tuple[Tensor, Factor]] = []
        if kept is not None:
            rows = record_first(_product(b, normalise(kept)), layout, records)
            found.append((weight, DenseFactor(_sum(rows, range(1, rows.ndim - len(shape))))))
        if bias is not None:
            rows = record_first(b, layout, records)
            found.append((bias, DenseFactor(_sum(rows, range(1, rows.ndim - len(shape))))))
        return found

    return finish


def _channel_norm(op: Operation, x: Tensor, weight: Any, bias: Any, normalise: Callable) -> Finish | None:
    """Normalisations of [N, C, ...] with a weight and a bias a channel."""
    layout, records = op.layout(x), op.records
    if layout is None or op.tracks(x) or layout.axis != 0:
        return None
    kept = x.detach() if op.tracks(weight) else None
    bias = bias if op.tracks(bias) else None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        found: list[tuple[Tensor, Factor]] = []
        if kept is not None:
            product = _product(b, normalise(kept))
            found.append((weight, DenseFactor(_channel_sum(product, layout, records))))
        if bias is not None:
            found.append((bias, DenseFactor(_channel_sum(b, layout, records))))
        return found

    return finish


def group_norm(op: Operation) -> Finish | None:
    x, groups, weight, bias, eps = op.get("input", "num_groups", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    layout, records = op.layout(x), op.records
    plain = layout == Layout(0) and x.is_contiguous() and accumulation_dtype(x.dtype) == x.dtype
    if not plain or op.tracks(x) or not op.tracks(weight):
        return _channel_norm(op, x, weight, bias, lambda t: F.group_norm(t, groups, eps=eps))
    kept, (channels, size) = x.detach(), (x.shape[1], x.shape[2:].numel())
    node = op.out.grad_fn
    mean, rstd = (getattr(node, f"_saved_result{i}", None) for i in (1, 2))  # what the forward computed
    bias = bias if op.tracks(bias) else None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        m, r = mean, rstd
        if m is None or r is None:
            _, m, r = torch.native_group_norm(kept, None, None, records, channels, size, groups, eps)
        # The records become groups of one large record, so that the sum over records is left out.
        _, by_weight, by_bias = torch.ops.aten.native_group_norm_backward(
            b.contiguous(), kept, m.view(1, -1), r.view(1, -1), kept.new_ones(records * channels),
            1, records * channels, size, records * groups, [False, True, True],
        )  # fmt: skip
        found: list[tuple[Tensor, Factor]] = [(weight, DenseFactor(by_weight.view(records, channels)))]
        if bias is not None:
            found.append((bias, DenseFactor(by_bias.view(records, channels))))
        return found

    return finish


def instance_norm(op: Operation) -> Finish | None:
    x, mean, var, weight, bias, own, _, eps = op.get(
        "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"
    )
    own, eps = own is None or own, 1e-5 if eps is None else eps
    if x.ndim < 3:
        return None
    if own:  # without the running statistics: they have been updated already
        return _channel_norm(op, x, weight, bias, lambda t: F.instance_norm(t, eps=eps))
    return _channel_norm(op, x, weight, bias, lambda t: F.batch_norm(t, mean, var, eps=eps))


def batch_norm(op: Operation) -> Finish | None:
    x, mean, var, weight, bias, training, _, eps = op.get(
        "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
    )
    if training or mean is None or var is None:
        return None  # statistics of the batch: records are mixed
    eps = 1e-5 if eps is None else eps
    mean, var = mean.clone(), var.clone()
    return _channel_norm(op, x, weight, bias, lambda t: F.batch_norm(t, mean, var, eps=eps))


def prelu(op: Operation) -> Finish | None:
    x, weight = op.get("input", "weight")
    if weight.numel() == 1 and weight.ndim == 1:
        return _broadcast(op, weight, lambda b, kept: _product(b, kept.clamp(max=0)), x)
    if x.ndim < 2:
        return None
    return _channel_norm(op, x, weight, None, lambda t: t.clamp(max=0))


# -------------------- elementwise, broadcast


def _broadcast(
    op: Operation, param: Tensor, local_gradient: Callable[[Tensor, Any], Tensor], kept: Any = None
) -> Finish | None:
    """Rows are the output gradient times a local factor, summed where the parameter was broadcast."""
    layout, records, shape, ndim = op.out_layout, op.records, param.shape, op.out.ndim
    kept = kept.detach() if isinstance(kept, Tensor) else kept

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        rows = record_first(local_gradient(b, kept), layout, records)
        g = sum_to_shape(rows, layout, ndim, shape)
        if g is None:
            raise NotImplementedError("the parameter does not broadcast along the records")
        return [(param, DenseFactor(g))]

    return finish


def _operands(op: Operation) -> tuple[Any, Any] | None:
    """The two operands of an elementwise operation if exactly one is tracked."""
    if len(op.args) + len(op.kwargs) < 2:
        return None
    left, right = (*op.args, *op.kwargs.values())[:2]
    return None if op.tracks(left) == op.tracks(right) else (left, right)


def add(op: Operation, sign: int = 1) -> Finish | None:
    pair = _operands(op)
    if pair is None:
        return None
    alpha = op.kwargs.get("alpha", 1)
    if op.tracks(pair[0]):
        return _broadcast(op, pair[0], lambda b, _: b)
    return _broadcast(op, pair[1], lambda b, _: b if sign * alpha == 1 else b * (sign * alpha))


def sub(op: Operation) -> Finish | None:
    return add(op, sign=-1)


def mul(op: Operation) -> Finish | None:
    pair = _operands(op)
    if pair is None:
        return None
    param, x = pair if op.tracks(pair[0]) else pair[::-1]
    return _broadcast(op, param, _times, x)


def _times(b: Tensor, kept: Any) -> Tensor:
    return _product(b, kept) if isinstance(kept, Tensor) else b * kept


def div(op: Operation) -> Finish | None:
    pair = _operands(op)
    if pair is None or op.kwargs.get("rounding_mode") is not None:
        return None
    top, bottom = pair
    if op.tracks(top):
        return _broadcast(op, top, lambda b, x: b / x, bottom)
    value = bottom.detach()
    return _broadcast(op, bottom, lambda b, out: -_product(b, out) / value, op.out.clone())


def expand(op: Operation) -> Finish | None:
    """``expand``, ``repeat``, ``tile``, ``broadcast_to``: the class token of a vision transformer."""
    return _broadcast(op, op.args[0], lambda b, _: b) if op.args and op.tracks(op.args[0]) else None


# -------------------- any operation, and the register


def local(op: Operation) -> Finish | None:
    """The operation's own vector-Jacobian product, vectorised over records: rows [B, *shape] at once."""
    name, records, func = getattr(op.func, "__name__", "_"), op.records, op.func
    if (name.endswith("_") and not name.startswith("__")) or name.startswith("__i") or name == "__setitem__":
        return None
    leaves, spec = tree_flatten((op.args, op.kwargs))
    targets = {id(t): t for t in leaves if op.tracks(t)}
    places: dict[int, Layout] = {}
    for i, leaf in enumerate(leaves):
        layout = op.layout(leaf) if isinstance(leaf, Tensor) else None
        if layout is not None:
            if layout.fold != op.out_layout.fold:
                return None
            places[i] = layout
    target_of = {i: id(leaf) for i, leaf in enumerate(leaves) if id(leaf) in targets}
    kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    values = {key: t.detach() for key, t in targets.items()}
    out_layout = op.out_layout

    def block(tensor: Tensor, layout: Layout) -> Tensor:
        """Records first, and within a record the axis stays (of size 1, or the folded positions)."""
        rows = record_first(tensor, layout, records)
        return rows.unsqueeze(layout.axis + 1) if layout.fold == "none" else rows

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        def one(b_record: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(places, inputs, strict=True))

            def run(*live: Tensor) -> Tensor:
                current = dict(zip(values, live, strict=True))
                filled = [
                    current[target_of[i]] if i in target_of else given.get(i, leaf)
                    for i, leaf in enumerate(kept)
                ]
                args, kwargs = tree_unflatten(filled, spec)
                return func(*args, **kwargs)

            return torch.func.vjp(run, *values.values())[1](b_record)

        inputs = [block(kept[i], layout) for i, layout in places.items()]
        rows = torch.func.vmap(one)(block(b, out_layout), *inputs)
        return [(t, DenseFactor(g)) for t, g in zip(targets.values(), rows, strict=True)]

    return finish


_T = torch.Tensor

RULES: dict[Callable, Rule] = {
    func: rule
    for rule, functions in {
        linear: (F.linear,),
        addmm: (torch.addmm, _T.addmm),
        matmul: (torch.matmul, torch.mm, _T.matmul, _T.mm, _T.__matmul__),
        einsum: (torch.einsum,),
        conv: (F.conv1d, F.conv2d, F.conv3d),
        conv_transpose: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        embedding: (F.embedding,),
        embedding_bag: (F.embedding_bag,),
        get_item: (_T.__getitem__,),
        layer_norm: (F.layer_norm,),
        rms_norm: (F.rms_norm,),
        group_norm: (F.group_norm,),
        instance_norm: (F.instance_norm,),
        batch_norm: (F.batch_norm,),
        prelu: (F.prelu, torch.prelu, _T.prelu),
        add: (torch.add, _T.add, _T.add_, _T.__add__, _T.__radd__, _T.__iadd__),
        sub: (torch.sub, _T.sub, _T.sub_, _T.__sub__, _T.__isub__),
        mul: (torch.mul, _T.mul, _T.__mul__, _T.__rmul__, torch.multiply, _T.multiply),
        div: (torch.div, _T.div, _T.__truediv__, torch.true_divide, torch.divide),
        expand: (
            _T.expand,
            _T.expand_as,
            _T.repeat,
            torch.broadcast_to,
            _T.broadcast_to,
            torch.tile,
            _T.tile,
        ),
    }.items()
    for func in functions
}


#: Rules whose factors, like the backward of their operations, want the output gradient in one piece.
MATRIX_RULES = frozenset({linear, addmm, matmul})


def rule_for(func: Callable) -> tuple[Rule, ...]:
    """The rules to try for a function, the special one first."""
    special = RULES.get(func)
    return (local,) if special is None else (special, local)
