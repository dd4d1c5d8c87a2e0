"""What all pages share: the template, the glossary, headline figures, charts, and writing in one move."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from equipoise._extras import of_extra
from equipoise._files import PathLike, write_atomically
from equipoise._relations import condition_in_words
from equipoise._rounding import plain, rounded_up
from equipoise._version import __version__
from equipoise.report.figures import Curve, chart
from equipoise.report.phrases import (
    ERRORS,
    PERCENTAGES,
    SHARES,
    evaluated_in_words,
    readable,
    score_in_words,
    score_name,
)

GUARANTEE_BANNERS = {
    "proven": (
        "proven",
        "good",
        "It is proved that all that was released of the training records keeps within this ε.",
    ),
    "worst_case": ("worst case", "mid", "Proved, though by a cruder argument than the method's paper uses."),
    "none": ("none", "bad", "At least one step of this run has no privacy proof."),
}
"""Of each guarantee the word, its tone (a class of the style sheet), and what it means."""


def render(**values: Any) -> str:
    """The page from its template; a name that it lacks is an error, and values are escaped.

    Args:
        values: what the template shows; a section whose values are not given is left out.
    """
    with of_extra():
        from jinja2 import Environment, PackageLoader
        from jinja2.filters import do_mark_safe
    environment = Environment(
        loader=PackageLoader("equipoise.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    glossary: dict[str, str] = {}  # of the words on this page, which stands at its end
    environment.filters["linked"] = lambda text: do_mark_safe(linked(str(text), glossary))
    return environment.get_template("page.html.j2").render(version=__version__, glossary=glossary, **values)


@cache
def _meanings() -> dict[str, tuple[str, str]]:
    """For each name of a term: the name under which the page explains it, and what it means."""
    rows = files("equipoise.report").joinpath("glossary.md").read_text(encoding="utf-8").splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {name.lower(): (names.split(",")[0], text) for names, text in cells for name in names.split(", ")}


def linked(text: str, glossary: dict[str, str]) -> str:
    """HTML in which each term has a link to the glossary, once, and no line ends inside a date or a 1e-5.

    Args:
        text: plain.
        glossary: takes the terms that were found, with their meanings.

    >>> linked("Delta 1e-5 & more delta", glossary := {})
    '<a href="#delta">Delta</a> <span class="whole">1e-5</span> &amp; more delta'
    >>> list(glossary)
    ['delta']
    """
    seen = set()

    def link(found: re.Match[str]) -> str:
        if found["whole"]:
            return f'<span class="whole">{found[0]}</span>'
        place, meaning = _meanings()[found[0].lower()]
        if place in seen:
            return found[0]
        seen.add(place)
        glossary[place] = meaning
        return f'<a href="#{place.replace(" ", "-")}">{found[0]}</a>'

    terms = "|".join(sorted(map(re.escape, _meanings()), key=len, reverse=True))
    pattern = rf"(?P<whole>\S*(?:\de|\d)-\d\S*)|\b(?:{terms})\b"
    return re.sub(pattern, link, html.escape(text), flags=re.IGNORECASE)


def write_page(text: str, folder: PathLike, name: str) -> Path:
    """Write a page into a folder in one move and return its path."""
    path = Path(folder) / name
    write_atomically(path, text.encode(), mode=0o644)
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
        tone, why = "mid", f"All that was released of the training records keeps within this ε{condition}."
    if not private:
        word, tone, why = "not private", "bad", "The noise follows a public seed, so anybody can subtract it."
    return figure("Guarantee", word, why, tone=tone)


def badge(guarantee: str) -> dict[str, str]:
    """The cell of a table that says what is guaranteed."""
    word, tone, _ = GUARANTEE_BANNERS.get(guarantee, GUARANTEE_BANNERS["none"])
    return {"word": word, "tone": tone}


def score_charts(
    names: Sequence[str],
    points: Callable[[str], Sequence[tuple[float, float]]],
    x_label: str,
    judges: str = "test records",
) -> list[dict[str, Any]]:
    """The main score by itself, the others together as far as they have one scale.

    Args:
        names: of the scores, the main one first.
        points: of a score along the training.
        x_label: what the points are counted in.
        judges: the records that they are of.
    """
    main, others = names[:1], list(names[1:])
    groups = [main, *([n for n in others if n in kind] for kind in (SHARES, ERRORS))]
    groups += [[n] for n in others if n not in (*SHARES, *ERRORS)]
    charts = []
    for group in filter(None, groups):
        is_percent = all(name in PERCENTAGES for name in group)
        title = readable(score_name(group[0])) if len(group) == 1 else "Other scores"
        charts += chart(
            title,
            f"On {judges}.",
            # the legend names a score with its last value
            [
                curve_of(f"{score_name(name)} {score_in_words(name, line[-1][1])}", line)
                for name, line in ((name, points(name)) for name in group)
            ],
            x_label=x_label,
            percent=is_percent,
            share=all(name in SHARES for name in group),
        )
    return charts


def curve_of(label: str, points: Sequence[tuple[float, float]]) -> Curve:
    """The curve through points."""
    return Curve(label, [x for x, _ in points], [y for _, y in points])


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


def lines_of(value: Any) -> list[str]:
    """A plain value as lines of text: one line an item of a list or a key of a mapping, none for nothing."""
    if value is None or value in ("", [], {}):
        return []
    if isinstance(value, Mapping):
        return [f"{readable(str(k))}: {text_of(v)}" for k, v in value.items() if v is not None]
    if isinstance(value, list | tuple):
        return [text_of(item) for item in value]
    return [text_of(value)]


def text_of(value: Any) -> str:
    """A plain value on one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return plain(value, 5)
    return str(value) if isinstance(value, str) else ", ".join(lines_of(value))
