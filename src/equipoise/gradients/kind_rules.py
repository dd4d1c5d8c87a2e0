"""What operations make of kinds: a rule for each operation of ATen.

The dimensions of an operation's operands and results bear labels. Along a label the operation computes every
entry apart from the others, or, if the result lacks the label, adds up what it has computed apart. Along a
dimension without label (None) anything may be mixed, so that no records may be there.

Why the kind of a result follows:

- **Entry by entry** (`add`, `exp`, `where`; what PyTorch tags `pointwise`, and a short list, unless it
  draws random numbers): an entry of the result is a function of the entries at its place, all of one record
  or public. Public values that differ along the records' axis (`arange(B)`) may not take part: the result
  would depend on a record's place.
- **The same values elsewhere** (`view`, `permute`, `expand`, `cat`): the axis moves. Entry *(o R + r) p +
  q* of a dimension belongs to record *r* of *R*, for outer copy *o* and place *q* of *p* per record. A
  reshape that splits the axis has no rule, nor has a part of the records (`x[:2]`), whose treatment would
  depend on their place. The engine's own blocks of records are all alike and join to the whole.
- **Along other dimensions** (`softmax`, `layer_norm`, pools, Fourier transforms, matrices of a batch): it
  stays within a record. Columns of the solution of a system of equations depend on their own column of the
  right side, so records may be columns.
- **Sums of products** (`mm`, convolution, `sum`): along a dimension that the result keeps, entries are
  independent. Along one that it adds up, one record's terms depend on it alone: a sum. Multiplying other
  records by zero does not leave them out, since zero times NaN is NaN; `where` does.
- **Linear operations on sums** (`view`, `add`, a product with public values) act on each term. Nothing else
  may take a sum (`x - x.mean(0)`).
- **Look-ups** (`gather`, `index`, `index_put`, `index_add`): a public table at a record's index is by
  record; so are a record's values at a public index, or at its own along another dimension. Along the
  records' axis an index must be `arange` over all of it. Writing at records' indices gives a sum if it adds
  up, and is a mixture if not. No rule relies on the range of an index that comes from records.
- **Loops over records** (`unbind`, `stack`): a function of one record is of that record. `stack` joins the
  results of all records, in order, if the same operations made them from the same public values, or from
  values that the same operations made.
- **Functions of public values** are public, even without a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from equipoise.gradients.kinds import (
    Axis,
    ByRecord,
    Kind,
    MixesError,
    NoRuleError,
    One,
    Operand,
    Public,
    Seen,
    Sum,
    broadcast,
    dims,
    every_axis,
    every_block,
    formed,
    labelled,
    listed,
    moved,
    tensors,
)

__all__ = ["RULES", "rule_of"]

# ---- the table: operation of ATen -> rule, and whether it is linear, so that it may take sums over records

RULES: dict[Any, tuple[Callable[..., Any], bool]] = {}


def rule(names: str, linear: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a rule for operations of ATen."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            packet, _, overload = name.partition(".")
            found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if found is not None:  # another version of PyTorch may lack it
                RULES[found] = (function, linear)
        return function

    return enter


# ---- each entry of the results follows from the entries at its place

#: Beside what PyTorch itself tags as `pointwise`.
ELEMENTWISE = """
_prelu_kernel _prelu_kernel_backward bernoulli complex elu_backward fake_quantize_per_tensor_affine_cachemask
floor_divide hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward
leaky_relu leaky_relu_backward log_sigmoid_backward log_sigmoid_forward masked_fill.Tensor mish_backward
native_dropout normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor polar softplus_backward
softshrink_backward
"""


@rule(ELEMENTWISE)
def elementwise(out: Any, *args: Any, additive: bool = False, **more: Any) -> Any:
    outs = listed(out)
    shape = torch.broadcast_shapes(*(one.shape for one in tensors(*args)))  # type: ignore[no-untyped-call]
    if any(one.value is None or one.shape != shape for one in outs):
        raise NoRuleError("its results have other shapes than its operands")
    found = labelled(broadcast(dims(outs[0]), shape, *args), [dims(outs[0])] * len(outs), additive=additive)
    return found if isinstance(out, list) else found[0]


def rule_of(operation: Any) -> tuple[Callable[..., Any] | None, bool]:
    """The rule for an operation, and whether it is linear."""
    tags = getattr(operation, "tags", ())
    # A random one may take more numbers for some values, so that the next record gets others.
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return RULES.get(operation) or (elementwise if is_pointwise else None, False)


@rule("add.Tensor sub.Tensor neg", linear=True)
def added(out: Seen, *args: Any, **more: Any) -> Kind:
    return elementwise(out, *args, additive=True)


@rule("mul.Tensor mul.Scalar div.Tensor div.Scalar", linear=True)
def multiplied(out: Seen, *args: Any) -> Kind:
    if isinstance(args[1], Seen) and isinstance(args[1].kind, Sum):
        raise MixesError("a sum over records multiplies or divides")
    return elementwise(out, *args)


@rule("mse_loss smooth_l1_loss huber_loss binary_cross_entropy mse_loss_backward smooth_l1_loss_backward")
@rule("huber_loss_backward binary_cross_entropy_backward soft_margin_loss soft_margin_loss_backward")
@rule("binary_cross_entropy_with_logits")
def elementwise_loss(out: Seen, *args: Any) -> Kind:
    if not out.shape or not args[0].shape:
        raise MixesError("over the records' axis, as reduction='none' would not")
    return elementwise(out, *args)


_FRESH = """
zeros ones full empty.memory_format scalar_tensor rand randn randint randint.low zeros_like ones_like
full_like empty_like rand_like randn_like randint_like randint_like.low_dtype new_zeros new_ones new_full
new_empty new_empty_strided bernoulli.p uniform exponential normal_functional fill.Scalar
"""


@rule(_FRESH, linear=True)  # sums too, since they read no value
def everywhere(out: Seen, *args: Any, **more: Any) -> Kind:
    """The same at every place, or random numbers of its own; what `empty` leaves unset is not read."""
    return Public(every_axis(out.shape, out.records) | every_block(out.shape))


@rule("arange arange.start arange.start_step")
def counted(out: Seen, *bounds: Any, **more: Any) -> Kind:
    start, _, step = [(0, *bounds, 1), (*bounds, 1), bounds][len(bounds) - 1]
    return Public(counts=0, step=step) if start == 0 and isinstance(step, int) else Public()


@rule("copy fill.Tensor", linear=True)
def copied(out: Seen, target: Seen, source: Seen, *more: Any) -> Kind:
    return expanded(out, source)


# ---- the same values at other places


@rule("clone detach alias _to_copy lift_fresh_copy view_as_real _conj _conj_physical _neg_view", linear=True)
@rule("view_as_complex", linear=True)
def same(out: Seen, seen: Seen, **more: Any) -> Kind:
    return moved(seen, lambda a: a if a.dim < len(out.shape) else None, "they lie along the two parts")


@rule("view _unsafe_view unsqueeze squeeze squeeze.dim squeeze.dims", linear=True)
def viewed(out: Seen, seen: Seen, *sizes: Any) -> Kind:
    def move(axis: Axis) -> Axis | None:
        ahead = math.prod(seen.shape[: axis.dim]) * axis.outer
        behind = math.prod(seen.shape[axis.dim + 1 :]) * axis.places
        count = seen.shape[axis.dim] // (axis.outer * axis.places)
        for dim, size in enumerate(out.shape):
            outer, no = divmod(ahead, math.prod(out.shape[:dim]))
            places, more = divmod(behind, math.prod(out.shape[dim + 1 :]))
            if no == more == 0 and outer * count * places == size:
                return Axis(dim, outer, places)
        return None

    if 0 in out.shape:
        return Public()
    return moved(seen, move, "the records' axis is split")


@rule("as_strided as_strided_scatter", linear=True)
def strided(out: Seen, seen: Seen, *args: Any) -> Kind:
    """Of memory without gaps, all of it in its order: a `view`."""
    sizes, strides, offset = args[-3:]
    dense = torch.empty(sizes, device="meta").stride()
    whole = seen.value is not None and seen.value.is_contiguous() and seen.value.storage_offset() == 0
    used = [d for d, size in enumerate(sizes) if size > 1]
    in_order = not offset and all(strides[d] == dense[d] for d in used)
    if not (whole and in_order and math.prod(sizes) == math.prod(seen.shape)):
        raise NoRuleError("it looks at memory in another way")
    return viewed(out, args[0] if isinstance(args[0], Seen) else seen)


@rule("permute t transpose.int", linear=True)
def permuted(out: Seen, seen: Seen, *order: Any) -> Kind:
    dimensions = list(range(len(seen.shape)))
    if len(order) == 1:
        dimensions = [dim % len(dimensions) for dim in order[0]]
    elif len(dimensions) > 1:
        one, two = order or (0, 1)
        dimensions[one], dimensions[two] = dimensions[two], dimensions[one]
    return moved(seen, lambda axis: axis._replace(dim=dimensions.index(axis.dim)))


@rule("expand", linear=True)
def expanded(out: Seen, seen: Seen, *sizes: Any, **more: Any) -> Kind:
    ahead = len(out.shape) - len(seen.shape)
    new = [d for d, size in enumerate(out.shape) if d < ahead or size != seen.shape[d - ahead]]
    found = moved(seen, lambda axis: None if axis.dim + ahead in new else axis._replace(dim=axis.dim + ahead))
    if isinstance(found, Public):
        return replace(found, alike=found.alike | every_axis(out.shape, out.records, new))
    return found


@rule("repeat", linear=True)
def repeated(out: Seen, seen: Seen, times: Sequence[int]) -> Kind:
    ahead = len(times) - len(seen.shape)
    wide = moved(seen, lambda a: Axis(a.dim + ahead, a.outer * times[a.dim + ahead], a.places))
    if isinstance(wide, Public):  # each record may have some of the copies
        own = [size // often for size, often in zip(out.shape, times, strict=True)]
        copies = every_axis(times, out.records)
        return Public(wide.alike | {axis._replace(places=axis.places * own[axis.dim]) for axis in copies})
    return wide


def part(seen: Seen, dim: int, start: int, size: int, step: int = 1) -> Kind:
    """The kind of a slice: whole copies of the records' axis, or some records."""
    first = 0

    def move(axis: Axis) -> Axis | None:
        nonlocal first
        if axis.dim != dim or size == seen.shape[dim]:
            return axis
        copy = seen.shape[dim] // axis.outer
        if step == 1 and start % copy == size % copy == 0:
            return axis._replace(outer=size // copy)
        if step == 1 and axis.outer == 1 and start % axis.places == size % axis.places == 0:
            first = start // axis.places
            return axis
        return None

    if isinstance(seen.kind, Public) and size != seen.shape[dim] and seen.kind.counts == dim:
        seen = seen._replace(kind=replace(seen.kind, counts=None))
    found = moved(seen, move, "a slice along the records' axis")
    return replace(found, first=found.first + first) if isinstance(found, ByRecord) else found


@rule("slice.Tensor", linear=True)
def sliced(
    out: Seen, seen: Seen, dim: int = 0, start: int | None = 0, end: Any = None, step: int = 1
) -> Kind:
    dim %= len(seen.shape)
    begin, size = slice(start, None).indices(seen.shape[dim])[0], out.shape[dim]
    return part(seen, dim, begin, size, step) if size else Public()


@rule("split.Tensor split_with_sizes", linear=True)
def split(outs: Sequence[Seen], seen: Seen, size: Any, dim: int = 0) -> list[Kind]:
    dim %= len(seen.shape)
    starts = [sum(out.shape[dim] for out in outs[:number]) for number in range(len(outs))]
    return [part(seen, dim, at, out.shape[dim]) for at, out in zip(starts, outs, strict=True)]


@rule("select.int unbind.int", linear=True)
def selected(out: Any, seen: Seen, dim: int = 0, index: int = 0) -> Any:
    labels = dims(seen, dim)
    found = labelled([(seen, labels)], [[label for label in labels if label is not None]])[0]
    return [found] * len(out) if isinstance(out, list) else found


def as_block(seen: Seen, dim: int) -> Seen:
    """A record alone, as a block of one along this dimension."""
    if isinstance(seen.kind, One):
        return seen._replace(kind=ByRecord(Axis(dim, 1, seen.shape[dim]), seen.kind.record))
    return seen


@rule("cat", linear=True)
def joined(out: Seen, parts: Sequence[Seen], dim: int = 0) -> Kind:
    dim %= len(out.shape)
    held = [as_block(one, dim) for one in parts if 0 not in one.shape]
    given = [one.kind for one in held if isinstance(one.kind, ByRecord) and one.kind.axis.dim == dim]
    if not given:
        operands = [(one, dims(one, dim)) for one in held]
        return labelled(operands, [dims(out, dim)], additive=True)[0]
    places, first = given[0].axis.places, given[0].first
    if given == [one.kind for one in held] and all(kind.axis == Axis(dim, 1, places) for kind in given):
        counts = [one.shape[dim] // places for one in held]
        if [kind.first for kind in given] == [first + sum(counts[:n]) for n in range(len(counts))]:
            return ByRecord(Axis(dim, 1, places), first)  # records, and then those behind them
    copies = 0
    for one in held:  # all records, and then all of them once more
        outer, rest = divmod(one.shape[dim], out.records * places)
        kind, axis = one.kind, Axis(dim, outer, places)
        if rest or not (kind == ByRecord(axis) or (isinstance(kind, Public) and axis in kind.alike)):
            raise MixesError("records are put at places of other records")
        copies += outer
    return ByRecord(Axis(dim, copies, places))


@rule("stack", linear=True)
def stacked(out: Seen, parts: Sequence[Seen], dim: int = 0) -> Kind:
    alone = [one.kind for one in parts]
    if isinstance(alone[0], One) and alone == [One(record, alone[0].way) for record in range(out.records)]:
        return ByRecord(Axis(dim % len(out.shape)))
    labels = dims(out, dim)
    own = [label for label in labels if label is not None]
    return labelled([(one, own) for one in parts], [labels], additive=True)[0]


@rule("select_scatter select_backward", linear=True)
def put_back(out: Seen, *args: Any) -> Kind:
    if any(isinstance(one.kind, One) and one.kind.record == args[3] for one in tensors(*args)):
        raise NoRuleError("records are put back one by one")
    labels = dims(out, args[2])
    own = [label for label in labels if label is not None]
    given = [(one, labels if len(one.shape) == len(labels) else own) for one in tensors(*args)]
    return labelled(given, [labels], additive=True)[0]


@rule("slice_scatter", linear=True)
def put(
    out: Seen, base: Seen, seen: Seen, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> Kind:
    dim %= len(out.shape)
    if seen.shape == out.shape:
        return seen.kind
    seen = as_block(seen, dim)
    begin = slice(start, None).indices(out.shape[dim])[0]
    if isinstance(seen.kind, ByRecord) and seen.kind.axis.dim == dim and step == 1:
        (_, outer, places), first = seen.kind.axis, seen.kind.first
        axis = Axis(dim, 1, places)
        good = base.kind == ByRecord(axis) or (isinstance(base.kind, Public) and axis in base.kind.alike)
        if outer == 1 and first * places == begin and good:
            return ByRecord(axis)
    return labelled([(base, dims(out, dim)), (seen, dims(out, dim))], [dims(out, dim)], additive=True)[0]


@rule("slice_backward", linear=True)
def sliced_back(out: Seen, grad: Seen, sizes: Any, dim: int, start: int, end: int, step: int) -> Kind:
    if (
        isinstance(grad.kind, ByRecord)
        and grad.kind.axis.dim == dim
        and grad.shape != out.shape
        and step == 1
    ):
        (_, outer, places), first = grad.kind.axis, grad.kind.first
        copy = grad.shape[dim] // outer
        if first == 0 and start % copy == out.shape[dim] % copy == 0 and copy == out.records * places:
            return ByRecord(Axis(dim, out.shape[dim] // copy, places))
    base = out._replace(kind=everywhere(out))
    return put(out, base, grad, dim, start, end, step)


# ---- along some dimensions anything may be mixed


def mixed_along(
    which: Callable[[Sequence[Any]], Any], orders: bool, out: Any, *args: Any, **more: Any
) -> Any:
    """What mixes, or orders, along dimensions that `which` finds in the arguments."""
    whole, given = listed(more["dim"] if "dim" in more else which(args)), tensors(*args)
    if len({len(one.shape) for one in (*given, *listed(out))}) > 1:
        raise NoRuleError("its tensors differ in dimensions")
    try:
        return formed(out, given, lambda one: dims(one, *whole))
    except MixesError:
        if orders:
            raise NoRuleError("an order of the records may be undone") from None
        raise


def mixes_along(names: str, which: Callable[[Sequence[Any]], Any], orders: bool = False) -> None:
    rule(names)(partial(mixed_along, which, orders))


mixes_along(
    """
    _softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin flip glu _fft_r2c _fft_c2r
    _fft_c2c
    """,
    lambda args: args[1],
)
mixes_along(
    "_softmax_backward_data _log_softmax_backward_data glu_backward topk rot90 linalg_cross",
    lambda args: args[2],
)
mixes_along("roll", lambda args: args[2] or list(range(len(args[0].shape))))
mixes_along("sort argsort sort.stable", lambda args: [*args, -1][1], orders=True)
mixes_along("constant_pad_nd", lambda args: [-1 - at // 2 for at, size in enumerate(args[1]) if size])
mixes_along("tril triu linalg_matrix_exp", lambda args: [-2, -1])
mixes_along("pixel_shuffle pixel_unshuffle", lambda args: [-3, -2, -1])
for _count in (1, 2, 3):  # of the last dimensions, those of an image
    _pools = """
    avg_pool# _adaptive_avg_pool# max_pool#_with_indices adaptive_max_pool# max_unpool# reflection_pad#
    replication_pad# upsample_nearest# _upsample_nearest_exact# upsample_linear# upsample_bilinear#
    _upsample_bilinear#_aa upsample_bicubic# _upsample_bicubic#_aa upsample_trilinear#
    """.replace("#", f"{_count}d").split()
    mixes_along(
        " ".join(f"{name} {name}_backward" for name in _pools),
        lambda args, whole=list(range(-_count, 0)): whole,  # type: ignore[misc]
    )


@rule("diagonal diag_embed diagonal_backward diagonal_scatter", linear=True)
def diagonal(out: Seen, *args: Any) -> Kind:
    given = tensors(*args)
    wide = dims(max(out, *given, key=lambda one: len(one.shape)), *args[-2:])
    forms = {len(wide): wide, len(wide) - 1: [*(label for label in wide if label is not None), None]}
    operands = [(one, forms[len(one.shape)]) for one in given]
    return labelled(operands, [forms[len(out.shape)]], additive=True)[0]


@rule("unfold unfold_backward", linear=True)
def unfolded(out: Seen, seen: Seen, *more: Any) -> Any:
    """The windows of a dimension have a dimension more, which is the last."""
    short = dims(min(out, seen, key=lambda one: len(one.shape)), more[-3])
    return formed(out, [seen], lambda one: [*short, None][: len(one.shape)])


def reduced(sums: bool, at: int, out: Any, seen: Seen, *args: Any, **more: Any) -> Any:
    """What goes along the dimensions that the argument `at` behind the tensor names, or all."""
    chosen, keep = (*args[at:], None, False)[:2] if len(args) > at else (more.get("dim"), False)
    labels, keep = dims(seen), keep or more.get("keepdim", False)
    gone = {d % max(1, len(labels)) for d in listed(chosen)} if chosen not in (None, []) else set(labels)
    kept = [None if d in gone else d for d in labels if keep or d not in gone]
    found = labelled([(seen, labels)], [kept for _ in listed(out)], sums=sums)
    return found if isinstance(out, list) else found[0]


rule("sum sum.dim_IntList mean mean.dim", linear=True)(partial(reduced, True, 0))
rule(
    """
    any any.dim any.dims all all.dim all.dims amax amin argmax argmin logsumexp max max.dim min min.dim
    median.dim nanmedian.dim mode std.correction var.correction var_mean.correction std_mean.correction
    aminmax count_nonzero count_nonzero.dim_IntList
    """
)(partial(reduced, False, 0))
# No `prod`: its derivative counts the zeros of the whole tensor and then takes one of two formulas, so that a
# trace shows another one than a step may run.
rule("nansum")(partial(reduced, True, 0))
rule("linalg_vector_norm norm.ScalarOpt_dim kthvalue")(partial(reduced, False, 1))


# ---- by letters: what a result lacks is summed; a dot or a star (all further dimensions) is mixed


def lettered(form: str, out: Any, *args: Any, **more: Any) -> Any:
    """A rule such as ``nk,km->nm``.

    Every argument has its place, ``!`` is a result that is not set, and ``@`` stands for dimensions in front
    that are broadcast.
    """
    left, right = (side.split(",") for side in form.split("->"))
    if tensors(*args[len(left) :], *more.values()):
        raise NoRuleError("it takes a tensor more")

    def labels(letters: str, seen: Seen) -> list[Hashable]:
        named = letters.rstrip("*!")
        if len(seen.shape) < len(named) or (len(seen.shape) > len(named) and named == letters):
            raise NoRuleError(f"a tensor has {len(seen.shape)} dimensions")
        return [None if at >= len(named) or named[at] == "." else named[at] for at in range(len(seen.shape))]

    def in_front(letters: str, seen: Seen) -> tuple[int, ...]:
        return seen.shape[: len(seen.shape) - len(letters) + 1]

    def operands(letters: str, seen: Seen) -> list[Operand]:
        if not letters.startswith("@"):
            return [(seen, labels(letters, seen))]
        own = seen.shape[len(seen.shape) - len(letters) + 1 :]
        core = labels(letters[1:], seen._replace(shape=own))
        return broadcast([*range(len(batch)), *core], (*batch, *own), seen)

    given = [(f, s) for f, s in zip(left, args, strict=False) if isinstance(s, Seen)]
    batch = torch.broadcast_shapes(*(in_front(*one) for one in given if one[0][:1] == "@"))  # type: ignore[no-untyped-call]
    asked = {at: one for at, one in enumerate(listed(out)) if one.value is not None}
    if any(right[at].startswith("n") and not one.shape for at, one in asked.items()):
        raise MixesError("over the records' axis, as reduction='none' would not")
    if any(right[at][:1] == "@" and in_front(right[at], one) != batch for at, one in asked.items()):
        raise NoRuleError("it sums over what was broadcast")
    forms = [operands(f, asked[at])[0][1] if at in asked else [] for at, f in enumerate(right)]
    found = labelled([one for f, s in given for one in operands(f, s)], forms, sums=True)
    found = [Public() if f == "!" else kind for f, kind in zip(right, found, strict=True)]
    return found if isinstance(out, list) else found[0]


for _name, _form in {
    "mm": "nk,km->nm",
    "bmm": "bnk,bkm->bnm",
    "mv": "nk,k->n",
    "dot": "k,k->",
}.items():
    rule(_name, linear=True)(partial(lettered, _form))
for _name, _form in {
    "im2col": "n...->n..",
    "col2im": "n..->n...",
    "multinomial": "n.->n.",
    "channel_shuffle affine_grid_generator": "n*->n*",
    "grid_sampler_2d grid_sampler_3d": "n*,n*->n*",
    "grid_sampler_2d_backward grid_sampler_3d_backward": "n*,n*,n*->n*,n*",
    "nll_loss_forward": "n.,n,.->n,!",
    "nll_loss_backward": "n,n.,n,.,,,*->n.",
    "nll_loss2d_forward": "n.hw,nhw,.->nhw,!",
    "nll_loss2d_backward": "nhw,n.hw,nhw,.,,,*->n.hw",
    "multi_margin_loss": "n.,n,,,.->n",
    "multi_margin_loss_backward": "n,n.,n,,,.->n.",
    "multilabel_margin_loss_forward": "n.,n.->n,n.",
    "multilabel_margin_loss_backward": "n,n.,n.,,n.->n.",
    # Matrices in batches; pivots and determinants have a dimension or two less.
    "linalg_inv_ex linalg_cholesky_ex": "@..->@..,@",
    "_linalg_det": "@..->@,@..,@.",
    "_linalg_slogdet": "@..->@,@,@..,@.",
    "cholesky_solve": "@.k,@..->@.k",
    "_cdist_forward": "@p.,@r.->@pr",
    "_cdist_backward": "@pr,@p.,@r.,,@pr->@p.",
    # Of CUDA alone, by their schemas: no test runs them.
    "cudnn_grid_sampler": "n*,n*->n*",
    "cudnn_grid_sampler_backward": "n*,n*,n*->n*,n*",
    "_thnn_fused_lstm_cell": "n.,n.,n.,.,.->n.,n.,n.",
    "_thnn_fused_lstm_cell_backward_impl": "n.,n.,n.,n.,n.->n.,n.,.",
    "_thnn_fused_gru_cell": "n.,n.,n.,.,.->n.,n.",
    "_thnn_fused_gru_cell_backward": "n.,n.->n.,n.,n.,.,.",
}.items():
    rule(_name)(partial(lettered, _form))


@rule("linalg_solve_triangular linalg_lu_solve")
def solved(out: Seen, *given: Any, left: bool = True, **more: Any) -> Kind:
    """Each column of a solution (row, if the matrix is at the right) follows its own of the right side."""
    right = "@.k->@.k" if left else "@k.->@k."
    found: Kind = lettered("@..," + "@.," * (len(given) - 2) + right, out, *given)
    return found


@rule("_linalg_solve_ex")
def solved_with_factors(outs: Sequence[Seen], matrix: Seen, right: Seen, **more: Any) -> list[Kind]:
    found = outs[0]
    if len(right.shape) == 1 or right.shape == matrix.shape[:-1]:  # vectors
        found, right = (one._replace(shape=(*one.shape, 1)) for one in (found, right))
    return [solved(found, matrix, right, **more), *lettered("@..->@..,@.,@", list(outs[1:]), matrix)]


@rule("addmm baddbmm addmv", linear=True)
def added_product(out: Seen, bias: Seen, left: Seen, right: Seen, **more: Any) -> Kind:
    name = {(2, 2): "mm", (3, 3): "bmm", (2, 1): "mv"}[len(left.shape), len(right.shape)]
    found = RULES[getattr(torch.ops.aten, name).default][0](out, left, right)
    return added(out, bias, out._replace(kind=found))


def within_groups(groups: int, operands: Sequence[tuple[Seen, int]], outs: Sequence[tuple[Seen, int]]) -> Any:
    """If records lie along channels, so that no group has two of them: the results' kinds; else None.

    Args:
        groups: of channels; they lie one after another.
        operands, outs: each with the dimension of its channels, or of its groups.
    """
    held = [one for one, dim in operands if isinstance(one.kind, ByRecord) and one.kind.axis.dim == dim]
    if not held:
        return None
    dim, _, places = held[0].kind.axis
    count, first = held[0].shape[dim] // places, held[0].kind.first
    if groups % count:
        raise MixesError("a group of channels has several records")
    for one, dim in operands:
        axis = Axis(dim, 1, one.shape[dim] // count)
        if one.kind != ByRecord(axis, first) and not (
            isinstance(one.kind, Public) and axis in one.kind.alike
        ):
            raise MixesError("records meet other records, or what differs from place to place")
    return [
        ByRecord(Axis(dim, 1, out.shape[dim] // count), first) if out.shape else Public() for out, dim in outs
    ]


@rule("convolution convolution_backward")
def convolution(out: Any, *args: Any) -> Any:
    outs, given = listed(out), tensors(*args[:3])
    backward = isinstance(out, list)
    groups, channels = (args[-2], (1, 1, 0)) if backward else (args[-1], (1, 0, 0))
    # The gradient of the weight alone reads no weight.
    held = given[:2] if backward and not args[-1][0] else given
    found = within_groups(groups, [*zip(held, channels, strict=False)], [*zip(outs, (1, 0, 0), strict=False)])
    if found is None:
        return lettered("n*,n*,*->n*,*,*" if backward else "n*,*,*->n*", out, *args[:3])
    return found if backward else found[0]


@rule("native_group_norm")
def group_norm(outs: Any, seen: Seen, weight: Any, bias: Any, n: int, *more: Any) -> Any:
    if n != seen.shape[0]:
        raise NoRuleError("its memory has another shape")
    return lettered("n*,*,*->n*,n*,n*", outs, seen, weight, bias)


@rule("native_group_norm_backward")
def group_norm_backward(outs: Any, grad: Seen, seen: Seen, *more: Any) -> Any:
    """The memory is taken as [n, c, size], whatever the shape says."""
    (n, c, size, groups), rest = more[3:7], tensors(*more[:3])
    given = [
        one._replace(shape=(n, c, size), kind=viewed(one._replace(shape=(n, c, size)), one))
        for one in (grad, seen)
    ]
    found = within_groups(
        groups,
        [*zip([*given, *rest], (1, 1, 1, 1, 0), strict=False)],
        [(given[0], 1), *zip(outs[1:], (0, 0), strict=True)],
    )
    found = found or lettered("n*,n*,n*,n*,*->n*,*,*", [given[0], *outs[1:]], *given, *rest)
    return [viewed(outs[0], given[0]._replace(kind=found[0])) if outs[0].shape else Public(), *found[1:]]


@rule("embedding")
def embedded(out: Seen, table: Seen, index: Seen, *more: Any) -> Kind:
    return labelled([at_places(table, [None, None]), (index, dims(index))], [dims(out, -1)])[0]


@rule("_embedding_bag _embedding_bag_forward_only")
def bags(outs: Sequence[Seen], table: Seen, index: Seen, offsets: Seen, *more: Any) -> list[Kind]:
    """Bags of one length, so that [bags * length] is [bags, length]."""
    count, kind = outs[0].shape[0], offsets.kind
    even = isinstance(kind, Public) and kind.counts == 0 and kind.step * count == index.shape[0]
    if not even or offsets.shape != (count,) or more[4]:
        raise NoRuleError("its bags differ in length")
    wide = index._replace(shape=(count, kind.step))
    given = [(wide._replace(kind=viewed(wide, one)), ["n", None]) for one in tensors(index, more[3])]
    each = ["n", None]
    found = labelled(
        [(table, [None, None]), *given], [each, each[: len(outs[2].shape)], each[: len(outs[3].shape)]]
    )
    return [found[0], Public(), *found[1:]]


@rule("embedding_dense_backward")
def embedded_backward(out: Seen, grad: Seen, index: Seen, rows: int, padding: int, by_count: bool) -> Kind:
    if by_count:
        raise MixesError("it counts over all records")
    return labelled([(grad, dims(grad, -1)), (index, dims(index))], [[None, None]], sums=True)[0]


@rule("native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward")
def layer_norm(outs: Sequence[Seen], *args: Any) -> list[Kind]:
    given = tensors(*args)
    shape = next(one for one in args if isinstance(one, list))
    size = len(given[0].shape)
    labels = [dim if dim < size - len(shape) else None for dim in range(size)]
    form = lambda one: labels if len(one.shape) == size else [None] * len(one.shape)  # noqa: E731
    return formed(outs, given, form, sums=True)


@rule("native_batch_norm native_batch_norm_backward cudnn_batch_norm")
def batch_norm(outs: Any, *args: Any) -> list[Kind]:
    given = tensors(*args)
    trains = next(one for one in args if isinstance(one, bool))
    labels = [None if trains else "n", "c", *[None] * (len(given[0].shape) - 2)]
    found = formed(outs, given, lambda one: labels if len(one.shape) == len(labels) else ["c"], not trains)
    if args[5] is True and tensors(*args[3:5]):
        raise NoRuleError("it writes running statistics, of which its schema says nothing")
    return found


def attention(
    bias: int | None, outs: Sequence[Seen], *args: Any, attn_mask: Seen | None = None, **more: Any
) -> list[Kind]:
    """Kernels of attention: batch and heads are apart, a mask is broadcast, and seeds are public.

    Args:
        bias: the place of the mask among the arguments; else it goes by name.
    """

    def labels(seen: Seen) -> Sequence[Hashable]:
        return [0, 1, None, None][: len(seen.shape)] if len(seen.shape) > 2 else [None] * len(seen.shape)

    mask = attn_mask if bias is None else args[bias]
    batches = [one.shape[:2] for one in tensors(*args[:3])]
    if any(len(out.shape) > 2 and out.shape[:2] not in batches for out in outs):
        raise NoRuleError("it sums over what was broadcast")
    given = [(s, labels(s)) for at, s in enumerate(args) if isinstance(s, Seen) and at != bias]
    masks = broadcast(labels(args[0]), (*args[0].shape[:2], 0, 0), mask)
    found = labelled([*given, *masks], [labels(out) for out in outs if len(out.shape) > 2])
    return [found.pop(0) if len(out.shape) > 2 else Public() for out in outs]


for _bias, _names in {
    None: """
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    """,
    3: "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    4: "_scaled_dot_product_efficient_attention_backward",
    8: "_scaled_dot_product_cudnn_attention_backward",
}.items():
    rule(_names)(partial(attention, _bias))


@rule("_trilinear", linear=True)
def trilinear(out: Seen, *args: Any) -> Kind:
    """Three tensors get dimensions and are multiplied; some dimensions are summed."""
    if any(dim < 0 for chosen in args[3:7] for dim in chosen):
        raise NoRuleError("its dimensions count from behind")
    size = len(args[0].shape) + len(args[3])
    forms = [[dim for dim in range(size) if dim not in new] for new in args[3:6]]
    kept = [dim for dim in range(size) if dim not in args[6]]
    return labelled([*zip(args[:3], forms, strict=True)], [kept], sums=True)[0]


# ---- look-ups: indices that come of records stay within what is the record's, or public


def at_places(seen: Seen, labels: Sequence[Hashable]) -> Operand:
    """What is read or written at places along the dimensions without a label."""
    if isinstance(seen.kind, ByRecord) and labels[seen.kind.axis.dim] is None:
        raise NoRuleError("an order of the records may be undone")
    return seen, labels


@rule("gather")
def gathered(out: Seen, seen: Seen, dim: int, index: Seen, **more: Any) -> Kind:
    return labelled([at_places(seen, dims(seen, dim)), (index, dims(index))], [dims(out)])[0]


@rule("index_select")
def index_selected(out: Seen, seen: Seen, dim: int, index: Seen) -> Kind:
    labels = ["i" if label is None else label for label in dims(out, dim)]
    return labelled([at_places(seen, dims(seen, dim)), (index, ["i"])], [labels])[0]


@rule("scatter.src scatter.value scatter_add scatter_reduce.two")
def scattered(out: Seen, seen: Seen, dim: int, index: Seen, source: Any, *more: Any, **others: Any) -> Kind:
    given = [at_places(one, dims(one, dim)) for one in tensors(seen, index, source)]
    return labelled(given, [dims(out, dim)])[0]


@rule("bucketize.Tensor")
def bucketed(out: Seen, seen: Seen, bounds: Seen, **more: Any) -> Kind:
    return labelled([(seen, dims(seen)), (bounds, [None])], [dims(out)])[0]


@rule("index_add")
def index_added(out: Seen, seen: Seen, dim: int, index: Seen, source: Seen, **more: Any) -> Kind:
    labels = ["i" if label is None else label for label in dims(source, dim)]
    given = [at_places(seen, dims(seen, dim)), (index, ["i"]), (source, labels)]
    return labelled(given, [dims(out, dim)], sums=True)[0]


def is_mask(index: Seen) -> bool:
    return index.value is not None and index.value.dtype in (torch.bool, torch.uint8)


def indexing(seen: Seen, indices: Sequence[Any]) -> tuple[list[Operand], list[Hashable], list[Hashable], Any]:
    """Operands of an index, labels of what it looks into and of what it finds, and the shape of the index.

    Where an index is 0, 1, 2, ... for the entries of a whole dimension, an entry stays in its place.
    """
    held = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.value is None or is_mask(index) for _, index in held):
        raise NoRuleError("an index is a mask")
    shape = torch.broadcast_shapes(*(index.shape for _, index in held))  # type: ignore[no-untyped-call]
    places: list[Hashable] = [f"i{number}" for number in range(len(shape))]
    inner: list[Hashable] = dims(seen)
    operands: list[Operand] = []
    for dim, index in held:
        inner[dim] = None
        counts = index.kind.counts if isinstance(index.kind, Public) else None
        if counts is not None and index.kind.step == 1 and index.shape[counts] == seen.shape[dim] > 1:
            place = places[len(shape) - len(index.shape) + counts]
            if place in inner:
                raise NoRuleError("one index stands for two dimensions")
            inner[dim] = place
        else:
            operands += broadcast(places, shape, index)
    first, last = held[0][0], held[-1][0]
    rest: list[Hashable] = [dim for dim in range(len(seen.shape)) if dim not in [d for d, _ in held]]
    at = first if last - first + 1 == len(held) else 0
    return operands, inner, [*rest[:at], *places, *rest[at:]], shape


@rule("index.Tensor")
def indexed(out: Seen, seen: Seen, indices: Sequence[Any]) -> Kind:
    operands, inner, found, _ = indexing(seen, indices)
    return labelled([at_places(seen, inner), *operands], [found])[0]


@rule("index_put")
def index_put(out: Seen, seen: Seen, indices: Sequence[Any], values: Seen, accumulate: bool = False) -> Kind:
    if len(indices) == 1 and is_mask(mask := indices[0]) and math.prod(values.shape) == 1:  # `where`
        places = list(range(len(mask.shape)))
        return labelled(
            [(seen, dims(seen)), (mask, places), (values, [None] * len(values.shape))], [dims(out)]
        )[0]
    operands, inner, found, shape = indexing(seen, indices)
    sizes = [shape[int(str(f)[1:])] if isinstance(f, str) else seen.shape[int(str(f))] for f in found]
    given = [at_places(seen, inner), *operands, *broadcast(found, sizes, values)]
    return labelled(given, [inner], sums=accumulate)[0]
