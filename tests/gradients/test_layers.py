"""Every layer against the oracle: norms, weighted sums, cross-Gram, inner products, differences."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle_cases import compare
from torch import nn
from torch.nn.utils import parametrizations
from zoo import Net as Free

from equipoise._tree import leaves
from equipoise.gradients.capture import compositions
from equipoise.gradients.capture.recorder import Capture, CapturePlan

B = 5


class Net(nn.Module):
    """A layer between two others, so that its inputs depend on parameters and its outputs go on."""

    def __init__(self, layer, before=None, after=None):
        super().__init__()
        self.before, self.layer, self.after = before or nn.Identity(), layer, after or nn.Identity()

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


def sequence_first(layer):
    def forward(self, x):
        out = self.layer(x.transpose(0, 1))
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)

    return Free(forward, layer=layer)


def attention(cross=False, batch_first=True):
    """Self-attention, or attention to a constant number of other positions (cross)."""

    def forward(self, x):
        turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
        other = turn(x[:, ::2] + 1 if cross else x)
        return turn(self.attention(turn(x), other, other)[0])

    return Free(forward, attention=nn.MultiheadAttention(6, 2, batch_first=batch_first))


def sizes_of_keys():
    layer = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True, add_bias_kv=True)
    return Free(lambda self, x: self.attention(x, x[..., :4], x[..., :3])[0], attention=layer)


def positions():
    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x) + self.table(torch.arange(x.shape[1]))))

    return Free(forward, table=nn.Embedding(9, 6), linear=nn.Linear(6, 6))


def elementwise():
    """Bare parameters of many broadcast shapes."""

    def forward(self, x):
        x = (1 + self.scale) * x - self.shift
        x = self.scalar * x / self.wide + self.wide / (2 + x.square()) - (1 - self.scale)
        x = torch.where(x > 0, x, self.scale)
        x = x.clone()
        x += self.shift
        return torch.einsum("btd,de->bte", x, self.left) + x @ self.left + (self.left.t() @ x.mT).mT

    tensors = {"scale": torch.randn(6), "shift": torch.randn(3, 1), "scalar": torch.tensor(1.3)}
    tensors |= {"wide": torch.rand(1, 3, 6) + 1, "left": torch.randn(6, 2)}
    return Free(forward, **{name: nn.Parameter(tensor) for name, tensor in tensors.items()})


def folded(is_first, layer=None):
    """Positions folded into the record axis, record-major and sequence-first."""

    def forward(self, x):
        x = x.transpose(0, 1) if is_first else x
        out = self.layer(x.reshape(-1, *x.shape[2:]))
        out = out.reshape(*x.shape[:2], *out.shape[1:])
        return out.transpose(0, 1) if is_first else out

    usual = [nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)]
    return Free(forward, layer=layer or nn.Sequential(*usual))


def tied():
    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))

    model = Free(forward, embedding=nn.Embedding(11, 6), head=nn.Linear(6, 11, bias=False))
    model.head.weight = model.embedding.weight
    return model


def standardised(self, x):
    """A convolution whose weight is an expression of the parameter."""
    w = self.conv.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
    return F.conv2d(x, w, self.conv.bias)


def encoder(**options):
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, **options)


CASES = {
    **{f"linear {len(s) + 1}d": (lambda: Net(nn.Linear(6, 4)), floats(*s)) for s in [(6,), (3, 6), (2, 3, 6),
        (2, 1, 2, 6)]},
    "linear, T == B": (lambda: Net(nn.Linear(6, 4), nn.Linear(6, 6)), floats(B, 6)),
    "bilinear": (lambda: Free(lambda self, x: self.layer(x, x), layer=nn.Bilinear(6, 6, 2)), floats(6)),
    "prelu": (lambda: Net(nn.PReLU(), nn.Linear(6, 6)), floats(6)),
    "prelu, channels": (lambda: Net(nn.PReLU(3), nn.Conv1d(3, 3, 1)), floats(3, 6)),
    "in-place relu": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8),
        nn.ReLU(inplace=True), nn.Linear(8, 2)), floats(3, 6)),
    "layer norm": (lambda: Net(nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)), floats(3, 6)),
    "layer norm, two axes": (lambda: Net(nn.LayerNorm((3, 6))), floats(2, 3, 6)),
    "group norm, flat": (lambda: Net(nn.GroupNorm(2, 6), nn.Linear(6, 6)), floats(6)),
    "instance norm 1d": (lambda: Net(nn.InstanceNorm1d(3, affine=True)), floats(3, 6)),
    "instance norm 2d": (lambda: Net(nn.InstanceNorm2d(3, affine=True)), floats(3, 4, 4)),
    "batch norm in eval": (lambda: Net(nn.BatchNorm2d(4), nn.Conv2d(2, 4, 3)).eval(), floats(2, 5, 5)),
    "embedding, one index": (lambda: Net(nn.Embedding(11, 4)), indices()),
    "embedding, two axes": (lambda: Net(nn.Embedding(11, 4), after=nn.Linear(4, 2)), indices(2, 3)),
    **{f"embedding bag {m}": (lambda m=m: Net(nn.EmbeddingBag(11, 4, mode=m)), indices(6)) for m in ("sum",
        "mean", "max")},
    "attention": (attention, floats(4, 6)),
    "attention, cross": (lambda: attention(cross=True), floats(4, 6)),
    "attention, T == B": (lambda: attention(batch_first=False), floats(B, 6)),
    "attention, key and value sizes": (sizes_of_keys, floats(4, 6)),
    "encoder layer, norm first False": (lambda: encoder(batch_first=True), floats(4, 6)),
    "encoder layer, norm first True": (lambda: encoder(batch_first=True, norm_first=True), floats(4, 6)),
    "encoder layer, sequence first": (lambda: sequence_first(encoder()), floats(B, 6)),
    "positions, T == B": (positions, floats(B, 6)),
    "elementwise": (elementwise, floats(3, 6)),
    "folded, records first": (lambda: folded(False), floats(4, 6)),
    "folded, sequence first": (lambda: folded(True), floats(4, 6)),
    "folded, T == B": (lambda: folded(True), floats(B, 6)),
    "folded convolution": (lambda: folded(False, nn.Conv2d(2, 3, 3)), floats(4, 2, 5, 5)),
    "folded convolution, sequence": (lambda: folded(True, nn.Conv2d(2, 3, 3)), floats(4, 2, 5, 5)),
    "folded group norm": (lambda: folded(True, nn.GroupNorm(2, 4)), floats(3, 4, 5)),
    "tied": (tied, indices(4)),
    "standardised convolution": (lambda: Free(standardised, conv=nn.Conv2d(2, 4, 3)), floats(2, 5, 5)),
    "weight norm": (lambda: Net(parametrizations.weight_norm(nn.Linear(6, 4))), floats(3, 6)),
}  # fmt: skip


@pytest.mark.few(20)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_layer(name, dtype):
    make, x = CASES[name]
    engine = compare(make().to(dtype), squared, x.to(dtype) if x.is_floating_point() else x)
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
TRANSPOSED = [
    {},
    {"stride": 2},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"groups": 2, "dilation": 2},
    {"stride": 3, "groups": 4, "padding": 1, "bias": False},
]


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [*(("Conv", one) for one in CONVOLUTIONS), *(("ConvTranspose", one) for one in TRANSPOSED)],
)
def test_convolution(dims, kind, options):
    layer = getattr(nn, f"{kind}{dims}d")(4, 8, **{"kernel_size": 3, **options})
    sizes = (6, 7, 5) if kind == "Conv" else (4, 5, 3)
    compare(Net(layer, before=nn.Tanh()).double(), squared, floats(4, *sizes[:dims]), how="rule")


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
    layer, options = RECURRENT[name]
    inner = layer(6, 3, batch_first=batch_first, **options)
    width = (inner.proj_size or 3) * (2 if inner.bidirectional else 1)
    body = Net(inner) if batch_first else sequence_first(inner)
    x = floats(4, 6)
    compare(nn.Sequential(nn.Linear(6, 6), body, nn.Linear(width, 2)).double(), squared, x, how="rule")
    with Capture({}, CapturePlan((), (), {}), B):
        mine = leaves(inner(x))
    for ours, theirs in zip(mine, leaves(inner(x)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_packed_sequences_are_dense_not_skipped():
    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.rnn(packed)[1].squeeze(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of vmap, which nobody asked for
        model = Free(forward, rnn=nn.GRU(6, 3, batch_first=True)).double()
        compare(model, squared, floats(4, 6), how="dense")


def both_entropies(values, classes, weights, transposed=False, **options):
    """Losses and gradients: PyTorch's, and those in parts."""
    for run in (F.cross_entropy, compositions.cross_entropy):
        leaf = values.clone().requires_grad_()
        losses = run(leaf.transpose(1, 2) if transposed else leaf, classes, reduction="none", **options)
        yield losses, torch.autograd.grad((losses * weights).sum(), leaf)[0]


