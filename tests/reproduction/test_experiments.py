"""The experiments: a short look at each, what their noise costs, the trainings by hand; (slow) every bar."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.federated import ServerRMS
from equipoise.methods import (
    DCDPSGD,
    DPSGD,
    DiceSGD,
    DPC4Plus,
    Every,
    PublicRecords,
    PublicSubspace,
    RandomSubspace,
)
from equipoise.methods.base import Setting
from equipoise.methods.dp_c4 import Distance, ReleasedNorm
from equipoise.privacy import FullBatch, Poisson
from equipoise.published.dc_dpsgd import average_noise
from equipoise.training import PrivateTraining, Run
from reproduction.findings import Curve, Findings, Site, Table, Verdict
from reproduction.harness import Problem, follow
from reproduction.neighbours import PIPELINES, audit
from reproduction.papers import (
    EXPERIMENTS,
    TITLES,
    adaptive_rms,
    adaptive_rms_fl,
    adaptive_rms_images,
    dc_dpsgd_ablations,
    dice_sgd,
    fed_pcdp,
    fed_pcdp_images,
    fed_pcdp_one_class,
    find_experiment,
    pcdp_sgd,
    pcdp_sgd_subspaces,
)
from reproduction.papers.dc_dpsgd import regression as heavy_tailed
from reproduction.papers.dc_dpsgd_long_tail import ARMS, error_of
from reproduction.papers.small_regressions import POPULATION, regression
from reproduction.result_cache import ResultCache
from tests.reproduction.made_up import images, nothing

pytestmark = pytest.mark.filterwarnings("ignore:the subspace captures")


# ---- trainings, findings and runs that are kept


def test_numbers_are_those_of_the_training():
    """The same steps through PrivateTraining by hand, with a changing learning rate."""
    rng = torch.Generator().manual_seed(1)
    x, solution = (
        torch.randn(40, 3, generator=rng, dtype=torch.float64),
        torch.tensor([1.0, -1.0, 0.5]).double(),
    )
    data = {"x": x, "y": x @ solution}

    def make():
        return nn.utils.skip_init(nn.Linear, 3, 1, bias=False, dtype=torch.float64).apply(
            lambda one: nn.init.zeros_(one.weight)
        )

    def loss(model, batch):
        return 0.5 * (model(batch["x"])[:, 0] - batch["y"]) ** 2

    problem = Problem("interp", make, loss, data, 40, lambda m: float((m.weight.detach() - solution).norm()))
    sampling, method = Poisson(8, 40, 6), DPSGD(clip_norm=1.0, noise_multiplier=0.5)
    rate, at = (lambda k: 0.3 / (1 + k)), [0, 2, 6]
    found = follow(method, problem, sampling=sampling, learning_rate=rate, seed=4, measure_at=at)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    run = Run(seed=4, reproducible=True, scheduler=scheduler)
    training = PrivateTraining(
        model, optimizer, loss=loss, data=data, sampling=sampling, method=method, run=run
    )
    by_hand = {0: problem.error(model)}
    for step in training:
        by_hand[step.step] = problem.error(model)
    assert list(found) == at
    assert found == pytest.approx({k: by_hand[k] for k in found}, rel=1e-12)


def test_findings_survive_a_file():
    seeds = [{0: 1.0, 10: 0.4}, {0: 1.0, 10: 0.6}]
    table = Table(["method", "T=10"], [["DP-SGD", 0.5], ["diverges", math.inf]], note="median of 2 seeds")
    verdicts = [Verdict.at_most("small", 0.5, 1.0), Verdict.at_least("large", 0.5, 1.0)]
    numbers = {("DP-SGD", 10): 1 / 3, ("diverges", 10): math.inf}
    findings = Findings(table, [Curve.of_seeds("DP-SGD", seeds, "interp")], verdicts, numbers)
    back = json.loads(json.dumps(findings.to_json(), allow_nan=False))
    assert back["table"]["rows"][1][1] == "inf"
    assert [verdict["met"] for verdict in back["verdicts"]] == [True, False]
    assert back["numbers"] == [["DP-SGD", 10, 0.333333], ["diverges", 10, "inf"]]


def test_finished_runs_are_not_run_again(tmp_path):
    done, path = [], tmp_path / "runs.jsonl"
    planned = [({"number": n}, lambda n=n: done.append(n) or {"value": n}) for n in range(3)]
    assert [r["value"] for r in ResultCache(path).finish(planned, nothing)] == [0, 1, 2]
    with path.open("a") as file:
        file.write('{"settings": {"number": 3}, "res')  # a kill in the middle of a line
    path.write_text(re.sub(r'("processor_seconds": )[\d.]+', r"\g<1>2.5", path.read_text()))
    kept = ResultCache(path)
    assert len(kept) == 3
    assert [r["value"] for r in kept.finish(planned, nothing)] == done == [0, 1, 2]
    assert kept.seconds_before == 7.5
    assert kept.result({"number": 1, "rounds": 2}, lambda: {"value": 9}) == {"value": 9}  # other settings


def test_every_experiment_has_its_runs_and_their_methods():
    """A method that cannot be made would stop the experiment after an hour of others."""
    for name in EXPERIMENTS:
        assert (find_experiment(name).name, find_experiment(name).title) == (name, TITLES[name])
    made = [(run.part, run.label, run.method()) for run in adaptive_rms.runs()]
    assert len({one[:2] for one in made}) == len(made)
    assert len({(run.part, run.kind, adaptive_rms_fl.halves(run)) for run in adaptive_rms_fl.runs()}) > 1
    assert all(run.method(0).name for run in pcdp_sgd.experiment_runs())
    lines = pcdp_sgd_subspaces.arms()
    assert len({(arm.part, arm.label) for arm in lines}) == len(lines)
    assert {arm.make(0).name for arm in lines} == {"dp-sgd", "pcdp-sgd", "pdp", "rpdp", "gep"}
    assert len({(arm.label, arm.epsilon) for arm in ARMS}) == len(ARMS) == 2 * 9 + 1


# ---- what noise costs


def test_the_constants_of_epsilon_8():
    """1.286 without a query; 1.661 and 6.58 with half of the budget for the query of all records."""
    sampling = Poisson(100, 1000, 300)
    query = ServerRMS(1.0, round_length=5, noise_multiplier=1.661, radius_noise_multiplier=6.58)
    for method in (eq.DPSGD(clip_norm=1.0, noise_multiplier=1.286), query):
        plan = method.plan(Setting(sampling=sampling)).releases
        assert plan.epsilon(1e-5).value == pytest.approx(8, rel=0.01)
    setting = Setting(sampling=sampling, budget=eq.Budget(8.0, 1e-5))
    planned = ServerRMS(1.0, round_length=5, radius_share=0.5).plan(setting).releases
    assert planned["gradient"].noise_multiplier == pytest.approx(1.661, rel=0.01)
    assert planned["squares"].noise_multiplier == pytest.approx(6.58, rel=0.01)


@pytest.mark.parametrize("form", [dc_dpsgd_ablations.ALGORITHM, dc_dpsgd_ablations.PROGRAM])
def test_labels_by_lot_have_the_noise_of_the_form(form):
    """In the column k of the ablations "none" differs from 200 in the labels alone."""
    usual, lots = (dc_dpsgd_ablations.Arm("images", form, "k", k) for k in ("200", "none"))
    setting = Setting(sampling=usual.sampling, budget=dc_dpsgd_ablations.BUDGET)
    (release,) = lots.method().plan(setting).releases.releases
    noise, plan = release.mechanism.noise_multiplier * release.max_bound, usual.method().plan(setting)
    if form == dc_dpsgd_ablations.ALGORITHM:
        (printed,) = plan.releases.releases
        assert noise == pytest.approx(printed.mechanism.noise_multiplier * printed.max_bound)
    else:
        assert noise == pytest.approx(average_noise(plan.constants[0], 1.0, 0.1, 0.1))


def test_what_can_be_proved_of_the_published_rows():
    rows = {row.label: dice_sgd._honest(row.make()) for row in dice_sgd.POINT_ROWS}
    assert rows["DiceSGD as published, algorithm 4 noise"] == pytest.approx(1.8e5, rel=0.03)
    assert rows["DiceSGD as published, theorem noise"] == pytest.approx(21.9, rel=5e-3)
    assert rows["DiceSGD as published, worst case noise"] == pytest.approx(1, rel=1e-3)
    assert rows["DP-SGD, clip norm 10"] == 1


# ---- short looks


def end(method, problem, sampling, rate):
    at = sampling.steps
    return follow(method, problem, sampling=sampling, learning_rate=rate, seed=0, measure_at=[at])[at]


def test_dc_dpsgd_comes_near_the_answer_without_noise():
    """On Gaussian noise with hardly any noise of privacy: least squares, 51 * 20 / 2000 away."""
    method = DCDPSGD(clip_norm=1e4, body_clip_norm=1e4, noise_multiplier=1e-9)
    found = end(method, heavy_tailed("Gaussian", 0, records=2000), FullBatch(2000, 20), 0.6)
    assert found == pytest.approx(51 * 20 / 2000, rel=0.4)
    (free,) = [arm for arm in ARMS if arm.label == "no privacy"]
    assert error_of(free, 0, steps=50)[50] < 0.45  # of rare classes


def test_interpolation_by_dp_c4_plus():
    """After 100 steps it is within reach of the solution and DP-SGD is still on its way."""
    c4 = DPC4Plus(
        clip_norm=20.0, coupled=Distance(10.0), anchor=ReleasedNorm(4.0), anchor_batch_size=POPULATION,
        schedule=Every(16), noise_multiplier=2.6572, anchor_noise_multiplier=22.291,
    )  # fmt: skip
    problem, sampling = regression("interp"), Poisson(64, POPULATION, 100)
    assert end(c4, problem, sampling, 0.1) < 0.06
    assert end(DPSGD(clip_norm=1.0, noise_multiplier=2.044), problem, sampling, 0.02) > 1


def test_feedback_removes_the_bias_that_clipping_leaves():
    """At little noise; the experiment itself runs at a true epsilon of 1."""
    given = dice_sgd.point(population=1000), Poisson(200, 1000, 150), lambda step: 0.4 * (1 - step / 150)
    assert 0.5 < end(DPSGD(clip_norm=3.0, noise_multiplier=0.1), *given) < 0.9
    assert end(DiceSGD(clip_norm=3.0, residual_clip_norm=15.0, noise_multiplier=0.1), *given) < 0.15


def test_a_good_subspace_wins_and_a_random_one_stays():
    """The means in 100 dimensions, an eighth of the work of the experiment, with wide margins."""
    problem, sampling = pcdp_sgd.means(0, 5000, 100), Poisson(250, 5000, 120)
    span = PublicSubspace(PublicRecords({"x": pcdp_sgd.span(0, 100)}), refresh_every=pcdp_sgd.NEVER)
    chance = RandomSubspace(dimension=10, refresh_every=pcdp_sgd.NEVER)
    noise = {"clip_norm": 3.0, "noise_multiplier": 4.0}
    pcdp = end(eq.PCDPSGD(source=span, **noise), problem, sampling, 0.03)
    assert pcdp < 2e-3
    assert pcdp < end(eq.methods.PDPSGD(source=span, **noise | {"clip_norm": 10.0}), problem, sampling, 0.03)
    assert end(eq.DPSGD(**noise), problem, sampling, 0.01) > 5 * pcdp
    assert end(eq.methods.RandomProjection(source=chance, **noise), problem, sampling, 0.03) > 0.15


def test_tables_of_the_image_experiments_hold_what_is_finished():
    result = {"accuracy": {"80": 0.8}, "epsilon": 0.5, "bytes_up": 6400, "bytes_down": 104040}
    planned = fed_pcdp_images.cases() + fed_pcdp_images.epoch_cases()
    some = {case: [result] for case in [*planned[:4], *planned[-2:]]}
    some[planned[-1]] = [{**result, "accuracy": {"80": 0.81}}]
    found = fed_pcdp_images.summarise({case: some.get(case, []) for case in planned})
    assert len(found.table.rows) == 6
    # equal accuracies where the paper's is ahead; ahead where the paper's is behind
    against = [verdict for verdict in found.verdicts if "less FedAvg in points" in verdict.sentence]
    assert [verdict.met for verdict in against] == [True, False]
    case = adaptive_rms_images.Case("mnist", 2, 1.0, "published", 0.1, 0.3)
    one = {"loss": 1.0, "accuracy": 0.6, "epsilon": 1.0, "radius": 0.1}
    rows = adaptive_rms_images.summarise({case: [one, one]}).table.rows
    assert rows[0][:4] == ["MNIST", 2, 1.0, "published"]


@pytest.mark.parametrize(
    "name", ["LoRA by hand", *(pytest.param(n, marks=pytest.mark.slow) for n in PIPELINES)]
)
def test_one_record_moves_the_sum_of_a_pipeline_by_its_bound(name, request):
    is_short = request.node.get_closest_marker("slow") is None
    assert audit(name, **({"positions": 1, "threads": (1,)} if is_short else {})).holds


# ---- whole, and slow


@pytest.mark.slow
@pytest.mark.parametrize("method", fed_pcdp_images.METHODS)
def test_a_case_on_made_up_images(method, monkeypatch):
    monkeypatch.setattr(fed_pcdp_images, "RECORDS", 300)
    case = fed_pcdp_images.Case("mnist", "one-class", 4.0, method)
    found = fed_pcdp_images.run_case(case, images(3400), seed=0, rounds=2)
    assert found["bytes_up"] == (6400 if method in ("fedpdp", "fedpcdp") else 104_040)
    assert set(found["accuracy"]) == {"2"}


@pytest.mark.slow
def test_rivals_and_fixed_features_train(monkeypatch):
    for module in (fed_pcdp, fed_pcdp_one_class):
        monkeypatch.setattr(module, "ROUNDS", 1)
    for arm in fed_pcdp_one_class.ARMS:
        assert 0 < fed_pcdp_one_class.measure(arm, 0)["1"] < 1
    case = adaptive_rms_images.Case("mnist", 2, 8.0, "published", 0.5, 0.3)
    found = adaptive_rms_images.run_case(case, images(3200), seed=0, rounds=10)
    assert found["accuracy"] > 0.5
    assert found["epsilon"] <= 8


SEEDS = {
    "adaptive-rms": 3, "adaptive-rms-fl": 3, "dc-dpsgd": 20, "dc-dpsgd-long-tail": 6, "dice-sgd": 10,
    "dp-c4": 5, "fed-pcdp": 3, "pcdp-sgd-subspaces": 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_the_bars_are_met(name):
    found = find_experiment(name).carry_out(range(SEEDS[name]), nothing, Site(None, ResultCache(None)))
    missed = [verdict.sentence for verdict in found.verdicts if not verdict.met]
    # No mode of DC-DPSGD with a guarantee is ahead on rare classes; the authors' program has none.
    assert not [one for one in missed if name != "dc-dpsgd-long-tail" or "authors' program" not in one]
