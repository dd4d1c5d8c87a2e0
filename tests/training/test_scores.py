"""Private scores: against brute force, on the records that are held apart, and for what they cost."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from sklearn import metrics
from small_problems import (
    CLASSES,
    OnDemand,
    loss,
    network,
    parameters,
    records,
    releases,
    resumed,
    saved,
    training,
)
from torch import nn

import equipoise as eq
from equipoise import Metric, Score
from equipoise.audit.replay import RecordingLedger
from equipoise.gradients import CrossRecordError
from equipoise.privacy import Budget, PlanError, PlanUsedUpError, Private
from equipoise.privacy.bounds.counts import histogram
from equipoise.privacy.private import unwrap
from equipoise.published.non_private import PlainSGD
from equipoise.statements.assumptions import Assumption
from equipoise.training.record_source import BatchFormError, DataError
from equipoise.training.scores import METRICS, metric_of
from equipoise.training.setup.private_scores import SCORE

COUNT, SHARE = 240, 0.25
BUDGET = Budget(4.0, 1e-5)


class ExactLedger(RecordingLedger):
    """Adds no noise."""

    def _noised(self, mechanism, sums, streams, over_steps):
        return {name: {k: unwrap(v) for k, v in one.value.items()} for name, one in sums.items()}


class Recorded(eq.PrivateTraining):
    ledger_class = RecordingLedger


class Exact(eq.PrivateTraining):
    ledger_class = ExactLedger


def scored(
    score, kind=Recorded, *, model=None, data=None, steps=6, sampling=None, rate=0.5, folder=None, **options
):
    model = network(dropout=0.3) if model is None else model
    fields = {one.name for one in dataclasses.fields(eq.Run)} & options.keys()
    run = {"reproducible": True, "seed": 5} | {name: options.pop(name) for name in fields}
    return kind(
        model,
        torch.optim.SGD(model.parameters(), lr=rate),
        data=eq.Data(records(COUNT) if data is None else data, score=score),
        sampling=sampling or eq.Poisson(40, round(COUNT * (1 - SHARE)), steps),
        run=eq.Run(folder, **run),
        **{"loss": loss, "budget": BUDGET} | options,
    )


def sides(run):
    """Numbers of the records that are scored, and of those, or the users, that are trained on."""
    return run._setup.score.rows.members, run._setup.rows.members


def two_classes(model, batch):
    return model(batch["input"])[:, :2], batch["label"] % 2


def outputs_of(kind, count=400):
    rng = torch.Generator().manual_seed(3)
    label = torch.randint(CLASSES, (count,), generator=rng)
    logits = torch.randn(count, CLASSES, generator=rng, dtype=torch.float64)
    logits[torch.arange(count), label] += 1
    if kind == "labels":
        return logits, (torch.rand(count, CLASSES, generator=rng) < 0.3).double()
    if kind == "binary":
        return logits[:, :1] - logits[:, 1:2], (label == 0).long()
    if kind == "grid":
        probability = torch.randint(1, 8, (count,), generator=rng) / 8
        return probability.logit().double(), (torch.rand(count, generator=rng) < probability).long()
    if kind == "items":
        items = torch.randn(count, 50, generator=rng)
        relevant = torch.stack([torch.randperm(50, generator=rng)[:3] for _ in range(count)])
        relevant[::4, 1:] = -1
        return items, relevant
    return logits, label


def of_recall(items, relevant, at_least_one=False):
    found = []
    for scores, mine in zip(items.numpy(), relevant.numpy(), strict=True):
        shown, mine = set(np.argsort(-scores)[:10]), {one for one in mine if one >= 0}
        found.append(bool(shown & mine) if at_least_one else len(shown & mine) / len(mine))
    return np.mean(found)


def of_calibration(logits, label):
    """On the grid, with each record shared out between the two values next to it."""
    probability, chosen = logits.softmax(1).max(1)
    share = [(at, (1 - (probability - at).abs() * 10).clamp(min=0)) for at in np.linspace(0, 1, 11)]
    found = sum(abs(float((weight * ((chosen == label).double() - at)).sum())) for at, weight in share)
    return found / len(label)


SEVERAL = "accuracy, of several labels"
WANTED = {
    SEVERAL:
        ("labels", lambda o, y: np.mean([metrics.accuracy_score(*of) for of in zip(y, o > 0, strict=True)])),
    "accuracy": ("classes", lambda o, y: metrics.accuracy_score(y, o.argmax(1))),
    "balanced-accuracy:3": ("classes", lambda o, y: metrics.balanced_accuracy_score(y, o.argmax(1))),
    "auc:32": ("binary", lambda o, y: metrics.roc_auc_score(y, o[:, 0])),
    "auc:9": ("grid", lambda o, y: metrics.roc_auc_score(y, o)),
    "calibration": ("classes", of_calibration),
    "error:1.5": ("binary", lambda o, y: (o[:, 0] - y).abs().clamp(max=1.5).mean()),
    "recall:10": ("items", of_recall),
    "hits:10": ("items", lambda o, y: of_recall(o, y, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_each_metric_is_what_others_compute(name):
    """To the digit on a grid of its own; within a step of the grid pairs are ranked by halves."""
    kind, wanted = WANTED[name]
    outputs, labels = outputs_of(kind)
    metric = metric_of(name.partition(",")[0])
    places = metric.places(outputs, labels)
    assert bool(((places >= 0) & (places <= metric.bins - 1)).all())
    sums = unwrap(histogram(Private(places), metric.bins).value["histogram"])
    error = 5e-3 if name == "auc:32" else 1e-6
    assert float(metric.read(sums)) == pytest.approx(wanted(outputs, labels), abs=error)


def test_every_metric_is_tried_and_the_error_holds_noise_and_chance():
    named = {name.partition(":")[0].replace("-", "_") for name in WANTED if name != SEVERAL}
    assert named | {"loss"} == METRICS.keys()
    rng, score = torch.Generator().manual_seed(1), Score("accuracy", share=0.1)
    found = []
    for _ in range(400):  # 80 of 100 are right on average, and each count has noise of 6
        counts = torch.poisson(torch.tensor([20.0, 80.0]), generator=rng)
        found.append(score.read(counts + 6 * torch.randn(2, generator=rng), 6.0))
    spread = np.std([one["private_accuracy"] for one in found])
    stated = np.mean([one["private_accuracy_error"] for one in found])
    assert stated == pytest.approx(spread, rel=0.15)
    assert math.isnan(score.read(torch.tensor([-5.0, 1.0]), 6.0)["private_accuracy"])


def test_the_error_is_known_beforehand():
    """As by drawing records of the stated number evenly over the places, and the noise of the plan."""
    score = Score("auc:4", share=SHARE, outputs=two_classes)
    run = scored(score)
    noise, bins = run.plan[SCORE].noise_multiplier, score.metric.bins
    drawn = torch.poisson(torch.full((2000, bins), COUNT * SHARE / bins, dtype=torch.float64))
    found = score.metric.read(drawn + noise * torch.randn(drawn.shape))
    told, spread = run.describe(), found[found.isfinite()].std()
    assert told.score_error == pytest.approx(float(spread), rel=0.2)
    assert f"{told.score_error:.2g}" in str(told)


USERS = torch.arange(COUNT) // 3
UNITS = {
    "record": {},
    "items on demand": {"data": OnDemand(records(COUNT))},
    "users drawn": {"unit": eq.Users(USERS, records_per_user=2, rows="mean")},
    "users' records": {"unit": eq.Users(USERS, records_per_user=2)},
    "averages": {"ema_decay": 0.9},
    "stages": {"stages": [eq.Stage(0, "3.*"), eq.Stage(4, "*")]},
    "data of its own": {},
}


@pytest.mark.parametrize("name", UNITS)
def test_a_score_is_that_of_the_model_in_evaluation_on_the_records_held_apart(name):
    options, data, further = UNITS[name], records(COUNT), records(50, seed=9)
    of = {"data": further, "population": 50} if "own" in name else {"share": SHARE}
    score = Score("accuracy", times=3, **of)
    drawn = COUNT if name != "users drawn" else COUNT // 3
    training = scored(score, Exact, sampling=eq.Poisson(20, round(drawn * (1 - SHARE)), 6), **options)
    if "share" in of:
        held, trained = sides(training)
        owned = held if "unit" not in options else training._setup.rows.owners.used(held)
        of_training = trained if name != "users drawn" else torch.isin(USERS, trained).nonzero().flatten()
        assert not torch.isin(of_training, held).any()
        assert len(held) + len(of_training) == COUNT
        assert 0.1 < len(held) / COUNT < 0.4
        further = {field: values[owned] for field, values in data.items()}
    for _ in range(3):
        training.take_step()
        training.take_step()
        wanted = training.evaluate(
            lambda m: (m(further["input"]).argmax(1) == further["label"]).double().mean()
        )
        assert training.evaluate(score)["private_accuracy"] == pytest.approx(wanted["score"], abs=1e-6)
        assert training.model.training
    with pytest.raises(PlanUsedUpError):
        training.evaluate(score)
    bounds = [one[SCORE] for one in training.ledger.bounds if SCORE in one]
    assert bounds == [2.0 if name == "users drawn" else 1.0] * 3


MARGIN = Metric(
    "margin", lambda o, y: (o[:, 0] - o[:, 1]).sigmoid() * 4, lambda counts: counts[..., -1], bins=5
)


@pytest.mark.parametrize("metric", ["loss:2", MARGIN], ids=["loss", "of one's own"])
def test_further_metrics_of_a_whole_training(metric):
    score, data = Score(metric, share=SHARE, times=1), records(COUNT)
    training = scored(score, Exact)
    training.take_step()
    held, _ = sides(training)
    model, batch = training.model.eval(), {name: value[held] for name, value in data.items()}
    with torch.no_grad():
        given = [loss(model, batch)] * 2 if metric == "loss:2" else [model(batch["input"]), batch["label"]]
    model.train()
    places = score.metric.places(*given)
    wanted = score.metric.read(unwrap(histogram(Private(places), score.metric.bins).value["histogram"]))
    assert training.evaluate(score)[f"private_{score.metric.name}"] == pytest.approx(float(wanted), abs=1e-5)
    assert training.independence.word == "proved"


def test_the_noise_has_the_scale_that_is_planned():
    score = Score("auc:32", share=SHARE, times=12, outputs=two_classes)
    training = scored(score, method=eq.DPSGD(noise_multiplier=20.0), reproducible=False)
    training.take_step()
    for _ in range(12):
        training.evaluate(score)
    ledger = training.ledger
    released = [
        (out[SCORE]["histogram"] - raw[SCORE]["histogram"]).double()
        for out, raw in zip(ledger.transcript, ledger.sums, strict=True)
        if SCORE in out
    ]
    noise = torch.cat(released)
    stated = training.plan[SCORE].noise_multiplier
    ratio = float(noise.square().sum()) / stated**2 / len(noise)
    spread = math.sqrt(2 / len(noise))
    assert abs(ratio - 1) < 5 * spread < 0.3  # noise of 4/5 or 5/4 of the scale would fall outside


def test_free_beside_the_training_and_paid_for_where_a_record_may_be_on_both_sides():
    free = scored(Score("accuracy", share=SHARE))
    alone = scored(None)
    assert free.plan["gradient"] == alone.plan["gradient"]
    assert free.statement().epsilon == pytest.approx(alone.statement().epsilon, rel=2e-3)
    assert free.statement().epsilon <= 4.0
    further = dict(list(records(50, seed=9).items()))
    for paid in (
        scored(Score("accuracy", data=further, population=50)),
        scored(Score("accuracy", share=SHARE), unit=eq.Record(relation="replace_one")),
    ):
        relation = paid.plan.relation
        training_alone = dataclasses.replace(paid.plan, releases=paid.plan.releases[:1])
        assert training_alone.epsilon(1e-5).value == pytest.approx(3.6, rel=0.01)
        assert 0.99 * 4 <= paid.statement().epsilon <= 4, relation
    assert paid.plan[SCORE].replace_ratio == math.sqrt(2)


def test_runs_of_one_journal_share_a_budget_scores_and_all(tmp_path):
    """A record may be scored in one run and trained on in the other, which is in the total of each side."""
    for number in range(2):
        score, folder = Score("accuracy", share=SHARE, times=2), tmp_path / str(number)
        options = {"journal": tmp_path / "journal", "folder": folder, "reproducible": False}
        run = scored(score, budget=Budget(3.0, 1e-5, runs=2), hardened=number == 1, **options)
        found = run.run(evaluate=score, progress=False)
        assert run.plan.arithmetic == ("grid" if number else "floating_point")
        assert eq.verify_run(folder).consistent
    assert 2.5 < found.epsilon <= 3
    assert found.statement.other_runs == 1


NAMED = {
    "content": (lambda data: data, False, "record"),
    "equal records": (lambda data: {k: torch.cat([v[:40]] * 6) for k, v in data.items()}, False, "record"),
    "ids": (lambda data: data, True, "record"),
    "users": (lambda data: data, False, "user"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_record_less_moves_no_other_record_to_another_side(name):
    make, is_named, unit = NAMED[name]
    whole = make(records(COUNT))

    def held(removed):
        keep = torch.arange(COUNT)[torch.arange(COUNT) != (COUNT if removed is None else removed)]
        data = {field: values[keep] for field, values in whole.items()}
        protected = unit if unit == "record" else eq.Users(keep // 3, records_per_user=3, rows="sum")
        ids = {"ids": [str(7 * i) for i in keep.tolist()]} if is_named else {}
        run = training(
            data=eq.Data(data, score=Score("accuracy", share=SHARE), **ids), method=eq.DPSGD(),
            unit=protected, sampling=eq.Poisson(10, COUNT, 2), budget=BUDGET,
        )  # fmt: skip
        return sorted(map(tuple, data["input"][sides(run)[0]].tolist()))

    before = held(None)
    for removed in (0, COUNT - 1):
        after, gone = held(removed), tuple(whole["input"][removed].tolist())
        expected = list(before)
        if len(after) < len(before):
            expected.remove(gone)
        assert after == expected


@pytest.mark.parametrize("side", ["trained on", "scored"])
@pytest.mark.parametrize("unit", ["record", "users"])
def test_a_record_more_moves_the_sums_of_its_own_side_alone(side, unit):
    """Forced to the same releases, the other side's sums stay to the last bit."""
    data, runs = records(COUNT + 20), []

    def of(chosen, replayed=None):
        some = {name: value[chosen] for name, value in data.items()}
        protected = unit if unit == "record" else eq.Users(torch.tensor(chosen), records_per_user=1)

        class Replayed(eq.PrivateTraining):
            ledger_class = staticmethod(functools.partial(RecordingLedger, replayed=replayed))

        score = Score("accuracy", share=SHARE, times=3)
        sampling = eq.FullBatch(round(COUNT * 0.75), 3)
        return score, scored(score, Replayed, data=some, unit=protected, sampling=sampling)

    held, trained = sides(of([*range(COUNT + 20)])[1])
    number = (trained if side == "trained on" else held)[-1].item()
    others = [*range(COUNT)]
    for chosen in (others, [*others, number]):
        score, run = of(chosen, runs[0].ledger.transcript if runs else None)
        runs.append(run)
        for _ in range(3):
            run.take_step()
            run.evaluate(score)
    assert number >= COUNT
    moves = {"gradient": [], SCORE: []}
    for one, other in zip(runs[0].ledger.sums, runs[1].ledger.sums, strict=True):
        for name, sums in one.items():
            moves[name].append(math.hypot(*(float((v - other[name][k]).norm()) for k, v in sums.items())))
    own, others = ("gradient", SCORE) if side == "trained on" else (SCORE, "gradient")
    assert moves[others] == [0.0] * 3
    assert min(moves[own]) > 0.1
    assert max(moves[own]) <= 1 + 1e-5


