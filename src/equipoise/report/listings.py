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
        summary = str(method["summary"]).removesuffix(".")
        table.add_row(str(method["name"]), _badge(str(method["guarantee"])), summary)
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
        head = Text(str(method["name"]), style="bold")
        head.append("  ")
        head.append_text(_badge(str(method["guarantee"] or "no card = Card(...) that says what it proves")))
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
            if method[field] is not None:
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
    >>> row |= {"meanings": {"clip_norm": "C > 0."}, "options_of_kinds": {}}
    >>> for line in _settings(row).items():
    ...     print(*line, sep=": ")
    --recipe: library (default), as_published
    --variant: library: one (default), two; as_published: two (default)
    --option: NAME=VALUE, with these names and defaults
    clip_norm=1.0: C > 0.
    dimension: By default it follows from the rest.
    """
    options = dict(method["options"])
    out: dict[str, str] = {}
    if len(method["recipes"]) > 1:
        out["--recipe"] = "library (default), as_published"
    if method["variants"]:
        parts = [
            f"{recipe}: {first} (default)" + "".join(f", {other}" for other in others)
            for recipe, (first, *others) in method["variants"].items()
        ]
        out["--variant"] = "; ".join(parts)
    options.pop("variant", None)
    out["--option"] = "NAME=VALUE, with these names and defaults" if options else "none"
    for name, value in options.items():
        text = str(method["meanings"].get(name, ""))
        out[name if value is None else f"{name}={value}"] = _sentence(text) or (
            "By default it follows from the rest." if value is None else ""
        )
    for option, kinds in method["options_of_kinds"].items():
        if len(kinds) > 1:
            explained = method["kinds"][option]
            known = {
                name.removeprefix(f"{option}."): text
                for name, text in method["meanings"].items()
                if name.startswith(f"{option}.")
            }
            out[f"{option}: kinds"] = "\n".join(
                _kind(kind, fields, explained[kind], known) for kind, fields in kinds.items()
            )
    return out


def _sentence(text: str) -> str:
    """The text with a capital letter, where it begins with a word and not with a symbol.

    >>> _sentence("weighs the rows"), _sentence("c_1 > 0"), _sentence("")
    ('Weighs the rows', 'c_1 > 0', '')
    """
    word = text.partition(" ")[0]
    return text[0].upper() + text[1:] if len(word) > 1 and word.isalpha() else text


def _kind(
    kind: str, fields: Mapping[str, Any], explained: Mapping[str, Any], known: Mapping[str, str]
) -> str:
    """A kind of an option: what it is, and its own fields; those that were explained before in brackets.

    >>> _kind("top_share", {}, {"summary": "The highest scores.", "meanings": {}}, {})
    'top_share: The highest scores.'
    >>> meanings = {"limit": "above 0", "rate": "of the steps"}
    >>> joint = {"summary": "Together.", "meanings": meanings}
    >>> print(_kind("joint", {"limit": 1.0, "rate": None}, joint, {"limit": "above 0"}))
    joint (limit=1.0): Together.
      rate: of the steps
    """
    brackets, lines = [], []
    for name, value in fields.items():
        said, meaning = name if value is None else f"{name}={value}", explained["meanings"].get(name, "")
        if meaning == known.get(name):
            brackets.append(said)
        else:
            lines.append(f"  {said}: {meaning}")
    head = f"{kind} ({', '.join(brackets)})" if brackets else kind
    return "\n".join([f"{head}: {explained['summary']}", *lines])


def _badge(guarantee: str) -> Any:
    from rich.text import Text

    return Text(MEANINGS.get(guarantee, guarantee), style=TONES.get(guarantee, "default"))
