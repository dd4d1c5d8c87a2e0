"""The ledger: the only door out of the private side.

`Ledger.release` adds the noise to bounded sums and books their event in one call. A release is refused
unless the plan holds it, its sums are within the planned bounds, and some of its number are left.

**Order of a release**: check everything, write the journal line, add the noise, hand out. So a crash leaves
either no line and nothing out, or a line, which is a charge. Its release can be given again, with the same
noise, to the same question.

**Draws have indices.** A ledger that resumes at a saved position opens its draws again. An index whose
journal line has the same digest (plan, draw, parameters, data, kernels) is replayed: same records, same
noise, no charge. Any other digest takes the next index that the journal does not hold, with fresh records and
fresh noise, and is charged.

**Noise follows the question.** A journal can be put back from an older copy, and nothing in it tells. So
where the key is private, records follow the key, the index and that digest. Noise follows these and what is
released (bounds and exact sums). Another question at an index that comes again gets noise, and records, that
are independent of the first one's. What the lost journal had booked is not charged then.

**Noise over steps.** A mechanism that uses earlier noise again gets that of the releases just before, which
is this ledger's `history`. It is private, goes into the checkpoint with `position`, and is given back on
resuming. Each noise has a key, and the digest of the keys is part of the question. So a ledger that was
opened without its history takes other noise, and does not mix the old one in another way. After a gap
between draws (a void draw, or a changed question) the noise starts afresh.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

import torch
from dp_accounting import DpEvent

from equipoise._host import Unread, host_waits, read
from equipoise._tree import map_leaves
from equipoise.privacy.accounting.calibrate import Budget
from equipoise.privacy.accounting.epsilon import EpsilonResult
from equipoise.privacy.bounds.bounded import Bounded
from equipoise.privacy.digests import Digestible, KeyedDigest, as_digest
from equipoise.privacy.errors import ChangedQueryError, JournalError, LedgerError, PlanUsedUpError
from equipoise.privacy.ledger.journal import (
    BookedDraw,
    CloseEntry,
    Entry,
    Journal,
    ReleaseEntry,
    RunEntry,
    VoidEntry,
)
from equipoise.privacy.ledger.journal_records import JournalRecords, events_of
from equipoise.privacy.ledger.run_record import BOUND_ROUNDING, RunRecord, check_budget, spent
from equipoise.privacy.mechanisms.base import (
    Mechanism,
    NoiseHistory,
    NoiseOverSteps,
    Sums,
    history_key,
)
from equipoise.privacy.noise.secrets import Secrets
from equipoise.privacy.noise.streams import ReleaseStreams
from equipoise.privacy.plan import Pattern, PrivacyPlan
from equipoise.privacy.private import Draw, Private, exact_values, unmark

Check = tuple[Unread[Any], Callable[[Any], None]]
"""A value, and what raises if nothing may leave with that value."""


def run_checks(checks: Sequence[Check], *also: Unread[Any], launches: dict[Any, Any] | None = None) -> None:
    """Run these in their order.

    Args:
        checks: see `Check`.
        also: what else the host needs here; it waits once for all.
        launches: as for `read`.
    """
    read(*map(itemgetter(0), checks), *also, launches=launches)
    for value, check in checks:
        check(value.value())


def check_sums(
    plan: PrivacyPlan, draw: Draw, sums: Mapping[str, Bounded]
) -> list[tuple[Mechanism, tuple[str, ...]]]:
    """Refuse sums that the plan does not hold, or holds with other bounds, another draw or other noise.

    Returns:
        Mechanisms, each with the names of the sums that share its noise.

    Raises:
        LedgerError: saying what does not fit.
    """
    if not sums:
        raise LedgerError("nothing to release: sums is empty; do not release a draw that no sum came from")
    for name, bounded in sums.items():
        _check_sum(plan, draw, name, bounded)
    # Noise that is correlated over sums hides each of them only if all leave in one event.
    groups = plan.groups(sums, draw.ordinal)
    for mechanism, members in groups:
        missing = sorted(set(members) - set(sums))
        if missing:
            raise LedgerError(
                f"the releases {list(members)} share noise, but {missing} are missing; release them together"
            )
        mechanism.check_sums({name: sums[name] for name in members})
    return groups


def pattern_for(
    patterns: Sequence[Pattern], used: Mapping[Pattern, int], draw: Draw, names: frozenset[str]
) -> Pattern:
    """The planned release that a release of these names counts as: the smallest of which some are left.

    Raises:
        LedgerError: the plan holds none that releases them together.
        PlanUsedUpError: it has none left.
    """
    fitting = [p for p in patterns if p.draw == draw.name and names <= p.names]
    if not fitting:
        raise LedgerError(f"the plan holds no draw {draw.name!r} that releases {sorted(names)} together")
    # Fewer names than a pattern holds cost less than was planned for it, so any pattern with them serves.
    left = [p for p in fitting if used.get(p, 0) < p.count and p.holds(draw.ordinal)]
    if not left:
        raise PlanUsedUpError(
            f"the plan's {sum(p.count for p in fitting)} releases of {sorted(names)} on draw {draw.name!r} "
            "are used up; plan more steps or scores (a step repeated after a resume with other numbers "
            "counts again)"
        )
    # The event counts epochs among the first `count` ordinals. A later one would lie in an epoch that is not
    # paid for.
    count = sum(p.count for p in patterns if p.draw == draw.name)
    if draw.ordinal >= count:
        raise PlanUsedUpError(
            f"draw {draw.name!r} was opened {draw.ordinal + 1} times, the plan holds {count}; open only "
            "draws that are released"
        )
    return left[0] if len(left) == 1 else min(left, key=lambda p: (len(p.names), sorted(p.names)))


def _check_sum(plan: PrivacyPlan, draw: Draw, name: str, bounded: Bounded) -> None:
    if not isinstance(bounded, Bounded):
        raise TypeError(
            f"sums[{name!r}] must be Bounded, got {type(bounded).__name__}; bound it: clip, indicator or "
            "capped"
        )
    try:
        release = plan[name]
    except ValueError as error:
        raise LedgerError(str(error)) from None
    if release.draw != draw.name:
        raise LedgerError(f"release {name!r} belongs to draw {release.draw!r}, not to {draw.name!r}")
    # A sum over another draw has other records: this draw's sampling would not account for them.
    if bounded.draw != draw:
        raise LedgerError(
            f"sums[{name!r}] comes from {bounded.draw}, not from the draw being released, {draw}"
        )
    made_for = release.mechanism.made_for
    if bounded.joint != made_for:
        raise LedgerError(
            f"sums[{name!r}] was made for the shared noise {bounded.joint}, but the plan releases it with "
            f"{made_for}; take the sums of clip_jointly for the mechanism of the plan, and no others"
        )
    if not (0 < bounded.add_remove < math.inf and bounded.add_remove <= release.max_bound * BOUND_ROUNDING):
        raise LedgerError(
            f"sums[{name!r}] has bound {bounded.add_remove:g}; the plan allows a positive bound of at most "
            f"{release.max_bound:g}: plan a larger max_bound"
        )
    # The noise is scaled to the add-or-remove bound. Under replace-one the plan accounts for this ratio.
    if bounded.replace > release.replace_ratio * bounded.add_remove * BOUND_ROUNDING:
        raise LedgerError(
            f"sums[{name!r}] has a replace-one bound {bounded.replace:g}, above "
            f"replace_ratio={release.replace_ratio} times its add-or-remove bound {bounded.add_remove:g}; "
            "plan the release with a larger replace_ratio"
        )


def check_finite(sums: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Check]:
    """For each sum whether it is finite, and what refuses it if it is not.

    Args:
        sums: {release name: exact values of the sum}.

    Raises:
        LedgerError: by the second ones, naming sum and tensor.
    """

    def refuse(name: str, raw: Mapping[str, torch.Tensor], is_finite: bool) -> None:
        # The totals tell in one pass without a copy; where one overflows, every entry is looked at.
        bad = [] if is_finite else [t for t, v in raw.items() if not bool(torch.isfinite(v).all())]
        if bad:
            raise LedgerError(
                f"sums[{name!r}][{bad[0]!r}] is not finite though bad records were left out: a bug in a "
                "factor or a kernel, or an overflow. Nothing was released"
            )

    found: list[Check] = []
    for name, values in sums.items():
        # Of DTensors the parts that are here.
        raw = {t: getattr(v, "_local_tensor", v) for t, v in values.items()}
        if raw:
            is_finite = Unread([*raw.values()], lambda found: bool(torch.isfinite(found).all()), _totals)
            found.append((is_finite, partial(refuse, name, raw)))
    return found


def _totals(*values: torch.Tensor) -> torch.Tensor:
    """A number for each that is not finite if one of its entries is not."""
    # Of many tensors a device takes norms at once; a processor takes sums much faster.
    on_device = host_waits(values[0].device)
    return torch.stack([*torch._foreach_norm(values, 1)] if on_device else [one.sum() for one in values])


def _check_shapes(sums: Mapping[str, Bounded], past: Sequence[NoiseOverSteps]) -> None:
    """Refuse sums of other shapes than earlier noise: stretched over them, it would hide too little.

    Raises:
        LedgerError: naming the sum.
    """
    for name, shapes in _shapes(sums).items():
        for left in past:
            if left.shapes[name] != shapes:
                raise LedgerError(
                    f"sums[{name!r}] has the tensors {shapes!r:.200}, the release before "
                    f"{left.shapes[name]!r:.200}. "
                    "Noise over steps goes on between releases of the same tensors: release one kind of sum "
                    "under the name, or take noise that is fresh in every step. Nothing was released"
                )


def _shapes(sums: Mapping[str, Bounded]) -> dict[str, dict[str, str]]:
    """Type and shape of each tensor, on which the numbers of its noise depend."""
    return {
        name: {key: f"{v.dtype}{list(v.shape)}" for key, v in bounded.value.items()}
        for name, bounded in sums.items()
    }


def _read_history(history: Mapping[str, Any]) -> NoiseHistory[NoiseOverSteps]:
    return NoiseHistory(
        {
            name: [
                (row["ordinal"], NoiseOverSteps(bytes.fromhex(row["key"]), row["shapes"], row["noise"]))
                for row in rows
                if "shapes" in row  # not of version 0.1, after which noise starts afresh
            ]
            for name, rows in unmark(history).items()
        }
    )


#: How streams follow from questions. Another version must not repeat what this one released: it charges anew.
_STREAMS = "noise of the question, of 64 bits of radius"


@dataclass
class _State:
    """Where a ledger stands; journal and checkpoint give it, and every draw and release moves it.

    Attributes:
        records: what the journal holds of this run and of others, as far as it was read.
        others: what the journal's other runs cost, by name.
        position: number of draws opened.
        history: noise that later releases use again.
        ordinals: how many draws of a name were opened.
        unreleased: draws opened here, and whether each may still be released.
    """

    records: JournalRecords
    others: dict[str, DpEvent]
    position: int
    history: NoiseHistory[NoiseOverSteps]
    ordinals: dict[str, int]
    unreleased: dict[Draw, bool]


@dataclass(frozen=True)
class BookedNoise:
    """The noise of a release that is booked.

    Attributes:
        streams: its random numbers.
        groups: mechanisms, each with the names of the sums that it noises.
        past: the earlier noise that each of them uses again.
    """

    streams: ReleaseStreams
    groups: Sequence[tuple[Mechanism, Sequence[str]]]
    past: Sequence[Sequence[NoiseOverSteps]]


class Ledger:
    """Releases of one run, noised and booked.

    Args:
        plan: what may be released.
        budget: (epsilon, delta) for everything in the journal, other runs included; None for no limit.
        journal: where releases are booked; None keeps them in memory.
        secrets: key of noise and sampling; None takes a fresh key of the operating system.
        position: number of draws opened when the checkpoint that is resumed was written.
        data_fingerprint: digest of the records; changed data are never answered with old noise.
        owners: of users, who owns which record, as `RunEntry.owners`; all runs in the journal have the same.
        kernels: digest of kernel choices or of anything else that the numbers depend on.
        keys: of each record, by which samplings assign it to draws (`Sampling.sample`); its position when
            None, which is right if no record is withdrawn and none moves while the run lasts.
        history: noise that later releases use again, as `ledger.history` gave it when the checkpoint was
            written.

    Raises:
        BudgetError: if the journal does not hold this run yet, and the plan with what it holds exceeds the
            budget.
        LedgerError: if the journal holds this run with another plan.

    Example:
        >>> from equipoise.privacy import Gaussian, Poisson, PrivateRows, Release, capped
        >>> plan = PrivacyPlan([Release("total", 5.0, Gaussian(1.0))], Poisson(10, 100, 3))
        >>> ledger = Ledger(plan)
        >>> draw = ledger.open("batch")
        >>> values = Private(torch.tensor([1.0, 9.0]), draw)
        >>> out = ledger.release(draw, {"total": capped(values, upper=5.0)})
        >>> out["total"]["sum"].shape
        torch.Size([])
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        budget: Budget | None = None,
        journal: Journal | None = None,
        secrets: Secrets | None = None,
        *,
        position: int = 0,
        data_fingerprint: str = "",
        owners: str = "",
        kernels: str = "",
        keys: torch.Tensor | None = None,
        history: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan, self._capacity = plan, plan.capacity
        self.budget = budget
        self.journal = Journal() if journal is None else journal
        self.secrets = Secrets() if secrets is None else secrets
        self.data_fingerprint, self.owners = data_fingerprint, owners
        self.kernels, self.keys = kernels, keys
        self.run = self.secrets.identity
        #: As `digest`, without a wait for a device.
        self.unread_digest = KeyedDigest(self.secrets.key, "what a step depends on")
        # Of exact raw sums: who holds the key alone can tell whether two are the same.
        self._digest_of_sums = KeyedDigest(self.secrets.key, "what a draw answers")
        self._launches: dict[Any, Any] = {}  # what a device launches before a release
        self._fingerprint = plan.fingerprint()
        self._state = self._state_at(position, history or {})

    def _state_at(self, position: int, history: Mapping[str, Any]) -> _State:
        """The state at a place of the run, which begins if the journal does not hold it yet."""
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ValueError(
                f"position must be a non-negative integer (the saved ledger.position), got {position!r}"
            )
        # One lock from reading to booking: two runs that begin at once must see each other, or both would
        # spend what is left of the budget.
        with self.journal.locked():
            records = JournalRecords.of(self.journal)
            others = self._events(records)
            mine = records.runs.get(self.run)
            if position > 0 and (mine is None or position - 1 not in mine.draws):
                raise JournalError(
                    f"the checkpoint has seen {position} draws of this run, and the journal does not hold "
                    "the last of them: it was cut or replaced, and charges are lost. Restore the journal "
                    "from a copy, or start a new run and count the old one as spent in full"
                )
            if mine is None:
                mine = self._begun(records, others)
        if mine.plan.fingerprint() != self._fingerprint:
            raise LedgerError(
                "the journal holds this run with another plan; a run keeps its plan. Start a new run folder "
                "(a new key, or another reproducible_seed) for the new plan: the old one stays charged"
            )
        # Void draws count too: a slot of an epoch that was drawn is not drawn again.
        ordinals = dict(mine.next_ordinals)
        return _State(records, others, position, _read_history(history), ordinals, {})

    def _events(self, records: JournalRecords) -> dict[str, DpEvent]:
        """What the other runs of the journal cost, by name."""
        others = {run: record for run, record in records.runs.items() if run != self.run}
        return events_of(others, self.plan.relation, self.plan.unit.name, self.owners)

    def _begun(self, records: JournalRecords, others: Mapping[str, DpEvent]) -> RunRecord:
        """Book that the run begins: from here on its plan is reserved with the other runs'."""
        # A plan is reserved while its run is open: a later run with a larger budget takes nothing away. What
        # a closed run gave up it never takes again: others may have it by now.
        check_budget(self.plan, others, self.budget)
        began = RunEntry(
            run=self.run,
            plan=self.plan,
            data=self.data_fingerprint,
            private=self.secrets.is_private,
            owners=self.owners,
        )
        records.take(began, self.journal.append(began))
        return records.runs[self.run]

    @property
    def record(self) -> RunRecord:
        """What the run has booked."""
        return self._state.records.runs[self.run]

    @property
    def position(self) -> int:
        """Number of draws opened; for the checkpoint."""
        return self._state.position

    @property
    def history(self) -> dict[str, list[dict[str, Any]]]:
        """The noise that later releases use again, with its keys; private, for the checkpoint (`mark`)."""
        return {
            name: [
                {"ordinal": o, "key": left.key.hex(), "shapes": left.shapes, "noise": left.noise}
                for o, left in rows
            ]
            for name, rows in self._state.history.values.items()
        }

    # ---- opening draws

    def open(self, name: str = "batch", parameters: Digestible = None) -> Draw:
        """Open a draw of the plan: decides its index, hence its records and its noise.

        Args:
            name: draw name of the plan.
            parameters: all that the releases of this draw depend on, except plan and records: model
                parameters and method state. Give named tensors, a digest, or a callable that gives either.
                Without it a repeated step is always charged again.
        """
        text = as_digest(parameters, self.secrets.key)
        if text is None:
            # What the draw depends on is not known, so no later draw is known to ask the same again.
            text = f"unique {os.urandom(32).hex()}"
        known = [_STREAMS, self._fingerprint, name, text, self.data_fingerprint, self.kernels]
        key = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        state = self._state
        index, draws = state.position, self.record.draws
        # An index is taken by what is booked there, unless that is this very question. A void one stays
        # taken: its noise was ready for a question that was not repeated.
        while index in draws and (draws[index].void or draws[index].booked.digest != key):
            index += 1
        replayed = index in draws
        # A repeated draw keeps its ordinal, and with it its slot of an epoch.
        ordinal = draws[index].booked.ordinal if replayed else state.ordinals.get(name, 0)
        state.ordinals[name] = max(state.ordinals.get(name, 0), ordinal + 1)
        state.position = index + 1
        secret = self.secrets.draw_secret(index, key)
        draw = Draw(name, index, ordinal, key, replayed, self._capacity, secret)
        state.unreleased[draw] = True
        return draw

    def sample(self, draw: Draw, num_records: int) -> torch.Tensor:
        """Sorted positions of the records of `draw`, by the plan's sampling.

        Raises:
            LedgerError: more records than the sums of a draw have room for.
        """
        sampling = self.plan.sampling_of(draw.name)
        keys = self.keys if sampling.takes_turns else None
        found = sampling.sample(self.secrets, draw, num_records if keys is None else keys)
        if len(found) > draw.capacity:
            raise LedgerError(
                f"draw {draw.name!r} holds more than {draw.capacity:,} records, several times what a draw of "
                f"population={sampling.population} holds, and its sums have room for no more. State a "
                "population that covers the records. Nothing was released"
            )
        return found

    def open_and_sample(
        self, name: str, parameters: Digestible, num_records: int
    ) -> tuple[Draw, torch.Tensor]:
        """A draw (`open`) and its records (`sample`)."""
        draw = self.open(name, parameters)
        return draw, self.sample(draw, num_records)

    # ---- releasing

    def release(self, draw: Draw, sums: Mapping[str, Bounded], checks: Sequence[Check] = ()) -> Sums:
        """Add noise to the bounded sums of a draw, book them as one event, and hand them out.

        Args:
            draw: an open draw; a draw is released once.
            sums: {release name: bounded sum}; releases that share noise are released together.
            checks: what else must hold before anything leaves; the host waits once for them and the sums.

        Returns:
            {release name: {tensor name: noised tensor}}, float32 at least.

        Raises:
            LedgerError: if the plan does not hold the releases or has none left, a bound is too large, the
                run was closed, the draw is not open, a sum is not finite, or its type cannot carry the noise.
                Nothing leaves and nothing is charged.
        """
        booked = self.book(draw, sums, checks=checks)
        out: Sums = {}
        for (mechanism, members), earlier in zip(booked.groups, booked.past, strict=True):
            parts = {name: sums[name] for name in members}
            noise = mechanism.noise_over_steps(parts, booked.streams, earlier)
            out |= self._noised(mechanism, parts, booked.streams, noise)
            if mechanism.memory:
                kept = map_leaves(Private, noise) if mechanism.keeps_noise else {}
                left = NoiseOverSteps(history_key(booked.streams, members[0]), _shapes(parts), kept)
                self._state.history.add(members[0], draw.ordinal, left, mechanism.memory)
        return {name: out[name] for name in sums}

    def book(
        self,
        draw: Draw,
        sums: Mapping[str, Bounded],
        parts: Sequence[str] = (),
        checks: Sequence[Check] = (),
    ) -> BookedNoise:
        """The first half of `release`: everything but the noise, for processes that hold parts of the sums.

        Who calls it adds the noise of the answer to these very sums, and hands out nothing else.

        Args:
            draw, sums, checks: as for `release`.
            parts: `digest` of the parts of the sums that other processes hold.

        Raises:
            LedgerError: as `release`.
        """
        # Everything that can be refused is refused before the line is written: a charge is never taken back.
        sums = dict(sums)
        self._check_unreleased(draw)
        groups = check_sums(self.plan, draw, sums)
        record, pattern = self.record, None
        if not draw.replayed:
            self._check_open()
            pattern = pattern_for(record.patterns, record.used, draw, frozenset(sums))
        bounds = {name: float(sums[name].add_remove) for name in sorted(sums)}
        values = {name: exact_values(bounded.value) for name, bounded in sums.items()}
        unread = self._digest_of_sums(
            values if not parts else {"here": values, "elsewhere": list(parts)}, when_read=True
        )
        run_checks([*checks, *check_finite(values)], unread, launches=self._launches)
        answer = unread.value()
        past = [self._state.history.before(names[0], draw.ordinal, m.memory) for m, names in groups]
        for (_, names), of in zip(groups, past, strict=True):
            _check_shapes({name: sums[name] for name in names}, of)
        # Noise that goes over steps depends on earlier noise: its keys are part of what is asked.
        asked = [m.question([left.key for left in of]) for (m, _), of in zip(groups, past, strict=True)]
        joint = "+".join(filter(None, asked)) or None
        if pattern is None:
            # The same noise for other sums, or at another scale, would show their difference.
            booked = record.draws[draw.index].release
            if booked is None or (booked.bounds, booked.answer, booked.joint) != (bounds, answer, joint):
                self._void(draw)
        else:
            multipliers = {name: m.noise_multiplier for m, members in groups for name in members}
            entry = ReleaseEntry(
                run=self.run,
                draw=BookedDraw.of(draw, self.data_fingerprint),
                bounds=bounds,
                multipliers={name: multipliers[name] for name in bounds},
                pattern=tuple(sorted(pattern.names)),
                answer=answer,
                joint=joint,
            )
            # From this line on it is charged, whatever happens.
            self._book(entry)
        self._state.unreleased[draw] = False  # before the noise: no second try with other sums if that fails
        streams = self._streams(draw, draw.parameters, bounds, answer, joint)
        return BookedNoise(streams, groups, past)

    def _void(self, draw: Draw) -> NoReturn:
        """Let no later draw repeat this index, and refuse this one."""
        self._book(VoidEntry(run=self.run, index=draw.index))
        self._state.unreleased[draw] = False
        raise ChangedQueryError(
            f"draw {draw.index} repeats a journaled release, but what would be released has changed: by the "
            "loss, the data, the method or the machine's rounding. The same noise would serve two questions, "
            "so nothing left. The draw is void; take the step again: it gets new records and new noise and "
            "is charged"
        )

    # Audits plant their bugs in the next two.

    def _streams(self, draw: Draw, *question: object) -> ReleaseStreams:
        """The random numbers of a release."""
        return self.secrets.streams(draw.index, *question)

    def _noised(
        self,
        mechanism: Mechanism,
        sums: Mapping[str, Bounded],
        streams: ReleaseStreams,
        over_steps: Sums,
    ) -> Sums:
        """Where the noise is added."""
        return mechanism.noised(sums, streams, over_steps)

    def call(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """An operation that a kind of ledger has in addition, for the methods that name this kind.

        Raises:
            LedgerError: the ledger has none of that name.
        """
        found = getattr(self, operation, None)
        if found is None:
            raise LedgerError(
                f"a {type(self).__name__} has no {operation}: give the method a ledger_class that has it"
            )
        return found(*arguments, **options)

    # ---- where it stands

    def digest(self, value: Any) -> str:
        """Digest of tensors and plain values that a draw depends on, under the run's key."""
        return self.unread_digest(value).value()

    @property
    def can_go_on(self) -> bool:
        """Whether the plan has releases left, or booked ones that are yet to be repeated, or none at all.

        A run that was resumed with other numbers (changed data, another machine) is charged again for the
        steps that it repeats. So its plan can be used up before its last step.
        """
        left = self.releases_left
        return not left or any(left.values()) or self.position < self.record.next_index

    @property
    def place(self) -> dict[str, Any]:
        """Where the ledger stands: the arguments `position` and `history` of one that goes on from here."""
        return {"position": self.position, "history": self.history}

    def synced_place(self) -> dict[str, Any]:
        """The place, for a checkpoint, with the journal on its device.

        After a loss of power a checkpoint must not meet a journal that lacks charges it has seen.
        """
        self.journal.sync()
        return self.place

    def rewind(self, place: Mapping[str, Any]) -> None:
        """Go back to an earlier place, as a ledger does that is opened there after a crash.

        What was booked since is given again to the same question, with the same noise and without a charge.
        """
        self._state = self._state_at(place["position"], place["history"])

    # ---- what was spent

    def spent(self, delta: float | None = None) -> EpsilonResult:
        """Epsilon of all that has been released so far, the journal's other runs included as they are now."""
        return spent(self.record, self.other_runs(), self._delta(delta))

    def progress(self, delta: float | None = None) -> float:
        """Epsilon so far, without a cross-check and without a look at the journal.

        Infinite where nothing is guaranteed. The journal's other runs are those that `spent` or `other_runs`
        saw last, or that were there at the opening.
        """
        if self.guarantee == "none":
            return math.inf
        return spent(self.record, self._state.others, self._delta(delta), cross_check=False).value

    def other_runs(self) -> dict[str, DpEvent]:
        """What the journal's other runs cost, by name, as they are now: some may have begun meanwhile."""
        if self.journal.length:  # a journal that was closed gives nothing: what is known stays
            with self.journal.locked():
                self._catch_up()
            self._state.others = self._events(self._state.records)
        return self._state.others

    @property
    def releases_left(self) -> dict[str, int]:
        """Draws left for each draw name; none of a run that was closed."""
        return self.record.releases_left()

    @property
    def guarantee(self) -> str:
        """ "proven", "worst_case" or "none"."""
        return self.record.guarantee

    def close(self, stop_fixed_beforehand: bool = False) -> None:
        """Book that the run has ended.

        It is on the device when this returns. From then on booked releases are repeated and no other is made,
        also when the run is opened again. Closed again, nothing happens.

        Args:
            stop_fixed_beforehand: say that the run ends before its plan where that was fixed to be before it
                began, or for a reason that no release has a part in. Then what it reserved and did not use
                is free again for others, and its statement claims the releases made, under this assumption.
                Without it the whole plan stays charged, which covers every way to stop.
        """
        if not self.record.closed:
            self._book(CloseEntry(run=self.run, stop_fixed_beforehand=stop_fixed_beforehand))
            # The key is deleted next: after a loss of power the run must not stand as open, and never to be
            # ended.
            self.journal.sync()

    # ---- inside

    def _book(self, entry: Entry) -> None:
        """Write an entry of this run, and take it in."""
        with self.journal.locked():
            self._catch_up()
            length = self.journal.append(entry)
        self._state.records.take(entry, length)

    def _catch_up(self) -> None:
        """Take in what others have booked, and refuse to go on where that is of this run.

        Raises:
            LedgerError: an entry of this run, which somebody else goes on with.
            JournalError: the journal was cut, or closed.
        """
        records = self._state.records
        for length, entry in self.journal.since(records.length, records.lines):
            # A run that has ended may be charged for a search.
            if entry.run == self.run and not self.record.closed:
                raise LedgerError(
                    "another process, or another object of this one, goes on with this run: it has "
                    "booked entries since this ledger was opened. Nothing was released here. Stop one of "
                    "the two, and resume the run, which then counts what both have released"
                )
            records.take(entry, length)

    def _check_open(self) -> None:
        if self.record.closed:
            raise PlanUsedUpError(
                "the run was closed: what it had left of its plan was given up, and other runs may have it "
                "now. Nothing was released and nothing was charged; start a new run with the same journal"
            )

    def _delta(self, delta: float | None) -> float:
        if delta is None and self.budget is None:
            raise ValueError("delta must be given: this ledger has no budget to take it from")
        return delta if delta is not None else self.budget.delta  # type: ignore[union-attr]

    def _check_draw(self, draw: Draw) -> None:
        if not isinstance(draw, Draw):
            raise TypeError(f"draw must be a Draw from ledger.open(), got {type(draw).__name__}")
        if draw not in self._state.unreleased:
            raise LedgerError(f"{draw} was not opened by this ledger; use ledger.open(name, parameters)")

    def _check_unreleased(self, draw: Draw) -> None:
        self._check_draw(draw)
        if not self._state.unreleased[draw]:
            raise LedgerError(
                f"draw {draw.index} ({draw.name!r}) was released already; open a new draw for a new release"
            )
