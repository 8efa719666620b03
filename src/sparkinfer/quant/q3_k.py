"""Q3_K, 256 values in 110 bytes: 32 bytes of third bits, 64 of low codes, 12 of scales, float16 d.

Low codes as in Q2_K; bit j of byte l of the third bits belongs to value l of the j-th run of 32. A
scale of six bits, minus 32, serves 16 values. w = d scale (q - 4).
"""

from __future__ import annotations

import numpy as np

from .bits import field, half, spread
from .codes import I8, U8, Codes


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 110]."""
    q = spread(field(blocks, 32, 64), 32, bits=2).reshape(-1, 256)
    q |= spread(field(blocks, 0, 32), 32, bits=1, up=2).reshape(-1, 256)
    scales = unpack_scales(field(blocks, 96, 12))
    return Codes(q=q, zero=4, d=half(blocks, 108), scales=scales, group_size=16)


def unpack_scales(packed: U8) -> I8:
    """Return the scales [n, 16], already minus 32, of the packed bytes [n, 12].

    Scale i takes its low four bits from a half of byte i % 8 (low halves first) and its top two
    from bits 2 (i / 4) and 2 (i / 4) + 1 of byte 8 + i % 4. The bytes of a word are four scales.
    """
    words = packed.view(np.uint32)
    high = words[:, 2]
    scales = np.empty((len(packed), 4), np.uint32)
    for quarter in range(4):
        low = words[:, quarter % 2] >> (4 * (quarter // 2))
        top = (high >> (2 * quarter)) & 0x03030303
        scales[:, quarter] = (low & 0x0F0F0F0F) | (top << 4)
    signed = scales.view(np.int8)
    signed -= 32
    return signed
