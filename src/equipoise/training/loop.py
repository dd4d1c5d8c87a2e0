"""The training loop. The method estimates the gradient, the ledger adds noise and accounts for it.

A step: the method draws records and asks for bounded sums. The ledger adds noise to them and books them. The
method answers with an estimate of the gradient; it is put on `.grad`, and optimiser and scheduler step. A
draw without records takes its step like any other. The model and the optimiser stay the user's: nothing is
wrapped, hooked or renamed.
"""

from __future__ import annotations

import math
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from equipoise import _validate
from equipoise._files import CheckpointError, PathLike, write_atomically
from equipoise._foreign_errors import cause_of, where_raised
from equipoise._rounding import correlation_in_words
from equipoise._say import say
from equipoise.distributed.processes import Processes
from equipoise.distributed.shared_ledger import own_ledger
from equipoise.gradients.compare import Independence
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import Method, State
from equipoise.privacy import Budget, Ledger, PlanUsedUpError, Sampling
from equipoise.statements import Statement, statement_of
from equipoise.statements.assumptions import MODEL, Assumption, with_public_step
from equipoise.training.arguments import Record, Run, TrainingInputs, Users, refuse_moved
from equipoise.training.describe import Description, best_guarantee, describe
from equipoise.training.folder.config_file import rebuild, rebuild_method, refuse_other_engine, settings_of
from equipoise.training.folder.run_folder import BOTH, LOAD, RunFolder, save_model
from equipoise.training.interrupt import catch_interrupt
from equipoise.training.moving_average import Values
from equipoise.training.population import warn_of_delta, warn_of_population
from equipoise.training.progress import progress_bar
from equipoise.training.restarts import FinishedTraining, check_same_run, continued, state_of, undo_start
from equipoise.training.run_ledger import booked_plan
from equipoise.training.scores import Score
from equipoise.training.setup.start import check_start
from equipoise.training.setup.training_setup import prepare
from equipoise.training.stages import Stage
from equipoise.training.started_run import StartedRun, continue_run, start_run
from equipoise.training.step import Result, StepReport
from equipoise.training.traces import Traces, digests

Evaluate = Callable[[nn.Module], "Mapping[str, float] | float"] | Score

OF_FOLDER = ("sampling", "budget", "compile", "stages")
"""Arguments that a run which goes on takes from its folder alone."""


# An error of a score beyond which its best step is one of noise. A choice: evaluations of a training that
# goes well differ by some hundredths.
UNSURE = 0.05


