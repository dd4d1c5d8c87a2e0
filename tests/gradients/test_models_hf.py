"""Hugging Face models as they come, small and with random weights, against the oracle."""

import pytest
import torch
import torch.nn.functional as F
from oracle_cases import compare

from equipoise.gradients import CrossRecordError, GradientEngine, dense_gradients

transformers = pytest.importorskip("transformers")

B, T, V = 4, 5, 23
ATTENTION = ["eager", "sdpa"]


def language_loss(model, batch):
    logits = model(**batch).logits
    labels = batch["input_ids"]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses.view(labels.shape[0], -1).mean(1)


def tokens():
    ids = torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


T5 = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}


def gpt2(attention="eager"):
    sizes = {"vocab_size": V, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, attn_implementation=attention)
    ).double()


def test_tied_gpt2_is_one_parameter_of_two_uses():
    engine = compare(gpt2("sdpa").eval(), language_loss, tokens(), how="rule")
    head = {c.name: c for c in engine.coverage()}["transformer.wte.weight"]
    assert set(head.operations) == {"embedding", "linear"}


@pytest.mark.parametrize("attention", ATTENTION)
def test_t5_with_dropout(attention):
    """Its bias by relative position is a parameter inside the attention kernel."""
    config = transformers.T5Config(**T5, attn_implementation=attention)
    model = transformers.T5ForConditionalGeneration(config).double()

    def loss(model, batch):
        logits = model(**batch, labels=batch["input_ids"]).logits
        return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"], reduction="none").mean(1)

    compare(model.eval(), loss, tokens(), how="rule")
    assert model.train().config.dropout_rate > 0
    engine = GradientEngine(model, loss, tokens())
    torch.manual_seed(3)
    sums = engine(tokens()).weighted_sums(torch.ones(B).double())
    torch.manual_seed(3)
    loss(model, tokens()).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(sums[name], p.grad)


def test_a_loss_that_balances_experts_is_refused_for_what_it_is():
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    kind = {"experts_implementation": "grouped_mm", "output_router_logits": True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **kind))

    def loss(model, batch):
        out = model(**batch, labels=batch["input_ids"])
        return language_loss(lambda **_: out, batch) + out.aux_loss

    with pytest.raises(CrossRecordError, match="balances experts"):
        GradientEngine(model, loss, tokens())


def test_a_router_that_casts_its_layer():
    experts = {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    experts |= {"num_experts": 4, "dropout_rate": 0.0, "router_jitter_noise": 0.0}
    config = transformers.SwitchTransformersConfig(**T5, **experts)
    model = transformers.SwitchTransformersForConditionalGeneration(config)

    def loss(model, batch):
        logits = model(**batch, labels=batch["input_ids"]).logits
        return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"], reduction="none").mean(1)

    engine = GradientEngine(model, loss, tokens())
    assert "dense" in {c.how for c in engine.coverage()}
    expected = dense_gradients(model, loss, tokens()).row_norms()
    torch.testing.assert_close(engine(tokens()).row_norms(), expected, rtol=1e-4, atol=0)


def test_lora_adapted_gpt2():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.1, fan_in_fan_out=True
    )
    model = peft.get_peft_model(gpt2(), config).double().eval()
    engine = compare(model, language_loss, tokens(), how="rule")
    assert all("lora_" in c.name for c in engine.coverage())


def test_checkpoints_with_dropout():
    """Hugging Face's own switch. In training the second forward of a checkpoint has the first one's masks."""
    model, batch = gpt2(), tokens()
    model.gradient_checkpointing_enable()
    model.train()
    assert model.config.resid_pdrop > 0
    engine = GradientEngine(model, language_loss, batch)
    rows = []
    for checkpointed in (True, False):
        if not checkpointed:
            model.gradient_checkpointing_disable()
        torch.manual_seed(3)
        rows.append(engine(batch).row_norms())
    torch.testing.assert_close(*rows)