HELD = records(COUNT)["input"]


class Centred(nn.Sequential):
    """In evaluation its outputs are centred over the batch; in training they are not."""

    def forward(self, x):
        found = super().forward(x)
        return found if self.training else found - found.mean(0)


def with_held(model, batch):
    return model(batch["input"] + HELD.mean(0)), batch["label"]


def over_records(model, batch):
    return model(batch["input"]).softmax(0), batch["label"]


MIXED = {
    "a model in evaluation": (lambda: Centred(*network()), Score("accuracy", share=SHARE)),
    "outputs": (network, Score("accuracy", share=SHARE, outputs=over_records)),
    "a metric": (
        network,
        Score(Metric("rank", lambda o, y: o[:, 0].argsort().argsort() / len(o)), share=SHARE),
    ),
}


def test_without_a_proof_each_record_is_scored_by_itself():
    """No record is above the largest tenth of itself; next to others, that no trial moves, some are."""

    def is_above(model, batch):
        value = model(batch["input"])[:, 1]
        above = value > value.quantile(0.9)
        return torch.stack([~above, above], 1).float(), batch["label"] % 2

    score, data = Score("accuracy", share=SHARE, times=1, outputs=is_above), records(COUNT)
    training = scored(score, Exact, data=data)
    training.take_step()
    wanted = (data["label"][sides(training)[0]] % 2 == 0).double().mean()
    assert training.evaluate(score)["private_accuracy"] == pytest.approx(float(wanted), abs=1e-6)
    assert training.independence.word == "compared"


