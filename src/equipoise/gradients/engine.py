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
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from equipoise.gradients.capture.planner import LARGE, ROUNDS, learn_plan
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
from equipoise.gradients.checks.oracle import dense_rows
from equipoise.gradients.compare import (
    FEW,
    LOSS_SEEDS,
    SEEDS,
    Independence,
    away_from_zero,
    compare,
    losses_moved,
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
    record_leaves,
    repeat_to,
    replace_leaves,
    signature,
    take_records,
    trainable_parameters,
)
from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.numerics import accumulation_dtype, length
from equipoise.gradients.operator import FactoredGradients, LossesOnly, PerSampleGradients
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

#: Share of a row's length that rounding may move where it opens or closes a few of many ReLUs; of dense rows,
#: which are computed one by one; and the length of rows that hold nothing but rounding.
KINKS, SUMS_ROUND, NO_GRADIENT = 0.1, 5e-3, 1e-6

#: What a row may round by next to others, relative to the whole row.
ROWS_ROUND = {"torch.float64": 1e-9, "torch.float32": 1e-4, "low": 5e-2}

#: Why a parameter is dense that a rule serves.
OTHER_ROWS = "its rows by rule are not those of the records by themselves"

ANOTHER_FUNCTION = (
    "ordinary autograd's gradient of a batch is not the sum of those of its records",
    "A hook or a backward of your own has to treat each record by itself, and a loss must not follow a "
    "record's place or the number of records. To change a parameter's whole gradient, do so to the released "
    "one (optimizer.register_step_pre_hook)",
)
"""Reason and remedy if records train another function than their batch."""


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
        excused: what mixes records in those, as far as it was met.
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

    #: Whether the example batch's rows are zero or not finite, at the model's parameters.
    rows_vanish = False

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
        publicly: bool = False,
    ) -> None:
        self.model, self.loss, self._trust = model, loss, trust
        self.excused: tuple[Fault, ...] = ()
        self._plans: dict[tuple, CapturePlan] = {}
        self._latest: CapturePlan | None = None
        self._lines: dict[tuple, Traced] = {}
        self._proofs: dict[tuple, Proof] = {}
        self._left: dict[str, Tensor] = {}
        self._kept: tuple[str, ...] = ()
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
                self.is_planned_publicly = publicly and self.plan_publicly(example_batch)
                if not self.is_planned_publicly:
                    self._learn(example_batch)
            self._buffers.find_changing(lambda: self._trial(example_batch))
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
            return self._gradients(batch, params)

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
        traced = None if self._eager or are_constant() else self._traced_of(batch, params)
        if traced is None:
            with self._watched(params, numbers):
                return self._by_plan(batch, params)
        # To set all generators takes as long as a small network.
        with self._drawn(numbers if traced.rows.draws else None):
            found, written = traced.gradients(*self._values(params), batch)
        if written:
            self._left = {name: written[name] for name in self._kept if name in written}
        return found

    @contextmanager
    def _watched(self, params: Mapping[str, Tensor] | None, numbers: Numbers | None = None) -> Iterator[None]:
        watched = parameters_watched(self._buffers.modules, params)
        with watched, self._buffers.kept(), self._drawn(numbers):
            yield

    def _drawn(self, numbers: Numbers | None) -> AbstractContextManager[None]:
        return nullcontext() if numbers is None else random_numbers_from(numbers(), self._device)

    def trace_anew(self) -> None:
        """Forget what was traced: what model and loss hold has changed, and a trace took it for constant."""
        self._lines.clear()
        self._proofs.clear()
        self._traced.clear()

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

    def _traced_of(self, batch: Any, params: Mapping[str, Tensor] | None) -> Traced | None:
        """What is replayed for batches of this form, traced at the first of them; None if it runs eagerly."""
        form = self._form(batch)
        if form not in self._traced:
            with self._watched(params):
                self._traced[form] = self._attach(batch)
        return self._traced[form]

    def _attach(self, batch: Any, *, starts: bool = False) -> Traced | None:
        """The trace of a form of micro-batch; None if it runs eagerly. What is not proved is compared.

        Args:
            batch: of the form.
            starts: compare whatever was compared before; else only what was checked before.

        Raises:
            CrossRecordError: in this form records are mixed.
        """
        proof = Proof(untraced=self._eager or TOO_MANY)
        if not self._eager and self.traces < MOST_TRACED:
            self.traces += 1
            proof = self.proof(batch)
        self._refuse_mixing(proof)
        traced, proof = self._replayable(batch, proof)
        if proof.outcome == "proved":
            if starts:
                self._found("proved")
        elif self.excused:
            pass  # rows move with the records next to them
        elif starts or (self._known is not None and self._compared_forms < MOST_TRACED):
            self._compared_forms += 1
            self._compare_with_others(batch, proof)
        elif self._known is not None:  # else nobody asked for `check`
            self._known = Independence("unchecked", TOO_MANY)
        return traced

    def _replayable(self, batch: Any, proof: Proof) -> tuple[Traced | None, Proof]:
        """The trace, if losses, norms and the sum of rows are the model's under the same random numbers.

        A forward that seeds a generator itself, or has one of its own, draws others when it is replayed.
        """
        if proof.untraced is not None:
            return None, proof
        traced = self._compiled(batch) if self.compiles else self._line(batch)
        state = GlobalState(self._device)

        def of(run: Callable[[], PerSampleGradients]) -> PerSampleGradients:
            with random_numbers_from(0, self._device), self._buffers.kept():
                return run()

        try:
            expected = of(lambda: self._by_plan(batch, None))
            found = of(lambda: traced.gradients(*self._values(None), batch)[0])
            reason = self._other_replay(found, expected)
        except RuntimeError:  # its text may hold values of records, and a statement has the reason
            reason = "the model fails on records that were tried"
        finally:
            state.restore()
        return (None, Proof(untraced=reason)) if reason else (traced, proof)

    def _other_replay(self, found: PerSampleGradients, expected: PerSampleGradients) -> str:
        """How a replay differs from the model; "" if it does not."""
        assert found.losses is not None
        assert expected.losses is not None
        if not torch.allclose(found.losses, expected.losses, rtol=1e-3, atol=1e-6, equal_nan=True):
            return "it gives other losses than the model, as if that seeded a generator itself"
        norms = expected.row_norms()
        if not (finite := norms.isfinite()).all():
            found, expected, norms = found.rows(finite), expected.rows(finite), norms[finite]
        ones = torch.ones_like(norms)
        # Gradients of a student at its teacher are zero but for rounding.
        same = bool((found.row_norms() - norms).norm() <= 1e-2 * norms.norm() + NO_GRADIENT)  # NaN is not
        if same and not self._other_sums(found, lambda n: expected.select([n]).weighted_sums(ones)[n]):
            return ""
        return "it gives other gradients than the model"

    def _other_sums(self, rows: PerSampleGradients, expected: Callable[[str], Tensor | None]) -> list[str]:
        """Parameters whose rows do not add up to what is expected of them (None: zeros)."""
        assert self._latest is not None
        whole = rows.row_norms()
        is_rough = self._latest.low_precision or whole.is_cuda  # which may multiply in TF32
        rounds, wrong = ROUNDS["low" if is_rough else str(whole.dtype)][1], {}
        totals = rows.weighted_sums(torch.ones_like(whole))
        for name in rows.names:  # one by one: of a large model all take much memory
            one, other, total = rows.select([name]), expected(name), local_part(totals.pop(name))
            # Where a parameter's gradient is zero but for rounding, the whole one says how much that is.
            least = rounds * (length(total) + whole.norm()) + NO_GRADIENT * len(whole) ** 0.5
            share = SUMS_ROUND if name in self._latest.dense and not is_rough else KINKS
            distance = length(total if other is None else total - other)
            if not distance <= share * one.row_norms().norm() + least:  # NaN is not
                wrong[name] = ""
        return [*found_by_any(self.model, wrong)]

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
        reason, others = str(proof), away_from_zero(self.model, self.loss, batch)

        def losses(batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None) -> LossesOnly:
            return LossesOnly(self._losses(batch, params), {})

        try:
            by_rows = bool(self._plan_for(batch).ruled) and not self.forward_only
            if by_rows:
                try:
                    draws = compare(self.model, self._by_plan, self._moved, batch, others)
                except PlanMismatch:  # such records are computed by themselves
                    by_rows = False
                    reason += "; losses were compared, and no gradients, since operations follow values"
            if not by_rows:
                draws = compare(self.model, losses, self._moved, batch, others, not_usual=())
            few = take_records(batch, slice(FEW))
            if draws and num_records(few) > 1:
                rare = range(SEEDS, LOSS_SEEDS)
                compare(self.model, losses, self._moved, few, others, not_usual=(), seeds=rare)
        except CrossRecordError as error:
            raise CrossRecordError(f"{error.found}; {reason}") from None
        self._found("compared", reason)

    def _losses(self, batch: Any, params: Mapping[str, Tensor] | None) -> Tensor:
        return evaluate_loss(self.model, self.loss, batch, params).detach()

    def followed_buffers(self, batch: Any) -> list[str]:
        """Buffers to which a forward writes what comes of records, if it reads them, or does in evaluation.

        Such a buffer can neither hold private numbers nor stay as it was. None of a model without a trace.
        """
        writes = self.proof(batch).private_writes
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
                if (value.shape, value.dtype) == (own[name].shape, own[name].dtype):
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
        form = self._form(batch)
        with parameters_restored(self.model), self._buffers.kept():
            proof = self.proof(batch)
            self._refuse_mixing(proof)
            is_proved = proof.outcome == "proved" and not self._eager
            few = take_records(batch, slice(FEW))
            if not self._trust and not self.forward_only and self._settle(few, is_proved):
                self.trace_anew()
                if not is_proved and self.proof(batch).untraced is None:  # dense rows hide what mixes
                    self._proofs[form] = proof
            self._traced[form] = self._attach(batch, starts=True)
        if self.forward_only:  # a loss that takes derivatives itself is refused
            with self._buffers.kept(), undisturbed(self.model), suppress(PlanMismatch):
                self._by_plan(batch, None)
        else:  # without a copy of the parameters beside gradients
            with self._buffers.kept():
                self._refuse_other_function(batch, is_proved)
        # Without a trace nothing is written that a step could keep.
        self._kept = () if self._traced[form] is None else self.proof(batch).public_writes
        return self.independence

    def _refuse_other_function(self, batch: Any, is_proved: bool) -> None:
        """Compare the sum of rows with ordinary autograd's gradient of the same records.

        They differ if a hook or a backward uses a statistic of the batch, and if a hook changes the gradient
        of a parameter. Dense rows are right all the same, of each record by itself, but are not what the user
        wrote: a warning.

        Raises:
            CoverageError: others differ.
        """
        if hooked := [n for n, p in self.model.named_parameters() if p._post_accumulate_grad_hooks]:
            warnings.warn(
                f"hooks of the parameters {hooked[:3]} are not called (register_post_accumulate_grad_hook): "
                "gradients of records are not accumulated in a parameter. To change or read the released "
                "gradient, use optimizer.register_step_pre_hook",
                stacklevel=2,
            )
        try:
            with undisturbed(self.model):
                rows = self._by_plan(batch, None)
        except PlanMismatch:
            return  # such records are computed by themselves
        norms = rows.row_norms()
        self.rows_vanish = not bool((norms.isfinite() & (norms > 0)).any())
        if not (finite := norms.isfinite()).all():  # the others have weight zero
            if finite.any():
                self._refuse_other_function(take_records(batch, finite.nonzero().squeeze(1).cpu()), is_proved)
            return
        with undisturbed(self.model), backward_included():
            start = GlobalState(self._device)
            expected, _ = self._row_among(batch, slice(None), *self._leaves(None))
            draws = bool(start.moved())
        assert self._latest is not None
        (reason, remedy), dense = ANOTHER_FUNCTION, self._latest.dense
        wrong = self._other_sums(rows, lambda name: expected.pop(name, None))
        if draws:  # a record by itself draws other numbers
            wrong = [name for name in wrong if name not in dense]
        if not wrong:
            return
        if any(name not in dense or (dense[name] == OTHER_ROWS and not is_proved) for name in wrong):
            raise CoverageError([RefusedParameter(n, n.rpartition(".")[0], reason, remedy) for n in wrong])
        warnings.warn(
            f"for the parameters {wrong[:3]} {reason}; that sum is trained, which is another function than "
            f"the one that you wrote. {remedy}.",
            stacklevel=2,
        )

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
        if self.forward_only:
            return self._proof_of_losses(batch)
        try:
            if not self._plan_for(batch).ruled:  # rows of each record by itself hide what the model mixes
                of_losses = self._proof_of_losses(batch)
                if of_losses.outcome == "mixes":
                    return of_losses
            found = prove(self._line(batch))
            # Once more with the lines of the source, if one has to be named.
            if found.fault is None:
                return found
            return prove(self.traced(batch, self.model), Trusted(self._trust) if self._trust else None)
        except ForwardWritesError:
            raise
        except Exception as error:  # whatever it is, there is no trace
            of_losses = self._proof_of_losses(batch)
            # What ends a forward says more than what came of it in a backward.
            is_more = of_losses.outcome in ("mixes", "no trace")
            return of_losses if is_more else Proof(untraced=why_untraced(error))

    def _line_of_losses(self, batch: Any) -> Line:
        """What a forward alone computes, with the lines of the source."""
        held: dict[str, Tensor] = {name: p.detach() for name, p in self.model.named_parameters()}
        held |= dict(self.model.named_buffers())
        records = {f"record:{number}": leaf for number, leaf in enumerate(record_leaves(batch))}

        def losses(given: dict[str, Tensor]) -> dict[str, Tensor]:
            leaves = [given.pop(name) for name in records]
            own = {name: value.clone() for name, value in given.items()}  # a forward may write to them
            return {"losses": evaluate_loss(self.model, self.loss, replace_leaves(batch, leaves), own)}

        with self._read_by_trace():
            return line_of(losses, held | records, self.model)[0]

    @contextmanager
    def _read_by_trace(self) -> Iterator[None]:
        """Inside, a trace runs the model, which leaves nothing behind.

        Raises:
            RuntimeError: it asks Python or NumPy for random numbers.
        """
        state = GlobalState()
        try:
            with self._buffers.kept():  # a forward may put others there
                yield
            if moved := {"NumPy", "Python"}.intersection(state.moved()):
                raise RuntimeError(f"the model asks {' and '.join(sorted(moved))} for random numbers")
        finally:
            state.restore()

    def _proof_of_losses(self, batch: Any) -> Proof:
        """The same of a forward alone."""
        trusted = Trusted(self._trust)
        try:
            line = self._line_of_losses(batch)
            held = [name for name in line.inputs if not name.startswith("record:")]
            kinds = read(line, dict.fromkeys(held, Public()), num_records(batch), trusted)
        except Exception as error:  # whatever it is, there is no trace
            return Proof(untraced=why_untraced(error))
        return Proof(not_by_record(kinds["losses"], "the losses"), excused=tuple(trusted.excused))

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

        with self._read_by_trace():
            traced = trace(compute, own | frozen, buffers, batch, sources)
        if plan.dense and traced.rows.draws:  # another forward draws them again
            raise RuntimeError("the model draws random numbers, and some rows are dense")
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

    def plan_publicly(self, example: Any) -> bool:
        """Plan on public records: a plan that followed private ones would tell of them.

        Args:
            example: private records, of which the plan has to serve one; others run alone.

        Returns:
            Whether the model takes such records and runs alike on one of these.
        """
        before, generator = (dict(self._plans), self._latest), torch.Generator().manual_seed(0)

        def numbers(leaf: Tensor) -> Tensor:
            return torch.rand(leaf.shape, generator=generator).to(leaf) if leaf.is_floating_point() else leaf

        def bits(leaf: Tensor) -> Tensor:
            drawn = torch.randint(2, leaf.shape, generator=generator)
            return leaf if leaf.is_floating_point() else drawn.to(leaf)

        zeros = fillers(example, LARGE)
        # Gradients of zeros, and behind a mask of zeros, vanish: nothing tells records from positions, or
        # what a hook makes of them. Some models take only zeros.
        for tried in (map_records(bits, map_records(numbers, zeros)), map_records(numbers, zeros), zeros):
            with suppress(Exception), undisturbed(self.model):  # whatever a model raises
                self._learn(tried)
                self._by_plan(zeros, None)  # which fill up forwards, and may take other branches
                self._served(example)
                return True
            self._plans, self._latest = dict(before[0]), before[1]
        return False

    def _served(self, records: Any) -> tuple[Any, PerSampleGradients]:
        """These, or else copies of one of them that runs what is planned, and the rows.

        Raises:
            PlanMismatch: there is none.
        """
        with suppress(PlanMismatch):
            return records, self._by_plan(records, None)
        for place in range(num_records(records)):
            copies = take_records(records, torch.full((LARGE,), place))
            with suppress(PlanMismatch):
                return copies, self._by_plan(copies, None)
        raise PlanMismatch("none of the records runs what is planned")

    def _plan_for(self, batch: Any) -> CapturePlan:
        """The plan of this form or, of another length, the latest or what fillers in its shape run."""
        form = signature(batch)
        if form not in self._plans:
            assert self._latest is not None
            self._plans[form] = self._latest
            if self.model not in SHARDED:  # the others, with other shapes, would not plan with this process
                zeros = fillers(batch, LARGE)
                with suppress(Exception), undisturbed(self.model):  # whatever a model raises
                    try:
                        self._by_plan(zeros, None)
                    except PlanMismatch:
                        self._learn(zeros)
        return self._plans[form]

    def planned_losses(self, batch: Any, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Per-record losses by a forward that runs what was planned; no backward can leave the plan.

        Args:
            batch, params: as in a call, one record at least.

        Raises:
            PlanMismatch: the model runs other operations for some of these records.
        """
        plan = self._plan_for(batch)
        leaves, substitute = self._leaves(params)
        capture, losses = self._run(plan, batch, leaves, substitute, self.forward_only)
        capture.let_go()
        for kept in capture.inputs:  # no hook will run
            kept.clear()
        if plan.ruled:
            capture.check_followed()
        return losses.detach()

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
        with self._watched(params, numbers), backward_included():
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

    def serves(self, batch: Any) -> bool:
        """Whether these records run what was planned, with finite losses and rows."""
        with suppress(Exception), undisturbed(self.model), self._buffers.kept():
            found = self._by_plan(batch, None)
            assert found.losses is not None
            numbers = found.losses if self.forward_only else found.losses + found.row_norms()
            return bool(numbers.isfinite().all())
        return False

    def _gradients(self, batch: Any, params: Mapping[str, Tensor] | None) -> PerSampleGradients:
        """As by plan; parameters whose operations follow values become dense."""
        is_new, state = signature(batch) not in self._plans, GlobalState(self._device)
        for attempt in range(MISMATCHES):
            try:
                return self._by_plan(batch, params)
            except PlanMismatch as mismatch:
                state.restore()  # the same random numbers, however often it is tried
                dense = dict(self._plan_for(batch).dense)
                if not is_new or attempt:
                    names = mismatch.names if attempt < MISMATCHES - 2 else ()
                    of_all = trainable_parameters(self.model)
                    dense |= dict.fromkeys(names or of_all, f"its use depends on values ({mismatch})")
                self._learn(batch, params, dense)
        raise AssertionError("what is dense altogether has no plan to differ from")

    def _settle(self, few: Any, is_proved: bool) -> bool:
        """Plan so that records have their own rows, the same among one copy more of themselves.

        Where rows by rule are others, since a forward sorts by value, say, they become dense. Without a
        proof, and if the plan is made on them, each record by itself has to run what is planned.

        Returns:
            Whether another plan was made.
        """
        before = self._plan_for(few)
        for place in range(0 if is_proved or self.is_planned_publicly else num_records(few)):
            with undisturbed(self.model):
                self._gradients(take_records(few, torch.full((LARGE,), place)), None)
        wrong: set[str] = set()
        with suppress(PlanMismatch), undisturbed(self.model):  # each runs alone
            few, rows = self._served(few)
            count = rows.num_records
            for place in range(min(LARGE, count)):
                with undisturbed(self.model):
                    start = GlobalState(self._device)
                    among = self._by_plan(take_records(few, torch.full((count + 1,), place)), None)
                    if not start.moved():  # a record that draws gets other numbers at another place
                        own = rows.rows(slice(place, place + 1))
                        wrong.update(self._moved(own, among.rows(slice(place + 1, place + 2))))
        plan = self._plan_for(few)
        if wrong := {n for n in plan.ruled if n in wrong or "the losses" in wrong}:
            self._learn(few, dense=plan.dense | dict.fromkeys(wrong, OTHER_ROWS))
        is_new = self._plan_for(few) is not before
        self.is_planned_publicly &= not is_new
        return is_new

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
        replaced = {name: value.detach().requires_grad_(name in own) for name, value in given.items()}
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

    def _learn(
        self, batch: Any, params: Mapping[str, Tensor] | None = None, dense: Mapping[str, str] | None = None
    ) -> CapturePlan:
        leaves, substitute = self._leaves(params)
        # Around the backward passes too: a checkpoint runs its forward once more there.
        with undisturbed(self.model), backward_included():
            plan = learn_plan(self.model, self.loss, batch, leaves, substitute, dense)
        self._plans[signature(batch)] = self._latest = plan
        return plan

    def _moved(self, before: PerSampleGradients, after: PerSampleGradients) -> list[str]:
        """Parameters where some row, of the same records, moved by more than rounding; or the losses."""
        assert self._latest is not None
        assert before.losses is not None
        assert after.losses is not None
        low_precision = self._latest.low_precision
        if losses_moved(before.losses, after.losses, record=-1, low_precision=low_precision):
            return ["the losses"]
        if isinstance(before, LossesOnly):
            return []
        finite = before.row_norms().isfinite()
        if not finite.all():
            before, after = before.rows(finite), after.rows(finite)
        whole = before.row_norms()
        tolerance = ROWS_ROUND["low" if low_precision else str(whole.dtype)]
        distances = (after - before).row_norms([(name,) for name in before.names])
        moved = (~(distances <= tolerance * whole[:, None])).any(0).tolist()  # to NaN, too
        names = [name for name, has_moved in zip(before.names, moved, strict=True) if has_moved]
        return [*found_by_any(self.model, dict.fromkeys(names, ""))]


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
    engine._refuse_mixing(engine.proof(batch))
    return engine(batch, params)


def _mixed(proof: Proof) -> CrossRecordError:
    """The refusal of what mixes records."""
    fault = proof.fault
    assert fault is not None
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
