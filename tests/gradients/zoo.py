"""A table of small models, each with its loss, its records, and what must come of training on them.

RIGHT: the sum of clipped gradients is that of a loop over single records. `refused(text)`: the training does
not begin, and the error says what is wrong and what to do. `unseen(word)`: the mixture shows only on records
or random numbers that were not met, and this is what is said of the model. Nothing else is wrong in silence.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

RECORDS, FEATURES, LENGTH, TOKENS = 15, 6, 5, 11


@dataclass(frozen=True)
class Outcome:
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
    loss: Callable[..., Tensor]
    records: Callable[[], Mapping[str, Tensor]]
    outcome: Outcome = RIGHT
    other: Mapping[str, Outcome] = field(default_factory=dict)
    is_random: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


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


def entropy(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def by_length(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return 0.5 * (model(batch["x"], batch["n"]).flatten(1).sum(1) - batch["y"]).square()


def of(change: Callable[[Tensor, Mapping[str, Tensor]], Tensor]) -> Callable[..., Tensor]:
    """A loss that changes the per-record losses."""
    return lambda model, batch: change(squared(model, batch), batch)


def penalised(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """With the gradient penalty of a Wasserstein critic."""
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return 0.5 * (out.squeeze(1) - batch["y"]).square() + (slope.norm(dim=1) - 1).square()


def penalised_by_transform(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    slopes = torch.vmap(torch.func.grad(lambda x: model(x[None])[0, 0]))(batch["x"])
    return squared(model, batch) + (slopes.norm(dim=1) - 1).square()


def directional(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    x = batch["x"]
    _, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return squared(model, batch) + slope.squeeze(1).square()


def adversarial(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Trained on records moved along the sign of their own gradient."""
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(squared(model, {**batch, "x": x}).sum(), x)
    return squared(model, {**batch, "x": batch["x"] + 0.1 * slope.sign()})


