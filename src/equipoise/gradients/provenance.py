"""Proofs that records do not mix, read from the operations of a trace.

The lines of a trace (``gradients/trace.py``), in a form in which no operation writes into a tensor, are read
from top to bottom. Each tensor is of a kind:

| kind | meaning |
|---|---|
| `Public` | depends on no record; it is known along which axes all records would find the same values |
| `ByRecord` | an entry depends on one record and public values; the axis says on which record |
| `One` | depends on one record: a loop over records takes them one by one, and `stack` joins them |
| `Sum` | a sum over records, each term of which depends on one record and public values |
| `Fault` | a mixture, or an operation without a rule |

Public values that differ along the records' axis, such as their numbers, may not meet records: what came out
would depend on a record's place among the others.

A rule says what kinds an operation makes of what kinds. The dimensions of its operands and results bear
labels. Along a label the operation computes every entry apart from the others, or, if the result lacks the
label, adds up what it has computed apart. Along a dimension without label (None) anything may be mixed, so
that no records may be there. `docs/concepts/proof.md` states the theorem.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.fx.traceback
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.gradients.trace import Line, Traced

__all__ = [
    "Axis",
    "ByRecord",
    "Fault",
    "Kind",
    "Proof",
    "Public",
    "Sum",
    "Trusted",
    "flow",
    "functional",
    "inputs_read",
    "prove",
]


class Axis(NamedTuple):
    """Where records are: entry ``(o * records + r) * places + p`` of a dimension is of record r."""

    dim: int
    outer: int = 1
    places: int = 1


@dataclass(frozen=True)
class Public:
    """Depends on no record.

    Attributes:
        alike: the axes along which all records would find the same values, or random ones of their own.
        counts: the dimension along which the values are 0, `step`, 2 `step`, ..., if there is one.
        step: see `counts`.
    """

    alike: frozenset[Axis] = frozenset()
    counts: int | None = None
    step: int = 1


@dataclass(frozen=True)
class ByRecord:
    """An entry depends on one record and public values.

    Attributes:
        axis: says on which.
        first: the first record; other records may be in other tensors.
    """

    axis: Axis
    first: int = 0


@dataclass(frozen=True)
class Fault:
    """Why there is no proof.

    Attributes:
        mixes: whether it is known that records mix; else an operation has no rule.
        operation: its name.
        what: happens there.
        where: line of the source, if it is known.
        module: path and class of the module that ran, if there was one.
    """

    mixes: bool
    operation: str
    what: str
    where: str = ""
    module: tuple[str | None, str] | None = None

    def __str__(self) -> str:
        said = f"{self.operation} mixes records" if self.mixes else f"there is no rule for {self.operation}"
        module = "" if self.module is None else "{} ({})".format(self.module[0] or "a module", self.module[1])
        places = ", ".join(filter(None, (module, self.where)))
        return f"{said}: {self.what}" + f" ({places})" * bool(places)


@dataclass(frozen=True)
class Sum:
    """A sum over records of terms that depend on one record each.

    Attributes:
        made: what a record that meets the sum is told.
    """

    made: Fault


@dataclass(frozen=True)
class One:
    """Depends on one record as a whole, and public values: what a loop over records computes.

    Attributes:
        record: its number.
        way: how it was computed; the same number for other records that were treated alike.
    """

    record: int
    way: int


Kind = Public | ByRecord | One | Sum | Fault


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
    """Whether something is known to come of records."""
    return isinstance(kind, ByRecord | One | Sum) or (isinstance(kind, Fault) and kind.mixes)


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
    faults += [not_by_record(norms[name], f"the norms of {name}") for name in traced.norms.outputs]
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
            alone = _of_one(node, kinds, ways)
            kinds[node] = _of_node(node, kinds, records) if alone is None else alone
        if trusted is not None and node.op == "call_function":
            kinds[node] = trusted.kinds(node, kinds[node], kinds, records)
    raise AssertionError("a graph returns something")


class Seen(NamedTuple):
    """A tensor that an operation takes, or makes (then its kind is not known yet)."""

    kind: Any
    shape: tuple[int, ...]
    records: int
    value: Tensor | None = None


class _MixesError(Exception):
    """Records mix; the text says what happens to them."""


class _NoRuleError(Exception):
    """The table does not know this form of an operation."""


def _of_one(node: Any, kinds: Mapping[Any, Any], ways: dict[Any, int]) -> Any:
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
            raise _NoRuleError("it is not in the table")
        args, named = fx.node.map_arg((node.args, node.kwargs), lambda at: seen(kinds[at], at.meta["val"]))
        named = dict(named)
        expected = [given for given in node.target._schema.arguments if not given.kwarg_only][len(args) :]
        args = [*args, *(named.pop(given.name, given.default_value) for given in expected)]
        if tensors(*named.values()) and "attn_mask" not in named:
            raise _NoRuleError("it takes a tensor more")
        found = rule(outs if isinstance(value, tuple | list) else outs[0], *args, **named)
    except Exception as error:  # also of a rule that meets a form that it was not written for
        if all(isinstance(k, Public) for k in held):
            return Public()  # whatever it does, it does to public values
        is_told = isinstance(error, _MixesError | _NoRuleError)
        what = str(error) if is_told else f"its form is not known ({type(error).__name__}: {error})"
        return Fault(isinstance(error, _MixesError), str(node.target), what, *_where(node))
    made = Sum(Fault(True, str(node.target), "it adds up over the records", *_where(node)))

    def settled(out: Seen, kind: Any) -> Any:
        dtype = torch.float32 if out.value is None else out.value.dtype
        whole = not dtype.is_floating_point
        if isinstance(kind, Sum) and whole and any(isinstance(k, Sum) for k in held):
            return Fault(True, str(node.target), "a sum over records is rounded", *_where(node))
        if isinstance(kind, Public) and dtype not in (torch.int32, torch.int64):
            kind = replace(kind, counts=None)  # a type may not hold the numbers
        return Public() if 0 in out.shape else made if kind is SUMMED else kind

    if isinstance(found, list):
        return [settled(out, kind) for out, kind in zip(outs, found, strict=True)]
    return settled(outs[0], found)


#: What a rule returns for a sum over records; where it is made is added later.
SUMMED = Sum(Fault(True, "", ""))


def _kept(node: fx.Node) -> Fault:
    return Fault(True, "copy_", "what comes of records stays in a tensor", *_where(node))


def _where(node: fx.Node) -> tuple[str, tuple[str | None, str] | None]:
    """Line of the source, and the module, as far as the trace has noted them."""
    module = next(iter((node.meta.get("nn_module_stack") or {}).values()), None)
    lines = re.findall(r'File "(?:.*[/\\])?(.*)", line (\d+), in (.*)', node.meta.get("stack_trace") or "")
    return ", ".join(f"{name} ({file}, line {line})" for file, line, name in lines[-1:]), module


# ---- what rules are made of

#: A tensor and the labels of its dimensions. None: the operation may mix all that is there.
Operand = tuple[Seen, Sequence[Hashable]]


def labelled(
    operands: Sequence[Operand],
    results: Sequence[Sequence[Hashable]],
    sums: bool = False,
    additive: bool = False,
) -> list[Kind]:
    """The kinds of results whose dimensions bear these labels.

    Args:
        operands: what the operation takes.
        results: the labels of each result.
        sums: whether it adds up along labels that a result lacks; else it mixes there.
        additive: whether it adds its operands, so that several may be sums.
    """
    held: tuple[Hashable, int, int, int, int] | None = None
    for seen, labels in operands:
        if isinstance(seen.kind, One):
            raise _NoRuleError("a record alone meets others")
        if isinstance(seen.kind, ByRecord):
            (dim, outer, places), first = seen.kind.axis, seen.kind.first
            if labels[dim] is None:
                raise _MixesError("over the records' axis")
            one = (labels[dim], outer, places, first, seen.shape[dim])
            if held not in (None, one):
                raise _MixesError("records meet other records")
            held = one
    totals = [seen.kind.made for seen, _ in operands if isinstance(seen.kind, Sum)]
    if held is not None and totals:
        raise _MixesError(f"single records meet what {totals[0].operation} adds up over records")
    if len(totals) > 1 and not additive:
        raise _MixesError("a sum over records meets another")
    if held is None:
        if totals:
            return [SUMMED for _ in results]
        return [
            Public(frozenset(Axis(d, *a) for d, label in enumerate(labels) for a in _alike(operands, label)))
            for labels in results
        ]
    label, outer, places, first, size = held
    for seen, labels in operands:
        for dim in (d for d, other in enumerate(labels) if other == label and isinstance(seen.kind, Public)):
            if seen.shape[dim] != size:
                raise _NoRuleError("sizes differ along the records' axis")
            if Axis(dim, outer, places) not in seen.kind.alike:
                raise _NoRuleError("what differs from place to place meets records")
    if not sums and not all(label in labels for labels in results):
        raise _MixesError("over the records' axis")
    return [
        ByRecord(Axis(list(labels).index(label), outer, places), first) if label in labels else SUMMED
        for labels in results
    ]


def _alike(operands: Sequence[Operand], label: Hashable) -> set[tuple[int, int]]:
    """The axes (outer, places) along a label along which all public operands are alike."""
    found: set[tuple[int, int]] | None = None
    sizes = {s.shape[d] for s, labels in operands for d, other in enumerate(labels) if other == label}
    if label is not None and len(sizes) > 1:  # one of them covers a part alone
        return set()
    for seen, labels in operands:
        for dim in (d for d, other in enumerate(labels) if other == label and label is not None):
            axes = {(a.outer, a.places) for a in seen.kind.alike if a.dim == dim}
            found = axes if found is None else found & axes
    return found or set()


def tensors(*given: Any) -> list[Seen]:
    return [one for one in given if isinstance(one, Seen)]


def listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list) else [given]


def dims(seen: Seen, *whole: int) -> list[Hashable]:
    """Each dimension's number as its label, but None for `whole`."""
    mixed = {dim % max(1, len(seen.shape)) for dim in whole}
    return [None if dim in mixed else dim for dim in range(len(seen.shape))]


