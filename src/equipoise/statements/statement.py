"""The statement: what a run may claim about its privacy, as data and in plain English.

The statement holds everything that is needed to compute epsilon again: the whole plan, how often each release
was made, and what the unproven steps cost at worst. `statement.schema.json` is its JSON schema.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_accounting import NonPrivateDpEvent

from equipoise._relations import condition_in_words
from equipoise._rounding import noise_in_words, plain, rounded_up, times_in_words
from equipoise._say import page_width, wrapped
from equipoise._validate import by_author
from equipoise._version import __version__
from equipoise.privacy.accounting.epsilon import EpsilonResult, epsilon
from equipoise.privacy.accounting.noise_tail import END
from equipoise.privacy.by_author import OwnMechanism, OwnSampling
from equipoise.privacy.ledger.run_record import OtherRuns, RunRecord, compose_events
from equipoise.statements.assumptions import DATA, MODEL, Assumption, by_reader

if TYPE_CHECKING:
    from equipoise.privacy.ledger.ledger import Ledger

SEEDED = (
    "Noise and sampling follow from a public seed, so that anyone can subtract the noise. The figures are "
    "those of the same run with a secret key."
)
"""Said of a run that was made reproducible."""

STOPPED = (
    "the training ended before its last planned step for a reason that did not follow from what was released"
)
"""Named where the releases made are claimed and not the plan. With a rule that looks at releases (stop at the
best accuracy, or when the gradient is small) their epsilon is too low: a true delta of 8 to 18 times the
stated one was computed."""

SAME_NOISE = (
    "steps without a proof that were planned and not taken would have had the noise of those that were"
)
FIXED_PLANS = (
    "the plans of the runs in this journal, and which of them were made, did not follow from what earlier "
    "ones released"
)
"""Composition of privacy loss distributions covers queries that follow from earlier answers, but not numbers
of steps or noise multipliers that do."""

# A statement gives epsilon at its own delta times these, too. A choice: other deltas take a computation, and
# with other factors statements of before would not verify.
DELTA_FACTORS = (10.0, 0.1, 0.01)
_PACKAGES = ("torch", "dp-accounting", "numpy", "scipy", "cryptography")
UNACCOUNTED_SEARCH = (
    "no other run on these data chose the settings of this one, unless it is in the same journal: a search "
    "for hyperparameters on private data costs privacy that this figure does not hold"
)
ACCOUNTED_SEARCH = (
    "this run is the best of a random number of runs drawn before the first of them, each with a plan whose "
    "Renyi divergence is at no order above this one's, and of the others nothing was published or used"
)

OWNED = (
    "every record belongs to one user, whom the data owner named; who owns which record, and in which order "
    "records stand, follows from no record of another user"
)
SAME_USERS = "the other runs in this journal have the same users"

OF_THE_LEDGER = (STOPPED, SAME_NOISE, FIXED_PLANS, ACCOUNTED_SEARCH, UNACCOUNTED_SEARCH, OWNED, SAME_USERS)
"""The assumptions that follow from plan and journal; a statement computed again names them, too."""


@functools.cache
def statement_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of `statement.json`.

    >>> sorted(statement_schema()["required"])[:3]
    ['accountant', 'assumptions', 'cross_check']
    """
    text = Path(__file__).with_name("statement.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


@functools.cache
def versions() -> dict[str, str]:
    """What computed the statement: Python and the packages that its figures and its noise come from."""
    # Our own is that of the code that runs: the metadata of an editable install stay behind it.
    found = {"python": platform.python_version(), "equipoise": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from the sources, not installed
            found[name] = "unknown"
    return found


def further_deltas(delta: float) -> tuple[float, ...]:
    """The further deltas that a statement gives epsilon at.

    >>> further_deltas(1e-5)
    (0.0001, 1e-06, 1e-07)
    """
    return tuple(float(f"{delta * factor:.12g}") for factor in DELTA_FACTORS if delta * factor < 1)


@dataclass(frozen=True)
class Statement:
    """What a run may claim. Plain data; publishable.

    Attributes:
        guarantee: "proven", "worst_case" or "none".
        epsilon: the true epsilon at `delta`; None if and only if the guarantee is "none".
        epsilon_claimed: what the recipe's publication claims, if anything.
        private: False if noise and sampling follow from a public seed: NOT PRIVATE.
        warnings: sentences on doubtful choices.
        run: the run's name in the journal.
        plan: SHA-256 of the privacy plan, which `relation`, `sampling`, `releases` and `unproven` give in
            full.
        epsilons: epsilon at further deltas.
        search: the search for hyperparameters that the figure includes.
        versions: of Python and the packages that the figures come from.
        independence: "proved", "compared" or "unchecked", of "model" and "data": whether a record's gradient
            follows from that record alone. Empty if no model was trained.
        secret_seed: whether noise and sampling follow from a file that the owner keeps.
        noise_tail: what the end of the noise's tail adds to delta.
        users: of the unit "user": the most records of one that are drawn from, and how they make a row; None
            for records.
        noise: "floating_point", or "grid" for exact noise on integers.
        stop_fixed_beforehand: whether the figures are of the releases made. Without it they are of the whole
            plan, which covers every way to stop.
    """

    recipe: str
    guarantee: str
    relation: str
    unit: str
    epsilon: float | None
    delta: float | None
    accountant: str | None
    interval: float | None
    cross_check: float | None
    epsilon_claimed: float | None
    private: bool
    releases: list[dict[str, Any]]
    assumptions: list[str]
    holes: list[dict[str, Any]]
    warnings: list[str]
    other_runs: int = 0
    plan: str = ""
    run: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    unproven: list[dict[str, Any]] = field(default_factory=list)
    epsilons: list[dict[str, float]] = field(default_factory=list)
    search: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    noise: str = "floating_point"
    stop_fixed_beforehand: bool = False
    users: dict[str, Any] | None = None
    noise_tail: float | None = None
    independence: dict[str, str] = field(default_factory=dict)
    secret_seed: bool = False

    def to_json(self) -> str:
        """The statement as indented JSON."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Statement:
        """The statement that `to_json` wrote."""
        return Statement(**json.loads(text))

    def without_guarantee(self, holes: list[dict[str, Any]]) -> Statement:
        """The same run's statement, with these holes and no figure."""
        figures = ("epsilon", "accountant", "interval", "cross_check", "noise_tail")
        empty: dict[str, Any] = dict.fromkeys(figures)
        return replace(self, guarantee="none", epsilons=[], holes=holes, **empty)

    def sections(self) -> list[tuple[str, list[str]]]:
        """The statement in plain English: headings, each with its sentences or the rows of its list."""
        word = self.guarantee.replace("_", " ") if self.private else "NOT PRIVATE"
        if self.epsilon is not None and self.private:
            word += condition_in_words(self.independence)
            if claims_of(self.releases):
                word += ", by the word of the author of its own noise or sampling"
        found = [
            (f"Guarantee: {word}", self._promise()),
            ("Released", [_release_in_words(release) for release in self.releases]),
            *by_reader(self.assumptions),
            ("Not proved", [f"{hole['reason']} ({times_in_words(hole['count'])})" for hole in self.holes]),
            ("Warnings", self.warnings),
        ]
        return [(heading, rows) for heading, rows in found if rows]

    def _promise(self) -> list[str]:
        parts = []
        if not self.private:
            parts.append(SEEDED)
        recipe = " (recipe as published)" if self.recipe == "as_published" else ""
        change = "adding or removing" if self.relation == "add_or_remove_one" else "replacing"
        if self.epsilon is None:
            parts.append(f"This run{recipe} carries no privacy guarantee.")
        else:
            by = {"pld": "privacy loss distributions", "rdp": "Renyi differential privacy"}.get(
                self.accountant or "", "the closed form for Gaussians"
            )
            kind = "is" if self.guarantee == "proven" else "is, in the worst case,"
            parts.append(
                f"This run{recipe} {kind} ({rounded_up(self.epsilon)}, {plain(self.delta or 0.0)})-"
                f"differentially private with respect to {change} one {self.unit}, by {by}."
            )
            if self.cross_check is not None:
                parts.append(
                    "As a cross-check, Renyi accounting gives another upper bound, usually a looser one: "
                    f"{self.cross_check:.4g}."
                )
        if self.independence:
            parts.append(
                "That records are kept apart is {model} for the model and {data} for what makes the "
                "records".format(**self.independence)
                + ("." if set(self.independence.values()) == {"proved"} else ": epsilon follows if they are.")
            )
        if self.users is not None:
            parts.append(_users_in_words(**self.users))
        if self.epsilon_claimed is not None:
            parts.append(
                f"The published recipe claims epsilon = {self.epsilon_claimed:.4g}; that claim is not proven "
                "here."
            )
        if self.epsilons:
            listed = ", ".join(
                f"{rounded_up(row['epsilon'])} at delta {plain(row['delta'])}" for row in self.epsilons
            )
            parts.append(f"Epsilon is {listed}.")
        return parts + self._scope()

    def _scope(self) -> list[str]:
        """What the figure is of; without one, only that the run ended early."""
        early = any(release["used"] < release["count"] for release in self.releases)
        if self.epsilon is None:
            return ["Not all planned releases were made."] if early else []
        parts = []
        if early:
            parts.append(
                "The figure is that of the releases made, whose number was fixed beforehand."
                if self.stop_fixed_beforehand
                else "Not all planned releases were made. The figure is that of all of them, so that it "
                "holds whatever decides when to stop."
            )
        if self.search is not None:
            parts.append(
                f"The figure includes the choice of this run among a random number of runs, "
                f"{self.search['mean']:g} on average."
            )
        if self.other_runs:
            parts.append(f"The figure includes {self.other_runs} other run(s) over the same data.")
        return parts

    def markdown(self) -> str:
        """The statement as Markdown: a heading and a paragraph or a list per section."""
        return self._text("## ", "\n", "", "- ") + "\n"

    def _text(self, heading: str, between: str, paragraph: str, row: str) -> str:
        """The sections, each part after these signs."""
        (first, promise), *lists = self.sections()
        parts = [f"{heading}{first}\n{between}{paragraph}{' '.join(promise)}"]
        for head, rows in lists:
            parts.append(f"{heading}{head}\n{between}" + "\n".join(f"{row}{text}" for text in rows))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        """What is promised, in a line; `to_json` has every key."""
        word = self.guarantee if self.private else "NOT PRIVATE"
        spent = (
            ""
            if self.epsilon is None
            else f", epsilon={rounded_up(self.epsilon)}, delta={plain(self.delta or 0.0)}"
        )
        return f"<Statement: {word}{spent}, {self.relation} of one {self.unit}>"

    def __str__(self) -> str:
        """The sections of `markdown`, wrapped at the terminal's width, at most 88 characters."""
        return wrapped(self._text("", "", "  ", "  - "), page_width())


def _users_in_words(records: int, rows: str | None) -> str:
    if rows == "update":
        return "Users are drawn. Each item of the data is all of one user, and its row is clipped as a whole."
    most = "1 record" if records == 1 else f"{records} records"
    if rows is None:
        verb, each = ("is", "it") if records == 1 else ("are", "each")
        return (
            f"Of a user at most {most} {verb} used, chosen by secret randomness; {each} is drawn and clipped "
            "by itself."
        )
    return f"Users are drawn, and the {rows} of the gradients of at most {most} of a user is clipped."


def _release_in_words(release: Mapping[str, Any]) -> str:
    bound = "any" if release["max_bound"] is None else format(release["max_bound"], "g")
    noise = noise_in_words(release["mechanism"])
    return (
        f"{release['name']} (noise multiplier {noise}, bound at most {bound}, {release['used']} of "
        f"{release['count']} times)"
    )


def sampling_assumptions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The assumptions on draws and noise of these releases (rows of a plan or statement), each once."""
    texts = [
        f"population {row['sampling']['population']} and sampling "
        f"{row['sampling'].get('by', row['sampling']['scheme'])} of draw {row['draw']!r}"
        for row in rows
    ]
    return list(dict.fromkeys([*texts, *claims_of(rows)]))


def claims_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What authors of own noise and samplings say of them, in these rows of a plan or statement."""
    noise = [row["mechanism"] for row in rows if "by" in row.get("mechanism", ())]
    draws = [row["sampling"] for row in rows if "by" in row["sampling"]]
    return [
        *(OwnMechanism.described(one).claim for one in noise),
        *(OwnSampling.described(one).claim for one in draws),
    ]


def independence_of(assumptions: Iterable[Any]) -> dict[str, str]:
    """The words of the sentences that say whether records are kept apart.

    >>> independence_of([MODEL + "proved, for all values of the records", "the population is public"])
    {'model': 'proved'}
    """
    return {
        name: text.removeprefix(start).split()[0].rstrip(",:")
        for name, start in (("model", MODEL), ("data", DATA))
        for text in assumptions
        if isinstance(text, str) and text.startswith(start)
    }


def statement_of(
    ledger: Ledger,
    delta: float | None = None,
    *,
    recipe: str = "library",
    assumptions: Sequence[str] = (),
    epsilon_claimed: float | None = None,
    stop_fixed_beforehand: bool = False,
) -> Statement:
    """What the run of a ledger may claim, the journal's other runs included as they are now.

    Args:
        ledger: open or closed.
        delta: of the statement; None takes the budget's.
        recipe, assumptions, epsilon_claimed: as for `make_statement`.
        stop_fixed_beforehand: claim what closing the ledger with this word would leave to claim.

    Example:
        >>> from equipoise.privacy import FullBatch, Gaussian, Ledger, PrivacyPlan, Release
        >>> ledger = Ledger(PrivacyPlan([Release("gradient", 1.0, Gaussian(2.0))], FullBatch(100, 4)))
        >>> statement_of(ledger, delta=1e-5).guarantee
        'proven'
    """
    if delta is None and ledger.budget is not None:
        delta = ledger.budget.delta
    if delta is None and ledger.guarantee != "none":
        raise ValueError("delta must be given: this ledger has no budget to take it from")
    record = ledger.record
    if stop_fixed_beforehand and not record.closed:
        record = replace(record, closed=True, stop_fixed_beforehand=True)
    return make_statement(
        record,
        delta,
        ledger.other_runs(),
        recipe=recipe,
        assumptions=[*assumptions, *by_author(ledger)],
        epsilon_claimed=epsilon_claimed,
    )


def make_statement(
    record: RunRecord,
    delta: float | None,
    others: OtherRuns,
    *,
    recipe: str = "library",
    assumptions: Sequence[str] = (),
    epsilon_claimed: float | None = None,
) -> Statement:
    """The statement of a run.

    Args:
        record: what was booked of the run.
        delta: of the statement; None only where the run's guarantee is "none".
        others: what the other runs over the same data cost.
        recipe: "library" or "as_published".
        assumptions: what else was taken as public; population and sampling are always listed.
        epsilon_claimed: figure of the publication.
    """
    plan, guarantee = record.plan, record.guarantee
    found: EpsilonResult | None = None
    further: list[dict[str, float]] = []
    if guarantee != "none":
        assert delta is not None
        event = compose_events([record.claimed_event, *others.values()])
        found = epsilon(event, delta, plan.relation)
        if math.isfinite(found.value):
            for other in further_deltas(delta):
                further.append({"delta": other, "epsilon": epsilon(event, other, plan.relation).value})
        else:  # another run over the same data is not private
            found, guarantee = None, "none"
    described = plan.describe()
    rows = []
    for release in described["releases"]:
        count = sum(n for pattern, n in record.used.items() if release["name"] in pattern.names)
        row = {**release, "used": count}
        stages = [p for p in record.patterns if release["name"] in p.names and p.stop is not None]
        if stages:
            row["used_by_stage"] = [record.used[pattern] for pattern in stages]
        if release["draw"] in record.epochs:
            row["epochs"] = record.epochs[release["draw"]]
        rows.append(row)
    stated = [*sampling_assumptions([*rows, *described["unproven"]]), *assumptions]
    if not record.used_up and record.stop_fixed_beforehand:
        stated.append(STOPPED)
    elif not record.used_up and guarantee == "worst_case":
        stated.append(SAME_NOISE)
    if others:
        stated.append(FIXED_PLANS)
    if plan.unit.name == "user":
        stated += [OWNED, SAME_USERS] if others else [OWNED]
    stated.append(ACCOUNTED_SEARCH if record.search else UNACCOUNTED_SEARCH)
    return Statement(
        recipe=recipe,
        guarantee=guarantee,
        relation=plan.relation,
        unit=plan.unit.name,
        epsilon=None if found is None else found.value,
        delta=delta,
        accountant=None if found is None else found.accountant,
        interval=None if found is None else found.interval,
        cross_check=None if found is None else found.cross_check,
        noise_tail=None if found is None else found.noise_tail,
        epsilon_claimed=epsilon_claimed,
        private=record.private,
        releases=rows,
        assumptions=stated,
        holes=record.unproven_steps,
        warnings=_warnings(delta, found, [*rows, *described["unproven"]], others),
        other_runs=len(others),
        plan=plan.fingerprint(),
        run=record.run,
        sampling=described["sampling"],
        unproven=described["unproven"],
        epsilons=further,
        search=None if record.search is None else record.search.describe(),
        versions=dict(versions()),
        noise=plan.arithmetic,
        stop_fixed_beforehand=record.stop_fixed_beforehand,
        users=plan.unit.describe(),
        independence=independence_of(stated),
        secret_seed=Assumption.SECRET_SEED in stated,
    )


def _warnings(
    delta: float | None, found: EpsilonResult | None, rows: Sequence[Mapping[str, Any]], others: OtherRuns
) -> list[str]:
    """Sentences on choices that promise little."""
    warnings = [
        f"run {run} in this journal has no guarantee (noise from a public seed, a release without any bound, "
        "or unproven releases that are not over yet), so that the runs together have none: keep such runs "
        "out of a journal that others share"
        for run, event in others.items()
        if isinstance(event, NonPrivateDpEvent)
    ]
    populations = [row["sampling"]["population"] for row in rows]
    if delta is not None and populations and delta >= 1 / max(populations):
        warnings.append(
            f"delta={delta:g} is not below 1/population = {1 / max(populations):.3g}; a mechanism that "
            "publishes a whole record with that probability would satisfy it"
        )
    if found is not None and delta is not None and (found.noise_tail or 0.0) > delta / 1000:
        warnings.append(
            f"the noise is so small that the end of its tail, at {END:.3g} standard deviations, adds "
            f"{found.noise_tail:.2g} to delta"
        )
    if found is not None and found.value > 10:
        warnings.append(f"epsilon={found.value:.4g} is so large that it promises little")
    return warnings
