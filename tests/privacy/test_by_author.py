"""Noise and samplings of a user's own: a sound one trains under its author's name, a wrong one is refused."""

import contextlib
import json
from dataclasses import dataclass

import jsonschema
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import privacy as ep
from equipoise.methods import Plan
from equipoise.privacy import capped
from equipoise.statements import verify_run
from equipoise.statements.statement import statement_schema


@dataclass(frozen=True)
class Louder(ep.OwnMechanism):
    noise_multiplier: float
    factor: float = 1.5
    truth: float = 1.0

    def standard_deviation(self, name, bound):
        return self.factor * self.noise_multiplier * bound

    def noise(self, normals, bound):
        return self.truth * self.standard_deviation("", bound) * normals


class OfItsOwnGenerator(Louder):
    def noise(self, normals, bound):
        return super().noise(torch.randn(normals.shape), bound)


class ForgetsTheBound(Louder):
    def noise(self, normals, bound):
        return super().noise(normals, 1.0)


@dataclass(frozen=True)
class Coins(ep.OwnSampling):
    population: int
    steps: int
    expected: float = 50.0
    rate: float | None = None

    @property
    def accounted_as(self):
        return ep.Poisson(self.expected, self.population, self.steps)

    def sample(self, secrets, draw, records):
        count = records if isinstance(records, int) else len(records)
        rate = self.rate or self.expected / self.population
        numbers = torch.rand(count, generator=secrets.sampling_generator(draw.index, draw.parameters))
        return (numbers < rate).nonzero().flatten()


class Shuffled(Coins):
    """Slices of a shuffled epoch."""

    def sample(self, secrets, draw, records):
        slices = round(self.population / self.expected)
        order = torch.randperm(records, generator=secrets.sampling_generator(draw.index // slices, "epoch"))
        return order.chunk(slices)[draw.index % slices].sort().values


class InPairs(Coins):
    """Neighbours are drawn together."""

    def sample(self, secrets, draw, records):
        pairs = super().sample(secrets, draw, records // 2)
        return torch.cat([2 * pairs, 2 * pairs + 1]).sort().values


@dataclass(frozen=True)
class Of(ep.OwnSampling):
    """Of a generator that does not follow the key."""

    generator: object
    population: int
    steps: int
    accounted_as = property(lambda self: ep.Poisson(50, self.population, self.steps))

    def sample(self, secrets, draw, records):
        return (
            (torch.rand(records, generator=self.generator(draw)) < 50 / self.population).nonzero().flatten()
        )


class OfFixedSize(Coins):
    accounted_as = property(lambda self: ep.WithoutReplacement(50, self.population, self.steps))


@dataclass(frozen=True, kw_only=True)
class Method(eq.DPSGD):
    name = "with-own-noise"

    def plan(self, setting):
        return Plan(self.calibrated(setting, Louder))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Louder(1.0, truth=0.95), "adds noise of deviation 1.4"),
        (OfItsOwnGenerator(1.0), "random numbers of its own"),
        (ForgetsTheBound(1.0), "to a sum of bound 30"),
        (Of(lambda draw: torch.Generator().manual_seed(draw.index), 300, 5), "under another key"),
        (Of(lambda draw: None, 300, 5), "when a draw is repeated"),
        (OfFixedSize(300, 5), "give Poisson or FullBatch"),
        (Coins(300, 5, rate=0.19), "how often a record"),
        (Shuffled(300, 5), "two draws in a row"),
        (InPairs(300, 5), "sizes vary"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_differs_from_its_claim_is_refused(part, why):
    with pytest.raises(ep.PlanError, match=why):
        part.check()


@pytest.mark.parametrize("part", [Louder(0.7), Coins(300, 5), Coins(3000, 5, 10.0)])
def test_what_is_sound_is_taken(part):
    part.check()


def test_a_run_names_the_author_goes_on_and_is_verified_without_the_class(tmp_path, monkeypatch):
    def arguments():
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        return (model, torch.optim.SGD(model.parameters(), lr=0.01)), {
            "loss": lambda model, batch: model(batch["x"]).square().sum(1),
            "data": {"x": torch.arange(1500.0).view(300, 5) / 1500},
            "method": Method(),
        }

    given, named = arguments()
    whole = {"sampling": Coins(300, 4), "budget": eq.Budget(4.0, 1e-3), "run": tmp_path / "run"}
    training = eq.PrivateTraining(*given, **named, **whole)
    training.take_step()
    training.save_checkpoint()
    training.close()
    given, named = arguments()
    result = eq.PrivateTraining.resume(tmp_path / "run", *given, **named).run(progress=False)
    plain = ep.PrivacyPlan(
        [ep.Release("gradient", 1.0, eq.privacy.Gaussian(training.plan["gradient"].noise_multiplier))],
        ep.Poisson(50, 300, 4),
    )
    assert result.epsilon == pytest.approx(plain.epsilon(1e-3).value)
    authors = [one for one in result.statement.assumptions if one.startswith("by its author")]
    assert [Louder.__qualname__ in authors[0], Coins.__qualname__ in authors[1]] == [True, True]
    assert "by the word of the author" in result.statement.sections()[0][0]
    jsonschema.validate(json.loads(result.statement.to_json()), statement_schema())
    monkeypatch.setattr(ep.OwnMechanism, "known", {})
    monkeypatch.setattr(ep.OwnSampling, "known", {})
    assert verify_run(tmp_path / "run").consistent
    for name, key in (("statement.json", "assumptions"), ("config.json", "conditions")):
        file = tmp_path / "run" / name
        told = json.loads(file.read_text())
        told[key] = [text for text in told[key] if not text.startswith("by its author")]
        file.write_text(json.dumps(told))
    assert not verify_run(tmp_path / "run").consistent
    described = training.plan.describe()
    elsewhere = ep.PrivacyPlan.from_description(described)
    assert elsewhere.describe() == described
    assert elsewhere.epsilon(1e-3) == training.plan.epsilon(1e-3)


def test_noise_of_an_edited_class_is_another_question(tmp_path, monkeypatch):
    """The same normals under other noise, of the same sum, would show it."""
    released, ledgers = [], []
    secrets = ep.Secrets(reproducible_seed=0)
    for scale in (1.0, 0.5):
        monkeypatch.setattr(Louder, "noise", lambda self, normals, bound, scale=scale: scale * normals)
        plan = ep.PrivacyPlan([ep.Release("total", 5.0, Louder(1.0))], ep.Poisson(50, 300, 4))
        with contextlib.closing(ep.Journal(tmp_path / "journal")) as journal:
            ledger = ep.Ledger(plan, journal=journal, secrets=secrets)
            draw = ledger.open("batch", "here")
            sums = {"total": capped(ep.Private(torch.ones(3), draw), 5.0)}
            if scale < 1:
                with pytest.raises(ep.ChangedQueryError):
                    ledger.release(draw, sums)
                draw = ledger.open("batch", "here")
                sums = {"total": capped(ep.Private(torch.ones(3), draw), 5.0)}
            released.append(float(ledger.release(draw, sums)["total"]["sum"]) - 3.0)
            ledgers.append(sum(ledger.record.used.values()))
    assert ledgers == [1, 2]
    assert released[1] != 0.5 * released[0]
