"""Training, dry run and resuming, as the command line does them.

Settings in, a run folder and plain values out.
"""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from math import isclose, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from equipoise._files import write_json
from equipoise._rounding import plain, rounded_up
from equipoise._run_files import RunFolderError, each_row, read_object
from equipoise._validate import delta_warning
from equipoise.app.build import Experiment, assemble, build_training
from equipoise.app.data_loading import cache_folder
from equipoise.app.model_table import ON_FEATURES
from equipoise.app.option_checks import SettingsError, noise_warning, rate_warning
from equipoise.app.run_checks import SETTINGS_FILE, check_new_folder, is_finished, report_values
from equipoise.app.settings import RunSettings
from equipoise.app.tasks import absent_warning
from equipoise.audit.canary_records import SCORES_FILE, InsertedCanaries, choose_canaries
from equipoise.audit.canary_scores import scores_of
from equipoise.methods import PublicRecords, find
from equipoise.published.non_private import NonPrivate
from equipoise.training import PrivateTraining, Run
from equipoise.training.folder.config_file import rebuild_method
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.restarts import undo_start

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.training.metrics import MetricWriter


def train_run(
    settings: RunSettings, console: Console, writers: Sequence[MetricWriter] = ()
) -> dict[str, Any]:
    """Train and write the run folder; `runs/DATA-TIME` if the settings name none. `writers` as for `Run`.

    Returns:
        Plain values: run_dir, accuracy, whether the model is finite, epsilon, delta, guarantee, steps,
            finished, seconds, statement and files.

    Raises:
        SettingsError, DataFileError: before anything is spent.
    """
    name = re.sub("[:.]", "-", settings.data_name)
    folder = settings.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = replace(settings, run_dir=folder)
    experiment = insert_canaries(assemble_shown(settings, console))

    class WithSettings(Run):
        """It puts down its settings before the first checkpoint: killed right after it, it can go on."""

        def created(self, folder: Path) -> None:
            _write_settings(folder, experiment)

    try:
        with console.status("calibrating the noise and checking the gradients"):
            training = build_training(experiment, make_run=WithSettings, writers=writers)
    except FileExistsError:
        check_new_folder(folder)  # another command has begun a run there since
        raise
    _introduce(training, experiment, console)
    try:
        return _run(training, experiment, folder, console)
    except Exception:
        booked = getattr(training.ledger, "record", None)  # of several processes one has it
        if booked is not None and not (training.steps_done or booked.num_draws):
            with suppress(Exception):  # whatever was released stays, as what it cost
                undo_start(RunFolder(folder))
        raise


def describe_run(settings: RunSettings, console: Console) -> dict[str, Any]:
    """What a training would do and cost: nothing is spent, and no folder is left behind."""
    experiment = assemble_shown(settings, console, outline=True)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "data holds equal records")  # zeros in place of features
        # with the runs of the shared journal, but in a copy of it
        copied = None if settings.ledger is None else str(Path(folder) / "ledger.jsonl")
        if settings.ledger is not None and Path(settings.ledger).is_file():
            shutil.copyfile(settings.ledger, str(copied))
        own = replace(experiment, settings=replace(experiment.settings, ledger=copied, run_dir=None))
        training = build_training(own)
        warned = _introduce(training, experiment, console)
        description = training.describe()
    console.print(str(description), markup=False)
    if experiment.settings.model == ON_FEATURES:
        console.print("  features    not computed here: a training does so first, for minutes")
    return {
        "dry_run": True,
        **description.to_json(),
        "settings": experiment.settings.publishable(),
        "warnings": warned,
    }


def resume_run(
    folder: str,
    settings: RunSettings,
    console: Console,
    writers: Sequence[MetricWriter] = (),
    *,
    stop_fixed_beforehand: bool = False,
) -> dict[str, Any]:
    """Go on with a run from its last checkpoint.

    Args:
        folder: the run folder.
        settings: those of the folder, where data files and device may be other ones; the code that they name
            is run (see `equipoise.app.run_checks.check_own_code`).
        console: for people.
        writers: as for `Run`.
        stop_fixed_beforehand: take no further step, and end the run with this word
            (`PrivateTraining.finish`).
    """
    if is_finished(folder):
        console.print(f"{folder} is finished already: there is nothing to resume.", markup=False)
        return _answer(folder, settings, finished=True, seconds=0.0)
    config = RunFolder(folder).read_config()
    experiment = assemble_shown(replace(settings, run_dir=folder), console)
    _check_same(folder, config, experiment)
    # no file holds the public records, and a class of the user's own is not registered under its name
    public = None if experiment.public is None else PublicRecords(experiment.public)
    kind = find(settings.method, settings.recipe or "library")
    method = rebuild_method(config, public, kind)
    if settings.canaries is not None:
        experiment = replace(experiment, canaries=InsertedCanaries.load(folder))
    training = PrivateTraining.resume(
        folder,
        experiment.model,
        experiment.optimizer,
        loss=experiment.loss,
        data=experiment.data,
        method=experiment.with_scores(method),
        unit=experiment.unit,
        run=Run(scheduler=experiment.scheduler, writers=writers),
        device=settings.device,
    )
    if stop_fixed_beforehand:
        began = time.perf_counter()
        training.evaluate(experiment.evaluate)
        training.finish(stop_fixed_beforehand=True)
        return _answer(folder, settings, True, time.perf_counter() - began)
    return _run(training, experiment, folder, console)


