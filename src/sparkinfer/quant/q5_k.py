"""Q5_K, 256 values in 176 bytes: as Q4_K, with 32 bytes of fifth bits before the codes.

Bit j of byte l of the fifth bits belongs to value l of group j. w = d scale q - dmin min.
"""

from __future__ import annotations

from .bits import field, half, nibbles, spread
from .codes import U8, Codes
from .q4_k import unpack_scales


def unpack(blocks: U8) -> Codes:
    """Return the codes of blocks uint8 [n, 176]."""
    scales, mins = unpack_scales(field(blocks, 4, 12))
    q = nibbles(field(blocks, 48, 128), 32)
    q |= spread(field(blocks, 16, 32), 32, bits=1, up=4).reshape(-1, 256)
    return Codes(q=q, zero=0, d=half(blocks, 0), m=half(blocks, 2), scales=scales, mins=mins)
