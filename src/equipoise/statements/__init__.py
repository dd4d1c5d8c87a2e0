"""What is claimed of a run or a federation: statements, their verification, their signatures.

Everything here works on the content of published files and on journal entries; the rooms above read and write
the files.
"""

from equipoise._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