class Stop(Exception):
    pass


class Killer:
    """A writer that fails at an evaluation."""

    def __init__(self, step):
        self.step = step

    def write(self, row):
        if row["step"] == self.step and "evaluation.private_accuracy" in row:
            raise Stop


@pytest.mark.parametrize("patience", [pytest.param(None, marks=pytest.mark.wide), 2])
def test_a_killed_run_keeps_the_best_step_of_an_uninterrupted_one(tmp_path, patience):
    options = {"keep_best": True, "patience": patience, "checkpoint_every": 5, "progress": False}
    results, models = [], []
    for name, killed in (("whole", 0), ("killed", 4 if patience else 8)):
        score = Score("accuracy", share=SHARE, times=4)
        given = {"folder": tmp_path / name, "writers": [Killer(killed)], "ema_decay": 0.5}
        run = scored(score, steps=8, rate=3.0, **given)
        if killed:
            with pytest.raises(Stop):
                run.run(evaluate=score, **options)
            run.close()
            score = Score("accuracy", share=SHARE, times=4)
            run = resumed(tmp_path / name, network(dropout=0.3), data=records(COUNT), score=score)
        results.append(run.run(evaluate=score, **options))
        models.append(parameters(run.model))
        verified = eq.verify_run(tmp_path / name)
        assert verified.consistent, str(verified)
    first = results[0]
    assert first.finished
    assert first.steps == 8 if patience is None else first.steps <= 8
    assert first.epsilon == results[1].epsilon == scored(score, steps=8).statement().epsilon
    loaded = network(dropout=0.3)
    eq.load_model(loaded, tmp_path / "killed" / "model.safetensors")
    assert torch.equal(parameters(loaded), models[0])
    for result, model in zip(results, models, strict=True):
        assert torch.equal(model, models[0])
        fields = ("steps", "best_step", "evaluation", "epsilon", "finished")
        assert [getattr(result, f) for f in fields] == [getattr(first, f) for f in fields]
    assert releases(tmp_path / "whole") == releases(tmp_path / "killed")  # nothing was charged twice


