from pathlib import Path

import pytest
import torch

from equipoise.data.readers.files import DataFileError
from equipoise.data.readers.text import HashingTokenizer, read_labelled_text

TOKENIZER = HashingTokenizer(vocabulary_size=50, length=5)


def write(folder: Path, text: str) -> Path:
    path = folder / "texts.tsv"
    path.write_text(text, encoding="utf-8")
    return path


def test_ids_are_fixed_for_ever_and_in_range() -> None:
    # the numbers themselves: a changed hash would silently make trained models useless
    assert 1 + 0xE8B7BE43 % 8191 == 1084  # the published CRC-32 of "a"
    assert HashingTokenizer(8192, 4)(["A good film"]).tolist() == [[1084, 4816, 4201, 0]]
    tokens = TOKENIZER([" ".join(f"word{i}" for i in range(200)), "", "\u00e9t\u00e9 \u4e2d\u6587 :)"])
    assert tokens.dtype == torch.int64
    assert tokens.shape == (3, 5)
    assert tokens.min() >= 0
    assert tokens.max() < 50
    assert tokens[0].min() > 0
    assert tokens[1].tolist() == [0] * 5


def test_tokens_of_a_text_do_not_depend_on_other_texts() -> None:
    assert torch.equal(TOKENIZER(["one two", "three four five"])[0], TOKENIZER(["one two"])[0])
    assert torch.equal(TOKENIZER(["ONE Two"]), TOKENIZER(["one two"]))


@pytest.mark.parametrize("arguments", [(1, 5), (10, 0)])
def test_tokenizer_constants(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="vocabulary_size"):
        HashingTokenizer(*arguments)


def test_header_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path, 'label\tid\tsentence\n1\ta\tsay "yes\n0\tb\tno\u2028way\n\n')
    records = read_labelled_text(path, TOKENIZER)
    assert records.fields["label"].tolist() == [1, 0]
    assert torch.equal(records.fields["input"], TOKENIZER(['say "yes', "no way"]))


def test_lines_without_header(tmp_path: Path) -> None:
    path = write(tmp_path, "pos a b c\nneg d\n")
    records = read_labelled_text(path, TOKENIZER, classes=("neg", "pos"), text=1, label=0, delimiter=" ")
    assert records.fields["label"].tolist() == [1, 0]
    assert torch.equal(records.fields["input"], TOKENIZER(["a b c", "d"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sentence\tclass\nx\t0\n", r"lacks the columns \['label'\]"),
        ("sentence\tlabel\nx\t2\n", r"line 2: the label is not one of \['0', '1'\]"),
        ("sentence\tlabel\nx\t0\nonly text\n", "line 3: 1 cells"),
        ("sentence\tlabel\n", "no texts"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataFileError, match=message):
        read_labelled_text(write(tmp_path, content), TOKENIZER)


def test_names_and_positions_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="both"):
        read_labelled_text(write(tmp_path, "x\t0\n"), TOKENIZER, text=0, label="label")
