"""Gradients projected on a subspace and clipped there: PCDP-SGD, PDP-SGD, RPDP, GEP and biased GEP.

With columns V [P, K] that are public or released, and coordinates y_i = V^T g_i of each record's gradient,

    estimate = V (sum_i a_i y_i + N(0, (z C)^2 I_K)) / B

    a_i = rule.weights(||y_i||, C)       clipped after the projection (PCDP-SGD, RPDP, biased GEP)
    a_i = rule.weights(||g_i||, C)       clipped before it (PDP-SGD)

and, for GEP, in addition, from the same records, sum_i b_i (g_i - V y_i) + N(0, (z_2 C_2)^2 I_P) with
b_i = rule.weights(||g_i - V y_i||, C_2). What the papers print is in `equipoise.published.pcdp_sgd`.

**Where a subspace comes from.** A source answers a *key*, plain data from which the subspace can be built
again (parameters of an anchor point, a step, released columns): the key is a method's state, the subspace
itself only a cache. Everything that a source uses is public or released.

=====================  =================================================================================
`PublicSubspace`       leading directions of the public records' gradients at the anchor (PCDP-SGD, GEP)
`RandomSubspace`       orthonormal columns from public randomness (RPDP)
`ReleasedSubspace`     leading directions of the last noised sums of full steps
`MomentSubspace`       leading eigenvectors of a noised second moment (Dwork et al. 2014)
`IterationSubspace`    noisy subspace iteration (Hardt and Price 2014)
=====================  =================================================================================

Sources: PCDP-SGD, arXiv 2312.03792, "PCDP-SGD: Improving the Convergence of Differentially Private SGD via
Projection in Advance" (version 2 withdraws the paper), and its baseline RPDP-SGD; Kasiviswanathan 2021
studies random projections in DP-SGD. PDP-SGD: Zhou, Wu and Banerjee 2021, "Bypassing the Ambient Dimension:
Private SGD with Gradient Subspace Identification". GEP: Yu, Zhang, Chen and Liu 2021, "Do not Let Privacy
Overbill Utility: Gradient Embedding Perturbation for Private Learning", arXiv 2102.12677.
"""

from __future__ import annotations

import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from equipoise.gradients.operator import DenseGradients
from equipoise.methods.base import Context, Parameters, Plan, Setting, State
from equipoise.methods.clip_rules import Abadi, layers
from equipoise.methods.configuration import Count, Noise, Option, Positive, Share
from equipoise.methods.estimator import Estimator, Sums, View
from equipoise.methods.named_tensors import copied, mean_of
from equipoise.methods.public_records import PublicRecords
from equipoise.methods.subspaces import (
    Basis,
    PrincipalSubspace,
    Subspace,
    held,
    orthonormal_columns,
    principal_subspace,
)
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip, clip_coordinates
from equipoise.privacy.bounds.second_moments import moment_action, second_moment
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import Release
from equipoise.privacy.rows import PrivateRows
from equipoise.privacy.sampling import Poisson, Sampling

Blocks = Literal["per_tensor", "per_layer", "whole"]
"""Which parameters share columns."""

Key = dict[str, Any]

SUBSPACE_DRAW = "subspace"

ENOUGH = 0.9
"""A lower share of a held-out public gradient is warned of: what is missed is a bias that no step removes.

A choice, and a rough one: which share makes up for itself follows the noise. Nothing but the warning depends
on it.
"""

