"""Figures by matplotlib: curves with the spread of their seeds, and charts as SVG text for pages.

A chart on a page loads nothing from outside and follows the page's colours in light and in dark: it is drawn
in placeholder colours, which become CSS variables of the page, and its text takes the page's font.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from equipoise._rounding import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curve", "curves_figure", "drawn_by", "line_chart", "range_chart"]

COLOURS = (
    "#2a6fdb", "#d9622b", "#2e9e5b", "#b23a8e", "#8a6d1f",
    "#17879b", "#c0392b", "#6c5ce7", "#5b6770", "#a3b33a",
)  # fmt: skip
STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Curve:
    """A line y(x), with the spread of the seeds around it.

    Attributes:
        label: what it is, as the legend says.
        x: positions, such as numbers of steps.
        y: values there, such as medians over the seeds.
        low, high: the spread, as long as `y`; empty for none.
        panel: the picture that it belongs to, where there are several.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    panel: str = ""

    def drawable(self) -> Curve | None:
        """The curve without points that are not finite; None where no point is left."""
        columns = [self.x, self.y, *((self.low, self.high) if len(self.low) else ())]
        points = [point for point in zip(*columns, strict=True) if all(abs(v) < 1e100 for v in point)]
        if not points:
            return None
        x, y, *band = zip(*points, strict=True)
        low, high = band or ((), ())
        return Curve(self.label, x, y, low, high, self.panel)

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


def curves_figure(
    curves: Sequence[Curve], *, x_label: str, y_label: str, log_y: bool = True, log_x: bool = False
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


def _plot(axes: Axes, curve: Curve, number: int) -> None:
    colour = COLOURS[number % len(COLOURS)]
    style = STYLES[number // len(COLOURS) % len(STYLES)]
    marker = "o" if len(curve.x) <= 12 else None
    axes.plot(
        curve.x, curve.y, style, color=colour, label=curve.label, linewidth=1.6, marker=marker, markersize=3.5
    )
    if len(curve.low) and len(curve.high):
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.14, linewidth=0)


# ---- charts on pages

WIDTH, WIDE, HEIGHT = 460, 940, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 28, 44
LINE, SOFT = "#0000f0", "#0000f1"
DOTS = 40


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    x_label: str,
    y_label: str,
    percent: bool = False,
    share: bool = False,
    from_zero: bool = False,
    wide: bool = False,
    joined: bool = True,
    target: tuple[float, str] | None = None,
) -> str:
    """An ``<svg>`` element with the curves; a dot on a curve tells its value.

    Args:
        curves: what is drawn, with their spread; points that are not finite are left out.
        title: what the picture shows, read out by screen readers.
        x_label: the label of the horizontal axis.
        y_label: the label of the vertical axis, printed above it.
        percent: print y values as percentages.
        share: y values lie in [0, 1]; as where they are percentages, noise of a point does not fill the axis.
        from_zero: let the vertical axis begin at 0.
        wide: draw it twice as wide, at the same height.
        joined: draw a line through the points; else a large dot for each.
        target: a dashed horizontal line ``(y, label)``.

    Returns:
        SVG text, or an empty string if no curve has a point.

    Example:
        >>> svg = line_chart([Curve("a", (0, 1), (1, 2))], title="t", x_label="x", y_label="y")
        >>> svg.startswith("<svg") and svg.count('class="line"') == 1
        True
        >>> line_chart([Curve("a", (), ())], title="t", x_label="x", y_label="y")
        ''
    """
    drawn = [curve for curve in (curve.drawable() for curve in curves) if curve is not None]
    if not drawn:
        return ""
    xs = [x for curve in drawn for x in curve.x]
    ys = [y for curve in drawn for y in (*curve.y, *curve.low, *curve.high)] + ([target[0]] if target else [])
    low, high = _padded(0.0 if from_zero else min(ys), max(ys), 0.06)
    if percent or share:
        low, high = _at_least(low, high, max(ys) <= 1)
    chart = _Chart(
        WIDE if wide else WIDTH,
        HEIGHT,
        LEFT,
        _padded(min(xs), max(xs), 0.0),
        (0.0 if from_zero else low, high),
    )
    axes = chart.axes
    chart.ticks(axes.xaxis, 12 if wide else 6, whole=all(float(x).is_integer() for x in xs))
    chart.ticks(axes.yaxis, 6, percent=percent)
    axes.yaxis.grid(True, color=LINE, linewidth=1, clip_on=False)
    axes.set_xlabel(x_label, color=SOFT, labelpad=8)
    axes.set_title(y_label, loc="left", color=SOFT, fontsize=12, pad=10)
    if target:
        axes.axhline(target[0], color=SOFT, linewidth=1.2, dashes=(5, 4), clip_on=False)
        near_top = target[0] > low + 0.9 * (high - low)
        axes.annotate(
            target[1],
            (0.01, target[0]),
            (0, -6 if near_top else 6),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="top" if near_top else "bottom",
            color=SOFT,
            parse_math=False,
        )
    for number, curve in enumerate(drawn, 1):
        if len(curve.low):
            around = (*curve.x, *reversed(curve.x))
            edge = (*curve.high, *reversed(curve.low))
            axes.fill(around, edge, color=_colour(number), alpha=0.13, linewidth=0, clip_on=False)
        if joined:
            (line,) = axes.plot(curve.x, curve.y, color=_colour(number), linewidth=2.2, clip_on=False)
            chart.call(line, "line")
        # a dot per point would be a wall of ink on long curves; thin them out, the last one always stays
        points = list(zip(curve.x, curve.y, strict=True))
        for x, y in points[:: -max(1, math.ceil(len(points) / DOTS))][::-1]:
            value = f"{y:.2%}" if percent else significant(y, 4)
            radius = 3.5 if (x, y) == points[-1] or not joined else 2.0
            chart.dot(x, y, radius, number, f"{curve.label}: {value} at {x:g}")
    return chart.svg(title)


