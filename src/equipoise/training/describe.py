"""The dry run: what a training will do, take and cost, with nothing spent.

Steps, passes, records per step and noise are public constants; memory and time are measured on a few records
through the gradient engine, whose results are thrown away.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from equipoise._rounding import noise_in_words, plain, rounded_up
from equipoise._say import page_width, wrapped
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.compare import Independence
from equipoise.gradients.engine_inputs import repeat_to
from equipoise.privacy import Ledger, PrivacyPlan, Release, epsilon, prefix_error
from equipoise.privacy.ledger.run_record import GUARANTEES, compose_events
from equipoise.privacy.mechanisms.correlated_gaussian import CorrelatedGaussian
from equipoise.privacy.noise.streams import ReleaseStreams, normals, way_of_noise
from equipoise.statements.assumptions import DATA
from equipoise.training.forwards import forward_rows
from equipoise.training.randomness import public_randomness
from equipoise.training.setup.memory_use import step_bytes
from equipoise.training.setup.private_scores import SCORE, without_score
from equipoise.training.setup.training_setup import TrainingSetup, run_of_budget

CLIPPED = "a gradient above the clip norm is shortened to it, and a weight in the loss then adds nothing"


@dataclass(frozen=True)
class Description:
    """What `PrivateTraining.describe` found.

    Attributes:
        method: the method's name.
        parameters: number of trainable parameters P.
        steps: optimiser steps.
        steps_done: of these, how many were taken before the dry run.
        epochs: expected passes over the population.
        sampling: the scheme's name, as the method planned it for the draws of its steps.
        sampling_rate: probability of a record, or of a user where users are drawn, to be in a draw.
        expected_batch_size: the public divisor.
        is_counted: whether the stated population is exactly the number of records, or users, that the data
            hold, though it is public and theirs is private. For the data's owner only.
        micro_batch_size: records or users at once.
        noise_multipliers: release name -> noise multiplier, the first and the last where it changes.
        noise: release name -> its noise in words, with how it is correlated over steps.
        unproven: names of the quantities that leave with noise of a scale that no proof covers, or with none.
        guarantee: the best that the run's statement will say: "proven", "worst_case" or "none".
        epsilon: at the end of all steps, other runs of a shared journal included; None where the guarantee
            is not "proven": a worst case is only known once the steps are made.
        private: whether the noise is secret; if not, epsilon is what secret noise would give.
        claim: what the method's publication claims, and what was found of it.
        delta: of the guarantee.
        relation: neighbouring relation.
        unit: of privacy, "record" or "user".
        drawn: what a draw draws and batch sizes count, "record" or "user".
        records_per_user: the most records of a user that are used; None where records are protected, or where
            a row is a user's update.
        memory_bytes: estimated peak above the model: factors of a micro-batch and copies of the parameters.
        passes: over an expected batch that the method takes a step, on average: forward and backward, or
            forward alone where it takes no gradients.
        seconds_per_step: of the micro-batches of all passes, the noise, the journal and the digests; each is
            measured alone.
        seconds: the whole training.
        processes: how many processes share the work.
        dense: parameters that are computed record by record for want of a rule, with the reason.
        unused: parameters that the loss did not depend on, on a few records: noise alone would move them.
        held: tensors of model and loss that are as long as the data, or hold public records; no epsilon
            covers what they hold at the start.
        written: buffers, attributes and variables that a forward writes to, and that stay as they were: what
            it writes is thrown away.
        independence: whether a record's gradient follows from that record alone.
        reading: the same of the owner's code that reads and prepares records; "" if none runs.
        way_of_launching: how a device other than the CPU is given the operations; "" for the CPU.
        way_of_noise: how a device other than the CPU makes noise; "" for the CPU.
        compile_seconds: seconds that `torch.compile` took, in the first run on a machine; 0 without it.
        run_of_budget: which run it is of those that share the budget; "" if it has the rest to itself.
        score_error: standard error of a private score's number if its records, of which the stated population
            tells how many, were spread evenly over the places of its metric; None if noise would hide them.
    """

    method: str
    parameters: int
    steps: int
    steps_done: int
    epochs: float
    sampling: str
    sampling_rate: float
    expected_batch_size: float
    is_counted: bool
    micro_batch_size: int
    noise_multipliers: dict[str, float]
    noise: dict[str, str]
    unproven: list[str]
    guarantee: str
    epsilon: float | None
    private: bool
    claim: str
    delta: float
    relation: str
    unit: str
    drawn: str
    records_per_user: int | None
    memory_bytes: int
    passes: float
    seconds_per_step: float
    seconds: float
    processes: int
    dense: dict[str, str]
    unused: list[str]
    held: list[str]
    written: list[str]
    independence: Independence
    reading: str = ""
    way_of_launching: str = ""
    way_of_noise: str = ""
    compile_seconds: float = 0.0
    run_of_budget: str = ""
    score_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, which commands print: without what follows from the number of private records."""
        return {name: value for name, value in asdict(self).items() if name != "is_counted"}

    def __str__(self) -> str:
        noise = [f"multiplier {name} {words}" for name, words in self.noise.items()]
        noise += [f"no proven noise for {name}" for name in self.unproven]
        passes, taken = f"{self.passes:.1f}", f"{self.steps_done} taken, " if self.steps_done else ""
        slow = f", {len(self.dense)} tensors one record at a time, which is slow" if self.dense else ""
        unused, held, written = map(", ".join, (self.unused, self.held, self.written))
        rows = [
            ("population", self.is_counted and f"exactly the number of {self.drawn}s in the data: if it was "
            "counted, state a public round number near it (this line is for the data's owner)"),
            ("sampling", f"{self.sampling}, rate {self.sampling_rate:.4g}, {self.expected_batch_size:g} "
            f"{self.drawn}s expected per step, in microbatches of up to {self.micro_batch_size}"
            + f", {self.processes} processes" * (self.processes > 1)),
            ("noise", ", ".join(noise) or "none"),
            ("made by", self.way_of_noise),
            ("launched", self.way_of_launching),
            ("privacy", self._privacy()),
            ("score", SCORE in self.noise and self._score_error()),
            ("parameters", f"{self.parameters:,}{slow}"),
            *(("dense", f"{name}: {reason}") for name, reason in self.dense.items()),
            ("clipping", self.noise and CLIPPED),
            ("records", self.independence),
            ("reading", self.reading),
            ("compiled", self.compile_seconds and f"in {self.compile_seconds:.0f} s"),
            ("memory", f"about {self.memory_bytes / 1e6:,.0f} MB in addition to the model"),
            ("time", f"about {self.seconds_per_step * 1e3:,.0f} ms per step"
            + f" for {passes} passes over each drawn {self.drawn}" * (passes != "1.0")
            + f", {timedelta(seconds=round(self.seconds))} in all"),
            ("unused", unused and f"{unused}: no record that was tried reaches them, and noise alone moves "
            "them until one does; if none can, freeze them with requires_grad_(False)"),
            ("held", held and f"{held}: as long as the data, or equal to records of it; no epsilon covers "
            "what is held at the start, so private records must not be in it"),
            ("not updated", written and f"{written}: what a forward writes there is thrown away"),
        ]  # fmt: skip
        lines = [
            f"{self.method}: {self.steps} steps planned, {taken}{self.epochs:.1f} passes over the population"
            + "; nothing spent yet" * (not self.steps_done),
            *(f"  {name:<11} {said}" for name, said in rows if said),
        ]
        return wrapped("\n".join(lines), page_width(), indent=14)

    def _score_error(self) -> str:
        if self.score_error is None:
            return "hidden by its noise: hold more records apart, or score less often"
        return f"standard error about {self.score_error:.2g}, each time"

    def _privacy(self) -> str:
        if self.guarantee == "none":
            return f"no guarantee, so no epsilon. {self.claim}"
        if self.epsilon is None:
            return f"no proven epsilon; the statement will hold a worst case. {self.claim}"
        seeded = "" if self.private else ", were the noise secret: NOT PRIVATE"
        relation = self.relation.replace("_", "-")
        users = "" if self.unit == "record" else " of users"
        if self.records_per_user is not None:
            users += f", {self.records_per_user} record{'s'[: self.records_per_user > 1]} of each at most"
        return (
            f"epsilon {rounded_up(self.epsilon)} at delta {plain(self.delta)} ({relation}{users}){seeded}"
            f"{self.run_of_budget and ', '}{self.run_of_budget}"
        )


