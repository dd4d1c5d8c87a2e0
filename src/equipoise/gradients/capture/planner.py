"""A survey of one run: what to do at every operation that touches a parameter, and where the records are.

Every operation with a rule gets copies of its parameters that are cut off from them, so that a gradient that
still reaches a parameter betrays a use that was not seen.

Making a plan: which operations touch parameters, where the records are, and a proof that no use was
missed.

The model runs on two and on three records. Comparing the shapes of every operation gives the record axes; on
three records, gradients and a changed record tell how positions are folded into an axis, and whether records
are mixed.
The proof: while the plan is made, each operation with a rule gets copies of its parameters that are cut off
from them. If a gradient still reaches a parameter, some use of it was not seen (inside a custom function,
say), and the parameter is computed densely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.gradients.batches import perturb_record, repeat_to
from equipoise.gradients.capture.expressions import CASTS
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.layouts import INCONSISTENT, Fold, Layout, learn_layout, record_first
from equipoise.gradients.capture.recorder import (
    OPENED,
    Capture,
    CapturePlan,
    PlannedOperation,
    Watch,
    anchor,
    name_of,
    opened,
    output_tensors,
    tensor_arguments,
)
from equipoise.gradients.checks.oracle import Loss, evaluate_loss
from equipoise.gradients.checks.record_mixing import losses_moved
from equipoise.gradients.checks.row_comparison import LOW_PRECISION, TOLERANCE, rounding_of
from equipoise.gradients.factors.base import Factor
from equipoise.gradients.operator import FactoredGradients
from equipoise.gradients.rules import rule_for

__all__ = ["RECORDS", "OperationSurvey", "SurveyedOperation", "learn_plan", "resolve_fold"]


#: How many records a survey runs on.
RECORDS = 3


@dataclass
class SurveyedOperation:
    """An operation with a rule, as the survey left it.

    Attributes:
        step: what the plan will say of it.
        edge: gradient edge of its output.
        shape: of its output.
        value: a copy of the output, where the fold is unknown.
    """

    step: PlannedOperation
    edge: Any
    shape: torch.Size
    value: Tensor | None


class OperationSurvey(Watch):
    """Decides the kind of every touching operation and cuts the parameters off from those with rules."""

    def __init__(self, params: Mapping[str, Tensor], layouts: list[tuple[tuple, tuple]]) -> None:
        super().__init__(params)
        self.layouts = layouts
        self.calls = 0
        self.steps: list[PlannedOperation] = []
        self.sites: list[SurveyedOperation] = []

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
        step = PlannedOperation(
            func, "opaque", names, inputs, outputs[0] if len(outputs) == 1 else None, rule_for(func)
        )
        self.steps.append(step)
        out = self._decide(step, func, args, kwargs, tensors, outputs)
        step.counts = any(t.requires_grad for t in output_tensors(out))
        return out

    def _decide(
        self,
        step: PlannedOperation,
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
        self,
        step: PlannedOperation,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
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
        self.sites.append(
            SurveyedOperation(step, torch.autograd.graph.get_gradient_edge(target), out.shape, value)
        )
        return out


def _views(tensor: Tensor, layout: Layout, fold: Fold) -> Tensor:
    """Records first, everything else flattened, [RECORDS, -1]."""
    return record_first(tensor, replace(layout, fold=fold), RECORDS).reshape(RECORDS, -1)


def resolve_fold(site: SurveyedOperation, evidence: list[tuple[int, Tensor]]) -> bool:
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


SMALL, LARGE = 2, RECORDS


@dataclass
class _Call:
    func: Callable
    inputs: tuple[torch.Size, ...]
    outputs: tuple[torch.Size, ...]


class _Trace(TorchFunctionMode):
    """Shapes of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return opened(func)(*args, **kwargs)
        inputs = tuple(t.shape for t in tensor_arguments(args, kwargs))
        out = func(*args, **kwargs)
        self.calls.append(_Call(func, inputs, tuple(t.shape for t in output_tensors(out))))
        return out


