"""Q5_K, 256 values in 176 bytes: as Q4_K, with 32 bytes of fifth bits before the 128 bytes of
codes.

Bit j of byte l of the fifth bits belongs to value l of group j. w = d scale q - dmin min.
"""

from __future__ import annotations

import numpy as np

from .codes import U8, Codes, half, nibbles
from .q4_k import unpack_scales


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 176]."""
    scales, mins = unpack_scales(blocks[:, 4:16])
    codes = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, 16:48]
    for group in range(8):
        codes[:, group] |= ((high >> group) & 1) << np.uint8(4)
    q = codes.reshape(-1, 256)
    return Codes(q=q, zero=0, d=half(blocks, 0), m=half(blocks, 2), scales=scales, mins=mins)
