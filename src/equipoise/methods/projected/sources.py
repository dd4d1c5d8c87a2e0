"""Where a subspace comes from: public records, earlier releases, private records with accounting, or chance.

A source answers a *key*, plain data from which the subspace can be built again (parameters of an anchor
point, a step, released columns): the key is a method's state, the subspace itself only a cache. Everything
that a source uses is public or released.

=====================  =================================================================================
`PublicSubspace`       leading directions of the public records' gradients at the anchor (PCDP-SGD, GEP)
`RandomSubspace`       orthonormal columns from public randomness (RPDP)
`ReleasedSubspace`     leading directions of the last noised sums of full steps
`MomentSubspace`       leading eigenvectors of a noised second moment (Dwork et al. 2014)
`IterationSubspace`    noisy subspace iteration (Hardt and Price 2014)
=====================  =================================================================================
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch

from equipoise import _validate
from equipoise.gradients.operator import DenseGradients
from equipoise.methods.base import Context, Parameters
from equipoise.methods.clip_rules import Abadi, layers
from equipoise.methods.configuration import Option
from equipoise.methods.named_tensors import copied
from equipoise.methods.public_records import PublicRecords
from equipoise.methods.subspaces.blocks import Block, BlockSubspace, orthonormal_columns
from equipoise.methods.subspaces.principal import Basis, PrincipalSubspace, principal_subspace
from equipoise.privacy.bounds.second_moments import moment_action, second_moment
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import Release
from equipoise.privacy.sampling import Poisson, Sampling

__all__ = [
    "Blocks",
    "IterationSubspace",
    "MomentSubspace",
    "PublicSubspace",
    "RandomSubspace",
    "ReleasedSubspace",
    "SubspaceSource",
    "groups_of",
]


Blocks = Literal["per_tensor", "per_layer", "whole"]
"""Which parameters share columns."""


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


@dataclass(frozen=True, kw_only=True)
class SubspaceSource(Option, ABC):
    """How columns are found, for each block of parameters.

    Attributes:
        blocks: "per_tensor", "per_layer" or "whole"; None takes the method's.
        dimension: columns per block, at most; None takes 100.
    """

    usual_kind: ClassVar[str | None] = "public"
    is_private: ClassVar[bool] = False
    """Whether finding a subspace draws private records, which is paid for."""

    blocks: Blocks | None = None
    dimension: int | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None:
            _validate.one_of(("per_tensor", "per_layer", "whole"), blocks=self.blocks)
        if self.dimension is not None:
            _validate.count("the columns per block", dimension=self.dimension)

    @property
    def public(self) -> PublicRecords | None:
        """The public records that the columns come from."""
        return None

    def settled(self, blocks: Blocks, refresh_every: int | None) -> Self:
        """The source with a method's defaults where it leaves something open."""
        return replace(self, blocks=self.blocks or blocks)

    @abstractmethod
    def refresh(self, context: Context, number: int) -> Key:
        """The key of a new subspace; `number` counts the refreshes from 0."""

    @abstractmethod
    def build(
        self, context: Context, key: Key, into: BlockSubspace | None = None, orthonormal: bool = False
    ) -> PrincipalSubspace:
        """The subspace of a key: the same for the same key, now or after a resume.

        Args:
            into: a subspace that nobody needs any more: its memory may be used again.
            orthonormal: hold orthonormal columns, to rounding.
        """

    def releases(self, sampling: Sampling, scale: float) -> list[Release]:
        """What finding the subspace releases, where a step's releases together have this multiplier."""
        return []

    def public_gradients(self, sampling: Sampling) -> int:
        """The gradients of public records that are computed in all."""
        return 0

    def _columns(self, context: Context) -> dict[tuple[str, ...], int]:
        """The blocks and their numbers of columns, whatever the rank."""
        shapes = {name: value.shape for name, value in context.params.items()}
        limit = DEFAULT_DIMENSION if self.dimension is None else self.dimension
        return {
            group: min(limit, sum(shapes[name].numel() for name in group))
            for group in groups_of(tuple(shapes), self.blocks or "per_tensor")
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


@dataclass(frozen=True, kw_only=True)
class RefreshedSource(SubspaceSource, ABC):
    """A source that is asked for a new subspace at regular steps.

    Attributes:
        refresh_every: steps between refreshes; None takes the method's, or an epoch of the sampling.
    """

    refresh_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh_every is not None:
            _validate.count("the steps between refreshes", refresh_every=self.refresh_every)

    def settled(self, blocks: Blocks, refresh_every: int | None) -> Self:
        return replace(super().settled(blocks, None), refresh_every=self.refresh_every or refresh_every)

    def interval(self, sampling: Sampling) -> int:
        """Steps between refreshes."""
        return self.refresh_every or max(1, round(1 / sampling.sampling_rate))

    def refreshes(self, sampling: Sampling) -> int:
        """The number of refreshes of a training."""
        return math.ceil(sampling.steps / self.interval(sampling))


def _held(params: Parameters, columns: Sequence[dict[str, torch.Tensor]]) -> PrincipalSubspace:
    blocks = [Block(next(iter(held.values())).shape[0], held) for held in columns]
    return PrincipalSubspace(BlockSubspace({n: p.shape for n, p in params.items()}, blocks), None, {})


@dataclass(frozen=True)
class PublicSubspace(RefreshedSource):
    """Leading directions of public gradients at the parameters of the refresh.

    Args:
        records: the public records; none of them may be a private record.
        dimension: the smaller of 100 and the number of public records when None.
        energy: choose the columns by the share of a held-out public gradient that they capture, in (0, 1).
        normalise: scale the public gradients to norm one before their directions are taken.
        batch_size: records per refresh, drawn afresh ("RBS"); all when None; "disjoint" divides them into
            disjoint parts, one per refresh ("IBS").
        basis: "kernel" (the columns are never formed), "held" (in memory; with a direction for every public
            record the public rows, of the same size, in their place), or "auto": what takes fewer
            multiplications. Where orthonormal columns are asked for they are held.
        blocks, refresh_every: as for every source.
    """

    kind: ClassVar[str] = "public"

    records: PublicRecords
    _: KW_ONLY
    energy: float | None = None
    normalise: bool = False
    batch_size: int | Literal["disjoint"] | None = None
    basis: Basis = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.instance(PublicRecords, "PublicRecords(batch)", records=self.records)
        _validate.one_of(("auto", "kernel", "held"), basis=self.basis)
        if self.energy is not None:
            _validate.share(energy=self.energy)
        if self.batch_size not in (None, "disjoint"):
            _validate.count("the records of a refresh, or 'disjoint'", batch_size=self.batch_size)

    @property
    def public(self) -> PublicRecords:
        return self.records

    def refreshes(self, sampling: Sampling) -> int:
        count = super().refreshes(sampling)
        if self.batch_size == "disjoint" and count > len(self.records):
            raise ValueError(
                f"batch_size='disjoint' needs a public record for each of the {count} refreshes, and there "
                f"are {len(self.records)}: give more, raise refresh_every, or leave batch_size out"
            )
        return count

    def releases(self, sampling: Sampling, scale: float) -> list[Release]:
        """None; but a training that has too few records for its refreshes is refused."""
        self.refreshes(sampling)
        return []

    def public_gradients(self, sampling: Sampling) -> int:
        count = self.refreshes(sampling)
        return count * self._size(count)

    def _size(self, refreshes: int) -> int:
        """The number of records of a refresh."""
        if isinstance(self.batch_size, str):
            return len(self.records) // refreshes
        return self.records.drawn_size(self.batch_size)

    def refresh(self, context: Context, number: int) -> Key:
        """The parameters as they are: the anchor at which the public gradients are taken."""
        # Copied, since the optimiser moves the parameters in place, and the key must build the same later.
        return {"anchor": copied(context.params), "step": context.step, "number": number}

    def build(
        self, context: Context, key: Key, into: BlockSubspace | None = None, orthonormal: bool = False
    ) -> PrincipalSubspace:
        batch, size = self._batch(context, key)
        rows = context.public_gradients(batch, at=key["anchor"], step=key["step"])
        limit = self.dimension
        if limit is None and self.energy is None:
            limit = DEFAULT_DIMENSION
        found = principal_subspace(
            rows,
            groups_of(rows.names, self.blocks or "per_tensor"),
            None if limit is None else min(limit, size),
            energy=self.energy,
            normalise=self.normalise,
            # Columns that are never formed cannot be made orthonormal.
            basis="held" if orthonormal else self.basis,
            records=context.sampling.expected_size,
            into=into,
        )
        if self.dimension is not None and (self.dimension > size or found.short):
            warnings.warn(
                f"dimension={self.dimension} is more than the public gradients span: {size} records, and "
                f"rank {found.short or 'enough'} by block; the columns that are there are used. Give more "
                "public records or a smaller dimension",
                stacklevel=2,
            )
        return found.orthonormal() if orthonormal else found

    def _batch(self, context: Context, key: Key) -> tuple[Any, int]:
        if isinstance(self.batch_size, str):
            parts = self.refreshes(context.sampling)
            size = self._size(parts)
            start = (key["number"] % parts) * size
            return self.records.take(slice(start, start + size)), size
        return self.records.drawn(self.batch_size, context.public_rng(key["step"])), self._size(1)


def warn_of_capture(found: PrincipalSubspace) -> None:
    """Warn where the subspace misses more of a held-out public gradient than projecting can win back."""
    if found.capture is None or found.capture >= ENOUGH:
        return
    measured = f"the subspace captures {found.capture:.1%} of the squared norm of a held-out public gradient"
    remedy = "Give more public records, a larger dimension, or normalise=True"
    if found.understated:
        # Public records that are a basis of the right directions give 0% here, and the best results.
        warnings.warn(
            f"{measured}, measured without the directions of the held-out records. The subspace in use holds "
            "these too, so it may capture more of the private gradients, and nobody can say how much from so "
            "few public records. Where private gradients are as far from the public ones as these are from "
            f"each other, the bias of what is missed makes DP-SGD the better method: try both. {remedy}",
            stacklevel=2,
        )
    else:
        warnings.warn(
            f"{measured}, less than {ENOUGH:.0%}: what it misses is a bias that no step removes, and DP-SGD "
            "is likely the better method, unless the private gradients lie in the subspace better than the "
            f"public ones. {remedy}",
            stacklevel=2,
        )


@dataclass(frozen=True, kw_only=True)
class RandomSubspace(RefreshedSource):
    """Random orthonormal columns of every block."""

    kind: ClassVar[str] = "random"

    def refresh(self, context: Context, number: int) -> Key:
        """The step, whose public randomness the columns come from."""
        return {"step": context.step}

    def build(
        self, context: Context, key: Key, into: BlockSubspace | None = None, orthonormal: bool = False
    ) -> PrincipalSubspace:
        return _held(context.params, self._random(context, context.public_rng(key["step"])))


@dataclass(frozen=True, kw_only=True)
class ReleasedSubspace(SubspaceSource):
    """Leading directions of the last noised sums of full steps, which the method hands over.

    Attributes:
        history: sums kept.
        explore_every: every such step is a full one: steps in the subspace show no new direction.
    """

    kind: ClassVar[str] = "released"

    history: int = 20
    explore_every: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.count(history=self.history, explore_every=self.explore_every)

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

    def build(
        self, context: Context, key: Key, into: BlockSubspace | None = None, orthonormal: bool = False
    ) -> PrincipalSubspace:
        """Principal directions of the kept sums."""
        rows = DenseGradients(key["history"])
        groups = groups_of(rows.names, self.blocks or "per_tensor")
        found = principal_subspace(rows, groups, self.dimension, basis="held", measure=False)
        return found.orthonormal() if orthonormal else found


@dataclass(frozen=True, kw_only=True)
class PrivateSource(RefreshedSource, ABC):
    """Columns released from private records; the key holds them.

    Attributes:
        clip_norm: c_V, the clip norm of rows for this purpose.
        noise_multiplier: z_V; from `share` when None.
        share: share of the budget for the subspace, in (0, 1).
        batch_size: expected records of its draws; those of the training when None.
    """

    is_private: ClassVar[bool] = True

    clip_norm: float = 1.0
    noise_multiplier: float | None = None
    share: float = 0.2
    batch_size: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.positive(clip_norm=self.clip_norm)
        _validate.share(share=self.share)
        _validate.positive_if_given(noise_multiplier=self.noise_multiplier, batch_size=self.batch_size)

    @property
    def rounds(self) -> int:
        return 1

    def sampling(self, sampling: Sampling) -> Sampling:
        """The sampling of the subspace's draws."""
        count = self.refreshes(sampling) * self.rounds
        if self.batch_size is None:
            return replace(sampling, steps=count)  # type: ignore[type-var]
        return Poisson(min(self.batch_size, sampling.population), sampling.population, count)

    def releases(self, sampling: Sampling, scale: float) -> list[Release]:
        """The moments, on draws of their own.

        In the Gaussian limit T draws at rate q and multiplier z cost as T (q / z)^2; by that the multiplier
        follows from the share of the budget.
        """
        own, bound = self.sampling(sampling), self.clip_norm**2
        noise = self.noise_multiplier
        if noise is None:
            rates = own.sampling_rate / sampling.sampling_rate
            noise = scale * rates * math.sqrt(own.steps / sampling.steps * (1 - self.share) / self.share)
        return [Release("moment", bound, Gaussian(noise), own.steps, SUBSPACE_DRAW, own, replace_ratio=2.0)]

    def build(
        self, context: Context, key: Key, into: BlockSubspace | None = None, orthonormal: bool = False
    ) -> PrincipalSubspace:
        return _held(context.params, key["columns"])


@dataclass(frozen=True, kw_only=True)
class MomentSubspace(PrivateSource):
    """Leading eigenvectors of each block's noised second moment; p_l x p_l numbers are released."""

    kind: ClassVar[str] = "moment"

    def refresh(self, context: Context, number: int) -> Key:
        sizes = self._columns(context)
        groups = list(sizes)
        draw = context.draw(SUBSPACE_DRAW)
        sums = draw.query(lambda rows, ids: {"moment": second_moment(rows, Abadi(), self.clip_norm, groups)})
        released = context.ledger.release(draw, sums)["moment"]
        columns = []
        for number_of_block, group in enumerate(groups):
            # The moment is symmetric and its noise is not: the noise's other half only disturbs.
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


@dataclass(frozen=True, kw_only=True)
class IterationSubspace(PrivateSource):
    """Subspace iteration from random columns: every round multiplies by a noised second moment.

    Attributes:
        iterations: rounds per refresh.
    """

    kind: ClassVar[str] = "iteration"

    iterations: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.count("the rounds of a refresh", iterations=self.iterations)

    @property
    def rounds(self) -> int:
        return self.iterations

    def refresh(self, context: Context, number: int) -> Key:
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
