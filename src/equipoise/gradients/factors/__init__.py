"""The kinds of factor, one per use of a parameter: what the rules of the capture make.

| factor | row i of the gradient |
|---|---|
| ``OuterFactor(a, b)`` | sum_s b_is (outer) a_is |
| ``IndexFactor(index, b, num_rows)`` | sum_s e_{index_is} (outer) b_is |
| ``DenseFactor(g)`` | g_i |
| ``ConvFactor(a, b, geometry)`` (``convolution.py``) | sum_p b_ip (outer) patch_ip |
| ``ScaledFactor(inner, diagonal)`` (``scaled.py``) | diagonal * row_i of another factor |
| ``SharedFactor(row, num_records)`` (``scaled.py``) | row, for every i |
"""

from equipoise.gradients.factors.base import DenseFactor, Factor
from equipoise.gradients.factors.lookup import IndexFactor
from equipoise.gradients.factors.outer import OuterFactor

__all__ = ["DenseFactor", "Factor", "IndexFactor", "OuterFactor"]
