"""Values that lie on a device are copied to the host together, and are what they were when asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equipoise import _host
from equipoise._host import Unread, read
from equipoise.privacy import digests
from equipoise.privacy.digests import KeyedDigest, keyed_digest

TENSORS = [
    torch.tensor([True, False, True]),
    torch.arange(7, dtype=torch.int32).view(7, 1),
    torch.tensor(2.5, dtype=torch.float64),
    torch.randn(4, 3)[:, 1:],
    torch.randn(3).bfloat16(),
    torch.zeros(0, 2),
    torch.tensor(-0.0),
]


@pytest.fixture
def copies(monkeypatch):
    """What is copied to the host where all tensors lie on a device."""
    found = []
    monkeypatch.setattr(_host, "host_waits", lambda device: True)
    monkeypatch.setattr(Tensor, "cpu", lambda raw: found.append(raw) or raw.clone())
    return found


def test_one_copy_brings_all(copies):
    values = [Unread(TENSORS[:3], lambda *found: found), Unread([], dict), Unread(TENSORS[3:], list_of)]
    read(*values)
    assert len(copies) == 1
    found = [*values[0].value(), *values[2].value()]
    for got, tensor in zip(found, TENSORS, strict=True):
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert got.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    assert values[1].value() == {}


def list_of(*found: Tensor) -> list[Tensor]:
    return list(found)


def test_what_nobody_read_is_read_where_it_is_asked_for_and_made_once(copies):
    made = []
    value = Unread([torch.tensor(3.0)], lambda found: made.append(float(found)))
    assert not copies
    assert value.value() is None
    assert value.value() is None
    assert made == [3.0]
    assert len(copies) == 1


def test_what_an_interrupt_left_on_the_device_is_copied_again(monkeypatch):
    copies = []

    def interrupted(raw):
        copies.append(raw)
        if len(copies) == 1:
            raise KeyboardInterrupt
        return raw.clone()

    monkeypatch.setattr(_host, "host_waits", lambda device: True)
    monkeypatch.setattr(Tensor, "cpu", interrupted)
    value = Unread([torch.tensor(3.0)], float)
    with pytest.raises(KeyboardInterrupt):
        read(value)
    assert value.value() == 3.0
    assert len(copies) == 2


@pytest.mark.parametrize("where", ["on the host", "on a device"])
def test_an_unread_digest_is_of_the_values_as_they_were(monkeypatch, where):
    monkeypatch.setattr(digests, "HASHED_WHERE_THEY_ARE", ("cpu",) if where == "on a device" else ())
    tensor, key = torch.arange(9.0), bytes(32)
    before = keyed_digest({"w": tensor}, key, "test")
    unread = KeyedDigest(key, "test")({"w": tensor})
    tensor += 1
    assert unread.value() == before
    assert keyed_digest({"w": tensor}, key, "test") != before
