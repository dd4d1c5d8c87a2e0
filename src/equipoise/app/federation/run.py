"""A simulated federation from settings to report, as the command line runs it.

Its folder: `federation.json` (settings, rounds, clients, as plain values), `report.html`,
`model.safetensors`, `server/` with the server's state, `clients/000` and so on with each client's statement,
journal and, while the federation lasts, key. The same command on the same folder goes on after the last
round. After the last one every client finishes, and `federation.json` is written when all else is: a folder
that holds it has nothing left to do.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from equipoise._files import make_folder, write_json
from equipoise._rounding import plain
from equipoise._run_files import read_object
from equipoise._validate import delta_warning
from equipoise.app.data_loading import load_data
from equipoise.app.default_settings import default_settings
from equipoise.app.federation.folder import read_result
from equipoise.app.federation.participants import ClientMaker, Federation, federation
from equipoise.app.models import default_model
from equipoise.app.run_checks import FEDERATION_FILE, check_federation_folder
from equipoise.app.settings import FederationSettings
from equipoise.federated import FederationHistory, RoundReport, simulate
from equipoise.federated.client_pool import ClientPool
from equipoise.federated.messages import CLIENT_FAILURES, size_in_bytes
from equipoise.methods.base import Parameters
from equipoise.report.federation_page import write_federation_report
from equipoise.report.phrases import SCORES, bytes_in_words, score_in_words, score_name
from equipoise.statements.verify_federation import RESULT, headline
from equipoise.training.population import population_warning

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger("equipoise.federated")


def run_federation(settings: FederationSettings, folder: str, console: Console) -> dict[str, Any]:
    """Run the rounds that the folder does not hold yet, and write report and statements.

    Returns:
        Plain values: what `federation.json` holds, with run_dir, report and seconds.

    Raises:
        SettingsError, DataFileError: before anything is spent.
    """
    path, began = Path(folder), time.perf_counter()
    settings.check()
    settings, kept = check_federation_folder(settings, folder), path / FEDERATION_FILE
    if kept.is_file() and "schema" in read_object(kept):  # rows are coded as in the first round
        settings = replace(settings, base=replace(settings.base, schema=str(kept)))
    text = _with_model(settings).to_json()
    if (path / RESULT).exists():
        found = read_result(folder)
        report = path / "report.html"
    else:
        found, report = _train(text, path, console)
    return {**found, "run_dir": folder, "report": str(report), "seconds": time.perf_counter() - began}


def _with_model(settings: FederationSettings) -> FederationSettings:
    """The folder must name model and features: they follow from data, and others may be predicted."""
    base = settings.base
    model = base.model or default_model(load_data(replace(base, owner=settings.site_column)))
    features = base.features or default_settings(base.data, model).features
    return replace(settings, base=replace(base, model=model, features=features))


def describe_federation(settings: FederationSettings, console: Console) -> dict[str, Any]:
    """What a federation would do, and what it would cost and take at its busiest client; nothing is spent.

    Returns:
        Plain values: those of the client's `Description`, with its number, the settings and warnings.

    Raises:
        SettingsError, DataFileError: as `run_federation`.
    """
    settings.check()
    with console.status("loading the data"):
        made = federation(settings.to_json())
    with console.status("calibrating the noise"):
        client = made.rehearse()
        description = client.training.describe()
        client.close()
        rows = _rows(made)
    warnings = _introduce(made, console)
    for row in rows:
        console.print(
            f"client {row['site']}: {row['population']:,} records, {row['rounds']} rounds, epsilon "
            f"{plain(row['epsilon'], 4)}, noise multiplier {plain(row['noise_multiplier'], 4)}",
            highlight=False,
        )
    rounds = f"{made.planned[made.busiest]} of the {made.setup.rounds} rounds"
    console.print(f"The busiest client, number {made.busiest}, takes part in {rounds}:", highlight=False)
    console.print(str(description), markup=False)
    return {
        "dry_run": True,
        "client": made.busiest,
        "clients": rows,
        **description.to_json(),
        "settings": made.settings.public(),
        "warnings": warnings,
    }


def _rows(made: Federation) -> list[dict[str, Any]]:
    """What each client would do; those of one budget, size and number of rounds add the same noise."""
    found, known = list[dict[str, Any]](), dict[Any, tuple[float, float]]()
    for number, rounds in enumerate(made.planned):
        population = made.population(number)
        asked = population, rounds, made.settings.of_site(number, "epsilon", made.settings.base.epsilon)
        if asked not in known and rounds:
            client = made.client(number, None)
            noise = min(client.training.describe().noise_multipliers.values())
            known[asked] = client.statement().epsilon or math.inf, noise
            client.close()
        epsilon, noise = known.get(asked, (0.0, 0.0))
        found.append({"site": made.settings.site_names()[number], "population": population, "rounds": rounds})
        found[-1] |= {"epsilon": epsilon, "noise_multiplier": noise}
    return found


def _train(text: str, path: Path, console: Console) -> tuple[dict[str, Any], Path]:
    """Run the rounds, end the clients' part and write the results, `federation.json` last."""
    with console.status("loading the data"):
        made = federation(text)
    if not (path / FEDERATION_FILE).exists():
        with console.status("calibrating the noise"):
            made.rehearse().close()  # settings that cannot be used begin no folder
    make_folder(path, "run_dir")
    schema = made.dataset.schema or {}
    own = {"schema": dict(schema)} if "columns" in schema else {}
    write_json(path / FEDERATION_FILE, json.loads(text) | own, mode=0o600)
    _introduce(made, console)
    maker, parts = ClientMaker(text, str(path / "clients")), range(len(made.parts))
    with closing(ClientPool(maker.client, len(parts))) as pool:
        with _progress(made, console) as on_round:
            history = _run_rounds(made, maker, pool, path, on_round)
        with console.status("adding up every client's privacy"):
            clients = [_client_values(made, maker, pool, history, number) for number in parts]
    save_file(dict(history.output), path / "model.safetensors")
    found = _values(made, history, clients)
    report = write_federation_report(found, path)
    write_json(path / RESULT, found)
    return found, report


