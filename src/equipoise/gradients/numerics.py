"""Sums that are true to rounding: precision, long sums, and guards of norms whose terms cancel.

*Precision.* A gradient norm that is wrong in the third digit is a clip bound that is wrong in the third
digit, and the difference of two nearly equal gradients loses those digits first. So the algebra of this room
runs without autocast and without the reduced mantissas (TF32, bfloat16) that PyTorch may use for float32
products.

*Guards.* A row ``sum_s b_is (outer) a_is`` is never formed: its norm comes from products of the terms, and
the weighted sum over records rounds ``w_i b_is`` first and adds all terms at once. Either errs by some units
in the last place of the terms, not of the row. With M_i >= sum_s |a_is| |b_is|,

    n_i = sqrt(q_i + E M_i^2) + max(4, A) eps M_i

where q_i is the squared norm as it was computed, so that the clipped part of the row in the sum stays below
the threshold. Norms that this changes by less than 5e-6 stay as they are, to the bit.

A: each of the additions that a row's terms take one after another loses at most eps / 2 of M_i, in the norm
and in the sum. Terms that are all alike lose it in one direction: A up to 0.66 of the positions was seen.
Beyond 512 terms the libraries add in pieces, and one addition for each 16 terms was more than any seen.

E: where q_i is ``sum_st (a_s . a_t) (b_s . b_t)``, a product that adds d numbers in any order loses at most
d eps / 2 of ``|a_s| |a_t|``. So wide ones are added in pieces of 128 and more, and E is half an eps for each
addition (`products_error`): a bound for the products, measured for the sum over s and t. For 512 positions
that have nothing in common M_i^2 is 512 q_i, and the norm at 768 features reads 0.6% too long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No gradient recording, no autocast, no reduced-precision float32 products; settings are put back after.

    >>> with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    changed: list[tuple[Any, str, Any]] = []
    autocast = torch.is_autocast_enabled(device.type)
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        try:
            for owner, name, full in _switches(device):
                before = getattr(owner, name)
                if before not in (full, "none"):
                    changed.append((owner, name, before))
                    setattr(owner, name, full)
            yield
        finally:
            for owner, name, before in changed:
                setattr(owner, name, before)


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


#: How many numbers a temporary of a chunked computation may hold (8 MiB of float32). A choice: more take
#: memory, fewer more calls, and sums over other chunks round otherwise.
CHUNK_ELEMENTS = 1 << 21


#: Squares and products are added up in float32 over this many numbers at most, and in float64 from there on:
#: at 512 they err by 2e-6. Longer pieces read long rows too short (a million numbers in one by 1e-3), which
#: then pass their bound (`tests/methods/test_long_rows.py`); shorter ones cost time.
PARTIAL_SUM = 512


#: Products are added at once, whatever the order, in sums whose rounding is bounded: the square root of wide
#: ones, where the pieces count for as much. PyTorch adds the products of two such sums in so many steps,
#: which was measured: fewer would make guards too short. Longer sums make guards longer, shorter ones take
#: more calls.
SHORT_SUM, SUM_OF_PRODUCTS = 128, 32


#: Matrix products at least this wide are added up in pieces by the libraries themselves; the pieces' sum is
#: float32 and short enough up to this many numbers. Measured on the CPU (MKL) alone; with a smaller width or
#: a larger number norms may read too short, otherwise products take longer.
WIDE_PRODUCT, LONG_PRODUCT = 16, 1 << 15


#: Rows are kept instead of their inputs only if they are at most this many times larger. A choice: more makes
#: steps hold more memory, less spares fewer sums their product.
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


def length(tensor: Tensor) -> Tensor:
    """The norm of all entries, in float64."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float64))


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


def memory_order(tensor: Tensor) -> list[int]:
    """Dimensions 1, 2, ... as they lie in memory, the outermost first (not ascending in channels last)."""
    strides = tensor.stride()
    return sorted(range(1, tensor.ndim), key=lambda dimension: -strides[dimension])


