import gzip
import struct

import pytest
import torch

from equipoise.data.readers.files import DataFileError, MissingDataError
from equipoise.data.readers.idx import load_idx_pair, read_idx
from equipoise.data.readers.images import standardise_each


def idx_bytes(shape: tuple[int, ...], body: bytes, kind: int = 0x08) -> bytes:
    return struct.pack(">HBB", 0, kind, len(shape)) + struct.pack(f">{len(shape)}I", *shape) + body


def write_pair(folder, *, labels=b"\x03\x09", images=None, pack=False):
    folder.mkdir(parents=True, exist_ok=True)
    pixels = idx_bytes((2, 4, 3), bytes(range(24))) if images is None else images
    for name, content in (("images-idx3", pixels), ("labels-idx1", idx_bytes((len(labels),), labels))):
        path = folder / f"train-{name}-ubyte{'.gz' * pack}"
        path.write_bytes(gzip.compress(content) if pack else content)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("place", ["", "toy"])
def test_pair_is_found_plain_or_packed_in_folder_or_subfolder(tmp_path, pack: bool, place: str):
    write_pair(tmp_path / place, pack=pack)
    records = load_idx_pair(tmp_path, "train", name="toy")
    assert records.fields["input"].shape == (2, 1, 4, 3)
    assert records.fields["label"].tolist() == [3, 9]
    expected = torch.arange(24.0).reshape(2, 1, 4, 3)
    expected = expected - expected.mean((1, 2, 3), keepdim=True)
    expected = expected / expected.square().mean((1, 2, 3), keepdim=True).sqrt()
    torch.testing.assert_close(records.fields["input"], expected, atol=1e-4, rtol=1e-4)


PACKED = gzip.compress(idx_bytes((1000,), bytes(range(250)) * 4), mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x", b"\x00\x00", "not an IDX file"),
        ("x", b"\x00\x01\x08\x01\x00\x00\x00\x00", "not an IDX file"),
        ("x", b"\x00\x00\x07\x01\x00\x00\x00\x00", "not an IDX file"),
        ("x", b"\x00\x00\x08\x00", "not an IDX file"),
        ("x", b"\x00\x00\x08\x01\x00\x00\x00", "within its header"),
        ("x", idx_bytes((3,), b"\x00\x01"), "truncated.*announces.*3.*11 bytes.*10"),
        ("x", idx_bytes((3,), b"\x00\x01\x02\x03"), "too long"),
        ("x", idx_bytes((2**32 - 1,), b"\x00"), "truncated"),  # a huge claim allocates nothing
        ("x.gz", PACKED[:-20], r"truncated.*again"),
        ("x.gz", PACKED[:-6] + bytes([PACKED[-6] ^ 0xFF]) + PACKED[-5:], "corrupt"),  # its checksum
        ("x.gz", b"this is not gzip", "corrupt"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataFileError, match=message):
        read_idx(tmp_path / name, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": b"\x01\x02\x03"}, "numbers of records"),
        ({"images": idx_bytes((2,), b"\x00\x01")}, "exchanged"),
        ({"labels": b"\x01\x0a"}, "label"),
    ],
)
def test_pair_that_does_not_belong_together(tmp_path, given, message):
    write_pair(tmp_path, **given)
    with pytest.raises(DataFileError, match=message):
        load_idx_pair(tmp_path, "train", name="toy")


def test_missing_files_say_where_they_belong(tmp_path):
    with pytest.raises(MissingDataError, match="not a folder"):
        load_idx_pair(tmp_path / "absent", "train", name="toy")
    with pytest.raises(MissingDataError, match=r"train-images-idx3-ubyte.*toy.train-images-idx3-ubyte.gz"):
        load_idx_pair(tmp_path, "train", name="toy")
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "absent", 1)


def test_images_are_standardised_one_by_one():
    images = torch.randint(0, 256, (7, 2, 5, 5), dtype=torch.uint8)
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
