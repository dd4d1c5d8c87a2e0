"""The subspace of a round: leading directions of public gradients at the global model, the same everywhere.

For each block l of parameters, G_l [m, p_l] the public gradients at x,

    G_l G_l^T = Q diag(lambda) Q^T,    W_l = Q_k diag(lambda_k)^(-1/2),    V_l = G_l^T W_l

Server and clients hold the public records and compute V themselves: they were sent once, the columns never.
A displacement d = x - y in the span of V can then be sent as

    coordinates    u = V^T d              K numbers; both ends need the same columns, order and signs
    combination    a_l = W_l V_l^T d_l    m numbers per block; G_l^T a_l = V_l V_l^T d_l in any basis

Everything is computed in float64 on a copy of the model in evaluation mode, so that neither dropout nor
rounding tells two machines apart; columns get their signs from their largest entries. Where eigenvalues
coincide the columns are not determined, and only the combination is safe.

Source: FedPCDP in PCDP-SGD, arXiv 2312.03792; the combination is this library's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from equipoise.gradients import DenseGradients, GradientEngine, PerSampleGradients
from equipoise.gradients.engine_inputs import map_records
from equipoise.methods.base import Context, Parameters
from equipoise.methods.configuration import Count
from equipoise.methods.named_tensors import copied
from equipoise.methods.projected import DEFAULT_DIMENSION, Blocks, Key, RefreshedSource, groups_of
from equipoise.methods.public_records import PublicRecords
from equipoise.methods.subspaces import Part, PrincipalSubspace, Subspace, held, principal_subspace
from equipoise.privacy import Sampling, digest

Form = Literal["combination", "coordinates"]
"""What is sent of a displacement."""


@dataclass(frozen=True)
class RoundBasis:
    """The columns at one global model.

    Attributes:
        columns: held, in the parameters' own type: what gradients are projected on.
        exact: the same in float64.
        weights: W_l [m, K_l] of each block, float64.
        groups: the parameters of each block.
        rows: the public gradients, float64.
    """

    columns: Subspace
    exact: Subspace
    weights: Sequence[Tensor]
    groups: Sequence[Sequence[str]]
    rows: PerSampleGradients

    def encode(self, displacement: Parameters, form: Form) -> dict[str, Tensor]:
        """What is sent of a displacement: its part in the subspace.

        Returns:
            ``coordinates`` [K] in the parameters' type, or ``combination`` [m, number of blocks] in float64.
        """
        row = DenseGradients({name: value.double()[None] for name, value in displacement.items()})
        y = self.exact.coordinates(row)[0]
        if form == "coordinates":
            return {form: y.to(next(iter(displacement.values())).dtype)}
        parts = torch.split(y, self.exact.sizes)
        return {form: torch.stack([W @ part for W, part in zip(self.weights, parts, strict=True)], dim=1)}

    def decode(self, sent: Parameters) -> dict[str, Tensor]:
        """The displacement, in float64.

        Raises:
            ValueError: numbers of a shape that is not expected here.
        """
        if set(sent) == {"coordinates"} and sent["coordinates"].shape == (self.exact.dimension,):
            return self.exact.lift(sent["coordinates"].double())
        shape = (self.rows.num_records, len(self.groups))
        if set(sent) != {"combination"} or sent["combination"].shape != shape:
            shapes = {name: tuple(value.shape) for name, value in sent.items()}
            raise ValueError(
                f"a client sent {shapes}; expected are coordinates [{self.exact.dimension}] or a combination "
                f"{list(shape)}: both ends need the same public records and settings"
            )
        combination = sent["combination"].double()
        coefficients = {
            name: combination[:, number] for number, names in enumerate(self.groups) for name in names
        }
        found = self.rows.select(list(coefficients)).weighted_sums(coefficients)
        return {
            name: found[name] if name in found else torch.zeros(shape, dtype=torch.float64)
            for name, shape in self.exact.shapes.items()
        }


@dataclass(frozen=True)
class RoundSubspace(RefreshedSource):
    """Public records, and what is computed of them at the global model of a round.

    The server's move renews the subspace, and nothing else does.

    Args:
        model: of server and clients; a copy is kept.
        loss: loss(model, batch) -> [B].
        records: a batch of public records, as the loss takes it; no client's private record is among them.
        dimension: columns per block; the smaller of 100 and the number of public records when None.
        blocks: "per_tensor", "per_layer" or "whole".
        normalise: scale public gradients to norm one first.
        batch_size: records of a round, drawn by the digest of its global model; all when None.

    The columns are held: memory for m P and K_l p_l numbers of float64.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> found = RoundSubspace(model, lambda m, x: m(x)[:, 0].square(), torch.eye(3)[:2])
        >>> start = {name: value.detach() for name, value in model.named_parameters()}
        >>> basis = found.at(start)
        >>> moved = {"weight": torch.tensor([[1.0, 1.0, 1.0]]), "bias": torch.tensor([1.0])}
        >>> back = basis.decode(basis.encode(moved, "combination"))
        >>> spanned = torch.tensor([[1.0, 1.0, 0.0]])  # the public records do not span the third direction
        >>> torch.allclose(back["weight"].float(), spanned, atol=1e-5)
        True
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    records: Any
    _: KW_ONLY
    blocks: Blocks = "per_tensor"
    normalise: bool = False
    batch_size: Count | None = None
    refresh_every: int = field(default=10**9, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The client's optimiser moves its model, and training mode would put dropout into the columns.
        object.__setattr__(self, "model", copy.deepcopy(self.model).double().eval())
        _ = self._engine  # refuses a model or records that it cannot work on, before anything is spent

    @functools.cached_property
    def public(self) -> PublicRecords:
        return PublicRecords(self.records)

    @functools.cached_property
    def _engine(self) -> GradientEngine:
        return GradientEngine(self.model, self.loss, _doubled(self.public.batch))

    @functools.cached_property
    def _last(self) -> dict[str, Any]:
        """The last global model and the basis there: clients and server of one process ask at the same."""
        return {}

    def config(self) -> dict[str, Any]:
        """What is published of the subspace: its settings, and the public records by their digest."""
        own = {"dimension": self.dimension, "blocks": self.blocks, "normalise": self.normalise}
        own |= {} if self.batch_size is None else {"batch_size": self.batch_size}
        return own | {"public": self.public.describe()}

    def at(self, params: Parameters) -> RoundBasis:
        """The basis at the global model.

        Raises:
            ValueError: the public gradients are all zero or not finite.
        """
        last = self._last
        if not last or any(not torch.equal(last["at"][name], value) for name, value in params.items()):
            # Together: a failure in between would leave a basis with another model.
            last.update(at=copied(params), basis=self._basis(params))
        basis: RoundBasis = last["basis"]
        return basis

    def _basis(self, params: Parameters) -> RoundBasis:
        values = {name: value.double() for name, value in params.items()}
        # By a seed that both ends know: the digest of the model that the server sent.
        rng = torch.Generator().manual_seed(int(digest(dict(params))[:15], 16))
        rows = self._engine(_doubled(self.public.drawn(self.batch_size, rng)), params=values)
        limit = min(DEFAULT_DIMENSION if self.dimension is None else self.dimension, rows.num_records)
        found = principal_subspace(
            rows, groups_of(rows.names, self.blocks), limit, normalise=self.normalise, basis="kernel",
            measure=False,
        ).subspace  # fmt: skip
        exact: list[Sequence[Part]] = []
        own: list[Sequence[Part]] = []
        weights, groups = [], []
        for (part,), columns in zip(found.blocks, found.columns(), strict=True):
            assert part.weights is not None
            signs = _signs(columns)
            weights.append(part.weights * signs)
            groups.append(part.rows.names)
            signed = {name: c * signs.view(-1, *[1] * (c.ndim - 1)) for name, c in columns.items()}
            exact += held(signed).blocks
            own += held({name: c.to(params[name].dtype) for name, c in signed.items()}).blocks
        columns_of = Subspace(found.shapes, own), Subspace(found.shapes, exact)
        return RoundBasis(*columns_of, weights, groups, rows)

    # ---- the source of a client's local steps

    def settled(self, blocks: Blocks, refresh_every: int | None) -> Self:
        return self

    def public_gradients(self, sampling: Sampling) -> int:
        return self.public.drawn_size(self.batch_size)

    def refresh(self, context: Context, number: int) -> Key:
        return {"anchor": copied(context.params)}

    def build(self, context: Context, key: Key, orthonormal: bool = False) -> PrincipalSubspace:
        return PrincipalSubspace(self.at(key["anchor"]).columns, None, {})


def _doubled(batch: Any) -> Any:
    return map_records(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


def _signs(columns: Parameters) -> Tensor:
    """[K] signs that make each column's largest entry positive."""
    flat = torch.cat([held.flatten(1) for held in columns.values()], dim=1)
    largest = flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]
    return torch.where(largest < 0, -1.0, 1.0).to(flat)
