"""A simulated federation: the clients and the server that its settings make.

Every client samples with the same rate q, whatever its size n_p, so that clients of different sizes that take
part in equally many rounds share one calibration. Subsets of a fixed size hold the nearest whole number. Who
takes part in which round is public and known beforehand: a client's plan holds exactly its rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.app.build import sampling_kind, whole_draws
from equipoise.app.data_loading import cache_folder, load_data, set_public_apart
from equipoise.app.method_settings import check_options
from equipoise.app.models import build_model, default_model, prepare_data
from equipoise.app.option_checks import SettingsError
from equipoise.app.settings import FederationSettings
from equipoise.app.tasks import loss_of, task_of
from equipoise.data import DataSet
from equipoise.data.records import OWNER
from equipoise.federated import Client, Strategy, dirichlet, iid, one_class, shards
from equipoise.federated.registry import FederatedMethod, FederationSetup, find_federated
from equipoise.federated.round_protocol import protocol_of
from equipoise.federated.server import pick_clients
from equipoise.privacy import Budget, gaussian_mu
from equipoise.training import Data, Record, Run
from equipoise.training.population import population_told_elsewhere

SAMPLING_RATE = 0.1


CLIP_NORM = 1.0


# Measured on training records of MNIST, Fashion-MNIST and digits that were held out: see
# docs/measurements/federated.md.
TOTAL_NOISE = 15.0


LARGEST_STEP = 3.0  # in a classification; other tasks take no longer ones than central training


# What the default settings fill in and local steps of plain SGD do not have.
_OF_OTHER_TRAININGS: dict[str, Any] = dict.fromkeys(
    ("epochs", "clip_rule", "optimizer", "momentum", "weight_decay", "schedule", "ema", "views")
)


@dataclass(frozen=True)
class Federation:
    """What the settings make.

    Attributes:
        settings: with the gaps filled.
        dataset: prepared for the model; its training records are all clients' together.
        parts: record numbers of each client.
        planned: rounds that each client will be picked for.
        setup: the public constants.
        entry: of the method in the table.
    """

    settings: FederationSettings
    dataset: DataSet
    parts: list[Tensor]
    planned: list[int]
    setup: FederationSetup
    entry: FederatedMethod

    def model(self) -> nn.Module:
        assert self.settings.base.model is not None
        return build_model(self.settings.base.model, self.dataset, seed=self.settings.base.seed)

    def strategy(self) -> Strategy:
        return self.entry.strategy(self.setup)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The scores of the task on the test records."""
        return task_of(self.dataset, self.settings.base.loss).evaluate(model, self.dataset)

    @property
    def busiest(self) -> int:
        """The number of the client that is picked most often, or of the first of these."""
        return max(range(len(self.parts)), key=self.planned.__getitem__)

    def rehearse(self) -> Client:
        """Make the server's side and the busiest client, in memory: refuses what cannot be used.

        Returns:
            The client, to be closed.

        Raises:
            ValueError, TypeError, BudgetError: as the method, its plan and the client.
        """
        self.strategy()
        return self.client(self.busiest, None)

    def population(self, number: int) -> int:
        """A client's public size: its share of the public population; the partition itself is public."""
        if self.settings.site_column is not None:
            return int(self.settings.of_site(number, "population", 0))
        share = len(self.parts[number]) / sum(map(len, self.parts))
        return max(1, round(self.dataset.population * share))

    def client(self, number: int, folder: Path | None) -> Client:
        """Client `number`, in its folder or in memory; a folder that holds a run is continued."""
        base, K = self.settings.base, self.setup.local_steps
        assert base.batch_size is not None
        assert base.delta is not None
        n = self.population(number)
        rate = base.batch_size * len(self.parts) / self.dataset.population
        method = self.entry.method(self.setup)
        kind = sampling_kind(base)
        size = max(1, round(rate * n)) if whole_draws(kind) else rate * n
        epsilon = self.settings.of_site(number, "epsilon", base.epsilon)
        budget = None if epsilon is None else Budget(epsilon, base.delta)
        with population_told_elsewhere():  # once, for all clients together
            return Client(
                self.model(),
                protocol_of(method).client_loss or self.setup.loss,
                Data(self.dataset.train.subset(self.parts[number]), microbatch_size=base.micro_batch_size),
                kind.of_size(size, n, max(1, self.planned[number]) * K),
                method,
                local_steps=K,
                budget=budget,
                learning_rate=base.learning_rate,
                unit=Record(relation=base.neighbours()),
                run=Run(
                    folder,
                    seed=(base.seed << 16) + number,
                    reproducible=base.reproducible,
                    hardened=base.hardened,
                ),
            )


@dataclass(frozen=True)
class ClientMaker:
    """A picklable maker of clients: other processes load the data themselves, once each.

    Attributes:
        settings: `FederationSettings.to_json`.
        folder: clients lie in 000, 001, ... in it.
    """

    settings: str
    folder: str

    def client(self, number: int) -> Client:
        return federation(self.settings).client(number, self.place(number))

    def place(self, number: int) -> Path:
        return Path(self.folder) / f"{number:03d}"

    def __call__(self, context: Any) -> Client:
        from equipoise.federated.flower import client_number

        return self.client(client_number(context))


