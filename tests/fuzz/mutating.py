"""Mutated inputs, as hypothesis strategies: bytes flipped, cut and spliced; trees with hostile leaves."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

NAMES = ["../../escaped", "/etc/passwd", "~/x", "C:\\x", "a/../../b", "\x00", "", ".", "con\nfig", "x" * 5000]
NUMBERS = [0, -1, 1, 2**31, 2**63, 10**30, 10**400, 0.0, -0.5, 1e-320, 1e308, float("nan"), float("inf")]
# what a pickle or a template would need to do harm
CODE = [
    "os:system",
    "__import__('os')",
    "{{ 7*7 }}",
    "<script>alert(1)</script>",
    "!!python/object:os.system",
]
HOSTILE: list[Any] = [
    None, True, False, [], {}, [[]], {"": None}, *NUMBERS, *NAMES, *CODE, "1", [1, "a", None],
    {"scheme": "Poisson"},
]  # fmt: skip
DEEP = "[" * 100_000


@st.composite
def mutated_bytes(draw: Callable[..., Any], seeds: Sequence[bytes]) -> bytes:
    """One of the seeds after one to four mutations."""
    content = bytearray(draw(st.sampled_from(list(seeds))))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "set", "cut", "drop", "repeat", "insert", "swap", "number"]))
        at = draw(st.integers(0, max(0, len(content) - 1)))
        size = draw(st.integers(1, 64))
        if kind == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and content:
            content[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at:]
        elif kind == "drop":
            del content[at : at + size]
        elif kind == "repeat":
            content[at:at] = content[at : at + size] * draw(st.integers(1, 20))
        elif kind == "insert":
            content[at:at] = draw(st.binary(max_size=32))
        elif kind == "swap":
            other = draw(st.integers(0, max(0, len(content) - 1)))
            content[at : at + size], content[other : other + size] = (
                content[other : other + size],
                content[at : at + size],
            )
        elif kind == "number":
            width = draw(st.sampled_from([1, 2, 4, 8]))
            value = draw(st.sampled_from([0, 1, 2**7, 2**15, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
            order = draw(st.sampled_from(["little", "big"]))
            content[at : at + width] = (value % 256**width).to_bytes(width, order)  # type: ignore[arg-type]
    return bytes(content)


@st.composite
def mutated_text(draw: Callable[..., Any], seeds: Sequence[bytes], words: Sequence[str] = ()) -> bytes:
    """A text file with cells replaced, dropped and doubled; now and then broken as bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(mutated_bytes(seeds))
    text = draw(st.sampled_from(list(seeds))).decode()
    hostile = st.sampled_from(
        [*map(str, NUMBERS), *NAMES, *CODE, *words, "\ufeff", "\r", '"', "\t\t", "é" * 50]
    )
    for _ in range(draw(st.integers(1, 4))):
        lines = text.split("\n")
        row = draw(st.integers(0, len(lines) - 1))
        for separator in draw(st.permutations([",", "\t", " ", ":"])):
            if separator in lines[row]:
                break
        cells = lines[row].split(separator)
        at = draw(st.integers(0, len(cells) - 1))
        kind = draw(st.sampled_from(["replace", "drop", "double", "line", "remove"]))
        if kind == "replace":
            cells[at] = draw(hostile)
        elif kind == "drop":
            del cells[at]
        elif kind == "double":
            cells.insert(at, cells[at])
        lines[row] = separator.join(cells)
        if kind == "line":
            lines.insert(row, draw(hostile))
        elif kind == "remove" and len(lines) > 1:
            del lines[row]
        text = "\n".join(lines)
    return text.encode(errors="surrogateescape")


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a tree of dicts and lists, the root first."""
    found = [at]
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        found += paths(child, (*at, key))
    return found


@st.composite
def mutated_tree(draw: Callable[..., Any], tree: Any, leaves: Sequence[Any] = tuple(HOSTILE)) -> Any:
    """A tree of dicts and lists after one to three edits: a value replaced, a key dropped or added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = paths(tree)
        place = draw(st.sampled_from(places))
        leaf = copy.deepcopy(draw(st.sampled_from(list(leaves))))  # later edits may go into it
        if not place:
            if draw(st.integers(0, 9)) == 0:
                return leaf
            continue
        parent = tree
        for key in place[:-1]:
            parent = parent[key]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "drop", "rename", "add", "from"]))
        if kind == "replace":
            parent[place[-1]] = leaf
        elif kind == "drop":
            del parent[place[-1]]
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from([*NAMES, "epsilon", "scheme"]))] = parent.pop(place[-1])
        elif kind == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["__class__", "ledger_file", "extra", "run_dir"]))] = leaf
        elif kind == "from":
            other: Any = tree
            for key in draw(st.sampled_from(places)):
                if isinstance(other, dict | list):
                    other = other.get(key) if isinstance(other, dict) else (other[key : key + 1] or [None])[0]
            parent[place[-1]] = copy.deepcopy(other)
    return tree


@st.composite
def mutated_json(draw: Callable[..., Any], seeds: Sequence[bytes]) -> bytes:
    """A JSON file: its tree edited, or its bytes."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return DEEP.encode()
    if kind < 6:
        return draw(mutated_bytes(seeds))
    tree = json.loads(draw(st.sampled_from(list(seeds))))
    return json.dumps(draw(mutated_tree(tree))).encode()


@st.composite
def mutated_lines(draw: Callable[..., Any], seed: bytes) -> bytes:
    """A file of JSON lines: one line edited, dropped, doubled or moved, or its bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(mutated_bytes([seed]))
    lines = seed.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(["edit", "edit", "edit", "drop", "double", "move"]))
    if kind == "edit":
        lines[at] = draw(mutated_json([lines[at]]))
    elif kind == "double":
        lines.insert(at, lines[at])
    else:
        line = lines.pop(at)
        if kind == "move":
            lines.insert(draw(st.integers(0, len(lines))), line)
    return b"\n".join(lines) + b"\n"
