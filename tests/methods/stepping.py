"""A bare loop for tests of methods: plan, ledger of the test's choice, steps of plain gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.audit.replay import RecordingLedger
from equipoise.distributed.processes import Processes
from equipoise.gradients import GradientEngine
from equipoise.gradients.forward_only import LossEngine
from equipoise.methods.base import Setting
from equipoise.privacy import Secrets, digest
from equipoise.training.context import Attempt, StepContext
from equipoise.training.forwards import BatchPreparation, RowSource
from equipoise.training.record_source import RecordSource


class Follower:
    """Runs a method step by step and keeps the iterates and the states.

    Args:
        transcript: releases of an earlier run that are handed out in place of new ones.
    """

    def __init__(
        self,
        method: eq.Method,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        data: Any,
        sampling: Any,
        *,
        budget: Any = None,
        learning_rate: float = 0.1,
        seed: int = 0,
        micro_batch_size: int | None = None,
        relation: str = "add_or_remove_one",
        transcript: Sequence[Any] | None = None,
        engine: GradientEngine | None = None,
    ) -> None:
        self.method, self.sampling, self.learning_rate = method, sampling, learning_rate
        self.method_plan = method.plan(
            Setting(sampling=sampling, budget=budget, relation=relation, public_seed=seed)
        )
        self.plan = self.method_plan.releases
        options: dict[str, Any] = {"secrets": Secrets(None, seed)}
        self.ledger = RecordingLedger(self.plan, replayed=transcript, **options)
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        source = RecordSource(data)
        example = source.take(torch.arange(3))
        self.engine = engine or (LossEngine if method.forward_only else GradientEngine)(model, loss, example)
        prepare = BatchPreparation(torch.device("cpu"))
        size = micro_batch_size or len(source)  # the whole draw at once, unless another size is asked for
        self.rows = RowSource(self.engine, source, prepare, size, example, seed)
        self.state: Any = None
        self.steps_done = 0
        self.states: list[dict[str, Any]] = []

    def step(self) -> dict[str, Tensor]:
        context = StepContext(
            Attempt(self.rows, self.ledger, Processes()),
            self.params,  # type: ignore[arg-type]
            self.steps_done,
            self.sampling,
            self.method_plan,
            digest({"step": self.steps_done, "parameters": self.params, "method": self.state}),
        )
        if self.state is None:
            self.state = self.method.init(context)
        estimate, self.state = self.method.step(context, self.state)
        with torch.no_grad():
            for name, parameter in self.params.items():
                parameter -= self.learning_rate * estimate[name]
        self.steps_done += 1
        self.states.append(self.state)
        return estimate

    def run(self, steps: int | None = None) -> Follower:
        for _ in range(self.sampling.steps if steps is None else steps):
            self.step()
        return self

    @property
    def vector(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.params.values()])

    def released(self, name: str) -> int:
        """How many releases held this name."""
        return sum(name in answer for answer in self.ledger.transcript)


class Linear(nn.Module):
    """A linear model without bias, from zero, in float64."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def half_square(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Least squares, one loss per record."""
    return 0.5 * (model(batch["x"]) - batch["y"]).square()


def consistent(records: int, features: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Least squares whose labels a solution of norm 2 explains exactly, and that solution."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(records, features, generator=rng, dtype=torch.float64)
    solution = torch.randn(features, generator=rng, dtype=torch.float64)
    solution *= 2 / solution.norm()
    return {"x": x, "y": x @ solution}, solution
