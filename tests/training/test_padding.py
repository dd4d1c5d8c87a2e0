"""Texts of many lengths, padded to the longest of their batch: fine with a mask, refused without one."""

from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from small_problems import RECORDS, owners, training
from torch import nn

import equipoise as eq
from equipoise.data import PadTo
from equipoise.statements.assumptions import Assumption

WORDS, WIDTH = 50, 24


class Texts(torch.utils.data.Dataset):
    """Texts of 4 to 19 words, or all but one of the same length."""

    def __init__(self, count=120, lengths=None, seed=0):
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 20, (count,), generator=rng).tolist() if lengths is None else lengths
        self.texts = [torch.randint(1, WORDS, (length,), generator=rng) for length in lengths]
        self.labels = torch.randint(0, 2, (len(lengths),), generator=rng)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, number):
        return self.texts[number], self.labels[number]


def padded(items, width=None):
    width = width or max(len(text) for text, _ in items)
    words = torch.stack([F.pad(text, (0, width - len(text))) for text, _ in items])
    return {"words": words, "label": torch.stack([label for _, label in items])}


class Pooled(nn.Module):
    """Over a text's embeddings, or over those of the padding too, for want of a mask."""

    def __init__(self, pool, body=None):
        super().__init__()
        self.words, self.head, self.body, self.pool = nn.Embedding(WORDS, 16), nn.Linear(16, 2), body, pool

    def forward(self, words, mask):
        found = self.words(words)
        return self.head(self.pool(found if self.body is None else self.body(found), words, mask))