def describe(setup: TrainingSetup, ledger: Ledger, steps_done: int) -> Description:
    """What this training would do; a micro-batch is made and thrown away.

    Args:
        setup: of the training.
        ledger: of the run, for what it holds already and for the other runs of a shared journal.
        steps_done: how many steps the run has taken.
    """
    plan, rows = setup.plan, setup.rows
    of_steps = "batch" in [release.draw for release in plan.releases]
    sampling = plan.sampling_of("batch") if of_steps else setup.sampling
    coverage = rows.engine.coverage()
    own = replace(setup.method_plan, releases=without_score(plan))
    passes = setup.method.gradients_per_step(own) / sampling.expected_size
    seconds = passes * _seconds_a_pass(setup) + _seconds_of_a_release(setup, ledger) * (
        sum(plan.count(release) for release in plan.releases) / sampling.steps
    )
    # The plan's event knows nothing of unproven releases and disclosures: its epsilon is the run's only
    # where there are none.
    guarantee = best_guarantee(setup, ledger)
    others = ledger.other_runs().values()
    total = epsilon(compose_events([plan.event(), *others]), setup.delta, plan.relation).value
    if not math.isfinite(total):  # a run in the shared journal is not private
        guarantee = "none"
    unit = plan.unit
    return Description(
        method=setup.method.name,
        parameters=setup.num_parameters,
        steps=sampling.steps,
        steps_done=steps_done,
        epochs=sampling.steps * sampling.sampling_rate,
        sampling=type(sampling).__name__,
        sampling_rate=sampling.sampling_rate,
        expected_batch_size=sampling.expected_size,
        is_counted=setup.unit.relation == "add_or_remove_one"
        and len(rows.source) == setup.sampling.population,
        micro_batch_size=rows.micro_batch_size,
        noise_multipliers=_noise_multipliers(plan),
        noise={release.name: _noise(release, plan.count(release)) for release in plan.releases},
        unproven=[row["name"] for row in plan.describe()["unproven"]],
        guarantee=guarantee,
        epsilon=total if guarantee == "proven" else None,
        private=not setup.run.reproducible,
        claim=setup.method.card.claim,
        delta=setup.delta,
        relation=setup.unit.relation,
        unit=unit.name,
        drawn=unit.drawn,
        records_per_user=None if unit.name == "record" or unit.rows == "update" else unit.records,
        memory_bytes=step_bytes(
            rows.record_bytes,
            setup.num_parameters,
            rows.micro_batch_size,
            setup.method.forward_only,
        ),
        passes=passes,
        seconds_per_step=seconds,
        seconds=seconds * sampling.steps,
        processes=setup.processes.count,
        dense={c.name: c.reason for c in coverage if c.how == "dense"},
        unused=[c.name for c in coverage if c.how == "unused"],
        held=setup.held,
        written=setup.written,
        independence=setup.rows.engine.independence,
        reading="".join(
            text.removeprefix(DATA)
            for text in setup.found
            if text.startswith(DATA) and not text.startswith(f"{DATA}proved")
        ),
        way_of_launching=setup.rows.engine.way_of_launching,
        way_of_noise=way_of_noise(setup.device),
        compile_seconds=setup.rows.engine.compile_seconds,
        run_of_budget=run_of_budget(setup.budget, others),
        score_error=_score_error(setup),
    )


