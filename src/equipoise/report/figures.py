"""Figures of experiments: curves with the spread of their seeds, one panel a problem, for matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curves_figure"]

COLOURS = (
    "#2a6fdb", "#d9622b", "#2e9e5b", "#b23a8e", "#8a6d1f",
    "#17879b", "#c0392b", "#6c5ce7", "#5b6770", "#a3b33a",
)  # fmt: skip
STYLES = ("-", "--", "-.", ":")


class CurveLike(Protocol):
    """A label, points and a spread; see `equipoise.experiments.findings.Curve`."""

    @property
    def label(self) -> str: ...
    @property
    def x(self) -> Sequence[float]: ...
    @property
    def y(self) -> Sequence[float]: ...
    @property
    def low(self) -> Sequence[float]: ...
    @property
    def high(self) -> Sequence[float]: ...
    @property
    def panel(self) -> str: ...


def curves_figure(
    curves: Sequence[CurveLike], *, x_label: str, y_label: str, log_y: bool = True, log_x: bool = False
) -> Figure:
    """Curves with bands, one panel a value of `panel`, in the order of their first appearance.

    One legend stands below the figure where all panels show the same labels; else each panel has its own.

    Args:
        curves: what is drawn; a label keeps its colour in all panels.
        x_label: of the horizontal axes.
        y_label: of the first vertical axis.
        log_y: logarithmic values; what is not above 0 is then left out.
        log_x: logarithmic positions.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(curve.panel for curve in curves)) or [""]
    labels = list(dict.fromkeys(curve.label for curve in curves))
    across = 2 if len(panels) == 4 else min(3, len(panels))
    down = -(-len(panels) // across)
    shared = all({c.label for c in curves if c.panel == panel} == set(labels) for panel in panels)
    rows = 0 if shared else max(sum(c.panel == panel for c in curves) for panel in panels)
    figure = Figure(figsize=(1.2 + 4.4 * across, 0.9 + (3.3 + 0.2 * rows) * down), layout="constrained")
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(down, across, number + 1)
        for curve in curves:
            if curve.panel == panel:
                _plot(axes, curve, labels.index(curve.label))
        if log_y and any(value > 0 for curve in curves if curve.panel == panel for value in curve.y):
            axes.set_yscale("log")
        if log_x:
            axes.set_xscale("log")
        axes.set_title(panel, fontsize=10, loc="left")
        axes.set_xlabel(x_label)
        if number % across == 0:
            axes.set_ylabel(y_label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#00000014", linewidth=0.6)
        if labels and not shared:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=8)
    if shared and labels:
        room = figure.get_figwidth() / (0.5 + 0.075 * max(map(len, labels)))  # inches an entry takes
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=max(1, min(4, len(labels), int(room))),
            frameon=False,
            fontsize=9,
        )
    return figure


def _plot(axes: Axes, curve: CurveLike, number: int) -> None:
    colour = COLOURS[number % len(COLOURS)]
    style = STYLES[number // len(COLOURS) % len(STYLES)]
    marker = "o" if len(curve.x) <= 12 else None
    axes.plot(
        curve.x, curve.y, style, color=colour, label=curve.label, linewidth=1.6, marker=marker, markersize=3.5
    )
    if len(curve.low) and len(curve.high):
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.14, linewidth=0)