@lru_cache(maxsize=1)
def federation(text: str) -> Federation:
    """The federation of settings as `FederationSettings.to_json` writes them, built once per process.

    Raises:
        SettingsError: a setting that cannot be used.
        DataFileError: data that cannot be used.
    """
    settings = FederationSettings.from_json(text)
    settings.check()
    base, entry = settings.base, find_federated(settings.base.method)
    raw = load_data(replace(base, owner=settings.site_column))
    if settings.site_column is not None:
        stated = sum(settings.of_site(p, "population", 0) for p in range(settings.clients))
        raw = replace(raw, population=stated)
    # Small networks are what federations were measured with, on named data sets too.
    # No client has more records than there are, so that delta suits each of them.
    filled = replace(base, model=base.model or default_model(raw)).resolved(population=raw.population)
    assert filled.model is not None
    whole = prepare_data(filled.model, raw, cache_folder(), features=filled.features)
    if entry.needs_public and base.public_records is None:
        raise SettingsError(
            f"--method {base.method} needs public records: give --public-records M, which takes the last M "
            "training records out of the private set. They get no protection."
        )
    dataset, public = set_public_apart(filled, whole)
    parts = _partition(settings, dataset)
    if settings.site_column is not None:
        dataset = replace(dataset, train=dataset.train.without(OWNER))
    average = dataset.population / len(parts)
    if base.batch_size is not None and base.batch_size > average:  # the default is a share of the average
        raise SettingsError(
            f"--batch-size is {base.batch_size:g}, but a client of average size has {average:g} records. "
            "Give at most that many."
        )
    recipe = base.recipe or "library"
    if recipe not in entry.recipes:
        raise SettingsError(
            f"--recipe is {recipe!r}, but --method {base.method} has only {', '.join(entry.recipes)}."
        )
    published = (entry.published or {}) if recipe == "as_published" else {}
    base = replace(
        filled,
        sampling=base.sampling,
        batch_size=base.batch_size or SAMPLING_RATE * average,
        clip_norm=base.clip_norm or f"{published.get('clip_norm', CLIP_NORM):g}",
        learning_rate=base.learning_rate,  # the default is that of central training
        **_OF_OTHER_TRAININGS,
    )
    settings = replace(settings, base=base)
    picked = settings.clients_per_round or settings.clients
    planned = Counter(
        number
        for r in range(1, settings.rounds + 1)
        for number in pick_clients(settings.members(r), picked, base.seed, r)
    )
    assert base.model is not None
    model = build_model(base.model, dataset, seed=base.seed)
    if base.learning_rate is None:
        usual = filled.learning_rate or LARGEST_STEP
        longest = LARGEST_STEP if dataset.task == "classification" else min(LARGEST_STEP, usual)
        base = replace(base, learning_rate=_learning_rate(settings, average, model, longest))
        settings = replace(settings, base=base)
    assert base.learning_rate is not None
    setup = FederationSetup(
        rounds=settings.rounds,
        clients=settings.clients,
        clients_per_round=picked,
        local_steps=settings.local_steps,
        learning_rate=base.learning_rate,
        model=model,
        loss=loss_of(dataset, base.class_weights, base.loss),
        clip_norm=_radius(base.clip_norm),
        recipe=recipe,
        options={
            **entry.defaults(recipe),
            **check_options(base.method, entry.options, base.options, nested=False),
        },
        public=public,
        client_records=average,
    )
    return Federation(settings, dataset, parts, [planned[p] for p in range(settings.clients)], setup, entry)


def _learning_rate(settings: FederationSettings, average: float, model: nn.Module, longest: float) -> float:
    """The rate at which the noise of all steps moves the global model by `TOTAL_NOISE`, rounded to 2 digits.

    A client of n records adds noise of z C / (q n) per coordinate and step, where z is near sqrt(T) q / mu
    for T steps and mu of the budget in Gaussian differential privacy (Dong, Roth and Su 2022). The mean of
    M clients' d parameters is moved by sqrt(R K d / M) times that and the rate. No step is longer than
    `longest`.
    """
    base, count = settings.base, settings.clients_per_round or settings.clients
    assert base.epsilon is not None
    assert base.delta is not None
    steps = settings.rounds * settings.local_steps
    own_steps = max(1.0, steps * count / settings.clients)
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    noise = math.sqrt(own_steps * steps * size / count) / (gaussian_mu(base.epsilon, base.delta) * average)
    return float(f"{min(TOTAL_NOISE / noise, longest) / _radius(base.clip_norm):.2g}")


def _partition(settings: FederationSettings, dataset: DataSet) -> list[Tensor]:
    labels, seed, P = dataset.train.fields.get("label"), settings.base.seed, settings.clients
    if settings.site_column is not None:
        from equipoise.data.readers.schema import digest_of  # pydantic is imported where a table is read

        owner = dataset.train.fields[OWNER]
        held = [(owner == torch.tensor(digest_of(name))).all(1) for name in settings.site_names()]
        if any(not one.any() for one in held) or sum(map(int, map(torch.sum, held))) < len(owner):
            raise SettingsError(
                f"--site-column {settings.site_column}: a named owner has no row, or a row has another "
                f"owner. Named are {', '.join(settings.site_names())}; give --site SITE.population=NUMBER "
                "for each, as the cells have it."
            )
        return [torch.nonzero(one).flatten() for one in held]
    if settings.partition == "iid":
        return iid(len(dataset.train), P, seed)
    if labels is None or dataset.task != "classification":
        raise SettingsError(
            f"--partition is {settings.partition}, which assigns records by their class, but "
            f"{settings.base.data_name!r} is made for {dataset.task}. Take --partition iid."
        )
    ways: dict[str, Callable[[], list[Tensor]]] = {
        "dirichlet": lambda: dirichlet(labels, P, settings.alpha, seed),
        "shards": lambda: shards(labels, P, seed=seed),
        "one-class": lambda: one_class(labels, P, seed),
    }
    return ways[settings.partition]()


def _radius(text: str | None) -> float:
    try:
        return float(text or "1")
    except ValueError:
        raise SettingsError(
            f"--clip-norm is {text!r}, but a federation takes a number. A quantile is learned by --method "
            "dp-fedavg-quantile."
        ) from None
