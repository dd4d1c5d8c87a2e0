"""Where a subspace comes from: public records, earlier releases, private records with accounting, or chance.

A source answers a *key*, plain data from which the subspace can be built again (parameters of an anchor
point, a step, released columns): the key is a method's state, the subspace itself only a cache. Everything
that a source uses is public or released.

=====================  =================================================================================
`PublicSource`         leading directions of the public records' gradients at the anchor (PCDP-SGD, GEP)
`RandomSource`         orthonormal columns from public randomness (RPDP)
`ReleasedSource`       leading directions of the last noised sums of full steps
`MomentSource`         leading eigenvectors of a noised second moment (Dwork et al. 2014)
`IterationSource`      noisy subspace iteration (Hardt and Price 2014)
=====================  =================================================================================
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch

from equipoise.gradients.operator import DenseGradients
from equipoise.gradients.subspaces.blocks import Block, BlockSubspace, orthonormal_columns
from equipoise.gradients.subspaces.principal import Basis, PrincipalSubspace, principal_subspace
from equipoise.methods.base import Context, Parameters
from equipoise.methods.clip_rules import Abadi, layers
from equipoise.methods.named_tensors import copied
from equipoise.methods.public_records import PublicRecords
from equipoise.privacy.bounds.second_moments import moment_action, second_moment
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import Release
from equipoise.privacy.sampling import Poisson, Sampling

__all__ = [
    "Blocks",
    "IterationSource",
    "MomentSource",
    "PublicSource",
    "RandomSource",
    "ReleasedSource",
    "SubspaceSource",
    "groups_of",
]


Blocks = Literal["per_tensor", "per_layer", "whole"]


Key = dict[str, Any]


SUBSPACE_DRAW = "subspace"


ENOUGH = 0.9  # a lower share of a held-out public gradient loses to noise in all directions


DEFAULT_DIMENSION = 100


def groups_of(names: Sequence[str], blocks: Blocks) -> tuple[tuple[str, ...], ...]:
    """The blocks of parameters that get columns of their own.

    >>> groups_of(["0.weight", "0.bias"], "per_tensor")
    (('0.weight',), ('0.bias',))
    """
    if blocks == "per_tensor":
        return tuple((name,) for name in names)
    return layers(names) if blocks == "per_layer" else (tuple(names),)


@dataclasses.dataclass(frozen=True)
class SubspaceSource(ABC):
    """How columns are found, for each block of parameters.

    Attributes:
        blocks: "per_tensor", "per_layer" or "whole".
        dimension: columns a block, at most.
    """

    blocks: Blocks
    dimension: int | None

    @abstractmethod
    def refresh(self, context: Context, number: int) -> Key:
        """The key of a new subspace; `number` counts the refreshes from 0."""

    @abstractmethod
    def build(self, context: Context, key: Key, into: BlockSubspace | None = None) -> PrincipalSubspace:
        """The subspace of a key: the same for the same key, now or after a resume.

        `into` is one that nobody needs any more: its memory may be used again.
        """

    def releases(self, sampling: Sampling, refreshes: int, noise_multiplier: float) -> list[Release]:
        """What finding the subspace releases."""
        return []

    def _columns(self, context: Context) -> dict[tuple[str, ...], int]:
        """The blocks and their numbers of columns, whatever the rank."""
        shapes = {name: value.shape for name, value in context.params.items()}
        limit = DEFAULT_DIMENSION if self.dimension is None else self.dimension
        return {
            group: min(limit, sum(shapes[name].numel() for name in group))
            for group in groups_of(tuple(shapes), self.blocks)
        }

    def _random(self, context: Context, rng: torch.Generator) -> list[dict[str, torch.Tensor]]:
        """Orthonormal columns of every block, normal before they are made so."""
        out = []
        for group, k in self._columns(context).items():
            normal = {
                name: torch.randn(k, *context.params[name].shape, generator=rng, dtype=torch.float64)
                for name in group
            }
            held = orthonormal_columns(normal)
            out.append({name: value.to(context.params[name]) for name, value in held.items()})
        return out


def _held(params: Parameters, columns: Sequence[dict[str, torch.Tensor]]) -> PrincipalSubspace:
    blocks = [Block(next(iter(held.values())).shape[0], held) for held in columns]
    return PrincipalSubspace(BlockSubspace({n: p.shape for n, p in params.items()}, blocks), None, {})


@dataclasses.dataclass(frozen=True)
class PublicSource(SubspaceSource):
    """Leading directions of public gradients at the parameters of the refresh.

    Attributes:
        public: the records.
        energy: columns by captured share instead of number; see `principal_subspace`.
        normalise: scale the public gradients to norm one.
        size: records a refresh; None takes all.
        disjoint_parts: number of refreshes among which the records are divided; None draws them afresh.
        basis: "kernel", "held" or "auto".
        orthonormal: hold orthonormal columns, to rounding.
    """

    public: PublicRecords
    energy: float | None = None
    normalise: bool = False
    size: int | None = None
    disjoint_parts: int | None = None
    basis: Basis = "auto"
    orthonormal: bool = False

    def refresh(self, context: Context, number: int) -> Key:
        """The parameters as they are: the anchor at which the public gradients are taken."""
        return {"anchor": copied(context.params), "step": context.step, "number": number}

    def build(self, context: Context, key: Key, into: BlockSubspace | None = None) -> PrincipalSubspace:
        """Public gradients at the anchor, and their leading directions."""
        batch, size = self._batch(context, key)
        rows = context.public_gradients(batch, at=key["anchor"], step=key["step"])
        limit = self.dimension
        if limit is None and self.energy is None:
            limit = DEFAULT_DIMENSION
        found = principal_subspace(
            rows,
            groups_of(rows.names, self.blocks),
            None if limit is None else min(limit, size),
            energy=self.energy,
            normalise=self.normalise,
            basis=self.basis,
            records=context.sampling.expected_size,
            into=into,
        )
        if self.dimension is not None and (self.dimension > size or found.short):
            warnings.warn(
                f"dimension={self.dimension} is more than the public gradients span: {size} records, "
                "and rank "
                f"{found.short or 'enough'} by block; the columns that are there are used. Give more public "
                "records or a smaller dimension",
                stacklevel=2,
            )
        return found.orthonormal() if self.orthonormal else found

    def _batch(self, context: Context, key: Key) -> tuple[Any, int]:
        if self.disjoint_parts is not None:
            size = len(self.public) // self.disjoint_parts
            start = (key["number"] % self.disjoint_parts) * size
            return self.public.take(slice(start, start + size)), size
        size = len(self.public) if self.size is None else min(self.size, len(self.public))
        return self.public.drawn(self.size, context.public_rng(key["step"])), size


def warn_of_capture(capture: float | None) -> None:
    """Warn where the subspace misses more of a held-out public gradient than projecting can win back."""
    if capture is not None and capture < ENOUGH:
        warnings.warn(
            f"the subspace captures {capture:.1%} of the squared norm of a held-out public gradient, "
            "less than "
            f"{ENOUGH:.0%}: what it misses is a bias that no step removes, and DP-SGD is likely the "
            "better method. "
            "Give more public records, a larger dimension, or normalise_public=True",
            stacklevel=2,
        )


@dataclasses.dataclass(frozen=True)
class RandomSource(SubspaceSource):
    """Random orthonormal columns of every block."""

    def refresh(self, context: Context, number: int) -> Key:
        """The step, whose public randomness the columns come from."""
        return {"step": context.step}

    def build(self, context: Context, key: Key, into: BlockSubspace | None = None) -> PrincipalSubspace:
        """The columns, drawn again."""
        return _held(context.params, self._random(context, context.public_rng(key["step"])))


@dataclasses.dataclass(frozen=True)
class ReleasedSource(SubspaceSource):
    """Leading directions of the last noised sums of full steps, which the method hands over.

    Attributes:
        history: sums kept.
        explore_every: every such step is a full one: steps in the subspace alone show no new direction.
        orthonormal: hold orthonormal columns, to rounding.
    """

    history: int = 20
    explore_every: int = 5
    orthonormal: bool = False

    def explores(self, step: int) -> bool:
        """Whether this step is a full step of DP-SGD."""
        return step < self.history or (step - self.history) % self.explore_every == 0

    def remember(self, key: Key | None, released: Parameters) -> Key:
        """The key after a full step."""
        old = {} if key is None else key["history"]
        return {
            "history": {
                name: torch.cat([old[name][1 - self.history :], value[None]]) if old else value[None].clone()
                for name, value in released.items()
            }
        }

    def refresh(self, context: Context, number: int) -> Key:
        """Not asked for: the key changes with every full step."""
        raise RuntimeError("a subspace of releases has no refresh of its own; full steps renew it")

    def build(self, context: Context, key: Key, into: BlockSubspace | None = None) -> PrincipalSubspace:
        """Principal directions of the kept sums."""
        rows = DenseGradients(key["history"])
        groups = groups_of(rows.names, self.blocks)
        found = principal_subspace(rows, groups, self.dimension, basis="held", measure=False)
        return found.orthonormal() if self.orthonormal else found


@dataclasses.dataclass(frozen=True)
class _PrivateSource(SubspaceSource):
    """Columns released from private records; the key holds them.

    Attributes:
        clip_norm: c_V, of the rows for this purpose.
        batch_size: expected records of a draw; None takes the training's sampling.
        iterations: draws a refresh.
    """

    clip_norm: float = 1.0
    batch_size: float | None = None
    iterations: int = 1

    def sampling(self, sampling: Sampling, refreshes: int) -> Sampling:
        """The sampling of the subspace's draws."""
        count = refreshes * self.iterations
        if self.batch_size is None:
            return dataclasses.replace(sampling, steps=count)  # type: ignore[type-var]
        return Poisson(min(self.batch_size, sampling.population), sampling.population, count)

    def releases(self, sampling: Sampling, refreshes: int, noise_multiplier: float) -> list[Release]:
        """The moments, on draws of their own."""
        own = self.sampling(sampling, refreshes)
        bound = self.clip_norm**2
        return [
            Release(
                "moment", bound, Gaussian(noise_multiplier), own.steps, SUBSPACE_DRAW, own, replace_ratio=2.0
            )
        ]

    def build(self, context: Context, key: Key, into: BlockSubspace | None = None) -> PrincipalSubspace:
        """The columns of the key."""
        return _held(context.params, key["columns"])


