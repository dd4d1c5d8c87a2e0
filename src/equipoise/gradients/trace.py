"""Traces: what a micro-batch computes, as straight lines of operations that can be read and replayed.

A model's forward, the backward to the outputs of its operations, the norms of the rows and their weighted
sums run once over fake tensors, which have shapes and no values
(``torch.fx.experimental.proxy_tensor.make_fx``). What comes out depends on no value: a branch on data has
none to follow and ends the trace. Later a step runs the lines and none of the model's Python.

    rows    parameters, buffers, records            -> losses [B], tensors of the factors, buffers written
    norms   tensors of the factors                  -> row norms [B], and their squares by parameter
    sums    tensors of the factors, weights [B]     -> the weighted sum of the rows by parameter

There are three, since norms and sums are taken at full precision, whatever the user chose for the model,
and since a method decides between them. A device launches rows with their norms as one, and weights with
their sums (`_launched`). No line reads a value. A norm that lost digits is NaN, and that of a row that is not
finite is none either; then norms and sums are computed from the factors by code that reads values and loses
no digits. So a row of weight zero is finite when it meets a sum, and changes no bit of it.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from traceback import StackSummary, walk_tb
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import equipoise
from equipoise._foreign_errors import place_of_user
from equipoise._host import nothing_read
from equipoise._launched import Launched, Stretch, launched
from equipoise.gradients.bindings import called_directly
from equipoise.gradients.capture.random_numbers import is_random
from equipoise.gradients.checks.replace_batch_norm import is_frozen_norm
from equipoise.gradients.engine_inputs import record_leaves
from equipoise.gradients.factors.base import Factor
from equipoise.gradients.numerics import are_lost_nan, full_precision, lost_are_nan
from equipoise.gradients.operator import FactoredGradients

#: Parameters and buffers by name, and the records' tensors -> rows. Buffers that a forward binds anew are so
#: in the mapping; what it writes in place is thrown away.
Compute = Callable[[dict[str, Tensor], dict[str, Tensor], list[Tensor]], FactoredGradients]


@dataclass(frozen=True)
class Line:
    """One straight line of operations.

    Attributes:
        graph: takes tensors one by one, and returns a list of them.
        inputs: what each tensor that it takes is called.
        outputs: what each tensor that it returns is called.
        written: inputs that it writes to.
        run: what a compiler made of it; None for the operations one by one.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    written: tuple[str, ...] = ()
    run: Callable[..., list[Tensor]] | None = None

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """What it returns for these."""
        return (self.run or self._operations)(*tensors)

    def compiled(self) -> Line:
        """The same, with kernels of `torch.compile`, which draw the same random numbers."""
        return replace(self, run=torch.compile(self.graph, dynamic=False, options={"fallback_random": True}))

    @cached_property
    def _operations(self) -> Callable[..., list[Tensor]]:
        return called_directly(self.graph)

    def is_on(self, device: torch.device) -> bool:
        """Whether the tensors that it holds lie there: of one on the host a graph would keep the number."""
        held = (node.target for node in self.graph.graph.nodes if node.op == "get_attr")
        tensors = (attrgetter(str(name))(self.graph) for name in held)
        return all(tensor.device == device for tensor in tensors if isinstance(tensor, Tensor))

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        operations = (node for node in self.graph.graph.nodes if hasattr(node.target, "overloadpacket"))
        return any(is_random(node.target, node.args, node.kwargs) for node in operations)


