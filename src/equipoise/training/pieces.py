"""The pieces of a training, checked and connected to each other: nothing is written or spent here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from equipoise.gradients import GradientEngine
from equipoise.methods import DPSGD, Method
from equipoise.privacy import Budget, PrivacyPlan, Sampling, digest
from equipoise.training.attach import (
    Loss,
    check_blending,
    check_loss,
    check_optimizer,
    check_scheduler,
    trainable,
)
from equipoise.training.batches import Source
from equipoise.training.draws import RowMaker
from equipoise.training.ema import MovingAverage
from equipoise.training.memory import bytes_per_record, default_micro_batch_size
from equipoise.training.processes import Processes
from equipoise.training.public_copies import check_public
from equipoise.training.randomness import generator
from equipoise.training.settings import Settings, averaged_over_views, check_pieces, move, watch_modes

__all__ = ["Pieces", "connect"]


@dataclass(frozen=True)
class Pieces:
    """What a training is made of.

    Attributes:
        model, optimizer, scheduler: the user's.
        sampling, method, budget: as given, or the defaults.
        settings: with the micro-batch size that was chosen.
        parameters: the trainable ones by name, live.
        device: where the model is.
        processes: who shares the work.
        plan: what the method will release.
        rows: makes gradient rows of records.
        record_bytes: memory that one record takes in a step.
        average: the moving average of the parameters, or None.
        restore_modes: puts the modules back into the modes that they had.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    sampling: Sampling
    method: Method
    budget: Budget | None
    settings: Settings
    parameters: dict[str, nn.Parameter]
    device: torch.device
    processes: Processes
    plan: PrivacyPlan
    rows: RowMaker
    record_bytes: float
    average: MovingAverage | None
    restore_modes: Callable[[], None]

    @property
    def num_parameters(self) -> int:
        """P, the number of trainable values."""
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
            "model": {"class": type(self.model).__qualname__, "parameters": self.num_parameters},
        }

    def kernels(self) -> str:
        """Digest of what the released numbers depend on besides parameters and records.

        With another value, no noise is used again.
        """
        return digest(
            {
                "engine": self.rows.engine.state_dict(),
                "micro_batch": self.settings.micro_batch_size,
                "views": self.settings.views,
                "method": self.method.config(),
                "processes": self.processes.count,
                "device": self.device.type,
            }
        )


def connect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
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
) -> Pieces:
    """Check everything, by what it does on a few records, and connect it; see `PrivateTraining`.

    Raises:
        TypeError, ValueError, DataError: what cannot work, named.
    """
    method = method or DPSGD()
    check_pieces(sampling, method, budget, augmentation, settings)
    parameters = trainable(model)
    check_optimizer(optimizer, parameters)
    check_scheduler(scheduler, optimizer)
    place = move(model, optimizer, device)
    processes = Processes()
    with processes.together():
        source = Source(data, collate)
        check_public(source, method, settings.allow_public_duplicates)
        example, probes = check_loss(model, loss, source, place)
        plan = method.plan(sampling, budget, settings.relation, generator(settings.seed, "plan"))
        if settings.views > 1:
            loss = averaged_over_views(loss, settings.views)
        rows = RowMaker(
            None, source, place, 1, example, settings.seed, augmentation, settings.views, probes=probes
        )
        prepared = rows.prepare(example, rows.public("example"))
        rows.engine = GradientEngine(model, loss, prepared)
        if augmentation is not None or not source.is_scanned:
            attempts = 1 if augmentation is None else 4
            check_blending(
                rows.engine.undisturbed_losses,
                source,
                lambda batch, attempt: rows.prepare(batch, rows.public("example", attempt)),
                attempts,
            )
        record_bytes = bytes_per_record(model, loss, prepared)
        size = settings.micro_batch_size or default_micro_batch_size(
            record_bytes, sum(p.numel() for p in parameters.values()), place, sampling.expected_size
        )
        # Kept with the run: a resumed run must add in the same order to compute the same numbers.
        settings = replace(settings, micro_batch_size=processes.first(lambda: size))
        rows.micro_batch_size = size
        processes.same("the model's parameters", digest(parameters))
        processes.same("the privacy plan", plan.fingerprint())
    return Pieces(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampling=sampling,
        method=method,
        budget=budget,
        settings=settings,
        parameters=parameters,
        device=place,
        processes=processes,
        plan=plan,
        rows=rows,
        record_bytes=record_bytes,
        average=MovingAverage(parameters, settings.ema_decay) if settings.ema_decay is not None else None,
        restore_modes=watch_modes(model),
    )
