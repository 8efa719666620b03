"""Q6_K, 256 values in 210 bytes: 128 bytes of low codes, 64 of high bits, 16 signed scales, float16
d.

Two halves of 128 values, each four runs of 32: runs 0 and 1 are the low halves of 64 low bytes,
runs 2 and 3 the high halves; run r takes bits 2r and 2r + 1 of 32 high bytes. A scale serves 16
values. w = d scale (q - 32).
"""

from __future__ import annotations

import numpy as np

from .codes import U8, Codes, half, nibbles


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 210]."""
    codes = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for run in range(4):
        codes[:, :, run] |= ((high >> (2 * run)) & 3) << np.uint8(4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return Codes(
        q=codes.reshape(-1, 256), zero=32, d=half(blocks, 208), scales=scales, group_size=16
    )
