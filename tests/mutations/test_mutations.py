"""The table of mutations follows the sources; `run.py` applies it."""

import ast
from pathlib import Path

import pytest

from mutations import MUTATIONS, PACKAGE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_applies_and_stays_python(mutation):
    text = (ROOT / PACKAGE / mutation.file).read_text()
    mutated = mutation.apply(text)
    assert mutated != text
    compile(mutated, mutation.file, "exec")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_its_tests_exist_and_are_fast(mutation):
    for test in mutation.tests:
        file, _, name = test.partition("::")
        functions = {
            node.name: node
            for node in ast.parse((ROOT / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        function = functions[name.partition("[")[0]]
        assert "mark.slow" not in "".join(ast.unparse(d) for d in function.decorator_list)


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_a_mutation_whose_text_is_gone_is_an_error():
    with pytest.raises(ValueError, match=r"occurs 0 times in .*up to date"):
        MUTATIONS[0].apply("nothing of the kind")
