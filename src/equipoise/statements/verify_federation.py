"""Verify the result of a federation against the statements of its clients.

Every client has a statement of its own; `federation.json` sums them up: the largest epsilon, the weakest
guarantee. What it says must follow from the statements, and each client must have a run of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from equipoise.privacy.ledger.run_record import GUARANTEES
from equipoise.statements.recompute import finite_number

__all__ = ["DISJOINT", "RESULT", "check_federation"]

RESULT = "federation.json"
DISJOINT = (
    "no person's records lie at several owners: for one whose records do, the epsilons of these owners add up"
)
"""The assumption that every client's statement makes."""


def check_federation(values: Mapping[str, Any], statements: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where `federation.json` says something else than its clients' statements, or than itself.

    Args:
        values: what `federation.json` holds.
        statements: the clients' statements, by the name of a client's folder: its number in three digits.
    """
    found = []
    listed = {f"{one['client']:03d}": one for one in values["clients"]}
    for name, one in listed.items():
        if name in statements:
            own = statements[name]
            said = {
                "epsilon": finite_number(own.get("epsilon")),
                "guarantee": own.get("guarantee"),
                "population": own["sampling"].get("population"),
            }
            if "epsilon_claimed" in one:
                said["epsilon_claimed"] = own.get("epsilon_claimed")
            found += [
                f"client {name}: {RESULT} says {key} {one[key]}, its statement {value}"
                for key, value in said.items()
                if one[key] != value
            ]
        elif one["rounds"]:
            found.append(f"client {name}: took part in {one['rounds']} rounds and has no statement")
    found += [
        f"client {name}: its statement does not say that no person's records lie at several owners"
        for name, own in statements.items()
        if DISJOINT not in own["assumptions"]
    ]
    found += [f"client {name}: {RESULT} does not list it" for name in statements if name not in listed]
    count = values["settings"]["clients"]
    if [one["client"] for one in values["clients"]] != list(range(count)):
        found.append(f"{RESULT} does not list each of the {count} clients of its settings once")
    return found + _headline_differences(values, statements) + _same_runs(statements)


def _headline_differences(
    values: Mapping[str, Any], statements: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Where the whole says something else than its parts."""
    found = []
    epsilons = [one["epsilon"] for one in values["clients"]]
    largest = None if None in epsilons else max(epsilons)
    if values["epsilon"] != largest:
        found.append(f"{RESULT} says epsilon {values['epsilon']}, the largest of its clients is {largest}")
    weakest = max((one["guarantee"] for one in values["clients"]), key=GUARANTEES.index)
    if values["guarantee"] != weakest:
        found.append(
            f"{RESULT} says guarantee {values['guarantee']}, the weakest of its clients is {weakest}"
        )
    claims = [one["epsilon_claimed"] for one in values["clients"] if one.get("epsilon_claimed") is not None]
    claimed = max(claims, default=None)
    if values.get("epsilon_claimed") != claimed:
        found.append(f"{RESULT} says epsilon_claimed {values.get('epsilon_claimed')}, its clients {claimed}")
    for key in ("delta", "private", "relation"):
        said = values[key]
        for name, own in statements.items():
            no_delta = key == "delta" and own.get(key) is None and own.get("guarantee") == "none"
            if own.get(key) != said and not no_delta:
                found.append(f"{RESULT} says {key} {said}, the statement of client {name} {own.get(key)}")
    if values["delta"] != values["settings"]["delta"]:
        found.append(f"{RESULT} says delta {values['delta']}, its settings {values['settings']['delta']}")
    rounds = values["rounds"]
    if [one["round"] for one in rounds] != list(range(1, values["settings"]["rounds"] + 1)):
        found.append(
            f"{RESULT} does not list each of the {values['settings']['rounds']} rounds of its settings"
        )
    else:
        for name, said in [("accuracy", values["accuracy"]), *values.get("evaluation", {}).items()]:
            if said != rounds[-1].get(name):
                found.append(f"{RESULT} says {name} {said}, its last round {rounds[-1].get(name)}")
    return found


def _same_runs(statements: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Clients whose statements are of the same run: all but one of these are another client's."""
    names = defaultdict(list)
    for name, own in statements.items():
        names[own.get("run")].append(name)
    return [
        f"clients {', '.join(same)}: their statements are of one run, {run}; every client has its own"
        for run, same in names.items()
        if len(same) > 1
    ]
