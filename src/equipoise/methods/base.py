"""What a method is, and what it may use.

A method turns the records of a step into an estimate of the gradient. It sees public things (parameters,
the step, public randomness) and, of the private data, only *draws*: it asks a draw for bounded sums and
hands these to the ledger, which adds noise and books the cost in one call. It sees no noise generators,
devices, micro-batches, processes or loops.

DP-SGD, as a method writes it:

    draw = context.draw("batch")
    sums = draw.query(lambda rows, ids: {"gradient": clip(rows, rule, clip_norm)})
    released = context.ledger.release(draw, sums)["gradient"]
    estimate = {name: value / expected_batch_size for name, value in released.items()}

Methods that need more find it here: rows at several parameter points (`query(fn, at=(x, w))` calls
``fn(rows_x, rows_w, ids)`` with the same records and the same dropout masks), several draws per step with
their own sampling (`context.draw("anchor")`), statistics of rows (`draw.rows`), gradients of public records
(`context.public_gradients`), public randomness that replays (`context.public_rng`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from equipoise import _validate
from equipoise.methods.card import Card
from equipoise.methods.configuration import Option, as_json, check_fields, field_types, read_settings
from equipoise.methods.public_records import PublicRecords
from equipoise.methods.registry import BY_CLASS, classes_of, registered
from equipoise.privacy import RECORD, Ledger, PrivacyPlan, Unit, calibrate

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from equipoise.gradients import PerSampleGradients
    from equipoise.privacy import Bounded, Budget, Sampling

OWN_METHOD = (
    "the method is the user's own, {path}, and its code was not checked: it hands out nothing but what the "
    "ledger released, and builds its sums from each record separately"
)

Parameters = Mapping[str, Tensor]
"""Named tensors: model parameters or an estimate of the gradient."""

State = dict[str, Any]
"""What a method carries from step to step: tensors, plain numbers and strings, lists and dicts of them."""

Query = Callable[..., "Mapping[str, Bounded]"]
"""fn(rows, ids) or fn(rows_x, rows_w, ..., ids): the bounded sums of one micro-batch."""


@runtime_checkable
class DrawHandle(Protocol):
    """One random sample of records, taken for one release. Which records is private; so is their number."""

    @property
    def name(self) -> str:
        """The draw's name in the privacy plan."""

    def query(
        self, fn: Query, at: Sequence[Parameters] | None = None, along: Tensor | None = None
    ) -> dict[str, Bounded]:
        """Run `fn` on each micro-batch and unite the bounded sums.

        Args:
            fn: called with one matrix of gradient rows per parameter point, then the records' numbers
                (LongTensor [b]). It keeps nothing: it may be asked again for the same micro-batches.
            at: the parameter points; only the current parameters when None. All points see the same
                dropout masks. The values of a point are asked for when its forward begins, and let go after
                it.
            along: numbers of the draw's records, [B], in the order in which `rows` gives them; `fn` gets
                those of the micro-batch's records, [b], as its last argument.

        Returns:
            name -> Bounded, over the whole draw; an empty draw gives sums of zero.
        """

    def secret_number(self, purpose: str) -> int:
        """A secret number of this draw that keys a random number per record; never to be released."""

    def rows(self, fn: Callable[..., Any], at: Sequence[Parameters] | None = None) -> Any:
        """Private numbers of the draw's records, in the draw's order.

        `fn` answers [b] per micro-batch, or a dict of such tensors; [B] comes back, or a dict of these.
        """


