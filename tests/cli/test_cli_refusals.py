"""Mistakes in a command: exit code 2 and words that name them, before anything is spent or written."""

import re

import pytest

# the command | words of its answer
SLIPS = """
train --data mnist | folder
train --data digits --population 1500 | published with 1437
train --data no_such_module:records --population 10 | no_such_module
train --data nothing.csv --test a.csv | does not exist
train --data digits --target a | --target is for tables
train --data digits --task regression --dry-run | made for classification
train --class-weight 3 | CLASS=NUMBER
train --model no-such-net | no-such-net
train --epsilon nan | --epsilon is nan
train --epsilon 1 --noise-multiplier 1 | were both given
train --delta 1 | --delta is 1
train --epochs 1e9 --dry-run | --epochs 1e+09 makes 2e+09 steps
train --batch-size 5000 | the population is 1437
train --sampling full-batch --batch-size 50 | full-batch takes all records in every step
train --optimizer lion | sgd, adam or adamw
train --optimizer adam --momentum 0.5 | --momentum is 0.5, but --optimizer adam
train --data {people} --test-share 0.2 --population 700 {subsets} | where the number of
train --learning-rate 1e308 | --learning-rate is 1e+308
train --clip-norm 0 | --clip-norm is '0', but it must be a number above 0
train --clip-norm quantile:2 | between 0 and 1
train --clip-norm decay:1:2 | decay:START:RATE
train --clip-rule abbadi | give one of abadi, auto_s, nsgd
train --device nowhere | nowhere
train --score auc | --score is auc
train --private-validation 0.1 --score f1 | 'f1' is none
train --private-validation 0.1 --canaries 5 | made of test records
train --private-validation 0.1 --sampling without-replacement --batch-size 100 | fixed size
{numbers} --score accuracy | of one class per record
{numbers} --score error:2000 | error:0.5
{numbers} --target buys,member --score auc | of one class per record
train --data {people} --test {people} | holds private records of --data
compare --data {people} --test {people} | holds private records of --data
federate --data {people} --test {people} | holds private records of --data
train {users} --owner patient | --owner belongs to --unit user
train {users} --unit user --records-per-user 2 | --unit user needs --owner
train {users} --unit user --owner patient | --unit user needs --records-per-user
train {two} --data digits --dry-run | whose records have no owners
train {users} {two} --canaries 10 | canaries are single records
train {users} {two} --subset 100 | takes the first rows, whosever they are
train {users} {two} --public-records 100 | takes the last rows, whosever they are
train {users} {two} --sampling without-replacement | --records-per-user 2: no accountant
train {users} {two} --owner buys | which is the target
train {users} {two} --owner person | --owner names 'person', but the table has no such column
{calibrate} --steps 10 --noise-multiplier 1 --epsilon 1 | exactly one of --noise-multiplier and --epsilon
{calibrate} --noise-multiplier 1 | exactly one of --steps and --epochs
{calibrate} --steps 10 --noise-multiplier 0 | clip-sgd
{calibrate} --steps 10 --noise-multiplier 1 --relation swap | --relation is 'swap'
{calibrate} --steps 9 --noise-multiplier 1 --batch-size 2000 | --batch-size is 2000, but --population is 1000
{calibrate} --steps 10 --noise-multiplier 1 --sampling without-replacement | replace_one
audit --method dp-sgd | equipoise audit method NAME
audit runs/a --data-dir x | equipoise audit run RUN
audit method dp-sgd --option tail=2 | not an option
audit method dice-sgd --hardened | independent noise
audit method dpsgd | must be one of
audit method dp-sgd --confidence 2 | --confidence
audit method dp-sgd --unit user | --records-per-user
audit method dp-sgd --user-rows mean | --unit user
audit neighbours --positions 0 | --positions
audit neighbours RUN --epsilon 3 --test-share 0.2 | --test-share
compare --data nothing.csv --test-share 0.2 | does not exist
compare --learning-rates 1,2 | --learning-rates has 2 numbers
compare --learning-rates 1,inf,2 | --learning-rates 1 is inf
compare --option clip_norm=3 | METHOD.NAME=VALUE
compare --option dp-sgd.learning_rate=fast | --learning-rate is 'fast'
compare --seeds 0 | --seeds is 0
federate --data people.csv | does not exist
federate --method baselines.moon:Moon | is no federated method
federate --method fedpcdp | --public-records
federate --method dp-fedavg --option tau=1 | is not an option of
federate --method dp-fedavg --option server_rate.x=0.5 | is not an option of
federate --method dp-fedavg-quantile --recipe as-published | has only library
federate --clients 3 --clients-per-round 4 | there are 3 clients
federate --clip-norm quantile | takes a number
federate --option tau=-1 | tau
schema init . | '.': it is a folder
schema init / | '/': it is a folder
schema ranges . --epsilon 1 --ledger l.jsonl | the schema '.schema.toml' does not exist
sweep --data digits | such as --grid epsilon=1,3,8 --grid seed=0
sweep --data digits --grid data=digits,mnist | data is shared by all runs
sweep --data digits --grid epsilon=1 --grid epsilon=2 | epsilon is there twice
sweep --data digits --grid epsilon=1,none | --epsilon is 'none'
sweep --data digits --grid no_such=1,2 | no_such
sweep --data digits --grid seed=0,1 --secret-seed README.md | the same noise and sampling
{search} --epsilon 3 --grid clip_norm=1,quantile | different privacy plans
{search} --epsilon 3 --grid batch_size=20,50 | different privacy plans
{search} --epsilon 3 --grid relation=add_or_remove_one,replace_one | other guarantees
{search} --epsilon 3 --grid epsilon=1,30 | other guarantees
{search} --noise-multiplier 3 | --noise-multiplier has no use
{search} --epsilon 3 --option noise_multiplier=3 | --noise-multiplier has no use
{search} --epsilon 3 --method dp-c4 --recipe as_published | without a proven guarantee
{search} --epsilon 3 --reproducible | --reproducible has no use
{search} --epsilon 3 --ledger all.jsonl --runs 10 | --ledger has no use
"""
WORDS = {
    "numbers": "train --data {people} --target wage --batch-size 60 --epochs 1 --private-validation 0.2",
    "users": "--data {patients} --test-share 0.2 --epsilon 8 --delta 1e-4 --batch-size 150 --dry-run",
    "two": "--unit user --owner patient --records-per-user 2",
    "calibrate": "calibrate --population 1000 --batch-size 100",
    "subsets": "--sampling without-replacement --batch-size 50",
    "search": "search --data digits --subset 400 --batch-size 50 --epochs 1 --private-validation 0.2 "
    "--grid learning_rate=0.01,0.3,1 --mean 3",
}


