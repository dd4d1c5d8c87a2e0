"""Secure sums: masks cancel, those who drop out are replaced by shares, and too few make no sum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from contrib.secure_sum.protocol import Party, SecureSum, TooFewClients, recover
from equipoise.federated import Refused

pytest.importorskip("flwr", reason="needs the extra federated")

LENGTH = 400


def vectors(count, seed=0):
    return torch.randn(count, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(rule, values, lost=None, silent=()):
    """All stages; `lost`: client -> the stage before which it is gone; `silent` give no shares at the end."""
    lost = lost or {}
    parties = {p: Party(rule, p) for p in range(len(values))}

    def there(stage):
        order = ("keys", "shares", "masked", "unmask")
        return [p for p in parties if p not in lost or order.index(lost[p]) > order.index(stage)]

    keys = {p: parties[p].keys() for p in there("keys")}
    boxes = {p: parties[p].shares(keys) for p in there("shares")}
    uploads = {
        p: parties[p].masked(values[p], {u: box[p] for u, box in boxes.items() if u != p})
        for p in there("masked")
    }
    answers = [parties[p].unmask(uploads) for p in there("unmask") if p not in silent]
    return recover(rule, keys, boxes, uploads, answers), uploads


@pytest.mark.parametrize("clients", [2, 3, 7])
def test_the_sum_is_the_plain_sum_to_half_a_step_each(clients):
    rule, values = SecureSum(clients), vectors(clients)
    found, _ = run(rule, values)
    error = (found - values.sum(0)).abs().max().item()
    assert 0 < error <= clients * rule.step / 2 * (1 + 1e-6)
    codes = np.sum([rule.encode(value) for value in values], axis=0, dtype=np.uint32)
    assert torch.equal(found, rule.decode(codes))  # but for the rounding before it, the sum is exact


@pytest.mark.parametrize(
    ("lost", "silent"),
    [
        ({1: "keys"}, ()),
        ({1: "shares"}, ()),
        ({1: "masked"}, ()),
        ({0: "masked", 4: "masked"}, ()),
        ({1: "shares", 3: "masked"}, ()),
        ({}, (0, 4)),
        ({2: "masked"}, (0,)),
        ({2: "unmask"}, ()),
    ],
)
def test_clients_that_drop_out(lost, silent):
    rule, values = SecureSum(5), vectors(5)
    found, _ = run(rule, values, lost, silent)
    counted = [p for p in range(5) if lost.get(p, "unmask") == "unmask"]
    torch.testing.assert_close(found, values[counted].sum(0), rtol=0, atol=5 * rule.step)


@pytest.mark.parametrize(
    ("lost", "silent", "error"),
    [
        ({0: "keys", 1: "keys", 2: "keys"}, (), Refused),
        ({0: "shares", 1: "shares", 2: "shares"}, (), Refused),
        ({0: "masked", 1: "masked", 2: "masked"}, (), Refused),
        ({}, (0, 1, 2), TooFewClients),
    ],
)
def test_below_the_threshold_there_is_no_sum(lost, silent, error):
    with pytest.raises(error):
        run(SecureSum(5), vectors(5), lost, silent)
    with pytest.raises(TooFewClients, match="uploads"):
        recover(SecureSum(5), {}, (), {0: b"", 1: b""}, ())


def test_an_upload_looks_uniform_and_hides_what_is_under_it():
    """Uploads of zeros: bytes as uniform as chi-square sees; two uploads of one vector share nothing."""
    rule, values = SecureSum(4), torch.zeros(4, 5000, dtype=torch.float64)
    _, uploads = run(rule, values)
    _, others = run(rule, values)
    for p, upload in uploads.items():
        counts = np.bincount(np.frombuffer(upload, dtype=np.uint8), minlength=256)
        expected = len(upload) / 256
        chi = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi - 255) < 6 * np.sqrt(2 * 255)
        plain = np.frombuffer(rule.encode(values[p]).tobytes(), dtype=np.uint8)
        for other in (plain, np.frombuffer(others[p], dtype=np.uint8)):
            assert np.mean(other == np.frombuffer(upload, dtype=np.uint8)) < 0.02  # 1/256 by chance
    # nor does the sum over any smaller set of uploads: every subset keeps masks
    for count in (2, 3):
        for some in itertools.combinations(uploads, count):
            part = np.sum([np.frombuffer(uploads[p], dtype="<u4") for p in some], axis=0, dtype=np.uint32)
            assert (part == 0).mean() < 0.01


def test_nobody_gives_both_shares_of_a_client_and_nobody_answers_twice():
    rule = SecureSum(3)
    parties = [Party(rule, p) for p in range(3)]
    keys = {p: party.keys() for p, party in enumerate(parties)}
    boxes = {p: party.shares(keys) for p, party in enumerate(parties)}
    inbox = {u: box[0] for u, box in boxes.items() if u != 0}
    with pytest.raises(Refused, match="'masked'"):
        parties[0].shares(keys)
    parties[0].masked(torch.zeros(2), inbox)
    with pytest.raises(Refused, match="'unmask'"):
        parties[0].masked(torch.zeros(2), inbox)
    for wrong in ([1, 2], [0], [0, 1, 7]):
        with pytest.raises(Refused):
            parties[0].unmask(wrong)
    with pytest.raises(Refused, match="fewer than 3"):
        parties[0].unmask([0, 1], least=3)
    parties[0].unmask([0, 1])
    with pytest.raises(Refused, match="'over'"):
        parties[0].unmask([0, 2])
    assert parties[0].state_dict() == {"stage": "over"}


def test_shares_for_one_client_are_closed_to_another():
    rule = SecureSum(3)
    parties = [Party(rule, p) for p in range(3)]
    keys = {p: party.keys() for p, party in enumerate(parties)}
    boxes = {p: party.shares(keys) for p, party in enumerate(parties)}
    with pytest.raises(Refused, match="cannot be read"):  # the first is meant for client 2
        parties[0].masked(torch.zeros(2), {1: boxes[1][2], 2: boxes[2][0]})
    assert parties[0].masked(torch.zeros(2), {1: boxes[1][0], 2: boxes[2][0]})


def test_shares_made_under_other_terms_are_closed():
    rule = SecureSum(3)
    parties = [Party(rule, p, terms="one" if p < 2 else "other") for p in range(3)]
    keys = {p: party.keys() for p, party in enumerate(parties)}
    boxes = {p: party.shares(keys) for p, party in enumerate(parties)}
    for p in range(3):
        with pytest.raises(Refused, match="made for another sum"):
            parties[p].masked(torch.zeros(2), {q: boxes[q][p] for q in range(3) if q != p})
    assert parties[0].masked(torch.zeros(2), {1: boxes[1][0]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 1}, "clients=1"),
        ({"clients": 4, "threshold": 2}, "threshold=2"),
        ({"clients": 4, "threshold": 3, "colluding": 2}, "threshold=3"),
        ({"clients": 4, "threshold": 5}, "more than the 4"),
        ({"clients": 3, "limit": 0.0}, "limit=0.0"),
        ({"clients": 3, "colluding": -1}, "colluding=-1"),
    ],
)
def test_unsafe_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SecureSum(**settings)


def test_flowers_masks_hang_on_32_bits_and_ours_do_not():
    """Two secrets whose 32-bit words have the same exclusive-or give the same masks in Flower's protocol."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    from contrib.secure_sum.protocol import _mask

    secret = bytes(range(32))
    other = secret[4:8] + secret[:4] + secret[8:]
    flower = [pseudo_rand_gen(s, 1 << 32, [(8,)])[0] for s in (secret, other)]
    assert (flower[0] == flower[1]).all()
    assert (_mask(secret, 8) != _mask(other, 8)).any()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_do_not_leave(number):
    rule, values = SecureSum(2), vectors(2)
    parties = [Party(rule, p) for p in range(2)]
    keys = {p: party.keys() for p, party in enumerate(parties)}
    boxes = [party.shares(keys) for party in parties]
    broken = values[0].clone()
    broken[3] = number
    with pytest.raises(Refused, match="not finite"):
        parties[0].masked(broken, {1: boxes[1][0]})
    assert parties[0].masked(values[0], {1: boxes[1][0]})  # nothing was used up
