"""Capture: one forward and one backward give the factors of every parameter's rows.

While the model runs, a ``TorchFunctionMode`` sees each torch function. It knows the trainable parameters and
what is computed from them alone (``expressions``). When such a tensor meets the records, the operation's rule
keeps the inputs that it needs and a hook on the output turns the output's gradient into factors as soon as
the backward reaches it.
The backward goes to the outputs of the operations only: no weight gradient is computed. What is done at each
operation was learned at the start and is a ``CapturePlan``: the operations that touch a parameter, in order,
and where the records are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from equipoise._dtensor import is_dtensor
from equipoise._tree import leaves
from equipoise.gradients.capture.compositions import COMPOSITIONS, composition, cross_entropy
from equipoise.gradients.capture.expressions import Expression, derive, pull_back
from equipoise.gradients.capture.local_operations import gradient_here, operation_here
from equipoise.gradients.capture.sharded import FSDP_AT_WORK, hooked_by_fsdp
from equipoise.gradients.factors.base import Factor, merged
from equipoise.gradients.rules import MATRIX_RULES
from equipoise.gradients.rules.operation import Finish, Layout, Operation, Rule

#: How an operation's tracked inputs are treated.
Kind = Literal["skip", "derive", "use", "opaque"]


class PlanMismatch(RuntimeError):
    """The model did not run the operations seen at the start."""


@dataclass
class PlannedOperation:
    """One operation that touches parameters."""

    func: Callable
    names: tuple[str, ...]  # parameters behind its tracked inputs
    layouts: tuple[Layout | None, ...]  # of its tensor arguments, in order
    out_layout: Layout | None
    rules: tuple[Rule, ...]  # to be tried in this order; the one that served once a plan is made
    kind: Kind = "opaque"


@dataclass(frozen=True)
class CapturePlan:
    """What capture does for batches of one signature."""

    steps: tuple[PlannedOperation, ...]
    ruled: tuple[str, ...]  # parameters whose rows come from rules (unused ones too: their rows are zero)
    dense: dict[str, str]  # parameters computed densely, with the reason
    unused: frozenset[str] = frozenset()
    low_precision: bool = False  # some gradients came in half precision (autocast), so that checks are coarse


#: A tensor whose shape changes with the batch in a way that is not one axis of proportional size; no axis has
#: its number.
INCONSISTENT = Layout(-1, "unknown")


def learn_layout(small: torch.Size, n_small: int, large: torch.Size, n_large: int) -> Layout | None:
    """The layout of a tensor from its shapes at two batch sizes; None if it does not follow the batch.

    >>> learn_layout(torch.Size([7, 2, 4]), 2, torch.Size([7, 3, 4]), 3)
    Layout(axis=1, fold='none')
    >>> learn_layout(torch.Size([14, 4]), 2, torch.Size([21, 4]), 3)
    Layout(axis=0, fold='unknown')
    """
    if len(small) != len(large):
        return INCONSISTENT
    changed = [i for i, (s, l) in enumerate(zip(small, large, strict=True)) if s != l]
    if not changed:
        return None
    axis = changed[0]
    if len(changed) > 1 or small[axis] * n_large != large[axis] * n_small or small[axis] % n_small:
        return INCONSISTENT
    return Layout(axis, "none" if small[axis] == n_small else "unknown")


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors among arguments or results, in order, looking into containers."""
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class TracedCall:
    """A function, and the shapes of the tensors that it got and gave."""

    func: Callable
    inputs: tuple[torch.Size, ...]
    outputs: tuple[torch.Size, ...]


