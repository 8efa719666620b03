"""Triton form of `attention` for few rows: partial results per unit of positions and kv head, then a merge.

Units lie at absolute positions: FINE of them up to COARSE_FROM, then COARSE (a multiple of FINE). A program keeps a
unit's keys and values to itself for all rows and query heads of the kv head: they are the columns of a product
keys x queries^T, and a column's bits depend on its own query alone: sums over keys or dimensions take the same steps
whatever the number of columns (the benchmark of the mixers checks it on the machine; a float32 cache, whose products
are none of the tensor cores, keeps to one number). Queries and weights go through
the tensor cores as two float16 parts each, which keeps about 21 bits of them.
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
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

FINE, COARSE, COARSE_FROM = (
    64,
    256,
    8192,
)  # divide kernels.attention.SPLIT, or begin after every bounded cache
NARROW, COLUMNS = 32, 64  # queries of a tile
MERGED = 64  # partial results that a step of the merge adds
SPLIT_WARPS, SPLIT_STAGES, SPLIT_PROGRAMS = 4, 2, 1  # programs of a multiprocessor

_FINE, _COARSE, _COARSE_FROM = tl.constexpr(FINE), tl.constexpr(COARSE), tl.constexpr(COARSE_FROM)


def units(positions: int) -> int:
    """Units that hold this many positions."""
    fine = -(-min(positions, COARSE_FROM) // FINE)
    return fine + -(-max(positions - COARSE_FROM, 0) // COARSE)


@triton.jit
def _unit_of(position):
    return (
        tl.minimum(position, _COARSE_FROM) // _FINE
        + tl.maximum(position - _COARSE_FROM, 0) // _COARSE
    )


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
def _weigh(keys, values, query, query_low, top, total, mixed, low, end, start, WIDE: tl.constexpr, FINE: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    """FINE more keys from position `start` on: the running maximum, sum of weights [COLUMNS] and weighted values."""
    scores = tl.zeros((FINE, COLUMNS), tl.float32)
    scores = _product(keys, query, query_low, scores, WIDE)
    at = start + tl.arange(0, FINE)
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
def _keep(partial, tops, totals, top, total, mixed, rows, head, tile, unit, units, HEADS: tl.constexpr,
          GROUP: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Write the partial results of one unit and tile."""
    c = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = c // GROUP
    at = (row * HEADS + head * GROUP + c % GROUP).to(tl.int64) * units + unit
    mine = row < rows
    d = tl.arange(0, PADDED)
    tl.store(
        partial + at[None, :] * PADDED + d[:, None], mixed, mask=mine[None, :] & (d >= 0)[:, None]
    )
    tl.store(tops + at, top, mask=mine)
    tl.store(totals + at, total, mask=mine)


