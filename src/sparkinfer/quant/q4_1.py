"""Q4_1, 32 values in 20 bytes: float16 d, float16 m, 16 bytes of codes as in Q4_0. w = d q + m."""

from __future__ import annotations

from .bits import field, half, nibbles
from .codes import U8, Codes


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 20]."""
    q = nibbles(field(blocks, 4, 16), 16)
    return Codes(q=q, zero=0, d=half(blocks, 0), m=half(blocks, 2))
