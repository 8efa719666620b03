"""Q4_1, 32 values in 20 bytes: float16 d, float16 m, 16 bytes of codes as in Q4_0. w = d q + m."""

from __future__ import annotations

from .codes import U8, Codes, half, nibbles


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 20]."""
    return Codes(q=nibbles(blocks[:, 4:]), zero=0, d=half(blocks, 0), m=half(blocks, 2))
