"""Q6_K, 256 values in 210 bytes: 128 bytes of low codes, 64 of high bits, 16 scales, float16 d.

Two halves of 128 values, each four runs of 32. Runs 0 and 1 are the low halves of 64 low bytes,
runs 2 and 3 their high halves; run r takes bits 2r and 2r + 1 of 32 high bytes. A signed scale
serves 16 values. w = d scale (q - 32).
"""

from __future__ import annotations

import numpy as np

from .bits import field, half, nibbles, spread
from .codes import U8, Codes


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 210]."""
    q = nibbles(field(blocks, 0, 128), 64)
    q |= spread(field(blocks, 128, 64), 32, bits=2, up=4).reshape(-1, 256)
    scales = field(blocks, 192, 16).view(np.int8)
    return Codes(q=q, zero=32, d=half(blocks, 208), scales=scales, group_size=16)
