"""Triton form of `attention` for many rows (prefill): softmax as keys come by, in tiles of rows x query heads.

All query heads of a kv head share a tile, so keys and values are read once for them. float16 products with float32 sums
(all float32 where the cache is). Deterministic: a tile belongs to one program. Of a q8_0 cache all that the rows see is
turned into float16 before, once for all tiles, in memory that all layers share.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.attention.triton_masks import LOG2_E, end_key, lowest_key
from sparkinfer.kernels.shapes import Heads
from sparkinfer.kernels.triton_cache import code_place, q8_plane, read_q8, scale_place
from sparkinfer.kernels.triton_mixers import (
    WORD_KEYS,
    WORD_POSITION,
    WORD_VALUES,
    cache_plane,
    power_of_two,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

TILE, KEYS_AT_ONCE, WARPS, STAGES = 128, 64, 8, 2
FLOAT32_TILE, FLOAT32_KEYS = 32, 32  # of a float32 cache, which serves comparisons


@triton.jit
def _step(keys, values, query, top, total, mixed, start, low, end, lowest, highest, SIZE: tl.constexpr,
          PADDED: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """KEYS more keys from position `start` on: the running maximum and sum of weights [TILE] and weighted values."""
    start += lowest * 0  # a tensor, under the interpreter too
    at = start + tl.arange(0, KEYS)
    d = tl.arange(0, PADDED)
    offset = tl.arange(0, KEYS)[:, None] * SIZE + d[None, :]
    keys += start.to(tl.int64) * SIZE
    values += start.to(tl.int64) * SIZE
    if MASKED:
        there = ((at >= lowest) & (at < highest))[:, None] & (d < SIZE)[None, :]
        key = tl.load(keys + offset, mask=there, other=0.0)
        value = tl.load(values + offset, mask=there, other=0.0)
    elif SIZE < PADDED:
        there = (at >= 0)[:, None] & (d < SIZE)[None, :]
        key = tl.load(keys + offset, mask=there, other=0.0)
        value = tl.load(values + offset, mask=there, other=0.0)
    else:
        key = tl.load(keys + offset)
        value = tl.load(values + offset)
    if WIDE:
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    else:
        scores = tl.dot(query, tl.trans(key))
    if MASKED:
        seen = (at[None, :] >= low[:, None]) & (at[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = higher
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - base)
    weight = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weight, 1)
    mixed = mixed * shrink[:, None]
    if WIDE:
        mixed = tl.dot(weight, value, mixed, input_precision="ieee")
    else:
        mixed = tl.dot(weight.to(tl.float16), value, mixed)
    return higher, total, mixed


@triton.jit
def _turn_unit(run, target, start, highest, plane, WORD: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
               VALUES: tl.constexpr):  # fmt: skip
    codes, scales = q8_plane(run, WORD, plane)
    p = (start + tl.arange(0, 32))[:, None]
    d = tl.arange(0, PADDED)[None, :]
    there = (p < highest) & (d < SIZE)
    code = tl.load(codes + code_place(p, d, SIZE, VALUES), mask=there, other=0)
    scale = tl.load(scales + scale_place(p, d // 32, SIZE, VALUES), mask=there, other=0.0)
    tl.store(target + p.to(tl.int64) * SIZE + d, read_q8(code, scale), mask=there)


@triton.jit(do_not_specialize=["rows", "layer", "context", "first_row", "of_rows"])
def turn_kernel(
    run, keys, values, rows, layer, context, first_row, of_rows,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """32 positions of a layer's q8_0 keys and values as float16 [kv head][context][SIZE]."""
    release_next()
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    query = position + first_row
    lowest = lowest_key(run, query, WINDOW)
    highest = end_key(query + rows - 1, position + of_rows, CAUSAL, WINDOW)
    start = (lowest // 32 + tl.program_id(0)) * 32
    head = tl.program_id(1)
    await_inputs()
    if start < highest:
        to, plane = head.to(tl.int64) * context * SIZE, layer * KV_HEADS + head
        _turn_unit(run, keys + to, start, highest, plane, WORD_KEYS, SIZE, PADDED, False)
        _turn_unit(run, values + to, start, highest, plane, WORD_VALUES, SIZE, PADDED, True)


@triton.jit(do_not_specialize=["rows", "layer", "first_row", "of_rows", "context"])
def wide_kernel(
    turned_keys, turned_values, context, q, q_stride, run, gate, gate_stride, out, out_stride, rows, layer, first_row,
    of_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, GATED: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Tile element m is query head m % GROUP of row m // GROUP; the tiles with the most keys come first."""
    release_next()
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    run_end = position + of_rows
    m = tile * TILE + tl.arange(0, TILE)
    row = m // GROUP
    mine = row < rows
    query_head = head * GROUP + m % GROUP
    at = position + first_row + row
    low, end = lowest_key(run, at, WINDOW), end_key(at, run_end, CAUSAL, WINDOW)
    oldest = position + first_row + tile * TILE // GROUP
    newest = position + first_row + tl.minimum((tile * TILE + TILE - 1) // GROUP, rows - 1)
    lowest, highest = lowest_key(run, oldest, WINDOW), end_key(newest, run_end, CAUSAL, WINDOW)
    begin, stop = lowest // KEYS, (highest + KEYS - 1) // KEYS
    # from here to plain_stop every row sees all
    plain = tl.minimum((lowest_key(run, newest, WINDOW) + KEYS - 1) // KEYS, stop)
    plain_stop = tl.maximum(plain, end_key(oldest, run_end, CAUSAL, WINDOW) // KEYS)
    plane = layer * KV_HEADS + head
    if TURNED:
        turned = head.to(tl.int64) * context * SIZE
        keys, values = turned_keys + turned, turned_values + turned
    else:
        keys = cache_plane(run, WORD_KEYS, plane, WIDE)
        values = cache_plane(run, WORD_VALUES, plane, WIDE)
    d = tl.arange(0, PADDED)
    inside = mine[:, None] & (d < SIZE)[None, :]
    source = row.to(tl.int64) * q_stride + query_head * SIZE
    await_inputs()
    query = tl.load(q + source[:, None] + d[None, :], mask=inside, other=0.0) * scale
    query = query.to(keys.dtype.element_ty)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mixed = tl.zeros((TILE, PADDED), tl.float32)
    for block in range(plain, plain_stop):
        top, total, mixed = _step(keys, values, query, top, total, mixed, block * KEYS, low, end, lowest, highest,
                                  SIZE, PADDED, KEYS, False, WIDE)  # fmt: skip
    head_blocks = plain - begin
    for index in range(head_blocks + stop - plain_stop):
        block = tl.where(index < head_blocks, begin + index, plain_stop + index - head_blocks)
        top, total, mixed = _step(keys, values, query, top, total, mixed, block * KEYS, low, end, lowest, highest,
                                  SIZE, PADDED, KEYS, True, WIDE)  # fmt: skip
    mixed = mixed / total[:, None]
    if GATED:
        source = row.to(tl.int64) * gate_stride + (2 * query_head + 1) * SIZE
        g = tl.load(gate + source[:, None] + d[None, :], mask=inside, other=0.0)
        mixed = mixed / (1.0 + tl.exp(-g))
    target = row.to(tl.int64) * out_stride + query_head * SIZE
    tl.store(out + target[:, None] + d[None, :], mixed, mask=inside)


def _record_turned(
    recorder: CudaRecorder, shape: Heads, params: Buffer, context: int, first_row: int, of_rows: int
) -> tuple[Any, Any]:
    """What the rows see of a q8_0 cache as float16 [kv head][context][head size]: keys, values."""
    size = shape.kv_heads * context * shape.head_size
    keys, values = (
        recorder.scratch(name, size, torch.float16) for name in ("turned keys", "turned values")
    )
    recorder.launch(
        turn_kernel, (-(-context // 32), shape.kv_heads),
        params.array, keys, values, recorder.rows, shape.layer, context, first_row, of_rows,
        KV_HEADS=shape.kv_heads, SIZE=shape.head_size, PADDED=power_of_two(shape.head_size), CAUSAL=shape.causal,
        WINDOW=shape.window, num_warps=4, overlap=True,
    )  # fmt: skip
    return keys, values


def record_wide(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, gate: Buffer | None, out: Activation, context: int,
    first_row: int, of_rows: int,
) -> None:  # fmt: skip
    group, wide, rows = shape.heads // shape.kv_heads, recorder.cache_format == "f32", recorder.rows
    turned = recorder.cache_format == "q8_0"
    keys, values = q.array, q.array
    if turned:
        context = -(-context // 32) * 32
        keys, values = _record_turned(recorder, shape, params, context, first_row, of_rows)
    tile = FLOAT32_TILE if wide else TILE
    if not wide and -(-rows * group // tile) * shape.kv_heads < recorder.owner.sms:
        tile //= 2  # more programs
    constants: dict[str, Any] = {
        "KV_HEADS": shape.kv_heads, "GROUP": group, "SIZE": shape.head_size, "PADDED": power_of_two(shape.head_size),
        "CAUSAL": shape.causal, "WINDOW": shape.window, "GATED": gate is not None, "WIDE": wide, "TURNED": turned,
        "TILE": tile, "KEYS": FLOAT32_KEYS if wide else KEYS_AT_ONCE,
    }  # fmt: skip
    recorder.launch(
        wide_kernel, (-(-rows * group // tile), shape.kv_heads),
        keys, values, context, q.array, stride_of(q.array), params.array,
        gate.array if gate else q.array, stride_of(gate.array) if gate else 0, out.f32.array, stride_of(out.f32.array),
        rows, shape.layer, first_row, of_rows, shape.head_size**-0.5 * LOG2_E,
        num_warps=4 if tile < TILE else WARPS, num_stages=1 if wide else STAGES, overlap=True, **constants,
    )  # fmt: skip
