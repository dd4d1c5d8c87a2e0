"""Models of transformers in use: tokenizers, checkpoints, autocast, adapters, generate."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from small_problems import training

import equipoise as eq

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
COUNT, LENGTH = 60, 12


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def bert(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=LENGTH, num_labels=2, **options,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).train()


def gpt2(**options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=2,
        eos_token_id=3, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def sentences():
    """Tokenised, of different lengths, as `datasets` would give them."""
    rng = torch.Generator().manual_seed(1)
    words = [
        torch.randint(4, len(WORDS), (int(n),), generator=rng) for n in torch.randint(3, LENGTH, (COUNT,))
    ]
    texts = [" ".join(WORDS[word] for word in text) for text in words]
    encoded = tokenizer()(texts)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": sum(ids) % 2}
        for ids, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
    ]


def tokens():
    rng = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(4, len(WORDS), (COUNT, LENGTH), generator=rng)}


def classified(model, batch):
    labels = batch["labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits.float(), labels, reduction="none")


def next_token(model, batch):
    logits = model(**batch).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2).float(), batch["input_ids"][:, 1:], reduction="none").mean(
        1
    )


def trained(model, loss, data, steps=2, **options):
    run = training(
        model,
        optimizer=lambda own, lr: torch.optim.AdamW([p for p in own if p.requires_grad], lr=0.01),
        loss=loss,
        data=data,
        sampling=eq.Poisson(expected_batch_size=15, population=COUNT, steps=steps),
        method=eq.DPSGD(clip_norm=0.1, noise_multiplier=1.0),
        **options,
    )
    run.run(progress=False)
    return run


def parameters(run):
    return torch.cat([p.detach().flatten() for p in run.parameters.values()])


def by_rule(training):
    assert {covered.how for covered in training.engine.coverage()} == {"rule"}


def test_batches_of_a_collator_for_tokenizers():
    """They are a BatchEncoding, which is a mapping and no dict."""
    collate = transformers.DataCollatorWithPadding(tokenizer())
    assert not isinstance(collate(sentences()[:2]), dict)
    by_rule(trained(bert(), classified, sentences(), collate=collate))


@pytest.mark.parametrize(("make", "attention"), [(bert, "eager"), (gpt2, "sdpa")])
def test_gradient_checkpointing_changes_no_number(make, attention):
    loss = next_token if make is gpt2 else classified
    data = tokens() if make is gpt2 else tokens() | {"labels": tokens()["input_ids"][:, 0] % 2}
    ends = []
    for is_checkpointed in (False, True):
        model = make(attn_implementation=attention)
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ends.append(parameters(trained(model, loss, data)))
    torch.testing.assert_close(*ends)


def test_autocast_in_the_loss():
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return next_token(model, batch)

    training = trained(gpt2(), loss, tokens())
    by_rule(training)
    assert parameters(training).dtype == torch.float32


@pytest.mark.parametrize(
    "variant", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["LoRA", "DoRA", "rsLoRA"]
)
def test_adapters(tmp_path, variant):
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True, **variant
    )
    model = peft.get_peft_model(gpt2(), config)
    training = trained(model, next_token, tokens())
    by_rule(training)
    assert all("lora_" in name for name in training.parameters)
    model.eval().save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path).eval()
    torch.testing.assert_close(again(**tokens()).logits, model(**tokens()).logits)


def test_a_trained_model_is_saved_and_loaded(tmp_path):
    model = trained(bert(), classified, tokens() | {"labels": tokens()["input_ids"][:, 0] % 2}).model
    model.save_pretrained(tmp_path)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
