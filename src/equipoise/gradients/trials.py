"""What is found out of a model at its start: whether its records are kept apart, and its rows are its own.

Read from the trace, a proof says so for all values of the records (`provenance`). Without one, rows are
compared (`compare`). And what runs in a step is compared with what the user wrote: a replay with the model,
rows by rule with those among copies of a record, their sum with ordinary autograd's gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from equipoise._dtensor import local_part
from equipoise.gradients.capture.attributes import attributes_kept
from equipoise.gradients.capture.isolation import parameters_restored, undisturbed
from equipoise.gradients.capture.planner import LARGE, ROUNDS
from equipoise.gradients.capture.random_numbers import GlobalState, random_numbers_from
from equipoise.gradients.capture.recorder import PlanMismatch
from equipoise.gradients.capture.sharded import SHARDED, found_by_any
from equipoise.gradients.checks.errors import (
    CoverageError,
    CrossRecordError,
    ForwardWritesError,
    RefusedParameter,
)
from equipoise.gradients.compare import (
    FEW,
    LOSS_SEEDS,
    SEEDS,
    Independence,
    away_from_zero,
    compare,
    losses_moved,
    with_others,
)
from equipoise.gradients.engine_inputs import num_records, take_records, trainable_parameters
from equipoise.gradients.kinds import Fault, Public
from equipoise.gradients.numerics import length
from equipoise.gradients.operator import LossesOnly, PerSampleGradients
from equipoise.gradients.provenance import Proof, Trusted, inputs_read, not_by_record, prove, read
from equipoise.gradients.trace import Traced, why_untraced

if TYPE_CHECKING:
    from equipoise.gradients.engine import GradientEngine

#: How often a trace is taken, which costs as much as many steps; other forms of micro-batches, and models
#: that change in every step, run eagerly. A choice: more make such runs begin later, fewer prove less of
#: them.
MOST_TRACED = 8

TOO_MANY = (
    f"there are more than {MOST_TRACED} forms of batches and changes of the model (pad to a few lengths by "
    "equipoise.data.PadTo; a loss that takes the step gets it as loss(model, batch, step))"
)

#: Share of a row's length that rounding may move where it opens or closes a few of many ReLUs; of dense rows,
#: which are computed one by one; and the length of rows that hold nothing but rounding. Choices: smaller ones
#: refuse models with kinks for their rounding, larger ones overlook other rows that differ by less.
KINKS, SUMS_ROUND, NO_GRADIENT = 0.1, 5e-3, 1e-6

#: What a row may round by next to others, relative to the whole row. Choices: tighter ones refuse models for
#: their rounding, wider ones overlook a dependence on other records that is smaller.
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


class Trials:
    """What is known of a model, form of micro-batch by form.

    Args:
        engine: is asked for rows, losses and traces.
        trust: paths of modules in which records may be mixed.

    Attributes:
        excused: what mixes records in those, as far as it was met.
        rows_vanish: all rows that were tried, at the model's parameters, are zero or not finite.
        kept: buffers to which a forward writes what depends on no record.
        proofs: what was read, by form of micro-batch.
    """

    def __init__(self, engine: GradientEngine, trust: Sequence[str]) -> None:
        self._engine, self._model, self._trust = engine, engine.model, trust
        self.excused: tuple[Fault, ...] = ()
        self.rows_vanish = False
        self.kept: tuple[str, ...] = ()
        self._known: Independence | None = None
        self._compared_forms = 0  # while steps ran
        self._deceiving: list[str] = []
        self.proofs: dict[tuple, Proof] = {}

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
        if self._known is None or (self._engine.eager and self._known.word == "proved"):
            return Independence("unchecked", self._engine.eager)
        return self._known

    def _found(self, word: Literal["proved", "compared"], reason: str = "") -> None:
        if self._known is None or self._known.word == "proved":
            self._known = Independence(word, reason)

    def attach(self, batch: Any, *, starts: bool = False) -> Traced | None:
        """The trace of a form of micro-batch; None if it runs eagerly. What is not proved is compared.

        Args:
            batch: of the form.
            starts: compare whatever was compared before; else only what was checked before.

        Raises:
            CrossRecordError: in this form records are mixed.
        """
        proof = Proof(untraced=self._engine.eager or TOO_MANY)
        if not self._engine.eager and self._engine.traces < MOST_TRACED:
            self._engine.traces += 1
            proof = self.proof(batch)
        self.refuse_mixing(proof)
        traced, proof = self.replayable(batch, proof)
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

    def replayable(self, batch: Any, proof: Proof) -> tuple[Traced | None, Proof]:
        """The trace, if losses, norms and the sum of rows are the model's under the same random numbers.

        A forward that seeds a generator itself, or has one of its own, draws others when it is replayed.
        """
        if proof.untraced is not None:
            return None, proof
        traced = self._engine.compiled(batch) if self._engine.compiles else self._engine.line(batch)
        state = GlobalState(self._engine.device)

        def of(run: Callable[[], PerSampleGradients]) -> PerSampleGradients:
            with random_numbers_from(0, self._engine.device):
                return run()

        try:
            expected = of(lambda: self._engine.run_plan(batch, None))
            found = of(lambda: traced.gradients(*self._engine.values(None), batch)[0])
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
        if isinstance(expected, LossesOnly):
            return ""
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
        assert self._engine.latest is not None
        whole = rows.row_norms()
        is_rough = self._engine.latest.low_precision or whole.is_cuda  # which may multiply in TF32
        rounds, wrong = ROUNDS["low" if is_rough else str(whole.dtype)][1], {}
        totals = rows.weighted_sums(torch.ones_like(whole))
        for name in rows.names:  # one by one: of a large model all take much memory
            one, other, total = rows.select([name]), expected(name), local_part(totals.pop(name))
            # Where a parameter's gradient is zero but for rounding, the whole one says how much that is.
            least = rounds * (length(total) + whole.norm()) + NO_GRADIENT * len(whole) ** 0.5
            share = SUMS_ROUND if name in self._engine.latest.dense and not is_rough else KINKS
            distance = length(total if other is None else total - other)
            if not distance <= share * one.row_norms().norm() + least:  # NaN is not
                wrong[name] = ""
        return [*found_by_any(self._model, wrong)]

    def refuse_mixing(self, proof: Proof) -> None:
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
        reason, others = str(proof), away_from_zero(self._model, self._engine.loss, batch)

        def losses(batch: Any, params: Mapping[str, Tensor] | None, upstream: Tensor | None) -> LossesOnly:
            return LossesOnly(self._engine.losses(batch, params), {})

        try:
            by_rows = bool(self._engine.plan_for(batch).ruled) and not self._engine.forward_only
            if by_rows:
                try:
                    draws = compare(self._model, self._engine.run_plan, self._moved, batch, others)
                except PlanMismatch:  # such records are computed by themselves
                    by_rows = False
                    reason += "; losses were compared, and no gradients, since operations follow values"
            if not by_rows:
                draws = compare(self._model, losses, self._moved, batch, others, not_usual=())
            few = take_records(batch, slice(FEW))
            if draws and num_records(few) > 1:
                rare = range(SEEDS, LOSS_SEEDS)
                compare(self._model, losses, self._moved, few, others, not_usual=(), seeds=rare)
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
        read = inputs_read(self._engine.line(batch).rows)
        with suppress(Exception), attributes_kept(self._model):  # it has no trace
            self._model.eval()
            read |= inputs_read(self._engine.line_of_losses(batch))
        return [name for name in writes if name in read]

    def check(self, batch: Any) -> Traced | None:
        """As `GradientEngine.check`; gives what is replayed for such batches, None if they run eagerly."""
        form = self._engine.form(batch)
        with parameters_restored(self._model):
            proof = self.proof(batch)
            self.refuse_mixing(proof)
            is_proved = proof.outcome == "proved" and not self._engine.eager
            few = take_records(batch, slice(FEW))
            if not self._trust and not self._engine.forward_only and self._settle(few, is_proved):
                self._engine.trace_anew()
                if not is_proved and self.proof(batch).untraced is None:  # dense rows hide what mixes
                    self.proofs[form] = proof
            traced = self.attach(batch, starts=True)
        if not self._engine.forward_only:  # without a copy of the parameters beside gradients
            self._refuse_other_function(batch, is_proved)
        self.kept = self._public_writes(batch, traced)
        return traced

    def _public_writes(self, batch: Any, traced: Traced | None) -> tuple[str, ...]:
        """Buffers that a forward writes as it would for other records: proved, and seen once.

        An operation whose schema hides that it writes would deceive a proof, and what it wrote be published.
        """
        names = self.proof(batch).public_writes
        if traced is None or not names:
            return ()
        found = []
        for records in (batch, next(next(with_others(batch)))[0]):
            with random_numbers_from(0, self._engine.device):
                found.append(traced.gradients(*self._engine.values(None), records)[1])
        one, other = found
        self._deceiving = [name for name in names if not torch.equal(one[name], other[name])]
        own = dict(self._model.named_buffers())
        fits = [n for n in names if (one[n].shape, one[n].dtype) == (own[n].shape, own[n].dtype)]
        return tuple(name for name in fits if name not in self._deceiving)

    def _refuse_other_function(self, batch: Any, is_proved: bool) -> None:
        """Compare the sum of rows with ordinary autograd's gradient of the same records.

        They differ if a hook or a backward uses a statistic of the batch, and if a hook changes the gradient
        of a parameter. Dense rows are right all the same, of each record by itself, but are not what the user
        wrote: a warning.

        Raises:
            CoverageError: others differ.
        """
        if hooked := [n for n, p in self._model.named_parameters() if p._post_accumulate_grad_hooks]:
            warnings.warn(
                f"hooks of the parameters {hooked[:3]} are not called (register_post_accumulate_grad_hook): "
                "gradients of records are not accumulated in a parameter. To change or read the released "
                "gradient, use optimizer.register_step_pre_hook",
                stacklevel=2,
            )
        try:
            rows = self._rows(batch)
        except PlanMismatch:
            return  # such records are computed by themselves
        norms = rows.row_norms()
        self.rows_vanish = not bool((norms.isfinite() & (norms > 0)).any())
        if not (finite := norms.isfinite()).all():  # the others have weight zero
            if finite.any():
                self._refuse_other_function(take_records(batch, finite.nonzero().squeeze(1).cpu()), is_proved)
            return
        with undisturbed(self._model):
            _, expected = self._engine.gradient(batch)
        assert self._engine.latest is not None
        (reason, remedy), dense = ANOTHER_FUNCTION, self._engine.latest.dense
        wrong = self._other_sums(rows, lambda name: expected.pop(name, None))
        if dense.keys() & wrong and self._follows_seed(batch):  # a record by itself draws other numbers
            wrong = [name for name in wrong if name not in dense]
        if not wrong:
            return
        if any(name not in dense or (dense[name] == OTHER_ROWS and not is_proved) for name in wrong):
            raise CoverageError([RefusedParameter(n, reason, remedy) for n in wrong])
        warnings.warn(
            f"for the parameters {wrong[:3]} {reason}; that sum is trained, which is another function than "
            f"the one that you wrote. {remedy}.",
            stacklevel=2,
        )

    def _rows(self, batch: Any, seed: int = 0) -> PerSampleGradients:
        """Rows by plan, under random numbers that are held constant as far as they can be."""
        with undisturbed(self._model, seed):
            return self._engine.run_plan(batch, None)

    def _follows_seed(self, batch: Any) -> bool:
        """Whether random numbers are drawn that cannot be held constant."""
        try:
            return bool(self._moved(self._rows(batch), self._rows(batch, 1)))
        except PlanMismatch:  # a branch by a random number
            return True

    def proof(self, batch: Any) -> Proof:
        """Whether micro-batches of this form keep records apart, read from their trace: for all values.

        Args:
            batch: as a call takes it.
        """
        form = self._engine.form(batch)
        if form not in self.proofs:
            self.proofs[form] = self._prove(batch)
        return self.proofs[form]

    def _prove(self, batch: Any) -> Proof:
        if self._model in SHARDED:
            return Proof(untraced="processes hold parts of the model")
        if self._engine.forward_only:
            return self._proof_of_losses(batch)
        try:
            found = prove(self._engine.line(batch))
            if not self._engine.plan_for(batch).ruled:  # rows of single records hide what the model mixes
                of_losses = self._proof_of_losses(batch)
                if of_losses.outcome != "proved":
                    return of_losses
            # Once more with the lines of the source, if one has to be named.
            if found.fault is None:
                return found
            traced = self._engine.traced(batch, self._model)
            return prove(traced, Trusted(self._trust) if self._trust else None)
        except ForwardWritesError:
            raise
        except Exception as error:  # whatever it is, there is no trace
            of_losses = self._proof_of_losses(batch)
            # What ends a forward says more than what came of it in a backward.
            is_more = of_losses.outcome in ("mixes", "no trace")
            return of_losses if is_more else Proof(untraced=why_untraced(error))

    def _proof_of_losses(self, batch: Any) -> Proof:
        """The same of a forward alone."""
        trusted = Trusted(self._trust)
        try:
            line = self._engine.line_of_losses(batch)
            held = [name for name in line.inputs if not name.startswith("record:")]
            kinds = read(line, dict.fromkeys(held, Public()), num_records(batch), trusted)
        except Exception as error:  # whatever it is, there is no trace
            return Proof(untraced=why_untraced(error))
        return Proof(not_by_record(kinds["losses"], "the losses"), excused=tuple(trusted.excused))

    def _settle(self, few: Any, is_proved: bool) -> bool:
        """Plan so that records have their own rows, the same among one copy more of themselves.

        Where rows by rule are others, since a forward sorts by value, say, they become dense. Without a
        proof, and if the plan is made on them, each record by itself has to run what is planned.

        Returns:
            Whether another plan was made.
        """
        before = self._engine.plan_for(few)
        for place in range(0 if is_proved or self._engine.is_planned_publicly else num_records(few)):
            with undisturbed(self._model):
                self._engine.gradients(take_records(few, torch.full((LARGE,), place)), None)
        wrong: set[str] = set()
        with suppress(PlanMismatch):  # each runs alone
            with undisturbed(self._model):
                few, rows = self._engine.served(few)
            count = rows.num_records
            for place in range(min(LARGE, count)):
                copies = take_records(few, torch.full((count + 1,), place))
                one, own = self._rows(copies), rows.rows(slice(place, place + 1))
                moved = self._moved(own, one.rows(slice(place + 1, place + 2)))
                # Random numbers that cannot be held constant differ from place to place, too.
                wrong.update([] if moved and self._follows_seed(copies) else moved)
        plan = self._engine.plan_for(few)
        if wrong := {n for n in plan.ruled if n in wrong or "the losses" in wrong}:
            self._engine.learn(few, dense=plan.dense | dict.fromkeys(wrong, OTHER_ROWS))
        is_new = self._engine.plan_for(few) is not before
        self._engine.is_planned_publicly &= not is_new
        return is_new

    def _moved(self, before: PerSampleGradients, after: PerSampleGradients) -> list[str]:
        """Parameters where some row, of the same records, moved by more than rounding; or the losses."""
        assert self._engine.latest is not None
        assert before.losses is not None
        assert after.losses is not None
        low_precision = self._engine.latest.low_precision
        # A model of several types rounds as the coarsest.
        types = {parameter.dtype for parameter in trainable_parameters(self._model).values()}
        coarsest = min(types, key=lambda dtype: torch.finfo(dtype).bits)
        left, right = before.losses, after.losses
        if coarsest == torch.float32:
            left, right = left.to(coarsest), right.to(coarsest)
        if losses_moved(left, right, low_precision=low_precision):
            return ["the losses"]
        if isinstance(before, LossesOnly):
            return []
        finite = before.row_norms().isfinite()
        if not finite.all():
            before, after = before.rows(finite), after.rows(finite)
        whole = before.row_norms()
        tolerance = ROWS_ROUND.get("low" if low_precision else str(coarsest), ROWS_ROUND["low"])
        distances = (after - before).row_norms([(name,) for name in before.names])
        # The guard of a norm adds a little to the difference of two rows of zeros, more for large inputs.
        least = 1e-6 * tolerance * whole.norm() + 1e-12
        moved = (~(distances <= tolerance * whole[:, None] + least)).any(0).tolist()  # to NaN, too
        names = [name for name, has_moved in zip(before.names, moved, strict=True) if has_moved]
        return [*found_by_any(self._model, dict.fromkeys(names, ""))]


def _mixed(proof: Proof) -> CrossRecordError:
    """The refusal of what mixes records."""
    fault = proof.fault
    assert fault is not None
    where = f" in {fault.where}" * bool(fault.where)
    path, kind = fault.module or (None, "")
    return CrossRecordError(f"{fault.what}{where} ({fault.operation})", path, kind, fault.operation)
