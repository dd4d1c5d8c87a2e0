"""Bounded second moments of rows: what a subspace of private rows may be computed from.

With rows g_i weighted to |w_i g_i| <= c over all blocks l of parameters together,

    M_l = sum_i w_i^2 g_il g_il^T                 the second moment, block by block
    A_l = sum_i w_i^2 g_il (g_il^T X_l)           its action on orthonormal columns X_l

One record moves all M_l together by at most c^2 in the Frobenius norm, since sum_l |g_l|^4 <= (sum_l
|g_l|^2)^2. A replaced record moves them by sqrt(2) c^2, since |aa^T - bb^T|^2 = |a|^4 + |b|^4 - 2 (a.b)^2.
The action is bounded record by record, sum_l |w g_l|^2 |w X_l^T g_l|^2 <= c^4, whatever X is. Noise that is
added to all p_l x p_l entries of M_l and then symmetrised is the symmetric Gaussian mechanism of Dwork et al.
2014 ("Analyze Gauss").

On the side of a layer's inputs, where a row is a matrix G_il [d_out, d_in] and each is brought to one length,

    H_l = L^(-1/2) sum_i G_il^T G_il / |G_il|^2        over L layers

One record moves H_l by at most L^(-1/2), since |G^T G| <= |G|^2, and all of them together by at most 1. A
replaced record moves them by at most sqrt(2): both parts are positive semidefinite, and their product's
trace is not negative. For a layer that sees one input x per record, G^T G / |G|^2 is x x^T / |x|^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equipoise.privacy.bounds.bounded import Bounded, make_bounded
from equipoise.privacy.bounds.clipping import (
    SMALLEST_NORM,
    WeightRule,
    counts_of,
    limited_weights,
    usable_rows,
    weights_for,
)
from equipoise.privacy.bounds.requirements import public_threshold
from equipoise.privacy.private import as_private
from equipoise.privacy.rows import PrivateRows


def second_moment(
    rows: PrivateRows, rule: WeightRule, threshold: float, groups: Sequence[Sequence[str]]
) -> Bounded:
    """The sums of g g^T, block by block, of rows clipped at c: bounds c^2 and sqrt(2) c^2.

    Args:
        rows: per-sample rows, B x P; each block's part is formed.
        rule: clip rule for the whole rows.
        threshold: c, a public number.
        groups: disjoint blocks of parameter names; what is in no block is left out.

    Returns:
        A bounded sum with one tensor [p_l, p_l] a block, named by the block's number.

    Example:
        >>> from equipoise.gradients import DenseGradients
        >>> from equipoise.methods import Abadi
        >>> rows = PrivateRows(DenseGradients({"w": torch.tensor([[3.0, 4.0]])}))
        >>> second_moment(rows, Abadi(), 1.0, [["w"]]).add_remove
        1.0
    """
    kept, weights, bad, total = _clipped(rows, rule, threshold)
    value = {}
    for number, group in enumerate(groups):
        part = kept.select(group).materialise().matrix() * weights.unsqueeze(1)
        value[str(number)] = part.t() @ part
    bound = total**2
    return make_bounded(as_private(value, rows.draw), bound, math.sqrt(2) * bound, rows.draw, bad)


def moment_action(
    rows: PrivateRows, rule: WeightRule, threshold: float, columns: Sequence[Mapping[str, torch.Tensor]]
) -> Bounded:
    """The second moments' action on public columns, of rows clipped at c: bounds c^2 and 2 c^2.

    Args:
        rows: per-sample rows, B x P.
        rule: clip rule for the whole rows.
        threshold: c, a public number.
        columns: X_l for each block, parameter name -> [K_l, *shape], orthonormal over the block.

    Returns:
        A bounded sum with the tensors of A_l, parameter name -> [K_l, *shape].
    """
    kept, weights, bad, total = _clipped(rows, rule, threshold)
    bound = total**2
    products, sizes = [], torch.zeros_like(weights, dtype=torch.float64)
    for block in columns:
        part = kept.select(list(block))
        y = torch.stack([_dots(part, name, held) for name, held in block.items()]).sum(0)
        products.append(y)
        lengths = part.row_norms().double().clamp_min(SMALLEST_NORM)
        sizes = sizes + lengths.square() * y.double().square().sum(1)
    # Of each record's part in the sum; above c^2 only where X is not orthonormal: then it is cut.
    norms = sizes.sqrt() * weights.double().square()
    over = torch.where(norms > bound, bound / norms, torch.ones_like(norms)).to(weights)
    value = {}
    for block, y in zip(columns, products, strict=True):
        value.update(kept.select(list(block)).weighted_sums(y * (weights.square() * over).unsqueeze(1)))
    return make_bounded(as_private(value, rows.draw), bound, 2 * bound, rows.draw, bad)


def input_moments(rows: PrivateRows, names: Sequence[str]) -> Bounded:
    """The sums of L^(-1/2) G^T G / |G|^2 of L matrix parameters: bounds 1 and sqrt(2).

    Args:
        rows: per-sample rows.
        names: of the parameters, [d_out, d_in] each.

    Returns:
        A bounded sum with a tensor [d_in, d_in] per parameter, under its name.

    Example:
        >>> from equipoise.gradients import DenseGradients
        >>> rows = PrivateRows(DenseGradients({"w": torch.tensor([[[3.0, 4.0]]])}))
        >>> input_moments(rows, ["w"]).add_remove
        1.0
    """
    kept, norms, usable = usable_rows(rows, [[name] for name in names])
    # Rows of length L^(-1/4), and shorter ones where a norm is too small to be read.
    weights = weights_for(len(names) ** -0.25, norms)
    value = kept.input_moments(dict(zip(names, weights.unbind(1), strict=True)))
    counts = counts_of(usable, None, rows.draw)
    return make_bounded(as_private(value, rows.draw), 1.0, math.sqrt(2), rows.draw, counts)


def _clipped(rows: PrivateRows, rule: WeightRule, threshold: float) -> tuple[Any, torch.Tensor, Any, float]:
    total = public_threshold("threshold", threshold)
    kept, norms, usable = usable_rows(rows)
    return kept, limited_weights(rule, norms, total), counts_of(usable, None, rows.draw), total


def _dots(part: Any, name: str, held: torch.Tensor) -> torch.Tensor:
    """Dot products [B, K] of one parameter's rows with columns [K, *shape]."""
    tensors = part.select([name]).materialise().tensors[name]
    return tensors.flatten(1) @ held.flatten(1).to(tensors).t()
