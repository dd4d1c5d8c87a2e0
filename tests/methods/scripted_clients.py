"""Published methods on samples and noise that a test writes down, to be laid beside a paper's algorithm.

`LeastSquares` has the gradients, `steps_of` runs a method alone, and `ScriptedClient` takes part in a
federation. Noise is given as standard normal numbers: how long the method makes it is under test too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scripted import Handle, NoiselessLedger
from torch import Tensor, nn

from equipoise.federated import Reply, Request
from equipoise.federated.round_protocol import protocol_of
from equipoise.gradients.operator import DenseGradients
from equipoise.methods.base import Setting
from equipoise.methods.named_tensors import copied
from equipoise.privacy import Draw, PrivateRows, WithoutReplacement


class LeastSquares:
    """Records (a, y) with losses (w a + v - y)^2 / 2; the parameters in a row are (w, v)."""

    def __init__(self, a: np.ndarray, y: np.ndarray) -> None:
        self.batch = {"a": torch.from_numpy(a), "y": torch.from_numpy(y)}

    @staticmethod
    def model() -> nn.Module:
        return nn.Linear(5, 1).double()

    @staticmethod
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (model(batch["a"])[:, 0] - batch["y"]).square()

    def rows(self, params: Mapping[str, Tensor], ids: Any = slice(None)) -> DenseGradients:
        a, y = self.batch["a"][ids], self.batch["y"][ids]
        residual = (a @ params["weight"][0] + params["bias"] - y)[:, None]
        return DenseGradients({"weight": (residual * a)[:, None], "bias": residual})


def named(x: np.ndarray) -> dict[str, Tensor]:
    """The parameters of a row."""
    row = torch.from_numpy(x)
    return {"weight": row[None, :5].clone(), "bias": row[5:].clone()}


def row_of(params: Mapping[str, Tensor]) -> np.ndarray:
    """The parameters in a row."""
    return np.concatenate([params["weight"].numpy().ravel(), params["bias"].numpy()])


class GivenNoise(NoiselessLedger):
    """Adds standard normal numbers of the test, times the planned multiplier and the sum's own bound."""

    def __init__(self, plan: Any, normals: Mapping[str, Sequence[np.ndarray]]) -> None:
        super().__init__()
        self.plan, self.normals = plan, {name: iter(values) for name, values in normals.items()}

    def release(self, draw: Any, sums: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        out = super().release(draw, sums)
        for name, bounded in sums.items():
            scale = self.plan[name].noise_multiplier * bounded.add_remove
            normal = torch.as_tensor(next(self.normals[name]))
            noise = {"sum": normal} if name == "squares" else named(normal.numpy())
            out[name] = {
                key: value + scale * noise[key].reshape(value.shape) for key, value in out[name].items()
            }
        return out


@dataclass
class BoxContext:
    """What a step may use, with the samples of the test."""

    private: LeastSquares
    public: LeastSquares | None
    params: dict[str, Tensor]
    sampling: Any
    plan: Any
    samples: Mapping[str, Iterator[np.ndarray]]
    ledger: GivenNoise
    step: int = 0
    relation: str = "replace_one"

    def draw(self, name: str = "batch") -> Handle:
        rows = self.private.rows(self.params, torch.from_numpy(next(self.samples[name])))
        return Handle(PrivateRows(rows, Draw(name, self.step)), name)

    def public_gradients(self, batch: Any, at: Any = None, step: Any = None) -> DenseGradients:
        return LeastSquares(batch["a"].numpy(), batch["y"].numpy()).rows(self.params if at is None else at)

    def public_rng(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(step)


@dataclass
class ScriptedClient:
    """A client of a federation with samples and noise of the test; it answers as `Client` does."""

    method: Any
    private: LeastSquares
    samples: Mapping[str, np.ndarray]
    normals: Mapping[str, Any]
    rate: float
    local_steps: int = 1
    public: LeastSquares | None = None
    state: Any = None
    context: BoxContext = field(init=False)

    def __post_init__(self) -> None:
        batches = self.samples["batch"]
        sampling = WithoutReplacement(batches.shape[1], len(self.private.batch["y"]), len(batches))
        plan = self.method.plan(Setting(sampling=sampling, relation="replace_one"))
        self.context = BoxContext(
            self.private,
            self.public,
            {},
            sampling,
            plan,
            {name: iter(values) for name, values in self.samples.items()},
            GivenNoise(plan.releases, self.normals),
        )

    def move(self, params: Mapping[str, Tensor]) -> None:
        self.context.params = copied(params)
        self.state = (
            self.method.init(self.context)
            if self.state is None
            else self.method.rebase(self.state, self.context.params)
        )

    def train(self, steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            estimate, self.state = self.method.step(self.context, self.state)
            self.context.params = {
                name: value - self.rate * estimate[name] for name, value in self.context.params.items()
            }
            self.context.step += 1
        return self.context.params

    def answer(self, request: Request) -> Reply:
        protocol = protocol_of(self.method)
        self.move(request.params)
        self.state = protocol.follow(self.state, request.extras)
        if request.kind == "query":
            return Reply(reports=protocol.query(self.context, self.state))
        end = self.train(self.local_steps)
        self.state = protocol.end_round(self.state, end)
        return protocol.reply(self.state, request.params, copied(end))
