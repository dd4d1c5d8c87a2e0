"""DPZO: zeroth-order training. Two forwards and no backward; the memory of inference.

    s_i = clip((f_i(theta + mu u) - f_i(theta - mu u)) / (2 mu), -C, C)      one number per record
    estimate = u (sum_i s_i + N(0, (z C)^2)) / B

The direction u is uniform on the sphere of radius sqrt(P). It is public randomness of the step, drawn before
any record is looked at. So all that leaves is one sum of numbers, each between -C and C: a step costs what a
step of DP-SGD costs at the same multiplier.

E[u u^T] is the identity, so that without clipping and for small mu the estimate is the gradient in the mean.
A single one is about sqrt(P) times as long as the slope along u, most of it across the gradient.

u is never held whole: it is made again, tensor by tensor, from the seeds of the step.

The proof needs each slope to come from its own record. A forward of records that share it may round their
losses by who else is there. Here that is divided by 2 mu: in float32 a unit of loss rounds to about 3e-5 of
slope at mu = 1e-3, for every other record. So the bound C is exact where losses keep their bits at every
place of a micro-batch. The statement names it as an assumption.

Source: Zhang et al. 2023, "DPZero: Private Fine-Tuning of Language Models without Backpropagation", arXiv
2310.09639, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.card import Card
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip_coordinates
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.private import Private
from equipoise.privacy.rows import PrivateRows

__all__ = ["DPZO", "RandomDirection"]

_ASSUMED = (
    "DP-ZO: a record's losses are the same to the last digit whoever else is drawn; what they differed by "
    "would be divided by twice the displacement"
)


class RandomDirection(Mapping[str, Tensor]):
    """u, uniform on the sphere of radius sqrt(P); each tensor is made when it is asked for.

    Args:
        like: the parameters.
        generator: public randomness.

    Example:
        >>> u = RandomDirection({"w": torch.zeros(3, 4)}, torch.Generator().manual_seed(0))
        >>> torch.equal(u["w"], u["w"]), round(float(u["w"].square().sum()), 4)
        (True, 12.0)
    """

    def __init__(self, like: Parameters, generator: torch.Generator) -> None:
        self._like = like
        seeds = torch.randint(2**62, (len(like),), generator=generator).tolist()
        self._seeds = dict(zip(like, seeds, strict=True))
        count = sum(value.numel() for value in like.values())
        square = sum(float(self._normal(name).double().square().sum()) for name in like)
        self._scale = math.sqrt(count / square)

    def _normal(self, name: str) -> Tensor:
        # On the CPU, so that the numbers are the same for every device.
        generator = torch.Generator().manual_seed(self._seeds[name])
        return torch.randn(self._like[name].shape, generator=generator)

    def __getitem__(self, name: str) -> Tensor:
        return self._normal(name).mul_(self._scale).to(self._like[name].device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)


class _Displaced(Mapping[str, Tensor]):
    """theta + t u; each tensor is made when it is asked for, so that no point stays in memory."""

    def __init__(self, params: Parameters, direction: RandomDirection, by: float) -> None:
        self._params, self._direction, self._by = params, direction, by

    def __getitem__(self, name: str) -> Tensor:
        value = self._params[name]
        return value.add(self._direction[name].to(value.dtype), alpha=self._by)

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


@dataclass(frozen=True, kw_only=True)
class DPZO(Method):
    """Zeroth-order training: the slope of each record's loss along a public random direction.

    Args:
        clip_norm: C > 0, of the slope; about as for the gradient's norm in DP-SGD.
        clip_rule: weighs the slopes by their sizes.
        displacement: mu > 0, how far from the parameters the losses are taken, in units of u.
        noise_multiplier: z; calibrated to the budget when None.

    Example:
        >>> DPZO(clip_norm=0.5).config()["displacement"]
        0.001
    """

    name: ClassVar[str] = "dp-zo"
    card: ClassVar[Card] = Card(
        summary="Clips the slope of every record's loss along a random direction; it runs no backward.",
        claim="The memory of inference; private, and proved so. It needs many more steps than DP-SGD.",
        source="Zhang et al. 2023, DPZero, arXiv 2310.09639",
        guarantee="proven",
        cost="two forward passes and no backward; one copy of the parameters, no activations",
        use_when="A pretrained model is to be tuned, and a backward does not fit into memory.",
        avoid_when="A backward fits: DP-SGD is far ahead at the same budget and time.",
    )
    forward_only: ClassVar[bool] = True

    clip_norm: float = 1.0
    clip_rule: ClipRule = Abadi()
    displacement: float = 1e-3
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.positive(clip_norm=self.clip_norm, displacement=self.displacement)
        _validate.instance(ClipRule, "PSAC(regulariser=0.1)", clip_rule=self.clip_rule)
        _validate.noise_if_given(noise_multiplier=self.noise_multiplier)

    def plan(self, setting: Setting) -> Plan:
        def at(scale: float) -> PrivacyPlan:
            releases = [Release("gradient", self.clip_norm, Gaussian(scale))]
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return Plan(setting.calibrated(at, self.noise_multiplier))

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (_ASSUMED, *super().assumptions(plan))

    def passes_over(self, draw: str) -> int:
        return 2  # forwards

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        # From public seed and step number: a direction that followed records would reveal them.
        direction = RandomDirection(context.params, context.public_rng(context.step))
        points = [_Displaced(context.params, direction, sign * self.displacement) for sign in (1, -1)]
        draw = context.draw("batch")
        sums = draw.query(self._sums, at=points)
        (slope,) = context.ledger.release(draw, sums)["gradient"]["slope"].tolist()
        mean = slope / context.sampling.expected_size
        return {name: u.mul_(mean) for name, u in direction.items()}, state

    def _sums(self, ahead: PrivateRows, behind: PrivateRows, ids: Any) -> dict[str, Bounded]:
        assert ahead.losses is not None
        assert behind.losses is not None
        # In float64: the difference of two losses that are close has few digits already.
        slopes = (ahead.losses.double() - behind.losses.double()) / (2 * self.displacement)
        column = cast("Private", slopes[:, None])
        return {"gradient": clip_coordinates(column, self.clip_rule, self.clip_norm, "slope")}
