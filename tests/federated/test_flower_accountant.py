"""Our accountant in Flower's protocol."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr", reason="needs the extra federated")

from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from equipoise.federated.flower import LedgerAccountant

MODELS = [
    (SamplingMethod.POISSON, NeighboringRelation.ADD_OR_REMOVE_ONE),
    (SamplingMethod.WITHOUT_REPLACEMENT, NeighboringRelation.REPLACE_ONE),
    (SamplingMethod.NO_AMPLIFICATION, NeighboringRelation.ADD_OR_REMOVE_ONE),
]
EVENT = GaussianPrivacyEvent(noise_multiplier=2.0, sample_size=10, population_size=100)


def config(sampling=SamplingMethod.NO_AMPLIFICATION, relation=NeighboringRelation.ADD_OR_REMOVE_ONE):
    return PrivacyConfig(1e-5, 100, relation, sampling, max_epsilon=5.0)


@pytest.mark.parametrize(("sampling", "relation"), MODELS)
def test_the_accountant_is_valid_and_no_looser_than_flowers(sampling, relation):
    ours, theirs = LedgerAccountant(config(sampling, relation)), RdpAccountant(config(sampling, relation))
    ratio = 2 if relation is NeighboringRelation.REPLACE_ONE else 1
    ours.compose(EVENT, 20)
    # Flower's does not double the sensitivity of a replaced client: give it the halved multiplier
    theirs.compose(GaussianPrivacyEvent(EVENT.noise_multiplier / ratio, 10, 100), 20)
    assert 0 < ours.get_epsilon(1e-5) <= theirs.get_epsilon(1e-5) * 1.001
    assert ours.num_releases == 20


def test_the_accountants_state_delta_and_limit():
    ours = LedgerAccountant(config())
    assert (ours.get_epsilon(1e-5), ours.get_delta(1.0)) == (0.0, 0.0)
    ours.compose(EVENT, 4)
    assert ours.get_epsilon(1e-5) == pytest.approx(4.377, abs=2e-3)
    assert 1e-5 <= ours.get_delta(ours.get_epsilon(1e-5)) <= 1.02e-5
    assert not ours.would_exceed(EVENT)
    assert ours.would_exceed(EVENT, count=2)
    assert ours.num_releases == 4
    again = LedgerAccountant(config())
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert again.get_privacy_spent() == ours.get_privacy_spent()
    other = LedgerAccountant(config(*MODELS[0]))
    with pytest.raises(ValueError, match="config"):
        other.load_state_dict(ours.state_dict())
    for wrong in ((EVENT, 0), (GaussianPrivacyEvent(2.0, 10, 50), 1)):
        with pytest.raises(ValueError, match=r"count=0|population_size=50"):
            ours.compose(*wrong)


def test_flowers_strategy_takes_the_accountant():
    accountant = LedgerAccountant(config())
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FlowerFedAvg(), noise_multiplier=2.0, clipping_norm=1.0, num_sampled_clients=10, accountant=accountant
    )
    assert strategy.privacy_spent().epsilon == 0.0
