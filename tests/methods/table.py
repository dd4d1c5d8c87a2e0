"""The table of methods that all laws run over, and the small problem that they run on.

`EXAMPLES` holds a line for every method and variant: a function that makes it. `public_batch()` serves those
that need public records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from flat_arguments import arranged
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise import methods as m
from equipoise.audit.replay import RecordingLedger
from equipoise.privacy import Ledger, Private

RECORDS, FEATURES, CLASSES = 60, 6, 3
STEPS = 6


def records(scale: float = 1.0, seed: int = 0, count: int = RECORDS) -> dict[str, Tensor]:
    """Three clouds; `scale` stretches every input and so every gradient."""
    rng = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=rng)
    centres = torch.randn(CLASSES, FEATURES, generator=rng, dtype=torch.float64)
    noise = torch.randn(count, FEATURES, generator=rng, dtype=torch.float64)
    return {
        "input": scale * (centres[label] + noise),
        "label": label,
        "weight": torch.ones(count, dtype=torch.float64),
    }


def public_batch() -> dict[str, Tensor]:
    """Records that nobody needs to protect."""
    return records(seed=9, count=20)


def on_public(**options: Any) -> m.PublicSubspace:
    return m.PublicSubspace(m.PublicRecords(public_batch()), **options)


LEARNED = m.ReleasedQuantile(initial=0.5, count_noise=0.3)
RELEASED = m.ReleasedSubspace(dimension=4, history=2, explore_every=2)


EXAMPLES: dict[str, Callable[[], m.Method]] = {
    "dp-sgd": lambda: eq.DPSGD(clip_norm=0.5),
    "fitted-rate": lambda: eq.methods.FittedRate(),
    "dp-mf": lambda: eq.DPMF(clip_norm=0.5),
    "dp-mf learned threshold": lambda: eq.DPMF(clip_norm=LEARNED, strategy=m.LeastError()),
    "scale-then-privatise": lambda: m.ScaleThenPrivatise(clip_norm=0.5),
    "scale-then-privatise by sides": lambda: m.ScaleThenPrivatise(
        clip_norm=LEARNED, scale=m.SecondMoment(decay=0.5, by_sides=True)
    ),
    "scale-then-privatise fixed": lambda: m.ScaleThenPrivatise(
        clip_norm=0.5, per_layer=True, scale=m.FixedScale(2.0)
    ),
    "joint-whitening": lambda: m.JointWhitening(clip_norm=0.5),
    "joint-whitening learned threshold": lambda: m.JointWhitening(clip_norm=LEARNED, share=0.6),
    "joint-whitening one layer": lambda: m.JointWhitening(clip_norm=0.5, per_layer=True, most_inputs=5),
    "adaclip": lambda: m.AdaClip(clip_norm=0.5),
    "adaclip learned threshold": lambda: m.AdaClip(clip_norm=LEARNED, decay=0.5, centred=False),
    "dp-adam-bc": lambda: m.DPAdamBC(clip_norm=0.5),
    "dp-adam-bc learned threshold": lambda: m.DPAdamBC(clip_norm=LEARNED, beta2=0.9),
    "disk": lambda: m.DiSK(clip_norm=0.5),
    "disk one point": lambda: m.DiSK(clip_norm=0.5, kappa=0.5, gamma=1.0, per_layer=True),
    "disk learned threshold": lambda: m.DiSK(clip_norm=LEARNED, kappa=0.3, gamma=0.2),
    "doppler": lambda: m.Doppler(clip_norm=0.5),
    "doppler learned threshold": lambda: m.Doppler(
        clip_norm=LEARNED, filter=m.LowPass(forward=(0.2, 0.1, 0.1), feedback=(-0.5, -0.1))
    ),
    "dp-zo": lambda: m.DPZO(clip_norm=0.5),
    "dp-sgd psac per layer": lambda: eq.DPSGD(clip_norm=0.5, clip_rule=m.PSAC(), per_layer=True),
    "pcdp-sgd": lambda: eq.PCDPSGD(source=on_public(), clip_norm=0.5),
    "pcdp-sgd published": lambda: m.published.PCDPSGD(source=on_public(), clip_norm=0.5),
    "pcdp-sgd kernel": lambda: eq.PCDPSGD(source=on_public(refresh_every=2, basis="kernel"), clip_norm=0.5),
    "pcdp-sgd released": lambda: eq.PCDPSGD(source=RELEASED, clip_norm=0.5),
    "pcdp-sgd moment": lambda: eq.PCDPSGD(source=m.MomentSubspace(dimension=4), clip_norm=0.5),
    "pcdp-sgd iteration": lambda: eq.PCDPSGD(source=m.IterationSubspace(dimension=4), clip_norm=0.5),
    "biased-gep": lambda: m.BiasedGEP(source=on_public(), clip_norm=0.5),
    "gep": lambda: m.GEP(source=on_public(), clip_norm=0.5),
    "gep random": lambda: m.GEP(source=m.RandomSubspace(dimension=4), clip_norm=0.5),
    "gep released": lambda: m.GEP(source=RELEASED, clip_norm=0.5),
    "gep moment": lambda: m.GEP(source=m.MomentSubspace(dimension=4, refresh_every=3), clip_norm=0.5),
    "gep iteration": lambda: m.GEP(source=m.IterationSubspace(dimension=4), clip_norm=0.5),
    "pdp": lambda: m.PDPSGD(source=on_public(), clip_norm=0.5),
    "rpdp": lambda: m.RandomProjection(source=m.RandomSubspace(dimension=10), clip_norm=0.5),
    "public-only": lambda: m.PublicOnly(public=m.PublicRecords(public_batch())),
    "public-warm-start": lambda: m.PublicWarmStart(
        public=m.PublicRecords(public_batch()), warm_steps=2, inner=eq.DPSGD(clip_norm=0.5)
    ),
    "public-warm-start pcdp-sgd": lambda: m.PublicWarmStart(
        public=m.PublicRecords(public_batch()),
        inner=eq.PCDPSGD(source=on_public(), clip_norm=0.5),
        warm_steps=2,
        public_batch_size=8,
    ),
    "rsdp": lambda: m.RandomSparsification(clip_norm=0.5),
    "dc-dpsgd": lambda: eq.DCDPSGD(clip_norm=0.5, tail_threshold=m.AdaptiveTail(count_noise=0.3)),
    "dc-dpsgd trace": lambda: eq.DCDPSGD(
        clip_norm=0.5, score=m.Trace(dimension=3), tail_threshold=m.NullTail()
    ),
    "dc-dpsgd trace without signs": lambda: eq.DCDPSGD(
        clip_norm=0.5,
        score=m.Trace(dimension=3, absolute=True),
        tail_threshold=m.AdaptiveTail(count_noise=0.3),
    ),
    "dc-dpsgd random": lambda: eq.DCDPSGD(clip_norm=0.5, score=m.Random()),
    "dc-dpsgd two channels": lambda: eq.DCDPSGD(
        clip_norm=0.5, variant=m.TwoChannel(), tail_threshold=m.AdaptiveTail(count_noise=0.3)
    ),
    "dc-dpsgd top share": lambda: eq.DCDPSGD(clip_norm=0.5, variant=m.TopShare()),
    "dc-dpsgd alg1": lambda: m.published.DCDPSGD(
        clip_norm=0.5, trace=m.Trace(dimension=3, structure="dense")
    ),
    "dc-dpsgd code": lambda: m.published.DCDPSGD(clip_norm=0.5, variant="code", trace=m.Trace(dimension=3)),
    "dp-sgd learned threshold": lambda: eq.DPSGD(clip_norm=LEARNED),
    "dp-sgd stages": lambda: eq.DPSGD(clip_norm=LEARNED, noise_multiplier=m.NoiseStages((1.0, 0.8, 0.5))),
    "dp-adam-bc stages": lambda: m.DPAdamBC(clip_norm=0.5, noise_multiplier=m.NoiseStages((1.0, 0.6))),
    "dp-sgd decaying threshold": lambda: eq.DPSGD(clip_norm=m.ExponentialDecay(0.5, rate=0.9)),
    "dp-svrg": lambda: m.DPSVRG(clip_norm=0.5, anchor_batch_size=40),
    "dp-svrg decaying threshold": lambda: m.DPSVRG(
        clip_norm=m.ExponentialDecay(0.5, rate=0.9), schedule=m.AtRandom(takes_next=True)
    ),
    "dp-svrg as published": lambda: m.published.DPSVRG(clip_norm=0.5),
    "dp-c4": lambda: eq.DPC4(clip_norm=0.5, anchor=m.Quantile(count_noise=0.3)),
    "dp-c4 coins": lambda: eq.DPC4(clip_norm=0.5, anchor=m.ReleasedNorm(), schedule=m.AtRandom()),
    "dp-c4 as published": lambda: m.published.DPC4(clip_norm=0.5, anchor_scale=0.1),
    "dp-c4-plus": lambda: eq.DPC4Plus(clip_norm=0.5, anchor=m.Quantile(count_noise=0.3)),
    "dp-c4-plus tracked": lambda: eq.DPC4Plus(
        clip_norm=0.5,
        anchor=m.Quantile(count_noise=0.3),
        coupled=m.Tracked(),
        schedule=m.Every(takes_next=True),
        anchor_batch_size=40,
    ),
    "dp-c4-plus scheduled": lambda: eq.DPC4Plus(
        clip_norm=m.LinearDecay(0.3, final=0.5, steps=4),
        coupled=m.Distance(m.LinearDecay(1.0, final=0.5, steps=4)),
        anchor=m.ReleasedNorm(m.LinearDecay(1.0, final=3.0, steps=4)),
    ),
    "dp-c4-plus noise at every step": lambda: eq.DPC4Plus(
        clip_norm=0.5, anchor=m.Constant(), schedule=m.Every(fresh_noise=True)
    ),
    "dp-c4-plus as published": lambda: m.published.DPC4Plus(clip_norm=0.5, anchor_scale=0.1),
    "dice-sgd": lambda: eq.DiceSGD(clip_norm=0.1, residual_clip_norm=0.6),
    "dice-sgd per layer": lambda: eq.DiceSGD(
        clip_norm=0.1, feedback=m.ErrorFeedback(rate=0.5), per_layer=True
    ),
    "dice-sgd independent": lambda: eq.DiceSGD(
        clip_norm=0.1, variant=m.Independent(), feedback=m.ErrorFeedback(memory_clip_norm=3.0)
    ),
    "dice-sgd automatic": lambda: eq.DiceSGD(clip_norm=0.1, variant=m.Automatic(regulariser=0.01)),
    "dice-sgd as published": lambda: m.published.DiceSGD(clip_norm=0.1),
    "dice-sgd algorithm 4": lambda: m.published.DiceSGD(variant="algorithm_4"),
    "adaptive-rms": lambda: eq.AdaptiveRMS(clip_norm=0.5, radius_share=0.5),
    "adaptive-rms self": lambda: eq.AdaptiveRMS(
        clip_norm=2.0, radius=m.MeanSquareRule(scale="self", ema_beta=0.5), radius_share=0.5
    ),
    "adaptive-rms round": lambda: eq.AdaptiveRMS(clip_norm=0.5, variant=m.Round(length=2)),
    "adaptive-rms published": lambda: m.published.AdaptiveRMS(clip_norm=0.5, round_length=2),
    "sgd": lambda: m.PlainSGD(),
    "clip-sgd": lambda: m.ClipSGD(clip_norm=0.1),
    "ef-sgd": lambda: m.EFSGD(clip_norm=0.1),
}


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none") * batch["weight"]


def training(method: m.Method, **options: Any) -> eq.PrivateTraining:
    """A reproducible training of the small problem."""
    model = options.pop("model", None) or network()
    defaults: dict[str, Any] = {
        "loss": loss,
        "data": records(),
        "sampling": eq.Poisson(20, RECORDS, options.pop("steps", STEPS)),
        "budget": eq.Budget(8.0, 1e-3),
        "reproducible": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return eq.PrivateTraining(model, optimizer, **arranged(method=method, **(defaults | options)))


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _numbers(state: Any) -> list[Any]:
    """The public numbers in a method's state: thresholds that it carries from step to step."""
    if isinstance(state, dict):
        return [number for key in sorted(state) for number in _numbers(state[key])]
    if isinstance(state, (list, tuple)):
        return [number for item in state for number in _numbers(item)]
    if isinstance(state, Tensor) and not isinstance(state, Private):
        return [state.double().sum().item()]
    return [state] if isinstance(state, (int, float)) else []


