"""Q5_1, 32 values in 24 bytes: float16 d, float16 m, 4 and 16 bytes of codes. w = d q + m.

The codes are packed as in Q5_0.
"""

from __future__ import annotations

from .bits import field, half
from .codes import U8, Codes
from .q5_0 import join


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 24]."""
    q = join(field(blocks, 8, 16), field(blocks, 4, 4))
    return Codes(q=q, zero=0, d=half(blocks, 0), m=half(blocks, 2))
