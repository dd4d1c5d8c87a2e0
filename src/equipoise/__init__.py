"""equipoise: differentially private training without clipping bias, on PyTorch.

    import equipoise as eq

The table of contents: names are imported when they are first used, so that `import equipoise` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from equipoise._version import __version__

if TYPE_CHECKING:
    from equipoise.gradients import (
        PerSampleGradients,
        dense_gradients,
        per_sample_gradients,
        replace_batch_norm,
    )
    from equipoise.methods import (
        DCDPSGD,
        DPC4,
        DPSGD,
        DPSVRG,
        EFSGD,
        GEP,
        METHODS,
        NSGD,
        PCDPSGD,
        PDPSGD,
        PSAC,
        Abadi,
        AdaptiveRMS,
        AutoS,
        BiasedGEP,
        ClipRule,
        ClipSGD,
        DiceSGD,
        DPC4Plus,
        ExponentialDecay,
        LinearDecay,
        Method,
        PublicOnly,
        PublicWarmStart,
        RandomProjection,
        RandomSparsification,
        ReleasedQuantile,
        Schedule,
    )
    from equipoise.privacy import (
        Budget,
        FixedEpochs,
        FullBatch,
        Poisson,
        PrivacyPlan,
        PrivateSearch,
        WithoutReplacement,
        calibrate_noise_multiplier,
    )
    from equipoise.statements import Statement
    from equipoise.training import (
        CSVWriter,
        PrivateTraining,
        TensorBoardWriter,
        charge_search,
        load_model,
        sign_run,
        verify_run,
    )


_CONTENTS = {
    # training
    "PrivateTraining": "training",
    "load_model": "training",
    "verify_run": "training",
    "sign_run": "training",
    "charge_search": "training",
    "CSVWriter": "training",
    "TensorBoardWriter": "training",
    # methods, clip rules, thresholds
    "DCDPSGD": "methods",
    "DPSGD": "methods",
    "DPSVRG": "methods",
    "DPC4": "methods",
    "DPC4Plus": "methods",
    "DiceSGD": "methods",
    "ClipSGD": "methods",
    "EFSGD": "methods",
    "AdaptiveRMS": "methods",
    "PCDPSGD": "methods",
    "BiasedGEP": "methods",
    "GEP": "methods",
    "PDPSGD": "methods",
    "PublicOnly": "methods",
    "PublicWarmStart": "methods",
    "RandomProjection": "methods",
    "RandomSparsification": "methods",
    "Method": "methods",
    "METHODS": "methods",
    "ClipRule": "methods",
    "Abadi": "methods",
    "AutoS": "methods",
    "NSGD": "methods",
    "PSAC": "methods",
    "ExponentialDecay": "methods",
    "LinearDecay": "methods",
    "Schedule": "methods",
    "ReleasedQuantile": "methods",
    # privacy
    "Budget": "privacy",
    "Poisson": "privacy",
    "WithoutReplacement": "privacy",
    "FullBatch": "privacy",
    "FixedEpochs": "privacy",
    "PrivacyPlan": "privacy",
    "PrivateSearch": "privacy",
    "Statement": "statements",
    "calibrate_noise_multiplier": "privacy",
    # gradients
    "per_sample_gradients": "gradients",
    "dense_gradients": "gradients",
    "PerSampleGradients": "gradients",
    "replace_batch_norm": "gradients",
}

__all__ = [
    "DCDPSGD",
    "DPC4",
    "DPSGD",
    "DPSVRG",
    "EFSGD",
    "GEP",
    "METHODS",
    "NSGD",
    "PCDPSGD",
    "PDPSGD",
    "PSAC",
    "Abadi",
    "AdaptiveRMS",
    "AutoS",
    "BiasedGEP",
    "Budget",
    "CSVWriter",
    "ClipRule",
    "ClipSGD",
    "DPC4Plus",
    "DiceSGD",
    "ExponentialDecay",
    "FixedEpochs",
    "FullBatch",
    "LinearDecay",
    "Method",
    "PerSampleGradients",
    "Poisson",
    "PrivacyPlan",
    "PrivateSearch",
    "PrivateTraining",
    "PublicOnly",
    "PublicWarmStart",
    "RandomProjection",
    "RandomSparsification",
    "ReleasedQuantile",
    "Schedule",
    "Statement",
    "TensorBoardWriter",
    "WithoutReplacement",
    "__version__",
    "calibrate_noise_multiplier",
    "charge_search",
    "dense_gradients",
    "load_model",
    "per_sample_gradients",
    "replace_batch_norm",
    "sign_run",
    "verify_run",
]


def __getattr__(name: str) -> Any:
    if name not in _CONTENTS:
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"equipoise.{_CONTENTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
