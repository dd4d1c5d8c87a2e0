"""The ledger: what it refuses, what it charges, and what a resumed run gets."""

import math
import os
import signal

import pytest
import torch
from privacy_rows import Flat, rows
from torch import Tensor

from equipoise import privacy as ep
from equipoise._host import Unread
from equipoise.privacy import capped, clip, digest, digests, gaussian_epsilon, unbounded_sum
from equipoise.privacy.bounds.bounded import make_bounded
from equipoise.privacy.digests import keyed_digest
from equipoise.privacy.ledger.journal import CloseEntry
from equipoise.privacy.private import unwrap
from equipoise.published import PublishedLedger, PublishedPlan, Unproven
from equipoise.statements import statement_of

GRADIENT = ep.Release("gradient", 1.0, ep.Gaussian(4.0))
NORMS = ep.Release("norms", 2.0, ep.Gaussian(8.0), 2, replace_ratio=1.0)
PLAN = ep.PrivacyPlan([GRADIENT, NORMS], ep.FullBatch(100, 6))


def gradient(draw, *records, bound=1.0):
    return clip(ep.PrivateRows(rows(*(records or ([3.0, 4.0],))), draw), Flat(), bound)


def step(ledger, parameters="p0", bound=1.0):
    draw = ledger.open("batch", parameters)
    return ledger.release(draw, {"gradient": gradient(draw, bound=bound)})["gradient"]["w"], draw


def corrupted(draw):
    return make_bounded({"w": ep.Private(torch.tensor([math.nan, 0.0]), draw)}, 1.0, 2.0, draw)


