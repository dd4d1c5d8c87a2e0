"""Differentially private training for PyTorch, with methods against clipping bias
and a guarantee that others can check.

    import equipoise as eq

Names are imported when they are first used, so that `import equipoise` is quick. What is not here is one dot
deeper: `eq.methods.ReleasedQuantile`, `eq.privacy.PrivateSearch`.
"""

from equipoise._lazy import attach
from equipoise._version import __version__ as __version__

__getattr__, __dir__, __all__ = attach(__name__, __file__)
