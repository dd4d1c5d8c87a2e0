"""Rounds in a subspace of public gradients at the global model: FedPCDP and FedPDP.

    FedPCDP    y <- y - rate V (sum_i clip_C(V^T g_i) + N(0, (z C)^2 I_K)) / B,     K steps, V fixed
    FedPDP     y <- y - rate V (sum_i min(1, C / |g_i|) V^T g_i + N(0, (z C)^2 I_K)) / B

    a client sends    u = V^T (x - y), or the combination of public gradients that is V u
    server            x <- x - rate_g mean_p V u_p

See `RoundSubspace` for V and for the two forms of what is sent. FedPCDP and FedPDP stay in the span of V with
plain SGD, so that what is sent loses nothing; weight decay, or momentum that lasts across rounds, leaves the
span, and what leaves it is lost.

Sources: PCDP-SGD, arXiv 2312.03792 (withdrawn by its authors in version 2), algorithm 3, with u the
displacement after all local steps; its comparison FedPDP, after Zhou, Wu and Banerjee 2021.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from equipoise.federated.messages import Reply
from equipoise.federated.methods.round_subspace import Form, RoundSubspace
from equipoise.federated.round_protocol import RoundProtocol
from equipoise.federated.server import FedAvg
from equipoise.methods import PCDPSGD, PDPSGD, State, published
from equipoise.methods.base import Parameters
from equipoise.methods.configuration import Positive
from equipoise.methods.projected import ProjectedGradient


class SubspaceUpload(RoundProtocol):
    """A mixin of client methods that send the part of their displacement in the subspace of the round."""

    source: RoundSubspace
    form: Form

    def reply(self, state: State, start: Parameters, end: Parameters) -> Reply:
        """Coordinates, or a combination of public gradients, with the inner method's reports."""
        displacement = {name: value - end[name] for name, value in start.items()}
        sent = self.source.at(start).encode(displacement, self.form)
        return Reply(sent, super().reply(state, start, end).reports)


@dataclass(frozen=True)
class RoundProjection(SubspaceUpload, ProjectedGradient):
    """DP-SGD inside the subspace of the round; `RoundPCDP` and `RoundPDP` are its forms.

    Args:
        source: the public records and their subspace.
        clip_norm: C > 0.
        clip_rule, noise_multiplier: as for `PCDPSGD`.
        form: what is sent: "combination" or "coordinates".
    """

    source: RoundSubspace
    clip_norm: float = 1.0
    _: KW_ONLY
    form: Form = "combination"


class RoundPCDP(RoundProjection):
    """The client's half of FedPCDP: clipped after the projection. Arguments of `RoundProjection`."""

    name: ClassVar[str] = "pcdp-client"
    card = PCDPSGD.card


class RoundPDP(RoundProjection):
    """The client's half of FedPDP: clipped before it. Arguments of `RoundProjection`."""

    name: ClassVar[str] = "pdp-client"
    card = PDPSGD.card
    clips_rows: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class PublishedRoundPCDP(SubspaceUpload, published.PCDPSGD):
    """The client's half as published: noise in all P coordinates, then projected.

    Where this is not the letter of algorithm 2: what is sent is the displacement after all T steps, rate_l
    included, where line 12 names the point before the last step and prints a sum without the rate. The lines
    of algorithm 1 differ as `published.PCDPSGD` says.

    Args:
        source, clip_norm, clip_rule, noise_multiplier, form: as for `RoundProjection`.
    """

    name: ClassVar[str] = "pcdp-client"

    source: RoundSubspace  # type: ignore[assignment]
    form: Form = "coordinates"


@dataclass(frozen=True, kw_only=True)
class PublishedRoundPDP(SubspaceUpload, published.PDPSGD):
    """FedPDP as published: clipped before the projection. Arguments of `PublishedRoundPCDP`."""

    name: ClassVar[str] = "pdp-client"

    source: RoundSubspace  # type: ignore[assignment]
    clip_norm: Positive = 0.01
    form: Form = "coordinates"


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
