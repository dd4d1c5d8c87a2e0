"""The training loop: privacy is the ledger's, the estimate the method's, the rest is here.

A step: the method draws records, asks for bounded sums, the ledger noises and books them, the method
answers an estimate of the gradient; it is put on `.grad`, the optimiser and the scheduler step. A draw
without records takes its step like any other. The model and the optimiser stay the user's: nothing is
wrapped, hooked or renamed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.gradients import GradientEngine
from equipoise.methods import DPSGD, METHODS, Method, State
from equipoise.privacy import (
    Budget,
    ChangedQueryError,
    Diagnostics,
    Draw,
    Sampling,
    Statement,
    digest,
    mark,
    unmark,
)
from equipoise.report import write_report
from equipoise.training.attach import Loss, check_loss, check_optimizer, check_scheduler, trainable
from equipoise.training.batches import Source, map_batch
from equipoise.training.checkpoint import write_atomically
from equipoise.training.describe import Description, time_once
from equipoise.training.desk import Desk
from equipoise.training.draws import RowMaker, StepContext
from equipoise.training.ema import MovingAverage
from equipoise.training.folder import RunFolder
from equipoise.training.interrupt import catch_interrupt
from equipoise.training.memory import bytes_per_record, default_micro_batch_size, step_bytes
from equipoise.training.metrics import JSONLines, MetricWriter, rewind_jsonl
from equipoise.training.model_file import save_model
from equipoise.training.processes import Processes
from equipoise.training.progress import progress_bar
from equipoise.training.randomness import generator
from equipoise.training.results import Result, Step
from equipoise.training.settings import (
    Settings,
    averaged_over_views,
    check_pieces,
    move,
    rebuild_sampling,
    watch_modes,
)
from equipoise.training.state import collect_state, restore_state

__all__ = ["PrivateTraining"]

Evaluate = Callable[[nn.Module], "Mapping[str, float] | float"]


class PrivateTraining:
    """A differentially private training of a model on private records.

    Args:
        model: any module; its trainable parameters are trained. Parts that mix records (BatchNorm) are
            refused by name.
        optimizer: any torch optimiser of the model's parameters that takes one gradient a step.
        loss: loss(model, batch) -> [B], one number a record.
        data: the private records: `equipoise.data.Records`, a dict or tuple of tensors, a map-style dataset.
        sampling: `Poisson(expected_batch_size, population, steps)` or another sampling; its numbers are
            public constants that you state, nothing of it is read from `data`.
        method: estimator of the gradient; `DPSGD()` by default.
        budget: `Budget(epsilon, delta)`.
        scheduler: a torch learning-rate scheduler; stepped after every step.
        run_dir: folder for statement, metrics, model and checkpoints; None keeps everything in memory.
        seed: public randomness (dropout, augmentation); never noise or sampling.
        reproducible: let noise and sampling follow the seed too. The result is then NOT PRIVATE, and the
            statement says so.
        micro_batch_size: records at once; chosen from the free memory by default. Never changes the result.
        ema_decay: keep a moving average of the parameters; it is evaluated and saved in place of the last
            ones.
        augmentation: (batch, generator) -> batch, record by record.
        views: augmented views of a record whose losses are averaged before its gradient is clipped.
        device: where to train; by default where the model is.
        ledger_file: a journal shared by several runs over the same data: their costs compose.
        relation: "add_or_remove_one" or "replace_one".
        collate: joins the items of a dataset to a batch.
        epsilon_every: steps between computations of the epsilon so far; 20 in all by default.
        writers: further writers of publishable metrics, such as `CSVWriter`.

    Raises:
        TypeError, ValueError: an argument that cannot work; the message names it. Nothing is spent before
            all checks passed.
        DataError: data that cannot be trained on.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss,
        data: Any,
        sampling: Sampling,
        method: Method | None = None,
        budget: Budget | None = None,
        scheduler: Any = None,
        run_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
        reproducible: bool = False,
        micro_batch_size: int | None = None,
        ema_decay: float | None = None,
        augmentation: Callable[[Any, torch.Generator], Any] | None = None,
        views: int = 1,
        device: str | torch.device | None = None,
        ledger_file: str | os.PathLike[str] | None = None,
        relation: str = "add_or_remove_one",
        collate: Callable[[list[Any]], Any] | None = None,
        epsilon_every: int | None = None,
        writers: Sequence[MetricWriter] = (),
    ) -> None:
        settings = Settings(
            seed=seed,
            reproducible=reproducible,
            micro_batch_size=micro_batch_size,
            ema_decay=ema_decay,
            views=views,
            relation=relation,
            epsilon_every=epsilon_every,
            ledger_file=None if ledger_file is None else os.fspath(ledger_file),
        )
        self._attach(
            model,
            optimizer,
            loss,
            data,
            sampling,
            method,
            budget,
            scheduler,
            settings,
            augmentation,
            device,
            collate,
        )
        self._writers = tuple(writers)
        self._open(run_dir, resume=False)

    @classmethod
    def resume(
        cls,
        run_dir: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss,
        data: Any,
        method: Method | None = None,
        scheduler: Any = None,
        augmentation: Callable[[Any, torch.Generator], Any] | None = None,
        device: str | torch.device | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        writers: Sequence[MetricWriter] = (),
    ) -> PrivateTraining:
        """Go on with a run from its last whole checkpoint; later steps are repeated with the noise they had.

        Args:
            run_dir: the folder of the run. Sampling, budget, method and settings come from there.
            model, optimizer, scheduler: of the same make as before; their state is overwritten from the
                checkpoint.
            loss, data, augmentation, collate: as before.
            method: only for methods with settings that no file can hold, such as a schedule function.
            device: where to go on.
            writers: as before.

        Raises:
            FileNotFoundError: no run lies there.
            CheckpointError: no whole checkpoint.
            ValueError: the pieces given do not fit the run.
        """
        config = RunFolder(run_dir).read_config()
        self = cls.__new__(cls)
        self._attach(
            model,
            optimizer,
            loss,
            data,
            rebuild_sampling(config["sampling"]),
            method or METHODS[config["method"]["name"]].from_config(config["method"]),
            Budget(**config["budget"]) if config["budget"] else None,
            scheduler,
            Settings(**config["settings"]),
            augmentation,
            device,
            collate,
        )
        if self.plan.fingerprint() != config["plan"]:
            raise ValueError(
                f"the privacy plan differs from the one that run_dir={str(run_dir)!r} was started with: "
                "give the same method "
                "and settings. Nothing was spent."
            )
        self._writers = tuple(writers)
        self._open(run_dir, resume=True)
        return self

    def _attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        data: Any,
        sampling: Sampling,
        method: Method | None,
        budget: Budget | None,
        scheduler: Any,
        settings: Settings,
        augmentation: Callable[[Any, torch.Generator], Any] | None,
        device: str | torch.device | None,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        """Check and connect everything; nothing is written or spent."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.sampling, self.method, self.budget = sampling, method or DPSGD(), budget
        check_pieces(sampling, self.method, budget, augmentation, settings)
        self.parameters = trainable(model)
        check_optimizer(optimizer, self.parameters)
        check_scheduler(scheduler, optimizer)
        self.device = move(model, optimizer, device)
        self.processes = Processes()
        source = Source(data, collate)
        example = check_loss(model, loss, source, self.device)
        self.plan = self.method.plan(sampling, budget, settings.relation, generator(settings.seed, "plan"))
        if settings.views > 1:
            loss = averaged_over_views(loss, settings.views)
        self._rows = RowMaker(
            None, source, self.device, 1, example, settings.seed, augmentation, settings.views
        )
        prepared = self._rows.prepare(example, "example")
        self.engine = self._rows.engine = GradientEngine(model, loss, prepared)
        self._record_bytes = bytes_per_record(model, loss, prepared)
        size = settings.micro_batch_size or default_micro_batch_size(
            self._record_bytes, self._num_parameters, self.device, sampling.expected_size
        )
        # Kept with the run: a resumed run must add in the same order to compute the same numbers.
        self.settings = replace(settings, micro_batch_size=self.processes.first(lambda: size))
        self._rows.micro_batch_size = size
        self._restore_modes = watch_modes(model)
        self._average = (
            MovingAverage(self.parameters, settings.ema_decay) if settings.ema_decay is not None else None
        )
        self._method_state: State | None = None
        self._evaluation: dict[str, float] = {}
        self.steps_done = 0
        self.processes.same("the model's parameters", digest(self.parameters))
        self.processes.same("the privacy plan", self.plan.fingerprint())

    def _open(self, run_dir: str | os.PathLike[str] | None, resume: bool) -> None:
        """Open the folder and the ledger; from here on the disk is written."""
        self.folder = RunFolder(run_dir) if run_dir is not None else None
        settings, first = self.settings, self.processes.is_first
        if self.folder is not None and not resume:
            folder = self.folder
            self.processes.first(folder.create)
            self.processes.first(folder.lock)
            self.processes.first(lambda: folder.write_config(self.config()))
        if self.folder is not None and resume:
            self.processes.first(self.folder.lock)
        position = self._load_checkpoint() if resume else 0
        # What the released numbers depend on besides parameters and records: with another value, no noise
        # is used again.
        kernels: dict[str, Any] = {
            "engine": self.engine.state_dict(),
            "micro_batch": settings.micro_batch_size,
            "views": settings.views,
            "method": self.method.config(),
        }
        kernels |= {"processes": self.processes.count, "device": self.device.type}
        self.desk = Desk(
            self.plan,
            self.budget,
            self.folder,
            settings,
            self.processes,
            position=position,
            data_fingerprint=self._rows.source.fingerprint() if first else "",
            kernels=digest(kernels),
        )
        self._public: JSONLines | None = None
        self._private: Diagnostics | None = None
        if self.folder is not None and first:
            rewind_jsonl(self.folder.metrics, self.steps_done, mode=0o644)
            rewind_jsonl(self.folder.diagnostics, self.steps_done, mode=0o600)
            self._public = JSONLines(self.folder.metrics)
            self._private = Diagnostics(self.folder.diagnostics)
        if self.folder is not None and not resume:
            self.save_checkpoint()

    # ---- what it will do, and what it may claim

    @property
    def _num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def delta(self) -> float:
        """The delta of the guarantee; below 1/population where no budget names one."""
        return self.budget.delta if self.budget is not None else 0.1 / self.sampling.population

    def config(self) -> dict[str, Any]:
        """The public settings, as `config.json` holds them."""
        return {
            "format": 1,
            "settings": self.settings.to_json(),
            "sampling": self.sampling.describe(),
            "budget": None if self.budget is None else asdict(self.budget),
            "method": self.method.config(),
            "plan": self.plan.fingerprint(),
            "optimizer": type(self.optimizer).__name__,
            "model": {"class": type(self.model).__qualname__, "parameters": self._num_parameters},
        }

    def describe(self) -> Description:
        """A dry run: steps, passes, memory, time, noise. Nothing is spent, the model is not moved."""
        result = self.plan.epsilon(self.delta)
        seconds = self._seconds_per_step()
        return Description(
            method=self.method.name,
            parameters=self._num_parameters,
            steps=self.sampling.steps,
            epochs=self.sampling.steps * self.sampling.sampling_rate,
            sampling=type(self.sampling).__name__,
            sampling_rate=self.sampling.sampling_rate,
            expected_batch_size=self.sampling.expected_size,
            micro_batch_size=self._rows.micro_batch_size,
            noise_multipliers={release.name: release.noise_multiplier for release in self.plan.releases},
            epsilon=result.value,
            delta=self.delta,
            relation=self.settings.relation,
            memory_bytes=step_bytes(
                self._record_bytes,
                self._num_parameters,
                min(self._rows.micro_batch_size, 2 * self.sampling.expected_size),
            ),
            seconds_per_step=seconds,
            seconds=seconds * self.sampling.steps,
            processes=self.processes.count,
            dense={c.name: c.reason for c in self.engine.coverage() if c.how == "dense"},
        )

    def _seconds_per_step(self) -> float:
        """Time of the rows and sums of one micro-batch, scaled to this process' share of a batch."""
        share = self.sampling.expected_size / self.processes.count
        count = min(self._rows.micro_batch_size, len(self._rows.source), max(1, math.ceil(share)))
        batch = self._rows.prepare(self._rows.source.take(torch.arange(count)), "describe")

        def work() -> None:
            (rows,) = self._rows.rows(batch, [None], "describe")
            rows.weighted_sums(1 / (1 + rows.row_norms()))

        return time_once(work) * share / count

    def statement(self) -> Statement:
        """What may be claimed about the privacy of what was released so far."""
        source = self._rows.source
        scanned = "data validated before the mechanism started"
        trusted = "data of the user's own, not validated before the mechanism started"
        claimed = self.method.claimed_epsilon(self.sampling, self.settings.relation, self.delta)
        return self.desk.statement(
            delta=self.delta,
            recipe=self.method.recipe,
            epsilon_claimed=claimed,
            assumptions=[scanned if source.is_scanned else trusted, *self.method.assumptions()],
        )

    def epsilon_so_far(self) -> float:
        """Epsilon of the releases made so far, at `delta`, other runs of a shared journal included."""
        return self.desk.spent(self.delta).value

    # ---- steps

    def __iter__(self) -> Iterator[Step]:
        """The remaining steps, each done when it is asked for; leaving early leaves a whole state."""
        while self.steps_done < self.sampling.steps and self.desk.can_go_on():
            yield self.take_step()

    def take_step(self) -> Step:
        """Draw, release, move the parameters.

        Raises:
            RuntimeError: all planned steps are done.
        """
        if self.steps_done >= self.sampling.steps:
            raise RuntimeError(
                f"all {self.sampling.steps} planned steps are done: the plan is fixed before the training, "
                "since the noise is "
                "calibrated to it. Plan more steps in a new run."
            )
        began = time.perf_counter()
        self._restore_modes()
        context = self._context()
        if self._method_state is None:
            self._method_state = self.method.init(context)
        try:
            estimate, state = self.method.step(context, self._method_state)
        except ChangedQueryError:
            if self.processes.count > 1:
                raise
            # A step repeated after a crash came out differently: it gets new records, and is charged.
            context = self._context()
            estimate, state = self.method.step(context, self._method_state)
        self._method_state = state
        missing = self.parameters.keys() - estimate.keys()
        if missing:
            raise RuntimeError(
                f"method {self.method.name!r} gave no estimate for the parameters {sorted(missing)}"
            )
        for name, parameter in self.parameters.items():
            parameter.grad = estimate[name].to(parameter.dtype)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            self._average.update(self.steps_done)
        self.steps_done += 1
        return self._note(context, estimate, rate, time.perf_counter() - began)

    def _context(self) -> StepContext:
        def depends_on() -> str:
            return digest(
                {"step": self.steps_done, "parameters": self.parameters, "method": self._method_state}
            )

        def take_draw(name: str) -> tuple[Draw, Tensor]:
            draw, ids = self.desk.open(name, depends_on, len(self._rows.source))
            return draw, self.processes.share(ids)

        return StepContext(
            self.parameters, self.steps_done, self.sampling, self.desk, take_draw, self._rows, self.processes
        )

    def _note(
        self, context: StepContext, estimate: Mapping[str, Tensor], rate: float, seconds: float
    ) -> Step:
        std, bound = self.desk.last_noise
        done, every = self.steps_done, self.settings.epsilon_every or max(1, self.sampling.steps // 20)
        due = done % every == 0 or done == self.sampling.steps
        epsilon = self.desk.progress(self.delta) if due else math.inf
        squares = sum(float(value.double().square().sum()) for value in estimate.values())
        step = Step(
            step=done,
            learning_rate=rate,
            clip_norm=bound,
            noise_std=std,
            released_norm=math.sqrt(squares),
            noise_norm=std * math.sqrt(self._num_parameters) / self.sampling.expected_size,
            epsilon=epsilon if math.isfinite(epsilon) else None,
        )
        row = {name: value for name, value in asdict(step).items() if value is not None}
        for writer in (self._public, *self._writers):
            if writer is not None and self.processes.is_first:
                writer.write(row)
        if self._private is not None:
            self._private.write(done, {**context.tally.finish(), "seconds": seconds})
        return step

    # ---- the whole training

    def run(
        self,
        evaluate: Evaluate | None = None,
        progress: bool = True,
        *,
        evaluate_every: int | None = None,
        checkpoint_every: int | None = None,
    ) -> Result:
        """Take the remaining steps; Ctrl-C finishes the step under way and leaves a checkpoint.

        Args:
            evaluate: evaluate(model) -> a number or a dict of numbers, from *public* data: the numbers are
                published. The model is in evaluation mode and has the averaged parameters where `ema_decay`
                is set.
            progress: show a progress bar on standard error.
            evaluate_every: steps between evaluations; 10 in all by default, and one at the end.
            checkpoint_every: steps between checkpoints; 20 in all by default.
        """
        steps = self.sampling.steps
        evaluate_every = evaluate_every or max(1, steps // 10)
        checkpoint_every = checkpoint_every or max(1, steps // 20)
        with (
            catch_interrupt() as interrupt,
            progress_bar(steps, self.steps_done, progress and self.processes.is_first) as bar,
        ):
            for step in self:
                last = step.step == steps
                evaluation: dict[str, float] = {}
                if evaluate is not None and (last or step.step % evaluate_every == 0):
                    evaluation = self.evaluate(evaluate)
                bar.update(step.step, step.epsilon, evaluation)
                stop = self.processes.first(lambda: interrupt.asked)
                if self.folder is not None and (last or stop or step.step % checkpoint_every == 0):
                    self.save_checkpoint()
                if stop:
                    break
        if evaluate is not None and not self._evaluation:
            self.evaluate(evaluate)
        return self.finish()

    def evaluate(self, evaluate: Evaluate) -> dict[str, float]:
        """Evaluate the (averaged) model on public data and write the numbers to the metrics."""
        self.model.eval()
        try:
            with torch.no_grad(), self._average.swapped_in() if self._average is not None else nullcontext():
                found = evaluate(self.model)
        finally:
            self._restore_modes()
        values = dict(found) if isinstance(found, Mapping) else {"score": found}
        self._evaluation = {name: float(value) for name, value in values.items()}
        row = {"step": self.steps_done} | {
            f"evaluation.{name}": value for name, value in self._evaluation.items()
        }
        for writer in (self._public, *self._writers):
            if writer is not None and self.processes.is_first:
                writer.write(row)
        return self._evaluation

    def finish(self) -> Result:
        """Write statement, model and report; at the end delete the key and put the average into the model."""
        finished = self.steps_done >= self.sampling.steps or not self.desk.can_go_on()
        statement = self.statement()
        if finished and self._average is not None:
            self._average.move_in()
        if self.folder is not None and self.processes.is_first:
            write_atomically(self.folder.statement, (statement.to_json() + "\n").encode(), mode=0o644)
            with self._average.swapped_in() if self._average is not None else nullcontext():
                save_model(self.model, self.folder.model, {"step": str(self.steps_done)})
            write_report(self.folder.path)
        if finished:
            self.desk.close()
        return Result(
            steps=self.steps_done,
            finished=finished,
            epsilon=statement.epsilon,
            delta=self.delta,
            evaluation=self._evaluation,
            run_dir=None if self.folder is None else self.folder.path,
            statement=statement,
        )

    # ---- checkpoints

    def save_checkpoint(self) -> None:
        """Write the whole state.

        Raises:
            RuntimeError: the training has no run folder.
            CheckpointError: it could not be written; the checkpoint before is intact.
        """
        if self.folder is None:
            raise RuntimeError("this training has no run_dir for checkpoints: give it run_dir=...")
        state = collect_state(self.model, self.optimizer, self.scheduler)
        state |= {
            "average": None if self._average is None else self._average.values,
            "method": mark(self._method_state),
            "engine": self.engine.state_dict(),
            "ledger": self.desk.position(),
            "evaluation": self._evaluation,
        }
        folder = self.folder
        self.processes.first(lambda: folder.checkpoints.save(self.steps_done, state))

    def _load_checkpoint(self) -> int:
        """Take over the state; the answer is the ledger's position."""
        assert self.folder is not None
        self.steps_done, state = self.folder.checkpoints.load()
        restore_state(state, self.model, self.optimizer, self.scheduler)
        if self._average is not None:
            self._average.values = {name: value.to(self.device) for name, value in state["average"].items()}
        self._method_state = unmark(map_batch(lambda value: value.to(self.device), state["method"]))
        self.engine.load_state_dict(state["engine"])
        self._evaluation = state["evaluation"]
        return int(state["ledger"])
