"""DP-SGD: the noised sum of clipped per-sample gradients, over the public expected batch size.

    estimate_t = (sum_i w_i g_i + N(0, (z C_t)^2 I)) / B,     w_i = rule.weights(||g_i||, C_t)

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy". B is the *expected* batch size of the
sampling, never the realised one; a draw of no records still releases noise. With per-layer clipping every
layer l has a threshold C_l with sum_l C_l^2 = C^2 (McMahan et al. 2018), so that the whole row keeps the
bound C. With a `ReleasedQuantile` threshold the centred count of rows below C_t is one more coordinate of
the same noised vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from equipoise.methods.estimator import Estimator


@dataclass(frozen=True, kw_only=True)
class DPSGD(Estimator):
    """Differentially private SGD; the estimate suits any optimiser.

    Guarantee: a step is one Gaussian release of multiplier z. Adding or removing a record moves the sum by
    its own clipped row, so by at most C_t, and replacing one by at most 2 C_t; C_t follows from earlier
    releases. Per layer, sum_l C_l^2 = C_t^2 keeps the whole row at C_t. A learned threshold adds a count of
    sensitivity 1/2 to the same release.

    Args:
        clip_norm: C > 0; or a function of the step; or a threshold such as `ReleasedQuantile`.
        clip_rule: weighs the rows.
        per_layer: clip every layer (module) on its own, at C / sqrt(number of layers); or a mapping from
            module paths to shares of C^2 that are scaled to sum to one.
        noise_multiplier: z, the noise's standard deviation over the threshold; calibrated to the budget
            when None; or `NoiseStages` for noise that changes over the run.

    Example:
        >>> from equipoise.methods import PSAC
        >>> DPSGD(clip_norm=0.1, clip_rule=PSAC()).config()["clip_rule"]
        {'kind': 'psac', 'regulariser': 0.01}
    """

    per_layer: bool | Mapping[str, float] = False
