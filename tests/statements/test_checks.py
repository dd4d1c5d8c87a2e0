"""Every edit of a statement is caught: with the journal, and from the published files alone."""

import copy
import functools
import json
import re
from dataclasses import fields

import jsonschema
import pytest
import torch

from equipoise.privacy import (
    BandedGaussian,
    Gaussian,
    Journal,
    JournalError,
    Ledger,
    Poisson,
    PrivacyPlan,
    Private,
    Release,
    Secrets,
    Staged,
    Unit,
    capped,
    gaussian_epsilon,
)
from equipoise.privacy.ledger.journal_records import JournalRecords
from equipoise.privacy.sampling import CyclicPoisson, FixedEpochs, FullBatch, TruncatedPoisson
from equipoise.published import PublishedLedger, PublishedPlan, Unproven
from equipoise.statements import (
    check_published,
    check_with_journal,
    make_statement,
    statement_from_journal,
    statement_schema,
)
from equipoise.statements import statement_of as made_of
from equipoise.statements.statement import OWNED, STOPPED

DELTA = 1e-5


def released(ledger: Ledger, name: str, *names: str) -> None:
    draw = ledger.open(name)
    values = Private(torch.tensor([1.0, 2.0]), draw)
    ledger.release(draw, {n: capped(values, upper=5.0) for n in names})


def plain_run(sampling=None, relation="add_or_remove_one", journal=None, steps=3) -> Ledger:
    sampling = sampling or FixedEpochs(100, 100, 4)  # in closed form: quick
    once = {"draw": "other", "count": 1, "sampling": FullBatch(100, 1)}
    apart = once if isinstance(sampling, FixedEpochs) else {"count": 2}
    releases = [Release("gradient", 5.0, Gaussian(2.0)), Release("norm", 5.0, Gaussian(6.0), **apart)]
    releases += [Release("radius", 5.0, Gaussian(9.0), **once)]
    ledger = PublishedLedger(PrivacyPlan(releases, sampling, relation), journal=journal)
    for step in range(steps):
        both = step < 2 and ledger.plan["norm"].draw == "batch"
        released(ledger, "batch", "gradient", *(["norm"] if both else []))
    released(ledger, "other", "radius")
    return ledger


def run_of(releases, sampling, draws, missed=(), **unit) -> Ledger:
    """So many draws, some of which are opened and not released."""
    ledger = PublishedLedger(PrivacyPlan(releases, sampling, **unit))
    for ordinal in range(draws):
        if ordinal in missed:
            ledger.open("batch")
        else:
            released(ledger, "batch", *(release.name for release in releases))
    return ledger


def gappy_run() -> Ledger:
    """Ten releases of an epoch's length, which lie in two."""
    return run_of([Release("gradient", 5.0, Gaussian(1.0))], FixedEpochs(10, 100, 20), 20, range(5, 15))


def over_steps_run() -> Ledger:
    """Noise over three steps, records in groups of four, nine of twelve draws released."""
    gradient = Release("gradient", 5.0, BandedGaussian((1.0, 0.5, 0.3), 2.0))
    return run_of([gradient], CyclicPoisson(10, 100, 12, bands=4), 12, range(5, 8))


STAGES = Release("gradient", 5.0, Staged(Gaussian(3.0), (0, 4, 7), (1.0, 0.8, 0.5)))


def stages_run(draws=9, missed=(4, 5)) -> Ledger:
    """Two releases whose noise falls twice over ten draws, seven of them released."""
    return run_of([STAGES, Release("norm", 5.0, Gaussian(6.0))], FullBatch(100, 10), draws, missed)


def users_run() -> Ledger:
    """Users of at most three sampled records, five of eight draws released."""
    return run_of([Release("gradient", 5.0, Gaussian(2.0))], Poisson(10, 100, 8), 5, unit=Unit("user", 3))


def unproven_run(multiplier) -> Ledger:
    plan = PublishedPlan(
        [Release("gradient", 5.0, Gaussian(2.0))], FullBatch(100, 4), unproven=[Unproven("raw")]
    )
    ledger = PublishedLedger(plan)
    draw = ledger.open("batch")
    value = {"x": Private(torch.zeros(2), draw)}
    ledger.release_unproven(
        draw, "raw", value, 1.0, hole="no bound is known", worst_case_multiplier=multiplier
    )
    return ledger


