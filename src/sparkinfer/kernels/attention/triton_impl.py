"""Triton form of `attention` for few rows: partial results per program and kv head, then a merge.

Positions come in units of UNIT; unit u belongs to program u modulo the number of programs of a kv head, which is fixed
for a machine. A program takes its units in order, with all rows and query heads of the kv head as the columns of a
product keys x queries^T. A column's bits depend on its own query alone: a unit that it does not see multiplies by one
and adds zero, and sums over keys or dimensions take the same steps whatever the number of columns (the benchmark of the
mixers checks it on the machine; a float32 cache, whose products are none of the tensor cores, keeps to one number).
Queries and weights go through the tensor cores as two float16 parts each, which keeps about 21 bits of them.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.attention.triton_masks import LOG2_E, end_key, lowest_key
from sparkinfer.kernels.attention.triton_wide import record_wide
from sparkinfer.kernels.shapes import Heads
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    WORD_KEYS,
    WORD_POSITION,
    WORD_VALUES,
    cache_plane,
    power_of_two,
    q8_args,
    store_int8,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import INTERPRETED, await_inputs, release_next

UNIT = 64  # positions; divides kernels.attention.SPLIT
NARROW, COLUMNS = 32, 64  # queries of a tile
SPLIT_WARPS, SPLIT_STAGES = 4, 2
LINE = 128  # bytes that come together from memory


@triton.jit
def _queries(q, q_stride, rows, head, tile, scale, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    """Query tile [COLUMNS, PADDED] of one kv head, scaled; column c is head c % GROUP of row c // GROUP."""
    c = tile * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, PADDED)
    row = c // GROUP
    at = row * q_stride + (head * GROUP + c % GROUP) * SIZE
    inside = (row < rows)[:, None] & (d < SIZE)[None, :]
    return tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0) * scale


@triton.jit
def _high_part(x, WIDE: tl.constexpr):
    if WIDE:
        return x
    else:
        return x.to(tl.float16)