def test_the_best_step_of_a_public_evaluation_is_published_and_patience_ends_the_run():
    given = iter([0.1, 0.5, 0.9, 0.3, 0.8, math.nan, 0.95, 0.96])
    seen = {}

    def evaluate(model):
        seen[run.steps_done] = parameters(model).clone()
        return next(given)

    run = training(steps=8, budget=None)
    found = run.run(evaluate=evaluate, evaluate_every=1, patience=3, progress=False)
    assert (found.steps, found.best_step, found.evaluation, found.finished) == (6, 3, {"score": 0.9}, True)
    assert torch.equal(parameters(run.model), seen[3])
    with pytest.raises(RuntimeError):
        run.take_step()


def test_a_number_of_unknown_error_is_not_the_best(monkeypatch):
    """The largest of four, which has no error, loses to the others; large errors are said once."""
    given = iter([(0.5, 0.2), (1.0, math.nan), (0.6, 0.21), (0.55, 0.22)])
    names = ("private_accuracy", "private_accuracy_error")
    monkeypatch.setattr(Score, "read", lambda *_, **__: dict(zip(names, next(given), strict=True)))
    score = Score("accuracy", share=SHARE, times=4)
    with pytest.warns(UserWarning, match="noise alone") as said:
        found = scored(score, steps=4).run(evaluate=score, evaluate_every=1, keep_best=True, progress=False)
    assert [str(one.message).split(",")[0].split()[-1] for one in said] == ["0.2", "nan"]
    assert found.best_step == 3