def formed(
    out: Any, given: Sequence[Seen], form: Callable[[Seen], Sequence[Hashable]], sums: bool = False
) -> Any:
    """The kinds of results, where `form` gives the labels of an operand's or a result's dimensions."""
    found = labelled([(one, form(one)) for one in given], [form(one) for one in listed(out)], sums=sums)
    return found if isinstance(out, list) else found[0]


def broadcast(labels: Sequence[Hashable], shape: Sequence[int], *operands: Any) -> list[Operand]:
    """Operands whose dimensions align from the right with a shape, whose labels they get."""
    found: list[Operand] = []
    for seen in tensors(*operands):
        ahead = len(shape) - len(seen.shape)
        own = list(labels[ahead:])
        for dim, size in enumerate(seen.shape):
            if size == 1 != shape[ahead + dim]:
                if isinstance(seen.kind, ByRecord) and seen.kind.axis.dim == dim:
                    raise _MixesError("one record is copied to others")
                own[dim] = object()  # the same for all: no label that must agree
        found.append((seen, own))
    return found


def moved(seen: Seen, move: Callable[[Axis], Axis | None], what: str = "") -> Kind:
    """The kind of the same values at other places; `move` says where an axis goes, if it is one there."""
    if isinstance(seen.kind, ByRecord):
        axis = move(seen.kind.axis)
        if axis is None:
            raise _NoRuleError(what)
        return replace(seen.kind, axis=axis)
    if isinstance(seen.kind, Public):
        counts = None if seen.kind.counts is None else move(Axis(seen.kind.counts))
        alike = frozenset(axis for axis in map(move, seen.kind.alike) if axis is not None)
        dim = counts.dim if counts is not None and counts[1:] == (1, 1) else None
        return Public(alike, dim, seen.kind.step)
    if isinstance(seen.kind, One):
        raise _NoRuleError("a record alone meets others")
    return seen.kind


