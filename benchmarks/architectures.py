"""Models as users bring them, each with a loss and made-up records; `model_coverage.py` trains them.

Twenty architectures of transformers, made from small configurations, with padding and without. Ten shapes of
popular repositories, in torch alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: SCALE=4 in the environment makes the transformers four times as wide.
SCALE = int(os.environ.get("SCALE", "1"))
WORDS, LENGTH, WIDTH, HEADS, LAYERS, CLASSES, PIXELS = 101, 24, 48 * SCALE, 4, 2, 3, 16

Records = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """A model and how it is trained.

    Attributes:
        model: makes it, with random weights.
        loss: loss(model, batch) -> [B].
        records: makes that many records.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor]
    records: Callable[[int], Records]


# ---- losses and records of transformers


def classification(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over a record's tokens; a label of -100 is none, as everywhere in transformers."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


def next_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """All of the batch goes in, labels too, so that the model computes its own mean loss for nothing."""
    return per_token(model(**batch).logits[:, :-1], batch["labels"][:, 1:])


def same_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return per_token(model(**batch).logits, batch["labels"])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def texts(count: int) -> Records:
    return {"input_ids": torch.randint(3, WORDS, (count, LENGTH), generator=generator())}


def padded_texts(count: int) -> Records:
    lengths = torch.randint(LENGTH // 3, LENGTH + 1, (count,), generator=generator())
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": texts(count)["input_ids"] * mask, "attention_mask": mask}


def of_class(inputs: Callable[[int], Records]) -> Callable[[int], Records]:
    def made(count: int) -> Records:
        return inputs(count) | {"labels": torch.randint(CLASSES, (count,), generator=generator())}

    return made


def of_tokens(inputs: Callable[[int], Records]) -> Callable[[int], Records]:
    """The labels are the tokens, -100 where the text is padded."""

    def made(count: int) -> Records:
        records = inputs(count)
        ids = records["input_ids"]
        seen = records.get("attention_mask", torch.ones_like(ids))
        return records | {"labels": ids.masked_fill(seen == 0, -100)}

    return made


def images(count: int) -> Records:
    return {"pixel_values": torch.randn(count, 3, PIXELS, PIXELS, generator=generator())}


def sounds(count: int) -> Records:
    labels = torch.randint(3, WORDS, (count, LENGTH // 2), generator=generator())
    return {"input_features": torch.randn(count, 8, 2 * LENGTH, generator=generator()), "labels": labels}


# ---- models of transformers

BODY = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = BODY | {"num_key_value_heads": HEADS // 2}


def hf(config: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers from its configuration, in the mode for training."""

    def made() -> nn.Module:
        import transformers

        return getattr(transformers, head)(getattr(transformers, config)(**options)).train()

    return made


def with_and_without_mask(
    name: str,
    model: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    labelled: Callable[[Callable[[int], Records]], Callable[[int], Records]],
) -> dict[str, Architecture]:
    return {
        name: Architecture(model, loss, labelled(texts)),
        f"{name}, padded": Architecture(model, loss, labelled(padded_texts)),
    }


def encoder(name: str, config: str, head: str, **options: Any) -> dict[str, Architecture]:
    model = hf(config, head, **{**BODY, "num_labels": CLASSES, **options})
    return with_and_without_mask(name, model, classification, of_class)


def decoder(name: str, config: str, head: str, **options: Any) -> dict[str, Architecture]:
    return with_and_without_mask(name, hf(config, head, **options), next_token, of_tokens)


def translator(name: str, config: str, head: str, **options: Any) -> dict[str, Architecture]:
    return with_and_without_mask(name, hf(config, head, **options), same_token, of_tokens)


def vision(name: str, config: str, head: str, **options: Any) -> dict[str, Architecture]:
    model = hf(config, head, num_labels=CLASSES, image_size=PIXELS, **options)
    return {name: Architecture(model, classification, of_class(images))}


PATCHES = {
    "patch_size": 4,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
}

TRANSFORMERS = {
    **encoder("BERT", "BertConfig", "BertForSequenceClassification"),
    **encoder("RoBERTa", "RobertaConfig", "RobertaForSequenceClassification", pad_token_id=0),
    **encoder(
        "DistilBERT",
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        hidden_dim=2 * WIDTH,
    ),
    **encoder("ALBERT", "AlbertConfig", "AlbertForSequenceClassification", embedding_size=16),
    **encoder(
        "DeBERTa",
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    **encoder("ELECTRA", "ElectraConfig", "ElectraForSequenceClassification", embedding_size=16),
    **decoder(
        "GPT-2",
        "GPT2Config",
        "GPT2LMHeadModel",
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=1,
        eos_token_id=2,
    ),
    **decoder("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", **BODY),
    **decoder(
        "OPT",
        "OPTConfig",
        "OPTForCausalLM",
        **{**BODY, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH},
    ),
    **decoder("Llama", "LlamaConfig", "LlamaForCausalLM", **GROUPED),
    **decoder("Mistral", "MistralConfig", "MistralForCausalLM", **GROUPED, sliding_window=LENGTH // 2),
    **decoder("Gemma", "GemmaConfig", "GemmaForCausalLM", **GROUPED, head_dim=WIDTH // HEADS),
    **decoder("Qwen", "Qwen2Config", "Qwen2ForCausalLM", **GROUPED),
    **decoder("Phi", "PhiConfig", "PhiForCausalLM", **BODY),
    **translator(
        "T5",
        "T5Config",
        "T5ForConditionalGeneration",
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    **translator(
        "BART",
        "BartConfig",
        "BartForConditionalGeneration",
        vocab_size=WORDS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=2 * LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    ),
    **vision("ViT", "ViTConfig", "ViTForImageClassification", **PATCHES),
    **vision("DeiT", "DeiTConfig", "DeiTForImageClassification", **PATCHES),
    **vision(
        "Swin",
        "SwinConfig",
        "SwinForImageClassification",
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "Whisper": Architecture(
        hf(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            vocab_size=WORDS,
            num_mel_bins=8,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=2 * WIDTH,
            decoder_ffn_dim=2 * WIDTH,
            max_source_positions=LENGTH,
            max_target_positions=LENGTH,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        same_token,
        sounds,
    ),
}


# ---- losses and records of the others


def of_input(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def of_places(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A class for every pixel or every token."""
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return losses.flatten(1).mean(1)


def pictures(count: int) -> Records:
    labels = torch.randint(CLASSES, (count,), generator=generator())
    return {"x": images(count)["pixel_values"], "y": labels}


def segmented(count: int) -> Records:
    return pictures(count) | {"y": torch.randint(CLASSES, (count, PIXELS, PIXELS), generator=generator())}


def tagged(count: int) -> Records:
    words = texts(count)["input_ids"]
    return {"x": words, "y": words % CLASSES}


def graphs(count: int) -> Records:
    nodes, edges = 10, 24
    return {
        "x": torch.randn(count, nodes, 8, generator=generator()),
        "edges": torch.randint(nodes, (count, 2, edges), generator=generator()),
        "y": torch.randint(CLASSES, (count,), generator=generator()),
    }


# ---- models of torch alone


class ResidualBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, c_out), nn.GroupNorm(4, c_out)
        self.second = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)), inplace=True)))
        return F.relu(y + self.short(x))


