"""AdaptDP-FedAvg: the server sets the clipping radius, from the noised mean squares of all clients.

A round has two phases. Every client releases its mean of min(|g|^2 / U, 1) at the global model, noised; the
server makes a radius of the mean of these and sends it; every client takes K steps of DP-SGD at that radius.

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from torch import Tensor

from equipoise import _validate
from equipoise.federated.messages import Reply, Request, check_number
from equipoise.federated.round_protocol import Extra, RoundProtocol
from equipoise.federated.server import FedAvg, RoundRequests
from equipoise.methods import AdaptiveRMS, Card, Context, State, published
from equipoise.methods.adaptive_rms import RMSClipping, RMSRadius, sampling_at
from equipoise.methods.base import Parameters, Plan
from equipoise.methods.configuration import Count, Positive, Share, UpToOne
from equipoise.privacy.sampling import Sampling

#: The reports: the released mean of min(|g|^2 / U, 1), and the public standard deviation of its noise.
SQUARES, SQUARES_NOISE = "squares", "squares_noise"


#: Below it noise in float32 could vanish among the denormals.
SMALLEST_RADIUS = 1e-25


class RadiusOfServer(RoundProtocol, RMSClipping):
    """What the forms of a client share: the server sets the radius, and learns of the squares."""

    def takes(self, kind: str) -> Mapping[str, Extra] | None:
        """The server's radius, up to G, for the steps; the scale U of the squares, up to G^2, for a query."""
        g_hat = self.rule.g_hat
        if kind == "train":
            return {
                "clip_norm": Extra(lambda value, _: check_number("clip_norm", value, g_hat, SMALLEST_RADIUS))
            }
        limit = Extra(lambda value, _: check_number("square_limit", value, g_hat**2))
        return {"square_limit": limit} if kind == "query" else None

    def check_local_steps(self, local_steps: int) -> None:
        if self.round_length != local_steps:
            raise ValueError(
                f"local_steps={local_steps} differs from the method's round_length={self.round_length}: its "
                "plan or its reports count on the steps of a round; give both the same"
            )

    def report_noise(self, plan: Plan) -> float:
        return self.radius_noise(plan)

    def begin_round(self, context: Context, state: State) -> State:
        return state  # the server has set the radius already

    def follow(self, state: State, extras: Mapping[str, Any]) -> State:
        own = {name: extras[name] for name in ("clip_norm", "square_limit") if name in extras}
        return {**state, **own}

    def query(self, context: Context, state: State) -> dict[str, float]:
        return {SQUARES: self.ask(context, state), SQUARES_NOISE: self.radius_noise(context.plan)}


@dataclass(frozen=True)
class ServerRMS(RadiusOfServer):
    """The client's half of AdaptDP-FedAvg.

    Args:
        clip_norm: G > 0, the largest radius that the client accepts.
        round_length: K, local steps per round.
        radius_share: rho in (0, 1), the radius' share of mu^2.
        radius_sampling_rate: q_C of the query; None or 1 asks all records.
        noise_multiplier, radius_noise_multiplier: z and z_C; calibrated to the budget when None.

    Raises:
        ValueError: a value out of range.

    Example:
        >>> list(ServerRMS(0.5, round_length=3).takes("query"))
        ['square_limit']
    """

    name: ClassVar[str] = "adaptive-rms-client"
    card: ClassVar[Card] = AdaptiveRMS.card

    clip_norm: Positive = 1.0
    _: KW_ONLY
    round_length: Count = 1
    radius_share: Share = 0.2
    radius_sampling_rate: UpToOne | None = None
    noise_multiplier: Positive | None = None
    radius_noise_multiplier: Positive | None = None

    @property
    def rule(self) -> RMSRadius:
        """Only its limit: the server's rule moves the radius."""
        return RMSRadius(float(self.clip_norm))

    def query_sampling(self, sampling: Sampling, rounds: int) -> Sampling:
        return sampling_at(self.radius_sampling_rate, sampling, rounds)


class PublishedServerRMS(RadiusOfServer, published.AdaptiveRMS):
    """The client's half as published: a query every round, and the noise of equation (1).

    The bar x of line 16, the mean of the local iterates, is in `baselines/averaged_iterate.py`.
    """

    name: ClassVar[str] = "adaptive-rms-client"


