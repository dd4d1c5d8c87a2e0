"""Noise on released tensors: one piece of a draw's stream for all tensors of one device and type."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equipoise.privacy.bounded import Bounded
from equipoise.privacy.correlated import CorrelatedNoise
from equipoise.privacy.draws import Draw
from equipoise.privacy.grid import GridStream, grid_unit, to_grid
from equipoise.privacy.noise import Secrets
from equipoise.privacy.normals import NormalStream
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


def on_grid(
    secrets: Secrets,
    draw: Draw,
    bounded: Bounded,
    multiplier: float,
    purpose: str,
    streams: list[GridStream],
) -> dict[str, torch.Tensor]:
    """The sum with exact normal noise on a grid of integers; see `grid`.

    Args:
        secrets: whose noise it is.
        draw: whose index picks the stream.
        bounded: the sum.
        multiplier: noise multiplier.
        purpose: of the stream.
        streams: the stream begun for this release, or nothing yet; a release with several sums goes on with
            it.
    """
    if not streams:
        streams.append(GridStream(secrets.stream_key(draw.index, purpose)))
    raws = {name: unwrap(value) for name, value in bounded.value.items()}
    unit = grid_unit(bounded.add_remove, sum(raw.numel() for raw in raws.values()), multiplier)
    out = {}
    for name in sorted(raws):
        raw = raws[name]
        sums = to_grid(raw, unit) + streams[0].draw(raw.numel())
        # from here on post-processing: half a unit makes up for rounding down
        values = torch.from_numpy(sums).to(torch.float64).add_(0.5).mul_(unit)
        dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
        out[name] = values.to(dtype).view(raw.shape).to(raw.device)
    return {name: out[name] for name in bounded.value}


def correlated(
    secrets: Secrets,
    draw: Draw,
    sums: Mapping[str, Bounded],
    noise: CorrelatedNoise,
    scale: float,
    purpose: str,
) -> Sums:
    """The sums of one draw with noise that they share: scale * (L z)_j for the j-th of them.

    `purpose` is the stream's.
    """
    streams: Streams = {}
    first = {name: unwrap(raw) for name, raw in sums[noise.names[0]].value.items()}
    normals = [_normals(secrets, draw, first, scale, purpose, streams) for _ in noise.names]
    out: Sums = {name: {} for name in sums}
    for j, name in enumerate(noise.names):
        for tensor in first:
            total = unwrap(sums[name].value[tensor]).to(normals[0][tensor].dtype).clone()
            for k in range(j + 1):
                total.add_(normals[k][tensor], alpha=noise.cholesky[j][k])
            out[name][tensor] = total
    return out


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
