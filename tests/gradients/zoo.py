"""A table of small models, each with its loss, its records, and what must come of training on them.

RIGHT: the sum of clipped gradients is that of a loop over single records. `refused(text)`: the training does
not begin, and the error says what is wrong and what to do. `unseen(word)`: the mixture shows only on records
or random numbers that were not met, and this is what is said of the model. Nothing else is wrong in silence.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

RECORDS, FEATURES, LENGTH, TOKENS = 15, 6, 5, 11


class Outcome(NamedTuple):
    """What must come of a case; `text` is a pattern of the error, or what is said of the model."""

    kind: str
    text: str = ""


RIGHT = Outcome("right")


def refused(text: str) -> Outcome:
    return Outcome("refused", text)


def right_or_refused(text: str) -> Outcome:
    """It follows from the micro-batch size, and that from the rounding of the machine."""
    return Outcome("right or refused", text)


def unseen(word: str = "compared") -> Outcome:
    return Outcome("unseen", word)


# ---- records


def random_numbers(*shape: int) -> Tensor:
    return torch.randn(RECORDS + 1, *shape, generator=torch.Generator().manual_seed(7))


def whole_numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, (RECORDS + 1, *shape), generator=torch.Generator().manual_seed(8))


def rows(*shape: int) -> dict[str, Tensor]:
    return {"x": random_numbers(*(shape or (FEATURES,))), "y": whole_numbers(3).float()}


def sequences() -> dict[str, Tensor]:
    return rows(LENGTH, FEATURES)


def images() -> dict[str, Tensor]:
    return rows(2, 6, 6)


def classes() -> dict[str, Tensor]:
    return {"x": random_numbers(FEATURES), "y": whole_numbers(3)}


def texts() -> dict[str, Tensor]:
    return {"x": whole_numbers(TOKENS, LENGTH), "y": whole_numbers(3).float()}


def with_lengths() -> dict[str, Tensor]:
    """The first records, on which a training is tried, are all of the full length."""
    lengths = 2 + whole_numbers(LENGTH - 1)
    lengths[:8] = LENGTH
    return sequences() | {"n": lengths}


def equal_labels() -> dict[str, Tensor]:
    """All labels are 1, but for the last record's."""
    return rows() | {"y": torch.ones(RECORDS + 1).index_fill(0, torch.tensor([RECORDS]), 2).long()}


# ---- losses