def _score_error(setup: TrainingSetup) -> float | None:
    if setup.score is None:
        return None
    release, records = setup.plan[SCORE], setup.plan.sampling_of(SCORE).population
    std = release.at(0).standard_deviation(SCORE, release.max_bound)
    found = setup.score.score.expected_error(records, std)
    return None if math.isnan(found) else found


def _noise(release: Release, count: int) -> str:
    """The noise of a release in words, and what correlation over steps leaves of it in their sum."""
    words, mechanism = noise_in_words(release.mechanism.describe()), release.mechanism
    if not isinstance(mechanism, CorrelatedGaussian) or not mechanism.memory:
        return words
    left = mechanism.prefix_error(count) / prefix_error([1.0], count)
    return f"{words} (sums of steps have {left:.2f} times the noise of dp-sgd at this multiplier)"


def best_guarantee(setup: TrainingSetup, ledger: Ledger) -> str:
    """The weakest of what the plan, the method's disclosures and the run so far leave to claim."""
    # As the ledger counts them: what is unproven is in the plan, or it may not leave; disclosures are in no
    # plan, so that the method's word counts.
    disclosed = "none" if setup.method.guarantee == "none" else "proven"
    return max(setup.plan.guarantee, disclosed, ledger.guarantee, key=GUARANTEES.index)


def _seconds_a_pass(setup: TrainingSetup) -> float:
    """Time of the rows and sums of one micro-batch, for each that this process' share of a batch makes."""
    rows = setup.rows
    share = setup.sampling.expected_size / setup.processes.parts
    # The records that were looked at already, repeated: others may be broken.
    example = repeat_to(rows.example, forward_rows(rows.micro_batch_size))
    randomness = public_randomness(rows.seed, "describe")

    def work() -> None:
        batch = rows.prepare(example, randomness)
        try:
            (made,) = rows.of_batch(rows.engine.by_plan, batch, [None], randomness)
        except PlanMismatch:
            (made,) = rows.of_batch(rows.engine.alone, batch, [None], randomness)
        if not rows.engine.forward_only:
            made.weighted_sums(1 / (1 + made.row_norms()))

    # Items that are made on demand are read one by one.
    reading = 0.0 if rows.source.has_rows else time_once(rows.check_source)
    return time_once(work) * math.ceil(share / rows.micro_batch_size) + reading * share


def _seconds_of_a_release(setup: TrainingSetup, ledger: Ledger) -> float:
    """Time of its noise, of its line in the journal and of digests of the parameters."""
    parameters = dict(setup.parameters)
    streams, path = ReleaseStreams.under(bytes(32)), ledger.journal.path  # nothing private is noised

    def work() -> None:
        normals(streams, parameters, 1.0)
        for _ in range(4):  # when a step begins, draws, has its estimate and ends
            ledger.digest(parameters)
        with tempfile.TemporaryFile(dir=path and path.parent) as file:
            file.write(b"release")
            file.flush()
            os.fsync(file.fileno())  # no release leaves before its line is on the device

    return time_once(work)


def time_once(run: Callable[[], Any]) -> float:
    """Median seconds of a call after one warm-up call."""
    run()
    return statistics.median(timeit.repeat(run, number=1, repeat=3))


def _noise_multipliers(plan: PrivacyPlan) -> dict[str, float]:
    found = {}
    for release in plan.releases:
        changes = release.mechanism.changes
        found[f"{release.name} at first" if changes else release.name] = release.noise_multiplier
        if changes:
            found[f"{release.name} at last"] = release.at(changes[-1]).noise_multiplier
    return found
