"""The per-sample gradient matrix G as an implicit operator: captured once, formed never unless asked."""

from equipoise.gradients.capture.isolation import parameters_restored
from equipoise.gradients.checks.errors import CoverageError, CrossRecordError, ForwardWritesError
from equipoise.gradients.checks.oracle import dense_gradients
from equipoise.gradients.checks.replace_batch_norm import replace_batch_norm
from equipoise.gradients.engine import Covered, GradientEngine, per_sample_gradients
from equipoise.gradients.operator import DenseGradients, FactoredGradients, PerSampleGradients

__all__ = [
    "CoverageError",
    "Covered",
    "CrossRecordError",
    "DenseGradients",
    "FactoredGradients",
    "ForwardWritesError",
    "GradientEngine",
    "PerSampleGradients",
    "dense_gradients",
    "parameters_restored",
    "per_sample_gradients",
    "replace_batch_norm",
]