def squared(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Its gradient differs from entry to entry of the output."""
    out = model(batch["x"]).flatten(1)
    ramp = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return 0.5 * ((torch.sin(out + 0.3) * ramp).sum(1) - batch["y"]).square()


@dataclass(frozen=True)
class Case:
    """A model, a loss, records, and the outcome.

    Attributes:
        model: makes the model.
        loss: loss(model, batch) -> [B].
        records: makes the records, one more than the smaller data set has.
        outcome: in every mode, or in the modes that `other` does not name.
        other: mode -> outcome.
        is_random: the model draws random numbers. They are held constant for the comparison with single
            records, and are those of a step where one record more is tried.
        options: further arguments of the training.
    """

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor] = squared
    records: Callable[[], Mapping[str, Tensor]] = rows
    outcome: Outcome = RIGHT
    other: Mapping[str, Outcome] = field(default_factory=dict)
    is_random: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def by_length(model, batch):
    return 0.5 * (model(batch["x"], batch["n"]).flatten(1).sum(1) - batch["y"]).square()


def of(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A loss that changes the per-record losses."""
    return lambda model, batch: change(squared(model, batch))


def on(change: Callable[[Mapping[str, Tensor]], Tensor]) -> Callable[..., Tensor]:
    """A loss that changes the inputs."""
    return lambda model, batch: squared(model, batch | {"x": change(batch)})


def penalised(model, batch):
    """With the gradient penalty of a Wasserstein critic."""
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return 0.5 * (out.squeeze(1) - batch["y"]).square() + (slope.norm(dim=1) - 1).square()


def penalised_by_transform(model, batch):
    slopes = torch.vmap(torch.func.grad(lambda x: model(x[None])[0, 0]))(batch["x"])
    return squared(model, batch) + (slopes.norm(dim=1) - 1).square()


def directional(model, batch):
    _, slope = torch.func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
    return squared(model, batch) + slope.squeeze(1).square()


def adversarial(model, batch):
    """Trained on records moved along the sign of their own gradient."""
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(squared(model, {**batch, "x": x}).sum(), x)
    return squared(model, {**batch, "x": batch["x"] + 0.1 * slope.sign()})


def contrastive(model, batch):
    out = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(out @ out.t() / 0.1, torch.arange(len(out)), reduction="none")


def pair_distance(model, batch):
    """Both halves of a record through one model."""
    left, right = batch["x"].chunk(2, dim=1)
    return (model(left) - model(right)).square().sum(1)


def distilled(model, batch):
    """The teacher is the model itself, without gradients."""
    with torch.no_grad():
        target = model(batch["x"]).softmax(1)
    return F.kl_div(model(batch["x"] + 0.1).log_softmax(1), target, reduction="none").sum(1)


def focal(model, batch):
    losses = entropy(model, batch)
    return (1 - torch.exp(-losses)) ** 2 * losses


def smoothed(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none", label_smoothing=0.1)


def aligned(model, batch):
    """Connectionist temporal classification."""
    out, count = model(batch["x"]).log_softmax(-1).transpose(0, 1), len(batch["x"])
    lengths = torch.full((count,), LENGTH), torch.ones(count, dtype=torch.long)
    return F.ctc_loss(out.float(), batch["y"].long()[:, None] + 1, *lengths, reduction="none")


# ---- models


class Net(nn.Module):
    """Parts by name, and a forward that uses them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def linear(out: int = 1) -> nn.Module:
    return nn.Linear(FEATURES, out)


def mlp(out: int = 1, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), activation(), nn.Linear(8, out))


def layer_of(layer: Callable[[Tensor], Tensor] | nn.Module) -> nn.Module:
    return copy.deepcopy(layer) if isinstance(layer, nn.Module) else Net(lambda self, x: layer(x))


def around(layer: Callable[[Tensor], Tensor] | nn.Module) -> Callable[[], nn.Module]:
    """A layer, or a function, between two linear layers."""
    return lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), layer_of(layer), nn.Linear(FEATURES, 2))


def gated(layer: Callable[[Tensor], Tensor] | nn.Module, start: float = 0.0) -> Callable[[], nn.Module]:
    """A layer beside the identity, behind a gate that begins closed."""

    def forward(self, x):
        x = self.tail(x)
        return self.head(x + self.gate * self.layer(x))

    def gate():
        return nn.Parameter(torch.full((FEATURES,), start))

    return lambda: Net(forward, tail=linear(FEATURES), layer=layer_of(layer), gate=gate(), head=linear(2))


def cnn(*norm: nn.Module) -> Callable[[], nn.Module]:
    head = (nn.ReLU(), nn.Flatten())
    return lambda: nn.Sequential(nn.Conv2d(2, 4, 3), *copy.deepcopy(norm), *head, nn.Linear(64, 2))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


def zeros(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


def evaluated(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().eval()


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])

    return lambda: Net(forward, body=kind(FEATURES, 4, batch_first=True, **options), head=nn.Linear(4, 1))


def packed(self, x, lengths):
    pack = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return self.head(self.gru(pack)[1][-1])


def attention(**options: Any) -> nn.Module:
    layer = nn.MultiheadAttention(FEATURES, 2, batch_first=True, **options)
    return Net(lambda self, x: self.attention(x, x, x)[0], attention=layer)


def fused(self, x, *mask, **options):
    """Scaled dot products."""
    return F.scaled_dot_product_attention(*self.qkv(x)[:, None].chunk(3, -1), *mask, **options)


def masked_attention(self, x):
    """With a mask per record."""
    seen = x[:, None, None, :, 0] > -1.5
    return fused(self, x, seen | ~seen.any(-1, keepdim=True))


def biased_attention(self, x):
    """Its bias by position is a parameter, as T5's is, and goes into the scores inside the kernel."""
    return fused(self, x, self.bias, dropout_p=0.2)


def learned_queries(self, x):
    return F.scaled_dot_product_attention(self.queries, *self.kv(x)[:, None].chunk(2, -1), dropout_p=0.2)


def tied(rows: int = TOKENS) -> Callable[[], nn.Module]:
    """The head is the embedding, or a slice of it."""

    def forward(self, x):
        return torch.tanh(self.embedding(x)) @ self.embedding.weight[:rows].t()

    return lambda: Net(forward, embedding=nn.Embedding(TOKENS, FEATURES))


def bag(**options: Any) -> Callable[[], nn.Module]:
    """Looks up a batch as one long list with offsets."""

    def forward(self, x):
        return self.head(self.bag(x.flatten(), torch.arange(len(x)) * x.shape[1]))

    return lambda: Net(forward, bag=nn.EmbeddingBag(TOKENS, 4, **options), head=nn.Linear(4, 1))


def lookup(layer: nn.Module, width: int = 20) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(copy.deepcopy(layer), nn.Flatten(), nn.Linear(width, 1))


def embedded(**options: Any) -> Callable[[], nn.Module]:
    return lookup(nn.Embedding(TOKENS, 4, **options))


class Checkpointed(nn.Module):
    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.before, self.drop, self.options = nn.Linear(FEATURES, FEATURES), nn.Dropout(dropout), options

    def inner(self, x):
        return self.drop(torch.tanh(self.first(x)))

    def forward(self, x):
        return self.second(checkpoint(self.inner, self.before(x), **self.options))


class Squared(torch.autograd.Function):
    """A function of one's own that treats every record alike."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Implicit(torch.autograd.Function):
    """Its backward differentiates by a parameter itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight.t())

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(x @ weight.t()), (x, weight), g)