def every_axis(shape: Sequence[int], records: int, of: Iterable[int] | None = None) -> frozenset[Axis]:
    """All axes that so many records can have: those of values that are the same everywhere."""
    found = set()
    for dim in range(len(shape)) if of is None else of:
        each, rest = divmod(shape[dim], records)
        if rest == 0:
            found |= {Axis(dim, outer, each // outer) for outer in range(1, each + 1) if each % outer == 0}
    return frozenset(found)


# ---- the table: operation of ATen -> rule, and whether it is linear, so that it may take sums over records

RULES: dict[Any, tuple[Callable[..., Any], bool]] = {}


def rule(names: str, linear: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a rule for operations of ATen."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            packet, _, overload = name.partition(".")
            found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if found is not None:  # another version of PyTorch may lack it
                RULES[found] = (function, linear)
        return function

    return enter


# ---- each entry of the results follows from the entries at its place

#: Beside what PyTorch itself tags as `pointwise`.
ELEMENTWISE = """
_prelu_kernel _prelu_kernel_backward bernoulli complex elu_backward fake_quantize_per_tensor_affine_cachemask
floor_divide hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward
leaky_relu leaky_relu_backward log_sigmoid_backward log_sigmoid_forward masked_fill.Tensor mish_backward
native_dropout normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor polar softplus_backward
softshrink_backward
"""


@rule(ELEMENTWISE)
def elementwise(out: Any, *args: Any, additive: bool = False, **more: Any) -> Any:
    outs = listed(out)
    shape = torch.broadcast_shapes(*(one.shape for one in tensors(*args)))  # type: ignore[no-untyped-call]
    if any(one.value is None or one.shape != shape for one in outs):
        raise _NoRuleError("its results have other shapes than its operands")
    found = labelled(broadcast(dims(outs[0]), shape, *args), [dims(outs[0])] * len(outs), additive=additive)
    return found if isinstance(out, list) else found[0]


def rule_of(operation: Any) -> tuple[Callable[..., Any] | None, bool]:
    """The rule for an operation, and whether it is linear."""
    tags = getattr(operation, "tags", ())
    # A random one may take more numbers for some values, so that the next record gets others.
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return RULES.get(operation) or (elementwise if is_pointwise else None, False)


@rule("add.Tensor sub.Tensor neg", linear=True)
def added(out: Seen, *args: Any, **more: Any) -> Kind:
    return elementwise(out, *args, additive=True)


@rule("mul.Tensor mul.Scalar div.Tensor div.Scalar", linear=True)
def multiplied(out: Seen, *args: Any) -> Kind:
    if isinstance(args[1], Seen) and isinstance(args[1].kind, Sum):
        raise _MixesError("a sum over records multiplies or divides")
    return elementwise(out, *args)


@rule("mse_loss smooth_l1_loss huber_loss binary_cross_entropy mse_loss_backward smooth_l1_loss_backward")
@rule("huber_loss_backward binary_cross_entropy_backward soft_margin_loss soft_margin_loss_backward")
def elementwise_loss(out: Seen, *args: Any) -> Kind:
    if not out.shape or not args[0].shape:
        raise _MixesError("over the records' axis; reduction='none' does not")
    return elementwise(out, *args)


_FRESH = """
zeros ones full empty.memory_format scalar_tensor rand randn randint randint.low zeros_like ones_like
full_like empty_like rand_like randn_like randint_like randint_like.low_dtype new_zeros new_ones new_full
new_empty new_empty_strided bernoulli.p uniform exponential normal_functional fill.Scalar
"""


@rule(_FRESH, linear=True)  # sums too, since they read no value
def everywhere(out: Seen, *args: Any, **more: Any) -> Kind:
    """The same at every place, or random numbers of its own; what `empty` leaves unset is not read."""
    return Public(every_axis(out.shape, out.records))


@rule("arange arange.start arange.start_step")
def counted(out: Seen, *bounds: Any, **more: Any) -> Kind:
    start, _, step = [(0, *bounds, 1), (*bounds, 1), bounds][len(bounds) - 1]
    return Public(counts=0, step=step) if start == 0 and isinstance(step, int) else Public()


@rule("copy fill.Tensor", linear=True)
def copied(out: Seen, target: Seen, source: Seen, *more: Any) -> Kind:
    return expanded(out, source)


# ---- the same values at other places


@rule("clone detach alias _to_copy lift_fresh_copy view_as_real _conj _conj_physical _neg_view", linear=True)
def same(out: Seen, seen: Seen, **more: Any) -> Kind:
    return moved(seen, lambda axis: axis)


@rule("view _unsafe_view", linear=True)
def viewed(out: Seen, seen: Seen, *sizes: Any) -> Kind:
    def move(axis: Axis) -> Axis | None:
        ahead = math.prod(seen.shape[: axis.dim]) * axis.outer
        behind = math.prod(seen.shape[axis.dim + 1 :]) * axis.places
        count = seen.shape[axis.dim] // (axis.outer * axis.places)
        for dim, size in enumerate(out.shape):
            outer, no = divmod(ahead, math.prod(out.shape[:dim]))
            places, more = divmod(behind, math.prod(out.shape[dim + 1 :]))
            if no == more == 0 and outer * count * places == size:
                return Axis(dim, outer, places)
        return None

    if 0 in out.shape:
        return Public()
    return moved(seen, move, "the records' axis is split")


@rule("as_strided as_strided_scatter", linear=True)
def strided(out: Seen, seen: Seen, *args: Any) -> Kind:
    """Of memory without gaps, all of it in its order: a `view`."""
    sizes, strides, offset = args[-3:]
    dense = torch.empty(sizes, device="meta").stride()
    whole = seen.value is not None and seen.value.is_contiguous() and seen.value.storage_offset() == 0
    used = [d for d, size in enumerate(sizes) if size > 1]
    in_order = not offset and all(strides[d] == dense[d] for d in used)
    if not (whole and in_order and math.prod(sizes) == math.prod(seen.shape)):
        raise _NoRuleError("it looks at memory in another way")
    return viewed(out, args[0] if isinstance(args[0], Seen) else seen)


@rule("permute t transpose.int", linear=True)
def permuted(out: Seen, seen: Seen, *order: Any) -> Kind:
    dimensions = list(range(len(seen.shape)))
    if len(order) == 1:
        dimensions = [dim % len(dimensions) for dim in order[0]]
    elif len(dimensions) > 1:
        one, two = order or (0, 1)
        dimensions[one], dimensions[two] = dimensions[two], dimensions[one]
    return moved(seen, lambda axis: axis._replace(dim=dimensions.index(axis.dim)))


@rule("view_as_complex", linear=True)
def as_complex(out: Seen, seen: Seen) -> Kind:
    return moved(
        seen, lambda axis: axis if axis.dim < len(out.shape) else None, "they lie along the two parts"
    )


@rule("unsqueeze", linear=True)
def unsqueezed(out: Seen, seen: Seen, dim: int) -> Kind:
    at = dim % len(out.shape)
    return moved(seen, lambda axis: axis._replace(dim=axis.dim + (axis.dim >= at)))


@rule("squeeze squeeze.dim squeeze.dims", linear=True)
def squeezed(out: Seen, seen: Seen, given: Any = None) -> Kind:
    chosen = range(len(seen.shape)) if given is None else [given] if isinstance(given, int) else given
    gone = {dim % max(1, len(seen.shape)) for dim in chosen}
    kept = [dim for dim, size in enumerate(seen.shape) if dim not in gone or size != 1]

    def move(axis: Axis) -> Axis | None:
        return axis._replace(dim=kept.index(axis.dim)) if axis.dim in kept else None

    return moved(seen, move, "the records' axis is removed")


@rule("expand", linear=True)
def expanded(out: Seen, seen: Seen, *sizes: Any, **more: Any) -> Kind:
    ahead = len(out.shape) - len(seen.shape)
    new = [d for d, size in enumerate(out.shape) if d < ahead or size != seen.shape[d - ahead]]
    found = moved(seen, lambda axis: None if axis.dim + ahead in new else axis._replace(dim=axis.dim + ahead))
    if isinstance(found, Public):
        return replace(found, alike=found.alike | every_axis(out.shape, out.records, new))
    return found


@rule("repeat", linear=True)
def repeated(out: Seen, seen: Seen, times: Sequence[int]) -> Kind:
    ahead = len(times) - len(seen.shape)
    wide = moved(seen, lambda a: Axis(a.dim + ahead, a.outer * times[a.dim + ahead], a.places))
    if isinstance(wide, Public):  # each record may have some of the copies
        own = [size // often for size, often in zip(out.shape, times, strict=True)]
        copies = every_axis(times, out.records)
        return Public(wide.alike | {axis._replace(places=axis.places * own[axis.dim]) for axis in copies})
    return wide


def part(seen: Seen, dim: int, start: int, size: int, step: int = 1) -> Kind:
    """The kind of a slice: whole copies of the records' axis, or some records."""
    first = 0

    def move(axis: Axis) -> Axis | None:
        nonlocal first
        if axis.dim != dim or size == seen.shape[dim]:
            return axis
        copy = seen.shape[dim] // axis.outer
        if step == 1 and start % copy == size % copy == 0:
            return axis._replace(outer=size // copy)
        if step == 1 and axis.outer == 1 and start % axis.places == size % axis.places == 0:
            first = start // axis.places
            return axis
        return None

    if isinstance(seen.kind, Public) and size != seen.shape[dim] and seen.kind.counts == dim:
        seen = seen._replace(kind=replace(seen.kind, counts=None))
    found = moved(seen, move, "a slice along the records' axis")
    return replace(found, first=found.first + first) if isinstance(found, ByRecord) else found


@rule("slice.Tensor", linear=True)
def sliced(
    out: Seen, seen: Seen, dim: int = 0, start: int | None = 0, end: Any = None, step: int = 1
) -> Kind:
    dim %= len(seen.shape)
    begin, size = slice(start, None).indices(seen.shape[dim])[0], out.shape[dim]
    return part(seen, dim, begin, size, step) if size else Public()


@rule("split.Tensor split_with_sizes", linear=True)
def split(outs: Sequence[Seen], seen: Seen, size: Any, dim: int = 0) -> list[Kind]:
    dim %= len(seen.shape)
    starts = [sum(out.shape[dim] for out in outs[:number]) for number in range(len(outs))]
    return [part(seen, dim, at, out.shape[dim]) for at, out in zip(starts, outs, strict=True)]


@rule("select.int unbind.int", linear=True)
def selected(out: Any, seen: Seen, dim: int = 0, index: int = 0) -> Any:
    labels = dims(seen, dim)
    found = labelled([(seen, labels)], [[label for label in labels if label is not None]])[0]
    return [found] * len(out) if isinstance(out, list) else found


@rule("cat", linear=True)
def joined(out: Seen, parts: Sequence[Seen], dim: int = 0) -> Kind:
    dim %= len(out.shape)
    held = [one for one in parts if 0 not in one.shape]
    given = [one.kind for one in held if isinstance(one.kind, ByRecord) and one.kind.axis.dim == dim]
    if not given:
        operands = [(one, dims(one, dim)) for one in held]
        return labelled(operands, [dims(out, dim)], additive=True)[0]
    places, first = given[0].axis.places, given[0].first
    if given == [one.kind for one in held] and all(kind.axis == Axis(dim, 1, places) for kind in given):
        counts = [one.shape[dim] // places for one in held]
        if [kind.first for kind in given] == [first + sum(counts[:n]) for n in range(len(counts))]:
            return ByRecord(Axis(dim, 1, places), first)  # records, and then those behind them
    copies = 0
    for one in held:  # all records, and then all of them once more
        outer, rest = divmod(one.shape[dim], out.records * places)
        kind, axis = one.kind, Axis(dim, outer, places)
        if rest or not (kind == ByRecord(axis) or (isinstance(kind, Public) and axis in kind.alike)):
            raise _MixesError("records are put at places of other records")
        copies += outer
    return ByRecord(Axis(dim, copies, places))


@rule("stack", linear=True)
def stacked(out: Seen, parts: Sequence[Seen], dim: int = 0) -> Kind:
    alone = [one.kind for one in parts]
    if isinstance(alone[0], One) and alone == [One(record, alone[0].way) for record in range(out.records)]:
        return ByRecord(Axis(dim % len(out.shape)))
    labels = dims(out, dim)
    own = [label for label in labels if label is not None]
    return labelled([(one, own) for one in parts], [labels], additive=True)[0]


@rule("select_scatter select_backward", linear=True)
def put_back(out: Seen, *args: Any) -> Kind:
    if any(isinstance(one.kind, One) and one.kind.record == args[3] for one in tensors(*args)):
        raise _NoRuleError("records are put back one by one")
    labels = dims(out, args[2])
    own = [label for label in labels if label is not None]
    given = [(one, labels if len(one.shape) == len(labels) else own) for one in tensors(*args)]
    return labelled(given, [labels], additive=True)[0]


@rule("slice_scatter", linear=True)
def put(
    out: Seen, base: Seen, seen: Seen, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> Kind:
    dim %= len(out.shape)
    if seen.shape == out.shape:
        return seen.kind
    begin = slice(start, None).indices(out.shape[dim])[0]
    if isinstance(seen.kind, ByRecord) and seen.kind.axis.dim == dim and step == 1:
        (_, outer, places), first = seen.kind.axis, seen.kind.first
        axis = Axis(dim, 1, places)
        good = base.kind == ByRecord(axis) or (isinstance(base.kind, Public) and axis in base.kind.alike)
        if outer == 1 and first * places == begin and good:
            return ByRecord(axis)
    return labelled([(base, dims(out, dim)), (seen, dims(out, dim))], [dims(out, dim)], additive=True)[0]


@rule("slice_backward", linear=True)
def sliced_back(out: Seen, grad: Seen, sizes: Any, dim: int, start: int, end: int, step: int) -> Kind:
    if (
        isinstance(grad.kind, ByRecord)
        and grad.kind.axis.dim == dim
        and grad.shape != out.shape
        and step == 1
    ):
        (_, outer, places), first = grad.kind.axis, grad.kind.first
        copy = grad.shape[dim] // outer
        if first == 0 and start % copy == out.shape[dim] % copy == 0 and copy == out.records * places:
            return ByRecord(Axis(dim, out.shape[dim] // copy, places))
    base = out._replace(kind=everywhere(out))
    return put(out, base, grad, dim, start, end, step)


# ---- along some dimensions anything may be mixed


def mixes_along(names: str, which: Callable[[Sequence[Any]], Any], orders: bool = False) -> None:
    """Enter operations that mix, or order, along dimensions that `which` finds in their arguments."""

    def applied(out: Any, *args: Any, **more: Any) -> Any:
        whole, given = listed(more["dim"] if "dim" in more else which(args)), tensors(*args)
        if len({len(one.shape) for one in (*given, *listed(out))}) > 1:
            raise _NoRuleError("its tensors differ in dimensions")
        try:
            return formed(out, given, lambda one: dims(one, *whole))
        except _MixesError:
            if orders:
                raise _NoRuleError("an order of the records may be undone") from None
            raise

    rule(names)(applied)


mixes_along(
    """
    _softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin flip glu _fft_r2c _fft_c2r
    _fft_c2c
    """,
    lambda args: args[1],
)
mixes_along(
    "_softmax_backward_data _log_softmax_backward_data glu_backward topk rot90 linalg_cross",
    lambda args: args[2],
)
mixes_along("roll", lambda args: args[2] or list(range(len(args[0].shape))))
mixes_along("sort argsort sort.stable", lambda args: [*args, -1][1], orders=True)
mixes_along("constant_pad_nd", lambda args: [-1 - at // 2 for at, size in enumerate(args[1]) if size])
mixes_along("tril triu linalg_matrix_exp", lambda args: [-2, -1])
mixes_along("pixel_shuffle pixel_unshuffle", lambda args: [-3, -2, -1])
for _count in (1, 2, 3):  # of the last dimensions, those of an image
    _names = """
    avg_pool# _adaptive_avg_pool# max_pool#_with_indices adaptive_max_pool# max_unpool# reflection_pad#
    replication_pad# upsample_nearest# _upsample_nearest_exact# upsample_linear# upsample_bilinear#
    _upsample_bilinear#_aa upsample_bicubic# _upsample_bicubic#_aa upsample_trilinear#
    """.replace("#", f"{_count}d").split()
    mixes_along(
        " ".join(f"{name} {name}_backward" for name in _names),
        lambda args, whole=list(range(-_count, 0)): whole,  # type: ignore[misc]
    )


@rule("linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_slogdet _linalg_solve_ex linalg_lu_solve")
@rule("linalg_solve_triangular")
def matrices(out: Any, *args: Any, **more: Any) -> Any:
    """Matrices of equal batches; pivots and determinants have a dimension or two less."""
    given, whole = tensors(*args), (torch.int32, torch.int64)
    size = len(given[0].shape) - 2
    batch = given[0].shape[:size]
    if any(one.shape[:size] != batch for one in (*given, *listed(out))):
        raise _NoRuleError("its batches differ")
    if any(len(s.shape) != size + 2 and getattr(s.value, "dtype", None) not in whole for s in given):
        raise _NoRuleError("a vector may be a matrix")
    return formed(out, given, lambda one: [dim if dim < size else None for dim in range(len(one.shape))])


@rule("diagonal diag_embed diagonal_backward", linear=True)
def diagonal(out: Seen, seen: Seen, *more: Any) -> Any:
    wide = dims(max(out, seen, key=lambda one: len(one.shape)), *more[-2:])
    short = [*(label for label in wide if label is not None), None]
    return formed(out, [seen], lambda one: wide if len(one.shape) == len(wide) else short)


@rule("unfold unfold_backward", linear=True)
def unfolded(out: Seen, seen: Seen, *more: Any) -> Any:
    """The windows of a dimension have a dimension more, which is the last."""
    short = dims(min(out, seen, key=lambda one: len(one.shape)), more[-3])
    return formed(out, [seen], lambda one: [*short, None][: len(one.shape)])


def reduction(sums: bool, at: int = 0) -> Callable[..., Any]:
    """What goes along the dimensions that the argument `at` behind the tensor names, or all."""

    def reduced(out: Any, seen: Seen, *args: Any, **more: Any) -> Any:
        chosen, keep = (*args[at:], None, False)[:2] if len(args) > at else (more.get("dim"), False)
        labels, keep = dims(seen), keep or more.get("keepdim", False)
        gone = {d % max(1, len(labels)) for d in listed(chosen)} if chosen not in (None, []) else set(labels)
        kept = [None if d in gone else d for d in labels if keep or d not in gone]
        found = labelled([(seen, labels)], [kept for _ in listed(out)], sums=sums)
        return found if isinstance(out, list) else found[0]

    return reduced


rule("sum sum.dim_IntList mean mean.dim", linear=True)(reduction(True))
rule("any any.dim any.dims all all.dim all.dims amax amin argmax argmin logsumexp max max.dim min min.dim")(
    reduction(False)
)
# No `prod`: its derivative counts the zeros of the whole tensor and then takes one of two formulas, so that a
# trace shows another one than a step may run.
rule("median.dim nanmedian.dim mode std.correction var.correction var_mean.correction std_mean.correction")(
    reduction(False)
)
rule("nansum")(reduction(True))
rule("aminmax count_nonzero count_nonzero.dim_IntList")(reduction(False))


rule("linalg_vector_norm norm.ScalarOpt_dim kthvalue")(reduction(False, at=1))


# ---- by letters: what a result lacks is summed; a dot or a star (all further dimensions) is mixed


def lettered(form: str) -> Callable[..., Any]:
    """A rule such as ``nk,km->nm``. Every argument has its place, and ``!`` is a result that is not set."""
    left, right = (side.split(",") for side in form.split("->"))

    def labels(letters: str, seen: Seen) -> list[Hashable]:
        named = letters.rstrip("*!")
        if len(seen.shape) < len(named) or (len(seen.shape) > len(named) and named == letters):
            raise _NoRuleError(f"a tensor has {len(seen.shape)} dimensions")
        return [None if at >= len(named) or named[at] == "." else named[at] for at in range(len(seen.shape))]

    def applied(out: Any, *args: Any, **more: Any) -> Any:
        if tensors(*args[len(left) :], *more.values()):
            raise _NoRuleError("it takes a tensor more")
        given = [(s, labels(f, s)) for f, s in zip(left, args, strict=False) if isinstance(s, Seen)]
        asked = {at: one for at, one in enumerate(listed(out)) if one.value is not None}
        if any(right[at].startswith("n") and not one.shape for at, one in asked.items()):
            raise _MixesError("over the records' axis; reduction='none' does not")
        forms = [labels(f, asked[at]) if at in asked else [] for at, f in enumerate(right)]
        found = labelled(given, forms, sums=True)
        found = [Public() if f == "!" else kind for f, kind in zip(right, found, strict=True)]
        return found if isinstance(out, list) else found[0]

    return applied


for _name, _form in {
    "mm": "nk,km->nm",
    "bmm": "bnk,bkm->bnm",
    "mv": "nk,k->n",
    "dot": "k,k->",
}.items():
    rule(_name, linear=True)(lettered(_form))
for _name, _form in {
    "im2col": "n...->n..",
    "col2im": "n..->n...",
    "multinomial": "n.->n.",
    "channel_shuffle affine_grid_generator": "n*->n*",
    "grid_sampler_2d grid_sampler_3d": "n*,n*->n*",
    "grid_sampler_2d_backward grid_sampler_3d_backward": "n*,n*,n*->n*,n*",
    "nll_loss_forward": "n.,n,.->n,!",
    "nll_loss_backward": "n,n.,n,.,,,*->n.",
    "nll_loss2d_forward": "n.hw,nhw,.->nhw,!",
    "nll_loss2d_backward": "nhw,n.hw,nhw,.,,,*->n.hw",
    "multi_margin_loss": "n.,n,,,.->n",
    "multi_margin_loss_backward": "n,n.,n,,,.->n.",
    "multilabel_margin_loss_forward": "n.,n.->n,n.",
    "multilabel_margin_loss_backward": "n,n.,n.,,n.->n.",
    # Of CUDA alone, by their schemas: no test runs them.
    "cudnn_grid_sampler": "n*,n*->n*",
    "cudnn_grid_sampler_backward": "n*,n*,n*->n*,n*",
    "_thnn_fused_lstm_cell": "n.,n.,n.,.,.->n.,n.,n.",
    "_thnn_fused_lstm_cell_backward_impl": "n.,n.,n.,n.,n.->n.,n.,.",
    "_thnn_fused_gru_cell": "n.,n.,n.,.,.->n.,n.",
    "_thnn_fused_gru_cell_backward": "n.,n.->n.,n.,n.,.,.",
}.items():
    rule(_name)(lettered(_form))


@rule("addmm baddbmm addmv", linear=True)
def added_product(out: Seen, bias: Seen, left: Seen, right: Seen, **more: Any) -> Kind:
    name = {(2, 2): "mm", (3, 3): "bmm", (2, 1): "mv"}[len(left.shape), len(right.shape)]
    found = RULES[getattr(torch.ops.aten, name).default][0](out, left, right)
    return added(out, bias, out._replace(kind=found))


def within_groups(groups: int, operands: Sequence[tuple[Seen, int]], outs: Sequence[tuple[Seen, int]]) -> Any:
    """If records lie along channels, so that no group has two of them: the results' kinds; else None.

    Args:
        groups: of channels; they lie one after another.
        operands, outs: each with the dimension of its channels, or of its groups.
    """
    held = [one for one, dim in operands if isinstance(one.kind, ByRecord) and one.kind.axis.dim == dim]
    if not held:
        return None
    dim, _, places = held[0].kind.axis
    count, first = held[0].shape[dim] // places, held[0].kind.first
    if groups % count:
        raise _MixesError("a group of channels has several records")
    for one, dim in operands:
        axis = Axis(dim, 1, one.shape[dim] // count)
        if one.kind != ByRecord(axis, first) and not (
            isinstance(one.kind, Public) and axis in one.kind.alike
        ):
            raise _MixesError("records meet other records, or what differs from place to place")
    return [
        ByRecord(Axis(dim, 1, out.shape[dim] // count), first) if out.shape else Public() for out, dim in outs
    ]


@rule("convolution convolution_backward")
def convolution(out: Any, *args: Any) -> Any:
    outs, given = listed(out), tensors(*args[:3])
    backward = isinstance(out, list)
    groups, channels = (args[-2], (1, 1, 0)) if backward else (args[-1], (1, 0, 0))
    # The gradient of the weight alone reads no weight.
    held = given[:2] if backward and not args[-1][0] else given
    found = within_groups(groups, [*zip(held, channels, strict=False)], [*zip(outs, (1, 0, 0), strict=False)])
    if found is None:
        return lettered("n*,n*,*->n*,*,*" if backward else "n*,*,*->n*")(out, *args[:3])
    return found if backward else found[0]


@rule("native_group_norm")
def group_norm(outs: Any, seen: Seen, weight: Any, bias: Any, n: int, *more: Any) -> Any:
    if n != seen.shape[0]:
        raise _NoRuleError("its memory has another shape")
    return lettered("n*,*,*->n*,n*,n*")(outs, seen, weight, bias)


@rule("native_group_norm_backward")
def group_norm_backward(outs: Any, grad: Seen, seen: Seen, *more: Any) -> Any:
    """The memory is taken as [n, c, size], whatever the shape says."""
    (n, c, size, groups), rest = more[3:7], tensors(*more[:3])
    given = [
        one._replace(shape=(n, c, size), kind=viewed(one._replace(shape=(n, c, size)), one))
        for one in (grad, seen)
    ]
    found = within_groups(
        groups,
        [*zip([*given, *rest], (1, 1, 1, 1, 0), strict=False)],
        [(given[0], 1), *zip(outs[1:], (0, 0), strict=True)],
    )
    found = found or lettered("n*,n*,n*,n*,*->n*,*,*")([given[0], *outs[1:]], *given, *rest)
    return [viewed(outs[0], given[0]._replace(kind=found[0])) if outs[0].shape else Public(), *found[1:]]


@rule("embedding")
def embedded(out: Seen, table: Seen, index: Seen, *more: Any) -> Kind:
    return labelled([(table, [None, None]), (index, dims(index))], [dims(out, -1)])[0]


@rule("_embedding_bag _embedding_bag_forward_only")
def bags(outs: Sequence[Seen], table: Seen, index: Seen, offsets: Seen, *more: Any) -> list[Kind]:
    """Bags of one length, so that [bags * length] is [bags, length]."""
    count, kind = outs[0].shape[0], offsets.kind
    even = isinstance(kind, Public) and kind.counts == 0 and kind.step * count == index.shape[0]
    if not even or offsets.shape != (count,) or more[4]:
        raise _NoRuleError("its bags differ in length")
    wide = index._replace(shape=(count, kind.step))
    given = [(wide._replace(kind=viewed(wide, one)), ["n", None]) for one in tensors(index, more[3])]
    each = ["n", None]
    found = labelled(
        [(table, [None, None]), *given], [each, each[: len(outs[2].shape)], each[: len(outs[3].shape)]]
    )
    return [found[0], Public(), *found[1:]]


@rule("embedding_dense_backward")
def embedded_backward(out: Seen, grad: Seen, index: Seen, rows: int, padding: int, by_count: bool) -> Kind:
    if by_count:
        raise _MixesError("it counts over all records")
    return labelled([(grad, dims(grad, -1)), (index, dims(index))], [[None, None]], sums=True)[0]


@rule("native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward")
def layer_norm(outs: Sequence[Seen], *args: Any) -> list[Kind]:
    given = tensors(*args)
    shape = next(one for one in args if isinstance(one, list))
    size = len(given[0].shape)
    labels = [dim if dim < size - len(shape) else None for dim in range(size)]
    form = lambda one: labels if len(one.shape) == size else [None] * len(one.shape)  # noqa: E731
    return formed(outs, given, form, sums=True)


@rule("native_batch_norm native_batch_norm_backward cudnn_batch_norm")
def batch_norm(outs: Any, *args: Any) -> list[Kind]:
    given = tensors(*args)
    trains = next(one for one in args if isinstance(one, bool))
    labels = [None if trains else "n", "c", *[None] * (len(given[0].shape) - 2)]
    found = formed(outs, given, lambda one: labels if len(one.shape) == len(labels) else ["c"], not trains)
    if args[5] is True and tensors(*args[3:5]):
        raise _NoRuleError("it writes running statistics, of which its schema says nothing")
    return found


def attention(names: str, bias: int | None = None) -> None:
    """Enter kernels of attention: batch and heads are apart, a mask is broadcast, and seeds are public.

    Args:
        bias: the place of the mask among the arguments; else it goes by name.
    """

    def applied(outs: Sequence[Seen], *args: Any, attn_mask: Seen | None = None, **more: Any) -> list[Kind]:
        mask = attn_mask if bias is None else args[bias]
        batches = [one.shape[:2] for one in tensors(*args[:3])]
        if any(len(out.shape) > 2 and out.shape[:2] not in batches for out in outs):
            raise _NoRuleError("it sums over what was broadcast")
        given = [(s, labels(s)) for at, s in enumerate(args) if isinstance(s, Seen) and at != bias]
        masks = broadcast(labels(args[0]), (*args[0].shape[:2], 0, 0), mask)
        found = labelled([*given, *masks], [labels(out) for out in outs if len(out.shape) > 2])
        return [found.pop(0) if len(out.shape) > 2 else Public() for out in outs]

    def labels(seen: Seen) -> Sequence[Hashable]:
        return [0, 1, None, None][: len(seen.shape)] if len(seen.shape) > 2 else [None] * len(seen.shape)

    rule(names)(applied)


attention("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward")
attention("_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward")
attention("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", bias=3)
attention("_scaled_dot_product_efficient_attention_backward", bias=4)
attention("_scaled_dot_product_cudnn_attention_backward", bias=8)


@rule("_cdist_forward _cdist_backward")
def distances(out: Seen, *args: Any) -> Kind:
    """Of rows [..., p, m] and [..., r, m]: [..., p, r]; and their derivative by the first."""
    is_backward = isinstance(args[-1], Seen)
    one, two = args[1:3] if is_backward else args[:2]
    sizes = torch.broadcast_shapes(one.shape[:-2], two.shape[:-2])  # type: ignore[no-untyped-call]
    if out.shape[:-2] != sizes:
        raise _NoRuleError("it sums over what was broadcast")
    batch: list[Hashable] = list(range(len(sizes)))
    given = broadcast([*batch, "p", None], (*sizes, *one.shape[-2:]), one)
    given += broadcast([*batch, "r", None], (*sizes, *two.shape[-2:]), two)
    if is_backward:
        given += [(pairs, [*batch, "p", "r"]) for pairs in (args[0], args[-1])]
    return labelled(given, [[*batch, "p", None if is_backward else "r"]], sums=is_backward)[0]


@rule("_trilinear", linear=True)
def trilinear(out: Seen, *args: Any) -> Kind:
    """Three tensors get dimensions and are multiplied; some dimensions are summed."""
    if any(dim < 0 for chosen in args[3:7] for dim in chosen):
        raise _NoRuleError("its dimensions count from behind")
    size = len(args[0].shape) + len(args[3])
    forms = [[dim for dim in range(size) if dim not in new] for new in args[3:6]]
    kept = [dim for dim in range(size) if dim not in args[6]]
    return labelled([*zip(args[:3], forms, strict=True)], [kept], sums=True)[0]


# ---- look-ups: indices that come of records stay within what is the record's, or public


@rule("gather")
def gathered(out: Seen, seen: Seen, dim: int, index: Seen, **more: Any) -> Kind:
    return labelled([(seen, dims(seen, dim)), (index, dims(index))], [dims(out)])[0]


@rule("index_select")
def index_selected(out: Seen, seen: Seen, dim: int, index: Seen) -> Kind:
    labels = ["i" if label is None else label for label in dims(out, dim)]
    return labelled([(seen, dims(seen, dim)), (index, ["i"])], [labels])[0]


@rule("scatter.src scatter.value scatter_add scatter_reduce.two")
def scattered(out: Seen, seen: Seen, dim: int, index: Seen, source: Any, *more: Any, **others: Any) -> Kind:
    given = [(one, dims(one, dim)) for one in tensors(seen, index, source)]
    return labelled(given, [dims(out, dim)])[0]


@rule("bucketize.Tensor")
def bucketed(out: Seen, seen: Seen, bounds: Seen, **more: Any) -> Kind:
    return labelled([(seen, dims(seen)), (bounds, [None])], [dims(out)])[0]


@rule("index_add")
def index_added(out: Seen, seen: Seen, dim: int, index: Seen, source: Seen, **more: Any) -> Kind:
    labels = ["i" if label is None else label for label in dims(source, dim)]
    given: list[Operand] = [(seen, dims(seen, dim)), (index, ["i"]), (source, labels)]
    return labelled(given, [dims(out, dim)], sums=True)[0]


def is_mask(index: Seen) -> bool:
    return index.value is not None and index.value.dtype in (torch.bool, torch.uint8)


def indexing(seen: Seen, indices: Sequence[Any]) -> tuple[list[Operand], list[Hashable], list[Hashable], Any]:
    """Operands of an index, labels of what it looks into and of what it finds, and the shape of the index.

    Where an index is 0, 1, 2, ... for the entries of a whole dimension, an entry stays in its place.
    """
    held = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.value is None or is_mask(index) for _, index in held):
        raise _NoRuleError("an index is a mask")
    shape = torch.broadcast_shapes(*(index.shape for _, index in held))  # type: ignore[no-untyped-call]
    places: list[Hashable] = [f"i{number}" for number in range(len(shape))]
    inner: list[Hashable] = dims(seen)
    operands: list[Operand] = []
    for dim, index in held:
        inner[dim] = None
        counts = index.kind.counts if isinstance(index.kind, Public) else None
        if counts is not None and index.kind.step == 1 and index.shape[counts] == seen.shape[dim] > 1:
            place = places[len(shape) - len(index.shape) + counts]
            if place in inner:
                raise _NoRuleError("one index stands for two dimensions")
            inner[dim] = place
        else:
            operands += broadcast(places, shape, index)
    first, last = held[0][0], held[-1][0]
    rest: list[Hashable] = [dim for dim in range(len(seen.shape)) if dim not in [d for d, _ in held]]
    at = first if last - first + 1 == len(held) else 0
    return operands, inner, [*rest[:at], *places, *rest[at:]], shape


@rule("index.Tensor")
def indexed(out: Seen, seen: Seen, indices: Sequence[Any]) -> Kind:
    operands, inner, found, _ = indexing(seen, indices)
    return labelled([(seen, inner), *operands], [found])[0]


@rule("index_put")
def index_put(out: Seen, seen: Seen, indices: Sequence[Any], values: Seen, accumulate: bool = False) -> Kind:
    if len(indices) == 1 and is_mask(mask := indices[0]) and math.prod(values.shape) == 1:  # `where`
        places = list(range(len(mask.shape)))
        return labelled(
            [(seen, dims(seen)), (mask, places), (values, [None] * len(values.shape))], [dims(out)]
        )[0]
    operands, inner, found, shape = indexing(seen, indices)
    sizes = [shape[int(str(f)[1:])] if isinstance(f, str) else seen.shape[int(str(f))] for f in found]
    return labelled([(seen, inner), *operands, *broadcast(found, sizes, values)], [inner], sums=accumulate)[0]