class AdaptDPFedAvg(FedAvg):
    """The server's half: FedAvg with a clipping radius that follows the clients' mean squared gradient norm.

    It asks every client of the round for its noised mean square at the global model first, makes the radius
    of the round of these, and sends it along.

    Args:
        radius: the rule; `RMSRadius(g_hat, offset="paper")` is the published one.
        rounds: R, and
        clients: P, for the paper's offset, which counts all R P released numbers.
        model_clip_norm: B of the paper, the largest norm of the global model; None, as in its experiments,
            takes the mean as it is.

    Example:
        >>> strategy = AdaptDPFedAvg(RMSRadius(1.0, offset="none"), rounds=10, clients=2)
        >>> requests = strategy.round(1, {})
        >>> next(requests).extras
        {'square_limit': 1.0}
        >>> replies = [Reply(reports={SQUARES: mean, SQUARES_NOISE: 0.0}) for mean in (0.1, 0.3)]
        >>> round(requests.send(replies).extras["clip_norm"], 6)  # sqrt(2 * 0.2)
        0.632456
    """

    def __init__(
        self, radius: RMSRadius, rounds: int, clients: int, model_clip_norm: float | None = None
    ) -> None:
        super().__init__()
        _validate.positive_if_given(model_clip_norm=model_clip_norm)
        self.model_clip_norm = math.inf if model_clip_norm is None else model_clip_norm
        self.radius, self._releases = radius, rounds * clients
        self.carried = radius.start()
        self._relative_noise: float | None = None

    def round(self, number: int, params: Parameters) -> RoundRequests:
        limit = {"square_limit": self.carried["square_limit"]}
        self._follow((yield Request(number, params, limit, "query")))
        return (yield from super().round(number, params))

    def extras(self) -> dict[str, Any]:
        """The radius of the round."""
        return {"clip_norm": self.carried["clip_norm"]}

    def aggregate(self, params: Parameters, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """The mean of the clients' parameters, clipped to the largest norm of a model."""
        mean = super().aggregate(params, replies)
        norm = math.hypot(*(float(value.norm()) for value in mean.values()))
        if norm <= self.model_clip_norm:
            return mean
        return {name: value * (self.model_clip_norm / norm) for name, value in mean.items()}

    def refusal(self, request: Request, reply: Reply) -> str | None:
        """Also where the squares, or their noise, are missing from a reply that must report them."""
        found = super().refusal(request, reply)
        if found is not None or request.kind == "train":
            return found
        if not {SQUARES, SQUARES_NOISE} <= set(reply.reports):
            return f"it sent no reports {SQUARES!r} and {SQUARES_NOISE!r}"
        return "it sent noise below zero" if reply.reports[SQUARES_NOISE] < 0 else None

    def _follow(self, replies: Sequence[Reply]) -> None:
        """Move the radius.

        The number of replies takes the place of P in the noise of their mean. Without any the radius stays.
        """
        if not replies:
            return
        limit = self.carried["square_limit"]
        mean = limit * math.fsum(reply.reports[SQUARES] for reply in replies) / len(replies)
        variance = math.fsum(reply.reports[SQUARES_NOISE] ** 2 for reply in replies)
        noise = limit * math.sqrt(variance) / len(replies)
        doubt = self.radius.doubt(noise / limit)
        if doubt is not None and self.radius.doubt(self._relative_noise or 0.0) is None:
            warnings.warn(doubt, stacklevel=3)
        self._relative_noise = noise / limit
        self.carried = self.radius.update(self.carried, mean, noise, self._releases)

    def metrics(self) -> Mapping[str, float]:
        """The round's radius; where it scales itself also s / U, which decides whether it may collapse."""
        own = {"radius": self.carried["clip_norm"]}
        if self.radius.scale == "self" and self._relative_noise is not None:
            own["radius_noise"] = self._relative_noise
        return own

    def doubt(self, metrics: Sequence[Mapping[str, float]]) -> str | None:
        """Whether the noisiest of the rounds' radii may collapse."""
        return self.radius.doubt(max((one.get("radius_noise", 0.0) for one in metrics), default=0.0))
