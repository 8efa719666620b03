"""Q4_0, 32 values in 18 bytes: float16 d, 16 bytes of codes. w = d (q - 8).

The low halves of the 16 bytes are values 0-15, the high halves values 16-31.
"""

from __future__ import annotations

from .bits import field, half, nibbles
from .codes import U8, Codes


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 18]."""
    return Codes(q=nibbles(field(blocks, 2, 16), 16), zero=8, d=half(blocks, 0))