def range_chart(
    rows: Sequence[tuple[str, Sequence[float]]],
    *,
    title: str,
    x_label: str,
    percent: bool = False,
    wide: bool = True,
) -> str:
    """An ``<svg>`` element with one line per row: one dot per value, and a stroke at their median.

    Args:
        rows: ``(label, values)``, from above; row i has the colour of curve i in `line_chart`.
        title: what the picture shows, read out by screen readers.
        x_label: the label of the horizontal axis.
        percent: print the values as percentages.
        wide: draw it as wide as the page.

    Example:
        >>> range_chart([("a", [0.8, 0.9])], title="t", x_label="x").count('class="dot"')
        2
    """
    everything = [value for _, values in rows for value in values]
    left = 16 + 7.4 * max(len(label) for label, _ in rows)
    low, high = _padded(min(everything), max(everything), 0.08)
    if percent:
        low, high = _at_least(low, high, max(everything) <= 1)
    chart = _Chart(
        WIDE if wide else WIDTH,
        TOP + 30 * len(rows) + BOTTOM,
        left,
        (low, high),
        (len(rows) + 0.5, 0.5),
        right=5 * RIGHT,
    )
    axes = chart.axes
    chart.ticks(axes.xaxis, 8 if wide else 3, percent=percent)
    axes.xaxis.grid(True, color=LINE, linewidth=1, clip_on=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(1, len(rows) + 1), [label for label, _ in rows], parse_math=False)
    axes.set_xlabel(x_label, color=SOFT, labelpad=8)
    for number, (label, values) in enumerate(rows, 1):
        colour, middle = _colour(number), statistics.median(values)
        axes.plot(
            [min(values), max(values)], [number] * 2, color=colour, linewidth=1.6, alpha=0.55, clip_on=False
        )
        axes.plot([middle] * 2, [number - 0.3, number + 0.3], color=colour, linewidth=3, clip_on=False)
        for value in values:
            said = f"{value:.2%}" if percent else significant(value, 4)
            chart.dot(value, number, 4.0, number, f"{label}: {said}")
        axes.annotate(
            f"{middle:.2%}" if percent else significant(middle, 4),
            (max(values), number),
            (12, 0),
            textcoords="offset points",
            va="center",
            color=SOFT,
        )
    return chart.svg(title)


def drawn_by() -> str:
    """What draws the charts: another version may draw the same page in other bytes."""
    import matplotlib

    return f"matplotlib {matplotlib.__version__}"