@dataclass
class Learned:
    """A plan with what was seen while it was made."""

    plan: CapturePlan
    mixes: bool  # some record's gradient or loss depends on another record
    factors: dict[str, list[Factor]] | None = None


@torch.enable_grad()
def learn_plan(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    params: Mapping[str, Tensor],
    substitute: Mapping[str, Tensor] | None,
    dense: Mapping[str, str] | None = None,
) -> Learned:
    """The plan for batches like ``batch``.

    Args:
        model: run in the mode that it is in; buffers and random states are restored.
        loss: ``loss(model, batch) -> [B]``.
        batch: at least one record; the first three are used, repeated if there are fewer.
        params: the trainable parameters' tensors, by name.
        substitute: what ``evaluate_loss`` puts in the model's place.
        dense: parameters that are to be computed densely whatever is found, with reasons.
    """
    three = repeat_to(batch, LARGE)

    def run(records: Any, mode: TorchFunctionMode) -> Tensor:
        with undisturbed(model), torch.enable_grad(), mode:
            try:
                return evaluate_loss(model, loss, records, substitute)
            except Exception as error:
                error.add_note(
                    f"(equipoise ran loss(model, batch) on {SMALL} and {LARGE} records to learn where the "
                    "records "
                    "are; it has to work for any number of records)"
                )
                raise

    small, large = _Trace(), _Trace()
    run(repeat_to(batch, SMALL), small)
    losses = run(three, large)
    moved = losses_moved(losses, run(perturb_record(three, 0), _Trace()))
    dense_found = dict(dense or {})
    same = len(small.calls) == len(large.calls) and all(
        a.func == b.func and len(a.inputs) == len(b.inputs) and len(a.outputs) == len(b.outputs)
        for a, b in zip(small.calls, large.calls, strict=True)
    )
    if not same:
        reason = "the operations that the model runs depend on the batch"
        return Learned(CapturePlan([], (), {name: dense_found.get(name, reason) for name in params}), moved)
    layouts = [
        (_compare(a.inputs, b.inputs), _compare(a.outputs, b.outputs))
        for a, b in zip(small.calls, large.calls, strict=True)
    ]
    while True:
        ruled = {name: p for name, p in params.items() if name not in dense_found}
        if not ruled:
            return Learned(CapturePlan([], (), dense_found), moved)
        survey = OperationSurvey(ruled, layouts)
        losses = run(three, survey)
        mixes = moved or not _learn_folds(
            survey, losses, lambda mode: run(perturb_record(three, 0), mode), ruled
        )
        if mixes:
            return Learned(CapturePlan([], (), {}), True)
        new = _find_dense(survey, losses, ruled)
        if not new:
            plan = CapturePlan(
                [s for s in survey.steps if s.counts], tuple(ruled), dense_found, _unused(survey, ruled)
            )
            capture = Capture(ruled, plan, LARGE, lenient=True)
            losses = run(three, capture)
            factors = capture.collect(losses)
            for index, reason in capture.failures.items():
                new |= dict.fromkeys(plan.steps[index].names, reason)
            if not new:
                new = _wrong_sums(factors, run(three, _Trace()), ruled, plan.low_precision)
            if not new:
                return Learned(plan, mixes, factors)
        dense_found |= {name: reason for name, reason in new.items() if name not in dense_found}


def _compare(small: tuple[torch.Size, ...], large: tuple[torch.Size, ...]) -> tuple[Layout | None, ...]:
    return tuple(learn_layout(s, SMALL, l, LARGE) for s, l in zip(small, large, strict=True))


