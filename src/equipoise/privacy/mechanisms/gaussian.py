"""Noise on released tensors: one piece of a draw's stream for all tensors of one device and type."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equipoise.privacy.draw import Draw
from equipoise.privacy.noise.secrets import Secrets
from equipoise.privacy.noise.streams import NormalStream
from equipoise.privacy.private import unwrap

Sums = dict[str, dict[str, torch.Tensor]]


Streams = dict[torch.device, NormalStream]


def noised(
    secrets: Secrets,
    draw: Draw,
    value: Mapping[str, torch.Tensor],
    std: float,
    purpose: str,
    streams: Streams,
) -> dict[str, torch.Tensor]:
    """The named tensors with independent normal noise of this standard deviation, float32 at least.

    Args:
        secrets: whose noise it is.
        draw: whose index picks the stream.
        value: raw or `Private` tensors.
        std: standard deviation.
        purpose: of the stream.
        streams: the streams begun for this release, one a device; a release with several sums goes on with
            them.
    """
    raws = {name: unwrap(value[name]) for name in sorted(value)}
    noise = _normals(secrets, draw, raws, std, purpose, streams)
    out = {name: noise[name].add_(raw) for name, raw in raws.items()}  # the noise's memory becomes the result
    return {name: out[name] for name in value}


def _normals(
    secrets: Secrets, draw: Draw, like: Mapping[str, torch.Tensor], std: float, purpose: str, streams: Streams
) -> dict[str, torch.Tensor]:
    """Normal noise in the shapes of `like`, in float32 at least; one piece of the stream a kind."""
    kinds: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, raw in like.items():
        dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
        kinds.setdefault((raw.device, dtype), []).append(name)
    out = {}
    for (device, dtype), names in kinds.items():
        if device not in streams:
            where = purpose if device.type == "cpu" else f"{purpose} {device}"  # two devices, two streams
            streams[device] = secrets.noise(draw.index, device, where)
        flat = streams[device].draw(sum(like[name].numel() for name in names), std, dtype)
        pieces = torch.split(flat, [like[name].numel() for name in names])
        out.update({name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)})
    return out