class _Chart:
    """A figure of one plot, in units of the page: a point is a pixel."""

    def __init__(
        self,
        width: float,
        height: float,
        left: float,
        x: tuple[float, float],
        y: tuple[float, float],
        right: float = RIGHT,
    ) -> None:
        from matplotlib.figure import Figure

        self.size = (width, height)
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)
        self.axes = self.figure.add_axes(
            (left / width, BOTTOM / height, (width - left - right) / width, (height - TOP - BOTTOM) / height)
        )
        self.axes.set(xlim=x, ylim=y)
        self.axes.patch.set_visible(False)
        self.axes.spines[["top", "left", "right"]].set_visible(False)
        self.axes.spines["bottom"].set_color(SOFT)
        self.axes.tick_params(length=0, labelsize=12, labelcolor=SOFT, pad=8)
        self._called: dict[str, tuple[str, str]] = {}

    def ticks(self, axis: Any, count: int, *, whole: bool = False, percent: bool = False) -> None:
        """About `count` round numbers, in steps of 1, 2 or 5 times a power of ten."""
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1))
        axis.set_major_formatter(
            FuncFormatter(lambda v, _: f"{100 * v:,.10g}%" if percent else f"{v:,.10g}".replace("e-0", "e-"))
        )

    def call(self, artist: Any, name: str, text: str = "") -> None:
        """Give the artist a class in the SVG, and a text that is shown where one points at it."""
        artist.set_gid(f"called-{len(self._called)}")
        self._called[artist.get_gid()] = (name, text)

    def dot(self, x: float, y: float, radius: float, number: int, text: str) -> None:
        """A dot of the colour of a curve. Markers would be references, which a page shall not hold."""
        from matplotlib.patches import RegularPolygon
        from matplotlib.transforms import IdentityTransform

        across, up = self.axes.transData.transform((x, y))
        dot = RegularPolygon((float(across), float(up)), 8, radius=radius, color=_colour(number), linewidth=0)
        dot.set_transform(IdentityTransform())
        dot.set_zorder(5)
        self.figure.add_artist(dot)
        self.call(dot, "dot", text)

    def svg(self, title: str) -> str:
        """The same text for the same chart, to the byte, by the same version of matplotlib."""
        import matplotlib

        out = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "equipoise"}):
            self.figure.savefig(out, format="svg", metadata={"Date": None})
        root = ElementTree.fromstring(out.getvalue().encode())
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
            element.text = (element.text or "").strip()
            element.tail = None
            for child in [c for c in element if c.tag.rpartition("}")[2] in ("metadata", "defs")]:
                element.remove(child)
            style = re.sub("#0000([0-9a-f]{2})", _variable, element.attrib.pop("style", ""))
            if element.tag == "text":
                # the page gives font and colour; the place is matplotlib's
                anchor = re.search("text-anchor: *(start|middle|end)", style)
                element.set("text-anchor", anchor[1] if anchor else "start")
            elif style:
                element.set("style", style)
            name, text = self._called.get(element.attrib.pop("id", ""), ("", ""))
            if name:
                element.set("class", name)
            if text:
                title_of = ElementTree.Element("title")
                title_of.text = text
                element.insert(0, title_of)
        width, height = self.size
        root.attrib.clear()
        root.attrib.update(
            {"class": "chart", "viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": title}
        )
        return ElementTree.tostring(root, encoding="unicode")


def _variable(placeholder: re.Match[str]) -> str:
    """The page's CSS variable of a placeholder colour."""
    return f"var(--{ {'f0': 'line', 'f1': 'soft'}.get(placeholder[1], f's{int(placeholder[1], 16)}') })"


def _colour(number: int) -> str:
    """The placeholder of the page's colour of curve `number`, from 1 on."""
    return f"#0000{number:02x}"


SMALLEST_SPAN = 0.1
"""Of an axis of shares: on a narrower one the chance of a few records looks like an event."""


def _at_least(low: float, high: float, shares: bool) -> tuple[float, float]:
    """An axis of at least `SMALLEST_SPAN`; within 0 and 1 where all values are.

    >>> [round(end, 3) for end in (*_at_least(0.84, 0.846, True), *_at_least(0.98, 0.99, True))]
    [0.793, 0.893, 0.9, 1.0]
    """
    if high - low < SMALLEST_SPAN:
        middle = (low + high) / 2
        if shares:
            middle = min(max(middle, SMALLEST_SPAN / 2), 1 - SMALLEST_SPAN / 2)
        low, high = middle - SMALLEST_SPAN / 2, middle + SMALLEST_SPAN / 2
    return low, min(high, 1.0) if shares else high


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    if high > low:
        extra = (high - low) * share
        return low - extra, high + extra
    extra = abs(low) * 0.05 or 0.5
    return low - extra, high + extra
