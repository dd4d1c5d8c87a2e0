"""What a training is given: the records, whom it protects, its run, and all of it with model and loss.

Each object is frozen and checks itself as far as it can alone. No field stands in two of them, but for
`relation`, which a record and users have alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn

from equipoise import _validate
from equipoise._files import PathLike
from equipoise.gradients.engine_inputs import Loss
from equipoise.methods import DPSGD, METHODS, Method, find
from equipoise.privacy import Budget, Sampling, Unit
from equipoise.privacy.accounting.epsilon import check_relation
from equipoise.privacy.unit import RECORD, UserRows
from equipoise.training.owners import column_of
from equipoise.training.scores import Score
from equipoise.training.setup.step_number import with_step, with_step_on
from equipoise.training.stages import Stage

if TYPE_CHECKING:
    from equipoise.training.metrics import MetricWriter


@dataclass(frozen=True, eq=False)
class Data:
    """Private records, and how they become batches.

    Args:
        records: `equipoise.data.Records`, a dict or tuple of tensors or of `numpy.memmap`, a map-style
            dataset.
        collate: joins the items of a dataset to a batch.
        workers: processes that read the items of a dataset ahead of the step; the result is the same for any
            number of them. 0 reads in this process.
        augmentation: (batch, generator) -> batch, record by record.
        views: how many views of a record have their losses averaged before its gradient is clipped. They
            differ by the augmentation, or by random numbers that the loss or the model draws for each row,
            such as the time and the noise of a diffusion model.
        ids: one number or text per record that names it for the whole run, or the name of the column of
            `records` that holds them. With it a run can be resumed after records were withdrawn or added if
            `sampling` assigns records to draws (`BallsInBins`, `FixedEpochs`, `dp-mf`); without it what a
            record holds names it, and of a dataset that makes its items on demand the number.
        weights: one number in [0, 1] per record, or the name of the column of `records` that holds them,
            which leaves the batch: what its clipped gradient is multiplied by, before the noised sum. The
            bound, and with it epsilon, stays what it is. Unlike a weight in the loss it makes long gradients
            shorter, too. A weight may depend on its own record and on public numbers alone: state the
            classes' shares, do not count them. A row of all of a user's records has the mean of their
            weights. Noised counts, of a learned threshold for example, count each record once. Not for
            methods that release other sums, which refuse it.
        widths: one whole number per record, or the name of the column of `records` that holds them, which
            leaves the batch: to which of a few public lengths `collate` pads it (`PadTo.width`). Records of
            one width then share a forward, so that a record's width follows from itself alone, and short
            records cost less. How many forwards a step has follows from the records: its time shows it.
            `PadTo.lengths` are tried at the start if they are at most seven; of other widths, how much is
            proved of the model may follow which were drawn. Not for sampled users; records that share random
            numbers are not sorted.
        microbatch_size: private records per forward, at most; filler rows make whole tiles of the kernels.
            Chosen by default from what will be drawn and from the free memory. It changes the result only by
            rounding.
        score: a private score, for which some of the records are held apart: `run(evaluate=score)`.

    Raises:
        TypeError, ValueError: naming the argument.
        DataError: the records hold no column of the name that `ids`, `weights` or `widths` is.
    """

    records: Any = field(repr=False)
    _: KW_ONLY
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    augmentation: Callable[[Any, torch.Generator], Any] | None = None
    views: int = 1
    ids: Any = field(default=None, repr=False)
    weights: Any = field(default=None, repr=False)
    widths: Any = field(default=None, repr=False)
    microbatch_size: int | None = None
    score: Score | None = None

    def __post_init__(self) -> None:
        if isinstance(self.records, Mapping):  # as tokenizers answer; records by number have no mapping
            object.__setattr__(self, "records", dict(self.records))
        for name, shape in (("augmentation", "(batch, generator)"), ("collate", "(items)")):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(
                    f"{_validate.given(name, value)} is no function: give {name}{shape} -> batch, or leave "
                    "it out"
                )
        _validate.instance(int, "4", workers=self.workers)
        _validate.non_negative(workers=self.workers)
        _validate.count("the number of augmented views of a record", views=self.views)
        if self.microbatch_size is not None:
            _validate.count("the number of records held at once", microbatch_size=self.microbatch_size)
        if self.score is not None:
            _validate.instance(Score, 'Score("accuracy", share=0.1)', score=self.score)
        for name in ("ids", "weights", "widths"):
            if isinstance(column := getattr(self, name), str):
                values, records = column_of(self.records, column, name)
                object.__setattr__(self, name, values)
                object.__setattr__(self, "records", records)

    @classmethod
    def of(cls, given: Any) -> Data:
        """The object itself, or bare records as one."""
        return given if isinstance(given, Data) else cls(given)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The guarantee covers one record: with or without it, or with another in its place.

    Args:
        relation: "add_or_remove_one" or "replace_one".
    """

    relation: str = "add_or_remove_one"
    owner: ClassVar[None] = None
    protected: ClassVar[Unit] = RECORD

    def __post_init__(self) -> None:
        check_relation(self.relation)