@triton.jit
def _low_part(x, high):
    return (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _product(left, right, right_low, total, WIDE: tl.constexpr):
    """left x right + total with right in two parts (one, for a float32 cache)."""
    if WIDE:
        return tl.dot(left, right, total, input_precision="ieee")
    else:
        total = tl.dot(left, right, total)
        return tl.dot(left, right_low, total)


@triton.jit
def _weigh(keys, values, query, query_low, top, total, mixed, low, end, start, WIDE: tl.constexpr, UNIT: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    """UNIT more keys from position `start` on: the running maximum, sum of weights [COLUMNS] and weighted values."""
    scores = tl.zeros((UNIT, COLUMNS), tl.float32)
    scores = _product(keys, query, query_low, scores, WIDE)
    at = start + tl.arange(0, UNIT)
    seen = (at[:, None] >= low[None, :]) & (at[:, None] < end[None, :])
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - base)
    weight = tl.exp2(scores - base[None, :])
    total = tl.fma(total, shrink, tl.sum(weight, 0))
    high = _high_part(weight, WIDE)
    mixed = _product(tl.trans(values), high, _low_part(weight, high), mixed * shrink[None, :], WIDE)
    return higher, total, mixed


@triton.jit
def _fetch(cache, start, end, SIZE: tl.constexpr, UNIT: tl.constexpr, LINE: tl.constexpr):
    """Ask for the unit at `start` to come to the chip's cache; positions from `end` on are no one's."""
    if not INTERPRETED:
        ITEMS: tl.constexpr = LINE * 8 // cache.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.next_power_of_2((SIZE + ITEMS - 1) // ITEMS)
        at = start + tl.arange(0, UNIT)
        at = tl.where(at < end, at, start)
        offset = (
            at.to(tl.int64)[:, None] * SIZE
            + tl.minimum(tl.arange(0, LINES) * ITEMS, SIZE - 1)[None, :]
        )
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(cache + offset).to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "layer", "first_row", "of_rows", "programs"])
def split_kernel(
    q, q_stride, run, partial, sums, rows, layer, first_row, of_rows, programs, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program's units of one kv head for one tile of queries."""
    release_next()
    program, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    query = position + first_row  # of the first row
    lowest = lowest_key(run, query, WINDOW)
    highest = end_key(query + rows - 1, position + of_rows, CAUSAL, WINDOW)
    first = lowest // UNIT
    first += (program + programs - first % programs) % programs
    units = (highest + UNIT - 1) // UNIT
    plane = layer * KV_HEADS + head
    keys = cache_plane(run, WORD_KEYS, plane, WIDE)
    values = cache_plane(run, WORD_VALUES, plane, WIDE)
    if first < units:
        _fetch(keys, first * UNIT, highest, SIZE, UNIT, LINE)
        _fetch(values, first * UNIT, highest, SIZE, UNIT, LINE)
    await_inputs()
    if first < units:
        d = tl.arange(0, PADDED)
        within = (d < SIZE)[None, :]
        inner = tl.arange(0, UNIT)[:, None] * SIZE + d[None, :]
        x = _queries(q, q_stride, rows, head, tile, scale, GROUP, SIZE, PADDED, COLUMNS)
        high = _high_part(x, WIDE)
        q_high, q_low = tl.trans(high), tl.trans(_low_part(x, high))
        c = tile * COLUMNS + tl.arange(0, COLUMNS)
        stands = query + c // GROUP
        low = lowest_key(run, stands, WINDOW)
        end = end_key(stands, position + of_rows, CAUSAL, WINDOW)
        top = tl.full((COLUMNS,), float("-inf"), tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        mixed = tl.zeros((PADDED, COLUMNS), tl.float32)
        for unit in range(first, units, programs):
            start = unit * UNIT + lowest * 0  # a tensor, under the interpreter too
            at = start + tl.arange(0, UNIT)
            there = ((at >= lowest) & (at < highest))[:, None] & within
            skipped = start.to(tl.int64) * SIZE
            key = tl.load(keys + skipped + inner, mask=there, other=0.0)
            value = tl.load(values + skipped + inner, mask=there, other=0.0)
            top, total, mixed = _weigh(
                key, value, q_high, q_low, top, total, mixed, low, end, start, WIDE, UNIT, COLUMNS
            )
        row = c // GROUP
        at = (row * KV_HEADS * GROUP + head * GROUP + c % GROUP) * programs + program
        mine = row < rows
        target = partial + at.to(tl.int64)[None, :] * PADDED + d[:, None]
        tl.store(target, mixed, mask=mine[None, :] & (d >= 0)[:, None])
        tl.store(sums + 2 * at, top, mask=mine)
        tl.store(sums + 2 * at + 1, total, mask=mine)


@triton.jit(do_not_specialize=["first_row", "of_rows", "programs"])
def merge_kernel(
    partial, sums, run, gate, gate_stride, out, out_stride, q8, q8_stride, first_row, of_rows, programs,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    GATED: tl.constexpr, QUANTISED: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """32 columns of one row, in two halves of 16: a half never crosses a head. PARTS: programs, padded."""
    release_next()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    query = position + first_row + tl.program_id(0)
    first = lowest_key(run, query, WINDOW) // UNIT
    units = (end_key(query, position + of_rows, CAUSAL, WINDOW) + UNIT - 1) // UNIT - first
    half = tl.program_id(1) * 32 + tl.arange(0, 2) * 16
    within = half < HEADS * SIZE
    program = tl.arange(0, PARTS)
    turn = (program + programs - first % programs) % programs  # of the program in the row's units
    used = ((program < programs) & (turn < units))[:, None] & within[None, :]
    entry = ((row * HEADS + half // SIZE) * programs)[None, :] + program[:, None]
    column = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
    inside = column < HEADS * SIZE
    await_inputs()
    tops = tl.load(sums + 2 * entry, mask=used, other=float("-inf"))
    totals = tl.load(sums + 2 * entry + 1, mask=used, other=0.0)
    source = (entry * PADDED + (half % SIZE)[None, :])[:, :, None] + tl.arange(0, 16)[None, None, :]
    values = tl.load(partial + source, mask=used[:, :, None], other=0.0)
    if GATED:
        place = row * gate_stride + (column // SIZE * 2 + 1) * SIZE + column % SIZE
        g = tl.load(gate + place, mask=inside, other=0.0)
    top = tl.max(tops, 0)
    weight = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(weight * totals, 0)
    mixed = tl.sum(weight[:, :, None] * values, 0)
    y = tl.reshape(tl.div_rn(mixed, tl.broadcast_to(total[:, None], (2, 16))), (1, 32))
    if GATED:
        y = tl.div_rn(y, 1.0 + tl.exp(-g))
    tl.store(out + row * out_stride + column, y, mask=inside)
    if QUANTISED:
        store_int8(q8 + row * q8_stride, y, column, HEADS * SIZE, inside)


def _record_few(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, gate: Buffer | None, out: Activation, context: int,
    first_row: int, of_rows: int,
) -> None:  # fmt: skip
    group, padded = shape.heads // shape.kv_heads, power_of_two(shape.head_size)
    programs = -(-recorder.owner.sms // shape.kv_heads)
    results = recorder.row_block * shape.heads * programs
    partial = recorder.scratch("attention", results * padded)
    sums = recorder.scratch("attention sums", 2 * results)
    queries = recorder.row_block * group
    columns = NARROW if queries <= NARROW or recorder.owner.wide_cache else COLUMNS
    common: dict[str, Any] = {
        "SIZE": shape.head_size, "PADDED": padded, "CAUSAL": shape.causal, "WINDOW": shape.window, "UNIT": UNIT,
    }  # fmt: skip
    grid = (min(programs, -(-context // UNIT)), shape.kv_heads, -(-queries // columns))
    recorder.launch(
        split_kernel, grid,
        q.array, stride_of(q.array), params.array, partial, sums, recorder.rows, shape.layer, first_row, of_rows,
        programs, shape.head_size**-0.5 * LOG2_E,
        KV_HEADS=shape.kv_heads, GROUP=group, COLUMNS=columns, WIDE=recorder.owner.wide_cache, LINE=LINE,
        num_warps=SPLIT_WARPS, num_stages=SPLIT_STAGES, overlap=True, **common, **EXACT,
    )  # fmt: skip
    q8, q8_stride = q8_args(out)
    width = shape.heads * shape.head_size
    recorder.launch(
        merge_kernel, (recorder.rows, -(-width // 32)),
        partial, sums, params.array, gate.array if gate else q.array, stride_of(gate.array) if gate else 0,
        out.f32.array, stride_of(out.f32.array), q8, q8_stride, first_row, of_rows, programs,
        HEADS=shape.heads, GATED=gate is not None, QUANTISED=out.q8 is not None, PARTS=power_of_two(programs),
        overlap=True, **common, **EXACT,
    )  # fmt: skip


def record(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, gate: Buffer | None, out: Activation, context: int,
    first_row: int, of_rows: int,
) -> None:  # fmt: skip
    if recorder.wide:
        record_wide(recorder, q, shape, params, gate, out, first_row, of_rows)
    else:
        _record_few(recorder, q, shape, params, gate, out, context, first_row, of_rows)
