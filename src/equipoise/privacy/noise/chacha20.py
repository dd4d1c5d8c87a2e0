"""The key stream of ChaCha20 in tensor operations, so that any device makes its own random bits.

All operations are on integers: every device gives the same bits, and no operation or memory access follows
from the key. A block of 16 words of 32 bits depends on key and counter alone, so a stream can begin anywhere.

Source: Bernstein 2008, "ChaCha, a variant of Salsa20", with its counter of 64 bits and a nonce of zero. With
small counters that is the stream of RFC 8439 under the same nonce.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

BLOCK_WORDS = 16  # of 32 bits: the definition of ChaCha20, which any other number would leave
_CONSTANTS = b"expand 32-byte k"


def key_stream(key: bytes, first_block: int, blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """Consecutive blocks of the key stream, int32 [16 * blocks].

    Args:
        key: 32 bytes that serve one stream.
        first_block: the counter of the first block.
        blocks: how many.
        device: where they are computed. The key goes there in the arguments of operations; nothing is waited
            for.

    Example:
        >>> bytes(key_stream(bytes(32), 0, 1).view(torch.uint8).tolist()).hex()[:16]
        '76b8e0ada0f13d90'
    """
    start = torch.zeros(BLOCK_WORDS, blocks, dtype=torch.int32, device=device)
    for row, word in enumerate(struct.unpack("<12i", _CONSTANTS + key)):
        start[row] = word
    counters = torch.arange(first_block, first_block + blocks, device=device)
    start[12:14] = torch.stack([counters, counters >> 32]).to(torch.int32)  # keeps the low 32 bits
    # Four rows of four words each; a round works on whole rows, so 2 of its 4 quarter rounds' operations are
    # one operation on a tensor.
    a, b, c, d = start.clone().view(4, 4, blocks).unbind()
    for _ in range(10):
        _quarter_rounds(a, b, c, d)  # down the columns
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _quarter_rounds(a, b, c, d)  # down the diagonals
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d]).add_(start).t().flatten()


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """Four quarter rounds side by side, in place."""
    for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x.add_(y)
        z.bitwise_xor_(x)
        # Turn left. The shift to the right copies the sign, so what it brings in is masked.
        high = z << bits
        z.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1).bitwise_or_(high)