REFUSALS = {
    "not in the plan": (lambda d: {"other": gradient(d)}, ep.LedgerError, "no release 'other'"),
    "bound too large": (lambda d: {"gradient": gradient(d, bound=1.01)}, ep.LedgerError, "bound 1.01"),
    "zero bound": (lambda d: {"gradient": 0.0 * gradient(d)}, ep.LedgerError, "positive bound"),
    "no bound": (lambda d: {"gradient": endless(d)}, ep.LedgerError, "bound inf"),
    "raw tensor": (lambda d: {"gradient": {"w": torch.zeros(2)}}, TypeError, "must be Bounded"),
    "private tensor": (lambda d: {"gradient": ep.Private(torch.zeros(2), d)}, TypeError, "must be Bounded"),
    "no draw": (lambda d: {"gradient": gradient(None)}, ep.LedgerError, "comes from None"),
    "not finite": (lambda d: {"gradient": corrupted(d)}, ep.LedgerError, "not finite"),
    "nothing": (lambda d: {}, ep.LedgerError, "empty"),
    "replaced": (lambda d: {"gradient": gradient(d), "norms": gradient(d)}, ep.LedgerError, "replace_ratio"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_release_and_charge_nothing(name):
    sums, kind, text = REFUSALS[name]
    ledger = ep.Ledger(PLAN, ep.Budget(100.0, 1e-5))
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

    ledger = ep.Ledger(PLAN)
    draw = ledger.open("batch", "p")
    before = ledger.journal.entries()
    checks = [(Unread([torch.tensor(moved)], int), check) for moved in (0, 1)]
    with pytest.raises(ValueError, match="moved"):
        ledger.release(draw, {"gradient": gradient(draw)}, checks)
    assert ledger.journal.entries() == before
    ledger.release(draw, {"gradient": gradient(draw)}, checks[:1])


def test_draws_are_checked():
    ledger = ep.Ledger(PLAN)
    draw = ledger.open("batch")
    sums = {"gradient": gradient(draw)}
    ledger.release(draw, sums)
    with pytest.raises(ep.LedgerError, match="released already"):
        ledger.release(draw, sums)
    other = ep.Ledger(PLAN).open("batch")
    with pytest.raises(ep.LedgerError, match="not opened"):
        ledger.release(other, {"gradient": gradient(other)})
    second = ledger.open("batch")
    with pytest.raises(ep.LedgerError, match="not from the draw"):
        ledger.release(second, {"gradient": gradient(draw)})
    with pytest.raises(TypeError, match="Draw"):
        ledger.release(0, sums)


def test_counts_run_out():
    ledger = ep.Ledger(PLAN)
    for i in range(6):
        draw = ledger.open("batch", f"p{i}")
        sums = {"gradient": gradient(draw), "norms": capped(ep.Private(torch.ones(3), draw), 2.0)}
        if i >= 2:
            with pytest.raises(ep.LedgerError, match="used up"):
                ledger.release(draw, sums)
            del sums["norms"]
        ledger.release(draw, sums)
        assert ledger.progress(1e-5) == pytest.approx(ledger.spent(1e-5).value, rel=0.1)
    assert ledger.releases_left == {"batch": 0}
    assert ledger.spent(1e-5).value == pytest.approx(PLAN.epsilon(1e-5).value)
    draw = ledger.open("batch", "p6")
    with pytest.raises(ep.LedgerError, match="used up"):
        ledger.release(draw, {"gradient": gradient(draw)})
    # An epoch more is not paid for, also where draws before it were not released.
    ledger = ep.Ledger(ep.PrivacyPlan([GRADIENT], ep.FixedEpochs(10, 40, 8)))
    for i in range(8):
        ledger.open("batch", f"p{i}")
    with pytest.raises(ep.PlanUsedUpError):
        step(ledger, "p8")
    assert ledger.spent(1e-5).value == 0


@pytest.mark.parametrize("change", ["parameters", "no parameters", "data_fingerprint", "kernels"])
def test_other_hash_takes_the_next_index_and_is_charged(tmp_path, change):
    secrets, path = ep.Secrets(tmp_path), tmp_path / "journal.jsonl"
    first = ep.Ledger(PLAN, journal=ep.Journal(path), secrets=secrets)
    known = None if change == "no parameters" else "p1"
    outs = [step(first, p) for p in ("p0", known, "p2")]
    spent = first.spent(1e-5).value
    options = {} if "parameters" in change else {change: "new"}
    again = ep.Ledger(PLAN, journal=ep.Journal(path), secrets=ep.Secrets(tmp_path), position=1, **options)
    out, draw = step(again, "other" if change == "parameters" else known)
    assert (draw.index, draw.replayed) == (3, False)
    for old, _ in outs:
        assert not torch.equal(out, old)
    assert again.spent(1e-5).value > spent


def test_line_is_written_before_anything_leaves(monkeypatch):
    ledger = ep.Ledger(PLAN)
    draw = ledger.open("batch", "p0")

    def fail(*args, **kwargs):
        raise ep.JournalError("disk full")

    monkeypatch.setattr(ledger.journal, "append", fail)
    with pytest.raises(ep.JournalError):
        ledger.release(draw, {"gradient": gradient(draw)})
    monkeypatch.undo()
    assert ledger.spent(1e-5).value == 0
    # a crash after the line: charged, and given again on resume
    monkeypatch.setattr(ledger, "_noised", fail)
    with pytest.raises(ep.JournalError):
        ledger.release(draw, {"gradient": gradient(draw)})
    assert ledger.spent(1e-5).value > 0
    again = ep.Ledger(PLAN, journal=ledger.journal, secrets=ledger.secrets)
    assert again.open("batch", "p0").replayed


def test_killed_process_loses_nothing(tmp_path):
    child = os.fork()
    if child == 0:
        ep.Journal(tmp_path / "j.jsonl").append(CloseEntry(run="a"))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert ep.Journal(tmp_path / "j.jsonl").entries() == [CloseEntry(run="a")]


def test_a_stop_that_was_fixed_beforehand_frees_what_was_reserved(tmp_path):
    path, budget = tmp_path / "shared.jsonl", ep.Budget(PLAN.epsilon(1e-5).value * 1.2, 1e-5)
    ended = ep.Ledger(PLAN, budget, ep.Journal(tmp_path / "other.jsonl"), ep.Secrets(tmp_path / "b"))
    step(ended)
    ended.close()  # its end may have followed from what it released
    with pytest.raises(ep.BudgetError, match="other runs"):
        ep.Ledger(PLAN, budget, ended.journal, ep.Secrets(tmp_path / "e"))
    first = ep.Ledger(PLAN, budget, ep.Journal(path), ep.Secrets(tmp_path / "a"))
    step(first)
    alone = first.spent().value
    with pytest.raises(ep.BudgetError, match="other runs"):  # the first has reserved its whole plan
        ep.Ledger(PLAN, budget, ep.Journal(path), ep.Secrets(tmp_path / "b"))
    first.close(stop_fixed_beforehand=True)
    second = ep.Ledger(PLAN, budget, ep.Journal(path), ep.Secrets(tmp_path / "c"))
    assert second.spent().value == pytest.approx(alone)
    step(second)
    assert second.spent().value == pytest.approx(gaussian_epsilon(math.sqrt(2 / 16), 1e-5))
    assert statement_of(second).other_runs == 1
    replace = ep.PrivacyPlan(PLAN.releases, PLAN.sampling, "replace_one")
    with pytest.raises(ep.JournalError, match="relation"):
        ep.Ledger(replace, None, ep.Journal(path), ep.Secrets(tmp_path / "d"))


def test_a_reserved_plan_is_resumed_whatever_came_later(tmp_path):
    path, small = tmp_path / "shared.jsonl", ep.Budget(PLAN.epsilon(1e-5).value * 1.1, 1e-5)
    with pytest.raises(ep.BudgetError):
        ep.Ledger(PLAN, ep.Budget(0.1, 1e-5), ep.Journal(path))
    assert path.read_bytes() == b""
    secrets = ep.Secrets(tmp_path / "a")
    first = ep.Ledger(PLAN, small, ep.Journal(path), secrets)
    step(first)
    alone = first.spent().value
    second = ep.Ledger(PLAN, ep.Budget(small.epsilon * 4, 1e-5), ep.Journal(path), ep.Secrets(tmp_path / "b"))
    first = ep.Ledger(PLAN, small, ep.Journal(path), secrets, position=1)
    step(first, "p1")
    both = first.spent().value
    assert 1.5 * alone < both < statement_of(first, delta=1e-5).epsilon  # with what began later
    step(second)
    second.close(stop_fixed_beforehand=True)  # gives back what it did not use
    assert alone < first.spent().value < both


def test_a_run_that_was_closed_is_repeated_and_releases_nothing_more(tmp_path):
    path, small = tmp_path / "shared.jsonl", ep.Budget(PLAN.epsilon(1e-5).value * 1.1, 1e-5)
    secrets = ep.Secrets(tmp_path / "a")
    first = PublishedLedger(PLAN, small, ep.Journal(path), secrets)
    out, _ = step(first)
    first.close(stop_fixed_beforehand=True)
    first.close()
    lines = path.read_bytes()
    for ledger in (first, PublishedLedger(PLAN, small, ep.Journal(path), secrets, position=1)):
        assert not any(ledger.releases_left.values())
        with pytest.raises(ep.PlanUsedUpError, match="was closed"):
            step(ledger, "p1")
        with pytest.raises(ep.PlanUsedUpError, match="was closed"):
            ledger.disclose(ep.Private(torch.tensor(3.0)), "raw")
    assert path.read_bytes() == lines
    ep.Ledger(PLAN, ep.Budget(small.epsilon * 4, 1e-5), ep.Journal(path), ep.Secrets(tmp_path / "b"))
    again = ep.Ledger(PLAN, small, ep.Journal(path), secrets)
    assert torch.equal(step(again)[0], out)
    with pytest.raises(ep.PlanUsedUpError, match="was closed"):
        step(again, "p1")


def with_unproven(**counts):
    unproven = [Unproven(name, count=count) for name, count in counts.items()]
    return PublishedPlan(PLAN.releases, PLAN.sampling, PLAN.relation, unproven=unproven)


def test_unproven_steps_cost_the_guarantee(tmp_path):
    secrets, path = ep.Secrets(tmp_path), tmp_path / "journal.jsonl"
    ledger = PublishedLedger(with_unproven(g=1, h=1), ep.Budget(50.0, 1e-5), ep.Journal(path), secrets)
    step(ledger)
    assert ledger.guarantee == "proven"
    draw = ledger.open("batch", "p1")
    value = {"w": ep.Private(torch.zeros(10_000), draw)}
    out = ledger.release_unproven(draw, "g", value, 2.0, hole="scale not proved", worst_case_multiplier=0.5)
    assert float(out["w"].std()) == pytest.approx(2.0, rel=0.05)
    assert ledger.guarantee == "worst_case"
    assert ledger.spent().value == pytest.approx(gaussian_epsilon(math.sqrt(1 / 16 + 4), 1e-5))
    ledger.release_unproven(draw, "h", value, 1.0, hole="x", worst_case_multiplier=9.0)
    with pytest.raises(ep.LedgerError, match="ledger_class"):
        ep.Ledger(PLAN).call("disclose", ep.Private(torch.tensor(3.0)), "raw")
    with pytest.raises(ep.LedgerError, match="hole"):
        ledger.disclose(ep.Private(torch.tensor(3.0)), "")
    assert float(ledger.disclose(ep.Private(torch.tensor(3.0)), "raw threshold")) == 3.0
    statement = statement_of(ledger, recipe="as_published", epsilon_claimed=2.0)
    assert (statement.guarantee, statement.epsilon, statement.epsilon_claimed) == ("none", None, 2.0)
    assert "raw threshold" in statement.markdown()
    assert ep.Ledger(ledger.plan, journal=ep.Journal(path), secrets=secrets).guarantee == "none"


def test_unproven_releases_are_planned_by_name_and_number():
    ledger = PublishedLedger(with_unproven(g=1))
    draw = ledger.open("batch", "p")
    value = {"w": ep.Private(torch.zeros(3), draw)}
    with pytest.raises(ep.LedgerError, match="holds no unproven release 'h'"):
        ledger.release_unproven(draw, "h", value, 1.0, hole="x")
    first = ledger.release_unproven(draw, "g", value, 1.0, hole="x")
    again = ledger.release_unproven(draw, "g", value, 1.0, hole="x")  # the same question of the same draw
    assert torch.equal(first["w"], again["w"])
    with pytest.raises(ep.LedgerError, match="used up"):
        ledger.release_unproven(ledger.open("batch", "q"), "g", value, 1.0, hole="x")


def test_an_unproven_release_never_gives_its_noise_to_another_value(tmp_path):
    plan = PublishedPlan([], ep.Poisson(10, 100, 5), unproven=[Unproven("g")])
    secrets, path = ep.Secrets(tmp_path), tmp_path / "journal.jsonl"

    def ask(ledger, value, std=1.0):
        draw = ledger.open("batch", "p")
        raw = {"w": ep.Private(torch.full((3,), value), draw)}
        return ledger.release_unproven(draw, "g", raw, std, hole="x", worst_case_multiplier=0.5)["w"], draw

    ledger = PublishedLedger(plan, journal=ep.Journal(path), secrets=secrets)
    first, draw = ask(ledger, 1.0)
    other = {"w": ep.Private(torch.full((3,), 2.0), draw)}
    for value, std in ((other, 1.0), ({"w": ep.Private(torch.full((3,), 1.0), draw)}, 1e-4)):
        with pytest.raises(ep.ChangedQueryError, match="two questions"):
            ledger.release_unproven(draw, "g", value, std, hole="x", worst_case_multiplier=0.5)
    again = PublishedLedger(plan, journal=ep.Journal(path), secrets=secrets)
    second, draw = ask(again, 2.0)  # the void draw is not repeated: a new index, new noise, a new charge
    assert draw.index == 1
    assert not torch.allclose(second - 2.0, first - 1.0)
    resumed = PublishedLedger(plan, journal=ep.Journal(path), secrets=secrets, position=1)
    with pytest.raises(ep.ChangedQueryError):
        ask(resumed, 3.0)
    assert resumed.spent(1e-5).value == pytest.approx(gaussian_epsilon(math.sqrt(8), 1e-5))


def endless(draw):
    total = unbounded_sum(ep.PrivateRows(rows([3.0, 4.0], [math.nan, 1.0]), draw))
    assert unwrap(total.value["w"]).tolist() == [3.0, 4.0]
    return total


@pytest.mark.parametrize("is_far", [False, True], ids=["on the host", "on a device"])
def test_digests(monkeypatch, is_far):
    """The digest without key tells apart what that of a key does; another key gives another one."""
    monkeypatch.setattr(digests, "HASHED_WHERE_THEY_ARE", ("cpu",) if is_far else ())
    monkeypatch.setattr(digests, "HASHED_AT_ONCE", 3 * digests.HASHED_BYTES)  # several groups
    key, w, b = bytes(range(32)), torch.arange(20_000.0), {"x": 1.0, "y": [True, None, "s"]}
    moved, flipped, a = w.clone(), w.clone(), {"w": w, "b": b}
    moved[[3, 5]] = moved[[5, 3]]
    flipped.view(torch.int32)[19_999] ^= 1
    others = [
        *({"w": one, "b": b} for one in (moved, flipped, w.view(torch.int32), w.view(200, 100), w[:19_999])),
        *({"w": one, "b": b} for one in (w.double(), torch.where(w == 0, -w, w))),
        {"w": w[:500], "v": w[500:], "b": b},
        {"w": w, "b": b | {"x": 1}},
        {"w": w},
    ]
    for of in (digest, lambda one: keyed_digest(one, key, "test")):
        assert of(a) == of(dict(reversed(a.items())))
        assert len({*map(of, [a, *others])}) == len(others) + 1
        with pytest.raises(TypeError, match="set"):
            of({"w": {1, 2}})
    assert keyed_digest({"w": ep.Private(w)}, key, "test")
    assert len({keyed_digest(a, k, p) for k in (key, bytes(32)) for p in ("test", "other")}) == 4
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
    pairs = [(one, other.as_subclass(Far)), (one.as_subclass(Far), other)]
    pairs += [(other, one.as_subclass(Far)), (other.as_subclass(Far), one)]
    nests = [{"a": a, "b": b} for a, b in pairs]
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
    journal, secrets = tmp_path / "journal.jsonl", ep.Secrets(tmp_path)
    first = ep.Ledger(PLAN, journal=ep.Journal(journal), secrets=secrets)
    old, draw = step(first)
    spent = first.spent(1e-5).value
    again = ep.Ledger(PLAN, journal=ep.Journal(journal), secrets=secrets)
    same = again.open("batch", "p0")
    assert same == ep.Draw(draw.name, draw.index, draw.ordinal, draw.parameters, replayed=True)
    with pytest.raises(ep.ChangedQueryError):
        again.release(same, {"gradient": gradient(same, [4.0, 3.0])})
    fresh = again.open("batch", "p0")
    assert (fresh.index, fresh.replayed) == (draw.index + 1, False)
    new = again.release(fresh, {"gradient": gradient(fresh, [4.0, 3.0])})["gradient"]["w"]
    assert float((new - torch.tensor([0.8, 0.6]) - (old - torch.tensor([0.6, 0.8]))).abs().min()) > 1e-4
    resumed = ep.Ledger(PLAN, journal=ep.Journal(journal), secrets=secrets)  # the void is remembered
    assert resumed.open("batch", "p0").index == draw.index + 1
    assert resumed.spent(1e-5).value > spent


def test_another_question_at_an_index_that_comes_again_has_noise_records_and_secrets_of_its_own():
    """A journal was put back from an older copy: only the same question gets its numbers again."""
    secrets, size, raw = ep.Secrets(), 4000, Unproven("raw")
    plan = PublishedPlan([], ep.Poisson(size / 2, size, 2), unproven=[raw])

    def asked(parameters="p", std=1.0, value=0.0):
        ledger = PublishedLedger(plan, secrets=secrets)
        draw, mask = ledger.open("batch", parameters), torch.zeros(size)
        mask[ledger.sample(draw, size)] = 1
        given = {"w": ep.Private(torch.full((size,), value, dtype=torch.float64), draw)}
        return (
            (ledger.release_unproven(draw, "raw", given, std, hole="x")["w"] - value) / std,
            mask,
            draw.secret,
        )

    def correlation(one, other):
        return abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1]))

    noise, mask, secret = asked()
    again, same, secret_again = asked(std=1)  # a bound read back from a file may be a whole number no more
    assert torch.equal(again, noise)
    assert torch.equal(same, mask)
    assert secret_again == secret
    for other in (asked("q"), asked(std=0.5), asked(value=0.25)):
        assert correlation(other[0], noise) < 5 / size**0.5
    assert correlation(asked("q")[1], mask) < 5 / size**0.5
    assert asked("q")[2] != secret


