"""A journal of many steps: how long it takes to open it again, to ask what was spent, and to verify it.

The journal is the one of a DP-SGD run, with the lines of its steps written without training. Each question
is asked in a process of its own, whose memory is reported above what the imports take.

    python benchmarks/journal.py --steps 100000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from equipoise.privacy import (
    Gaussian,
    Journal,
    Ledger,
    Poisson,
    PrivacyPlan,
    Private,
    Release,
    Secrets,
    capped,
)
from equipoise.privacy.ledger.journal import ReleaseEntry
from equipoise.statements import check_with_journal, statement_of

DELTA = 1e-9
SECRETS = Secrets(reproducible_seed=1)


def plan_of(steps: int) -> PrivacyPlan:
    return PrivacyPlan([Release("gradient", 1.0, Gaussian(1.0))], Poisson(1024, 10**8, steps))


def step(ledger: Ledger) -> None:
    """A draw, and its release."""
    draw = ledger.open("batch", str(ledger.position))
    ledger.release(draw, {"gradient": capped(Private(torch.ones(2), draw), upper=1.0)})


def opened(path: Path, steps: int, position: int) -> Ledger:
    """The ledger of a run of `steps` at a position."""
    plan, journal = plan_of(steps), Journal(path)
    return Ledger(plan, journal=journal, secrets=SECRETS, position=position, data_fingerprint="f" * 64)


def write_journal(path: Path, steps: int) -> None:
    """The journal of a run with all but the last of its steps, as a ledger would have written it."""
    ledger = opened(path, steps, 0)
    step(ledger)
    journal = ledger.journal
    like = journal.entries()[-1]
    assert isinstance(like, ReleaseEntry)
    with closing(journal), path.open("a") as file:
        for at in range(1, steps - 1):
            entry = replace(like, draw=replace(like.draw, index=at, ordinal=at, digest=f"{at:064x}"))
            file.write(json.dumps(entry.to_json(), separators=(",", ":")) + "\n")


def resident() -> int:
    """MB of this process, now and at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return max(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def ask(path: Path, steps: int, question: str) -> dict[str, float]:
    """Seconds and memory of one question."""
    ledger = opened(path, steps, steps - 1) if question == "spent" else None
    before, start = resident(), time.perf_counter()
    if question == "open":
        step(opened(path, steps, steps - 1))
    elif ledger is not None:
        ledger.spent(DELTA)
    else:
        statement = json.loads(statement_of(opened(path, steps, steps - 1), DELTA).to_json())
        with closing(Journal(path, read_only=True)) as journal:
            findings = check_with_journal(statement, journal)
        assert all(finding.ok is not False for finding in findings), findings
    return {"seconds": time.perf_counter() - start, "MB": resident() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ask", nargs=2, metavar=("JOURNAL", "QUESTION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(ask(Path(options.ask[0]), options.steps, options.ask[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        write_journal(path, options.steps)
        print(f"{options.steps:,} steps, {path.stat().st_size / 1e6:,.0f} MB")
        for question in ("open", "spent", "verify"):
            command = [sys.executable, __file__, "--steps", str(options.steps), "--ask", str(path), question]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{question:8} {found['seconds']:8.2f} s {found['MB']:8.0f} MB")


if __name__ == "__main__":
    main()
