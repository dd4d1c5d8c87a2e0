"""One report of a federation whose sites are elsewhere, from the server's folder and the sites' statements.

The server's folder becomes one as `equipoise federate` leaves it: `federation.json`, the model, the page, and
each site's statement with the signature of the site under `clients/`, so that `equipoise verify` and `sign`
take it too.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from equipoise._files import PathLike, make_folder, write_json
from equipoise._run_files import finite_number, read_object
from equipoise.app.federation.run import result_values
from equipoise.federated.server import ServerFolder
from equipoise.report import RunFolderError
from equipoise.report.federation_page import write_federation_report
from equipoise.statements.verify import SIGNATURE, STATEMENT, check_consistent, verify_run
from equipoise.statements.verify_federation import RESULT, check_federation


def gather_federation(
    server: PathLike, statements: Sequence[PathLike], keys: Sequence[PathLike] = (), command: str = ""
) -> dict[str, Any]:
    """Verify the statements of a federation's sites, each under its own key, and write one page of all.

    Args:
        server: the server's folder, as `run_rounds(folder=...)` leaves it; federation.json, report.html,
            model.safetensors and clients/ are written there.
        statements: the sites' folders, or their published parts, in the order of the clients' numbers. The
            last sites may have none: their epsilon is then unknown, if they answered.
        keys: a file with public keys for each site, or one for all; signatures are not asked for without.
        command: that repeats it.

    Returns:
        What federation.json holds, with run_dir and report.

    Raises:
        RunFolderError: no rounds, or a statement that is not consistent, not signed by its key, or of another
            federation: nothing is written then.
        KeyFileError: no public key in a file.
    """
    folder, rounds = Path(server), ServerFolder.read(server)
    if len(keys) not in (0, 1, len(statements)):
        raise RunFolderError(
            f"{len(keys)} keys are given for {len(statements)} statements: give none, one for all, or one "
            "for each, in the same order"
        )
    each: list[Any] = list(keys) * (len(statements) if len(keys) == 1 else 1) or [None] * len(statements)
    found = [verify_run(place, public_key=key) for place, key in zip(statements, each, strict=True)]
    for one in found:
        check_consistent(one, "no page was made")
    own = [read_object(Path(place) / STATEMENT) for place in statements]
    known = 1 + max((index for done in rounds.rounds for index in done.asked), default=0)
    if len(own) > known:
        given = f"{len(own)} statements are given. Name each site once"
        raise RunFolderError(f"run={str(server)!r} asked {known} clients, but {given}")
    clients = []
    for number in range(known):
        answered = sum(number in done.answered for done in rounds.rounds)
        unknown = (None, "none") if answered else (0.0, "proven")
        row: dict[str, Any] = {"client": number, "rounds": answered, "population": 0}
        row["epsilon"], row["guarantee"] = unknown
        if number < len(own):
            its = own[number]
            row.update(
                site=Path(statements[number]).resolve().name,
                signer=found[number].signer,
                population=its["sampling"]["population"],
                epsilon=finite_number(its.get("epsilon")),
                epsilon_claimed=its.get("epsilon_claimed"),
                **{key: its[key] for key in ("unit", "guarantee")},
            )
        clients.append(row)
    values = _values(rounds, own, clients, command)
    problems = check_federation(values, {f"{number:03d}": its for number, its in enumerate(own)})
    if wrong := [one for one in problems if "has no statement" not in one]:
        raise RunFolderError(f"the statements are not of one federation, so no page was made. {wrong[0]}")
    for number, place in enumerate(map(Path, statements)):
        kept = make_folder(folder / "clients" / f"{number:03d}", "server")
        if place.resolve() != kept.resolve():
            (kept / SIGNATURE).unlink(missing_ok=True)
            for name in (STATEMENT, SIGNATURE):
                if (place / name).is_file():
                    shutil.copyfile(place / name, kept / name)
    save_file(dict(rounds.params), folder / "model.safetensors")
    report = write_federation_report(values, folder)
    write_json(folder / RESULT, values)
    return {**values, "run_dir": str(server), "report": str(report)}


def _values(
    rounds: Any, own: Sequence[dict[str, Any]], clients: list[dict[str, Any]], command: str
) -> dict[str, Any]:
    """What federation.json holds of a federation whose settings lie with its sites."""
    delta = own[0]["delta"] if own else None
    return {
        "gathered": True,
        "settings": {
            "method": rounds.strategy,
            "data": None,
            "clients": len(clients),
            "rounds": len(rounds.rounds),
            "delta": delta,
        },
        "command": command,
        "summary": "statements of its sites, each by itself",
        "delta": delta,
        "private": all(its["private"] for its in own),
        "clients": clients,
        **result_values(rounds, clients, own),
    }