@triton.jit(do_not_specialize=["rows", "layer", "first_row", "of_rows", "units"])
def split_kernel(
    q, q_stride, run, partial, tops, totals, rows, layer, first_row, of_rows, units, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th unit of one kv head for one tile of queries."""
    release_next()
    program, programs = tl.program_id(0), tl.num_programs(0)
    head, tile = tl.program_id(1), tl.program_id(2)
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    query = position + first_row  # of the first row
    lowest = lowest_key(run, query, WINDOW)
    highest = end_key(query + rows - 1, position + of_rows, CAUSAL, WINDOW)
    first, last = _unit_of(lowest), _unit_of(highest - 1)
    border = _COARSE_FROM // _FINE
    fine = tl.maximum(
        (tl.minimum(last + 1, border) - first - program + programs - 1) // programs, 0
    )
    many = tl.maximum((last + 1 - first - program + programs - 1) // programs, 0)
    plane = layer * KV_HEADS + head
    keys = cache_plane(run, WORD_KEYS, plane, WIDE)
    values = cache_plane(run, WORD_VALUES, plane, WIDE)
    d = tl.arange(0, PADDED)
    within = (d < SIZE)[None, :]
    inner = tl.arange(0, _FINE)[:, None] * SIZE + d[None, :]
    await_inputs()
    x = _queries(q, q_stride, rows, head, tile, scale, GROUP, SIZE, PADDED, COLUMNS)
    high = _high_part(x, WIDE)
    q_high, q_low = tl.trans(high), tl.trans(_low_part(x, high))
    stands = query + (tile * COLUMNS + tl.arange(0, COLUMNS)) // GROUP
    low, end = lowest_key(run, stands, WINDOW), end_key(stands, position + of_rows, CAUSAL, WINDOW)
    top = tl.full((COLUMNS,), float("-inf"), tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    mixed = tl.zeros((PADDED, COLUMNS), tl.float32)
    PARTS: tl.constexpr = _COARSE // _FINE
    for step in range(fine + (many - fine) * PARTS):
        later = tl.maximum(step - fine, 0)
        part = later % PARTS
        unit = first + program + (tl.minimum(step, fine) + later // PARTS) * programs
        start = (
            tl.minimum(unit, border) * _FINE + tl.maximum(unit - border, 0) * _COARSE + part * _FINE
        )
        at = start + tl.arange(0, _FINE)
        there = ((at >= lowest) & (at < highest))[:, None] & within
        skipped = start.to(tl.int64) * SIZE
        key = tl.load(keys + skipped + inner, mask=there, other=0.0)
        value = tl.load(values + skipped + inner, mask=there, other=0.0)
        top, total, mixed = _weigh(
            key, value, q_high, q_low, top, total, mixed, low, end, start, WIDE, _FINE, COLUMNS
        )
        if (step < fine) | (part == PARTS - 1):
            _keep(partial, tops, totals, top, total, mixed, rows, head, tile, unit, units, KV_HEADS * GROUP, GROUP,
                  PADDED, COLUMNS)  # fmt: skip
            top = tl.full((COLUMNS,), float("-inf"), tl.float32)
            total = tl.zeros((COLUMNS,), tl.float32)
            mixed = tl.zeros((PADDED, COLUMNS), tl.float32)


@triton.jit(do_not_specialize=["first_row", "of_rows", "units"])
def merge_kernel(
    partial, tops, totals, run, gate, gate_stride, out, out_stride, q8, q8_stride, first_row, of_rows, units,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    GATED: tl.constexpr, QUANTISED: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """32 columns of one row, in two halves of 16: a half never crosses a head."""
    release_next()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    query = position + first_row + tl.program_id(0)
    first = _unit_of(lowest_key(run, query, WINDOW))
    last = _unit_of(end_key(query, position + of_rows, CAUSAL, WINDOW) - 1)
    half = tl.program_id(1) * 32 + tl.arange(0, 2) * 16
    within = half < HEADS * SIZE
    head = half // SIZE
    source = (row * HEADS + head) * units
    lane = tl.arange(0, 16)
    at = half % SIZE
    top = tl.full((2,), float("-inf"), tl.float32)
    total = tl.zeros((2,), tl.float32)
    mixed = tl.zeros((2, 16), tl.float32)
    await_inputs()
    for begin in range(first // MERGED * MERGED, last + 1, MERGED):
        unit = begin + tl.arange(0, MERGED)
        used = ((unit >= first) & (unit <= last))[:, None] & within[None, :]
        entry = source[None, :] + unit[:, None]
        tops_here = tl.load(tops + entry, mask=used, other=float("-inf"))
        totals_here = tl.load(totals + entry, mask=used, other=0.0)
        values = tl.load(
            partial + (entry * PADDED + at[None, :])[:, :, None] + lane[None, None, :],
            mask=used[:, :, None],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(tops_here, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(tops_here - base[None, :])
        total = tl.fma(total, shrink, tl.sum(weight * totals_here, 0))
        mixed = tl.fma(
            mixed, tl.broadcast_to(shrink[:, None], (2, 16)), tl.sum(weight[:, :, None] * values, 0)
        )
        top = higher
    y = tl.div_rn(mixed, tl.broadcast_to(total[:, None], (2, 16)))
    y = tl.reshape(y, (1, 32))
    column = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
    inside = column < HEADS * SIZE
    if GATED:
        g = tl.load(
            gate + row * gate_stride + (column // SIZE * 2 + 1) * SIZE + column % SIZE,
            mask=inside,
            other=0.0,
        )
        y = tl.div_rn(y, 1.0 + tl.exp(-g))
    tl.store(out + row * out_stride + column, y, mask=inside)
    if QUANTISED:
        store_int8(q8 + row * q8_stride, y, column, HEADS * SIZE, inside)


def _record_few(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, gate: Buffer | None, out: Activation, context: int,
    first_row: int, of_rows: int,
) -> None:  # fmt: skip
    group, padded = shape.heads // shape.kv_heads, power_of_two(shape.head_size)
    count, rows = units(context), recorder.rows
    results = recorder.row_block * shape.heads * count
    partial = recorder.scratch("attention", results * padded)
    sums = recorder.scratch("attention sums", 2 * results)
    tops, totals = sums[:results], sums[results:]
    queries = recorder.row_block * group
    columns = NARROW if queries <= NARROW or recorder.owner.wide_cache else COLUMNS
    common: dict[str, Any] = {
        "SIZE": shape.head_size, "PADDED": padded, "CAUSAL": shape.causal, "WINDOW": shape.window,
    }  # fmt: skip
    programs = min(count, -(-SPLIT_PROGRAMS * recorder.owner.sms // shape.kv_heads))
    recorder.launch(
        split_kernel, (programs, shape.kv_heads, -(-queries // columns)),
        q.array, stride_of(q.array), params.array, partial, tops, totals, rows, shape.layer, first_row, of_rows, count,
        shape.head_size**-0.5 * LOG2_E,
        KV_HEADS=shape.kv_heads, GROUP=group, COLUMNS=columns, WIDE=recorder.owner.wide_cache,
        num_warps=SPLIT_WARPS, num_stages=SPLIT_STAGES, overlap=True, **common, **EXACT,
    )  # fmt: skip
    q8, q8_stride = q8_args(out)
    width = shape.heads * shape.head_size
    recorder.launch(
        merge_kernel, (rows, -(-width // 32)),
        partial, tops, totals, params.array, gate.array if gate else q.array, stride_of(gate.array) if gate else 0,
        out.f32.array, stride_of(out.f32.array), q8, q8_stride, first_row, of_rows, count,
        HEADS=shape.heads, GATED=gate is not None, QUANTISED=out.q8 is not None, MERGED=MERGED, overlap=True,
        **common, **EXACT,
    )  # fmt: skip


def record(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, gate: Buffer | None, out: Activation, context: int,
    first_row: int, of_rows: int,
) -> None:  # fmt: skip
    if recorder.wide:
        record_wide(recorder, q, shape, params, gate, out, first_row, of_rows)
    else:
        _record_few(recorder, q, shape, params, gate, out, context, first_row, of_rows)