def statement_of(ledger: Ledger, **facts) -> dict:
    return json.loads(made_of(ledger, DELTA, **facts).to_json())


def rows_of(ledger: Ledger) -> list[dict]:
    """The journal's lines, which a test may change."""
    return copy.deepcopy(ledger.journal.read())


def journal_of(rows) -> Journal:
    journal = Journal()
    for row in rows:
        journal.write(row)
    return journal


def entries_of(rows):
    return journal_of(rows).entries()


def complaint(statement, rows) -> str:
    """The first thing that is wrong with a statement or with the lines of its journal."""
    try:
        return next(f.detail for f in check_with_journal(statement, entries_of(rows)) if f.ok is False)
    except JournalError as error:
        return str(error)


def verdicts(statement, ledger):
    """Whether it is consistent: (with the journal, from the statement alone)."""
    return tuple(
        all(finding.ok is not False for finding in findings)
        for findings in (check_with_journal(statement, ledger.journal.entries()), check_published(statement))
    )


def test_epochs_are_charged_by_the_draws_that_lie_in_them():
    ledger = gappy_run()
    two = gaussian_epsilon(2**0.5, DELTA)
    assert ledger.spent(DELTA).value == pytest.approx(two)
    assert ledger.progress(DELTA) == pytest.approx(two)
    again = PublishedLedger(ledger.plan, journal=ledger.journal, secrets=ledger.secrets)
    assert again.spent(DELTA).value == pytest.approx(two)
    ledger.close()
    other = PublishedLedger(ledger.plan, journal=ledger.journal)
    assert other.spent(DELTA).value == pytest.approx(two)


def stopped(ledger: Ledger, fixed: bool = True) -> Ledger:
    ledger.close(stop_fixed_beforehand=fixed)
    return ledger


def test_a_run_that_stopped_claims_its_plan():
    """However it was closed, unless with the word that its stop had been fixed."""
    whole = plain_run(steps=4)
    for ledger in (plain_run(), stopped(plain_run(), fixed=False)):
        assert statement_of(ledger)["epsilon"] == statement_of(whole)["epsilon"] > ledger.spent(DELTA).value
    fixed = stopped(plain_run())
    assert statement_of(fixed)["epsilon"] == fixed.spent(DELTA).value
    assert STOPPED in statement_of(fixed)["assumptions"]
    worst, part = unproven_run(3.0), stopped(unproven_run(3.0))
    assert statement_of(worst)["epsilon"] > statement_of(part)["epsilon"] == part.spent(DELTA).value


def test_a_word_about_the_stop_that_the_journal_does_not_hold_is_caught():
    ledger = stopped(plain_run(), fixed=False)
    claimed = json.loads(made_of(stopped(plain_run()), DELTA).to_json()) | {"run": ledger.run}
    assert verdicts(claimed, ledger) == (False, True)
    rows = rows_of(stopped(plain_run()))
    rows[-1]["stop_fixed_beforehand"] = "yes"
    with pytest.raises(JournalError, match="stop_fixed_beforehand must be true or false"):
        entries_of(rows)


def test_a_statement_from_before_stops_were_told_apart_says_so():
    """It claims the releases made, under the assumption that it names; that is said, not refused."""
    ledger = plain_run()
    fixed = made_of(ledger, DELTA, stop_fixed_beforehand=True)
    old = json.loads(fixed.to_json())
    del old["stop_fixed_beforehand"], old["users"]  # nor were there any
    jsonschema.validate(old, statement_schema())
    assert verdicts(old, ledger) == (True, True)
    for found in (check_with_journal(old, ledger.journal.entries()), check_published(old)):
        assert [one.ok for one in found if one.subject == "stop"] == [None]


