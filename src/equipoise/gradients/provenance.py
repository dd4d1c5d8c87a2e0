"""Proofs that records do not mix, read from the operations of a trace.

The lines of a trace (``gradients/trace.py``), in a form in which no operation writes into a tensor, are read
from top to bottom. Each tensor is of a kind (``gradients/kinds.py``), which follows from those of the
operands by the rule of the operation (``gradients/kind_rules.py``). `docs/concepts/proof.md` states the
theorem.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.gradients.kind_rules import RULES, rule_of
from equipoise.gradients.kinds import (
    SUMMED,
    Axis,
    ByRecord,
    Fault,
    Kind,
    MixesError,
    NoRuleError,
    One,
    Public,
    Seen,
    Sum,
    every_axis,
    listed,
    tensors,
)
from equipoise.gradients.trace import MADE_BY, Line, Traced

#: How the engine computes the results of a record: as those of others, in blocks of as many as memory holds.
BLOCK = -1

#: By these the engine puts the results of blocks together.
JOINS = (torch.ops.aten.slice_scatter.default, torch.ops.aten.cat.default)


@dataclass(frozen=True)
class Proof:
    """What came of reading a trace; without a fault the records do not mix, whatever their values.

    Attributes:
        fault: what mixes, or has no rule.
        untraced: why there is no trace to read.
        public_writes: buffers to which a forward writes what depends on no record.
        excused: what mixes, or has no rule, in modules for which the owner answers.
        private_writes: buffers to which a forward writes what comes of records.
    """

    fault: Fault | None = None
    untraced: str | None = None
    public_writes: tuple[str, ...] = ()
    excused: tuple[Fault, ...] = ()
    private_writes: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """``"proved"``, ``"mixes"``, ``"no rule"``, ``"no trace"`` or ``"trusted"``."""
        if self.untraced is not None:
            return "no trace"
        if self.fault is not None and self.fault.mixes:
            return "mixes"
        return "trusted" if self.excused else "proved" if self.fault is None else "no rule"

    def __str__(self) -> str:
        if self.untraced is not None:
            return f"not proved: there is no trace, since {self.untraced}"
        return "proved for all values of the records" if self.fault is None else f"not proved: {self.fault}"


def prove(traced: Traced, trusted: Trusted | None = None) -> Proof:
    """Whether losses and squared norms are by record, and what leaves is a sum over records.

    Args:
        traced: with the modules at its operations, if some are trusted.
        trusted: if there is no proof without them. What is written to buffers is read without them.
    """
    records = traced.like.num_records
    kinds: dict[str, Kind] = {name: Public() for name in (*traced.parameters, *traced.buffers)}
    rows = read(traced.rows, kinds, records)
    written = [name.removeprefix("buffer:") for name, kind in rows.items() if isinstance(kind, Public)]
    public = tuple(name for name in written if name in traced.written)
    private = tuple(name for name in traced.written if _is_private(rows.get(f"buffer:{name}")))
    proof = Proof(None, public_writes=public, private_writes=private)
    fault = _fault(traced, rows, records)
    if fault is None or trusted is None:
        return replace(proof, fault=fault)
    stays = {name: kind for name, kind in rows.items() if name.startswith("written:")}
    rest = _fault(traced, read(traced.rows, kinds, records, trusted) | stays, records)
    return replace(proof, fault=rest, excused=tuple(trusted.excused))


def _is_private(kind: Kind | None) -> bool:
    """Whether something comes of records, or has no rule: then it may."""
    return kind is not None and not isinstance(kind, Public)


def inputs_read(line: Line) -> set[str]:
    """The inputs that results follow, but for what is written to buffers that no result follows.

    A buffer that nothing but its own update reads, such as a count, is not among them.
    """
    graph = functional(line.graph).graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = dict(zip(line.outputs, output.args[0], strict=True))
    places = dict(zip((node for node in graph.nodes if node.op == "placeholder"), line.inputs, strict=True))
    waiting = [node for name, node in results.items() if not name.startswith("buffer:")]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += node.all_input_nodes
        if node in places and f"buffer:{places[node]}" in results:  # then so is what is written to it
            waiting.append(results[f"buffer:{places[node]}"])
    return {name for node, name in places.items() if node in seen}


def _fault(traced: Traced, rows: Mapping[str, Kind], records: int) -> Fault | None:
    """What mixes, if it is known, or else what has no rule, given the kinds of what `rows` returns."""
    norms = read(traced.norms, rows, records)
    sums = read(traced.sums, {**rows, "weights": ByRecord(Axis(0))}, records)
    faults = [not_by_record(rows["losses"], "the losses")]
    faults += [not_by_record(norms[name], f"the norms of {name or 'rows'}") for name in traced.norms.outputs]
    faults += [not_a_sum(sums[name], f"the sums of {name}") for name in traced.sums.outputs]
    faults += [kind for name, kind in rows.items() if name.startswith("written:") and isinstance(kind, Fault)]
    return min(filter(None, faults), key=lambda fault: not fault.mixes, default=None)


def not_by_record(kind: Kind, name: str) -> Fault | None:
    """Why these are not one number for each record, [B]."""
    if isinstance(kind, Fault | Sum):
        return kind if isinstance(kind, Fault) else kind.made
    good = kind == ByRecord(Axis(0)) or (isinstance(kind, Public) and Axis(0) in kind.alike)
    return None if good else Fault(True, name, "they follow the places of the records")


def not_a_sum(kind: Kind, name: str) -> Fault | None:
    """Why this is not a sum over records."""
    if isinstance(kind, ByRecord | One):
        return Fault(True, name, "single records leave")
    return kind if isinstance(kind, Fault) else None


def read(
    line: Line, kinds: Mapping[str, Kind], records: int, trusted: Trusted | None = None
) -> dict[str, Kind]:
    """The kinds of what a line returns by name; what is not in `kinds` is a record's."""
    try:
        graph = functional(line.graph)
    except Exception as error:  # whatever PyTorch finds: then there is no proof
        fault = Fault(False, "a write", re.split(r"\. |\n", f"{type(error).__name__}: {error}")[0])
        return dict.fromkeys(line.outputs, fault)
    given = [kinds.get(name, ByRecord(Axis(0))) for name in line.inputs]
    found, written = flow(graph, given, records, trusted)
    return dict(zip(line.outputs, found, strict=True)) | {f"written:{n}": k for n, k in enumerate(written)}


