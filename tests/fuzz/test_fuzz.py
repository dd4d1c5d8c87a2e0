"""A few mutated inputs for every reader (the whole run: python tests/fuzz/fuzz.py)."""

from __future__ import annotations

import pickle
import subprocess

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from targets import Target, targets
from watching import Harm, watched

from fuzz import feed

NAMES = [target.name for target in targets()]


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_inputs_are_read_or_refused(number):
    target = targets()[number]
    if target.good is not None:
        assert feed(target, target.good) == "accepted"

    @settings(
        max_examples=8,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # shrinking would resume runs by the hundred
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def one(value):
        assert feed(target, value) in ("accepted", "refused")

    one()


HARM = {
    "escape": lambda value, folder: (folder.parent / "escaped").write_text(value),
    "execute": lambda value, folder: subprocess.run(["true"], check=False),
    "unpickle": lambda value, folder: pickle.loads(b"cos\ngetcwd\n(tR."),
}


@pytest.mark.parametrize("act", HARM.values(), ids=HARM)
def test_harm_is_seen(act, tmp_path):
    with pytest.raises(Harm):
        feed(Target("harmful", None, act, 1, None), "x")
    with watched(tmp_path):
        (tmp_path / "own").write_text("may be written")


def test_an_error_from_elsewhere_is_no_refusal():
    with pytest.raises(ValueError):
        feed(Target("careless", None, lambda value, folder: int(value), 1, None), "x")
