"""`equipoise methods`: listings."""

import pytest

from equipoise.methods import METHODS, find
from equipoise.methods.options import defaults


def test_methods_say_what_they_are(equipoise):
    answer = equipoise("methods")
    assert answer.code == 0
    for name in METHODS:
        assert name in answer.out
        assert find(name).card.summary.split()[0] in answer.out
    assert equipoise("methods --json").value["methods"][0]["guarantee"] in ("proven", "worst_case")


@pytest.mark.parametrize("columns", [80, 120])
def test_methods_fit_the_terminal(equipoise, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, equipoise("methods").out.splitlines())) <= columns


def test_one_method_and_an_unknown_one(equipoise):
    assert [m["name"] for m in equipoise("methods dp-sgd --json").value["methods"]] == ["dp-sgd"]
    answer = equipoise("methods dpsgd")
    assert answer.code == 2
    assert "there is no method 'dpsgd'. Did you mean dp-sgd?" in answer.err
    assert find("dp-sgd").card.claim.split()[0] in equipoise("methods dp-sgd").out


def test_a_method_lists_its_recipes_variants_and_options_with_their_defaults(equipoise):
    out = " ".join(equipoise("methods dc-dpsgd").out.split())
    assert "--recipe library (default), as-published" in out
    assert "library: per_sample (default), joint_topk, two_channel; as-published: alg1 (default), code" in out
    assert "tail_threshold=adaptive" in out
    assert "body_clip_norm" in out
    plain = equipoise("methods rsdp").out
    assert "--recipe" not in plain
    assert "--variant" not in plain
    assert "drop_rate=0.3" in plain


def test_the_listed_options_are_those_of_the_constructor(equipoise):
    for row in equipoise("methods --json").value["methods"]:
        method = find(row["name"])
        assert {*row["options"], "public", "recipe"} == {*defaults(method), "public", "recipe"}
        assert ("as_published" in row["recipes"]) == (method.card.published_guarantee is not None)
        assert ("variant" in row["options"]) == bool(row["variants"])


@pytest.mark.parametrize("name", [name for name in METHODS if find(name).variants])
def test_the_listed_variants_are_those_that_a_method_takes(name):
    method, every = find(name), {v for some in find(name).variants.values() for v in some}
    for recipe, variants in method.variants.items():
        assert method(recipe=recipe).variant == variants[0]
        for variant in every:
            if variant in variants:
                assert method(recipe=recipe, variant=variant).variant == variant
            else:
                with pytest.raises(ValueError, match="variant"):
                    method(recipe=recipe, variant=variant)


def test_the_papers_experiments_stand_beside_the_package(equipoise):
    answer = equipoise("experiment dp-c4")
    assert answer.code == 2
    assert "python -m reproduction" in answer.err
