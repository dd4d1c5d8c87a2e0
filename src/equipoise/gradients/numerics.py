"""Sums that are true to rounding: precision, long sums, and guards of norms whose terms cancel.

*Precision.* A gradient norm that is wrong in the third digit is a clip bound that is wrong in the third
digit, and the difference of two nearly equal gradients loses those digits first. So the algebra of this room
runs without autocast and without the reduced mantissas (TF32, bfloat16) that PyTorch may use for float32
products.

*Guards.* A row ``sum_s b_is (outer) a_is`` is never formed: its norm comes from products of the terms, and
the weighted sum over records rounds ``w_i b_is`` first and adds all terms at once. Either errs by some units
in the last place of the terms, not of the row. With M_i >= sum_s |a_is| |b_is|, a row shorter than a tenth of
M_i has

    n_i = |g_i| + max(4, T / 16) eps M_i

with T terms, so that its clipped part in the sum stays below the threshold: rows of 256 to 1,000 terms that
cancel were seen to err by up to T / 30. Longer rows keep their norm to the bit: to them 4 eps M_i is less
than 5e-6 in float32. (As for all rounding here: measured, not proved.)

*Long sums.* A sum of T terms that are all alike drifts: each of them is rounded the same way as it is added.
Beyond 512 terms, convolutions with many positions and look-ups of one token drift by up to T eps / 12, in the
norm and in the sum; T eps / 4 is added to the norm of rows with so many terms, whatever they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["GUARD", "full_precision", "guarded", "times_held"]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No gradient recording, no autocast, no reduced-precision float32 products; settings are put back after.

    >>> with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        for owner, name, full in _switches(device):
            before = getattr(owner, name)
            if before not in (full, "none"):
                setattr(owner, name, full)
                stack.callback(setattr, owner, name, before)
        yield


@cache
def _switches(device: torch.device) -> list[tuple[Any, str, Any]]:
    backends: Any = torch.backends
    if hasattr(backends, "fp32_precision"):
        owners: list[Any] = [backends.mkldnn.matmul, backends.mkldnn.conv]
        if device.type == "cuda":
            owners = [backends.cuda.matmul, backends.cudnn.conv]
        return [(owner, "fp32_precision", "ieee") for owner in owners]
    if device.type == "cuda":
        return [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]
    return []


#: How many numbers a temporary of a chunked computation may hold (8 MiB of float32).
CHUNK_ELEMENTS = 1 << 21


#: Squares and products are added up in float32 over this many numbers at most, and in float64 from there on.
PARTIAL_SUM = 512


#: Matrix products at least this wide are added up in pieces by the libraries themselves; the pieces' sum is
#: float32 and short enough up to this many numbers.
WIDE_PRODUCT, LONG_PRODUCT = 16, 1 << 15


#: Rows are kept instead of their inputs only if they are at most this many times larger (memory of a step).
ROWS_GROWTH = 2


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a sum over numbers of ``dtype`` is taken: float32 at least.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in its accumulation type (itself where it is there already)."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def chunks(count: int, size: int, budget: int | None = None) -> Iterator[slice]:
    """Slices of ``range(count)`` with at most ``budget`` numbers each, one item holding ``size`` numbers."""
    step = max(1, (CHUNK_ELEMENTS if budget is None else budget) // max(1, size))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def take(tensor: Tensor, index: Tensor | slice) -> Tensor:
    """Rows of ``tensor``; what is broadcast over the records stays broadcast."""
    if isinstance(index, Tensor) and tensor.shape[0] > 1 and tensor.stride(0) == 0:
        count = int(index.sum()) if index.dtype == torch.bool else index.shape[0]
        return tensor[:1].expand(count, *tensor.shape[1:])
    return tensor[index]


def pad_positions(tensor: Tensor, positions: int) -> Tensor:
    """``tensor`` [B, S, ...] with zeros appended to reach ``positions`` along dimension 1."""
    missing = positions - tensor.shape[1]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)


def memory_order(tensor: Tensor) -> list[int]:
    """Dimensions 1, 2, ... as they lie in memory, the outermost first (not ascending in channels last)."""
    strides = tensor.stride()
    return sorted(range(1, tensor.ndim), key=lambda dimension: -strides[dimension])


def squared_rows(tensor: Tensor) -> Tensor:
    """Sum of squares of each record, [B, ...] -> [B] in float64, without a copy of dense rows.

    Float32 alone would read rows of a million numbers too short by up to 1e-3: each square is rounded as it
    is added to a sum that is far larger, all of them down where they are alike. So it takes pieces of
    ``PARTIAL_SUM`` numbers, at 2e-6 each at most. Squares below 1e-45 vanish: what is lost of a norm is less
    than 1e-17 for 1e10 numbers.

    >>> squared_rows(torch.full((1, 10**6), 0.1)).sub(10**4).abs() < 1e-2
    tensor([True])
    """
    if tensor.ndim == 1:
        return tensor.double().square()
    if tensor.ndim > 2:
        tensor = tensor if tensor.is_contiguous() else tensor.permute(0, *memory_order(tensor))
        tensor = tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())
    pieces = tensor.shape[1] // PARTIAL_SUM
    if pieces == 0:
        return torch.linalg.vector_norm(tensor, dim=1).double().square_()
    whole = pieces * PARTIAL_SUM
    parts = torch.linalg.vector_norm(tensor[:, :whole].view(tensor.shape[0], pieces, PARTIAL_SUM), dim=2)
    out = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64).square_()
    if whole < tensor.shape[1]:
        out += torch.linalg.vector_norm(tensor[:, whole:], dim=1).double().square_()
    return out


def contracted(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [..., m, K] times ``right`` [..., K, n], true to 1e-5 of its terms however long K is.

    Libraries add wide products up in pieces of some hundred terms, narrow ones from end to end.
    """
    pieces = left.shape[-1] // PARTIAL_SUM
    if pieces <= 1 or min(left.shape[-2], right.shape[-1]) >= WIDE_PRODUCT:
        return torch.matmul(left, right)
    whole = pieces * PARTIAL_SUM
    first = left[..., :whole].reshape(*left.shape[:-1], pieces, PARTIAL_SUM).movedim(-2, -3)
    second = right[..., :whole, :].reshape(*right.shape[:-2], pieces, PARTIAL_SUM, right.shape[-1])
    out = torch.matmul(first, second).sum(-3, dtype=torch.float64)
    return out.add_(torch.matmul(left[..., whole:], right[..., whole:, :])).to(left.dtype)


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Dot products [n, m] of rows [n, P] with rows [m, P], true to 1e-5 of their lengths for every P."""
    if left.shape[1] <= LONG_PRODUCT:
        return contracted(left, right.t())
    out = left.new_zeros(left.shape[0], right.shape[0], dtype=torch.float64)
    for start in range(0, left.shape[1], LONG_PRODUCT):
        piece = slice(start, start + LONG_PRODUCT)
        out += contracted(left[:, piece], right[:, piece].t())
    return out.to(left.dtype)


#: A squared norm below this share of the square of its terms' summed norms lost digits to cancellation: a
#: Gram route is then left, and a guard added (``operator.py``).
CANCELLATION_SHARE = 1e-2


#: A squared norm is right to float32 if what its squares may have lost is at most this share of it.
LOST_SHARE = 1e-12


#: Below so many held numbers the product is short anyway and calls of the operator cost more.
LARGE_MATRIX = 1 << 20


def times_held(rows: Tensor, held: Tensor) -> Tensor:
    """rows held^T, [n, m], for a few long rows [n, p] and many held ones [m, p] of one float type.

    Nearly all of its time is reading the held rows once. On processors MKL, which `torch.mm` calls, reaches
    half of what the memory gives for such shapes; oneDNN, which PyTorch carries for the linear layers of
    compiled models, reaches it (V of 100 x 262,144 and 16 rows, one thread: 20.7 ms against 10.7). PyTorch
    has no public name for that product of plain tensors; where the operator is missing or refuses, `dots`
    does the work. It is true to about 3e-5 of the rows' lengths for a million numbers, all of them alike: for
    rows that say they are ``rough``, whose products are coordinates that are clipped by their own norm.

    >>> times_held(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    operator = _linear()
    suited = rows.device.type == "cpu" and rows.dtype == held.dtype == torch.float32
    if operator is None or not suited or held.numel() < LARGE_MATRIX or rows.shape[0] >= held.shape[0]:
        return dots(rows, held)
    product: Tensor = operator(held, rows, None, "none", [], "")
    return product.t()


@cache
def _linear() -> Any:
    """oneDNN's linear layer, tried once; None where PyTorch does not offer it as it is called here."""
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        one = torch.ones(1, 1)
        return operator if operator(one, one, None, "none", [], "").shape == (1, 1) else None
    except (AttributeError, RuntimeError, TypeError):
        return None


#: In units of eps: what a guard is of the sizes that were rounded; one more for so many terms of a long sum.
GUARD, TERMS_PER_UNIT = 4, 16


def guarded(squares: Tensor, magnitudes: Tensor | None, terms: int = 1, by_products: bool = False) -> Tensor:
    """Squared norms [B] with the guards for rows that lost digits.

    Args:
        squares: squared norms [B], float64.
        magnitudes: M, [B], in the type in which the terms are added; None where rows are single terms.
        terms: T, how many terms a row adds.
        by_products: the squares are a difference of products of the terms, which err by eps M^2: the guard
            grows with M / |g|, up to tenfold.

    >>> guarded(torch.tensor([1.0, 0.0]).double(), torch.tensor([2.0, 2.0]))
    tensor([1.0000e+00, 9.0949e-13], dtype=torch.float64)
    """
    if magnitudes is None:
        return squares
    sizes = magnitudes.to(squares.dtype)
    weak = squares < CANCELLATION_SHARE * sizes.square()
    norms = squares.sqrt()
    eps = torch.finfo(magnitudes.dtype).eps
    guard = max(GUARD, terms / TERMS_PER_UNIT) * eps * sizes
    if by_products:
        guard = guard * (sizes / (10 * norms)).clamp(1, 10)
    out = torch.where(weak, (norms + guard).square_(), squares)
    return out.mul_((1 + terms * eps / 4) ** 2) if terms > PARTIAL_SUM else out
