"""Settings chosen at random, as many as a law draws, of which only the best run is kept and charged for all.

    equipoise search --data digits --grid learning_rate=0.3,1,3,9 --private-validation 0.1 --epsilon 3

The budget is that of the search: a run gets the noise at which the choice among all of them costs it
(`privacy.accounting.private_search`). What is chosen by is a noised score of private records, or one of test
records. Of the other runs nothing is kept, and nobody but the owner may learn how many there were.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise._files import make_folder, write_json
from equipoise._roots import crossing
from equipoise._run_files import read_object
from equipoise.app.option_checks import SettingsError, flag
from equipoise.app.settings import RunSettings
from equipoise.report import read_run
from equipoise.training.folder.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.app.build import Experiment
    from equipoise.app.sweep import Grid
    from equipoise.privacy import PrivateSearch
    from equipoise.training import PrivateTraining

_PLAN_KEPT: dict[str, Any] = {"learning_rate": 1.0, "momentum": 0.0, "ema": 0.0, "seed": 0}
"""Settings that no plan follows from, and a value: what differs in these alone has one plan."""

_NO_USE = ("ledger", "runs", "noise_multiplier", "reproducible", "canaries")
_NO_AXIS = ("epsilon", "noise_multiplier", "delta", "relation", "unit", "records_per_user", "user_rows")


def search(asked: Grid, law: PrivateSearch, folder: str, console: Console) -> dict[str, Any]:
    """Draw how many runs to make, make them, keep the best, and charge it for the choice.

    Returns:
        Plain values of the chosen run, and `chosen`: the values of its combination.

    Raises:
        SettingsError: before anything is trained.
        RuntimeError: none of the runs came to an end, or another process searches in the folder.
    """
    from equipoise.app.compare import result_file
    from equipoise.app.run_checks import report_values
    from equipoise.statements import charge_search

    _check(asked)
    wanted, kept = asked.combinations(), Path(folder) / "chosen"
    private = make_folder(Path(folder) / "private", "run_dir")
    private.chmod(0o700)
    words = json.dumps([asked.axes(), law.describe()])
    notes = result_file(private, "search", asked.base, "search", words)[0]
    if any(other != notes for other in private.glob("search-*.json")):
        raise SettingsError(
            f"--run-dir is {folder}, which holds a search with other settings, data or laws: what it chose "
            "among would not be what is charged. Give another --run-dir."
        )
    place = RunFolder(folder)
    place.lock()
    try:
        alone = _of_one_run(asked, law, [made for _, made in wanted])
        state: dict[str, Any] = {"runs": law.draw(), "done": 0, "best": None}
        state = read_object(notes) if notes.is_file() else state
        # Before the first run: a search that is stopped goes on with the number that it drew.
        write_json(notes, state, mode=0o600)
        while state["done"] < state["runs"]:
            with console.status("training with settings drawn at random"):
                _try_one(wanted, alone, private, notes, state, type(console)(quiet=True))
        if state["best"] is None:
            raise RuntimeError(
                "none of the runs that were drawn came to an end, and their budget is spent: take settings "
                "that train"
            )
        _delete_others(private, state)
        if not kept.exists():
            best = private / state["best"]["run"]
            if read_object(best / "statement.json")["search"] is None:
                charge_search(best, law)
            best.rename(kept)
    finally:
        place.unlock()
    return {**report_values(str(kept)), "chosen": state["best"]["row"]}


def _check(asked: Grid) -> None:
    """Refuse what a search cannot have.

    Raises:
        SettingsError: naming the option.
    """
    for name in _NO_USE:
        if getattr(asked.base, name) not in (None, False) or name in asked.base.options:
            raise SettingsError(
                f"{flag(name)} has no use in a search, whose runs share a budget: leave it out."
            )
    for name in _NO_AXIS:
        if name in asked.axes():
            raise SettingsError(f"--grid {name} would give runs of a search other guarantees: leave it out.")
    if asked.base.epsilon is None:
        raise SettingsError("--epsilon is missing: it is the budget of the whole search.")


def _try_one(
    wanted: list[tuple[dict[str, Any], RunSettings]],
    alone: float,
    private: Path,
    notes: Path,
    state: dict[str, Any],
    quiet: Console,
) -> None:
    """Train once, and note whether it is the best; a run that fails counts as made."""
    from equipoise.app.build import assemble
    from equipoise.app.train import train_run

    _delete_others(private, state)
    best = state["best"]
    row, made = secrets.choice(wanted)
    trial = private / f"run-{state['done'] + 1}"
    score = -math.inf
    try:
        found = train_run(replace(made, epsilon=alone, run_dir=str(trial)), quiet)
        if not found["finished"]:
            raise KeyboardInterrupt
        score = _score(assemble(made, outline=True), trial)
    except SettingsError:
        raise
    except (ValueError, RuntimeError, ArithmeticError):
        pass
    if math.isfinite(score) and (best is None or score > best["score"]):
        state["best"] = {"score": score, "row": row, "run": trial.name}
    state["done"] += 1
    write_json(notes, state, mode=0o600)


def _delete_others(private: Path, state: Mapping[str, Any]) -> None:
    """All runs but the best one that is noted: worse ones, and one that a killed process left."""
    for run in private.glob("run-*"):
        if state["best"] is None or run.name != state["best"]["run"]:
            shutil.rmtree(run)


def _score(experiment: Experiment, folder: Path) -> float:
    """The best private score of a run, or the last of the test records; no number is the worst."""
    run, (name, more_is_better) = read_run(folder), experiment.task.main
    if experiment.score is not None:
        more_is_better = experiment.score.larger_is_better
        name = next(name for name in run.evaluation if run.is_private_score(name))
        found = [value for _, value in run.curve(f"evaluation.{name}")]
    else:
        found = [value for key, value in run.evaluation.items() if key == name]
    return max((value if more_is_better else -value for value in found), default=-math.inf)


def _of_one_run(asked: Grid, law: PrivateSearch, wanted: list[RunSettings]) -> float:
    """Epsilon of one run, if the choice among all costs what the budget allows.

    Raises:
        SettingsError: combinations of different plans, or without a proof.
    """
    from equipoise.app.build import assemble, build_training
    from equipoise.app.data_loading import load_data
    from equipoise.privacy import epsilon

    budget, raw = asked.base.epsilon, load_data(asked.base)
    assert budget is not None

    def planned(made: RunSettings, alone: float) -> PrivateTraining:
        return build_training(assemble(replace(made, epsilon=alone), raw=raw, outline=True), on_disk=False)

    def left(log_epsilon: float) -> float:
        """Of the budget; falling."""
        training = planned(wanted[0], math.exp(log_epsilon))
        assert training.budget is not None
        event, relation = law.event(training.plan.event()), training.plan.relation
        return budget - epsilon(event, training.budget.delta, relation, cross_check=False).value

    first = planned(wanted[0], budget)
    if {first.plan.guarantee, first.method.guarantee} != {"proven"} or not first.plan.releases:
        raise SettingsError(
            f"--method is {asked.base.method}, without a proven guarantee in this form: a search of its runs "
            "has no epsilon."
        )
    alone = math.exp(crossing(left, math.log(budget / 2), 0.5, tolerance=2e-3)[0])
    plans = set()
    for made in {repr(replace(one, **_PLAN_KEPT)): one for one in wanted}.values():
        training = planned(made, alone)
        # By what it costs: a clip norm is in a plan, and in no event.
        plans.add(
            repr((training.plan.event(), training.plan.relation, training.plan.unit, training.budget))
            + training.plan.guarantee
            + training.method.guarantee
        )
    if len(plans) > 1:
        raise SettingsError(
            f"--grid has combinations of {len(plans)} different privacy plans, and the best of a search is "
            "charged by its own plan: take settings that leave sampling, noise and steps alone, such as "
            "learning_rate, momentum or a clip norm that is a number."
        )
    return alone
