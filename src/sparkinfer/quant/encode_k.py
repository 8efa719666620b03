"""Encoders for the K formats Q4_K and Q6_K, with scales of least square error.

A block of 256 values has groups with a scale (and in Q4_K a minimum) of their own, which are stored in few bits as
multiples of the block's float16 scales. The encoder finds the best straight line of every group, rounds these lines to
the block's scales, fits those to the rounded lines, and chooses the codes last, for the scales as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .codes import F32, U8

K_BLOCK = 256
_PART = 2048  # blocks encoded at a time: temporaries stay near the cache
_CUTS_4 = (1.0, 0.95, 0.9, 0.85, 0.8, 0.72)
_CUTS_6 = (1.03, 1.0, 0.97, 0.94, 0.9, 0.85)
_TURNS = 2
_TINY = np.float32(1e-30)


def encode_q4_k(values: F32) -> U8:
    """Blocks uint8 [n, 144] of values [n, 256]."""
    return _in_parts(values, 144, _q4_k)


def encode_q6_k(values: F32) -> U8:
    """Blocks uint8 [n, 210] of values [n, 256]."""
    return _in_parts(values, 210, _q6_k)


def _in_parts(values: F32, block_bytes: int, encode: Callable[[F32], U8]) -> U8:
    out = np.empty((len(values), block_bytes), np.uint8)
    for start in range(0, len(values), _PART):
        out[start : start + _PART] = encode(values[start : start + _PART])
    return out


class _Lines(NamedTuple):
    """w = scale q - low for groups [n, groups]; the square error of the best codes."""

    scale: F32
    low: F32
    error: F32


def _q4_k(values: F32) -> U8:
    groups = values.reshape(-1, 8, 32)
    lines = _best_lines(groups)
    d = _half(lines.scale.max(1) / np.float32(63))
    dmin = _half(lines.low.max(1) / np.float32(63))
    scales, lows = _steps(lines.scale, d, 63), _steps(lines.low, dmin, 63)
    best = _refined(groups, _Block(d, dmin, scales, lows))
    best_error = _error(groups, best).sum(1)
    for _ in range(_TURNS):
        tried = _refined(groups, _fit_block(groups, best))
        error = _error(groups, tried).sum(1)
        closer = error < best_error
        best = _Block(
            np.where(closer, tried.d, best.d),
            np.where(closer, tried.dmin, best.dmin),
            np.where(closer[:, None], tried.scales, best.scales),
            np.where(closer[:, None], tried.lows, best.lows),
        )
        best_error = np.where(closer, error, best_error)
    return _pack_q4_k(best, _block_codes(groups, best))


class _Block(NamedTuple):
    """What a block stores besides codes: d and dmin [n], and their multiples [n, 8]."""

    d: F32
    dmin: F32
    scales: F32
    lows: F32


def _block_codes(groups: F32, block: _Block) -> F32:
    return _codes(groups, block.d[:, None] * block.scales, block.dmin[:, None] * block.lows, 15)


def _error(groups: F32, block: _Block) -> F32:
    """Square error of every group [n, 8] with the best codes."""
    back = _block_codes(groups, block)
    back *= (block.d[:, None] * block.scales)[..., None]
    back -= (block.dmin[:, None] * block.lows)[..., None]
    back -= groups
    error: F32 = np.einsum("ngv,ngv->ng", back, back)
    return error


def _refined(groups: F32, block: _Block) -> _Block:
    """Of every group the neighbouring multiples of d with the least error, each with the low that suits it."""
    means = groups.mean(2)
    inverse = _inverse(block.dmin)[:, None]
    best, best_error = block, _error(groups, block)
    for step in (-1, 0, 1):
        scales = np.clip(block.scales + np.float32(step), 0, 63)
        wide = block.d[:, None] * scales
        codes = _codes(groups, wide, block.dmin[:, None] * block.lows, 15)
        lows = np.clip(np.rint((wide * codes.mean(2) - means) * inverse), 0, 63)
        tried = _Block(block.d, block.dmin, scales, lows)
        error = _error(groups, tried)
        closer = error < best_error
        best = best._replace(
            scales=np.where(closer, scales, best.scales), lows=np.where(closer, lows, best.lows)
        )
        best_error = np.where(closer, error, best_error)
    return best


def _best_lines(groups: F32) -> _Lines:
    """The best line with a low of 0 or more for every group: ranges cut at both ends, codes and line in turns."""
    low = np.minimum(groups.min(2), 0)
    width = np.maximum(groups.max(2) - low, 0)
    best = _Lines(np.zeros_like(low), np.zeros_like(low), np.full_like(low, np.inf))
    for share in _CUTS_4:
        cut = width * np.float32((1 - share) / 2)
        scale, offset = width * np.float32(share / 15), np.maximum(-low - cut, 0)
        for _ in range(_TURNS):
            codes = _codes(groups, scale, offset, 15)
            scale, offset = _line(groups, codes)
        back = _codes(groups, scale, offset, 15) * scale[..., None] - offset[..., None]
        back -= groups
        error = np.einsum("ngv,ngv->ng", back, back)
        closer = error < best.error
        best = _Lines(
            np.where(closer, scale, best.scale),
            np.where(closer, offset, best.low),
            np.where(closer, error, best.error),
        )
    return best


def _line(groups: F32, codes: F32) -> tuple[F32, F32]:
    """Scale >= 0 and low >= 0 of least square error for given codes [n, groups, values]."""
    count = np.float32(groups.shape[2])
    q, x = codes.sum(2), groups.sum(2)
    qq, qx = np.einsum("ngv,ngv->ng", codes, codes), np.einsum("ngv,ngv->ng", codes, groups)
    spread = count * qq - q * q
    scale = np.where(spread > 0, (count * qx - q * x) / np.maximum(spread, _TINY), 0)
    low = (scale * q - x) / count
    # A negative low cannot be stored: the best line through zero instead.
    scale = np.where(low < 0, qx / np.maximum(qq, _TINY), scale)
    return np.maximum(scale, 0).astype(np.float32), np.maximum(low, 0).astype(np.float32)


def _codes(groups: F32, scale: F32, low: F32, highest: int) -> F32:
    """Nearest codes 0 .. highest, as floats."""
    steps = groups + low[..., None]
    steps *= _inverse(scale)[..., None]
    np.rint(steps, out=steps)
    return np.clip(steps, 0, highest, out=steps)


def _fit_block(groups: F32, block: _Block) -> _Block:
    """The block with the d and dmin of least square error for x = d (scale q) - dmin low, both at least 0."""
    codes, scales, lows = _block_codes(groups, block), block.scales, block.lows
    count = np.float32(groups.shape[2])
    q, x = codes.sum(2), groups.sum(2)
    qq, qx = np.einsum("ngv,ngv->ng", codes, codes), np.einsum("ngv,ngv->ng", codes, groups)
    aa = (scales * scales * qq).sum(1).astype(np.float64)
    bb = (count * lows * lows).sum(1).astype(np.float64)
    ab = (scales * lows * q).sum(1).astype(np.float64)
    ax = (scales * qx).sum(1).astype(np.float64)
    bx = (lows * x).sum(1).astype(np.float64)
    determinant = aa * bb - ab * ab
    regular = determinant > 1e-9 * aa * bb
    safe = np.where(regular, determinant, 1)
    d = np.where(regular, (ax * bb - bx * ab) / safe, ax / np.maximum(aa, 1e-30))
    dmin = np.where(regular, (ax * ab - bx * aa) / safe, 0)
    return block._replace(d=_half(np.maximum(d, 0)), dmin=_half(np.maximum(dmin, 0)))


def _pack_q4_k(block: _Block, codes: F32) -> U8:
    sc, m = block.scales.astype(np.uint8), block.lows.astype(np.uint8)
    packed = np.empty((len(sc), 12), np.uint8)
    packed[:, :4] = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    packed[:, 4:8] = m[:, :4] | (m[:, 4:] >> 4) << 6
    packed[:, 8:] = (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    q = codes.astype(np.uint8)
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(sc), 128)
    halves = np.stack((block.d, block.dmin), 1).astype("<f2").view(np.uint8)
    return np.concatenate((halves, packed, nibbles), axis=1)


def _q6_k(values: F32) -> U8:
    groups = values.reshape(-1, 16, 16)
    scale = _best_scales(groups)
    # The scale of largest magnitude becomes -128 or 127, whichever its sign allows: d takes a sign.
    where = np.abs(scale).argmax(1)
    peak = np.take_along_axis(scale, where[:, None], 1)[:, 0]
    d = _half(peak / np.float32(-128))
    scales = np.clip(np.rint(scale * _inverse(d)[:, None]), -128, 127)
    codes = _signed(groups, d[:, None] * scales)
    products = scales[..., None] * codes
    fitted = (products * groups).sum((1, 2)) / np.maximum(np.square(products).sum((1, 2)), _TINY)
    d = np.where(np.abs(fitted) > 0, _half(fitted), d)
    codes = _signed(groups, d[:, None] * scales)
    return _pack_q6_k(d, scales, codes)


def _best_scales(groups: F32) -> F32:
    """The scale of least square error of every group for codes -32 .. 31; it may be negative."""
    where = np.abs(groups).argmax(2)
    peak = np.take_along_axis(groups, where[..., None], 2)[..., 0]
    best, best_error = np.zeros_like(peak), np.full_like(peak, np.inf)
    for share in _CUTS_6:
        scale = peak * np.float32(share / -32)
        for _ in range(_TURNS):
            codes = _signed(groups, scale)
            squares = np.einsum("ngv,ngv->ng", codes, codes)
            scale = np.einsum("ngv,ngv->ng", codes, groups) / np.maximum(squares, _TINY)
        back = _signed(groups, scale) * scale[..., None] - groups
        error = np.einsum("ngv,ngv->ng", back, back)
        closer = error < best_error
        best, best_error = np.where(closer, scale, best), np.where(closer, error, best_error)
    return best


def _signed(groups: F32, scale: F32) -> F32:
    """Nearest codes -32 .. 31, as floats."""
    steps = groups * _inverse(scale)[..., None]
    np.rint(steps, out=steps)
    return np.clip(steps, -32, 31, out=steps)


def _pack_q6_k(d: F32, scales: F32, codes: F32) -> U8:
    q = (codes + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # half, run of 32, value
    low, high = q & 15, q >> 4
    ql = np.stack((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), 2)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = (
        ql.reshape(len(d), 128),
        qh.reshape(len(d), 64),
        scales.astype(np.int8).view(np.uint8),
        d.astype("<f2").view(np.uint8).reshape(-1, 2),
    )
    return np.concatenate(parts, axis=1)


def _steps(values: F32, unit: F32, highest: int) -> F32:
    """Multiples of `unit` [n] nearest to values [n, groups], 0 .. highest."""
    steps: F32 = np.clip(np.rint(values * _inverse(unit)[:, None]), 0, highest)
    return steps


def _half(values: npt.NDArray[np.floating]) -> F32:
    """Rounded to float16, kept as float32."""
    rounded: F32 = values.astype(np.float16).astype(np.float32)
    return rounded


def _inverse(scale: F32) -> F32:
    """1 / scale, 0 where the scale is 0."""
    safe = np.where(scale == 0, np.float32(1), scale)
    return np.where(scale == 0, np.float32(0), np.float32(1) / safe).astype(np.float32)
