"""A method around another one passes on whatever it does not say itself."""

from __future__ import annotations

import inspect

import pytest

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