def _learn_folds(
    survey: OperationSurvey,
    losses: Tensor,
    again: Callable[[TorchFunctionMode], Tensor],
    params: Mapping[str, Tensor],
) -> bool:
    """Resolve unknown folds; False if records are mixed."""
    if not survey.sites or not losses.requires_grad:
        return True
    evidence: list[list[tuple[int, Tensor]]] = [[] for _ in survey.sites]
    edges = [site.edge for site in survey.sites]
    for record in range(LARGE):
        found = torch.autograd.grad(losses[record], edges, retain_graph=True, allow_unused=True)
        for kept, g, site in zip(evidence, found, survey.sites, strict=True):
            if g is not None:
                kept.append((record, (g != 0).reshape(site.shape)))
    if any(site.value is not None for site in survey.sites):
        other = OperationSurvey(params, survey.layouts)
        again(other)
        if len(other.sites) == len(survey.sites):
            for kept, one, two in zip(evidence, survey.sites, other.sites, strict=True):
                if one.value is not None and two.value is not None:
                    kept.append((0, one.value != two.value))
    separate = True
    for site, kept in zip(survey.sites, evidence, strict=True):
        separate = resolve_fold(site, kept) and separate
    return separate


def _find_dense(survey: OperationSurvey, losses: Tensor, ruled: Mapping[str, Tensor]) -> dict[str, str]:
    """Parameters that rules cannot serve, with reasons."""
    found: dict[str, str] = {}
    for step in survey.steps:
        if step.kind == "opaque":
            found |= {name: step.reason or f"{name_of(step.func)} has no rule" for name in step.names}
        elif step.kind == "use" and step.out_layout is not None and step.out_layout.fold == "unknown":
            reason = f"the order of records and positions in the output of {name_of(step.func)} is ambiguous"
            found |= dict.fromkeys(step.names, reason)
    if losses.requires_grad:
        reached = torch.autograd.grad(
            losses.sum(), list(ruled.values()), retain_graph=True, allow_unused=True
        )
        for name, g in zip(ruled, reached, strict=True):
            if g is not None:
                found.setdefault(name, "a use of it is hidden from rules (a custom or compiled function)")
    used = {name for step in survey.steps if step.kind == "use" for name in step.names}
    for name in survey.unseen - used:
        found.setdefault(name, "it is used while gradients are off (a custom function or a checkpoint)")
    return found


def _unused(survey: OperationSurvey, ruled: Mapping[str, Tensor]) -> frozenset[str]:
    used = {name for step in survey.steps if step.kind == "use" for name in step.names}
    return frozenset(ruled) - used


def _wrong_sums(
    factors: dict[str, list[Factor]], losses: Tensor, params: Mapping[str, Tensor], low_precision: bool
) -> dict[str, str]:
    """Parameters whose rows do not add up to the gradient of the summed loss."""
    if not losses.requires_grad:
        return {}
    found = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
    # A gradient that vanishes (the key bias of attention) holds rounding alone, relative to the others' size.
    whole = torch.stack(
        [torch.zeros(()).double(), *(g.double().norm().cpu() for g in found if g is not None)]
    ).norm()
    wrong = {}
    for (name, p), g in zip(params.items(), found, strict=True):
        weights = torch.ones(LARGE, 1, device=p.device)
        total = sum(
            (factor.weighted_sum(weights)[0].to(p.dtype) for factor in factors.get(name, [])),
            torch.zeros_like(p),
        )
        expected = torch.zeros_like(p) if g is None else g
        tolerance = LOW_PRECISION if low_precision else TOLERANCE.get(p.dtype, LOW_PRECISION)
        scale = expected.double().norm() + 1e-30
        allowed = tolerance * scale + 1e-12
        sizes = FactoredGradients({name: factors[name]}).magnitudes(name) if factors.get(name) else None
        terms = whole if sizes is None else whole + sizes.double().sum().cpu()
        floor = rounding_of(terms, p.dtype, low_precision).to(p.device)
        if not bool((total.double() - expected.double()).norm() <= torch.maximum(allowed, floor)):
            wrong[name] = "the rows by rule did not add up to its gradient"
    return wrong
