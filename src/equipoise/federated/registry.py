"""The table of federated methods: what runs at each client, and what at the server.

A method is two functions of the public constants of a federation (`FederationSetup`), one that makes the
client's method and one that makes the server's strategy. `fedavg:NAME` names any method of the library at the
clients, with plain averaging; `package.module:NAME` a `FederatedMethod` that is not in the table, such as
those in `baselines/` of the repository. The table loads neither torch nor any method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from equipoise import federated, methods
from equipoise.methods.registry import find, registered

if TYPE_CHECKING:
    from torch import nn

    from equipoise.federated import RoundSubspace, Strategy
    from equipoise.gradients.engine_inputs import Loss
    from equipoise.methods import Method, ReleasedQuantile

PLAIN_AVERAGING = "fedavg:"
"""Before the name of a method of the library: that method at the clients, averaged."""

QUERIED_RECORDS = 600
"""Records that a radius query asks on average: precise enough, at next to no cost in privacy."""


@dataclass(frozen=True, kw_only=True)
class FederationSetup:
    """Public constants of a federation.

    Attributes:
        rounds: R.
        clients: P, all of them.
        clients_per_round: that take part in a round.
        local_steps: K, steps per round.
        learning_rate: of the local steps, which are plain SGD.
        model: of the federation's make; its values do not matter.
        loss: loss(model, batch) -> [B].
        clip_norm: bound on one record's gradient, or the largest radius.
        recipe: "library" or "as_published".
        options: the method's own settings, by name; see its entry.
        public: a batch of public records, for the methods that use some.
        client_records: how many records a client has on average, where that is public.
    """

    rounds: int
    clients: int
    clients_per_round: int
    local_steps: int
    learning_rate: float
    model: nn.Module
    loss: Loss
    clip_norm: float = 1.0
    recipe: str = "library"
    options: Mapping[str, Any] = field(default_factory=dict)
    public: Any = None
    client_records: float | None = None

    @cached_property
    def directions(self) -> RoundSubspace:
        """The subspace of public gradients; in one process clients and server share it."""
        options = {name: self.options[name] for name in ("dimension", "blocks")}
        size = self.options["public_batch_size"]
        return federated.RoundSubspace(self.model, self.loss, self.public, batch_size=size, **options)


@dataclass(frozen=True)
class FederatedMethod:
    """An entry of the table.

    Attributes:
        summary: one line for listings.
        method: what estimates the gradient at a client; every client gets one of its own.
        strategy: the server's side.
        options: the method's own settings and their defaults; `FederationSetup.options` holds all of them.
        published: what the recipe as published has in place of these defaults, and of the usual clip norm
            under `clip_norm`; None if there is no such recipe.
        needs_public: whether it asks for public records.
    """

    summary: str
    method: Callable[[FederationSetup], Method]
    strategy: Callable[[FederationSetup], Strategy]
    options: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] | None = None
    needs_public: bool = False

    @property
    def recipes(self) -> tuple[str, ...]:
        """Which the method has."""
        return ("library",) if self.published is None else ("library", "as_published")

    def defaults(self, recipe: str) -> Mapping[str, Any]:
        """The options and their defaults under a recipe."""
        changed = (self.published or {}) if recipe == "as_published" else {}
        return {name: changed.get(name, value) for name, value in self.options.items()}


def find_federated(name: str) -> FederatedMethod:
    """The entry of a name, of ``fedavg:NAME``, or of ``package.module:NAME``.

    Raises:
        ValueError: there is no such method.

    Example:
        >>> find_federated("fedavg:dp-c4").summary == find("dp-c4").card.summary
        True
    """
    if name in FEDERATED:
        return FEDERATED[name]
    local = name.removeprefix(PLAIN_AVERAGING)
    if local != name and local in registered():
        return FederatedMethod(find(local).card.summary, lambda setup: _local(local, setup), average)
    if ":" in name and local == name:
        from equipoise.data.readers.custom import load_named

        found = load_named(name)
        if isinstance(found, FederatedMethod):
            return found
    raise ValueError(
        f"method={name!r} is no federated method. There are {', '.join(FEDERATED)}, fedavg:NAME with any "
        "name that `equipoise methods` lists, and package.module:NAME of a FederatedMethod."
    )


def _local(name: str, setup: FederationSetup) -> Method:
    from equipoise.methods.configuration import defaults

    kind = find(name)
    place = "inner.clip_norm" if "inner" in defaults(kind) else "clip_norm"
    words = {place: setup.clip_norm} if place.partition(".")[0] in defaults(kind) else {}
    public = None if setup.public is None else methods.PublicRecords(setup.public)
    found: Method = kind.from_config({"name": kind.name, **words}, public)
    return found


def average(setup: FederationSetup) -> Strategy:
    """The server's side of the methods that send parameters."""
    return federated.FedAvg(setup.options.get("server_rate", 1.0))


