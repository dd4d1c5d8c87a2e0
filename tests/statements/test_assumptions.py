"""Every assumption of a statement is shown to whoever can check it."""

from equipoise.statements.assumptions import MODEL, OF_RECORD, ROUNDED, START, Assumption, always, by_reader


def test_every_assumption_stands_under_who_is_to_check_it():
    """None is lost; what was proved needs nobody, and what was compared the author of the model."""
    proved, compared = f"{MODEL}proved, for all", f"{MODEL}compared, on a few"
    texts = [*map(str, Assumption), *always("record"), proved, compared]
    owner, author, limits = (rows for _, rows in by_reader(texts))
    assert sorted([*owner, *author, *limits]) == sorted(texts)
    assert {OF_RECORD, Assumption.BY_CONTENT, Assumption.HELD_OUT} <= {*owner}
    assert {START, Assumption.SCHEDULED, compared} <= {*author}
    assert {ROUNDED, Assumption.FOUND, proved} <= {*limits}
