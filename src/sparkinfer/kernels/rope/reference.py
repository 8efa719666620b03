"""Numpy specification of the rotation in `rope`."""

import numpy as np
from numpy.typing import NDArray

from sparkinfer.kernels.rms_norm.reference import rms_norm


def angles(
    positions: int, rotated: int, base: float, divisors: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Table of positions x rotated: cosines, then sines, of position * base^(-2j / rotated) / divisors[j]."""
    frequency = base ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if divisors is not None:
        frequency = frequency / divisors
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def factors(table: NDArray[np.float32], interleaved: bool) -> NDArray[np.float32]:
    """The table of `angles` as factors of each dimension: its own, then (with their signs) its partner's.

    positions x 2 rotated: out[i] = x[i] * factors[i] + x[partner of i] * factors[rotated + i].
    """
    half = table.shape[1] // 2
    cos, sin = table[:, :half], table[:, half:]
    if interleaved:
        own = np.repeat(cos, 2, axis=1)
        partner = np.stack([-sin, sin], axis=2).reshape(len(table), -1)
    else:
        own = np.concatenate([cos, cos], axis=1)
        partner = np.concatenate([-sin, sin], axis=1)
    return np.concatenate([own, partner], axis=1)


def rope(
    x: NDArray[np.float32],
    table: NDArray[np.float32],
    interleaved: bool,
    norm: NDArray[np.float32] | None,
    eps: float,
) -> NDArray[np.float32]:
    """x rows x heads x head_size, table rows x rotated (the rows of the positions); the rotated x."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    out = x.copy()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def q8_0(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """x [..., head_size] as a cache in q8_0 keeps it: codes [..., head_size] and scales [..., head_size / 32].

    A scale is the largest magnitude of its 32 values / 127, in float16; NaN, with codes of zero, where that is no
    number or does not fit.
    """
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(-1) / np.float32(127)
    scale = np.where(top <= 65504, top, np.nan).astype(np.float16)
    good = (scale > 0)[..., None]
    inverse = np.float32(1) / np.where(good, scale[..., None], 1).astype(np.float32)
    steps = np.multiply(blocks, inverse, where=good, out=np.zeros_like(blocks))
    return np.clip(np.rint(steps), -127, 127).astype(np.int8).reshape(x.shape), scale


def from_q8_0(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.float32]:
    """The numbers that codes and scales stand for."""
    blocks = codes.reshape(*scales.shape, 32) * scales[..., None].astype(np.float32)
    return blocks.reshape(codes.shape)