DEFAULT_DIMENSION = 100
"""The paper's columns per block: with fewer a subspace misses more, with more it lets in more noise."""


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
    dimension: Count | None = None

    @property
    def public(self) -> PublicRecords | None:
        """The public records that the columns come from."""
        return None

    def explores(self, step: int) -> bool:
        """Whether this step is a full step of DP-SGD."""
        return False

    def settled(self, blocks: Blocks, refresh_every: int | None) -> Self:
        """The source with a method's defaults where it leaves something open."""
        return replace(self, blocks=self.blocks or blocks)

    @abstractmethod
    def refresh(self, context: Context, number: int) -> Key:
        """The key of a new subspace; `number` counts the refreshes from 0."""

    @abstractmethod
    def build(self, context: Context, key: Key, orthonormal: bool = False) -> PrincipalSubspace:
        """The subspace of a key: the same for the same key, now or after a resume.

        Args:
            context: of the step.
            key: as `refresh` gave it.
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

    def _random(self, context: Context, rng: torch.Generator) -> list[dict[str, Tensor]]:
        """Orthonormal columns of every block, normal before they are made so."""
        out, params = [], context.params
        for group, k in self._columns(context).items():
            normal = {
                name: torch.randn(k, *params[name].shape, generator=rng, dtype=torch.float64)
                for name in group
            }
            found = orthonormal_columns(normal)
            out.append({name: value.to(params[name]) for name, value in found.items()})
        return out


@dataclass(frozen=True, kw_only=True)
class RefreshedSource(SubspaceSource, ABC):
    """A source that is asked for a new subspace at regular steps.

    Attributes:
        refresh_every: steps between refreshes; None takes the method's, or an epoch of the sampling.
    """

    refresh_every: Count | None = None

    def settled(self, blocks: Blocks, refresh_every: int | None) -> Self:
        return replace(super().settled(blocks, None), refresh_every=self.refresh_every or refresh_every)

    def interval(self, sampling: Sampling) -> int:
        """Steps between refreshes."""
        return self.refresh_every or max(1, round(1 / sampling.sampling_rate))

    def refreshes(self, sampling: Sampling) -> int:
        """The number of refreshes of a training."""
        return math.ceil(sampling.steps / self.interval(sampling))


def _held(params: Parameters, columns: Sequence[dict[str, Tensor]]) -> PrincipalSubspace:
    blocks = [block for part in columns for block in held(part).blocks]
    return PrincipalSubspace(Subspace({name: p.shape for name, p in params.items()}, blocks), None, {})


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
        basis: "kernel" (the columns are never formed), "held" (in memory), or "auto": what takes fewer
            multiplications. Where orthonormal columns are asked for they are held.
        blocks, refresh_every: as for every source.
    """

    kind: ClassVar[str] = "public"

    records: PublicRecords
    _: KW_ONLY
    energy: Share | None = None
    normalise: bool = False
    batch_size: Count | Literal["disjoint"] | None = None
    basis: Basis = "auto"

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

    def build(self, context: Context, key: Key, orthonormal: bool = False) -> PrincipalSubspace:
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
    # Public records that are a basis of the right directions give 0% here, and the best results.
    without = ", measured without the directions of the held-out records, which the subspace in use holds too"
    warnings.warn(
        f"the subspace captures {found.capture:.1%} of the squared norm of a held-out public gradient"
        f"{without if found.understated else ''}: less than {ENOUGH:.0%}. What it misses is a bias that no "
        "step removes. Unless the private gradients lie in the subspace better than the public ones, DP-SGD "
        "is the better method: try both. Give more public records, a larger dimension, or normalise=True",
        stacklevel=2,
    )


@dataclass(frozen=True, kw_only=True)
class RandomSubspace(RefreshedSource):
    """Random orthonormal columns of every block."""

    kind: ClassVar[str] = "random"

    def refresh(self, context: Context, number: int) -> Key:
        """The step, whose public randomness the columns come from."""
        return {"step": context.step}

    def build(self, context: Context, key: Key, orthonormal: bool = False) -> PrincipalSubspace:
        return _held(context.params, self._random(context, context.public_rng(key["step"])))


@dataclass(frozen=True, kw_only=True)
class ReleasedSubspace(SubspaceSource):
    """Leading directions of the last noised sums of full steps, which the method hands over.

    Attributes:
        history: sums kept.
        explore_every: every such step is a full one: steps in the subspace show no new direction.
    """

    kind: ClassVar[str] = "released"

    history: Count = 20
    explore_every: Count = 5

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

    def build(self, context: Context, key: Key, orthonormal: bool = False) -> PrincipalSubspace:
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

    clip_norm: Positive = 1.0
    noise_multiplier: Positive | None = None
    share: Share = 0.2
    batch_size: Positive | None = None

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

    def build(self, context: Context, key: Key, orthonormal: bool = False) -> PrincipalSubspace:
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

    iterations: Count = 3

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


# ---- the methods


@dataclass(frozen=True, kw_only=True)
class HasSource:
    """The field that stands first, behind `Estimator` in the order of classes: a round's client is
    `RoundPCDP(source, clip_norm)`."""

    source: SubspaceSource