def head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


def resnet() -> nn.Module:
    blocks = [ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), *blocks, *head(32))


class ChannelsLast(nn.Module):
    """ConvNeXt's block: depthwise, layer norm over channels, two dense layers, a scale per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow, self.scale = nn.Linear(4 * width, width), nn.Parameter(1e-2 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 4, 4), ChannelsLast(16), ChannelsLast(16), *head(16))


class SqueezedBlock(nn.Module):
    """EfficientNet's inverted bottleneck with squeeze and excitation."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(width, wide, 1, bias=False), nn.GroupNorm(4, wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False)
        self.norm2, self.norm3 = nn.GroupNorm(4, wide), nn.GroupNorm(4, width)
        self.squeeze, self.excite = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)
        self.project = nn.Conv2d(wide, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm2(self.depthwise(F.silu(self.norm1(self.expand(x))))))
        share = torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return x + self.norm3(self.project(y * share))


def efficientnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), SqueezedBlock(16, 32), SqueezedBlock(16, 32), *head(16))


def double(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1),
        nn.GroupNorm(4, c_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(c_out, c_out, 3, padding=1),
        nn.GroupNorm(4, c_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double(3, 8), double(8, 16), double(16, 32)
        self.up2, self.join2 = nn.ConvTranspose2d(32, 16, 2, 2), double(32, 16)
        self.up1, self.join1 = nn.ConvTranspose2d(16, 8, 2, 2), double(16, 8)
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        up = self.up2(self.bottom(F.max_pool2d(second, 2)))
        up = self.up1(self.join2(torch.cat([up, second], 1)))
        return self.out(self.join1(torch.cat([up, first], 1)))


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, padding_idx=0)
        self.body = kind(16, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.words(x))[0]).transpose(1, 2)


