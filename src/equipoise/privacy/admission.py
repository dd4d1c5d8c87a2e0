"""What the ledger lets out: sums of the draw that is released, within the plan, while some are left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from equipoise.privacy.bounded import Bounded
from equipoise.privacy.correlated import CorrelatedNoise
from equipoise.privacy.draws import Draw
from equipoise.privacy.errors import LedgerError, PlanUsedUpError
from equipoise.privacy.normals import carries
from equipoise.privacy.private import unwrap
from equipoise.privacy.releases import Pattern, PrivacyPlan

_ROUNDING = 1 + 1e-6


def check_sums(
    plan: PrivacyPlan, draw: Draw, sums: Mapping[str, Bounded], noise: CorrelatedNoise | None
) -> None:
    """Refuse sums that the plan does not hold, or holds with other bounds, another draw or other noise.

    Raises:
        LedgerError: saying what does not fit.
    """
    if not sums:
        raise LedgerError("nothing to release: sums is empty; do not release a draw that no sum came from")
    joint = None if noise is None else noise.identity
    for name, bounded in sums.items():
        _check_sum(plan, draw, name, bounded, joint)
    if noise is not None and set(noise.names) != set(sums):
        raise LedgerError(
            f"correlated noise covers {noise.names}, but {sorted(sums)} are released; release them together"
        )
    groups = {plan[name].correlated_with or name for name in sums}
    if noise is not None and groups != {noise.names[0]}:
        raise LedgerError(
            f"the plan does not hold {noise.names} as one correlated release: all but "
            f"{noise.names[0]!r} need "
            f"correlated_with={noise.names[0]!r}"
        )
    if noise is None and any(plan[name].correlated_with for name in sums):
        raise LedgerError(
            f"the plan holds {sorted(sums)} with correlated noise; pass noise=CorrelatedNoise(...)"
        )


def check_noise(plan: PrivacyPlan, sums: Mapping[str, Bounded], noise: CorrelatedNoise | None) -> None:
    """Refuse noise that the type of a released sum cannot carry.

    Raises:
        LedgerError: naming the sum.
    """
    for name, bounded in sums.items():
        stds = [plan[name].noise_multiplier * bounded.add_remove]
        if noise is not None:
            # what is drawn, what of it is this sum's own, and all that this sum gets
            j, scale = noise.names.index(name), plan[noise.names[0]].noise_multiplier
            own = noise.cholesky[j][j]
            stds = [scale, own, scale * own, scale * noise.standard_deviations[j]]
        require_carried(f"sums[{name!r}]", bounded.value, stds)


def require_carried(what: str, value: Mapping[str, torch.Tensor], stds: Sequence[float]) -> None:
    """Refuse standard deviations beyond the range of the types that the named tensors are released in.

    Raises:
        LedgerError: saying which.
    """
    for tensor, raw in value.items():
        dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
        wrong = [std for std in stds if not carries(dtype, std)]
        if wrong:
            raise LedgerError(
                f"{what}[{tensor!r}] would get noise of standard deviation {wrong[0]:.3g}, which {dtype} "
                "cannot carry: the noise would vanish or overflow. Keep the threshold away from the ends of "
                "the type's range (a floor for one that shrinks), or compute in float64. Nothing was released"
            )


def pattern_for(
    patterns: Sequence[Pattern], used: Mapping[Pattern, int], draw: Draw, names: frozenset[str]
) -> Pattern:
    """The planned release that a release of these names counts as: the smallest of which some are left.

    Raises:
        LedgerError: the plan holds none that releases them together.
        PlanUsedUpError: it has none left.
    """
    fitting = [p for p in patterns if p.draw == draw.name and names <= p.names]
    if not fitting:
        raise LedgerError(f"the plan holds no draw {draw.name!r} that releases {sorted(names)} together")
    left = [p for p in fitting if used.get(p, 0) < p.count]
    if not left:
        raise PlanUsedUpError(
            f"the plan's {sum(p.count for p in fitting)} releases of {sorted(names)} on draw "
            f"{draw.name!r} are used up; plan "
            "more steps (a step repeated after a resume with other numbers counts again)"
        )
    count = sum(p.count for p in patterns if p.draw == draw.name)
    if draw.ordinal >= count:
        raise PlanUsedUpError(
            f"draw {draw.name!r} was opened {draw.ordinal + 1} times, the plan holds {count}; open "
            "only draws that are released"
        )
    return min(left, key=lambda p: (len(p.names), sorted(p.names)))


def check_unproven(plan: PrivacyPlan, used: Mapping[str, int], draw: Draw, name: str) -> None:
    """Refuse an un-proven release that the plan does not hold, or of which none is left.

    Raises:
        LedgerError, PlanUsedUpError: saying which.
    """
    planned = [item for item in plan.unproven if item.name == name and item.draw == draw.name]
    if not planned:
        raise LedgerError(
            f"the plan holds no unproven release {name!r} on draw {draw.name!r}; it holds "
            f"{[(item.name, item.draw) for item in plan.unproven]}"
        )
    if used.get(name, 0) >= plan.count(planned[0]):
        raise PlanUsedUpError(
            f"the plan's {plan.count(planned[0])} unproven releases of {name!r} are used up"
        )


def _check_sum(plan: PrivacyPlan, draw: Draw, name: str, bounded: Bounded, joint: str | None) -> None:
    if not isinstance(bounded, Bounded):
        raise TypeError(
            f"sums[{name!r}] must be Bounded, got {type(bounded).__name__}; bound it: clip, indicator, "
            "capped or top_k"
        )
    try:
        release = plan[name]
    except ValueError as error:
        raise LedgerError(str(error)) from None
    if release.draw != draw.name:
        raise LedgerError(f"release {name!r} belongs to draw {release.draw!r}, not to {draw.name!r}")
    if bounded.draw != draw:
        raise LedgerError(
            f"sums[{name!r}] comes from {bounded.draw}, not from the draw being released, {draw}"
        )
    if bounded.joint != joint:
        raise LedgerError(
            f"sums[{name!r}] was made for correlated noise {bounded.joint}, but is released with "
            f"{joint}; sums of "
            "clip_jointly(rows, noise) go with release(..., noise=noise) and no others do"
        )
    if not (0 < bounded.add_remove < math.inf and bounded.add_remove <= release.max_bound * _ROUNDING):
        raise LedgerError(
            f"sums[{name!r}] has bound {bounded.add_remove:g}; the plan allows a positive bound of at "
            "most "
            f"{release.max_bound:g}: plan a larger max_bound"
        )
    if bounded.replace > release.replace_ratio * bounded.add_remove * _ROUNDING:
        raise LedgerError(
            f"sums[{name!r}] has a replace-one bound {bounded.replace:g}, above "
            f"replace_ratio={release.replace_ratio} times its "
            f"add-or-remove bound {bounded.add_remove:g}; plan the release with a larger replace_ratio"
        )
    for tensor, value in bounded.value.items():
        raw = unwrap(value)
        if raw.numel() and not bool(torch.isfinite(raw.sum())) and not bool(torch.isfinite(raw).all()):
            raise LedgerError(
                f"sums[{name!r}][{tensor!r}] is not finite though bad records were left out: a bug in "
                "a factor or a "
                "kernel, or an overflow. Nothing was released"
            )