@dataclass(frozen=True, kw_only=True)
class ProjectedGradient(Estimator, HasSource):
    """DP-SGD inside a subspace; `PCDPSGD`, `BiasedGEP`, `GEP`, `PDPSGD` and `RandomProjection` are its forms.

    Guarantee: that of DP-SGD at the same multiplier, whatever K is. Given the releases before, V is fixed.
    The sum is clipped and noised in coordinates and ||a_i y_i|| <= C for any V, so that the guarantee does
    not rest on orthonormal columns: the sum moves by at most C with a record. A private source adds releases
    of its own, on draws of its own; V y is post-processing.

    Args:
        source: where the subspace comes from, such as `PublicSubspace(PublicRecords(batch), dimension=100)`.
        clip_norm: C > 0, the clip norm of the coordinates.
        clip_rule: weighs the rows.
        noise_multiplier: z; calibrated to the budget when None.
    """

    clips_rows: ClassVar[bool] = False
    orthonormal: ClassVar[bool] = False
    """Whether the columns must be orthonormal, to rounding."""
    default_blocks: ClassVar[Blocks] = "per_tensor"
    default_refresh: ClassVar[int | None] = None

    clip_norm: Positive = 1.0
    noise_multiplier: Noise = None

    @functools.cached_property
    def subspace(self) -> SubspaceSource:
        """The source, with the defaults of this method."""
        return self.source.settled(self.default_blocks, self.default_refresh)

    @functools.cached_property
    def _last_built(self) -> dict[str, Any]:
        """A cache: the subspace that was built last, and the key that it follows from."""
        return {}

    def plan(self, setting: Setting) -> Plan:
        of_source = functools.partial(self.subspace.releases, setting.sampling)
        return Plan(self.calibrated(setting, others=of_source))

    def gradients_per_step(self, plan: Plan) -> float:
        sampling = plan.releases.sampling
        return super().gradients_per_step(plan) + self.subspace.public_gradients(sampling) / sampling.steps

    # ---- the steps

    def start(self, params: Parameters) -> State:
        """No subspace yet: the first step finds one before it draws a private record."""
        return {"age": 0, "refreshes": 0, "key": None, "capture": None}

    def rebase(self, state: State, params: Parameters) -> State:
        """The next step finds a subspace at the new parameters, if that costs nothing."""
        return state if self.source.is_private else {**state, "age": 0}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """Find the subspace if it is due, then one draw and one release of coordinates."""
        source = self.subspace
        if isinstance(source, RefreshedSource) and state["age"] % source.interval(context.sampling) == 0:
            key = source.refresh(context, state["refreshes"])
            self._last_built.clear()  # two sets of K P numbers may not fit
            found = self._built(context, key)
            warn_of_capture(found)
            state = {**state, "key": key, "refreshes": state["refreshes"] + 1, "capture": found.capture}
        return super().step(context, state)

    def view(self, context: Context, state: State) -> View:
        if self.subspace.explores(state["age"]):
            return View()  # a step of DP-SGD
        subspace = self._built(context, state["key"]).subspace
        return View(sums=lambda rows: self._sums(rows, subspace))

    def update(
        self, context: Context, state: State, mean: dict[str, Tensor], released: Sums
    ) -> tuple[dict[str, Tensor], State]:
        age = {"age": state["age"] + 1}
        if isinstance(self.subspace, ReleasedSubspace) and self.subspace.explores(state["age"]):
            return mean, age | {"key": self.subspace.remember(state["key"], released["gradient"])}
        lifted = self._lifted(self._built(context, state["key"]).subspace, released)
        return mean_of(lifted, context.sampling.expected_size), age

    def _built(self, context: Context, key: Any) -> PrincipalSubspace:
        last = self._last_built
        # After a resume, or where another training used the object, the key builds the same subspace again.
        if last.get("key") is not key:
            last |= {"key": key, "subspace": self.subspace.build(context, key, self.orthonormal)}
        found: PrincipalSubspace = last["subspace"]
        return found

    def _sums(self, rows: PrivateRows, subspace: Subspace) -> dict[str, Bounded]:
        norms = rows.row_norms() if self.clips_rows else None
        y = rows.coordinates(subspace)
        return {"gradient": clip_coordinates(y, self.clip_rule, self.clip_norm, norms=norms)}

    def _lifted(self, subspace: Subspace, released: Sums) -> dict[str, Tensor]:
        """The released sum on the parameters."""
        return subspace.lift(released["gradient"]["coordinates"])

    # ---- what is said of it

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        public = self.source.public
        own = super().assumptions(plan)
        return own if public is None else (*own, *public.assumptions())

    def public_batches(self) -> Sequence[PublicRecords]:
        public = self.source.public
        return () if public is None else (public,)


@dataclass(frozen=True, kw_only=True)
class PCDPSGD(ProjectedGradient):
    """PCDP-SGD: clipped and noised in the coordinates of a subspace of public gradients.

    The arguments are those of `ProjectedGradient`. Against DP-SGD the noise falls from P to K dimensions;
    what the subspace misses of the gradient is a bias that stays.

    Example:
        >>> import torch
        >>> from equipoise.methods import PublicRecords, PublicSubspace
        >>> source = PublicSubspace(PublicRecords(torch.eye(3)), dimension=2)
        >>> PCDPSGD(source=source, clip_norm=0.1).config()["source"]["dimension"]
        2
    """


