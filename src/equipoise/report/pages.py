"""What all pages share: templates, headline figures, banners, charts, and writing in one move."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from equipoise._extras import of_extra
from equipoise._files import PathLike
from equipoise._relations import condition_in_words
from equipoise._rounding import plain, rounded_up
from equipoise._version import __version__
from equipoise.report.figures import Curve, line_chart
from equipoise.report.phrases import evaluated_in_words

__all__ = [
    "GUARANTEE_BANNERS",
    "banner",
    "chart",
    "data_in_words",
    "figure",
    "guarantee_figure",
    "loss_figure",
    "on_any_screen",
    "render",
    "unbroken",
    "write_page",
]


GUARANTEE_BANNERS = {
    "proven": ("proven", "good", "Every release is covered by a proof that this library's tests repeat."),
    "worst_case": ("worst case", "mid", "Proved, though by a cruder argument than the method's paper uses."),
    "none": ("none", "bad", "At least one step of this run has no privacy proof."),
}
"""Of each guarantee the word, its tone (a class of the style sheet), and what it means."""


def render(name: str, /, **values: Any) -> str:
    """A page of this room from its template; unknown names in it are errors, and values are escaped."""
    with of_extra():
        from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("equipoise.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["unbroken"] = unbroken
    return environment.get_template(name).render(version=__version__, **values)


def unbroken(text: str) -> str:
    """Escaped text in which no line ends inside a date or a number such as 1e-5.

    >>> unbroken("at 1e-5 &amp; below")
    'at <span class="whole">1e-5</span> &amp; below'
    """
    return re.sub(r"\S*(?:\de|\d)-\d\S*", r'<span class="whole">\g<0></span>', str(text))


def write_page(text: str, folder: PathLike, name: str) -> Path:
    """Write a page into a folder in one move and return its path."""
    path = Path(folder) / name
    temporary = path.with_suffix(".html.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def figure(name: str, value: str, note: str = "", *, unit: str = "", tone: str = "") -> dict[str, str]:
    """A headline figure."""
    return {"name": name, "value": value, "note": note, "unit": unit, "tone": tone}


def loss_figure(name: str, epsilon: float | None, delta: float | None, note: str) -> dict[str, str]:
    """The headline figure of a privacy loss."""
    unit = "" if delta is None else f"at δ = {plain(delta)}"
    if epsilon is None:
        return figure(name, "no value", note, unit=unit, tone="bad")
    return figure(name, rounded_up(epsilon), note, unit=unit)


def guarantee_figure(
    guarantee: str, private: bool, independence: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The headline figure of what may be claimed."""
    word, tone, why = GUARANTEE_BANNERS.get(guarantee, GUARANTEE_BANNERS["none"])
    if guarantee != "none" and (condition := condition_in_words(independence or {})):
        tone, why = "mid", f"Every release is covered by a proof{condition}."
    if not private:
        word, tone, why = "not private", "bad", "The noise follows a public seed, so anybody can subtract it."
    return figure("Guarantee", word, why, tone=tone)


def banner(tone: str, *lines: str) -> dict[str, Any]:
    """A coloured box; its first line is in bold."""
    return {"tone": tone, "lines": lines}


def on_any_screen(draw: Callable[..., str], wide: bool = True) -> str:
    """The SVG of a chart; of a wide one two, of which the style shows the one that fits the screen.

    Args:
        draw: takes ``wide`` and answers an ``<svg>`` element.
        wide: whether there is room for a wide one.
    """
    if not wide:
        return draw(wide=False)
    found = {"if-roomy": draw(wide=True), "if-narrow": draw(wide=False)}
    return "".join(svg.replace('class="chart"', f'class="chart {name}"', 1) for name, svg in found.items())


def chart(
    title: str, caption: str, curves: Sequence[Curve | None], *, wide: bool = False, **options: Any
) -> list[Mapping[str, Any]]:
    """A chart of the curves that there are, with a legend where there are several; none without points.

    Args:
        title, caption: above the chart.
        curves: None for one that the run does not have.
        wide: across the page.
        options: of `line_chart`.
    """
    drawn = [curve for curve in curves if curve is not None]
    svg = on_any_screen(partial(line_chart, drawn, title=title, **options), wide)
    if not svg:
        return []
    legend = [curve.label for curve in drawn] if len(drawn) > 1 else []
    return [{"title": title, "caption": caption, "svg": svg, "legend": legend, "wide": wide}]


def data_in_words(
    name: str | None, description: str | None, sizes: Mapping[str, Any], drawn: str = "record"
) -> list[str]:
    """What the records are, by public facts; sizes that are no whole number are left out.

    >>> data_in_words("digits", "8 x 8 grey images", {"population": 1437})
    ['digits: 8 x 8 grey images.', '1,437 training records, a public number that sets the sampling rate.']
    """
    facts = [str(fact) for fact in (name, description) if fact]
    words = {
        "population": f"{{:,}} training {drawn}s, a public number that sets the sampling rate.",
        "public_records": "{:,} more records were declared public: they get no protection.",
    }
    found = [": ".join(facts) + "."] if facts else []
    found += [words[key].format(sizes[key]) for key in words if isinstance(sizes.get(key), int)]
    return [*found, f"{evaluated_in_words(sizes)}."] if "test_records" in sizes else found
