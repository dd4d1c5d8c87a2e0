"""The experiments of the papers, small enough for one core; `EXPERIMENTS` is the table of their modules.

A module defines `EXPERIMENT`, a `PaperExperiment`, and is imported when its experiment is asked for. Adding
one is one file and one line here.
"""

from __future__ import annotations

from importlib import import_module

from equipoise.experiments.findings import PaperExperiment

__all__ = ["EXPERIMENTS", "find_experiment"]

EXPERIMENTS: dict[str, str] = {
    "adaptive-rms-images": "equipoise.experiments.papers.adaptive_rms_images",
    "fed-pcdp": "equipoise.experiments.papers.fed_pcdp",
    "fed-pcdp-images": "equipoise.experiments.papers.fed_pcdp_images",
    "adaptive-rms": "equipoise.experiments.papers.adaptive_rms",
    "adaptive-rms-fl": "equipoise.experiments.papers.adaptive_rms_fl",
    "pcdp-sgd": "equipoise.experiments.papers.pcdp_sgd",
    "dc-dpsgd": "equipoise.experiments.papers.dc_dpsgd",
    "dice-sgd": "equipoise.experiments.papers.dice_sgd",
    "dp-c4": "equipoise.experiments.papers.dp_c4",
    "dp-c4-misfit": "equipoise.experiments.papers.dp_c4_misfit",
}


def find_experiment(name: str) -> PaperExperiment:
    """The experiment of this name.

    Raises:
        ValueError: there is none; the message lists those that there are.

    Example:
        >>> find_experiment("cold-fusion")
        Traceback (most recent call last):
            ...
        ValueError: there is no experiment 'cold-fusion'; ...
    """
    if name not in EXPERIMENTS:
        raise ValueError(
            f"there is no experiment {name!r}; there are {', '.join(sorted(EXPERIMENTS)) or 'none yet'}"
        )
    experiment = import_module(EXPERIMENTS[name]).EXPERIMENT
    assert isinstance(experiment, PaperExperiment)
    assert experiment.name == name
    return experiment