@pytest.mark.parametrize("form", ["classes", "classes last", "images", "one each"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 3}])
def test_a_cross_entropy_in_parts_has_the_same_bits(monkeypatch, form, options):
    monkeypatch.setattr(compositions, "SMALL_LOGITS", 1)
    shape, places = {
        "classes": ((6, 50, 37), (6, 37)),
        "classes last": ((6, 37, 50), (6, 37)),
        "images": ((6, 50, 9, 11), (6, 9, 11)),
        "one each": ((7, 1001), (7,)),
    }[form]
    given = torch.randn(shape), torch.randint(50, places), torch.rand(places), form == "classes last"
    assert all(map(torch.equal, *both_entropies(*given, **options)))


@pytest.mark.parametrize("form", ["classes", "smoothed", "shares"])
def test_equal_records_have_equal_losses_in_parts_by_two_threads(monkeypatch, form):
    monkeypatch.setattr(compositions, "SMALL_LOGITS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            logits = torch.randn(1, 5025, 37).repeat(5, 1, 1)
            target = torch.randint(5025, (1, 37)).repeat(5, 1)
            if form == "shares":
                target = torch.randn(1, 5025, 37).softmax(1).repeat(5, 1, 1)
            smoothing = 0.1 if form == "smoothed" else 0.0
            whole, parts = both_entropies(logits, target, torch.ones(()), label_smoothing=smoothing)
            assert all(map(torch.equal, whole, parts))
            assert len(parts[0].unique(dim=0)) == 1
    finally:
        torch.set_num_threads(before)