class Watch(TorchFunctionMode):
    """A mode that finds the operations touching tracked tensors and hands them to ``touch``."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        # By id: tensors compare by value. An expression keeps its tensor alive, so that no id comes again.
        self.tracked: dict[int, Expression] = {id(p): Expression(p, {name: p}) for name, p in params.items()}
        self.names = frozenset(params)
        self.calls = 0  # so far, whatever they touch
        self.unseen: set[str] = set()  # touched where nothing is recorded: perhaps inside a custom function

    def follow(self, name: str, tensor: Tensor) -> None:
        """Take this tensor for the parameter; a sharded one is another while the model runs."""
        if name in self.names:
            self.tracked[id(tensor)] = Expression(tensor, {name: tensor})

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FSDP_AT_WORK[0] or (func is Tensor.register_hook and hooked_by_fsdp(args)):
            return func(*args, **kwargs)
        parts = composition(func, args, kwargs) if func in COMPOSITIONS else None
        if parts is not None:
            with self:  # a mode is off inside its own handler
                return parts(*args, **kwargs)
        self.calls += 1
        if func is Tensor.register_hook:
            self.notice_hook()
        tracked = self.tracked
        touched = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            if id(value) in tracked:
                touched = True
                break
            if isinstance(value, (list, tuple)) and any(id(inner) in tracked for inner in value):
                touched = True
                break
        if not touched:
            return self.pass_by(func, args, kwargs)
        # Inside a transform of torch.func (a derivative in the loss) no hook sees the gradient that counts.
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            for tensor in tensors_in(args, kwargs):
                if id(tensor) in tracked:
                    self.unseen.update(tracked[id(tensor)].roots)
            return func(*args, **kwargs)
        return self.touch(func, args, kwargs)

    def notice_hook(self) -> None:
        """The model registers a hook on the gradient of some tensor."""

    def pass_by(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operation without tracked tensors."""
        return func(*args, **kwargs)

    def touch(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operation with tracked tensors."""
        raise NotImplementedError

    def track(
        self, func: Callable, args: tuple, kwargs: dict[str, Any], out: Any, tensors: list[Tensor]
    ) -> None:
        """Track the outputs of an operation on nothing but tracked tensors."""
        tracked = self.tracked
        parents = {id(t): tracked[id(t)] for t in tensors if id(t) in tracked}
        for expression in derive(func, args, kwargs, out, list(parents.values())):
            tracked.setdefault(id(expression.value), expression)


class CallTrace(Watch):
    """What a forward calls, in which shapes; of compositions what they consist of, as a capture sees it.

    Attributes:
        made: calls, in their order.
        low_precision: some results are in half precision.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.made: list[TracedCall] = []
        self.low_precision = False

    def shapes(self) -> list[tuple[torch.Size, ...]]:
        """Those of all results."""
        return [call.outputs for call in self.made]

    def pass_by(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Any operation: nothing is tracked."""
        inputs = tuple(t.shape for t in tensors_in(args, kwargs))
        out = func(*args, **kwargs)
        results = tensors_in(out)
        self.low_precision |= any(t.dtype in (torch.bfloat16, torch.float16) for t in results)
        self.made.append(TracedCall(func, inputs, tuple(t.shape for t in results)))
        return out


class Capture(Watch):
    """Follows a plan through one forward, then collects factors in one backward.

    Args:
        params: the parameters that the plan serves by rules, by name.
        plan: what to do at each touching operation.
        records: B.
        lenient: note which rule serves each operation and what fails, instead of raising (while a plan is
            made).
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        plan: CapturePlan,
        records: int,
        lenient: bool = False,
    ) -> None:
        super().__init__(params)
        self.plan, self.records, self.lenient = plan, records, lenient
        self.cursor = 0
        self.left_plan: str | None = None  # how a forward left the plan; the model may have caught the error
        self.collecting = False  # the backward that gives the rows is running
        self.edges: list[Any] = []
        self.inputs: list[list[Any]] = []  # of the operations, kept by their hooks until these have run
        self.found: list[tuple[int, int, Expression, Factor]] = []
        # What a lenient capture learns for the plan, by the number of the operation.
        self.failures: dict[int, str] = {}
        self.served: dict[int, Rule] = {}
        self.low_precision = False

    def pass_by(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operation that touches no parameter."""
        if func is F.cross_entropy:
            return cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)

    def notice_hook(self) -> None:
        """The plan knows of no hooks on gradients."""
        self.left_plan = "the model registers a hook on a gradient, which it did not do at the start"
        raise PlanMismatch(self.left_plan)

    def touch(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Do what the plan says for the next operation."""
        out = func(*args, **kwargs)
        if not has_gradient(out):
            return out  # a look at a parameter, not a use: it is not part of the plan
        try:
            return self._follow(func, args, kwargs, out)
        except Exception as error:
            self.left_plan = self.left_plan or str(error)
            raise

    def _follow(self, func: Callable, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
        index = self.cursor
        self.cursor += 1
        steps = self.plan.steps
        if index >= len(steps) or steps[index].func != func:
            wanted = name_of(steps[index].func) if index < len(steps) else "the end"
            raise PlanMismatch(
                f"operation {index} on a parameter is {name_of(func)}; at the start it was {wanted}"
            )
        step = steps[index]
        if step.kind == "derive":
            self.track(func, args, kwargs, out, tensors_in(args, kwargs))
        elif step.kind == "use":
            return self.use(index, step, func, args, kwargs, out)
        return out

    def use(
        self,
        index: int,
        step: PlannedOperation,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        out: Tensor,
    ) -> Tensor:
        """Ask the rule what it needs and hang the rest on the output's gradient."""
        layout, tracked = step.out_layout, self.tracked
        tensors = tensors_in(args, kwargs)
        if layout is None or len(tensors) != len(step.layouts) or not _fits(out, layout, self.records):
            raise PlanMismatch(f"{name_of(func)} gave shape {tuple(out.shape)} for {self.records} records")
        op = Operation(func, args, kwargs, out, tracked, tensors, step.layouts, layout, self.records)
        is_split = is_dtensor(out)
        op, counting = operation_here(op) if is_split else (op, None)
        finishes: list[tuple[Rule, Finish]] = []
        for rule in step.rules:
            finish = self._ask(index, rule, op)
            if finish is not None:
                finishes.append((rule, finish))
                if not self.lenient:
                    break  # a plan names the rule that serves; while it is made, any may still fail
        if not finishes:
            if not self.lenient:
                raise PlanMismatch(f"{name_of(func)} is no longer in the form that was seen at the start")
            self.failures.setdefault(index, f"no rule serves {name_of(func)} in this form")
            return out
        out, target = anchor(out, tensors)
        here = gradient_here(out, target) if is_split else partial(torch.reshape, shape=out.shape)
        # The backward has to reach this output. Its gradient, which factors hold too, is not copied for that.
        self.edges.append(torch.autograd.graph.get_gradient_edge(target))
        # Rules keep detached inputs, of which autograd does not notice that they are changed in place.
        versions = [
            (t, t._version)
            for t, known in zip(op.tensors, step.layouts, strict=True)
            if known is not None and t is not out
        ]

        self.inputs += (finishes, versions)
        matrix = step.rules[0] in MATRIX_RULES
        tracked_here = op.tracked  # without the output, whose graph would hold the hook and never go

        def hook(b: Tensor) -> Tensor | None:
            if not self.collecting:  # the loss takes a gradient itself
                # With a graph of its own it is part of the loss, by ways that no rule knows; else it is data.
                if torch.is_grad_enabled():
                    reason = f"the loss differentiates {name_of(func)} (a gradient penalty)"
                    if not self.lenient:
                        raise PlanMismatch(reason)
                    self.failures[index] = reason
                return None
            copied = matrix and not b.is_contiguous()
            if copied:
                b = b.contiguous()  # handed on as well, so that the backward does not copy it again
            mine = here(b) if counting is None else here(b) * counting
            for tensor, version in versions:
                if tensor._version != version:
                    raise RuntimeError(
                        f"an input of {name_of(func)} (shape {tuple(tensor.shape)}) was changed in place "
                        "after it was used, so that the gradient of its parameters is lost; use the "
                        "operation that is not in place"
                    )
            for rule, finish in finishes:
                try:
                    terms, served = finish(mine), rule
                    break
                except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
                    if not self.lenient:
                        raise
                    reason = f"{type(error).__name__} in the rule for {name_of(func)}: {error}"
            else:
                self.failures[index] = reason
                return None
            if self.lenient:
                self.low_precision |= b.dtype in (torch.bfloat16, torch.float16)
                self.served[index] = served
            for place, (tensor, factor) in enumerate(terms):
                self.found.append((index, place, tracked_here[id(tensor)], factor.fastest()))
            # The graph keeps this hook until it goes as a whole: let the inputs go now.
            finishes.clear()
            versions.clear()
            return b if copied else None

        target.register_hook(hook)  # type: ignore[no-untyped-call]
        return out

    def _ask(self, index: int, rule: Rule, op: Operation) -> Finish | None:
        try:
            return rule(op)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            if not self.lenient:
                raise
            self.failures[index] = f"{type(error).__name__} in the rule for {name_of(op.func)}: {error}"
            return None

    def let_go(self) -> list[Any]:
        """Hooks hold this object and the edges hold the hooks: let go, or none of them is ever freed.

        Returns:
            The edges.
        """
        edges, self.edges = self.edges, []
        return edges

    def check_followed(self) -> None:
        """See that the forward followed the plan to its end.

        Raises:
            PlanMismatch: it did not.
        """
        if self.left_plan is not None:
            raise PlanMismatch(self.left_plan)
        if self.cursor != len(self.plan.steps):
            raise PlanMismatch(
                f"the model touched parameters {self.cursor} times, and {len(self.plan.steps)} times at the "
                "start"
            )

    def collect(self, losses: Tensor, upstream: Tensor | None = None) -> dict[str, list[Factor]]:
        """Run the backward and return the factors by parameter name, in the order of use.

        Args:
            losses: [B].
            upstream: what each is multiplied by, [B]; 1 by default.

        Raises:
            PlanMismatch: the forward left the plan.
        """
        edges = self.let_go()
        self.check_followed()
        if edges and losses.requires_grad:
            self.collecting = True
            # Only for the hooks. Where the loss does not depend on an output none runs.
            start = torch.ones_like(losses) if upstream is None else upstream.to(losses)
            torch.autograd.grad(losses, edges, start, allow_unused=True)
        factors: dict[str, list[Factor]] = {}
        # Hooks ran from the loss backwards; in the order of use, differences pair the uses of two points.
        for _, _, expression, factor in sorted(self.found, key=itemgetter(0, 1)):
            for name, part in pull_back(expression, factor):
                factors.setdefault(name, []).append(part)
        return {name: [part.fastest() for part in merged(parts)] for name, parts in factors.items()}


def anchor(out: Tensor, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The output to hand on, and the tensor whose gradient is watched in its place.

    An output may be a view of a tensor that the operation made inside (a linear layer on more than two
    dimensions). A later in-place operation would then lead the gradient past the view, but not past that
    tensor.
    """
    base = out._base
    if base is None or any(base is t or base is t._base for t in tensors):
        return out, out
    if base.is_contiguous() and out.is_contiguous() and base.numel() == out.numel():
        return out, base
    out = out.clone()
    return out, out


def has_gradient(out: Any) -> bool:
    """Whether a result, or one of a nest, takes part in the backward pass."""
    if isinstance(out, Tensor):  # nearly always
        return out.requires_grad
    return any(t.requires_grad for t in tensors_in(out))


def _fits(out: Tensor, layout: Layout, records: int) -> bool:
    if layout.axis >= out.ndim:
        return False
    size = out.shape[layout.axis]
    return size == records if layout.fold == "none" else size % records == 0


def name_of(func: Callable) -> str:
    """What a function is called in messages."""
    return getattr(func, "__name__", str(func))
