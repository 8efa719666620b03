"""IQ4_XS, 256 values in 136 bytes: float16 d, 2 bytes of high and 4 of low scale bits, 128 bytes of
indices.

Eight groups of 32, each indexed as in IQ4_NL. Scale j: its low four bits are half j of the low
bytes, its top two are bits 2j and 2j + 1 of the 16-bit high field; 32 is subtracted. w = d scale
CODEBOOK[index].
"""

from __future__ import annotations

import numpy as np

from .codes import I8, U8, Codes, half, nibbles
from .iq4_nl import CODES, ZERO


def unpack(blocks: U8) -> Codes:
    """Return the codebook values plus 128 of blocks uint8 [n, 136]."""
    index = nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256)
    return Codes(q=CODES[index], zero=ZERO, d=half(blocks, 0), scales=unpack_scales(blocks[:, 2:8]))


def unpack_scales(packed: U8) -> I8:
    """Return the scales [n, 8], already minus 32, of the packed bytes [n, 6]."""
    high, low = packed[:, :2], packed[:, 2:]
    scales = np.empty((len(packed), 8), np.uint8)
    scales[:, 0::2] = low & 15
    scales[:, 1::2] = low >> 4
    for group in range(8):
        scales[:, group] |= ((high[:, group // 4] >> (2 * (group % 4))) & 3) << np.uint8(4)
    scales -= 32
    return scales.view(np.int8)