class PrivateTraining:
    """A differentially private training of a model on private records.

    Args:
        model: any module; its trainable parameters are trained. Parts that mix records (BatchNorm) are
            refused by name.
        optimizer: any torch optimiser of the model's parameters that takes one gradient per step.
        loss: loss(model, batch) -> [B], one number per record; or loss(model, batch, step), where step is a
            tensor with the number of the step, from 1 on. Compute with it; a branch on it is refused.
        data: the private records: `equipoise.data.Records`, a dict or tuple of tensors or of `numpy.memmap`,
            a map-style dataset. Or `Data(records, ...)`, which says how they become batches.
        sampling: `Poisson(expected_batch_size, population, steps)` or another sampling; its numbers are
            public constants that you state, nothing of it is read from `data`.
        method: estimator of the gradient; `DPSGD()` by default.
        budget: `Budget(epsilon, delta)`.
        unit: whose adding, removing or replacing the guarantee covers: one "record",
            `Record(relation="replace_one")`, or `Users(owner=..., records_per_user=...)` with all of their
            records.
        run: folder for statement, metrics, model and checkpoints, or `Run(folder, journal=..., seed=...)`;
            None keeps everything in memory.
        device: where to train; by default where the model is.
        compile: let `torch.compile` make kernels of what a step replays, which takes tens of seconds at the
            start (less once PyTorch has cached them) and may make steps faster or slower: try it. It needs a
            C++ compiler or a GPU. The statement says that the compiler is trusted.
        stages: parameters to thaw and freeze at steps fixed beforehand, `[Stage(0, "head.*"), Stage(20,
            "head.*", "layer2.*")]`; all trainable parameters in every step by default. What a method
            remembers begins anew with each stage. A step takes as long as if all were trained.

    Attributes:
        ledger_class: what takes the releases; None for the ledger that the method names. A subclass that
            audits a training names its own.

    Raises:
        TypeError, ValueError: an argument that cannot work; the message names it, and the new place of one
            that has moved. Nothing is spent before all checks passed.
        DataError: data that cannot be trained on.
    """

    ledger_class: ClassVar[Callable[..., Ledger] | None] = None

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
        unit: Record | Users | str = "record",
        run: Run | PathLike | None = None,
        device: str | torch.device | None = None,
        compile: bool = False,
        stages: Sequence[Stage] = (),
        **moved: Any,
    ) -> None:
        refuse_moved(moved)
        given = TrainingInputs.of(
            model=model,
            optimizer=optimizer,
            loss=loss,
            data=data,
            sampling=sampling,
            method=method,
            budget=budget,
            unit=unit,
            run=run,
            device=device,
            compile=compile,
            stages=stages,
        )
        setup = prepare(given)
        # Once more before the first step: what a run left may be put into the model after the start.
        self._check_start = partial(check_start, given, setup.processes)
        if setup.processes.is_first:
            warn_of_population(
                round(len(setup.rows.source) * (1 - ((setup.data.score and setup.data.score.share) or 0))),
                setup.sampling.population,
                setup.sampling.expected_size,
                setup.unit.protected.drawn,
            )
            warn_of_delta(setup.delta, setup.sampling.population)
        folder = None if setup.run.folder is None else RunFolder(setup.run.folder)
        self._take_up(start_run(setup, folder, ledger_class=type(self).ledger_class))

    _check_start: Callable[[], list[str]] | None = None

    def _take_up(self, run: StartedRun) -> None:
        """Be the training of a run that can take steps."""
        self._run, self._steps = run, run.steps
        self._setup = setup = run.setup
        self.folder, self.ledger = run.folder, run.ledger
        self.model, self.optimizer, self.scheduler = setup.model, setup.optimizer, setup.run.scheduler
        self.sampling, self.method, self.budget = setup.sampling, setup.method, setup.budget
        self.parameters, self.device = setup.parameters, setup.device
        self.processes, self.plan, self.engine = setup.processes, setup.plan, setup.rows.engine
        self.method_plan = setup.method_plan
        self._found, self._evaluation = setup.found, run.evaluation
        # The best evaluation: its step, numbers and parameters, and how many followed that were not better.
        self._best = dict(run.best)
        name = self.processes.first(lambda: own_ledger(self.ledger).record.run)
        started = frozenset[str]() if self.steps_done else digests(self.parameters.values())
        self._traces, self._is_traced = Traces(name, started), False
        self._trace()
        # What `finish` gave all processes; None where a step was taken since.
        self._finished_with: Statement | None = None
        # The next step needs a release of which the plan has none left.
        self._plan_used_up = False
        if self.folder is not None and self.processes.is_first:  # no method of this: nobody could drop it
            self._steps.note = self.folder.add_assumptions
        began = "resume" if self._check_start is None else "start"
        place = None if self.folder is None else str(self.folder.path)
        self._run.metrics.event(began, self.steps_done, folder=place)
        # A loaded state may not fit: the first step shows it.
        self._state_is_tried = self._check_start is not None

    @classmethod
    def resume(
        cls,
        folder: PathLike,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss,
        data: Any,
        method: Method | None = None,
        unit: Record | Users | str = "record",
        run: Run | None = None,
        device: str | torch.device | None = None,
        **moved: Any,
    ) -> Self:
        """Go on with a run from its last whole checkpoint; later steps are repeated with the noise they had.

        Args:
            folder: of the run. Sampling, budget, method and settings come from there.
            model, optimizer: of the same make as before; their state is overwritten from the checkpoint.
            loss: as before.
            data: the records as before, or `Data` with what no file holds: `collate`, `augmentation`, `ids`
                as before, and `workers` from here on.
            method: only for methods with settings that no file can hold, such as a schedule function.
            unit: only for users: `Users(owner=..., ...)` as before.
            run: `Run` with what no file holds: `scheduler`, `writers` and `diagnostics` as before.
            device: where to go on.

        Raises:
            FileNotFoundError: no run lies there.
            CheckpointError: no whole checkpoint.
            ValueError: what is given does not fit the run, or a version with other steps began it.
            RuntimeError: the run is finished.
            DataError: `sampling` assigns items to draws by their numbers, and items have other numbers now.
        """
        refuse_moved(moved)
        place = RunFolder(folder)
        config = Processes().first(place.read_config)
        if Processes().first(place.has_ended):
            raise RuntimeError(
                f"folder={str(folder)!r} is finished already, so there is nothing to resume: "
                f"{LOAD.format(str(place.model))}, and {BOTH}. For more steps start a new run, with one "
                "journal for both. Nothing was spent"
            )
        refuse_other_engine(config, place.path)
        began = rebuild(config)
        given = TrainingInputs.of(
            model=model,
            optimizer=optimizer,
            loss=loss,
            data=data,
            sampling=began.sampling,
            method=method or rebuild_method(config),
            budget=began.budget,
            unit=unit,
            run=run,
            device=device,
        )
        given = continued(place, began, given)
        booked = Processes().first(lambda: booked_plan(place, began.run))
        setup = prepare(given, began, booked)
        training = cls.__new__(cls)
        training._take_up(continue_run(setup, place, ledger_class=cls.ledger_class))
        return training

    @classmethod
    def start_or_resume(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any
    ) -> Self | FinishedTraining:
        """Begin a run, or go on with the one in its folder: for scripts that something restarts.

        `torchrun --max-restarts` starts the same script again after a process was killed. A start that was
        killed before its first checkpoint released nothing; it is undone, and the run begins anew. For a run
        that has ended the result is its own, and the model gets its parameters.

        Args:
            model, optimizer, arguments: as for the class; `run` names a folder.

        Raises:
            ValueError: `run` names no folder, or the run there has another sampling or budget, or other
                settings.
        """
        given, processes = TrainingInputs.of(model=model, optimizer=optimizer, **arguments), Processes()
        if given.run.folder is None:
            raise ValueError(
                "run names no folder, where a restarted script finds its run: give run=Run(folder)"
            )
        folder = RunFolder(given.run.folder)
        found = processes.first(lambda: state_of(folder))
        if found in ("ended", "open"):
            began = rebuild(processes.first(folder.read_config))
            check_same_run(folder, began, given, {} if found == "ended" else settings_of(given))
        if found == "ended":
            return FinishedTraining(folder, model, processes)
        if found == "open":
            kept = {name: one for name, one in arguments.items() if name not in OF_FOLDER}
            return cls.resume(
                folder.path, model, optimizer, **kept | {"method": given.method, "run": given.run}
            )
        if found == "unbegun":
            processes.first(lambda: undo_start(folder))
        return cls(model, optimizer, **arguments)

    # ---- what it will do, and what it may claim

    @property
    def delta(self) -> float:
        """The delta of the guarantee; below 1/population where no budget names one."""
        return self._setup.delta

    @property
    def _assumed(self) -> list[str]:
        """What was found out by now."""
        return Assumption.of_all([*self._found, *self._steps.found])

    def config(self) -> dict[str, Any]:
        """The public settings, as `config.json` holds them."""
        return self._setup.config(self._assumed)

    def describe(self) -> Description:
        """A dry run: steps, passes, memory, time, noise. Nothing is spent, the model is not moved.

        Raises:
            RuntimeError: of several processes this is not the first one, which keeps the ledger.
            NotImplementedError: processes hold parts of the model, so that one cannot run it.
        """
        if self._setup.is_sharded:
            raise NotImplementedError(
                "describe() times a forward in the first process, and this model runs in all of them: "
                "call it in one process before fully_shard or parallelize_module"
            )
        found = describe(self._setup, own_ledger(self.ledger), self.steps_done)
        return replace(found, independence=self.independence)

    @property
    def independence(self) -> Independence:
        """Whether a record's gradient follows from that record alone, by what the start and the steps found.

        Its `word` is "proved" (for all values of the records), or "compared" (on a few of them) with the
        `reason`: an operation without a rule, or why the model cannot be traced. Of a resumed run it is the
        weakest that any of its processes found, as in the statement.
        """
        (text,) = (text for text in self._assumed if text.startswith(MODEL))
        return Independence.of(text.removeprefix(MODEL))

    def statement(self, *, stop_fixed_beforehand: bool = False) -> Statement:
        """What may be claimed about the run's privacy.

        The figure is that of the whole plan, however many of its steps were taken: it holds whatever decides
        when to stop. `epsilon_so_far` is what was spent. Of several processes the first one can say it at any
        time without the others; those say what `finish` gave them.

        Args:
            stop_fixed_beforehand: claim what `finish(stop_fixed_beforehand=True)` would.

        Raises:
            RuntimeError: this is another process, and `finish` was not called since its last step.
        """
        if not self.processes.is_first and self._finished_with is not None:
            return self._finished_with
        found, ledger = self._booked_statement(stop_fixed_beforehand), own_ledger(self.ledger)
        can_prove = best_guarantee(self._setup, ledger) == "proven"
        if can_prove or found.guarantee != "proven" or found.stop_fixed_beforehand:
            return found
        # What leaves without a proof is booked as it leaves: before the first step the journal lacks it.
        hole = {"kind": "release_unproven", "reason": self.method.card.claim, "worst_case": None}
        return found.without_guarantee([hole | {"count": self.sampling.steps}])

    def _booked_statement(self, stop_fixed_beforehand: bool) -> Statement:
        """The statement of what is booked, which `equipoise verify` computes again from the journal."""
        ledger = own_ledger(self.ledger)
        setup, method = self._setup, self.method
        claimed = method.claimed_epsilon(setup.method_plan, self.delta)
        return statement_of(
            ledger,
            delta=self.delta,
            recipe=method.recipe,
            epsilon_claimed=claimed,
            assumptions=[*setup.assumptions(self._assumed), *_validate.by_author(self)],
            stop_fixed_beforehand=stop_fixed_beforehand,
        )

    def epsilon_so_far(self) -> float:
        """Epsilon of the releases made so far, at `delta`, other runs of a shared journal included.

        Raises:
            RuntimeError: of several processes this is not the first one, which keeps the ledger.
        """
        return own_ledger(self.ledger).spent(self.delta).value

    # ---- steps

    @property
    def steps_done(self) -> int:
        """How many steps moved the parameters."""
        return self._steps.done

    @property
    def method_state(self) -> State | None:
        """What the method carries to the next step; None before the first."""
        return self._steps.state

    def _can_go_on(self) -> bool:
        """Whether the plan has releases left, or booked ones that are yet to be repeated, or none at all."""
        with self.processes.together():
            self._steps.settle()
        return not self._plan_used_up and self.ledger.can_go_on

    def __repr__(self) -> str:
        done = f"step {self.steps_done} of {self.sampling.steps}"
        noise = "".join(correlation_in_words(release.mechanism.describe()) for release in self.plan.releases)
        return f"PrivateTraining({self.method.name}{noise}, {done}, {type(self.model).__name__})"

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError(
            "a training cannot be copied or pickled: two would draw under one key. save_checkpoint() and "
            "PrivateTraining.resume(...) go on with it elsewhere"
        )

    def __iter__(self) -> Iterator[StepReport]:
        """The remaining steps, each done when it is asked for; leaving early leaves a whole state."""
        while self.steps_done < self.sampling.steps and self._can_go_on():
            try:
                step = self.take_step()
            except PlanUsedUpError:
                # Steps repeated with other numbers were charged twice. A method with several kinds of draw
                # can use up one while others are left. Of several processes each has this error.
                self._plan_used_up = True
                return
            yield step

    def take_step(self) -> StepReport:
        """Draw, release, move the parameters.

        After an error or an interrupt the next call repeats the step with the records and the noise that it
        had. Nothing is charged again. If the parameters had moved already, the step counts as done.

        Raises:
            RuntimeError: all planned steps are done.
        """
        if self.steps_done >= self.sampling.steps:
            raise RuntimeError(
                f"all {self.sampling.steps} planned steps are done: the plan is fixed before the training, "
                "since the noise is calibrated to it. Plan more steps in a new run; if that begins from this "
                "model, give both runs one journal, run=Run(journal=...), which adds up their costs."
            )
        if self._check_start is not None:
            with self.processes.together():
                self._assume(self._check_start())
            self._check_start = None
        with self.processes.together():
            try:
                outcome = self._steps.take()
            except (KeyError, AttributeError, TypeError, IndexError) as error:
                if self._state_is_tried:
                    raise
                raise CheckpointError(
                    f"the first step after resuming failed ({where_raised(error)}): the state in the "
                    "checkpoint is not what method and optimizer wrote, or the loss fails. Resume from a "
                    "copy of the checkpoint; the step is repeated with the noise it had."
                ) from cause_of(error)
            finally:
                self._trace()
            self._state_is_tried, self._finished_with = True, None
            return self._run.metrics.step(self.steps_done, outcome, self.ledger)

    def public_step(self, fn: Callable[[], Any]) -> Any:
        """Call `fn`, which may move the parameters between steps by public or released numbers alone.

        For public records between private steps, weight clipping, or going back to the best snapshot. It
        costs no epsilon; the statement names `fn` and its number of calls among the assumptions. What has to
        happen after every step is cheaper in `optimizer.register_step_post_hook`. Of several processes each
        calls it, and changes its model in the same way.

        Returns:
            What `fn` returns.

        Raises:
            RuntimeError: the run has ended, something else changed the model since the last step, or the
                models of two processes are no longer the same.
        """
        if self.processes.first(lambda: own_ledger(self.ledger).record.closed):
            raise RuntimeError("public_step: the run has ended, and its statement no longer changes")
        with self.processes.together():
            answer = self._steps.accept(fn)
        self._finished_with = None
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        self._found = with_public_step(self._found, name)
        if self.folder is not None and self.processes.is_first:
            self.folder.write_assumptions(self._found)
        return answer

    def _trace(self) -> None:
        """From its first step on the parameters are known as those of this run."""
        if self.steps_done and not self._is_traced:
            self._traces.trained(self.parameters.values())
            self._is_traced = True

    # ---- the whole training

    def run(
        self,
        evaluate: Evaluate | None = None,
        progress: bool = True,
        *,
        evaluate_every: int | None = None,
        checkpoint_every: int | None = None,
        keep_best: bool = False,
        patience: int | None = None,
        stop: Literal["exit", "return"] | None = None,
    ) -> Result:
        """Take the remaining steps; Ctrl-C and SIGTERM finish the step under way and leave a checkpoint.

        Args:
            evaluate: evaluate(model) -> a number or a dict of numbers, from *public* data: the numbers are
                published. The model is in evaluation mode and has the averaged parameters where `ema_decay`
                is set. If it looks at private records that were set aside, give it an attribute
                `held_out = True`: the statement then says that epsilon does not cover those. Or the
                `Score` of the data, which is noised and paid for.
            progress: show a progress bar on standard error.
            evaluate_every: steps between evaluations; 10 in all by default (of a `Score` its `times`), and
                one at the end.
            checkpoint_every: steps between checkpoints; 20 in all by default.
            keep_best: publish the parameters of the best evaluation, in the model at the end too. The first
                number of an evaluation decides: the largest, or the least where `evaluate.larger_is_better`
                is False, as of a `Score` by its metric.
            patience: end the run after so many evaluations that were not better. Epsilon stays that of the
                plan.
            stop: what SIGTERM does after the checkpoint. "exit" raises SystemExit(143), so that a scheduler
                does not count the job as done; "return" returns a result with `finished` False, and says
                nothing. By default "exit" in a script and "return" in an interactive session. Ctrl-C
                returns. That a run was stopped, or goes on, is one line on standard error.
        """
        if stop not in (None, "exit", "return"):
            raise ValueError(f"stop={stop!r}: give 'exit' or 'return'")
        steps = self.sampling.steps
        if not (evaluate is None or callable(evaluate) or isinstance(evaluate, Score)):
            raise TypeError(
                f"evaluate is {_validate.what_is(evaluate)}; give a function evaluate(model) that returns a "
                "number or a dict of numbers"
            )
        if patience is not None:
            _validate.count("the evaluations to wait for a better one", patience=patience)
            keep_best = True
        if keep_best and (evaluate is None or self._setup.is_sharded):
            raise ValueError("keep_best needs evaluate, and a model that each process holds as a whole")
        if not keep_best:  # of what was given before
            self._best = {}
        least = -(-steps // evaluate.times) if isinstance(evaluate, Score) else 1
        if evaluate_every is None:
            evaluate_every = max(least, steps // 10)
        if checkpoint_every is None:
            checkpoint_every = max(1, steps // 20)
        unused = [one.name for one in self.engine.coverage() if one.how == "unused"]
        if unused and not self.steps_done and self.processes.is_first:
            warnings.warn(
                f"no record that was tried reaches {', '.join(unused)}, and noise alone moves them until one "
                "does (experts, rare classes, skipped layers); if none can, freeze them with "
                "requires_grad_(False) before the training",
                stacklevel=2,
            )
        _validate.count("the steps between evaluations", evaluate_every=evaluate_every)
        _validate.count("the steps between checkpoints", checkpoint_every=checkpoint_every)
        if evaluate_every < least:
            raise ValueError(
                f"evaluate_every={evaluate_every} takes the score more often than planned: give {least} or "
                "more, or Score(times=...)"
            )
        speaks = self.processes.is_first and (progress or self.folder is not None)
        if speaks and 0 < self.steps_done < steps:
            say(f"going on from step {self.steps_done:,} of {steps:,}")
        with (
            self.processes.together(),
            catch_interrupt() as interrupt,
            progress_bar(steps, self.steps_done, progress and self.processes.is_first) as show,
        ):
            over = self._gives_up(patience)
            for step in () if over else self:
                last = step.step == steps
                evaluation: dict[str, float] = {}
                if evaluate is not None and (last or step.step % evaluate_every == 0):
                    evaluation = self._evaluated(evaluate, keep_best)
                    over = self._gives_up(patience)
                show(step.step, step.epsilon, evaluation)
                stopped = self.processes.first(lambda: interrupt.signal is not None)
                if self.folder is not None and (last or over or stopped or step.step % checkpoint_every == 0):
                    self.save_checkpoint()
                if stopped or over:
                    break
        if evaluate is not None and not self._evaluation:
            self._evaluated(evaluate, keep_best)
        result = self.finish(early=over)
        stopped_by = None if result.finished else self.processes.first(lambda: interrupt.signal)
        result = replace(result, stopped_by=stopped_by)
        if stopped_by is not None:
            self._run.metrics.event("stop", result.steps, reason=signal.Signals(stopped_by).name)
        exits = stop == "exit" or (stop is None and not (hasattr(sys, "ps1") or "ipykernel" in sys.modules))
        exits = exits and stopped_by == signal.SIGTERM
        if stopped_by is not None and speaks and stop != "return":
            word, ways = ("", []) if exits else (" (result.finished is False)", ["run() in this process"])
            saved = "nothing saved, for want of a folder"
            if self.folder is not None:
                saved = f"saved in {self.folder.path}"
                ways.append("PrivateTraining.start_or_resume(...)")
            again = f". To go on: {' or '.join(ways)}" if ways else ""
            say(f"stopped at step {result.steps:,} of {steps:,}{word}, {saved}{again}")
        if exits:
            raise SystemExit(128 + signal.SIGTERM)
        return result

    def _evaluated(self, evaluate: Evaluate, keep_best: bool) -> dict[str, float]:
        """An evaluation in a run; empty where those that were charged again used the score up."""
        with suppress(PlanUsedUpError):
            return self.evaluate(evaluate, keep_best=keep_best)
        return {}

    def _keep_best(self, found: dict[str, float], evaluate: Evaluate) -> None:
        """Keep what an evaluation judged, if the first of its numbers is the best so far."""
        value, *error = found.values()
        if isinstance(evaluate, Score) and not error[0] <= UNSURE * max(1.0, abs(value)):
            is_unknown = math.isnan(error[0])
            if is_unknown or not self._best:  # later ones differ little
                warnings.warn(
                    f"the score's noise alone is {error[0]:.2g}, so that the best step follows from noise "
                    "rather than from the model: hold more records apart, score less often, or take a score "
                    "with less noise ('accuracy' has less than 'auc', a smaller bound less than a large one)",
                    stacklevel=5,
                )
            if is_unknown:  # a number that nobody knows the error of is not the best
                value = math.nan
        value *= 1 if getattr(evaluate, "larger_is_better", True) else -1
        if self._best and not value > self._best["value"]:
            self._best = {**self._best, "since": self._best["since"] + 1}
            return
        average = self._setup.average
        judged = self.parameters if average is None else average.values
        self._best = {
            "step": self.steps_done,
            "value": -math.inf if math.isnan(value) else value,
            "since": 0,
            "evaluation": found,
            "values": {name: one.detach().clone() for name, one in judged.items()},
        }

    def _gives_up(self, patience: int | None) -> bool:
        """Whether so many evaluations in a row were not better."""
        return bool(patience and self._best and self._best["since"] >= patience)

    def evaluate(self, evaluate: Evaluate, *, keep_best: bool = False) -> dict[str, float]:
        """Evaluate the (averaged) model and write the numbers to the metrics.

        Args:
            evaluate, keep_best: as for `run`.

        Raises:
            PlanUsedUpError: a score was taken as often as it is planned.
        """
        with self.processes.together():
            self._steps.check()
        found = self._scored(evaluate) if isinstance(evaluate, Score) else self._measured(evaluate)
        self._note_evaluation(found)
        if keep_best:
            self._keep_best(found, evaluate)
        return found

    def _scored(self, score: Score) -> dict[str, float]:
        prepared, average = self._setup.score, self._setup.average
        if prepared is None or prepared.score is not score:
            raise ValueError(
                "evaluate is a Score that this training has not planned: give it as data=Data(records, "
                "score=score), and the same one here"
            )
        at = None if average is None else average.values
        return self._steps.ask(lambda context, _: prepared.taken(context, at))

    def _measured(self, evaluate: Callable[[nn.Module], Any]) -> dict[str, float]:
        average = self._setup.average
        self.model.eval()
        try:
            with (
                torch.no_grad(),
                average.swapped_in() if average is not None else nullcontext(),
            ):
                if self.steps_done:  # the parameters that are judged are the ones that get copied
                    self._traces.left(self.parameters.values())
                found = evaluate(self.model)
        finally:
            self._setup.restore_modes()
        values = dict(found) if isinstance(found, Mapping) else {"score": found}
        try:
            numbers = {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError):
            kinds = ", ".join(f"{name}: {_validate.what_is(value)}" for name, value in values.items())
            raise TypeError(
                f"evaluate(model) returns {{{kinds}}}; it must return a number or a dict of numbers"
            ) from None
        is_held_out = getattr(evaluate, "held_out", False)
        self._assume([Assumption.HELD_OUT if is_held_out else Assumption.EVALUATED])
        return numbers

    def _note_evaluation(self, numbers: dict[str, float], **more: float) -> None:
        self._evaluation = numbers
        self._run.metrics.evaluation(self.steps_done, numbers | more)

    def _assume(self, found: Sequence[str]) -> None:
        """Name these in the statement from now on, and for whoever goes on with the run."""
        new = [one for one in found if one not in self._found]
        self._found = [*self._found, *new]
        if new and self.folder is not None and self.processes.is_first:
            self.folder.add_assumptions(new)

    def finish(self, *, stop_fixed_beforehand: bool = False, early: bool = False) -> Result:
        """Write statement and model.

        After the last step also put the average into the model, book the end of the run and delete the key:
        nothing more can be released.

        Args:
            stop_fixed_beforehand: end the run here, before its last planned step, and claim the epsilon of
                the steps taken, not of the plan. It is right only if this stop was fixed before the training,
                or followed from nothing that the training released: a clock, and not an accuracy, a loss or
                a gradient. The statement names that as an assumption.
            early: end the run here, whatever decided it. Epsilon stays that of the plan.
        """
        with self.processes.together():
            self._steps.check()
        steps, kept, folder = self.steps_done, self._kept, self.folder
        is_over = stop_fixed_beforehand or early or steps >= self.sampling.steps
        finished = is_over or not self._can_go_on()
        statement = self._finished_with = self.processes.first(
            lambda: self._booked_statement(stop_fixed_beforehand)
        )
        if stop_fixed_beforehand:
            # Before it is published: a run that went on would make the smaller claim untrue.
            self.processes.first(lambda: own_ledger(self.ledger).close(stop_fixed_beforehand=True))
        if finished and self._best:  # written last: it is of what is published
            self._note_evaluation(self._best["evaluation"], best_step=self._best["step"])
        if finished and kept is not None:
            self._traces.left(self.parameters.values())
            kept.move_in()
            self._steps.watch.accept_parameters()
        elif kept is not None and self.processes.is_first:
            remedy = "give run=folder, whose model file holds them, or take the other steps"
            if folder is not None:
                remedy = f"load_model(model, {str(folder.model)!r})"
            warnings.warn(
                f"the run stopped after {steps} of its {self.sampling.steps} steps: the model in memory "
                "holds the last parameters, from which a step goes on, not the averages (ema_decay) or the "
                f"best ones (keep_best). For those: {remedy}",
                stacklevel=2,
            )
        ended_early = finished and not stop_fixed_beforehand and steps < self.sampling.steps
        if ended_early and folder is not None:
            self.processes.first(lambda: folder.write_early_end(steps))
        if folder is not None:
            with self.processes.together():
                self._publish(folder, statement)
            self.processes.all_well()
        if finished:
            self.end(stop_fixed_beforehand)
            reason = (
                "fixed beforehand" if stop_fixed_beforehand
                else "patience" if early
                else "all steps" if steps >= self.sampling.steps
                else "plan used up"
            )  # fmt: skip
            self._run.metrics.event("finish", steps, reason=reason, epsilon=statement.epsilon)
        if ended_early and not early and self.processes.is_first:
            warnings.warn(
                f"the run has ended after {steps} of its {self.sampling.steps} steps: steps that it computed "
                "with other numbers after it was resumed (other processes, another device, other records) "
                "were charged again, and not enough releases are left for another step. Epsilon is that of "
                "the plan. A scheduler did not reach its end. A smaller checkpoint_every loses fewer steps.",
                stacklevel=2,
            )
        return Result(
            steps=steps,
            finished=finished,
            epsilon=statement.epsilon,
            delta=self.delta,
            evaluation=self._evaluation,
            run_dir=None if folder is None else folder.path,
            statement=statement,
            best_step=self._best.get("step"),
        )

    @property
    def _kept(self) -> Values | None:
        """What is published in place of the last parameters."""
        return Values(self.parameters, self._best["values"]) if self._best else self._setup.average

    def _publish(self, folder: RunFolder, statement: Statement) -> None:
        """Write statement and model; every process helps with a sharded model."""
        kept, writes = self._kept, self.processes.is_first
        if writes:
            write_atomically(folder.statement, (statement.to_json() + "\n").encode(), mode=0o644)
        if writes or self._setup.is_sharded:
            with kept.swapped_in() if kept is not None else nullcontext():
                trained = "\n".join(self.parameters)
                told = {"step": str(self.steps_done), "run": self._traces.run, "trained": trained}
                save_model(self.model, folder.model, told, writes=writes)
        if writes:
            folder.page.unlink(missing_ok=True)  # of an earlier statement, if there is one

    def end(self, stop_fixed_beforehand: bool = False) -> None:
        """Book the end of the run, and delete the key and noise: nothing more can be released.

        Args:
            stop_fixed_beforehand: as for `finish`.
        """

        def on_rank_0() -> None:
            own = own_ledger(self.ledger)
            own.close(stop_fixed_beforehand)
            # Before the key goes: a run that is killed between the two is ended again when it is resumed.
            if self.folder is not None:
                self.folder.checkpoints.forget_noise()
            own.secrets.delete()

        self.processes.first(on_rank_0)
        self._traces.left(self.parameters.values())
        self._setup.rows.source.close()
        if self.folder is not None:
            self.folder.unlock()

    def close(self) -> None:
        """Let go of the folder, so that another process or object can go on with the run; this one cannot."""
        self._steps.watch.stop(
            "this training was closed: go on with the run by PrivateTraining.resume(folder, ...)"
        )
        self._traces.left(self.parameters.values())
        self._setup.rows.source.close()
        if self.processes.is_first:
            own_ledger(self.ledger).journal.close()
        if self.folder is not None:
            self.folder.unlock()

    # ---- checkpoints

    def save_checkpoint(self) -> None:
        """Write the whole state.

        Raises:
            RuntimeError: the training has no run folder.
            CheckpointError: it could not be written; the checkpoint before is intact.
        """
        self._run.save_checkpoint(self._evaluation, self._best)
        self._run.metrics.event("checkpoint", self.steps_done)

    def synced_place(self) -> dict[str, Any]:
        """Where the ledger stands; the journal is on its device when this returns."""
        return self._run.synced_place()
