"""Encoders for the simple block formats, for exports: F32, F16, BF16, Q8_0, Q4_0 and Q4_1 as other writers make them.

The choice of scale follows the layout's definition at https://github.com/ggml-org/ggml: Q8_0 maps the largest
magnitude to 127, Q4_0 the value of largest magnitude to -8, Q4_1 the range to 0 .. 15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ..errors import UnsupportedError
from .codes import F32, U8

BLOCK = 32


def encode_q8_0(values: F32) -> U8:
    """Blocks uint8 [n, 34] of values [n, 32]."""
    peak = np.abs(values).max(axis=1)
    scale = peak / np.float32(127)
    codes = _round_away(values * _inverse(scale)[:, None])
    return _joined(scale.astype("<f2"), codes.astype(np.int8).view(np.uint8))


def encode_q4_0(values: F32) -> U8:
    """Blocks uint8 [n, 18] of values [n, 32]."""
    where = np.abs(values).argmax(axis=1)
    peak = np.take_along_axis(values, where[:, None], 1)[:, 0]
    scale = peak / np.float32(-8)
    codes = np.minimum(15, (values * _inverse(scale)[:, None] + np.float32(8.5)).astype(np.int8))
    return _joined(scale.astype("<f2"), _nibbles(codes.astype(np.uint8)))


def encode_q4_1(values: F32) -> U8:
    """Blocks uint8 [n, 20] of values [n, 32]."""
    low = values.min(axis=1)
    scale = (values.max(axis=1) - low) / np.float32(15)
    shifted = (values - low[:, None]) * _inverse(scale)[:, None]
    codes = np.minimum(15, (shifted + np.float32(0.5)).astype(np.int8))
    halves = np.stack((scale, low), 1).astype("<f2")
    return _joined(halves, _nibbles(codes.astype(np.uint8)))


def encode_f32(values: F32) -> U8:
    """Bytes uint8 [n, 4] of values [n, 1]."""
    return np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1, 4)


def encode_f16(values: F32) -> U8:
    """Bytes uint8 [n, 2] of values [n, 1]; values beyond float16 become infinite."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def encode_bf16(values: F32) -> U8:
    """Bytes uint8 [n, 2] of finite values [n, 1], rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").view(np.uint8).reshape(-1, 2)


ENCODERS: Mapping[str, Callable[[F32], U8]] = MappingProxyType(
    {
        "F32": encode_f32,
        "F16": encode_f16,
        "BF16": encode_bf16,
        "Q8_0": encode_q8_0,
        "Q4_0": encode_q4_0,
        "Q4_1": encode_q4_1,
    }
)


def quantize(format_name: str, values: F32) -> U8:
    """Blocks uint8 [n, block_bytes] of float32 values [..., inputs], row by row.

    Raises UnsupportedError for a format without an encoder and for rows that are no multiple of its block.
    """
    encode = ENCODERS.get(format_name)
    if encode is None:
        raise UnsupportedError(
            f"cannot write tensor type {format_name!r}; accepted: {', '.join(ENCODERS)}"
        )
    size = 1 if format_name in ("F32", "F16", "BF16") else BLOCK
    if values.shape[-1] % size:
        raise UnsupportedError(
            f"rows of {values.shape[-1]} values are no multiple of {size}, the block size of {format_name}"
        )
    return encode(np.ascontiguousarray(values, np.float32).reshape(-1, size))


def _inverse(scale: F32) -> F32:
    """1 / scale, 0 where the scale is 0."""
    safe = np.where(scale == 0, np.float32(1), scale)
    return np.where(scale == 0, np.float32(0), np.float32(1) / safe).astype(np.float32)


def _round_away(values: F32) -> F32:
    """Nearest integers, halves away from zero."""
    return np.trunc(values + np.copysign(np.float32(0.5), values))


def _nibbles(codes: U8) -> U8:
    """16 bytes of 32 codes: the first half in the low bits."""
    return codes[:, :16] | (codes[:, 16:] << np.uint8(4))


def _joined(scales: np.ndarray, codes: U8) -> U8:
    """Blocks of scale bytes followed by code bytes."""
    heads = np.ascontiguousarray(scales).view(np.uint8).reshape(len(codes), -1)
    return np.concatenate((heads, codes), axis=1)
