"""``equipoise audit``: attacks on a method, on a published claim, on planted bugs, or on a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.words import DataDir, Json, RunDir, UsageError, chosen_folder

if TYPE_CHECKING:
    from equipoise.audit.attacks import Finding
    from equipoise.audit.bounds import Certificate
    from equipoise.audit.mechanism import Audit
    from equipoise.audit.planted import Planted

__all__ = ["audit"]


def audit(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A finished run that was trained with --canaries."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Audit a method of the table, by canaries in small trainings.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="What the method's noise is calibrated to.")] = 2.0,
    delta: Annotated[float, typer.Option(help="Failure probability of the guarantee.")] = 1e-5,
    relation: Annotated[
        str, typer.Option(help="Of --method: add-or-remove-one or replace-one.")
    ] = "add-or-remove-one",
    hardened: Annotated[
        bool, typer.Option("--hardened", help="With --method: exact noise on a grid of integers.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="Number of audits, each with a seed of its own.")] = 1,
    attack: Annotated[
        str | None, typer.Option(help="Attack a published claim: a method's name, or all.")
    ] = None,
    planted: Annotated[bool, typer.Option("--planted", help="Look for bugs planted on purpose.")] = False,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Guess members with shadow models, with privacy and without.")
    ] = False,
    data: Annotated[str, typer.Option(help="Data set of the shadow models.")] = "digits",
    models: Annotated[int, typer.Option(help="Number of shadow models of either kind.")] = 32,
    confidence: Annotated[
        float, typer.Option(help="Over all seeds together; of each attack on a run.")
    ] = 0.99,
    data_dir: DataDir = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Certify a lower bound on epsilon beside the claimed upper one."""
    asked = [name for name, given in (
        ("RUN", run is not None or (run_dir is not None and not shadow)), ("--method", method is not None),
        ("--attack", attack is not None), ("--planted", planted), ("--shadow", shadow),
    ) if given]  # fmt: skip
    if len(asked) != 1:
        raise UsageError(
            "audit takes one of RUN, --method, --attack, --planted and --shadow, and got "
            f"{' and '.join(asked) or 'none of them'}."
        )
    relation = relation.replace("_", "-")
    if relation not in ("add-or-remove-one", "replace-one"):
        raise UsageError(f"--relation is {relation!r}, but it must be add-or-remove-one or replace-one.")
    if method is None and (hardened or relation != "add-or-remove-one"):
        raise UsageError("--relation and --hardened are of --method alone.")
    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence is {confidence}, but it lies between 0.5 and 1.")
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}, but at least one audit is needed.")
    if shadow and ":" in data:
        raise UsageError(f"--data is {data!r}, but shadow models take one of the named data sets.")
    if shadow and models < 4:
        raise UsageError(f"--models is {models}, but 4 shadow models are the fewest that can be compared.")
    with loading():
        import warnings

        from equipoise.privacy import Budget

        Budget(epsilon, delta)
    quiet()
    warnings.filterwarnings("ignore", category=UserWarning, module="equipoise.methods")
    if method is not None:
        found = _audit_method(method, epsilon, delta, relation.replace("-", "_"), hardened, seeds, confidence)
        _show_method(found, json_output)
    elif attack is not None:
        _show_attacks(_attacks(attack), json_output)
    elif planted:
        _show_planted(json_output)
    elif shadow:
        _show_shadow(_audit_shadow(data, data_dir, epsilon, delta, models, run_dir), json_output)
    else:
        _show_run(chosen_folder(run, run_dir), confidence, data_dir, json_output)


def _audit_method(
    name: str, epsilon: float, delta: float, relation: str, hardened: bool, seeds: int, confidence: float
) -> Audit:
    from equipoise.audit.mechanism import AUDITS, audit_method
    from equipoise.privacy import LedgerError

    if name not in AUDITS:
        raise UsageError(f"--method is {name!r}, but it must be one of {', '.join(AUDITS)}.")
    with open_console(True).status(f"training canaries with {name}"):
        try:
            return audit_method(
                name,
                epsilon,
                delta,
                relation=relation,
                hardened=hardened,
                seeds=range(seeds),
                confidence=confidence,
            )
        except LedgerError as error:
            raise UsageError(f"{name} cannot be audited with --hardened: {error}.") from error


def _attacks(name: str) -> list[Finding]:
    from equipoise.audit.attacks import ATTACKS

    if name != "all" and name not in ATTACKS:
        raise UsageError(f"--attack is {name!r}, but it must be all or one of {', '.join(ATTACKS)}.")
    found = []
    for chosen in ATTACKS if name == "all" else [name]:
        with open_console(True).status(f"attacking {chosen} as published"):
            found.append(ATTACKS[chosen]())
    return found


def _audit_shadow(
    data: str, data_dir: str | None, epsilon: float, delta: float, models: int, run_dir: str | None
) -> dict[str, Any]:
    from equipoise.experiments.settings import Settings
    from equipoise.experiments.shadow_run import audit_shadow

    settings = Settings(data=data, data_dir=data_dir, epsilon=epsilon, delta=delta)
    with open_console(True).status("training shadow models") as status:
        return audit_shadow(
            settings, models, run_dir, lambda done, of: status.update(f"shadow model {done} of {of}")
        )


