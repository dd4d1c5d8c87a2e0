"""The engine: per-sample gradients of a model as it is, by one forward and one backward.

Attaching learns a plan for the model (``capture.planner``) and proves that no use of a parameter is missed.
What a plan computes is traced and, if a proof or a comparison finds the records apart, replayed; else the
plan is followed in each call (``capture.recorder``). Parameters that no rule serves are computed densely
(``checks.oracle``). The model is never wrapped or changed, and nothing stays on it: buffers that a forward
updates, such as running statistics, are copies while it runs, and a forward that updates parameters is
refused (``capture.isolation``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from equipoise._dtensor import device_of, local_part, part_like
from equipoise._foreign_errors import cause_of, where_raised
from equipoise._launched import GRAPHS
from equipoise._tree import leaves
from equipoise.gradients.capture.attributes import attributes_kept
from equipoise.gradients.capture.isolation import (
    parameters_restored,
    parameters_watched,
    same_values,
    undisturbed,
)
from equipoise.gradients.capture.planner import LARGE, learn_plan
from equipoise.gradients.capture.random_numbers import GlobalState, are_constant, random_numbers_from
from equipoise.gradients.capture.recorder import Capture, CapturePlan, PlanMismatch
from equipoise.gradients.capture.sharded import SHARDED, begin_sharded, leaves_told, tensor_parallel_mesh
from equipoise.gradients.checks.errors import BufferWritesError, ForwardWritesError
from equipoise.gradients.checks.oracle import SumsOfProducts, dense_rows
from equipoise.gradients.compare import Independence
from equipoise.gradients.engine_inputs import (
    Loss,
    backward_at,
    backward_included,
    check_batch,
    check_model,
    check_params,
    evaluate_loss,
    fillers,
    map_records,
    num_records,
    record_leaves,
    repeat_to,
    replace_leaves,
    run_loss,
    signature,
    take_records,
    trainable_parameters,
)
from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.numerics import accumulation_dtype
from equipoise.gradients.operator import FactoredGradients, PerSampleGradients
from equipoise.gradients.split import SplitGradients
from equipoise.gradients.trace import Line, Traced, line_on_copies, trace
from equipoise.gradients.trials import Trials


@dataclass(frozen=True)
class Covered:
    """How the rows of one parameter are computed.

    ``how`` is ``"rule"``, ``"dense"`` or ``"unused"`` (the loss does not reach it: its rows are zero).
    """

    name: str
    module_path: str
    how: str
    operations: tuple[str, ...]
    reason: str


#: Gives what random numbers begin from.
Numbers = Callable[[], torch.Generator]
Found = TypeVar("Found")


class GradientEngine:
    """Per-sample gradients of ``loss(model, batch) -> [B]``.

    Args:
        model: any module; it stays as it is. Its training mode at the start counts: dropout is allowed,
            BatchNorm in training mode is refused.
        loss: per-record losses, [B].
        example_batch: a tensor or a nest of dict, tuple, list of tensors, record axis first; one record at
            least.
        check: see at the start whether records are kept apart (`check`), on these records.
        trust: paths of modules in which records may be mixed, for which the owner answers.
        publicly: plan on public records in the shape of these, if the model runs alike on them.

    Attributes:
        trials: what was found out of records and rows.
        is_planned_publicly: how rows are computed follows no private record.

    Raises:
        TypeError: a scripted, sharded or wrapped model, see ``check_model``.
        CrossRecordError: the loss of a record depends on other records.
        CoverageError: a trainable parameter has no per-sample gradient; names, reasons and remedies are
            listed.
        ForwardWritesError: the forward changes a parameter, frozen or not (it is put back), or would.

    >>> model = nn.Linear(3, 2)
    >>> engine = GradientEngine(model, lambda m, x: m(x).square().sum(1), torch.randn(4, 3))
    >>> engine(torch.randn(5, 3)).shape
    (5, 8)
    >>> [(c.name, c.how, c.operations) for c in engine.coverage()]
    [('weight', 'rule', ('linear',)), ('bias', 'rule', ('linear',))]
    """

    #: Whether private records are asked for losses alone, as `LossEngine` does.
    forward_only: ClassVar[bool] = False

    #: Whether `torch.compile` makes kernels of what is replayed, and the seconds that it took so far.
    compiles, compile_seconds = False, 0.0

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        example_batch: Any,
        *,
        check: bool = True,
        trust: Sequence[str] = (),
        publicly: bool = False,
    ) -> None:
        self.model, self.loss = model, loss
        self.trials = Trials(self, trust)
        self._plans: dict[tuple, CapturePlan] = {}
        self.latest: CapturePlan | None = None
        self._lines: dict[tuple, Traced] = {}
        self._left: dict[str, Tensor] = {}
        self._traced: dict[tuple, Traced | None] = {}
        self.traces = 0
        self.device = device_of(next(iter(trainable_parameters(model).values())))
        if check_batch(example_batch) == 0:
            raise ValueError(
                "example_batch has 0 records; pass at least one (three let the checks compare records)"
            )
        check_model(model)
        is_sharded = begin_sharded(model)
        self._leaves_told = leaves_told if is_sharded else nullcontext
        #: Why steps run the model itself and no trace; "" if they do not.
        self.eager = (
            "EQUIPOISE_EAGER is set"
            if os.environ.get("EQUIPOISE_EAGER") == "1"
            else "processes hold parts of the model"
            if is_sharded
            else ""
        )
        with parameters_restored(model):
            self.is_planned_publicly = publicly and self.plan_publicly(example_batch)
            if not self.is_planned_publicly:
                self.learn(example_batch)
            self._written = self._written_by_forward(example_batch)
        # Buffers to which a forward wrote before anything of model or loss changed.
        self._known_writes, self._is_changed = set(self._written), False
        if check:
            self.check(repeat_to(example_batch, max(LARGE, num_records(example_batch))))

    def __call__(
        self, batch: Any, params: Mapping[str, Tensor] | None = None, numbers: Numbers | None = None
    ) -> PerSampleGradients:
        """G of a batch, at the model's parameters or at others.

        Args:
            batch: as the example batch, any number of records (0 too) and other lengths.
            params: name -> value; parameters left out keep the model's values.
            numbers: gives what random numbers begin from.

        Raises:
            ForwardWritesError: the forward changes a parameter, frozen ones too, whose value is lost.
        """
        with self._watched(params, numbers):
            return self.gradients(batch, params)

    def by_plan(
        self,
        batch: Any,
        params: Mapping[str, Tensor] | None = None,
        numbers: Numbers | None = None,
    ) -> PerSampleGradients:
        """G of private records: what was planned at the start, whatever their values.

        A plan that followed a batch would change how all its records round, and which random numbers they
        get, so that one record moved the others. Records of other lengths are planned on fillers.

        Args:
            batch, params: as in a call.
            numbers: gives what random numbers begin from, if any are drawn.

        Raises:
            PlanMismatch: the model runs other operations for some of these records; `alone` serves them.
            BufferWritesError, ForwardWritesError: as in a call.
        """
        # A trace draws random numbers where these are to be constant.
        traced = None if self.eager or are_constant() else self._traced_of(batch, params)
        if traced is None:
            with self._watched(params, numbers):
                return self.run_plan(batch, params)
        # To set all generators takes as long as a small network.
        with self._drawn(numbers if traced.rows.draws else None):
            found, written = traced.gradients(*self.values(params), batch)
        if written:
            self._left = {name: written[name] for name in self.trials.kept if name in written}
        return found

    @contextmanager
    def _watched(self, params: Mapping[str, Tensor] | None, numbers: Numbers | None = None) -> Iterator[None]:
        with parameters_watched(self.model, params), self._drawn(numbers):
            yield

    def _drawn(self, numbers: Numbers | None) -> AbstractContextManager[None]:
        return nullcontext() if numbers is None else random_numbers_from(numbers(), self.device)

    def trace_anew(self) -> None:
        """Forget what was traced: what model and loss hold has changed, and a trace took it for constant."""
        self._known_writes |= {n for line in self._lines.values() for n in getattr(line, "written", ())}
        self._is_changed = True
        self._lines.clear()
        self.trials.proofs.clear()
        self._traced.clear()

    def never_replay(self, reason: str) -> None:
        """Run the model in every step, for this reason: then nothing is proved."""
        self.eager = reason

    @property
    def way_of_launching(self) -> str:
        """How a device other than the CPU is given the operations of a microbatch: "" for the CPU."""
        if self.device.type not in GRAPHS:
            return "" if self.device.type == "cpu" else "operation by operation"
        if self.runs_model:
            return "operation by operation, since steps run the model's own code"
        if self.forward_only:
            return "operation by operation, since each step asks at other parameters"
        refused = {run.refused for one in self._traced.values() if one for run in one.launches} - {""}
        if refused:
            return f"operation by operation, since the graph cannot be used: {min(refused)}"
        if any(one._weighed for one in self._traced.values() if one):
            return "as two graphs: rows with norms, weights with sums"
        return (
            "rows with norms as one graph; others until two steps clip whole rows at one norm: by operations"
        )

    @property
    def runs_model(self) -> bool:
        """Whether some form of micro-batch has no trace, so that steps run the model's own code."""
        return bool(self.eager) or None in self._traced.values()

    def prepare(self, batch: Any) -> None:
        """Trace and try what batches of this form run."""
        self._traced_of(batch, None)

    def _traced_of(self, batch: Any, params: Mapping[str, Tensor] | None) -> Traced | None:
        """What is replayed for batches of this form, traced at the first of them; None if it runs eagerly."""
        form = self.form(batch)
        if form not in self._traced:
            with self._watched(params):
                self._traced[form] = self.trials.attach(batch)
        return self._traced[form]

    @torch.enable_grad()  # as in a step: a loss may take gradients itself
    def losses(self, batch: Any, params: Mapping[str, Tensor] | None) -> Tensor:
        """Per-record losses [B], without a plan."""
        return evaluate_loss(self.model, self.loss, batch, params).detach()

    @property
    def independence(self) -> Independence:
        """What is known of whether records are kept apart: the weakest of what was found of all that runs."""
        return self.trials.independence

    def check(self, batch: Any) -> Independence:
        """Whether micro-batches like this one keep records apart: proved for all values or, if not, compared.

        Proved is what steps run: a model that runs eagerly is compared, whatever its trace says.

        Args:
            batch: as many records as in a step, two at least.

        Raises:
            CrossRecordError: an operation mixes records, or a row moved with the records next to it.
            CoverageError: the sum of the rows is not the gradient of the batch.
            ValueError: with the same random numbers model or loss give other values each time.
        """
        self._traced[self.form(batch)] = self.trials.check(batch)
        return self.independence

    def keep_public_writes(self) -> None:
        """Give buffers what the last forward of records wrote to them, as far as it depends on no record."""
        if not self._left:
            return
        own = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in self._left.items():
                if (value.shape, value.dtype) == (own[name].shape, own[name].dtype):
                    own[name].copy_(value)
        self._left = {}

    def values(self, params: Mapping[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers by name, with others in the place of some."""
        own = {**dict(self.model.named_parameters()), **check_params(self.model, params)}
        return own, dict(self.model.named_buffers())

    def compiled(self, batch: Any) -> Traced:
        """The trace with kernels of `torch.compile`, which are made here.

        Raises:
            ValueError: there is no compiler, or it fails.
        """
        started, state = time.perf_counter(), GlobalState(self.device)
        try:
            traced = self.line(batch)
            held = vars(traced).items()
            lines: dict[str, Any] = {name: one.compiled() for name, one in held if isinstance(one, Line)}
            traced = replace(traced, **lines)
            found, _ = traced.gradients(*self.values(None), batch)
            found.weighted_sums(torch.ones(found.num_records, device=self.device))
        except Exception as error:  # whatever its layers raise
            raise ValueError(
                f"compile=True, and torch.compile fails ({where_raised(error)}). On a processor it needs a "
                "C++ compiler, such as g++; or leave compile out"
            ) from cause_of(error)
        finally:
            state.restore()
        self.compile_seconds += time.perf_counter() - started
        return traced

    def line_of_losses(self, batch: Any) -> Line:
        """What a forward alone computes, with the lines of the source."""
        held: dict[str, Tensor] = {name: p.detach() for name, p in self.model.named_parameters()}
        held |= dict(self.model.named_buffers())
        records = {f"record:{number}": leaf for number, leaf in enumerate(record_leaves(batch))}

        def losses(given: dict[str, Tensor], _: Sequence[str]) -> dict[str, Tensor]:
            leaves = [given.pop(name) for name in records]
            return {"losses": evaluate_loss(self.model, self.loss, replace_leaves(batch, leaves), given)}

        line, _, written = _read_by_trace(lambda: line_on_copies(losses, held | records, self.model))
        _refuse_shared(written, held)
        return line

    def line(self, batch: Any) -> Traced:
        """As `traced`, once for each form."""
        form = self.form(batch)
        if form not in self._lines:
            self._lines[form] = self.traced(batch)
        return self._lines[form]

    def form(self, batch: Any) -> tuple[Any, ...]:
        """What a trace is good for: number, shapes and types of records, and PyTorch's global settings."""
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        of_all = nn.modules.module
        hooks = (
            *of_all._global_forward_hooks,
            *of_all._global_forward_pre_hooks,
            *of_all._global_backward_hooks,
        )
        buffers = (*((name, b.shape, b.dtype) for name, b in self.model.named_buffers()),)
        return num_records(batch), signature(batch), autocast, torch.get_default_dtype(), hooks, buffers

    def traced(self, batch: Any, sources: nn.Module | None = None) -> Traced:
        """The lines of operations of micro-batches of this form; see `trace`.

        Raises:
            RuntimeError: the batch holds something else than tensors of records, which a trace would take for
                a constant; the model asks Python or NumPy for random numbers; or whatever the trace raises.
        """
        if len(record_leaves(batch)) < len(leaves(batch)):
            raise RuntimeError("the batch holds a value without an axis of records, which may follow them")
        plan = self.plan_for(batch)
        own, buffers = trainable_parameters(self.model), dict(self.model.named_buffers())
        frozen = {n: p for n, p in self.model.named_parameters() if n not in own}

        def compute(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], records: list[Tensor]
        ) -> FactoredGradients:
            leaves = {n: p.detach().requires_grad_() if n in own else p for n, p in parameters.items()}
            served = {name: leaves[name] for name in own}
            given = replace_leaves(batch, records)
            held = leaves | buffers
            with backward_included():
                found = self._capture(plan, given, served, held, leaves)
            buffers.update((name, held[name]) for name in buffers)
            gradients = _gathered(self.model, served, *found)
            assert isinstance(gradients, FactoredGradients)
            return gradients

        traced = _read_by_trace(lambda: trace(compute, own | frozen, buffers, batch, sources))
        if plan.dense and traced.rows.draws:  # another forward draws them again
            raise RuntimeError("the model draws random numbers, and some rows are dense")
        if written := [name for name in traced.written if name in traced.parameters]:
            raise ForwardWritesError(written)
        _refuse_shared(traced.written, own | frozen | buffers)
        # At the start the statement says what is thrown away; of what comes later nobody would know.
        if self._is_changed and (written := [n for n in traced.written if n not in self._known_writes]):
            raise BufferWritesError(written, "it did not at the start")
        return traced

    @backward_included()
    def run_plan(
        self, batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None = None
    ) -> PerSampleGradients:
        """G by the model's own code, under the caller's random numbers, as it was planned.

        Args:
            batch, params: as in a call.
            upstream: what each loss is multiplied by, [B]; 1 by default.

        Raises:
            PlanMismatch: the model runs other operations for some of these records.
        """
        leaves, substitute = self._leaves(params)
        if num_records(batch) == 0:
            return _no_rows(self.model, leaves)
        found = self._capture(self.plan_for(batch), batch, leaves, substitute, params, upstream)
        return _gathered(self.model, leaves, *found)

    def plan_publicly(self, example: Any) -> bool:
        """Plan on public records: a plan that followed private ones would reveal them.

        Args:
            example: private records, of which the plan has to serve one; others run alone.

        Returns:
            Whether the model takes such records and runs alike on one of these.
        """
        before, generator = (dict(self._plans), self.latest), torch.Generator().manual_seed(0)

        def numbers(leaf: Tensor) -> Tensor:
            return torch.rand(leaf.shape, generator=generator).to(leaf) if leaf.is_floating_point() else leaf

        def bits(leaf: Tensor) -> Tensor:
            drawn = torch.randint(2, leaf.shape, generator=generator)
            return leaf if leaf.is_floating_point() else drawn.to(leaf)

        def ones(leaf: Tensor) -> Tensor:
            return leaf if leaf.is_floating_point() else torch.ones_like(leaf)

        zeros = fillers(example, LARGE)
        some = map_records(numbers, zeros)
        # Gradients of zeros, and behind a mask of zeros, vanish: nothing tells records from positions, or
        # what a hook makes of them. A length of 0 may be a divisor. Some models take only zeros.
        for tried in (map_records(bits, some), map_records(ones, some), some, zeros):
            with suppress(Exception), undisturbed(self.model):  # whatever a model raises
                if tried is not zeros and not self.losses(tried, None).isfinite().all():
                    continue
                self.learn(tried)
                self.run_plan(zeros, None)  # which fill up forwards, and may take other branches
                self.served(example)
                return True
            self._plans, self.latest = dict(before[0]), before[1]
        return False

    def served(self, records: Any) -> tuple[Any, PerSampleGradients]:
        """These, or else copies of one of them that runs what is planned, and the rows.

        Raises:
            PlanMismatch: there is none.
        """
        with suppress(PlanMismatch):
            return records, self.run_plan(records, None)
        for place in range(num_records(records)):
            copies = take_records(records, torch.full((LARGE,), place))
            with suppress(PlanMismatch):
                return copies, self.run_plan(copies, None)
        raise PlanMismatch("none of the records runs what is planned")

    def plan_for(self, batch: Any) -> CapturePlan:
        """The plan of this form or, of another length, the latest or what fillers in its shape run."""
        form = signature(batch)
        if form not in self._plans:
            assert self.latest is not None
            self._plans[form] = self.latest
            if self.model not in SHARDED:  # the others, with other shapes, would not plan with this process
                zeros = fillers(batch, LARGE)
                with suppress(Exception), undisturbed(self.model):  # whatever a model raises
                    try:
                        self.run_plan(zeros, None)
                    except PlanMismatch:
                        self.learn(zeros)
        return self._plans[form]

    def alone(
        self,
        batch: Any,
        params: Mapping[str, Tensor] | None = None,
        numbers: Numbers | None = None,
        place: int = 0,
    ) -> PerSampleGradients:
        """G of one record of a batch, by ordinary autograd, without a plan.

        Args:
            batch, params, numbers: as in a call.
            place: of the record.

        Raises:
            ForwardWritesError: as in a call.
        """
        chosen = slice(place, place + 1)
        with self._watched(params, numbers):
            losses, found = self.gradient(batch, chosen, params)
            rows = {name: [DenseFactor(row[None])] for name, row in found.items()}
            return _gathered(self.model, self._leaves(params)[0], rows, losses[chosen])

    @backward_included()
    def gradient(
        self,
        batch: Any,
        chosen: slice = slice(None),
        params: Mapping[str, Tensor] | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [B], and ordinary autograd's gradient of the sum of some, for parameters that it reaches.

        Args:
            batch, params: as in a call.
            chosen: which records' losses are added up.
            weights: what each of these is multiplied by; 1 by default.
        """
        leaves, substitute = self._leaves(params)
        seen = dict(leaves)
        told = self._leaves_told(seen.__setitem__)
        with torch.enable_grad(), told, backward_at(self.model, substitute):
            losses = evaluate_loss(self.model, self.loss, batch, substitute)
            some = losses[chosen]
            start = torch.ones_like(some) if weights is None else weights.to(some)
            found: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if some.requires_grad:
                found = torch.autograd.grad(some, [seen[name] for name in leaves], start, allow_unused=True)
        rows = {
            # Look-ups may give sparse ones.
            name: part_like(gradient.to_dense(), seen[name])
            for name, gradient in zip(leaves, found, strict=True)
            if gradient is not None
        }
        return losses.detach(), rows

    def serves(self, batch: Any) -> bool:
        """Whether these records run what was planned, with finite losses and rows."""
        with suppress(Exception), undisturbed(self.model):
            found = self.run_plan(batch, None)
            assert found.losses is not None
            numbers = found.losses if self.forward_only else found.losses + found.row_norms()
            return bool(numbers.isfinite().all())
        return False

    def gradients(self, batch: Any, params: Mapping[str, Tensor] | None) -> PerSampleGradients:
        """As by plan; if operations follow values, all parameters become dense."""
        state, names = GlobalState(self.device), tuple(trainable_parameters(self.model))
        try:
            return self.run_plan(batch, params)
        except PlanMismatch as mismatch:
            state.restore()  # the same random numbers
            self.learn(batch, params, dict.fromkeys(names, f"its use depends on values ({mismatch})"))
            return self.run_plan(batch, params)

    def coverage(self) -> tuple[Covered, ...]:
        """One entry per trainable parameter, in the model's order."""
        plan = self.latest
        assert plan is not None
        found = []
        for name in trainable_parameters(self.model):
            operations = tuple(
                dict.fromkeys(s.func.__name__ for s in plan.steps if s.kind == "use" and name in s.names)
            )
            how = "dense" if name in plan.dense else "unused" if name in plan.unused else "rule"
            reason = plan.dense.get(name, "no record that was tried reaches it" if how == "unused" else "")
            found.append(Covered(name, name.rpartition(".")[0], how, operations, reason))
        return tuple(found)

    @property
    def written_buffers(self) -> list[str]:
        """The buffers that a forward gives other values that may follow records: on copies, thrown away."""
        return [name for name in self._written if name not in self.trials.kept]

    # -------------------- capture

    def _written_by_forward(self, batch: Any) -> list[str]:
        """The buffers to which a forward as a capture makes it gives other values."""
        before = dict(self.model.named_buffers())
        kept, numbers = attributes_kept(self.model, self.loss), random_numbers_from(0, self.device)
        with kept, numbers, torch.enable_grad():
            run_loss(self.model, self.loss, repeat_to(batch, LARGE), None)
            after = dict(self.model.named_buffers())
            return [name for name, buffer in before.items() if not same_values(after.get(name), buffer)]

    def _leaves(
        self, params: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """The trainable tensors of this call, and what replaces the model's parameters (None: nothing)."""
        own: dict[str, Tensor] = dict(trainable_parameters(self.model))
        if params is None:
            return own, None
        given = check_params(self.model, params)
        replaced = {name: value.detach().requires_grad_(name in own) for name, value in given.items()}
        return own | {name: value for name, value in replaced.items() if name in own}, replaced

    def _run(
        self,
        plan: CapturePlan,
        batch: Any,
        leaves: Mapping[str, Tensor],
        substitute: Mapping[str, Tensor] | None,
    ) -> tuple[Capture, Tensor]:
        """The forward: per-record losses, and the capture that will collect the factors."""
        served = {name: leaves[name] for name in plan.ruled}
        capture = Capture(served, plan, num_records(batch))
        try:
            with torch.enable_grad(), self._leaves_told(capture.follow), capture:
                losses = evaluate_loss(self.model, self.loss, batch, substitute)
        except BaseException:
            capture.edges.clear()  # as in `collect`: hooks and edges hold each other
            raise
        return capture, losses

    def _capture(
        self,
        plan: CapturePlan,
        batch: Any,
        leaves: Mapping[str, Tensor],
        substitute: Mapping[str, Tensor] | None,
        params: Mapping[str, Tensor] | None,
        upstream: Tensor | None = None,
    ) -> tuple[dict[str, list[Factor]], Tensor]:
        factors: dict[str, list[Factor]] = {}
        losses: Tensor | None = None
        if plan.ruled:
            with backward_at(self.model, substitute):
                capture, losses = self._run(plan, batch, leaves, substitute)
                factors = capture.collect(losses, upstream)
        if plan.dense:
            with SumsOfProducts() as sums:
                rows, dense_losses = dense_rows(self.model, self.loss, batch, params, names=tuple(plan.dense))
            factors |= {name: [sums.factor(g)] for name, g in rows.items()}
            losses = dense_losses if losses is None else losses
        assert losses is not None
        return factors, losses.detach()

    def learn(
        self, batch: Any, params: Mapping[str, Tensor] | None = None, dense: Mapping[str, str] | None = None
    ) -> CapturePlan:
        """Plan on these records, from now on for all in their form; with parameters that are to be dense."""
        leaves, substitute = self._leaves(params)
        # Around the backward passes too: a checkpoint runs its forward once more there.
        with undisturbed(self.model), backward_included():
            plan = learn_plan(self.model, self.loss, batch, leaves, substitute, dense)
        self._plans[signature(batch)] = self.latest = plan
        return plan


def per_sample_gradients(
    model: nn.Module, loss: Loss, batch: Any, params: Mapping[str, Tensor] | None = None
) -> PerSampleGradients:
    """G of one batch; what is read to mix records is refused, and no rows are compared.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> G = per_sample_gradients(model, lambda m, x: m(x).squeeze(1), torch.eye(3))
    >>> G.row_norms()
    tensor([1., 1., 1.])
    """
    if num_records(batch) == 0:
        return _no_rows(model, trainable_parameters(model))
    engine = GradientEngine(model, loss, batch, check=False)
    engine.trials.refuse_mixing(engine.trials.proof(batch))
    return engine(batch, params)


def _read_by_trace(trace: Callable[[], Found]) -> Found:
    """What a trace gives, which runs the model and leaves nothing behind.

    Raises:
        RuntimeError: the model asks Python or NumPy for random numbers.
    """
    # Other threads ask, too (a heartbeat of Flower's, every 20 s): only beside such is it worth another look.
    for _ in range(3 if threading.active_count() > 1 else 1):
        state = GlobalState()
        try:
            found = trace()
            moved = {"NumPy", "Python"}.intersection(state.moved())
        finally:
            state.restore()
        if not moved:
            return found
    raise RuntimeError(f"the model asks {' and '.join(sorted(moved))} for random numbers")


def _refuse_shared(written: Sequence[str], held: Mapping[str, Tensor]) -> None:
    """Refuse writes to memory of several names: a line writes to a copy, which the others would not see.

    Raises:
        RuntimeError: naming two of them.
    """
    memory = {n: t.untyped_storage().data_ptr() for n, t in held.items() if t.layout is torch.strided}
    for name in written:
        place = memory.get(name)
        if others := [n for n, other in memory.items() if n != name and place and other == place]:
            raise RuntimeError(f"a forward writes to {name}, which shares its memory with {others[0]}")


def _gathered(
    model: nn.Module, leaves: Mapping[str, Tensor], factors: Mapping[str, Sequence[Factor]], losses: Tensor
) -> PerSampleGradients:
    """The rows in the order of the parameters; those of unused parameters are zero."""
    mesh = tensor_parallel_mesh(model) if model in SHARDED else None
    params: Mapping[str, Tensor] = leaves if mesh is None else trainable_parameters(model)
    first = next(iter(leaves.values()))
    found = FactoredGradients(
        {name: factors.get(name, ()) for name in leaves},
        losses=losses,
        shapes={name: (p if mesh is None else local_part(p)).shape for name, p in params.items()},
        dtype=accumulation_dtype(first.dtype),
        device=first.device,
    )
    return found if mesh is None else SplitGradients(found, params, mesh)


def _no_rows(model: nn.Module, leaves: Mapping[str, Tensor]) -> PerSampleGradients:
    first = next(iter(leaves.values()))
    return _gathered(model, leaves, {}, torch.zeros(0, dtype=first.dtype, device=device_of(first)))
