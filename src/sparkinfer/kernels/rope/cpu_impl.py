"""CPU form of `rope`: a prologue for few rows, else one chunk a row."""

import functools

import numpy as np
from numba import njit

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.compiled import Kernel, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import (
    fma,
    load,
    load_f32,
    load_i64,
    splat,
    sqrt_scalar,
    store,
    store_f16,
    store_f32,
    store_half,
    sum_lanes,
)
from sparkinfer.kernels.rms_norm.cpu_impl import float_bits
from sparkinfer.kernels.run_params import HEAD_BYTES, KEYS, POSITION, VALUES
from sparkinfer.kernels.shapes import Heads

_ONE = np.float32(1.0)


@njit(error_model="numpy")
def _norm_scale(source: int, width: int, eps: float) -> float:
    total = splat(np.float32(0.0))
    for i in range(0, 4 * width, 64):
        value = load(source + i)
        total = fma(value, value, total)
    return _ONE / sqrt_scalar(sum_lanes(total) / np.float32(width) + eps)


@njit(error_model="numpy")
def _element(source: int, norm: int, scale: float, i: int) -> float:
    value = load_f32(source + 4 * i)
    return value * scale * load_f32(norm + 4 * i) if norm != 0 else value


@njit(error_model="numpy")
def _rotate(
    source: int, norm: int, scale: float, table: int, i: int, rotated: int, interleaved: int
) -> float:
    """Dimension i of the head after norm and rotation."""
    if i >= rotated:
        return _element(source, norm, scale, i)
    half = rotated >> 1
    pair, second = (i >> 1, i & 1) if interleaved else (i % half, i // half)
    first_at = 2 * pair if interleaved else pair
    second_at = first_at + 1 if interleaved else pair + half
    x = _element(source, norm, scale, first_at)
    y = _element(source, norm, scale, second_at)
    cos = load_f32(table + 4 * pair)
    sin = load_f32(table + 4 * (half + pair))
    return x * sin + y * cos if second else x * cos - y * sin


@njit(error_model="numpy")
def _key_row(target: int, position: int, size: int, i: int, value: float, wide: int) -> None:
    tile = (position >> 4) * size * 16 + i * 16 + (position & 15)
    if wide:
        store_f32(target + 4 * tile, value)
    else:
        store_f16(target + 2 * tile, value)


@njit(error_model="numpy")
def _value_row(target: int, position: int, size: int, source: int, wide: int) -> None:
    for i in range(0, size, 16):
        if wide:
            store(target + 4 * (position * size + i), load(source + 4 * i))
        else:
            store_half(target + 2 * (position * size + i), load(source + 4 * i))


@njit(error_model="numpy")
def rope_row(args: int, row: int, wide: int) -> None:
    params = load_i64(args + 96)
    heads, kv_heads, size = load_i64(args + 112), load_i64(args + 120), load_i64(args + 128)
    rotated, interleaved, gated = load_i64(args + 136), load_i64(args + 144), load_i64(args + 152)
    eps, q_norm, k_norm = load_f32(args + 160), load_i64(args + 168), load_i64(args + 176)
    position = load_i64(params + POSITION) + row
    table = load_i64(args + 80) + position * load_i64(args + 88)
    source = load_i64(args) + row * load_i64(args + 8)
    target = load_i64(args + 48) + row * load_i64(args + 56)
    step = size * 4 * (2 if gated else 1)
    for head in range(heads):
        scale = _norm_scale(source, size, eps) if q_norm != 0 else _ONE
        for i in range(size):
            store_f32(
                target + 4 * i, _rotate(source, q_norm, scale, table, i, rotated, interleaved)
            )
        source += step
        target += size * 4
    plane = load_i64(params + HEAD_BYTES)
    first = load_i64(args + 104) * kv_heads * plane
    keys, values = load_i64(params + KEYS) + first, load_i64(params + VALUES) + first
    k = load_i64(args + 16) + row * load_i64(args + 24)
    v = load_i64(args + 32) + row * load_i64(args + 40)
    for head in range(kv_heads):
        scale = _norm_scale(k, size, eps) if k_norm != 0 else _ONE
        for i in range(size):
            _key_row(
                keys,
                position,
                size,
                i,
                _rotate(k, k_norm, scale, table, i, rotated, interleaved),
                wide,
            )
        _value_row(values, position, size, v, wide)
        k += size * 4
        v += size * 4
        keys += plane
        values += plane


@functools.cache
def _jobs(wide: int) -> tuple[Kernel, Kernel]:
    @job
    def rope_one(args, row, thread):  # type: ignore[no-untyped-def]
        rope_row(args, row, wide)

    @job
    def rope_all(args, chunk, thread):  # type: ignore[no-untyped-def]
        for row in range(load_i64(args + 64)):
            rope_row(args, row, wide)

    return rope_one, rope_all


def record(
    recorder: CpuRecorder, q: Buffer, k: Buffer, v: Buffer, shape: Heads, table: Buffer, params: Buffer, out: Buffer,
    q_norm: Buffer | None, k_norm: Buffer | None,
) -> None:  # fmt: skip
    assert shape.head_size % 16 == 0, shape
    args = (
        q.address, q.stride, k.address, k.stride, v.address, v.stride, out.address, out.stride, recorder.rows, 0,
        table.address, table.stride, params.address, shape.layer, shape.heads, shape.kv_heads, shape.head_size,
        shape.rotated, int(shape.interleaved), int(shape.gated), float_bits(shape.eps),
        q_norm.address if q_norm else 0, k_norm.address if k_norm else 0,
    )  # fmt: skip
    one, every = _jobs(int(recorder.owner.wide_cache))
    if recorder.prefers_prologue:
        recorder.prologue(Job(every, args, 1))
    else:
        recorder.phase([Job(one, args, recorder.rows)])
