"""IQ4_NL, 32 values in 18 bytes: float16 d, 16 bytes of indices as in Q4_0. w = d CODEBOOK[i]."""

from __future__ import annotations

import numpy as np

from .bits import field, half
from .codes import U8, Codes

CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
ZERO = 128

_LOW = bytes(CODEBOOK[byte & 15] + ZERO for byte in range(256))
_HIGH = bytes(CODEBOOK[byte >> 4] + ZERO for byte in range(256))


def unpack(blocks: U8) -> Codes:
    """Return the codebook values plus 128 of blocks uint8 [n, 18]."""
    return Codes(q=look_up(field(blocks, 2, 16)), zero=ZERO, d=half(blocks, 0))


def look_up(packed: U8) -> U8:
    """Return the codebook values plus 128, [n, 32], of the indices in the bytes [n, 16]."""
    raw = packed.tobytes()
    out = np.empty((len(packed), 2), "V16")
    out[:, 0] = np.frombuffer(raw.translate(_LOW), "V16")
    out[:, 1] = np.frombuffer(raw.translate(_HIGH), "V16")
    return out.view(np.uint8)
