"""Bugs that audits must find: each planted on purpose, and looked at by the check that suits it.

One step of the library's DP-SGD at full batch (the samplers: many draws), with a bug in one place and
without. A check that does not tell them apart is of no use; the table shows its statistic for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from equipoise.audit.replay import RecordingLedger
from equipoise.methods import DPMF, DPSGD, Abadi, AdaClip, Context, ScaleThenPrivatise, State
from equipoise.privacy import (
    Draw,
    FixedEpochs,
    FullBatch,
    Gaussian,
    Ledger,
    Poisson,
    PrivacyPlan,
    PrivateRows,
    Release,
    Secrets,
    clip,
)
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.mechanisms import Mechanism
from equipoise.privacy.mechanisms.base import Sums
from equipoise.privacy.noise.streams import ReleaseStreams
from equipoise.privacy.private import unwrap
from equipoise.testing.canaries import FAR, Rows, canary_loss
from equipoise.testing.checks import Check, noise_scale
from equipoise.testing.rehearsal import InMemoryTraining, whitened
from reproduction.noise_checks import batch_sizes, echoes, pairs, repeats, same_scale, sensitivity

__all__ = ["BUGS", "Planted", "find_planted"]

COORDINATES = 20_000
NOISE = 2.0


@dataclass(frozen=True)
class Planted:
    """A check of a clean step and of one with a bug.

    Attributes:
        bug: what was planted.
        clean, planted: the check of either.
    """

    bug: str
    clean: Check
    planted: Check

    @property
    def found(self) -> bool:
        """The bug is seen, and nothing is seen where there is none."""
        return self.clean.passes and not self.planted.passes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "bug": self.bug,
            "check": self.clean.name,
            "clean": self.clean.statistic,
            "planted": self.planted.statistic,
            "limit": self.clean.limit,
            "found": self.found,
        }


def find_planted(seed: int = 0) -> list[Planted]:
    """Every bug of `BUGS`, clean and planted.

    Example:
        >>> Planted("none", noise_scale(torch.ones(9), 1.0), noise_scale(9 * torch.ones(9), 1.0)).found
        True
    """
    return [Planted(bug, probe(False, seed), probe(True, seed)) for bug, probe in BUGS.items()]


# ---- the bugs


class Quieter(RecordingLedger):
    """Noise at 0.8 of its scale."""

    scale = 0.8

    def _noised(self, mechanism: Mechanism, *rest: Any) -> Sums:
        return super()._noised(mechanism.scaled(self.scale), *rest)


class Repeating(RecordingLedger):
    """The noise of every release is used for the next one too."""

    def _streams(self, draw: Draw, *question: object) -> ReleaseStreams:
        return super()._streams(replace(draw, index=draw.index // 2 * 2), *question)


class Restarting(RecordingLedger):
    """The noise of every tensor begins at the same place of the stream."""

    def _noised(self, mechanism: Mechanism, sums: Mapping[str, Bounded], *rest: Any) -> Sums:
        out = {name: dict(tensors) for name, tensors in super()._noised(mechanism, sums, *rest).items()}
        for name, tensors in out.items():
            raw = {key: unwrap(value) for key, value in sums[name].value.items()}
            first = next(iter(tensors))
            noise = tensors[first] - raw[first]
            for key in tensors:
                tensors[key] = raw[key] + noise
        return out


class WithoutHistory(RecordingLedger):
    """Noise over steps that begins afresh at every step, as after a resume that lost its history."""

    def release(self, draw: Draw, sums: Mapping[str, Bounded], checks: Any = ()) -> Sums:
        self._state.history.values.clear()
        return super().release(draw, sums, checks)


class ReversedHistory(RecordingLedger):
    """Noise over steps whose coefficients meet the steps before in reverse order."""

    def release(self, draw: Draw, sums: Mapping[str, Bounded], checks: Any = ()) -> Sums:
        values = self._state.history.values
        for name, rows in values.items():
            backwards = [left for _, left in reversed(rows)]
            values[name] = [(ordinal, left) for (ordinal, _), left in zip(rows, backwards, strict=True)]
        return super().release(draw, sums, checks)


class OtherNorms:
    """Rows with the norms of others, which `norms` makes of them."""

    def __init__(self, rows: PrivateRows, norms: Callable[[Any], Any]) -> None:
        self._rows, self._norms = rows._rows, norms

    def row_norms(self, groups: Any = None) -> Any:
        """The others' norms."""
        return self._norms(self._rows)

    def __getattr__(self, name: str) -> Any:
        if name == "weighed":  # takes the true norms
            raise AttributeError(name)
        return getattr(self._rows, name)

    @classmethod
    def of(cls, rows: PrivateRows, norms: Callable[[Any], Any]) -> PrivateRows:
        """As methods see them."""
        return rows._like(cls(rows, norms))


