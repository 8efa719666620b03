"""CPU form of `rope`: a prologue for few rows, else one chunk a row."""

from typing import Any

import numpy as np

from sparkinfer.backend.base import Buffer, CacheFormat
from sparkinfer.backend.compiled import Kernel, family, inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import (
    fma,
    fma_scalar,
    load,
    load_f32,
    load_i64,
    splat,
    store,
    store_f16,
    store_f32,
    store_half,
    swap_pairs,
)
from sparkinfer.kernels.rms_norm.cpu_impl import float_bits, norm_scale
from sparkinfer.kernels.rope.cpu_blocks import key_blocks, value_blocks
from sparkinfer.kernels.run_params import HEAD_BYTES, KEYS, POSITION, ROTATION, VALUES
from sparkinfer.kernels.shapes import Heads

_ONE = np.float32(1.0)


@inner
def _normed(source: int, norm: int, scale: float, i: int) -> Any:
    value = load(source + 4 * i)
    return value * splat(scale) * load(norm + 4 * i) if norm != 0 else value


@inner
def _turn_fast(
    source: int, norm: int, scale: float, table: int, size: int, rotated: int, paired: int, target: int,
) -> None:  # fmt: skip
    """A head whose rotated part, or each half of it, is a whole number of vectors."""
    half = rotated >> 1
    for i in range(0, size, 16):
        value = _normed(source, norm, scale, i)
        if i < rotated:
            if paired:
                partner = swap_pairs(value)
            else:
                partner = _normed(source, norm, scale, i + half if i < half else i - half)
            value = fma(value, load(table + 4 * i), partner * load(table + 4 * (rotated + i)))
        store(target + 4 * i, value)


@inner
def _turn_slow(
    source: int, norm: int, scale: float, table: int, size: int, rotated: int, paired: int, target: int,
) -> None:  # fmt: skip
    """Any head, one dimension at a time."""
    half = rotated >> 1
    for i in range(size):
        other = i
        if i < rotated:
            other = (i ^ 1) if paired else (i + half if i < half else i - half)
        x, y = load_f32(source + 4 * i), load_f32(source + 4 * other)
        if norm != 0:
            x = x * scale * load_f32(norm + 4 * i)
            y = y * scale * load_f32(norm + 4 * other)
        if i < rotated:
            x = fma_scalar(x, load_f32(table + 4 * i), y * load_f32(table + 4 * (rotated + i)))
        store_f32(target + 4 * i, x)


@inner
def _turn(
    source: int, norm: int, eps: float, table: int, size: int, rotated: int, paired: int, target: int,
) -> None:  # fmt: skip
    scale = norm_scale(source, size, eps) if norm != 0 else _ONE
    if rotated % 16 == 0 and (paired or rotated % 32 == 0):
        _turn_fast(source, norm, scale, table, size, rotated, paired, target)
    else:
        _turn_slow(source, norm, scale, table, size, rotated, paired, target)


@inner
def _key_row(target: int, position: int, size: int, source: int, wide: int) -> None:
    """Keys lie in tiles of 16 positions, one dimension after the other."""
    first = (position >> 4) * size * 16 + (position & 15)
    for i in range(size):
        if wide:
            store_f32(target + 4 * (first + 16 * i), load_f32(source + 4 * i))
        else:
            store_f16(target + 2 * (first + 16 * i), load_f32(source + 4 * i))


@inner
def _value_row(target: int, position: int, size: int, source: int, wide: int) -> None:
    for i in range(0, size, 16):
        if wide:
            store(target + 4 * (position * size + i), load(source + 4 * i))
        else:
            store_half(target + 2 * (position * size + i), load(source + 4 * i))


@inner
def turn_query(args: int, row: int, head: int, target: int) -> None:
    """A query head of one row, to size floats at `target`."""
    size = load_i64(args + 128)
    step = size * 4 * (2 if load_i64(args + 152) else 1)
    source = load_i64(args) + row * load_i64(args + 8) + head * step
    _turn(
        source, load_i64(args + 168), load_f32(args + 160), _table_row(args, row), size,
        load_i64(args + 136), load_i64(args + 144), target,
    )  # fmt: skip


@inner
def _turned_key(args: int, row: int, head: int, thread: int) -> int:
    """The address of the turned key of one row and kv head, size floats that are the thread's own."""
    size = load_i64(args + 128)
    k = load_i64(args + 16) + row * load_i64(args + 24) + head * size * 4
    turned = load_i64(args + 184) + thread * size * 4
    _turn(
        k, load_i64(args + 176), load_f32(args + 160), _table_row(args, row), size,
        load_i64(args + 136), load_i64(args + 144), turned,
    )  # fmt: skip
    return turned


@inner
def _value_of(args: int, row: int, head: int) -> int:
    return load_i64(args + 32) + row * load_i64(args + 40) + head * load_i64(args + 128) * 4


