"""Code from outside the library: a method by its path or by an installed package, data, a model."""

import gc
import json
import re
import shutil
import sys

import pytest

from equipoise.methods.base import OWN_METHOD
from equipoise.methods.registry import registered
from equipoise.report import read_run
from equipoise.training.folder.config_file import rebuild_method

MODULE = """
import os
import signal
from dataclasses import dataclass
from typing import ClassVar

import equipoise as eq
from equipoise.methods import Abadi
from equipoise.methods.base import Plan
from equipoise.privacy import Gaussian, PrivacyPlan, Release, clip


@dataclass(frozen=True, kw_only=True)
class HalfStep(eq.DPSGD):
    name: ClassVar[str] = "half-step"
    card: ClassVar[eq.methods.Card] = eq.methods.Card(
        summary="DP-SGD whose estimate is scaled.",
        claim="Private, as DP-SGD.",
        source="none",
        guarantee="proven",
        cost="as DP-SGD",
        use_when="In tests.",
        avoid_when="Otherwise.",
    )
    factor: float = 0.5

    def step(self, context, state):
        if context.step == 2 and os.environ.pop("HALF_STEPS_STOP", None):
            os.kill(os.getpid(), signal.SIGINT)
        estimate, state = super().step(context, state)
        return {name: value * self.factor for name, value in estimate.items()}, state


@dataclass(frozen=True, kw_only=True)
class FromScratch(eq.Method):
    name: ClassVar[str] = "from-scratch"

    def plan(self, setting):
        def releases(noise_multiplier):
            gradient = Release("gradient", 1.0, Gaussian(noise_multiplier))
            return PrivacyPlan([gradient], setting.sampling, setting.relation)

        return Plan(setting.calibrated(releases))

    def step(self, context, state):
        draw = context.draw("batch")
        sums = draw.query(lambda rows, ids: {"gradient": clip(rows, Abadi(), 1.0)})
        return context.ledger.release(draw, sums)["gradient"], state


class Stranger:
    pass


class Nameless(eq.DPSGD):
    pass
"""
TRAIN = "train --data digits --epochs 4 --noise-multiplier 2 --seed 3 --option factor=0.25 --json --method"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of somebody else's; not installed yet."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "half_steps.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    registered.cache_clear()
    yield folder
    registered.cache_clear()
    sys.modules.pop("half_steps", None)


def install(folder):
    """What an installer leaves behind: metadata with an entry point."""
    metadata = folder / "half_steps-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: half-steps\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[equipoise.methods]\nhalf-step = half_steps:HalfStep\n")
    registered.cache_clear()


@pytest.mark.parametrize("word", ["half_steps:HalfStep", "half-step"])
def test_it_trains_resumes_and_verifies(package, equipoise, tmp_path, monkeypatch, request, word):
    gc.disable()  # an interrupted command lets go of its folder by itself
    request.addfinalizer(gc.enable)
    if ":" not in word:
        install(package)
    run, own = tmp_path / "run", f" --method {word}" if ":" in word else ""
    monkeypatch.setenv("HALF_STEPS_STOP", "1")
    found = equipoise(f"{TRAIN} {word} --run-dir", run)
    assert (found.code, found.value["finished"]) == (130, False), found.err
    assert f"equipoise resume {run}{own}\n" in found.err  # ready to be copied
    config = json.loads((run / "config.json").read_text())
    assert (config["method"]["name"], config["method"]["factor"]) == ("half-step", 0.25)
    again = equipoise.ok("resume --json", run, *own.split())
    assert again.value["finished"] is True
    checked = equipoise.ok("verify", run, "--json")
    named = json.loads((run / "statement.json").read_text())["assumptions"]
    assert OWN_METHOD.format(path="half_steps:HalfStep") in named
    further = [f["detail"] for f in checked.value["findings"] if f["subject"] == "further assumptions"]
    assert not further  # config.json names what the method assumes


def test_a_method_from_scratch_needs_no_card(package, equipoise, tmp_path):
    words = "train --data digits --epochs 1 --batch-size 700 --json --method half_steps:FromScratch"
    run = tmp_path / "run"
    assert equipoise(f"{words} --dry-run").value["guarantee"] == "proven"
    equipoise.ok(f"{words} --run-dir", run)
    assert json.loads((run / "statement.json").read_text())["guarantee"] == "proven"
    assert equipoise("verify", run, "--json").code == 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("half_steps:Nameless", "Give the class a name of its own"),
        ("half_steps:Stranger", "is no subclass of equipoise.Method"),
        ("half_steps:Nobody", "cannot be imported"),
    ],
)
def test_what_is_no_method_is_refused(package, equipoise, word, message):
    found = equipoise(f"{TRAIN} {word}")
    assert found.code == 2
    assert message in found.value["error"]
    assert found.value["error"].count(word) == 1


TRAP = """
import pathlib
from half_steps import HalfStep
from torch import nn

pathlib.Path("{mark}").touch()


def records(folder=None):
    from equipoise import data

    return data.load("digits")


def net(dataset):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def trap(package, tmp_path):
    """A module that leaves a mark when it is imported."""
    mark = tmp_path / "was-run"
    (package / "trap.py").write_text(TRAP.format(mark=mark))
    sys.modules.pop("trap", None)
    yield mark
    sys.modules.pop("trap", None)


@pytest.mark.parametrize("command", ["resume", "predict", "audit run"])
def test_a_folder_does_not_say_what_to_import(equipoise, trained, trap, tmp_path, command):
    run = shutil.copytree(trained[0], tmp_path / "run")
    path = run / "checkpoint" / "settings.json"
    settings = json.loads(path.read_text())
    words = {"data": "trap:records", "model": "trap:net", "method": "trap:HalfStep"}
    for setting, word in words.items():
        if setting == "method" and command != "resume":  # the others run none
            continue
        path.write_text(json.dumps({**settings, setting: word}))
        found = equipoise(command, run, "--json")
        assert found.code == 2
        assert "could name any code, so nothing was run" in found.value["error"]
        assert found.value["error"].endswith(f"name it again: --{setting} {word}")
        assert equipoise(command, run, "--json", f"--{setting}", "nothing:other").code == 2
        assert not trap.exists()


def test_what_the_user_names_again_is_run(equipoise, trap, tmp_path):
    run, own = tmp_path / "run", "--data trap:records --model trap:net"
    words = "train --population 1437 --noise-multiplier 2 --epochs 1 --batch-size 700"
    trained = equipoise.ok(f"{words} {own} --run-dir", run)
    predicted = re.search(r"equipoise (predict .*)", trained.out).group(1)
    assert equipoise(predicted.replace("predicted.csv", str(tmp_path / "out.csv"))).code == 0  # as it stands
    again = equipoise(f"predict --json {run} {own}")
    assert again.value["accuracy"] == pytest.approx(read_run(run).accuracy)
    assert equipoise("predict --json", run, "--data", "digits", "--model", "trap:net").code == 0
    assert "was trained with 'dp-sgd'" in equipoise.refused(
        f"resume --json {run} {own} --method trap:HalfStep"
    )


def test_no_description_of_a_method_names_an_import(trap):
    """Not as the method within a method either, however deep: `resume` and `verify` read these."""
    for described in ("trap:HalfStep", {"name": "trap:HalfStep"}):
        for _ in range(12):
            described = {"name": "public-warm-start", "inner": described}
            with pytest.raises(ValueError, match="no method is registered under the name 'trap:HalfStep'"):
                rebuild_method({"method": described})
    assert not trap.exists()