@dataclass(frozen=True, eq=False)
class Users:
    """The guarantee covers a user with all of their records.

    Args:
        owner: one number or text per record that says whose it is, or the name of the column of the records
            that holds them.
        records_per_user: the most records of a user that the run uses. A public number; of a user with more,
            secret randomness chooses.
        rows: draw users instead of records: a row is the "sum" or the "mean" of the gradients of a user's
            records, clipped as a whole. With "mean" each user counts once, so that the model fits an average
            over users (households); with "sum" each record counts once, below the clip norm: an average over
            records (persons). Or "update": each item of the data is all of a user, and the loss
            `federated.LocalUpdates`. `population` and batch sizes count users then.
        relation: as for `Record`: which users the two data sets differ by.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    owner: Any = field(repr=False)
    _: KW_ONLY
    records_per_user: int
    rows: UserRows | None = None
    relation: str = "add_or_remove_one"

    def __post_init__(self) -> None:
        check_relation(self.relation)
        if self.owner is None:
            raise TypeError(
                "owner=None names no user: give one number or text per record that says whose it is, or the "
                "name of the column of data that holds them"
            )
        assert self.protected  # raises for what is no unit

    @property
    def protected(self) -> Unit:
        """The unit of privacy."""
        return Unit("user", self.records_per_user, self.rows)


def unit_of(given: Any) -> Record | Users:
    """The object itself; "record" as one.

    Raises:
        TypeError: neither.
    """
    if isinstance(given, Record | Users):
        return given
    if isinstance(given, str) and given == "record":
        return Record()
    raise TypeError(
        f"{_validate.given('unit', given)} is no unit: give unit='record' or Record(relation=...) to protect "
        "records, or Users(owner=..., records_per_user=...) to protect users"
    )


@dataclass(frozen=True)
class Run:
    """What makes a training a run: where it is written down, its randomness, what it starts from.

    Args:
        folder: for statement, metrics, model and checkpoints; None keeps everything in memory.
        journal: a journal shared by several runs over the same data: their costs compose.
        seed: public randomness (schedules, records that are public); never noise, sampling, dropout or
            augmentation of private records.
        reproducible: let noise and sampling follow the seed too. The result is then NOT PRIVATE, and the
            statement says so.
        secret_seed: a file of at least 32 secret bytes that the key of noise and sampling follows from, with
            `seed`: whoever keeps it can repeat the run bit by bit. The statement says that noise is secret as
            long as the file is. Give each run a `seed` of its own.
        starts_from: "public" if no private record went into what model and optimizer hold at the start. It is
            asked for if another run of this process left the model, the model was loaded from the file of a
            run, or the optimizer remembers steps; the statement then names it as your word. With records of
            the same people give both runs one `journal` instead.
        ema_decay: keep a moving average of the parameters; it is evaluated and saved in place of the last
            ones.
        scheduler: a torch learning-rate scheduler; stepped after every step.
        hardened: exact noise on a grid of integers, against attacks on floating-point noise; slower.
        trust: paths of modules, as in `model.named_modules()`, in which records may be mixed: you answer for
            it, and epsilon then follows only if that moves no other record's gradient. The statement names
            them and what mixes there. What mixes elsewhere is refused as ever.
        writers: further writers of publishable metrics, such as `CSVWriter`, and `Events`.
        diagnostics: of a run that is `reproducible`, so NOT PRIVATE, a function of the step's number and of
            what noise and clipping hide: `median_norm` and `largest_norm` of the gradients of this process'
            records, `true_norm` of their sum over the expected batch size, the `cosine` between that and the
            estimate, and the share of `clipped` ones.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    folder: PathLike | None = None
    _: KW_ONLY
    journal: PathLike | None = None
    seed: int = 0
    reproducible: bool = False
    secret_seed: PathLike | None = None
    starts_from: Literal["public"] | None = None
    ema_decay: float | None = None
    scheduler: Any = None
    hardened: bool = False
    trust: Sequence[str] = ()
    writers: Sequence[MetricWriter] = ()
    diagnostics: Callable[[int, Mapping[str, float]], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("folder", "journal"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise TypeError(f"{_validate.given(name, value)} is {_validate.what_is(value)}; give a path")
        if self.journal is not None:
            object.__setattr__(self, "journal", os.fspath(self.journal))
        _validate.instance(bool, "False", reproducible=self.reproducible, hardened=self.hardened)
        _validate.instance(int, "0", seed=self.seed)
        if self.diagnostics is not None and not self.reproducible:
            raise ValueError(
                "diagnostics are computed from the private records without noise, and no epsilon would cover "
                "them: give reproducible=True, which is NOT PRIVATE, on public records"
            )
        seed = self.secret_seed
        if seed is not None and (
            self.reproducible or Path(seed).stat().st_size < 32 or len(set(Path(seed).read_bytes())) < 8
        ):
            raise ValueError(
                f"secret_seed={str(seed)!r} is a file of less than 32 bytes, or of few different ones, which "
                "could be guessed, or stands beside reproducible=True, by which noise follows a public seed: "
                "give one of them, and 32 random bytes (openssl rand -out FILE 32)"
            )
        if self.starts_from is not None:
            _validate.one_of(("public",), starts_from=self.starts_from)
        if self.ema_decay is not None:
            _validate.share(ema_decay=self.ema_decay)
        is_list = isinstance(self.trust, Sequence) and not isinstance(self.trust, str)
        if not (is_list and all(isinstance(name, str) for name in self.trust)):
            raise TypeError(f"trust={self.trust!r} is no tuple of names: give for instance ('router',)")
        if not isinstance(self.writers, Sequence) or not all(hasattr(one, "write") for one in self.writers):
            name = _validate.given("writers", self.writers)
            raise TypeError(f"{name} is no list of writers: give for instance [CSVWriter(path)]")
        for name in ("trust", "writers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def of(cls, given: Any) -> Run:
        """The object itself, or the run in a folder, or one in memory.

        Raises:
            TypeError: no run and no path.
        """
        if given is None or isinstance(given, str | os.PathLike):
            return cls(given)
        _validate.instance(Run, "Run(folder, seed=1), or the path of a folder", run=given)
        return given

    def created(self, folder: Path) -> None:
        """Called in the run's folder before its first checkpoint is written; a subclass puts down its own."""


_IN_RUN = {name: name for name in Run.__dataclass_fields__} | {"run_dir": "folder", "ledger_file": "journal"}
_IN_DATA = {name: name for name in Data.__dataclass_fields__} | {"micro_batch_size": "microbatch_size"}
MOVED = {
    **{old: f"now data=Data(records, {new}=...)" for old, new in _IN_DATA.items()},
    **{old: f"now run=Run({new}=...)" for old, new in _IN_RUN.items()},
    **dict.fromkeys(("owner", "records_per_user"), "now unit=Users(owner=..., records_per_user=...)"),
    "user_rows": "now unit=Users(owner=..., records_per_user=..., rows=...)",
    "relation": "now unit=Record(relation=...), or of users unit=Users(..., relation=...)",
}
"""Where an argument that training took by itself stands now."""


#: Names that other libraries, the command line or `run()` have for them.
_ELSEWHERE = {
    **dict.fromkeys(
        ["clip_norm", "noise_multiplier"], "given as method=DPSGD(clip_norm=..., noise_multiplier=...)"
    ),
    "max_grad_norm": "given as method=DPSGD(clip_norm=...)",
    **dict.fromkeys(
        ["epsilon", "delta", "target_epsilon", "target_delta"], "given as budget=Budget(epsilon, delta)"
    ),
    **dict.fromkeys(
        ["batch_size", "epochs", "steps"], "given as sampling=Poisson(batch_size=..., epochs=...)"
    ),
    **dict.fromkeys(
        ["evaluate", "evaluate_every", "checkpoint_every", "progress"], "an argument of training.run(...)"
    ),
    **dict.fromkeys(["ledger", "run_folder", "output_dir"], "given as run=Run(folder, journal=...)"),
    **dict.fromkeys(["lr_scheduler", "ema"], "given as run=Run(scheduler=..., ema_decay=...)"),
    "adjacency": "given as unit=Record(relation=...)",
}


def refuse_moved(given: Mapping[str, Any]) -> None:
    """Refuse arguments that are none, with the new place of those that were.

    Raises:
        TypeError: if there is one.
    """
    known = _ELSEWHERE | MOVED
    found = [f"{n}= is {known[n]}" if n in known else f"there is no argument {n!r}" for n in given]
    if found:
        raise TypeError(f"{'; '.join(found)}. Nothing was spent.")


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """What a user gives a training; see `PrivateTraining` for its meaning.

    Raises:
        TypeError: an object of another kind than the training needs; it names the argument and what to give.
        ValueError: ids of records that belong to users.
        DataError: the data hold no column of the name that owner or ids is.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    data: Data
    sampling: Sampling
    method: Method
    budget: Budget | None = None
    unit: Record | Users
    run: Run
    device: str | torch.device | None = None
    compile: bool = False
    stages: Sequence[Stage] = ()

    @classmethod
    def of(
        cls, *, data: Any, method: Any = None, unit: Any = "record", run: Any = None, **others: Any
    ) -> Self:
        """From the short forms that a user may write: bare records, no method, "record", a path.

        Raises:
            TypeError: an argument that there is not, or not any more.
        """
        refuse_moved({name: one for name, one in others.items() if name not in cls.__dataclass_fields__})
        method = DPSGD() if method is None else method
        others["stages"] = tuple(others.get("stages", ()))
        return cls(data=Data.of(data), method=method, unit=unit_of(unit), run=Run.of(run), **others)

    def move_step(self, device: torch.device) -> None:
        """Let the number of the step, if the loss takes it, lie on this device."""
        object.__setattr__(self, "loss", with_step_on(self.loss, device))

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", with_step(self.loss))
        _validate.instance(bool, "False", compile=self.compile)
        if isinstance(self.unit, Users):
            self._check_users(self.unit)
        sampling, method = self.sampling, self.method
        _validate.instance(
            Sampling,
            "Poisson(expected_batch_size=256, population=60_000, steps=2_000). State the population "
            "yourself: it is not read from the data",
            sampling=sampling,
        )
        called = f"{find(method).__name__}()" if isinstance(method, str) and method in METHODS else "DPSGD()"
        _validate.instance(Method, f"equipoise.methods.{called}", method=method)
        if self.budget is not None:
            _validate.instance(Budget, "Budget(epsilon=3.0, delta=1e-5)", budget=self.budget)

    def _check_users(self, unit: Users) -> None:
        """No single record is named beside users; the name of their column becomes its values."""
        if self.data.ids is not None:
            raise ValueError("ids names single records, and unit=Users(...) protects users: leave ids out")
        if isinstance(unit.owner, str):
            owner, records = column_of(self.data.records, unit.owner)
            object.__setattr__(self, "unit", replace(unit, owner=owner))
            object.__setattr__(self, "data", replace(self.data, records=records))
