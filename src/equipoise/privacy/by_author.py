"""Noise and samplings of a user's own, accounted for by what their author says of them.

A description of such a class names it, and says as what it is accounted for: noise as normal noise of its
multiplier, fresh in every release; a sampling as one of the library's. So whoever verifies a statement
computes epsilon without the class, and reads there that the figure rests on its author's word.

What can be tried is tried before a run spends anything (`check`): the noise's variance, whether it follows
its stream and no other, how often records are drawn, and whether draws follow from each other. Some thousand
numbers show a wrong scale or a shuffled epoch; they prove no epsilon.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from equipoise.privacy._torch_side import Bounded, ReleaseStreams, bounded, keyed, private, secrets, torch
from equipoise.privacy.draw import Draw
from equipoise.privacy.errors import PlanError
from equipoise.privacy.mechanisms.base import Mechanism, Sums
from equipoise.privacy.sampling import FullBatch, Poisson, Sampling, sampling_from

# Deviations from what is claimed. A sound class is beyond them in one of 5e8 trials, and a scale that is
# wrong by a twentieth is: it stands out by 7.
_LIMIT = 6.0
_NUMBERS = 20_000  # of each of two tensors; with fewer, a scale must be wrong by more to stand out
# Of sums that a trial of noise is for: noise must grow with the bound.
_BOUNDS = (1.0, 30.0)
# Records of all draws of a trial together, and draws: fewer see less, these take about a second.
_RECORDS, _DRAWS = 400_000, 2000


class _ByAuthor:
    """What own noise and own samplings share: how they are written down and found again.

    Attributes:
        known: classes that are imported here, by their paths.
    """

    known: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.known[f"{cls.__module__}:{cls.__qualname__}"] = cls

    @classmethod
    def imported(cls, author: str, **values: Any) -> Any:
        """The object of a class that is imported here, or None."""
        return cls.known[author](**values) if author in cls.known else None

    @property
    def author(self) -> str:
        """The class, as module:Class."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def settings(self) -> dict[str, Any]:
        """Its fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


class OwnMechanism(_ByAuthor, Mechanism):
    """Fresh noise of your own: a frozen dataclass of plain values, `noise_multiplier` among them.

    You say that a sum with this noise tells no more of one record than the sum with
    `Gaussian(noise_multiplier)`. Write `noise`, and `standard_deviation` if it is not noise_multiplier *
    bound.
    """

    kind: ClassVar[str] = "own"

    @abstractmethod
    def noise(self, normals: torch.Tensor, bound: float) -> torch.Tensor:
        """The noise of one tensor of a sum.

        Args:
            normals: independent standard normal numbers in the tensor's shape, secret and fresh, from which
                the noise is computed: nothing else here is random. `torch.special.ndtr(normals)` is uniform.
            bound: of the sum.
        """

    def noised(
        self, sums: Mapping[str, Bounded], streams: ReleaseStreams, over_steps: Sums | None = None
    ) -> Sums:
        out: Sums = {}
        for name, one in sums.items():
            numbers = keyed.normals(streams, {key: one.value[key] for key in sorted(one.value)}, 1.0)
            noise = {key: self.noise(value, one.add_remove) for key, value in numbers.items()}
            for key, value in numbers.items():
                if (noise[key].shape, noise[key].dtype) != (value.shape, value.dtype):
                    raise PlanError(
                        f"{self.author}.noise must return {value.dtype} numbers of shape "
                        f"{tuple(value.shape)}, got {noise[key].dtype} of {tuple(noise[key].shape)}"
                    )
            out[name] = private.add_exact(noise, one.value)
        return out

    def describe(self) -> dict[str, Any]:
        settings = self.settings()
        multiplier = settings.pop("noise_multiplier")
        return {"kind": "own", "by": self.author, "noise_multiplier": multiplier, "settings": settings}

    @staticmethod
    def described(description: Mapping[str, Any]) -> OwnMechanism:
        """What `describe` wrote; if the class is not imported here, enough of it to account for it."""
        author, multiplier, given = (description[key] for key in ("by", "noise_multiplier", "settings"))
        elsewhere = _NoiseElsewhere(author, multiplier, json.dumps(given, sort_keys=True))
        return OwnMechanism.imported(author, noise_multiplier=multiplier, **given) or elsewhere

    @property
    def claim(self) -> str:
        """What a statement says of it."""
        return (
            f"by its author: noise of {self.author} hides a record as well as normal noise of its "
            "multiplier; its variance was tried before the start"
        )

    @cached_property
    def _tried(self) -> str:
        """Digest of the noise of public numbers: what a class of this name makes now."""
        normals = torch.linspace(-3, 3, 64)
        noise = [self.noise(normals, bound).double().tolist() for bound in _BOUNDS]
        return hashlib.sha256(json.dumps(noise).encode()).hexdigest()[:32]

    def question(self, past: Sequence[bytes]) -> str | None:
        # A release that is repeated by a class that was edited meanwhile has other noise of the same normals,
        # and the two would show the sum: the digest, which is booked, makes it another question.
        return self._tried

    def check(self) -> None:
        """Try the noise on sums of zeros of several bounds.

        Raises:
            PlanError: its variance is not what it says, it does not follow its streams, or it repeats.
        """
        for bound in _BOUNDS:
            self._check_on(bound)

    def _check_on(self, bound: float) -> None:
        zeros = {name: private.Private(torch.zeros(_NUMBERS // 100, 100)) for name in ("one", "other")}
        sums = {"tried": bounded.make_bounded(zeros, bound, 2 * bound, None)}
        key = secrets.Secrets(reproducible_seed=0)
        first, again, next_one = (
            self.noised(sums, key.streams(index, "tried"))["tried"] for index in (0, 0, 1)
        )
        squares = torch.cat([*first.values()]).double().square()
        wanted = self.standard_deviation("tried", bound)
        score = (squares.mean() - wanted**2) / (squares.std() / math.sqrt(squares.numel()))
        if not abs(float(score)) <= _LIMIT:
            raise PlanError(
                f"{self.author} adds noise of deviation {float(squares.mean()) ** 0.5:.4g} to a sum of bound "
                f"{bound:g}, and says {wanted:.4g} (standard_deviation). Nothing was spent"
            )
        if not torch.equal(first["one"], again["one"]) or torch.equal(first["one"], next_one["one"]):
            raise PlanError(
                f"{self.author}.noise makes random numbers of its own: other ones when a release is "
                "repeated, or the same for another release, and the difference of the two shows what noise "
                "hides. Compute the noise from `normals` alone. Nothing was spent"
            )


class OwnSampling(_ByAuthor, Sampling):
    """A sampling of your own: a frozen dataclass of plain values, `population` and `steps` among them.

    You say that a draw tells no more of one record than a draw of `accounted_as`, whatever the draws before
    were. Write `accounted_as` and `sample`, which takes all its random numbers from `secrets`.
    """

    @property
    @abstractmethod
    def accounted_as(self) -> Sampling:
        """`Poisson` or `FullBatch` of the same population and steps: each record is drawn by itself."""

    @property
    def expected_size(self) -> float:
        return self.accounted_as.expected_size

    def event(self, noise_multiplier: float, count: int = 1, group: int = 1) -> Any:
        return self.accounted_as.event(noise_multiplier, count, group)

    def describe(self) -> dict[str, Any]:
        settings = self.settings()
        public = {name: settings.pop(name) for name in ("population", "steps")}
        like = self.accounted_as.describe()
        return {"scheme": "own", "by": self.author, **public, "settings": settings, "accounted_as": like}

    @staticmethod
    def described(description: Mapping[str, Any]) -> OwnSampling:
        """What `describe` wrote; if the class is not imported here, enough of it to account for it."""
        author, given, like = (description[key] for key in ("by", "settings", "accounted_as"))
        public = {name: description[name] for name in ("population", "steps")}
        text = json.dumps(given, sort_keys=True)
        elsewhere = _DrawnElsewhere(**public, by=author, given=text, like=sampling_from(like))
        return OwnSampling.imported(author, **public, **given) or elsewhere

    @property
    def claim(self) -> str:
        """What a statement says of it."""
        return (
            f"by its author: a draw of {self.author} tells no more of a record than one of "
            f"{type(self.accounted_as).__name__}; how often records are drawn, and together, was tried "
            "before the start"
        )

    def check(self) -> None:
        """Draw many times from as many records as the population.

        Raises:
            PlanError: records are not drawn as often, or not as independently, as the claim says.
        """
        like, records = self.accounted_as, self.population
        if type(like) not in (Poisson, FullBatch) or (like.population, like.steps) != (records, self.steps):
            raise PlanError(
                f"{self.author} is accounted as {like}: give Poisson or FullBatch of the same population and "
                "steps"
            )
        key = secrets.Secrets(reproducible_seed=0)
        count = max(50, min(_DRAWS, round(_RECORDS / like.expected_size)))
        drawn = [self.sample(key, Draw("batch", index, index), records) for index in range(count)]
        if any(one.dtype != torch.int64 or not bool((one.diff() > 0).all()) for one in drawn):
            raise PlanError(f"{self.author}.sample must return sorted int64 positions, each at most once")
        if not torch.equal(drawn[0], self.sample(key, Draw("batch", 0, 0), records)):
            raise PlanError(
                f"{self.author} draws other records when a draw is repeated: take all random numbers from "
                "`secrets`, as secrets.sampling_generator(draw.index, draw.parameters). Nothing was spent"
            )
        if like.sampling_rate < 1 and torch.equal(
            drawn[0], self.sample(secrets.Secrets(reproducible_seed=1), Draw("batch", 0, 0), records)
        ):
            raise PlanError(
                f"{self.author} draws the same records under another key: whoever has the class knows who is "
                "drawn. Take all random numbers from `secrets`. Nothing was spent"
            )
        wrong = [what for what, score in _scores(drawn, like).items() if not abs(score) <= _LIMIT]
        if wrong:
            raise PlanError(
                f"{self.author} is accounted as {like}, and {count} draws differ from its in "
                f"{' and '.join(wrong)}. Nothing was spent"
            )


def _scores(drawn: Sequence[torch.Tensor], like: Sampling) -> dict[str, float]:
    """How far draws are from those of a sampling, in deviations of a sound one."""
    count, n, rate = len(drawn), like.population, like.sampling_rate
    sizes = torch.tensor([float(len(one)) for one in drawn], dtype=torch.float64)
    times = torch.bincount(torch.cat([*drawn]), minlength=n).double()
    again = torch.tensor([float(torch.isin(*pair).sum()) for pair in pairwise(drawn)])
    # What has no deviation must be met; one record is then as far as a thousand deviations.
    rough = 1e-3
    spread, size = math.sqrt(n * rate * (1 - rate)), like.size_deviation
    return {
        "how often a record is drawn": float(
            ((times - count * rate).square().sum() / max(count * rate * (1 - rate), rough) - n)
            / math.sqrt(2 * n)
            if rate < 1
            else (times.min() - count) / rough
        ),
        "their mean size": float((sizes.mean() - n * rate) * math.sqrt(count) / max(size, rough)),
        "how much their sizes vary": float(
            (sizes.var() - size**2) * math.sqrt(count / 2) / max(size**2, rough)
        ),
        "how many records two draws in a row share": float(
            (again.mean() - n * rate**2) * math.sqrt(count) / max(2 * rate * spread, rough)
        ),
    }


@dataclass(frozen=True)
class _NoiseElsewhere(OwnMechanism):
    by: str
    noise_multiplier: float
    given: str

    author = property(lambda self: self.by)

    def settings(self) -> dict[str, Any]:
        return {"noise_multiplier": self.noise_multiplier, **json.loads(self.given)}

    def noise(self, normals: torch.Tensor, bound: float) -> torch.Tensor:
        raise PlanError(f"noise of {self.by} is made by that class: import it before the run goes on")


@dataclass(frozen=True)
class _DrawnElsewhere(OwnSampling):
    population: int
    steps: int
    by: str
    given: str
    like: Sampling

    author = property(lambda self: self.by)
    accounted_as = property(lambda self: self.like)

    def settings(self) -> dict[str, Any]:
        return {"population": self.population, "steps": self.steps, **json.loads(self.given)}

    def sample(self, secrets: Any, draw: Draw | int, records: int | torch.Tensor) -> torch.Tensor:
        raise PlanError(f"draws of {self.by} are made by that class: import it before the run goes on")