class GraphNetwork(nn.Module):
    """The nodes of all graphs in one long list, as PyTorch Geometric batches them; messages by index."""

    def __init__(self) -> None:
        super().__init__()
        self.message1, self.own1 = nn.Linear(8, 16), nn.Linear(8, 16)
        self.message2, self.own2 = nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        count, nodes, _ = x.shape
        shifted = edges + nodes * torch.arange(count, device=x.device)[:, None, None]
        source, target = shifted.transpose(0, 1).flatten(1)
        graph = torch.arange(count, device=x.device).repeat_interleave(nodes)
        h = x.flatten(0, 1)
        for message, own in ((self.message1, self.own1), (self.message2, self.own2)):
            sent = torch.zeros(count * nodes, 16).to(h).index_add(0, target, message(h)[source])
            h = F.relu(own(h) + sent)
        pooled = torch.zeros(count, 16).to(h).index_add(0, graph, h)
        return self.out(pooled / nodes)


def of_graph(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["edges"]), batch["y"], reduction="none")


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS**2, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3 * PIXELS**2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + (log_variance / 2).exp() * torch.randn_like(mean)), mean, log_variance


def evidence(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out, mean, log_variance = model(batch["x"])
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return (out - batch["x"].flatten(1)).square().mean(1) + 1e-3 * kl


class DiffusionUNet(nn.Module):
    """A U-Net that takes the time by sines, with attention at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1)
        self.norm, self.attention = nn.GroupNorm(4, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.out = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-torch.arange(8, device=x.device) * math.log(1e4) / 8)
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.first(x)
        low = F.silu(self.down(first) + embedded[:, :, None, None])
        places = self.norm(low).flatten(2).transpose(1, 2)
        low = low + self.attention(places, places, places)[0].transpose(1, 2).view_as(low)
        wide = F.interpolate(low, scale_factor=2, mode="nearest")
        return self.out(F.silu(self.up(torch.cat([wide, first], 1))))


def denoising(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    x = batch["x"]
    time = torch.rand(len(x), device=x.device).to(x)
    noise, share = torch.randn_like(x), torch.cos(time * math.pi / 2)[:, None, None, None]
    noised = share * x + (1 - share**2).sqrt() * noise
    return (model(noised, 1000 * time) - noise).square().flatten(1).mean(1)


class MixerBlock(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 32), nn.GELU(), nn.Linear(32, places))
        self.along = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, 32), MixerBlock(16, 32))
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


class SelectiveScan(nn.Module):
    """Mamba's block: a causal depthwise convolution and a scan whose steps follow the input."""

    def __init__(self, width: int = 16, states: int = 4) -> None:
        super().__init__()
        self.states = states
        self.words, self.enter = nn.Embedding(WORDS, width), nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.select, self.step = nn.Linear(width, 2 * states + 1), nn.Linear(1, width)
        self.log_decay = nn.Parameter(torch.arange(1.0, states + 1).repeat(width, 1).log())
        self.skip, self.leave = nn.Parameter(torch.ones(width)), nn.Linear(width, width)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        inner, gate = self.enter(h).chunk(2, -1)
        inner = F.silu(self.conv(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, into, out_of = self.select(inner).split([1, self.states, self.states], -1)
        step = F.softplus(self.step(step))
        decay = torch.exp(-step[..., None] * self.log_decay.exp())
        added = step[..., None] * into[:, :, None] * inner[..., None]
        state, seen = torch.zeros_like(added[:, 0]), []
        for place in range(x.shape[1]):
            state = decay[:, place] * state + added[:, place]
            seen.append((state * out_of[:, place, None]).sum(-1))
        y = (torch.stack(seen, 1) + self.skip * inner) * F.silu(gate)
        return self.out((h + self.leave(y)).mean(1))


OTHERS = {
    "ResNet": Architecture(resnet, of_input, pictures),
    "ConvNeXt": Architecture(convnext, of_input, pictures),
    "U-Net": Architecture(UNet, of_places, segmented),
    "EfficientNet": Architecture(efficientnet, of_input, pictures),
    "GRU tagger": Architecture(lambda: Tagger(nn.GRU), of_places, tagged),
    "LSTM tagger": Architecture(lambda: Tagger(nn.LSTM), of_places, tagged),
    "graph network": Architecture(GraphNetwork, of_graph, graphs),
    "VAE": Architecture(VAE, evidence, pictures),
    "diffusion U-Net": Architecture(DiffusionUNet, denoising, pictures),
    "MLP-Mixer": Architecture(Mixer, of_input, pictures),
    "Mamba-like scan": Architecture(
        SelectiveScan,
        of_input,
        lambda count: {
            "x": texts(count)["input_ids"],
            "y": of_class(texts)(count)["labels"],
        },
    ),
}

ARCHITECTURES = TRANSFORMERS | OTHERS
