"""AdaptDP-FedAvg: the server sets the clipping radius, from the noised mean squares of all clients.

A round has two phases. Every client releases its mean of min(|g|^2 / U, 1) at the global model, noised; the
server makes a radius of the mean of these and sends it; every client takes K steps of DP-SGD at that radius.

variant="fused": no query. Every local step is one Gaussian release of the clipped gradients and of the
squared norms of the same batch, and what is reported with the parameters is

    s_p = mean over the round's steps of (sum_i min(|g_i|^2 / U, 1) + N(0, z_C^2)) / B,

with noise of z_C / (B sqrt(K)), which sets the radius of the next round. With query_steps="first" the squares
join only the first local step, the one at the global model: R steps are Gaussians of multiplier
(z^-2 + z_C^-2)^(-1/2) and the other R (K - 1) of multiplier z, and the noise of s_p is z_C / B. U of a round
is the server's, so that both ends know it, whatever rounds a client has missed.

Source: Fukami, Murata and Niwa, TMLR 2025, "AdaptDP-FedAvg"; variant="fused" is this library's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from equipoise import _validate
from equipoise.federated.messages import Reply, Request, check_number
from equipoise.federated.round_protocol import Extra, RoundProtocol
from equipoise.federated.server import FedAvg, RoundRequests
from equipoise.methods import AdaptiveRMS, Card, Context, State, published
from equipoise.methods.adaptive_rms import RadiusState, RMSClipping, RMSRadius, require_rate, sampling_at
from equipoise.methods.base import Parameters, Plan, Setting
from equipoise.privacy.plan import PrivacyPlan
from equipoise.privacy.sampling import FixedEpochs, Sampling

__all__ = ["SQUARES", "SQUARES_NOISE", "AdaptDPFedAvg", "PublishedServerRMS", "ServerRMS"]


#: The reports: the released mean of min(|g|^2 / U, 1), and the public standard deviation of its noise.
SQUARES, SQUARES_NOISE = "squares", "squares_noise"


#: Below it noise in float32 could vanish among the denormals.
SMALLEST_RADIUS = 1e-25


class RadiusOfServer(RoundProtocol, RMSClipping):
    """What the forms of a client share: the server sets the radius, and learns of the squares."""

    round_length: int
    query_steps: Literal["all", "first"]

    @property
    def steps_per_round(self) -> int:
        return self.round_length

    def takes(self, kind: str) -> Mapping[str, Extra] | None:
        """The server's radius, up to G; the scale U of the squares, up to G^2, where squares are released."""
        g_hat = self.rule.g_hat
        clip_norm = Extra(lambda value, mine: check_number("clip_norm", value, g_hat, SMALLEST_RADIUS))
        square_limit = Extra(lambda value, mine: check_number("square_limit", value, g_hat**2))
        if kind == "train":
            return {"clip_norm": clip_norm} | ({"square_limit": square_limit} if self.fused else {})
        return {"square_limit": square_limit} if kind == "query" and not self.fused else None

    def check_local_steps(self, local_steps: int) -> None:
        if self.round_length != local_steps:
            raise ValueError(
                f"local_steps={local_steps} differs from the method's round_length={self.round_length}: its "
                "plan or its reports count on the steps of a round; give both the same"
            )

    @property
    def squares_per_round(self) -> int:
        """How many releases of squares the mean is over that is sent in a round."""
        return self.round_length if self.fused and self.query_steps == "all" else 1

    def radius_noise(self, plan: Plan) -> float:
        # Of the mean that is sent; the releases of a round have independent noise.
        return super().radius_noise(plan) / math.sqrt(self.squares_per_round)

    def report_noise(self, plan: Plan) -> float:
        return self.radius_noise(plan)

    def _releases(self, setting: Setting, query: Sampling, z: float, radius_z: float) -> PrivacyPlan:
        plan, sampling = super()._releases(setting, query, z, radius_z), setting.sampling
        if not self.fused or self.squares_per_round == self.round_length:
            return plan
        if isinstance(sampling, FixedEpochs):
            raise ValueError(
                f"sampling={sampling!r} with query_steps={self.query_steps!r}: a record meets one step of an "
                "epoch, and must not meet squares by its place in it. Give query_steps='all', or sampling "
                "that amplifies"
            )
        # A round that broke off has used its squares, and is not given others: one release per planned round.
        rounds = math.ceil(sampling.steps / self.round_length)
        return PrivacyPlan(
            [plan["gradient"], replace(plan["squares"], count=rounds)], sampling, plan.relation
        )

    def init(self, context: Context) -> State:
        """The first radius, and no squares; fused, also the noise of the mean that will be reported."""
        state = self._without_squares(super().init(context))
        return {**state, "noise": self.radius_noise(context.plan)} if self.fused else state

    def rebase(self, state: State, params: Parameters) -> State:
        return self._without_squares(super().rebase(state, params))

    def _without_squares(self, state: State) -> State:
        return {**state, "squares": None} if self.fused else state

    def measures(self, state: State) -> bool:
        return self.fused and (self.query_steps == "all" or state["squares"] is None)

    def learn(self, plan: Plan, state: State, mean: float) -> State:
        # The radius is the server's: it stays for the round, and the squares wait for the reply.
        return {**state, "squares": (state["squares"] or 0.0) + mean}

    def begin_round(self, context: Context, state: State) -> State:
        return state  # the server has set the radius already

    def follow(self, state: State, extras: Mapping[str, Any]) -> State:
        own = {name: extras[name] for name in ("clip_norm", "square_limit") if name in extras}
        return {**state, **own}

    def query(self, context: Context, state: State) -> dict[str, float]:
        return {SQUARES: self.ask(context, state), SQUARES_NOISE: self.radius_noise(context.plan)}

    def reply(self, state: State, start: Parameters, end: Parameters) -> Reply:
        """The parameters; fused also the mean of the squares that the round's steps have released."""
        sent = super().reply(state, start, end)
        if not self.fused:
            return sent
        mean = state["squares"] / self.squares_per_round
        return Reply(sent.params, {SQUARES: mean, SQUARES_NOISE: state["noise"]})