def mean(found, words, mask):
    mask = torch.ones_like(words) if mask is None else mask
    return (found * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def Mean():
    return Pooled(mean)


def bert(layers=1):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=WIDTH, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def loss_of(is_masked, half=False):
    def loss(model, batch):
        words = batch["words"]
        mask = (words > 0).long() if is_masked else None
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            given = {"attention_mask": mask} if hasattr(model, "config") else {"mask": mask}
            answer = model(words, **given)
            logits = answer.logits if hasattr(model, "config") else answer
            return F.cross_entropy(logits.float(), batch["label"], reduction="none")

    return loss


def started(model, loss, data=None, collate=padded, steps=2, **settings):
    """A run after its first step."""
    data = data or Texts()
    population = len(data) if isinstance(data, Texts) else 100
    sampling = eq.Poisson(expected_batch_size=20, population=population, steps=steps)
    options = {"data": data, "collate": collate, "loss": loss, "sampling": sampling, "reproducible": False}
    run = training(model, **options | settings)
    run.take_step()
    return run


def test_models_that_mask_their_padding_are_taken():
    """Also one whose padding's features are below all others, so that the largest ones follow the text."""

    def largest(found, words, mask):
        return found.masked_fill(words[..., None] == 0, -1e9).amax(1)

    assert not started(Mean(), loss_of(True, half=True)).statement().warnings
    started(Pooled(largest), loss_of(False))


@pytest.mark.wide
def test_a_transformer_that_masks_its_padding_is_taken():
    assert not started(bert(), loss_of(True)).statement().warnings


def test_padding_without_a_mask_is_refused_in_bfloat16():
    """A short text's loss may move by less than losses round, while its gradient moves a lot."""
    with pytest.raises(ValueError, match="mixes records"):
        started(Mean(), loss_of(False, half=True))


ENCODER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
POOLINGS = {
    "mean": Mean,
    "last state": lambda: Pooled(lambda found, *_: found[1][-1], nn.GRU(16, 16, batch_first=True)),
    "largest": lambda: Pooled(lambda found, *_: found.amax(1)),
    "first": lambda: Pooled(lambda found, *_: found[:, 0], ENCODER),  # as models with a class token are read
    "encoder": bert,
}


@pytest.mark.parametrize("name", [*list(POOLINGS)[:4], pytest.param("encoder", marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    "order", [0, *(pytest.param(order, marks=pytest.mark.slow) for order in range(1, 24))]
)
def test_no_pooling_over_padding_is_taken_in_any_order(name, order):
    """The same texts in 24 orders: which of them stand next to each other is chance."""
    texts, order_of = Texts(), torch.Generator().manual_seed(order)
    places = torch.randperm(len(texts), generator=order_of).tolist()
    texts.texts, texts.labels = [texts.texts[i] for i in places], texts.labels[places]
    torch.manual_seed(order)
    with pytest.raises(ValueError, match="mixes records"):
        started(POOLINGS[name](), loss_of(False), texts)


def test_one_long_text_among_short_ones_is_tried():
    """It is looked for: records at equal distances have one length here."""
    data = Texts(lengths=[6] * 77 + [18] + [6] * 122)
    with pytest.raises(ValueError, match="mixes records"):
        started(Mean(), loss_of(False), data)
    assert Assumption.SHAPES_FOLLOW in started(Mean(), loss_of(True), data).statement().assumptions


@pytest.mark.parametrize(("collate", "lengths"), [(partial(padded, width=WIDTH), None), (padded, [7] * 100)])
def test_the_statement_says_that_shapes_follow_no_record(collate, lengths):
    assumptions = started(Mean(), loss_of(True), Texts(lengths=lengths), collate).statement().assumptions
    assert Assumption.SHAPES_ALIKE in assumptions
    assert Assumption.SHAPES_FOLLOW not in assumptions


def test_the_statement_says_that_widths_are_those_of_the_records_drawn():
    """Also where the few that were tried at the start have one width."""
    run = started(Mean(), loss_of(True), collate=partial(padded, width=WIDTH), widths=[8] * 120)
    assert Assumption.SHAPES_FOLLOW in run.statement().assumptions
    assert Assumption.SHAPES_ALIKE not in run.statement().assumptions


@pytest.mark.parametrize(("shape", "axis"), [((2, 3), 1), ((2, 3, 4), 1), ((2, 4, 3), -1)])
def test_padding_is_behind_the_records_up_to_the_last_length(shape, axis):
    collate = PadTo(lambda items: {"x": torch.ones(shape), "y": 1}, (2, 5), {"x": 7}, axis)
    found = collate([])["x"]
    assert found.narrow(axis, 0, 3).eq(1).all()
    assert found.narrow(axis, 3, 2).eq(7).all()
    assert found.numel() == torch.ones(shape).numel() // 3 * 5
    with pytest.raises(ValueError, match="lengths"):
        PadTo(lambda items: {"x": torch.ones(1, 9)}, (4, 8), {"x": 0})([])
    with pytest.raises(ValueError, match="lengths"):
        PadTo(padded, (8, 4), {"words": 0})


def taken(data):
    """Parameters after a step, from public seeds, and the run."""
    torch.manual_seed(0)
    model = Mean()
    run = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        loss=loss_of(True),
        data=data,
        sampling=eq.Poisson(40, 120, 2),
        method=eq.DPSGD(clip_norm=0.5, noise_multiplier=1.0),
        run=eq.Run(seed=3, reproducible=True),
    )
    data.collate.seen.clear()
    run.take_step()
    return dict(run.parameters)


class Seen(PadTo):
    """Notes how long each record was, and to what it was padded."""

    seen: ClassVar = []

    def __call__(self, items):
        batch = super().__call__(items)
        self.seen.extend((len(text), batch["words"].shape[1]) for text, _ in items)
        return batch


def test_records_of_one_width_share_forwards():
    """They train what they train unsorted; how far a record is padded follows from itself alone."""
    texts, collate, found = Texts(), Seen(padded, (8, 12, 24), {"words": 0}), []
    for widths in ([collate.width(len(text)) for text in texts.texts], None):
        ended = taken(eq.Data(texts, collate=collate, widths=widths, microbatch_size=8))
        found.append((ended, sorted(Seen.seen)))
    (alike, of_sorted), (unsorted, others) = found
    assert all(width == collate.width(length) for length, width in of_sorted)
    assert [length for length, _ in of_sorted] == [length for length, _ in others]
    assert sum(width for _, width in of_sorted) < sum(width for _, width in others)
    for name, value in alike.items():
        torch.testing.assert_close(value, unsorted[name], rtol=1e-5, atol=1e-6)


def test_what_is_known_of_the_model_follows_no_width_that_is_drawn():
    """One record has a width of its own: the statement says at the start what it says after its draw."""

    def read(found, words, mask):  # of some texts a value is read, so that nothing is proved
        return mean(found, words, mask) * (1 if words.shape[1] != 12 or words.sum() >= 0 else 2)

    texts, collate = Texts(lengths=[6] * 60 + [10] + [18] * 59), PadTo(padded, (8, 12, 24), {"words": 0})
    for model, word in ((Mean(), "proved"), (Pooled(read), "compared")):
        run = training(
            model,
            loss=loss_of(True),
            data=texts,
            collate=collate,
            widths=[collate.width(len(text)) for text in texts.texts],
            sampling=eq.Poisson(1, 120, 2),
        )
        assert run.engine.independence.word == word


def test_more_lengths_than_are_traced_leave_room_for_those_that_are_drawn():
    texts, collate = Texts(lengths=[14, 17, 19] * 40), PadTo(padded, range(2, 64), {"words": 0})
    widths = [collate.width(len(text)) for text in texts.texts]
    run = started(Mean(), loss_of(True), texts, collate, widths=widths)
    assert run.engine.independence.word == "proved"
    assert not run.engine.runs_model


@pytest.mark.parametrize("widths", [[8] * 119, [8.5] * 120, torch.ones(120, 1, dtype=torch.long)])
def test_widths_that_are_refused(widths):
    collate = Seen(padded, (8, 12, 24), {"words": 0})
    with pytest.raises(ValueError, match="widths must hold one whole number per record"):
        taken(eq.Data(Texts(), collate=collate, widths=widths))
    with pytest.raises(ValueError, match="no users may be sampled"):
        training(widths=[8] * RECORDS, unit=eq.Users(owners(), records_per_user=2, rows="mean"))
