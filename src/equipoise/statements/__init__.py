"""What is claimed of a run or a federation: statements, their verification, their signatures.

Everything here works on the content of published files and on journal entries; the rooms above read and write
the files.
"""

from equipoise.statements.recompute import Finding
from equipoise.statements.sign import KeyFileError, Signature
from equipoise.statements.statement import Statement, make_statement, statement_of, statement_schema
from equipoise.statements.verify_run import check_published, check_with_journal, statement_from_journal

__all__ = [
    "Finding",
    "KeyFileError",
    "Signature",
    "Statement",
    "check_published",
    "check_with_journal",
    "make_statement",
    "statement_from_journal",
    "statement_of",
    "statement_schema",
]