def noise_scales(run: eq.PrivateTraining) -> list[Any]:
    """Bounds and noise of everything that left, as the journal holds them, and the numbers of the state."""
    entries = run.ledger.journal.entries()
    left = [e.bounds if e.kind == "release" else e.std for e in entries if e.kind in ("release", "unproven")]
    return [*left, _numbers(run._steps.state)]


def under_replay(
    make: Callable[[], m.Method], monkeypatch: Any, scale: float = 3.0, thinned: bool = False, **options: Any
) -> tuple[eq.PrivateTraining, eq.PrivateTraining]:
    """A run, and one on stretched data that is forced to the same releases.

    Args:
        scale: of the second run's inputs.
        thinned: let every draw of the second run have only half of its records.
    """
    ledgers: list[RecordingLedger] = []

    def recording(*args: Any, **kwargs: Any) -> Ledger:
        ledgers.append(RecordingLedger(*args, **kwargs))
        return ledgers[-1]

    class Replaying(RecordingLedger):
        def sample(self, draw: Any, num_records: int) -> Tensor:
            ids = super().sample(draw, num_records)
            return ids[::2] if thinned else ids

    monkeypatch.setattr(eq.PrivateTraining, "ledger_class", recording)
    first = training(make(), **options)
    list(first)
    transcript = ledgers[0].transcript
    monkeypatch.setattr(eq.PrivateTraining, "ledger_class", functools.partial(Replaying, replayed=transcript))
    second = training(make(), data=records(scale=scale), **options)
    list(second)
    return first, second


def holds_private(value: Any) -> bool:
    """Whether a state holds private tensors."""
    if isinstance(value, Private):
        return True
    if isinstance(value, dict):
        return any(map(holds_private, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_private, value))
