"""A small language model of characters, and the text that it learns.

The model is that of Y. Bengio, R. Ducharme, P. Vincent, C. Jauvin, "A neural probabilistic language model",
JMLR 2003, on characters: the embeddings of the last eight, a hidden layer of tanh, and the next one. The text
is that of A. Karpathy's char-rnn ("tiny Shakespeare"). It is cut into pieces of 33 characters, which are the
records: a piece is the unit of privacy, and nothing of another piece is seen while one is read. The last
tenth of the text is for the test.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.data import DataSet, Records
from equipoise.data.readers.files import DataFileError, find_file, read_text

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Published with the text."""

LENGTH, TEST_SHARE = 33, 0.1
CONTEXT, WIDTH, HIDDEN = 8, 16, 64


class NextCharacter(nn.Module):
    """Logits of the next character at every position of a text.

    Args:
        classes: number of characters.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(classes + 1, WIDTH)  # the last one stands before a text
            self.hidden = nn.Linear(CONTEXT * WIDTH, HIDDEN)
            self.head = nn.Linear(HIDDEN, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, text: Tensor) -> Tensor:
        """Characters ``[B, T]`` -> logits ``[B, classes, T]``."""
        before = F.pad(text, (CONTEXT - 1, 0), value=self.embedding.num_embeddings - 1)
        seen = self.embedding(before.unfold(1, CONTEXT, 1)).flatten(2)
        return self.head(torch.tanh(self.hidden(seen))).transpose(1, 2)


def read_shakespeare(name: str, folder: Path) -> DataSet:
    """The pieces of the text. Its label is a piece's last character; `shifted` makes that of the others."""
    path = find_file(folder, "tinyshakespeare.txt", subfolders=[name])
    text = read_text(path)
    if unknown := set(text) - set(ALPHABET):
        raise DataFileError(
            f"The file {str(path)!r} has {len(unknown)} characters that are not in the published text. Fetch "
            "it again."
        )
    cut = round((1 - TEST_SHARE) * len(text))
    train, test = (_pieces(part) for part in (text[:cut], text[cut:]))
    return DataSet(name, train, test, population=len(train), num_classes=len(ALPHABET))


def _pieces(text: str) -> Records:
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    found = torch.tensor([numbers[character] for character in text])
    pieces = found[: len(found) // LENGTH * LENGTH].view(-1, LENGTH)
    return Records({"input": pieces, "label": pieces[:, -1]}, num_classes=len(ALPHABET))


def shifted(records: dict[str, Tensor]) -> dict[str, Tensor]:
    """A text without its end, and as its label the character that follows each one.

    >>> shifted({"input": torch.tensor([[1, 2, 3]])})["label"].tolist()
    [[2, 3]]
    """
    text = records["input"]
    return {**records, "input": text[:, :-1], "label": text[:, 1:]}
