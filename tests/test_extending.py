"""What docs/extending.md says of additions holds: each is made in a copy and touches exactly the files named.

Then every test file that mentions the kind runs in the copy. Slow: every case runs pytest there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from equipoise.methods.registry import METHODS

ROOT = Path(__file__).parent.parent
PARTS = (
    *("src", "tests", "docs", "reproduction", "benchmarks", "contrib", "examples"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "Makefile"),
    *("mkdocs.yml", "pyproject.toml", "conftest.py"),
)


def named_files(kind: str) -> list[str]:
    """The files in the row of a kind; a folder stands for one new file in it."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {kind} \| (.*) \|$", text, flags=re.M)
    return re.findall(r"`([^`]+)`", row)


class Copy:
    """A copy of the sources that notes which files were touched."""

    name = "halved-sgd"  # NAME in the paths of the table

    def __init__(self, folder: Path) -> None:
        self.folder, self.touched = folder, set[str]()
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / part)

    def write(self, path: str, text: str) -> None:
        assert not (self.folder / path).exists()
        (self.folder / path).write_text(text, encoding="utf-8")
        self.touched.add(path)

    def edit(self, path: str, *pairs: tuple[str, str]) -> None:
        place = self.folder / path
        text = place.read_text(encoding="utf-8")
        for old, new in pairs:
            assert text.count(old) == 1, f"{path}: {old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        place.write_text(text, encoding="utf-8")
        self.touched.add(path)

    def run(self, *command: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (self.folder / "src", self.folder))),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def check(self, kind: str, *folders: str, mention: str, without: Iterable[str] = ()) -> None:
        """Exactly the named files were touched, and the tests pass on the copy.

        Args:
            kind: the row of the table.
            folders: further tests that run.
            mention: a pattern; every test file that holds it runs.
            without: parts of names of tests that need not run, since they are about other additions.
        """
        named = {name.replace("NAME", self.name) for name in named_files(kind)}
        fits = {
            path: [n for n in named if path == n or (n.endswith("/") and path.startswith(n))]
            for path in self.touched
        }
        assert all(fits.values()), fits
        assert named == {name for found in fits.values() for name in found}
        tests = [
            str(path.relative_to(self.folder))
            for path in sorted((self.folder / "tests").rglob("test_*.py"))
            if re.search(mention, path.read_text(encoding="utf-8")) and path.name != "test_extending.py"
        ]
        assert tests
        others = " or ".join(without)
        chosen = ["-k", f"{self.name} or not ({others})"] if others else []
        options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *chosen]
        self.run("pytest", *options, "tests/test_contents.py", *tests, *folders)


pytestmark = pytest.mark.slow


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_clip_rule(copy: Copy) -> None:
    path = "src/equipoise/methods/clip_rules.py"
    text = (ROOT / path).read_text(encoding="utf-8")
    names = text[text.index("__all__") :].split("]")[0] + "]"
    copy.edit(path, (names, names[:-1] + '    "Smooth",\n]'))
    rule = '''

@dataclass(frozen=True)
class Smooth(ClipRule):
    """w = C / (C^2 + n^2)^(1/2)."""

    kind: ClassVar[str] = "smooth"

    def _weights(self, norms: Tensor, threshold: Tensor | float) -> Tensor:
        return threshold / (threshold**2 + norms.square()).sqrt()
'''
    place = copy.folder / path
    place.write_text(place.read_text(encoding="utf-8") + rule, encoding="utf-8")
    line = "from equipoise.methods.clip_rules import ClipRule as ClipRule\n"
    added = "from equipoise.methods.clip_rules import Smooth as Smooth\n"
    copy.edit("src/equipoise/methods/__init__.pyi", (line, line + added))
    (copy.folder / "tests" / "test_added.py").write_text(
        """from equipoise import DPSGD
from equipoise.methods import Smooth
from equipoise.methods.clip_rules import ClipRule


def test_it():
    assert ClipRule.kinds()["smooth"] is Smooth
    assert DPSGD.from_config({"name": "dp-sgd", "clip_rule": "smooth"}).clip_rule == Smooth()
"""
    )
    copy.check("clip rule", "tests/test_added.py", "tests/methods/test_options.py", mention="ClipRule")


