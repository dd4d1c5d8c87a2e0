"""The ledger: what it refuses, what it charges, and what a resumed run gets."""

import json
import math
import os
import signal

import pytest
import torch
from privacy_rows import DenseRows, Flat, rows
from torch import Tensor

from equipoise._host import Unread
from equipoise.privacy import (
    Budget,
    BudgetError,
    ChangedQueryError,
    Draw,
    FixedEpochs,
    FullBatch,
    Gaussian,
    Journal,
    JournalError,
    Ledger,
    LedgerError,
    PlanUsedUpError,
    Poisson,
    PrivacyPlan,
    Private,
    PrivateRows,
    Release,
    Secrets,
    capped,
    clip,
    digest,
    digests,
    gaussian_epsilon,
    unbounded_sum,
)
from equipoise.privacy.digests import keyed_digest
from equipoise.privacy.ledger.journal import CloseEntry
from equipoise.privacy.private import unwrap
from equipoise.published import PublishedLedger, PublishedPlan, Unproven
from equipoise.statements import statement_of

PLAN = PrivacyPlan(
    [
        Release("gradient", 1.0, Gaussian(4.0)),
        Release("norms", 2.0, Gaussian(8.0), count=2, replace_ratio=1.0),
    ],
    FullBatch(100, 6),
)


def gradient(draw, *records, bound=1.0):
    return clip(PrivateRows(rows(*(records or ([3.0, 4.0],))), draw), Flat(), bound)


def step(ledger, parameters="p0", bound=1.0):
    draw = ledger.open("batch", parameters)
    return ledger.release(draw, {"gradient": gradient(draw, bound=bound)})["gradient"]["w"], draw


def corrupted(draw):
    class Broken(DenseRows):
        def weighted_sums(self, weights):
            return {"w": torch.tensor([math.nan, 0.0])}

    return clip(PrivateRows(Broken({"w": torch.ones(1, 2)}), draw), Flat(), 1.0)


