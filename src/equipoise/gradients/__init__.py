"""The per-sample gradient matrix G as an implicit operator: captured once, formed never unless asked."""

from equipoise.gradients.buffers import Buffers
from equipoise.gradients.engine import Covered, GradientEngine, per_sample_gradients
from equipoise.gradients.errors import CoverageError, CrossRecordError, ForwardWritesError
from equipoise.gradients.factored import DenseGradients, FactoredGradients, concat
from equipoise.gradients.fix import Change, find_batch_norms, fix
from equipoise.gradients.operator import PerSampleGradients
from equipoise.gradients.oracle import dense_gradients
from equipoise.gradients.writes import parameters_restored, refuse_max_norm

__all__ = [
    "Buffers",
    "Change",
    "CoverageError",
    "Covered",
    "CrossRecordError",
    "DenseGradients",
    "FactoredGradients",
    "ForwardWritesError",
    "GradientEngine",
    "PerSampleGradients",
    "concat",
    "dense_gradients",
    "find_batch_norms",
    "fix",
    "parameters_restored",
    "per_sample_gradients",
    "refuse_max_norm",
]
