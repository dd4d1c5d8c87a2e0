"""Line charts as SVG text, for pages that load nothing from outside.

Colours are CSS classes (``s1``, ``s2``, ..., ``grid``, ``axis``), so the page that holds a chart decides how
it looks in light and in dark; the picture itself holds no colour. Ticks follow the usual 1-2-5 rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

__all__ = ["Series", "line_chart", "range_chart", "ticks"]

WIDTH, WIDE, HEIGHT = 460, 940, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 28, 44

Point = tuple[float, float]
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Series:
    """One curve: a label and points ``(x, y)`` in the order of x; points that are not finite are left out.

    Attributes:
        label: what it is.
        points: its points.
        band: ``(x, low, high)`` of its spread, drawn behind it; empty for none.
    """

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()

    def finite(self) -> list[tuple[float, float]]:
        """The points whose two coordinates are finite."""
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``, in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 80)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    >>> ticks(0.88, 0.97)
    [0.88, 0.9, 0.92, 0.94, 0.96]
    >>> ticks(1, 3, 6, whole=True)  # of things that are counted
    [1.0, 2.0, 3.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    if whole:
        step = max(step, 1.0)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    percent: bool = False,
    from_zero: bool = False,
    wide: bool = False,
    target: tuple[float, str] | None = None,
) -> str:
    """An ``<svg>`` element with one curve a series.

    Args:
        series: the curves; curves without a finite point are left out.
        title: what the picture shows, read out by screen readers.
        x_label: the label of the horizontal axis.
        y_label: the label of the vertical axis, printed above it.
        percent: print y values as percentages.
        from_zero: let the vertical axis begin at 0.
        wide: draw it twice as wide, at the same height.
        target: a dashed horizontal line ``(y, label)``.

    Returns:
        SVG text, or an empty string if no curve has a point.

    >>> svg = line_chart([Series("a", [(0, 1), (1, 2)])], title="t", x_label="x", y_label="y")
    >>> svg.startswith("<svg") and svg.count("<polyline") == 1
    True
    >>> line_chart([Series("a", [])], title="t", x_label="x", y_label="y")
    ''
    """
    series = [s for s in series if s.finite()]
    curves = [(s.label, s.finite()) for s in series]
    if not curves:
        return ""
    width = WIDE if wide else WIDTH
    xs = [x for _, points in curves for x, _ in points]
    ys = [y for _, points in curves for _, y in points] + ([target[0]] if target else [])
    ys += [y for s in series for _, low, high in s.band for y in (low, high)]
    x_low, x_high = _padded(min(xs), max(xs), 0.0)
    y_low, y_high = _padded(0.0 if from_zero else min(ys), max(ys), 0.06)
    if from_zero:
        y_low = 0.0
    if percent:
        y_high = min(y_high, 1.0) if max(ys) <= 1 else y_high

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (width - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    y_ticks = ticks(y_low, y_high, 6)
    for y in y_ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{py(y) + 4:.1f}" text-anchor="end">'
            f"{_number(y, y_ticks, percent)}</text>"
        )
    x_ticks = ticks(x_low, x_high, 12 if wide else 6, whole=all(float(x).is_integer() for x in xs))
    for x in x_ticks:
        parts.append(
            f'<text class="tick" x="{px(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{_number(x, x_ticks, False)}</text>"
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    )
    parts.append(
        f'<text class="label" x="{(LEFT + width - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    parts.append(f'<text class="label" x="{LEFT}" y="{TOP - 14}">{escape(y_label)}</text>')
    if target:
        y = py(target[0])
        parts.append(
            f'<line class="target" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT + 6}" y="{y - 6 if y > TOP + 14 else y + 14:.1f}">'
            f"{escape(target[1])}</text>"
        )
    for number, s in enumerate(series, 1):
        if s.band:
            edge = [(x, high) for x, _, high in s.band] + [(x, low) for x, low, _ in reversed(s.band)]
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in edge)
            parts.append(f'<g class="s{number}"><polygon class="band" points="{path}"/></g>')
    for number, (label, points) in enumerate(curves, 1):
        parts.append(_curve(number, label, points, px, py, percent))
    parts.append("</svg>")
    return "".join(parts)


def range_chart(
    rows: Sequence[tuple[str, Sequence[float]]], *, title: str, x_label: str, percent: bool = False
) -> str:
    """An ``<svg>`` element with a line a row: a dot a value, and a stroke at their median.

    Args:
        rows: ``(label, values)``, from above; row i has the colour of curve i in `line_chart`.
        title: what the picture shows, read out by screen readers.
        x_label: the label of the horizontal axis.
        percent: print the values as percentages.

    >>> range_chart([("a", [0.8, 0.9])], title="t", x_label="x").count('class="dot"')
    2
    """
    left, step = 16 + 7.4 * max(len(label) for label, _ in rows), 30
    height = TOP + step * len(rows) + BOTTOM
    everything = [value for _, values in rows for value in values]
    low, high = _padded(min(everything), max(everything), 0.08)

    def px(x: float) -> float:
        return left + (x - low) / (high - low) * (WIDE - left - 5 * RIGHT)

    shown = ticks(low, high, 8)
    bottom = height - BOTTOM
    parts = [f'<svg class="chart" viewBox="0 0 {WIDE} {height}" role="img" aria-label="{escape(title)}">']
    for x in shown:
        parts.append(f'<line class="grid" x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{px(x):.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{_number(x, shown, percent)}</text>"
        )
    parts.append(
        f'<text class="label" x="{(left + WIDE) / 2:.0f}" y="{height - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    for number, (label, values) in enumerate(rows, 1):
        y = TOP + step * (number - 0.5)
        middle = median(values)
        parts.append(
            f'<text class="name" x="{left - 12}" y="{y + 4}" text-anchor="end">{escape(label)}</text>'
        )
        parts.append(f'<g class="s{number}">')
        parts.append(
            f'<line class="span" x1="{px(min(values)):.1f}" x2="{px(max(values)):.1f}" y1="{y}" y2="{y}"/>'
        )
        for value in values:
            shown_value = _number(value, everything, percent, extra=1)
            parts.append(
                f'<circle class="dot" cx="{px(value):.1f}" cy="{y}" r="4"><title>{escape(label)}: '
                f"{shown_value}</title></circle>"
            )
        parts.append(
            f'<line class="mark" x1="{px(middle):.1f}" x2="{px(middle):.1f}" y1="{y - 9}" y2="{y + 9}"/></g>'
        )
        parts.append(
            f'<text class="tick" x="{px(max(values)) + 12:.1f}" y="{y + 4}">'
            f"{_number(middle, everything, percent, extra=1)}</text>"
        )
    parts.append("</svg>")
    return "".join(parts)


def _curve(number: int, label: str, points: list[Point], px: Scale, py: Scale, percent: bool) -> str:
    path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
    parts = [f'<g class="s{number}"><polyline class="line" points="{path}"/>']
    # a dot a point would be a wall of ink on long curves; thin them out, the last one always stays
    stride = max(1, math.ceil(len(points) / 40))
    shown = points[::-1][::stride][::-1]
    values = [y for _, y in points]
    for x, y in shown:
        last = (x, y) == points[-1]
        parts.append(
            f'<circle class="dot" cx="{px(x):.1f}" cy="{py(y):.1f}" r="{3.5 if last else 2}">'
            f"<title>{escape(label)}: {_number(y, values, percent, extra=1)} at {x:g}</title></circle>"
        )
    parts.append("</g>")
    return "".join(parts)


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    if high > low:
        extra = (high - low) * share
        return low - extra, high + extra
    extra = abs(low) * 0.05 or 0.5
    return low - extra, high + extra


def _number(value: float, among: Sequence[float], percent: bool, extra: int = 0) -> str:
    """A value with as many decimals as its neighbours need to be told apart."""
    scale = 100.0 if percent else 1.0
    span = (max(among) - min(among)) * scale / max(len(set(among)) - 1, 1)
    decimals = 0 if span == 0 else max(0, -math.floor(math.log10(span * 1.001)))
    decimals = min(decimals + extra, 6)
    text = f"{value * scale:,.{decimals}f}" if abs(value) < 1e7 else f"{value:.3g}"
    return f"{text}%" if percent else text