RUNS = {
    "gaps": gappy_run,
    "poisson": lambda: plain_run(Poisson(20, 100, 4)),
    "truncated": lambda: plain_run(TruncatedPoisson(20, 100, 4, 25)),
    "replace": lambda: plain_run(relation="replace_one"),
    "unamplified": plain_run,
    "nested": lambda: plain_run(FullBatch(100, 4)),
    "worst case": lambda: unproven_run(3.0),
    "no guarantee": lambda: unproven_run(None),
    "over steps": over_steps_run,
    "stages": stages_run,
    "stages, fixed stop": lambda: stopped(stages_run()),
    "nothing yet": lambda: plain_run(steps=0),
    "fixed stop": lambda: stopped(plain_run()),
    "fixed stop, worst case": lambda: stopped(unproven_run(3.0)),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_true_statement_is_consistent_and_fits_the_schema(kind):
    ledger = RUNS[kind]()
    statement = statement_of(
        ledger, assumptions=["something else"], recipe="as_published", epsilon_claimed=2.0
    )
    assert verdicts(statement, ledger) == (True, True)
    jsonschema.validate(statement, statement_schema())


def every_release(**changes):
    return lambda s: [row.update(changes) for row in s["releases"]]


def first(**changes):
    return lambda s: s["releases"][0].update(changes)


def mechanism(**changes):
    return lambda s: s["releases"][0]["mechanism"].update(changes)


def in_groups(**changes):
    return lambda s: [place["sampling"].update(changes) for place in (s, s["releases"][0])]


def of_draws(**changes):
    def edit(s):
        for place in (s["sampling"], *(row["sampling"] for row in s["releases"])):
            place.update(changes if place["scheme"] == "TruncatedPoisson" else {})

    return edit


def at_top(**changes):
    return lambda s: s.update(changes)


HOLE = {"kind": "disclose", "reason": "x", "count": 1, "worst_case": None}
LOUDER = {"kind": "gaussian", "noise_multiplier": 4.0}
EDITS = {
    "epsilon halved": lambda s: s.update(epsilon=s["epsilon"] / 2),
    "epsilon a little lower": lambda s: s.update(epsilon=s["epsilon"] * (1 - 1e-5)),
    "epsilon a little higher": lambda s: s.update(epsilon=s["epsilon"] * (1 + 1e-5)),
    "epsilon at another delta": lambda s: s["epsilons"][0].update(epsilon=0.1),
    "epsilon of 400 digits": at_top(epsilon=10**400),
    "delta": at_top(delta=1e-3),
    "noise multiplier": first(noise_multiplier=3.0),
    "number of steps made": first(used=2),
    "sampling rate": lambda s: s["releases"][0]["sampling"].update(batch_size=20),
    "population": lambda s: s["releases"][0]["sampling"].update(population=10_000),
    "bound": first(max_bound=0.1),
    "plan": at_top(plan="0" * 64),
    "relation": at_top(relation="replace_one"),
    "guarantee": at_top(guarantee="worst_case"),
    "hole": lambda s: s["holes"].append(HOLE),
    "a release left out": lambda s: s["releases"].pop(),
    "cross-check": at_top(cross_check=1.0),
    "assumption left out": lambda s: s["assumptions"].pop(0),
    "the sentence on searches": lambda s: s["assumptions"].pop(),
    "a claim of the library": at_top(epsilon_claimed=0.05),
    "a fact": at_top(facts={"independently certified epsilon": 0.05}),
    "a version that is no text": lambda s: s["versions"].update(torch=2),
    "a key too many": at_top(certified_by="an authority"),
}
OVER_STEPS_EDITS = {
    "a coefficient": mechanism(coefficients=[1.0, 0.5, 0.2]),
    "the order of the coefficients": mechanism(coefficients=[1.0, 0.3, 0.5]),
    "fresh noise": first(mechanism={"kind": "gaussian", "noise_multiplier": 2.0}),
    "more noise": mechanism(noise_multiplier=3.0),
    "fewer groups, a lower rate": in_groups(bands=3),
    "more groups": in_groups(bands=5),
    "no groups": lambda s: [place["sampling"].pop("bands") for place in (s, s["releases"][0])],
    "Poisson sampling": in_groups(scheme="Poisson"),
    "an epoch left out": first(epochs=2, used=8),
}
STAGES_EDITS = {
    "a factor": mechanism(factors=[1.0, 0.9, 0.5]),
    "the order of the factors": mechanism(factors=[1.0, 0.5, 0.8]),
    "a start": mechanism(starts=[0, 4, 8]),
    "a stage left out": mechanism(starts=[0, 4], factors=[1.0, 0.8]),
    "more noise": mechanism(noise_multiplier=4.0),
    "more noise inside": mechanism(mechanism=LOUDER),
    "more noise in both places": mechanism(noise_multiplier=4.0, mechanism=LOUDER),
    "the same noise in all steps": first(mechanism={"kind": "gaussian", "noise_multiplier": 3.0}),
    "releases of a late stage told as early ones": every_release(used_by_stage=[4, 2, 1]),
    "stages of two releases of a draw that differ": lambda s: s["releases"][1].update(
        used_by_stage=[4, 2, 1]
    ),
    "more releases in a stage than it has": every_release(used_by_stage=[5, 0, 2]),
    "counts of stages left out": lambda s: [row.pop("used_by_stage") for row in s["releases"]],
}
CAPPED_EDITS = {
    "a higher cap": of_draws(max_batch_size=30),
    "a lower cap": of_draws(max_batch_size=19),
    "smaller samples": of_draws(expected_batch_size=10),
    "a larger population": of_draws(population=200),
    "no cap": of_draws(scheme="Poisson"),
    "a cap left out": lambda s: s["sampling"].pop("max_batch_size"),
}


USERS_EDITS = {
    "records": at_top(unit="record"),
    "records, and no users": at_top(unit="record", users=None),
    "no users": lambda s: s.pop("users"),
    "fewer records of a user": lambda s: s["users"].update(records=1),
    "more records of a user": lambda s: s["users"].update(records=4),
    "no number of records": lambda s: s["users"].pop("records"),
    "users drawn whole": lambda s: s["users"].update(rows="mean"),
    "the words on owners": lambda s: s["assumptions"].remove(OWNED),
    "epsilon of one record": lambda s: s.update(epsilon=s["epsilon"] / 3),
}
BESIDE_OTHERS = {
    "epsilon": at_top(epsilon=0.01),
    "epsilon that is not finite": at_top(epsilon=float("inf")),
    "epsilon of 400 digits": at_top(epsilon=10**400),
    "a further delta": lambda s: s["epsilons"][1].update(delta=1e-3),
    "epsilons left out": at_top(epsilons=[]),
    "cross-check": at_top(cross_check=0.01),
    "guarantee": at_top(guarantee="worst_case"),
    "less than no runs": at_top(other_runs=-1),
    "runs that are true": at_top(other_runs=True),
    "no guarantee but an epsilon": at_top(guarantee="none"),
}
EDITED = {
    "plain": (plain_run, EDITS),
    "over steps": (lambda: stopped(over_steps_run()), OVER_STEPS_EDITS),
    "stages": (lambda: stopped(stages_run()), STAGES_EDITS),
    "truncated": (lambda: stopped(RUNS["truncated"]()), CAPPED_EDITS),
    "users": (users_run, USERS_EDITS),
    "beside another": (lambda: two_at_once()[1], BESIDE_OTHERS),
}


@functools.cache
def edited_run(kind: str) -> tuple[Ledger, str]:
    """A run, whose ledger no edit of its statement changes, and that statement."""
    ledger = EDITED[kind][0]()
    return ledger, made_of(ledger, DELTA).to_json()


@pytest.mark.parametrize(("kind", "edit"), [(k, edit) for k, (_, edits) in EDITED.items() for edit in edits])
def test_an_edited_statement_is_caught(kind, edit):
    ledger, text = edited_run(kind)
    statement = json.loads(text)
    assert verdicts(statement, ledger) == (True, True)
    EDITED[kind][1][edit](statement)
    assert verdicts(statement, ledger) == (False, False)


@pytest.mark.parametrize("ordinal", [3, 4])
def test_a_journal_line_with_the_noise_of_another_stage_is_caught(ordinal):
    ledger = stages_run(5, ())
    rows = rows_of(ledger)
    rows[1 + ordinal]["multipliers"]["gradient"] = 3.0 * 0.8 if ordinal < 4 else 3.0
    assert "noise multiplier" in complaint(statement_of(ledger), rows)


VALUES = [None, True, 0, 1, 1.0, 1.5, -1, float("inf"), "", "a" * 64, [], ["x"], [1], {}, {"a": 1}]


@pytest.mark.parametrize("key", sorted(statement_schema()["properties"]))
def test_any_value_of_a_key_that_the_schema_refuses_is_found(key):
    known = jsonschema.Draft202012Validator(statement_schema())
    for value in VALUES:
        changed = json.loads(edited_run("plain")[1]) | {key: value}
        found = check_published(changed)
        assert known.is_valid(changed) or any(finding.ok is False for finding in found), value


@pytest.mark.parametrize("change", [{"run": "f" * 16}, {"other_runs": 1}, {"private": False}])
def test_edits_that_the_journal_alone_catches(change):
    ledger = plain_run()
    assert verdicts(statement_of(ledger) | change, ledger) == (False, True)


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        (0, lambda e: e["plan"]["releases"][0]["mechanism"].update(noise_multiplier=9.0), "fingerprint is"),
        (1, lambda e: e["multipliers"].update(gradient=9.0), "noise multiplier"),
        (1, lambda e: e["bounds"].update(gradient=50.0), "bound"),
        (1, lambda e: e.update(pattern=["nothing"]), "holds no draw"),
        (1, lambda e: e.pop("bounds"), "line 2 of the journal .*bounds is missing"),
        (1, lambda e: e.update(note="x"), "line 2 .*'note' is not a field"),
        (1, lambda e: e.update(answer=3), "line 2 .*answer must be a text, but is 3"),
        (0, lambda e: e["plan"].pop("relation"), "line 1 .*plan cannot be read: KeyError"),
        (0, lambda e: e.update(private=1), "line 1 .*private must be true or false"),
        (0, lambda e: e.update(type="noise"), "line 1 .*unknown type"),
        (2, lambda e: e.update(type="noise"), "line 3 .*unknown type"),
    ],
)
def test_an_edited_journal_is_caught(line, change, words):
    ledger = plain_run()
    statement, rows = statement_of(ledger), rows_of(ledger)
    change(rows[line])
    assert re.search(words, complaint(statement, rows))
    if not line:  # another run, which opens the journal, refuses it as well
        with pytest.raises(JournalError, match=words):
            plain_run(journal=journal_of(rows))


