import pytest
import torch

from equipoise.data.features.extractors import extract
from equipoise.data.records import Records


def pictures(seed=0):
    inputs = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return Records({"input": inputs, "label": torch.arange(5) % 2}, num_classes=2)


class Counting:
    """An extractor that counts its calls."""

    def __init__(self, factor: float = 2.0):
        self.factor, self.calls = factor, 0

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs * self.factor

    def config(self) -> dict[str, object]:
        return {"extractor": "counting", "factor": self.factor}


def test_cache_hit_computes_nothing_and_equals_the_first_run(tmp_path):
    records, extractor = pictures(), Counting()
    first, second = (extract(records, extractor, tmp_path / "cache").fields for _ in range(2))
    assert extractor.calls == 1
    for other in (second, extract(records, extractor).fields):
        assert torch.equal(first["input"], other["input"])
    assert torch.equal(first["label"], records.fields["label"])
    assert first["input"].dtype == torch.float32
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_cache_misses_on_other_data_or_other_constants(tmp_path):
    extractor, other = Counting(), Counting(factor=3.0)
    for seed in (0, 1):
        extract(pictures(seed=seed), extractor, tmp_path)
    tripled = extract(pictures(), other, tmp_path).fields["input"]
    assert (extractor.calls, other.calls, len(list(tmp_path.iterdir()))) == (2, 1, 3)
    torch.testing.assert_close(tripled, 3 * pictures().fields["input"], atol=1e-2, rtol=1e-3)


def flip_last_byte(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"garbage" * 100, flip_last_byte]
)
def test_damaged_cache_is_computed_anew_and_mended(tmp_path, damage):
    records, extractor = pictures(), Counting()
    good = extract(records, extractor, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = extract(records, extractor, tmp_path)
    assert extractor.calls == 2
    assert torch.equal(good.fields["input"], again.fields["input"])
    extract(records, extractor, tmp_path)
    assert extractor.calls == 2
