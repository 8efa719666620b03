"""Q8_0, 32 values in 34 bytes: float16 d, 32 signed bytes. w = d x; the codes are x + 128."""

from __future__ import annotations

import numpy as np

from .bits import field, half
from .codes import U8, Codes


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 34]; flipping the top bit adds 128."""
    q = field(blocks, 2, 32)
    q ^= np.uint8(128)
    return Codes(q=q, zero=128, d=half(blocks, 0))
