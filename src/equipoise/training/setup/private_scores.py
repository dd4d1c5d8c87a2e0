"""A private score of a training: its release, its records, and how their places are found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._foreign_errors import where_raised
from equipoise.distributed.processes import Processes
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.compare import away_from_zero
from equipoise.gradients.engine import Numbers
from equipoise.gradients.engine_inputs import Loss, fillers, repeat_to
from equipoise.gradients.forward_only import LossEngine
from equipoise.gradients.operator import PerSampleGradients
from equipoise.methods.base import Parameters, Setting
from equipoise.privacy import (
    Bounded,
    FullBatch,
    Gaussian,
    PlanError,
    PrivacyPlan,
    Private,
    PrivateRows,
    Release,
    Secrets,
    Unit,
    WithoutReplacement,
    calibrate,
)
from equipoise.privacy.bounds.counts import histogram
from equipoise.privacy.noise.uniform import KEYS, keyed_integers
from equipoise.training.arguments import TrainingInputs
from equipoise.training.forwards import BatchPreparation, RowSource, forward_rows
from equipoise.training.randomness import public_randomness
from equipoise.training.record_source import BatchFormError, DataError, RecordSource
from equipoise.training.scores import Score
from equipoise.training.setup.loss_trials import check_loss, refuse_followed
from equipoise.training.setup.pipeline_trials import Pipeline
from equipoise.training.setup.private_copies import check_held

SCORE = "private score"
"""The name of its release and of its draw."""

# ---- what it costs


def is_free(score: Score, relation: str) -> bool:
    """Whether no record that the score looks at is trained on, in either of two neighbouring data sets."""
    return score.share is not None and relation == "add_or_remove_one"


def setting_beside(score: Score | None, setting: Setting) -> Setting:
    """What the method itself plans with, where a score takes a part of the budget."""
    if score is None:
        return setting
    budget, booked = setting.budget, setting.booked
    if budget is not None and not is_free(score, setting.relation):
        budget = replace(budget, epsilon=(1 - score.budget_share) * budget.epsilon)
    return replace(setting, budget=budget, booked=booked and without_score(booked))


def without_score(plan: PrivacyPlan) -> PrivacyPlan:
    """What the method releases."""
    return replace(plan, releases=[one for one in plan.releases if one.name != SCORE])


def with_score(plan: PrivacyPlan, score: Score | None, setting: Setting) -> PrivacyPlan:
    """The training's plan and the score's release, whose noise meets the whole budget beside it.

    Raises:
        PlanError: what cannot be accounted for beside a score; or the method plans records held apart, or a
            draw of the score's, and nothing would hold these records apart.
        ValueError: there is no budget.
    """
    for one in plan.releases:
        if one.apart or one.draw == SCORE:
            raise PlanError(
                f"release {one.name!r} of the method has apart={one.apart} and draw={one.draw!r}: records "
                "are held apart for a private score alone. Leave apart out, and give the draw another name"
            )
    if score is None:
        return plan
    fixed_size = any(isinstance(plan.sampling_of(one.draw), WithoutReplacement) for one in plan.releases)
    if plan.guarantee != "proven" or not plan.releases or (fixed_size and score.share is not None):
        raise PlanError(
            "a private score needs a method that is proven and, with share=..., draws of no fixed size: how "
            "many records are left to train on is random. Take dp-sgd with Poisson, or leave the score out"
        )
    most, apart = moved_by_a_row(setting.unit), score.share is not None
    share, trained = score.share or 0.0, setting.sampling.population * most
    population = score.population or math.ceil(trained * share / (1 - share))
    sampling = FullBatch(population, score.times)

    def released(scale: float) -> Release:
        noise = Gaussian(scale)
        return Release(SCORE, most, noise, score.times, SCORE, sampling, math.sqrt(2), apart)

    for one in () if setting.booked is None else setting.booked.releases:
        if replace(one, mechanism=Gaussian(1.0)) == released(1.0):
            return replace(plan, releases=(*plan.releases, one))
    # A training that is on another side has no part in what the score costs.
    beside = () if is_free(score, plan.relation) else plan.releases
    fitted = calibrate(
        lambda scale: replace(plan, releases=(*beside, released(scale))),
        setting.budget or setting.required_budget("no score"),
        other_events=setting.other_runs,
    )
    return replace(plan, releases=(*plan.releases, fitted[SCORE]))


def moved_by_a_row(unit: Unit) -> int:
    """How many records a row that is drawn stands for, each of which is scored by itself."""
    return unit.records if unit.joined is not None else 1


# ---- how it is computed


class ScoreEngine(LossEngine):
    """The places of records; each by itself, unless it is proved that a forward keeps them apart.

    That no place moved when the others were exchanged shows little where places are few: most records stay
    on their side of a quantile of their batch.
    """

    def by_plan(
        self, batch: Any, params: Mapping[str, Tensor] | None = None, numbers: Numbers | None = None
    ) -> PerSampleGradients:
        if self.independence.word == "proved":
            found = super().by_plan(batch, params, numbers)
            if self.independence.word == "proved":  # of a form that is new, too
                return found
        raise PlanMismatch("nothing proves that the records of a forward are kept apart")


@dataclass(frozen=True)
class PreparedScore:
    """A score that can be taken.

    Attributes:
        score: as given.
        rows: makes the places of the records that are held apart, the losses of its engine.
        records: how many one row of the training stands for.
    """

    score: Score
    rows: RowSource
    records: int

    def taken(self, context: Any, at: Parameters | None) -> dict[str, float]:
        """The score, noised and booked.

        Args:
            context: of a step.
            at: the parameters that are judged; those of the step when None.
        """
        bins = self.score.metric.bins

        def sums(rows: PrivateRows, _: Private) -> dict[str, Bounded]:
            assert rows.losses is not None
            return {SCORE: histogram(rows.losses, bins, self.records)}

        draw = context.draw(SCORE)
        found = draw.query(sums, at=None if at is None else [at])
        (counts,) = context.ledger.release(draw, found)[SCORE].values()
        return self.score.read(counts, context.ledger.last_noise.std)

    def check(self) -> None:
        """See that model and metric, as they are now, keep records apart.

        Raises:
            CrossRecordError, DataError: they do not.
        """
        rows, engine = self.rows, self.rows.engine
        engine.trace_anew()
        prepared = rows.prepare(rows.example, public_randomness(rows.seed, "example"))
        full = repeat_to(prepared, forward_rows(rows.micro_batch_size))
        engine.check(full)
        refuse_followed(engine.trials.followed_buffers(full))

    def hold_apart(self, trained: RowSource, secrets: Secrets) -> None:
        """Share the records out between the score and the training, where the score has none of its own.

        By a hash of its name, or of what it holds, under a key of the run: whether a record more is there
        changes no other's side. Of equal records, which may take each other's place, each has its own.
        """
        if self.score.share is None:
            return
        owners, source = trained.owners, trained.source
        names = source.keys(secrets) if owners is None else owners.names
        names = torch.arange(len(source)) if names is None else names
        hashed = keyed_integers(KEYS, names, secrets.stream_key(0, "records that are held apart"))
        held = hashed < int(self.score.share * KEYS)
        of_records = held if owners is None else held[owners.users]
        self.rows.members = of_records.nonzero().flatten()
        trained.members = (~(held if trained.prepare.of_users else of_records)).nonzero().flatten()


def prepare_score(given: TrainingInputs, trained: RowSource, processes: Processes) -> PreparedScore | None:
    """The score of a training, tried on a few records.

    Args:
        given: by the user.
        trained: makes the rows of the records that are trained on.
        processes: share the work.

    Raises:
        CrossRecordError, DataError, ValueError: what cannot work, named.
    """
    score, model, source = given.data.score, given.model, trained.source
    if score is None:
        return None
    of_others = score.data is not None and trained.owners is not None
    if trained.backend.is_sharded or source.is_elsewhere or of_others:
        raise ValueError(
            "a private score needs a model and records that are here as a whole and, where users are "
            "protected, some of their records: give Score(share=...), or leave it out"
        )
    source = source.of_records
    if score.data is not None:
        source = RecordSource(score.data, given.data.collate, given.data.workers)
    prepare, places = BatchPreparation(trained.prepare.device), _places(score, given.loss)
    try:
        example, probes = check_loss(model, places, source, prepare.device)
    except BatchFormError:
        raise
    except DataError as error:
        why = where_raised(error.__cause__) if error.__cause__ else str(error)
        raise DataError(
            f"outputs of the Score, or its metric, fails: {why}. By default "
            "outputs are model(batch['input']) and batch['label']; give Score(..., outputs=lambda model, "
            "batch: (model(...), batch[...])). Nothing was spent."
        ) from error
    check_held(model, score.outputs, source, example, given.sampling.population)
    prepared = prepare(example, public_randomness(trained.seed, "example"))
    engine = ScoreEngine(model, places, prepared, check=False, trust=given.run.trust, publicly=True)
    params = away_from_zero(model, places, prepared)
    random_use = Pipeline(engine, params, source, prepare, trained.seed).random_use(probes)
    rows = replace(
        trained,
        engine=engine,
        source=source,
        prepare=prepare,
        example=example,
        probes=probes,
        fills_with=None if engine.serves(fillers(prepared, 4)) else example,
        random_places="shared" in processes.all_of(random_use),
    )
    found = PreparedScore(score, rows, moved_by_a_row(given.unit.protected))
    found.check()
    return found


def _places(score: Score, loss: Loss) -> Loss:
    """From model and batch to the place of each record, [B], in evaluation mode wherever it is asked."""
    metric = score.metric

    def places(model: nn.Module, batch: Any) -> Tensor:
        model.eval()  # until the forward is over: what changes in attributes meanwhile is put back
        found = [loss(model, batch)] * 2 if metric.name == "loss" else score.outputs(model, batch)
        return metric.places(*found).float()

    return places
