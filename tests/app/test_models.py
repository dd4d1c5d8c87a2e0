import random
import sys
from pathlib import Path

import pytest
import torch

from equipoise.app.model_table import MODELS, STATISTICS
from equipoise.app.models import (
    build_model,
    extractor_of,
    prepare_data,
)
from equipoise.app.option_checks import SettingsError
from equipoise.app.tasks import loss_of
from equipoise.data.readers.text import HashingTokenizer
from equipoise.data.records import DataSet, Records
from equipoise.gradients import FactoredGradients, dense_gradients, per_sample_gradients


def data_set(inputs, classes=2, **options) -> DataSet:
    rows = Records({"input": inputs, "label": torch.arange(len(inputs)) % classes})
    return DataSet("some", rows, rows, len(inputs), classes, **options)


def images(channels: int, size: int) -> DataSet:
    return data_set(torch.randn(4, channels, size, size, generator=torch.Generator().manual_seed(0)), 10)


def texts() -> DataSet:
    return data_set(torch.tensor([[3, 5, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]), vocabulary_size=8)


def table(**options) -> DataSet:
    return data_set(torch.randn(4, 6), **options)


DECLARED = {
    "target": "y",
    "columns": {
        **{name: {"type": "number", "low": 0, "high": 1} for name in "abcdef"},
        "y": {"type": "category", "values": ["no", "yes"]},
    },
}
SUITABLE = {
    "mlp-tanh": images(1, 8),
    "cnn-tanh": images(1, 28),
    "cnn-cifar": images(3, 32),
    "logistic": table(),
    "additive": table(numeric_columns=(1, 4)),
    **dict.fromkeys(STATISTICS, table(schema=DECLARED)),
    "patches-linear": images(1, 8),
    "hashed-words": texts(),
}


@pytest.fixture(autouse=True)
def few_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit of the features on fewer pictures than users get: it takes a second here."""
    small = {"dictionaries": ((16, 5, 4),), "pictures": 500}
    mirrored = {**small, "with_mirror_image": True}
    upright, deep = {**small, "upright": True}, {**mirrored, "network": "contrastive"}
    kinds = {"strokes": small, "upright-strokes": upright, "things": mirrored, "deep-things": deep}
    kinds["steady-things"] = {**deep, "by_views": True}
    monkeypatch.setattr("equipoise.app.models.DRAWN_FEATURES", kinds)


@pytest.mark.parametrize("name", list(MODELS))
def test_models_map_inputs_to_logits_record_by_record_and_start_by_the_seed(name: str) -> None:
    dataset = prepare_data(name, SUITABLE[name])
    model = build_model(name, dataset, seed=1)
    torch.nn.init.normal_(list(model.parameters())[-1])  # so that a model that starts at zero says something
    batch = dataset.train[:]
    logits = model(batch["input"])
    assert logits.shape == (len(dataset.train), dataset.num_classes)
    alone = torch.cat([model(batch["input"][i : i + 1]) for i in range(len(dataset.train))])
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)
    if name not in STATISTICS:  # they are trained by a loss of their own
        torch.nn.functional.cross_entropy(logits, batch["label"]).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    # initial weights follow the seed alone
    state = torch.random.get_rng_state()
    first = build_model(name, dataset, seed=3).state_dict()
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(5)
    again, other = (build_model(name, dataset, seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(first[k], again[k]) for k in first)
    is_random = name in ("mlp-tanh", "cnn-tanh", "cnn-cifar")
    assert all(torch.equal(first[k], other[k]) for k in first) != is_random


def test_unsuitable_models_are_refused() -> None:
    for name, dataset, message in (
        ("cnn-tahn", images(1, 28), "Known: mlp-tanh, cnn-tanh"),
        ("cnn-tanh", images(1, 8), "at least 14"),
        ("cnn-cifar", table(), "images"),
        ("hashed-words", images(1, 8), "token ids"),
        ("logistic", texts(), "hashed-words"),
        ("additive", table(), "declares as numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            build_model(name, dataset)


ODD_TEXTS = (
    "", " \n\t", "...!?", "a A a a", "word " * 500, "don't 10,000 _x_", "\u0130 \u00df \ufb01 \u00e9t\u00e9",
    "\u4e2d\u6587 \u0939\u093f\u0928\u094d\u0926\u0940", "\u202e\ufffd\x00\ud800 \U0001f600\U0001f600",
)  # fmt: skip


def test_hashed_words_is_the_linear_model_of_its_definition() -> None:
    """Logits by rows that are written out, of norm 1 or 0; gradients by looked-up rows, none held densely."""
    drawn = random.Random(0)
    letters = "ab\u00e9\u4e2d '.,_1\u0130\n"
    fuzzed = ["".join(drawn.choices(letters, k=drawn.randrange(60))) for _ in range(200)]
    tokens = HashingTokenizer(97, 12)([*ODD_TEXTS, *fuzzed])
    distinct = [sorted(set(row) - {0}) for row in tokens.tolist()]
    rows = torch.zeros(len(tokens), 97, dtype=torch.float64)
    for row, words in zip(rows, distinct, strict=True):
        row[words] = max(len(words), 1) ** -0.5
    label = torch.arange(len(tokens)) % 3
    records = Records({"input": tokens, "label": label})
    model = build_model("hashed-words", DataSet("odd", records, records, 9, 3, vocabulary_size=97)).double()
    torch.nn.init.normal_(model.words.weight)
    torch.testing.assert_close(model(tokens), rows @ model.words.weight)

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["input"]), batch["label"], reduction="none")

    batch = records[:]
    found, dense = (of(model, loss, batch) for of in (per_sample_gradients, dense_gradients))
    assert isinstance(found, FactoredGradients)
    assert [factor.kind for factors in found.factors.values() for factor in factors] == ["index"]
    weights = torch.rand(len(tokens), dtype=torch.float64)
    torch.testing.assert_close(found.row_norms(), dense.row_norms())
    torch.testing.assert_close(found.weighted_sums(weights), dense.weighted_sums(weights))
    residual = model(tokens).softmax(1) - torch.nn.functional.one_hot(label, 3)
    torch.testing.assert_close(found.row_norms(), residual.norm(dim=1).detach() * rows.norm(dim=1))


def test_model_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models_for_test.py").write_text(
        "import numpy, torch\n"
        "def good(dataset):\n"
        "    net = torch.nn.Linear(3, dataset.num_classes)\n"
        "    torch.nn.init.constant_(net.bias, numpy.random.rand())\n"
        "    return net\n"
        "def bad(dataset):\n    return 7\n"
        "def alone():\n    return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    model = build_model("my_models_for_test:good", table(), seed=5)
    again = build_model("my_models_for_test:good", table(), seed=5)
    assert torch.equal(model.weight, again.weight)
    assert torch.equal(model.bias, again.bias)  # NumPy's numbers follow the seed too
    with pytest.raises(TypeError, match="returned a int"):
        build_model("my_models_for_test:bad", table())
    with pytest.raises(TypeError, match="cannot be called with the data set"):
        build_model("my_models_for_test:alone", table())
    assert extractor_of("my_models_for_test:good", table()) is None
    assert str(tmp_path) not in sys.path


def test_the_weight_of_a_class_multiplies_its_losses() -> None:
    dataset, outputs = table(), torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    batch = dataset.train[:]
    plain, weighted = (
        loss_of(dataset, weights)(lambda inputs: outputs, batch) for weights in ({}, {"1": 0.25})
    )
    torch.testing.assert_close(weighted, plain * torch.tensor([1.0, 0.25, 1.0, 0.25]))
    with pytest.raises(SettingsError, match="'2'"):
        loss_of(dataset, {"2": 1.0})
