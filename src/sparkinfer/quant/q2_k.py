"""Q2_K, 256 values in 84 bytes: 16 bytes of scales and mins, 64 of codes, float16 d and dmin.

Two halves of 128 values, each four runs of 32: run r is bits 2r and 2r + 1 of the half's 32 bytes.
The low half of a scale byte is the scale, the high half the min, of 16 values.
w = d scale q - dmin min.
"""

from __future__ import annotations

import numpy as np

from .bits import field, half, spread
from .codes import U8, Codes


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 84]."""
    packed = field(blocks, 0, 16)
    q = spread(field(blocks, 16, 64), 32, bits=2).reshape(-1, 256)
    scales = np.bitwise_and(packed, np.uint8(15)).view(np.int8)
    mins = np.right_shift(packed, np.uint8(4))
    d, dmin = half(blocks, 80), half(blocks, 82)
    return Codes(q=q, zero=0, d=d, m=dmin, scales=scales, mins=mins, group_size=16)