def test_a_method(copy: Copy) -> None:
    copy.write(
        "src/equipoise/methods/halved_sgd.py",
        '''"""DP-SGD whose estimate is halved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from equipoise.methods.base import Context, State
from equipoise.methods.card import Card
from equipoise.methods.dp_sgd import DPSGD


@dataclass(frozen=True, kw_only=True)
class HalvedSGD(DPSGD):
    """DP-SGD whose estimate is halved."""

    name: ClassVar[str] = "halved-sgd"
    card: ClassVar[Card] = Card(
        summary="DP-SGD whose estimate is halved.",
        claim="Private, as DP-SGD.",
        source="an example",
        guarantee="proven",
        cost="as DP-SGD",
        use_when="To see how a method is added.",
        avoid_when="Otherwise.",
    )

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        estimate, state = super().step(context, state)
        return {name: value / 2 for name, value in estimate.items()}, state
''',
    )
    line = '    "dp-sgd": MethodEntry("equipoise.methods.dp_sgd:DPSGD"),\n'
    copy.edit(
        "src/equipoise/methods/registry.py",
        (line, line + '    "halved-sgd": MethodEntry("equipoise.methods.halved_sgd:HalvedSGD"),\n'),
    )
    line = '    "dp-sgd": lambda: eq.DPSGD(clip_norm=0.5),\n'
    made = '    "halved-sgd": lambda: find("halved-sgd")(clip_norm=0.5),\n'
    copy.edit(
        "tests/methods/table.py",
        (line, line + made),
        ("import equipoise as eq\n", "import equipoise as eq\nfrom equipoise.methods.registry import find\n"),
    )
    line = '    "dp-svrg": lambda: eq.methods.DPSVRG(clip_norm=0.5, anchor_batch_size=40),\n'
    made = '    "halved-sgd": lambda: eq.methods.HalvedSGD(clip_norm=0.5),\n'
    copy.edit("tests/federated/test_client.py", (line, line + made))
    page = (ROOT / "docs" / "methods" / "rsdp.md").read_text(encoding="utf-8").replace("rsdp", "halved-sgd")
    copy.write("docs/methods/halved-sgd.md", page.replace("RandomSparsification", "HalvedSGD"))
    line = "      - rsdp: methods/rsdp.md\n"
    copy.edit("mkdocs.yml", (line, line + "      - halved-sgd: methods/halved-sgd.md\n"))
    line = "| [rsdp](rsdp.md) | DP-SGD on a fresh random part of the coordinates at every step |\n"
    added = "| [halved-sgd](halved-sgd.md) | DP-SGD whose estimate is halved |\n"
    copy.edit("docs/methods/index.md", (line, line + added))
    line = "from equipoise.methods.dp_sgd import DPSGD as DPSGD\n"
    added = "from equipoise.methods.halved_sgd import HalvedSGD as HalvedSGD\n"
    copy.edit("src/equipoise/methods/__init__.pyi", (line, line + added))
    line = '        "clip-sgd": Picture(\n'
    drawn = '        "halved-sgd": Picture({"halved-sgd": find("halved-sgd")(clip_norm=4.0), **dp_sgd}),\n'
    copy.edit(
        "reproduction/pictures.py",
        (line, drawn + line),
        (
            "from equipoise.privacy import Budget, Poisson\n",
            "from equipoise.methods.registry import find\nfrom equipoise.privacy import Budget, Poisson\n",
        ),
    )
    copy.run("reproduction", "pictures", "halved-sgd")
    copy.touched.add("docs/figures/halved-sgd.png")
    copy.check("method", mention=r"\bMETHODS\b|\bregistered\b|from table import", without=METHODS)


def test_a_mechanism(copy: Copy) -> None:
    text = (ROOT / "src/equipoise/privacy/mechanisms/gaussian.py").read_text(encoding="utf-8")
    text = text.replace("class Gaussian(", "class PlainGaussian(").replace('"gaussian"', '"plain_gaussian"')
    copy.write(
        "src/equipoise/privacy/mechanisms/plain_gaussian.py",
        text.replace(">>> Gaussian", ">>> PlainGaussian"),
    )
    line = "from equipoise.privacy.mechanisms.joint_gaussian import JointGaussian\n"
    added = "from equipoise.privacy.mechanisms.plain_gaussian import PlainGaussian\n"
    copy.edit(
        "src/equipoise/privacy/mechanisms/__init__.py",
        (line, line + added),
        ("BandedGaussian, Staged)", "BandedGaussian, Staged, PlainGaussian)"),
    )
    line = '    "gaussian": Case(Gaussian, {"a": 1.5}, FRESH),\n'
    case = '    "plain_gaussian": Case(MECHANISMS["plain_gaussian"], {"a": 1.5}, FRESH),\n'
    copy.edit("tests/privacy/test_mechanisms.py", (line, line + case))
    schema = "src/equipoise/statements/statement.schema.json"
    kind = '"const": "gaussian"'
    copy.edit(schema, (kind, '"enum": ["gaussian", "plain_gaussian"]'))
    copy.check("mechanism", "tests/statements", mention=r"\bMECHANISMS\b")


