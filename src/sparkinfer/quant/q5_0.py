"""Q5_0, 32 values in 22 bytes: float16 d, 32 fifth bits, 16 bytes of low codes as in Q4_0. w = d (q
- 16).
"""

from __future__ import annotations

import numpy as np

from .codes import U8, Codes, half, nibbles


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 22]."""
    return Codes(q=join(blocks[:, 6:], blocks[:, 2:6]), zero=16, d=half(blocks, 0))


def join(low: U8, high: U8) -> U8:
    """Return 5-bit codes [n, 32] of low halves [n, 16] and high bits [n, 4], bit i of which belongs
    to value i.
    """
    codes = nibbles(low)
    bits = np.unpackbits(high, axis=1, bitorder="little")
    bits <<= 4
    codes |= bits
    return codes
