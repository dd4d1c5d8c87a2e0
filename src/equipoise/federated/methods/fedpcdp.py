"""FedPCDP: local steps inside a subspace of public gradients at the global model, sent as coordinates.

    client:   y <- y - rate V (sum_i clip_C(V^T g_i) + N(0, (z C)^2 I_K)) / B,     K steps, V fixed
              sends u = V^T (x - y), or the combination of public gradients that is V u
    server:   x <- x - rate_g mean_p V u_p

Local steps of plain SGD stay in the span of V, so that what is sent loses nothing; weight decay, or momentum
that lasts across rounds, leaves the span, and what leaves it is lost. See `RoundSubspace` for V and for the
two forms. FedPDP is the same with clipping before the projection; `ProjectedUpload` projects what any method
would send, and nothing else.

Source: PCDP-SGD, arXiv 2312.03792 (withdrawn by its authors in version 2), algorithm 3, with u the
displacement after all local steps.

FedPDP: FedPCDP with every record's gradient clipped before it is projected.

    client:   y <- y - rate V (sum_i min(1, C / |g_i|) V^T g_i + N(0, (z C)^2 I_K)) / B

The server's half is `SubspaceAverage`.

Source: the comparison of PCDP-SGD, arXiv 2312.03792, after Zhou, Wu and Banerjee 2021.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from equipoise.federated.messages import Reply
from equipoise.federated.methods.round_subspace import FORMS, Form, RoundSubspace
from equipoise.federated.round_protocol import RoundProtocol
from equipoise.federated.server import FedAvg
from equipoise.gradients.subspaces.blocks import BlockSubspace
from equipoise.gradients.subspaces.principal import PrincipalSubspace
from equipoise.methods import PCDPSGD, PDPSGD, Context, State
from equipoise.methods.base import Parameters
from equipoise.methods.clip_rules import Abadi, ClipRule
from equipoise.methods.named_tensors import copied
from equipoise.methods.projected.projected_gradient import ProjectedGradient
from equipoise.methods.projected.sources import Key, RefreshedSource
from equipoise.methods.public_records import PublicRecords
from equipoise.privacy import Sampling

__all__ = ["RoundPCDP", "RoundPDP", "SubspaceAverage", "SubspaceUpload"]


NEVER = 10**9  # steps


class SubspaceUpload(RoundProtocol):
    """A mixin of client methods that send the part of their displacement in the subspace of the round."""

    directions: RoundSubspace
    form: Form

    def reply(self, state: State, start: Parameters, end: Parameters) -> Reply:
        """Coordinates, or a combination of public gradients, with the inner method's reports."""
        displacement = {name: value - end[name] for name, value in start.items()}
        sent = self.directions.at(start).encode(displacement, self.form)
        return Reply(sent, super().reply(state, start, end).reports)


class RoundProjection(SubspaceUpload, ProjectedGradient):
    """DP-SGD inside the subspace of the round; `RoundPCDP` and `RoundPDP` are its forms.

    Args:
        directions: the public records and their subspace.
        clip_norm: C > 0.
        clip_rule: as for `ProjectedGradient`.
        noise_multiplier: z; calibrated to the budget when None.
        form: what is sent: "combination" or "coordinates".
    """

    def __init__(
        self,
        directions: RoundSubspace,
        clip_norm: float = 1.0,
        clip_rule: ClipRule | None = None,
        *,
        noise_multiplier: float | None = None,
        form: Form = "combination",
    ) -> None:
        super().__init__(
            source=_RoundSource(directions), clip_norm=clip_norm, clip_rule=clip_rule or Abadi(),
            noise_multiplier=noise_multiplier,
        )  # fmt: skip
        self.directions, self.form = directions, checked_form(form)

    def config(self) -> dict[str, Any]:
        """The settings, with what is told of the subspace in place of its source."""
        found = super().config()
        del found["source"]
        own = {"form": self.form, "dimension": self.directions.dimension, "blocks": self.directions.blocks}
        return found | own | {"public": self.directions.public.describe()}


class RoundPCDP(RoundProjection):
    """The client's half of FedPCDP: clipped after the projection. Arguments of `RoundProjection`."""

    name: ClassVar[str] = "pcdp-client"
    card = PCDPSGD.card


class SubspaceAverage(FedAvg):
    """The server's half: the mean of what was sent, lifted to the parameters.

    Args:
        directions: as at the clients; the server's own object, or, in one process, the same.
        server_rate: rate_g.
    """

    def __init__(self, directions: RoundSubspace, server_rate: float = 1.0) -> None:
        super().__init__(server_rate)
        self.directions = directions

    def received(self, params: Parameters, sent: Parameters) -> Parameters:
        """The client's parameters: the global ones less the lifted displacement."""
        lifted = self.directions.at(params).decode(sent)
        return {name: value - lifted[name].to(value) for name, value in params.items()}


@dataclasses.dataclass(frozen=True)
class _RoundSource(RefreshedSource):
    """The subspace of the round, wherever the client stands in its own steps."""

    directions: RoundSubspace

    @property
    def public(self) -> PublicRecords:
        return self.directions.public

    def interval(self, sampling: Sampling) -> int:
        """The server's move renews the subspace, and nothing else."""
        return NEVER

    def public_gradients(self, sampling: Sampling) -> int:
        return len(self.public)

    def refresh(self, context: Context, number: int) -> Key:
        return {"anchor": copied(context.params)}

    def build(
        self, context: Context, key: Key, into: BlockSubspace | None = None, orthonormal: bool = False
    ) -> PrincipalSubspace:
        return PrincipalSubspace(self.directions.at(key["anchor"]).columns, None, {})


def checked_form(form: Any) -> Form:
    """The form of an upload, if it is one."""
    if form not in FORMS:
        raise ValueError(f"form={form!r} is unknown; give one of {list(FORMS)}")
    return form


class RoundPDP(RoundProjection):
    """The client's half of FedPDP. Arguments of `RoundProjection`."""

    name: ClassVar[str] = "pdp-client"
    card = PDPSGD.card
    clips_rows: ClassVar[bool] = True
