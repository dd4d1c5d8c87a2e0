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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise._files import make_folder, write_atomically
from equipoise._roots import crossing
from equipoise._run_files import read_object
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import RunSettings
from equipoise.report import read_run

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.app.build import Experiment
    from equipoise.app.sweep import Grid
    from equipoise.privacy import PrivacyPlan, PrivateSearch

_PLAN_KEPT: dict[str, Any] = {"learning_rate": 1.0, "momentum": 0.0, "ema": 0.0, "seed": 0}
"""Settings that no plan follows from, and a value: what differs in these alone has one plan."""


def search(asked: Grid, law: PrivateSearch, folder: str, console: Console) -> dict[str, Any]:
    """Draw how many runs to make, make them, keep the best, and charge it for the choice.

    Returns:
        Plain values of the chosen run, with its `score`, and `chosen`: the values of its combination.

    Raises:
        SettingsError: before anything is trained.
    """
    from equipoise.app.build import assemble
    from equipoise.app.run_checks import report_values
    from equipoise.app.train import train_run
    from equipoise.statements import charge_search

    wanted = asked.combinations()
    alone = _of_one_run(asked, law, [made for _, made in wanted])
    private = make_folder(Path(folder) / "private", "run_dir")
    notes, kept = private / "search.json", Path(folder) / "chosen"
    # Drawn once: a search that was stopped goes on with the number that it had.
    state: dict[str, Any] = (
        read_object(notes) if notes.is_file() else {"runs": law.draw(), "done": 0, "best": None}
    )
    while state["done"] < state["runs"]:
        row, made = secrets.choice(wanted)
        trial = private / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        with console.status("training with settings drawn at random"):
            quiet = type(console)(quiet=True)
            found = train_run(replace(made, epsilon=alone, run_dir=str(trial)), quiet)
        if not found["finished"]:
            raise KeyboardInterrupt
        score = _score(assemble(made, outline=True), trial)
        if state["best"] is None or score > state["best"]["score"]:
            shutil.rmtree(kept, ignore_errors=True)
            trial.rename(kept)
            state["best"] = {"score": score, "row": row}
        state["done"] += 1
        write_atomically(notes, json.dumps(state).encode(), mode=0o600)
    shutil.rmtree(private / "trial", ignore_errors=True)
    if read_object(kept / "statement.json").get("search") is None:  # stopped before it was charged
        charge_search(kept, law)
    return {**report_values(str(kept)), "chosen": state["best"]["row"]}


def _score(experiment: Experiment, folder: Path) -> float:
    """The best private score of a run, or the last of the test records; no number is the worst."""
    run, (name, more_is_better) = read_run(folder), experiment.task.main
    if experiment.score is not None:
        more_is_better = experiment.score.larger_is_better
        name = next(name for name in run.evaluation if run.is_private_score(name))
    found = [value if more_is_better else -value for _, value in run.curve(f"evaluation.{name}")]
    if not found:
        return -math.inf
    return max(found) if experiment.score is not None else found[-1]


def _of_one_run(asked: Grid, law: PrivateSearch, wanted: list[RunSettings]) -> float:
    """Epsilon of one run, if the choice among all costs what the budget allows.

    Raises:
        SettingsError: no budget, or combinations of different plans.
    """
    from equipoise.app.build import assemble, build_training
    from equipoise.app.data_loading import load_data
    from equipoise.privacy import epsilon

    budget, raw = asked.base.epsilon, load_data(asked.base)
    if budget is None:
        raise SettingsError("--epsilon is missing: it is the budget of the whole search.")

    def planned(made: RunSettings, alone: float) -> tuple[PrivacyPlan, float]:
        experiment = assemble(replace(made, epsilon=alone), raw=raw, outline=True)
        training = build_training(experiment, on_disk=False)
        assert training.budget is not None
        return training.plan, training.budget.delta

    kinds = {repr(replace(one, **_PLAN_KEPT)): one for one in wanted}.values()
    # by what they cost: a clip norm is in a plan, and in no event
    plans = {repr(planned(made, budget)[0].event()) for made in kinds}
    if len(plans) > 1:
        raise SettingsError(
            f"--grid has combinations of {len(plans)} different privacy plans, and the best of a search is "
            "charged by its own plan: take settings that leave sampling, noise and steps alone, such as "
            "learning_rate, momentum or a clip norm that is a number."
        )

    def excess(log_epsilon: float) -> float:
        """How much of the budget is left, falling."""
        plan, delta = planned(wanted[0], math.exp(log_epsilon))
        return budget - epsilon(law.event(plan.event()), delta, plan.relation, cross_check=False).value

    log_epsilon, _ = crossing(excess, math.log(budget / 2), 0.5, tolerance=2e-3)
    return math.exp(log_epsilon)
