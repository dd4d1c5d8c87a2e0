"""The networks on which step times are compared, each with one fixed batch.

`TASKS` is the table of regimes: a number at the end of a name is the size of the batch, where a network is
measured at several; of a language model it is the length of a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """A network, a fixed batch of inputs and labels, and the loss of one record."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    losses: Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> [B]

    def to(self, device: torch.device) -> Task:
        """The same network, moved there, and its batch."""
        here = {"inputs": self.inputs.to(device), "labels": self.labels.to(device)}
        return replace(self, model=self.model.to(device), **here)


def _classification(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def _language(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(dim=1)


def _flat_language(outputs: Tensor, labels: Tensor) -> Tensor:
    """The same losses with logits flattened, as users of `transformers` write it."""
    losses = F.cross_entropy(outputs.view(-1, outputs.shape[-1]), labels.view(-1), reduction="none")
    return losses.view(labels.shape).mean(dim=1)


def mlp(batch_size: int = 256, width: int = 512, hidden: int = 1) -> Task:
    """670,000 parameters; 10 million with three hidden layers of 2,048."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, width), nn.ReLU()]
    for _ in range(hidden):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return Task(model, torch.randn(batch_size, 784), torch.randint(0, 10, (batch_size,)), _classification)


def cnn(batch_size: int = 256) -> Task:
    """The tanh network of the literature on private training: 26,010 parameters on 28x28 pixels."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    inputs, labels = torch.randn(batch_size, 1, 28, 28), torch.randint(0, 10, (batch_size,))
    return Task(model, inputs, labels, _classification)


class _Block(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, c_out)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.short = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.GroupNorm(8, c_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


def resnet(batch_size: int, stages: tuple[int, ...], blocks: int) -> Task:
    """Stages of blocks with so many channels, each but the first at half the pixels of the one before."""
    first = stages[0]
    layers: list[nn.Module] = [nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.GroupNorm(8, first), nn.ReLU()]
    c_in = first
    for c_out in stages:
        for block in range(blocks):
            layers.append(_Block(c_in, c_out, 2 if block == 0 and c_out != first else 1))
            c_in = c_out
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, 10))
    inputs, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    return Task(model, inputs, labels, _classification)


def resnet20(batch_size: int = 128) -> Task:
    return resnet(batch_size, (16, 32, 64), blocks=3)


def resnet18(batch_size: int = 32) -> Task:
    """11 million parameters."""
    return resnet(batch_size, (64, 128, 256, 512), blocks=2)


class _Logits(nn.Module):
    """Explicit [B, T] positions, since hook-based libraries give none per record to broadcast ones."""

    def __init__(self, gpt2: nn.Module) -> None:
        super().__init__()
        self.gpt2 = gpt2

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1).contiguous()
        return self.gpt2(input_ids=ids, position_ids=positions, use_cache=False).logits


def gpt2(batch_size: int = 16, linear: bool = False, checkpointed: bool = False) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    config = GPT2Config(
        vocab_size=5000, n_positions=64, n_embd=256, n_layer=4, n_head=4, tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if linear:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Conv1D):
                    layer = nn.Linear(child.weight.shape[0], child.weight.shape[1])
                    layer.weight.data.copy_(child.weight.data.T)
                    layer.bias.data.copy_(child.bias.data)
                    setattr(module, name, layer)
    ids = torch.randint(0, 5000, (batch_size, 65))
    return Task(_Logits(model), ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), _language)


def gpt2_small(
    batch_size: int = 4, length: int = 128, low_rank: bool = False, flat: bool = False, **sizes: int
) -> Task:
    """124 million parameters, head and table tied, as Hugging Face ships it; or LoRA of rank 8 on it.

    Args:
        batch_size, length: of the batch and of its records.
        low_rank: train LoRA alone.
        flat: whether the loss flattens the logits; else their classes are the second axis.
        sizes: of `GPT2Config`, others than those of GPT-2 small.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **sizes
    )
    model: nn.Module = GPT2LMHeadModel(config)
    if low_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))
    ids = torch.randint(0, config.vocab_size, (batch_size, length + 1))
    return Task(
        _Logits(model),
        ids[:, :-1].contiguous(),
        ids[:, 1:].contiguous(),
        _flat_language if flat else _language,
    )


class Block(nn.Module):
    """A block of a language model: attention and two layers behind norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """4.2 million parameters."""

    def __init__(self, width: int = 256, layers: int = 4, words: int = 2000, length: int = 256) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        x = self.table(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language(batch_size: int, length: int, words: int = 2000, tied: bool = False) -> Task:
    model = LanguageModel(words=words, length=length)
    if tied:
        model.head.weight = model.table.weight
    tokens = torch.randint(0, words, (batch_size, length + 1))
    return Task(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), _language)


