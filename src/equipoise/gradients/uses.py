"""The factors of one parameter's uses, put together over records or paired over two points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from equipoise.gradients.base import DenseFactor, Factor

__all__ = ["checked_names", "differing_uses", "joined_uses", "shapes_of"]


def joined_uses(parts: Sequence[tuple[Factor, ...]]) -> tuple[Factor, ...]:
    """The uses of one parameter over the records of all parts; rows where the parts use it differently."""
    counts = {len(kept) for kept in parts}
    if len(counts) == 1:
        return tuple(Factor.concat(uses) for uses in zip(*parts, strict=True))
    used = [kept for kept in parts if kept]
    shape = used[0][0].shape
    rows = []
    for kept in parts:
        if not kept:
            raise ValueError(
                f"a parameter of shape {tuple(shape)} is used in some parts and not in "
                "others, so that its records cannot be counted; materialise() the parts first"
            )
        rows.append(torch.stack([factor.materialise() for factor in kept]).sum(0))
    return (DenseFactor(torch.cat(rows)),)


def differing_uses(left: tuple[Factor, ...], right: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """Uses paired in order where they match; rows where the two points use the parameter differently."""
    if [factor.kind for factor in left] == [factor.kind for factor in right]:
        return tuple(a.difference(b) for a, b in zip(left, right, strict=True))
    if not left:
        return (DenseFactor(-torch.stack([factor.materialise() for factor in right]).sum(0)),)
    rows = torch.stack([factor.materialise() for factor in left]).sum(0)
    for factor in right:
        rows = rows - factor.materialise()
    return (DenseFactor(rows),)


def checked_names(names: Sequence[str], shapes: Mapping[str, torch.Size]) -> tuple[str, ...]:
    """The names, if they are known and none is there twice."""
    if isinstance(names, str):
        raise TypeError(f"names={names!r} is a string; pass a sequence of parameter names, [{names!r}]")
    unknown = [name for name in names if name not in shapes]
    if unknown or len(set(names)) != len(names):
        raise ValueError(
            f"names holds {'unknown' if unknown else 'repeated'} parameters {unknown or list(names)}; "
            f"there are {', '.join(shapes)}"
        )
    return tuple(names)


def shapes_of(
    factors: Mapping[str, tuple[Factor, ...]], given: Mapping[str, Sequence[int]]
) -> dict[str, torch.Size]:
    """The shape of every parameter, from its factors or as given."""
    shapes = {}
    for name, kept in factors.items():
        sizes = {factor.shape for factor in kept} | ({torch.Size(given[name])} if name in given else set())
        if len(sizes) != 1:
            raise ValueError(
                f"the parameter {name!r} has factors of shapes {sorted(map(tuple, sizes))}; "
                "all uses need the parameter's shape, and a parameter without a use needs it in shapes="
            )
        shapes[name] = sizes.pop()
    return shapes
