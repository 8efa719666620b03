"""Q3_K, 256 values in 110 bytes: 32 bytes of third bits, 64 of low codes, 12 of scales, float16 d.

Low codes as in Q2_K; bit j of byte l of the third bits belongs to value l of the j-th run of 32. A
scale of six bits, minus 32, serves 16 values. w = d scale (q - 4).
"""

from __future__ import annotations

import numpy as np

from .codes import I8, U8, Codes, half
from .q2_k import two_bits


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 110]."""
    codes = two_bits(blocks[:, 32:96]).reshape(-1, 8, 32)
    high = blocks[:, :32]
    for run in range(8):
        codes[:, run] |= ((high >> run) & 1) << np.uint8(2)
    scales = unpack_scales(blocks[:, 96:108])
    return Codes(
        q=codes.reshape(-1, 256), zero=4, d=half(blocks, 108), scales=scales, group_size=16
    )


def unpack_scales(packed: U8) -> I8:
    """Return the scales [n, 16], already minus 32, of the packed bytes [n, 12].

    Scale i takes its low four bits from a half of byte i % 8 (low halves first) and its top two
    from bits 2 (i / 4) and 2 (i / 4) + 1 of byte 8 + i % 4.
    """
    low, high = packed[:, :8], packed[:, 8:]
    scales = np.empty((len(packed), 16), np.uint8)
    scales[:, :8] = low & 15
    scales[:, 8:] = low >> 4
    for quarter in range(4):
        scales[:, 4 * quarter : 4 * quarter + 4] |= ((high >> (2 * quarter)) & 3) << np.uint8(4)
    scales -= 32
    return scales.view(np.int8)