@dataclass(frozen=True)
class Traced:
    """The lines of one form of micro-batch.

    Attributes:
        rows, norms, sums: see the module.
        like: rows without values.
        parameters, buffers: names of those that `rows` takes.
        written: names of those to which the model writes; the lines write to copies.
    """

    rows: Line
    norms: Line
    sums: Line
    like: FactoredGradients
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    written: tuple[str, ...] = ()

    @cached_property
    def _left(self) -> list[str]:
        """The buffers that `rows` returns behind all else, from the last one on."""
        names = reversed(self.rows.outputs)
        return [name.removeprefix("buffer:") for name in names if name.startswith("buffer:")]

    @cached_property
    def _forward(self) -> Stretch:
        """Whether all norms are finite, what `norms` returns for what `rows` returns, and that."""

        def both(*given: Tensor) -> list[Tensor]:
            with torch.no_grad():
                found = self.rows(*given)
            with full_precision(self.like.device):
                norms = self.norms(*found[1 : len(found) - len(self._left)])
                return [(norms[0] < math.inf).all(), *norms, *found]

        device = self.like.device
        if not (self.rows.is_on(device) and self.norms.is_on(device)):
            return both
        return launched(both, [name.startswith("record:") for name in self.rows.inputs], device)

    @cached_property
    def _summed(self) -> Stretch:
        """`sums`."""
        return launched(self.sums, [name == "weights" for name in self.sums.inputs], self.like.device)

    @cached_property
    def _weighed(self) -> dict[Hashable, Stretch]:
        """By what is asked: from norms and places of all rows and tensors of factors to counts and sums."""
        return {}

    @property
    def launches(self) -> list[Launched]:
        """What a device launches as one."""
        every = self._forward, self._summed, *self._weighed.values()
        return [one for one in every if isinstance(one, Launched)]

    def gradients(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> tuple[FactoredGradients, dict[str, Tensor]]:
        """The rows of a micro-batch, and what the forward wrote to buffers, by name.

        If a norm is not finite, or lost digits, all norms and sums are computed anew from the factors, by
        code that reads values. Inside `lost_are_nan` nobody looks at the norms, and they may be NaN.

        Args:
            parameters, buffers: values of those that `rows` takes, by name.
            batch: of the form that was traced.
        """
        values = [parameters[name].detach() for name in self.parameters]
        values += [buffers[name] for name in self.buffers]
        found = self._forward(*values, *record_leaves(batch))
        written = {name: found.pop() for name in self._left}
        rows = Replayed(self, found)
        if are_lost_nan() or bool(rows.all_finite):
            return rows, written
        like = self.like
        exact = FactoredGradients(
            rows.factors,
            losses=rows.losses,
            shapes=like.shapes,
            num_records=like.num_records,
            dtype=like.dtype,
            device=rows.device,
        )
        return exact, written


#: Norms [B] of all rows of a forward, and which of them are meant, bool [B] -> their weights [B], zero
#: elsewhere, and counts of them. It reads no value.
WeightsOf = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

MOST_WEIGHED = 4
"""Kinds of weights of which a graph is held. A choice: a method has one or two, and each takes memory."""


class Replayed(FactoredGradients):
    """Rows whose norms and weighted sums are replayed; all else is computed from the factors.

    Args:
        traced: the lines.
        found: what `Traced._forward` returns, but for buffers.
        places: which rows are meant; None for all.

    Attributes:
        all_finite: whether all norms of the forward are finite, bool [].
    """

    def __init__(self, traced: Traced, found: Sequence[Tensor], places: Tensor | slice | None = None) -> None:
        self._traced, self._found, self._places = traced, found, places
        count = 1 + len(traced.norms.outputs)
        self.all_finite, self._norms_of_all, *self._squares_of_all = found[:count]
        losses, *self._tensors = found[count:]
        self.losses = losses if places is None else losses[places]
        self.shapes, self.dtype, self.device = traced.like.shapes, traced.like.dtype, losses.device
        self._operands, self.num_records = None, len(self.losses)

    @cached_property
    def _squared(self) -> dict[str | tuple[str, ...], Tensor]:  # type: ignore[override]
        places = slice(None) if self._places is None else self._places
        names = self._traced.norms.outputs[1:]
        return {n: square[places] for n, square in zip(names, self._squares_of_all, strict=True)}

    @cached_property
    def factors(self) -> dict[str, tuple[Factor, ...]]:  # type: ignore[override]
        """As of any rows."""
        found = with_tensors(self._traced.like.factors, self._tensors)
        if self._places is None:
            return found
        return {name: tuple(factor.rows(self._places) for factor in kept) for name, kept in found.items()}

    def row_norms(self, groups: Sequence[Sequence[str]] | None = None) -> Tensor:
        if groups is not None:
            return super().row_norms(groups)
        return self._norms_of_all if self._places is None else self._norms_of_all[self._places]

    def rows(self, index: Tensor | slice) -> FactoredGradients:
        if self._places is not None or not isinstance(index, slice):
            every = torch.arange(self._all, device=self.device)
            index = (every if self._places is None else every[self._places])[index]
        return Replayed(self._traced, self._found, index)

    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(weights, Tensor) or weights.ndim != 1:
            return super().weighted_sums(weights)
        given = self._weights_for("", weights).to(self.dtype)
        if self._places is not None:  # the others have weight zero
            whole = given.new_zeros(self._all)
            whole[self._places] = given
            given = whole
        with full_precision(self.device):
            sums = self._traced._summed(*self._tensors, given)
        return dict(zip(self._traced.sums.outputs, sums, strict=True))

    def weighed(self, key: Hashable, weights_of: WeightsOf) -> tuple[dict[str, Tensor], Tensor]:
        """Weighted sums whose weights follow from the norms, and counts of these.

        All rows of the forward are computed, so that no shape follows the draw.

        Args:
            key: tells what `weights_of` computes: the first one of each is asked for all.
            weights_of: see `WeightsOf`.
        """
        traced, known = self._traced, self._traced._weighed
        if key not in known:

            def both(norms: Tensor, here: Tensor, *tensors: Tensor) -> list[Tensor]:
                weights, counts = weights_of(norms, here.to(norms.device, non_blocking=True))
                return [counts, *traced.sums(*tensors, weights.to(traced.like.dtype))]

            if len(known) == MOST_WEIGHED:
                del known[next(iter(known))]
            copied = [False, True, *[False] * len(self._tensors)]
            known[key] = launched(both, copied, self.device)
        where = slice(None) if self._places is None else self._places
        here = torch.zeros(self._all, dtype=torch.bool, device=getattr(where, "device", None))
        here[where] = True
        with full_precision(self.device):
            counts, *sums = known[key](self._norms_of_all, here, *self._tensors)
        return dict(zip(traced.sums.outputs, sums, strict=True)), counts

    @property
    def _all(self) -> int:
        """How many rows the forward had."""
        return self._traced.like.num_records


def tensors_of(factors: Mapping[str, Sequence[Factor]]) -> dict[str, Tensor]:
    """The tensors that factors hold, by name."""
    return {
        f"{name}:{number}:{key}": value
        for name, kept in factors.items()
        for number, factor in enumerate(kept)
        for key, value in vars(factor).items()
        if isinstance(value, Tensor)
    }


def with_tensors(
    factors: Mapping[str, Sequence[Factor]], tensors: Sequence[Tensor]
) -> dict[str, tuple[Factor, ...]]:
    """Factors like these that hold other tensors, in the order of `tensors_of`."""
    following = iter(tensors)

    def filled(like: Factor) -> Factor:
        factor = copy.copy(like)
        vars(factor).update({k: next(following) for k, v in vars(like).items() if isinstance(v, Tensor)})
        return factor

    return {name: tuple(map(filled, kept)) for name, kept in factors.items()}


def trace(
    compute: Compute,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Any,
    sources: nn.Module | None = None,
) -> Traced:
    """Trace what micro-batches of the form of `batch` compute.

    Args:
        compute: see `Compute`.
        parameters, buffers: of the model, by name.
        batch: records; only their shapes count.
        sources: note at each operation of `rows` the line of the source and the module of this model, which
            takes time.
    """
    made: list[FactoredGradients] = []

    def rows(given: dict[str, Tensor], written: Sequence[str]) -> dict[str, Tensor]:
        own, others = ({name: given.pop(name) for name in known} for known in (parameters, buffers))
        before = dict(others)
        gradients = compute(own, others, list(given.values()))
        made.append(gradients)
        assert gradients.losses is not None
        left = {
            f"buffer:{name}": now
            for name, now in others.items()
            if name in written or now is not before[name]  # written to, or bound anew
        }
        return {"losses": gradients.losses, **tensors_of(gradients.factors), **left}

    records = {f"record:{number}": leaf for number, leaf in enumerate(record_leaves(batch))}
    everything = {**{name: p.detach() for name, p in parameters.items()}, **buffers, **records}
    of_rows, found, written = line_on_copies(rows, everything, sources)
    like = made[-1]
    held = {name: found[name] for name in tensors_of(like.factors)}

    def again(tensors: Mapping[str, Tensor]) -> FactoredGradients:
        factors = with_tensors(like.factors, list(tensors.values()))
        return FactoredGradients(
            factors, shapes=like.shapes, num_records=like.num_records, dtype=like.dtype, device=like.device
        )

    def norms(given: dict[str, Tensor]) -> dict[Any, Tensor]:
        gradients = again(given)
        return {"": gradients.row_norms(), **gradients._squared}  # of each parameter, and of all together

    def sums(given: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = given.pop("weights")
        return again(given).weighted_sums(weights)

    of_norms, _ = line_of(norms, held)
    weights = found["losses"].new_empty(like.num_records, dtype=like.dtype)
    of_sums, _ = line_of(sums, {**held, "weights": weights})
    written += [n for name in found if (n := name.removeprefix("buffer:")) != name and n not in written]
    return Traced(of_rows, of_norms, of_sums, like, tuple(parameters), tuple(buffers), tuple(written))


def line_on_copies(
    function: Callable[[dict[str, Tensor], Sequence[str]], dict[str, Tensor]],
    given: Mapping[str, Tensor],
    sources: nn.Module | None = None,
) -> tuple[Line, dict[str, Tensor], list[str]]:
    """As `line_of`; what the function writes to are copies, so that the model's own stay; and their names."""
    written: list[str] = []

    def copied(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return function(values | {name: values[name].clone() for name in written}, written)

    line, found = line_of(copied, given, sources)
    if line.written:
        written += line.written
        line, found = line_of(copied, given, sources)
    return line, found, written


def line_of(
    function: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    given: Mapping[str, Tensor],
    sources: nn.Module | None = None,
) -> tuple[Line, dict[str, Tensor]]:
    """The operations of a function of tensors by name, and what it returned, without values."""
    found: dict[str, Tensor] = {}

    def flat(*values: Tensor) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]), _NumbersOfForward():
            found.update(function(dict(zip(given, values, strict=True))))
        return list(found.values())

    # PyTorch 2.6 notes no lines.
    noted = sources if hasattr(PythonKeyTracer, "_filter_traceback_frames") else None
    sources_noted = nullcontext() if noted is None else _sources_of_users(noted)
    with nothing_read(), lost_are_nan(), _compiled_parts(), _unseen_values(), _own_noted(), sources_noted:
        # Tensors that model and loss hold beside parameters and buffers stay in the graph as they are.
        more: Any = {} if noted is None else {"record_stack_traces": True}
        make = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True, **more)
        graph = make(*given.values())
    _simplify(graph)
    for node in graph.graph.nodes:  # a dense loop over records may have gone on
        if any(isinstance(size, torch.SymInt) for size in getattr(node.meta.get("val"), "shape", ())):
            raise RuntimeError(f"a shape follows values ({node.target})")
    written = _written(graph.graph)
    places = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    if held := [name for name in written if name not in places]:
        raise RuntimeError(
            f"a forward writes to {len(held)} tensors that model or loss hold outside of buffers"
        )
    names = dict(zip(places, given, strict=True))
    return Line(graph, tuple(given), tuple(found), tuple(names[name] for name in written)), found


