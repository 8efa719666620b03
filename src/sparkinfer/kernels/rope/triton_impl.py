"""Triton form of `rope`: a program per row and head; one for a query head, one for a key head with its values.

Pinned: a program knows one row only, so a row's bits cannot depend on how many there are.
A row of values that does not fit the cache as numbers is stored as zeros and its keys as NaN: whoever sees the position
gets NaN, and whoever does not is untouched, though attention multiplies values it does not see by zero. A q8_0 cache
has NaN scales for such keys.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.shapes import Heads
from sparkinfer.kernels.triton_cache import q8_plane, store_q8
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    WORD_KEYS,
    WORD_POSITION,
    WORD_ROTATION,
    WORD_VALUES,
    cache_plane,
    power_of_two,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next


@triton.jit
def _turned(
    source, norm, table, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROTATED: tl.constexpr, PAIRED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One head, normed and rotated, [PADDED]; `table` is the row of its position. Awaits the inputs."""
    i = tl.arange(0, PADDED)
    inside = i < SIZE
    turns = i < ROTATED
    if PAIRED:
        partner = i ^ 1
    else:
        HALF: tl.constexpr = ROTATED // 2
        partner = tl.where(i < HALF, i + HALF, i - HALF)
    own = tl.load(table + i, mask=turns, other=1.0)
    other = tl.load(table + ROTATED + i, mask=turns, other=0.0)
    if NORMED:
        factor = tl.load(norm + i, mask=inside, other=0.0)
        partner_factor = tl.load(norm + partner, mask=turns, other=0.0)
    await_inputs()
    x = tl.load(source + i, mask=inside, other=0.0)
    y = tl.load(source + partner, mask=turns, other=0.0)
    if NORMED:
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps))
        x = x * scale * factor
        y = y * scale * partner_factor
    return tl.where(turns, tl.fma(x, own, y * other), x)


@triton.jit
def _lost(value):
    """NaN where one of the values is no number, else 0."""
    return tl.sum(value.to(tl.float32) * 0.0, 0)


@triton.jit(do_not_specialize=["layer"])
def rope_kernel(
    q, q_stride, k, k_stride, v, v_stride, table, table_stride, run, out, out_stride, q_norm, k_norm, layer, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROTATED: tl.constexpr,
    PAIRED: tl.constexpr, GATED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, WIDE: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    release_next()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    position = tl.load(run + WORD_POSITION) + row
    turn = table + (position + tl.load(run + WORD_ROTATION)) * table_stride
    i = tl.arange(0, PADDED)
    inside = i < SIZE
    if slot < HEADS:
        STEP: tl.constexpr = 2 * SIZE if GATED else SIZE
        source = q + row * q_stride + slot * STEP
        turned = _turned(source, q_norm, turn, eps, SIZE, PADDED, ROTATED, PAIRED, Q_NORM)
        tl.store(out + row * out_stride + slot * SIZE + i, turned, mask=inside)
    elif slot < HEADS + KV_HEADS:
        head = slot - HEADS
        source = k + row * k_stride + head * SIZE
        turned = _turned(source, k_norm, turn, eps, SIZE, PADDED, ROTATED, PAIRED, K_NORM)
        plane = layer * KV_HEADS + head
        value = tl.load(v + row * v_stride + head * SIZE + i, mask=inside, other=0.0)
        if CODES:
            codes, scales = q8_plane(run, WORD_KEYS, plane)
            store_q8(
                codes, scales, position, turned, _lost(value.to(tl.float16)), SIZE, PADDED, False
            )
        else:
            keys = cache_plane(run, WORD_KEYS, plane, WIDE) + position * SIZE
            values = cache_plane(run, WORD_VALUES, plane, WIDE) + position * SIZE
            value = value.to(values.dtype.element_ty)
            lost = _lost(value)
            value = tl.where(lost == 0.0, value, 0.0).to(values.dtype.element_ty)
            tl.store(keys + i, (turned + lost).to(keys.dtype.element_ty), mask=inside)
            tl.store(values + i, value, mask=inside)
    elif CODES:  # values in programs of their own: a block takes longer than a number
        head = slot - HEADS - KV_HEADS
        codes, scales = q8_plane(run, WORD_VALUES, layer * KV_HEADS + head)
        await_inputs()
        value = tl.load(v + row * v_stride + head * SIZE + i, mask=inside, other=0.0)
        value = tl.where(_lost(value.to(tl.float16)) == 0.0, value, 0.0)
        store_q8(codes, scales, position, value, 0.0, SIZE, PADDED, True)


def _launch(
    recorder: CudaRecorder, q: Buffer, k: Buffer, v: Buffer, shape: Heads, table: Buffer, params: Buffer, out: Buffer,
    q_norm: Buffer | None, k_norm: Buffer | None, heads: int,
) -> None:  # fmt: skip
    arrays = (q.array, k.array, v.array, table.array)
    strided: list[Any] = [part for array in arrays for part in (array, stride_of(array))]
    codes = recorder.cache_format == "q8_0"
    recorder.launch(
        rope_kernel, (recorder.rows, heads + (2 if codes else 1) * shape.kv_heads),
        *strided, params.array, out.array, stride_of(out.array),
        q_norm.array if q_norm else q.array, k_norm.array if k_norm else k.array, shape.layer, shape.eps,
        HEADS=heads, KV_HEADS=shape.kv_heads, SIZE=shape.head_size, PADDED=power_of_two(shape.head_size),
        ROTATED=shape.rotated, PAIRED=shape.interleaved, GATED=shape.gated,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, WIDE=recorder.cache_format == "f32",
        CODES=codes, num_warps=1, overlap=True, **EXACT,
    )  # fmt: skip


def record(
    recorder: CudaRecorder, q: Buffer, k: Buffer, v: Buffer, shape: Heads, table: Buffer, params: Buffer, out: Buffer,
    q_norm: Buffer | None, k_norm: Buffer | None,
) -> None:  # fmt: skip
    _launch(recorder, q, k, v, shape, table, params, out, q_norm, k_norm, shape.heads)


def record_cache(
    recorder: CudaRecorder, k: Buffer, v: Buffer, shape: Heads, table: Buffer, params: Buffer, k_norm: Buffer | None,
) -> None:  # fmt: skip
    _launch(recorder, k, k, v, shape, table, params, k, None, k_norm, 0)
