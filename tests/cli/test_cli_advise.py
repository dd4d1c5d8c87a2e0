import pytest


def test_advice_is_one_object_with_a_dry_run(equipoise):
    found = equipoise("advise --data digits --epsilon 2 --records-per-person 2 --json")
    assert found.code == 0, found.out
    assert found.value["command"] == "equipoise train --data digits --method dp-sgd --epsilon 2"
    assert found.value["dry_run"]["dry_run"] is True
    assert "a person's is about 4" in found.value["warnings"][0]
    assert "nothing spent" in " ".join(found.err.split())


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
