from pathlib import Path

import pytest
import torch

from equipoise.data.named import NAMED
from equipoise.data.readers.files import DataFileError
from equipoise.data.readers.tables import Label, Table, Text, read_table
from equipoise.data.readers.text import HashingTokenizer

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


FORM = Table(
    (Text("sentence", TOKENIZER), Label("label", ("0", "1"))), delimiter="\t", header=True, quotes=False
)


def test_quotes_without_a_meaning(tmp_path: Path) -> None:
    path = write(tmp_path, 'label\tid\tsentence\n1\ta\tsay "yes\n0\tb\tno\u2028way\n1\tc\t"no", he said\n\n')
    records = read_table(path, FORM)
    assert records.fields["label"].tolist() == [1, 0, 1]
    assert torch.equal(records.fields["input"], TOKENIZER(['say "yes', "no way", '"no", he said']))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sentence\tclass\nx\t0\n", "lacks the declared columns 'label'"),
        ("sentence\tlabel\nx\t2\n", "line 2, column 'label': the cell is not a declared class"),
        ("sentence\tlabel\nx\t0\nonly text\n", "line 3: 1 cells"),
        ("sentence\tlabel\n", "no rows"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataFileError, match=message):
        read_table(write(tmp_path, content), FORM)


def test_a_label_before_a_sentence(tmp_path: Path) -> None:
    """The form of the sentences of SST-2."""
    for part in ("train", "test"):
        (tmp_path / f"stsa.binary.{part}").write_text('1 a "b c\n\n0 d\n', encoding="utf-8")
    train, test = NAMED["sst2-sentences"].read(tmp_path)
    assert train.fields["label"].tolist() == [1, 0]
    assert torch.equal(train.fields["input"], HashingTokenizer()(['a "b c', "d"]))
    assert train.fingerprint() == test.fingerprint()
    (tmp_path / "stsa.binary.test").write_text("1 a\nsecret\n", encoding="utf-8")
    with pytest.raises(DataFileError, match=r"stsa\.binary\.test', line 2: the line is no label") as error:
        NAMED["sst2-sentences"].read(tmp_path)
    assert "secret" not in str(error.value)
