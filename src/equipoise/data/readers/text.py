"""A tokenizer that needs no vocabulary.

A vocabulary learnt from the private texts would leak: that a rare name has an entry tells that somebody's
text contains it, and cutting by counts does not help, since one record may tip a count. So words are *hashed*
to a fixed number of token ids; the map is public and the same for every data set. Two words may share an id,
which costs a little accuracy.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

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

    vocabulary_size: int = 32_768
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

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, ``length`` of them."""
        words = self.words(text)[: self.length]
        coded = (word.encode(errors="surrogatepass") for word in words)  # half of a pair is text to Python
        found = [1 + zlib.crc32(word) % (self.vocabulary_size - 1) for word in coded]
        return found + [0] * (self.length - len(found))

    def __call__(self, texts: Iterable[str]) -> Tensor:
        """Token ids int64 ``[len(texts), length]``."""
        return torch.tensor([self.ids(text) for text in texts], dtype=torch.int64).reshape(-1, self.length)
