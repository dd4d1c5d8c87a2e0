"""Fine-tune a GPT-2 privately through LoRA adapters. Needs `pip install -e '.[hf]'`; no network is used.

python examples/hf_gpt2_lora.py

The weights are random and the text is a few lines, so that it runs anywhere in seconds: put your own
pretrained model and records in their places. A record is one sequence of tokens; its loss is the mean over
its tokens. Only the adapters are trained, noised and saved in the optimiser: the frozen weights never see a
private gradient.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import equipoise as eq

TEXT = "the quick brown fox jumps over the lazy dog and the dog sleeps on in the sun "
LENGTH = 32


def records(count: int = 200) -> dict[str, torch.Tensor]:
    """Windows of the text, one character per token: {"tokens": int64 [count, LENGTH]}."""
    codes = torch.tensor([ord(letter) for letter in TEXT * 20])
    starts = torch.arange(count) * 7 % len(TEXT)
    return {"tokens": torch.stack([codes[start : start + LENGTH] for start in starts.tolist()])}


def build_model() -> torch.nn.Module:
    """A two-layer GPT-2 with random weights, frozen, with rank-4 adapters on its attention."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(config), adapters)


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next token, one number per record, [B]."""
    tokens = batch["tokens"]
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def main(steps: int = 20) -> eq.Statement:
    """Train, print the loss on public text and the statement; the statement comes back."""
    model = build_model()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    public = {"tokens": records(8)["tokens"]}  # stands for text that is nobody's secret
    training = eq.PrivateTraining(
        model,
        torch.optim.AdamW(adapters, lr=0.01),
        loss=loss,
        data=records(),
        sampling=eq.Poisson(expected_batch_size=50, population=200, steps=steps),
        method=eq.DPSGD(clip_norm=0.1),
        budget=eq.Budget(epsilon=8.0, delta=1e-3),
    )
    print(training.describe())
    training.run(evaluate=lambda model: {"loss": float(loss(model, public).mean())})
    print(training.statement())
    return training.statement()


if __name__ == "__main__":
    main()