def test_a_rule_for_an_operation(copy: Copy) -> None:
    copy.write(
        "src/equipoise/gradients/rules/negation.py",
        '''"""A rule for the reversed difference, ``x - parameter`` with the operands exchanged."""

from __future__ import annotations

from equipoise.gradients.rules.elementwise import broadcast
from equipoise.gradients.rules.operation import Finish, Operation


def reversed_difference(op: Operation) -> Finish | None:
    """``torch.rsub(x, parameter)`` is parameter - x."""
    param = op.args[1] if len(op.args) > 1 else None
    return broadcast(op, param, lambda b, _: b) if op.tracks(param) and not op.tracks(op.args[0]) else None
''',
    )
    line = "from equipoise.gradients.rules.norms import"
    copy.edit(
        "src/equipoise/gradients/rules/__init__.py",
        (line, "from equipoise.gradients.rules.negation import reversed_difference\n" + line),
        ("        expand: (\n", "        reversed_difference: (torch.rsub,),\n        expand: (\n"),
    )
    (copy.folder / "tests" / "gradients" / "test_added.py").write_text(
        """import torch
from oracle_cases import compare
from torch import nn


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x):
        return torch.rsub(x, self.weight).sin()


def test_it():
    def loss(model, x):
        return model(x).square().sum(1)

    compare(Shift(), loss, torch.randn(5, 4, dtype=torch.float64), how="rule")
"""
    )
    copy.check("rule for an operation", "tests/gradients/test_added.py", mention='how="rule"')


def test_a_data_set(copy: Copy) -> None:
    copy.write(
        "src/equipoise/data/readers/points.py",
        '''"""Two clouds of points."""

from __future__ import annotations

import torch

from equipoise._files import PathLike
from equipoise.data.records import Records


def load_points(folder: PathLike) -> tuple[Records, Records]:
    """100 points to train on and 20 to test."""
    made = []
    for count, seed in ((100, 0), (20, 1)):
        label = torch.arange(count) % 2
        noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
        made.append(Records({"input": noise + label.unsqueeze(1), "label": label}, num_classes=2))
    return made[0], made[1]
''',
    )
    line = "NAMED: dict[str, NamedSet] = {\n"
    copy.edit(
        "src/equipoise/data/named.py",
        (line, line + '    "points": NamedSet(100, 2, "points of two clouds", (), load_points),\n'),
        (
            "from equipoise.data.readers.tables import",
            "from equipoise.data.readers.points import load_points\n"
            "from equipoise.data.readers.tables import",
        ),
    )
    copy.edit("src/equipoise/app/option_checks.py", ('    "digits", ', '    "points", "digits", '))
    line, pairs = "DEFAULT_MODEL: dict[str, str] = {\n", "str], DefaultSettings] = {\n"
    copy.edit(
        "src/equipoise/app/default_settings.py",
        (line, line + '    "points": "linear",\n'),
        (pairs, pairs + '    ("points", "linear"): DefaultSettings(batch_size=20, epochs=5),\n'),
    )
    published = "PUBLISHED = {\n"
    copy.edit("tests/data/test_named.py", (published, published + '    "points": (100, 20, (3,)),\n'))
    copy.edit("docs/how-to/own-data.md", ("`digits` comes", "`points` is made up, `digits` comes"))
    (copy.folder / "tests" / "test_added.py").write_text(
        """from equipoise import data


def test_it():
    assert len(data.load("points").train) == 100
"""
    )
    mention = r"\b(NAMED|DATA_NAMES|DEFAULT_MODEL|DEFAULT_SETTINGS)\b"
    copy.check("data set", "tests/app", "tests/test_added.py", mention=mention)
