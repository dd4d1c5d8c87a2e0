"""Curves of an experiment, in panels of one picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from equipoise.report import figures

__all__ = ["Curve", "curves_figure"]


@dataclass(frozen=True)
class Curve(figures.Curve):
    """A curve, and the picture that it belongs to where there are several."""

    panel: str = ""

    @classmethod
    def of_seeds(cls, label: str, runs: Sequence[Mapping[int, float]], panel: str = "") -> Curve:
        """Median, smallest and largest value over the runs of several seeds.

        Args:
            label: what was run.
            runs: {steps done: error} per seed, as `follow` gives it, all with the same steps.
            panel: the picture that it belongs to.

        Example:
            >>> Curve.of_seeds("a", [{1: 2.0, 5: 1.0}, {1: 4.0, 5: 3.0}, {1: 3.0, 5: 0.5}]).y
            (3.0, 1.0)
        """
        x = tuple(runs[0])
        values = [[run[step] for run in runs] for step in x]
        return cls(
            label,
            x,
            tuple(statistics.median(v) for v in values),
            tuple(min(v) for v in values),
            tuple(max(v) for v in values),
            panel,
        )


def curves_figure(curves: Sequence[Curve], *, x_label: str, y_label: str, log_y: bool = True) -> Figure:
    """Curves with bands, one panel a value of `panel`, in the order of their first appearance.

    One legend stands below the figure where all panels show the same labels; else each panel has its own.

    Args:
        curves: what is drawn; a label keeps its colour in all panels.
        x_label: of the horizontal axes.
        y_label: of the first vertical axis.
        log_y: logarithmic values; what is not above 0 is then left out.
    """
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
                figures.plot(axes, curve, labels.index(curve.label))
        if log_y and any(value > 0 for curve in curves if curve.panel == panel for value in curve.y):
            axes.set_yscale("log")
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