@pytest.mark.parametrize("slip", SLIPS.strip().splitlines())
def test_a_slip_is_named_and_nothing_is_begun(equipoise, people, patients, tmp_path, monkeypatch, slip):
    monkeypatch.chdir(tmp_path)
    line, said = slip.split(" | ")
    tables = {"people": people, "patients": patients}
    line = line.format(**WORDS | tables).format(**tables)
    if not re.search("epsilon|noise|users", slip):  # no time for a calibration
        line += " --noise-multiplier 2" * line.startswith("train")
    found = equipoise(line)
    assert found.code == 2, found.out
    assert said in " ".join(found.err.split())
    assert "Traceback" not in found.err
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"lock"}


def test_a_run_that_ends_and_cannot_write_its_page_stays(equipoise, tmp_path, monkeypatch):
    """Its key is gone, and its releases are booked elsewhere."""

    def full(_):
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr("equipoise.app.train.report_values", full)
    line = "train --data digits --subset 200 --noise-multiplier 3 --epochs 1 --batch-size 100"
    found = equipoise(line, "--ledger", tmp_path / "all.jsonl", "--run-dir", tmp_path / "run")
    assert found.code == 2
    monkeypatch.undo()
    assert equipoise("resume", tmp_path / "run").code == 0
    assert equipoise("verify", tmp_path / "run").code == 0
