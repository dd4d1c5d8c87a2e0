"""Every layer against the oracle: norms, weighted sums, cross-Gram, inner products, differences."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle_cases import compare
from torch import nn
from torch.nn.utils import parametrizations

from equipoise._tree import leaves
from equipoise.gradients.capture import compositions
from equipoise.gradients.capture.recorder import Capture, CapturePlan

B = 5


class Net(nn.Module):
    """A layer between two others, so that its inputs depend on parameters and its outputs go on."""

    def __init__(self, layer, before=None, after=None):
        super().__init__()
        self.before = before or nn.Identity()
        self.layer = layer
        self.after = after or nn.Identity()

    def forward(self, x):
        out = self.layer(self.before(x))
        return self.after(out[0] if isinstance(out, tuple) else out)


def squared(model, batch):
    """A loss whose gradient is not constant along positions."""
    out = model(batch).flatten(1)
    ramp = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (torch.sin(out + 0.3) * ramp).sum(1)


def floats(*shape):
    return torch.randn(B, *shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def indices(*shape, high=11):
    return torch.randint(0, high, (B, *shape), generator=torch.Generator().manual_seed(7))


class SequenceFirst(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x.transpose(0, 1))
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


class Attention(nn.Module):
    """Self-attention, or attention to a constant number of other positions (cross)."""

    def __init__(self, cross=False, **options):
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(6, 2, **options)

    def forward(self, x):
        other = x[:, ::2] + 1 if self.cross else x
        if not self.attention.batch_first:
            x, other = x.transpose(0, 1), other.transpose(0, 1)
        out = self.attention(x, other, other)[0]
        return out if self.attention.batch_first else out.transpose(0, 1)


class KeyValueDims(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True, add_bias_kv=True)

    def forward(self, x):
        return self.attention(x, x[..., :4], x[..., :3])[0]


class Positions(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.table = nn.Embedding(9, 6) if "lookup" in form else None
        self.bare = None if "lookup" in form else nn.Parameter(torch.randn(9, 6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        T = x.shape[1]
        positions = {
            "lookup [1, T]": lambda: self.table(torch.arange(T)[None]),
            "lookup [T]": lambda: self.table(torch.arange(T)),
            "slice [T]": lambda: self.bare[:T],
            "slice [1, T]": lambda: self.bare[None, :T],
            "expanded": lambda: self.bare[None, :T].expand(x.shape[0], -1, -1),
            "repeated": lambda: self.bare[:T].repeat(x.shape[0], 1, 1),
        }[self.form]()
        return self.linear(torch.tanh(self.linear(x) + positions))


class ClassToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))


class Elementwise(nn.Module):
    """Bare parameters of many broadcast shapes."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(3, 1))
        self.scalar, self.wide = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.rand(1, 3, 6) + 1)
        self.left = nn.Parameter(torch.randn(6, 2))

    def forward(self, x):
        x = (1 + self.scale) * x - self.shift
        x = self.scalar * x / self.wide + self.wide / (2 + x.square()) - (1 - self.scale)
        x = torch.where(x > 0, x, self.scale)
        x = x.clone()
        x += self.shift
        return torch.einsum("btd,de->bte", x, self.left) + x @ self.left + (self.left.t() @ x.mT).mT


class Folded(nn.Module):
    """Positions folded into the record axis, record-major and sequence-first."""

    def __init__(self, first, layer=None):
        super().__init__()
        self.first = first
        self.layer = layer or nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x):
        if self.first == "sequence":
            x = x.transpose(0, 1)
        out = self.layer(x.reshape(-1, *x.shape[2:]))
        out = out.reshape(*x.shape[:2], *out.shape[1:])
        return out.transpose(0, 1) if self.first == "sequence" else out


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.conv = nn.Linear(6, 6), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        x = torch.tanh(self.conv(torch.tanh(self.layer(x))))
        return self.conv(self.layer(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))