def _run_rounds(
    made: Federation,
    maker: ClientMaker,
    pool: ClientPool,
    path: Path,
    on_round: Callable[[RoundReport], None],
) -> FederationHistory:
    """The rounds, by the driver of the settings; Flower opens the clients in processes of its own."""
    model = made.model()
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def evaluate(params: Parameters) -> Mapping[str, float]:
        with torch.no_grad():
            for name in start:
                model.get_parameter(name).copy_(params[name])
        return made.evaluate(model)

    options: dict[str, Any] = {
        "clients_per_round": made.setup.clients_per_round,
        "seed": made.settings.base.seed,
        "evaluate": evaluate,
        "on_round": on_round,
        "folder": path / "server",
        "members": made.settings.members,
    }
    if made.settings.driver == "inline":
        return simulate(made.strategy(), pool, start, made.setup.rounds, **options)
    from equipoise.federated.flower import simulate_on_flower

    return simulate_on_flower(made.strategy(), maker, len(pool), start, made.setup.rounds, **options)


def _client_values(
    made: Federation, maker: ClientMaker, pool: ClientPool, history: FederationHistory, number: int
) -> dict[str, Any]:
    """What a client claims at its end, after which its key is gone; nothing if its ledger is broken."""
    values: dict[str, Any] = {"client": number, "population": made.population(number)}
    if made.settings.site_column is not None:
        values["site"] = made.settings.site_names()[number]
    if not maker.place(number).exists():  # never picked: nothing left it
        return {**values, "rounds": 0, "epsilon": 0.0, "guarantee": "proven", "statement": None}
    try:
        statement = asdict(pool[number].finish())
    except CLIENT_FAILURES:
        _log.exception("client %s has no statement and keeps its key", number)
        seen = sum(number in round_.answered for round_ in history.rounds)
        return {**values, "rounds": seen, "epsilon": None, "guarantee": "none", "statement": None}
    claims = {name: statement[name] for name in ("epsilon", "epsilon_claimed", "guarantee")}
    return {**values, "rounds": pool[number].rounds_done, **claims, "statement": statement}


def _values(made: Federation, history: FederationHistory, clients: list[dict[str, Any]]) -> dict[str, Any]:
    settings = made.settings
    public = made.setup.public or {}  # every client is sent them once
    public_bytes = size_in_bytes(public) * len({index for done in history.rounds for index in done.asked})
    statements = [one["statement"] for one in clients if one["statement"]]
    doubt = made.strategy().doubt([done.metrics for done in history.rounds])
    found = result_values(history, clients, statements)
    return {
        **found,
        "settings": settings.public(),
        "command": settings.command(),
        "summary": made.entry.summary,
        "schema": None if made.dataset.schema is None else dict(made.dataset.schema),
        "data_description": made.dataset.description,
        "test_records": len(made.dataset.test),
        "test_records_apart": settings.base.test_records_apart,
        "delta": settings.base.delta,
        "private": not settings.base.reproducible,
        "bytes_down": found["bytes_down"] + public_bytes,
        "bytes_public": public_bytes,
        "public_records": len(next(iter(public.values()), ())),
        "warnings": [] if doubt is None else [doubt],
        "clients": [{k: v for k, v in one.items() if k != "statement"} for one in clients],
    }


