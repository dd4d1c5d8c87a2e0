"""Joint sums: several bounded sums of the same rows, made for noise that they share.

A record of norm n contributes lengths w_1(n), ..., w_m(n) along its own direction. `clip_jointly` takes them
from the mechanism, and keeps every record within the whitened length and within the sums' bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from equipoise.privacy.bounds.bounded import Bounded, make_bounded, weighted_sums
from equipoise.privacy.bounds.clipping import counts_of, require_rows, usable_rows, weights_for
from equipoise.privacy.bounds.requirements import answers_by_record, check_groups, public_threshold
from equipoise.privacy.mechanisms.joint_gaussian import JointGaussian
from equipoise.privacy.private import as_sum, summed
from equipoise.privacy.rows import PrivateRows


def clip_jointly(
    rows: PrivateRows,
    noise: JointGaussian,
    groups: Sequence[Sequence[str]] | None = None,
    shares: Sequence[float] | None = None,
) -> dict[str, Bounded]:
    """The sums S_j of all names in one contraction; their bounds are sup w_j.

    Whatever the radial weights ask for, a record keeps to the whitened length 1 and to the sums' bounds. One
    that would exceed them is made shorter in all sums alike.

    With groups of parameters every group k is bounded on its own, at its share s_k of every length. A record
    whose gradient has norm n in the group contributes s_k w_j(n / s_k). Its whitened length there is at most
    s_k. Over all groups it is at most (sum_k s_k^2)^(1/2) = 1, so the same noise covers the whole.

    Args:
        rows: per-sample rows, B x P.
        noise: names, lengths and noise of the sums.
        groups: disjoint lists of parameter names that cover every parameter; None for one group.
        shares: one positive number per group, with squares that sum to at most 1; equal shares when None.

    Raises:
        ValueError: groups that do not cover every parameter once, or shares that are too large.
    """
    if groups is None:
        kept, norms, usable = usable_rows(rows)
        weights = _joint_weights(noise, norms, 1.0)
        cut = weights < 1
        sums = weighted_sums(kept, weights, max(noise.bounds), rows.draw)
    else:
        require_rows(rows)
        groups = check_groups(groups, rows.names)
        shares = _check_shares(shares, len(groups))
        kept, norms, usable = usable_rows(rows, groups)
        per_tensor: dict[str, torch.Tensor] = {}
        cut = torch.zeros(len(norms), len(noise.names), dtype=torch.bool, device=norms.device)
        for column, (group, share) in enumerate(zip(groups, shares, strict=True)):
            weights = _joint_weights(noise, norms[:, column], share)
            cut |= weights < 1
            per_tensor.update(dict.fromkeys(group, weights))
        sums = weighted_sums(kept, per_tensor, max(noise.bounds), rows.draw)
    out = {}
    for j, (name, bound) in enumerate(zip(noise.names, noise.bounds, strict=True)):
        value = {key: as_sum(summed(tensor)[j], tensor.dtype, rows.draw) for key, tensor in sums.items()}
        counts = counts_of(usable, cut[:, j], rows.draw)
        out[name] = make_bounded(value, bound, 2 * bound, rows.draw, counts, joint=noise.identity)
    return out


def _joint_weights(noise: JointGaussian, norms: torch.Tensor, share: float) -> torch.Tensor:
    """Weights [B, m] of rows with these norms [B]: s w_j(n / s) / n, less where n is too small to be read."""
    # Raised by some units in the last place: rounding must not carry a record above its length.
    relative = norms * ((1 + 4 * torch.finfo(norms.dtype).eps) / share)
    lengths = answers_by_record("radial_weights", noise.radial_weights, noise.lengths, relative)
    weights = weights_for(lengths * noise.shrinkage(lengths)[:, None], relative)
    # Beyond the largest floats: such rows count nothing.
    return torch.where(torch.isfinite(weights), weights, torch.zeros_like(weights))


def _check_shares(shares: Sequence[float] | None, count: int) -> list[float]:
    if shares is None:
        return [count**-0.5] * count
    checked = [public_threshold(f"shares[{i}]", share) for i, share in enumerate(shares)]
    if len(checked) != count:
        raise ValueError(f"shares has {len(checked)} entries for {count} groups; give one per group")
    if math.hypot(*checked) > 1 + 1e-9:  # equal shares sum to 1 up to rounding
        raise ValueError(
            f"the squares of shares={checked} sum to {math.hypot(*checked) ** 2:.6g}, above 1: the noise "
            "would not cover a record; divide the shares by the root of that sum"
        )
    return checked