class _Attention(nn.Module):
    """PyTorch's layer of attention, of a sequence to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x, x, x, need_weights=False)[0]


class _Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def attention(batch_size: int = 64) -> Task:
    """Two layers of nn.MultiheadAttention over sequences of 64 vectors, then a class."""
    model = nn.Sequential(_Attention(128, 4), _Attention(128, 4), _Mean(), nn.Linear(128, 10))
    return Task(model, torch.randn(batch_size, 64, 128), torch.randint(0, 10, (batch_size,)), _classification)


class _Outputs(nn.Module):
    """What a recurrent layer gives at every position."""

    def forward(self, outputs: tuple[Tensor, object]) -> Tensor:
        return outputs[0]


def recurrent(kind: type[nn.LSTM] | type[nn.GRU], batch_size: int = 64) -> Task:
    """A class for each sequence of 64 vectors: a recurrent layer, the mean over positions, a linear layer."""
    model = nn.Sequential(kind(64, 128, batch_first=True), _Outputs(), _Mean(), nn.Linear(128, 10))
    return Task(model, torch.randn(batch_size, 64, 64), torch.randint(0, 10, (batch_size,)), _classification)


def tagger(kind: type[nn.LSTM] | type[nn.GRU], batch_size: int = 64) -> Task:
    """A tag for each of 64 words: an embedding, two recurrent layers in both directions, a linear layer."""
    layers = kind(64, 128, num_layers=2, bidirectional=True, batch_first=True)
    model = nn.Sequential(nn.Embedding(2000, 64), layers, _Outputs(), nn.Linear(256, 20))
    words, tags = (torch.randint(0, count, (batch_size, 64)) for count in (2000, 20))
    return Task(model, words, tags, _language)


#: By name: makes the task, with another `batch_size` where one is given.
TASKS: dict[str, Callable[..., Task]] = {
    "mlp-16": partial(mlp, batch_size=16),
    "mlp": mlp,
    "mlp-1024": partial(mlp, batch_size=1024),
    "mlp10m-16": partial(mlp, batch_size=16, width=2048, hidden=2),
    "mlp10m-256": partial(mlp, batch_size=256, width=2048, hidden=2),
    "cnn-16": partial(cnn, batch_size=16),
    "cnn": cnn,
    "cnn-1024": partial(cnn, batch_size=1024),
    "resnet20-16": partial(resnet20, batch_size=16),
    "resnet20": resnet20,
    "resnet18": resnet18,
    "attention": attention,
    "lstm": partial(recurrent, nn.LSTM),
    "gru": partial(recurrent, nn.GRU),
    "lstm-tagger": partial(tagger, nn.LSTM),
    "gru-tagger": partial(tagger, nn.GRU),
    "lm-64": partial(language, batch_size=16, length=64),
    "lm-256": partial(language, batch_size=16, length=256),
    "lm-1024": partial(language, batch_size=4, length=1024),
    "lm-50k-words": partial(language, batch_size=16, length=64, words=50_000),
    "lm-50k-words-tied": partial(language, batch_size=16, length=64, words=50_000, tied=True),
    "gpt2lin": partial(gpt2, linear=True),
    "gpt2": gpt2,
    "gpt2-checkpointed": partial(gpt2, checkpointed=True),
    "gpt2-small": gpt2_small,
    "gpt2-small-flat": partial(gpt2_small, flat=True),
    "gpt2-small-16x64": partial(gpt2_small, batch_size=16, length=64),
    "lora": partial(gpt2_small, low_rank=True),
    "lora-flat": partial(gpt2_small, low_rank=True, flat=True),
    "lora-16x64": partial(gpt2_small, batch_size=16, length=64, low_rank=True),
}
