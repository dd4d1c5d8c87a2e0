"""A `transformers.Trainer` whose steps are private.

The loop is the library's own, so that parameters, cost and statement are those of `PrivateTraining`.
Arguments of `TrainingArguments` that have no meaning there, or would break the guarantee, are refused by
name.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise._extras import of_extra
from equipoise._files import write_atomically
from equipoise.data.padding import PadTo
from equipoise.gradients.engine_inputs import Loss
from equipoise.integrations.train_mode import to_train_mode
from equipoise.methods import Method
from equipoise.privacy import Budget, PlanUsedUpError, Poisson
from equipoise.publishing import privacy_section
from equipoise.report.run_reader import read_run
from equipoise.statements import Statement
from equipoise.training import Data, PrivateTraining, Record, Run, Score, StepReport, Users, load_model
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.interrupt import catch_interrupt
from equipoise.training.setup.repeated_records import check_apart

with of_extra():
    from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import SaveStrategy, TrainOutput

__all__ = ["PrivateTrainer", "record_losses"]

#: Arguments that keep their defaults, with the reason and what to do instead.
REFUSED = {
    "auto_find_batch_size": "the expected batch size is public; state it as per_device_train_batch_size",
    "data_seed": "which records are drawn is secret; leave it out",
    "dataloader_drop_last": "records are drawn by Poisson sampling, which has no last batch; leave it out",
    "debug": "it prints values computed from private records; debug on public ones with transformers.Trainer",
    "deepspeed": "gradients are taken by record; train without it",
    "fp16": "it scales the loss by what overflowed, which follows private records; give bf16=True",
    "fsdp": "gradients are taken by record; train without it",
    "full_determinism": "noise and draws are secret; Run(reproducible=True) is NOT PRIVATE",
    "ignore_data_skip": "a resumed run repeats the draws that it had; leave it out",
    "include_num_input_tokens_seen": "it counts the tokens of private records; leave it out",
    "label_smoothing_factor": "it belongs into the loss of a record; give PrivateTrainer(loss=...)",
    "neftune_noise_alpha": "it hooks into the model; add the noise in the model",
    "parallelism_config": "gradients are taken by record; train without it",
    "push_to_hub": "it uploads the output folder with the run's secret key and journal; upload the model "
    "by trainer.model.push_to_hub(...)",
    "restore_callback_states_from_checkpoint": "a run goes on from its run folder, which holds no callbacks",
    "skip_memory_metrics": "memory and time follow which records were drawn; leave it True",
    "torch_compile": "compiled forwards hide their operations; leave it out",
    "torch_empty_cache_steps": "it belongs to the loop of transformers; leave it out",
    "train_sampling_strategy": "records are drawn by Poisson sampling, which the guarantee is computed for; "
    "group_by_length sorts each draw",
    "use_liger_kernel": "its fused losses have no loss of a record; leave it out",
}

SORTED = ("train_sampling_strategy", "group_by_length")
"""Records of one width share forwards, in each draw."""


PRIVACY = "## Differential privacy"
"""Where the section on privacy begins in a model card."""


def check_arguments(args: TrainingArguments) -> None:
    """Refuse what has no meaning for private steps, or would break the guarantee.

    Raises:
        ValueError: naming the argument, its value, the reason and the remedy.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for name, reason in REFUSED.items():
        value = getattr(args, name, None)
        if (name, value) == SORTED:
            continue
        if name in defaults and value != defaults[name] and (value or defaults[name]):
            raise ValueError(f"TrainingArguments({name}={value!r}) does not go with private steps: {reason}.")
    if args.max_grad_norm not in (None, 0, defaults["max_grad_norm"]):
        raise ValueError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm!r}) clips the gradient of a whole batch; "
            "private steps clip each record's: give PrivateTrainer(method=DPSGD(clip_norm=...))."
        )
    if str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) in (
        "reduce_lr_on_plateau",
        "greedy",
    ):
        raise ValueError(
            f"TrainingArguments(lr_scheduler_type={args.lr_scheduler_type!r}) follows a metric; give a "
            "schedule of the step, such as 'cosine'."
        )
    if args.world_size > 1 or args.n_gpu > 1:
        raise ValueError(
            f"{args.world_size} processes and {args.n_gpu} devices: PrivateTrainer takes one of each. Set "
            "CUDA_VISIBLE_DEVICES=0, or use PrivateTraining under torchrun."
        )


