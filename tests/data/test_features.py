from pathlib import Path

import pytest
import torch

from equipoise.data.features.extractors import extract
from equipoise.data.records import Records


def pictures(n: int = 5, size: int = 8, channels: int = 1, seed: int = 0) -> Records:
    generator = torch.Generator().manual_seed(seed)
    return Records(
        {"input": torch.randn(n, channels, size, size, generator=generator), "label": torch.arange(n) % 2},
        num_classes=2,
    )


class Counting:
    """An extractor that counts its calls."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs * self.factor

    def config(self) -> dict[str, object]:
        return {"extractor": "counting", "factor": self.factor}


def test_cache_hit_computes_nothing_and_equals_the_first_run(tmp_path: Path) -> None:
    records, extractor = pictures(), Counting()
    first = extract(records, extractor, tmp_path / "cache")
    assert extractor.calls == 1
    second = extract(records, extractor, tmp_path / "cache")
    assert extractor.calls == 1
    uncached = extract(records, extractor)
    assert torch.equal(first.fields["input"], second.fields["input"])
    assert torch.equal(first.fields["input"], uncached.fields["input"])
    assert torch.equal(first.fields["label"], records.fields["label"])
    assert first.fields["input"].dtype == torch.float32
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_cache_misses_on_other_data_or_other_constants(tmp_path: Path) -> None:
    extractor = Counting()
    extract(pictures(seed=0), extractor, tmp_path)
    extract(pictures(seed=1), extractor, tmp_path)
    assert extractor.calls == 2
    other = Counting(factor=3.0)
    tripled = extract(pictures(seed=0), other, tmp_path)
    assert other.calls == 1
    torch.testing.assert_close(
        tripled.fields["input"], 3 * pictures(seed=0).fields["input"], atol=1e-2, rtol=1e-3
    )
    assert len(list(tmp_path.iterdir())) == 3


def flip_last_byte(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"garbage" * 100, flip_last_byte]
)
def test_damaged_cache_is_computed_anew_and_mended(tmp_path: Path, damage) -> None:
    records, extractor = pictures(), Counting()
    good = extract(records, extractor, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = extract(records, extractor, tmp_path)
    assert extractor.calls == 2
    assert torch.equal(good.fields["input"], again.fields["input"])
    extract(records, extractor, tmp_path)
    assert extractor.calls == 2
