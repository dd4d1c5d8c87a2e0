"""``equipoise audit``: attacks on a run, on its steps, or on a method."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from click.core import ParameterSource

from equipoise._rounding import plain, rounded_up
from equipoise.app.option_checks import flag
from equipoise.app.run_checks import check_own_code, settings_of_run
from equipoise.app.settings import OF_OWN_DATA, RunSettings
from equipoise.cli.screen import answer, loading, open_console
from equipoise.cli.settings_options import settings_options
from equipoise.cli.shared_options import (
    DataDir,
    Json,
    OwnData,
    OwnLoss,
    OwnModel,
    RunArgument,
    RunDir,
    UsageError,
    chosen_folder,
)
from equipoise.methods.registry import find

if TYPE_CHECKING:
    from equipoise.audit.bounds import Certificate
    from equipoise.audit.neighbours import NeighbourAudit
    from equipoise.testing.method_audit import Audit

audit = typer.Typer(
    name="audit",
    help="Certify a lower bound on epsilon next to the claimed upper one, or see what one record moves. Exit "
    "code 1: a claim is refuted, or a sum moved too far.",
    no_args_is_help=True,
)

CLAIM: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}
"""What is audited where no run says it."""

Confidence = Annotated[float, typer.Option(min=0.5, max=0.9999, help="Of the certificates together.")]
Several = Annotated[int, typer.Option(min=1, help="Number of audits, each with a seed of its own.")]

REFUTED = "[bold red]the claim is refuted[/]"


@audit.command(epilog="equipoise audit run runs/NAME")
def run(
    run: RunArgument = None,
    confidence: Confidence = 0.99,
    data: OwnData = None,
    model: OwnModel = None,
    loss: OwnLoss = None,
    data_dir: DataDir = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Guess which canaries a finished run was trained with (equipoise train --canaries)."""
    folder = chosen_folder(run, run_dir)
    settings = _of_run(folder, data_dir, data=data, model=model, loss=loss)
    with loading():
        from equipoise.app.audits.finished_run import audit_run
    with open_console(True).status("guessing the canaries"):
        found = audit_run(folder, settings, confidence)
    claimed = found["claimed_epsilon"]
    holds = claimed is None or all(attack["epsilon"] <= claimed for attack in found["attacks"].values())
    claims = "nothing" if claimed is None else f"epsilon {rounded_up(claimed)}"
    lines = [
        f"{folder} claims [bold]{claims}[/] at delta {plain(found['delta'])}; {found['canaries']} canaries"
    ]
    for name, attack in found["attacks"].items():
        lines.append(
            f"  {name}: epsilon at least [bold]{attack['epsilon']:.3f}[/] is certified "
            f"[dim]({attack['correct']} of {attack['guesses']} guesses right, area under the curve "
            f"{attack['auc']:.3f}, confidence {attack['confidence']:g})[/]"
        )
    _end(found, [*lines, "" if holds else REFUTED, found["figure"]], holds, json_output)