class ConvByWeight(nn.Module):
    """A convolution whose weight is standardised (an expression of the parameter)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)

    def forward(self, x):
        w = self.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.conv.bias)


CASES = {
    **{
        f"linear {len(s) + 1}d": (lambda s=s: Net(nn.Linear(6, 4)), lambda s=s: floats(*s))
        for s in [(6,), (3, 6), (2, 3, 6), (2, 1, 2, 6)]
    },
    "linear, T == B": (lambda: Net(nn.Linear(6, 4), nn.Linear(6, 6)), lambda: floats(B, 6)),
    "linear, no bias": (lambda: Net(nn.Linear(6, 4, bias=False)), lambda: floats(3, 6)),
    "bilinear": (lambda: Net(nn.Bilinear(6, 6, 2)), None),
    "prelu": (lambda: Net(nn.PReLU(), nn.Linear(6, 6)), lambda: floats(6)),
    "prelu, channels": (lambda: Net(nn.PReLU(3), nn.Conv1d(3, 3, 1)), lambda: floats(3, 6)),
    "in-place relu": (
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)
        ),
        lambda: floats(3, 6),
    ),
    "in-place after convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.SiLU(inplace=True)
        ),
        lambda: floats(2, 7, 7),
    ),
    "layer norm": (lambda: Net(nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)), lambda: floats(3, 6)),
    "layer norm, two axes": (lambda: Net(nn.LayerNorm((3, 6))), lambda: floats(2, 3, 6)),
    "layer norm, no bias": (lambda: Net(nn.LayerNorm(6, bias=False)), lambda: floats(6)),
    "rms norm": (lambda: Net(nn.RMSNorm(6), nn.Linear(6, 6)), lambda: floats(3, 6)),
    "group norm": (lambda: Net(nn.GroupNorm(2, 4), nn.Conv2d(2, 4, 3)), lambda: floats(2, 5, 5)),
    "group norm, flat": (lambda: Net(nn.GroupNorm(2, 6), nn.Linear(6, 6)), lambda: floats(6)),
    "instance norm 1d": (lambda: Net(nn.InstanceNorm1d(3, affine=True)), lambda: floats(3, 6)),
    "instance norm 2d": (lambda: Net(nn.InstanceNorm2d(3, affine=True)), lambda: floats(3, 4, 4)),
    "instance norm, running": (
        lambda: Net(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)).eval(),
        lambda: floats(3, 6),
    ),
    "batch norm in eval": (
        lambda: Net(nn.BatchNorm2d(4), nn.Conv2d(2, 4, 3)).eval(),
        lambda: floats(2, 5, 5),
    ),
    "embedding": (lambda: Net(nn.Embedding(11, 4)), lambda: indices(6)),
    "embedding, padding": (lambda: Net(nn.Embedding(11, 4, padding_idx=2)), lambda: indices(6, high=4)),
    "embedding, one index": (lambda: Net(nn.Embedding(11, 4)), lambda: indices()),
    "embedding, two axes": (lambda: Net(nn.Embedding(11, 4), after=nn.Linear(4, 2)), lambda: indices(2, 3)),
    **{
        f"embedding bag {mode}": (
            lambda mode=mode: Net(nn.EmbeddingBag(11, 4, mode=mode)),
            lambda: indices(6),
        )
        for mode in ("sum", "mean", "max")
    },
    "embedding bag, padding": (
        lambda: Net(nn.EmbeddingBag(11, 4, mode="mean", padding_idx=1)),
        lambda: indices(6, high=4),
    ),
    "attention": (lambda: Attention(batch_first=True), lambda: floats(4, 6)),
    "attention, sequence first": (lambda: Attention(), lambda: floats(4, 6)),
    "attention, cross": (lambda: Attention(cross=True, batch_first=True), lambda: floats(4, 6)),
    "attention, T == B": (lambda: Attention(), lambda: floats(B, 6)),
    "attention, no bias": (lambda: Attention(bias=False, batch_first=True), lambda: floats(4, 6)),
    "attention, key and value sizes": (KeyValueDims, lambda: floats(4, 6)),
    **{
        f"encoder layer, norm first {first}": (
            lambda first=first: nn.TransformerEncoderLayer(
                6, 2, 8, dropout=0.0, batch_first=True, norm_first=first
            ),
            lambda: floats(4, 6),
        )
        for first in (False, True)
    },
    "encoder layer, sequence first": (
        lambda: SequenceFirst(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)),
        lambda: floats(B, 6),
    ),
    "encoder in eval": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2).eval(),
        lambda: floats(4, 6),
    ),
    **{
        f"positions, {form}": (lambda form=form: Positions(form), lambda: floats(4, 6))
        for form in ("lookup [1, T]", "lookup [T]", "slice [T]", "slice [1, T]", "expanded", "repeated")
    },
    "positions, T == B": (lambda: Positions("lookup [T]"), lambda: floats(B, 6)),
    "class token": (ClassToken, lambda: floats(4, 6)),
    "elementwise": (Elementwise, lambda: floats(3, 6)),
    "folded, records first": (lambda: Folded("records"), lambda: floats(4, 6)),
    "folded, sequence first": (lambda: Folded("sequence"), lambda: floats(4, 6)),
    "folded, T == B": (lambda: Folded("sequence"), lambda: floats(B, 6)),
    "folded convolution": (lambda: Folded("records", nn.Conv2d(2, 3, 3)), lambda: floats(4, 2, 5, 5)),
    "folded convolution, sequence": (
        lambda: Folded("sequence", nn.Conv2d(2, 3, 3)),
        lambda: floats(4, 2, 5, 5),
    ),
    "folded group norm": (lambda: Folded("sequence", nn.GroupNorm(2, 4)), lambda: floats(3, 4, 5)),
    "reused": (Reused, lambda: floats(4, 6)),
    "tied": (Tied, lambda: indices(4)),
    "standardised convolution": (ConvByWeight, lambda: floats(2, 5, 5)),
    "weight norm": (lambda: Net(parametrizations.weight_norm(nn.Linear(6, 4))), lambda: floats(3, 6)),
    "spectral norm": (
        lambda: Net(parametrizations.spectral_norm(nn.Linear(6, 4))).eval(),
        lambda: floats(3, 6),
    ),
    "weight norm, convolution": (
        lambda: Net(parametrizations.weight_norm(nn.Conv1d(3, 4, 3))),
        lambda: floats(3, 6),
    ),
    **{
        f"{cell.__name__}": (lambda cell=cell: Net(cell(6, 4)), lambda: floats(6))
        for cell in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
    },
}
CASES["bilinear"] = (
    lambda: type("Twice", (Net,), {"forward": lambda self, x: self.layer(x, x)})(nn.Bilinear(6, 6, 2)),
    lambda: floats(6),
)


@pytest.mark.few(24)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_layer(name, dtype):
    torch.manual_seed(0)
    make, batch = CASES[name]
    model, x = make().to(dtype), batch()
    x = x.to(dtype) if x.is_floating_point() else x
    engine = compare(model, squared, x)
    dense = {c.name for c in engine.coverage() if c.how == "dense"}
    assert not dense or name == "embedding bag max", engine.coverage()


CONVOLUTIONS = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"dilation": 2, "padding": 2},
    {"groups": 2},
    {"groups": 4, "stride": 2, "padding": 1},
    {"padding": "same", "kernel_size": 4},
    {"padding": "valid", "bias": False},
    *({"padding": 1, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")),
    {"padding": "same", "padding_mode": "circular"},
]


@pytest.mark.few(9)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolution(dims, options):
    torch.manual_seed(0)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = Net(layer(4, 8, **{"kernel_size": 3, **options}), before=nn.Tanh()).double()
    compare(model, squared, floats(4, *(6, 7, 5)[:dims]), how="rule")


@pytest.mark.few(4)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"groups": 2, "dilation": 2},
        {"stride": 3, "groups": 4, "padding": 1, "bias": False},
    ],
    ids=str,
)
def test_transposed_convolution(dims, options):
    torch.manual_seed(0)
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    model = Net(layer(4, 8, 3, **options), before=nn.Tanh()).double()
    compare(model, squared, floats(4, *(4, 5, 3)[:dims]), how="rule")


RECURRENT = {
    **{layer.__name__: (layer, {}) for layer in (nn.RNN, nn.GRU, nn.LSTM)},
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "two layers, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru, two layers, both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "no biases": (nn.GRU, {"bias": False}),
    "projected": (nn.LSTM, {"proj_size": 2, "bidirectional": True}),
    "projected without biases": (nn.LSTM, {"proj_size": 2, "bias": False}),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("batch_first", [True, False], ids=["records first", "sequence first"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layer(name, batch_first):
    """Each is served by rules, and its values and states are those of PyTorch's kernel."""
    torch.manual_seed(0)
    layer, options = RECURRENT[name]
    inner = layer(6, 3, batch_first=batch_first, **options)
    recurrent = Net(inner) if batch_first else SequenceFirst(inner)
    width = (inner.proj_size or 3) * (2 if inner.bidirectional else 1)
    model = nn.Sequential(nn.Linear(6, 6), recurrent, nn.Linear(width, 2)).double()
    compare(model, squared, floats(7, 6), how="rule")
    x = floats(7, 6)
    with Capture({}, CapturePlan((), (), {}), B):
        mine = leaves(inner(x))
    for ours, theirs in zip(mine, leaves(inner(x)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_packed_sequences_are_dense_not_skipped():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(6, 3, batch_first=True)

        def forward(self, x):
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.rnn(packed)[1].squeeze(0)

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of vmap, which nobody asked for
        compare(Packed().double(), squared, floats(4, 6), how="dense")


@pytest.mark.parametrize("form", ["classes", "classes last", "images", "one each"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 3}])
def test_a_cross_entropy_in_parts_has_the_same_bits(monkeypatch, form, options):
    monkeypatch.setattr(compositions, "SMALL_LOGITS", 1)
    rng = torch.Generator().manual_seed(0)
    shape, positions = {
        "classes": ((6, 50, 37), (6, 37)),
        "classes last": ((6, 37, 50), (6, 37)),
        "images": ((6, 50, 9, 11), (6, 9, 11)),
        "one each": ((7, 1001), (7,)),
    }[form]
    values, classes = torch.randn(shape, generator=rng), torch.randint(50, positions, generator=rng)
    weights = torch.rand(positions, generator=rng)
    found = []
    for run in (F.cross_entropy, compositions.cross_entropy):
        leaf = values.clone().requires_grad_()
        logits = leaf.transpose(1, 2) if form == "classes last" else leaf
        losses = run(logits, classes, reduction="none", **options)
        found.append((losses, torch.autograd.grad((losses * weights).sum(), leaf)[0]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("form", ["classes", "smoothed", "shares"])
def test_equal_records_have_equal_losses_in_parts_by_two_threads(monkeypatch, form):
    monkeypatch.setattr(compositions, "SMALL_LOGITS", 1)
    rng = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            logits = torch.randn(1, 5025, 37, generator=rng).repeat(5, 1, 1).requires_grad_()
            target = torch.randint(5025, (1, 37), generator=rng).repeat(5, 1)
            if form == "shares":
                target = torch.randn(1, 5025, 37, generator=rng).softmax(1).repeat(5, 1, 1)
            options = {"reduction": "none", "label_smoothing": 0.1 if form == "smoothed" else 0.0}
            losses = compositions.cross_entropy(logits, target, **options)
            assert torch.equal(losses, F.cross_entropy(logits, target, **options))
            assert len(losses.unique(dim=0)) == 1
            gradient = torch.autograd.grad(losses.sum(), logits)[0]
            whole = torch.autograd.grad(F.cross_entropy(logits, target, **options).sum(), logits)[0]
            assert torch.equal(gradient, whole)
    finally:
        torch.set_num_threads(before)