class LedgerHandle(Protocol):
    """The part of the ledger that methods use."""

    def release(self, draw: Any, sums: Mapping[str, Bounded]) -> dict[str, dict[str, Tensor]]:
        """Noise the sums of one draw, book the event, answer sum name -> tensor name -> released tensor."""

    def call(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """An operation that only the method's own `ledger_class` has."""


class Context(Protocol):
    """What a step may use."""

    @property
    def params(self) -> Parameters:
        """The trainable parameters, read-only and detached."""

    @property
    def step(self) -> int:
        """The number of the step, from 0."""

    @property
    def sampling(self) -> Sampling:
        """The training's sampling: `steps`, `population`, `expected_size` (the public divisor)."""

    @property
    def relation(self) -> str:
        """The neighbouring relation of the privacy plan: "add_or_remove_one" or "replace_one"."""

    @property
    def plan(self) -> Plan:
        """What the method planned for this training."""

    @property
    def ledger(self) -> LedgerHandle:
        """The only way out of the private side."""

    def draw(self, name: str = "batch") -> DrawHandle:
        """Take the next sample of records for the planned draw of this name."""

    def public_gradients(
        self, batch: Any, at: Parameters | None = None, step: int | None = None
    ) -> PerSampleGradients:
        """The gradient rows of public records (a batch, not record numbers), not guarded by `Private`.

        Args:
            batch: the public records.
            at: the parameter point; the current parameters when None.
            step: the step whose dropout masks they see, so that rows of an earlier step come out the same
                again; the current step when None.
        """

    def public_rng(self, step: int) -> torch.Generator:
        """Public randomness of a step: the same at every replay, independent of the records."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The public constants that a plan is made from.

    Attributes:
        sampling: how records are drawn, and for how many steps.
        budget: the (epsilon, delta) that noise is calibrated to; None where the method fixes its noise.
        relation: the neighbouring relation: "add_or_remove_one" or "replace_one".
        other_runs: events of other runs over the same data in a shared journal; the budget covers them too.
        booked: of a run that goes on, the plan that it began with: nothing is calibrated again.
        public_seed: of public randomness, for schedules that do not depend on data.
        unit: whose privacy is accounted for: one record's, or one user's. Plans that `calibrated` makes are
            for it; of all others the training sees to it.
    """

    sampling: Sampling
    budget: Budget | None = None
    relation: str = "add_or_remove_one"
    other_runs: tuple[DpEvent, ...] = ()
    booked: PrivacyPlan | None = None
    public_seed: int = 0
    unit: Unit = RECORD

    def public_rng(self) -> torch.Generator:
        """A new generator: plans that are made twice, or again at a resume, draw the same numbers."""
        return torch.Generator().manual_seed(self.public_seed)

    @property
    def shares_budget(self) -> bool:
        """Whether the budget is for other runs, too: before this one, or to come."""
        return bool(self.other_runs) or (self.budget is not None and self.budget.runs > 1)

    def required_budget(self, instead: str = "a noise_multiplier") -> Budget:
        """The budget, for a method that computes its noise from it without `calibrated`.

        Args:
            instead: arguments of the method that would have made it needless.

        Raises:
            ValueError: none was given, or other runs share it, which such a computation does not know.
        """
        if self.budget is None:
            raise ValueError(
                f"budget is missing: give budget=Budget(epsilon, delta), or {instead} to the method"
            )
        if self.shares_budget:
            raise ValueError(
                f"budget={self.budget} is shared with other runs of the journal, and this method computes "
                f"its noise from a budget of its own: give {instead} to the method, or the run a journal "
                "and a budget of its own"
            )
        return self.budget

    def count_noise(self, multiplier: float, of_gradient: float) -> float:
        """The noise multiplier of a count that is released with a gradient.

        A user whose records are drawn by themselves moves a count by all of them. It then has the gradient's
        multiplier at least: so it takes half of the budget at most, and some noise meets every budget.

        Args:
            multiplier: as asked for.
            of_gradient: the gradient's.

        Example:
            >>> from equipoise.privacy import Poisson, Unit
            >>> sampling = Poisson(20, 1000, 5)
            >>> of_users = Setting(sampling=sampling, unit=Unit("user", 8))
            >>> Setting(sampling=sampling).count_noise(2.0, 7.0), of_users.count_noise(2.0, 7.0)
            (2.0, 7.0)
        """
        return multiplier if self.unit.group == 1 else max(multiplier, of_gradient)

    def calibrated(
        self,
        with_noise: Callable[[float], PrivacyPlan],
        noise_multiplier: float | None = None,
        start: float = 1.0,
    ) -> PrivacyPlan:
        """The plan with this noise multiplier, or with the one that spends the budget where it is None.

        The budget is that of this run and the other runs together. A run that goes on keeps its plan.

        Args:
            with_noise: from the multiplier to the plan.
            noise_multiplier: as given to the method.
            start: first guess of it, where it is searched for.

        Raises:
            ValueError: neither a noise multiplier nor a budget is given.
            BudgetError: no noise meets the budget.
        """
        if noise_multiplier is not None:
            return with_noise(noise_multiplier).protecting(self.unit)
        if (kept := self.kept(lambda: with_noise(start))) is not None:
            return kept
        budget = self.budget or self.required_budget()
        return calibrate(
            lambda scale: with_noise(scale).protecting(self.unit), budget, start, other_events=self.other_runs
        )

    def kept(self, like: Callable[[], PrivacyPlan]) -> PrivacyPlan | None:
        """The plan that a run which goes on has booked; None at a start.

        None, too, if it has other releases than these: a method may calibrate a part of its plan, and that is
        done as it was at the start; or its settings are others now, and the plan made of them is refused.

        Args:
            like: gives the plan with any noise.
        """
        if self.booked is not None and _releases(like()) == _releases(self.booked):
            return self.booked
        return None


def _releases(plan: PrivacyPlan) -> list[tuple[object, ...]]:
    """What a plan releases, but for its noise and for whom it protects."""
    return [
        (one.name, one.draw, one.max_bound, one.replace_ratio, one.sampling or plan.sampling)
        for one in plan.releases
    ]


@dataclass(frozen=True)
class Plan:
    """What a method will release, and what else it fixed beforehand.

    Attributes:
        releases: the releases, their sampling and their noise; what the ledger holds the method to.
        constants: further public constants that the steps need, such as a schedule of anchors.
    """

    releases: PrivacyPlan
    constants: Any = None

    def __post_init__(self) -> None:
        _validate.instance(PrivacyPlan, "setting.calibrated(with_noise)", releases=self.releases)


class Method(ABC):
    """A differentially private estimator of the gradient: a frozen dataclass whose fields are its settings.

    Nothing is remembered on the object: what a run needs is in its plan and in its state. Name, recipe and
    card of a method of the library are in `methods.toml`. The page `docs/extending.md` lists the files that a
    new one touches.
    """

    name: ClassVar[str]
    # A method of the user's own need not have a card: it may claim what its plan proves.
    card: ClassVar[Card] = Card(
        summary="A method without a card.",
        claim="The method has no card that says what it proves.",
        source="not stated",
        guarantee="proven",
        cost="not stated",
        use_when="Not stated.",
        avoid_when="Not stated.",
    )
    ledger_class: ClassVar[Callable[..., Ledger]] = Ledger
    """What takes the releases. Recipes as published name one that also lets out what no proof covers."""
    recipe: ClassVar[str] = "library"
    """"library" (proven by composition) or "as_published" (the paper's to the letter)."""
    forward_only: ClassVar[bool] = False
    """Whether its draws give `losses` and no gradients: no backward runs, and no activations are kept."""
    split_models: ClassVar[frozenset[str]] = frozenset()
    """How processes may hold parts of a model that it trains: by "fully_shard", where rows give nothing but
    norms, differences and weighted sums, or "tensor parallel". A subclass says so anew."""

    is_whole_step: ClassVar[bool] = False
    """Whether the length of its estimate is that of the step: an optimiser other than SGD would undo it."""
    takes_weights: ClassVar[bool] = False
    """Whether records may have weights: its estimate is made of sums of clipped rows, and of no other
    numbers of theirs. A subclass says so anew."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        row: Mapping[str, Any] = {}
        if (path := f"{cls.__module__}:{cls.__qualname__}") in BY_CLASS:
            cls.name, recipe, row = BY_CLASS[path]
            if recipe != "library":  # of a method around another one, the recipe is the inner one's
                cls.recipe = recipe
            cls.card = Card(**{field.name: row[field.name] for field in dataclasses.fields(Card)})
        if "split_models" not in vars(cls):
            cls.split_models = frozenset(row.get("split_models", ()))
        cls.takes_weights = vars(cls).get("takes_weights", row.get("takes_weights", False))

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def plan(self, setting: Setting) -> Plan:
        """What will be released, with noise calibrated to the budget, from public constants.

        A pure function: the method remembers nothing. `context.plan` hands the plan to every step. Random
        schedules that do not depend on data are drawn here, from `setting.public_rng()`.
        """

    def init(self, context: Context) -> State:
        """The state before the first step; empty where a method remembers nothing."""
        return {}

    @abstractmethod
    def step(self, context: Context, state: State) -> tuple[dict[str, Tensor], State]:
        """One step: an estimate of the gradient for every trainable parameter, and the next state."""

    def passes_over(self, draw: str) -> int:
        """How often a step computes the gradients of the records of this draw: points times queries.

        For a `forward_only` method, their losses.
        """
        return 1

    def gradients_per_step(self, plan: Plan) -> float:
        """Expected per-sample gradients per step, private and public, on average over the run."""
        releases = plan.releases
        counts: dict[str, int] = {}
        for item in releases.planned:
            counts[item.draw] = max(counts.get(item.draw, 0), releases.count(item))
        total = sum(
            count * releases.sampling_of(draw).expected_size * self.passes_over(draw)
            for draw, count in counts.items()
        )
        return total / releases.sampling.steps

    def claimed_epsilon(self, plan: Plan, delta: float) -> float | None:
        """The epsilon that the method's publication claims for a recipe as published; None for none."""
        return None

    def assumptions(self, plan: Plan | None = None) -> Sequence[str]:
        """What this method takes as public in addition to sampling and settings, for the statement.

        That a class is the user's own is said in addition (`by_author`).

        Args:
            plan: of the run; None where only the configuration is known.
        """
        return ()

    def public_batches(self) -> Sequence[PublicRecords]:
        """The public records that it was given: they are compared with the private ones before the start."""
        return ()

    def metrics(self, state: State) -> Mapping[str, float]:
        """Public numbers of the state after a step, for the metrics; only what was computed from releases."""
        return {}

    def rebase(self, state: State, params: Parameters) -> State:
        """The state after someone else moved the parameters (a warm start, a server)."""
        return state

    @property
    def guarantee(self) -> str:
        """The best that a run may claim: "proven", "worst_case" or "none"."""
        return self.card.guarantee

    @classmethod
    def said(cls) -> str:
        """Its name; that of its class where the name is another method's."""
        path = _validate.author_of(cls)
        is_known = path is None or cls.name not in registered() or cls in classes_of(cls.name)
        return cls.name if is_known else str(path)

    def config(self) -> dict[str, Any]:
        """The method as plain values: its name, its recipe and its fields."""
        fields = {name: as_json(getattr(self, name)) for name in field_types(type(self))}
        return {"name": self.said(), "recipe": self.recipe, **fields}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], public: PublicRecords | None = None) -> Self:
        """The method that `config` described, or that the words of a command line ask for.

        Args:
            config: `name` and `recipe`, and fields, as `read_settings` takes them; the others keep their
                defaults.
            public: the public records again, which no file holds.

        Raises:
            ValueError: it describes another method, has a setting that this one does not have, or holds an
                opaque value such as a function; or public records are missing, or others than before.
        """
        given = {name: value for name, value in config.items() if name not in ("name", "recipe")}
        if config.get("name") not in (cls.name, cls.said()):
            raise ValueError(f"config={dict(config)!r} does not describe the method {cls.name!r}")
        found = cls(**read_settings(cls, given, public))
        if str(config.get("recipe", found.recipe)).replace("-", "_") != found.recipe:
            raise ValueError(f"config={dict(config)!r} does not describe the recipe {found.recipe!r}")
        return found


def by_author(part: Any) -> list[str]:
    """What of a method and its options is the user's own, in the words of a statement.

    Example:
        >>> from equipoise.methods import DPSGD
        >>> by_author(DPSGD())
        []
    """
    path = _validate.author_of(type(part))
    is_method = isinstance(part, Method) and path is not None
    found = [OWN_METHOD.format(path=path)] if is_method else _validate.by_author(part)
    for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
        inside = getattr(part, field.name)
        if isinstance(inside, (Method, Option, PublicRecords)):
            found += by_author(inside)
    return found
