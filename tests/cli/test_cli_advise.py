import pytest


def test_advice_is_one_object_with_a_dry_run(equipoise):
    found = equipoise("advise --data digits --epsilon 2 --records-per-person 2 --json")
    assert found.code == 0, found.out
    assert found.value["command"] == "equipoise train --data digits --method dp-sgd --epsilon 2"
    assert found.value["dry_run"]["dry_run"] is True
    assert "a person's is about 4" in found.value["warnings"][0]
    assert "nothing spent" in " ".join(found.err.split())


def test_the_command_has_the_paths_that_were_given(equipoise, people, tmp_path):
    schema = tmp_path / "my schema.toml"
    schema.write_text(people.with_name("people.schema.toml").read_text())
    words = ("--data", people, "--schema", schema, "--test", people.with_name("held_out.csv"))
    found = equipoise("advise --epsilon 2 --json", *words)
    assert found.code == 0, found.err
    assert f"--data {people} --schema '{schema}' --test {people.with_name('held_out.csv')}" in (
        found.value["command"].replace("--target buys ", "")
    )


@pytest.mark.parametrize(("target", "task"), [("wage", "a regression"), ("buys,member", "several labels")])
def test_figures_of_classifications_are_no_reasons_elsewhere(equipoise, people, target, task):
    data = ("--data", people, "--target", target, "--test-share", "0.2", "--public-records", "50")
    found = equipoise("advise --epsilon 2 --json", *data)
    assert found.code == 0, found.err
    assert f"for {task} no measurement speaks" in found.value["reasons"][0]
    assert "%" not in " ".join(found.value["reasons"])
    assert f"for {task} it was not measured" in found.value["worth_trying"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data digits", "--epsilon is missing"),
        ("--data digitz --epsilon 2", "Did you mean digits?"),
        ("--data digits --epsilon 2 --records-per-person 0", "it must be at least 1"),
        (
            "--data there-is-no.csv --epsilon 2 --target income --population 90 --test-share 0.2",
            "there-is-no.csv' does not exist",
        ),
    ],
)
def test_slips_are_answered(equipoise, words, said):
    found = equipoise(f"advise {words} --json")
    assert found.code == 2
    assert said in found.value["error"]
