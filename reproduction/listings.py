"""What the terminal shows of experiments, findings, attacks and planted bugs, as rich renderables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from equipoise._rounding import significant

if TYPE_CHECKING:
    from rich.console import RenderableType

    from reproduction.attacks import Finding
    from reproduction.findings import Findings, Verdict
    from reproduction.planted_bugs import Planted

__all__ = ["attacks_listing", "bugs_table", "experiments_listing", "findings_tables"]


def experiments_listing(experiments: Mapping[str, str]) -> RenderableType:
    """Name and title of every experiment."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2), expand=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, title in experiments.items():
        grid.add_row(Text(name, style="bold"), Text(title))
    return grid


def findings_tables(findings: Findings) -> RenderableType:
    """The table of an experiment and its verdicts, met and missed alike.

    Args:
        findings: what an experiment found.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    numbers = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(findings.table.columns):
        cells = [row[number] for row in findings.table.rows]
        words = any(isinstance(cell, str) for cell in cells)
        numbers.add_column(str(column), justify="left" if words else "right", overflow="fold")
    for row in findings.table.rows:
        numbers.add_row(*(_cell(cell) for cell in row))
    parts: list[RenderableType] = [numbers]
    if findings.table.note:
        parts.append(Text(findings.table.note, style="dim"))
    if findings.verdicts:
        verdicts = Table.grid(padding=(0, 2))
        verdicts.add_column(no_wrap=True)
        verdicts.add_column(overflow="fold")
        verdicts.add_column(justify="right", no_wrap=True)
        verdicts.add_column(style="dim", no_wrap=True)
        for verdict in findings.verdicts:
            mark = Text("met", style="green") if verdict.met else Text("MISSED", style="bold red")
            verdicts.add_row(mark, verdict.sentence, significant(verdict.value), _bars(verdict))
        parts += [Text(), verdicts]
    return Group(*parts)


def _bars(verdict: Verdict) -> str:
    if not math.isfinite(verdict.high):
        return f"at least {significant(verdict.low)}"
    if not math.isfinite(verdict.low):
        return f"at most {significant(verdict.high)}"
    return f"{significant(verdict.low)} to {significant(verdict.high)}"


def _cell(value: str | float | int | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else significant(value)


def attacks_listing(found: Sequence[Finding]) -> RenderableType:
    """What each attack certifies against the claim that it attacks."""
    from rich.console import Group

    lines: list[RenderableType] = []
    for attack in found:
        certificate = attack.certificate
        certified = "no epsilon at all" if attack.unbounded else f"epsilon at least {certificate.epsilon:.4g}"
        lines.append(f"[bold]{attack.name}[/] as published: {attack.target}")
        lines.append(
            f"  claimed epsilon {attack.claimed:g}, certified: [bold]{certified}[/] at delta "
            f"{certificate.delta:g}, confidence {certificate.confidence:g} "
            f"({'the claim fails' if attack.succeeds else 'the claim stands'})"
        )
        for name, value in attack.details.items():
            lines.append(f"  [dim]{name.replace('_', ' ')}: {value:.4g}[/]")
    return Group(*lines)


def bugs_table(rows: Sequence[Planted]) -> RenderableType:
    """The statistic of each check on a clean step and on one with the bug."""
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
    return table
