"""IQ4_XS, 256 values in 136 bytes: float16 d, 6 bytes of scales, 128 bytes of indices.

Eight groups of 32, each indexed as in IQ4_NL. Scale j: its top two bits are bits 2j and 2j + 1 of
the first two scale bytes, its low four are half j of the other four; 32 is subtracted.
w = d scale CODEBOOK[i].
"""

from __future__ import annotations

import numpy as np

from .bits import field, half
from .codes import I8, U8, Codes
from .iq4_nl import ZERO, look_up


def unpack(blocks: U8) -> Codes:
    """Return the codebook values plus 128 of blocks uint8 [n, 136]."""
    q = look_up(field(blocks, 8, 128).reshape(-1, 16)).reshape(-1, 256)
    return Codes(q=q, zero=ZERO, d=half(blocks, 0), scales=unpack_scales(field(blocks, 2, 6)))


def unpack_scales(packed: U8) -> I8:
    """Return the scales [n, 8], already minus 32, of the packed bytes [n, 6]."""
    scales = np.empty((len(packed), 8), np.int8)
    for group in range(8):
        low = packed[:, 2 + group // 2] >> (4 * (group % 2))
        high = packed[:, group // 4] >> (2 * (group % 4))
        scales[:, group] = (low & 15) | ((high & 3) << 4)
    scales -= 32
    return scales