@audit.command(epilog="equipoise audit neighbours --data digits --positions 3")
@settings_options(
    RunSettings,
    "data", "data_dir", "model", "method", "variant", "options", "epsilon", "delta", "relation", "hardened",
    *OF_OWN_DATA,
    parameter="base",
    defaults=CLAIM,
    helps={
        "data": "Data set, as of train; or the run's own function, named again.",
        "model": "Model, as of train; or the run's own function, named again.",
        "loss": "Loss, as of train; or the run's own function, named again.",
        "epsilon": "What the method's noise is calibrated to.",
    },
)  # fmt: skip
def neighbours(
    base: RunSettings,
    run: RunArgument = None,
    positions: Annotated[int, typer.Option(min=1, help="How many records are tried.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Steps on each pair of data sets.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Try so many threads, too.")] = 1,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Take steps with one record more, less or replaced, and see what moves; of RUN, or of --data."""
    if run is None and run_dir is None:
        base.check()
    else:
        context = click.get_current_context()
        given = [n for n in vars(base) if context.get_parameter_source(n) is ParameterSource.COMMANDLINE]
        if extra := [flag(name) for name in given if name not in ("data", "model", "loss", "data_dir")]:
            raise UsageError(f"leave {' and '.join(extra)} out: data, method and settings come from the run.")
        data = base.data if "data" in given else None
        own = {"data": data, "model": base.model, "loss": base.loss}
        base = _of_run(chosen_folder(run, run_dir), base.data_dir, **own)
    with loading():
        from equipoise.app.audits.finished_run import neighbours_of
    _quieten()
    with open_console(True).status("taking steps with one record more, less or replaced"):
        found = neighbours_of(base, positions, steps, (1,) if threads == 1 else (1, threads))
    _end(found.to_json(), _moved(found), found.holds, json_output)


CHANGES = {
    "add": "added",
    "remove": "removed",
    "replace": "replaced",
    "silent": "added, without its own part",
}


def _moved(found: NeighbourAudit) -> list[Any]:
    """How far one record moved the sums, and what that tells the reader."""
    from rich.table import Table

    tried = sorted({pair.threads for pair in found.pairs})
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in (f"one {found.unit}", "tried", "sum moved by", "allowed", "epsilon", "allowed", ""):
        table.add_column(title, justify="left" if title in (f"one {found.unit}", "") else "right")
    for change, words in CHANGES.items():
        pair = found.worst_of(change)
        if pair is None:
            table.add_row(words, "-")
            continue
        silent = change == "silent"
        table.add_row(
            words,
            str(sum(one.change == change for one in found.pairs)),
            f"{pair.movement:.1e}" if silent else f"{pair.movement:.4f}",
            "0" if silent else "1",
            rounded_up(pair.epsilon),
            "" if silent else rounded_up(pair.claimed),
            "" if pair.holds else "[bold red]TOO FAR[/]",
        )
    worst = found.worst
    verdict = (
        f"[green]no sum moved farther than it may[/]\nIn plain words: one {found.unit} moved the sums as far "
        "as the proof says, and nothing else moved by more than rounding. This was tried on these records "
        "and proves nothing about others."
        if found.holds
        else f"[bold red]one record {CHANGES[worst.change]}, its numbers times {worst.scale:g}, at place "
        f"{worst.position} with {worst.threads} thread(s), moved a sum by {worst.movement:.4g}[/]\n"
        "In plain words: the guarantee does not hold for this model and these data. Other records changed "
        "with that one: look for what joins the records of a batch (statistics over the batch, padding to "
        "its longest record, state that is kept between batches)."
    )
    return [
        f"[bold]{found.method}[/], {found.records:,} records, micro-batches of {found.micro_batch_size}, "
        f"{found.steps} step(s), {' and '.join(map(str, tried))} thread(s); random numbers: "
        f"{'yes' if found.draws_numbers else 'no'}",
        table,
        *(f"Not tried: {CHANGES[change]}. The reason: {why}." for change, why in found.left_out.items()),
        f"{verdict} Movements are in units of the bound that the noise is made for. Epsilon is of these "
        f"steps at delta {plain(found.delta)}, for a {found.unit} that is in all their draws; the whole "
        f"training claims {rounded_up(found.plan_epsilon)}.",
    ]


@audit.command(epilog="equipoise audit method dp-sgd --epsilon 2")
@settings_options(
    RunSettings,
    "variant", "options", "epsilon", "delta", "relation", "unit", "records_per_user", "user_rows", "hardened",
    parameter="base",
    defaults=CLAIM,
    helps={"epsilon": "What the method's noise is calibrated to."},
)  # fmt: skip
def method(
    base: RunSettings,
    name: Annotated[str, typer.Argument(metavar="METHOD", help="A name that `equipoise methods` lists.")],
    one_step: Annotated[
        bool, typer.Option("--one-step", help="Steps on all records: the bound comes close to the claim.")
    ] = False,
    seeds: Several = 1,
    confidence: Confidence = 0.99,
    json_output: Json = False,
) -> None:
    """Train canaries with a method, and certify what its releases give away."""
    if (base.unit == "user") != (base.records_per_user is not None) or (base.user_rows and not base.unit):
        raise UsageError(
            "--unit user and --records-per-user, how many records a user has, need each other; --user-rows "
            "belongs to them."
        )
    with loading():
        from equipoise.app.method_settings import check_options, option_names, read_clip_norm
        from equipoise.privacy import LedgerError, Unit
        from equipoise.testing import method_audit
        from equipoise.testing.designs import AUDITS
    _quieten()
    if name not in AUDITS:
        raise UsageError(f"METHOD is {name!r}, but it must be one of {', '.join(AUDITS)}.")
    words = ({"variant": base.variant} if base.variant else {}) | base.options
    options = check_options(name, option_names(find(name)), words)
    if isinstance(options.get("clip_norm"), str):
        options["clip_norm"] = read_clip_norm(options["clip_norm"])
    with open_console(True).status(f"training canaries with {name}"):
        try:
            found = method_audit.audit_method(
                name,
                base.epsilon or CLAIM["epsilon"],
                base.delta or CLAIM["delta"],
                one_step=one_step,
                options=options,
                relation=base.neighbours(),
                hardened=base.hardened,
                seeds=range(seeds),
                confidence=confidence,
                unit=Unit(base.unit or "record", base.records_per_user or 1, base.user_rows),
            )
        except LedgerError as error:
            raise UsageError(f"{name} cannot be audited with --hardened: {error}.") from error
    values = {
        "method": found.method,
        "relation": found.relation,
        "unit": found.unit.name,
        "users": found.unit.describe(),
        "requested_epsilon": found.requested,
        "claimed_epsilon": found.claimed,
        "certified_epsilon": found.certified,
        "delta": found.delta,
        "confidence": found.confidence,
        "holds": found.holds,
        "certificates": [certificate_values(c) for c in found.certificates],
    }
    _end(values, _certified(found), found.holds, json_output)


def _certified(found: Audit) -> list[str]:
    """What was certified of a method, and what a lower bound tells the reader."""
    claimed = "nothing" if found.claimed is None else f"epsilon at most [bold]{rounded_up(found.claimed)}[/]"
    users = "" if found.unit.name == "record" else f"; users of {found.unit.records} records each"
    delta = plain(found.delta)
    lines = [
        f"[bold]{found.method}[/] claims {claimed} at delta {delta} ({found.relation.replace('_', ' ')}"
        f"{users})"
    ]
    for seed, c in enumerate(found.certificates):
        lines.append(
            f"  seed {seed}: epsilon at least [bold]{c.epsilon:.3f}[/] is certified "
            f"[dim]({c.true_positives:,} of {c.runs[1]:,} seen, {c.false_positives:,} of {c.runs[0]:,} "
            "falsely)[/]"
        )
    # Of a plan's whole trade-off the scale of its noise is certified, and epsilon at delta follows from it.
    what = f"the true epsilon at delta {delta} is at least {found.certified:.3f}"
    if any(c.law == "plan" for c in found.certificates):
        what = f"the releases tell what this plan tells at epsilon {found.certified:.3f} (delta {delta})"
    verdict = "[green]no contradiction[/]" if found.holds else REFUTED
    rest = (
        "whatever anybody claims; that this attack found no more proves no privacy: only the proof bounds "
        "epsilon from above."
        if found.holds
        else f"and {found.requested:g} was asked for: the claim or the plan is wrong."
    )
    return [
        *lines,
        f"{verdict}; all of it with confidence {found.confidence:g}",
        f"In plain words: {what}, {rest}",
    ]


def certificate_values(found: Certificate) -> dict[str, Any]:
    """A certificate as plain values; numbers that are not finite become None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(found).items()
    }


def _of_run(folder: str, data_dir: str | None, **named: str | None) -> RunSettings:
    """The settings of a run, whose own code the user has named again."""
    settings = settings_of_run(folder)
    check_own_code(folder, settings, **named)
    return replace(settings, data_dir=data_dir or settings.data_dir)


def _quieten() -> None:
    """A method warns of settings that are chosen badly: those of an audit are chosen to be hard."""
    warnings.filterwarnings("ignore", category=UserWarning, module="equipoise.methods")


def _end(values: dict[str, Any], lines: list[Any], holds: bool, as_json: bool) -> None:
    """Show what was found; exit code 1 where a claim does not hold."""
    answer(values, as_json, *lines)
    if not holds:
        raise typer.Exit(1)