def shut(entries):
    """A release comes after the run's end."""
    entries.insert(1, {"type": "close", "run": entries[0]["run"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e[2].update(bounds={}), "releases what the plan does not hold"),
        (lambda e: e[2].update(bounds={}, multipliers={"gradient": 1e-6}), "does not hold"),
        (lambda e: e[2]["multipliers"].update(norm=1e-6), "noise multipliers for"),
        (lambda e: e[2].update(multipliers={}), "noise multipliers for"),
        (lambda e: e[2]["bounds"].update(gradient=True), "bounds must be positive numbers"),
        (lambda e: e[2].update(index=0), "that of another draw"),
        (lambda e: e[2].update(ordinal=0), "that of another draw"),
        (lambda e: e[2].update(hash="0", index=0, ordinal=0), "that of another draw"),
        (lambda e: e[2].update(index=True), "count from 0"),
        (lambda e: e[2].update(ordinal=-1), "count from 0"),
        (lambda e: e.insert(2, e[1]), "a second time"),
        (lambda e: e.append({"type": "void", "run": e[0]["run"], "index": 9}), "makes draw 9 void"),
        (shut, "release after the run was closed"),
    ],
)
def test_lines_that_no_ledger_writes_are_caught(change, words):
    ledger = plain_run()
    statement, rows = statement_of(ledger), rows_of(ledger)
    change(rows)
    assert words in complaint(statement, rows)
    with pytest.raises(JournalError, match=words):  # nor is a statement made of them
        statement_from_journal(entries_of(rows), ledger.run, DELTA)
    for secrets in (ledger.secrets, None):  # nor does this run go on, nor another one with them
        with pytest.raises(JournalError, match=words):
            PublishedLedger(ledger.plan, journal=journal_of(rows), secrets=secrets)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e[1].update(name="other"), "does not hold"),
        (lambda e: e.append(e[1]), "more often than planned"),
        (shut, "release after the run was closed"),
    ],
)
def test_unproven_lines_are_held_against_the_plan(change, words):
    ledger = unproven_run(3.0)
    rows = rows_of(ledger)
    change(rows)
    with pytest.raises(JournalError, match=words):
        statement_from_journal(entries_of(rows), ledger.run, DELTA)


