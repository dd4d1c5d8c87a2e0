"""Gradients projected on a subspace and clipped there: PCDP-SGD, PDP-SGD, RPDP, and what GEP shares.

With columns V [P, K] that are public or released, and coordinates y_i = V^T g_i of each record's gradient,

    estimate = V (sum_i a_i y_i + N(0, (z C)^2 I_K)) / B

    a_i = rule.weights(||y_i||, C)       clipped after the projection (PCDP-SGD, RPDP, biased GEP)
    a_i = rule.weights(||g_i||, C)       clipped before it (PDP-SGD)

and, for GEP, in addition, from the same records, sum_i b_i (g_i - V y_i) + N(0, (z_2 C_2)^2 I_P) with
b_i = rule.weights(||g_i - V y_i||, C_2).

The sums are clipped and noised in coordinates: noise of K numbers instead of P, and ||a_i y_i|| <= C for
any V, so that the guarantee does not rest on orthonormal columns. Given the releases before, V is fixed; the
sum moves by at most C when a record enters or leaves: a step costs what a step of DP-SGD costs at the same
multiplier. What the papers print is in `equipoise.published.pcdp_sgd`.

Sources: PCDP-SGD, arXiv 2312.03792, "PCDP-SGD: Improving the Convergence of Differentially Private SGD via
Projection in Advance" (version 2 withdraws the paper), and its baseline RPDP-SGD; Kasiviswanathan 2021
studies random projections in DP-SGD. PDP-SGD: Zhou, Wu and Banerjee 2021, "Bypassing the Ambient Dimension:
Private SGD with Gradient Subspace Identification". GEP: see `equipoise.methods.projected.gep`.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.card import Card, card_of
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.projected.sources import (
    Blocks,
    RandomSubspace,
    RefreshedSource,
    ReleasedSubspace,
    SubspaceSource,
    warn_of_capture,
)
from equipoise.methods.public_records import PublicRecords
from equipoise.methods.subspaces.blocks import BlockSubspace
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip, clip_coordinates
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.rows import PrivateRows

__all__ = ["PCDPSGD", "PDPSGD", "ProjectedGradient", "RandomProjection"]


@dataclass(frozen=True, kw_only=True)
class ProjectedGradient(Method, ABC):
    """DP-SGD inside a subspace; `PCDPSGD`, `BiasedGEP`, `GEP`, `PDPSGD` and `RandomProjection` are its forms.

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

    source: SubspaceSource
    clip_norm: float = 1.0
    clip_rule: ClipRule = Abadi()
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.instance(SubspaceSource, "PublicSubspace(PublicRecords(batch))", source=self.source)
        _validate.instance(ClipRule, "PSAC(regulariser=0.1)", clip_rule=self.clip_rule)
        _validate.positive(clip_norm=self.clip_norm)
        _validate.noise_if_given(noise_multiplier=self.noise_multiplier)

    @functools.cached_property
    def subspace(self) -> SubspaceSource:
        """The source, with the defaults of this method."""
        return self.source.settled(self.default_blocks, self.default_refresh)

    @functools.cached_property
    def _last_built(self) -> _LastBuilt:
        return _LastBuilt()

    # ---- the plan

    def plan(self, setting: Setting) -> Plan:
        def with_noise(scale: float) -> PrivacyPlan:
            parts, together = self._parts(scale)
            releases = [*parts, *self.subspace.releases(setting.sampling, together)]
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return Plan(setting.calibrated(with_noise, self.noise_multiplier))

    def _parts(self, scale: float) -> tuple[list[Release], float]:
        """What a step in the subspace releases, and the multiplier that all of it together costs as."""
        return [Release("gradient", self.clip_norm, Gaussian(scale))], scale

    def gradients_per_step(self, plan: Plan) -> float:
        sampling = plan.releases.sampling
        return super().gradients_per_step(plan) + self.subspace.public_gradients(sampling) / sampling.steps

    # ---- the steps

    def init(self, context: Context) -> State:
        """No subspace yet: the first step finds one before it draws a private record."""
        return {"age": 0, "refreshes": 0, "key": None, "capture": None}

    def rebase(self, state: State, params: Parameters) -> State:
        """The next step finds a subspace at the new parameters, if that costs nothing."""
        return state if self.source.is_private else {**state, "age": 0}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """Find the subspace if it is due, then one draw and one release of coordinates."""
        source = self.subspace
        if isinstance(source, ReleasedSubspace) and source.explores(state["age"]):
            return self._full_step(context, state, source)
        if isinstance(source, RefreshedSource) and state["age"] % source.interval(context.sampling) == 0:
            state = self._refreshed(context, state)
        estimate = self._release(context, self._built(context, state))
        following = {**state, "age": state["age"] + 1}
        return mean_of(estimate, context.sampling.expected_size), following

    def _refreshed(self, context: Context, state: State) -> State:
        key = self.subspace.refresh(context, state["refreshes"])
        # The old columns' memory goes to the new ones: two sets of K P numbers may not fit.
        into, self._last_built.subspace = self._last_built.subspace, None
        found = self.subspace.build(context, key, into, self.orthonormal)
        self._last_built.key, self._last_built.subspace = key, found.subspace
        warn_of_capture(found)
        return {**state, "key": key, "refreshes": state["refreshes"] + 1, "capture": found.capture}

    def _built(self, context: Context, state: State) -> BlockSubspace:
        last, key = self._last_built, state["key"]
        # After a resume, or where another training used the object, the key builds the same subspace again.
        if last.subspace is None or last.key is not key:
            found = self.subspace.build(context, key, orthonormal=self.orthonormal)
            last.key, last.subspace = key, found.subspace
        assert last.subspace is not None
        return last.subspace

    def _full_step(
        self, context: Context, state: State, source: ReleasedSubspace
    ) -> tuple[dict[str, Tensor], State]:
        """A step of DP-SGD, whose release is also kept for the subspace."""
        draw = context.draw("batch")
        sums = draw.query(lambda rows, ids: {"gradient": clip(rows, self.clip_rule, self.clip_norm)})
        released = context.ledger.release(draw, sums)["gradient"]
        key = source.remember(state["key"], released)
        estimate = mean_of(released, context.sampling.expected_size)
        return estimate, {**state, "key": key, "age": state["age"] + 1}

    def _release(self, context: Context, subspace: BlockSubspace) -> dict[str, Tensor]:
        """The noised sum, lifted to the parameters."""
        draw = context.draw("batch")
        sums = draw.query(lambda rows, ids: self._sums(rows, subspace))
        return self._lifted(subspace, context.ledger.release(draw, sums))

    def _sums(self, rows: PrivateRows, subspace: BlockSubspace) -> dict[str, Bounded]:
        norms = rows.row_norms() if self.clips_rows else None
        y = rows.coordinates(subspace)
        return {"gradient": clip_coordinates(y, self.clip_rule, self.clip_norm, norms=norms)}

    def _lifted(
        self, subspace: BlockSubspace, released: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        return subspace.lift(released["gradient"]["coordinates"])

    # ---- what is said of it

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        public = self.source.public
        own = super().assumptions(plan)
        return own if public is None else (*own, *public.assumptions())

    def public_batches(self) -> Sequence[PublicRecords]:
        public = self.source.public
        return () if public is None else (public,)


class _LastBuilt:
    """A cache: the subspace that was built last, and the key that it follows from."""

    key: Any = None
    subspace: BlockSubspace | None = None


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

    name: ClassVar[str] = "pcdp-sgd"
    card: ClassVar[Card] = card_of("pcdp-sgd")


@dataclass(frozen=True, kw_only=True)
class PDPSGD(ProjectedGradient):
    """PDP-SGD: the weights come from the whole gradients' norms. Arguments of `ProjectedGradient`.

    Example:
        >>> from equipoise.methods import RandomSubspace
        >>> PDPSGD(source=RandomSubspace(), clip_norm=0.1).clip_norm
        0.1
    """

    name: ClassVar[str] = "pdp"
    card: ClassVar[Card] = card_of("pdp")
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

    name: ClassVar[str] = "rpdp"
    card: ClassVar[Card] = card_of("rpdp")

    source: RandomSubspace = RandomSubspace()
