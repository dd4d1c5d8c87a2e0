"""Verify the result of a federation against the statements of its clients.

Every client has a statement of its own; `federation.json` sums them up: the largest epsilon, the weakest
guarantee. What it says must follow from the statements, and each client must have a run of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from equipoise._run_files import finite_number
from equipoise.privacy.ledger.run_record import GUARANTEES

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
    settings, rounds, clients = values["settings"], values["rounds"], values["clients"]
    found = []

    def compare(key: str, said: object, of: str, value: object, client: str = "") -> None:
        if said != value:
            found.append(f"{client}{RESULT} says {key} {said}, {of} {value}")

    listed = {f"{one['client']:03d}": one for one in clients}
    for name, one in listed.items():
        if name not in statements and one["rounds"]:
            found.append(f"client {name}: took part in {one['rounds']} rounds and has no statement")
    runs = Counter(own.get("run") for own in statements.values())
    for name, own in statements.items():
        one, client = listed.get(name), f"client {name}: "
        if one is None:
            found.append(f"{client}{RESULT} does not list it")
        else:
            compare("epsilon", one["epsilon"], "its statement", finite_number(own.get("epsilon")), client)
            compare("guarantee", one["guarantee"], "its statement", own.get("guarantee"), client)
            population = own["sampling"].get("population")
            compare("population", one["population"], "its statement", population, client)
            claimed = own.get("epsilon_claimed")
            compare("epsilon_claimed", one.get("epsilon_claimed", claimed), "its statement", claimed, client)
        if DISJOINT not in own["assumptions"]:
            found.append(f"{client}its statement does not say that no person's records lie at several owners")
        if runs[own.get("run")] > 1:
            same = ", ".join(other for other, its in statements.items() if its.get("run") == own.get("run"))
            found.append(f"clients {same}: their statements are of one run; every client has its own")
        for key in ("delta", "private", "relation"):
            if key != "delta" or own.get("delta") is not None or own.get("guarantee") != "none":
                compare(key, values[key], f"the statement of client {name}", own.get(key))
    if [one["client"] for one in clients] != list(range(settings["clients"])):
        found.append(f"{RESULT} does not list each of the {settings['clients']} clients of its settings once")
    for key, of_clients in headline(clients).items():
        compare(key, values.get(key), "its clients", of_clients)
    compare("delta", values["delta"], "its settings", settings["delta"])
    if [one["round"] for one in rounds] != list(range(1, settings["rounds"] + 1)):
        found.append(f"{RESULT} does not list each of the {settings['rounds']} rounds of its settings")
    else:
        for name, said in [("accuracy", values["accuracy"]), *values.get("evaluation", {}).items()]:
            compare(name, said, "its last round", rounds[-1].get(name))
    return found


def headline(clients: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest epsilon of the clients, their weakest guarantee and the largest claim."""
    epsilons = [one["epsilon"] for one in clients]
    claims = [one["epsilon_claimed"] for one in clients if one.get("epsilon_claimed") is not None]
    return {
        "epsilon": None if None in epsilons else max(epsilons),
        "epsilon_claimed": max(claims, default=None),
        "guarantee": max((one["guarantee"] for one in clients), key=GUARANTEES.index),
    }
