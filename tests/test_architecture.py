"""The rooms and the arrows between them, read from the imports of every module."""

from __future__ import annotations

import ast
import dataclasses
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import equipoise
from equipoise.methods.base import Method
from equipoise.methods.configuration import Option

PACKAGE = Path(equipoise.__file__).parent
ROOMS = {
    "gradients",
    "privacy",
    "statements",
    "methods",
    "training",
    "data",
    "app",
    "federated",
    "report",
    "audit",
    "integrations",
    "cli",
}
# What a room may import besides itself. Arrows run down only; data and report are leaves that the rooms above
# methods may use.
ALLOWED: dict[str, set[str]] = {
    "gradients": set(),
    "privacy": set(),
    "statements": {"privacy"},
    "methods": {"gradients", "privacy"},
    "training": {"statements", "methods", "gradients", "privacy", "data", "report"},
    "federated": {"training", "statements", "methods", "gradients", "privacy", "data"},
    "integrations": {"training", "statements", "methods", "gradients", "privacy", "report"},
    "data": set(),
    "report": set(),
    "audit": {"federated", "statements", "training", "methods", "gradients", "privacy", "data"},
    "app": {
        "audit",
        "integrations",
        "statements",
        "federated",
        "training",
        "methods",
        "gradients",
        "privacy",
        "data",
        "report",
    },
    "cli": ROOMS - {"cli"},
}
# These two know nothing of each other, nor of anything above them, at run time and for type checkers alike.
FOUNDATIONS = {"gradients", "privacy"}


def imports_of(path: Path, package: Path, at_run_time: bool) -> set[str]:
    """The rooms of equipoise that a module imports, absolute and relative, wherever the import stands.

    Another package counts as a room of its own name: `reproduction` uses the library, never the other way.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if at_run_time:
        tree.body = [node for node in tree.body if not _is_type_checking(node)]
    module = ["equipoise", *path.relative_to(package).with_suffix("").parts]
    if module[-1] == "__init__":
        module.pop()
        parent = module
    else:
        parent = module[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "equipoise" and len(parts) > 1 and parts[1] in ROOMS:
                found.add(parts[1])
            if parts[0] == "reproduction":
                found.add("reproduction")
    return found


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def modules(package: Path) -> list[tuple[str, Path]]:
    out = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room in ROOMS:
            out.append((room, path))
    return out


@pytest.mark.parametrize(
    ("room", "path"), modules(PACKAGE), ids=lambda v: v if isinstance(v, str) else v.stem
)
def test_arrows_run_down_only(room: str, path: Path) -> None:
    for at_run_time in (True, False):
        wrong = imports_of(path, PACKAGE, at_run_time) - ALLOWED[room] - {room}
        assert not wrong, (
            f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}; {room} may import {sorted(ALLOWED[room])}"
        )


def test_the_design_page_says_who_imports_whom() -> None:
    said: dict[str, set[str]] = {}
    for line in (PACKAGE.parents[1] / "docs/design.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 2 and cells[0].strip("`").split("`")[0] in ALLOWED:
            words = set(re.findall(r"`(\w+)`", cells[1]))
            is_all = cells[1].startswith("all")
            for room in re.findall(r"`(\w+)`", cells[0]):
                said[room] = ROOMS - words - {room} if is_all else words
    assert said == {room: rooms - {room} for room, rooms in ALLOWED.items()}


def test_every_room_exists_and_is_known() -> None:
    packages = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert packages <= ROOMS, (
        f"new rooms need a line in this test and in docs/design.md: {sorted(packages - ROOMS)}"
    )
    assert packages >= FOUNDATIONS


def test_a_wrong_arrow_is_seen(tmp_path: Path) -> None:
    """The reader of imports finds absolute, relative, nested and whole-module imports."""
    room = tmp_path / "privacy"
    room.mkdir()
    for text in (
        "import equipoise.gradients.engine",
        "from equipoise.gradients import x",
        "from equipoise import gradients",
        "from ..gradients.engine import x",
        "from .. import gradients",
        "def f():\n    from equipoise.gradients import x",
    ):
        (room / "wrong.py").write_text(text)
        assert imports_of(room / "wrong.py", tmp_path, at_run_time=True) == {"gradients"}, text
    (room / "hidden.py").write_text("if TYPE_CHECKING:\n    from equipoise.gradients import x")
    assert imports_of(room / "hidden.py", tmp_path, at_run_time=True) == set()
    assert imports_of(room / "hidden.py", tmp_path, at_run_time=False) == {"gradients"}
    (room / "named.py").write_text('HOME = "equipoise.gradients.engine:GradientEngine"')
    assert named_in_strings(room / "named.py") == {"gradients"}


@pytest.mark.parametrize("text", ["import reproduction.run", "from reproduction import papers"])
def test_the_library_does_not_know_what_stands_beside_it(text: str, tmp_path: Path) -> None:
    """No module imports `reproduction`, those outside the rooms included; an import of it is seen."""
    for path in PACKAGE.rglob("*.py"):
        assert "reproduction" not in imports_of(path, PACKAGE, at_run_time=False), path
    (tmp_path / "wrong.py").write_text(text)
    assert imports_of(tmp_path / "wrong.py", tmp_path, at_run_time=False) == {"reproduction"}


def test_models_and_noise_keep_apart() -> None:
    """The privacy room has no word of torch.nn; the gradients room may not import it, and so no noise."""
    for path in (PACKAGE / "privacy").rglob("*.py"):
        assert "torch.nn" not in path.read_text(encoding="utf-8"), path
    assert "privacy" not in ALLOWED["gradients"]


def named_in_strings(path: Path) -> set[str]:
    """The rooms of the modules that a file names in strings, which may be imported by name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.partition(":")[0].split(".")
            if parts[0] == "equipoise" and len(parts) > 2 and parts[1] in ROOMS:
                found.add(parts[1])
    return found