def test_a_run_that_gave_up_has_ended_and_claims_its_plan(tmp_path):
    score, folder = Score("loss:9", share=SHARE, times=8), tmp_path / "run"
    run = scored(score, steps=40, folder=folder, rate=1e-9, reproducible=False)
    found = run.run(evaluate=score, patience=1, progress=False)
    assert found.finished
    assert found.steps < 40
    assert found.epsilon == pytest.approx(4, rel=0.01)
    assert eq.verify_run(folder).consistent
    with pytest.raises(RuntimeError, match="finished"):
        resumed(folder, data=records(COUNT))


def test_the_split_of_a_resumed_run_is_that_of_its_start(tmp_path):
    run, given = scored(Score("accuracy", share=SHARE), folder=tmp_path / "run"), {"data": records(COUNT)}
    before = sides(run)
    saved(run)
    again = resumed(
        tmp_path / "run", network(dropout=0.3), score=Score("balanced_accuracy:3", share=SHARE), **given
    )
    assert all(map(torch.equal, before, sides(again)))
    again.close()
    with pytest.raises(ValueError, match="plan differs"):
        resumed(tmp_path / "run", network(dropout=0.3), **given)


def test_other_data_of_a_score_at_a_resume_are_named(tmp_path):
    """And a run that had a best step does what it is asked now."""
    score = Score("accuracy", data=records(50, seed=9), population=50, times=2)
    run = scored(score, folder=tmp_path / "run", writers=[Killer(3)], reproducible=False)
    with pytest.raises(Stop):
        run.run(evaluate=score, evaluate_every=3, keep_best=True, checkpoint_every=1, progress=False)
    run.close()
    for seed, is_other in ((9, False), (8, True)):
        score = Score("accuracy", data=records(50, seed=seed), population=50, times=2)
        again = resumed(tmp_path / "run", network(dropout=0.3), data=records(COUNT), score=score)
        assert (Assumption.OTHER_DATA in again.statement().assumptions) is is_other
        again.close()
    again = resumed(tmp_path / "run", network(dropout=0.3), data=records(COUNT), score=score)
    found = again.run(progress=False)
    assert (found.finished, found.best_step) == (True, None)


