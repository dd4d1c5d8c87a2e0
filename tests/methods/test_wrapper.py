"""A method around another one passes on whatever it does not say itself."""

from __future__ import annotations

import inspect

import pytest

from baselines.fedprox import Proximal
from equipoise.audit.canary_scores import WithCanaryScores
from equipoise.methods import Method
from equipoise.methods.wrapper import MethodWrapper

# Every public method of an instance; classmethods make methods and are each class's own.
PUBLIC = [name for name, f in vars(Method).items() if inspect.isfunction(f) and not name.startswith("_")]
OUTER = {"inner": "inner state"}


class Plain(MethodWrapper):
    """Adds nothing."""

    name = "plain"


def spy():
    """A method that notes what it is asked, and answers with something of its own."""

    def asked(name):
        def answer(self, *args):
            self.asked.append((name, args))
            return ("estimate", "next state") if name == "step" else f"answer of {name}"

        return answer

    made = type("Spy", (Method,), {name: asked(name) for name in PUBLIC} | {"name": "spy", "card": None})()
    made.asked = []
    return made


def expected(name):
    of_state = {"inner": f"answer of {name}"}
    known = {
        "step": ("estimate", {"inner": "next state"}),
        "init": of_state,
        "rebase": of_state,
        "config": {"name": "plain", "recipe": "library", "inner": "answer of config"},
        "assumptions": tuple("answer of assumptions"),
    }
    return known.get(name, f"answer of {name}")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_method_is_passed_on(name):
    inner = spy()
    wanted = [n for n in inspect.signature(getattr(Method, name)).parameters if n != "self"]
    given = [OUTER if n == "state" else f"the {n}" for n in wanted]
    assert getattr(Plain(inner), name)(*given) == expected(name)
    passed = tuple("inner state" if n == "state" else f"the {n}" for n in wanted)
    assert inner.asked == [(name, passed)]


COSTS = ("passes_over", "gradients_per_step", "claimed_epsilon", "plan", "metrics")


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(
    "wrap",
    [lambda inner: WithCanaryScores(inner, {}), lambda inner: Proximal(inner, 0.1)],
    ids=["watched", "proximal"],
)
def test_wrappers_cost_and_claim_what_the_inner_method_does(wrap, name):
    inner = spy()
    inner.recipe = "as_published"
    outer = wrap(inner)
    assert outer.recipe == "as_published"
    count = len(inspect.signature(getattr(Method, name)).parameters) - 1
    assert getattr(outer, name)(*[OUTER] * count) == f"answer of {name}"
    assert [asked for asked, _ in inner.asked] == [name]
