"""Methods: differentially private estimators of the gradient, in families, with clip rules and thresholds.

`METHODS` is the table of methods by name, `find` gives the class of one.
"""

from equipoise._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