def evaluated(**options):
    score = Score("accuracy", share=SHARE, times=2)
    return scored(score).run(**{"evaluate": score, "progress": False} | options)


class HeldApart(eq.DPSGD):
    def plan(self, setting):
        plan = super().plan(setting)
        releases = [dataclasses.replace(one, apart=True) for one in plan.releases.releases]
        return dataclasses.replace(plan, releases=dataclasses.replace(plan.releases, releases=releases))


REFUSED = {
    "a method's own side": (lambda: scored(None, method=HeldApart()), PlanError, "apart=True"),
    "neither share nor data": (lambda: Score("auc"), TypeError, "either share, or data"),
    "data without a population": (lambda: Score("auc", data=records(9)), TypeError, "public population"),
    "an AUC of three classes": (lambda: scored(Score("auc", share=SHARE)), BatchFormError, "two classes"),
    "an unknown metric": (lambda: Score("f1", share=0.1), ValueError, "'f1' is none: give a Metric"),
    "outputs that fail": (
        lambda: scored(Score("accuracy", share=SHARE, outputs=lambda m, b: (m(b["x"]), b["label"]))),
        DataError,
        r"outputs of the Score.*outputs=lambda.*Nothing was spent",
    ),
    "outputs that hold the records": (
        lambda: scored(Score("accuracy", share=SHARE, outputs=with_held)), ValueError, "HELD"
    ),
    **{
        f"{name} that mixes": (
            lambda make=make, score=score: scored(score, model=make()), CrossRecordError, ""
        )
        for name, (make, score) in MIXED.items()
    },
    "another score": (lambda: evaluated(evaluate=Score("auc", share=0.1)), ValueError, "has not planned"),
    "too often": (lambda: evaluated(evaluate_every=1), ValueError, "evaluate_every=1.*give 3"),
    "best of nothing": (lambda: evaluated(evaluate=None, keep_best=True), ValueError, "keep_best needs"),
    "no budget": (
        lambda: scored(Score("auc", share=0.1), budget=None, method=eq.DPSGD(noise_multiplier=1.0)),
        ValueError, "budget is missing",
    ),
    "draws of a fixed size": (
        lambda: scored(
            Score("accuracy", share=0.1), sampling=eq.WithoutReplacement(40, COUNT, 4),
            unit=eq.Record(relation="replace_one"),
        ),
        PlanError, "fixed size",
    ),
    "no guarantee": (
        lambda: scored(Score("accuracy", share=0.1), method=PlainSGD(), budget=None), PlanError, "proven"
    ),
    "users' data": (
        lambda: scored(Score("accuracy", data=HELD, population=9), unit=eq.Users(USERS, records_per_user=3)),
        ValueError, "some of their records",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scored_is_refused(name):
    make, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        make()
