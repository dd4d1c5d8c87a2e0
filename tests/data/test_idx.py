import gzip
import struct
from pathlib import Path

import pytest
import torch

from equipoise.data.readers.files import DataFileError, MissingDataError
from equipoise.data.readers.idx import load_idx_pair, read_idx
from equipoise.data.readers.images import standardise_each


def idx_bytes(shape: tuple[int, ...], body: bytes, kind: int = 0x08) -> bytes:
    return struct.pack(">HBB", 0, kind, len(shape)) + struct.pack(f">{len(shape)}I", *shape) + body


def write_pair(
    folder: Path, *, labels: bytes = b"\x03\x09", images: bytes | None = None, pack: bool = False
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = idx_bytes((2, 4, 3), bytes(range(24))) if images is None else images
    for name, content in (
        ("train-images-idx3-ubyte", pixels),
        ("train-labels-idx1-ubyte", idx_bytes((len(labels),), labels)),
    ):
        if pack:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("place", ["", "toy"])
def test_pair_is_found_plain_or_packed_in_folder_or_subfolder(tmp_path: Path, pack: bool, place: str) -> None:
    write_pair(tmp_path / place, pack=pack)
    records = load_idx_pair(tmp_path, "train", name="toy")
    assert records.fields["input"].shape == (2, 1, 4, 3)
    assert records.fields["label"].tolist() == [3, 9]
    expected = torch.arange(24.0).reshape(2, 1, 4, 3)
    expected = expected - expected.mean((1, 2, 3), keepdim=True)
    expected = expected / expected.square().mean((1, 2, 3), keepdim=True).sqrt()
    torch.testing.assert_close(records.fields["input"], expected, atol=1e-4, rtol=1e-4)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx_bytes((1000,), bytes(range(250)) * 4))[:-20])
    with pytest.raises(DataFileError, match=r"truncated.*again"):
        read_idx(path, 1)


def test_corrupt_gzip(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    content = bytearray(gzip.compress(idx_bytes((1000,), bytes(range(250)) * 4)))
    content[-6] ^= 0xFF  # the checksum at the end no longer fits
    path.write_bytes(bytes(content))
    with pytest.raises(DataFileError, match="corrupt"):
        read_idx(path, 1)
    path.write_bytes(b"this is not gzip")
    with pytest.raises(DataFileError, match="corrupt"):
        read_idx(path, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x00", "not an IDX file"),
        (b"\x00\x01\x08\x01\x00\x00\x00\x00", "not an IDX file"),
        (b"\x00\x00\x07\x01\x00\x00\x00\x00", "not an IDX file"),
        (b"\x00\x00\x08\x00", "not an IDX file"),
        (b"\x00\x00\x08\x01\x00\x00\x00", "within its header"),
        (idx_bytes((3,), b"\x00\x01"), "truncated.*announces.*3.*11 bytes.*10"),
        (idx_bytes((3,), b"\x00\x01\x02\x03"), "too long"),
        (idx_bytes((2**32 - 1,), b"\x00"), "truncated"),  # a huge claim allocates nothing
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(DataFileError, match=message):
        read_idx(path, 1)


def test_pair_that_does_not_belong_together(tmp_path: Path) -> None:
    write_pair(tmp_path, labels=b"\x01\x02\x03")
    with pytest.raises(DataFileError, match="numbers of records"):
        load_idx_pair(tmp_path, "train", name="toy")
    write_pair(tmp_path, images=idx_bytes((2,), b"\x00\x01"))
    with pytest.raises(DataFileError, match="exchanged"):
        load_idx_pair(tmp_path, "train", name="toy")
    write_pair(tmp_path, labels=b"\x01\x0a")
    with pytest.raises(DataFileError, match="label"):
        load_idx_pair(tmp_path, "train", name="toy")


def test_missing_files_say_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="not a folder"):
        load_idx_pair(tmp_path / "absent", "train", name="toy")
    with pytest.raises(MissingDataError, match=r"train-images-idx3-ubyte.*toy.train-images-idx3-ubyte.gz"):
        load_idx_pair(tmp_path, "train", name="toy")
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "absent", 1)


def test_images_are_standardised_one_by_one() -> None:
    images = torch.randint(
        0, 256, (7, 2, 5, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    images[3] = 9
    whole = standardise_each(images)
    alone = torch.cat([standardise_each(images[i : i + 1]) for i in range(7)])
    # equal bit for bit: no image can see another
    assert torch.equal(whole, alone)
    assert torch.equal(whole, standardise_each(images, chunk=2))
    assert whole[3].abs().max() == 0
    assert whole.isfinite().all()
    changed = images.clone()
    changed[0] = 0
    assert torch.equal(standardise_each(changed)[1:], whole[1:])
