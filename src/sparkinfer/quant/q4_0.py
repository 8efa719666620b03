"""Q4_0, 32 values in 18 bytes: float16 d, 16 bytes of codes (low halves are values 0-15). w = d (q
- 8).
"""

from __future__ import annotations

from .codes import U8, Codes, half, nibbles


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 18]."""
    return Codes(q=nibbles(blocks[:, 2:]), zero=8, d=half(blocks, 0))