#: Without autograd these give their argument.
_GIVE_THEIR_ARGUMENT = frozenset([torch.ops.aten.detach.default, torch.ops.aten.alias.default])


def _simplify(graph: fx.GraphModule) -> None:
    """Leave out operations that change nothing or were done before: half of what a small network runs.

    Views are of one memory, whatever is written to it. Other results are taken a second time only as long as
    nothing is written in between, and never if something writes to them, as to new memory, or if the graph
    returns them: who gets a tensor may write to it.
    """
    behind, written = _memory(graph.graph)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    own = {*written}.union(*(behind[node] for node in output.all_input_nodes))
    done: dict[Hashable, fx.Node] = {}
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        if schema.is_mutable:
            done = {key: kept for key, kept in done.items() if _is_view(kept)}
            continue
        shown, layout = [*_shown_by(node)], _layout(node)
        if node.target in _GIVE_THEIR_ARGUMENT:
            found = shown[0]
        else:
            found = next((one for one in shown if layout is not None and _layout(one) == layout), node)
        if found is node:
            module = repr(node.meta.get("nn_module_stack"))  # a trusted one excuses no other
            made: Hashable = node.target, repr(node.args), repr(node.kwargs)
            found = done.setdefault((module, (shown[-1], layout) if shown and layout else made), node)
            if found is node or (not shown and (found in own or node in own)):
                continue
        node.replace_all_uses_with(found)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _is_view(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    last = schema.returns[-1] if schema is not None and schema.returns else None
    return last is not None and last.alias_info is not None and not last.alias_info.is_write


def _shown_by(node: fx.Node) -> Iterator[fx.Node]:
    """What a view is of, and what that is of, up to what is no view; nothing for others."""
    while _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


def _layout(node: fx.Node) -> tuple[Any, ...] | None:
    """How a tensor lies in its memory; None for what is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    signs = value.is_conj(), value.is_neg()  # views that say how values are read
    return value.dtype, value.shape, value.stride(), value.storage_offset(), signs


def _compiled_parts() -> AbstractContextManager[Any]:
    """Inside, what `torch.compile` made is traced as it was written."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.config.patch(error_on_nested_fx_trace=False) if dynamo else nullcontext()


@contextmanager
def _unseen_values() -> Iterator[None]:
    """Inside, PyTorch's distributions look at no values. Its errors are not printed: the proof has them."""
    log, of_all = logging.getLogger("torch._subclasses.fake_tensor"), torch.distributions.Distribution
    before = log.level, of_all._validate_args
    log.setLevel(logging.CRITICAL)
    of_all.set_default_validate_args(False)
    try:
        yield
    finally:
        log.setLevel(before[0])
        of_all.set_default_validate_args(before[1])


#: The field of a node that says that the engine made it; `functional` keeps it.
MADE_BY = "partitioner_tag"


@contextmanager
def _own_noted() -> Iterator[None]:
    """Inside, a trace notes which operations the factors' code asks for.

    It works on blocks of records, all alike. A model that does so may give records at some places something
    else than others.
    """
    before = PythonKeyTracer.create_node

    def create_node(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = before(tracer, *args, **kwargs)
        if _asked_by().startswith(("equipoise.gradients.factors", "equipoise.gradients.operator")):
            node.meta[MADE_BY] = "engine"
        return node

    PythonKeyTracer.create_node = create_node  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PythonKeyTracer.create_node = before  # type: ignore[method-assign]


def _asked_by() -> str:
    """The module whose code asks for an operation, behind PyTorch's and what sees operations on their way."""
    around = ("torch.", "equipoise.gradients.capture.", "equipoise.gradients.numerics", __name__)
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(around):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


@contextmanager
def _sources_of_users(model: nn.Module) -> Iterator[None]:
    """Inside, a trace notes the module that runs, and lines that are neither PyTorch's nor ours."""
    own = [str(Path(module.__file__ or "").parent) for module in (torch, equipoise)]
    names: dict[
        nn.Module, tuple[str | None, str]
    ] = {  # now: inside, parameters are others, and no norm frozen
        module: (name, f"{'frozen ' * is_frozen_norm(module)}{type(module).__name__}")
        for name, module in model.named_modules()
    }
    running: list[tuple[str | None, str] | None] = []
    # By the numbers that autograd gives operations: which module ran from there on. A backward has them too.
    numbers: list[int] = [0]
    ran: list[tuple[str | None, str] | None] = [None]
    before = PythonKeyTracer._filter_traceback_frames, PythonKeyTracer.create_node

    def of_users(_: Any, frames: Any) -> StackSummary:
        return StackSummary.from_list([f for f in frames if not f.filename.startswith((*own, "<"))])

    def create_node(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = before[1](tracer, *args, **kwargs)
        backward = torch._C._current_autograd_node()
        module = running[-1] if running else None
        if module is None and backward is not None:
            module = ran[bisect_right(numbers, backward._sequence_nr()) - 1]
        if module is not None:
            node.meta["nn_module_stack"] = {"": module}
        return node

    def note() -> None:
        numbers.append(torch._C._autograd._get_sequence_nr())
        ran.append(running[-1] if running else None)

    def enter(module: nn.Module, _: Any) -> None:
        if module not in names:  # one that holds the model is its loss, which is no place
            is_around = any(inner is model for inner in module.modules())
            running.append(None if is_around else (None, type(module).__name__))
        else:
            running.append(names[module])
        note()

    def leave(*_: Any) -> None:
        running.pop()
        note()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    PythonKeyTracer._filter_traceback_frames = of_users  # type: ignore[method-assign, assignment]
    PythonKeyTracer.create_node = create_node  # type: ignore[method-assign, assignment]
    try:
        with warnings.catch_warnings():  # compiled parts warn of hooks that are gone in a moment
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            yield
    finally:
        PythonKeyTracer._filter_traceback_frames, PythonKeyTracer.create_node = before  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


#: What a model did for which there is no trace, by the name of PyTorch's error.
_REASONS = {
    "GuardOnDataDependentSymNode": "a branch, a loop or a shape follows values",
    "DataDependentOutputException": "a value is read",
    "DynamicOutputShapeException": "a shape follows values",
}


def why_untraced(error: Exception) -> str:
    """Why there is no trace, and at which line of the model or the loss; PyTorch's own layers branch too.

    >>> try:
    ...     raise ValueError("Expected more")
    ... except ValueError as error:
    ...     why_untraced(error)
    'Expected more'
    """
    reason = _REASONS.get(type(error).__name__) or next(iter(str(error).splitlines()), "")
    if reason in _REASONS.values() and (name := _layer_of_torch(error)):
        reason += f" in PyTorch's {name}"
    place = place_of_user(error)
    return reason + (f", in {place}" if place else "")


def _layer_of_torch(error: Exception) -> str | None:
    """The function of PyTorch's layers, losses or distributions that an error comes from."""
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("equipoise", "torch"):
            found = None
        elif module.startswith(("torch.nn.", "torch.distributions.")):
            found = f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
    return found


#: The generator's seed counts the random operations of a trace from here on: far above the seeds that a
#: model's own code is likely to set, which would be taken for numbers of operations.
FIRST_SEED = 2**40


class _NumbersOfForward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a checkpoint, whose forward runs once more in the backward, the random numbers of the first time.

    In a model that runs, the checkpoint sets the generator back for that. A graph sets none back. So here the
    seed says which numbers follow, and those of the forward stay in the graph.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn: list[tuple[Any, Any]] = []
        torch.default_generator.manual_seed(FIRST_SEED)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        number = torch.default_generator.initial_seed() - FIRST_SEED
        if torch._C._current_graph_task_id() == -1:  # a forward
            out = func(*args, **kwargs)
            number = len(self._drawn)
            self._drawn.append((func, tree_map_only(Tensor, torch.clone, out)))
        elif 0 <= number < len(self._drawn) and self._drawn[number][0] is func:
            out = self._drawn[number][1]
            out = args[0].copy_(out) if func._schema.is_mutable else tree_map_only(Tensor, torch.clone, out)
        else:
            raise RuntimeError(f"the backward draws random numbers ({func}), and not those of a checkpoint")
        torch.default_generator.manual_seed(FIRST_SEED + number + 1)
        return out


def _written(graph: fx.Graph) -> list[str]:
    """Names of the inputs and constants that some operation writes to, itself or through a view."""
    return [node.name for node in _memory(graph)[1] if node.op in ("placeholder", "get_attr")]


def _memory(graph: fx.Graph) -> tuple[dict[fx.Node, frozenset[fx.Node]], dict[fx.Node, None]]:
    """Whose memory each node may show: that of inputs, constants and results; and what is written to.

    Schemas do not say that a batch norm in training mode writes its running statistics.
    """
    behind: dict[fx.Node, frozenset[fx.Node]] = {}
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        shown: set[fx.Node] = set()
        if schema is None:  # an input, or one of several results
            shown.update(*(behind.get(given, ()) for given in node.all_input_nodes))
        else:
            given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
            for argument in schema.arguments:
                hidden = argument.name.startswith("running_") and given.get("training") is True
                if (argument.alias_info is None and not hidden) or argument.name not in given:
                    continue
                value = given[argument.name]
                values = value if isinstance(value, (list, tuple)) else [value]
                roots = frozenset().union(*(behind.get(v, ()) for v in values if isinstance(v, fx.Node)))
                shown |= roots
                if hidden or argument.alias_info.is_write:
                    found.update(dict.fromkeys(roots))
        behind[node] = frozenset(shown or [node])
    return behind, found
