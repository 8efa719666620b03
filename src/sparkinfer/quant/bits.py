"""Splitting packed bytes into codes, eight bytes at a time.

numpy is slow on rows of 16 or 32 bytes inside wider blocks: an inner loop costs more than its work.
So rows are moved as single items (`V16`, `V32`) and the arithmetic runs over flat 64-bit words.
"""

from __future__ import annotations

import numpy as np

from .codes import F16, U8

_EVERY_BYTE = 0x0101010101010101


def field(blocks: U8, offset: int, width: int) -> U8:
    """Return a contiguous copy of `width` bytes at `offset` of every block, [n, width]."""
    rows: U8 = blocks[:, offset : offset + width].view(f"V{width}").copy().view(np.uint8)
    return rows


def half(blocks: U8, offset: int) -> F16:
    """Return the float16 field at `offset` of every block, [n]."""
    return field(blocks, offset, 2).view(np.float16).reshape(-1)


def spread(packed: U8, width: int, bits: int, up: int = 0) -> U8:
    """Split every run of `width` bytes into 8 / bits runs of codes.

    Shapes: `packed` contiguous, [..] of m * width bytes, a multiple of 8 in all; the result is
    [m, 8 / bits, width]. Run r holds bits r * bits and up of each byte, shifted left by `up`.
    """
    words = packed.reshape(-1).view(np.uint64)
    mask = np.uint64(((1 << bits) - 1 << up) * _EVERY_BYTE)
    item = np.dtype(f"V{width}")
    out = np.empty((packed.size // width, 8 // bits), item)
    for run in range(8 // bits):
        shift = run * bits - up
        moved = words >> np.uint64(shift) if shift >= 0 else words << np.uint64(-shift)
        moved &= mask
        out[:, run] = moved.view(item)
    return out.view(np.uint8).reshape(-1, 8 // bits, width)


def nibbles(packed: U8, width: int) -> U8:
    """Return codes of 4 bits: of each `width` bytes first all low halves, then all high halves.

    Shapes: `packed` [n, k] with k a multiple of `width`; the result is [n, 2k].
    """
    return spread(packed, width, 4).reshape(-1, 2 * packed.shape[1])
