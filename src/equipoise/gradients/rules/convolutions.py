"""Rules for convolutions and transposed convolutions."""

from __future__ import annotations

from torch import Tensor

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.convolution import ConvFactor, ConvGeometry
from equipoise.gradients.rules.operation import Finish, Operation, channel_sum, record_first


def _convolution(op: Operation, transposed: bool) -> Finish | None:
    names: tuple[str, ...] = ("input", "weight", "bias", "stride", "padding")
    names += ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    given = dict(zip(names, op.get(*names), strict=True))
    x, weight, bias = given["input"], given["weight"], given["bias"]
    layout, records = op.layout(x), op.records
    if layout is None or op.tracks(x) or layout.axis != 0 or x.ndim != weight.ndim:
        return None
    kept = x.detach() if op.tracks(weight) else None
    geometry = ConvGeometry.of(
        weight.shape[2:],
        **{
            name: given[name]
            for name in ("stride", "padding", "dilation", "groups")
            if given[name] is not None
        },
    )
    bias = bias if op.tracks(bias) else None

    def finish(b: Tensor) -> list[tuple[Tensor, Factor]]:
        found: list[tuple[Tensor, Factor]] = []
        if kept is not None:
            x, y = record_first(kept, layout, records), record_first(b, layout, records)
            # A transposed convolution is the adjoint: what came in and what came back change places.
            found.append((weight, ConvFactor(y, x, geometry) if transposed else ConvFactor(x, y, geometry)))
        if bias is not None:
            found.append((bias, DenseFactor(channel_sum(b, layout, records))))
        return found

    return finish


def conv(op: Operation) -> Finish | None:
    """``conv1d``, ``conv2d``, ``conv3d``."""
    return _convolution(op, transposed=False)


def conv_transpose(op: Operation) -> Finish | None:
    """``conv_transpose1d``, ``2d``, ``3d``."""
    return _convolution(op, transposed=True)
