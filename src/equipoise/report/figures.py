"""Curves with the spread of their seeds, drawn by matplotlib; for pages as SVG.

A chart on a page loads nothing from outside and follows the page's colours in light and in dark: the colours
of curves, grid and text become CSS variables of the page, and the text takes the page's font.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from equipoise._extras import of_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#2a6fdb", "#d9622b", "#2e9e5b", "#b23a8e", "#8a6d1f",
    "#17879b", "#c0392b", "#6c5ce7", "#5b6770", "#a3b33a",
)  # fmt: skip
STYLES = ("-", "--", "-.", ":")
LINE, SOFT = "#e3e1dc", "#5b6470"
WIDTH, HEIGHT = 460, 260
SMALLEST_SPAN = 0.1
"""Of an axis of shares: on a narrower one the chance of a few records looks like an event."""


@dataclass(frozen=True)
class Curve:
    """A line y(x), with the spread of the seeds around it.

    Attributes:
        label: what it is, as the legend says.
        x: positions, such as numbers of steps.
        y: values there, such as medians over the seeds.
        low, high: the spread, as long as `y`; empty for none.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    def drawable(self) -> Self | None:
        """The curve without points that are not finite; None where no point is left."""
        columns = [self.x, self.y, *((self.low, self.high) if len(self.low) else ())]
        points = [point for point in zip(*columns, strict=True) if all(abs(v) < 1e100 for v in point)]
        if not points:
            return None
        x, y, *band = zip(*points, strict=True)
        low, high = band or ((), ())
        return replace(self, x=x, y=y, low=low, high=high)


def plot(axes: Axes, curve: Curve, number: int) -> None:
    """Draw a curve with its band, in the colour of its number from 0 on."""
    colour = COLOURS[number % len(COLOURS)]
    style = STYLES[number // len(COLOURS) % len(STYLES)]
    marker = "o" if len(curve.x) <= 12 else None
    axes.plot(
        curve.x, curve.y, style, color=colour, label=curve.label, linewidth=1.6, marker=marker, markersize=3.5
    )
    if len(curve.low) and len(curve.high):
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.14, linewidth=0)


def chart(
    title: str,
    caption: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    percent: bool = False,
    share: bool = False,
    target: tuple[float, str] | None = None,
) -> list[dict[str, Any]]:
    """A chart for a page, the same text for the same chart; none without finite points.

    Args:
        title, caption: above the chart; screen readers read the title out.
        curves: what is drawn, with their spread; curve i has the page's colour i, and a place in the legend
            where there are several.
        x_label: of the horizontal axis.
        percent: print y values as percentages.
        share: y values lie in [0, 1]; otherwise the vertical axis begins at 0 where all are above it.
        target: a dashed horizontal line ``(y, label)``.

    Returns:
        ``title``, ``caption``, ``svg`` (an element) and ``legend``, of one chart or none.

    Example:
        >>> (found,) = chart("t", "", [Curve("a", (0, 1), (1, 2))], x_label="x")
        >>> found["svg"].startswith("<svg") and "var(--s1)" in found["svg"]
        True
        >>> chart("t", "", [Curve("a", (), ())], x_label="x")
        []
    """
    with of_extra():
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    drawn = [found for curve in curves if (found := curve.drawable())]
    if not drawn:
        return []
    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "equipoise", "text.parse_math": False, "font.size": 12,
        "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
    }  # fmt: skip
    out = io.StringIO()
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained", facecolor="none")
        axes = figure.subplots()
        for number, curve in enumerate(drawn):
            plot(axes, curve, number)
        axes.set_facecolor("none")
        axes.spines["bottom"].set_color(SOFT)
        axes.yaxis.grid(True, color=LINE)
        axes.tick_params(length=0, pad=6)
        axes.set_xlabel(x_label)
        if target:
            axes.axhline(target[0], color=SOFT, linewidth=1.2, dashes=(5, 4))
            axes.text(0.01, target[0], target[1], transform=axes.get_yaxis_transform(), va="top")
        if percent or share:
            low, high = axes.get_ylim()
            widen = max(0.0, SMALLEST_SPAN - (high - low)) / 2
            axes.set_ylim(max(low - widen, 0.0), min(high + widen, 1.0))
        elif axes.dataLim.y0 >= 0:
            axes.set_ylim(bottom=0)
        whole = all(float(x).is_integer() for curve in drawn for x in curve.x)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], min_n_ticks=1))
        numbers = FuncFormatter(lambda v, _: f"{v:,.10g}")
        axes.xaxis.set_major_formatter(numbers)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.10g}%") if percent else numbers)
        for artist in axes.findobj():
            artist.set_clip_on(False)
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    svg = re.sub(r'<style.*?</style>| xmlns(:\w+)?="[^"]*"', "", svg, flags=re.DOTALL)
    for number, colour in enumerate(COLOURS, 1):
        svg = svg.replace(colour, f"var(--s{number})")
    svg = svg.replace(LINE, "var(--line)").replace(SOFT, "var(--soft)")
    svg = svg.replace("<svg", f'<svg class="chart" role="img" aria-label="{html.escape(title)}"', 1)
    legend = [curve.label for curve in drawn] if len(drawn) > 1 else []
    return [{"title": title, "caption": caption, "svg": svg, "legend": legend}]
