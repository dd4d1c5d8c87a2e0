"""Gradients projected on a subspace and clipped there: what PCDP-SGD, GEP and PDP-SGD share.

With columns V [P, K] that are public or released, and coordinates y_i = V^T g_i of each record's gradient,

    estimate = V (sum_i a_i y_i + N(0, (z C)^2 I_K)) / B

    a_i = rule.weights(||y_i||, C)       clipped after the projection (PCDP-SGD, biased GEP)
    a_i = rule.weights(||g_i||, C)       clipped before it (PDP-SGD)

and, for GEP, beside it from the same records sum_i b_i (g_i - V y_i) + N(0, (z_2 C_2)^2 I_P) with
b_i = rule.weights(||g_i - V y_i||, C_2).

The sums are clipped and noised in coordinates: noise of K numbers instead of P, and ||a_i y_i|| <= C for
any V, so that the guarantee does not rest on orthonormal columns. Given the releases before, V is fixed; the
sum moves by at most C when a record enters or leaves: a step costs what a step of DP-SGD costs at the same
multiplier. `recipe="as_published"` takes the form in R^P of the paper,

    estimate = V V^T (sum_i clip_C(V V^T g_i) + N(0, (z C)^2 I_P)) / B

which equals it in law for orthonormal columns, and checks that they are.

Sources: PCDP-SGD, arXiv 2312.03792 (withdrawn by its authors in version 2); GEP and biased GEP, Yu et al.
2021; PDP-SGD, Zhou et al. 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor

from equipoise.gradients.subspaces.blocks import BlockSubspace
from equipoise.gradients.subspaces.principal import Basis
from equipoise.methods.base import Context, Method, Parameters, Plan, Setting, State
from equipoise.methods.checks import require_count, require_one_of, require_positive, require_share
from equipoise.methods.clip_rules import ClipRule, resolve_rule
from equipoise.methods.named_tensors import mean_of
from equipoise.methods.projected.sources import (
    Blocks,
    IterationSource,
    MomentSource,
    PublicSource,
    RandomSource,
    ReleasedSource,
    SubspaceSource,
    subspace_noise,
    warn_of_capture,
)
from equipoise.methods.public_records import PublicRecords, require_public
from equipoise.methods.published.pcdp_sgd_formulas import check_orthonormal, projected, renyi_2017
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.bounds.clipping import clip, clip_coordinates
from equipoise.privacy.mechanisms import Gaussian
from equipoise.privacy.plan import PrivacyPlan, Release
from equipoise.privacy.rows import PrivateRows
from equipoise.privacy.sampling import Sampling

if TYPE_CHECKING:
    pass

__all__ = ["ProjectedGradient"]


Origin = Literal["public", "released", "private_moment", "private_iteration", "random"]


class ProjectedGradient(Method):
    """DP-SGD inside a subspace; `PCDPSGD`, `BiasedGEP`, `GEP`, `PDPSGD` and `RandomProjection` are its forms.

    Args:
        public: a batch of public records, as the loss takes it; none of them may be a private record.
            Needed for `subspace="public"`.
        clip_norm: C > 0, the clip norm of the coordinates; 1 when None, and 0.01 for PCDP-SGD as published.
        clip_rule: "abadi", "auto_s", "nsgd", "psac", or a `ClipRule`.
        recipe: "library", or "as_published": noise in all P coordinates and then projected, a refresh every
            step, 100 columns, orthonormality asserted, and the paper's clip norm.
        noise_multiplier: z; calibrated to the budget when None.
        dimension: columns a block; the smaller of 100 and the number of public records when None.
        energy: choose the columns by the share of a held-out public gradient that they capture, in (0, 1).
        subspace: "public"; "released" (the last noised sums of full steps); "private_moment" or
            "private_iteration" (private records, released and paid for); "random".
        blocks: "per_tensor", "per_layer" or "whole".
        normalise_public: scale public gradients to norm one before their directions are taken.
        split: "rbs": `public_batch_size` records drawn afresh a refresh; "ibs": disjoint parts, one a
            refresh.
        public_batch_size: for "rbs"; all records when None.
        refresh_every: steps between refreshes; an epoch of the sampling when None.
        basis: "kernel" (the columns are never formed), "held" (in memory; with a direction for every public
            record the public rows, of the same size, in their place), or "auto": what takes fewer
            multiplications.
        subspace_clip_norm: c_V, the clip norm of rows for a private subspace.
        subspace_noise_multiplier: z_V for a private subspace; from `subspace_share` when None.
        subspace_share: share of the budget for a private subspace, in (0, 1).
        subspace_batch_size: expected records of its draws; those of the training when None.
        subspace_iterations: rounds a refresh of "private_iteration".
        history: releases that "released" keeps.
        explore_every: steps between its full steps.
    """

    clips_rows: ClassVar[bool] = False
    takes_residual: ClassVar[bool] = False
    default_blocks: ClassVar[Blocks] = "per_tensor"
    default_refresh: ClassVar[int | None] = None
    published_clip_norm: ClassVar[float] = 1.0

    noise_arguments: ClassVar[Mapping[str, str]] = {
        "noise_multiplier": "gradient",
        "subspace_noise_multiplier": "moment",
    }

    def __init__(
        self,
        public: Any = None,
        clip_norm: float | None = None,
        clip_rule: str | ClipRule = "abadi",
        *,
        recipe: Literal["library", "as_published"] = "library",
        noise_multiplier: float | None = None,
        dimension: int | None = None,
        energy: float | None = None,
        subspace: Origin = "public",
        blocks: Blocks | None = None,
        normalise_public: bool = False,
        split: Literal["rbs", "ibs"] = "rbs",
        public_batch_size: int | None = None,
        refresh_every: int | None = None,
        basis: Basis = "auto",
        subspace_clip_norm: float = 1.0,
        subspace_noise_multiplier: float | None = None,
        subspace_share: float = 0.2,
        subspace_batch_size: float | None = None,
        subspace_iterations: int = 3,
        history: int = 20,
        explore_every: int = 5,
    ) -> None:
        self.recipe = require_one_of("recipe", recipe, ("library", "as_published"))
        default = self.published_clip_norm if recipe == "as_published" else 1.0
        self.clip_norm, self.clip_rule = default if clip_norm is None else clip_norm, resolve_rule(clip_rule)
        self.noise_multiplier, self.dimension, self.energy = noise_multiplier, dimension, energy
        self.subspace = require_one_of(
            "subspace", subspace, ("public", "released", "private_moment", "private_iteration", "random")
        )
        chosen = self.default_blocks if blocks is None else blocks
        self.blocks: Blocks = require_one_of("blocks", chosen, ("per_tensor", "per_layer", "whole"))
        self.normalise_public, self.split = normalise_public, require_one_of("split", split, ("rbs", "ibs"))
        self.public_batch_size, self.basis = (
            public_batch_size,
            require_one_of("basis", basis, ("auto", "kernel", "held")),
        )
        self.refresh_every = refresh_every
        self.subspace_clip_norm, self.subspace_noise_multiplier = (
            subspace_clip_norm,
            subspace_noise_multiplier,
        )
        self.subspace_share, self.subspace_batch_size = subspace_share, subspace_batch_size
        self.subspace_iterations, self.history = subspace_iterations, history
        self.explore_every = explore_every
        self._check_numbers()
        self.public = None if public is None else PublicRecords(public)
        if (self.public is None) != (subspace != "public"):
            raise ValueError(
                f"subspace={subspace!r} with "
                + (
                    "no public records: give public=..., a batch of them"
                    if subspace == "public"
                    else "public=..."
                )
                + ("" if subspace == "public" else ": these records would not be used; leave them out")
            )
        self._kept: tuple[Any, BlockSubspace] | None = (
            None  # a cache: the key it was built from, the subspace
        )

    def _check_numbers(self) -> None:
        require_positive("clip_norm", self.clip_norm)
        require_positive("subspace_clip_norm", self.subspace_clip_norm)
        for name in ("noise_multiplier", "subspace_noise_multiplier", "subspace_batch_size"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        for name in (
            "dimension",
            "public_batch_size",
            "refresh_every",
            "subspace_iterations",
            "history",
            "explore_every",
        ):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        for name in ("energy", "subspace_share"):
            if getattr(self, name) is not None:
                require_share(name, getattr(self, name))
        if self.recipe == "as_published" and (self.subspace != "public" or self.energy is not None):
            raise ValueError(
                f"recipe='as_published' with subspace={self.subspace!r} and energy={self.energy!r}: the "
                "published "
                "recipe takes a fixed number of directions of public records; use recipe='library'"
            )

    # ---- the plan

    def plan(self, setting: Setting) -> Plan:
        """The coordinates, one release a step; with those of the residual and the subspace."""

        def at(scale: float) -> PrivacyPlan:
            releases = self._releases(setting.sampling, scale)
            return PrivacyPlan(releases, setting.sampling, setting.relation)

        return Plan(setting.calibrated(at, self.noise_multiplier))

    def _releases(self, sampling: Sampling, scale: float) -> list[Release]:
        source, refreshes = self._source(sampling), self._refreshes(sampling)
        parts, together = self._parts(scale)
        noise = self.subspace_noise_multiplier
        if noise is None:
            noise = subspace_noise(source, sampling, refreshes, together, self.subspace_share)
        return [*parts, *source.releases(sampling, refreshes, noise)]

    def _parts(self, scale: float) -> tuple[list[Release], float]:
        """What a step in the subspace releases, and the multiplier that all of it together costs as."""
        return [Release("gradient", self.clip_norm, Gaussian(scale))], scale

    def gradients_per_step(self, plan: Plan) -> float:
        """With those of the public records at every refresh."""
        private, sampling = super().gradients_per_step(plan), plan.releases.sampling
        if self.public is None:
            return private
        count = self._refreshes(sampling)
        parts = len(self.public) // count if self.split == "ibs" else self.public_batch_size
        return private + count * self.public.drawn_size(parts) / sampling.steps

    def _interval(self, sampling: Sampling) -> int:
        default = 1 if self.recipe == "as_published" else self.default_refresh
        return self.refresh_every or default or max(1, round(1 / sampling.sampling_rate))

    def _refreshes(self, sampling: Sampling) -> int:
        return math.ceil(sampling.steps / self._interval(sampling))

    def _source(self, sampling: Sampling) -> SubspaceSource:
        if self.subspace == "random":
            return RandomSource(self.blocks, self.dimension)
        if self.subspace == "released":
            return ReleasedSource(
                self.blocks, self.dimension, self.history, self.explore_every, self.takes_residual
            )
        if self.subspace != "public":
            kind = MomentSource if self.subspace == "private_moment" else IterationSource
            rounds = 1 if kind is MomentSource else self.subspace_iterations
            return kind(
                self.blocks, self.dimension, self.subspace_clip_norm, self.subspace_batch_size, rounds
            )
        assert self.public is not None
        parts = None
        if self.split == "ibs":
            parts = self._refreshes(sampling)
            if parts > len(self.public):
                raise ValueError(
                    f"split='ibs' needs a public record for each of the {parts} refreshes, and there are "
                    f"{len(self.public)}: give more, raise refresh_every, or use split='rbs'"
                )
        published = self.recipe == "as_published"
        return PublicSource(
            self.blocks,
            self.dimension,
            self.public,
            self.energy,
            self.normalise_public,
            self.public_batch_size,
            parts,
            "held" if published or self.takes_residual else self.basis,
            orthonormal=published or self.takes_residual,
        )

    # ---- the steps

    def init(self, context: Context) -> State:
        """No subspace yet: the first step finds one before it draws a private record."""
        return {"age": 0, "refreshes": 0, "key": None, "capture": None}

    def rebase(self, state: State, params: Parameters) -> State:
        """The next step finds a subspace at the new parameters, if that costs nothing."""
        return state if self.subspace.startswith("private") else {**state, "age": 0}

    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """Find the subspace if it is due, then one draw and one release of coordinates."""
        source = self._source(context.sampling)
        if isinstance(source, ReleasedSource):
            if source.explores(state["age"]):
                return self._full_step(context, state, source)
        elif state["age"] % self._interval(context.sampling) == 0:
            state = self._refreshed(context, state, source)
        subspace = self._built(context, state, source)
        estimate = self._release(context, subspace)
        following = {**state, "age": state["age"] + 1}
        return mean_of(estimate, context.sampling.expected_size), following

    def _refreshed(self, context: Context, state: State, source: SubspaceSource) -> State:
        key = source.refresh(context, state["refreshes"])
        old, self._kept = self._kept, None
        found = source.build(context, key, None if old is None else old[1])
        self._kept = (key, found.subspace)
        warn_of_capture(found.capture)
        return {**state, "key": key, "refreshes": state["refreshes"] + 1, "capture": found.capture}

    def _built(self, context: Context, state: State, source: SubspaceSource) -> BlockSubspace:
        if self._kept is None or self._kept[0] is not state["key"]:
            self._kept = (state["key"], source.build(context, state["key"]).subspace)
        return self._kept[1]

    def _full_step(
        self, context: Context, state: State, source: ReleasedSource
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
        if self.recipe == "as_published":
            check_orthonormal(subspace)
            sums = draw.query(lambda rows, ids: {"gradient": self._clipped_in_full(rows, subspace)})
            released = context.ledger.release(draw, sums)["gradient"]
            return projected(subspace, released)
        sums = draw.query(lambda rows, ids: self._sums(rows, subspace))
        released_sums = context.ledger.release(draw, sums)
        return self._lifted(subspace, released_sums)

    def _sums(self, rows: PrivateRows, subspace: BlockSubspace) -> dict[str, Bounded]:
        norms = rows.row_norms() if self.clips_rows else None
        y = rows.coordinates(subspace)
        return {"gradient": clip_coordinates(y, self.clip_rule, self.clip_norm, norms=norms)}

    def _lifted(
        self, subspace: BlockSubspace, released: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        return subspace.lift(released["gradient"]["coordinates"])

    def _clipped_in_full(self, rows: PrivateRows, subspace: BlockSubspace) -> Bounded:
        """The published form: rows clipped in R^P, after the projection or before it."""
        if self.clips_rows:
            return clip(rows, self.clip_rule, self.clip_norm)
        return clip(rows.projection(subspace), self.clip_rule, self.clip_norm)

    # ---- what is said of it

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """The figure of the paper: see `renyi_2017`."""
        if self.recipe != "as_published":
            return None
        return renyi_2017(plan.releases.sampling, plan.releases["gradient"].noise_multiplier, delta)

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """How many records are public, and that none of them is private."""
        if self.public is None:
            return ()
        return self.public.assumptions()

    def public_batches(self) -> Sequence[PublicRecords]:
        """The records that the directions come from."""
        return () if self.public is None else (self.public,)

    # ---- settings

    def config(self) -> dict[str, Any]:
        """The settings, as plain values; of the public records only their number and a digest."""
        found = super().config()
        found.pop("public", None)
        return found if self.public is None else {**found, "public": self.public.describe()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], public: Any = None) -> Self:
        """The method that `config` described; `public` are the records again.

        Raises:
            ValueError: public records are missing, or others than before.
        """
        given = dict(config)
        if given.get("public") is not None:
            given["public"] = require_public(cls.name, given["public"], public)
        return super().from_config(given)
