"""What docs/design.md says of where things are is so."""

from __future__ import annotations

import ast
import re
import sys
from types import FrameType

import pytest
import torch
from pages import DOCS, ROOT
from torch import nn

import equipoise as eq

PAGE = (DOCS / "design.md").read_text(encoding="utf-8")
PLACES = re.findall(r"^\| .* \| `([\w/]+\.py)` \| `([\w.]+)` \|$", PAGE, re.M)


def names_of(node: ast.AST, prefix: str = "") -> set[str]:
    """What a module or class defines, what its classes define included."""
    found: set[str] = set()
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            found |= {prefix + part.name} | names_of(part, f"{prefix}{part.name}.")
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_a_place_is_where_the_page_says(file: str, name: str) -> None:
    text = (ROOT / "src" / "equipoise" / file).read_text(encoding="utf-8")
    assert name in names_of(ast.parse(text)), f"docs/design.md: {file} defines no {name}"


def test_there_are_ten_places() -> None:
    assert len(PLACES) == 10


def test_a_step_takes_the_way_that_the_page_shows() -> None:
    (block,) = re.findall(r"^### A step\n\n```text\n(.*?)```", PAGE, re.M | re.S)
    way = re.findall(r"[\w.]+", re.sub(r"#.*", "", block))
    model = nn.Linear(3, 1)
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).square().sum(1),
        data=torch.randn(200, 3),
        sampling=eq.Poisson(expected_batch_size=20, population=200, steps=2),
        budget=eq.Budget(4.0, 1e-3),
    )
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (name := frame.f_code.co_qualname) in way and name not in called:
            called.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        training.take_step()
    finally:
        sys.setprofile(before)
    assert called == way