def functional(graph: fx.GraphModule) -> fx.GraphModule:
    """The same computation without operations that write; the nodes keep what is known of their source."""
    schemas = (getattr(node.target, "_schema", None) for node in graph.graph.nodes)
    if not any(schema is not None and schema.is_mutable for schema in schemas):
        return graph
    held = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    values = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in held]

    def run(*tensors: Tensor) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            return fx.Interpreter(graph).run(*tensors)

    made = make_fx(torch.func.functionalize(run), tracing_mode="fake", _allow_non_fake_inputs=True)(*values)
    made.graph.eliminate_dead_code()
    return made


class Trusted:
    """Modules for which the owner answers: what mixes there is taken to keep records apart.

    From the first mixture in such a module on, what its operations make of it is by record if it has an axis
    as long as that of the records, and else public.

    Args:
        names: paths of the modules; those inside them count, too.

    Attributes:
        excused: what was taken so.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.excused: list[Fault] = []
        self._mixed: set[fx.Node] = set()
        self._axes: dict[int, tuple[int, int]] = {}

    def kinds(self, node: fx.Node, found: Any, kinds: Mapping[fx.Node, Any], records: int) -> Any:
        """The kinds of what an operation makes, which rules say to be `found`."""
        module, tensors = _where(node)[1], listed(found)
        path = module[0] if module is not None else None
        inside = path is not None and any(path == name or path.startswith(name + ".") for name in self.names)
        if any(isinstance(kind, Fault) for at in node.all_input_nodes for kind in listed(kinds[at])):
            return found  # from elsewhere
        follows = any(argument in self._mixed for argument in node.all_input_nodes)
        value = node.meta.get("val")
        values = value if isinstance(value, tuple | list) else [value]
        shapes = [tuple(v.shape) if isinstance(v, Tensor) else () for v in values]
        if not inside or not (follows or any(isinstance(kind, Fault | Sum) for kind in tensors)):
            for kind, shape in zip(tensors, shapes, strict=False):
                if isinstance(kind, ByRecord):
                    self._axes.setdefault(shape[kind.axis.dim], kind.axis[1:])
            if follows and node.target is operator.getitem:
                self._mixed.add(node)
            return found
        if not follows:
            mixed = [kind for kind in tensors if isinstance(kind, Fault | Sum)]
            faults = [kind.made if isinstance(kind, Sum) else kind for kind in mixed]
            self.excused += [fault for fault in faults if fault not in self.excused]
        self._mixed.add(node)
        own = [
            (kinds[at].axis, at.meta["val"].shape[kinds[at].axis.dim])
            for at in sorted(node.all_input_nodes, key=lambda at: at in self._mixed)
            if isinstance(kinds[at], ByRecord)
        ]
        taken = [self._by_shape(shape, own, records) for shape in shapes]
        return taken if isinstance(value, tuple | list) else taken[0]

    def _by_shape(self, shape: Sequence[int], own: Iterable[tuple[Axis, int]], records: int) -> Kind:
        for axis, size in own:
            if axis.dim < len(shape) and shape[axis.dim] == size:
                return ByRecord(axis)
        axes = self._axes | {records: (1, 1)}
        return next(
            (ByRecord(Axis(d, *axes[size])) for d, size in enumerate(shape) if size in axes), Public()
        )


def flow(
    graph: fx.GraphModule, given: Sequence[Kind], records: int, trusted: Trusted | None = None
) -> tuple[list[Kind], list[Kind]]:
    """The kinds of what a graph returns, given those of what it takes; and of what it writes."""
    kinds: dict[fx.Node, Any] = {}
    ways: dict[Any, int] = {}
    following = iter(given)
    written: list[Kind] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            kinds[node] = next(following)
        elif node.op == "output":
            return [kinds[argument] for argument in node.args[0]], written
        elif node.op == "get_attr":
            kinds[node] = Public()
        elif node.target is operator.getitem:
            held = kinds[node.args[0]]
            kinds[node] = held[node.args[1]] if isinstance(held, list) else held
        elif node.target is torch.ops.aten.copy_.default:  # into what the graph takes: the only write left
            kinds[node] = kind = kinds[node.args[1]]
            written.append(kind if isinstance(kind, Public | Fault) else _kept(node))
        else:
            alone = _of_one(node, kinds, ways, records)
            kinds[node] = _of_node(node, kinds, records) if alone is None else alone
        if trusted is not None and node.op == "call_function":
            kinds[node] = trusted.kinds(node, kinds[node], kinds, records)
    raise AssertionError("a graph returns something")


def _of_one(node: Any, kinds: Mapping[Any, Any], ways: dict[Any, int], records: int) -> Any:
    """The kind of what an operation makes of one record alone; None if there is none, or more."""

    def told(at: Any) -> Any:
        """The same for other records: what was made alike of the same, or of what they have alike."""
        if isinstance(kinds[at], One):
            return ("way", kinds[at].way)
        if at not in ways:
            made = (at.target, at.args, at.kwargs) if at.op == "call_function" else at
            if at.target is select and isinstance(kinds[at.args[0]], Public):
                dim = at.args[1] % at.args[0].meta["val"].ndim
                made = ("each", at.args[0], dim) if Axis(dim) in kinds[at.args[0]].alike else at
            ways[at] = ways.setdefault(repr(fx.node.map_arg(made, told)) if made is not at else at, len(ways))
        return ("made", ways[at])

    select, unbind = torch.ops.aten.select.int, torch.ops.aten.unbind.int
    held = [kinds[argument] for argument in node.all_input_nodes]
    record = next((kind.record for kind in held if isinstance(kind, One)), None)
    if node.target in (select, unbind) and isinstance(held[0], ByRecord) and not node.kwargs:
        whole, dim, *index = (*node.args, 0)[: 3 if node.target is select else 2]
        shape = whole.meta["val"].shape
        if held[0] != ByRecord(Axis(dim % len(shape))) or not all(isinstance(at, int) for at in index):
            return None
        number = ways.setdefault((whole, dim % len(shape)), len(ways))
        alone = [One(at, number) for at in range(shape[dim])]
        return alone[index[0]] if index else alone
    if node.target is torch.ops.aten.stack.default and held and all(isinstance(k, Public) for k in held):
        parts, dim = (*node.args, 0)[:2]  # a loop over records whose values they have alike
        if len(parts) == records and len({told(part) for part in parts}) == 1:
            shape = node.meta["val"].shape
            return Public(every_axis(shape, records, [dim % len(shape)]))
    if MADE_BY in node.meta:
        if node.target in JOINS:  # blocks are put where they belong
            return None
        several = len({getattr(kind, "record", -1) for kind in held}) > 1
        if (
            node.target is torch.ops.aten.add.Tensor
            and several
            and all(isinstance(k, One | Sum) for k in held)
        ):
            return Sum(Fault(True, str(node.target), "it adds up over the records", *_where(node)))
    # How many random numbers it takes may follow its values, and shift those of the next record.
    if node.target not in RULES and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    if record is None or not all(isinstance(k, Public) or getattr(k, "record", -1) == record for k in held):
        return None
    number = ways.setdefault((node.target, repr(fx.node.map_arg((node.args, node.kwargs), told))), len(ways))
    if not isinstance(node.meta["val"], tuple | list):
        return One(record, number)
    return [One(record, ways.setdefault((number, at), len(ways))) for at in range(len(node.meta["val"]))]


def _of_node(node: Any, kinds: Mapping[Any, Any], records: int) -> Any:
    """The kind of what an operation makes, or a list of them."""
    held = [
        k for at in node.all_input_nodes for k in (kinds[at] if isinstance(kinds[at], list) else [kinds[at]])
    ]
    faults = sorted((k for k in held if isinstance(k, Fault)), key=lambda fault: not fault.mixes)
    rule, is_linear = rule_of(node.target)
    if faults:
        return faults[0]
    if not is_linear and any(isinstance(k, Sum) for k in held):
        return next(k.made for k in held if isinstance(k, Sum))

    def seen(kind: Any, value: Any) -> Seen:
        if not isinstance(value, Tensor):  # a result that nobody asked for
            return Seen(kind, (), records)
        return Seen(kind if value.numel() else Public(), tuple(value.shape), records, value)

    value = node.meta.get("val")
    outs = [seen(None, v) for v in (value if isinstance(value, tuple | list) else [value])]
    try:
        if rule is None:
            raise NoRuleError("it is not in the table")
        args, named = fx.node.map_arg((node.args, node.kwargs), lambda at: seen(kinds[at], at.meta["val"]))
        named = dict(named)
        expected = [given for given in node.target._schema.arguments if not given.kwarg_only][len(args) :]
        args = [*args, *(named.pop(given.name, given.default_value) for given in expected)]
        if tensors(*named.values()) and "attn_mask" not in named:
            raise NoRuleError("it takes a tensor more")
        found = rule(outs if isinstance(value, tuple | list) else outs[0], *args, **named)
    except Exception as error:  # also of a rule that meets a form that it was not written for
        if all(isinstance(k, Public) for k in held):
            return Public()  # whatever it does, it does to public values
        is_named = isinstance(error, MixesError | NoRuleError)
        what = str(error) if is_named else f"its form is not known ({type(error).__name__}: {error})"
        return Fault(isinstance(error, MixesError), str(node.target), what, *_where(node))
    made = Sum(Fault(True, str(node.target), "it adds up over the records", *_where(node)))

    def settled(out: Seen, kind: Any) -> Any:
        dtype = torch.float32 if out.value is None else out.value.dtype
        whole = not dtype.is_floating_point
        if isinstance(kind, Sum) and whole and any(isinstance(k, Sum) for k in held):
            return Fault(True, str(node.target), "a sum over records is rounded", *_where(node))
        if isinstance(kind, ByRecord) and out.shape:
            (dim, outer, places), first = kind.axis, kind.first
            count = out.shape[dim] // (outer * places)
            joins = any(isinstance(k, One) for k in held) and node.target is not torch.ops.aten.stack.default
            if MADE_BY not in node.meta and (count < records or joins):
                return Fault(False, str(node.target), "records at some places alone", *_where(node))
            if count == 1 < records:
                return One(first, BLOCK)
        if isinstance(kind, Public) and dtype not in (torch.int32, torch.int64):
            kind = replace(kind, counts=None)  # a type may not hold the numbers
        return Public() if 0 in out.shape else made if kind is SUMMED else kind

    if isinstance(found, list):
        return [settled(out, kind) for out, kind in zip(outs, found, strict=True)]
    return settled(outs[0], found)


def _kept(node: fx.Node) -> Fault:
    return Fault(True, "copy_", "what comes of records stays in a tensor", *_where(node))


def _where(node: fx.Node) -> tuple[str, tuple[str | None, str] | None]:
    """Line of the source, and the module, as far as the trace has noted them."""
    module = next(iter((node.meta.get("nn_module_stack") or {}).values()), None)
    lines = re.findall(r'File "(?:.*[/\\])?(.*)", line (\d+), in (.*)', node.meta.get("stack_trace") or "")
    return ", ".join(f"{name} ({file}, line {line})" for file, line, name in lines[-1:]), module
