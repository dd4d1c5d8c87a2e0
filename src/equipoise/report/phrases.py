"""What (epsilon, delta) promises, in figures that need no training in the field.

Let P be the output's distribution with a record and Q the one without it. (epsilon, delta)-DP says

    P(S) <= e^epsilon Q(S) + delta   and   Q(S) <= e^epsilon P(S) + delta   for every set S of outputs.

Somebody who sees the output and must guess, at even odds beforehand, which of the two it came from is right
with probability at most

    (e^epsilon + delta) / (e^epsilon + 1),

whatever else they know (P. Kairouz, S. Oh, P. Viswanath, "The composition theorem for differential privacy",
ICML 2015, theorem 2.1: the region of false alarms and misses; the bound is its corner).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from equipoise._rounding import plain, rounded_up, significant


def guessing_bound(epsilon: float, delta: float) -> float:
    """The largest probability of a right guess at even odds.

    >>> guessing_bound(0.0, 0.0)
    0.5
    >>> round(guessing_bound(3.0, 1e-5), 4)
    0.9526
    """
    # written with e^-epsilon, so that a huge epsilon gives 1 and no overflow
    small = math.exp(-epsilon)
    return min(1.0, (1.0 + delta * small) / (1.0 + small))


def epsilon_in_words(epsilon: float, delta: float, relation: str, unit: str = "record") -> str:
    """Two sentences that say what the figures bound.

    >>> print(epsilon_in_words(1.0, 1e-5, "add_or_remove_one"))
    Suppose somebody knows everything about the training data except whether one particular record is among \
them, and holds both answers for equally likely. After seeing all that this run published they are right \
with probability at most 73.2%; without seeing it, 50%.
    >>> "99.97%" in epsilon_in_words(8.0, 1e-5, "add_or_remove_one")
    True
    """
    bound = guessing_bound(epsilon, delta)
    # never round an upper bound down, least of all to a certainty that it does not reach
    missing = 100 * (1 - bound)
    places = 1 if missing >= 0.1 or missing <= 0 else min(9, -math.floor(math.log10(missing)))
    percent = math.ceil(bound * 100 * 10**places) / 10**places
    if relation.startswith("replace"):
        unknown = f"which of two candidates one particular {unit} is"
    else:
        unknown = f"whether one particular {unit} is among them"
    return (
        f"Suppose somebody knows everything about the training data except {unknown}, and holds both answers "
        "for equally likely. After seeing all that this run published they are right with probability at "
        f"most {percent:.10g}%; without seeing it, 50%."
    )


RELATIONS_IN_WORDS = {
    "add_or_remove_one": "neighbours differ by adding or removing one record",
    "replace_one": "neighbours differ by replacing one record",
}


def relation_in_words(statement: Mapping[str, Any]) -> str:
    """What neighbouring data sets differ by; empty for a relation that is not known.

    >>> relation_in_words({"relation": "replace_one", "unit": "user"})
    'neighbours differ by replacing one user'
    """
    words = RELATIONS_IN_WORDS.get(str(statement.get("relation", "")), "")
    return words.replace("record", "user") if statement.get("unit") == "user" else words


ACCOUNTANTS = {
    "pld": "privacy loss distributions",
    "gdp": "the closed form for Gaussians",
    "gdp, amplification ignored": "the closed form for Gaussians, without the gain from sampling",
    "rdp": "Renyi differential privacy",
}


_HUGE = 15.0
"""Above this epsilon somebody who guesses can be right but for less than one time in a million."""


def promise_in_words(
    epsilon: float, delta: float, relation: str, unit: str = "record", condition: str = ""
) -> str:
    """The definition, with the run's figures and what they rest on (`condition_in_words`).

    >>> promise_in_words(1.0, 1e-5, "replace_one")[:67]
    'What was released of the training records is (1.000, 1e-5)-differen'
    """
    change = "replacing" if relation.startswith("replace") else "adding or removing"
    figures = f"({rounded_up(epsilon)}, {plain(delta)})"
    doubt = " A factor this large promises nothing in practice." if epsilon > _HUGE else ""
    return (
        f"What was released of the training records is {figures}-differentially private{condition}: "
        f"{change} any one training {unit} changes the probability of any outcome at most by the factor "
        f"{factor_in_words(epsilon)}, apart from an exception of probability at most {plain(delta)}.{doubt}"
    )


def factor_in_words(epsilon: float) -> str:
    """e^epsilon as a number, never rounded down.

    >>> [factor_in_words(epsilon) for epsilon in (3.0, 20.0, 15_710.0)]
    ['e^3.000 = 20.09', 'e^20.00 = 4.9e+8', 'e^15,710, which is below 10^6,823']
    """
    power = f"e^{rounded_up(epsilon)}"
    if epsilon < _HUGE:
        return f"{power} = {rounded_up(math.exp(epsilon))}"
    if epsilon < 700:  # a float ends at e^709
        return f"{power} = {rounded_up(math.exp(epsilon), 2)}"
    return f"{power}, which is below 10^{math.ceil(epsilon / math.log(10) + 1e-9):,}"


def unit_in_words(unit: str) -> str:
    """What is protected, and what is not.

    >>> print(unit_in_words("record"))
    The unit is one record. A person may own several: with k of them the bound grows to about k times \
