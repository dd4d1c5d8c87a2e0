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
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.methods.base import Context, Parameters, Plan, State
from equipoise.methods.configuration import Noise, Positive
from equipoise.methods.estimator import Estimator, View
from equipoise.privacy import PrivateRows, clip_coordinates

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
class DPZO(Estimator):
    """Zeroth-order training: the slope of each record's loss along a public random direction.

    Guarantee: that of DP-SGD at the same noise. The direction is public randomness, drawn before any record
    is looked at. All that leaves is one sum of numbers, each of one record and between -C and C. The proof
    needs each slope to come from its own record, see above: the statement names that.

    Args:
        clip_norm: C > 0, of the slope; about as for the gradient's norm in DP-SGD.
        clip_rule: weighs the slopes by their sizes.
        displacement: mu > 0, how far from the parameters the losses are taken, in units of u.
        noise_multiplier: z; calibrated to the budget when None.

    Example:
        >>> DPZO(clip_norm=0.5).config()["displacement"]
        0.001
    """

    forward_only: ClassVar[bool] = True

    clip_norm: Positive = 1.0
    noise_multiplier: Noise = None
    displacement: Positive = 1e-3

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        return (_ASSUMED, *super().assumptions(plan))

    def passes_over(self, draw: str) -> int:
        return 2  # forwards

    def view(self, context: Context, state: State) -> View:
        # From public seed and step number: a direction that followed records would reveal them.
        direction = RandomDirection(context.params, context.public_rng(context.step))
        return View(
            at=[_Displaced(context.params, direction, sign * self.displacement) for sign in (1, -1)],
            back=lambda mean: {name: u.mul_(mean["slope"].item()) for name, u in direction.items()},
            sums=lambda ahead, behind: {
                "gradient": clip_coordinates(
                    self.slopes(ahead, behind), self.clip_rule, self.clip_norm, "slope"
                )
            },
        )

    def slopes(self, ahead: PrivateRows, behind: PrivateRows) -> Any:
        """The slope of each record's loss along the direction, [b, 1]."""
        assert ahead.losses is not None
        assert behind.losses is not None
        # In float64: the difference of two losses that are close has few digits already.
        return ((ahead.losses.double() - behind.losses.double()) / (2 * self.displacement))[:, None]
