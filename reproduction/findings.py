"""What an experiment found: a table, curves with their spread, and verdicts against bars set beforehand.

A verdict that was missed is a finding like any other: it is printed, written and drawn with the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reproduction.figures import Curve, curves_figure
from reproduction.result_cache import ResultCache

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Curve",
    "Ends",
    "Findings",
    "PaperExperiment",
    "Progress",
    "Site",
    "Table",
    "Verdict",
    "end_as_before",
    "numbers_of",
    "over_seeds",
    "read_results",
    "reported",
]

Progress = Callable[[int, int, str], None]
"""progress(done, total, what): so many of the experiment's runs are done, and what was the last one."""

Ends = Mapping[tuple[str, str], float]
"""(part, label) -> the median loss at the end of the runs."""

RESULTS = Path(__file__).parents[1] / "docs" / "measurements" / "data" / "papers-results.jsonl"

ROUNDING = 1e-20
"""A loss below this is zero up to rounding."""

Run = TypeVar("Run")
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under named columns.

    Attributes:
        columns: the names of the columns.
        rows: one cell a column; None for an empty one.
        note: what the reader must know, such as the seeds and what the numbers are.

    Example:
        >>> Table(["method", "error"], [["DP-SGD", 0.014]]).rows[0][1]
        0.014
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int | None]]
    note: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"rows[{number}] has {len(row)} cells under {len(self.columns)} columns: "
                    "give one a column"
                )


@dataclass(frozen=True)
class Verdict:
    """A sentence that can be true or false, the number that decides, and the bars it was measured against.

    A number that is bad by intention, such as a baseline's, needs both bars: a baseline that never trains is
    bad too.

    Attributes:
        sentence: the claim, such as "DP-SGD stalls above 5e-3".
        value: what was measured; NaN never meets a bar.
        low, high: the value must lie between these.

    Example:
        >>> Verdict.at_most("converges to machine precision", 4e-16, 1e-10).met
        True
        >>> Verdict.at_least("stalls", float("nan"), 5e-3).met
        False
        >>> Verdict.within("the baseline stalls", 2.0, 0.01, 0.1).met
        False
    """

    sentence: str
    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def met(self) -> bool:
        """Whether the value lies between the bars."""
        return self.low <= self.value <= self.high

    @classmethod
    def at_most(cls, sentence: str, value: float, bar: float) -> Verdict:
        """The value must not exceed the bar."""
        return cls(sentence, float(value), high=bar)

    @classmethod
    def at_least(cls, sentence: str, value: float, bar: float) -> Verdict:
        """The value must reach the bar."""
        return cls(sentence, float(value), low=bar)

    @classmethod
    def within(cls, sentence: str, value: float, low: float, high: float) -> Verdict:
        """The value must reach the lower bar and not exceed the upper one."""
        return cls(sentence, float(value), low, high)