class Backward(torch.autograd.Function):
    """The identity, whose gradient is another."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.change(g), None


def backward(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: Backward.apply(x, change)


def unless(is_spoilt: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A backward that gives nothing to any record where this is said of the whole gradient."""
    return backward(lambda g: torch.zeros_like(g) if bool(is_spoilt(g)) else g)


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity, whose gradient a hook changes."""

    def layer(x):
        out = x.clone()
        if out.requires_grad:
            out.register_hook(hook)
        return out

    return layer


def straight_through(factor: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """The identity, whose backward multiplies by 1 + factor(x): no loss shows it."""
    return around(lambda x: x + factor(x.detach()) * (x - x.detach()))


def checked_up_to(most: float, x: Tensor) -> Tensor:
    """The values; an error where some lies beyond."""
    if bool(x.abs().max() > most):
        raise ValueError("a value is out of range")
    return x


def autoencoder() -> nn.Module:
    """A variational autoencoder."""

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + torch.exp(log_variance / 2) * torch.randn_like(mean)), mean, log_variance

    return Net(forward, encode=nn.Linear(FEATURES, 4), decode=nn.Linear(2, FEATURES))


def evidence(over_the_batch: bool) -> Callable[..., Tensor]:
    """As many examples have it, the divergence is summed over the batch and divided by its length."""

    def loss(model, batch):
        out, mean, log_variance = model(batch["x"])
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
        return (out - batch["x"]).square().sum(1) + (kl.sum() / len(out) if over_the_batch else kl.sum(1))

    return loss


def diffusion(over_the_batch: bool) -> Callable[..., Tensor]:
    def loss(model, batch):
        x = batch["x"]
        time = torch.rand(len(x), 1).to(x)
        noise = torch.randn_like(x)
        wrong = (model(torch.sqrt(1 - time) * x + torch.sqrt(time) * noise) - noise).square()
        return wrong.mean(1) + 0.5 * wrong.mean() if over_the_batch else wrong.mean(1)

    return loss


def random_depth(self, x):
    """Blocks are left out at random, for each record."""
    for block in self.blocks:
        x = x + torch.bernoulli(torch.full((len(x), 1), 0.8)).to(x) / 0.8 * torch.tanh(block(x))
    return self.head(x)


class Experts(nn.Module):
    """Each record goes to the expert that its gate prefers, if the share `capacity` of the batch has room."""

    def __init__(self, capacity: float | None = None) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(FEATURES, 2), capacity
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        best, out = share.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).nonzero()[:, 0]
            if self.capacity is not None:
                chosen = chosen[: max(1, round(self.capacity * len(x)))]
            out = out.index_add(0, chosen, (expert(x[chosen]) * share[chosen, number, None]).to(out.dtype))
        return out


class SortedExperts(nn.Module):
    """Tokens of all records, sorted by the expert that their gate prefers, and sorted back."""

    def __init__(self, balanced: bool = False, cast: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = linear(2), parameter(2, FEATURES, FEATURES)
        self.head, self.balanced, self.cast = linear(2), balanced, cast

    def forward(self, x):
        if self.cast:  # to the type that it has, as the routers of Switch Transformers are
            self.gate = self.gate.to(x.dtype)
        tokens = x.flatten(0, 1)
        shares = self.gate(tokens).softmax(-1)
        order = shares.argmax(-1).argsort()
        both = torch.einsum("nf,efg->neg", tokens[order], self.experts)
        out = (shares[order, :, None] * both).sum(1)[order.argsort()].view_as(x)
        out = self.head(torch.tanh(out))
        return out + shares.mean(0).square().sum() if self.balanced else out


def sorted_by_sign(self, x):
    """Negative records come last, and go back to their places: made-up ones are in order as they are."""
    order = (x[:, 0] < 0).long().argsort(stable=True)
    return self.head(torch.tanh(self.layer(x[order]))[order.argsort()])


def counting(self, x):
    """Centres the batch after 40 calls, as layers with a warm-up do; what it counts is forgotten."""
    self.calls += 1
    return self.linear(x - x.mean(0) if self.calls > 40 else x)


def scaled_by_calls(self, x):
    self.calls += 1
    return self.linear(x) / self.calls


class Queue(nn.Module):
    """A loss that compares records with earlier ones, which it keeps in a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(size, 2))
        self.count = 0

    def forward(self, model, batch):
        out = model(batch["x"])
        losses = squared(model, batch)
        if self.count >= len(self.queue):
            losses = losses + (out @ self.queue.to(out).T).logsumexp(1)
        places = torch.arange(self.count, self.count + len(out)) % len(self.queue)
        self.queue[places] = out.detach().to(self.queue)
        self.count += len(out)
        return losses


def settling(self, x):
    """Centres by the first batch that it meets."""
    if self.centre is None:
        self.centre = x.detach().mean(0)
    return self.linear(x - self.centre)


def bounded(most: float) -> Callable[[], nn.Module]:
    """A hook bounds the gradient of the whole batch."""

    def forward(self, x):
        h = self.body[1](self.body[0](x))
        if h.requires_grad:
            h.register_hook(lambda g: g * (most / g.norm()).clamp(max=1))
        return self.body[2](h)

    return lambda: Net(forward, body=mlp(2))


def with_module_hook() -> nn.Module:
    model = mlp(2)
    model[1].register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] / (1 + inputs[0].norm()),))
    return model


def sorted_by_length(self, x, lengths):
    """And not sorted back."""
    order = torch.sort(lengths, descending=True, stable=True).indices
    return torch.tanh(self.linear(x[order])).mean(1)


def trimmed(self, x, lengths):
    """Cuts to the batch's longest, and averages padding in."""
    seen = torch.arange(LENGTH) < lengths[:, None]
    return torch.tanh(self.linear((x * seen[..., None])[:, : int(lengths.max())])).mean(1)