@pytest.mark.parametrize(
    ("room", "path"), modules(PACKAGE), ids=lambda v: v if isinstance(v, str) else v.stem
)
def test_arrows_hold_for_modules_named_in_strings(room: str, path: Path) -> None:
    wrong = named_in_strings(path) - ALLOWED[room] - {room}
    assert not wrong, f"{path.relative_to(PACKAGE)} names modules of {sorted(wrong)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("_[a-z]*.py")), ids=lambda path: path.stem)
def test_what_all_rooms_build_on_knows_no_room(path: Path) -> None:
    assert not imports_of(path, PACKAGE, at_run_time=False) | named_in_strings(path)


# Names that may stand in several rooms, since they mean the same: what the files of a folder build on.
SHARED_MODULE_NAMES = {"base", "errors", "registry"}


def named_modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def lazy_homes(known: dict[str, Path]) -> dict[str, str]:
    """The modules of the names that packages load when they are asked for, by package.name."""
    homes = {}
    for package, path in known.items():
        stub = path.with_suffix(".pyi")
        if path.stem == "__init__" and stub.exists():
            for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom):
                    homes |= {f"{package}.{a.asname or a.name}": str(node.module) for a in node.names}
    return homes


def import_graph(package: Path) -> dict[str, set[str]]:
    """Which modules of the package a module imports, lazy imports and those for type checkers included."""
    known = named_modules(package)
    homes = lazy_homes(known)
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert not node.level, f"{path}: imports name the package, so that a reader finds them"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {item if item in known else homes.get(item, node.module) for item in inner}
        graph[name] = (found & known.keys()) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, by Kahn's algorithm from both ends."""
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        done = {name for name, targets in left.items() if not targets}
        sources = set(left) - {target for targets in left.values() for target in targets}
        if not done | sources:
            return [sorted(left)] if left else []
        left = {name: targets - done for name, targets in left.items() if name not in done | sources}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not circles(import_graph(PACKAGE))


def test_a_circle_is_seen(tmp_path: Path) -> None:
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    base = copy / "methods/base.py"
    base.write_text("from equipoise.methods import DPSGD\n" + base.read_text(encoding="utf-8"))
    assert any("equipoise.methods.base" in group for group in circles(import_graph(copy)))
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_a_module_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for name, path in named_modules(PACKAGE).items():
        if path.stem not in SHARED_MODULE_NAMES | {"__init__"} and ".methods.published" not in name:
            places.setdefault(path.stem, []).append(name)
    assert not {stem: names for stem, names in places.items() if len(names) > 1}


def public_names(module: str, path: Path) -> set[str]:
    """The public classes, functions, constants and type aliases that stand at the top of a module.

    Recipes as published share the names of our methods: they are told apart by `equipoise.published`. A
    command bears the name of what it does.
    """
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            if ".methods.published" not in module and not module.startswith("equipoise.cli"):
                found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inner = (name for target in targets for name in ast.walk(target))
            found |= {name.id for name in inner if isinstance(name, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def several_homes(package: Path) -> dict[str, list[str]]:
    """The modules of each public name that more than one module gives a thing of its own."""
    places: dict[str, list[str]] = {}
    for module, path in named_modules(package).items():
        for name in public_names(module, path):
            places.setdefault(name, []).append(module)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def test_a_public_name_has_one_meaning() -> None:
    assert not several_homes(PACKAGE)


@pytest.mark.parametrize(
    "text",
    ["RELATIONS = 1", "A, RELATIONS = 1, 2", "RELATIONS: int = 1", "Loss = int", "class Loss: pass"],
)
def test_a_second_meaning_is_seen(text: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("RELATIONS = ()\nLoss = int")
    (tmp_path / "other.py").write_text("from one import RELATIONS, Loss\ndef f():\n    Loss = 1")
    assert not several_homes(tmp_path)
    (tmp_path / "other.py").write_text(text)
    ((_, modules),) = several_homes(tmp_path).items()
    assert [module.rpartition(".")[2] for module in modules] == ["one", "other"]


MOST_FIELDS = 8


def crowded(*rooms: ModuleType) -> dict[str, int]:
    """The methods and options in the contents of these modules that have too many fields, with how many."""
    kinds = {kind for room in rooms for name in dir(room) if isinstance(kind := getattr(room, name), type)}
    found = {
        kind.__name__: len(dataclasses.fields(kind))
        for kind in kinds
        if issubclass(kind, Method | Option) and dataclasses.is_dataclass(kind)
    }
    assert found, rooms
    return {name: count for name, count in found.items() if count > MOST_FIELDS}


@pytest.mark.parametrize("name", ["methods", "published", "federated"])
def test_a_configuration_has_few_fields(name: str) -> None:
    """Where a ninth is needed, some of them are an object."""
    assert not crowded(getattr(equipoise, name))


@pytest.mark.parametrize("base", [equipoise.DiceSGD, equipoise.methods.ErrorFeedback])
def test_a_ninth_field_is_seen(base: type) -> None:
    room = ModuleType("room")
    for name, count in (("Eight", MOST_FIELDS), ("Nine", MOST_FIELDS + 1)):
        fields = [(f"field_{i}", int, 1) for i in range(count - len(dataclasses.fields(base)))]
        made = dataclasses.make_dataclass(name, fields, bases=(base,), frozen=True, kw_only=True)
        setattr(room, name, made)
    assert crowded(room) == {"Nine": 9}