@dataclass(frozen=True)
class ServerRMS(RadiusOfServer):
    """The client's half of AdaptDP-FedAvg.

    Args:
        clip_norm: G > 0, the largest radius that the client accepts.
        round_length: K, local steps per round.
        variant: "round", a query of its own every round, or "fused".
        query_steps: of variant "fused", which of a round's steps release squares: "all", or the "first".
        radius_share: rho in (0, 1), the radius' share of 1/z^2 (fused) or of mu^2 (round).
        radius_sampling_rate: q_C of the query of variant "round"; None or 1 asks all records.
        noise_multiplier, radius_noise_multiplier: z and z_C; calibrated to the budget when None.

    Raises:
        ValueError: a value out of range, or one that the variant does not have.

    Example:
        >>> list(ServerRMS(0.5, round_length=3).takes("query"))
        ['square_limit']
        >>> list(ServerRMS(0.5, round_length=3, variant="fused").takes("train"))
        ['clip_norm', 'square_limit']
    """

    name: ClassVar[str] = "adaptive-rms-client"
    card: ClassVar[Card] = AdaptiveRMS.card

    clip_norm: float = 1.0
    _: KW_ONLY
    round_length: int = 1
    variant: Literal["round", "fused"] = "round"
    query_steps: Literal["all", "first"] = "all"
    radius_share: float = 0.2
    radius_sampling_rate: float | None = None
    noise_multiplier: float | None = None
    radius_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.positive(clip_norm=self.clip_norm)
        _validate.count(round_length=self.round_length)
        _validate.one_of(("round", "fused"), variant=self.variant)
        _validate.one_of(("all", "first"), query_steps=self.query_steps)
        _validate.share(radius_share=self.radius_share)
        require_rate("radius_sampling_rate", self.radius_sampling_rate)
        self._check_noise()
        if self.query_steps == "first" and not self.fused:
            raise ValueError(
                f"query_steps={self.query_steps!r} belongs to variant='fused': the query of variant='round' "
                "is no step's"
            )
        if self.radius_sampling_rate is not None and self.fused:
            raise ValueError(f"radius_sampling_rate={self.radius_sampling_rate!r} belongs to variant='round'")

    @property
    def fused(self) -> bool:
        return self.variant == "fused"

    @property
    def rule(self) -> RMSRadius:
        """Only its limit: the server's rule moves the radius."""
        return RMSRadius(float(self.clip_norm))

    def query_sampling(self, sampling: Sampling, rounds: int) -> Sampling:
        return sampling_at(self.radius_sampling_rate, sampling, rounds)


class PublishedServerRMS(RadiusOfServer, published.AdaptiveRMS):
    """The client's half as published: a query every round, and the noise of equation (1)."""

    name: ClassVar[str] = "adaptive-rms-client"


