"""What `equipoise audit` says: the screen and the plain values of its answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from equipoise._rounding import plain, rounded_up
from equipoise.cli.screen import emit, open_console

if TYPE_CHECKING:
    from equipoise.audit.bounds import Certificate
    from equipoise.audit.neighbours import NeighbourAudit, NeighbourPair
    from equipoise.privacy import Unit
    from equipoise.testing.method_audit import Audit

__all__ = [
    "certificate_values",
    "show_method",
    "show_neighbours",
    "show_run",
]


def show_method(found: Audit, as_json: bool) -> bool:
    """Show an audit of a method; gives whether its claim holds."""
    if as_json:
        emit(
            {
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
        )
        return found.holds
    console = open_console(False)
    claimed = "nothing" if found.claimed is None else f"epsilon at most [bold]{rounded_up(found.claimed)}[/]"
    console.print(
        f"[bold]{found.method}[/] claims {claimed} at delta {plain(found.delta)} "
        f"({found.relation.replace('_', ' ')}{_of_users(found.unit)})"
    )
    if not found.within_request:
        console.print(f"  [bold red]more than the {found.requested:g} that it was asked for[/]")
    for seed, c in enumerate(found.certificates):
        console.print(
            f"  seed {seed}: epsilon at least [bold]{c.epsilon:.3f}[/] is certified "
            f"[dim]({c.true_positives:,} of {c.runs[1]:,} seen, {c.false_positives:,} of {c.runs[0]:,} "
            "falsely)[/]"
        )
    verdict = "[green]no contradiction[/]" if found.holds else "[bold red]the claim is refuted[/]"
    console.print(f"{verdict}; all of it with confidence {found.confidence:g}")
    console.print(_meaning(found), soft_wrap=True)
    return found.holds


def _of_users(unit: Unit) -> str:
    return "" if unit.name == "record" else f"; users of {unit.records} records each"


def _meaning(found: Audit) -> str:
    """What a lower bound tells the reader, and what it does not."""
    certified = max((c.epsilon for c in found.certificates), default=0.0)
    bound = f"the true epsilon at delta {plain(found.delta)} is at least {certified:.3f}"
    if not found.within_request:
        return "In plain words: the plan does not keep to the epsilon that was asked for."
    if not found.holds:
        return f"In plain words: {bound}, more than is claimed, so the claim is wrong."
    return (
        f"In plain words: {bound}, whatever anybody claims; that this attack found no more proves no "
        "privacy: only the proof bounds epsilon from above."
    )


CHANGES_IN_WORDS = {
    "add": "added",
    "remove": "removed",
    "replace": "replaced",
    "silent": "added, without its own part",
}


def show_neighbours(found: NeighbourAudit, as_json: bool) -> bool:
    """Show how far one record moved the sums; gives whether none moved too far."""
    if as_json:
        emit(found.to_json())
        return found.holds
    from rich.table import Table

    console = open_console(False)
    tried = sorted({pair.threads for pair in found.pairs})
    console.print(
        f"[bold]{found.method}[/], {found.records:,} records, micro-batches of {found.micro_batch_size}, "
        f"{found.steps} step{'s' * (found.steps > 1)}, {' and '.join(map(str, tried))} "
        f"thread{'s' * (tried[-1] > 1)}; random numbers: {'yes' if found.draws_numbers else 'no'}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in (f"one {found.unit}", "tried", "sum moved by", "allowed", "epsilon", "allowed", ""):
        table.add_column(title, justify="left" if title in (f"one {found.unit}", "") else "right")
    for change, words in CHANGES_IN_WORDS.items():
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
    console.print(table)
    for reason in dict.fromkeys(found.left_out.values()):
        words = "; ".join(CHANGES_IN_WORDS[change] for change, why in found.left_out.items() if why == reason)
        console.print(f"Not tried: {words}. The reason: {reason}.", soft_wrap=True)
    console.print(_verdict(found), soft_wrap=True)
    return found.holds


def _verdict(found: NeighbourAudit) -> str:
    """What the movements tell the reader, and what they do not."""
    units = (
        "Movements are in units of the bound that the noise is made for. Epsilon is of these steps at delta "
        f"{plain(found.delta)}, for a {found.unit} that is in all their draws; the whole training claims "
        f"{rounded_up(found.plan_epsilon)}."
    )
    if found.holds:
        return (
            f"[green]no sum moved farther than it may[/]\nIn plain words: one {found.unit} moved the sums as "
            "far as the proof says, and nothing else moved by more than rounding. This was tried on these "
            f"records and proves nothing about others. {units}"
        )
    worst = found.worst
    return (
        f"[bold red]{_place(worst)} moved a sum by {worst.movement:.4g}[/]\n"
        "In plain words: the guarantee does not hold for this model and these data. Other records changed "
        "with that one: look for what joins the records of a batch (statistics over the batch, padding to "
        f"its longest record, state that is kept between batches). {units}"
    )


def _place(pair: NeighbourPair) -> str:
    scaled = "" if pair.scale == 1 else f" (the entering one's numbers times {pair.scale:g})"
    words = f"one record {CHANGES_IN_WORDS[pair.change]}{scaled}"
    return f"{words}, at place {pair.position} with {pair.threads} thread(s),"


def show_run(found: dict[str, Any], as_json: bool) -> bool:
    """Show what the canaries of a run prove; gives whether its claim holds."""
    claimed = found["claimed_epsilon"]
    fine = claimed is None or all(attack["epsilon"] <= claimed for attack in found["attacks"].values())
    if as_json:
        emit(found)
        return fine
    console = open_console(False)
    claims = "nothing" if claimed is None else f"epsilon {rounded_up(claimed)}"
    console.print(
        f"{found['run_dir']} claims [bold]{claims}[/] at delta {plain(found['delta'])}; {found['canaries']} "
        "canaries",
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


def certificate_values(found: Certificate) -> dict[str, Any]:
    """A certificate as plain values; numbers that are not finite become None."""
    from dataclasses import asdict

    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(found).items()
    }
