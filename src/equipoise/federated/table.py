"""The table of federated methods: what runs at each client, and what at the server.

A new method is one line here: two functions of the public constants of a federation (`Setup`), one that makes
the client's method and one that makes the server's strategy. `fedavg:NAME` names any method of the library
at the clients, with plain averaging.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from equipoise.federated.proximal import Proximal
from equipoise.federated.server_radius import ServerRMS
from equipoise.federated.strategies import AdaptDPFedAvg, FedAvg, Strategy
from equipoise.methods import DPSGD, METHODS, Method, ReleasedQuantile
from equipoise.methods.rms_radius import RMSRadius

__all__ = ["FEDERATED", "FederatedMethod", "Setup", "find_federated"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Public constants of a federation.

    Attributes:
        rounds: R.
        clients: that take part in a round.
        local_steps: K, steps a round.
        clip_norm: bound on one record's gradient, or the largest radius.
        recipe: "library" or "as_published".
        options: the method's own settings, by name; see its line.
        public: a batch of public records, for the methods that use some.
    """

    rounds: int
    clients: int
    local_steps: int
    clip_norm: float = 1.0
    recipe: str = "library"
    options: Mapping[str, Any] = field(default_factory=dict)
    public: Any = None


@dataclass(frozen=True)
class FederatedMethod:
    """A line of the table.

    Attributes:
        summary: one line for listings.
        method: what estimates the gradient at a client; every client gets one of its own.
        strategy: the server's side.
        options: the method's own settings and their defaults; `Setup.options` holds all of them.
        recipes: which the method has.
        needs_public: whether it asks for public records.
    """

    summary: str
    method: Callable[[Setup], Method]
    strategy: Callable[[Setup], Strategy]
    options: Mapping[str, Any] = field(default_factory=dict)
    recipes: tuple[str, ...] = ("library",)
    needs_public: bool = False


def find_federated(name: str) -> FederatedMethod:
    """The line of a name, or of ``fedavg:NAME``.

    Raises:
        ValueError: there is no such method.

    Example:
        >>> find_federated("fedavg:dp-c4").method(Setup(rounds=1, clients=2, local_steps=1)).name
        'dp-c4'
    """
    if name in FEDERATED:
        return FEDERATED[name]
    kind, _, local = name.partition(":")
    if kind == "fedavg" and local in METHODS:
        return FederatedMethod(METHODS[local].card.summary, lambda setup: _local(local, setup), _mean)
    raise ValueError(
        f"method={name!r} is no federated method. There are {', '.join(FEDERATED)}, and fedavg:NAME with any "
        "name that `equipoise methods` lists."
    )


def _local(name: str, setup: Setup) -> Method:
    public = {"public": setup.public} if setup.public is not None else {}
    return METHODS[name](**public, clip_norm=setup.clip_norm)  # type: ignore[call-arg]


def _mean(setup: Setup) -> Strategy:
    return FedAvg()


def _fixed(setup: Setup) -> Method:
    return DPSGD(setup.clip_norm)


def _quantile(setup: Setup) -> Method:
    return DPSGD(ReleasedQuantile(setup.clip_norm, quantile=setup.options["quantile"]))


def _normalised(setup: Setup) -> Method:
    return DPSGD(setup.clip_norm, clip_rule="auto_s")


def _proximal(setup: Setup) -> Method:
    return Proximal(_fixed(setup), setup.options["strength"])


def _radius_client(setup: Setup) -> Method:
    share = {} if setup.recipe == "as_published" else {"radius_share": setup.options["radius_share"]}
    return ServerRMS(setup.clip_norm, round_length=setup.local_steps, recipe=setup.recipe, **share)


def _radius_server(setup: Setup) -> Strategy:
    options = {name: value for name, value in setup.options.items() if name != "radius_share"}
    if setup.recipe == "as_published":
        options |= {"offset": "paper", "scale": "g_hat", "kappa": None}
    return AdaptDPFedAvg(RMSRadius(setup.clip_norm, **options), setup.rounds, setup.clients)


_RADIUS = {
    "radius_share": 0.2, "tau": 1.0, "offset": "sd", "scale": "g_hat", "kappa": None, "ema_beta": 0.0,
    "minimum": None,
}  # fmt: skip

FEDERATED: dict[str, FederatedMethod] = {
    "dp-fedavg": FederatedMethod("DP-SGD at a fixed clip norm, averaged", _fixed, _mean),
    "dp-fedavg-quantile": FederatedMethod(
        "DP-SGD at a quantile that every client learns", _quantile, _mean, {"quantile": 0.5}
    ),
    "dp-fedavg-normalised": FederatedMethod("DP-SGD with normalised gradients, averaged", _normalised, _mean),
    "fedprox": FederatedMethod(
        "DP-SGD with a pull to the global model, after the noise", _proximal, _mean, {"strength": 0.1}
    ),
    "adaptdp-fedavg": FederatedMethod(
        "the clipping radius follows the clients' noised mean squared gradient norm",
        _radius_client,
        _radius_server,
        _RADIUS,
        recipes=("library", "as_published"),
    ),
}
"""name -> its two halves."""
