"""The networks on which step times are compared, each with one fixed batch and its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def _classification(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def _language(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(dim=1)


def mlp(batch_size: int = 256) -> Task:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
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


def resnet20(batch_size: int = 128) -> Task:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    c_in = 16
    for c_out, stride in [(16, 1), (16, 1), (16, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1)]:
        layers.append(_Block(c_in, c_out, stride))
        c_in = c_out
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    inputs, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    return Task(model, inputs, labels, _classification)


class _Logits(nn.Module):
    """Explicit [B, T] positions, since hook-based libraries give none per record to broadcast ones."""

    def __init__(self, gpt2: nn.Module) -> None:
        super().__init__()
        self.gpt2 = gpt2

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1).contiguous()
        return self.gpt2(input_ids=ids, position_ids=positions, use_cache=False).logits


def gpt2(batch_size: int = 16, linear: bool = False) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    config = GPT2Config(
        vocab_size=5000, n_positions=64, n_embd=256, n_layer=4, n_head=4, tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
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


class _LastMean(nn.Module):
    """The mean over positions of what a recurrent layer gives."""

    def forward(self, outputs: tuple[Tensor, object]) -> Tensor:
        return outputs[0].mean(1)


def lstm(batch_size: int = 64) -> Task:
    model = nn.Sequential(nn.LSTM(64, 128, batch_first=True), _LastMean(), nn.Linear(128, 10))
    return Task(model, torch.randn(batch_size, 64, 64), torch.randint(0, 10, (batch_size,)), _classification)


TASKS: dict[str, Callable[..., Task]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet20": resnet20,
    "lstm": lstm,
    "gpt2lin": lambda batch_size=16: gpt2(batch_size, linear=True),
    "gpt2": gpt2,
}
