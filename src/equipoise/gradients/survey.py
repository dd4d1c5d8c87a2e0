"""A survey of one run: what to do at every operation that touches a parameter, and where the records are.

Every operation with a rule gets copies of its parameters that are cut off from them, so that a gradient that
still reaches a parameter betrays a use that was not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.capture import (
    Step,
    Watch,
    anchor,
    name_of,
    output_tensors,
    tensor_arguments,
)
from equipoise.gradients.expressions import CASTS
from equipoise.gradients.layouts import INCONSISTENT, Fold, Layout, record_first
from equipoise.gradients.rules import rule_for

__all__ = ["RECORDS", "Site", "Survey", "resolve_fold"]

#: How many records a survey runs on.
RECORDS = 3


@dataclass
class Site:
    """An operation with a rule, as the survey left it.

    Attributes:
        step: what the plan will say of it.
        edge: gradient edge of its output.
        shape: of its output.
        value: a copy of the output, where the fold is unknown.
    """

    step: Step
    edge: Any
    shape: torch.Size
    value: Tensor | None


class Survey(Watch):
    """Decides the kind of every touching operation and cuts the parameters off from those with rules."""

    def __init__(self, params: Mapping[str, Tensor], layouts: list[tuple[tuple, tuple]]) -> None:
        super().__init__(params)
        self.layouts = layouts
        self.calls = 0
        self.steps: list[Step] = []
        self.sites: list[Site] = []

    def other(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Count an operation that touches no parameter."""
        self.calls += 1
        return func(*args, **kwargs)

    def touch(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Decide what to do at an operation that touches parameters, and run it."""
        if self.calls >= len(self.layouts):
            raise RuntimeError("the model ran more operations than before on the same records")
        inputs, outputs = self.layouts[self.calls]
        self.calls += 1
        tensors = tensor_arguments(args, kwargs)
        names = tuple(
            dict.fromkeys(
                name for t in tensors if id(t) in self.tracked for name in self.tracked[id(t)].roots
            )
        )
        step = Step(func, "opaque", names, inputs, outputs[0] if len(outputs) == 1 else None, rule_for(func))
        self.steps.append(step)
        out = self._decide(step, func, args, kwargs, tensors, outputs)
        step.counts = any(t.requires_grad for t in output_tensors(out))
        return out

    def _decide(
        self,
        step: Step,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        outputs: tuple[Layout | None, ...],
    ) -> Any:
        """Run the operation and say what kind of step it is."""
        inputs = step.layouts
        free = not any(inputs) or name_of(func) in CASTS
        if not outputs:
            step.kind = "skip"
            if name_of(func) in ("__setitem__",):
                step.kind, step.reason = "opaque", "it is written into another tensor in place"
            return func(*args, **kwargs)
        if not any(outputs) and free:
            out = func(*args, **kwargs)
            if not any(t.requires_grad for t in output_tensors(out)):
                step.kind = "skip"
            elif any(t.requires_grad for t in tensors if id(t) not in self.tracked):
                step.reason = (
                    f"{name_of(func)} joins it with a tensor that depends on the batch without a record axis"
                )
            else:
                step.kind = "derive"
                self.track(func, args, kwargs, out, tensors)
            return out
        if len(outputs) != 1 or outputs[0] is None or INCONSISTENT in (*inputs, *outputs):
            step.reason = f"{name_of(func)} has no rule"
            out = func(*args, **kwargs)
            if not any(t.requires_grad for t in output_tensors(out)):
                step.kind = "skip"
            return out
        return self._cut(step, func, args, kwargs, tensors)

    def _cut(
        self, step: Step, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Run the operation on copies of its parameters that have no history."""
        copies: dict[int, Tensor] = {}

        def cut(value: Any) -> Any:
            if id(value) in self.tracked:
                return copies.setdefault(id(value), value.detach().requires_grad_())
            if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
                parts = [cut(inner) for inner in value]
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            return value

        out = func(*map(cut, args), **{key: cut(value) for key, value in kwargs.items()})
        if not isinstance(out, Tensor) or not out.requires_grad:
            step.kind = "skip"
            return out
        if len(step.rules) == 1:  # no special rule: type_as and its like look at a tensor's type only
            reached = torch.autograd.grad(
                out, list(copies.values()), torch.zeros_like(out), retain_graph=True, allow_unused=True
            )
            if all(g is None for g in reached):
                step.kind = "skip"
                return out
        step.kind = "use"
        out, target = anchor(out, tensors)
        unknown = step.out_layout is not None and step.out_layout.fold == "unknown"
        value = out.detach().clone() if unknown else None
        self.sites.append(Site(step, torch.autograd.graph.get_gradient_edge(target), out.shape, value))
        return out


def _views(tensor: Tensor, layout: Layout, fold: Fold) -> Tensor:
    """Records first, everything else flattened, [RECORDS, -1]."""
    return record_first(tensor, replace(layout, fold=fold), RECORDS).reshape(RECORDS, -1)


def resolve_fold(site: Site, evidence: list[tuple[int, Tensor]]) -> bool:
    """Find the fold that keeps each record's evidence (nonzero entries) in its own rows.

    Returns False where records are mixed under every fold.
    """
    layout = site.step.out_layout
    assert layout is not None
    folds: tuple[Fold, ...] = ("major", "minor") if layout.fold == "unknown" else (layout.fold,)
    fitting = []
    for fold in folds:
        fits = True
        for record, support in evidence:
            rows = _views(support, layout, fold)
            outside = torch.cat([rows[:record], rows[record + 1 :]])
            fits = fits and not bool(outside.any())
        if fits:
            fitting.append(fold)
    if not fitting:
        return False
    if layout.fold == "unknown" and len(fitting) == 1:
        fold = fitting[0]
        site.step.out_layout = replace(layout, fold=fold)
        site.step.layouts = tuple(
            replace(known, fold=fold)
            if known is not None and known.fold == "unknown" and known.axis == layout.axis
            else known
            for known in site.step.layouts
        )
    return True
