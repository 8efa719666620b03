"""F32, F16 and BF16: a block is one value, so there are no codes, only a way to float32."""

from __future__ import annotations

import numpy as np

from .codes import F32, U8


def dequantize_f32(blocks: U8) -> F32:
    """Return float32 [n, 1] of little-endian blocks uint8 [n, 4]."""
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=False)


def dequantize_f16(blocks: U8) -> F32:
    """Return float32 [n, 1] of little-endian IEEE half blocks uint8 [n, 2]."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def dequantize_bf16(blocks: U8) -> F32:
    """Return float32 [n, 1] of blocks uint8 [n, 2] that hold the upper 16 bits of a float32."""
    bits = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)
