"""Every list of verdicts holds for the methods it speaks of, and for no other method under their names.

The results are those of the docs, a line of JSON each; a run of an experiment makes a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from reproduction.findings import Verdict, numbers_of, read_results, reported
from reproduction.papers import (
    EXPERIMENTS,
    TITLES,
    dc_dpsgd_images,
    dc_dpsgd_whole,
    dice_sgd_images,
    dp_c4,
    dp_c4_misfit,
    fed_pcdp_images,
)

Key = tuple[Any, ...]
Numbers = Mapping[Key, float]
PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "papers.md"
BARRED = {
    "dc-dpsgd-images": ("fashion-mnist",),
    "pcdp-sgd-images": ("MNIST, z = 30",),
}
"""The parts that have a bar for each method; the paper's claims alone are judged in the others."""


def fed_images(numbers: Numbers) -> list[Verdict]:
    return fed_pcdp_images.verdicts({fed_pcdp_images.Case(*key): value for key, value in numbers.items()})


JUDGES: dict[str, Callable[[Any], list[Verdict]]] = {
    name: fed_images if name == "fed-pcdp-images" else import_module(place).verdicts
    for name, place in EXPERIMENTS.items()
}

START: dict[str, dict[str, float | None]] = {
    "adaptive-rms": {"": 0.5, "D, separable": 0.693, "D, few gradients": 0.025},
    "adaptive-rms-fl": {"": 0.5},
    "adaptive-rms-images": {"": 10.0},
    "adaptive-rms-printed": {
        "loss, [0, 1]": 2.35,
        "loss, 0 to 255": 89.3,
        "accuracy, [0, 1]": 6.1,
        "accuracy, 0 to 255": 6.9,
    },
    "dc-dpsgd": {"skewed": 1.0, "Gaussian": 1.0, "symmetric": 1.0},
    "dc-dpsgd-ablations": {
        "regression": 1.0,
        "images": 10.0,
        "regression, paired": 1.044,
        "images, paired": -29.0,
    },
    "dc-dpsgd-images": {"": 10.0},
    "dc-dpsgd-long-tail": {"": 10.0},
    "dc-dpsgd-whole": {"": 10.0, dc_dpsgd_whole.PROVEN: None},
    "dice-sgd": {"point": 3.0, "line": 0.753, "point, early": 3.0, "line, early": 0.753, "still": 3.0},
    "dice-sgd-ablations": {"regression": 0.753, "images": 10.0},
    "dice-sgd-images": {"": 10.0},
    "dp-c4": {"": 2.0},
    "dp-c4-ablations": {"": 51.87692307692308},
    "dp-c4-misfit": {"skew": 1.9443, "log": 0.9967},
    "dp-c4-mushroom": {"": 51.87692307692308},
    "fed-pcdp": {"": 0.9, "clipping alone": 0.29, "bytes": None},
    "fed-pcdp-images": {"": 10.0},
    "fed-pcdp-one-class": {"": 0.9},
    "pcdp-sgd": {"means": 0.29, "clipping alone": 0.29, "digits, z = 4": 0.9, "digits, z = 16": 0.9},
    "pcdp-sgd-images": {"": 10.0},
    "pcdp-sgd-printed": {"": 7.7},
    "pcdp-sgd-subspaces": {"": 0.29},
}
"""What each part of an experiment has before any training ("" for all other parts); None: no such thing."""


RESULTS = read_results()
FIRST = {result["experiment"]: result for result in RESULTS if not result["seed_offset"]}
AGAIN = {result["experiment"]: result for result in RESULTS if result["seed_offset"]}


def failing(name: str, numbers: Numbers) -> set[str]:
    """The verdicts that are missed, apart from those that the true methods miss."""
    missed = {verdict.sentence for verdict in JUDGES[name](numbers) if not verdict.met}
    return missed - set(FIRST[name]["missed"])


def test_every_experiment_has_its_numbers():
    assert set(JUDGES) == set(TITLES) == set(FIRST)
    assert len(FIRST) + len(AGAIN) == len(RESULTS)


@pytest.mark.parametrize(
    "result", RESULTS, ids=lambda result: f"{result['experiment']}-{result['seed_offset']}"
)
def test_the_numbers_give_the_verdicts(result):
    """Met and missed ones: what is missed is a finding, and stands in the result."""
    verdicts = JUDGES[result["experiment"]](numbers_of(result))
    assert sorted(v.sentence for v in verdicts if not v.met) == sorted(result["missed"])
    assert sum(verdict.met for verdict in verdicts) == result["met"]
    assert len({verdict.sentence for verdict in verdicts}) == len(verdicts)