class ForgetsParameter(DPSGD):
    """DP-SGD whose norms leave one parameter out."""

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """As DP-SGD's."""
        draw = context.draw("batch")

        def first(raw: Any) -> Any:
            return raw.select(raw.names[:1]).row_norms()

        sums = draw.query(
            lambda rows, ids: {
                "gradient": clip(OtherNorms.of(rows, first), Abadi(), self.threshold.at(0, 0.0))
            }
        )
        return context.ledger.release(draw, sums)["gradient"], state


class DividesByRealised(DPSGD):
    """DP-SGD that divides by how many records were drawn."""

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """As DP-SGD's, with the wrong divisor."""
        draw = context.draw("batch")
        count = len(unwrap(draw.rows(lambda rows, ids: rows.row_norms())))
        sums = draw.query(lambda rows, ids: {"gradient": clip(rows, Abadi(), self.threshold.at(0, 0.0))})
        released = context.ledger.release(draw, sums)["gradient"]
        return {name: value / count for name, value in released.items()}, state


class RawThreshold(DPSGD):
    """DP-SGD whose clip norm is the largest norm of the batch."""

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """As DP-SGD's, with the wrong threshold."""
        draw = context.draw("batch")
        largest = float(unwrap(draw.rows(lambda rows, ids: rows.row_norms())).max())
        limit = min(largest, self.threshold.upper(1))
        sums = draw.query(lambda rows, ids: {"gradient": clip(rows, Abadi(), limit)})
        return context.ledger.release(draw, sums)["gradient"], state


class PrivateScale(ScaleThenPrivatise):
    """Rows scaled by the largest norm of the batch before they are clipped, and back afterwards."""

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """As the method's, with a scale that follows from the records."""
        draw = context.draw("batch")
        largest = float(unwrap(draw.rows(lambda rows, ids: rows.row_norms())).max())
        scale = {name: torch.full_like(value, 1 / largest) for name, value in context.params.items()}
        sums = draw.query(lambda rows, ids: {"gradient": clip(rows.scaled(scale), Abadi(), 1.0)})
        released = context.ledger.release(draw, sums)["gradient"]
        return {name: value * largest for name, value in released.items()}, state


class AddsUnscaledRows(AdaClip):
    """AdaClip that clips by the norms of scaled rows and adds the rows as they were."""

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """As the method's at b = 2, whose release has the noise of scaled rows."""
        draw = context.draw("batch")

        def halved(raw: Any) -> Any:
            return 0.5 * raw.row_norms()

        sums = draw.query(lambda rows, ids: {"gradient": clip(OtherNorms.of(rows, halved), Abadi(), 1.0)})
        return context.ledger.release(draw, sums)["gradient"], state


def fixed_size(self: Poisson, secrets: Secrets, draw: Draw | int, records: int | Tensor) -> Tensor:
    """In the place of `Poisson.sample`, which is accounted: positions of a subset of a fixed size."""
    assert isinstance(records, int)
    generator = secrets.sampling_generator(draw.index if isinstance(draw, Draw) else draw)
    size = round(self.sampling_rate * records)
    return torch.randperm(records, generator=generator)[:size].sort().values


# ---- the probes


def _training(
    method: DPSGD,
    records: int,
    seed: int,
    *,
    ledger: type[RecordingLedger] = RecordingLedger,
    steps: int = 1,
    first: float = 0.5,
    tables: int = 1,
) -> InMemoryTraining:
    """A full-batch training whose records move the first parameters; the others hold noise alone.

    `first` is the length of the first record's gradient, the others' is 0.5.
    """
    scale = torch.full((records, tables), 0.5)
    scale[0] = first
    return InMemoryTraining.open(
        method,
        Rows(COORDINATES, tables=tables),
        canary_loss(),
        {"index": torch.arange(records), "scale": scale},
        FullBatch(10, steps),  # the public population, whatever is there
        None,
        seed=seed,
        make_ledger=ledger,
    ).run()


def _noises(training: InMemoryTraining) -> Tensor:
    ledger = training.ledger
    rows = []
    for released, raw in zip(ledger.transcript, ledger.sums, strict=True):
        outs, inside = released["gradient"], raw["gradient"]
        rows.append(torch.cat([(outs[name] - inside[name]).flatten() for name in outs]))
    return torch.stack(rows)


def _noise_scale(planted: bool, seed: int) -> Check:
    method = DPSGD(clip_norm=1.0, noise_multiplier=NOISE)
    training = _training(method, 10, seed, ledger=Quieter if planted else RecordingLedger)
    return noise_scale(_noises(training), NOISE)


def _repeats(planted: bool, seed: int) -> Check:
    method = DPSGD(clip_norm=1.0, noise_multiplier=NOISE)
    training = _training(method, 10, seed, ledger=Repeating if planted else RecordingLedger, steps=4)
    return repeats(_noises(training))


