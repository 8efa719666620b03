"""Encoders for exports: F32, F16, BF16, Q8_0, Q4_0 and Q4_1 as other writers make them, Q4_K and Q6_K of `encode_k`.

The choice of scale follows the layout's definition at https://github.com/ggml-org/ggml: Q8_0 maps the largest
magnitude to 127, Q4_0 the value of largest magnitude to -8, Q4_1 the range to 0 .. 15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..errors import UnsupportedError
from .codes import F16, F32, U8
from .encode_k import K_BLOCK, encode_q4_k, encode_q6_k

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


def fit_q4_1(values: F32) -> U8:
    """Blocks like `encode_q4_1`, with scale and offset fitted to least square error: slower, closer.

    Tries ranges cut at both ends; for each, codes and the best straight line through them take turns.
    """
    low, high = values.min(axis=1), values.max(axis=1)
    centre, width = (low + high) / 2, high - low
    best = _straight(values, width / np.float32(15), low)
    for share in _CUTS:
        cut = width * np.float32(share)
        scale, offset = cut / np.float32(15), centre - cut / 2
        for _ in range(_TURNS):
            scale, offset = _line(values, _codes(values, scale, offset))
        tried = _straight(values, scale, offset)
        best = _closer(tried, best)
    halves = np.stack((best.scale, best.offset), 1)
    return _joined(halves, _nibbles(best.codes))


_CUTS, _TURNS = (1.0, 0.95, 0.9, 0.85, 0.8), 3


class _Straight(NamedTuple):
    """Codes [n, 32] on a line, its float16 scale and offset [n], and the square error [n]."""

    codes: U8
    scale: F16
    offset: F16
    error: F32


def _straight(values: F32, scale: F32, offset: F32) -> _Straight:
    d, m = scale.astype("<f2"), offset.astype("<f2")
    codes = _codes(values, d.astype(np.float32), m.astype(np.float32))
    back = codes * d.astype(np.float32)[:, None] + m.astype(np.float32)[:, None]
    return _Straight(codes, d, m, np.square(back - values).sum(axis=1))


def _codes(values: F32, scale: F32, offset: F32) -> U8:
    steps = (values - offset[:, None]) * _inverse(scale)[:, None]
    codes: U8 = np.clip(np.rint(steps), 0, 15).astype(np.uint8)
    return codes


def _line(values: F32, codes: U8) -> tuple[F32, F32]:
    """Scale and offset of least square error for given codes; a scale of 0 where all codes are equal."""
    q = codes.astype(np.float32)
    spread = q - q.mean(axis=1, keepdims=True)
    scale = (spread * values).sum(axis=1) * _inverse(np.square(spread).sum(axis=1))
    return scale, values.mean(axis=1) - scale * q.mean(axis=1)


def _closer(new: _Straight, old: _Straight) -> _Straight:
    """Of every block the one with the smaller error."""
    better = new.error < old.error
    return _Straight(
        np.where(better[:, None], new.codes, old.codes),
        np.where(better, new.scale, old.scale),
        np.where(better, new.offset, old.offset),
        np.where(better, new.error, old.error),
    )


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
        "Q4_K": encode_q4_k,
        "Q6_K": encode_q6_k,
    }
)

_BLOCK_SIZES = {"F32": 1, "F16": 1, "BF16": 1, "Q4_K": K_BLOCK, "Q6_K": K_BLOCK}

FITTED: Mapping[str, Callable[[F32], U8]] = MappingProxyType({"Q4_1": fit_q4_1})


def quantize(format_name: str, values: F32, *, fit: bool = False) -> U8:
    """Blocks uint8 [n, block_bytes] of float32 values [..., inputs], row by row.

    `fit` looks for the scales of least square error where that is known how (Q4_1).

    Raises UnsupportedError for a format without an encoder and for rows that are no multiple of its block.
    """
    encode = FITTED.get(format_name) if fit else None
    encode = encode or ENCODERS.get(format_name)
    if encode is None:
        raise UnsupportedError(
            f"cannot write tensor type {format_name!r}; accepted: {', '.join(ENCODERS)}"
        )
    size = _BLOCK_SIZES.get(format_name, BLOCK)
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