@pytest.mark.parametrize("kept", [0, 1])
def test_a_cut_journal_does_not_lower_epsilon(tmp_path, kept):
    journal, secrets = tmp_path / "journal.jsonl", ep.Secrets(tmp_path)
    ledger = ep.Ledger(PLAN, journal=ep.Journal(journal), secrets=secrets)
    step(ledger, "p0")
    step(ledger, "p1")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: 2 * kept]))
    with pytest.raises(ep.JournalError, match="charges are lost"):
        ep.Ledger(PLAN, journal=ep.Journal(journal), secrets=secrets, position=ledger.position)


def test_of_two_ledgers_of_one_run_the_one_that_is_behind_releases_nothing(tmp_path):
    secrets, path = ep.Secrets(tmp_path), tmp_path / "journal.jsonl"
    ep.Ledger(PLAN, journal=ep.Journal(path), secrets=ep.Secrets(tmp_path / "another run"))
    first, second = (PublishedLedger(PLAN, journal=ep.Journal(path), secrets=secrets) for _ in range(2))
    step(first, "p0")
    length = path.stat().st_size
    for behind in (
        lambda: step(second, "q0"),
        lambda: second.disclose(ep.Private(torch.tensor(3.0)), "raw"),
        lambda: second.close(stop_fixed_beforehand=True),
        lambda: statement_of(second, delta=1e-5, stop_fixed_beforehand=True),
    ):
        with pytest.raises(ep.LedgerError, match=r"goes on with this run.*resume"):
            behind()
    assert path.stat().st_size == length
    step(first, "p1")
    second.rewind(second.place)  # as a step does that failed: now it knows
    step(second, "q1")
    with pytest.raises(ep.LedgerError, match="goes on with this run"):
        step(first, "p2")
    assert second.releases_left == {"batch": 3}


@pytest.mark.parametrize("how", ["cut", "closed"])
def test_a_journal_that_is_lost_while_the_run_goes_on_stops_it(tmp_path, how):
    path = tmp_path / "journal.jsonl"
    ledger = ep.Ledger(PLAN, journal=ep.Journal(path), secrets=ep.Secrets(tmp_path))
    place = ledger.place
    step(ledger, "p0")
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        ledger.journal.close()
    with pytest.raises(ep.JournalError, match="charges are lost"):
        step(ledger, "p1")
    if how == "closed":
        with pytest.raises(ep.JournalError, match="was closed"):
            ledger.rewind(place)


def test_what_other_runs_book_is_no_reason_to_stop(tmp_path):
    path = tmp_path / "journal.jsonl"
    runs = [ep.Ledger(PLAN, journal=ep.Journal(path), secrets=ep.Secrets(tmp_path / name)) for name in "ab"]
    for number in range(3):
        for run in runs:
            step(run, f"p{number}")
    with path.open("a") as file:
        file.write("{}damaged\n")
    with pytest.raises(ep.JournalError, match=r"line 9 .* is damaged"):
        step(runs[0], "p3")
