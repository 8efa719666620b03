"""Compiled helpers that write an `Activation` (layout: `backend.base.Activation`)."""

from typing import Any

import numpy as np

from sparkinfer.backend.base import Activation
from sparkinfer.backend.compiled import inner
from sparkinfer.backend.simd import (
    largest_magnitude,
    load,
    splat,
    store,
    store_f32,
    store_i32,
    store_int8,
    sum_rounded,
)

_TOP = np.float32(127.0)
_ZERO = np.float32(0.0)
_LEAST = np.float32(1e-36)  # 127 over less than this is infinite


def activation_args(act: Activation) -> tuple[int, ...]:
    """Five int64 arguments: f32 address, its thread stride, its row stride, q8 address, its thread stride."""
    q8 = act.q8
    return (
        act.f32.address,
        act.f32.thread_stride,
        act.f32.stride,
        q8.address if q8 else 0,
        q8.thread_stride if q8 else 0,
    )


@inner
def write_record(panel: int, block: int, row: int, group: int, y0: Any, y1: Any) -> None:
    """Quantise 32 floats into `block` of a panel of `group` rows: d = max|y| / 127, codes rounded to nearest even.

    A block whose largest value is below 1e-36 becomes zero; one with a NaN or an infinity has no finite d.
    """
    top = largest_magnitude(y0, y1)
    scale = top / _TOP
    inverse = splat(_TOP / top) if top > _LEAST else splat(_ZERO)
    record = panel + block * 48 * group
    s0 = y0 * inverse
    s1 = y1 * inverse
    store_int8(record + 32 * row, s0)
    store_int8(record + 32 * row + 16, s1)
    sum0 = sum_rounded(s0)
    sum1 = sum_rounded(s1)
    store_f32(record + 32 * group + 4 * row, scale)
    store_i32(record + 36 * group + 4 * row, sum0)
    store_i32(record + 40 * group + 4 * row, sum1)
    store_f32(record + 44 * group + 4 * row, scale * np.float32(sum0 + sum1))


@inner
def write_q8(base: int, blocks: int, rows: int, row: int, block: int, y0: Any, y1: Any) -> None:
    """Write one block of one row of an `Activation.q8` of `rows` rows and `blocks` blocks."""
    first = row & -8
    group = min(8, rows - first)
    write_record(base + first * blocks * 48, block, row - first, group, y0, y1)


@inner
def quantise_row(base: int, blocks: int, rows: int, row: int, source: int) -> None:
    """Quantise a float32 row of blocks * 32 values at `source`."""
    for block in range(blocks):
        y = source + block * 128
        write_q8(base, blocks, rows, row, block, load(y), load(y + 64))


@inner
def copy_row(target: int, source: int, width: int) -> None:
    for i in range(0, width, 16):
        store(target + 4 * i, load(source + 4 * i))
