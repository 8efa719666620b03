"""Q4_K, 256 values in 144 bytes: float16 d and dmin, 12 bytes of scales, 128 bytes of codes.

Eight groups of 32 values. Byte l of each 32 bytes of codes holds value l of an even group in its
low half and value l of the next group in its high half. w = d scale q - dmin min.
"""

from __future__ import annotations

import numpy as np

from .bits import field, half, nibbles
from .codes import I8, U8, Codes


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 144]."""
    scales, mins = unpack_scales(field(blocks, 4, 12))
    q = nibbles(field(blocks, 16, 128), 32)
    return Codes(q=q, zero=0, d=half(blocks, 0), m=half(blocks, 2), scales=scales, mins=mins)


def unpack_scales(packed: U8) -> tuple[I8, U8]:
    """Return scales and mins, 6 bits each, [n, 8], of the packed bytes [n, 12].

    Groups 0-3 are the low six bits of bytes 0-3 (scales) and 4-7 (mins). Groups 4-7 take their low
    four bits from the halves of bytes 8-11 and their top two from the top two bits of bytes 0-7.
    The four bytes of a word are four groups.
    """
    words = packed.view(np.uint32)
    first, second, low = words[:, 0], words[:, 1], words[:, 2]
    scales = np.empty((len(packed), 2), np.uint32)
    mins = np.empty((len(packed), 2), np.uint32)
    scales[:, 0] = first & 0x3F3F3F3F
    scales[:, 1] = (low & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
    mins[:, 0] = second & 0x3F3F3F3F
    mins[:, 1] = ((low >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)
    return scales.view(np.int8), mins.view(np.uint8)
