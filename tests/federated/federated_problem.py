"""A small problem for clients: three clouds, sixty records a client, a tanh network in float64."""

from typing import Any

import torch
from flat_arguments import arranged
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.federated import AdaptDPFedAvg, Client, Reply, Request, ServerRMS
from equipoise.federated.methods.server_radius import SQUARES
from equipoise.methods.adaptive_rms import RMSRadius

RECORDS, FEATURES, CLASSES = 60, 6, 3
ROUNDS, LOCAL_STEPS = 3, 2
NOISE = {"noise_multiplier": 1.0, "radius_noise_multiplier": 3.0}


def records(seed: int = 0, count: int = RECORDS) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=rng)
    centres = 2 * torch.eye(CLASSES, FEATURES, dtype=torch.float64)
    noise = torch.randn(count, FEATURES, generator=rng, dtype=torch.float64)
    return {"input": centres[label] + noise, "label": label}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def start() -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in network().named_parameters()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def client(method: Any = None, number: int = 0, **options: Any) -> Client:
    """A reproducible client; `number` seeds its data, its records and its noise."""
    defaults: dict[str, Any] = {
        "sampling": eq.Poisson(20, RECORDS, options.pop("steps", ROUNDS * LOCAL_STEPS)),
        "local_steps": LOCAL_STEPS,
        "learning_rate": 0.3,
        "seed": number,
        "reproducible": True,
        "data": records(number),
    }
    method = method or eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0)
    model = options.pop("model", None) or network()
    loss_function = options.pop("loss_function", loss)
    return Client(model, loss_function, **arranged(method=method, **(defaults | options)))


def central(method: Any, sampling: Any, **options: Any) -> tuple[eq.PrivateTraining, dict[str, Tensor]]:
    """A finished training of the same method in one process, on the records of client 0, and its model."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    given = {"loss": loss, "data": records(), "sampling": sampling, "method": method, **options}
    training = eq.PrivateTraining(model, optimizer, run=eq.Run(reproducible=True), **given)
    training.run(progress=False)
    return training, {name: p.detach() for name, p in model.named_parameters()}


def follower(clip_norm: float = 0.5, round_length: int = LOCAL_STEPS, **options: Any) -> ServerRMS:
    """The client's half of a radius that the server sets."""
    return ServerRMS(clip_norm, round_length=round_length, **(NOISE | options))


def adaptive(clients: int = 3, clip_norm: float = 0.5, **rule: Any) -> AdaptDPFedAvg:
    """The server's half."""
    return AdaptDPFedAvg(RMSRadius(clip_norm, **rule), rounds=ROUNDS, clients=clients)


def sent(number: Any, params: Any, kind: str = "train", **extras: Any) -> Request:
    """A request with those extras that are not None; of a reply, its parameters are sent."""
    given = {name: value for name, value in extras.items() if value is not None}
    return Request(number, params.params if isinstance(params, Reply) else params, given, kind)


def train(one: Any, number: Any, params: Any, clip_norm: Any = None, **extras: Any) -> Reply:
    """The client's reply to a request for its local steps."""
    return one.answer(sent(number, params, clip_norm=clip_norm, **extras))


def ask(one: Any, number: Any, params: Any, square_limit: Any) -> float:
    """The mean square that the client reports to a query."""
    return one.answer(sent(number, params, "query", square_limit=square_limit)).reports[SQUARES]


def charges(one: Client) -> int:
    """Releases that the client's ledger holds."""
    return sum(e.kind == "release" for e in one.training.ledger.journal.entries())


def same(a: Any, b: Any) -> bool:
    """Bit for bit; of replies, also the reports."""
    if isinstance(a, Reply) and isinstance(b, Reply):
        return a.reports == b.reports and same(a.params, b.params)
    a, b = (x.params if isinstance(x, Reply) else x for x in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def away(one: Client, kind: str, number: int, *, after: bool = False) -> Client:
    """The same client, away when it is asked for this in this round; `after` it has done the work."""
    answer = one.answer

    def missing(request: Request) -> Reply:
        if (request.kind, request.round) != (kind, number):
            return answer(request)
        if after:
            answer(request)
        raise TimeoutError("too slow")

    one.answer = missing  # type: ignore[method-assign]
    return one
