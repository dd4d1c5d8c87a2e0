"""`equipoise methods`: listings."""

import pytest

from equipoise.methods import METHODS, find
from equipoise.methods.configuration import defaults


def test_methods_say_what_they_are(equipoise):
    answer = equipoise("methods")
    assert answer.code == 0
    for name in METHODS:
        assert name in answer.out
        assert find(name).card.summary.split()[0] in answer.out
    assert equipoise("methods --json").value["methods"][0]["guarantee"] in ("proven", "worst_case")


def test_one_method_and_an_unknown_one(equipoise):
    assert [m["name"] for m in equipoise("methods dp-sgd --json").value["methods"]] == ["dp-sgd"]
    answer = equipoise("methods dpsgd")
    assert answer.code == 2
    assert "there is no method 'dpsgd'. Did you mean dp-sgd?" in answer.err
    assert find("dp-sgd").card.claim.split()[0] in equipoise("methods dp-sgd").out


def test_every_option_is_explained(equipoise):
    """By the docstring of its class, which is the one place where it is written down."""
    for row in equipoise("methods --json").value["methods"]:
        assert row["meanings"].keys() == row["options"].keys()
        unexplained = [name for name, text in row["meanings"].items() if not text]
        for option, kinds in row["kinds"].items():
            for kind, found in kinds.items():
                fields = row["options_of_kinds"][option][kind]
                unexplained += [f"{option}={kind}" for _ in range(not found["summary"])]
                unexplained += [f"{option}={kind}.{name}" for name in fields if not found["meanings"][name]]
        assert unexplained == [], row["name"]
    out = " ".join(equipoise("methods dp-c4").out.split())
    assert "schedule.period m >= 1; by default half the anchor batch" in out


def test_the_listed_options_are_the_fields(equipoise):
    for row in equipoise("methods --json").value["methods"]:
        direct = {name for name in row["options"] if "." not in name}
        assert {*direct, "public"} == {*defaults(find(row["name"])), "public"}
        assert ("as_published" in row["recipes"]) == ("published" in METHODS[row["name"]])
        assert ("variant" in row["options"]) == ("library" in row["variants"])


@pytest.mark.parametrize("name", ["dice-sgd", "dc-dpsgd", "adaptive-rms"])
def test_the_listed_variants_are_those_that_a_method_takes(equipoise, name):
    (row,) = equipoise(f"methods {name} --json").value["methods"]
    every = {variant for some in row["variants"].values() for variant in some}
    for recipe, variants in row["variants"].items():
        kind, config = find(name, recipe), {"name": name, "recipe": recipe}
        assert kind.from_config(config).variant == kind.from_config(config | {"variant": variants[0]}).variant
        for variant in every - set(variants):
            with pytest.raises(ValueError, match="variant"):
                kind.from_config(config | {"variant": variant})
