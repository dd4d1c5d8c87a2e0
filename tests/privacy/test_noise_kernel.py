"""The kernel that makes noise on a CUDA device, against operations on tensors: bit for bit.

Where there is no such device Triton's interpreter runs it.
"""

import numpy as np
import pytest
import torch

from equipoise.privacy.noise import streams
from equipoise.privacy.noise.chacha20 import key_stream
from equipoise.privacy.noise.streams import NormalStream

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
with pytest.MonkeyPatch.context() as patch:  # Triton reads it where a kernel is defined
    if DEVICE.type == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    from equipoise.privacy.noise import chacha_kernel

    words = chacha_kernel._words

    @triton.jit
    def write_words(out, first, k0, k1, k2, k3, k4, k5, k6, k7, WHOLE: tl.constexpr):
        if WHOLE:
            at = first + (tl.arange(0, 2) * 16).to(tl.int64)
            place = (tl.arange(0, 2) * 16)[:, None] + tl.arange(0, 16)[None, :]
        else:
            at = first + tl.arange(0, 32).to(tl.int64)
            place = tl.arange(0, 32)
        tl.store(out + place, words(at, k0, k1, k2, k3, k4, k5, k6, k7, WHOLE))


#: RFC 8439, appendix A.1, those with a nonce of zero: key, counter, block.
PUBLISHED = [
    (bytes(32), 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
     "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    (bytes(32), 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
     "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    (bytes(31) + b"\1", 1, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
     "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    (b"\0\xff" + bytes(30), 2, "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
     "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
]  # fmt: skip


def words_of(key, first, whole):
    out = torch.empty(32, dtype=torch.int32, device=DEVICE)
    write_words[(1,)](out, first, *np.frombuffer(key, "<i4").tolist(), WHOLE=whole)
    return out.cpu()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("key", "counter", "block"), PUBLISHED)
def test_the_words_are_those_of_the_published_vectors(key, counter, block, whole):
    got = words_of(key, 16 * counter, whole)[:16]
    assert bytes(got.view(torch.uint8).tolist()).hex() == block


@pytest.mark.parametrize("first", [2**32 - 1, 2**36 - 16, 2**36 + 160])
def test_the_words_are_those_of_the_key_stream(first):
    key = bytes(range(100, 132))
    expected = key_stream(key, first // 16, 3)[first % 16 :][:32]
    assert torch.equal(words_of(key, first, False), expected)
    if first % 16 == 0:
        assert torch.equal(words_of(key, first, True), expected)


@pytest.fixture
def by_kernel(monkeypatch):
    """A function that draws by the kernel and by tensor operations, in blocks of 256 numbers."""
    monkeypatch.setattr(streams, "_BLOCK", 256)
    monkeypatch.setattr(streams, "_Aes", lambda key: streams._ChaCha(key, DEVICE))
    monkeypatch.setattr(streams._ChaCha, "blocks_at_once", 3)

    def both(draw):
        found = []
        for write in (chacha_kernel.write_normals, None):
            monkeypatch.setattr(streams, "_kernel", lambda device, write=write: (write, ""))
            found.append(draw(NormalStream(b"k" * 32)))
        return found

    return both


@pytest.mark.parametrize("count", [1, 32, 37, 256, 1029])
@pytest.mark.parametrize("before", [0, 6])
def test_the_kernel_makes_the_bits_of_tensor_operations(count, before, by_kernel):
    def draw(stream):
        stream.draw(before, 1.0, device=DEVICE)
        return stream.draw(count, 2.7, device=DEVICE)

    got, expected = by_kernel(draw)
    assert torch.equal(got, expected)
    assert len(got.unique()) == count


def test_ranges_by_the_kernel_are_those_of_the_whole_stream(by_kernel):
    ranges = [(3, 5), (200, 777), (1000, 1029)]
    got, expected = by_kernel(lambda stream: stream.draw_ranges(1029, 1.0, ranges, device=DEVICE))
    whole, _ = by_kernel(lambda stream: stream.draw(1029, 1.0, device=DEVICE))
    assert torch.equal(got, expected)
    assert torch.equal(got, torch.cat([whole[start:stop] for start, stop in ranges]))


def test_a_kernel_is_used_only_if_its_numbers_are_those_of_tensor_operations():
    def scaled(out, place, keys, std):
        chacha_kernel.write_normals(out, place, keys, std * (1 + 2**-22))

    assert streams._makes_the_same(chacha_kernel.write_normals, DEVICE)
    assert not streams._makes_the_same(scaled, DEVICE)