def squared_rows_in_float64(tensor: Tensor) -> Tensor:
    """As `squared_rows`, where no square vanishes or overflows: each is taken in float64, a slower way."""
    flat = tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()


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
    if tensor.shape[1] <= PARTIAL_SUM:
        return torch.linalg.vector_norm(tensor, dim=1).double().square()
    whole = pieces * PARTIAL_SUM
    parts = torch.linalg.vector_norm(tensor[:, :whole].view(tensor.shape[0], pieces, PARTIAL_SUM), dim=2)
    out = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64).square()
    if whole < tensor.shape[1]:
        out += torch.linalg.vector_norm(tensor[:, whole:], dim=1).double().square()
    return out


def contracted(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [..., m, K] times ``right`` [..., K, n], true to 1e-5 of its terms however long K is.

    Libraries add wide products up in pieces of some hundred terms, narrow ones from end to end.
    """
    if right.ndim == 2 and left.ndim > 2:  # at once: the pieces of `right` would be copied for each
        return contracted(left.flatten(0, -2), right).view(*left.shape[:-1], right.shape[1])
    pieces = left.shape[-1] // PARTIAL_SUM
    if left.shape[-1] <= PARTIAL_SUM or min(left.shape[-2], right.shape[-1]) >= WIDE_PRODUCT:
        return torch.matmul(left, right)
    whole = pieces * PARTIAL_SUM
    first = left[..., :whole].reshape(*left.shape[:-1], pieces, PARTIAL_SUM).movedim(-2, -3)
    second = right[..., :whole, :].reshape(*right.shape[:-2], pieces, PARTIAL_SUM, right.shape[-1])
    out = torch.matmul(first, second).sum(-3, dtype=torch.float64)
    return out.add_(torch.matmul(left[..., whole:], right[..., whole:, :])).to(left.dtype)


def piece_length(width: int) -> int:
    """How many products are added up at once in sums over ``width`` whose rounding is bounded."""
    return max(SHORT_SUM, math.isqrt(width) + 1)


def in_pieces(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [B, m, K] times ``right`` [B, K, n]; each number is off by less than ``products_error``."""
    length, width = piece_length(left.shape[2]), left.shape[2]
    out = torch.bmm(left[:, :, :length], right[:, :length])
    for start in range(length, width, length):
        # Not baddbmm: libraries may go on adding to what is there, number by number.
        out += torch.bmm(left[:, :, start : start + length], right[:, start : start + length])
    return out


def products_error(dtype: torch.dtype, positions: int, *widths: int) -> float:
    """At most this share of M^2 is lost where a square is ``sum_st (a_s . a_t) (b_s . b_t)``.

    Args:
        dtype: the type in which the products are added.
        positions: how many s and t there are.
        widths: of a and of b. Without pieces the error would grow with the whole width.

    >>> products_error(torch.float32, 99, 768, 768) < 2e-5
    True
    """
    additions = sum(min(piece_length(width), width) + width // piece_length(width) for width in widths)
    return (additions + min(positions, SUM_OF_PRODUCTS)) * torch.finfo(dtype).eps / 2


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Dot products [n, m] of rows [n, P] with rows [m, P], true to 1e-5 of their lengths for every P."""
    if left.shape[1] <= LONG_PRODUCT:
        return contracted(left, right.t())
    out = left.new_zeros(left.shape[0], right.shape[0], dtype=torch.float64)
    for start in range(0, left.shape[1], LONG_PRODUCT):
        piece = slice(start, start + LONG_PRODUCT)
        out += contracted(left[:, piece], right[:, piece].t())
    return out.to(left.dtype)


#: Below this share of their terms' sizes, norms (by Gram matrices) and squared norms (of look-ups and of sums
#: of uses) lost digits to cancellation: sums of products are then left. A choice: a smaller share rests on
#: what `products_error` grants the products, a larger one forms more rows.
CANCELLATION_SHARE = 1e-2


#: Sums of products stay where what is added for their rounding is at most this share of a squared norm, so
#: that no norm reads more than 5% too long for it. A choice: a smaller share forms more rows.
MOST_EXCESS = 0.1


#: A squared norm is right to float32 if what its squares may have lost is at most this share of it: far below
#: the type's eps of 1e-7. A choice: a larger share shortens norms by as much, a smaller one forms more rows.
LOST_SHARE = 1e-12


_LOST_ARE_NAN: ContextVar[bool] = ContextVar("lost_are_nan", default=False)


def are_lost_nan() -> bool:
    """Whether `lost_are_nan` is in force."""
    return _LOST_ARE_NAN.get()


@contextmanager
def lost_are_nan() -> Iterator[None]:
    """Norms that lost digits are NaN: the host does not look whether there are any, which a device would make
    it wait for. Who takes the norms throws away all that follows from a NaN.
    """
    before = _LOST_ARE_NAN.set(True)
    try:
        yield
    finally:
        _LOST_ARE_NAN.reset(before)


#: A norm that cannot be longer than this is as good as zero next to any bound: clipping divides by no smaller
#: one (`SMALLEST_NORM`). With a smaller length, rows of zeros would count as lost: theirs may read as
#: `TINY` a position.
NO_LENGTH = 1e-12


def without_lost(
    squares: Tensor,
    errors: Tensor | None,
    lost: Tensor,
    exact: Callable[[Tensor], Tensor],
    most: Tensor,
) -> Tensor:
    """Squared norms [B], those that lost digits taken in a way that loses none.

    Args:
        squares: as they were computed.
        errors: how much each may have lost, [B] or None; changed in place.
        lost: which lost digits, bool [B].
        exact: squared norms of the rows at some places, LongTensor.
        most: what they are at most, [B] in float64. If lost norms are NaN, it stands for tiny ones, such as
            those of rows of zeros.
    """
    if are_lost_nan():
        squares = torch.where(lost & (most <= NO_LENGTH**2), most, squares)
        return squares.masked_fill(lost & ~(most <= NO_LENGTH**2), math.nan)
    if bool(lost.any()):
        places = lost.nonzero().squeeze(1)
        squares[places] = exact(places)
        if errors is not None:
            errors[places] = 0.0
    return squares


#: In units of eps: what a guard is of the sizes that were rounded, without the additions. Not proved:
#: searches for rows that pass their bound by 1e-5 find none (`tests/methods/test_sensitivity.py`). Below it
#: they may, and above it rows whose terms cancel are clipped more than they need.
GUARD = 4


#: Beyond ``PARTIAL_SUM`` terms libraries add in pieces; one addition for so many terms was more than any
#: seen. With more terms an addition a guard may be too short, with fewer long rows are clipped more than they
#: need.
TERMS_PER_ADDITION = 16


def sum_error(dtype: torch.dtype, additions: int) -> float:
    """At most this share of M is lost by the norm of a row and its part in a weighted sum together."""
    return max(GUARD, additions) * torch.finfo(dtype).eps


#: A guard below this share of a norm, 40 eps of float32, is not added, so that usual rows keep their bits. A
#: choice: a clipped row may pass its bound by as much.
NEGLIGIBLE = 4.8e-6


def guarded(
    squares: Tensor, magnitudes: Tensor | None, additions: int = 1, errors: Tensor | None = None
) -> Tensor:
    """Squared norms [B] with the guard for what the squares and the sum of a row's terms may lose.

    Args:
        squares: squared norms [B], float64.
        magnitudes: M, [B], in the type in which the terms are added; None where rows are single terms.
        additions: A, how many a row's terms take, one after another.
        errors: how much the squares may have lost, [B]; None for nothing.

    >>> guarded(torch.tensor([1.0, 0.0]).double(), torch.tensor([2.0, 2.0]))
    tensor([1.0000e+00, 9.0949e-13], dtype=torch.float64)
    """
    if magnitudes is None:
        return squares
    sizes, norms = magnitudes.double(), squares.sqrt()
    whole = norms if errors is None else (squares + errors).sqrt_()
    whole = whole.add(sizes, alpha=sum_error(magnitudes.dtype, additions))
    return torch.where(whole - norms <= NEGLIGIBLE * norms, squares, whole.square_())
