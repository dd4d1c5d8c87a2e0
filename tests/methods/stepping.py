"""A bare loop for tests of methods: plan, ledger of the test's choice, steps of plain gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.audit.replay import RecordingLedger
from equipoise.distributed.processes import Processes
from equipoise.gradients import GradientEngine
from equipoise.gradients.forward_only import LossEngine
from equipoise.methods.base import Setting
from equipoise.privacy import Secrets, digest
from equipoise.privacy.private import unwrap
from equipoise.training.context import Attempt, StepContext
from equipoise.training.forwards import BatchPreparation, RowSource
from equipoise.training.record_source import RecordSource

ADD = "add_or_remove_one"


class Follower:
    """Runs a method step by step, each draw in one micro-batch, and keeps the iterates and the states."""

    def __init__(
        self, method, model, loss, data, sampling, *, budget=None, learning_rate=0.1, seed=0, relation=ADD
    ):
        self.method, self.sampling, self.learning_rate = method, sampling, learning_rate
        setting = Setting(sampling=sampling, budget=budget, relation=relation, public_seed=seed)
        self.method_plan = method.plan(setting)
        self.plan = self.method_plan.releases
        self.ledger = RecordingLedger(self.plan, secrets=Secrets(None, seed))
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        source = RecordSource(data)
        example = source.take(torch.arange(min(3, len(source))))
        engine = (LossEngine if method.forward_only else GradientEngine)(model, loss, example)
        prepare = BatchPreparation(torch.device("cpu"))
        self.rows = RowSource(engine, source, prepare, len(source), example, seed)
        self.state, self.steps_done, self.states = None, 0, []

    def step(self) -> dict[str, Tensor]:
        attempt = Attempt(self.rows, self.ledger, Processes())
        key = digest({"step": self.steps_done, "parameters": self.params, "method": self.state})
        context = StepContext(attempt, self.params, self.steps_done, self.sampling, self.method_plan, key)
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


class Noiseless(RecordingLedger):
    """Books as ever and adds nothing: for limits without noise."""

    def _noised(self, mechanism: Any, sums: Any, *rest: Any) -> Any:
        return {name: {k: unwrap(v).clone() for k, v in b.value.items()} for name, b in sums.items()}


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
