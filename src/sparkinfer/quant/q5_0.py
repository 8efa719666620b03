"""Q5_0, 32 values in 22 bytes: float16 d, 32 fifth bits, 16 bytes of low codes. w = d (q - 16).

Low codes as in Q4_0; bit i of the four bytes of fifth bits belongs to value i.
"""

from __future__ import annotations

import numpy as np

from .bits import field, half, nibbles
from .codes import U8, Codes


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 22]."""
    q = join(field(blocks, 6, 16), field(blocks, 2, 4))
    return Codes(q=q, zero=16, d=half(blocks, 0))


def join(low: U8, high: U8) -> U8:
    """Return 5-bit codes [n, 32] of packed low halves [n, 16] and fifth bits [n, 4]."""
    codes = nibbles(low, 16)
    fifth = np.unpackbits(high.reshape(-1), bitorder="little").view(np.uint64)
    fifth <<= np.uint64(4)
    flat = codes.reshape(-1).view(np.uint64)
    flat |= fifth
    return codes