REFUSALS = {
    "not in the plan": (lambda d: {"other": gradient(d)}, LedgerError, "no release 'other'"),
    "bound too large": (lambda d: {"gradient": gradient(d, bound=1.01)}, LedgerError, "bound 1.01"),
    "zero bound": (lambda d: {"gradient": 0.0 * gradient(d)}, LedgerError, "positive bound"),
    "raw tensor": (lambda d: {"gradient": {"w": torch.zeros(2)}}, TypeError, "must be Bounded"),
    "private tensor": (lambda d: {"gradient": Private(torch.zeros(2), d)}, TypeError, "must be Bounded"),
    "no draw": (lambda d: {"gradient": gradient(None)}, LedgerError, "comes from None"),
    "not finite": (lambda d: {"gradient": corrupted(d)}, LedgerError, "not finite"),
    "nothing": (lambda d: {}, LedgerError, "empty"),
    "replace bound": (
        lambda d: {"gradient": gradient(d), "norms": gradient(d)},
        LedgerError,
        "replace_ratio",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_release_and_charge_nothing(name):
    sums, kind, text = REFUSALS[name]
    ledger = Ledger(PLAN, Budget(100.0, 1e-5))
    draw = ledger.open("batch")
    before = ledger.journal.entries()
    with pytest.raises(kind, match=text):
        ledger.release(draw, sums(draw))
    assert ledger.journal.entries() == before
    assert ledger.spent().value == 0
    assert ledger.release(draw, {"gradient": gradient(draw)})  # the draw is still good


def test_nothing_leaves_where_a_check_that_was_required_fails():
    def check(value):
        if value:
            raise ValueError("moved")

    ledger = Ledger(PLAN)
    draw = ledger.open("batch", "p")
    before = ledger.journal.entries()
    checks = [(Unread([torch.tensor(moved)], int), check) for moved in (0, 1)]
    with pytest.raises(ValueError, match="moved"):
        ledger.release(draw, {"gradient": gradient(draw)}, checks)
    assert ledger.journal.entries() == before
    ledger.release(draw, {"gradient": gradient(draw)}, checks[:1])


def test_draws_are_checked():
    ledger = Ledger(PLAN)
    draw = ledger.open("batch")
    sums = {"gradient": gradient(draw)}
    ledger.release(draw, sums)
    with pytest.raises(LedgerError, match="released already"):
        ledger.release(draw, sums)
    other = Ledger(PLAN).open("batch")
    with pytest.raises(LedgerError, match="not opened"):
        ledger.release(other, {"gradient": gradient(other)})
    second = ledger.open("batch")
    with pytest.raises(LedgerError, match="not from the draw"):
        ledger.release(second, {"gradient": gradient(draw)})
    with pytest.raises(TypeError, match="Draw"):
        ledger.release(0, sums)


def test_counts_run_out():
    ledger = Ledger(PLAN)
    for i in range(6):
        draw = ledger.open("batch", f"p{i}")
        sums = {"gradient": gradient(draw), "norms": capped(Private(torch.ones(3), draw), 2.0)}
        if i >= 2:
            with pytest.raises(LedgerError, match="used up"):
                ledger.release(draw, sums)
            del sums["norms"]
        ledger.release(draw, sums)
    assert ledger.releases_left == {"batch": 0}
    assert ledger.spent(1e-5).value == pytest.approx(PLAN.epsilon(1e-5).value)
    draw = ledger.open("batch", "p6")
    with pytest.raises(LedgerError, match="used up"):
        ledger.release(draw, {"gradient": gradient(draw)})


def test_a_draw_beyond_the_planned_ones_is_refused():
    """Its epoch is not paid for, also where draws before it were not released."""
    ledger = Ledger(PrivacyPlan([Release("gradient", 1.0, Gaussian(4.0))], FixedEpochs(10, 40, 8)))
    for i in range(8):
        ledger.open("batch", f"p{i}")
    with pytest.raises(PlanUsedUpError):
        step(ledger, "p8")
    assert ledger.spent(1e-5).value == 0


def test_spent_follows_what_was_released():
    ledger = Ledger(PLAN)
    for i in range(3):
        step(ledger, f"p{i}")
        assert ledger.spent(1e-5).value == pytest.approx(gaussian_epsilon(math.sqrt((i + 1) / 16), 1e-5))
    assert ledger.progress(1e-5) == pytest.approx(ledger.spent(1e-5).value, rel=0.1)


def test_noise_scales_with_the_bound():
    plan = PrivacyPlan([Release("gradient", 1.0, Gaussian(3.0))], FullBatch(10, 1))
    stds = []
    for bound in (1.0, 0.25):
        ledger = Ledger(plan, secrets=Secrets(reproducible_seed=1))
        draw = ledger.open()
        zero = clip(PrivateRows(rows([0.0] * 20_000), draw), Flat(), bound)
        stds.append(float(ledger.release(draw, {"gradient": zero})["gradient"]["w"].std()))
    assert stds == pytest.approx([3.0, 0.75], rel=0.02)


# ---- resume


def test_same_hash_same_noise_no_charge(tmp_path):
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"
    first = Ledger(PLAN, journal=Journal(path), secrets=secrets)
    outs = [step(first, f"p{i}") for i in range(3)]
    spent = first.spent(1e-5).value
    again = Ledger(PLAN, journal=Journal(path), secrets=Secrets(tmp_path), position=1)
    for i in (1, 2):
        out, draw = step(again, f"p{i}")
        assert draw.replayed
        assert draw == outs[i][1] or draw.index == outs[i][1].index
        assert torch.equal(out, outs[i][0])
    assert again.spent(1e-5).value == spent
    out, draw = step(again, "p3")
    assert not draw.replayed
    assert again.spent(1e-5).value > spent


@pytest.mark.parametrize("change", ["parameters", "data", "kernels"])
def test_other_hash_takes_the_next_index_and_is_charged(tmp_path, change):
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"
    first = Ledger(PLAN, journal=Journal(path), secrets=secrets)
    outs = [step(first, f"p{i}") for i in range(3)]
    spent = first.spent(1e-5).value
    options = (
        {"data_fingerprint": "new"} if change == "data" else {"kernels": "new"} if change == "kernels" else {}
    )
    again = Ledger(PLAN, journal=Journal(path), secrets=Secrets(tmp_path), position=1, **options)
    out, draw = step(again, "other" if change == "parameters" else "p1")
    assert (draw.index, draw.replayed) == (3, False)
    for old, _ in outs:
        assert not torch.equal(out, old)
    assert again.spent(1e-5).value > spent


def test_without_parameters_nothing_is_replayed(tmp_path):
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"
    a, _ = step(Ledger(PLAN, journal=Journal(path), secrets=secrets), None)
    b, draw = step(Ledger(PLAN, journal=Journal(path), secrets=secrets), None)
    assert draw.index == 1
    assert not torch.equal(a, b)


def test_a_run_keeps_its_plan(tmp_path):
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"
    Ledger(PLAN, journal=Journal(path), secrets=secrets)
    other = PrivacyPlan([Release("gradient", 1.0, Gaussian(5.0))], FullBatch(100, 6))
    with pytest.raises(LedgerError, match="another plan"):
        Ledger(other, journal=Journal(path), secrets=secrets)


# ---- journal


def test_line_is_written_before_anything_leaves(monkeypatch):
    ledger = Ledger(PLAN)
    draw = ledger.open("batch", "p0")

    def fail(*args, **kwargs):
        raise JournalError("disk full")

    monkeypatch.setattr(ledger.journal, "append", fail)
    with pytest.raises(JournalError):
        ledger.release(draw, {"gradient": gradient(draw)})
    monkeypatch.undo()
    assert ledger.spent(1e-5).value == 0
    # a crash after the line: charged, and given again on resume
    monkeypatch.setattr(ledger, "_noised", fail)
    with pytest.raises(JournalError):
        ledger.release(draw, {"gradient": gradient(draw)})
    assert ledger.spent(1e-5).value > 0
    again = Ledger(PLAN, journal=ledger.journal, secrets=ledger.secrets)
    assert again.open("batch", "p0").replayed


def test_torn_last_line_is_cut_and_not_charged(tmp_path):
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"
    ledger = Ledger(PLAN, journal=Journal(path), secrets=secrets)
    step(ledger, "p0")
    spent = ledger.spent(1e-5).value
    step(ledger, "p1")
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 1, 23):
        path.write_bytes(whole[:-cut])
        again = Ledger(PLAN, journal=Journal(path), secrets=secrets, position=1)
        assert again.spent(1e-5).value == spent
        _, draw = step(again, "p1")
        assert (draw.index, draw.replayed) == (1, False)
        assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_killed_process_loses_nothing(tmp_path):
    child = os.fork()
    if child == 0:
        Journal(tmp_path / "j.jsonl").append(CloseEntry(run="a"))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert Journal(tmp_path / "j.jsonl").entries() == [CloseEntry(run="a")]


def test_a_stop_that_was_fixed_beforehand_frees_what_was_reserved(tmp_path):
    path, budget = tmp_path / "shared.jsonl", Budget(PLAN.epsilon(1e-5).value * 1.2, 1e-5)
    ended = Ledger(PLAN, budget, Journal(tmp_path / "other.jsonl"), Secrets(tmp_path / "b"))
    step(ended)
    ended.close()  # its end may have followed from what it released
    with pytest.raises(BudgetError, match="other runs"):
        Ledger(PLAN, budget, ended.journal, Secrets(tmp_path / "e"))
    first = Ledger(PLAN, budget, Journal(path), Secrets(tmp_path / "a"))
    step(first)
    alone = first.spent().value
    with pytest.raises(BudgetError, match="other runs"):  # the first has reserved its whole plan
        Ledger(PLAN, budget, Journal(path), Secrets(tmp_path / "b"))
    first.close(stop_fixed_beforehand=True)
    second = Ledger(PLAN, budget, Journal(path), Secrets(tmp_path / "c"))
    assert second.spent().value == pytest.approx(alone)
    step(second)
    assert second.spent().value == pytest.approx(gaussian_epsilon(math.sqrt(2 / 16), 1e-5))
    assert statement_of(second).other_runs == 1
    replace = PrivacyPlan(PLAN.releases, PLAN.sampling, "replace_one")
    with pytest.raises(JournalError, match="relation"):
        Ledger(replace, None, Journal(path), Secrets(tmp_path / "d"))


def test_a_reserved_plan_is_resumed_whatever_came_later(tmp_path):
    path, small = tmp_path / "shared.jsonl", Budget(PLAN.epsilon(1e-5).value * 1.1, 1e-5)
    secrets = Secrets(tmp_path / "a")
    first = Ledger(PLAN, small, Journal(path), secrets)
    step(first)
    Ledger(PLAN, Budget(small.epsilon * 4, 1e-5), Journal(path), Secrets(tmp_path / "b"))
    again = Ledger(PLAN, small, Journal(path), secrets, position=1)
    step(again, "p1")


def test_a_run_that_was_closed_is_repeated_and_releases_nothing_more(tmp_path):
    """Its reservation was given up, and another run may have taken it: A, its end, B, and A again."""
    path, small = tmp_path / "shared.jsonl", Budget(PLAN.epsilon(1e-5).value * 1.1, 1e-5)
    secrets = Secrets(tmp_path / "a")
    first = PublishedLedger(PLAN, small, Journal(path), secrets)
    out, _ = step(first)
    first.close(stop_fixed_beforehand=True)
    first.close()
    lines = path.read_bytes()
    for ledger in (first, PublishedLedger(PLAN, small, Journal(path), secrets, position=1)):
        assert not any(ledger.releases_left.values())
        with pytest.raises(PlanUsedUpError, match="was closed"):
            step(ledger, "p1")
        with pytest.raises(PlanUsedUpError, match="was closed"):
            ledger.disclose(Private(torch.tensor(3.0)), "raw")
    assert path.read_bytes() == lines
    Ledger(PLAN, Budget(small.epsilon * 4, 1e-5), Journal(path), Secrets(tmp_path / "b"))
    again = Ledger(PLAN, small, Journal(path), secrets)
    assert torch.equal(step(again)[0], out)
    with pytest.raises(PlanUsedUpError, match="was closed"):
        step(again, "p1")


def test_runs_that_began_later_are_in_what_was_spent(tmp_path):
    path = tmp_path / "shared.jsonl"
    first = Ledger(PLAN, None, Journal(path), Secrets(tmp_path / "a"))
    step(first)
    alone = first.spent(1e-5).value
    second = Ledger(PLAN, None, Journal(path), Secrets(tmp_path / "b"))
    both = first.spent(1e-5).value
    assert both > 1.5 * alone
    assert both < statement_of(first, delta=1e-5).epsilon
    step(second)
    second.close(stop_fixed_beforehand=True)  # gives back what it did not use
    assert alone < first.spent(1e-5).value < both


def test_plan_over_budget_is_refused_before_anything(tmp_path):
    path = tmp_path / "journal.jsonl"
    with pytest.raises(BudgetError):
        Ledger(PLAN, Budget(0.1, 1e-5), Journal(path))
    assert path.read_bytes() == b""


# ---- unproven, replay, statement


def with_unproven(**counts):
    unproven = [Unproven(name, count=count) for name, count in counts.items()]
    return PublishedPlan(PLAN.releases, PLAN.sampling, PLAN.relation, unproven=unproven)


def test_unproven_steps_cost_the_guarantee():
    ledger = PublishedLedger(with_unproven(g=1, h=1), Budget(50.0, 1e-5))
    step(ledger)
    assert ledger.guarantee == "proven"
    draw = ledger.open("batch", "p1")
    value = {"w": Private(torch.zeros(10_000), draw)}
    out = ledger.release_unproven(draw, "g", value, 2.0, hole="scale not proved", worst_case_multiplier=0.5)
    assert float(out["w"].std()) == pytest.approx(2.0, rel=0.05)
    assert ledger.guarantee == "worst_case"
    assert ledger.spent().value == pytest.approx(gaussian_epsilon(math.sqrt(1 / 16 + 4), 1e-5))
    ledger.release_unproven(draw, "h", value, 1.0, hole="x", worst_case_multiplier=9.0)
    raw = ledger.disclose(Private(torch.tensor(3.0)), "raw threshold")
    assert float(raw) == 3.0
    statement = statement_of(ledger, recipe="as_published", epsilon_claimed=2.0)
    assert (statement.guarantee, statement.epsilon, statement.epsilon_claimed) == ("none", None, 2.0)
    assert "raw threshold" in statement.markdown()


def test_unproven_releases_are_planned_by_name_and_number():
    ledger = PublishedLedger(with_unproven(g=1))
    draw = ledger.open("batch", "p")
    value = {"w": Private(torch.zeros(3), draw)}
    with pytest.raises(LedgerError, match="holds no unproven release 'h'"):
        ledger.release_unproven(draw, "h", value, 1.0, hole="x")
    first = ledger.release_unproven(draw, "g", value, 1.0, hole="x")
    again = ledger.release_unproven(draw, "g", value, 1.0, hole="x")  # the same question of the same draw
    assert torch.equal(first["w"], again["w"])
    with pytest.raises(LedgerError, match="used up"):
        ledger.release_unproven(ledger.open("batch", "q"), "g", value, 1.0, hole="x")


def test_an_unproven_release_never_gives_its_noise_to_another_value(tmp_path):
    plan = PublishedPlan([], Poisson(10, 100, 5), unproven=[Unproven("g")])
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"

    def ask(ledger, value, std=1.0):
        draw = ledger.open("batch", "p")
        raw = {"w": Private(torch.full((3,), value), draw)}
        return ledger.release_unproven(draw, "g", raw, std, hole="x", worst_case_multiplier=0.5)["w"], draw

    ledger = PublishedLedger(plan, journal=Journal(path), secrets=secrets)
    first, draw = ask(ledger, 1.0)
    other = {"w": Private(torch.full((3,), 2.0), draw)}
    for value, std in ((other, 1.0), ({"w": Private(torch.full((3,), 1.0), draw)}, 1e-4)):
        with pytest.raises(ChangedQueryError, match="two questions"):
            ledger.release_unproven(draw, "g", value, std, hole="x", worst_case_multiplier=0.5)
    again = PublishedLedger(plan, journal=Journal(path), secrets=secrets)
    second, draw = ask(again, 2.0)  # the void draw is not repeated: a new index, new noise, a new charge
    assert draw.index == 1
    assert not torch.allclose(second - 2.0, first - 1.0)
    resumed = PublishedLedger(plan, journal=Journal(path), secrets=secrets, position=1)
    with pytest.raises(ChangedQueryError):
        ask(resumed, 3.0)
    assert resumed.spent(1e-5).value == pytest.approx(gaussian_epsilon(math.sqrt(8), 1e-5))


def test_a_disclosed_draw_is_repeated_after_a_resume(tmp_path):
    plan = PublishedPlan([], Poisson(10, 100, 5), unproven=[Unproven("g")])
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"
    ledger = PublishedLedger(plan, journal=Journal(path), secrets=secrets)
    draw = ledger.open("batch", "p")
    ids = ledger.sample(draw, 100)
    ledger.disclose({"w": Private(torch.zeros(3), draw)}, "raw sums")
    assert math.isinf(ledger.progress(1e-5))
    after = PublishedLedger(plan, journal=Journal(path), secrets=secrets, position=1)
    assert after.guarantee == "none"
    again = PublishedLedger(plan, journal=Journal(path), secrets=secrets)
    assert torch.equal(again.sample(again.open("batch", "p"), 100), ids)


def test_an_unbounded_sum_is_never_released():
    plan = PrivacyPlan([Release("gradient", math.inf, Gaussian(1.0))], Poisson(10, 100, 5))
    ledger = PublishedLedger(plan)
    draw = ledger.open()
    total = unbounded_sum(PrivateRows(rows([3.0, 4.0], [math.nan, 1.0]), draw))
    assert unwrap(total.value["w"]).tolist() == [3.0, 4.0]
    with pytest.raises(LedgerError, match="bound inf"):
        ledger.release(draw, {"gradient": total})


def test_what_leaves_without_a_proof_needs_a_reason_and_its_own_ledger():
    with pytest.raises(LedgerError, match="ledger_class"):
        Ledger(PLAN).call("disclose", Private(torch.tensor(3.0)), "raw")
    with pytest.raises(LedgerError, match="hole"):
        PublishedLedger(PLAN).disclose(Private(torch.tensor(3.0)), "")


def test_holes_survive_a_resume(tmp_path):
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"
    PublishedLedger(PLAN, journal=Journal(path), secrets=secrets).disclose(Private(torch.tensor(1.0)), "raw")
    assert Ledger(PLAN, journal=Journal(path), secrets=secrets).guarantee == "none"


def test_digest():
    a = {"w": torch.zeros(3), "b": {"x": 1.0, "y": [True, None, "s"]}}
    assert digest(a) == digest(dict(reversed(a.items())))
    for other in (
        {**a, "w": torch.zeros(3).double()},
        {**a, "w": torch.zeros(3, 1)},
        {**a, "w": torch.tensor([0.0, 0.0, -0.0])},
        {**a, "b": {"x": 1, "y": [True, None, "s"]}},
        {"w": a["w"]},
    ):
        assert digest(other) != digest(a)
    with pytest.raises(TypeError, match="set"):
        digest({"w": {1, 2}})


@pytest.mark.parametrize("is_far", [False, True], ids=["on the host", "on a device"])
def test_keyed_digest(monkeypatch, is_far):
    """As the digest without key, and another key or purpose gives another one."""
    monkeypatch.setattr(digests, "HASHED_WHERE_THEY_ARE", ("cpu",) if is_far else ())
    monkeypatch.setattr(digests, "HASHED_AT_ONCE", 3 * digests.HASHED_BYTES)  # several groups
    key = bytes(range(32))
    a = {"w": torch.arange(20_000.0), "b": {"x": 1.0, "y": Private(torch.ones(3))}}
    known = keyed_digest(a, key, "test")
    assert known == keyed_digest(dict(reversed(a.items())), key, "test")
    moved = a["w"].clone()
    moved[[3, 5]] = moved[[5, 3]]
    flipped = a["w"].clone()
    flipped.view(torch.int32)[19_999] ^= 1
    others = [
        {**a, "w": moved},
        {**a, "w": flipped},
        {**a, "w": a["w"].view(torch.int32)},
        {**a, "w": a["w"].view(200, 100)},
        {"w": a["w"][:500], "v": a["w"][500:], "b": a["b"]},
        {**a, "w": a["w"][:19_999]},
        {**a, "b": {"x": 1, "y": a["b"]["y"]}},
        {"w": a["w"]},
    ]
    found = [known, *(keyed_digest(other, key, "test") for other in others)]
    found += [keyed_digest(a, key, "other"), keyed_digest(a, bytes(32), "test")]
    assert len(set(found)) == len(found)
    with pytest.raises(ValueError, match="32"):
        keyed_digest(a, b"short", "test")


class Elsewhere:
    type = "far"


class Far(Tensor):
    """A tensor that says that it lies elsewhere."""

    device = property(lambda self: Elsewhere)
    is_cpu = property(lambda self: False)


def test_a_digest_tells_which_tensors_were_hashed_on_a_device(monkeypatch):
    """Or two tensors that change places between host and device would have one digest."""
    monkeypatch.setattr(digests, "HASHED_WHERE_THEY_ARE", ("far",))
    monkeypatch.setattr(digests, "weights_of", lambda key, device: None)
    monkeypatch.setattr(digests, "compressed", lambda far, _: [one.as_subclass(Tensor) for one in far])
    one, other = torch.arange(5.0), torch.arange(5.0) + 1
    nests = [
        {"a": one, "b": other.as_subclass(Far)},
        {"a": one.as_subclass(Far), "b": other},
        {"a": other, "b": one.as_subclass(Far)},
        {"a": other.as_subclass(Far), "b": one},
    ]
    assert len({keyed_digest(nest, bytes(32), "test") for nest in nests}) == 4


def test_a_device_without_products_of_bytes_makes_the_same_digest(monkeypatch):
    monkeypatch.setattr(digests, "HASHED_WHERE_THEY_ARE", ("cpu",))
    value = {"w": torch.randn(300_000)}
    found = []
    for works in (True, False):
        monkeypatch.setattr(digests, "_multiplies_bytes", lambda device, works=works: works)
        found.append(keyed_digest(value, bytes(32), "test"))
    assert found[0] == found[1]


def test_products_of_bytes_that_are_wrong_are_not_used(monkeypatch):
    asked = digests._multiplies_bytes.__wrapped__
    product = torch._int_mm
    assert asked(torch.device("cpu"))
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: product(a, b).index_fill_(0, torch.tensor(17), 0))
    assert not asked(torch.device("cpu"))

    def missing(a, b):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert not asked(torch.device("cpu"))


