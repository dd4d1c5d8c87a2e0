"""Statements that contradict what stands beside them, and classes of one's own, refused or named."""

import copy
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
from equipoise.statements.consistency import check_metrics, check_settings

STATEMENT = {
    "recipe": "library", "guarantee": "proven", "epsilon": 2.0, "other_runs": 0, "search": None,
    "releases": [
        {
            "name": "gradient", "draw": "batch", "count": 3, "used": 3, "max_bound": 0.1,
            "mechanism": {"kind": "gaussian", "noise_multiplier": 1.5},
        }
    ],
    "unproven": [], "holes": [],
}  # fmt: skip
UNPROVEN = STATEMENT | {
    "recipe": "as_published", "guarantee": "worst_case", "releases": [],
    "unproven": [{"name": "update", "draw": "batch", "count": 3}],
    "holes": [{"kind": "release_unproven", "reason": "x", "count": 3, "worst_case": 1.0}],
}  # fmt: skip
CONFIG = {"sampling": {"steps": 3}}
ROWS = [
    {"step": 1, "learning_rate": 1.0, "epsilon": 1.0},
    {"step": 1, "evaluation.accuracy": 0.1},
    {"step": 2, "learning_rate": 1.0},
    {"step": 3, "learning_rate": 1.0, "epsilon": 2.0},
]


def method(name, **described):
    return {"method": {"name": name} | described}


def fits(findings):
    return all(finding.ok is not False for finding in findings)


PUBLIC = {"records": 9, "digest": "x"}
PUBLISHED = STATEMENT | {"recipe": "as_published"}


@pytest.mark.parametrize(
    ("statement", "config", "right"),
    [
        (STATEMENT, method("dp-sgd"), True),
        (PUBLISHED, method("of my own", recipe="as_published"), True),
        (PUBLISHED, method("dp-sgd"), False),
        (STATEMENT, method("dice-sgd", recipe="as_published"), False),
        (PUBLISHED, method("moon", inner=method("dice-sgd", recipe="as_published")["method"]), True),
        (PUBLISHED, method("moon", inner=method("dp-sgd")["method"]), False),
    ],
)
def test_the_recipe_is_that_of_the_method_that_releases(statement, config, right):
    assert fits(check_settings(statement, config)) is right


def used(statement, number):
    changed = copy.deepcopy(statement)
    for row in changed["releases"]:
        row["used"] = number
    for row in changed["holes"]:
        row["count"] = number
    return changed


@pytest.mark.parametrize(
    ("statement", "rows", "right"),
    [
        (STATEMENT, ROWS, True),
        (UNPROVEN, ROWS, True),
        (STATEMENT, [], True),
        (used(STATEMENT, 2), ROWS, False),
        (used(UNPROVEN, 2), ROWS, False),
        (UNPROVEN | {"holes": []}, ROWS, False),
        (used(STATEMENT, 0) | {"epsilon": 0.0}, ROWS, False),
        (STATEMENT | {"epsilon": 1.9}, ROWS, False),
        (STATEMENT | {"epsilon": 2.02}, ROWS, True),
        (STATEMENT | {"epsilon": 2.1, "other_runs": 1}, ROWS, True),
        (STATEMENT | {"epsilon": 4.1, "search": {"mean": 10.0, "shape": 1.0}}, ROWS, True),
        (STATEMENT | {"epsilon": None, "guarantee": "none"}, ROWS, True),
        (STATEMENT, [ROWS[0] | {"epsilon": 3.0}, *ROWS[1:]], False),
        (STATEMENT, [*ROWS, ROWS[3] | {"step": 4}], False),
        (STATEMENT, ROWS[:3], True),  # stopped before its end, and a release of the next step is booked
    ],
)
def test_the_metrics_tell_of_no_more_than_the_statement(statement, rows, right):
    assert fits(check_metrics(statement, CONFIG, rows)) is right


SAMPLING = {"scheme": "Poisson", "expected_batch_size": 20.0, "population": 100, "steps": 4}
SETTLED = {
    "recipe": "library", "plan": "a" * 64, "private": True, "noise": "floating_point",
    "relation": "add_or_remove_one", "unit": "record", "sampling": SAMPLING, "delta": 1e-5,
    "releases": [{"name": "gradient"}],
}  # fmt: skip
CONFIGURED = {
    "plan": "a" * 64,
    "settings": {"reproducible": False, "hardened": False, "relation": "add_or_remove_one", "unit": "record"},
    "sampling": SAMPLING,
    "budget": {"epsilon": 8.0, "delta": 1e-5},
}


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("private", {"settings": {"reproducible": True}}),
        ("noise", {"settings": {"hardened": True}}),
        ("noise", {"settings": {"hardened": "no"}}),
        ("relation", {"settings": {"relation": "replace_one"}}),
        ("unit", {"settings": {"unit": "user"}}),
        ("users", {"settings": {"unit": "user", "records_per_user": 4}}),
        ("sampling", {"sampling": SAMPLING | {"population": 1000}}),
        ("sampling", {"sampling": SAMPLING | {"steps": 5}}),
        ("sampling", {"sampling": SAMPLING | {"steps": 3}} | method("dp-sgd", public=PUBLIC)),
        ("delta", {"budget": {"epsilon": 8.0, "delta": 1e-6}}),
        ("plan", {"plan": "0" * 64}),
    ],
)
def test_a_statement_and_its_configuration_must_not_differ(key, change):
    assert [finding.ok for finding in check_settings(SETTLED, CONFIGURED)] == [True]
    (wrong,) = check_settings(SETTLED, CONFIGURED | change)
    assert (wrong.subject, wrong.ok) == ("configuration", False)
    assert key in wrong.detail


def test_a_plan_may_have_no_noise_to_harden_and_fewer_steps_where_some_draw_public_records_alone():
    hardened = CONFIGURED | {"settings": {"hardened": True}}
    assert fits(check_settings(SETTLED | {"releases": [], "unproven": []}, hardened))
    longer = {"sampling": SAMPLING | {"steps": 5}} | method("public-warm-start", public=PUBLIC)
    assert fits(check_settings(SETTLED, CONFIGURED | longer))


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
