"""Q4_K, 256 values in 144 bytes: float16 d, float16 dmin, 12 bytes of scales, 128 bytes of codes.

Eight groups of 32; byte l of each 32 codes holds value l of an even group (low half) and of the
next group (high half). w = d scale q - dmin min.
"""

from __future__ import annotations

import numpy as np

from .codes import I8, U8, Codes, half, nibbles


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 144]."""
    scales, mins = unpack_scales(blocks[:, 4:16])
    codes = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return Codes(q=codes, zero=0, d=half(blocks, 0), m=half(blocks, 2), scales=scales, mins=mins)


def unpack_scales(packed: U8) -> tuple[I8, U8]:
    """Return scales and mins, 6 bits each, [n, 8], of the packed bytes [n, 12].

    Groups 0-3 are the low six bits of bytes 0-3 (scales) and 4-7 (mins). Groups 4-7 take their low
    four bits from the halves of bytes 8-11 and their top two from the top two bits of bytes 0-3 and
    4-7.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.empty((len(packed), 8), np.uint8)
    mins = np.empty((len(packed), 8), np.uint8)
    scales[:, :4] = first & 63
    scales[:, 4:] = (low & 15) | ((first >> 2) & 48)
    mins[:, :4] = second & 63
    mins[:, 4:] = (low >> 4) | ((second >> 2) & 48)
    return scales.view(np.int8), mins