def dp_sgd(setup: FederationSetup) -> Method:
    """DP-SGD at the clip norm of the federation, for methods that go around it."""
    kind = methods.published.DPFedAvg if setup.recipe == "as_published" else methods.DPSGD
    return kind(clip_norm=setup.clip_norm)


def _quantile(setup: FederationSetup) -> ReleasedQuantile:
    return methods.ReleasedQuantile(setup.clip_norm, quantile=setup.options["quantile"])


def _subspace_server(setup: FederationSetup) -> Strategy:
    return federated.SubspaceAverage(setup.directions, setup.options["server_rate"])


def _in_subspace(library: str, published: str) -> Callable[[FederationSetup], Method]:
    def client(setup: FederationSetup) -> Method:
        kind = getattr(federated, published if setup.recipe == "as_published" else library)
        found: Method = kind(source=setup.directions, clip_norm=setup.clip_norm, form=setup.options["form"])
        return found

    return client


def _radius_client(setup: FederationSetup) -> Method:
    if setup.recipe == "as_published":
        rate = setup.options["radius_sampling_rate"]
        return federated.PublishedServerRMS(
            clip_norm=setup.clip_norm, round_length=setup.local_steps, radius_sampling_rate=rate
        )
    own = {name: setup.options[name] for name in _RADIUS_AT_CLIENTS}
    method = federated.ServerRMS(setup.clip_norm, round_length=setup.local_steps, **own)
    if method.radius_sampling_rate is not None or setup.client_records is None:
        return method
    rate = float(f"{min(1.0, QUERIED_RECORDS / setup.client_records):.2g}")
    return replace(method, radius_sampling_rate=rate)


def _radius_server(setup: FederationSetup) -> Strategy:
    from equipoise.methods.adaptive_rms import RMSRadius

    options = {name: value for name, value in setup.options.items() if name not in _RADIUS_AT_CLIENTS}
    limit = options.pop("model_clip_norm")
    rule = RMSRadius(setup.clip_norm, **options)
    return federated.AdaptDPFedAvg(rule, setup.rounds, setup.clients_per_round, limit)


_RADIUS_AT_CLIENTS = ("radius_share", "radius_sampling_rate")


_RADIUS = {
    "radius_share": 0.2, "radius_sampling_rate": None, "tau": 1.0, "offset": "sd", "scale": "g_hat",
    "kappa": None, "ema_beta": 0.0, "minimum": None, "failure": 0.01, "model_clip_norm": None,
}  # fmt: skip


_SUBSPACE = {
    "dimension": 100, "blocks": "per_tensor", "form": "combination", "public_batch_size": None,
    "server_rate": 1.0,
}  # fmt: skip


_SUBSPACE_PUBLISHED = {"clip_norm": 0.01, "blocks": "whole", "form": "coordinates"}


FEDERATED: dict[str, FederatedMethod] = {
    "dp-fedavg": FederatedMethod(
        "DP-SGD at a fixed clip norm, averaged", dp_sgd, average, {"server_rate": 1.0}, published={}
    ),
    "dp-fedavg-quantile": FederatedMethod(
        "DP-SGD at a quantile of all clients' gradient norms, from noised counts",
        lambda setup: federated.ServerQuantile(_quantile(setup)),
        lambda setup: federated.QuantileFedAvg(_quantile(setup)),
        {"quantile": 0.5},
    ),
    "dp-fedavg-normalised": FederatedMethod(
        "DP-SGD with normalised gradients, averaged",
        lambda setup: methods.DPSGD(clip_norm=setup.clip_norm, clip_rule=methods.AutoS()),
        average,
    ),
    "adaptdp-fedavg": FederatedMethod(
        "the clipping radius follows the clients' noised mean squared gradient norm",
        _radius_client,
        _radius_server,
        _RADIUS,
        published={"offset": "paper"},
    ),
    "fedpcdp": FederatedMethod(
        "local steps inside the span of public gradients, clipped after the projection",
        _in_subspace("RoundPCDP", "PublishedRoundPCDP"),
        _subspace_server,
        _SUBSPACE,
        _SUBSPACE_PUBLISHED,
        needs_public=True,
    ),
    "fedpdp": FederatedMethod(
        "local steps inside the span of public gradients, clipped before the projection",
        _in_subspace("RoundPDP", "PublishedRoundPDP"),
        _subspace_server,
        _SUBSPACE,
        _SUBSPACE_PUBLISHED,
        needs_public=True,
    ),
}
"""name -> its two halves."""