def _run(training: PrivateTraining, experiment: Experiment, folder: str, console: Console) -> dict[str, Any]:
    began = time.perf_counter()
    with closing(training):  # where it was interrupted, too: the folder is free for `resume`
        result = training.run(
            evaluate=experiment.evaluate,
            evaluate_every=experiment.settings.evaluate_every,
            keep_best=experiment.score is not None,
            progress=console.is_terminal,
            stop="return",  # the command has an exit code of its own
        )
        scores = scores_of(training.method, training.method_state)
    if result.finished:
        _say_if_clipped(experiment, RunFolder(folder), console)
    if scores is not None:
        write_json(Path(folder) / SCORES_FILE, {"scores": scores.tolist()}, mode=0o600)
    answer = _answer(folder, experiment.settings, result.finished, time.perf_counter() - began)
    return answer | {"exit_code": 128 + (result.stopped_by or signal.SIGINT)}


_CLIPPED = "batch.gradient.clip_fraction"


def _say_if_clipped(experiment: Experiment, folder: RunFolder, console: Console) -> None:
    """Tell the owner alone that clipping biases the coefficients of a model which is read for them.

    A logistic model at clip norm 1 may rank well and be wrong in slopes and probabilities. What is said
    comes from the private diagnostics, so it goes to a terminal and into no file.
    """
    is_read = experiment.settings.model in ("logistic", "additive")
    if not is_read or not console.is_terminal or not folder.diagnostics.is_file():
        return
    clipped = [row[_CLIPPED] for row in each_row(folder.diagnostics) if _CLIPPED in row][-20:]
    if sum(clipped) > 0.2 * len(clipped):
        console.print(
            f"[bold yellow]For you alone[/]: {sum(clipped) / len(clipped):.0%} of the last gradients were "
            "clipped, so that coefficients and probabilities are biased, however good the accuracy. Compare "
            "with a larger --clip-norm."
        )


def _answer(folder: str, settings: RunSettings, finished: bool, seconds: float) -> dict[str, Any]:
    """What a command answers about a run, whose statement is written; the page is written here."""
    values, model = report_values(folder), Path(folder) / "model.safetensors"
    weights = load_file(model) if model.is_file() else {}
    return {
        **values,
        "finished": finished,
        "finite": all(bool(weight.isfinite().all()) for weight in weights.values()),
        "seconds": seconds,
        "settings": settings.publishable(),
    }


def insert_canaries(experiment: Experiment) -> Experiment:
    """The experiment with the canaries that its settings ask for.

    They come only from the seed and the test records: no training record has a say in who is there.
    """
    settings, dataset = experiment.settings, experiment.dataset
    if settings.canaries is None:
        return experiment
    if dataset.task != "classification":
        raise SettingsError(
            f"--canaries is {settings.canaries}, but canaries are records with a wrong class, and "
            f"{settings.data_name!r} is made for {dataset.task}. Leave --canaries out."
        )
    canaries = choose_canaries(
        dataset.test,
        dataset.num_classes,
        settings.canaries,
        seed=settings.seed,
        reproducible=settings.reproducible,
    )
    return replace(experiment, canaries=canaries)


def _write_settings(folder: Path, experiment: Experiment) -> None:
    """Everything for resuming into the private part, what may be published into config.json."""
    settings = experiment.settings
    if experiment.canaries is not None:
        experiment.canaries.save(folder)
    path = folder / SETTINGS_FILE
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(path, asdict(settings), mode=0o600)
    config = folder / "config.json"
    content = read_object(config) if config.is_file() else {}
    content["command"] = settings.command()
    content["experiment"] = {
        **settings.publishable(),
        "population": experiment.dataset.population,
        "steps": experiment.sampling.steps,
        **_of_test_records(experiment),
        **({"data_description": about} if (about := experiment.dataset.description) else {}),
    }
    if experiment.dataset.schema is not None:
        content["schema"] = dict(experiment.dataset.schema)
    write_json(config, content)


