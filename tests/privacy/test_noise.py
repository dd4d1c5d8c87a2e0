"""The key, the generators and the noise that follow from it."""

import itertools
import os
import pickle
import random
import sys

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from privacy_rows import Flat, rows
from scipy import stats

from equipoise import privacy as ep
from equipoise.gradients import DenseGradients
from equipoise.privacy import clip
from equipoise.privacy.mechanisms.grid_gaussian import GridStream
from equipoise.privacy.noise import streams
from equipoise.privacy.noise.chacha20 import key_stream
from equipoise.privacy.noise.streams import NormalStream
from equipoise.privacy.noise.uniform import keyed_integers

SIZE = 20_000


def released_noise(multiplier: float, bound: float, dtype=torch.float32) -> torch.Tensor:
    """Noise of one release of a zero sum whose bound is below the plan's largest."""
    ledger = ep.Ledger(
        ep.PrivacyPlan([ep.Release("gradient", 10 * bound, ep.Gaussian(multiplier))], ep.FullBatch(10, 1)),
        secrets=ep.Secrets(reproducible_seed=5),
    )
    draw = ledger.open()
    zero = ep.PrivateRows(rows([0.0] * SIZE, dtype=dtype), draw)
    return ledger.release(draw, {"gradient": clip(zero, Flat(), bound)})["gradient"]["w"]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_key_follows_no_generator_of_the_process(in_memory, tmp_path):
    """Whoever knows the seed of a script would know the key, and could take the noise off."""
    keys = []
    for name in ("a", "b"):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        keys.append(ep.Secrets(None if in_memory else tmp_path / name).key)
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("bound", "dtype"),
    [
        *((2.0, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        *((bound, torch.float32) for bound in (1e-20, 1e37)),
        *((bound, torch.float64) for bound in (1e-300, 1e200)),  # the square leaves the range before
    ],
)
def test_noise_passes_kolmogorov_smirnov_at_its_scale_only(bound, dtype, cipher):
    noise = released_noise(1.5, bound, dtype)
    assert noise.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    sample = noise.double().numpy() / (1.5 * bound)
    assert stats.kstest(sample, "norm").pvalue > 1e-3
    assert stats.kstest(sample, "norm", args=(0, 0.9)).pvalue < 1e-6
    assert stats.kstest(sample, "norm", args=(0, 1.1)).pvalue < 1e-6
    assert abs(stats.pearsonr(sample[1:], sample[:-1]).statistic) < 5 / SIZE**0.5


def tensors(dtype, draw, bound):
    return clip(ep.PrivateRows(rows([0.0, 0.0], dtype=dtype), draw), Flat(), bound)


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize(
    ("multiplier", "bound", "dtype"),
    [(1e-10, 1e-25, torch.bfloat16), (10.0, 1e38, torch.float32), (1.0, 1e-310, torch.float64)],
)
def test_noise_that_the_type_cannot_carry_is_refused_and_free(multiplier, bound, dtype, hardened):
    plan = ep.PrivacyPlan([ep.Release("gradient", 1e305, ep.Gaussian(multiplier))], ep.FullBatch(10, 1))
    ledger = ep.Ledger(plan.hardened() if hardened else plan)
    draw = ledger.open()
    with pytest.raises(ep.LedgerError, match="cannot carry"):
        ledger.release(draw, {"gradient": tensors(dtype, draw, bound)})
    assert ledger.spent(1e-5).value == 0
    assert ledger.release(draw, {"gradient": tensors(dtype, draw, 1.0)}), "the draw is still good"
    least, most = torch.finfo(dtype).tiny * 2.0**24, torch.finfo(dtype).max / 16
    carried = [streams.carries(dtype, std) for std in (least, most, 0.99 * least, 1.01 * most)]
    assert dtype == torch.bfloat16 or carried == [True, True, False, False]


def test_sums_and_tensors_of_one_release_share_no_number():
    plan = ep.PrivacyPlan([ep.Release(name, 1.0, ep.Gaussian(1.0)) for name in "ab"], ep.FullBatch(10, 1))
    ledger = ep.Ledger(plan, secrets=ep.Secrets())
    draw = ledger.open()
    zero = ep.PrivateRows(DenseGradients({"v": torch.zeros(1, SIZE), "w": torch.zeros(1, SIZE)}), draw)
    out = ledger.release(draw, {name: clip(zero, Flat(), 1.0) for name in "ab"})
    found = torch.stack([out[name][tensor] for name in "ab" for tensor in "vw"])
    assert float((torch.corrcoef(found) - torch.eye(4)).abs().max()) < 5 / SIZE**0.5


def noise(secrets, index, purpose="noise"):
    return NormalStream(secrets.stream_key(index, purpose))


def test_streams_differ_by_key_purpose_and_index():
    secrets, other = ep.Secrets(reproducible_seed=1), ep.Secrets(reproducible_seed=2)
    streams = [
        noise(secrets, 0),
        noise(secrets, 1),
        noise(secrets, 0, "noise0"),
        noise(other, 0),
        noise(ep.Secrets(), 0),
    ]
    drawn = [stream.draw(1000, 1.0) for stream in streams]
    drawn += [torch.randn(1000, generator=secrets.sampling_generator(i)) for i in (0, 1)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert float((a == b).float().mean()) < 0.01
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.16
    assert torch.equal(noise(secrets, 0).draw(1000, 1.0), drawn[0])


def test_noise_does_not_depend_on_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = NormalStream(bytes(32)).draw(600_001, 1.0)
        torch.set_num_threads(2)
        two = NormalStream(bytes(32)).draw(600_001, 1.0)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_in_the_tail(dtype, cipher):
    """A million numbers: moments and tail counts of a normal."""
    x = NormalStream(b"t" * 32).draw(1_000_000, 1.0, dtype).double()
    assert torch.isfinite(x).all()
    assert abs(float(x.mean())) < 4 / 1000
    assert abs(float(x.var()) - 1) < 4 * 2**0.5 / 1000
    assert abs(float((x**4).mean()) - 3) < 4 * 96**0.5 / 1000
    for at in (1.0, 3.0, 4.5):
        expected = 2 * stats.norm.sf(at) * len(x)
        assert abs(float((x.abs() > at).sum()) - expected) < 5 * expected**0.5
    pairs = x[: len(x) // 2] * x[len(x) // 2 :]
    assert abs(float(pairs.mean())) < 5 / len(pairs) ** 0.5


def test_the_whole_twister_state_is_keyed():
    a = ep.Secrets(reproducible_seed=1).sampling_generator(0).get_state()
    b = ep.Secrets(reproducible_seed=1).sampling_generator(1).get_state()
    words_a, words_b = (s[24 : 24 + 624 * 8].view(torch.int64) for s in (a, b))
    assert int((words_a == words_b).sum()) == 0
    assert int(words_a.min()) >= 0
    assert int(words_a.max()) < 2**32


def test_key_file(tmp_path):
    secrets, path = ep.Secrets(tmp_path), tmp_path / "private" / "key"
    assert (path.stat().st_mode & 0o777, len(path.read_bytes())) == (0o600, 32)
    assert ep.Secrets(tmp_path).key == secrets.key != ep.Secrets(tmp_path / "other").key
    assert secrets.is_private
    assert secrets.key.hex() not in repr(secrets)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(secrets)
    secrets.delete()
    assert not path.exists()
    with pytest.raises(RuntimeError, match="deleted"):
        noise(secrets, 0)
    ep.Secrets(tmp_path)
    os.truncate(path, 7)
    with pytest.raises(RuntimeError, match="damaged"):
        ep.Secrets(tmp_path)
    assert not ep.Secrets(reproducible_seed=3).is_private
    assert ep.Secrets(reproducible_seed=3).key == ep.Secrets(reproducible_seed=3).key
    assert ep.Secrets().key != ep.Secrets().key


def test_streams_of_a_key_stay_as_they_are():
    """A run that an older version began goes on with the noise and the records that it had."""
    secrets = ep.Secrets()
    secrets._key = b"k" * 32
    assert secrets.identity == "19082aaa63bf243e"
    assert secrets.stream_key(3, "noise").hex()[:16] == "6011e31798398c99"
    assert secrets.draw_secret(3, "q").hex()[:16] == "406300ab5561f366"
    assert (len(secrets.stream_key(3, "")), secrets.draw_secret(3)) == (32, secrets.draw_secret(3, ""))
    drawn = [secrets.sampling_generator(3, question) for question in ("q", "")]
    assert [int(torch.randint(2**40, (), generator=one)) for one in drawn] == [202179766366, 430757592322]
    assert secrets.bound("noise", "q", 1) == 'noise ["q", 1]'
    values = [
        *secrets.streams(3, "q").normal().draw(2, 1.0),
        *NormalStream(bytes(32)).draw(2, 2.0, torch.float64),
    ]
    assert torch.stack(values).tolist() == pytest.approx(
        [0.1011321, 0.4080272, -0.7749964, -0.1369649], abs=1e-6
    )
    assert GridStream(bytes(32)).draw(3).tolist() == [11662552, 8835996, 7984389]
    assert keyed_integers(1000, torch.arange(3), b"k" * 32).tolist() == [238, 772, 100]


@pytest.fixture(params=["cpu", "other"])
def cipher(request, monkeypatch):
    """Numbers are made on the CPU, by its own cipher or by that of other devices."""
    if request.param == "other":
        monkeypatch.setattr(streams._ChaCha, "blocks_at_once", 2)
        monkeypatch.setattr(streams, "_Aes", lambda key: streams._ChaCha(key, torch.device("cpu")))
    return request.param


@pytest.mark.parametrize("first", [0, 5, 2**31 - 1, 2**32 - 2, 2**32 + 3, 2**40 + 3])
def test_the_key_stream_is_chacha20(first):
    key, expected = os.urandom(32), b""
    for block in range(first, first + 3):
        nonce = block.to_bytes(8, "little") + bytes(8)
        expected += Cipher(algorithms.ChaCha20(key, nonce), None).encryptor().update(bytes(64))
    assert bytes(key_stream(key, first, 3).view(torch.uint8).tolist()) == expected


@pytest.mark.parametrize("made", [streams._Aes, lambda key: streams._ChaCha(key, torch.device("cpu"))])
def test_bits_from_a_place_on_are_those_of_the_whole_stream(made):
    """Also from within a block of the cipher: else two sums would share bits."""
    whole, part = torch.empty(2, 80)
    made(b"k" * 32).write(whole, 40, 0)
    made(b"k" * 32).write(part, 30, 24)
    assert torch.equal(part[:30].view(torch.int32), whole[6:36].view(torch.int32))


def test_without_triton_tensor_operations_make_noise(monkeypatch):
    monkeypatch.setitem(sys.modules, "equipoise.privacy.noise.chacha_kernel", None)
    write, words = streams._kernel.__wrapped__(torch.device("cuda"))
    assert write is None
    assert "Triton" in words
    assert streams.way_of_noise(torch.device("cpu")) == ""


FAULTS = [{}, {"std": 1e-6}, {"keys": True}, {"last": 1e-6}, {"parts": True}]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_kernel_is_used_only_if_it_makes_the_numbers_of_tensor_operations(fault):
    device = torch.device("cpu")

    def kernel(memory, place, keys, std):
        ciphers = [streams._ChaCha(bytes(32), device) for _ in keys]
        for cipher, key in zip(ciphers, keys[:: -1 if "keys" in fault else 1], strict=True):
            cipher.key = key
        count = memory.shape[1]
        made = torch.empty(count + streams._ROOM)
        streams._write(*ciphers, made, count, place + fault.get("place", 0), std + fault.get("std", 0))
        memory[0] = made[:count]
        memory[0, -1] += fault.get("last", 0) + ("parts" in fault and place > 0)

    assert streams._makes_the_same(kernel, device) is (not fault)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stream_has_one_place_for_all_devices(dtype):
    """Sums of one release that lie on two devices never share a number, nor do two ciphers have one key."""
    key = b"k" * 32
    whole, other = NormalStream(key), NormalStream(key)
    whole.draw(17, 1.0, dtype)
    assert other.draw(17, 1.0, dtype, "meta").device.type == "meta"
    assert torch.equal(whole.draw(9, 1.0, dtype), other.draw(9, 1.0, dtype))
    assert key not in (streams._ChaCha(key, torch.device("meta")).key, bytes(32))
    assert streams._Aes(key).key == key
    like = {"a": torch.empty(7), "far": torch.empty(4, 5, device="meta"), "b": torch.empty(9)}
    found = streams.normals(streams.ReleaseStreams(lambda purpose: key), like, 1.0)
    whole = NormalStream(key).draw(36, 1.0)
    assert torch.equal(torch.cat([found["a"], found["b"]]), torch.cat([whole[:7], whole[27:]]))
    assert (found["far"].device.type, found["far"].shape) == ("meta", (4, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 17, 3 * 2**18 + 5])
def test_joined_ranges_of_processes_are_the_whole_stream(dtype, count, cipher):
    whole, again = NormalStream(b"k" * 32), NormalStream(b"k" * 32)
    for stream in (whole, again):
        stream.draw(6, 1.0, torch.float32)  # 24 bytes: no whole block of the cipher
    expected, following = whole.draw(count, 2.5, dtype), whole.draw(5, 1.0)
    ends = [round(count * part / 3) for part in range(4)]
    parts = []
    for start, stop in itertools.pairwise(ends):
        mine = NormalStream(b"k" * 32)
        mine.draw(6, 1.0, torch.float32)
        parts.append(mine.draw_ranges(count, 2.5, [(start, stop)], dtype))
        assert torch.equal(mine.draw(5, 1.0), following)
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize(("width", "columns"), [(5, (1, 3)), (2**18 + 3, (7, 2**18))])
def test_the_columns_of_a_matrix_are_those_of_the_whole_stream(width, columns, cipher, monkeypatch):
    rows = 3 * 2**18 // width + 2
    whole = NormalStream(b"k" * 32).draw(rows * width, 1.0).view(rows, width)
    ranges = width * torch.arange(rows)[:, None] + torch.tensor(columns)
    parts = NormalStream(b"k" * 32).draw_ranges(rows * width, 1.0, ranges)
    assert torch.equal(parts.view(rows, -1), whole[:, slice(*columns)])
    made, transform = [], streams._transform
    noted = lambda out, *rest: (made.append(out.numel()), transform(out, *rest))  # noqa: E731
    monkeypatch.setattr(streams, "_transform", noted)
    NormalStream(bytes(32)).draw_ranges(2**22, 1.0, [(0, 2**20), (3 * 2**20 + 7, 3 * 2**20 + 107)])
    assert sum(made) <= 2 * (2**20 + 100)  # of the numbers that are wanted


def test_many_ranges_are_those_of_the_whole_stream(cipher):
    count, rng = 2**18 + 1000, np.random.default_rng(0)
    whole = NormalStream(b"k" * 32).draw(count, 1.0)
    ranges = [tuple(sorted(rng.integers(0, count + 1, 2).tolist())) for _ in range(20)]
    parts = NormalStream(b"k" * 32).draw_ranges(count, 1.0, ranges)
    assert torch.equal(parts, torch.cat([whole[start:stop] for start, stop in ranges]))
