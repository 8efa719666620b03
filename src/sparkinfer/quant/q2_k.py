"""Q2_K, 256 values in 84 bytes: 16 bytes of scale (low half) and min (high half), 64 of codes,
float16 d and dmin.

Two halves of 128 values, each four runs of 32: run r is bits 2r and 2r + 1 of the half's 32 bytes.
w = d scale q - dmin min, a scale and a min per 16 values.
"""

from __future__ import annotations

import numpy as np

from .codes import U8, Codes, half


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 84]."""
    packed = blocks[:, :16]
    scales, mins = (packed & 15).view(np.int8), np.right_shift(packed, 4, dtype=np.uint8)
    codes = two_bits(blocks[:, 16:80]).reshape(-1, 256)
    d, dmin = half(blocks, 80), half(blocks, 82)
    return Codes(q=codes, zero=0, d=d, m=dmin, scales=scales, mins=mins, group_size=16)


def two_bits(packed: U8) -> U8:
    """Return 2-bit codes [n, 2, 4, 32] of bytes [n, 64]: half, run, value."""
    halves = packed.reshape(-1, 2, 32)
    codes = np.empty((len(packed), 2, 4, 32), np.uint8)
    for run in range(4):
        np.bitwise_and(halves >> (2 * run), 3, out=codes[:, :, run])
    return codes