def result_values(
    history: FederationHistory, clients: Sequence[Mapping[str, Any]], statements: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What federation.json holds of rounds and statements, wherever the clients are."""
    last = history.rounds[-1].metrics
    return {
        "finished": time.strftime("%Y-%m-%d", time.gmtime()),
        "parameters": sum(value.numel() for value in history.params.values()),
        "rounds": [_round_values(done) for done in history.rounds],
        "accuracy": last.get("accuracy"),
        "evaluation": {name: last[name] for name in last if name in SCORES},
        **headline(clients),
        "relation": statements[0]["relation"] if statements else None,
        "bytes_up": sum(done.bytes_up for done in history.rounds),
        "bytes_down": sum(done.bytes_down for done in history.rounds),
        "assumptions": _shared_assumptions([one["assumptions"] for one in statements]),
    }


def _shared_assumptions(assumptions: Sequence[Sequence[str]]) -> list[str]:
    """What all clients' statements take as true, and how much else single ones do."""
    if not assumptions:
        return []
    common = [line for line in assumptions[0] if all(line in others for others in assumptions)]
    more = {line for lines in assumptions for line in lines} - set(common)
    own = [f"{len(more)} more, such as its population, stand in the statements of single clients"]
    return common + (own if more else [])


def _round_values(done: RoundReport) -> dict[str, Any]:
    """A row of federation.json."""
    return {
        "round": done.number,
        "asked": len(done.asked),
        "answered": len(done.answered),
        "absent": {str(index): reason for index, reason in done.absent.items()},
        **{name: float(value) for name, value in done.metrics.items()},
        **({"scores": {str(index): dict(one) for index, one in done.scores.items()}} if done.scores else {}),
        "bytes_up": done.bytes_up,
        "bytes_down": done.bytes_down,
    }


def _introduce(made: Federation, console: Console) -> list[str]:
    """Say what will be trained; what is doubtful about it is returned, too."""
    base, sizes = made.settings.base, [made.population(number) for number in range(len(made.parts))]
    spread = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    rounds = f"{made.setup.rounds} round{'s' * (made.setup.rounds != 1)}"
    steps = f"{made.setup.local_steps} step{'s' * (made.setup.local_steps != 1)}"
    console.print(
        f"[bold]{base.method}[/]: {made.setup.clients} clients with {spread} records of "
        f"[bold]{base.data_name}[/] each, {made.setup.clients_per_round} per round, "
        f"{rounds} of {steps}, budget per client "
        f"epsilon {plain(base.epsilon or 0.0)} at delta {plain(base.delta or 0.0)}"
    )
    if base.reproducible:
        console.print("[bold red]NOT PRIVATE[/]: --reproducible lets the noise follow the public seed.")
    assert base.batch_size is not None
    warnings = [population_warning(len(made.dataset.train), made.dataset.population, base.batch_size)]
    assert base.delta is not None
    warning = delta_warning(base.delta, max(1, min(sizes)))
    if warning is not None:
        at = "" if min(sizes) == max(sizes) else " The smallest client sets the measure."
        warnings.append(f"{warning}{at}")
    told = [warning for warning in warnings if warning is not None]
    for warning in told:
        console.print(f"[bold yellow]Warning[/]: {warning}")
    return told


@contextmanager
def _progress(made: Federation, console: Console) -> Iterator[Callable[[RoundReport], None]]:
    """Show a progress bar on a terminal, and print some rounds elsewhere."""
    from rich.progress import Progress

    rounds = made.setup.rounds
    every = max(1, rounds // 20)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("calibrating the noise", total=rounds)
        warned, strategy = False, made.strategy()

        def on_round(done: RoundReport) -> None:
            nonlocal warned
            doubt = None if warned else strategy.doubt([done.metrics])
            if doubt is not None:
                console.print(f"[bold yellow]Warning[/]: {doubt}")
                warned = True
            words = _round_words(done)
            bar.update(task, completed=done.number, description=words)
            if not console.is_terminal and (done.number % every == 0 or done.number in (1, rounds)):
                console.print(words, highlight=False)

        yield on_round


def _round_words(done: RoundReport) -> str:
    words = [f"round {done.number}"]
    first = next((name for name in SCORES if name in done.metrics), None)
    if first is not None:
        words.append(f"{score_name(first)} {score_in_words(first, done.metrics[first])}")
    if "radius" in done.metrics:
        words.append(f"radius {done.metrics['radius']:.4g}")
    words.append(f"{len(done.answered)} of {len(done.asked)} answered")
    words.append(f"{bytes_in_words(done.bytes_up)} up")
    return ", ".join(words)