def _of_test_records(experiment: Experiment) -> dict[str, Any]:
    """What is published of the records that are evaluated on: their number, and what any model reaches."""
    (baseline, answer), count = experiment.baseline, len(experiment.dataset.test)
    found = {"test_records": count, "test_records_apart": experiment.settings.test_records_apart}
    numbers = {f"baseline_{name}": value for name, value in baseline.items()}
    return {**(found if count else {}), **numbers, "baseline": answer}


def _check_same(folder: str, config: Mapping[str, Any], experiment: Experiment) -> None:
    """Refuse to go on where what is published of the data would not be of those that scores are taken on.

    Raises:
        RunFolderError: the classes of images, or the test records, are others than when the run began.
    """
    before, now = config.get("experiment", {}), _of_test_records(experiment)
    same = all(
        isclose(value, before.get(name, nan), rel_tol=1e-4)  # summed on another machine, perhaps
        if isinstance(value, float)
        else value == before.get(name)
        for name, value in now.items()
    )
    classes = (experiment.dataset.schema or {}).get("classes")
    if not same or classes != config.get("schema", {}).get("classes"):
        raise RunFolderError(
            f"run={folder!r} began with other classes or records to evaluate on "
            f"({before.get('test_records', 0):,} then, {now.get('test_records', 0):,} now), so its scores "
            "would be of neither. Give the files as they were; nothing was spent."
        )


def assemble_shown(settings: RunSettings, console: Console, outline: bool = False) -> Experiment:
    """As `assemble`; the console shows what is done meanwhile."""
    with console.status("loading the data and building the model") as status:

        def update(done: int, total: int) -> None:
            if done == 0:
                console.print(
                    f"computing features of {total:,} records once; they are kept in {cache_folder()} for "
                    "later runs (EQUIPOISE_CACHE names another folder)",
                    markup=False,
                )
            status.update(f"computing features: {done:,} of {total:,}")

        return assemble(settings, update, outline=outline)


def _introduce(training: PrivateTraining, experiment: Experiment, console: Console) -> list[str]:
    """Say what will be trained how; gives what is doubtful about it, which is said too."""
    settings, sampling, budget = experiment.settings, experiment.sampling, training.budget
    assert budget is not None
    assert settings.optimizer is not None
    assert settings.learning_rate is not None
    is_proven = training.method.guarantee == "proven" and training.plan.guarantee == "proven"
    doubt = "" if is_proven else " (not a guarantee)"
    asked = rounded_up(budget.epsilon) if settings.epsilon is None else plain(settings.epsilon)
    spends = f"budget epsilon {asked} at delta {plain(budget.delta)}{doubt}"
    if isinstance(training.method, NonPrivate):
        spends = "[bold red]NOT PRIVATE[/]: no noise, and so no epsilon"
    length = f", clip norm {settings.clip_norm}" if "clip_norm" in settings.publishable() else ""
    parameters = sum(p.numel() for p in experiment.model.parameters() if p.requires_grad)
    console.print(
        f"[bold]{settings.model}[/] ({parameters:,} parameters) on [bold]{settings.data_name}[/], "
        f"{settings.method}, {sampling.steps:,} steps of about {sampling.expected_size:,g} "
        f"{training.plan.unit.drawn}s, {spends}; {settings.optimizer} with learning rate "
        f"{settings.learning_rate:g}{length}"
    )
    if settings.reproducible:
        console.print("[bold red]NOT PRIVATE[/]: --reproducible lets the noise follow the public seed.")
    if settings.test_share is not None:
        console.print(
            f"[dim]{settings.test_share:.0%} of the rows are evaluated on and not trained on; no epsilon "
            "covers what the scores tell of them[/]"
        )
    found = [
        delta_warning(budget.delta, sampling.population),
        rate_warning(settings.optimizer, settings.learning_rate),
        absent_warning(experiment.dataset),
    ]
    if training.plan.releases:
        noise = training.plan.releases[0].noise_multiplier
        found.append(noise_warning(noise, parameters, sampling.expected_size, sampling.steps))
    warnings = [warning for warning in found if warning is not None]
    # of the number of records, which is private, on the screen alone
    for warning in filter(None, [experiment.population_warning, *warnings]):
        console.print(f"[bold yellow]Warning[/]: {warning}")
    return warnings