epsilon, and delta grows faster.
    """
    if unit != "record":
        return f"The unit is one {unit}, with all of their records in the data."
    return (
        "The unit is one record. A person may own several: with k of them the bound grows to about k times "
        "epsilon, and delta grows faster."
    )


def drawn_of(statement: Mapping[str, Any]) -> str:
    """What a draw draws, and what population and batch sizes count.

    >>> drawn_of({"users": {"records": 4, "rows": "mean"}}), drawn_of({"users": {"records": 4, "rows": None}})
    ('user', 'record')
    """
    users = statement.get("users")
    return "user" if isinstance(users, Mapping) and users.get("rows") is not None else "record"


def sampling_in_words(sampling: Mapping[str, Any]) -> str:
    """How the records or users of a step are drawn, as the plan describes it.

    >>> sampling_in_words({"scheme": "Poisson", "expected_batch_size": 256, "population": 60000, "steps": 9})
    'Poisson, with rate 0.00427: expected batch size 256, population 60,000, steps 9'
    """
    if "accounted_as" in sampling:
        claim = sampling_in_words(sampling["accounted_as"])
        return f"by its author: {sampling['by']}, accounted for as {claim}"
    size, population = sampling.get("expected_batch_size"), sampling.get("population")
    rate = f", with rate {plain(size / population, 3)}" if size and population else ""
    facts = (f"{key.replace('_', ' ')} {value:,}" for key, value in sampling.items() if key != "scheme")
    return f"{sampling.get('scheme', 'unknown')}{rate}: {', '.join(facts)}"


def readable(name: str) -> str:
    """A key of a file as words.

    >>> readable("expected_batch_size")
    'Expected batch size'
    """
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


SCORES = (
    "accuracy", "rmse", "balanced_accuracy", "label_accuracy", "f1", "auc", "mae", "r2", "finite_answers",
)  # fmt: skip
"""What a task is evaluated by; the first that there is stands for the others.

Where answers of a model are not finite there are no scores but ``finite_answers``, the share of the others.
"""
PERCENTAGES = ("accuracy", "balanced_accuracy", "label_accuracy", "finite_answers")
SHARES = (*PERCENTAGES, "f1", "auc")
ERRORS = ("rmse", "mae")


def score_in_words(name: str, value: float) -> str:
    """A score of an evaluation: shares of records as percentages, other numbers as they are.

    >>> score_in_words("accuracy", 0.8471), score_in_words("auc", 0.90461)
    ('84.7%', '0.9046')
    """
    return f"{value:.1%}" if name.removeprefix("private_") in PERCENTAGES else f"{value:.4g}"


_SHORT = {"auc": "AUC", "f1": "F1", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}


def evaluated_in_words(values: Mapping[str, Any], is_private_score: bool = False) -> str:
    """How many records were evaluated on, and that none was trained on where that is known.

    Args:
        values: what a run tells of itself.
        is_private_score: the number is one of a `Score`.

    >>> evaluated_in_words({"test_records": 1200, "test_records_apart": True})
    '1,200 test records, none of them trained on'
    >>> evaluated_in_words({"test_records": 1200}), evaluated_in_words({})
    ('1,200 test records', 'test records')
    """
    if is_private_score:
        return "private records, with noise, which epsilon covers"
    count = values.get("test_records")
    records = f"{count:,} test records" if isinstance(count, int) else "test records"
    return records + (", none of them trained on" if values.get("test_records_apart") is True else "")


def score_name(name: str) -> str:
    """The name of a score as people write it.

    >>> score_name("auc"), score_name("balanced_accuracy")
    ('AUC', 'balanced accuracy')
    """
    return _SHORT.get(name, name.replace("_", " "))


BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def bytes_in_words(count: float) -> str:
    """A number of bytes in the unit that leaves digits to read.

    >>> [bytes_in_words(n) for n in (0, 512, 19_240, 57_720_000, 2.5e9)]
    ['0 bytes', '512 bytes', '19.2 kB', '57.7 MB', '2.50 GB']
    """
    for unit, name in BYTE_UNITS[:-1]:
        if count >= unit:
            return f"{significant(count / unit)} {name}"
    return f"{count:.0f} bytes"
