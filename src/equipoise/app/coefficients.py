"""A linear model of a table in the words of its columns: coefficients, intervals, and one SQL expression.

A number's code is a linear function of the number, clamped to its declared range, or of the logarithm of its
distance from the range's lower end; a category's codes are zeros and ones. So coefficients of codes are those
of the columns times a public scale, and what the codes add at zero goes to the intercept.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from equipoise.app.option_checks import SettingsError
from equipoise.app.statistics import SufficientStatistics

if TYPE_CHECKING:
    from equipoise.data.readers.schema import Category, Date, Number, Table


@dataclass(frozen=True)
class Place:
    """A number x of a row: scale * v + shift, where v is said in SQL; None of a hashed category or a date."""

    name: str
    sql: str | None
    scale: float = 1.0
    shift: float = 0.0


INTERCEPT = Place("intercept", "1")


def places_of(table: Table) -> list[list[Place]]:
    """What a row's code is made of, by column and in order."""
    return [_of_column(name, column) for name, column in table.inputs.items()]  # type: ignore[arg-type]


def _of_column(column: str, declared: Number | Category | Date) -> list[Place]:
    if declared.type == "date":
        found_days = [Place(f"{column} {code}", None, *line) for code, *line, _ in declared.codes()]
        return found_days + [Place(f"{column} is missing", None)] * bool(declared.missing)
    name, missing = '"' + column.replace('"', '""') + '"', declared.missing or []
    if declared.type == "number":
        numbers = [sign for sign in missing if sign.replace(".", "", 1).lstrip("-").isdigit()]
        low, high, is_missing = declared.low, declared.high, _missing(name, numbers)
        half = math.expm1(math.log1p(high - low) / 2) if declared.log else (high - low) / 2
        value = (
            f"CASE WHEN {is_missing} THEN {low + half:.17g} WHEN {name} < {low:.17g} THEN {low:.17g} "
            f"WHEN {name} > {high:.17g} THEN {high:.17g} ELSE {name} END"
        )
        found = Place(column, value, 2 / (high - low), -1 - 2 * low / (high - low))
        if declared.log:
            sql = f"LN(1 + {value} - ({low:.17g}))"
            found = Place(f"ln(1 + {column} - {low:g})", sql, 2 / math.log1p(high - low), -1.0)
        return [found, *([Place(f"{column} is missing", _indicator(is_missing))] if missing else [])]
    if declared.values is None:
        return [Place(f"{column} in bucket {number}", None) for number in range(declared.width)]
    cases = [f"{name} = {_quoted(value)}" for value in declared.values]
    found_all = [
        Place(f"{column} = {value}", _indicator(case))
        for value, case in zip(declared.values, cases, strict=True)
    ]
    known = " OR ".join([*cases, _missing(name, [*map(_quoted, missing)])])
    return [
        *found_all,
        *([Place(f"{column} is another", f"1 - {_indicator(known)}")] if declared.other else []),
    ]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _missing(name: str, signs: Sequence[str]) -> str:
    return f"({name} IS NULL OR {name} IN ({', '.join(signs)}))" if signs else f"{name} IS NULL"


def _indicator(condition: str) -> str:
    return f"CASE WHEN {condition} THEN 1 ELSE 0 END"


def design_of(table: Table) -> tuple[Tensor, list[Place]]:
    """A design of full rank: [1 + places, k], from a 1 and a row's code to the inputs x, and what each x is.

    The first value of a category has no input of its own: the others are compared with it. Where there are
    signs for a missing cell, that takes its place.
    """
    columns = places_of(table)
    unit = torch.eye(1 + sum(map(len, columns)))
    vectors, named, at = [unit[0]], [INTERCEPT], 1
    for (name, declared), places in zip(table.inputs.items(), columns, strict=True):
        numbered = [*zip(unit[at : at + len(places)], places, strict=True)]
        at += len(places)
        if isinstance(getattr(declared, "other", None), bool):  # a category
            (_, _), *numbered = numbered
            if getattr(declared, "missing", None):
                of_column = unit[at - len(places) : at].sum(0)
                numbered.append((unit[0] - of_column, Place(f"{name} is missing", None)))
        vectors += [vector for vector, _ in numbered]
        named += [place for _, place in numbered]
    return torch.stack(vectors, 1), named


