"""What the terminal shows of methods, as rich renderables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["methods_listing", "methods_table"]

TONES = {"proven": "green", "worst_case": "yellow", "none": "red"}
MEANINGS = {"proven": "proven", "worst_case": "worst case only", "none": "no guarantee"}


def methods_table(methods: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line a method: its name, what it does, and what may be claimed.

    Args:
        methods: rows as for `methods_listing`.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for method in methods:
        summary = str(method["summary"]).removesuffix(".")
        table.add_row(str(method["name"]), _badge(str(method["guarantee"])), summary)
    return table


def methods_listing(methods: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A block a method: what it is, what may be claimed, what it costs, when it suits, what can be set.

    Args:
        methods: rows with the fields of `equipoise.methods.card.Card`, the `name`, the `variants` of each
            recipe, the `options` with their defaults, and those of every kind of an option
            (`options_of_kinds`).
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    blocks: list[RenderableType] = []
    for method in methods:
        head = Text(str(method["name"]), style="bold")
        head.append("  ")
        head.append_text(_badge(str(method["guarantee"])))
        if method["published_guarantee"] is not None:
            head.append("; as published: ", style="dim")
            head.append_text(_badge(str(method["published_guarantee"])))
        grid = Table.grid(padding=(0, 2), expand=False)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, field in (
            ("claim", "claim"),
            ("cost", "cost"),
            ("use when", "use_when"),
            ("not when", "avoid_when"),
            ("source", "source"),
        ):
            grid.add_row(label, str(method[field]))
        for label, text in _settings(method).items():
            grid.add_row(label, Text(text))
        blocks += [head, Padding(Text(str(method["summary"])), (0, 0, 0, 2)), Padding(grid, (0, 0, 1, 2))]
    return Group(*blocks)


def _settings(method: Mapping[str, Any]) -> dict[str, str]:
    """Recipes, their variants and the other options of a method, as lines of a listing.

    >>> variants = {"library": ("one", "two"), "as_published": ("two",)}
    >>> options = {"variant": None, "clip_norm": 1.0, "dimension": None}
    >>> row = {"recipes": ["library", "as_published"], "options": options, "variants": variants}
    >>> _settings(row | {"options_of_kinds": {}})
    {'--recipe': 'library (default), as-published', '--variant': 'library: one (default), two; \
as-published: two (default)', '--option': 'clip_norm=1.0, dimension (by default it follows from the rest)'}
    """
    options = dict(method["options"])
    out: dict[str, str] = {}
    if "as_published" in method["recipes"]:
        out["--recipe"] = "library (default), as-published"
    if method["variants"]:
        parts = [
            f"{recipe.replace('_', '-')}: {first} (default)" + "".join(f", {other}" for other in others)
            for recipe, (first, *others) in method["variants"].items()
        ]
        out["--variant"] = "; ".join(parts)
    options.pop("variant", None)
    valued = [f"{name}={value}" for name, value in options.items() if value is not None]
    free = [name for name, value in options.items() if value is None]
    rest = f"{', '.join(free)} (by default {'it follows' if len(free) == 1 else 'they follow'} from the rest)"
    out["--option"] = ", ".join([*valued, *([rest] if free else [])]) or "none"
    for option, kinds in method["options_of_kinds"].items():
        if len(kinds) > 1:
            out[option] = "; ".join(_kind(kind, fields) for kind, fields in kinds.items())
    return out


def _kind(kind: str, fields: Mapping[str, Any]) -> str:
    """A kind of an option with its own fields.

    >>> _kind("top_share", {}), _kind("joint", {"noise_inflation": 1.0, "limit": None})
    ('top_share', 'joint (noise_inflation=1.0, limit)')
    """
    given = ", ".join(name if value is None else f"{name}={value}" for name, value in fields.items())
    return f"{kind} ({given})" if given else kind


def _badge(guarantee: str) -> Any:
    from rich.text import Text

    return Text(MEANINGS.get(guarantee, guarantee), style=TONES.get(guarantee, "default"))