@dataclasses.dataclass(frozen=True)
class MomentSource(_PrivateSource):
    """Leading eigenvectors of each block's noised second moment; p_l x p_l numbers are released."""

    def refresh(self, context: Context, number: int) -> Key:
        """One draw, one release."""
        sizes = self._columns(context)
        groups = list(sizes)
        draw = context.draw(SUBSPACE_DRAW)
        sums = draw.query(lambda rows, ids: {"moment": second_moment(rows, Abadi(), self.clip_norm, groups)})
        released = context.ledger.release(draw, sums)["moment"]
        columns = []
        for number_of_block, group in enumerate(groups):
            moment = released[str(number_of_block)].double()
            _, vectors = torch.linalg.eigh((moment + moment.t()) / 2)
            leading = vectors[:, -sizes[group] :].t().flip(0)
            parts = torch.split(leading, [context.params[name].numel() for name in group], dim=1)
            columns.append(
                {
                    name: part.reshape(-1, *context.params[name].shape).to(context.params[name])
                    for name, part in zip(group, parts, strict=True)
                }
            )
        return {"columns": columns}


@dataclasses.dataclass(frozen=True)
class IterationSource(_PrivateSource):
    """Subspace iteration from random columns: every round multiplies by a noised second moment."""

    def refresh(self, context: Context, number: int) -> Key:
        """One draw and one release a round."""
        columns = self._random(context, context.public_rng(context.step))
        for _ in range(self.iterations):
            now = columns
            draw = context.draw(SUBSPACE_DRAW)
            sums = draw.query(
                lambda rows, ids, now=now: {"moment": moment_action(rows, Abadi(), self.clip_norm, now)}
            )
            released = context.ledger.release(draw, sums)["moment"]
            columns = [
                orthonormal_columns({name: released[name].to(context.params[name]) for name in block})
                for block in columns
            ]
        return {"columns": columns}


def subspace_noise(
    source: SubspaceSource, sampling: Sampling, refreshes: int, scale: float, share: float
) -> float:
    """The multiplier that spends about `share` of the budget on the subspace, beside releases at `scale`.

    In the Gaussian limit T draws at rate q and multiplier z cost as T (q / z)^2.
    """
    if not isinstance(source, _PrivateSource):
        return scale
    own = source.sampling(sampling, refreshes)
    rates = own.sampling_rate / sampling.sampling_rate
    return scale * rates * math.sqrt(own.steps / sampling.steps * (1 - share) / share)