def test_the_same_hash_with_other_sums_is_void_and_charged_anew(tmp_path):
    """A changed loss or changed records behind an equal digest: the old noise must not meet the new sums."""
    journal, secrets = tmp_path / "journal.jsonl", Secrets(tmp_path)
    first = Ledger(PLAN, journal=Journal(journal), secrets=secrets)
    old, draw = step(first)
    spent = first.spent(1e-5).value
    again = Ledger(PLAN, journal=Journal(journal), secrets=secrets)
    same = again.open("batch", "p0")
    assert same == Draw(draw.name, draw.index, draw.ordinal, draw.parameters, replayed=True)
    with pytest.raises(ChangedQueryError):
        again.release(same, {"gradient": gradient(same, [4.0, 3.0])})
    fresh = again.open("batch", "p0")
    assert (fresh.index, fresh.replayed) == (draw.index + 1, False)
    new = again.release(fresh, {"gradient": gradient(fresh, [4.0, 3.0])})["gradient"]["w"]
    assert float((new - torch.tensor([0.8, 0.6]) - (old - torch.tensor([0.6, 0.8]))).abs().min()) > 1e-4
    resumed = Ledger(PLAN, journal=Journal(journal), secrets=secrets)  # the void is remembered
    assert resumed.open("batch", "p0").index == draw.index + 1
    assert resumed.spent(1e-5).value > spent


