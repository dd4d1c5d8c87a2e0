"""Methods run on gradients that a test writes down, without noise, loop, engine or sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.operator import DenseGradients
from equipoise.methods.base import Setting
from equipoise.privacy import Draw, FullBatch, PrivateRows
from equipoise.privacy.private import unwrap

Gradients = Callable[[Tensor], Tensor]  # x [d] -> rows [N, d]


class NoiselessLedger:
    """Hands out the sums as they are; counts what was asked."""

    def __init__(self) -> None:
        self.released: list[dict[str, dict[str, Tensor]]] = []
        self.unproven: list[dict[str, Any]] = []

    def release(self, draw: Any, sums: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        out = {name: {k: unwrap(v).clone() for k, v in b.value.items()} for name, b in sums.items()}
        self.released.append(out)
        return out

    def call(self, operation: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self, operation)(*arguments, **options)

    def release_unproven(
        self, draw: Any, name: str, value: Mapping[str, Any], std: float, **options: Any
    ) -> dict[str, Tensor]:
        self.unproven.append({"name": name, "std": std, **options})
        return {k: unwrap(v).clone() for k, v in value.items()}

    def disclose(self, value: Any, hole: str) -> Any:
        self.unproven.append({"hole": hole})
        return {k: unwrap(v) for k, v in value.items()}


@dataclass
class Handle:
    rows: PrivateRows
    name: str = "batch"

    def query(self, fn: Callable[..., Any], at: Any = None) -> Any:
        return fn(self.rows, torch.arange(self.rows._rows.num_records))


@dataclass
class ScriptedContext:
    """The parameter "x" [d] and the rows that `gradients` gives there."""

    gradients: Gradients
    x: Tensor
    sampling: Any
    plan: Any
    step: int = 0
    relation: str = "add_or_remove_one"
    ledger: NoiselessLedger = field(default_factory=NoiselessLedger)

    @property
    def params(self) -> dict[str, Tensor]:
        return {"x": self.x}

    def draw(self, name: str = "batch") -> Handle:
        return Handle(PrivateRows(DenseGradients({"x": self.gradients(self.x)}), Draw(name, self.step)))


@dataclass
class Run:
    """x before every step and after the last, estimates, and states after every step."""

    xs: list[Tensor]
    estimates: list[Tensor]
    states: list[dict[str, Any]]
    ledger: NoiselessLedger


def run(
    method: Any, gradients: Gradients, x: Tensor, *, steps: int, rate: float, batch: float | None = None
) -> Run:
    """Gradient descent with the method's estimates; every step sees all rows, divided by `batch`."""
    sampling = FullBatch(population=len(gradients(x)) if batch is None else int(batch), steps=steps)
    context = ScriptedContext(gradients, x, sampling, method.plan(Setting(sampling=sampling)))
    state = method.init(context)
    out = Run([x], [], [], context.ledger)
    for step in range(steps):
        context.step = step
        estimate, state = method.step(context, state)
        context.x = context.x - rate * estimate["x"]
        out.xs.append(context.x)
        out.estimates.append(estimate["x"])
        out.states.append(state)
    return out