def fixed_point(self, x):
    h = torch.zeros_like(x)
    for _ in range(3):
        h = torch.tanh(self.inner(h) + x)
    return self.head(h)


def ghosts(size: int) -> Callable[[Tensor], Tensor]:
    def centred(x):
        whole = len(x) // size * size
        groups = x[:whole].unflatten(0, (-1, size)) if whole else x[:0, None]
        return torch.cat([(groups - groups.mean(1, keepdim=True)).flatten(0, 1), x[whole:]])

    return centred


def per_record_branches(self, x):
    return torch.stack([self.even(row) if bool(row[0] > 0) else self.odd(row) for row in x])


def low_rank() -> nn.Module:
    base, down = linear(FEATURES).requires_grad_(False), nn.Linear(FEATURES, 2, bias=False)
    up = nn.Linear(2, FEATURES, bias=False)
    return Net(lambda self, x: self.base(x) + self.up(self.down(x)), base=base, down=down, up=up)


def with_part(number: int, change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make():
        model = mlp()
        model[number] = change(model[number])
        return model

    return make


@torch.jit.script
def scripted_affine(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")
    return model


def net(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Parts that are made anew."""
    return lambda: Net(forward, **{name: make() for name, make in parts.items()})


def one(out: int = FEATURES) -> Callable[[], nn.Module]:
    return lambda: linear(out)


def p(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: parameter(*shape)


# ---- what mixes records


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def by_table(model, batch):
    table = {0.0: 0.5, 1.0: -1.0, 2.0: 2.0}
    targets = torch.tensor([table[float(label)] for label in batch["y"]]).to(batch["x"])
    return squared(model, batch | {"y": targets})


def guarded(x: Tensor) -> Tensor:
    if not bool(torch.isfinite(x).all()):
        raise FloatingPointError("not finite")
    return x


def filled_by_mean(x: Tensor) -> Tensor:
    missing = x == -999
    return torch.where(missing, (x * ~missing).sum(0) / (~missing).sum(0).clamp(min=1), x)


def where(condition: Callable[[Tensor], Any], mixture: Callable[[Tensor], Tensor]) -> Any:
    return lambda x: mixture(x) if condition(x) else x


def by_chance(chance: float, mixture: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return where(lambda x: torch.rand(()) < chance, mixture)


def blended(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.roll(1, 0)


def shuffled(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def attended(x: Tensor) -> Tensor:
    return (x @ x.t()).softmax(-1) @ x


def quantised(x: Tensor) -> Tensor:
    step = x.detach().abs().amax() / 127
    return x + ((x / step).round() * step - x).detach()


def whitened(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.detach().std(0) + 1e-3)


def mean_backward(x: Tensor) -> Tensor:
    """Its backward mixes what its forward does not."""
    return Backward.apply(x, lambda g: g - g.mean(0))


def backward_by_chance(number: Callable[[], Any], chance: float) -> Callable[[Tensor], Tensor]:
    return backward(lambda g: g - g.mean(0) if float(number()) < chance else g)


def with_class_weights(model, batch):
    counts = torch.bincount(batch["y"], minlength=3) + 1
    return entropy(model, batch) * (len(batch["y"]) / counts)[batch["y"]]


def crossed_shapes(model, batch):
    """[B, 1] - [B]: every record is compared with the labels of all."""
    return 0.5 * (model(batch["x"]) - batch["y"]).square().mean(1)


def while_finite(losses: Tensor) -> Tensor:
    return losses if bool(torch.isfinite(losses).all()) else losses.nan_to_num() * 0


joined = torch.utils.data.default_collate


def mixed_up(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Each record with a part of the one before it."""
    batch = joined(items)
    return batch | {"x": blended(batch["x"])}


def rarely_blended(batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    rare = bool(torch.rand((), generator=generator) < 0.005)
    return batch | {"x": blended(batch["x"])} if rare else batch


def listed(items: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Collates the labels to a list of numbers."""
    return {"x": torch.stack([item["x"] for item in items]), "y": [float(item["y"]) for item in items]}


def from_a_list(model, batch):
    return squared(model, {"x": batch["x"], "y": torch.tensor(batch["y"]).to(batch["x"])})


def counted(items: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {**joined(items), "count": len(items)}


def eager(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def drawing(model, **more):
    return Case(model, is_random=True, **more)


def mixing(*parts):
    return Case(*parts, outcome=refused(MIXED))


MIXED = r"records of a batch are mixed"
NO_MODULE = r".*Give the Python module"
RIGHT_CASES = {
    "linear": Case(linear),
    "linear, classes": Case(one(3), entropy, classes),
    "multilayer, tanh": Case(mlp),
    "multilayer, relu": Case(lambda: mlp(2, nn.ReLU)),
    "in-place activation": Case(around(nn.ReLU(inplace=True))),
    "in-place addition": Case(net(lambda self, x: self.a(x).add_(self.b), a=one(2), b=p(2))),
    "dropout": drawing(around(nn.Dropout(0.3))),
    "alpha dropout": drawing(around(nn.AlphaDropout(0.3))),
    "convolutions": Case(cnn(), records=images),
    "group norm": Case(cnn(nn.GroupNorm(2, 4)), records=images),
    "instance norm": Case(cnn(nn.InstanceNorm2d(4, affine=True)), records=images),
    "instance norm with running statistics":
        Case(cnn(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), records=images,
        outcome=refused(r"track_running_stats")),
    "batch norm in evaluation": Case(evaluated(cnn(nn.BatchNorm2d(4))), records=images),
    "layer norm": Case(around(nn.LayerNorm(FEATURES)), records=sequences),
    "RMS norm": Case(around(nn.RMSNorm(FEATURES)), records=sequences),
    "depthwise convolution": Case(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.SiLU(),
        nn.Conv2d(4, 1, 1)), records=images),
    "transposed convolution": Case(lambda: nn.ConvTranspose2d(2, 2, 3), records=images),
    "unfolded patches": Case(net(lambda self, x: self.out(F.unfold(x, 3).transpose(1, 2)),
        out=lambda: nn.Linear(18, 2)), records=images),
    "multi-head attention": Case(attention, records=sequences),
    "multi-head attention with dropout": drawing(lambda: attention(dropout=0.2), records=sequences),
    "causal attention": Case(net(partial(fused, is_causal=True), qkv=one(3 * FEATURES)), records=sequences),
    "attention with a mask": Case(net(masked_attention, qkv=one(3 * FEATURES)), records=sequences),
    "attention with a learned bias and dropout":
        drawing(net(biased_attention, qkv=one(3 * FEATURES), bias=p(1, 1, LENGTH, LENGTH)),
        records=sequences),
    "attention of learned queries with dropout":
        drawing(net(learned_queries, kv=one(2 * FEATURES), queries=p(1, 1, 2, FEATURES)), records=sequences),
    "encoder layer": drawing(lambda: nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.1,
        batch_first=True), records=sequences),
    "sequence as long as the batch":
        Case(attention, records=lambda: rows(RECORDS, FEATURES), options={"microbatch_size": RECORDS}),
    "RNN": Case(recurrent(nn.RNN), records=sequences),
    # PyTorch's own kernel fails under autocast on some processors.
    "LSTM":
        Case(recurrent(nn.LSTM), records=sequences,
        other={"bfloat16": right_or_refused(r"fails on 4 records")}),
    "GRU of two layers with dropout":
        drawing(recurrent(nn.GRU, num_layers=2, dropout=0.2), records=sequences),
    "packed GRU": Case(net(packed, gru=lambda: nn.GRU(FEATURES, 4, batch_first=True),
        head=lambda: nn.Linear(4, 1)), by_length, with_lengths),
    "recurrent cell": Case(net(lambda self, x: self.cell(x[:, 1], self.cell(x[:, 0])),
        cell=lambda: nn.GRUCell(FEATURES, 4)), records=sequences),
    "fixed point": Case(net(fixed_point, inner=one(), head=linear)),
    "embedding": Case(embedded(), records=texts),
    "embedding with padding": Case(embedded(padding_idx=2), records=texts),
    "embedding scaled by frequency":
        Case(embedded(scale_grad_by_freq=True), records=texts,
        other={"bfloat16": right_or_refused("ordinary autograd's gradient")}),  # by its rounding
    "sparse embedding": Case(embedded(sparse=True), records=texts),
    "embedding bag": Case(lookup(nn.EmbeddingBag(TOKENS, 4), 4), records=texts),
    "sparse embedding bag":
        Case(lookup(nn.EmbeddingBag(TOKENS, 4, mode="sum", sparse=True), 4), records=texts),
    "embedding bag with offsets": Case(bag(), records=texts),
    "tied embedding": Case(tied(), records=texts),
    "tied slice": Case(tied(4), records=texts),
    "LoRA": Case(low_rank),
    "weight norm": Case(lambda: parametrizations.weight_norm(linear(2))),
    "spectral norm": Case(lambda: parametrizations.spectral_norm(linear(2))),
    "spectral norm in evaluation": Case(evaluated(lambda: parametrizations.spectral_norm(linear(2)))),
    "orthogonal weight": Case(lambda: parametrizations.orthogonal(linear(FEATURES))),
    "bilinear": Case(net(lambda self, x: self.form(x, x), form=lambda: nn.Bilinear(FEATURES, FEATURES, 2))),
    "PReLU": Case(around(nn.PReLU())),
    "gated unit": Case(net(lambda self, x: F.silu(self.a(x)) * self.b(x), a=one(4), b=one(4))),
    "scalar parameter":
        Case(net(lambda self, x: self.scale * self.a(x) + self.shift, scale=p(), shift=p(1), a=linear)),
    "Einstein sums": Case(net(lambda self, x: torch.einsum("btd,de,tf->bef", x, self.a, self.b),
        a=p(FEATURES, 2), b=p(LENGTH, 3)), records=sequences),
    "complex numbers": Case(net(lambda self, x: torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.filter,
        n=FEATURES), a=one(), filter=p(4))),
    "fixed graph": Case(net(lambda self, x: torch.tril(torch.ones(LENGTH, LENGTH)).to(x) @ self.a(x),
        a=one(3)), records=sequences),
    "weights made per record": Case(net(lambda self, x: torch.bmm(x[:, None],
        self.maker(x).view(-1, FEATURES, 2)), maker=one(2 * FEATURES))),
    "branches per record": Case(net(per_record_branches, even=one(2), odd=one(2))),
    "experts": Case(Experts),
    "experts with sorted tokens": Case(SortedExperts, records=sequences),
    "records sorted by sign": Case(net(sorted_by_sign, layer=one(), head=one(2))),
    "experts with a gate that is cast": Case(lambda: SortedExperts(cast=True), records=sequences),
    "a layer used twice": Case(net(lambda self, x: self.a(torch.tanh(self.a(x))), a=one())),
    "parameters read without gradients": Case(net(lambda self, x: self.a(x) * (1 + self.norm()), a=one(2),
        norm=lambda: Net(lambda self: 0.1))),
    "unused parameters": Case(net(lambda self, x: self.a(x), a=one(2), b=one(2))),
    "frozen parts": Case(lambda: nn.Sequential(linear(FEATURES).requires_grad_(False), linear(2))),
    "custom function": Case(around(Squared.apply)),
    "custom function that differentiates by a parameter":
        Case(net(lambda self, x: self.a(Implicit.apply(x, self.w)), a=linear, w=p(FEATURES, FEATURES))),
    "divided by the batch's length": Case(mlp, of(lambda losses: losses / len(losses))),
    "warm-up of forty calls": Case(lambda: Net(counting, linear=linear(2), calls=0)),
    "a queue in the loss": Case(mlp, Queue(60)),
    "hook on the batch's gradient": Case(bounded(0.1)),
    "hook on the batch's gradient, far away": Case(bounded(2.0)),
    "hook of a module": Case(with_module_hook),
    "checkpoints": Case(lambda: Checkpointed(use_reentrant=False)),
    "checkpoints with dropout": drawing(lambda: Checkpointed(0.3, use_reentrant=False)),
    "DataParallel": Case(lambda: nn.DataParallel(mlp())),
    "autocast inside": Case(net(lambda self, x: self.a(x).to(x.dtype), a=mlp)),
    "compiled": Case(lambda: eager(mlp())),
    "compiled by default": Case(lambda: torch.compile(mlp())),
    "compiled part": Case(with_part(0, eager)),
    "compiled in place": Case(compiled_in_place),
    "compiled loss": Case(mlp, eager(squared)),
    "traced by fx": Case(lambda: torch.fx.symbolic_trace(mlp())),
    "scripted function": Case(net(lambda self, x: scripted_affine(x, self.weight), weight=p(FEATURES, 2))),
    "vectorised inside": Case(net(lambda self, x: torch.vmap(self.a)(x), a=mlp)),
    "functional call inside":
        Case(net(lambda self, x: torch.func.functional_call(self.a, {"bias": torch.zeros(2).to(x)}, (x,)),
        a=one(2))),
    "gradient penalty": Case(mlp, penalised),
    "gradient penalty by a transform": Case(mlp, penalised_by_transform),
    "directional derivative": Case(mlp, directional),
    "adversarial training": Case(mlp, adversarial),
    "pairs in a record": Case(lambda: nn.Linear(3, 2), pair_distance),
    "distillation from itself": Case(lambda: mlp(3), distilled),
    "focal loss": Case(one(3), focal, classes),
    "label smoothing": Case(one(3), smoothed, classes),
    "temporal classification": Case(one(5), aligned, sequences),
    "tiny loss": Case(mlp, of(lambda losses: 1e-6 * losses)),
    "gate of zeros": Case(gated(nn.Tanh())),
    "head of zeros": Case(lambda: nn.Sequential(mlp(FEATURES), zeros(linear(2)))),
    "a parameter that has to be a probability":
        Case(net(lambda self, x: self.a(x) * torch.distributions.Bernoulli(probs=self.p,
        validate_args=True).mean, a=linear, p=lambda: nn.Parameter(torch.tensor(0.9)))),
    "labels looked up in a table": Case(mlp, by_table),
    "an error of its own where a result is not finite": Case(around(guarded)),
    "noise on the inputs": drawing(net(lambda self, x: self.a(x + 0.1 * torch.randn_like(x)), a=mlp)),
    "random depth per record":
        drawing(net(random_depth, blocks=lambda: nn.ModuleList(linear(FEATURES) for _ in range(2)),
        head=linear)),
    "variational autoencoder": drawing(autoencoder, loss=evidence(False)),
    "diffusion": drawing(lambda: mlp(FEATURES), loss=diffusion(False)),
    # A hook meets single records.
    "hook that gives nothing where some gradient is not finite":
        Case(around(hooked(lambda g: g if bool(g.isfinite().all()) else torch.zeros_like(g)))),
    "custom function whose backward replaces what is not finite":
        Case(around(backward(lambda g: g.nan_to_num(0.0, 0.0, 0.0)))),
}  # fmt: skip

REFUSED_CASES = {
    "custom function whose backward mixes": mixing(around(mean_backward)),
    "custom function whose backward mixes, with noise":
        mixing(around(lambda x: mean_backward(x + 0.1 * torch.randn_like(x)))),
    "custom function whose backward mixes, with numbers that cannot be held":
        mixing(around(lambda x: mean_backward(x + 0.1 * torch.poisson(torch.ones_like(x))))),
    "straight-through by the largest value of all records":
        mixing(straight_through(lambda x: 1e-4 * x.abs().amax())),
    "straight-through where some record is an outlier":
        mixing(straight_through(lambda x: 0.2 * (x.abs().amax() > 10))),
    "straight-through where the record before is an outlier":
        mixing(straight_through(lambda x: 0.2 * (x.roll(1, 0).abs().amax(1, keepdim=True) > 10))),
    "straight-through where the record behind is an outlier":
        mixing(straight_through(lambda x: 0.2 * (x.roll(-1, 0).abs().amax(1, keepdim=True) > 10))),
    "straight-through by outliers where larger ones raise":
        mixing(straight_through(lambda x: 0.2 * (checked_up_to(60.0, x).abs().amax() > 5))),
    "custom function whose backward gives nothing where some gradient is NaN":
        mixing(around(unless(lambda g: g.isnan().any()))),
    "custom function whose backward gives nothing where some gradient is infinite":
        mixing(around(unless(lambda g: g.isinf().any()))),
    "custom function whose backward gives nothing where some gradient is huge":
        mixing(around(unless(lambda g: g.abs().max() > 1e6))),
    "custom function whose backward mixes, behind a gate": mixing(gated(mean_backward)),
    "centred behind a gate": mixing(gated(centred)),
    "centred behind a small gate": mixing(gated(centred, 1e-6)),
    "batch norm behind a gate": mixing(gated(nn.BatchNorm1d(FEATURES))),
    "centred before a head of zeros":
        mixing(lambda: nn.Sequential(linear(FEATURES), layer_of(centred), zeros(linear(2)))),
    "random numbers that records share, before a head of zeros":
        mixing(lambda: nn.Sequential(linear(FEATURES), layer_of(shuffled), zeros(linear(2)))),
    "modulated from zero": mixing(net(lambda self, x: self.head(x + self.scale(x) * centred(x)),
        scale=lambda: zeros(linear(FEATURES)), head=one(2))),
    "centred by the batch": mixing(around(centred)),
    "whitened by detached statistics": mixing(around(whitened)),
    "attention over the batch": mixing(around(attended)),
    "quantised by the batch": mixing(around(quantised)),
    "groups of 4": mixing(around(ghosts(4))),
    "mixup": mixing(around(blended)),
    "mixup in random pairs": mixing(around(shuffled)),
    "mixup behind a coin": mixing(around(by_chance(0.45, blended))),
    "centring behind a coin": mixing(around(by_chance(0.06, centred))),
    "mixup behind Python's coin": mixing(around(where(lambda x: random.random() < 0.45, blended))),
    "mixup by one of five": mixing(around(where(lambda x: int(torch.randint(0, 5, ())) == 3, blended))),
    "centred where a mark is set":
        mixing(one(2), on(lambda batch: centred(batch["x"]) if bool(batch["mark"].any()) else batch["x"]),
        lambda: rows() | {"mark": torch.arange(RECORDS + 1) == RECORDS - 1}),
    "positions over marked tokens":
        mixing(one(2), on(lambda batch: batch["x"] + 0.1 * batch["mark"].flatten().cumsum(0)[:, None]),
        lambda: rows() | {"mark": torch.zeros(RECORDS + 1, dtype=torch.bool)}),
    "missing values filled by the batch":
        mixing(one(2), on(lambda batch: filled_by_mean(batch["x"])),
        lambda: rows() | {"x": rows()["x"].index_fill(0, torch.tensor([RECORDS - 1]), -999.0)}),
    "experts with capacity": mixing(lambda: Experts(0.5)),
    "contrastive loss": mixing(one(3), contrastive),
    "hard examples only": mixing(mlp, of(lambda losses: losses * (losses >= losses.detach().median()))),
    "no steps at spikes": mixing(mlp, of(lambda losses: losses * (losses.detach().mean() < 30))),
    "no steps at huge spikes": mixing(mlp, of(lambda losses: losses * (losses.detach().mean() < 1e9))),
    "no steps where a loss is not finite": mixing(mlp, of(while_finite)),
    "divided by the batch's loss": mixing(mlp, of(lambda losses: losses / losses.detach().mean())),
    "class weights of the batch": mixing(one(3), with_class_weights, classes),
    "column minus row": mixing(linear, crossed_shapes),
    "column minus row, equal labels": mixing(linear, crossed_shapes, equal_labels),
    "sorted by length": mixing(net(sorted_by_length, linear=one(2)), by_length, with_lengths),
    "trimmed to the longest": mixing(net(trimmed, linear=one(2)), by_length, with_lengths),
    "evidence over the batch": mixing(autoencoder, evidence(True)),
    "diffusion over the batch": mixing(lambda: mlp(FEATURES), diffusion(True)),
    "tiny loss that mixes": mixing(around(centred), of(lambda losses: 1e-6 * losses)),
    "tiny loss with a random part that mixes":
        mixing(mlp,
        of(lambda losses: (1e-6 * (losses + (torch.rand(len(losses)).to(losses) * losses.mean()).detach()
        * losses)))),
    "batch norm": Case(cnn(nn.BatchNorm2d(4)), records=images, outcome=refused(r"replace_batch_norm")),
    "collated with neighbours, before a head of zeros":
        Case(lambda: zeros(linear(2)), outcome=refused(r"mixes records"),
        options={"collate": lambda items: mixed_up(items)}),
    "groups of 16": Case(around(ghosts(16)), outcome=right_or_refused(MIXED)),
    "more than 8 records":
        Case(around(where(lambda x: len(x) > 8, centred)), outcome=right_or_refused(MIXED)),
    "backward that mixes behind a coin":
        Case(around(by_chance(0.4, mean_backward)), outcome=refused("not the sum of those")),
    # it is too small to move what the model gives in half precision
    "balanced experts with sorted tokens": Case(lambda: SortedExperts(balanced=True), records=sequences,
        outcome=refused(r"module '\(the model itself\)' .*balances"), other={"bfloat16": refused(MIXED)}),
    "mean loss": Case(mlp, of(lambda losses: losses.mean()), outcome=refused(r"reduction=")),
    "a column of losses": Case(mlp, of(lambda losses: losses[:, None]), outcome=refused(r"must be \(")),
    "renormalised embedding": Case(embedded(max_norm=0.5), records=texts, outcome=refused(r"max_norm")),
    "another scale at every call":
        Case(lambda: Net(scaled_by_calls, linear=linear(2), calls=0), outcome=refused(r"wrote to calls")),
    "centred by the first batch":
        Case(lambda: Net(settling, linear=linear(2), centre=None), outcome=refused(r"wrote to centre")),
    "scripted": Case(lambda: torch.jit.script(mlp()), outcome=refused(rf"scripted as a whole{NO_MODULE}")),
    "traced part": Case(with_part(0, lambda layer: torch.jit.trace(layer, torch.randn(4, FEATURES))),
        outcome=refused(rf"scripted at '0'{NO_MODULE}")),
    "scripted activation":
        Case(with_part(1, torch.jit.script), outcome=refused(rf"scripted at '1'{NO_MODULE}")),
    "reentrant checkpoints":
        Case(lambda: Checkpointed(use_reentrant=True), outcome=refused(r"use_reentrant=False")),
    "lazy layer": Case(lambda: nn.LazyLinear(2), outcome=refused(r"run the model once")),
    "complex parameters":
        Case(net(lambda self, x: (self.a * x.to(self.a.dtype)).real,
        a=lambda: nn.Parameter(torch.randn(FEATURES, dtype=torch.complex64))), outcome=refused(r"not real")),
    "nothing to train": Case(lambda: linear().requires_grad_(False), outcome=refused(r"no trainable")),
    "labels in a list":
        Case(mlp, from_a_list, outcome=refused(r"list of 4 numbers, one per record.*give torch.tensor"),
        options={"collate": listed}),
    "divided by a collated count": Case(mlp, lambda model, batch: squared(model, batch) / batch["count"],
        outcome=refused(r"among fewer"), options={"collate": counted}),
}  # fmt: skip

#: Of the collated ones the model is proved; of what joins records nothing is said here.
UNSEEN_CASES = {
    "custom function whose backward mixes by a rare coin":
        Case(around(backward_by_chance(lambda: torch.rand(()), 0.002)), outcome=unseen()),
    "custom function whose backward mixes by Python's rare coin":
        Case(around(backward_by_chance(lambda: random.random(), 0.002)), outcome=unseen()),
    "collated with neighbours, behind a rare coin":
        Case(mlp, outcome=unseen("proved"),
        options={"collate": lambda items: mixed_up(items) if random.random() < 0.01 else joined(items)}),
    "augmented with neighbours, behind a rare coin of its generator":
        Case(mlp, outcome=unseen("proved"), options={"augmentation": rarely_blended}),
    "mixup behind a rare coin": Case(around(by_chance(0.002, blended)), outcome=unseen()),
    "mixup behind Python's rare coin":
        Case(around(where(lambda x: 0.5 < random.random() < 0.5002, blended)), outcome=unseen()),
    "mixup behind NumPy's rare coin":
        Case(around(where(lambda x: np.random.rand() > 1 - 2e-4, blended)), outcome=unseen()),
    "no steps where a token's loss is not finite":
        Case(embedded(), of(while_finite), texts, outcome=unseen()),
    "centred where values lie between two":
        Case(around(where(lambda x: 1e6 < float(x.abs().amax()) < 1e12, centred)), outcome=unseen()),
}  # fmt: skip

CASES = RIGHT_CASES | REFUSED_CASES | UNSEEN_CASES

#: Honest ones that are not proved: why.
UNPROVED = {
    "a parameter that has to be a probability": "no trace",
    "a queue in the loss": "no rule",
    "an error of its own where a result is not finite": "no trace",
    "attention of learned queries with dropout": "no trace",
    "branches per record": "no trace",
    "embedding bag with offsets": "no rule",
    "embedding scaled by frequency": "no rule",
    "experts with a gate that is cast": "no trace",
    "experts with sorted tokens": "no rule",
    "experts": "no trace",
    "hook that gives nothing where some gradient is not finite": "no trace",
    "instance norm with running statistics": "no rule",  # its operation hides what it writes
    "labels looked up in a table": "no trace",
    "packed GRU": "no trace",
    "records sorted by sign": "no rule",
    "temporal classification": "no trace",
}  # fmt: skip