def contrastive(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(out @ out.t() / 0.1, torch.arange(len(out)), reduction="none")


def pair_distance(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Both halves of a record through one model."""
    left, right = batch["x"].chunk(2, dim=1)
    return (model(left) - model(right)).square().sum(1)


def distilled(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The teacher is the model itself, without gradients."""
    with torch.no_grad():
        target = model(batch["x"]).softmax(1)
    return F.kl_div(model(batch["x"] + 0.1).log_softmax(1), target, reduction="none").sum(1)


def focal(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    losses = entropy(model, batch)
    return (1 - torch.exp(-losses)) ** 2 * losses


def smoothed(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none", label_smoothing=0.1)


def aligned(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Connectionist temporal classification."""
    out = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    count = len(batch["x"])
    targets = batch["y"].long()[:, None] + 1
    lengths = torch.full((count,), LENGTH), torch.ones(count, dtype=torch.long)
    return F.ctc_loss(out.float(), targets, *lengths, reduction="none")


# ---- models


class Net(nn.Module):
    """Parts by name, and a forward that uses them."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self, *inputs)


def linear(out: int = 1) -> nn.Module:
    return nn.Linear(FEATURES, out)


def mlp(out: int = 1, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), activation(), nn.Linear(8, out))


def around(layer: Callable[[Tensor], Tensor] | nn.Module) -> Callable[[], nn.Module]:
    """A layer, or a function, between two linear layers."""

    def make() -> nn.Module:
        inner = copy.deepcopy(layer) if isinstance(layer, nn.Module) else Net(lambda self, x: layer(x))
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), inner, nn.Linear(FEATURES, 2))

    return make


def cnn(*norm: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), *copy.deepcopy(norm), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


def evaluated(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().eval()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.body = kind(FEATURES, 4, batch_first=True, **options)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(FEATURES, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class FusedAttention(nn.Module):
    """Scaled dot products, causal or with a mask per record."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(FEATURES, 3 * FEATURES), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        seen = x[:, None, None, :, 0] > -1.5
        seen = seen | ~seen.any(-1, keepdim=True)
        mask = {"is_causal": True} if self.causal else {"attn_mask": seen}
        return F.scaled_dot_product_attention(q, k, v, **mask)


class Tied(nn.Module):
    """The head is the embedding, or a slice of it."""

    def __init__(self, rows: int = TOKENS) -> None:
        super().__init__()
        self.embedding, self.rows = nn.Embedding(TOKENS, FEATURES), rows

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.embedding(x)) @ self.embedding.weight[: self.rows].t()


class Bag(nn.Module):
    """Looks up a batch as one long list with offsets."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(TOKENS, 4, **options), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x.flatten(), torch.arange(len(x)) * x.shape[1]))


def lookup(layer: nn.Module, width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(copy.deepcopy(layer), nn.Flatten(), nn.Linear(width, 1))


class Checkpointed(nn.Module):
    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.before, self.drop, self.options = nn.Linear(FEATURES, FEATURES), nn.Dropout(dropout), options

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
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


class MeanBackward(torch.autograd.Function):
    """Its backward mixes what its forward does not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


class GuardedBackward(torch.autograd.Function):
    """Its backward gives nothing to any record where `is_spoilt` says so of the whole gradient."""

    @staticmethod
    def forward(ctx, x, is_spoilt):
        ctx.is_spoilt = is_spoilt
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g) if bool(ctx.is_spoilt(g)) else g, None


class NumbersBackward(torch.autograd.Function):
    """Its backward looks at single numbers."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.nan_to_num(0.0, 0.0, 0.0)


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity, whose gradient a hook changes."""

    def layer(x: Tensor) -> Tensor:
        out = x.clone()
        if out.requires_grad:
            out.register_hook(hook)
        return out

    return layer


def straight_through(factor: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity, whose backward multiplies by 1 + factor(x): no loss shows it."""

    def layer(x: Tensor) -> Tensor:
        return x + factor(x.detach()) * (x - x.detach())

    return layer


def checked_up_to(most: float, x: Tensor) -> Tensor:
    """The values; an error where some lies beyond."""
    if bool(x.abs().max() > most):
        raise ValueError("a value is out of range")
    return x


class MeanBackwardByChance(torch.autograd.Function):
    """Its backward mixes where a random number of its own says so."""

    @staticmethod
    def forward(ctx, x, number, chance):
        ctx.number, ctx.chance = number, chance
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0) if float(ctx.number()) < ctx.chance else g, None, None


class Autoencoder(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, 4), nn.Linear(2, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + torch.exp(log_variance / 2) * torch.randn_like(mean)), mean, log_variance


def evidence(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out, mean, log_variance = model(batch["x"])
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
    return (out - batch["x"]).square().sum(1) + kl.sum(1)


def evidence_over_the_batch(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """As many examples have it: the divergence is summed over the batch and divided by its length."""
    out, mean, log_variance = model(batch["x"])
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
    return (out - batch["x"]).square().sum(1) + kl.sum() / len(out)


def diffusion(over_the_batch: bool) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"]
        time = torch.rand(len(x), 1).to(x)
        noise = torch.randn_like(x)
        wrong = (model(torch.sqrt(1 - time) * x + torch.sqrt(time) * noise) - noise).square()
        return wrong.mean(1) + 0.5 * wrong.mean() if over_the_batch else wrong.mean(1)

    return loss


class RandomDepth(nn.Module):
    """Blocks are left out at random, for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(linear(FEATURES) for _ in range(2)), linear()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.bernoulli(torch.full((len(x), 1), 0.8)).to(x) / 0.8 * torch.tanh(block(x))
        return self.head(x)


class Experts(nn.Module):
    """Each record goes to the expert that its gate prefers, if there is room.

    Args:
        capacity: the share of the batch that an expert takes; None for all.
    """

    def __init__(self, capacity: float | None = None) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(FEATURES, 2), capacity
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
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

    def __init__(self, balanced: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = linear(2), parameter(2, FEATURES, FEATURES)
        self.head, self.balanced = linear(2), balanced

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares = self.gate(tokens).softmax(-1)
        order = shares.argmax(-1).argsort()
        both = torch.einsum("nf,efg->neg", tokens[order], self.experts)
        out = (shares[order, :, None] * both).sum(1)[order.argsort()].view_as(x)
        out = self.head(torch.tanh(out))
        return out + shares.mean(0).square().sum() if self.balanced else out


class SortedBySign(nn.Module):
    """Negative records come last, and go back to their places: made-up ones are in order as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = linear(FEATURES), linear(2)

    def forward(self, x: Tensor) -> Tensor:
        order = (x[:, 0] < 0).long().argsort(stable=True)
        return self.head(torch.tanh(self.layer(x[order]))[order.argsort()])


class CastExperts(SortedExperts):
    """The gate is cast to the type that it has, as the routers of Switch Transformers are."""

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(x.dtype)
        return super().forward(x)


class Counting(nn.Module):
    """Centres the batch after `start` calls, as layers with a warm-up do; what it counts is forgotten."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.linear, self.calls, self.start = nn.Linear(FEATURES, 2), 0, start

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x - x.mean(0) if self.calls > self.start else x)


class Scaled(nn.Module):
    """Another scale at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(FEATURES, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


class Bank(nn.Module):
    """Compares records with those of earlier batches, once there are enough of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.size, self.kept = nn.Linear(FEATURES, 2), size, []

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.kept += list(out.detach())
        return out - torch.stack(self.kept[-self.size :]).mean(0) if len(self.kept) > self.size else out


class SharedBank(nn.Module):
    """The same, in a list of its class."""

    kept: ClassVar[dict[str, list[Tensor]]] = defaultdict(list)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(FEATURES, 2), size

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        known = self.kept["outputs"]
        known += list(out.detach())
        return out - torch.stack(known[-self.size :]).mean(0) if len(known) > self.size else out


class Hooking(nn.Module):
    """Every forward adds a hook, and after `most` of them the outputs are others."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(FEATURES, 2), most

    def forward(self, x: Tensor) -> Tensor:
        self.linear.register_forward_hook(
            lambda module, given, out: 1.1 * out if len(module._forward_hooks) > self.most else out
        )
        return self.linear(x)


class Queue(nn.Module):
    """A loss that compares records with earlier ones, which it keeps in a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(size, 2))
        self.count = 0

    def forward(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        losses = squared(model, batch)
        if self.count >= len(self.queue):
            losses = losses + (out @ self.queue.to(out).T).logsumexp(1)
        places = torch.arange(self.count, self.count + len(out)) % len(self.queue)
        self.queue[places] = out.detach().to(self.queue)
        self.count += len(out)
        return losses


class Settling(nn.Module):
    """Centres by the first batch that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.centre = nn.Linear(FEATURES, 2), None

    def forward(self, x: Tensor) -> Tensor:
        if self.centre is None:
            self.centre = x.detach().mean(0)
        return self.linear(x - self.centre)


class Guarded(nn.Module):
    """A hook bounds the gradient of the whole batch."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.body, self.most = mlp(2), most

    def forward(self, x: Tensor) -> Tensor:
        h = self.body[1](self.body[0](x))
        if h.requires_grad:
            h.register_hook(lambda g: g * (self.most / g.norm()).clamp(max=1))
        return self.body[2](h)


def with_module_hook() -> nn.Module:
    model = mlp(2)
    model[1].register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] / (1 + inputs[0].norm()),))
    return model


class Sorted(nn.Module):
    """Sorts by length, and does not sort back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = torch.sort(lengths, descending=True, stable=True).indices
        return torch.tanh(self.linear(x[order])).mean(1)


class Trimmed(nn.Module):
    """Cuts to the batch's longest, and averages padding in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        seen = torch.arange(LENGTH) < lengths[:, None]
        return torch.tanh(self.linear((x * seen[..., None])[:, :longest])).mean(1)


def fixed_point(self: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for _ in range(3):
        h = torch.tanh(self.inner(h) + x)
    return self.head(h)


def generated(self: Net, x: Tensor) -> Tensor:
    """A weight for every record, made by a network."""
    weights = self.maker(x).view(-1, FEATURES, 2)
    return torch.bmm(x[:, None], weights)


def ghosts(size: int) -> Callable[[Tensor], Tensor]:
    def centred(x: Tensor) -> Tensor:
        whole = len(x) // size * size
        groups = x[:whole].unflatten(0, (-1, size)) if whole else x[:0, None]
        return torch.cat([(groups - groups.mean(1, keepdim=True)).flatten(0, 1), x[whole:]])

    return centred


def biased_attention(self: Net, x: Tensor) -> Tensor:
    """Its bias by position is a parameter, as T5's is, and goes into the scores inside the kernel."""
    return F.scaled_dot_product_attention(*self.qkv(x)[:, None].chunk(3, -1), self.bias, dropout_p=0.2)


def learned_queries(self: Net, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(self.queries, *self.kv(x)[:, None].chunk(2, -1), dropout_p=0.2)


def per_record_branches(self: Net, x: Tensor) -> Tensor:
    return torch.stack([self.even(row) if bool(row[0] > 0) else self.odd(row) for row in x])


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.1, batch_first=True)


def low_rank() -> nn.Module:
    base = linear(FEATURES).requires_grad_(False)
    return Net(
        lambda self, x: self.base(x) + self.up(self.down(x)),
        base=base,
        down=nn.Linear(FEATURES, 2, bias=False),
        up=nn.Linear(2, FEATURES, bias=False),
    )


def vision_transformer() -> nn.Module:
    def forward(self: Net, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.block(tokens)[:, 0])

    return Net(
        forward,
        patches=nn.Conv2d(2, FEATURES, 3, stride=3),
        token=parameter(1, 1, FEATURES),
        places=parameter(1, 5, FEATURES),
        block=nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True),
        head=nn.Linear(FEATURES, 2),
    )


def unet() -> nn.Module:
    def forward(self: Net, x: Tensor) -> Tensor:
        low = torch.relu(self.down(x))
        return self.out(torch.cat([self.up(low), x], 1))

    return Net(
        forward,
        down=nn.Conv2d(2, 4, 2, stride=2),
        up=nn.ConvTranspose2d(4, 2, 2, stride=2),
        out=nn.Conv2d(4, 1, 1),
    )


def scripted() -> nn.Module:
    return torch.jit.script(mlp())


def traced_part() -> nn.Module:
    model = mlp()
    model[0] = torch.jit.trace(model[0], torch.randn(4, FEATURES))
    return model


def scripted_part_without_parameters() -> nn.Module:
    model = mlp()
    model[1] = torch.jit.script(model[1])
    return model


@torch.jit.script
def scripted_affine(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def compiled_part() -> nn.Module:
    model = mlp()
    model[0] = torch.compile(model[0], backend="eager")
    return model


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")
    return model


def traced_by_fx() -> nn.Module:
    return torch.fx.symbolic_trace(mlp())


# ---- what mixes records


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def by_table(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
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


def gated(layer: Callable[[Tensor], Tensor] | nn.Module, start: float = 0.0) -> Callable[[], nn.Module]:
    """A layer beside the identity, behind a gate that begins closed."""

    def forward(self: Net, x: Tensor) -> Tensor:
        x = self.tail(x)
        return self.head(x + self.gate * self.layer(x))

    return lambda: Net(
        forward,
        tail=linear(FEATURES),
        layer=copy.deepcopy(layer) if isinstance(layer, nn.Module) else Net(lambda self, x: layer(x)),
        gate=nn.Parameter(torch.full((FEATURES,), start)),
        head=linear(2),
    )


def zeros(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


def by_chance(chance: float, mixture: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: mixture(x) if torch.rand(()) < chance else x


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


def with_class_weights(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    counts = torch.bincount(batch["y"], minlength=3) + 1
    return entropy(model, batch) * (len(batch["y"]) / counts)[batch["y"]]


def crossed_shapes(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """[B, 1] - [B]: every record is compared with the labels of all."""
    return 0.5 * (model(batch["x"]) - batch["y"]).square().mean(1)


def mined(losses: Tensor, batch: Any) -> Tensor:
    return losses * (losses >= losses.detach().median())


def while_finite(losses: Tensor, batch: Any) -> Tensor:
    return losses if bool(torch.isfinite(losses).all()) else losses.nan_to_num() * 0


def without_spikes(losses: Tensor, batch: Any) -> Tensor:
    return losses * (losses.detach().mean() < 30)


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


def from_a_list(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return squared(model, {"x": batch["x"], "y": torch.tensor(batch["y"]).to(batch["x"])})


def counted(items: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {**torch.utils.data.default_collate(items), "count": len(items)}


MIXED = r"records of a batch are mixed"
RIGHT_CASES = {
    "linear": Case(linear, squared, rows),
    "linear, classes": Case(lambda: linear(3), entropy, classes),
    "multilayer, tanh": Case(mlp, squared, rows),
    "multilayer, relu": Case(lambda: mlp(2, nn.ReLU), squared, rows),
    "in-place activation": Case(around(nn.ReLU(inplace=True)), squared, rows),
    "in-place addition": Case(
        lambda: Net(lambda self, x: self.a(x).add_(self.b), a=linear(2), b=parameter(2)), squared, rows
    ),
    "dropout": Case(around(nn.Dropout(0.3)), squared, rows, is_random=True),
    "alpha dropout": Case(around(nn.AlphaDropout(0.3)), squared, rows, is_random=True),
    "convolutions": Case(cnn(), squared, images),
    "group norm": Case(cnn(nn.GroupNorm(2, 4)), squared, images),
    "instance norm": Case(cnn(nn.InstanceNorm2d(4, affine=True)), squared, images),
    "instance norm with running statistics": Case(
        cnn(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        squared,
        images,
        refused(r"track_running_stats"),
    ),
    "batch norm in evaluation": Case(evaluated(cnn(nn.BatchNorm2d(4))), squared, images),
    "layer norm": Case(around(nn.LayerNorm(FEATURES)), squared, sequences),
    "RMS norm": Case(around(nn.RMSNorm(FEATURES)), squared, sequences),
    "depthwise convolution": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.SiLU(), nn.Conv2d(4, 1, 1)), squared, images
    ),
    "transposed convolution": Case(lambda: nn.ConvTranspose2d(2, 2, 3), squared, images),
    "unfolded patches": Case(
        lambda: Net(lambda self, x: self.out(F.unfold(x, 3).transpose(1, 2)), out=nn.Linear(18, 2)),
        squared,
        images,
    ),
    "U-net": Case(unet, squared, images),
    "vision transformer": Case(vision_transformer, squared, images),
    "multi-head attention": Case(Attention, squared, sequences),
    "multi-head attention with dropout": Case(
        lambda: Attention(dropout=0.2), squared, sequences, is_random=True
    ),
    "causal attention": Case(lambda: FusedAttention(True), squared, sequences),
    "attention with a mask": Case(lambda: FusedAttention(False), squared, sequences),
    "attention with a learned bias and dropout": Case(
        lambda: Net(biased_attention, qkv=linear(3 * FEATURES), bias=parameter(1, 1, LENGTH, LENGTH)),
        squared,
        sequences,
        is_random=True,
    ),
    "attention of learned queries with dropout": Case(
        lambda: Net(learned_queries, kv=linear(2 * FEATURES), queries=parameter(1, 1, 2, FEATURES)),
        squared,
        sequences,
        is_random=True,
    ),
    "encoder layer": Case(transformer, squared, sequences, is_random=True),
    "sequence as long as the batch": Case(
        Attention, squared, lambda: rows(RECORDS, FEATURES), options={"microbatch_size": RECORDS}
    ),
    "RNN": Case(lambda: Recurrent(nn.RNN), squared, sequences),
    # PyTorch's own kernel fails under autocast on some processors.
    "LSTM": Case(
        lambda: Recurrent(nn.LSTM),
        squared,
        sequences,
        other={"bfloat16": right_or_refused(r"fails on 4 records")},
    ),
    "GRU of two layers with dropout": Case(
        lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.2), squared, sequences, is_random=True
    ),
    "packed GRU": Case(Packed, by_length, with_lengths),
    "recurrent cell": Case(
        lambda: Net(lambda self, x: self.cell(x[:, 1], self.cell(x[:, 0])), cell=nn.GRUCell(FEATURES, 4)),
        squared,
        sequences,
    ),
    "fixed point": Case(lambda: Net(fixed_point, inner=linear(FEATURES), head=linear()), squared, rows),
    "embedding": Case(lookup(nn.Embedding(TOKENS, 4), 20), squared, texts),
    "embedding with padding": Case(lookup(nn.Embedding(TOKENS, 4, padding_idx=2), 20), squared, texts),
    "embedding scaled by frequency": Case(
        lookup(nn.Embedding(TOKENS, 4, scale_grad_by_freq=True), 20),
        squared,
        texts,
        other={"bfloat16": right_or_refused("ordinary autograd's gradient")},  # by its rounding
    ),
    "sparse embedding": Case(lookup(nn.Embedding(TOKENS, 4, sparse=True), 20), squared, texts),
    "embedding bag": Case(lookup(nn.EmbeddingBag(TOKENS, 4), 4), squared, texts),
    "sparse embedding bag": Case(
        lookup(nn.EmbeddingBag(TOKENS, 4, mode="sum", sparse=True), 4), squared, texts
    ),
    "embedding bag with offsets": Case(Bag, squared, texts),
    "sparse embedding bag with offsets": Case(lambda: Bag(sparse=True), squared, texts),
    "tied embedding": Case(Tied, squared, texts),
    "tied slice": Case(lambda: Tied(4), squared, texts),
    "LoRA": Case(low_rank, squared, rows),
    "weight norm": Case(lambda: parametrizations.weight_norm(linear(2)), squared, rows),
    "spectral norm": Case(lambda: parametrizations.spectral_norm(linear(2)), squared, rows),
    "spectral norm in evaluation": Case(
        evaluated(lambda: parametrizations.spectral_norm(linear(2))), squared, rows
    ),
    "orthogonal weight": Case(
        lambda: parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES)), squared, rows
    ),
    "bilinear": Case(
        lambda: Net(lambda self, x: self.form(x, x), form=nn.Bilinear(FEATURES, FEATURES, 2)), squared, rows
    ),
    "PReLU": Case(around(nn.PReLU()), squared, rows),
    "gated unit": Case(
        lambda: Net(lambda self, x: F.silu(self.a(x)) * self.b(x), a=linear(4), b=linear(4)), squared, rows
    ),
    "scalar parameter": Case(
        lambda: Net(
            lambda self, x: self.scale * self.a(x) + self.shift,
            scale=parameter(),
            shift=parameter(1),
            a=linear(),
        ),
        squared,
        rows,
    ),
    "Einstein sums": Case(
        lambda: Net(
            lambda self, x: torch.einsum("btd,de,tf->bef", x, self.a, self.b),
            a=parameter(FEATURES, 2),
            b=parameter(LENGTH, 3),
        ),
        squared,
        sequences,
    ),
    "complex numbers": Case(
        lambda: Net(
            lambda self, x: torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.filter, n=FEATURES),
            a=linear(FEATURES),
            filter=parameter(4),
        ),
        squared,
        rows,
    ),
    "fixed graph": Case(
        lambda: Net(lambda self, x: torch.tril(torch.ones(LENGTH, LENGTH)).to(x) @ self.a(x), a=linear(3)),
        squared,
        sequences,
    ),
    "ensemble in one tensor": Case(
        lambda: Net(
            lambda self, x: torch.einsum("bd,kde->bke", x, self.weights).mean(1),
            weights=parameter(3, FEATURES, 2),
        ),
        squared,
        rows,
    ),
    "weights made per record": Case(lambda: Net(generated, maker=linear(2 * FEATURES)), squared, rows),
    "branches per record": Case(
        lambda: Net(per_record_branches, even=linear(2), odd=linear(2)), squared, rows
    ),
    "experts": Case(Experts, squared, rows),
    "experts with sorted tokens": Case(SortedExperts, squared, sequences),
    "records sorted by sign": Case(SortedBySign, squared, rows),
    "experts with a gate that is cast": Case(CastExperts, squared, sequences),
    "a layer used twice": Case(
        lambda: Net(lambda self, x: self.a(torch.tanh(self.a(x))), a=linear(FEATURES)), squared, rows
    ),
    "parameters read without gradients": Case(
        lambda: Net(lambda self, x: self.a(x) * (1 + self.norm()), a=linear(2), norm=Net(lambda self: 0.1)),
        squared,
        rows,
    ),
    "unused parameters": Case(
        lambda: Net(lambda self, x: self.a(x), a=linear(2), b=linear(2)), squared, rows
    ),
    "frozen parts": Case(
        lambda: nn.Sequential(linear(FEATURES).requires_grad_(False), linear(2)), squared, rows
    ),
    "custom function": Case(around(Squared.apply), squared, rows),
    "custom function that differentiates by a parameter": Case(
        lambda: Net(
            lambda self, x: self.a(Implicit.apply(x, self.w)), a=linear(), w=parameter(FEATURES, FEATURES)
        ),
        squared,
        rows,
    ),
    "divided by the batch's length": Case(mlp, of(lambda losses, batch: losses / len(losses)), rows),
    "warm-up of three calls": Case(lambda: Counting(3), squared, rows),
    "warm-up of forty calls": Case(lambda: Counting(40), squared, rows),
    "a bank of earlier records": Case(lambda: Bank(60), squared, rows),
    "a bank of earlier records in a class": Case(lambda: SharedBank(60), squared, rows),
    "a queue in the loss": Case(mlp, Queue(60), rows),
    "a hook more with every forward": Case(lambda: Hooking(40), squared, rows),
    "hook on the batch's gradient": Case(lambda: Guarded(0.1), squared, rows),
    "hook on the batch's gradient, far away": Case(lambda: Guarded(2.0), squared, rows),
    "hook of a module": Case(with_module_hook, squared, rows),
    "checkpoints": Case(lambda: Checkpointed(use_reentrant=False), squared, rows),
    "checkpoints with dropout": Case(
        lambda: Checkpointed(0.3, use_reentrant=False), squared, rows, is_random=True
    ),
    "DataParallel": Case(lambda: nn.DataParallel(mlp()), squared, rows),
    "autocast inside": Case(lambda: Net(lambda self, x: self.a(x).to(x.dtype), a=mlp()), squared, rows),
    "compiled": Case(lambda: torch.compile(mlp(), backend="eager"), squared, rows),
    "compiled by default": Case(lambda: torch.compile(mlp()), squared, rows),
    "compiled part": Case(compiled_part, squared, rows),
    "compiled in place": Case(compiled_in_place, squared, rows),
    "compiled loss": Case(mlp, torch.compile(squared, backend="eager"), rows),
    "traced by fx": Case(traced_by_fx, squared, rows),
    "scripted function": Case(
        lambda: Net(lambda self, x: scripted_affine(x, self.weight), weight=parameter(FEATURES, 2)),
        squared,
        rows,
    ),
    "vectorised inside": Case(lambda: Net(lambda self, x: torch.vmap(self.a)(x), a=mlp()), squared, rows),
    "functional call inside": Case(
        lambda: Net(
            lambda self, x: torch.func.functional_call(self.a, {"bias": torch.zeros(2).to(x)}, (x,)),
            a=linear(2),
        ),
        squared,
        rows,
    ),
    "gradient penalty": Case(mlp, penalised, rows),
    "gradient penalty by a transform": Case(mlp, penalised_by_transform, rows),
    "directional derivative": Case(mlp, directional, rows),
    "adversarial training": Case(mlp, adversarial, rows),
    "pairs in a record": Case(lambda: nn.Linear(3, 2), pair_distance, rows),
    "distillation from itself": Case(lambda: mlp(3), distilled, rows),
    "focal loss": Case(lambda: linear(3), focal, classes),
    "label smoothing": Case(lambda: linear(3), smoothed, classes),
    "temporal classification": Case(lambda: linear(5), aligned, sequences),
    "tiny loss": Case(mlp, of(lambda losses, batch: 1e-6 * losses), rows),
    "huge loss": Case(mlp, of(lambda losses, batch: 1e6 * losses), rows),
    "gate of zeros": Case(gated(nn.Tanh()), squared, rows),
    "head of zeros": Case(lambda: nn.Sequential(mlp(FEATURES), zeros(linear(2))), squared, rows),
    "a parameter that has to be a probability": Case(
        lambda: Net(
            lambda self, x: self.a(x) * torch.distributions.Bernoulli(probs=self.p, validate_args=True).mean,
            a=linear(1),
            p=nn.Parameter(torch.tensor(0.9)),
        ),
        squared,
        rows,
    ),
    "labels looked up in a table": Case(mlp, by_table, rows),
    "an error of its own where a result is not finite": Case(around(guarded), squared, rows),
    "noise on the inputs": Case(
        lambda: Net(lambda self, x: self.a(x + 0.1 * torch.randn_like(x)), a=mlp()),
        squared,
        rows,
        is_random=True,
    ),
    "random depth per record": Case(RandomDepth, squared, rows, is_random=True),
    "variational autoencoder": Case(Autoencoder, evidence, rows, is_random=True),
    "diffusion": Case(lambda: mlp(FEATURES), diffusion(False), rows, is_random=True),
    "hook that gives nothing where some gradient is not finite": Case(  # a hook meets single records
        around(hooked(lambda g: g if bool(g.isfinite().all()) else torch.zeros_like(g))), squared, rows
    ),
    "custom function whose backward replaces what is not finite": Case(
        around(NumbersBackward.apply), squared, rows
    ),
}

REFUSED_CASES = {
    "batch norm": Case(cnn(nn.BatchNorm2d(4)), squared, images, refused(r"replace_batch_norm")),
    "custom function whose backward mixes": Case(around(MeanBackward.apply), squared, rows, refused(MIXED)),
    "custom function whose backward mixes, with noise": Case(
        around(lambda x: MeanBackward.apply(x + 0.1 * torch.randn_like(x))), squared, rows, refused(MIXED)
    ),
    "custom function whose backward mixes, with numbers that cannot be held": Case(
        around(lambda x: MeanBackward.apply(x + 0.1 * torch.poisson(torch.ones_like(x)))),
        squared,
        rows,
        refused(MIXED),
    ),
    "straight-through by the largest value of all records": Case(
        around(straight_through(lambda x: 1e-4 * x.abs().amax())), squared, rows, refused(MIXED)
    ),
    "straight-through where some record is an outlier": Case(
        around(straight_through(lambda x: 0.2 * (x.abs().amax() > 10))), squared, rows, refused(MIXED)
    ),
    "straight-through where the record before is an outlier": Case(
        around(straight_through(lambda x: 0.2 * (x.roll(1, 0).abs().amax(1, keepdim=True) > 10))),
        squared,
        rows,
        refused(MIXED),
    ),
    "straight-through where the record behind is an outlier": Case(
        around(straight_through(lambda x: 0.2 * (x.roll(-1, 0).abs().amax(1, keepdim=True) > 10))),
        squared,
        rows,
        refused(MIXED),
    ),
    "straight-through by outliers where larger ones raise": Case(
        around(straight_through(lambda x: 0.2 * (checked_up_to(60.0, x).abs().amax() > 5))),
        squared,
        rows,
        refused(MIXED),
    ),
    "custom function whose backward gives nothing where some gradient is NaN": Case(
        around(lambda x: GuardedBackward.apply(x, lambda g: g.isnan().any())), squared, rows, refused(MIXED)
    ),
    "custom function whose backward gives nothing where some gradient is infinite": Case(
        around(lambda x: GuardedBackward.apply(x, lambda g: g.isinf().any())), squared, rows, refused(MIXED)
    ),
    "custom function whose backward gives nothing where some gradient is huge": Case(
        around(lambda x: GuardedBackward.apply(x, lambda g: g.abs().max() > 1e6)),
        squared,
        rows,
        refused(MIXED),
    ),
    "custom function whose backward mixes, behind a gate": Case(
        gated(MeanBackward.apply), squared, rows, refused(MIXED)
    ),
    "centred behind a gate": Case(gated(centred), squared, rows, refused(MIXED)),
    "centred behind a small gate": Case(gated(centred, 1e-6), squared, rows, refused(MIXED)),
    "batch norm behind a gate": Case(gated(nn.BatchNorm1d(FEATURES)), squared, rows, refused(MIXED)),
    "centred before a head of zeros": Case(
        lambda: nn.Sequential(linear(FEATURES), Net(lambda self, x: centred(x)), zeros(linear(2))),
        squared,
        rows,
        refused(MIXED),
    ),
    "random numbers that records share, before a head of zeros": Case(
        lambda: nn.Sequential(linear(FEATURES), Net(lambda self, x: shuffled(x)), zeros(linear(2))),
        squared,
        rows,
        refused(MIXED),
    ),
    "modulated from zero": Case(
        lambda: Net(
            lambda self, x: self.head(x + self.scale(x) * centred(x)),
            scale=zeros(linear(FEATURES)),
            head=linear(2),
        ),
        squared,
        rows,
        refused(MIXED),
    ),
    "collated with neighbours, before a head of zeros": Case(
        lambda: zeros(linear(2)),
        squared,
        rows,
        refused(r"mixes records"),
        options={"collate": lambda items: mixed_up(items)},
    ),
    "centred by the batch": Case(around(centred), squared, rows, refused(MIXED)),
    "whitened by detached statistics": Case(around(whitened), squared, rows, refused(MIXED)),
    "attention over the batch": Case(around(attended), squared, rows, refused(MIXED)),
    "quantised by the batch": Case(around(quantised), squared, rows, refused(MIXED)),
    "groups of 16": Case(around(ghosts(16)), squared, rows, right_or_refused(MIXED)),
    "groups of 4": Case(around(ghosts(4)), squared, rows, refused(MIXED)),
    "more than 8 records": Case(
        around(lambda x: centred(x) if len(x) > 8 else x), squared, rows, right_or_refused(MIXED)
    ),
    "mixup": Case(around(blended), squared, rows, refused(MIXED)),
    "mixup in random pairs": Case(around(shuffled), squared, rows, refused(MIXED)),
    "mixup behind a coin": Case(around(by_chance(0.45, blended)), squared, rows, refused(MIXED)),
    "centring behind a coin": Case(around(by_chance(0.06, centred)), squared, rows, refused(MIXED)),
    "mixup behind Python's coin": Case(
        around(lambda x: blended(x) if random.random() < 0.45 else x), squared, rows, refused(MIXED)
    ),
    "mixup by one of five": Case(
        around(lambda x: blended(x) if int(torch.randint(0, 5, ())) == 3 else x),
        squared,
        rows,
        refused(MIXED),
    ),
    "backward that mixes behind a coin": Case(
        around(lambda x: MeanBackward.apply(x) if torch.rand(()) < 0.4 else x),
        squared,
        rows,
        refused("not the sum of those"),
    ),
    "centred where a mark is set": Case(
        lambda: linear(2),
        lambda model, batch: squared(
            model, batch | {"x": centred(batch["x"]) if bool(batch["mark"].any()) else batch["x"]}
        ),
        lambda: rows() | {"mark": torch.arange(RECORDS + 1) == RECORDS - 1},
        refused(MIXED),
    ),
    "positions over marked tokens": Case(
        lambda: linear(2),
        lambda model, batch: squared(
            model, batch | {"x": batch["x"] + 0.1 * batch["mark"].flatten().cumsum(0)[:, None]}
        ),
        lambda: rows() | {"mark": torch.zeros(RECORDS + 1, dtype=torch.bool)},
        refused(MIXED),
    ),
    "missing values filled by the batch": Case(
        lambda: linear(2),
        lambda model, batch: squared(model, batch | {"x": filled_by_mean(batch["x"])}),
        lambda: rows() | {"x": rows()["x"].index_fill(0, torch.tensor([RECORDS - 1]), -999.0)},
        refused(MIXED),
    ),
    "experts with capacity": Case(lambda: Experts(0.5), squared, rows, refused(MIXED)),
    "balanced experts with sorted tokens": Case(
        lambda: SortedExperts(balanced=True),
        squared,
        sequences,
        refused(r"module '\(the model itself\)' .*balances"),
        other={"bfloat16": refused(MIXED)},  # it is too small to move what the model gives in half precision
    ),
    "contrastive loss": Case(lambda: linear(3), contrastive, rows, refused(MIXED)),
    "hard examples only": Case(mlp, of(mined), rows, refused(MIXED)),
    "no steps at spikes": Case(mlp, of(without_spikes), rows, refused(MIXED)),
    "no steps at huge spikes": Case(
        mlp,
        of(lambda losses, batch: losses * (losses.detach().mean() < 1e9)),
        rows,
        refused(MIXED),
    ),
    "no steps where a loss is not finite": Case(mlp, of(while_finite), rows, refused(MIXED)),
    "divided by the batch's loss": Case(
        mlp, of(lambda losses, batch: losses / losses.detach().mean()), rows, refused(MIXED)
    ),
    "class weights of the batch": Case(lambda: linear(3), with_class_weights, classes, refused(MIXED)),
    "column minus row": Case(linear, crossed_shapes, rows, refused(MIXED)),
    "column minus row, equal labels": Case(linear, crossed_shapes, equal_labels, refused(MIXED)),
    "sorted by length": Case(Sorted, by_length, with_lengths, refused(MIXED)),
    "trimmed to the longest": Case(Trimmed, by_length, with_lengths, refused(MIXED)),
    "evidence over the batch": Case(Autoencoder, evidence_over_the_batch, rows, refused(MIXED)),
    "diffusion over the batch": Case(lambda: mlp(FEATURES), diffusion(True), rows, refused(MIXED)),
    "tiny loss that mixes": Case(
        around(centred), of(lambda losses, batch: 1e-6 * losses), rows, refused(MIXED)
    ),
    "tiny loss with a random part that mixes": Case(
        mlp,
        of(
            lambda losses, batch: (
                1e-6 * (losses + (torch.rand(len(losses)).to(losses) * losses.mean()).detach() * losses)
            )
        ),
        rows,
        refused(MIXED),
    ),
    "mean loss": Case(mlp, of(lambda losses, batch: losses.mean()), rows, refused(r"reduction=")),
    "a column of losses": Case(mlp, of(lambda losses, batch: losses[:, None]), rows, refused(r"must be \(")),
    "renormalised embedding": Case(
        lookup(nn.Embedding(TOKENS, 4, max_norm=0.5), 20), squared, texts, refused(r"max_norm")
    ),
    "another scale at every call": Case(Scaled, squared, rows, refused(r"wrote to calls")),
    "centred by the first batch": Case(Settling, squared, rows, refused(r"wrote to centre")),
    "scripted": Case(scripted, squared, rows, refused(r"scripted as a whole.*Give the Python module")),
    "traced part": Case(traced_part, squared, rows, refused(r"scripted at '0'.*Give the Python module")),
    "scripted activation": Case(
        scripted_part_without_parameters, squared, rows, refused(r"scripted at '1'.*Give the Python module")
    ),
    "reentrant checkpoints": Case(
        lambda: Checkpointed(use_reentrant=True), squared, rows, refused(r"use_reentrant=False")
    ),
    "lazy layer": Case(lambda: nn.LazyLinear(2), squared, rows, refused(r"run the model once")),
    "complex parameters": Case(
        lambda: Net(
            lambda self, x: (self.a * x.to(self.a.dtype)).real,
            a=nn.Parameter(torch.randn(FEATURES, dtype=torch.complex64)),
        ),
        squared,
        rows,
        refused(r"not real"),
    ),
    "nothing to train": Case(lambda: linear().requires_grad_(False), squared, rows, refused(r"no trainable")),
    "labels in a list": Case(
        mlp,
        from_a_list,
        rows,
        refused(r"list of 4 numbers, one per record.*give torch.tensor"),
        options={"collate": listed},
    ),
    "divided by a collated count": Case(
        mlp,
        lambda model, batch: squared(model, batch) / batch["count"],
        rows,
        refused(r"among fewer"),
        options={"collate": counted},
    ),
}

#: Of the collated ones the model is proved; of what joins records nothing is said here.
UNSEEN_CASES = {
    "custom function whose backward mixes by a rare coin": Case(
        around(lambda x: MeanBackwardByChance.apply(x, lambda: torch.rand(()), 0.002)),
        squared,
        rows,
        unseen(),
    ),
    "custom function whose backward mixes by Python's rare coin": Case(
        around(lambda x: MeanBackwardByChance.apply(x, random.random, 0.002)), squared, rows, unseen()
    ),
    "collated with neighbours, behind a rare coin": Case(
        mlp,
        squared,
        rows,
        unseen("proved"),
        options={"collate": lambda items: mixed_up(items) if random.random() < 0.01 else joined(items)},
    ),
    "augmented with neighbours, behind a rare coin of its generator": Case(
        mlp,
        squared,
        rows,
        unseen("proved"),
        options={"augmentation": rarely_blended},
    ),
    "mixup behind a rare coin": Case(around(by_chance(0.002, blended)), squared, rows, unseen()),
    "mixup behind Python's rare coin": Case(
        around(lambda x: blended(x) if 0.5 < random.random() < 0.5002 else x), squared, rows, unseen()
    ),
    "mixup behind NumPy's rare coin": Case(
        around(lambda x: blended(x) if np.random.rand() > 1 - 2e-4 else x), squared, rows, unseen()
    ),
    "no steps where a token's loss is not finite": Case(
        lookup(nn.Embedding(TOKENS, 4), 20), of(while_finite), texts, unseen()
    ),
    "centred where values lie between two": Case(
        around(lambda x: centred(x) if 1e6 < float(x.abs().amax()) < 1e12 else x), squared, rows, unseen()
    ),
}

CASES = RIGHT_CASES | REFUSED_CASES | UNSEEN_CASES
