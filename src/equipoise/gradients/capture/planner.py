"""Make a plan: which operations touch parameters, where the records are, and a proof that no use was missed.

The model runs on two and on three records. Comparing the shapes of every operation gives the record axes; on
three records, gradients and a changed record tell how positions are folded into an axis.

The proof: while the model is surveyed, each operation with a rule gets copies of its parameters that are cut
off from them. If a gradient still reaches a parameter, some use of it was not seen (inside a custom function,
say), and the parameter is computed densely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._dtensor import is_dtensor, local_part, part_like
from equipoise._tree import map_leaves
from equipoise.gradients.capture.expressions import CASTS
from equipoise.gradients.capture.isolation import undisturbed
from equipoise.gradients.capture.local_operations import gradient_here, why_not_here
from equipoise.gradients.capture.recorder import (
    INCONSISTENT,
    CallTrace,
    Capture,
    CapturePlan,
    PlannedOperation,
    Watch,
    anchor,
    has_gradient,
    learn_layout,
    name_of,
    tensors_in,
)
from equipoise.gradients.capture.sharded import SHARDED, found_by_any, leaves_told
from equipoise.gradients.checks.errors import CoverageError, RefusedParameter
from equipoise.gradients.engine_inputs import Loss, evaluate_loss, map_records, repeat_to
from equipoise.gradients.factors.base import Factor
from equipoise.gradients.numerics import length
from equipoise.gradients.rules import rule_for
from equipoise.gradients.rules.operation import Fold, Layout, record_first

#: The two numbers of records: different, so that the sizes that follow them are told apart, and as small as
#: can be, since both are run. Neither is one: axes of size one are squeezed and broadcast.
SMALL, LARGE = 2, 3


SHARDED_REMEDY = (
    "A model of which processes hold parts takes only parameters whose use a rule serves: freeze this one, "
    "or give the model as it was before fully_shard or parallelize_module. Activation checkpointing needs "
    "use_reentrant=False"
)

#: What gradients round by, relative to their own length, and to that of all together. Choices: tighter ones
#: give up rules whose rows round, wider ones take the rows of a wrong rule for right.
ROUNDS = {"torch.float64": (1e-8, 1e-9), "torch.float32": (1e-3, 1e-5), "low": (1e-1, 5e-2)}


@dataclass
class SurveyedOperation(PlannedOperation):
    """An operation that touches parameters, as far as a survey knows it: `PlannedOperation` in the making.

    Attributes:
        reason: why no rule serves it, where its kind is "opaque".
        counts: False for a look at a parameter (its shape, a detached copy), whose result has no gradient.
        edge, gradient_here: of its output, where a rule serves it.
        value: a copy of that output, as far as it is here, where its fold is unknown.
    """

    reason: str = ""
    counts: bool = True
    edge: Any = None
    gradient_here: Callable[[Tensor], Tensor] = lambda b: b
    value: Tensor | None = None

    def planned(self) -> PlannedOperation:
        return PlannedOperation(*(getattr(self, field.name) for field in fields(PlannedOperation)))


class OperationSurvey(Watch):
    """Decides the kind of every touching operation and cuts the parameters off from those with rules."""

    def __init__(self, params: Mapping[str, Tensor], layouts: list[tuple[tuple, tuple]]) -> None:
        super().__init__(params)
        self.layouts = layouts
        self.sharded = any(is_dtensor(p) for p in params.values())
        self.steps: list[SurveyedOperation] = []

    @property
    def sites(self) -> list[SurveyedOperation]:
        """The operations that rules serve."""
        return [step for step in self.steps if step.kind == "use"]

    def used(self) -> set[str]:
        """The parameters that they use."""
        return {name for site in self.sites for name in site.names}

    def touch(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Decide what to do at an operation that touches parameters, and run it."""
        if self.calls > len(self.layouts):
            raise RuntimeError("the model ran more operations than before on the same records")
        inputs, outputs = self.layouts[self.calls - 1]
        tensors = tensors_in(args, kwargs)
        names = tuple(
            dict.fromkeys(
                name for t in tensors if id(t) in self.tracked for name in self.tracked[id(t)].roots
            )
        )
        step = SurveyedOperation(
            func, names, inputs, outputs[0] if len(outputs) == 1 else None, rule_for(func)
        )
        self.steps.append(step)
        out = self._decide(step, func, args, kwargs, tensors, outputs)
        step.counts = has_gradient(out)
        return out

    def _decide(
        self,
        step: SurveyedOperation,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        outputs: tuple[Layout | None, ...],
    ) -> Any:
        """Run the operation and say what kind of step it is."""
        inputs = step.layouts
        free = not any(inputs) or name_of(func) in CASTS
        if not outputs:  # no tensor comes out: a size, a type, or a write
            step.kind = "skip"
            if name_of(func) == "__setitem__":
                step.kind, step.reason = "opaque", "it is written into another tensor in place"
            return func(*args, **kwargs)
        if not any(outputs) and free:
            out = func(*args, **kwargs)
            if not has_gradient(out):
                step.kind = "skip"
            elif any(t.requires_grad for t in tensors if id(t) not in self.tracked):
                step.reason = (
                    f"{name_of(func)} joins it with a tensor that depends on the batch without a record axis"
                )
            elif any(map(is_dtensor, tensors)):
                step.reason = f"{name_of(func)} computes something of its parts before it is used"
            elif self.sharded and _needs_values(out, [t for t in tensors if id(t) in self.tracked]):
                step.reason = f"the derivative of {name_of(func)} needs its values, gone after the forward"
            else:
                step.kind = "derive"
                self.track(func, args, kwargs, out, tensors)
            return out
        if len(outputs) != 1 or outputs[0] is None or INCONSISTENT in (*inputs, *outputs):
            step.reason = f"{name_of(func)} has no rule"
            out = func(*args, **kwargs)
            if not has_gradient(out):
                step.kind = "skip"
            return out
        return self._cut(step, func, args, kwargs, tensors)

    def _cut(
        self,
        step: SurveyedOperation,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """Run the operation on copies of its parameters that have no history.

        The output's gradient is then the only way to these uses, which is the way that a capture takes.
        """
        copies: dict[int, Tensor] = {}

        def cut(value: Any) -> Any:
            if id(value) in self.tracked:
                return copies.setdefault(id(value), value.detach().requires_grad_())
            return value

        args, kwargs = map_leaves(cut, (args, kwargs))
        out = func(*args, **kwargs)
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
        reason = why_not_here(func, args, kwargs, tensors)
        if reason is not None:
            step.reason = reason
            return out
        step.kind = "use"
        out, target = anchor(out, tensors)
        unknown = step.out_layout is not None and step.out_layout.fold == "unknown"
        step.value = local_part(out).detach().clone() if unknown else None
        step.edge = torch.autograd.graph.get_gradient_edge(target)
        step.gradient_here = gradient_here(out, target)
        return out


def _needs_values(outputs: Any, parameters: list[Tensor]) -> bool:
    """Whether the backward of the outputs reads the memory of these tensors."""
    memory = {t.untyped_storage().data_ptr() for t in parameters}
    waiting = [t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for name in dir(node):
            saved = getattr(node, name, None) if name.startswith("_saved_") else None
            if any(t.untyped_storage().data_ptr() in memory for t in tensors_in(saved)):
                return True
        following = {node for node, _ in node.next_functions if node is not None} - seen
        seen |= following
        waiting += following
    return False


def resolve_fold(
    site: SurveyedOperation, supports: list[tuple[int, Tensor]], changed: Tensor | None = None
) -> None:
    """Find the fold that keeps each record's evidence in its own rows.

    Where none does although no two records' gradients meet, the order follows values, as that of tokens that
    are sorted by expert, and the fold stays unknown. Where they meet, records are taken to come first.

    Args:
        site: its output has the record axis somewhere.
        supports: a record, and where the gradient of its loss is not zero.
        changed: what a change of the first record moves.
    """
    layout = site.out_layout
    assert layout is not None
    evidence = [*supports, *([] if changed is None else [(0, changed)])]
    folds: tuple[Fold, ...] = ("major", "minor") if layout.fold == "unknown" else (layout.fold,)

    def fits(fold: Fold) -> bool:
        for record, support in evidence:
            rows = record_first(support, replace(layout, fold=fold), LARGE)
            if bool(rows[:record].any()) or bool(rows[record + 1 :].any()):
                return False
        return True

    def settle(fold: Fold, axis: int | None = None) -> None:
        site.out_layout = replace(layout, fold=fold)
        site.layouts = tuple(
            replace(known, fold=fold)
            if known is not None and known.fold == "unknown" and axis in (None, known.axis)
            else known
            for known in site.layouts
        )

    fitting = [fold for fold in folds if fits(fold)]
    if layout.fold == "unknown" and len(fitting) == 1:
        # Inputs folded along the same axis are taken to be folded alike. Where they are not, the rows do not
        # add up to the gradient (`_wrong_sums`), and the parameter is computed densely.
        settle(fitting[0], layout.axis)
    if fitting:
        return
    if supports and bool(torch.stack([one for _, one in supports]).sum(0).gt(1).any()):
        settle("major")
    else:
        site.out_layout = replace(layout, fold="unknown")


@torch.enable_grad()
def learn_plan(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    params: Mapping[str, Tensor],
    substitute: Mapping[str, Tensor] | None,
    dense: Mapping[str, str] | None = None,
) -> CapturePlan:
    """The plan for batches like ``batch``.

    Where records are mixed, which hides in which order records and positions stand, records are taken to come
    first: a proof or the comparison of rows has to show whether they do.

    Args:
        model: run in the mode that it is in; buffers and random states are restored.
        loss: ``loss(model, batch) -> [B]``.
        batch: at least one record; the first three are used, repeated if there are fewer.
        params: the trainable parameters' tensors, by name.
        substitute: what ``evaluate_loss`` puts in the model's place.
        dense: parameters that are to be computed densely whatever is found, with reasons.
    """
    three = repeat_to(batch, LARGE)
    leaves = dict(params)  # what operations saw in their place

    def hear(name: str, tensor: Tensor) -> None:
        if name in params:
            leaves[name] = tensor

    def run(records: Any, mode: Watch) -> Tensor:
        with undisturbed(model), torch.enable_grad(), leaves_told(hear), leaves_told(mode.follow), mode:
            try:
                return evaluate_loss(model, loss, records, substitute)
            except Exception as error:
                error.add_note(
                    f"(equipoise ran loss(model, batch) on {SMALL} and {LARGE} records to learn where the "
                    "records are; it has to work for any number of records: x.view(-1, ...), not "
                    "x.view(32, ...))"
                )
                raise

    small, large = CallTrace(), CallTrace()
    run(repeat_to(batch, SMALL), small)
    run(three, large)
    dense_found = dict(dense or {})

    def all_dense(reason: str) -> CapturePlan:
        reasons = {name: dense_found.get(name, reason) for name in params}
        refuse_sharded(reasons)
        return CapturePlan((), (), reasons, low_precision=large.low_precision)

    def refuse_sharded(reasons: Mapping[str, str]) -> None:
        if model in SHARDED and reasons:
            refused = [RefusedParameter(n, why, SHARDED_REMEDY) for n, why in reasons.items()]
            raise CoverageError(refused)

    refuse_sharded(dense_found)
    if _changes_gradients(model, large):
        return all_dense("hooks change the gradients, and could look at the whole batch")
    same = len(small.made) == len(large.made) and all(
        a.func == b.func and len(a.inputs) == len(b.inputs) and len(a.outputs) == len(b.outputs)
        for a, b in zip(small.made, large.made, strict=True)
    )
    if not same:
        return all_dense("the operations that the model runs depend on the batch")
    layouts = [
        (_compare(a.inputs, b.inputs), _compare(a.outputs, b.outputs))
        for a, b in zip(small.made, large.made, strict=True)
    ]
    while True:
        ruled = {name: p for name, p in params.items() if name not in dense_found}
        if not ruled:
            return all_dense("")
        survey = OperationSurvey(ruled, layouts)
        losses = run(three, survey)
        _learn_folds(survey, losses, lambda mode: run(_with_another_first(three), mode), ruled)
        new = found_by_any(model, _find_dense(survey, losses, {name: leaves[name] for name in ruled}))
        if not new:
            steps = tuple(step.planned() for step in survey.steps if step.counts)
            plan = CapturePlan(steps, tuple(ruled), dense_found, frozenset(ruled) - survey.used())
            del survey, losses  # and with them what the graph holds
            capture = Capture(ruled, plan, LARGE, lenient=True)
            losses = run(three, capture)
            factors = capture.collect(losses)
            for index, reason in capture.failures.items():
                new |= dict.fromkeys(steps[index].names, reason)
            new = found_by_any(model, new)
            if not new:
                again = run(three, CallTrace())
                seen = {name: leaves[name] for name in ruled}
                new = found_by_any(model, _wrong_sums(factors, again, seen, capture.low_precision))
            if not new:
                served = tuple(
                    replace(step, rules=(capture.served[i],)) if i in capture.served else step
                    for i, step in enumerate(steps)
                )
                return replace(plan, steps=served, low_precision=capture.low_precision)
        # Every round takes at least one parameter from the rules to dense rows, so that the loop ends.
        dense_found |= {name: reason for name, reason in new.items() if name not in dense_found}
        refuse_sharded(dense_found)


def _with_another_first(batch: Any) -> Any:
    """The batch with noise on its first record; labels and tokens become those of the second."""
    generator = torch.Generator().manual_seed(20)

    def changed(leaf: Tensor) -> Tensor:
        # Drawn in float32 on the CPU, so that neither type nor device changes what is tried.
        noise = torch.randn(leaf.shape[1:], generator=generator, dtype=torch.float32)
        first = leaf[0] + noise.to(leaf) if leaf.is_floating_point() else leaf[1]
        return torch.cat([first[None], leaf[1:]])

    return map_records(changed, batch)


def _changes_gradients(model: nn.Module, trace: CallTrace) -> bool:
    """Whether the model, or its forward, registers hooks on gradients."""
    return any(call.func is Tensor.register_hook for call in trace.made) or any(
        module._backward_hooks or module._backward_pre_hooks for module in model.modules()
    )


def _compare(small: tuple[torch.Size, ...], large: tuple[torch.Size, ...]) -> tuple[Layout | None, ...]:
    return tuple(learn_layout(s, SMALL, l, LARGE) for s, l in zip(small, large, strict=True))


def _learn_folds(
    survey: OperationSurvey,
    losses: Tensor,
    again: Callable[[Watch], Tensor],
    params: Mapping[str, Tensor],
) -> None:
    """Resolve unknown folds."""
    if not survey.sites or not losses.requires_grad:
        return
    supports: list[list[tuple[int, Tensor]]] = [[] for _ in survey.sites]
    changed: list[Tensor | None] = [None for _ in survey.sites]
    # The gradient of one record's loss is zero wherever that record is not.
    edges = [site.edge for site in survey.sites]
    for record in range(LARGE):
        found = torch.autograd.grad(losses[record], edges, retain_graph=True, allow_unused=True)
        for kept, g, site in zip(supports, found, survey.sites, strict=True):
            if g is not None:
                kept.append((record, site.gradient_here(g) != 0))
    # Gradients may vanish by chance (a dead unit): what a changed record moves in the forward tells as well.
    if any(site.value is not None for site in survey.sites):
        other = OperationSurvey(params, survey.layouts)
        with suppress(Exception):  # contents that the model does not take tell nothing
            again(other)
        if len(other.sites) == len(survey.sites):
            changed = [
                None if one.value is None or two.value is None else _moved(one.value, two.value)
                for one, two in zip(survey.sites, other.sites, strict=True)
            ]
    for parts in zip(survey.sites, supports, changed, strict=True):
        resolve_fold(*parts)


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Where values differ: everywhere if another record changes how many positions an expert is sent."""
    return before != after if before.shape == after.shape else torch.ones_like(before, dtype=torch.bool)


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
    for name in survey.unseen - survey.used():
        found.setdefault(
            name, "it is used inside a custom function, a checkpoint or a transform of torch.func"
        )
    return found


def _wrong_sums(
    factors: dict[str, list[Factor]], losses: Tensor, params: Mapping[str, Tensor], low_precision: bool
) -> dict[str, str]:
    """Parameters whose rows do not add up to the gradient of the summed loss."""
    if not losses.requires_grad:
        return {}
    found = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
    # Look-ups may give sparse ones.
    gradients = [
        None if g is None else part_like(g.to_dense(), p) for g, p in zip(found, params.values(), strict=True)
    ]
    del found, losses
    whole = torch.stack([torch.zeros(()), *(length(g).cpu() for g in gradients if g is not None)]).norm()
    wrong = {}
    # One by one, and no second tensor: a table may be as large as the rest of the model.
    for name, p in reversed([*params.items()]):
        expected, weights = gradients.pop(), torch.ones(LARGE, 1, device=p.device)
        sums = (factor.weighted_sum(weights)[0].to(p.dtype) for factor in factors.get(name, []))
        total = next(sums, None)
        total = torch.zeros_like(local_part(p)) if total is None else reduce(Tensor.add_, sums, total)
        if are_others(total, expected, whole, "low" if low_precision else str(p.dtype)):
            wrong[name] = "the rows by rule did not add up to its gradient"
    return wrong


def are_others(found: Tensor, expected: Tensor | None, whole: Tensor, kind: str) -> bool:
    """Whether a gradient, which is spent, differs from the expected one by more than rounding of this kind.

    Where terms cancel (the key bias of an attention layer) there is nothing but rounding, relative to
    `whole`, the length of all gradients together.
    """
    share, rounding = ROUNDS.get(kind, ROUNDS["low"])
    size = length(found)
    distance = size if expected is None else length(found.sub_(expected))
    return not bool(distance <= share * size + rounding * whole.to(distance.device))
