"""Text classification from tab-separated files, with a tokenizer that needs no vocabulary.

A vocabulary learnt from the private texts would leak: that a rare name has an entry tells that somebody's
text contains it, and cutting by counts does not help, since one record may tip a count. So words are *hashed*
to a fixed number of token ids; the map is public and the same for every data set. Two words may share an id,
which costs a little accuracy.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise._files import PathLike
from equipoise.data.readers.files import DataFileError, read_text
from equipoise.data.records import Records

__all__ = ["HashingTokenizer", "read_labelled_text"]


# words with their inner apostrophes, runs of digits, single punctuation marks
_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+|[^\w\s]|_")


MOST_TOKENS, MOST_WORDS = 2**24, 2**16
"""More have no place in memory: a model holds a row per token id, the records a number per word."""


@dataclass(frozen=True)
class HashingTokenizer:
    """Text -> ``length`` token ids: 0 is padding, words hash to ``1 .. vocabulary_size - 1``.

    Words are lower-cased; texts longer than ``length`` tokens are cut. The hash is CRC-32 of the word's UTF-8
    bytes.

    >>> tokens = HashingTokenizer(vocabulary_size=100, length=4)(["Good film!", "good"])
    >>> tokens.shape, bool(tokens[0, 0] == tokens[1, 0]), tokens[1, 1:].tolist()
    (torch.Size([2, 4]), True, [0, 0, 0])
    """

    vocabulary_size: int = 8192
    length: int = 64

    def __post_init__(self) -> None:
        if not (2 <= self.vocabulary_size <= MOST_TOKENS and 1 <= self.length <= MOST_WORDS):
            raise ValueError(
                f"vocabulary_size={self.vocabulary_size} must lie between 2 and {MOST_TOKENS:,}, and "
                f"length={self.length} between 1 and {MOST_WORDS:,}."
            )

    def words(self, text: str) -> list[str]:
        """The words of a text, lower-cased.

        >>> HashingTokenizer().words("It's 10,000 miles.")
        ["it's", '10', ',', '000', 'miles', '.']
        """
        return _TOKEN.findall(text.lower())

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Token ids int64 ``[len(texts), length]``."""
        tokens = torch.zeros(len(texts), self.length, dtype=torch.int64)
        for row, text in enumerate(texts):
            ids = [
                1 + zlib.crc32(word.encode()) % (self.vocabulary_size - 1)
                for word in self.words(text)[: self.length]
            ]
            tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return tokens


def read_labelled_text(
    path: PathLike,
    tokenizer: HashingTokenizer,
    *,
    classes: Sequence[str] | Mapping[str, int] = ("0", "1"),
    text: int | str = "sentence",
    label: int | str = "label",
    delimiter: str = "\t",
) -> Records:
    """A file of labelled texts, one per line (plain or ``.gz``): input token ids ``[n, length]``, label
    ``[n]``.

    Args:
        path: the file. Quotes have no meaning; a cell ends at the delimiter.
        tokenizer: see :class:`HashingTokenizer`.
        classes: the labels as written, in the order of their class numbers, or a map to class numbers.
        text: the column of the text: its name in the header, or its position in a file without header.
        label: the same for the class. Both are names or both are positions.
        delimiter: between cells. In a file without header the last column takes the rest of the line.

    Raises:
        MissingDataError, DataFileError: no such file, a missing column, a line with too few cells, an unknown
        label; the
            message names file and line.
    """
    numbers = dict(classes) if isinstance(classes, Mapping) else {name: i for i, name in enumerate(classes)}
    # only line feeds end a line: str.splitlines would also cut at the odd separators that texts contain
    lines = read_text(path).replace("\r\n", "\n").rstrip("\n").split("\n")
    if isinstance(text, str) and isinstance(label, str):
        header = [name.strip() for name in lines[0].split(delimiter)]
        missing = [name for name in (text, label) if name not in header]
        if missing:
            raise DataFileError(
                f"The header of {str(path)!r} lacks the columns {missing}. Correct the names, or name the "
                "columns by their positions."
            )
        text_at, label_at, first, cuts = header.index(text), header.index(label), 1, -1
    elif isinstance(text, int) and isinstance(label, int):
        text_at, label_at, first, cuts = text, label, 0, max(text, label)
    else:
        raise TypeError(f"text={text!r} and label={label!r} must both be column names or both be positions.")
    texts: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(lines[first:], start=first + 1):
        if not line.strip():
            continue
        cells = line.split(delimiter, cuts)
        place = f"{str(path)!r}, line {number}"
        if len(cells) <= max(text_at, label_at):
            raise DataFileError(
                f"{place}: {len(cells)} cells, but the text is in cell {text_at + 1}, the label in "
                f"{label_at + 1}."
            )
        name = cells[label_at].strip()
        if name not in numbers:
            raise DataFileError(f"{place}: the label is not one of {list(numbers)}.")
        texts.append(cells[text_at])
        labels.append(numbers[name])
    if not texts:
        raise DataFileError(f"The file {str(path)!r} holds no texts.")
    return Records(
        {"input": tokenizer(texts), "label": torch.tensor(labels)}, num_classes=max(numbers.values()) + 1
    )
