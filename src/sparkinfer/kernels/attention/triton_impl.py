"""Triton form of `attention` for few rows: partial results per program and kv head, then a merge.

Positions come in units of UNIT; unit u belongs to program u modulo the number of programs of a kv head, which is fixed
for a machine. A program takes its units in order, with a tile of rows and query heads of the kv head as the columns of
a product keys x queries^T. Queries and weights go through the tensor cores as two float16 parts each, which keeps about
21 bits of them. A column's bits depend on its own query alone: a unit that it does not see multiplies by one and adds
zero, and in a tile of 8 columns it has the same matrix instructions (of 64 x 16, only narrower on the queries' side),
the same sums in one thread and the same tree over threads as in one of 16.

Keys are folded: 32 keys are 64 rows of half a head, as many as a matrix instruction of Hopper takes, and a part of a
query is two columns, one for each half. Which key is where keeps all that is added of a score in one thread.

A multiprocessor has one program with five units on their way. Before a program awaits the launch before it, it asks for
its first units (FIRST) to come to the chip's cache.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.attention.triton_masks import LOG2_E, end_key, lowest_key
from sparkinfer.kernels.attention.triton_q8 import record_split_q8
from sparkinfer.kernels.attention.triton_split import (
    ask,
    in_turn,
    low_part,
    partial_results,
    program_units,
    result_place,
    weigh,
)
from sparkinfer.kernels.attention.triton_wide import record_wide
from sparkinfer.kernels.shapes import Heads
from sparkinfer.kernels.triton_cache import has_units, q8_plane, read_q8
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

UNIT = 32  # positions (they divide kernels.attention.SPLIT)
SPLIT_WARPS = 4
FIRST = 3  # units of a program that are asked for ahead
FEW_QUERIES = 8  # of a kv head: no more than these have the narrow tile
FEW = 8, 6  # columns of a tile, stages of its loads
MANY = 16, 5
PLAIN = 16, 3  # where the head is too small for folded keys, or the cache has float32
FOLDS = 64  # head size from which keys are folded
MERGE_COLUMNS, MERGE_WARPS = 32, 2  # columns of a program
MERGE_PARTS = 128  # partial results that it takes at once
MERGE_FEW = 16  # .. where there are no more


@triton.jit
def _queries(q, q_stride, rows, head, tile, scale, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
             COLUMNS: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr):  # fmt: skip
    """Query tile of one kv head, scaled; column c is head c % GROUP of row c // GROUP. float32 [PADDED, COLUMNS] for a
    float32 cache, else float16: [PADDED, (column, part)], or folded [PADDED / 2, (part, column, half of the head)].
    """
    TIMES: tl.constexpr = 1 if WIDE else 4 if FOLD else 2
    LENGTH: tl.constexpr = PADDED // 2 if FOLD else PADDED
    i = tl.arange(0, TIMES * COLUMNS)
    d = tl.arange(0, LENGTH)[None, :]
    if FOLD:
        c, is_high = i // 2 % COLUMNS, i < 2 * COLUMNS
        d = d + (i % 2 * LENGTH)[:, None]
    else:
        c, is_high = i // (2 if TIMES == 2 else 1), i % 2 == 0
    c += tile * COLUMNS
    row = c // GROUP
    at = row * q_stride + (head * GROUP + c % GROUP) * SIZE
    inside = (row < rows)[:, None] & (d < SIZE)
    x = tl.load(q + at[:, None] + d, mask=inside, other=0.0) * scale
    if WIDE:
        return tl.trans(x)
    else:
        high = x.to(tl.float16)
        is_high = tl.broadcast_to(is_high[:, None], high.shape)
        return tl.trans(tl.where(is_high, high, low_part(x, high)))


@triton.jit
def _scores(
    keys, query, WIDE: tl.constexpr, FOLD: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr
):
    """keys x queries^T [UNIT, COLUMNS]."""
    if WIDE:
        return tl.dot(keys, query, tl.zeros((UNIT, COLUMNS), tl.float32), input_precision="ieee")
    elif FOLD:
        parts = tl.dot(keys, query, tl.zeros((2 * UNIT, 4 * COLUMNS), tl.float32))
        first, second = tl.split(tl.reshape(parts, (UNIT // 8, 2, 8, 2, COLUMNS, 2)))
        half = tl.broadcast_to(tl.arange(0, 2)[None, :, None, None, None], first.shape)
        both = tl.sum(tl.where(half == 0, first, second), 1)
        return tl.reshape(tl.sum(both, 2), (UNIT, COLUMNS))
    else:
        parts = tl.dot(keys, query, tl.zeros((UNIT, 2 * COLUMNS), tl.float32))
        return tl.sum(tl.reshape(parts, (UNIT, COLUMNS, 2)), 2)


@triton.jit
def _mix(
    mixed, shrink, weight, values, WIDE: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr
):
    """Weighted values, [PADDED, COLUMNS] or, from weights in two parts, [PADDED, (column, part)]."""
    if WIDE:
        return tl.dot(tl.trans(values), weight, mixed * shrink, input_precision="ieee")
    else:
        high = weight.to(tl.float16)
        parts = in_turn(high, low_part(weight, high), UNIT, COLUMNS)
        return tl.dot(tl.trans(values), parts, mixed * in_turn(shrink, shrink, 1, COLUMNS))


@triton.jit
def _fetch(cache, start, end, SIZE: tl.constexpr, UNIT: tl.constexpr):
    """Ask for the unit at `start` < `end` to come to the chip's cache; positions from `end` on are no one's."""
    if not INTERPRETED:
        count = tl.minimum(end - start, UNIT) * (
            SIZE * cache.dtype.element_ty.primitive_bitwidth // 8
        )
        ask(cache + start.to(tl.int64) * SIZE, count)


@triton.jit
def _read(cache, scales, start, place, element, there, SIZE: tl.constexpr, CODES: tl.constexpr):
    """Numbers `element` of the positions start + place, as a product takes them."""
    numbers = tl.load(
        cache + start.to(tl.int64) * SIZE + (place[:, None] * SIZE + element), mask=there, other=0
    )
    if CODES:
        at = (start + place)[:, None] * (SIZE // 32) + element // 32
        numbers = read_q8(numbers, tl.load(scales + at, mask=there, other=0.0))
    return numbers


@triton.jit(do_not_specialize=["rows", "layer", "first_row", "of_rows"])
def split_kernel(
    q, q_stride, run, partial, sums, rows, layer, first_row, of_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
    PROGRAMS: tl.constexpr, FIRST: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """One program's units of one kv head for one tile of queries. PROGRAMS of a kv head: a power of two."""
    release_next()
    tile, program, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position, query, lowest, highest, first, units = program_units(
        run, program, rows, first_row, of_rows, CAUSAL, WINDOW, UNIT, PROGRAMS
    )
    plane = layer * KV_HEADS + head
    if CODES:
        keys, key_scales = q8_plane(run, WORD_KEYS, plane)
        values, value_scales = q8_plane(run, WORD_VALUES, plane)
    else:
        keys = cache_plane(run, WORD_KEYS, plane, WIDE)
        values = cache_plane(run, WORD_VALUES, plane, WIDE)
        key_scales, value_scales = keys, values  # none
    asked = tl.where(tile == 0, units, 0)  # tiles share what comes
    for turn in tl.static_range(FIRST):
        unit = first + turn * PROGRAMS
        if unit < asked:
            _fetch(keys, unit * UNIT, highest, SIZE, UNIT)
            _fetch(values, unit * UNIT, highest, SIZE, UNIT)
    await_inputs()
    if first < units:
        d = tl.arange(0, PADDED)
        place = tl.arange(0, UNIT)
        if FOLD:  # of a warp's eight keys the first halves, then the second halves: sums of both stay in a thread
            HALF: tl.constexpr = PADDED // 2
            r = tl.arange(0, 2 * UNIT)
            key_place, element = (
                r // 16 * 8 + r % 8,
                (r // 8 % 2 * HALF)[:, None] + tl.arange(0, HALF)[None, :],
            )
        else:
            key_place, element = place, d[None, :]
        within, key_within = (d < SIZE)[None, :], element < SIZE
        x = _queries(q, q_stride, rows, head, tile, scale, GROUP, SIZE, PADDED, COLUMNS, WIDE, FOLD)
        c = tile * COLUMNS + tl.arange(0, COLUMNS)
        stands = query + c // GROUP
        low = lowest_key(run, stands, WINDOW)
        end = end_key(stands, position + of_rows, CAUSAL, WINDOW)
        top = tl.full((COLUMNS,), float("-inf"), tl.float32)
        total = tl.zeros((UNIT, COLUMNS), tl.float32)
        mixed = tl.zeros((PADDED, COLUMNS if WIDE else 2 * COLUMNS), tl.float32)
        for unit in range(first, units, PROGRAMS):
            start = unit * UNIT + lowest * 0  # a tensor, under the interpreter too
            at = start + key_place
            there = ((at >= lowest) & (at < highest))[:, None] & key_within
            key = _read(keys, key_scales, start, key_place, element, there, SIZE, CODES)
            at = start + place
            there = ((at >= lowest) & (at < highest))[:, None] & within
            value = _read(values, value_scales, start, place, d[None, :], there, SIZE, CODES)
            scores = _scores(key, x, WIDE, FOLD, UNIT, COLUMNS)
            top, shrink, weight, total = weigh(scores, at, low, end, top, total)
            mixed = _mix(mixed, shrink, weight, value, WIDE, UNIT, COLUMNS)
        total = tl.sum(total, 0)
        if not WIDE:
            mixed = tl.sum(tl.reshape(mixed, (PADDED, COLUMNS, 2)), 2)
        at = result_place(c, program, head, KV_HEADS, GROUP, PROGRAMS)
        mine = c // GROUP < rows
        target = partial + at.to(tl.int64)[None, :] * PADDED + d[:, None]
        tl.store(target, mixed, mask=mine[None, :] & (d >= 0)[:, None])
        tl.store(sums + 2 * at, top, mask=mine)
        tl.store(sums + 2 * at + 1, total, mask=mine)


@triton.jit
def _merged(partial, sums, entry, inner, within, first, used, PADDED: tl.constexpr, PROGRAMS: tl.constexpr,
            PARTS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Sums of weights [PIECES] and weighted values [PIECES, PIECE] of `used` partial results in the order of their
    units, PARTS at a time.
    """
    top = tl.full((PIECES,), float("-inf"), tl.float32)
    total = tl.zeros((PIECES,), tl.float32)
    mixed = tl.zeros((PIECES, PIECE), tl.float32)
    for begin in range(0, used, PARTS):
        turn = begin + first * 0 + tl.arange(0, PARTS)
        there = (turn < used)[:, None] & within[None, :]
        at = entry[None, :] + ((first + turn) % PROGRAMS)[:, None]
        tops = tl.load(sums + 2 * at, mask=there, other=float("-inf"))
        totals = tl.load(sums + 2 * at + 1, mask=there, other=0.0)
        source = (at * PADDED)[:, :, None] + inner[None, :, :]
        values = tl.load(partial + source, mask=there[:, :, None], other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(tops - base[None, :])
        total = tl.fma(total, shrink, tl.sum(weight * totals, 0))
        scaled = mixed * shrink[:, None]
        mixed = scaled + tl.sum(weight[:, :, None] * values, 0)
        top = higher
    return total, mixed


@triton.jit(do_not_specialize=["first_row", "of_rows"])
def merge_kernel(
    partial, sums, run, gate, gate_stride, out, out_stride, q8, q8_stride, first_row, of_rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    GATED: tl.constexpr, QUANTISED: tl.constexpr, UNIT: tl.constexpr, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one row, as pieces that never cross a head; PARTS partial results at a time, in the order of the row's
    units, of which the first PROGRAMS begin one each; FEW at a time where that is all, which saves the instructions of
    what is not there. A row's steps depend on its own position alone.
    """
    release_next()
    PIECE: tl.constexpr = COLUMNS if SIZE % COLUMNS == 0 else 16
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    query = position + first_row + tl.program_id(0)
    first = lowest_key(run, query, WINDOW) // UNIT
    units = (end_key(query, position + of_rows, CAUSAL, WINDOW) + UNIT - 1) // UNIT - first
    used = tl.minimum(units, PROGRAMS)
    piece = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS // PIECE) * PIECE
    within = piece < HEADS * SIZE
    entry = (row * HEADS + piece // SIZE) * PROGRAMS
    column = tl.program_id(1) * COLUMNS + tl.reshape(tl.arange(0, COLUMNS), (COLUMNS // 32, 32))
    inside = column < HEADS * SIZE
    inner = (piece % SIZE)[:, None] + tl.arange(0, PIECE)[None, :]
    await_inputs()
    if GATED:
        place = row * gate_stride + (column // SIZE * 2 + 1) * SIZE + column % SIZE
        g = tl.load(gate + place, mask=inside, other=0.0)
    if used <= FEW:
        total, mixed = _merged(
            partial, sums, entry, inner, within, first, used, PADDED, PROGRAMS, FEW, COLUMNS // PIECE, PIECE
        )  # fmt: skip
    else:
        total, mixed = _merged(
            partial, sums, entry, inner, within, first, used, PADDED, PROGRAMS, PARTS, COLUMNS // PIECE, PIECE
        )  # fmt: skip
    y = tl.div_rn(mixed, tl.broadcast_to(total[:, None], (COLUMNS // PIECE, PIECE)))
    y = tl.reshape(y, (COLUMNS // 32, 32))
    if GATED:
        y = tl.div_rn(y, 1.0 + tl.exp(-g))
    tl.store(out + row * out_stride + column, y, mask=inside)
    if QUANTISED:
        store_int8(q8 + row * q8_stride, y, column, HEADS * SIZE, inside)


def _record_split(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, context: int, first_row: int, of_rows: int,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    """Record the partial results: where they and their sums are, and what the merge must know of them."""
    group, padded = shape.heads // shape.kv_heads, power_of_two(shape.head_size)
    programs, partial, sums = partial_results(recorder, shape, padded)
    wide, codes = recorder.cache_format == "f32", recorder.cache_format == "q8_0"
    common: dict[str, Any] = {
        "SIZE": shape.head_size, "PADDED": padded, "CAUSAL": shape.causal, "WINDOW": shape.window, "UNIT": UNIT,
        "PROGRAMS": programs,
    }  # fmt: skip
    folds = not wide and padded >= FOLDS
    queries = recorder.rows * group
    columns, stages = PLAIN if not folds else FEW if queries <= FEW_QUERIES else MANY
    tiles = -(-queries // columns)  # side by side: they share what comes from memory
    grid = (tiles, min(programs, -(-context // UNIT)), shape.kv_heads)
    recorder.launch(
        split_kernel, grid,
        q.array, stride_of(q.array), params.array, partial, sums, recorder.rows, shape.layer, first_row, of_rows,
        shape.head_size**-0.5 * LOG2_E,
        KV_HEADS=shape.kv_heads, GROUP=group, COLUMNS=columns, WIDE=wide, FOLD=folds, FIRST=FIRST, CODES=codes,
        num_warps=SPLIT_WARPS, num_stages=1 if wide else stages, overlap=True, **common, **EXACT,
    )  # fmt: skip
    return partial, sums, common


def _record_few(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, gate: Buffer | None, out: Activation, context: int,
    first_row: int, of_rows: int,
) -> None:  # fmt: skip
    in_units = recorder.cache_format == "q8_0" and has_units(shape.head_size)
    split = record_split_q8 if in_units else _record_split
    partial, sums, common = split(recorder, q, shape, params, context, first_row, of_rows)
    programs = common["PROGRAMS"]
    q8, q8_stride = q8_args(out)
    if out.q8 is not None:
        recorder.blocked.add(out.f32.address)
    width = shape.heads * shape.head_size
    recorder.launch(
        merge_kernel, (recorder.rows, -(-width // MERGE_COLUMNS)),
        partial, sums, params.array, gate.array if gate else q.array, stride_of(gate.array) if gate else 0,
        out.f32.array, stride_of(out.f32.array), q8, q8_stride, first_row, of_rows,
        HEADS=shape.heads, GATED=gate is not None, QUANTISED=out.q8 is not None, COLUMNS=MERGE_COLUMNS,
        PARTS=min(programs, MERGE_PARTS), FEW=min(programs, MERGE_FEW),
        num_warps=MERGE_WARPS, overlap=True, **common, **EXACT,
    )  # fmt: skip


def record(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, gate: Buffer | None, out: Activation, context: int,
    first_row: int, of_rows: int,
) -> None:  # fmt: skip
    if recorder.wide:
        record_wide(recorder, q, shape, params, gate, out, context, first_row, of_rows)
    else:
        _record_few(recorder, q, shape, params, gate, out, context, first_row, of_rows)
