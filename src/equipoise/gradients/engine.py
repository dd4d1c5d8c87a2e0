"""The engine: per-sample gradients of a model as it is, by one forward and one backward.

Attaching learns a plan for the model (``capture.planner``), proves that no use of a parameter is missed, and
compares the result with single records. Calling follows the plan (``capture.recorder``); parameters that no
rule serves are computed densely (``checks.oracle``). The model is never wrapped or changed, and nothing stays
on it: buffers that a forward updates, such as running statistics, are copies while it runs, and a forward
that updates parameters is refused (``capture.isolation``).
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from equipoise._dtensor import device_of, local_part, part_like
from equipoise._foreign_errors import cause_of, where_raised
from equipoise._tree import leaves
from equipoise.gradients.capture.isolation import (
    Buffers,
    parameters_restored,
    parameters_watched,
    undisturbed,
)
from equipoise.gradients.capture.planner import LARGE, learn_plan
from equipoise.gradients.capture.random_numbers import GlobalState, are_constant, random_numbers_from
from equipoise.gradients.capture.recorder import Capture, CapturePlan, PlanMismatch
from equipoise.gradients.capture.sharded import (
    SHARDED,
    begin_sharded,
    found_by_any,
    leaves_told,
    tensor_parallel_mesh,
)
from equipoise.gradients.checks.errors import (
    BufferWritesError,
    CoverageError,
    CrossRecordError,
    ForwardWritesError,
    RefusedParameter,
)
from equipoise.gradients.checks.oracle import dense_rows, visit_rows
from equipoise.gradients.checks.row_comparison import distance_and_length, length, rows_differ
from equipoise.gradients.compare import (
    FEW,
    LOSS_SEEDS,
    SEEDS,
    Independence,
    TracedLosses,
    away_from_zero,
    compare,
    with_others,
)
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
    places_of_different,
    record_leaves,
    repeat_to,
    replace_leaves,
    signature,
    take_records,
    trainable_parameters,
)
from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.numerics import accumulation_dtype
from equipoise.gradients.operator import FactoredGradients, PerSampleGradients
from equipoise.gradients.provenance import (
    Fault,
    Proof,
    Public,
    Trusted,
    inputs_read,
    not_by_record,
    prove,
    read,
)
from equipoise.gradients.split import SplitGradients
from equipoise.gradients.trace import Line, Traced, line_of, trace, why_untraced

__all__ = ["Covered", "GradientEngine", "per_sample_gradients"]

#: How often a trace is taken, which costs as much as many steps; other forms of micro-batches, and models
#: that change in every step, run eagerly.
MOST_TRACED = 8

TOO_MANY = (
    f"there are more than {MOST_TRACED} forms of batches and changes of the model (pad to a few lengths by "
    "equipoise.data.PadTo; a loss that takes the step gets it as loss(model, batch, step))"
)

#: Attempts at a batch whose operations differ from the plan; the last one is dense altogether.
MISMATCHES = 5

#: Share of a row's length that rounding may move where it opens or closes a few of many ReLUs.
KINKS = 0.1

#: Share of the rows' root of squares that their sum may round by in another order, and of the whole rows'.
SUMS_ROUND, ROUNDS_TO_ZERO = 5e-3, 1e-5

#: So many rows are summed for that: the rounding of a sum grows faster than the root of its terms' squares.
MOST_SUMMED = 4096

#: How a reason begins why a parameter is dense.
BY_VALUES = "its use depends on values"

ANOTHER_FUNCTION = (
    "ordinary autograd's gradient of a batch is not the sum of those of its records",
    "A hook or a backward of your own has to treat each record by itself, and a loss must not follow a "
    "record's place or the number of records. To change a parameter's whole gradient, do so to the released "
    "one (optimizer.register_step_pre_hook)",
)
"""Reason and remedy where records train another function than their batch."""

#: What norms and sums of a replay may round by, relative to the norms: a compiler may change their order.
REPLAYS_ROUND, NO_GRADIENT = 1e-2, 1e-6

#: What rows may round by where another record changes, relative to the norms of whole rows.
ROWS_ROUND = {"torch.float64": 1e-9, "torch.float32": 1e-4, "low": 5e-2}


class _OtherReplayError(Exception):
    """A trace does not compute what the model does; the text is for a statement."""


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

    Attributes:
        excused: what mixes records in those, as far as it was met.

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

    #: Whether the example batch's rows are zero or not finite, at the model's parameters, under two seeds.
    rows_vanish = False

    _has_warned = False

    #: Whether rows are planned though records are mixed, in trusted modules alone if `settle` lets it pass.
    _mixed = False

    #: Whether a comparison has seen that model or loss ask for random numbers.
    _asks_for_numbers = False

    _known: Independence | None = None

    #: Whether `torch.compile` makes kernels of what is replayed, and the seconds that it took so far.
    compiles, compile_seconds = False, 0.0

    #: How many forms were compared while steps ran.
    _compared_forms = 0

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        example_batch: Any,
        *,
        check: bool = True,
        trust: Sequence[str] = (),
    ) -> None:
        self.model, self.loss, self._trust = model, loss, trust
        self.excused: tuple[Fault, ...] = ()
        self._plans: dict[tuple, CapturePlan] = {}
        self._latest: CapturePlan | None = None
        self._lines: dict[tuple, Traced] = {}
        self._proofs: dict[tuple, Proof] = {}
        self._left: dict[str, Tensor] = {}
        self._kept: tuple[str, ...] = ()
        self._deceiving: list[str] = []
        self._traced: dict[tuple, Traced | None] = {}
        self.traces = 0
        self._device = device_of(next(iter(trainable_parameters(model).values())))
        if check_batch(example_batch) == 0:
            raise ValueError(
                "example_batch has 0 records; pass at least one (three let the checks compare records)"
            )
        check_model(model)
        is_sharded = begin_sharded(model)
        self._leaves_told = leaves_told if is_sharded else nullcontext
        #: Why steps run the model itself and no trace; "" if they do not.
        self._eager = (
            "EQUIPOISE_EAGER is set"
            if os.environ.get("EQUIPOISE_EAGER") == "1"
            else "processes hold parts of the model"
            if is_sharded
            else "the method asks for losses alone"
            if self.forward_only
            else ""
        )
        self._buffers = Buffers(model)
        with parameters_restored(model):
            with self._buffers.kept():
                self._learn(example_batch)
            self._buffers.find_changing(lambda: self._trial(example_batch))
        if check:
            self.settle(example_batch)
            self.check(repeat_to(example_batch, max(LARGE, num_records(example_batch))))

    def __call__(self, batch: Any, params: Mapping[str, Tensor] | None = None) -> PerSampleGradients:
        """G of a batch, at the model's parameters or at others.

        Args:
            batch: as the example batch, any number of records (0 too) and other lengths.
            params: name -> value; parameters left out keep the model's values.

        Raises:
            ForwardWritesError: the forward changes a parameter, frozen ones too, whose value is lost.
        """
        with parameters_watched(self._buffers.modules, params), self._buffers.kept():
            return self._gradients(batch, params)

    def by_plan(self, batch: Any, params: Mapping[str, Tensor] | None = None) -> PerSampleGradients:
        """G of private records: what was planned at the start, whatever their values.

        A plan that followed a batch would change how all its records round, and which random numbers they
        get, so that one record moved the others. Records of other lengths are planned on fillers.

        Raises:
            PlanMismatch: the model runs other operations for some of these records; `alone` serves them.
            BufferWritesError, ForwardWritesError: as in a call.
        """
        # A trace draws random numbers where these are to be constant.
        replayed = None if self._eager or are_constant() else self._replayed(batch, params)
        if replayed is not None:
            return replayed
        with parameters_watched(self._buffers.modules, params), self._buffers.kept():
            return self._by_plan(batch, params)

    def trace_anew(self) -> None:
        """Forget what was traced: what model and loss hold has changed, and a trace took it for constant."""
        self._lines.clear()
        self._proofs.clear()
        self._traced.clear()

    def draws(self, batch: Any) -> bool:
        """Whether rows of a batch of this form may ask for random numbers."""
        traced = self._traced.get(self._form(batch))
        return traced is None or traced.rows.draws

    def never_replay(self, reason: str) -> None:
        """Run the model in every step, for this reason: then nothing is proved."""
        self._eager = reason

    @property
    def runs_model(self) -> bool:
        """Whether some form of micro-batch has no trace, so that steps run the model's own code."""
        return bool(self._eager) or None in self._traced.values()

    @property
    def independence(self) -> Independence:
        """What is known of whether records are kept apart: the weakest of what was found of all that runs."""
        if self.excused:
            what = "; ".join(map(str, self.excused[:3]))
            return Independence(
                "unchecked",
                f"the owner answers for what mixes records in {', '.join(self._trust)}: {what}; epsilon "
                "follows only if no record's gradient, as it is clipped, depends on other records by that",
            )
        if self._known is None or (self._eager and self._known.word == "proved"):
            return Independence("unchecked", self._eager)
        return self._known

    def _found(self, word: Literal["proved", "compared"], reason: str = "") -> None:
        if self._known is None or self._known.word == "proved":
            self._known = Independence(word, reason)

    def _replayed(self, batch: Any, params: Mapping[str, Tensor] | None) -> PerSampleGradients | None:
        """G by what was traced, at the first batch of a form; None if there is no trace."""
        form = self._form(batch)
        if form not in self._traced:
            with parameters_watched(self._buffers.modules, params), self._buffers.kept():
                self._traced[form] = self._traced_anew(batch)
        traced = self._traced[form]
        if traced is None:
            return None
        found, written = traced.gradients(*self._values(params), batch)
        if written:
            public = self._proofs[form].public_writes
            self._left = {name: written[name] for name in self._kept if name in public}
        return found

    def _traced_anew(self, batch: Any, *, once_more: bool = False) -> Traced | None:
        """The trace of a form of micro-batch; None if it runs eagerly. What is not proved is compared.

        Args:
            batch: of the form.
            once_more: compare whatever was compared before; without it only what was checked before.

        Raises:
            CrossRecordError: in this form records are mixed.
        """
        proof = Proof(untraced=self._eager or TOO_MANY)
        if not self._eager and self.traces < MOST_TRACED:
            self.traces += 1
            proof = self.proof(batch)
        self._refuse_mixing(proof)
        traced = None
        if proof.untraced is None:
            line = self._compiled(batch) if self.compiles else self._line(batch)
            try:
                traced = self._compared(line, batch)
            except _OtherReplayError as error:
                proof = Proof(untraced=str(error))
            except RuntimeError:  # its text may hold values of records, and a statement has the reason
                proof = Proof(untraced="the model fails on records that were tried")
        if proof.outcome == "proved":
            if once_more:
                self._found("proved")
        elif self.excused:
            pass  # rows move with the records next to them
        elif once_more or (self._known is not None and self._compared_forms < MOST_TRACED):
            self._compared_forms += 1
            self._compare_with_others(batch, proof)
        elif self._known is not None:  # else nobody asked for `check`
            self._known = Independence("unchecked", TOO_MANY)
        return traced

    def _refuse_mixing(self, proof: Proof) -> None:
        """Refuse what mixes records, and note what is excused.

        Raises:
            CrossRecordError: it does, outside of the trusted modules.
        """
        if proof.outcome == "mixes":
            raise _mixed(proof)
        self.excused = self.excused or proof.excused

    def _compare_with_others(self, batch: Any, proof: Proof) -> None:
        """The second way.

        Raises:
            CrossRecordError: a loss or a row moved with the records next to it.
        """
        reason = str(proof)
        try:
            others = self._compare_losses(batch)
            if not self.forward_only:
                compare(self._rows_under, self._moved, self._asks, batch, others)
        except PlanMismatch:  # such records are computed by themselves
            reason += "; losses were compared, and no gradients, since operations follow values"
        except CrossRecordError as error:
            raise CrossRecordError(f"{error.found}; {reason}") from None
        self._found("compared", reason)

    def followed_buffers(self, batch: Any) -> list[str]:
        """Buffers to which a forward writes what comes of records, if it reads them, or does in evaluation.

        Such a buffer can neither hold private numbers nor stay as it was. None of a model without a trace.
        """
        writes = [*self.proof(batch).private_writes, *self._deceiving]
        if not writes:
            return []
        read = inputs_read(self._line(batch).rows)
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            self.model.eval()
            with suppress(Exception):  # it has no trace
                read |= inputs_read(self._line_of_losses(batch))
        finally:
            for module, is_training in modes:
                module.training = is_training
        return [name for name in writes if name in read]

    def keep_public_writes(self) -> None:
        """Give buffers what the last forward of records wrote to them, as far as it depends on no record."""
        own = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in self._left.items():
                own[name].copy_(value)
        self._left = {}

    def _values(self, params: Mapping[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers by name, with others in the place of some."""
        own = {**dict(self.model.named_parameters()), **check_params(self.model, params)}
        return own, dict(self.model.named_buffers())

    def _compiled(self, batch: Any) -> Traced:
        """The trace with kernels of `torch.compile`, which are made here.

        Raises:
            ValueError: there is no compiler, or it fails.
        """
        started, state = time.perf_counter(), GlobalState(self._device)
        try:
            traced = self._line(batch).compiled()
            found, _ = traced.gradients(*self._values(None), batch)
            found.weighted_sums(torch.ones(found.num_records, device=self._device))
        except Exception as error:  # whatever its layers raise
            raise ValueError(
                f"compile=True, and torch.compile fails ({where_raised(error)}). On a processor it needs a "
                "C++ compiler, such as g++; or leave compile out"
            ) from cause_of(error)
        finally:
            state.restore()
        self.compile_seconds += time.perf_counter() - started
        return traced

    def _compared(self, traced: Traced, batch: Any) -> Traced:
        """The trace, if losses, norms and the sum of rows are the model's under the same random numbers.

        A forward that seeds a generator itself, or has one of its own, draws others when it is replayed.

        Raises:
            _OtherReplayError: they are not.
            RuntimeError: of the model.
        """
        state = GlobalState(self._device)

        def of(run: Callable[[], PerSampleGradients]) -> PerSampleGradients:
            with random_numbers_from(0, self._device), self._buffers.kept():
                return run()

        try:
            expected = of(lambda: self._by_plan(batch, None))
            found = of(lambda: traced.gradients(*self._values(None), batch)[0])
        finally:
            state.restore()
        assert found.losses is not None
        assert expected.losses is not None
        if not torch.allclose(found.losses, expected.losses, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise _OtherReplayError(
                "it gives other losses than the model, as if that seeded a generator itself"
            )
        norms = expected.row_norms()
        if not (finite := norms.isfinite()).all():
            found, expected, norms = found.rows(finite), expected.rows(finite), norms[finite]
        # Gradients of a student at its teacher are zero but for rounding.
        ones, least = torch.ones_like(norms), REPLAYS_ROUND * norms.norm() + NO_GRADIENT
        sums = found.weighted_sums(ones)
        same = bool((found.row_norms() - norms).norm() <= least)  # NaN is not
        for name in expected.names:  # one by one: of a large model all take much memory
            one = expected.select([name]).weighted_sums(ones)[name]
            same &= bool(length(one.sub_(sums.pop(name))) <= math.sqrt(len(ones)) * least)
        if not same:
            raise _OtherReplayError("it gives other gradients than the model")
        return traced

    def settle(self, batch: Any) -> None:
        """See that each of these records by itself runs what was planned, and that rows are those of records.

        A parameter whose use depends on values becomes dense.

        Args:
            batch: a few records.

        Raises:
            CrossRecordError: an operation mixes records.
            CoverageError: rows are others than those of single records.
        """
        several = repeat_to(batch, max(LARGE, num_records(batch)))
        with parameters_restored(self.model), self._buffers.kept():
            self._settle(batch)
            if self._mixed or (self._trust and self.proof(several).outcome == "trusted"):
                self._refuse_mixing(self.proof(several))
                self._mixed = True
                if not self.excused:
                    raise CrossRecordError(
                        "changing one record changed the loss or gradient of another one, by no trusted "
                        f"module: {self.proof(several)}"
                    )
            plan = self._plan_for(batch)
            try:
                self._compare(plan, batch)
            except Exception:  # also one of the model's own: one record may be too few for it
                self._refuse_mixed_losses(several)
                raise
            if self._plan_for(batch) is not plan:  # rows of records by themselves: why were they others?
                self._refuse_mixed_losses(several)

    def _losses_read(self, batch: Any) -> Proof:
        try:
            return self._proof_of_losses(batch)
        except Exception as error:  # whatever it is, there is no trace
            return Proof(untraced=why_untraced(error))

    def _refuse_mixed_losses(self, batch: Any) -> None:
        proof = self._losses_read(batch)
        if proof.outcome == "mixes":
            raise _mixed(proof)
        if proof.outcome != "proved":
            self._compare_losses(batch)

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
        # The plan stays: one that followed these records would tell of them.
        with parameters_restored(self.model), self._buffers.kept(), self._plans_kept():
            if self._eager:
                self._refuse_mixing(self.proof(batch))
            form = self._form(batch)
            self._traced[form] = self._traced_anew(batch, once_more=True)
            if self.forward_only:  # a loss that takes derivatives itself is refused
                with undisturbed(self.model), suppress(PlanMismatch):
                    self._by_plan(batch, None)
            else:
                self.rows_vanish = self._vanish(batch)
        with self._buffers.kept(), self._plans_kept():  # without a copy of the parameters beside gradients
            self._refuse_other_function(batch)
        self._kept = self._public_writes(batch)
        return self.independence

    def _public_writes(self, batch: Any) -> tuple[str, ...]:
        """Buffers that a forward writes as it would for other records: proved, and seen once.

        An operation whose schema hides that it writes would deceive a proof, and what it wrote be published.
        """
        traced, names = self._traced[self._form(batch)], self.proof(batch).public_writes
        if traced is None or not names:
            return ()
        found = []
        for records in (batch, next(next(with_others(batch)))[0]):
            with random_numbers_from(0, self._device):
                found.append(traced.gradients(*self._values(None), records)[1])
        own, (one, other) = dict(self.model.named_buffers()), found
        self._deceiving = [name for name in names if not torch.equal(one[name], other[name])]
        fits = {n: (own[n].shape, own[n].dtype) == (one[n].shape, one[n].dtype) for n in names}
        return tuple(name for name in names if fits[name] and name not in self._deceiving)

    def proof(self, batch: Any) -> Proof:
        """Whether micro-batches of this form keep records apart, read from their trace: for all values.

        Args:
            batch: as a call takes it.
        """
        form = self._form(batch)
        if form not in self._proofs:
            self._proofs[form] = self._prove(batch)
        return self._proofs[form]

    def _prove(self, batch: Any) -> Proof:
        if self.model in SHARDED:
            return Proof(untraced="processes hold parts of the model")
        try:
            if self.forward_only:
                return self._proof_of_losses(batch)
            found = prove(self._line(batch))
            # Once more with the lines of the source, if one has to be named.
            if found.fault is None:
                return found
            return prove(self.traced(batch, self.model), Trusted(self._trust) if self._trust else None)
        except ForwardWritesError:
            raise
        except Exception as error:  # whatever it is, there is no trace
            reason = error
            try:
                found = self._proof_of_losses(batch)
                if found.outcome == "mixes":
                    return found
            except Exception as of_forward:  # which says more than what came of it in a backward
                reason = of_forward
            return Proof(untraced=why_untraced(reason))

    def _line_of_losses(self, batch: Any) -> Line:
        """What a forward alone computes, with the lines of the source."""
        held: dict[str, Tensor] = {name: p.detach() for name, p in self.model.named_parameters()}
        held |= dict(self.model.named_buffers())
        records = {f"record:{number}": leaf for number, leaf in enumerate(record_leaves(batch))}

        def losses(given: dict[str, Tensor]) -> dict[str, Tensor]:
            leaves = [given.pop(name) for name in records]
            own = {name: value.clone() for name, value in given.items()}  # a forward may write to them
            return {"losses": evaluate_loss(self.model, self.loss, replace_leaves(batch, leaves), own)}

        state = GlobalState()
        try:
            with self._buffers.kept():
                line, _ = line_of(losses, held | records, self.model)
            if moved := {"NumPy", "Python"}.intersection(state.moved()):
                raise RuntimeError(f"the model asks {' and '.join(sorted(moved))} for random numbers")
        finally:
            state.restore()
        return line

    def _proof_of_losses(self, batch: Any) -> Proof:
        """The same of a forward alone."""
        line = self._line_of_losses(batch)
        held = [name for name in line.inputs if not name.startswith("record:")]
        kinds = read(line, dict.fromkeys(held, Public()), num_records(batch))
        fault, trusted = not_by_record(kinds["losses"], "the losses"), Trusted(self._trust)
        if fault is not None and self._trust:
            kinds = read(line, dict.fromkeys(held, Public()), num_records(batch), trusted)
            fault = not_by_record(kinds["losses"], "the losses")
        return Proof(fault, excused=tuple(trusted.excused))

    def _line(self, batch: Any) -> Traced:
        form = self._form(batch)
        if form not in self._lines:
            self._lines[form] = self.traced(batch)
        return self._lines[form]

    def _form(self, batch: Any) -> tuple[Any, ...]:
        """What a trace is good for: number, shapes and types of records, and PyTorch's global settings."""
        kind = self._device.type
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
        plan = self._plan_for(batch)
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

        state = GlobalState()
        try:
            with self._buffers.kept():  # a forward may put others there
                traced = trace(compute, own | frozen, buffers, batch, sources)
            moved = {"NumPy", "Python"}.intersection(state.moved())
            if plan.dense and traced.rows.draws:  # another forward draws them again
                raise RuntimeError("the model draws random numbers, and some rows are dense")
        finally:
            state.restore()
        if moved:
            raise RuntimeError(f"the model asks {' and '.join(sorted(moved))} for random numbers")
        if written := [name for name in traced.written if name in traced.parameters]:
            raise ForwardWritesError(written)
        if written := [name for name in traced.written if name not in self._buffers.changing]:
            raise BufferWritesError(written, "it did not at the start")
        return traced

    @backward_included()
    def _by_plan(
        self, batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None = None
    ) -> PerSampleGradients:
        leaves, substitute = self._leaves(params)
        if num_records(batch) == 0:
            return _no_rows(self.model, leaves)
        found = self._capture(self._plan_for(batch), batch, leaves, substitute, params, upstream)
        return _gathered(self.model, leaves, *found)

    def _plan_for(self, batch: Any) -> CapturePlan:
        return self._plans.get(signature(batch)) or self._plan_of_length(batch)

    def planned_losses(self, batch: Any, params: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """Per-record losses by a forward that runs what was planned; no backward can leave the plan.

        Args:
            batch, params: as in a call, one record at least.

        Returns:
            None if the model runs other operations for some of these records.
        """
        try:
            return self._planned_losses(self._plan_for(batch), batch, params)
        except PlanMismatch:
            return None

    def _planned_losses(self, plan: CapturePlan, batch: Any, params: Mapping[str, Tensor] | None) -> Tensor:
        leaves, substitute = self._leaves(params)
        capture, losses = self._run(plan, batch, leaves, substitute, self.forward_only)
        capture.let_go()
        for kept in capture.inputs:  # no hook will run
            kept.clear()
        if plan.ruled:
            capture.check_followed()
        return losses.detach()

    def alone(
        self, batch: Any, params: Mapping[str, Tensor] | None = None, place: int = 0
    ) -> PerSampleGradients:
        """G of one record of a batch, by ordinary autograd, without a plan.

        Args:
            batch: as in a call.
            params: as in a call.
            place: of the record.

        Raises:
            ForwardWritesError: as in a call.
        """
        with parameters_watched(self._buffers.modules, params), self._buffers.kept(), backward_included():
            leaves, substitute = self._leaves(params)
            found, loss = self._row_among(batch, place, leaves, substitute)
            rows = {name: [DenseFactor(row[None])] for name, row in found.items()}
            return _gathered(self.model, leaves, rows, loss[None])

    def _row_among(
        self,
        batch: Any,
        place: int | slice,
        leaves: Mapping[str, Tensor],
        substitute: Mapping[str, Tensor] | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The gradient of one record's loss in a batch, or of the sum of several, and that sum.

        Only parameters that it reaches have one.
        """
        seen = dict(leaves)
        told = self._leaves_told(seen.__setitem__)
        with torch.enable_grad(), told, backward_at(self.model, substitute):
            loss = evaluate_loss(self.model, self.loss, batch, substitute)[place].sum()
            found: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if loss.requires_grad:
                found = torch.autograd.grad(loss, [seen[name] for name in leaves], allow_unused=True)
        rows = {
            # Look-ups may give sparse ones.
            name: part_like(gradient.to_dense(), seen[name])
            for name, gradient in zip(leaves, found, strict=True)
            if gradient is not None
        }
        return rows, loss.detach()

    def plan_on(self, public: Any, example: Any) -> bool:
        """Plan anew on public records: a plan that followed private ones would tell of them.

        Args:
            public: records, zeros say.
            example: private records, of which the plan has to serve one at least, with its rows.

        Returns:
            False if private records set a part of it; if there is none, the one of the start stays.
        """
        before = dict(self._plans), self._latest
        generator = torch.Generator().manual_seed(0)

        def uniform(leaf: Tensor) -> Tensor:
            values = torch.rand(leaf.shape, generator=generator)
            return values.to(leaf) if leaf.is_floating_point() else leaf

        def bits(leaf: Tensor) -> Tensor:
            values = torch.randint(2, leaf.shape, generator=generator)
            return leaf if leaf.is_floating_point() else values.to(leaf)

        # Parameters whose rows by rule were wrong stay dense; what follows values is planned anew.
        settled = before[0][signature(example)]
        wrong = {n: why for n, why in settled.dense.items() if not why.startswith(BY_VALUES)}
        # Gradients of zeros, and behind a mask of zeros, vanish: nothing tells records from positions, or
        # what a hook makes of them. Some models take only zeros.
        numbers = map_records(uniform, public)
        for tried in (map_records(bits, numbers), numbers, public):
            with suppress(Exception):  # whatever a model raises that does not take such records
                plan = self._learn(tried)
                if not (is_public := wrong.keys() <= plan.dense.keys()):
                    plan = self._learn(tried, dense=wrong)
                takes_zeros = self._holds(public, 0)  # which fill up forwards, and may take other branches
                if takes_zeros and plan == settled:
                    return is_public
                few = [at for at in range(num_records(example)) if self._holds(example, at)]
                if takes_zeros and few:
                    self._compare(plan, take_records(example, torch.tensor(few[:LARGE])))
                    if self._latest is plan:
                        return is_public
            self._plans, self._latest = dict(before[0]), before[1]
        return False

    def _holds(self, batch: Any, place: int) -> bool:
        """Whether copies of a record run what is planned."""
        copies = take_records(batch, torch.full((LARGE,), place))
        with undisturbed(self.model), self._buffers.kept():
            return self.planned_losses(copies) is not None

    def serves(self, batch: Any) -> bool:
        """Whether these records run what was planned, with finite losses and rows."""
        with suppress(Exception), undisturbed(self.model), self._buffers.kept():
            found = self._by_plan(batch, None)
            assert found.losses is not None
            numbers = found.losses if self.forward_only else found.losses + found.row_norms()
            return bool(numbers.isfinite().all())
        return False

    def _settle(self, batch: Any) -> None:
        """Plan so that each of these records by itself runs what was planned.

        Parameters whose operations depend on values become dense.
        """
        for _ in range(MISMATCHES):  # what one record changes must hold for those before it
            before = self._plans.get(signature(batch))
            for place in places_of_different(batch):
                if not self._holds(batch, place):
                    with undisturbed(self.model), self._buffers.kept():
                        self._gradients(take_records(batch, torch.full((LARGE,), place)), None)
            if self._plans.get(signature(batch)) is before:
                return

    def _plan_of_length(self, batch: Any) -> CapturePlan:
        """The latest plan or another, by what fillers in the shape of these records run."""
        assert self._latest is not None
        if self.model in SHARDED:  # the others, who have other shapes, would not plan with this process
            return self._latest
        with suppress(Exception), undisturbed(self.model):  # whatever a model raises that takes no zeros
            self._gradients(fillers(batch, LARGE), None)
        return self._plans.setdefault(signature(batch), self._latest)

    @backward_included()
    def _gradients(self, batch: Any, params: Mapping[str, Tensor] | None) -> PerSampleGradients:
        leaves, substitute = self._leaves(params)
        records = num_records(batch)
        if records == 0:
            return _no_rows(self.model, leaves)
        own = self._plans.get(signature(batch))
        plan = own or self._latest  # for batches of another form the latest is tried first
        assert plan is not None
        state = GlobalState(device_of(next(iter(leaves.values()))))
        for attempt in range(MISMATCHES):
            try:
                factors, losses = self._capture(plan, batch, leaves, substitute, params)
                break
            except PlanMismatch as mismatch:
                state.restore()  # the same random numbers, however often it is tried
                dense = dict(plan.dense)
                if own or attempt:  # the operations depend on values: what they touch is computed densely
                    reason = f"{BY_VALUES} ({mismatch})"
                    names = mismatch.names if attempt < MISMATCHES - 2 else ()
                    dense |= dict.fromkeys(names or leaves, reason)
                plan = self._learn(batch, params, dense)
        return _gathered(self.model, leaves, factors, losses)

    def _vanish(self, batch: Any) -> bool:
        """Whether all rows are zero or not finite; a plan that does not hold for it is changed here."""
        for seed in range(2):
            with undisturbed(self.model, seed, dropout=True):
                norms = self(batch).row_norms()
                # Processes that hold parts of a model go on together. A norm that is not finite has weight 0.
                trains = (norms > 0) & norms.isfinite()
                if self.model in SHARDED or bool(trains.any()):
                    return False
        return True

    def coverage(self) -> tuple[Covered, ...]:
        """One entry per trainable parameter, in the model's order."""
        plan = self._latest
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
        return [name for name in self._buffers.written if name not in self._kept]

    @contextmanager
    def _plans_kept(self) -> Iterator[None]:
        """Inside, records may run other operations than planned; the plan stays."""
        before = dict(self._plans), self._latest
        try:
            yield
        finally:
            self._plans, self._latest = before

    # -------------------- capture

    def _trial(self, batch: Any) -> None:
        """One forward as a capture makes it, for what it does to buffers; random states are restored."""
        devices = {p.device for p in self.model.parameters()}
        with random_numbers_from(0, *devices), torch.enable_grad():
            evaluate_loss(self.model, self.loss, repeat_to(batch, LARGE), None)

    def _leaves(
        self, params: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """The trainable tensors of this call, and what replaces the model's parameters (None: nothing)."""
        own: dict[str, Tensor] = dict(trainable_parameters(self.model))
        if params is None:
            return own, None
        given = check_params(self.model, params)
        replaced = {
            name: value.detach().requires_grad_() if name in own else value.detach()
            for name, value in given.items()
        }
        return own | {name: value for name, value in replaced.items() if name in own}, replaced

    def _run(
        self,
        plan: CapturePlan,
        batch: Any,
        leaves: Mapping[str, Tensor],
        substitute: Mapping[str, Tensor] | None,
        forward_only: bool = False,
    ) -> tuple[Capture, Tensor]:
        """The forward: per-record losses, and the capture that will collect the factors."""
        served = {name: leaves[name] for name in plan.ruled}
        capture = Capture(served, plan, num_records(batch), forward_only=forward_only)
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
            rows, dense_losses = dense_rows(self.model, self.loss, batch, params, names=tuple(plan.dense))
            factors |= {name: [DenseFactor(g)] for name, g in rows.items()}
            losses = dense_losses if losses is None else losses
        assert losses is not None
        return factors, losses.detach()

    # -------------------- plans

    def _learn(
        self, batch: Any, params: Mapping[str, Tensor] | None = None, dense: Mapping[str, str] | None = None
    ) -> CapturePlan:
        leaves, substitute = self._leaves(params)
        try:
            # Around the backward passes too: a checkpoint runs its forward once more there.
            with undisturbed(self.model), backward_included():
                plan = learn_plan(self.model, self.loss, batch, leaves, substitute, dense, self._mixed)
        except RuntimeError as error:
            if isinstance(error, CoverageError) or "use_reentrant" not in str(error):
                raise
            remedy = "Call torch.utils.checkpoint.checkpoint with use_reentrant=False"
            reason = "reentrant activation checkpointing hides the gradients of what is inside"
            refused = [RefusedParameter(name, name.rpartition(".")[0], reason, remedy) for name in leaves]
            raise CoverageError(refused) from error
        if plan is None:
            proof = self._losses_read(repeat_to(batch, LARGE))
            if proof.outcome == "mixes" or not self._trust:
                raise _mixed(proof)
            self._mixed = True
            return self._learn(batch, params, dense)
        self._plans[signature(batch)] = self._latest = plan
        return plan

    def _refuse_other_function(self, batch: Any) -> None:
        """Compare the sum of rows with ordinary autograd's gradient of the same records in another order.

        They differ if a hook or a backward uses a statistic of the batch, if a hook changes the gradient of a
        parameter, and if a loss follows a record's place or the number of records. Dense rows are right all
        the same, of each record by itself, but are not what the user wrote: a warning.

        Args:
            batch: records.

        Raises:
            CoverageError: others differ.
        """
        if self.forward_only:
            return
        if hooked := [n for n, p in self.model.named_parameters() if p._post_accumulate_grad_hooks]:
            warnings.warn(
                f"hooks of the parameters {hooked[:3]} are not called (register_post_accumulate_grad_hook): "
                "gradients of records are not accumulated in a parameter. To change or read the released "
                "gradient, use optimizer.register_step_pre_hook",
                stacklevel=2,
            )
        batch = take_records(batch, slice(MOST_SUMMED))
        try:
            with undisturbed(self.model):
                rows = self._by_plan(batch, None)
        except PlanMismatch:
            return  # such records are computed by themselves
        assert self._latest is not None
        if not (finite := rows.row_norms().isfinite()).all():  # the others have weight zero
            if finite.any():
                self._refuse_other_function(take_records(batch, finite.nonzero().squeeze(1).cpu()))
            return
        order = torch.randperm(rows.num_records, generator=torch.Generator().manual_seed(0))
        order = order.sort().values if self._mixed else order
        with undisturbed(self.model), backward_included():
            expected, _ = self._row_among(take_records(batch, order), slice(None), *self._leaves(None))
        whole = rows.row_norms()
        is_rough = self._latest.low_precision or whole.is_cuda  # which may multiply in TF32
        wrong = {}
        for name in rows.names:  # one by one, as in `_moved`
            one = rows.select([name])
            total = local_part(one.weighted_sums(torch.ones_like(whole))[name])
            distance = length(total.sub_(expected.pop(name)) if name in expected else total)
            share = SUMS_ROUND if name in self._latest.dense and not is_rough else KINKS
            # Where a parameter's gradient is zero but for rounding, the whole one says how much that is.
            if not distance <= share * one.row_norms().norm() + ROUNDS_TO_ZERO * whole.norm():
                wrong[name] = ""
        wrong = found_by_any(self.model, wrong)
        if not wrong or self._follows_seed(take_records(batch, slice(LARGE)), self._latest):
            return
        if usual := self._where_rows_do_not_vanish(self._latest, batch):
            with backward_at(self.model, usual):
                self._refuse_other_function(batch)
            return
        if wrong.keys() - self._latest.dense.keys():
            raise CoverageError([RefusedParameter(n, n.rpartition(".")[0], *ANOTHER_FUNCTION) for n in wrong])
        if not self._has_warned:
            self._has_warned = True
            reason, remedy = ANOTHER_FUNCTION
            warnings.warn(
                f"for the parameters {[*wrong][:3]} {reason}; that sum is trained, which is another function "
                f"than the one that you wrote. {remedy}.",
                stacklevel=2,
            )

    def _rows_under(
        self, seed: int, batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None
    ) -> PerSampleGradients:
        with undisturbed(self.model, seed, dropout=True):
            before = GlobalState(self._device)
            found = self._by_plan(batch, params, upstream)
            self._asks_for_numbers |= bool(before.moved())
        return found

    def _asks(self) -> bool:
        return self._asks_for_numbers

    def _compare_losses(self, batch: Any) -> dict[str, Tensor]:
        """Compare losses of records next to others; gives the parameters away from zero."""

        def moved(before: TracedLosses, after: TracedLosses) -> list[str]:
            return ["the losses"] * before.moved(after, record=-1)

        others = away_from_zero(self.model, self.loss, batch)
        compare(self._losses_under, moved, self._asks, batch, others, not_usual=())
        few = take_records(batch, slice(FEW))
        if num_records(few) > 1:
            rare = range(SEEDS, LOSS_SEEDS)
            compare(self._losses_under, moved, self._asks, few, others, not_usual=(), seeds=rare)
        return others

    def _losses_under(
        self, seed: int, batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None
    ) -> TracedLosses:
        with undisturbed(self.model, seed, dropout=True), torch.enable_grad():
            before = GlobalState(self._device)
            found = TracedLosses.of(lambda b: evaluate_loss(self.model, self.loss, b, params).detach(), batch)
            self._asks_for_numbers |= bool(before.moved())
        return found

    def _moved(self, before: PerSampleGradients, after: PerSampleGradients) -> list[str]:
        """Parameters where some row, of the same records, moved by more than rounding."""
        finite = before.row_norms().isfinite()
        if not finite.all():
            before, after = before.rows(finite), after.rows(finite)
        assert self._latest is not None
        weights = 0.5 + torch.rand(before.num_records, generator=torch.Generator().manual_seed(0))
        whole = before.row_norms()
        tolerance = ROWS_ROUND["low" if self._latest.low_precision else str(whole.dtype)]
        by_name = [(name,) for name in before.names]
        distances = (after.row_norms(by_name) - before.row_norms(by_name)).abs()
        moved = (~(distances <= tolerance * whole[:, None])).any(0).tolist()  # to NaN, too
        # Rows of one length each: the longest would hide the others. Of denormal numbers there is no unit.
        least = torch.finfo(whole.dtype).tiny / torch.finfo(whole.dtype).eps
        unit = torch.where(whole > least, weights.to(whole) / whole, 0.0)
        difference = after - before
        for place, name in enumerate(before.names):  # one by one: of a large model all take much memory
            distance = length(local_part(difference.select([name]).weighted_sums(unit)[name]))
            moved[place] |= not distance <= tolerance * before.num_records
        own = self._leaves(None)[0]
        names = [name for name, has_moved in zip(own, moved, strict=True) if has_moved]
        return [*found_by_any(self.model, dict.fromkeys(names, ""))]

    @torch.enable_grad()
    @backward_included()
    def _compare(self, plan: CapturePlan, batch: Any) -> None:
        """The self-check: rows of three records against ordinary autograd, a record at a time."""
        if self._mixed:  # next to others a record has another row
            return
        # In another order than the plan was learned on: a model may sort records, or tokens, by value.
        three = take_records(repeat_to(batch, LARGE), torch.arange(LARGE).flip(0))
        for _ in range(2):
            wrong = self._wrong_rows(plan, three)
            if wrong and (usual := self._where_rows_do_not_vanish(plan, three)):
                with backward_at(self.model, usual):
                    wrong = self._wrong_rows(plan, three)
            if not wrong:
                return
            if all(name in plan.dense for name in wrong):
                break  # the dense rows are wrong too: no plan can help
            plan = self._learn(batch, dense=plan.dense | wrong)
        remedy = "Replace the layer by one that treats records alike in any batch, or freeze the parameter"
        raise CoverageError(
            [RefusedParameter(n, n.rpartition(".")[0], why, remedy) for n, why in wrong.items()]
        )

    def _where_rows_do_not_vanish(self, plan: CapturePlan, batch: Any) -> dict[str, Tensor]:
        """Other parameters, if rows at the model's own hold rounding alone: a student that is its teacher."""
        if self.model in SHARDED:
            return {}
        usual = away_from_zero(self.model, self.loss, batch)
        with undisturbed(self.model):
            own, other = (self._by_plan(batch, params).row_norms().max() for params in (None, usual))
        dtype = "low" if plan.low_precision else str(next(iter(usual.values())).dtype)
        return usual if bool(own < ROWS_ROUND.get(dtype, ROWS_ROUND["low"]) * other) else {}

    def _wrong_rows(self, plan: CapturePlan, three: Any) -> dict[str, str]:
        """Parameters whose rows by plan are not those of single records, and why.

        A forward of one record rounds otherwise than that of several. Where a value is all but zero, a ReLU
        lets it pass in one of them only, and a large model has many values. So in float32 a row may be up to
        a tenth of its length away, if it is that of another batch: copies of the record alone, twice as
        many rows, and the record at another place. What follows other records, place or number is seen there.

        """
        leaves = trainable_parameters(self.model)
        with undisturbed(self.model):
            factors, _ = self._capture(plan, three, leaves, None, None)

        def single(place: int, visit: Callable[[str, Tensor], None]) -> None:
            self._row_alone(three, place, plan, visit)

        found = self._distances(factors, leaves, single)
        differences = {
            name: rows_differ(rows, leaves[name].dtype, plan.low_precision, sizes)
            for name, (rows, sizes) in found.items()
        }
        wrong = found_by_any(self.model, {name: why for name, why in differences.items() if why is not None})
        compared = {name: leaves[name] for name in wrong if leaves[name].dtype == torch.float32}
        if compared and not plan.low_precision:

            def copied(place: int, visit: Callable[[str, Tensor], None]) -> None:
                copies = take_records(three, torch.full((2 * LARGE,), place))
                with undisturbed(self.model):
                    rows, _ = self._row_among(copies, (place + 1) % LARGE, compared, None)
                for name, row in rows.items():
                    visit(name, row)

            for name, (rows, _) in self._distances(factors, compared, copied).items():
                first, sizes = found[name]
                is_near = bool((first[:, 0] <= KINKS * first[:, 1]).all())
                if is_near and len(rows) == LARGE and rows_differ(rows, torch.float32, sizes=sizes) is None:
                    del wrong[name]
            wrong = found_by_any(self.model, wrong)
        # Single records may draw other random numbers, which cannot be held constant, than those of a batch.
        return {} if wrong and self._follows_seed(three, plan) else wrong

    def _distances(
        self,
        factors: Mapping[str, Sequence[Factor]],
        names: Iterable[str],
        visit_row: Callable[[int, Callable[[str, Tensor], None]], None],
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """How far the rows of the first records lie from others, and what their rounding is relative to.

        A record at a time: of a large model, rows of three records take more memory than its training.

        Args:
            factors: give the rows.
            names: the parameters.
            visit_row: visit_row(place, visit) hands the other row of each parameter to visit(name, row).

        Returns:
            Of each parameter `distance_and_length` [n, 2] and sizes [n], n as often as it was visited.
        """
        compared: dict[str, list[Tensor]] = {name: [] for name in names}
        sizes: dict[str, list[Tensor]] = {name: [] for name in compared}
        for place in range(LARGE):
            terms: dict[str, Tensor | None] = {}

            def compare(
                name: str, row: Tensor, place: int = place, terms: dict[str, Tensor | None] = terms
            ) -> None:
                mine = [factor.rows(slice(place, place + 1)) for factor in factors.get(name, [])]
                by_plan = torch.zeros_like(row, dtype=accumulation_dtype(row.dtype))
                for factor in mine:
                    by_plan += factor.materialise()[0]
                terms[name] = FactoredGradients({name: mine}).magnitudes(name) if mine else None
                compared[name].append(distance_and_length(by_plan, row))

            visit_row(place, compare)
            if terms:
                # The norm of what was visited: what the rounding of the backward pass is relative to.
                whole = torch.stack([compared[name][-1][1] for name in terms]).norm()
                for name, size in terms.items():
                    sizes[name].append(whole if size is None else whole + size[0])
        return {
            name: (torch.stack(rows), torch.stack(sizes[name])) for name, rows in compared.items() if rows
        }

    def _follows_seed(self, three: Any, plan: CapturePlan) -> bool:
        """Whether a record by itself has another row under another seed, though numbers are held constant."""
        moved: dict[str, str] = {}
        for place in range(LARGE):
            rows: dict[str, Tensor] = {}

            def keep(name: str, row: Tensor, rows: dict[str, Tensor] = rows) -> None:
                rows[name] = row.clone()

            self._row_alone(three, place, plan, keep)

            def compare(name: str, again: Tensor, rows: dict[str, Tensor] = rows) -> None:
                # Kernels of a GPU may round in another order each time.
                compared = distance_and_length(again, rows.pop(name))[None]
                if rows_differ(compared, again.dtype, plan.low_precision) is not None:
                    moved[name] = ""

            self._row_alone(three, place, plan, compare, seed=1)
        return bool(found_by_any(self.model, moved))

    def _row_alone(
        self, batch: Any, place: int, plan: CapturePlan, visit: Callable[[str, Tensor], None], seed: int = 0
    ) -> None:
        """Hand the row of a record, by ordinary autograd under random numbers of this seed, to `visit`."""
        try:
            with undisturbed(self.model, seed):
                visit_rows(self.model, self.loss, take_records(batch, slice(place, place + 1)), visit)
        except RuntimeError as error:
            raise CoverageError(
                [
                    RefusedParameter(
                        name,
                        name.rpartition(".")[0],
                        f"the loss of a single record cannot be differentiated ({where_raised(error)})",
                        "Make loss(model, batch) work with one record and ordinary autograd",
                    )
                    for name in plan.dense or trainable_parameters(self.model)
                ]
            ) from cause_of(error)


def per_sample_gradients(
    model: nn.Module, loss: Loss, batch: Any, params: Mapping[str, Tensor] | None = None
) -> PerSampleGradients:
    """G of one batch: attaches without the comparison with single records, and captures.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> G = per_sample_gradients(model, lambda m, x: m(x).squeeze(1), torch.eye(3))
    >>> G.row_norms()
    tensor([1., 1., 1.])
    """
    if num_records(batch) == 0:
        return _no_rows(model, trainable_parameters(model))
    return GradientEngine(model, loss, batch, check=False)(batch, params)


def _mixed(proof: Proof) -> CrossRecordError:
    """The refusal of what mixes records, as far as it is known."""
    fault = proof.fault
    if fault is None or not fault.mixes:
        why = fault or (f"there is no trace, since {proof.untraced}" if proof.untraced else "")
        found = "changing one record changed the loss or gradient of another one" + f" ({why})" * bool(why)
        is_recurrent = fault is not None and "rnn" in fault.operation  # others may be innocent
        return CrossRecordError(found, operation="rnn" * is_recurrent)
    where = f" in {fault.where}" * bool(fault.where)
    path, kind = fault.module or (None, "")
    return CrossRecordError(f"{fault.what}{where} ({fault.operation})", path, kind, fault.operation)


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