def record_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The usual loss of each record, [B], by the shapes of logits and labels.

    Classes of a record: cross entropy. One number: squared error. Several: squared error for regression, else
    a binary cross entropy per label. Classes of tokens: the mean over the record's tokens whose label is not
    -100; causal language models predict the next one.

    Raises:
        TypeError: the model gives no logits, or none that fit the labels.
    """
    base = _base(model)
    config: Any = getattr(base, "config", None)
    logits, labels = record_outputs(model, batch)
    if labels.ndim == 1 and logits.ndim == 2:
        if logits.shape[1] == 1:
            return (logits[:, 0] - labels).square()
        return F.cross_entropy(logits, labels, reduction="none")
    if labels.shape == logits.shape and labels.ndim == 2:
        if getattr(config, "problem_type", None) == "regression":
            return (logits - labels).square().mean(1)
        return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
    if labels.ndim >= 2 and labels.shape == logits.shape[:-1]:
        is_causal = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if is_causal and not getattr(config, "is_encoder_decoder", False):
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", ignore_index=-100)
        return losses.flatten(1).sum(1) / (labels != -100).flatten(1).sum(1).clamp(min=1)
    raise TypeError(
        f"logits {tuple(logits.shape[1:])} and labels {tuple(labels.shape[1:])} of a record go with no usual "
        "loss; give PrivateTrainer(loss=...), [B] losses"
    )


def in_bfloat16(loss: Loss, device: torch.device) -> Loss:
    """The loss under autocast: a function, since what a function holds can be copied and looked at."""

    def loss_in_bfloat16(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss(model, batch)

    return loss_in_bfloat16


def record_outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and labels of the records: what a `Score` is computed from.

    Raises:
        TypeError: the model gives no logits.
    """
    base = _base(model)
    is_seq2seq = bool(getattr(getattr(base, "config", None), "is_encoder_decoder", False))
    # Decoders make their inputs of the labels. Other models would compute a mean loss in vain.
    inputs = batch if is_seq2seq else {name: value for name, value in batch.items() if name != "labels"}
    logits = getattr(model(**inputs), "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"{type(base).__name__} gives no logits; give PrivateTrainer(loss=...), [B] losses")
    return logits.float(), batch["labels"]


def _base(model: nn.Module) -> nn.Module:
    """The model beneath adapters."""
    adapted: Any = getattr(model, "get_base_model", None)
    return model if adapted is None else adapted()


def _refused(reason: str) -> Callable[..., Any]:
    """A method of `Trainer` that belongs to its own loop, and raises RuntimeError here."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(reason)

    return method


class PrivateTrainer(Trainer):
    """Trains privately with the arguments, callbacks and evaluation of `transformers.Trainer`.

    A step expects `per_device_train_batch_size * gradient_accumulation_steps` records. With more than one
    accumulation step the former is what goes through the model at once. An epoch is `population` over that.
    The run folder is `run` in `output_dir`.

    The training loss is private, and neither logged nor returned. Evaluation is published: its data must be
    public. Or `eval_dataset` is a `Score`, on records that are held apart: it is noised, and taken as often
    as the arguments evaluate. With `load_best_model_at_end` its best step is then what the run publishes.

    Args:
        model, args, data_collator, train_dataset, eval_dataset, processing_class: as for `Trainer`; the
            training records are private. Further arguments of `Trainer` go by name.
        population: a public number of records, or of users that are drawn; see `PrivateTraining`.
        budget, method: of `PrivateTraining`.
        unit: "record", `Record(relation="replace_one")`, or `Users(...)`, whose owner may be a column.
        run: a `Run` without folder, seed and scheduler, which `args` give.
        loss: loss(model, batch) -> [B]; by default `record_losses`.

    Attributes:
        private_training: the `PrivateTraining` beneath, once `train` was called.

    Raises:
        ValueError: an argument that does not go with private steps; the message says what to do.
    """

    state: Any  # of transformers
    eval_dataset: Any
    control: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        population: int,
        budget: Budget | None = None,
        method: Method | None = None,
        loss: Loss | None = None,
        unit: Record | Users | str = "record",
        run: Run | None = None,
        **others: Any,
    ) -> None:
        if args is None:
            args = TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args)
        if others.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func gives the loss of a batch; give loss=..., a function "
                "loss(model, batch) -> [B]"
            )
        for name in ("training_step", "compute_loss", "get_train_dataloader"):
            if getattr(type(self), name) is not getattr(PrivateTrainer, name):
                raise TypeError(
                    f"{type(self).__name__}.{name} would not be called in a private step; give loss=... for "
                    "the loss of each record, and data_collator=... for its batch"
                )
        _check_public(train_dataset, eval_dataset)
        self.population, self.budget, self.method = population, budget, method
        self._loss = record_losses if loss is None else loss
        self._unit, self._run = unit, Run.of(run)
        self.private_training: PrivateTraining | None = None
        if isinstance(eval_dataset, Score):
            outputs = record_outputs if eval_dataset.outputs is Score.outputs else eval_dataset.outputs
            eval_dataset = dataclasses.replace(eval_dataset, outputs=outputs)
            args.metric_for_best_model = f"private_{eval_dataset.metric.name}"
            args.greater_is_better = eval_dataset.larger_is_better
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, processing_class, **others)

    # ---- public constants of the run

    @property
    def run_dir(self) -> Path:
        """The run folder: statement, metrics, model, report; and the private part."""
        return Path(self.args.output_dir) / "run"

    @property
    def sampling(self) -> Poisson:
        """Poisson sampling of the expected batch size, for the planned steps."""
        expected = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        steps = self.args.max_steps
        if steps <= 0:
            steps = math.ceil(self.args.num_train_epochs * math.ceil(self.population / expected))
        return Poisson(expected_batch_size=expected, population=self.population, steps=steps)

    def statement(self) -> Statement:
        """What may be claimed about the run's privacy, by its whole plan.

        Raises:
            RuntimeError: before `train`.
        """
        return self._training().statement()

    # ---- the loop

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Take the private steps, with callbacks, evaluation and checkpoints as in `Trainer`.

        Args:
            resume_from_checkpoint: True goes on with the run in the run folder. Checkpoints in the output
                folder hold models alone, and no run.
            trial: refused; every trial is a run of its own, with an epsilon of its own.
            ignore_keys_for_eval: as in `Trainer`.
        """
        if trial is not None:
            raise ValueError("trial: give a PrivateTrainer of its own to each trial; the costs of all add up")
        training = self._start(bool(_checked(resume_from_checkpoint, self.run_dir)))
        sampling = training.sampling
        per_epoch = math.ceil(self.population / sampling.expected_size)
        args, handler = self.args, self.callback_handler
        self.state.compute_steps(args, sampling.steps)
        self.state.init_training_references(self, sampling.steps, math.ceil(sampling.steps / per_epoch), None)
        self.state.train_batch_size = args.per_device_train_batch_size
        self.state.global_step = training.steps_done
        self.state.epoch = training.steps_done / per_epoch
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = None  # callbacks do not see private records
        self.control = handler.on_train_begin(args, self.state, self.control)
        self.is_in_train = True
        try:
            if args.eval_on_start and not training.steps_done:
                self._evaluate(None, ignore_keys_for_eval)
            self._take_steps(training, per_epoch, ignore_keys_for_eval)
        finally:
            self.is_in_train = False
        # Any other stop, as of a clock, is one from which train(resume_from_checkpoint=True) goes on.
        early = any(
            isinstance(one, EarlyStoppingCallback)
            and one.early_stopping_patience_counter >= one.early_stopping_patience
            for one in handler.callbacks
        )
        result = training.finish(early=early)
        figures = {} if result.epsilon is None else {"epsilon": result.epsilon, "delta": result.delta}
        self.log(dict(figures))
        self.save_state()
        if args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.control = handler.on_train_end(args, self.state, self.control)
        return TrainOutput(self.state.global_step, math.nan, figures)

    def _take_steps(self, training: PrivateTraining, per_epoch: int, ignore_keys: Any) -> None:
        args, state, handler = self.args, self.state, self.callback_handler
        reports = iter(training)
        self.control.should_training_stop = False
        with catch_interrupt() as interrupt, self._moments_of_the_step(training.optimizer):
            while training.steps_done < state.max_steps and not self.control.should_training_stop:
                if training.steps_done % per_epoch == 0:
                    self.control = handler.on_epoch_begin(args, state, self.control)
                self.control = handler.on_step_begin(args, state, self.control)
                report = next(reports, None)
                if report is None:
                    break
                state.global_step, state.epoch = report.step, report.step / per_epoch
                self.control = handler.on_step_end(args, state, self.control)
                self._follow(report, ignore_keys)
                if report.step % per_epoch == 0 or report.step == state.max_steps:
                    self.control = handler.on_epoch_end(args, state, self.control)
                    self._follow(report, ignore_keys)
                if interrupt.signal is not None:
                    training.save_checkpoint()
                    break

    @contextmanager
    def _moments_of_the_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, callbacks are called before and after the optimiser's step; gradients are the estimate."""

        def hook(moment: Callable[..., Any]) -> Callable[..., None]:
            def call(*_: Any) -> None:
                self.control = moment(self.args, self.state, self.control)

            return call

        handler = self.callback_handler
        before = optimizer.register_step_pre_hook(hook(handler.on_pre_optimizer_step))
        after = optimizer.register_step_post_hook(hook(handler.on_optimizer_step))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _follow(self, report: StepReport, ignore_keys: Any) -> None:
        """Log, evaluate and save, where the callbacks ask for it."""
        if self.control.should_log:
            names = ("learning_rate", "clip_norm", "released_norm", "noise_norm", "epsilon")
            found = {name: getattr(report, name) for name in names}
            self.log({name: value for name, value in found.items() if value is not None})
        if self.control.should_evaluate:
            metrics = self._evaluate(None, ignore_keys)
            is_best = bool(metrics) and self._determine_best_metric(metrics=metrics, trial=None)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_best
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False

    def _start(self, resume: bool) -> PrivateTraining:
        if self.train_dataset is None:
            raise ValueError("train_dataset is missing: give the private records to PrivateTrainer")
        if not resume and (self.run_dir / "config.json").exists():
            ended = RunFolder(self.run_dir).has_ended()
            way = (
                "It is finished: name"
                if ended
                else "Go on with it by train(resume_from_checkpoint=True), or name"
            )
            raise FileExistsError(
                f"output_dir={self.args.output_dir!r} holds a run already. {way} a new folder; what the old "
                "run spent stays spent."
            )
        if self.private_training is not None:
            self.private_training.close()
        args, sampling, model = self.args, self.sampling, cast(nn.Module, self.model)
        to_train_mode(model)
        self._checkpoint_activations(model)
        self.create_optimizer()
        self.create_scheduler(num_training_steps=sampling.steps)
        data, collate = self._records()
        if isinstance(self.eval_dataset, Score):
            per_epoch = math.ceil(self.population / sampling.expected_size)
            self.state.compute_steps(args, sampling.steps)
            every = self.state.eval_steps if args.eval_strategy == "steps" else per_epoch
            times = max(1, args.eval_on_start + math.ceil(sampling.steps / every))
            self.eval_dataset = dataclasses.replace(self.eval_dataset, times=times)
        shared: dict[str, Any] = {
            "loss": in_bfloat16(self._loss, args.device) if args.bf16 else self._loss,
            "data": Data(
                data,
                collate=collate,
                workers=args.dataloader_num_workers,
                microbatch_size=args.per_device_train_batch_size
                if args.gradient_accumulation_steps > 1
                else None,
                widths=self._widths(),
                score=self.eval_dataset if isinstance(self.eval_dataset, Score) else None,
            ),
            "method": self.method,
            "unit": self._protected(),
            "run": dataclasses.replace(
                self._run, folder=self.run_dir, seed=args.seed, scheduler=self.lr_scheduler
            ),
            "device": args.device,
        }
        if resume:
            training = PrivateTraining.resume(self.run_dir, model, self.optimizer, **shared)
            self._read_state(training.steps_done)
        else:
            training = PrivateTraining(
                model,
                self.optimizer,
                sampling=sampling,
                budget=self.budget,
                **shared,
            )
            self.state.log_history = []
        self.private_training = training
        return training

    def _protected(self) -> Any:
        """The unit, with the column of owners as its values: the model does not take that column."""
        unit, columns = self._unit, getattr(self.train_dataset, "column_names", ())
        if isinstance(unit, Users) and isinstance(unit.owner, str) and unit.owner in columns:
            return dataclasses.replace(unit, owner=list(self.train_dataset[unit.owner]))
        return unit

    def _widths(self) -> list[int] | None:
        """To which of the collator's public lengths each record is padded, if draws are sorted by it."""
        if getattr(self.args, SORTED[0], None) != SORTED[1]:
            return None
        if not isinstance(self.data_collator, PadTo):
            raise ValueError(
                "TrainingArguments(train_sampling_strategy='group_by_length') needs public lengths: give "
                'data_collator=PadTo(collate, (64, 128, 256), {"input_ids": 0})'
            )
        data, column = self.train_dataset, self.args.length_column_name
        is_given = column in getattr(data, "column_names", ())
        fields = self.data_collator.values

        def length(item: Any) -> int:
            return max(len(item[name]) for name in fields if name in item)

        lengths = data[column] if is_given else [length(data[number]) for number in range(len(data))]
        return [self.data_collator.width(each) for each in lengths]

    def _records(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The private records and what joins them, without the columns that the model does not take."""
        data, collate = self.train_dataset, self.data_collator
        if hasattr(data, "column_names") and hasattr(data, "remove_columns"):  # of the package datasets
            return self._remove_unused_columns(data, description="training"), collate
        return data, self._get_collator_with_removed_columns(collate, description="training")

    def _checkpoint_activations(self, model: Any) -> None:
        args: Any = self.args
        for kind in ("activation", "gradient"):  # the older name of transformers is the second one
            if getattr(args, f"{kind}_checkpointing", None) and hasattr(
                model, f"{kind}_checkpointing_enable"
            ):
                options = getattr(args, f"{kind}_checkpointing_kwargs", None)
                getattr(model, f"{kind}_checkpointing_enable")(**{f"{kind}_checkpointing_kwargs": options})
                return

    def _training(self) -> PrivateTraining:
        if self.private_training is None:
            raise RuntimeError("nothing was trained yet: call train() first")
        return self.private_training

    # ---- evaluation, on public records

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on public records, as `Trainer` does; in a training the numbers go into its metrics too.

        Raises:
            ValueError: these are the private records.
            RuntimeError: a `Score` is asked for outside of `train`.
        """
        if isinstance(score := self.eval_dataset if eval_dataset is None else eval_dataset, Score):
            if not self.is_in_train:
                raise RuntimeError("eval_dataset is a Score, which train() takes as often as it is planned")
            try:
                taken = self._training().evaluate(score, keep_best=self.args.load_best_model_at_end)
            except PlanUsedUpError:  # by those of steps that were taken again, or that a callback asked for
                warnings.warn("the Score was taken as often as it was booked, and is not again", stacklevel=2)
                return {}
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in taken.items()}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics
        _check_public(self.train_dataset, eval_dataset)

        def measured(model: nn.Module) -> dict[str, float]:
            with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
                found.update(
                    super(PrivateTrainer, self).evaluate(eval_dataset, ignore_keys, metric_key_prefix)
                )
            # What accelerate hangs on the model's forward is taken back: steps run what was planned.
            self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            self.accelerator.free_memory()
            timing = ("_runtime", "_per_second", "_time")
            numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
            return {name: value for name, value in numbers.items() if not name.endswith(timing)}

        found: dict[str, float] = {}
        if self.is_in_train:
            self._training().evaluate(measured)
        else:
            measured(cast(nn.Module, self.model))
        return found

    def _load_best_model(self) -> None:
        """The best model of a `Score` is the one that the run publishes."""
        if isinstance(self.eval_dataset, Score):
            load_model(cast(nn.Module, self.model), self.run_dir)
        else:
            super()._load_best_model()

    # ---- what is saved

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`, with the statement of its run once there is one."""
        super().save_model(output_dir, _internal_call)
        statement = self.run_dir / "statement.json"
        if self.private_training is not None and statement.exists() and not self.is_in_train:
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            write_atomically(folder / statement.name, statement.read_bytes(), mode=0o644)
            self._write_privacy_section(folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's card, with the statement of the run as its last section."""
        super().create_model_card(*args, **kwargs)
        self._write_privacy_section(Path(self.args.output_dir))

    def _write_privacy_section(self, folder: Path) -> None:
        """Say in the folder's card, the Trainer's or PEFT's, what the statement says; once, at its end."""
        card = folder / "README.md"
        if card.exists() and (self.run_dir / "statement.json").exists():
            text = card.read_text(encoding="utf-8").partition(PRIVACY)[0].rstrip()
            section = privacy_section(read_run(self.run_dir)).replace("\n## ", "\n### ")
            write_atomically(card, f"{text}\n\n{PRIVACY}\n\n{section}".encode(), mode=0o644)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        self._training().save_checkpoint()
        super()._save_checkpoint(model, trial)
        self.save_state()

    def _save_nothing(self, output_dir: Any) -> None:
        """The run folder has the optimiser, the scheduler and what is random; bfloat16 needs no scaler."""

    _save_optimizer_and_scheduler = _save_scaler = _save_rng_state = _save_nothing

    def _read_state(self, steps: int) -> None:
        """The log of the run that goes on, without steps that will be repeated."""
        path = Path(self.args.output_dir) / "trainer_state.json"
        if not path.exists():
            return
        self.state = TrainerState.load_from_json(str(path))
        self.state.log_history = [row for row in self.state.log_history if row.get("step", 0) <= steps]
        if (
            self.state.best_model_checkpoint is not None
            and not Path(self.state.best_model_checkpoint).is_dir()
        ):
            self.state.best_model_checkpoint = None

    # ---- what belongs to the loop of transformers

    training_step: Any = _refused(
        "a private step is taken by train(); for a loop of your own use equipoise.PrivateTraining"
    )
    get_train_dataloader: Any = _refused(
        "private records are drawn in secret; trainer.train_dataset holds them"
    )
    hyperparameter_search: Any = _refused(
        "every trial of a search costs privacy: give one PrivateTrainer to each, with one journal, "
        "run=Run(journal=...), which composes their costs"
    )
    push_to_hub: Any = _refused(
        "the output folder holds the run's secret key and journal; upload the model by "
        "trainer.model.push_to_hub(...)"
    )


def _check_public(train_dataset: Any, eval_dataset: Any) -> None:
    several = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    check_apart(train_dataset, [*several], "eval_dataset")


def _checked(resume: Any, run_dir: Path) -> bool:
    """Whether to go on with the run in the run folder.

    Raises:
        ValueError: another folder is named.
    """
    if resume is None or isinstance(resume, bool):
        return bool(resume)
    if Path(resume).resolve() != run_dir.resolve():
        raise ValueError(
            f"resume_from_checkpoint={str(resume)!r} is not the run folder {str(run_dir)!r}: only that one "
            "holds what was spent. Give resume_from_checkpoint=True."
        )
    return True
