"""The methods that are compared, each from a clip norm and a step length.

A step length is the learning rate times the clip norm: what a step moves at most, without its noise, where
every gradient is clipped and all agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

import equipoise as eq
from equipoise.methods import (
    EFSGD,
    AdaClip,
    AdaptiveRMS,
    AutoS,
    ClipSGD,
    DiSK,
    Doppler,
    DPAdamBC,
    JointWhitening,
    PlainSGD,
    PublicRecords,
    PublicSubspace,
    PublicWarmStart,
    RandomSparsification,
    ReleasedQuantile,
    ScaleThenPrivatise,
)

MOMENTUM = 0.9

Make = Callable[[float, PublicRecords], eq.Method]


@dataclass(frozen=True)
class Contender:
    """A method in the bench.

    Attributes:
        make: from a clip norm and the public records.
        private: whether it has an epsilon.
        scale: of its steps; Adam's are one long in every entry, far more than a mean of clipped gradients.
        by_clip_norm: whether its steps grow with the clip norm.
        clips: whether its clip norm is chosen; AUTO-S divides it out of a step length.
        momentum: of its steps.
        adam: whether its steps are Adam's.
    """

    make: Make
    private: bool = True
    scale: float = 1.0
    by_clip_norm: bool = True
    clips: bool = True
    momentum: float = 0.0
    adam: bool = False

    @property
    def optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """Of (parameters, lr=rate)."""
        return torch.optim.Adam if self.adam else partial(torch.optim.SGD, momentum=self.momentum)

    def rate(self, clip_norm: float, length: float) -> float:
        """The learning rate of a step length."""
        return self.scale * length / (clip_norm if self.by_clip_norm else 1.0)


CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(lambda clip, public: PlainSGD(), private=False, clips=False, by_clip_norm=False),
    "dp-sgd": Contender(lambda clip, public: eq.DPSGD(clip_norm=clip)),
    "auto-s": Contender(lambda clip, public: eq.DPSGD(clip_norm=clip, clip_rule=AutoS()), clips=False),
    "dice-sgd": Contender(lambda clip, public: eq.DiceSGD(clip_norm=clip)),
    "dp-c4": Contender(lambda clip, public: eq.DPC4(clip_norm=clip)),
    "dc-dpsgd": Contender(lambda clip, public: eq.DCDPSGD(clip_norm=clip)),
    "dp-mf": Contender(lambda clip, public: eq.DPMF(clip_norm=clip)),
    "disk": Contender(lambda clip, public: DiSK(clip_norm=clip)),
    "doppler": Contender(lambda clip, public: Doppler(clip_norm=clip)),
    "scale-then-privatise": Contender(lambda clip, public: ScaleThenPrivatise(clip_norm=clip)),
    "adaclip": Contender(lambda clip, public: AdaClip(clip_norm=clip)),
    "dp-adam-bc": Contender(lambda clip, public: DPAdamBC(clip_norm=clip), scale=2**-8, by_clip_norm=False),
    "dp-sgd, adam": Contender(
        lambda clip, public: eq.DPSGD(clip_norm=clip),
        scale=2**-8,
        by_clip_norm=False,
        adam=True,
    ),
    "dp-sgd, momentum": Contender(
        lambda clip, public: eq.DPSGD(clip_norm=clip),
        scale=0.1,
        momentum=MOMENTUM,
    ),
    "joint-whitening": Contender(lambda clip, public: JointWhitening(clip_norm=clip)),
    "pcdp-sgd": Contender(lambda clip, public: eq.PCDPSGD(source=PublicSubspace(public), clip_norm=clip)),
    "public-warm-start": Contender(
        lambda clip, public: PublicWarmStart(public=public, inner=eq.DPSGD(clip_norm=clip))
    ),
    "dp-c4-plus": Contender(lambda clip, public: eq.DPC4Plus(clip_norm=clip)),
    "quantile-clipping": Contender(lambda clip, public: eq.DPSGD(clip_norm=ReleasedQuantile(clip))),
    "adaptive-rms": Contender(lambda clip, public: AdaptiveRMS(clip_norm=clip)),
    "rsdp": Contender(lambda clip, public: RandomSparsification(clip_norm=clip)),
    "clip-sgd": Contender(lambda clip, public: ClipSGD(clip_norm=clip), private=False),
    "ef-sgd": Contender(lambda clip, public: EFSGD(clip_norm=clip), private=False),
}
"""In the order in which they are worth knowing. `sgd`, `clip-sgd` and `ef-sgd` add no noise."""

# The bench takes these with momentum too. A gradient then moves 1 / (1 - momentum) times as far in the end.
for _name in (
    "sgd",
    "auto-s",
    "joint-whitening",
    "public-warm-start",
    "dp-mf",
    "disk",
    "dice-sgd",
    "dc-dpsgd",
    "pcdp-sgd",
    "dp-c4-plus",
):
    CONTENDERS[f"{_name}, momentum"] = replace(CONTENDERS[_name], scale=1 - MOMENTUM, momentum=MOMENTUM)