@pytest.mark.parametrize(
    ("change", "subject"),
    [(lambda e: e.pop(2), "draws"), (lambda e: e[2].update(data="other"), "data")],
)
def test_what_an_honest_journal_may_hold_too_is_told(change, subject):
    """A draw may be opened and not released, and a run resumed with changed data: neither is an edit."""
    ledger = plain_run()
    rows = rows_of(ledger)
    before = check_with_journal(statement_of(ledger), entries_of(rows))
    assert not {"draws", "data"} & {finding.subject for finding in before}
    change(rows)
    entries = entries_of(rows)
    statement = json.loads(statement_from_journal(entries, ledger.run, DELTA).to_json())
    found = check_with_journal(statement, entries)
    assert [f.subject for f in found if f.ok is None] == [subject]
    assert all(f.ok is not False for f in found)


def test_a_line_left_out_of_the_journal_is_caught():
    ledger = plain_run()
    statement, entries = statement_of(ledger), ledger.journal.entries()
    for gone in range(1, len(entries)):
        left = entries[:gone] + entries[gone + 1 :]
        assert any(finding.ok is False for finding in check_with_journal(statement, left))


def test_a_stranger_cannot_tell_lines_and_statement_edited_together():
    """What signatures are for: a whole other run is consistent in itself."""
    ledger = plain_run()
    ledger.close(stop_fixed_beforehand=True)
    entries = ledger.journal.entries()
    left = [entry for entry in entries if entry.kind != "release" or entry.draw.index != 2]
    statement = json.loads(statement_from_journal(left, ledger.run, DELTA).to_json())
    assert statement["epsilon"] < statement_of(ledger)["epsilon"]
    assert all(finding.ok is not False for finding in check_with_journal(statement, left))