def _echoes(planted: bool, seed: int) -> Check:
    method = DPSGD(clip_norm=1.0, noise_multiplier=NOISE)
    training = _training(method, 10, seed, ledger=Restarting if planted else RecordingLedger, tables=2)
    return echoes(_noises(training)[0])


def _over_steps(ledger: type[RecordingLedger], planted: bool, seed: int) -> Check:
    """Is the noise of a run with noise over steps white once it is whitened?"""
    training = InMemoryTraining.open(
        DPMF(clip_norm=1.0, noise_multiplier=NOISE, bands=4),
        Rows(COORDINATES),
        canary_loss(),
        {"index": torch.arange(40), "scale": torch.full((40, 1), 0.5)},
        FixedEpochs(5, 40, 12),
        None,
        seed=seed,
        make_ledger=ledger if planted else RecordingLedger,
    ).run()
    left, raw = (
        whitened(training.ledger, sums) for sums in (training.ledger.transcript, training.ledger.sums)
    )
    rows = []
    for after, before in zip(left, raw, strict=True):
        outs, inside = after["gradient"], before["gradient"]
        rows.append(torch.cat([(outs[name] - inside[name]).flatten() for name in outs]))
    return repeats(torch.stack(rows))


class Pair(nn.Module):
    """Two tables; a record's gradient is small in the first and large in the second."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.first, self.second = Rows(canaries), Rows(canaries)

    def forward(self, index: Tensor) -> Tensor:
        """One number per record, [B, 1]."""
        return 1e-4 * self.first(index) + self.second(index)


def _reach(kind: type[DPSGD], planted: bool, seed: int) -> Check:
    canaries, kind = 1000, kind if planted else DPSGD
    data = {"index": torch.arange(canaries), "scale": torch.full((canaries, 1), FAR)}
    training = InMemoryTraining.open(
        kind(clip_norm=1.0, noise_multiplier=NOISE),
        Pair(canaries),
        canary_loss(),
        data,
        FullBatch(canaries, 1),
        None,
        seed=seed,
    ).run()
    return sensitivity(training.ledger.transcript[0]["gradient"]["second.tables.0"].flatten(), NOISE, 1.0)


def _same_scale(kind: type[DPSGD], planted: bool, seed: int, far: bool) -> Check:
    """What leaves as the estimate, from ten records and from one more, or with one of them far out."""
    method = kind if planted else DPSGD
    worlds = []
    for number, present in enumerate((False, True)):
        training = _training(
            method(clip_norm=10.0, noise_multiplier=NOISE),
            11 if present and not far else 10,
            seed + 1000 * number,
            first=FAR if present and far else 0.5,
        )
        worlds.append(training.parameters[11:])
    return same_scale(*worlds)


@lru_cache(maxsize=4)
def _draws(planted: bool, seed: int) -> tuple[Tensor, float]:
    """Who was drawn, [5000, 20] bool, and the rate that is accounted."""
    records, rate, draws = 20, 0.25, 5000
    ledger = Ledger(
        PrivacyPlan([Release("gradient", 1.0, Gaussian(1.0))], Poisson(rate * records, records, draws)),
        secrets=Secrets(reproducible_seed=seed),
    )
    drawn = torch.zeros(draws, records, dtype=torch.bool)
    with mock.patch.object(Poisson, "sample", fixed_size) if planted else nullcontext():
        for number in range(draws):
            drawn[number, ledger.sample(ledger.open("batch", str(number)), records)] = True
    return drawn, rate


def _sizes(planted: bool, seed: int) -> Check:
    drawn, rate = _draws(planted, seed)
    return batch_sizes(drawn.sum(dim=1), drawn.shape[1], rate)


BUGS: Mapping[str, Callable[[bool, int], Check]] = {
    "noise scaled by 0.8": _noise_scale,
    "one parameter left out of the norm": lambda planted, seed: _reach(ForgetsParameter, planted, seed),
    "rows clipped by scaled norms, added unscaled": lambda planted, seed: _reach(
        AddsUnscaledRows, planted, seed
    ),
    "divisor by the realised batch size": lambda planted, seed: _same_scale(
        DividesByRealised, planted, seed, far=False
    ),
    "without replacement accounted as Poisson (sizes)": _sizes,
    "without replacement accounted as Poisson (pairs)": lambda planted, seed: pairs(*_draws(planted, seed)),
    "the same noise used twice": _repeats,
    "the same noise for two tensors": _echoes,
    "noise over steps without its history": lambda planted, seed: _over_steps(WithoutHistory, planted, seed),
    "noise over steps in reverse order": lambda planted, seed: _over_steps(ReversedHistory, planted, seed),
    "scale from the raw batch": lambda planted, seed: _same_scale(PrivateScale, planted, seed, far=True),
    "threshold from the raw batch": lambda planted, seed: _same_scale(RawThreshold, planted, seed, far=True),
}
"""bug -> probe(planted, seed): the check that suits it, on a step with the bug or without."""
