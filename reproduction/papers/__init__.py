"""The experiments of the papers, small enough for one core; `EXPERIMENTS` is the table of their modules.

A module defines `EXPERIMENT`, a `PaperExperiment`, and is imported when its experiment is asked for. Adding
one is one file and one line here. The titles stand here too, so that a listing need not load torch.
"""

from __future__ import annotations

from importlib import import_module

from equipoise._validate import suggestion
from reproduction.findings import PaperExperiment

__all__ = ["EXPERIMENTS", "TITLES", "check_experiment", "find_experiment"]

TITLES: dict[str, str] = {
    "adaptive-rms": "A clipping radius that follows the gradients",
    "adaptive-rms-fl": "AdaptDP-FedAvg with ten clients",
    "adaptive-rms-images": "AdaptDP-FedAvg on MNIST and Fashion-MNIST at epsilons 1, 3 and 8",
    "adaptive-rms-printed": "AdaptDP-FedAvg's table at its own noise levels",
    "dc-dpsgd": "Two thresholds on heavy-tailed regression",
    "dc-dpsgd-ablations": "DC-DPSGD's ablations: dimension, tail index and split of epsilon",
    "dc-dpsgd-images": "Two thresholds on long-tailed CIFAR-10, MNIST and Fashion-MNIST",
    "dc-dpsgd-long-tail": "Two thresholds on rare classes",
    "dc-dpsgd-whole": "DC-DPSGD's table on MNIST and Fashion-MNIST at full size",
    "dice-sgd": "The bias of clipping and its removal at a true epsilon of 1",
    "dice-sgd-ablations": "DiceSGD's ablations: feedback radius and rate beside C1",
    "dice-sgd-images": "DiceSGD's table on CIFAR-10, by a linear model on fixed features",
    "dp-c4-ablations": "DP-C4's ablations, on Mushroom: C, C1 x C2, routines, anchor batch, p",
    "dp-c4": "DP-C4 under interpolation: thresholds that shrink, at a true epsilon of 4",
    "dp-c4-misfit": "DP-C4 without interpolation: constant and rising c2, everybody tuned alike",
    "dp-c4-mushroom": "DP-C4's convex table: Mushroom at a printed epsilon of 1",
    "fed-pcdp": "FedPCDP on the digits, and the bytes that it sends",
    "fed-pcdp-images": "FedPCDP's setting on MNIST and Fashion-MNIST",
    "fed-pcdp-one-class": "FedPCDP and its rivals with one class per client, on the digits",
    "pcdp-sgd": "Projecting gradients before clipping them",
    "pcdp-sgd-images": "PCDP-SGD on images, with public records of the same set and of others",
    "pcdp-sgd-printed": "PCDP-SGD's table in its own schedule of 3,200 steps",
    "pcdp-sgd-subspaces": "Where the directions of a projection come from",
}
EXPERIMENTS: dict[str, str] = {name: f"reproduction.papers.{name.replace('-', '_')}" for name in TITLES}


def check_experiment(name: str) -> None:
    """Refuse a name that no experiment has.

    Raises:
        ValueError: with the name that was probably meant, and all that there are.

    Example:
        >>> check_experiment("dp-c4-missfit")
        Traceback (most recent call last):
            ...
        ValueError: there is no experiment 'dp-c4-missfit'. Did you mean dp-c4-misfit? There are ...
    """
    if name not in EXPERIMENTS:
        raise ValueError(
            f"there is no experiment {name!r}.{suggestion(name, EXPERIMENTS)} There are "
            f"{', '.join(EXPERIMENTS)}."
        )


def find_experiment(name: str) -> PaperExperiment:
    """The experiment of this name.

    Raises:
        ValueError: there is none; the message lists those that there are.

    Example:
        >>> find_experiment("cold-fusion")
        Traceback (most recent call last):
            ...
        ValueError: there is no experiment 'cold-fusion'. There are ...
    """
    check_experiment(name)
    experiment = import_module(EXPERIMENTS[name]).EXPERIMENT
    assert isinstance(experiment, PaperExperiment)
    assert experiment.name == name
    return experiment
