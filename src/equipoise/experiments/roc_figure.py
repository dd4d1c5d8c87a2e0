"""The picture of a membership test: its curves on logarithmic axes, and what epsilon and delta allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from equipoise.audit.roc import Roc, bound_on_roc
from equipoise.experiments.findings import Curve

__all__ = ["roc_curves", "save_roc_figure"]


def roc_curves(found: Mapping[str, Roc], size: int, epsilon: float | None, delta: float) -> list[Curve]:
    """The curves, from a few false positives on, with the bound where there is one, and guessing.

    Args:
        found: curves by label.
        size: number of scores, present and absent ones.
        epsilon, delta: of the guarantee; no epsilon, no bound.
    """
    rates = np.geomspace(min(0.1, 10 / size), 1.0, 200)
    x = rates.tolist()
    curves = [
        Curve(f"{label} (area {curve.area:.3f})", x, curve.at(rates).tolist())
        for label, curve in found.items()
    ]
    if epsilon is not None:
        bound = bound_on_roc(rates, epsilon, delta).tolist()
        curves.append(Curve(f"allowed by epsilon {epsilon:.3g}", x, bound))
    return [*curves, Curve("guessing", x, x)]


def save_roc_figure(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves into a file for the owner alone: they speak of records."""
    from equipoise.report.figures import curves_figure

    figure = curves_figure(
        curves, x_label="false-positive rate", y_label="true-positive rate", log_x=True, log_y=True
    )
    figure.savefig(path, dpi=150)
    path.chmod(0o600)