def written(
    weights: Mapping[str, Tensor], table: Table, loss: str | None = None, level: float = 0.95
) -> tuple[str, str | None, str]:
    """A model's coefficients as CSV, with intervals where it has some, and its prediction as SQL.

    The prediction is a number in the units of the target, or the probability of the second class; of classes
    the coefficients are those of the logit. There is no SQL where a category is hashed, or for dates; the
    third text then says so.

    Args:
        weights: of a model of the kinds `logistic`, `statistics` and `statistics-by-groups`.
        table: the columns.
        loss: that the model was trained with.
        level: of the intervals.

    Raises:
        SettingsError: more than two classes, several labels, or a text.
    """
    from scipy import stats

    two = len(table.class_names) == 2 and table.task == "classification"
    if (not two and table.task != "regression") or any(c.type == "text" for c in table.inputs.values()):
        raise SettingsError(
            "--format coefficients is for columns of numbers and categories, and for a number or two classes "
            "to predict. Take another format."
        )
    places = [INTERCEPT, *(place for column in places_of(table) for place in column)]
    design, named = torch.eye(len(places)), places
    covariance, degrees, factor = None, math.inf, 1.0
    if "second" in weights:
        model = SufficientStatistics.of(weights, classes=2 if two else 1)
        design, named = design_of(table)
        theta, (covariance, degrees) = model.coefficients(), model.covariance()
        factor = 2.0 if two else 1.0
    else:
        bias, weight = (weights[name].double() for name in ("1.bias", "1.weight"))
        theta = torch.cat([bias, weight[0]]) if not two else torch.cat([bias.diff(), weight.diff(dim=0)[0]])
    scale, constant, form = _in_units(table, loss)
    to_units = factor * scale * _to_columns(named)
    found = [to_units @ theta]
    found[0][0] += constant
    if covariance is not None:
        error = (to_units @ covariance @ to_units.t()).diagonal().clamp(min=0).sqrt()
        reach = float(stats.t.ppf((1 + level) / 2, degrees)) * error
        found += [error, found[0] - reach, found[0] + reach]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["term", "coefficient", "error", "low", "high"][: 1 + len(found)])
    for place, row in zip(named, torch.stack(found, 1).tolist(), strict=True):
        writer.writerow([place.name, *(f"{number:.10g}" for number in row)])
    if any(place.sql is None for place in places):
        unsaid = [n for n, c in table.inputs.items() if c.type == "date" or getattr(c, "buckets", None)]
        why = f"no prediction.sql: SQL has no common words for {', '.join(unsaid)}"
        return file.getvalue(), None, f"{why} (dates, and categories in buckets)"
    of_places = factor * scale * _to_columns(places) @ (design.double() @ theta)
    of_places[0] += constant
    terms = [f"{value:.17g} * ({place.sql})" for place, value in zip(places, of_places.tolist(), strict=True)]
    return file.getvalue(), form.format("\n  + ".join(terms)) + "\n", ""


def _to_columns(places: Sequence[Place]) -> Tensor:
    """From coefficients of codes to those of what the places are made of."""
    found = torch.diag(torch.tensor([place.scale for place in places], dtype=torch.double))
    found[0] += torch.tensor([place.shift for place in places], dtype=torch.double)
    return found


def _in_units(table: Table, loss: str | None) -> tuple[float, float, str]:
    """Scale and shift of a model's output, and what the prediction is made of it."""
    if table.task == "classification":
        return 1.0, 0.0, "1 / (1 + EXP(-({})))"
    target, word = cast("Number", table.learnt[0]), (loss or "").partition(":")[0]
    span = math.log1p(target.high - target.low) if target.log else target.high - target.low
    scale, shift, form = span / 2, span / 2, "{}"
    if word == "poisson":
        scale, shift, form = 1.0, math.log(span), "EXP({})"
    elif word == "logistic":
        scale, shift, form = 1.0, 0.0, f"{span:.17g} / (1 + EXP(-({{}})))"
    return scale, shift, f"{target.low:.17g} + {f'EXP({form}) - 1' if target.log else form}"