@dataclass(frozen=True, kw_only=True)
class PDPSGD(ProjectedGradient):
    """PDP-SGD: the weights come from the whole gradients' norms. Arguments of `ProjectedGradient`.

    Example:
        >>> from equipoise.methods import RandomSubspace
        >>> PDPSGD(source=RandomSubspace(), clip_norm=0.1).clip_norm
        0.1
    """

    clips_rows: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class RandomProjection(ProjectedGradient):
    """RPDP: PCDP-SGD in a random subspace, the control that shows what the public directions are worth.

    The projection of a fixed random subspace keeps K/P of the gradient's squared norm in the mean.

    Args:
        source: the blocks, the columns per block (the paper takes 800 to 1,000), and the steps between fresh
            ones.
        clip_norm, clip_rule, noise_multiplier: as for `ProjectedGradient`.

    Example:
        >>> RandomProjection(clip_norm=0.1, source=RandomSubspace(dimension=800)).source.dimension
        800
    """

    source: RandomSubspace = RandomSubspace()


@dataclass(frozen=True, kw_only=True)
class BiasedGEP(ProjectedGradient):
    """GEP without its residual: blocks are layers, a refresh every step. Arguments of `ProjectedGradient`.

    Example:
        >>> from equipoise.methods import RandomSubspace
        >>> BiasedGEP(source=RandomSubspace()).subspace.blocks
        'per_layer'
    """

    default_blocks: ClassVar[Blocks] = "per_layer"
    default_refresh: ClassVar[int | None] = 1


@dataclass(frozen=True, kw_only=True)
class GEP(ProjectedGradient):
    """Gradient embedding perturbation: coordinates and residual, clipped and noised apart.

        estimate = [V (sum_i clip_C(V^T g_i) + N(0, (z C)^2 I_K))
                    + sum_i clip_C2(r_i) + N(0, (z_2 C_2)^2 I)] / B,      r_i = g_i - V V^T g_i

    Guarantee: that of `ProjectedGradient`, with one more sum of the same draw. The residual of a record is
    formed, so that its norm is true whatever the columns are, and moves its sum by at most C_2: the two are
    one Gaussian of multiplier (z^-2 + z_2^-2)^(-1/2).

    Args:
        source, clip_norm, clip_rule, noise_multiplier: as for `ProjectedGradient`. Blocks are layers and the
            subspace is renewed every step by default; for a private subspace that is a release per step. The
            full steps of `ReleasedSubspace` have no residual, and the noise of the coordinates. The columns
            are in memory and orthonormal, so that the residual is what they miss.
        residual_clip_norm: C_2 > 0; `clip_norm` when None.
        residual_noise_multiplier: z_2; from `residual_share` when None.
        residual_share: share of the budget for the residual, in (0, 1); 0.5 gives both the multiplier
            z = sqrt(2) z' where z' alone would spend the budget.

    Example:
        >>> from equipoise.methods import RandomSubspace
        >>> GEP(source=RandomSubspace(), clip_norm=0.2).residual_radius
        0.2
    """

    default_blocks: ClassVar[Blocks] = "per_layer"
    default_refresh: ClassVar[int | None] = 1
    orthonormal: ClassVar[bool] = True
    residual_clip_norm: Positive | None = None
    residual_noise_multiplier: Positive | None = None
    residual_share: Share = 0.5

    @property
    def residual_radius(self) -> float:
        """C_2."""
        return self.clip_norm if self.residual_clip_norm is None else self.residual_clip_norm

    def plan(self, setting: Setting) -> Plan:
        """Two releases of one draw; where the noise is calibrated, `scale` is that of both together."""
        share = self.residual_share

        def parts(scale: float) -> tuple[float, float]:
            first = scale if self.noise_multiplier is not None else scale / math.sqrt(1 - share)
            return first, self.residual_noise_multiplier or first * math.sqrt((1 - share) / share)

        def others(scale: float) -> list[Release]:
            first, second = parts(scale)
            residual = Release("residual", self.residual_radius, Gaussian(second))
            together = 1 / math.hypot(1 / first, 1 / second)
            return [residual, *self.subspace.releases(setting.sampling, together)]

        return Plan(self.calibrated(setting, lambda scale: Gaussian(parts(scale)[0]), others=others))

    def _sums(self, rows: PrivateRows, subspace: Subspace) -> dict[str, Bounded]:
        coordinates, residual = rows.split(subspace)
        return {
            "gradient": clip_coordinates(coordinates, self.clip_rule, self.clip_norm),
            "residual": clip(residual, self.clip_rule, self.residual_radius),
        }

    def _lifted(self, subspace: Subspace, released: Sums) -> dict[str, Tensor]:
        inside = super()._lifted(subspace, released)
        return {name: value + released["residual"][name] for name, value in inside.items()}