@inner
def cache_head(args: int, row: int, head: int, thread: int, wide: int) -> None:
    """Key and value of one row and kv head, to a cache of float16 or float32."""
    params, size = load_i64(args + 96), load_i64(args + 128)
    first = (load_i64(args + 104) * load_i64(args + 120) + head) * load_i64(params + HEAD_BYTES)
    position = load_i64(params + POSITION) + row
    turned, v = _turned_key(args, row, head, thread), _value_of(args, row, head)
    _key_row(load_i64(params + KEYS) + first, position, size, turned, wide)
    _value_row(load_i64(params + VALUES) + first, position, size, v, wide)


@inner
def cache_head_blocks(args: int, row: int, head: int, thread: int) -> None:
    """The same, to a cache of q8_0."""
    params, size = load_i64(args + 96), load_i64(args + 128)
    plane = load_i64(params + HEAD_BYTES)
    first = (load_i64(args + 104) * load_i64(args + 120) + head) * plane
    keys, values = load_i64(params + KEYS) + first, load_i64(params + VALUES) + first
    position, codes = load_i64(params + POSITION) + row, plane // 17 * 16
    turned, v = _turned_key(args, row, head, thread), _value_of(args, row, head)
    lost = value_blocks(values, values + codes, position, size, v)
    key_blocks(keys, keys + codes, position, size, turned, lost)


@inner
def _table_row(args: int, row: int) -> int:
    params = load_i64(args + 96)
    position = load_i64(params + POSITION) + row + load_i64(params + ROTATION)
    return load_i64(args + 80) + position * load_i64(args + 88)


@inner
def _query_row(args: int, row: int) -> None:
    size = load_i64(args + 128)
    target = load_i64(args + 48) + row * load_i64(args + 56)
    for head in range(load_i64(args + 112)):
        turn_query(args, row, head, target + head * size * 4)


@inner
def _rope_row(args: int, row: int, thread: int, wide: int) -> None:
    _query_row(args, row)
    for head in range(load_i64(args + 120)):
        cache_head(args, row, head, thread, wide)


@inner
def _rope_row_blocks(args: int, row: int, thread: int) -> None:
    _query_row(args, row)
    for head in range(load_i64(args + 120)):
        cache_head_blocks(args, row, head, thread)


@family
def rope_jobs(cache_format: CacheFormat) -> tuple[Kernel, Kernel]:
    """For one row a chunk, and for all of them at once; `attention` does the latter's work where it comes next."""
    wide, blocks = int(cache_format == "f32"), int(cache_format == "q8_0")

    @job
    def rope_one(args, row, thread):  # type: ignore[no-untyped-def]
        if blocks:
            _rope_row_blocks(args, row, thread)
        else:
            _rope_row(args, row, thread, wide)

    @job
    def rope_all(args, chunk, thread):  # type: ignore[no-untyped-def]
        for row in range(load_i64(args + 64)):
            if blocks:
                _rope_row_blocks(args, row, thread)
            else:
                _rope_row(args, row, thread, wide)

    return rope_one, rope_all


def _args(
    recorder: CpuRecorder, q: Buffer, k: Buffer, v: Buffer, shape: Heads, table: Buffer, params: Buffer, out: Buffer,
    q_norm: Buffer | None, k_norm: Buffer | None, heads: int,
) -> tuple[int, ...]:  # fmt: skip
    """Arguments of `_rope_row` for the first `heads` query heads."""
    assert shape.head_size % 16 == 0, shape
    turned = recorder.owner.shared_scratch(
        "turned key", recorder.owner.threads * shape.head_size * 4
    )
    return (
        q.address, q.stride, k.address, k.stride, v.address, v.stride, out.address, out.stride, recorder.rows, 0,
        table.address, table.stride, params.address, shape.layer, heads, shape.kv_heads, shape.head_size,
        shape.rotated, int(shape.interleaved), int(shape.gated), float_bits(shape.eps),
        q_norm.address if q_norm else 0, k_norm.address if k_norm else 0, turned,
    )  # fmt: skip


def record(
    recorder: CpuRecorder, q: Buffer, k: Buffer, v: Buffer, shape: Heads, table: Buffer, params: Buffer, out: Buffer,
    q_norm: Buffer | None, k_norm: Buffer | None,
) -> None:  # fmt: skip
    args = _args(recorder, q, k, v, shape, table, params, out, q_norm, k_norm, shape.heads)
    one, every = rope_jobs(recorder.cache_format)
    if recorder.prefers_prologue:
        recorder.prologue(Job(every, args, 1))
    else:
        recorder.phase([Job(one, args, recorder.rows)])


def record_cache(
    recorder: CpuRecorder, k: Buffer, v: Buffer, shape: Heads, table: Buffer, params: Buffer, k_norm: Buffer | None,
) -> None:  # fmt: skip
    args = _args(recorder, k, k, v, shape, table, params, k, None, k_norm, 0)
    one, _ = rope_jobs(recorder.cache_format)
    recorder.phase([Job(one, args, recorder.rows)])
