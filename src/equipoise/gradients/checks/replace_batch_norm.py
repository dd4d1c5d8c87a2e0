"""Replace BatchNorm by GroupNorm on a copy of the model.

BatchNorm normalises with statistics of the batch, so that a record's loss depends on the other records and it
has no gradient of its own. GroupNorm (Wu and He 2018, arXiv:1803.08494) takes them from the record itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase


def replace_batch_norm(
    model: nn.Module, *, groups: int = 32, show: Callable[[str], object] | None = print
) -> nn.Module:
    """A copy of ``model`` with GroupNorm in place of every BatchNorm; the original is not touched.

    Scales and offsets are taken over, running statistics have no counterpart. Nothing else is changed.

    Args:
        model: any module.
        groups: at most this many groups; the largest number that divides the channels and leaves two in each
            is used, and one group for BatchNorm1d, whose inputs may have no positions to average over.
        show: called with lines of text that name each change; None for silence.

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
    fixed, replaced = copy.deepcopy(model), dict[int, nn.Module]()
    norms = [(p, m) for p, m in fixed.named_modules(remove_duplicate=False) if isinstance(m, _BatchNorm)]
    show = show or (lambda text: None)
    show("in the copy:" if norms else "no BatchNorm found: the copy is like the model")
    for path, norm in norms:
        # A module in two places stays one module.
        new = replaced.setdefault(id(norm), _group_norm(norm, groups))
        where = path or "(model)"
        show(f"- {where}: {type(norm).__name__}({norm.num_features})")
        show(f"+ {where}: {type(new).__name__}({new.num_groups}, {norm.num_features})")
        if not path:
            return new
        parent, _, child = path.rpartition(".")
        setattr(fixed.get_submodule(parent), child, new)
    return fixed


def _groups(norm: _BatchNorm, most: int) -> int:
    if isinstance(norm, nn.BatchNorm1d):
        return 1
    channels = norm.num_features
    return max((g for g in range(1, most + 1) if channels % g == 0 and channels // g >= 2), default=1)


def _group_norm(norm: _BatchNorm, most: int) -> nn.GroupNorm:
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