def _show_method(found: Audit, as_json: bool) -> None:
    if as_json:
        emit(
            {
                "method": found.method,
                "relation": found.relation,
                "requested_epsilon": found.requested,
                "claimed_epsilon": found.claimed,
                "certified_epsilon": found.certified,
                "delta": found.delta,
                "confidence": found.confidence,
                "holds": found.holds,
                "certificates": [_plain(c) for c in found.certificates],
            }
        )
        return
    console = open_console(False)
    claimed = "nothing" if found.claimed is None else f"epsilon at most [bold]{found.claimed:.4g}[/]"
    console.print(
        f"[bold]{found.method}[/] claims {claimed} at delta {found.delta:g} "
        f"({found.relation.replace('_', ' ')})"
    )
    if not found.within_request:
        console.print(f"  [bold red]more than the {found.requested:g} that it was asked for[/]")
    for seed, c in enumerate(found.certificates):
        console.print(
            f"  seed {seed}: epsilon at least [bold]{c.epsilon:.3f}[/] is certified "
            f"[dim]({c.true_positives:,} of {c.runs[1]:,} seen, {c.false_positives:,} of {c.runs[0]:,} "
            f"falsely; a Gaussian of these rates has {c.gaussian_epsilon or 0:.3f})[/]"
        )
    verdict = "[green]no contradiction[/]" if found.holds else "[bold red]the claim is refuted[/]"
    console.print(f"{verdict}; all of it with confidence {found.confidence:g}")
    console.print(_meaning(found), soft_wrap=True)


def _meaning(found: Audit) -> str:
    """What a lower bound tells the reader, and what it does not."""
    certified = max((c.epsilon for c in found.certificates), default=0.0)
    bound = f"the true epsilon at delta {found.delta:g} is at least {certified:.3f}"
    if not found.within_request:
        return "In plain words: the plan does not keep to the epsilon that was asked for."
    if not found.holds:
        return f"In plain words: {bound}, more than is claimed, so the claim is wrong."
    return (
        f"In plain words: {bound}, whatever anybody claims; that this attack found no more proves no "
        "privacy: only the proof bounds epsilon from above."
    )


def _show_attacks(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        emit({"attacks": [_finding(found) for found in findings]})
        return
    console = open_console(False)
    for found in findings:
        certified = (
            "no epsilon at all" if found.unbounded else f"epsilon at least {found.certificate.epsilon:.4g}"
        )
        console.print(f"[bold]{found.name}[/] as published: {found.target}")
        console.print(
            f"  claimed epsilon {found.claimed:g}, certified: [bold]{certified}[/] at delta "
            f"{found.certificate.delta:g}, confidence {found.certificate.confidence:g} "
            f"({'the claim fails' if found.succeeds else 'the claim stands'})"
        )
        for name, value in found.details.items():
            console.print(f"  [dim]{name.replace('_', ' ')}: {value:.4g}[/]")


def _show_planted(as_json: bool) -> None:
    from equipoise.audit.planted import find_planted

    with open_console(True).status("planting bugs and looking for them"):
        rows = find_planted()
    if as_json:
        emit({"planted": [_row(row) for row in rows]})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("planted bug", "check", "clean", "with the bug", "limit", ""):
        table.add_column(name, justify="left" if name in ("planted bug", "check", "") else "right")
    for row in rows:
        table.add_row(
            row.bug,
            row.clean.name,
            f"{row.clean.statistic:.2f}",
            f"{row.planted.statistic:,.1f}",
            f"{row.clean.limit:g}",
            "found" if row.found else "[bold red]MISSED[/]",
        )
    open_console(False).print(table)


def _show_shadow(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(found)
        return
    from rich.table import Table

    console = open_console(False)
    console.print(
        f"{found['models']} models of either kind ({found['model']}), each on half of {found['records']:,} "
        f"records of [bold]{found['data']}[/]"
    )
    levels = list(found["allowed"])
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "area under the curve", *(f"seen at {float(level):.1%} falsely" for level in levels)):
        table.add_column(name, justify="right" if name else "left")
    for name, training in found["trainings"].items():
        seen = (f"{training['true_positives'][level]:.2%}" for level in levels)
        table.add_row(name, f"{training['area_under_curve']:.3f}", *seen)
    epsilon = found["trainings"]["private"]["epsilon"]
    allowed = (f"{found['allowed'][level]:.2%}" for level in levels)
    table.add_row(f"allowed by epsilon {epsilon:.4g}", "", *allowed)
    console.print(table)
    console.print(found["figure"], markup=False, soft_wrap=True)


def _show_run(folder: str, confidence: float, data_dir: str | None, as_json: bool) -> None:
    with loading():
        from equipoise.experiments.audit_run import audit_run

    with open_console(True).status("guessing the canaries"):
        found = audit_run(folder, confidence, data_dir)
    if as_json:
        emit(found)
        return
    console = open_console(False)
    claims = "nothing" if found["claimed_epsilon"] is None else f"epsilon {found['claimed_epsilon']:.4g}"
    console.print(
        f"{folder} claims [bold]{claims}[/] at delta {found['delta']:g}; {found['canaries']} canaries",
        soft_wrap=True,
    )
    for name, attack in found["attacks"].items():
        console.print(
            f"  {name}: epsilon at least [bold]{attack['epsilon']:.3f}[/] is certified "
            f"[dim]({attack['correct']} of {attack['guesses']} guesses right, area under the curve "
            f"{attack['auc']:.3f}, confidence {attack['confidence']:g})[/]"
        )
    console.print(found["figure"], markup=False, soft_wrap=True)


def _row(row: Planted) -> dict[str, Any]:
    return {
        "bug": row.bug,
        "check": row.clean.name,
        "clean": row.clean.statistic,
        "planted": row.planted.statistic,
        "limit": row.clean.limit,
        "found": row.found,
    }


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "name": found.name,
        "target": found.target,
        "claimed_epsilon": found.claimed,
        "certified_epsilon": None if found.unbounded else found.certificate.epsilon,
        "unbounded": found.unbounded,
        "succeeds": found.succeeds,
        "certificate": _plain(found.certificate),
        "details": found.details,
    }


def _plain(found: Certificate) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(found).items()
    }
