"""Replace BatchNorm by GroupNorm on a copy of the model.

BatchNorm normalises with statistics of the batch, so that a record's loss depends on the other records and it
has no gradient of its own. GroupNorm (Wu and He 2018, arXiv:1803.08494) takes them from the record itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

__all__ = ["Replacement", "find_batch_norms", "is_frozen_norm", "replace_batch_norm"]


@dataclass(frozen=True)
class Replacement:
    """One module that ``replace_batch_norm`` replaces."""

    module_path: str
    before: str
    after: str

    def __str__(self) -> str:
        path = self.module_path or "(model)"
        return f"- {path}: {self.before}\n+ {path}: {self.after}"


def replace_batch_norm(
    model: nn.Module, *, groups: int = 32, show: Callable[[str], object] | None = print
) -> nn.Module:
    """A copy of ``model`` with GroupNorm in place of every BatchNorm; the original is not touched.

    Scales and offsets are taken over, running statistics have no counterpart. Nothing else is changed.

    Args:
        model: any module.
        groups: at most this many groups; the largest number that divides the channels and leaves two in each
            is used, and one group for BatchNorm1d, whose inputs may have no positions to average over.
        show: called with a heading, and with each change as text; None for silence.

    Example:
        Before the optimizer is made, which takes the parameters of the copy:

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> model = replace_batch_norm(model)
    in the copy:
    - 1: BatchNorm2d(8)
    + 1: GroupNorm(4, 8)
    """
    if groups < 1:
        raise ValueError(f"groups={groups} must be at least 1")
    changes = find_batch_norms(model, groups=groups)
    if show is not None:
        show("in the copy:" if changes else "no BatchNorm found: the copy is like the model")
    replaced: dict[int, nn.Module] = {}
    fixed = copy.deepcopy(model)
    for change in changes:
        if change.module_path == "":
            fixed = _group_norm(fixed, groups)
        else:
            parent_path, _, child = change.module_path.rpartition(".")
            parent = fixed.get_submodule(parent_path)
            norm = fixed.get_submodule(change.module_path)
            # A module in two places stays one module.
            setattr(parent, child, replaced.setdefault(id(norm), _group_norm(norm, groups)))
        if show is not None:
            show(str(change))
    return fixed


def find_batch_norms(model: nn.Module, *, groups: int = 32) -> tuple[Replacement, ...]:
    """What ``replace_batch_norm`` would change.

    >>> find_batch_norms(nn.BatchNorm1d(6))[0].after
    'GroupNorm(1, 6)'
    """
    return tuple(
        Replacement(
            path,
            f"{type(module).__name__}({module.num_features})",
            f"GroupNorm({_groups(module, groups)}, {module.num_features})",
        )
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm)
    )


def _groups(norm: _BatchNorm, most: int) -> int:
    if isinstance(norm, nn.BatchNorm1d):
        return 1
    channels = norm.num_features
    return max((g for g in range(1, most + 1) if channels % g == 0 and channels // g >= 2), default=1)


def _group_norm(norm: nn.Module, most: int) -> nn.GroupNorm:
    assert isinstance(norm, _BatchNorm)
    if isinstance(norm, _LazyNormBase):
        raise ValueError(
            "model has a lazy BatchNorm whose size is not known yet; run it once on a batch first"
        )
    new = nn.GroupNorm(_groups(norm, most), norm.num_features, eps=norm.eps, affine=norm.affine)
    new.train(norm.training)
    if norm.affine:
        new.to(norm.weight.device, norm.weight.dtype)
        with torch.no_grad():
            new.weight.copy_(norm.weight)
            new.bias.copy_(norm.bias)
        new.weight.requires_grad_(norm.weight.requires_grad)
        new.bias.requires_grad_(norm.bias.requires_grad)
    return new


def is_frozen_norm(module: nn.Module) -> bool:
    """Whether it is a BatchNorm without trainable parameters that has running statistics to use."""
    return (
        isinstance(module, _BatchNorm)
        and module.track_running_stats
        and not any(p.requires_grad for p in module.parameters())
    )