def test_a_shared_journal_that_has_grown_since():
    journal = Journal()
    first = plain_run(journal=journal)
    early = statement_of(first)
    second = plain_run(journal=journal)
    late = statement_of(second)
    assert late["other_runs"] == 1
    first.close()
    third = plain_run(journal=journal)
    for statement in (early, late, statement_of(third)):
        assert verdicts(statement, first)[0]
        assert not verdicts(statement | {"epsilon": statement["epsilon"] * 0.999}, first)[0]
        assert not verdicts(statement | {"other_runs": 7}, first)[0]
    told = {one.subject: one.detail for one in check_with_journal(early, journal.entries())}
    assert "2 later runs" in told["later runs"]
    assert f"{statement_of(third)['epsilon']:.2f}"[:3] in told["later runs"]
    of_last = check_with_journal(statement_of(third), journal.entries())
    assert "later runs" not in {one.subject for one in of_last}
    # a stranger sees that the figure covers the run itself at least
    assert verdicts(late, second)[1]
    assert not verdicts(late | {"epsilon": 0.01}, second)[1]


def two_at_once():
    """A opens, B opens, B makes its releases and ends, A makes its own and ends."""
    journal = Journal()
    plan = PrivacyPlan([Release("gradient", 5.0, Gaussian(2.0))], FullBatch(100, 3))
    first, second = PublishedLedger(plan, journal=journal), PublishedLedger(plan, journal=journal)
    alone = made_of(first, delta=DELTA)
    for ledger in (second, first):
        for _ in range(3):
            released(ledger, "batch", "gradient")
        ledger.close()
    return first, second, alone


def test_what_others_released_before_a_runs_last_release_is_in_its_statement():
    first, _, before = two_at_once()
    statement = statement_of(first)
    assert (before.other_runs, statement["other_runs"]) == (1, 1)
    assert verdicts(statement, first) == (True, True)
    own = [entry for entry in first.journal.entries() if entry.run == first.run]
    without = json.loads(statement_from_journal(own, first.run, DELTA).to_json())
    assert (without["other_runs"], without["epsilon"] < statement["epsilon"]) == (0, True)
    assert not verdicts(without, first)[0]


