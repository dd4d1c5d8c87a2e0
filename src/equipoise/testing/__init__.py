"""Checks for authors of methods: does a method keep what it claims? (`check_method`)"""

from equipoise._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
