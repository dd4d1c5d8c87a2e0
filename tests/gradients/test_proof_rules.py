"""Every rule of the table against the truth: records are exchanged, and only what a kind allows changes."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.gradients import kind_rules, provenance
from equipoise.gradients import kinds as the_kinds
from equipoise.gradients.kind_rules import RULES, rule_of
from equipoise.gradients.kinds import Axis, ByRecord, Fault, One, Public, Sum, every_axis
from equipoise.gradients.trace import MADE_BY, Line

aten = torch.ops.aten
RECORDS = 3
#: Which record is exchanged, and for what.
EXCHANGES = [(0, "other"), (1, "other"), (2, "other"), (0, "nan"), (1, "inf"), (2, "huge")]


class T(NamedTuple):
    """A tensor to be made: floats, whole numbers below `high`, marks (`high` = 1), complex (`high` = -1)."""

    shape: tuple[int, ...]
    high: int = 0
    lengths: tuple[float, float] = (-2.0, 2.0)


def t(*shape: int) -> T:
    return T(shape)


def whole(high: int, *shape: int) -> T:
    return T(shape, high)


def marks(*shape: int) -> T:
    return T(shape, 1)


def c(*shape: int) -> T:
    return T(shape, -1)


def shares(*shape: int) -> T:
    return T(shape, 0, (0.0, 1.0))


def each(first: T, *rest: Any) -> list[list[Any]]:
    """Samples with the same first operand."""
    return [[first, *(one if isinstance(one, tuple) and not isinstance(one, T) else (one,))] for one in rest]


def alike(samples: list[list[Any]], *names: str) -> dict[str, list[list[Any]]]:
    """The same samples of several operations."""
    return dict.fromkeys(names, samples)


class Numbers(NamedTuple):
    """0, `step`, 2 `step`, ... along dimension 0."""

    shape: tuple[int, ...]
    step: int = 1


# ---- what operations are tried on

GENERIC = {"Tensor": None, "number": 0.7, "float": 0.7, "int": 1, "bool": False, "Scalar": 0.7}
#: Parts of the names of operations on whole numbers.
WHOLE = ("bitwise", "shift__", "xor__", "gcd", "lcm")


def of_schema(operation: Any, shapes: Sequence[T]) -> list[Any]:
    """Arguments as the schema wants them: these tensors in turn, and a number for everything else."""
    following = itertools.cycle(shapes)
    args: list[Any] = []
    for argument in operation._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            break
        if kind in ("Tensor", "Optional[Tensor]"):
            args.append(next(following))
        elif argument.has_default_value() and argument.default_value is not None:
            args.append(argument.default_value)
        else:
            args.append(GENERIC[kind.removeprefix("Optional[").rstrip("]")])
    return args


def elementwise_samples(name: str) -> list[list[Any]]:
    x, wide = t(3, 6, 2), t(6, 2)
    special = {
        "where.self": [[marks(3, 6, 2), wide, t(3, 1, 2)], [marks(3, 1, 1), x, t()]],
        "masked_fill.Scalar": [[x, marks(3, 1, 2), 0.5], [t(3, 2), marks(3, 2), 0.0]],
        "masked_fill.Tensor": [[x, marks(3, 1, 2), t()]],
        **alike([[x, -0.5, 0.5]], "clamp", "clip"),
        **alike([[x, x]], "polar", "complex", "gelu_backward"),
        **alike([[x, x, x]], "_prelu_kernel_backward", "log_sigmoid_backward"),
        "clamp.Tensor": [[x, x, None], [x, None, wide]],
        "ldexp.Tensor": [[x, whole(5, 3, 1, 2)]],
        "normal.Tensor_float": [[x, 0.5]],
        "normal.float_Tensor": [[0.5, shares(3, 6, 2)]],
        "normal.Tensor_Tensor": [[x, shares(3, 6, 2)]],
        "fake_quantize_per_tensor_affine_cachemask": [[x, 0.1, 0, -5, 5]],
        "div.Tensor_mode": [[x, wide]],
        "bernoulli": [[shares(3, 6, 2)]],
        "native_dropout": [[x, 0.5, True]],
        "native_dropout_backward": [[x, marks(3, 6, 2), 2.0]],
        "_prelu_kernel": [[x, t(1, 6, 1)]],
        "elu_backward": [[x, 1.0, 1.0, 1.0, False, x]],
    }
    if name in special:
        return special[name]
    operation = resolved(name)
    tensors = sum("Tensor" in str(argument.type) for argument in operation._schema.arguments)
    if any(part in name for part in WHOLE):
        args = of_schema(operation, [whole(7, 3, 6, 2), whole(7, 3, 1, 2)])
        return [[2 if arg == 0.7 else arg for arg in args]]
    if tensors == 1 or "_backward" in name:
        return [of_schema(operation, [x])]
    return [of_schema(operation, shapes) for shapes in ([x, wide], [t(3, 1, 2), t(6, 1)])]


def resolved(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


IMAGE = t(3, 6, 4, 4)


def images() -> dict[str, list[list[Any]]]:
    """Pools, paddings and interpolations of signals, images and volumes."""
    found: dict[str, list[list[Any]]] = {}
    for n in (1, 2, 3):
        whole_one, half, double, wide = (t(3, 6, *[size] * n) for size in (4, 2, 8, 6))
        one, two, none, sizes = [1] * n, [2] * n, [0] * n, [3, 6, *[4] * n]
        places = whole(4**n, 3, 6, *two)
        pool, average = [two, two, none], [two, two, none, False, True, None]
        found |= {
            f"avg_pool{n}d": [[whole_one, *average[:3]], [t(3, *[4] * n), *average[:3]]],
            f"avg_pool{n}d_backward": [[half, whole_one, *average]],
            f"_adaptive_avg_pool{n}d": [[whole_one, two], [whole_one, one]],
            f"_adaptive_avg_pool{n}d_backward": [[half, whole_one]],
            f"max_pool{n}d_with_indices": [[whole_one, *pool], [t(3, *[4] * n), *pool]],
            f"max_pool{n}d_with_indices_backward": [[half, whole_one, *pool, one, False, places]],
            f"adaptive_max_pool{n}d": [[whole_one, two]],
            f"adaptive_max_pool{n}d_backward": [[half, whole_one, places]],
            f"max_unpool{n}d": [[half, places, [4] * n, *([two, none] if n == 3 else [])]],
        }
        for kind in ("reflection", "replication"):
            found[f"{kind}_pad{n}d"] = [[whole_one, [1, 1] * n], [t(3, *[4] * n), [1, 1] * n]]
            found[f"{kind}_pad{n}d_backward"] = [[wide, whole_one, [1, 1] * n]]
        for kind in ("upsample_nearest#", "_upsample_nearest_exact#"):
            found[kind.replace("#", f"{n}d")] = [[whole_one, [8] * n]]
            found[kind.replace("#", f"{n}d_backward")] = [[double, [8] * n, sizes]]
        plane = ["bilinear#", "bicubic#", "bilinear#_aa", "bicubic#_aa"]
        for kind in {1: ["linear#"], 2: plane, 3: ["trilinear#"]}[n]:
            name = "_" * ("aa" in kind) + "upsample_" + kind.replace("#", f"{n}d")
            found[name] = [[whole_one, [8] * n, False]]
            found[f"{name}_backward"] = [[double, [8] * n, sizes, False]]
    return found


SAMPLES: dict[str, list[list[Any]]] = {
    "add.Tensor": [[t(3, 6), t(6)], [t(3, 6), t(3, 6)], [t(3, 1), t(1, 3)]],
    **alike([[t(3, 6), t(3, 1)], [t(3, 6), t(3, 6)]], "sub.Tensor", "mul.Tensor"),
    **alike([[t(3, 6)]], "neg", "clone", "detach", "alias", "_to_copy", "lift_fresh_copy", "squeeze", "t",
        "sort.stable", "sum", "mean", "any", "all", "max", "min", "aminmax", "zeros_like", "ones_like",
        "empty_like", "rand_like", "randn_like", "uniform", "exponential", "normal_functional"),
    **alike([[t(3, 6), 0.5]], "mul.Scalar", "div.Scalar", "fill.Scalar", "bernoulli.p"),
    "div.Tensor": [[t(3, 6), t(3, 1)]],
    "mse_loss": [[t(3, 6), t(3, 6), 0], [t(3, 6), t(3, 6), 1], [t(3), t(3), 2]],
    **alike([[t(3, 6), t(3, 6), 0], [t(3, 6), t(3, 6), 1]], "smooth_l1_loss", "soft_margin_loss"),
    "huber_loss": [[t(3, 6), t(3, 6), 0], [t(3, 6), t(3, 6), 2]],
    "binary_cross_entropy": [[shares(3, 6), shares(3, 6), None, 0], [shares(3, 6), shares(3, 6), t(6), 0],
        [shares(3, 6), shares(3, 6), None, 1]],
    "binary_cross_entropy_with_logits": [[t(3, 6), shares(3, 6), None, None, 0],
        [t(3, 6), shares(3, 6), t(6), t(6), 0], [t(3, 6), shares(3, 6), None, None, 1]],
    **alike([[t(3, 6), t(3, 6), t(3, 6), 0], [t(), t(3, 6), t(3, 6), 1]], "mse_loss_backward",
        "soft_margin_loss_backward"),
    "smooth_l1_loss_backward": [[t(3, 6), t(3, 6), t(3, 6), 0, 1.0], [t(), t(3, 6), t(3, 6), 1, 1.0]],
    "huber_loss_backward": [[t(3, 6), t(3, 6), t(3, 6), 0, 1.0]],
    "binary_cross_entropy_backward": [[t(3, 6), shares(3, 6), shares(3, 6), None, 0]],
    "copy": [[t(3, 6), t(3, 6)], [t(3, 6), t(6)], [t(3, 6), t(3, 1)]],
    "fill.Tensor": [[t(3, 6), t()]],
    "view": each(t(3, 6), [18], [3, 2, 3]) + each(t(18), [3, 6], [6, 3]) + [[t(6, 3), [18]], [t(9), [3, 3]],
        [t(2, 3, 3), [6, 3]], [t(2, 9), [2, 3, 3]], [t(6, 2), [4, 3]]],
    "_unsafe_view": [[t(3, 6), [18]], [t(18), [2, 9]], [t(3, 4), [2, 6]]],
    "permute": [[t(3, 6, 2), [1, 2, 0]], [t(3, 6, 2), [-1, 0, 1]]],
    "transpose.int": [[t(3, 6, 2), 0, 1], [t(3, 6, 2), -1, 0]],
    "as_strided": [[t(3, 6), [3, 6], [6, 1]], [t(3, 6), [6, 3], [3, 1]], [t(18), [3, 6], [6, 1], 0],
        [t(3, 6), [3, 6], [1, 3]], [t(6, 2), [3, 2], [2, 1]]],
    "as_strided_scatter": [[t(18), t(3, 6), [3, 6], [6, 1]], [t(3, 6), t(3, 6), [3, 6], [6, 1]],
        [t(3, 6), t(3, 6), [3, 6], [1, 3]], [t(18), t(6, 2), [6, 2], [2, 1]]],
    "unsqueeze": [[t(3, 6), 0], [t(3, 6), -1], [t(3, 6), 1]],
    "squeeze.dim": [[t(3, 1, 6), 1], [t(1, 3, 6), 0], [t(3, 6), 0]],
    "squeeze.dims": [[t(3, 1, 6, 1), [1, -1]]],
    "expand": [[t(3, 1), [3, 6]], [t(3, 6), [2, 3, 6]], [t(6), [3, 6]], [t(1, 6), [3, -1]]],
    "repeat": each(t(3, 2), [2, 1], [1, 3]) + each(t(2, 3), [3, 1], [6, 1]) + [[t(3), [2, 2]],
        [t(1, 3), [3, 2]], [t(2), [3, 2]]],
    "slice.Tensor":
        [*each(t(6, 3), (0, 0, 3), (0, 3, 6), (1, 1, 3), (0, 2, 6), (0, 0, 6, 2), (0, 2, 4)), [t(9), 0, -3]],
    "split.Tensor": [[t(6, 3), 3], [t(6, 3), 1, 1], [t(6, 3), 2, 0]],
    "split_with_sizes": [[t(6, 3), [2, 4]], [t(6, 3), [3, 3]]],
    "select.int": [[t(6, 3), 0, 1], [t(6, 3), 1, -1]],
    "unbind.int": [[t(3, 3)], [t(3, 2), 1]],
    "cat": [[[t(3, 2), t(3, 2)]], [[t(3, 2), t(3, 4)], 1], [[t(6, 2), t(3, 2)]], [[t(2, 2), t(4, 2)]]],
    "stack": [[[t(3, 2), t(3, 2)]], [[t(3, 2), t(3, 2)], 1], [[t(3), t(3), t(3)], -1]],
    "select_scatter": [[t(3, 6), t(6), 0, 1], [t(3, 6), t(3), 1, 2]],
    "select_backward": [[t(3), [3, 6], 1, 2], [t(3), [3, 3], 0, 2]],
    "slice_scatter": [[t(6, 3), t(3, 3), 0, 3, 6], [t(3, 6), t(3, 2), 1, 2, 4], [t(6, 3), t(6, 3), 0, 0, 6],
        [t(3, 2), t(2, 2), 0, 1, 3], [t(6, 2), t(3, 2), 0, 0, 6, 2]],
    "slice_backward": [[t(3, 2), [6, 2], 0, 3, 6, 1], [t(3, 2), [3, 6], 1, 2, 4, 1],
        [t(2, 2), [3, 2], 0, 1, 3, 1], [t(3, 2), [6, 2], 0, 0, 6, 2]],
    **alike([[t(3, 6), 1, False], [t(3, 6), 0, False]], "_softmax", "_log_softmax"),
    **alike([[t(3, 6), 1], [t(3, 6), 0]], "_safe_softmax", "cummax", "cummin"),
    **alike([[t(3, 6), 1], [t(3, 6), 0], [t(3, 3), -1]], "cumsum", "cumprod", "logcumsumexp", "sort",
        "argsort"),
    "glu": [[t(3, 6), 1], [t(6, 3), 0]],
    "flip": [[t(3, 6), [1]], [t(3, 6), [0]], [t(3, 6), [0, 1]]],
    **alike([[t(3, 6), t(3, 6), 1, torch.float64], [t(3, 6), t(3, 6), 0, torch.float64]],
        "_softmax_backward_data", "_log_softmax_backward_data"),
    "glu_backward": [[t(3, 3), t(3, 6), 1], [t(3, 3), t(6, 3), 0]],
    "topk": [[t(3, 6), 2], [t(6, 3), 3, 0]],
    "roll": [[t(3, 6), [1], [1]], [t(3, 6), [1], [0]], [t(3, 6), [1]], [t(3, 6), [6]]],
    "tril": [[t(3, 3, 3)], [t(3, 6)]],
    **alike([[t(3, 3, 3)]], "triu", "linalg_matrix_exp"),
    "constant_pad_nd": each(t(3, 6), [0, 0], [1, 1], [0, 0, 1, 2], [1, -1], [0, 0, 1, -1]),
    "diagonal": [[t(3, 3, 3)], [t(3, 3, 3), 0, 1, 2]],
    "unfold": [[t(3, 6), 1, 2, 1], [t(6, 3), 0, 2, 2], [t(3, 6, 3), 1, 3, 3]],
    "unfold_backward": [[t(3, 5, 2), [3, 6], 1, 2, 1], [t(3, 3, 2), [6, 3], 0, 2, 2]],
    "diagonal_scatter": [[t(3, 2, 2), t(3, 2), 0, 1, 2], [t(2, 6, 2), t(6, 2), 0, 0, 2], [t(3, 3), t(3)],
        [t(3, 3, 3), t(3, 2), 1, -2, -1], [t(3, 3, 3), t(3, 3)]],
    "diag_embed": [[t(3, 3)], [t(3, 6), 1, 0, 1]],
    "diagonal_backward": [[t(3, 3), [3, 3, 3], 0, 1, 2], [t(3, 3), [3, 3, 3], 0, 0, 1]],
    "rot90": [[t(3, 6, 6), 1, [1, 2]], [t(3, 3, 6), 1, [0, 1]]],
    "linalg_cross": [[t(3, 6, 3), t(3, 6, 3)], [t(6, 3), t(6, 3)]],
    "_fft_r2c": [[t(3, 6), [1], 0, True], [t(3, 6), [0], 0, True], [t(3, 6, 4), [1, 2], 1, True]],
    "_fft_c2r": [[c(3, 6), [1], 0, 10], [c(3, 6), [0], 0, 4], [c(3, 6, 3), [1, 2], 1, 4]],
    "_fft_c2c": [[c(3, 6), [1], 0, True], [c(3, 6), [0], 0, False], [c(3, 6, 4), [1, 2], 1, True]],
    **alike([[c(3, 6)]], "view_as_real", "_conj", "_conj_physical", "_neg_view"),
    "view_as_complex": [[t(3, 6, 2)], [t(3, 2)]],
    "pixel_shuffle": [[t(3, 4, 3, 3), 2], [t(4, 3, 3), 2]],
    "pixel_unshuffle": [[t(3, 2, 6, 6), 2], [t(3, 6, 6), 2]],
    "channel_shuffle": [[t(3, 6, 3), 2], [t(3, 6, 3), 3]],
    **alike([[t(3, 2, 2)], [t(3, 3, 3)], [t(3, 3)]], "linalg_inv_ex", "_linalg_det", "_linalg_slogdet",
        "linalg_cholesky_ex"),
    "_linalg_solve_ex": [[t(3, 2, 2), t(3, 2, 6)], [t(3, 3, 3), t(3, 3)], [t(3, 3, 3), t(3, 6)],
        [t(3, 3), t(3, 6)], [t(3, 3), t(3)], [t(3, 3, 3), t(3)], [t(2, 3, 3), t(3, 6)],
        [t(3, 1, 2, 2), t(2, 2, 3)], [t(2, 2), t(6, 2), {"left": False}],
        [t(3, 2, 2), t(3, 6, 2), {"left": False}]],
    "linalg_lu_solve": [[t(3, 2, 2), whole(2, 3, 2), t(3, 2, 6)], [t(3, 3), whole(3, 3), t(3, 6)],
        [t(3, 2, 2), whole(2, 3, 2), t(2, 3)], [t(2, 2), whole(2, 2), t(6, 2), {"left": False}]],
    "cholesky_solve": [[t(3, 2, 6), t(3, 2, 2)], [t(3, 6), t(3, 3)], [t(2, 6), t(3, 2, 2)]],
    "linalg_solve_triangular": [[t(3, 2, 2), t(3, 2, 6)], [t(3, 3), t(3, 6)], [t(3, 3), t(3, 3, 3)],
        [t(3, 1, 2, 2), t(2, 2, 3)], [t(2, 2), t(6, 2), {"left": False}],
        [t(3, 2, 2), t(3, 6, 2), {"left": False}]],
    **alike([[t(3, 6), [1]], [t(3, 6), [0]], [t(3, 6, 3), [0, -1], True], [t(3, 6), None], [t(3, 6), []]],
        "sum.dim_IntList", "mean.dim"),
    **alike([[t(3, 6), [1]], [t(3, 6), [0]], [t(3, 6), []]], "amax", "amin", "any.dims", "all.dims"),
    **alike([[t(3, 6), 1], [t(3, 6), 0, True]], "any.dim", "all.dim", "max.dim", "min.dim", "median.dim",
        "nanmedian.dim", "mode", "argmax", "argmin"),
    **alike([[t(3, 6), [1]], [t(3, 6), [0]]], "logsumexp", "count_nonzero.dim_IntList"),
    **alike([[t(3, 6), [1]], [t(3, 6), [0]], [t(3, 6)]], "std.correction", "var.correction",
        "var_mean.correction", "std_mean.correction", "nansum"),
    "count_nonzero": [[t(3, 6), 1], [t(3, 6)]],
    "kthvalue": [[t(3, 6), 2], [t(3, 6), 2, 0, True]],
    "norm.ScalarOpt_dim": [[t(3, 6), 2, [1], True], [t(3, 6), 1, [0]]],
    "linalg_vector_norm": [[t(3, 6), 2, [1]], [t(3, 6), 2, [0]], [t(3, 6), 2], [t(3, 6), 1, [1], True]],
    "mm": [[t(3, 6), t(6, 3)], [t(3, 3), t(3, 3)]],
    "bmm": [[t(3, 3, 6), t(3, 6, 3)], [t(3, 2, 3), t(3, 3, 3)]],
    "mv": [[t(3, 6), t(6)], [t(3, 3), t(3)]],
    "dot": [[t(6), t(6)]],
    "addmm": [[t(3), t(3, 6), t(6, 3)], [t(3, 3), t(3, 3), t(3, 3)]],
    "baddbmm": [[t(3, 3, 3), t(3, 3, 6), t(3, 6, 3)]],
    "addmv": [[t(3), t(3, 6), t(6)]],
    "im2col": [[t(3, 6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]], [t(3, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]]],
    "col2im": [[t(3, 12, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]],
        [t(12, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]]],
    "multinomial": [[shares(3, 6), 2, True], [shares(3), 3, True]],
    "convolution": [[t(3, 2, 5), t(3, 2, 3), t(3), [1], [0], [1], False, [0], 1],
        [t(1, 6, 5), t(6, 2, 3), None, [1], [1], [1], False, [0], 3],
        [t(2, 6, 5), t(12, 1, 3), t(12), [1], [1], [1], False, [0], 6],
        [t(1, 6, 5), t(6, 2, 3), None, [1], [1], [1], True, [0], 3],
        [t(3, 6, 5), t(3, 6, 3), None, [1], [1], [1], False, [0], 1]],
    "convolution_backward": [[t(3, 3, 3), t(3, 2, 5), t(3, 2, 3), [3], [1], [0], [1], False, [0], 1,
        [True, True, True]], [t(1, 6, 5), t(1, 6, 5), t(6, 2, 3), None, [1], [1], [1], False, [0], 3,
        [True, True, False]], [t(2, 12, 5), t(2, 6, 5), t(12, 1, 3), [12], [1], [1], [1], False, [0], 6,
        [False, True, True]]],
    "native_group_norm": [[t(3, 6, 4), t(6), t(6), 3, 6, 4, 2, 1e-5],
        [t(3, 6, 4), t(18), None, 1, 18, 4, 6, 1e-5], [t(3, 6, 4), None, None, 1, 18, 4, 2, 1e-5],
        [t(3, 6, 4), None, None, 3, 6, 4, 3, 1e-5]],
    "native_group_norm_backward": [[t(3, 6, 4), t(3, 6, 4), t(3, 2), t(3, 2), t(6), 3, 6, 4, 2,
        [True, True, True]], [t(3, 6, 4), t(3, 6, 4), t(1, 6), t(1, 6), t(18), 1, 18, 4, 6,
        [False, True, True]], [t(3, 6, 4), t(3, 6, 4), t(1, 2), t(1, 2), t(18), 1, 18, 4, 2,
        [False, True, True]]],
    "_trilinear": [[t(3, 2), t(4, 2, 3), t(3, 3), [1, 3], [0], [1, 2], [2, 3]],
        [t(3, 2), t(3, 3), t(3, 3), [2], [1], [1], [0]]],
    "_cdist_forward": [[t(3, 4, 2), t(3, 6, 2), 2.0, None], [t(3, 6), t(6, 6), 1.0, None],
        [t(3, 3, 6), t(1, 6, 6), 2.0, None], [t(6, 2), t(6, 2), 2.0, None]],
    "_cdist_backward":
        [[t(3, 4, 6), t(3, 4, 2), t(3, 6, 2), 1.0, t(3, 4, 6)], [t(3, 6), t(3, 2), t(6, 2), 1.0, t(3, 6)]],
    **alike([[t(5, 2), whole(5, 12), Numbers((6,), 2), False, mode, False, weights]
             for mode, weights in ((0, None), (0, t(12)), (1, None), (2, None))]
            + [[t(5, 2), whole(5, 12), Numbers((6,))], [t(5, 2), whole(5, 9), Numbers((3,), 3)]]
            + [[t(5, 2), whole(5, 12), Numbers((6,), 2), False, n, False, None, False, 1] for n in (0, 1, 2)],
            "_embedding_bag", "_embedding_bag_forward_only"),
    "embedding": [[t(5, 2), whole(5, 3, 6)], [t(6, 3), whole(6, 3)]],
    "embedding_dense_backward":
        [[t(3, 6, 2), whole(5, 3, 6), 5, -1, False], [t(3, 6, 2), whole(5, 3, 6), 5, 1, True]],
    "native_layer_norm": [[t(3, 6, 2), [2], t(2), t(2), 1e-5], [t(3, 6, 2), [6, 2], None, None, 1e-5],
        [t(3, 6), [3, 6], None, None, 1e-5]],
    "native_layer_norm_backward": [[t(3, 6, 2), t(3, 6, 2), [2], t(3, 6, 1), t(3, 6, 1), t(2), t(2),
        [True] * 3], [t(3, 6), t(3, 6), [6], t(3, 1), t(3, 1), None, None, [True, False, False]]],
    "_fused_rms_norm": [[t(3, 6, 2), [2], t(2), 1e-5], [t(3, 6), [3, 6], None, 1e-5]],
    "native_batch_norm":
        [[t(3, 6, 4), t(6), t(6), t(6), shares(6), train, 0.1, 1e-5] for train in (True, False)],
    "native_batch_norm_backward": [[t(3, 6, 4), t(3, 6, 4), t(6), t(6), shares(6), t(6), shares(6), train,
        1e-5, [True] * 3] for train in (True, False)],
    "nll_loss_forward": [[t(3, 6), whole(6, 3), None, 0, -100], [t(3, 6), whole(6, 3), t(6), 0, 1],
        [t(3, 6), whole(6, 3), None, 1, -100]],
    "nll_loss_backward":
        [[t(3), t(3, 6), whole(6, 3), t(6), 0, -100, t()], [t(), t(3, 6), whole(6, 3), None, 1, -100, t()]],
    "nll_loss2d_forward": [[t(3, 6, 3, 2), whole(6, 3, 3, 2), t(6), 0, -100],
        [t(3, 6, 3, 2), whole(6, 3, 3, 2), None, 2, -100]],
    "nll_loss2d_backward": [[t(3, 3, 2), t(3, 6, 3, 2), whole(6, 3, 3, 2), None, 0, -100, t()]],
    "multi_margin_loss": [[t(3, 6), whole(6, 3), 1, 1.0, t(6), 0], [t(3, 6), whole(6, 3), 2, 1.0, None, 0],
        [t(3, 6), whole(6, 3), 1, 1.0, None, 1], [t(6), whole(6), 1, 1.0, None, 0]],
    "multi_margin_loss_backward":
        [[t(3), t(3, 6), whole(6, 3), 1, 1.0, t(6), 0], [t(), t(3, 6), whole(6, 3), 1, 1.0, None, 1]],
    "multilabel_margin_loss_forward": [[t(3, 6), whole(6, 3, 6), 0], [t(6), whole(6, 6), 0]],
    "multilabel_margin_loss_backward":
        [[t(3), t(3, 6), whole(6, 3, 6), 0, shares(3, 6)], [t(), t(3, 6), whole(6, 3, 6), 1, shares(3, 6)]],
    "grid_sampler_2d": [[IMAGE, t(3, 3, 3, 2), 0, 0, False], [IMAGE, t(3, 3, 3, 2), 1, 1, True]],
    "grid_sampler_2d_backward": [[t(3, 6, 3, 3), IMAGE, t(3, 3, 3, 2), 0, 0, False, [True, True]]],
    "grid_sampler_3d": [[t(3, 6, 2, 2, 2), t(3, 3, 1, 3, 3), 0, 0, False]],
    "grid_sampler_3d_backward":
        [[t(3, 6, 3, 1, 3), t(3, 6, 2, 2, 2), t(3, 3, 1, 3, 3), 0, 0, False, [True, True]]],
    "affine_grid_generator": [[t(3, 2, 3), [3, 2, 4, 4], False], [t(3, 3, 4), [3, 1, 2, 2, 2], True]],
    "_scaled_dot_product_flash_attention_for_cpu":
        [[t(3, 3, 3, 4), t(3, 3, 3, 4), t(3, 3, 3, 4), 0.0, causal] for causal in (False, True)],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [[t(3, 3, 3, 4)] * 5 + [t(3, 3, 3), 0.0, False]],
    **images(),
    "gather": [[t(3, 6), 1, whole(6, 3, 2)], [t(6, 3), 0, whole(6, 3, 3)], [t(6, 3), 0, whole(6, 6, 3)],
        [t(6, 6), 1, whole(6, 3, 6)]],
    "bucketize.Tensor": [[t(3, 6), t(5)], [t(3, 6), t(3)]],
    "scatter_reduce.two": [[t(3, 6), 1, whole(6, 3, 2), t(3, 2), "sum"],
        [t(3, 6), 1, whole(6, 3, 6), t(3, 6), "amax"], [t(6, 3), 0, whole(6, 3, 3), t(3, 3), "mean"]],
    "index_select": [[t(3, 6), 1, whole(6, 3)], [t(6, 3), 0, whole(6, 3)], [t(6, 3), 0, whole(6, 6)]],
    "scatter.src": [[t(3, 6), 1, whole(6, 3, 2), t(3, 2)], [t(6, 3), 0, whole(6, 3, 3), t(3, 3)],
        [t(6, 6), 1, whole(6, 3, 6), t(6, 6)]],
    "scatter.value": [[t(3, 3), 1, whole(3, 2, 1), 0.5], [t(3, 6), 1, whole(6, 3, 2), 0.5],
        [t(6, 3), 0, whole(6, 3, 3), 0.5]],
    "scatter_add": [[t(3, 6), 1, whole(6, 3, 2), t(3, 2)], [t(6, 3), 0, whole(6, 3, 3), t(3, 3)]],
    "index_add": [[t(5, 2), 0, whole(5, 6), t(6, 2)], [t(3, 6), 1, whole(6, 3), t(3, 3)],
        [t(6, 2), 0, whole(6, 3), t(3, 2)]],
    "index.Tensor": [[t(3, 6), [whole(3, 3)]], [t(3, 6), [None, whole(6, 3)]],
        [t(3, 6), [Numbers((3,)), whole(6, 3)]], [t(6, 3, 3), [whole(6, 3, 1), None, whole(3, 3)]],
        [t(3, 6, 2), [Numbers((3, 1)), whole(6, 3, 2)]], [t(6, 3), [Numbers((3,))]],
        [t(3, 6, 2), [None, whole(6, 3), whole(2, 3)]]],
    "index_put": [[t(5, 2), [whole(5, 3)], t(3, 2), True], [t(5, 2), [whole(5, 3)], t(3, 2), False],
        [t(3, 6), [Numbers((3,)), whole(6, 3)], t(3), True],
        [t(3, 6), [Numbers((3, 1)), whole(6, 3, 2)], t(3, 2), True],
        [t(3, 6), [None, whole(6, 2)], t(3, 2), True], [t(3, 6), [None, whole(6, 2)], t(), False],
        [t(3, 6), [whole(3, 3), whole(6, 3)], t(3), True], [t(3, 6), [marks(3, 6)], t()],
        [t(3, 6), [marks(3)], t(1)]],
    "arange": [[6]],
    "arange.start": [[0, 6], [1, 6]],
    "arange.start_step": [[0, 6, 1], [0, 6, 2]],
    **alike([[[3, 6]]], "zeros", "ones", "rand", "randn", "empty.memory_format"),
    "full": [[[3, 6], 0.5]],
    "scalar_tensor": [[0.5]],
    "randint": [[5, [3, 6]]],
    "randint.low": [[1, 5, [3, 6]]],
    **alike([[t(3, 6), 5]], "full_like", "randint_like"),
    "randint_like.low_dtype": [[t(3, 6), 1, 5]],
    **alike([[t(3, 6), [6, 3]]], "new_zeros", "new_ones", "new_empty"),
    "new_empty_strided": [[t(3, 6), [6, 3], [3, 1]]],
    "new_full": [[t(3, 6), [6, 3], 0.5]],
}  # fmt: skip
HEADS, ROWS, SEED, MASK = t(3, 2, 5, 4), t(3, 4), whole(9), t(3, 1, 5, 5)
#: Of CUDA alone, which no test here can run: arguments, and what of which kind results if records lie along
#: dimension 0 of those: by record, a sum, or public.
OF_CUDA: dict[str, tuple[list[Any], str]] = {
    "_scaled_dot_product_flash_attention": ([HEADS] * 3, "BB.....PP"),
    "_scaled_dot_product_flash_attention_backward":
        ([*[HEADS] * 5, t(3, 2, 5), None, None, 5, 5, 0.1, True, SEED, SEED], "BBB"),
    "_scaled_dot_product_efficient_attention": ([*[HEADS] * 3, MASK, True], "BBPP"),
    "_scaled_dot_product_efficient_attention_backward":
        ([*[HEADS] * 4, MASK, HEADS, t(3, 2, 5), SEED, SEED, 0.1, [True, True, True, False]], "BBB."),
    "_scaled_dot_product_cudnn_attention": ([*[HEADS] * 3, MASK, True], "BB....PP."),
    "_scaled_dot_product_cudnn_attention_backward":
        ([*[HEADS] * 5, t(3, 2, 5, 1), SEED, SEED, MASK, None, None, 5, 5, 0.1, True], "BBB"),
    "_thnn_fused_lstm_cell": ([t(3, 16), t(3, 16), ROWS, t(16), t(16)], "BBB"),
    "_thnn_fused_lstm_cell_backward_impl": ([ROWS, None, ROWS, ROWS, t(3, 16), True], "BBS"),
    "_thnn_fused_gru_cell": ([t(3, 12), t(3, 12), ROWS, t(12), t(12)], "BB"),
    "_thnn_fused_gru_cell_backward": ([ROWS, t(3, 20), True], "BBBSS"),
    "cudnn_batch_norm": ([t(3, 6, 4), t(6), t(6), t(6), t(6), False, 0.1, 1e-5], "B..."),
    "cudnn_grid_sampler": ([IMAGE, t(3, 2, 2, 2)], "B"),
    "cudnn_grid_sampler_backward": ([IMAGE, t(3, 2, 2, 2), t(3, 6, 2, 2)], "BB"),
    "_fused_rms_norm_backward": ([ROWS, ROWS, [4], t(3, 1), t(4), [True, True]], "BS"),
}  # fmt: skip


def pointwise() -> list[str]:
    """What has a rule since PyTorch tags it as pointwise."""
    packets = {n.partition("::")[2].partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    found = []
    for packet in sorted(name for name in packets if hasattr(aten, name)):
        for overload in getattr(aten, packet).overloads():
            operation = getattr(getattr(aten, packet), overload)
            returns_tensors = all(str(one.type) == "Tensor" for one in operation._schema.returns)
            writes = operation._schema.is_mutable or "out" in overload
            if operation not in RULES and rule_of(operation)[0] and returns_tensors and not writes:
                found.append(packet if overload == "default" else f"{packet}.{overload}")
    return found


SAMPLES |= {name: elementwise_samples(name) for name in [*pointwise(), *kind_rules.ELEMENTWISE.split()]}
for _table in (SAMPLES, OF_CUDA):  # another version of PyTorch may lack some
    for _name in [name for name in _table if not hasattr(aten, name.partition(".")[0])]:
        del _table[_name]
KEYWORDS = {
    "div.Tensor_mode": {"rounding_mode": "floor"}, "div.Scalar_mode": {"rounding_mode": "floor"},
    "sort.stable": {"stable": True, "dim": 1}, "_to_copy": {"dtype": torch.float64}, "aminmax": {"dim": 1},
    "std.correction": {"correction": 1}, "var.correction": {"keepdim": True}, "linalg_cross": {"dim": -1},
    "round.decimals": {"decimals": 1}, "linalg_solve_triangular": {"upper": True},
}  # fmt: skip

#: What is drawn anew differs between calls, unless the generator starts alike.
RANDOM = {
    "rand", "randn", "rand_like", "randn_like", "randint", "randint.low", "randint_like",
    "randint_like.low_dtype", "bernoulli", "bernoulli.p", "uniform", "exponential", "normal_functional",
    "normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", "native_dropout", "multinomial",
}  # fmt: skip
UNSET = {"empty.memory_format", "empty_like", "new_empty", "new_empty_strided"}


# ---- the truth


@lru_cache(maxsize=4096)
def made(spec: Any, seed: Any, poison: str = "") -> Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    if isinstance(spec, Numbers):
        return (spec.step * torch.arange(spec.shape[0])).view(spec.shape)
    if spec.high == 1:
        return torch.rand(spec.shape, generator=generator) < 0.5
    if spec.high > 1:
        return torch.randint(spec.high, spec.shape, generator=generator)
    low, high = spec.lengths
    dtype = torch.complex128 if spec.high else torch.float64
    found = low + (high - low) * torch.rand(spec.shape, generator=generator, dtype=dtype)
    if low == 0.0 or poison in ("", "other"):
        return found
    return found * {"nan": torch.nan, "inf": torch.inf, "huge": 1e300}[poison]


def place(size: int, axis: Axis, first: int = 0) -> Tensor:
    """The record of each entry along a dimension."""
    count = size // (axis.outer * axis.places)
    return (torch.arange(size) // axis.places) % count + first


def value(spec: Any, kind: Any, number: int, records: Sequence[tuple[int, str]]) -> Tensor:
    """What an operand holds where records have these seeds and poisons."""
    base = made(spec, number)
    if isinstance(kind, Public) and kind.alike and not isinstance(spec, Numbers):
        axis = next(iter(kind.alike))
        own = torch.arange(base.shape[axis.dim])
        block = base.shape[axis.dim] // axis.outer
        return base.index_select(axis.dim, own // block * block + own % axis.places)
    if isinstance(kind, ByRecord):
        (dim, outer, places), size = kind.axis, base.shape[kind.axis.dim]
        owner, entry = place(size, kind.axis, kind.first), torch.arange(size)
        # where a record has it, whatever its own place
        within = entry // (size // outer) * places + entry % places
        sizes = tuple(outer * places if d == dim else n for d, n in enumerate(base.shape))
        for record, (seed, poison) in enumerate(records):
            own = made(spec._replace(shape=sizes), (number, seed), poison).index_select(dim, within)
            shape = [-1 if d == dim else 1 for d in range(base.ndim)]
            base = torch.where((owner == record).view(shape), own, base)
    if isinstance(kind, Sum):
        return sum(made(spec, (number, seed), poison) for seed, poison in records)
    return base


def equal(one: Tensor, two: Tensor, exact: bool = True) -> bool:
    return torch.allclose(one, two, rtol=1e-13 if exact else 1e-9, atol=0 if exact else 1e-9, equal_nan=True)


def run(operation: Any, args: Any, kwargs: Any, values: Sequence[Tensor]) -> list[Any]:
    following = iter(values)
    filled = torch.utils._pytree.tree_map_only(
        (T, Numbers), lambda _: next(following), args, is_leaf=lambda leaf: isinstance(leaf, (T, Numbers))
    )
    if operation is aten.linalg_lu_solve.default:
        filled = (filled[0], (filled[1] + 1).int(), filled[2])
    torch.default_generator.manual_seed(5)  # of the processor alone: a hundred times as fast
    found = operation(*filled, **kwargs)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def specs(args: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(args, is_leaf=lambda leaf: isinstance(leaf, (T, Numbers)))
    return [leaf for leaf in leaves if isinstance(leaf, (T, Numbers))]


def claimed(operation: Any, args: Any, kwargs: Any, kinds: Any, values: Any, results: Any) -> list[Any]:
    """What the table says of one operation."""
    graph = fx.Graph()
    held = []
    for number, tensor in enumerate(values):
        held.append(graph.placeholder(f"x{number}"))
        held[-1].meta["val"] = tensor
    following = iter(held)
    filled = torch.utils._pytree.tree_map_only(
        (T, Numbers), lambda _: next(following), args, is_leaf=lambda leaf: isinstance(leaf, (T, Numbers))
    )
    node = graph.call_function(operation, tuple(filled), kwargs)
    many = len(operation._schema.returns) > 1 or str(operation._schema.returns[0].type) == "List[Tensor]"
    node.meta["val"] = tuple(results) if many else results[0]
    node.meta[MADE_BY] = "engine"  # blocks of records are told apart in nobody else's operations
    outs = [graph.call_function(operator.getitem, (node, n)) for n in range(len(results))] if many else [node]
    graph.output(outs)
    return provenance.flow(SimpleNamespace(graph=graph), kinds, RECORDS)[0]


def choices(spec: Any, linear: bool) -> list[Any]:
    if isinstance(spec, Numbers):
        return [Public(counts=0, step=spec.step)]
    axes, two = (sorted(every_axis(spec.shape, count)) for count in (RECORDS, 2))
    some = [ByRecord(axis, first) for axis in two if axis.outer == 1 for first in (0, 1)]
    sums = [Sum(Fault(True, "", ""))] if linear and spec.high <= 0 else []
    return [Public(), *sums, *map(ByRecord, axes), *some, *(Public(frozenset([axis])) for axis in axes)]


def likely(held: Sequence[Any], chosen: random.Random, most: int) -> list[list[Any]]:
    """Operands of some number of dimensions have the same axis, the others are public."""

    def kinds_of(spec: Any, dim: int, least: int) -> list[Any]:
        if isinstance(spec, Numbers):
            return [Public(counts=0, step=spec.step)]
        if not dim < len(spec.shape) >= least or spec.shape[dim] % RECORDS:
            return [Public()]
        axis = Axis(dim, 1, spec.shape[dim] // RECORDS)
        return [ByRecord(axis), Public(frozenset([axis]))]

    found = []
    for dim, least in itertools.product(range(3), range(1, 4)):
        own = [kinds_of(spec, dim, least) for spec in held]
        found += [[kinds[0] for kinds in own]]
        found += [[chosen.choice(kinds) for kinds in own] for _ in range(most // 4)]
    return found


def check_claim(name: str, kind: Any, number: int, results: Callable[..., Any], complete: bool) -> None:
    """That a result is of the kind that is claimed; `complete`: all records are there, at random places."""
    whole = [(record, "") for record in range(RECORDS)]

    def exchanged(*records: int, poison: str = "other") -> Any:
        found = results(*((9 + r, poison) if r in records else own for r, own in enumerate(whole)))[number]
        return torch.view_as_real(found.resolve_conj()) if found is not None and found.is_complex() else found

    before = exchanged()
    if before is None or not before.numel():
        return
    if isinstance(kind, Public):
        for record, poison in EXCHANGES:
            assert name in UNSET or equal(before, exchanged(record, poison=poison)), "public, and it changes"
        for axis in kind.alike if name not in RANDOM | UNSET else ():
            owner = place(before.shape[axis.dim], axis)
            parts = [before.index_select(axis.dim, (owner == r).nonzero()[:, 0]) for r in owner.unique()]
            assert all(equal(parts[0], part) for part in parts), "alike, and it differs"
        if kind.counts is not None:
            shape = [-1 if dim == kind.counts else 1 for dim in range(before.ndim)]
            numbers = kind.step * torch.arange(before.shape[kind.counts]).view(shape).expand(before.shape)
            assert equal(before, numbers.to(before.dtype)), "no numbers"
        return
    if isinstance(kind, ByRecord):
        owner = place(before.shape[kind.axis.dim], kind.axis, kind.first)
        for record, poison in EXCHANGES:
            others = (owner != record).nonzero()[:, 0]
            after = exchanged(record, poison=poison)
            one, two = (full.index_select(kind.axis.dim, others) for full in (before, after))
            assert equal(one, two), f"another record's entries change: {poison}"
    if isinstance(kind, One):
        changed = [
            record for record, poison in EXCHANGES if not equal(before, exchanged(record, poison=poison))
        ]
        assert set(changed) <= {kind.record}, "it changes with another record"
        return
    if isinstance(kind, Sum):
        both = [exchanged(*records).double() for records in ((), (0,), (1,), (0, 1))]
        size = max(float(one.abs().nan_to_num().max()) for one in both)
        rest = (both[3] - both[2] - both[1] + both[0]).nan_to_num().abs().max()
        assert rest <= 1e-9 * (1 + size), "no sum over records"
    if complete:
        turned = results((2, ""), (0, ""), (1, ""))[number]
        turned = torch.view_as_real(turned.resolve_conj()) if turned.is_complex() else turned
        if isinstance(kind, Sum):
            assert equal(before.double(), turned.double(), exact=False), "the records' places count"
        else:
            size = before.shape[kind.axis.dim]
            if size != RECORDS * math.prod(kind.axis[1:]):
                return  # a slice
            owner, order = place(size, kind.axis), torch.arange(size)
            step = kind.axis.places
            source = torch.where(owner == 0, order + 2 * step, order - step)
            assert equal(before.index_select(kind.axis.dim, source), turned, exact=False), "the places count"


def check_rule(name: str, seed: int = 0, most: int = 8) -> int:
    """Try a rule on operands of all kinds; how many results are by record or sums."""
    operation, chosen, good = resolved(name), random.Random(seed), 0
    linear = rule_of(operation)[1]
    for sample in SAMPLES[name]:
        args = [one for one in sample if not isinstance(one, dict)]
        kwargs = KEYWORDS.get(name, {}) | next((one for one in sample if isinstance(one, dict)), {})
        held = specs(args)
        each = [choices(spec, linear) for spec in held]
        options = [[chosen.choice(own) for own in each] for _ in range(most)] + likely(held, chosen, most)
        if math.prod(map(len, each)) <= most:
            options = list(itertools.product(*each))
        for kinds in dict.fromkeys(map(tuple, options)):
            operands = list(zip(held, kinds, strict=True))
            axes = [(s, k.axis) for s, k in operands if isinstance(k, ByRecord)]
            complete = {s.shape[axis.dim] // math.prod(axis[1:]) for s, axis in axes} <= {RECORDS}

            @cache
            def values(*records, operands=operands):
                return [value(s, k, n, records) for n, (s, k) in enumerate(operands)]

            @cache
            def results(*records, args=args, kwargs=kwargs, values=values):
                return run(operation, args, kwargs, values(*records))

            whole = [(record, "") for record in range(RECORDS)]
            said = claimed(operation, args, kwargs, kinds, values(*whole), results(*whole))
            for number, kind in enumerate(said):
                if not isinstance(kind, Fault):
                    check_claim(name, kind, number, results, name not in RANDOM and complete)
                    good += isinstance(kind, (ByRecord, Sum, One))
    return good


NAMES = sorted(SAMPLES)


def test_every_rule_is_tried():
    assert {resolved(name) for name in NAMES} >= set(RULES) - set(map(resolved, OF_CUDA))


@pytest.mark.parametrize("name", OF_CUDA)
def test_what_is_said_of_kernels_of_cuda(name):
    args, expected = OF_CUDA[name]
    held = specs(args)
    values = [torch.empty(spec.shape) for spec in held]
    rows = [spec.shape[:1] == (RECORDS,) for spec in held]
    shapes = {"B": held[0].shape, "S": (4,), "P": (2,)}
    results = [torch.empty(shapes[letter]) if letter != "." else None for letter in expected]

    def kinds(axis: Axis) -> list[str]:
        given = [ByRecord(axis) if at else Public() for at in rows]
        return [type(kind).__name__[0] for kind in claimed(resolved(name), args, {}, given, values, results)]

    for kind, letter in zip(kinds(Axis(0)), expected, strict=True):
        assert kind == letter or letter == "."
    assert set(kinds(Axis(len(held[0].shape) - 1))) == {"F"}


#: How many results of the operands of `check_rule` are by record or sums, for each kind of operation.
CLAIMS = """
_cdist_backward=6 _cdist_forward=14 _embedding_bag=39 _fft_r2c=5 _fused_rms_norm=6 _linalg_det=6
_linalg_solve_ex=65 _scaled_dot_product_flash_attention_for_cpu=32
_scaled_dot_product_flash_attention_for_cpu_backward=36 _softmax=4 _softmax_backward_data=7 _trilinear=15
add.Tensor=16 addmm=6 addmv=3 affine_grid_generator=2 as_strided=10 avg_pool2d=4 baddbmm=9 bmm=10
bucketize.Tensor=9 cat=8 cholesky_solve=14 col2im=1 constant_pad_nd=11 convolution=3 convolution_backward=17
copy=19 count_nonzero.dim_IntList=4 cumsum=5 diag_embed=3 diagonal=4 diagonal_backward=4 diagonal_scatter=11
div.Tensor=5 dot=3 embedding=3 embedding_dense_backward=4 expand=15 fill.Tensor=4 flip=4 gather=16 im2col=1
index.Tensor=27 index_add=11 index_put=26 index_select=11 linalg_lu_solve=13 linalg_matrix_exp=1
linalg_solve_triangular=18 linalg_vector_norm=5 mm=8 mse_loss=6 mul.Tensor=12
multilabel_margin_loss_forward=6 multinomial=1 mv=6 native_batch_norm=2 native_batch_norm_backward=6
native_group_norm=9 native_group_norm_backward=12 native_layer_norm=9 native_layer_norm_backward=42 neg=4
nll_loss2d_forward=5 nll_loss_backward=2 nll_loss_forward=2 permute=11 pixel_shuffle=1 repeat=23 roll=4
scatter.src=7 scatter_reduce.two=12 select.int=4 select_backward=4 select_scatter=5 slice.Tensor=19
slice_backward=13 slice_scatter=17 sort.stable=2 split.Tensor=22 squeeze.dim=12 stack=11 sum=4
sum.dim_IntList=22 topk=4 tril=1 unbind.int=15 unfold=5 unfold_backward=4 unsqueeze=12 view=32 view_as_real=4
"""
LEAST = {name: int(count) for name, count in (one.split("=") for one in CLAIMS.split())}


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_claims_what_is_true_and_no_less_than_it_did(name):
    """With fewer claims, models that are proved would no longer be."""
    assert check_rule(name) >= LEAST.get(name, int(rule_of(resolved(name))[0] is kind_rules.elementwise))


def test_all_axes_and_blocks_are_found():
    shape, numbers = (6, 12, 4), range(1, 13)
    axes = {
        Axis(d, o, p) for d, size in enumerate(shape) for o in numbers for p in numbers if o * 3 * p == size
    }
    assert every_axis(shape, 3) == axes
    assert every_axis(shape, 3, [1, 2]) == {axis for axis in axes if axis.dim == 1}
    blocks = {Axis(d, 1, p) for d, size in enumerate(shape) for p in numbers if size % p == 0}
    assert the_kinds.every_block(shape) == blocks


def counted(count, mean, spare, x):
    """A count that only its update reads, a mean that the result follows, and what only the mean reads."""
    return [x * mean, count + 1, mean + spare]


@pytest.mark.parametrize("writes", [False, True])
def test_a_buffer_is_read_if_a_result_follows_it_even_over_another(writes):
    def run(*given):
        x = given[3].clone().add_(0) if writes else given[3]
        return counted(*given[:3], x)

    graph = make_fx(run)(*torch.ones(4, 2).unbind())
    names = ("count", "mean", "spare", "x")
    line = Line(graph, names, ("losses", "buffer:count", "buffer:mean"))
    assert provenance.inputs_read(line) == {"mean", "spare", "x"}
    assert provenance.inputs_read(replace(line, outputs=("buffer:x", "losses", "sizes"))) == {*names} - {"x"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_claims_what_is_true_of_many(name):
    check_rule(name, seed=1, most=100)


def as_operand(out, seen, *rest, **more):
    """It is by the record of its first operand, entry by entry."""
    return kind_rules.same(out, seen)


def as_others(out, seen, *others, **more):
    """It is by the record of the operands behind the first."""
    return kind_rules.elementwise(out, *(one for one in others if hasattr(one, "kind")))


def public_alike(seen):
    return seen._replace(kind=Public(every_axis(seen.shape, 3))) if isinstance(seen.kind, Public) else seen


def equally_long(outs, table, index, offsets, *more):
    numbers = Public(counts=0, step=index.shape[0] // outs[0].shape[0])
    return kind_rules.bags(outs, table, index, offsets._replace(kind=numbers), *more)


def batched(outs, one, two, **more):
    dims = [0, None, None]
    operands = [(one, dims), (two, dims[: len(two.shape)])]
    return the_kinds.labelled(operands, [dims[: len(out.shape)] for out in outs])


#: What a wrong rule says, and of which operation.
WRONG = {
    "a sum over any dimension is elementwise": ("cumsum", as_operand),
    "a softmax is elementwise": ("_softmax", as_operand),
    "a roll is elementwise": ("roll", as_operand),
    "a padding shifts nothing": ("constant_pad_nd", as_operand),
    "a reshape leaves the axis where it is": ("view", as_operand),
    "copies of the records are no copies": ("repeat", as_operand),
    "a diagonal is written within its rows": ("diagonal_scatter", as_operand),
    "what is written stays with the record": ("index_add", as_operand),
    "zero times a record is nothing": ("mul.Tensor", as_operand),
    "a product has the axis of its right side": ("mm", as_others),
    "a mask is no operand": ("where.self", as_others),
    "a maximum is a sum": ("amax", partial(kind_rules.reduced, True, 0)),
    "a public operand is alike everywhere":
        ("mul.Tensor", lambda out, left, right: kind_rules.elementwise(out, public_alike(left),
        public_alike(right))),
    "a look-up is by the index's record":
        ("index_select", lambda out, seen, dim, index: the_kinds.labelled([(index, [dim])],
        [the_kinds.dims(out)])[0]),
    "an index into records is by record":
        ("index.Tensor", lambda out, seen, indices: the_kinds.moved(next(i for i in indices if i),
        lambda axis: axis)),
    "a batch norm keeps the records apart":
        ("native_batch_norm", lambda outs, seen, *rest: [kind_rules.same(outs[0], seen), Public(), Public()]),
    "bags are equally long": ("_embedding_bag", equally_long),
    "windows do not overlap": ("unfold",
        lambda out, seen, *rest: the_kinds.labelled([(seen, the_kinds.dims(seen))],
        [[*the_kinds.dims(seen), None]])[0]),
    "what lies before a matrix is a batch": ("_linalg_solve_ex", batched),
    "rows of a solution are apart":
        ("linalg_solve_triangular", lambda out, one, two, **more: kind_rules.solved(out, one, two,
        left=False)),
    "columns of a solution are apart":
        ("_linalg_solve_ex", lambda outs, *given, **more: kind_rules.solved_with_factors(outs, *given,
        left=True)),
    "every distance is of two of the same place":
        ("_cdist_forward", lambda out, one, two, *rest: the_kinds.labelled([(s,
        the_kinds.dims(s, -1)) for s in (one, two)], [the_kinds.dims(out, -1)])[0]),
    "a table's gradient counts within a record":
        ("embedding_dense_backward",
        lambda out, grad, index, rows, padding, by_count: kind_rules.embedded_backward(out, grad, index, rows,
        padding, False)),
}  # fmt: skip


@pytest.mark.parametrize("title", WRONG)
def test_a_wrong_rule_is_found(title, monkeypatch):
    name, rule = WRONG[title]
    monkeypatch.setitem(RULES, resolved(name), (rule, rule_of(resolved(name))[1]))
    with pytest.raises(AssertionError):
        list(map(partial(check_rule, name, most=30), range(4)))
