"""``equipoise audit``: attacks on a method, on a step of it with bugs and without, or on a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise._rounding import rounded_up
from equipoise.cli.audit_views import (
    show_method,
    show_shadow,
    show_steps,
    step_values,
)
from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.shared_options import DataDir, Json, RunDir, UsageError, chosen_folder

if TYPE_CHECKING:
    from equipoise.audit.method_audit import Audit

__all__ = ["audit"]


def audit(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A finished run that was trained with --canaries."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Audit a method of the table, by canaries in small trainings.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="With --method: its form, where it has several.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="With --method: further argument of it; repeatable.", metavar="NAME=VALUE"),
    ] = None,
    one_step: Annotated[
        bool,
        typer.Option(
            "--one-step", help="Audit steps on all records, clean and with bugs; of --method, or of all."
        ),
    ] = False,
    epsilon: Annotated[float, typer.Option(help="What the method's noise is calibrated to.")] = 2.0,
    delta: Annotated[float, typer.Option(help="Failure probability of the guarantee.")] = 1e-5,
    relation: Annotated[
        str, typer.Option(help="Of --method: add-or-remove-one or replace-one.")
    ] = "add-or-remove-one",
    hardened: Annotated[
        bool, typer.Option("--hardened", help="With --method: exact noise on a grid of integers.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="Number of audits, each with a seed of its own.")] = 1,
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
    """Certify a lower bound on epsilon beside the claimed upper one.

    Exit code 1: a claim is refuted, or --one-step misses a bug that it put in.
    """
    asked = [name for name, given in (
        ("RUN", run is not None or (run_dir is not None and not shadow)),
        ("--method", method is not None), ("--one-step", one_step and method is None),
        ("--shadow", shadow),
    ) if given]  # fmt: skip
    if len(asked) != 1:
        raise UsageError(
            "audit takes one of RUN, --method, --one-step and --shadow, and got "
            f"{' and '.join(asked) or 'none of them'}."
        )
    relation = relation.replace("_", "-")
    if relation not in ("add-or-remove-one", "replace-one"):
        raise UsageError(f"--relation is {relation!r}, but it must be add-or-remove-one or replace-one.")
    if method is None and (hardened or relation != "add-or-remove-one" or variant or option):
        raise UsageError("--relation, --hardened, --variant and --option are of --method alone.")
    if one_step and (hardened or seeds != 1):
        raise UsageError("--one-step has one seed, and looks at noise in floating point.")
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
    if method is not None or one_step:
        options = _options(method, variant, option)
        relation = relation.replace("-", "_")
        if one_step:
            fine = _show_steps(method, options, epsilon, delta, relation, confidence, json_output)
        else:
            assert method is not None
            found = _audit_method(method, options, epsilon, delta, relation, hardened, seeds, confidence)
            show_method(found, json_output)
            fine = found.holds
    elif shadow:
        show_shadow(_audit_shadow(data, data_dir, epsilon, delta, models, run_dir), json_output)
        fine = True
    else:
        fine = _show_run(chosen_folder(run, run_dir), confidence, data_dir, json_output)
    if not fine:
        raise typer.Exit(1)


def _options(method: str | None, variant: str | None, option: list[str] | None) -> dict[str, Any]:
    """Arguments of the method, in the words of `equipoise train`."""
    from equipoise.app.settings import parse_option
    from equipoise.app.shared_budget import check_options, find_class, read_clip_norm
    from equipoise.audit.designs import AUDITS

    if method is None:
        return {}
    if method not in AUDITS:
        raise UsageError(f"--method is {method!r}, but it must be one of {', '.join(AUDITS)}.")
    words = {**({"variant": variant} if variant else {}), **dict(map(parse_option, option or []))}
    options = check_options(method, find_class(method, None), words)
    if isinstance(options.get("clip_norm"), str):
        options["clip_norm"] = read_clip_norm(options["clip_norm"])
    return options


def _audit_method(
    name: str,
    options: dict[str, Any],
    epsilon: float,
    delta: float,
    relation: str,
    hardened: bool,
    seeds: int,
    confidence: float,
) -> Audit:
    from equipoise.audit.method_audit import audit_method
    from equipoise.privacy import LedgerError

    with open_console(True).status(f"training canaries with {name}"):
        try:
            return audit_method(
                name,
                epsilon,
                delta,
                options=options,
                relation=relation,
                hardened=hardened,
                seeds=range(seeds),
                confidence=confidence,
            )
        except LedgerError as error:
            raise UsageError(f"{name} cannot be audited with --hardened: {error}.") from error


def _show_steps(
    method: str | None,
    options: dict[str, Any],
    epsilon: float,
    delta: float,
    relation: str,
    confidence: float,
    as_json: bool,
) -> bool:
    """A step of one method or of all, clean and with bugs; whether all is as it should be."""
    from equipoise.audit.designs import ONE_STEP
    from equipoise.audit.one_step import probe_method

    names = list(ONE_STEP) if method is None else [method]
    share = 1 - (1 - confidence) / len(names)
    rows = []
    for name in names:
        with open_console(True).status(f"a step of {name}, clean and with bugs"):
            rows.append(
                probe_method(name, epsilon, delta, options=options, relation=relation, confidence=share)
            )
    fine = all(row.holds and row.finds for row in rows)
    if as_json:
        emit({"confidence": confidence, "delta": delta, "one_step": [step_values(row) for row in rows]})
        return fine
    show_steps(rows)
    return fine


def _audit_shadow(
    data: str, data_dir: str | None, epsilon: float, delta: float, models: int, run_dir: str | None
) -> dict[str, Any]:
    from equipoise.app.audit_shadow import audit_shadow
    from equipoise.app.settings import Settings

    settings = Settings(data=data, data_dir=data_dir, epsilon=epsilon, delta=delta)
    with open_console(True).status("training shadow models") as status:
        return audit_shadow(
            settings, models, run_dir, lambda done, of: status.update(f"shadow model {done} of {of}")
        )


def _show_run(folder: str, confidence: float, data_dir: str | None, as_json: bool) -> bool:
    with loading():
        from equipoise.app.audit_run import audit_run

    with open_console(True).status("guessing the canaries"):
        found = audit_run(folder, confidence, data_dir)
    claimed = found["claimed_epsilon"]
    fine = claimed is None or all(attack["epsilon"] <= claimed for attack in found["attacks"].values())
    if as_json:
        emit(found)
        return fine
    console = open_console(False)
    claims = "nothing" if claimed is None else f"epsilon {rounded_up(claimed)}"
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
    if not fine:
        console.print("[bold red]the claim is refuted[/]")
    console.print(found["figure"], markup=False, soft_wrap=True)
    return fine
