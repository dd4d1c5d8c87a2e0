"""SIGKILL at real SuperNodes and at the SuperLink, in the middle of rounds: restart goes on, ledgers hold.

The app of examples/federated runs as it stands, but for a pause in the loss that makes a round long enough to
be killed in. In one process and over sockets the same is tested in tests/federated/test_killed.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from equipoise.privacy import Journal

EXAMPLE = Path(__file__).parents[2] / "examples" / "federated"
ROUNDS, LOCAL_STEPS, PAUSE = 4, 3, 1.0
SLOWLY = f"""

_loss = loss


def loss(model, batch):
    import time

    time.sleep({PAUSE} if len(batch["label"]) > 50 else 0)  # in a step, and not where shapes are learned
    return _loss(model, batch)
"""


@pytest.fixture
def deployment(tmp_path):
    """The example's processes, all of them gone in the end."""
    app = shutil.copytree(EXAMPLE, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    with (app / "hospitals" / "agreed.py").open("a") as agreed:
        agreed.write(SLOWLY)
    specification = importlib.util.spec_from_file_location("federated_example", app / "run.py")
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        specification.loader.exec_module(module)
    made = module.Deployment(tmp_path / "run")
    yield made
    for name in list(made.running):
        made.kill(name)


def releases(folder, owner):
    """What an owner's ledger holds, in its order."""
    path = folder / f"owner-{owner}" / "private" / "journal.jsonl"
    if not path.is_file():
        return []
    entries = Journal(path, read_only=True).entries()
    return [entry for entry in entries if entry.kind == "release"]


def wait(deployment, reached, seconds=600):
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            logs = {path.name: path.read_text()[-2000:] for path in deployment.folder.glob("*.log")}
            raise TimeoutError(f"nothing more happens: {logs}")
        time.sleep(0.05)


def start(deployment):
    deployment.start_link()
    for owner in range(2):
        deployment.start_node(owner)
    deployment.run(f"rounds={ROUNDS} local-steps={LOCAL_STEPS}")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups and SIGKILL")
def test_a_supernode_and_the_superlink_are_killed_in_the_middle_of_rounds(deployment):
    pytest.importorskip("flwr", reason="needs the extra federated")
    folder = deployment.folder
    start(deployment)

    def booked(owner):
        with contextlib.suppress(OSError):
            return len(releases(folder, owner))
        return 0

    # owner 1 dies in the first step of a round after the first
    wait(deployment, lambda: booked(1) > 0 and booked(1) % LOCAL_STEPS == 1 and len(deployment.rounds()) > 0)
    deployment.kill("owner-1")
    of_owner_1 = releases(folder, 1)
    broken = len(of_owner_1) % LOCAL_STEPS
    assert broken != 0, "it was killed between two rounds"
    before = len(deployment.rounds())
    deployment.start_node(1)
    wait(deployment, lambda: len(deployment.rounds()) > before)

    # the server's side dies while owner 0 works
    wait(deployment, lambda: booked(0) % LOCAL_STEPS == 1 and booked(0) > LOCAL_STEPS * before)
    deployment.kill("superlink")
    rounds_before = deployment.rounds()
    assert 1 <= len(rounds_before) < ROUNDS
    of_owner_0 = releases(folder, 0)
    for owner in range(2):
        deployment.kill(f"owner-{owner}")
    start(deployment)
    wait(deployment, lambda: len(deployment.rounds()) == ROUNDS)
    for name in list(deployment.running):
        deployment.kill(name)

    lines = deployment.rounds()
    assert [int(re.match(r"round (\d+)", line).group(1)) for line in lines] == list(range(1, ROUNDS + 1))
    assert lines[: len(rounds_before)] == rounds_before
    for owner, known in ((0, of_owner_0), (1, of_owner_1)):
        found = releases(folder, owner)
        assert found[: len(known)] == known, "a release is lost from the ledger"
        assert len({entry.draw.index for entry in found}) == len(found), "a noise draw is booked twice"
        answered = sum(f"owner {owner} is missing" not in line for line in lines)
        assert answered * LOCAL_STEPS <= len(found) <= ROUNDS * LOCAL_STEPS
    assert len(releases(folder, 1)) % LOCAL_STEPS == broken, "the steps before its death stay booked"