def test_the_table_of_the_page_is_that_of_the_results():
    cells = {
        line.split("`")[1]: line.split("|")[2:5]
        for line in PAGE.read_text().splitlines()
        if line[:3] == "| `"
    }
    for name, first in FIRST.items():
        *shown, minutes = (cell.strip() for cell in cells[name])
        again = AGAIN.get(name)
        assert shown[0] == f"{first['met']} of {first['met'] + len(first['missed'])}"
        if again is None:
            assert shown[1] == "not run"
        else:
            assert shown[1] == f"{again['met']} of {again['met'] + len(again['missed'])}, {again['seeds']}"
            assert minutes == f"{again['processor_seconds'] / 60:.0f}"


@pytest.mark.parametrize("name", JUDGES)
def test_nobody_may_stay_at_the_start(name):
    """A method that never trains is seen, contender and baseline alike."""
    numbers, start = reported(name), START[name]
    barred = {
        key for key in numbers if not _is_reference(name, key) and key[0] in BARRED.get(name, (key[0],))
    }
    for row in dict.fromkeys(_row(name, key) for key in numbers if key in barred):
        false = {
            key: start.get(str(key[0]), start.get("")) if _row(name, key) == row else value
            for key, value in numbers.items()
        }
        if None not in false.values():
            assert failing(name, false), row


IMPOSTORS = (
    ("adaptive-rms", "published", "fixed"),
    ("adaptive-rms-fl", "published", "DP-FedAvg"),
    ("adaptive-rms-images", "published", "DP-FedAvg"),
    ("adaptive-rms-printed", "AdaptDP-FedAvg", "DP-FedAvg"),
    *(("dc-dpsgd", label, "DP-SGD") for label in ("norm", "trace", "top share by norm", "Algorithm 1")),
    *(("dc-dpsgd-ablations", form, "DP-SGD") for form in ("Algorithm 1", "the program", "top share")),
    *(("dc-dpsgd-images", arm, "DP-SGD") for arm in (*dc_dpsgd_images.TWO, dc_dpsgd_images.PROGRAM)),
    *(("dc-dpsgd-whole", arm, "DP-SGD") for arm in (dc_dpsgd_whole.PROGRAM, dc_dpsgd_whole.NORM)),
    *(
        ("dc-dpsgd-long-tail", label, "DP-SGD")
        for label in ("trace, p=0.1", "Algorithm 1", "authors' program")
    ),
    *(
        ("dice-sgd", f"DiceSGD joint, clip norm {c}, residual 10", f"DP-SGD, clip norm {c}")
        for c in ("0.3", "1", "3")
    ),
    ("dice-sgd", "DiceSGD as published, algorithm 4 noise", "DP-SGD, clip norm 1"),
    *(("dice-sgd-ablations", form, "DP-SGD") for form in ("its formula", "joint")),
    *(
        ("dice-sgd-images", kind, "DP-SGD")
        for kind in (dice_sgd_images.DICE, dice_sgd_images.FORMULA, dice_sgd_images.PROGRAM)
    ),
    *(("dp-c4", label, "DP-SGD") for label in dp_c4.CONVERGING),
    *(("dp-c4-misfit", label, "DP-SGD") for label in dp_c4_misfit.ARMS if label.startswith("DP-C4")),
    *(("dp-c4-ablations", label, "DP-SGD") for label in ("DP-C4", "DP-C4+")),
    *(("dp-c4-mushroom", label, "DP-SGD") for label in ("DP-C4", "DP-C4+")),
    ("fed-pcdp", "FedPCDP", "FedAvg"),
    ("fed-pcdp-images", "fedpcdp", "fedavg"),
    ("fed-pcdp-one-class", "FedPCDP", "FedAvg"),
    ("pcdp-sgd", "PCDP", "DP-SGD"),
    ("pcdp-sgd-images", "PCDP, same set", "DP-SGD"),
    ("pcdp-sgd-subspaces", "released", "DP-SGD"),
    ("pcdp-sgd-printed", "PCDP", "DP-SGD"),
)
"""Experiment, a method of a paper, and DP-SGD, which may not pass under that name."""


def test_every_list_has_an_impostor():
    assert {name for name, _, _ in IMPOSTORS} == set(JUDGES)


@pytest.mark.parametrize(("name", "method", "plain"), IMPOSTORS)
def test_dp_sgd_does_not_pass_as_the_method(name, method, plain):
    numbers = reported(name)
    names = {method: plain, f"{method}, early": f"{plain}, early"}

    def in_its_place(key: Key) -> Key:
        return tuple(names.get(part, part) for part in key)

    false = {key: numbers.get(in_its_place(key), value) for key, value in numbers.items()}
    assert false != numbers
    assert failing(name, false)


def _row(name: str, key: Key) -> Key:
    """The training that a number is of: some have several, after more and fewer steps."""
    if name == "dp-c4":
        return key[:1]
    return tuple(p.removesuffix(", early").removesuffix(", half") if isinstance(p, str) else p for p in key)


def _is_reference(name: str, key: Key) -> bool:
    """A number that is no method's error: what can be proved, or a point of rest."""
    return str(key[0]).endswith(", epsilon") or key[-1] == "||x_u - x*||"