class AdaptDPFedAvg(FedAvg):
    """The server's half: FedAvg with a clipping radius that follows the clients' mean squared gradient norm.

    It asks every client of the round for its noised mean square at the global model first, makes the radius
    of the round of these, and sends it along. With variant="fused" it asks nothing: the clients report the
    noised mean square of their local steps with the parameters, and it sets the radius of the next round.

    Args:
        radius: the rule; `RMSRadius(g_hat, offset="paper")` is the published one.
        rounds: R, and
        clients: P, for the paper's offset, which counts all R P released numbers.
        variant: as at the clients' `ServerRMS`: "round", or "fused", whose radius is a round late.
        initial_clip_norm: radius of the first round of variant "fused"; G when None.

    Raises:
        ValueError: an argument out of range, or one that the variant does not have.

    Example:
        >>> strategy = AdaptDPFedAvg(RMSRadius(1.0, offset="none"), rounds=10, clients=2)
        >>> requests = strategy.round(1, {})
        >>> next(requests).extras
        {'square_limit': 1.0}
        >>> replies = [Reply(reports={SQUARES: mean, SQUARES_NOISE: 0.0}) for mean in (0.1, 0.3)]
        >>> round(requests.send(replies).extras["clip_norm"], 6)  # sqrt(2 * 0.2)
        0.632456
        >>> fused = AdaptDPFedAvg(RMSRadius(1.0, offset="none"), rounds=10, clients=2, variant="fused")
        >>> next(fused.round(1, {})).extras
        {'clip_norm': 1.0, 'square_limit': 1.0}
    """

    def __init__(
        self,
        radius: RMSRadius,
        rounds: int,
        clients: int,
        *,
        variant: Literal["round", "fused"] = "round",
        initial_clip_norm: float | None = None,
    ) -> None:
        super().__init__()
        _validate.one_of(("round", "fused"), variant=variant)
        if initial_clip_norm is not None and variant == "round":
            raise ValueError(
                f"initial_clip_norm={initial_clip_norm!r} belongs to variant='fused': a round of variant="
                "'round' begins with a radius of its own"
            )
        self.radius, self.variant, self._releases = radius, variant, rounds * clients
        self._state: RadiusState = radius.start(initial_clip_norm)
        self._used = self._state["clip_norm"]
        self._relative_noise: float | None = None

    def round(self, number: int, params: Parameters) -> RoundRequests:
        if self.variant == "round":
            limit = {"square_limit": self._state["square_limit"]}
            self._follow((yield Request(number, params, limit, "query")))
        self._used = self._state["clip_norm"]
        return (yield from super().round(number, params))

    def extras(self) -> dict[str, Any]:
        """The radius of the round; of variant "fused" also U, in whose units squares are to be sent."""
        limit = {"square_limit": self._state["square_limit"]} if self.variant == "fused" else {}
        return {"clip_norm": self._state["clip_norm"], **limit}

    def refusal(self, request: Request, reply: Any) -> str | None:
        """Also where the squares, or their noise, are missing from a reply that must report them."""
        found = super().refusal(request, reply)
        if found is not None or (self.variant == "round" and request.kind == "train"):
            return found
        if not {SQUARES, SQUARES_NOISE} <= set(reply.reports):
            return f"it sent no reports {SQUARES!r} and {SQUARES_NOISE!r}"
        return "it sent noise below zero" if reply.reports[SQUARES_NOISE] < 0 else None

    def aggregate(self, params: Parameters, replies: Sequence[Reply]) -> dict[str, Tensor]:
        if self.variant == "fused":
            self._follow(replies)
        return super().aggregate(params, replies)

    def _follow(self, replies: Sequence[Reply]) -> None:
        """Move the radius.

        The number of replies takes the place of P in the noise of their mean. Without any the radius stays.
        """
        if not replies:
            return
        limit = self._state["square_limit"]
        mean = limit * math.fsum(reply.reports[SQUARES] for reply in replies) / len(replies)
        variance = math.fsum(reply.reports[SQUARES_NOISE] ** 2 for reply in replies)
        noise = limit * math.sqrt(variance) / len(replies)
        doubt = self.radius.doubt(noise / limit)
        if doubt is not None and self.radius.doubt(self._relative_noise or 0.0) is None:
            warnings.warn(doubt, stacklevel=3)
        self._relative_noise = noise / limit
        self._state = self.radius.update(self._state, mean, noise, self._releases)

    def metrics(self) -> Mapping[str, float]:
        """The round's radius; where it scales itself also s / U, which decides whether it may collapse."""
        own = {"radius": self._used}
        if self.radius.scale == "self" and self._relative_noise is not None:
            own["radius_noise"] = self._relative_noise
        return own

    def doubt(self, metrics: Sequence[Mapping[str, float]]) -> str | None:
        """Whether the noisiest of the rounds' radii may collapse."""
        return self.radius.doubt(max((one.get("radius_noise", 0.0) for one in metrics), default=0.0))

    def state_dict(self) -> dict[str, Any]:
        return {"variant": self.variant, **self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: it is another strategy's, or that of the other variant.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"state has {sorted(state)}, a radius has {sorted(self.state_dict())}")
        if state["variant"] != self.variant:
            raise ValueError(
                f"variant={self.variant!r}: the state is of variant={state['variant']!r}, whose clients "
                "answer otherwise; give that one to go on with it, or another folder to start anew"
            )
        self._state = {name: state[name] for name in self._state}
        self._used = self._state["clip_norm"]