@pytest.mark.parametrize("kept", [0, 1])
def test_a_cut_journal_does_not_lower_epsilon(tmp_path, kept):
    journal, secrets = tmp_path / "journal.jsonl", Secrets(tmp_path)
    ledger = Ledger(PLAN, journal=Journal(journal), secrets=secrets)
    step(ledger, "p0")
    step(ledger, "p1")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: 2 * kept]))
    with pytest.raises(JournalError, match="charges are lost"):
        Ledger(PLAN, journal=Journal(journal), secrets=secrets, position=ledger.position)


def test_of_two_ledgers_of_one_run_the_one_that_is_behind_releases_nothing(tmp_path):
    """Each had counted its own releases alone: more of them than planned, and every statement was proven."""
    secrets, path = Secrets(tmp_path), tmp_path / "journal.jsonl"
    Ledger(PLAN, journal=Journal(path), secrets=Secrets(tmp_path / "another run"))
    first, second = (PublishedLedger(PLAN, journal=Journal(path), secrets=secrets) for _ in range(2))
    step(first, "p0")
    length = path.stat().st_size
    for behind in (
        lambda: step(second, "q0"),
        lambda: second.disclose(Private(torch.tensor(3.0)), "raw"),
        lambda: second.close(stop_fixed_beforehand=True),
        lambda: statement_of(second, delta=1e-5, stop_fixed_beforehand=True),
    ):
        with pytest.raises(LedgerError, match=r"goes on with this run.*resume"):
            behind()
    assert path.stat().st_size == length
    step(first, "p1")
    second.rewind(second.place)  # as a step does that failed: now it knows
    step(second, "q1")
    with pytest.raises(LedgerError, match="goes on with this run"):
        step(first, "p2")
    assert second.releases_left == {"batch": 3}


@pytest.mark.parametrize("how", ["cut", "closed"])
def test_a_journal_that_is_lost_while_the_run_goes_on_stops_it(tmp_path, how):
    """A closed one took the entries into memory."""
    path = tmp_path / "journal.jsonl"
    ledger = Ledger(PLAN, journal=Journal(path), secrets=Secrets(tmp_path))
    place = ledger.place
    step(ledger, "p0")
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        ledger.journal.close()
    with pytest.raises(JournalError, match="charges are lost"):
        step(ledger, "p1")
    if how == "closed":
        with pytest.raises(JournalError, match="was closed"):
            ledger.rewind(place)


def test_what_other_runs_book_is_no_reason_to_stop(tmp_path):
    path = tmp_path / "journal.jsonl"
    runs = [Ledger(PLAN, journal=Journal(path), secrets=Secrets(tmp_path / name)) for name in "ab"]
    for number in range(3):
        for run in runs:
            step(run, f"p{number}")
    with path.open("a") as file:
        file.write("{}damaged\n")
    with pytest.raises(JournalError, match=r"line 9 .* is damaged"):
        step(runs[0], "p3")
