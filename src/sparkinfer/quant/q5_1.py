"""Q5_1, 32 values in 24 bytes: float16 d, float16 m, 32 fifth bits, 16 bytes of low codes. w = d q
+ m.
"""

from __future__ import annotations

from .codes import U8, Codes, half
from .q5_0 import join


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 24]."""
    return Codes(
        q=join(blocks[:, 8:], blocks[:, 4:8]), zero=0, d=half(blocks, 0), m=half(blocks, 2)
    )