def test_a_closed_journal_takes_no_other_run_out_of_a_statement(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    plain_run(journal=journal)
    ledger = plain_run(journal=journal)
    before = statement_of(ledger)
    journal.close()
    assert statement_of(ledger) == before


def test_a_run_that_released_nothing_may_stand_beside_others():
    statement = statement_of(plain_run(steps=0), stop_fixed_beforehand=True) | {"other_runs": 1}
    beside = {"epsilon": 2.0, "epsilons": [{**row, "epsilon": 2.0} for row in statement["epsilons"]]}
    found = check_published(statement | beside | {"cross_check": 2.5})
    assert [one.ok for one in found if one.subject == "epsilon"] == [None], found


def test_a_worst_case_beside_others_is_no_proof():
    ledger = unproven_run(3.0)
    statement = statement_of(ledger) | {"other_runs": 1}
    assert verdicts(statement, ledger)[1]
    assert not verdicts(statement | {"guarantee": "proven"}, ledger)[1]


OLDER = {"python": "3.0"}


@pytest.mark.parametrize(("factor", "consistent"), [(1.005, True), (1.02, False), (0.995, False)])
@pytest.mark.parametrize("key", ["epsilon", "cross_check"])
def test_figures_of_other_versions_may_be_looser_and_not_tighter(key, factor, consistent):
    ledger = plain_run(Poisson(20, 100, 4))
    statement = statement_of(ledger) | {"versions": OLDER}
    statement[key] *= factor
    assert verdicts(statement, ledger) == (consistent, consistent)


def test_plans_are_compared_exactly_whatever_the_versions():
    ledger = plain_run()
    mechanism = Gaussian(2.0 * (1 + 1e-9)).describe()
    for key, value in (("mechanism", mechanism), ("max_bound", 5.0 * (1 + 1e-3))):
        statement = statement_of(ledger) | {"versions": OLDER}
        statement["releases"][0][key] = value
        assert verdicts(statement, ledger) == (False, False)
    statement = statement_of(ledger) | {"versions": OLDER}
    statement["epsilons"][0]["delta"] *= 1.001
    assert verdicts(statement, ledger) == (False, False)


@pytest.mark.parametrize("multiplier", [3.0, None])
@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(holes=[]),
        lambda s: s["holes"][0].update(count=0),
        lambda s: s["holes"][0].update(count=5),
    ],
)
def test_what_was_planned_without_a_proof_is_a_hole_to_a_stranger(change, multiplier):
    """Also where the figures are computed anew, as if nothing but the plan's releases had left."""
    ledger = unproven_run(multiplier)
    statement = statement_of(ledger, recipe="as_published")
    proven = made_of(PublishedLedger(ledger.plan), delta=DELTA)
    figures = ("guarantee", "epsilon", "epsilons", "cross_check", "accountant", "interval", "warnings")
    change(statement)
    if not statement["holes"]:
        statement |= {key: getattr(proven, key) for key in figures}
        assert statement["guarantee"] == "proven"
    assert verdicts(statement, ledger) == (False, False)


def test_a_reproducible_run_says_so():
    plan = PrivacyPlan([Release("gradient", 5.0, Gaussian(2.0))], FullBatch(100, 4))
    ledger = PublishedLedger(plan, secrets=Secrets(reproducible_seed=1))
    statement = statement_of(ledger)
    assert (statement["private"], verdicts(statement, ledger)) == (False, (True, True))
    assert verdicts(statement | {"private": True}, ledger)[0] is False


@pytest.mark.parametrize(
    "value", [{}, {"delta": 0.1}, {"delta": "x"}, {"delta": 1e-5, "run": [], "releases": 3}]
)
def test_what_is_no_statement(value):
    assert verdicts(value, plain_run()) == (False, False)


def test_a_disclosure_with_the_sentence_of_an_unproven_release_leaves_no_guarantee():
    ledger = unproven_run(3.0)
    assert ledger.guarantee == "worst_case"
    ledger.disclose(Private(torch.tensor(1.0)), "no bound is known")
    statement = statement_of(ledger)
    assert (ledger.guarantee, statement["guarantee"], len(statement["holes"])) == ("none", "none", 2)
    assert verdicts(statement, ledger) == (True, True)


def test_the_record_of_the_journal_is_the_ledgers():
    for make in RUNS.values():
        ledger = make()
        record = JournalRecords.of(ledger.journal).runs[ledger.run]
        assert vars(record).keys() == vars(ledger.record).keys()
        assert record.plan.fingerprint() == ledger.plan.fingerprint()
        for field in ({one.name for one in fields(record)} | {"unproven_steps"}) - {"plan"}:
            assert getattr(record, field) == getattr(ledger.record, field), field
        assert make_statement(record, DELTA, {}) == made_of(ledger, DELTA)
