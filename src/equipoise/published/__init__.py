"""What papers printed, to the letter: a class each, with its formulas, programs and claims.

The references without noise stand here too: they claim nothing either.
"""

from equipoise._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
