"""A statement in a console is a line, not all of its keys."""

from dataclasses import replace

import torch
from torch import nn

import equipoise as eq
from equipoise._rounding import rounded_up
from equipoise.statements.assumptions import MODEL, OF_RECORD, ROUNDED, START, Assumption, always, by_reader


def test_a_statement_is_shown_in_a_line():
    model = nn.Linear(3, 1)
    training = eq.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch["x"]).square().sum(1),
        data={"x": torch.randn(200, 3)},
        sampling=eq.Poisson(20, 200, steps=2),
        budget=eq.Budget(3.0, 1e-4),
    )
    training.run(progress=False)
    statement = training.statement()
    spent = f"epsilon={rounded_up(statement.epsilon)}, delta=0.0001"
    assert repr(statement) == f"<Statement: proven, {spent}, add_or_remove_one of one record>"
    assert "NOT PRIVATE" in repr(replace(statement, private=False))
    early = [row | {"used": 1} for row in statement.releases]
    assert "The figure is that of all of them" in " ".join(str(replace(statement, releases=early)).split())
    empty = replace(statement, guarantee="none", epsilon=None, epsilons=[], releases=early, other_runs=2)
    assert "Not all planned releases were made." in " ".join(str(empty).split())
    assert "figure" not in dict(empty.sections())["Guarantee: none"][-1]
    assert "epsilon" not in repr(replace(statement, guarantee="none", epsilon=None))


def test_every_assumption_stands_under_who_is_to_check_it():
    """None is lost; what was proved needs nobody, and what was compared the author of the model."""
    texts = [
        *map(str, Assumption),
        *always("record"),
        f"{MODEL}proved, for all",
        f"{MODEL}compared, on a few",
    ]
    owner, author, limits = (rows for _, rows in by_reader(texts))
    assert sorted([*owner, *author, *limits]) == sorted(texts)
    assert {OF_RECORD, Assumption.BY_CONTENT, Assumption.HELD_OUT} <= {*owner}
    assert {START, Assumption.SCHEDULED, f"{MODEL}compared, on a few"} <= {*author}
    assert {ROUNDED, Assumption.FOUND, f"{MODEL}proved, for all"} <= {*limits}
