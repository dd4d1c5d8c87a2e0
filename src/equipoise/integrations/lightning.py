"""Private training of a `LightningModule` by a `lightning.Trainer`, with its callbacks and loggers.

`fit` stands for `trainer.fit`. The module stays as it is; while it is fitted, its training steps are those of
a `PrivateTraining`, and what they log is public. While private records go through the module, it has no
trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise._extras import of_extra
from equipoise._files import PathLike
from equipoise._tree import leaves
from equipoise.gradients.engine_inputs import Loss
from equipoise.integrations.train_mode import to_train_mode
from equipoise.privacy import Sampling
from equipoise.training import Data, PrivateTraining, Run
from equipoise.training.loop import OF_FOLDER
from equipoise.training.setup.repeated_records import check_apart

with of_extra():
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["fit"]

LOGGED = ("learning_rate", "clip_norm", "released_norm", "noise_norm", "epsilon")

_AVERAGE = "it moves the parameters; give run=Run(ema_decay=...)"
#: Callbacks by the name of their class, with the reason and what to do instead.
REFUSED_CALLBACKS = {
    "BatchSizeFinder": "it takes steps of its own; state the expected batch size in sampling=...",
    "LearningRateFinder": "it takes steps of its own; choose the rate on public data",
    "ModelPruning": "it moves the parameters; prune the trained model",
    "SpikeDetection": "it reads the training loss, which is private",
    "StochasticWeightAveraging": _AVERAGE,
    "WeightAveraging": _AVERAGE,
}

#: Hooks of a module or a callback that no private step calls, with what to do instead.
REFUSED_HOOKS = {
    ("optimizer_step", "lr_scheduler_step"): (
        "rates are those of configure_optimizers(); a warm-up is a scheduler there, such as LambdaLR"
    ),
    ("configure_gradient_clipping",): "records are clipped by method=DPSGD(clip_norm=...)",
    ("backward", "on_before_backward", "on_after_backward", "on_before_zero_grad", "optimizer_zero_grad"): (
        "on_before_optimizer_step is, with the released gradient"
    ),
    ("on_before_batch_transfer", "on_after_batch_transfer"): (
        "prepare private records in data=... or loss=..., public ones in validation_step"
    ),
}


def fit(
    trainer: Trainer,
    module: LightningModule,
    *,
    loss: Loss,
    data: Any,
    sampling: Sampling,
    val_dataloaders: Any = None,
    public_step: Callable[[Any], Any] | None = None,
    run: Run | PathLike | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    **options: Any,
) -> PrivateTraining:
    """Fit a module privately: `trainer.fit`, with private training steps in place of the module's.

    Optimiser and scheduler come from `module.configure_optimizers()`, and validation from the module. What
    validation logs is published: its records must be public. An epoch is the population over the expected
    batch size. The training ends with the plan, or when the trainer stops.

    Args:
        trainer: on one device, without gradient clipping or accumulation: records are clipped by the method,
            and go through the model a few at a time.
        module: its `training_step` is not called.
        loss: loss(module, batch) -> [B], one number per record. The module has no trainer in it: `log` logs
            nothing there, since what it is given follows private records.
        data, sampling, run: of `PrivateTraining`; the scheduler is the module's.
        val_dataloaders: as for `trainer.fit`.
        public_step: called with the module after each private step. The first of several optimizers is then
            the private one; it steps the others (a GAN's generator), by public and released numbers alone
            (see `PrivateTraining.public_step`). Their state is in no checkpoint.
        resume: go on with the run in the folder of `run`. Checkpoints of Lightning hold the model alone, and
            no run.
        checkpoint_every: steps between checkpoints in the folder; 20 in all by default.
        options: further arguments of `PrivateTraining`: `budget`, `method`, `unit` and the others.

    Returns:
        The training, finished.

    Raises:
        ValueError: a setting or callback of the trainer that does not go with private steps; it is named.
        TypeError: the module or a callback has a hook that no private step calls; it is named.
    """
    _check(trainer)
    _check_evaluated(data, val_dataloaders)
    begun = Run.of(run)
    if resume and begun.folder is None:
        raise ValueError("resume=True needs run=..., the folder of the run that goes on")
    bridge = _Bridge(loss, data, sampling, begun, resume, checkpoint_every, public_step, options)
    own, was_automatic = type(module), module.automatic_optimization
    # The same object, so that its logging, hooks and checkpoints are the user's.
    module.__class__ = type(own.__name__, (_PrivateSteps, own), {"_bridge": bridge})
    module.automatic_optimization = False
    evaluations = _Evaluations(bridge)
    trainer.callbacks.append(evaluations)
    try:
        try:
            trainer.fit(module, val_dataloaders=val_dataloaders)
        finally:
            trainer.callbacks.remove(evaluations)
            module.__class__, module.automatic_optimization = own, was_automatic
        assert bridge.training is not None
        bridge.training.finish()
    except BaseException:
        if bridge.training is not None:
            bridge.training.close()
        raise
    return bridge.training


def _check_evaluated(data: Any, loaders: Any) -> None:
    """Refuse to evaluate on private records."""
    evaluated = [getattr(loader, "dataset", loader) for loader in leaves(loaders)]
    check_apart(data.records if isinstance(data, Data) else data, evaluated, "val_dataloaders")


def _check(trainer: Trainer) -> None:
    """Refuse what has no meaning for private steps, or would break the guarantee."""
    known: Any = trainer
    refused = {
        "gradient_clip_val": (None, "it clips the gradient of a batch; give method=DPSGD(clip_norm=...)"),
        "accumulate_grad_batches": (1, "state the expected batch size in sampling=..."),
        "overfit_batches": (0.0, "draws are those of the sampling; leave it out"),
        "limit_train_batches": (1.0, "the sampling has the steps; leave it out"),
        "fast_dev_run": (False, "a step costs privacy; PrivateTraining.describe() is a dry run"),
        "world_size": (1, "train on one device, or use PrivateTraining under torchrun"),
    }
    for name, (usual, reason) in refused.items():
        value = getattr(known, name)
        if value != usual and not (name == "gradient_clip_val" and value == 0):
            raise ValueError(f"Trainer({name}={value!r}) does not go with private steps: {reason}.")
    if str(known.precision) not in ("32-true", "64-true", "bf16-true", "bf16-mixed"):
        raise ValueError(
            f"Trainer(precision={known.precision!r}) scales the loss by what overflowed, which follows "
            "private records (GradScaler); give precision='bf16-mixed', which needs no scaling."
        )


def _check_hooks(trainer: Any, module: LightningModule) -> None:
    """Refuse callbacks that train in their own way, and hooks that would be ignored."""
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if (reason := REFUSED_CALLBACKS.get(kind.__name__)) is not None:
                raise ValueError(
                    f"the callback {type(callback).__name__} does not go with private steps: {reason}."
                )
    for owner in (module, *trainer.callbacks):
        parent = LightningModule if owner is module else Callback
        for names, remedy in REFUSED_HOOKS.items():
            for name in names:
                if hasattr(parent, name) and is_overridden(name, owner, parent):
                    raise TypeError(
                        f"{type(owner).__name__}.{name} would not be called in a private step: {remedy}."
                    )


@contextmanager
def _without_trainer(module: LightningModule) -> Iterator[None]:
    """Detached: what follows a private record reaches no logger, and copies of the module hold no trainer."""
    trainer, module.trainer = module.trainer, None
    try:
        yield
    finally:
        module.trainer = trainer


@dataclass
class _Bridge:
    """What a fit is made of, and its training once there is one."""

    loss: Loss
    data: Any
    sampling: Sampling
    run: Run
    resume: bool
    checkpoint_every: int | None
    public_step: Callable[[Any], Any] | None
    options: dict[str, Any]
    training: PrivateTraining | None = field(default=None, init=False)
    public: list[nn.Parameter] = field(default_factory=list, init=False)

    def start(self, module: Any) -> None:
        """Begin or go on, with the optimiser and the scheduler that Lightning made."""
        trainer = module.trainer
        optimizer, *others = trainer.strategy.optimizers
        if (others and self.public_step is None) or len(trainer.strategy.lr_scheduler_configs) > 1:
            raise ValueError(
                f"configure_optimizers() gives {1 + len(others)} optimizers and "
                f"{len(trainer.strategy.lr_scheduler_configs)} schedulers; let it give one optimizer, and "
                "one scheduler at most. Others than the first, such as that of a GAN's generator, are "
                "stepped by public_step=..., a function of the module"
            )
        self.public = [one for other in others for group in other.param_groups for one in group["params"]]
        for parameter in self.public:
            parameter.requires_grad_(False)
        scheduler = None
        for config in trainer.strategy.lr_scheduler_configs:
            if config.interval != "step" or config.frequency != 1:
                raise ValueError(
                    f"the scheduler steps once per {config.frequency} {config.interval}; a private training "
                    "steps it after every step: let configure_optimizers() give {'scheduler': ..., "
                    "'interval': 'step'}, with lengths in steps"
                )
            scheduler = config.scheduler
        plugin, own_loss = trainer.precision_plugin, self.loss

        def in_precision(module: nn.Module, batch: Any) -> Tensor:
            with plugin.forward_context():
                return own_loss(module, plugin.convert_input(batch))

        shared = {
            "loss": own_loss if trainer.precision == "32-true" else in_precision,
            "data": self.data,
            "run": replace(self.run, scheduler=scheduler),
        }
        to_train_mode(module)

        def before_step(*_: Any) -> None:
            module.trainer = trainer  # gradients are the released estimate
            try:
                for callback in trainer.callbacks:
                    callback.on_before_optimizer_step(trainer, module, optimizer)
                module.on_before_optimizer_step(optimizer)
            finally:
                module.trainer = None

        optimizer.register_step_pre_hook(before_step)
        with _without_trainer(module):
            if self.resume:
                assert self.run.folder is not None
                options = {name: value for name, value in self.options.items() if name not in OF_FOLDER}
                self.training = PrivateTraining.resume(
                    self.run.folder, module, optimizer, **shared, **options
                )
            else:
                self.training = PrivateTraining(
                    module, optimizer, sampling=self.sampling, **shared, **self.options
                )

    def after_step(self, module: Any) -> None:
        """The owner's step of the other optimizers, whose parameters are trained only here."""
        if self.public_step is None:
            return
        assert self.training is not None
        move = self.public_step

        @wraps(move)
        def step() -> None:
            for parameter in self.public:
                parameter.requires_grad_(True)
            move(module)
            for parameter in self.public:
                parameter.requires_grad_(False)

        self.training.public_step(step)


class _PrivateSteps(LightningModule):
    """What replaces the training half of a module while it is fitted."""

    _bridge: _Bridge

    def on_fit_start(self) -> None:
        self._bridge.start(self)
        super().on_fit_start()

    def train_dataloader(self) -> Any:
        """Numbers of steps, an epoch of them: Lightning sees no private record."""
        sampling = self._bridge.sampling
        numbers: Any = range(math.ceil(sampling.population / sampling.expected_size))
        return DataLoader(numbers, batch_size=None)

    def training_step(self, *args: Any, **kwargs: Any) -> None:
        training, trainer = self._bridge.training, self.trainer
        assert training is not None
        steps = training.sampling.steps
        with _without_trainer(self):
            report = next(iter(training), None)
        if report is not None:
            self._bridge.after_step(self)
            # `trainer.global_step` counts the first while this module is fitted, and the other one later.
            loop = trainer.fit_loop.epoch_loop
            automatic = loop.automatic_optimization.optim_progress.optimizer.step
            for progress in (loop.manual_optimization.optim_step_progress, automatic):
                progress.increment_ready()
                progress.increment_completed()
            numbers = {name: getattr(report, name) for name in LOGGED}
            self.log_dict({name: value for name, value in numbers.items() if value is not None}, batch_size=1)
            every = self._bridge.checkpoint_every or max(1, steps // 20)
            if training.folder is not None and (report.step % every == 0 or report.step == steps):
                training.save_checkpoint()
        if report is None or report.step == steps:
            trainer.should_stop = True


class _Evaluations(Callback):
    """Writes what validation measured into the metrics of the run, as the publication that it is."""

    def __init__(self, bridge: _Bridge) -> None:
        self._bridge = bridge

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _check_hooks(trainer, pl_module)  # those of configure_callbacks() are there by now

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_evaluated(self._bridge.data, trainer.val_dataloaders)  # those of the module, too

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = self._bridge.training
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if name not in LOGGED}
        if training is not None and found and not trainer.sanity_checking:
            training.evaluate(lambda model: found)
