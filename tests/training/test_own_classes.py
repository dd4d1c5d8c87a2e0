"""What is not the library's own is refused by name or named in the statement."""

from dataclasses import dataclass, replace

import pytest
import torch
from small_problems import RECORDS, loss, network, records, training

import equipoise as eq
from equipoise.methods.base import Plan
from equipoise.methods.clip_rules import Abadi as LibrarysAbadi
from equipoise.methods.clip_rules import ClipRule
from equipoise.privacy import Gaussian as LibrarysGaussian
from equipoise.privacy import PlanError, PrivacyPlan, Release, Unit, clip
from equipoise.privacy.mechanisms import Staged


class Poisson(eq.Poisson):
    """Always the first records."""

    def sample(self, secrets, draw, num_records):
        return torch.arange(10)


@dataclass(frozen=True)
class Gaussian(LibrarysGaussian):
    """Without noise."""

    def noised(self, sums, streams, over_steps=None):
        return {name: dict(bounded.value) for name, bounded in sums.items()}


class Nobody(Unit):
    pass


@dataclass(frozen=True, kw_only=True)
class FromScratch(eq.Method):
    """A method whose plan is one of those below."""

    name = "from-scratch"
    kind: str = "none"

    def plan(self, setting):
        mechanism = {"mechanism": Gaussian(1.0), "staged": Staged(Gaussian(1.0), (0, 2), (1.0, 2.0))}
        release = Release("gradient", 0.5, mechanism.get(self.kind, LibrarysGaussian(1.0)))
        sampling, relation = setting.sampling, setting.relation
        if self.kind == "sampling of a release":
            release = replace(release, sampling=Poisson(10, RECORDS, 4))
        made = PrivacyPlan([release], sampling, relation)
        return Plan(replace(made, unit=Nobody()) if self.kind == "unit" else made)

    def step(self, context, state):
        draw = context.draw("batch")
        sums = draw.query(lambda rows, ids: {"gradient": clip(rows, LibrarysAbadi(), 0.5)})
        return context.ledger.release(draw, sums)["gradient"], state


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sampling": Poisson(10, RECORDS, 4)}, "Poisson"),
        *(
            ({"method": FromScratch(kind=kind)}, name)
            for kind, name in {
                "mechanism": "Gaussian", "staged": "Gaussian", "sampling of a release": "Poisson",
                "unit": "Nobody",
            }.items()
        ),
    ],
)  # fmt: skip
def test_what_the_accountant_takes_at_its_word_is_the_librarys_own(options, name, tmp_path):
    with pytest.raises(PlanError, match=rf"{__name__}:{name} .*not the library's"):
        training(steps=4, folder=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Abadi(ClipRule):
    kind = "abadi"

    def _weights(self, norms, threshold):
        return 0 * norms


class OwnLedger(eq.privacy.Ledger):
    pass


class OwnTraining(eq.PrivateTraining):
    ledger_class = OwnLedger


NOISE = {"clip_norm": 0.5, "noise_multiplier": 1.0}


def test_a_ledger_and_a_training_of_ones_own_are_named():
    model, options = network(), {"sampling": eq.Poisson(12, RECORDS, 2), "method": eq.DPSGD(**NOISE)}
    run = OwnTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.3), loss=loss, data=records(), **options
    )
    named = [text for text in run.statement().assumptions if f"{__name__}:" in text]
    assert [text.split(",")[0].split(":")[1].split()[0] for text in named] == ["OwnTraining", "OwnLedger"]
    assert ClipRule.kinds()["abadi"] is LibrarysAbadi  # no class of one's own takes the place of a kind
