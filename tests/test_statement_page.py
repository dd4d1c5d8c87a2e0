"""docs/statement.md explains every key of a statement, and no key that there is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import equipoise as eq
from equipoise.privacy import Gaussian, Ledger, Release, Staged
from equipoise.statements import statement_of

PAGE = Path(__file__).parents[1] / "docs" / "statement.md"


def documented() -> list[set[str]]:
    """The keys in the first column of each table."""
    tables: list[set[str]] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| key |"):
            tables.append(set())
        elif line.startswith("| `"):
            tables[-1] |= set(re.findall(r"`(\w+)`", line.split("|")[1]))
    return tables


def test_every_key_is_explained():
    staged = Staged(Gaussian(1.0), (0, 10), (1.0, 0.5))
    plan = eq.privacy.PrivacyPlan([Release("gradient", 1.0, staged)], eq.FixedEpochs(10, 100, 20))
    statement = json.loads(statement_of(Ledger(plan), delta=1e-3).to_json())
    keys, of_a_release = documented()
    assert keys == set(statement)
    assert of_a_release == set(statement["releases"][0])