@dataclass(frozen=True)
class Findings:
    """All that a run of an experiment says.

    Attributes:
        table: the numbers.
        curves: the lines of the figure.
        verdicts: claims and whether they held.
        numbers: what the verdicts were judged by: medians over the seeds, by part, method and the like.
    """

    table: Table
    curves: Sequence[Curve] = ()
    verdicts: Sequence[Verdict] = ()
    numbers: Mapping[Any, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite become their names, since JSON has no word for them.

        Example:
            >>> found = Findings(Table(["e"], [[float("nan")]]), [], [Verdict.at_most("s", 1.0, 2.0)])
            >>> found.to_json()["table"]["rows"], found.to_json()["verdicts"][0]["met"]
            ([['nan']], True)
        """
        values = {
            "table": asdict(self.table),
            "curves": [asdict(curve) for curve in self.curves],
            "verdicts": [asdict(verdict) | {"met": verdict.met} for verdict in self.verdicts],
            "numbers": [[*key, float(f"{value:.6g}")] for key, value in self.numbers.items()],
        }
        plain = _finite(values)
        assert isinstance(plain, dict)
        return plain


def reported(name: str) -> dict[tuple[Any, ...], float]:
    """The numbers of an experiment that the docs report; the bars set after the runs are around them."""
    (first,) = (r for r in read_results() if r["experiment"] == name and not r["seed_offset"])
    return numbers_of(first)


@cache
def read_results() -> list[dict[str, Any]]:
    """The lines of the docs: of each experiment one, and one of the same with other seeds."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def numbers_of(result: Mapping[str, Any]) -> dict[tuple[Any, ...], float]:
    """What the verdicts of a result are judged by."""
    return {
        tuple(math.inf if part == "inf" else part for part in key): float(value)
        for *key, value in result["numbers"]
    }


def over_seeds(
    runs: Sequence[Run],
    measure: Callable[[Run, int], Measured],
    name: Callable[[Run], str],
    seeds: Sequence[int],
    progress: Progress,
) -> Iterator[tuple[Run, list[Measured]]]:
    """Every run, with what it measured with each seed.

    Args:
        runs: of the experiment.
        measure: (run, seed) -> what it measured.
        name: of a run, for `progress`.
        seeds: of every run.
        progress: called after each of them.

    Example:
        >>> list(over_seeds([10, 20], lambda run, seed: run + seed, str, (1, 2), print))
        1 4 10
        2 4 10
        3 4 20
        4 4 20
        [(10, [11, 12]), (20, [21, 22])]
    """
    for number, run in enumerate(runs):
        found = []
        for position, seed in enumerate(seeds):
            found.append(measure(run, seed))
            progress(number * len(seeds) + position + 1, len(runs) * len(seeds), name(run))
        yield run, found


def end_as_before(name: str, ends: Ends) -> list[Verdict]:
    """Whether runs end within a factor of 4 of where those of the docs ended, or at rounding.

    Args:
        name: of the experiment.
        ends: (part, label) -> loss.
    """
    return [
        Verdict.within(
            f"{part}: {label}, ends at",
            ends[part, label],
            loss / 4 if loss > ROUNDING else 0.0,
            max(4 * loss, ROUNDING),
        )
        for (part, label), loss in reported(name).items()
        if not part.endswith(", half")
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _draw(findings: Findings) -> Figure:
    return curves_figure(findings.curves, x_label="steps", y_label="error")


@dataclass(frozen=True)
class Site:
    """Where a long experiment runs.

    Attributes:
        data_dir: folder with the data files; None where none was named.
        kept: the finished runs, which are not run again.
    """

    data_dir: str | None
    kept: ResultCache


@dataclass(frozen=True)
class PaperExperiment:
    """An experiment that anybody can run again with `python -m reproduction NAME`.

    Attributes:
        name: the command's word for it.
        title: one line.
        summary: what is compared, on what, and what was expected beforehand.
        run: run(seeds, progress) -> Findings; `seeds` are the seeds themselves.
        run_on: run_on(seeds, progress, site) -> Findings, in the place of `run`, for an experiment that reads
            data files or takes hours.
        draw: draw(findings) -> figure; by default the curves with their spread, one panel each.
        default_seeds: how many seeds without `--seeds`.
    """

    name: str
    title: str
    summary: str
    run: Callable[[Sequence[int], Progress], Findings] | None = None
    run_on: Callable[[Sequence[int], Progress, Site], Findings] | None = None
    draw: Callable[[Findings], Figure] = _draw
    default_seeds: int = 5

    def __post_init__(self) -> None:
        if (self.run is None) == (self.run_on is None):
            raise ValueError(f"the experiment {self.name!r} needs either run or run_on")

    def carry_out(self, seeds: Sequence[int], progress: Progress, site: Site) -> Findings:
        """Run it."""
        if self.run_on is not None:
            return self.run_on(seeds, progress, site)
        assert self.run is not None
        return self.run(seeds, progress)
