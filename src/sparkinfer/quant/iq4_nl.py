"""IQ4_NL, 32 values in 18 bytes: float16 d, 16 bytes of indices as in Q4_0. w = d CODEBOOK[i]."""

from __future__ import annotations

import numpy as np

from .codes import U8, Codes, half, nibbles

CODEBOOK = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
ZERO = 128
CODES = (CODEBOOK.astype(np.int16) + ZERO).astype(np.uint8)


def unpack(blocks: U8) -> Codes:
    """Return the codebook values plus 128 of blocks uint8 [n, 18]."""
    return Codes(q=CODES[nibbles(blocks[:, 2:])], zero=ZERO, d=half(blocks, 0))
