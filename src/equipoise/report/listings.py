"""What the terminal shows of methods, as rich renderables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from equipoise.report.terminal import guarantee_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def methods_table(methods: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line per method: its name, what it does, and what may be claimed.

    Args:
        methods: rows as for `methods_listing`.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for method in methods:
        table.add_row(
            method["name"], guarantee_text(method["guarantee"]), method["summary"].removesuffix(".")
        )
    return table


def methods_listing(methods: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A block per method: what it is, what may be claimed, what it costs, when it suits, what can be set.

    Args:
        methods: rows with the fields of `equipoise.methods.card.Card`, the `name`, the `variants` of each
            recipe, the `options` with their defaults and `meanings`, and those of every kind of an option
            (`options_of_kinds`, `kinds`). All but the summary of a card that is missing are None.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    blocks: list[RenderableType] = []
    for method in methods:
        head = Text(method["name"], style="bold").append("  ")
        head.append_text(
            guarantee_text(method["guarantee"] or "no card = Card(...) that says what it proves")
        )
        if method["published_guarantee"] is not None:
            head.append("; as published: ", style="dim")
            head.append_text(guarantee_text(method["published_guarantee"]))
        grid = Table.grid(padding=(0, 2), expand=False)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label in ("claim", "cost", "use_when", "avoid_when", "source"):
            if method[label] is not None:
                grid.add_row(label.replace("_", " "), str(method[label]))
        for label, text in _settings(method).items():
            grid.add_row(label, Text(text))
        blocks += [head, Padding(Text(method["summary"]), (0, 0, 0, 2)), Padding(grid, (0, 0, 1, 2))]
    return Group(*blocks)


def _settings(method: Mapping[str, Any]) -> dict[str, str]:
    """Recipes, their variants and the other options of a method, as lines of a listing.

    >>> variants = {"library": ("one", "two"), "as_published": ("two",)}
    >>> options = {"variant": None, "clip_norm": 1.0, "dimension": None}
    >>> row = {"recipes": ["library", "as_published"], "options": options, "variants": variants}
    >>> row |= {"meanings": {"clip_norm": "C > 0."}, "options_of_kinds": {}}
    >>> for line in _settings(row).items():
    ...     print(*line, sep=": ")
    --recipe: library (default), as_published
    --variant: library: one (default), two; as_published: two (default)
    --option: NAME=VALUE, with these names and defaults
    clip_norm=1.0: C > 0.
    dimension: By default it follows from the rest.
    """
    out: dict[str, str] = {}
    if len(method["recipes"]) > 1:
        out["--recipe"] = "library (default), as_published"
    if method["variants"]:
        parts = [
            f"{recipe}: {first} (default)" + "".join(f", {other}" for other in others)
            for recipe, (first, *others) in method["variants"].items()
        ]
        out["--variant"] = "; ".join(parts)
    options = {name: value for name, value in method["options"].items() if name != "variant"}
    out["--option"] = "NAME=VALUE, with these names and defaults" if options else "none"
    for name, value in options.items():
        otherwise = "By default it follows from the rest." if value is None else ""
        out[_default(name, value)] = method["meanings"].get(name) or otherwise
    for option, kinds in method["options_of_kinds"].items():
        if len(kinds) > 1:
            lines = []
            for kind, fields in kinds.items():
                about = method["kinds"][option][kind]
                lines.append(f"{kind}: {about['summary']}")
                lines += [f"  {_default(n, v)}: {about['meanings'].get(n, '')}" for n, v in fields.items()]
            out[f"{option}: kinds"] = "\n".join(lines)
    return out


def _default(name: str, value: object) -> str:
    return name if value is None else f"{name}={value}"
