"""Triton form of `attention` for few rows over a cache of 8 bits (heads of 128 or 256).

Like triton_impl.py: units of positions dealt to a fixed number of programs, queries and weights as two float16 parts
each, then the same merge. A number read is float16(scale x code). Codes lie in the order of a matrix instruction's left
operand (kernels/triton_cache.py), so a thread loads 16 bytes at a time and decodes them in its registers: no shared
memory, no barrier. A program asks for its next unit before it computes this one.

Pinned: a column's bits depend on its own query alone: the same chain of matrix instructions whatever the width of the
tile; sums over the places of a unit are halved one step after another, in an order that no layout changes.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.attention.triton_masks import LOG2_E, end_key, lowest_key
from sparkinfer.kernels.shapes import Heads
from sparkinfer.kernels.triton_cache import q8_plane
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    WORD_KEYS,
    WORD_POSITION,
    WORD_VALUES,
    power_of_two,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import INTERPRETED, await_inputs, release_next


@triton.jit
def _pairs(words, scale):
    """Bytes (codes + 128) of words times two float16 of `scale`: two words of float16 pairs."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $2, 0x64646464, 0x4140;
        prmt.b32 b, $2, 0x64646464, 0x4342;
        sub.rn.f16x2 a, a, $4;
        sub.rn.f16x2 b, b, $4;
        mul.rn.f16x2 $0, a, $3;
        mul.rn.f16x2 $1, b, $3;
        }""",
        "=&r,=&r,r,r,r", [words, scale, 0x64806480], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _half(word):
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _slow(words, scale, SHIFT: tl.constexpr, HIGH: tl.constexpr):
    code = (words >> SHIFT & 0xFF) - 128
    return (code.to(tl.float32) * _half(scale >> (16 * HIGH)).to(tl.float32)).to(tl.float16)


@triton.jit
def halves(words, scale):
    """float16 [.., 2, 2] of words [..]: byte 2 i + j at [i, j], times half j of `scale` (broadcast to [..])."""
    if INTERPRETED:
        even = tl.join(_slow(words, scale, 0, 0), _slow(words, scale, 16, 0))
        odd = tl.join(_slow(words, scale, 8, 1), _slow(words, scale, 24, 1))
    else:
        low, high = _pairs(words, scale)
        even = tl.join(_half(low), _half(high))
        odd = tl.join(_half(low >> 16), _half(high >> 16))
    return tl.join(even, odd)


@triton.jit
def _as_words(codes):
    return tl.multiple_of(codes.to(tl.pointer_type(tl.int32), bitcast=True), 16)


@triton.jit
def load_keys(
    codes, scales, start, highest, SIZE: tl.constexpr, UNIT: tl.constexpr, EIGHT: tl.constexpr
):
    """Words and scales of UNIT keys (64 or 128) in the order of threads; EIGHT warps have two keys of 64 apart."""
    N: tl.constexpr = UNIT * SIZE // 4
    WORDS: tl.constexpr = 8 * SIZE  # of 32 positions
    i = tl.arange(0, N)
    thirty = i // WORDS
    if EIGHT:  # r, quarter, place's bit 6, rest
        thirty = i // 512 % 2 * 2 + i // (2 * WORDS)
        i = thirty * WORDS + i // 1024 % (SIZE // 64) * 512 + i % 512
        i = tl.max_contiguous(tl.multiple_of(i, 4), 4)
    there = start + thirty * 32 < highest
    words = tl.load(codes + start.to(tl.int64) * (SIZE // 4) + i, mask=there, other=0)
    i = tl.arange(0, UNIT // 64 * SIZE)
    at = i // SIZE * (2 * SIZE) + i % SIZE
    at = tl.max_contiguous(tl.multiple_of(at, SIZE // 128), SIZE // 128)
    scale = scales + start.to(tl.int64) * (SIZE // 32) + at
    first = tl.load(scale, mask=start + i // SIZE * 64 < highest, other=0.0)
    second = tl.load(scale + SIZE, mask=start + i // SIZE * 64 + 32 < highest, other=0.0)
    return words, first, second


@triton.jit
def _twice(scale, SIZE: tl.constexpr, P: tl.constexpr):
    """Scales of 32 keys out of every 64 as words of two, [P, quarter's high, 128]."""
    s = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.permute(tl.reshape(s | (s << 16), (P, 128, SIZE // 128)), (0, 2, 1))


@triton.jit
def key_halves(words, first, second, SIZE: tl.constexpr, UNIT: tl.constexpr, EIGHT: tl.constexpr):
    """float16 [UNIT, SIZE]: place 64 p + 16 w + 8 r + g has position 64 p + 32 r + 8 w + g of the unit."""
    P: tl.constexpr = UNIT // 64
    H: tl.constexpr = SIZE // 128
    s = tl.join(_twice(first, SIZE, P), _twice(second, SIZE, P))  # p, quarter's high, rest, r
    if EIGHT:
        w = tl.reshape(
            words, (2, H, 2, P, 4, 8, 4, 4)
        )  # r, quarter's high, low, p, warp, g, t, word
        s = tl.reshape(tl.permute(s, (3, 1, 0, 2)), (2, H, 1, P, 4, 8, 4, 1))
        x = halves(w, tl.broadcast_to(s, w.shape))  # .., hi, pair
        x = tl.permute(x, (3, 4, 0, 5, 1, 2, 7, 8, 6, 9))
    else:
        w = tl.reshape(words, (P, 2, H, 2, 4, 8, 4, 4))
        s = tl.reshape(tl.permute(s, (0, 3, 1, 2)), (P, 2, H, 1, 4, 8, 4, 1))
        x = halves(w, tl.broadcast_to(s, w.shape))
        x = tl.permute(x, (0, 4, 1, 5, 2, 3, 7, 8, 6, 9))
    return tl.reshape(x, (UNIT, SIZE))


@triton.jit
def key_column(k):
    """The dimension at place k of a key."""
    return (
        k // 128 * 128
        + k // 2 % 4 * 32
        + k // 64 % 2 * 16
        + k // 16 % 4 * 4
        + k // 8 % 2 * 2
        + k % 2
    )


@triton.jit
def load_values(
    codes, scales, start, highest, SIZE: tl.constexpr, UNIT: tl.constexpr, EIGHT: tl.constexpr
):
    """Words of codes, and words of two scales [UNIT / 32, threads, 4]."""
    N: tl.constexpr = UNIT * SIZE // 4
    i = tl.arange(0, N)
    there = start + i // (8 * SIZE) * 32 < highest
    words = tl.load(codes + start.to(tl.int64) * (SIZE // 4) + i, mask=there, other=0)
    THREADS: tl.constexpr = 256 if EIGHT else 128
    i = tl.arange(0, UNIT // 8 * THREADS)
    thread = i // 4 % 128
    block = thread // 4 * (SIZE // 32) // 32  # of 32 dimensions
    thirty = i // (4 * THREADS)
    at = thirty * (SIZE // 2) + block * 16 + thread % 4 * 4 + i % 4
    at = tl.max_contiguous(tl.multiple_of(at, 4), 4)
    pairs = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    scale = tl.load(
        pairs + start.to(tl.int64) * (SIZE // 64) + at, mask=start + thirty * 32 < highest, other=0
    )
    return words, scale


@triton.jit
def value_halves(words, scale, SIZE: tl.constexpr, UNIT: tl.constexpr, EIGHT: tl.constexpr):
    """float16 [SIZE, UNIT], transposed; row m is dimension `value_row(m)`, a column the place of its key."""
    P: tl.constexpr = UNIT // 64
    Y: tl.constexpr = 2 if EIGHT else 1
    if SIZE == 256:  # p, r, s high, y, warp, g, t, s low, m
        w = tl.reshape(words, (P, 2, 2, 2, 4, 8, 4, 2, 2))
        s = tl.reshape(scale, (P, 2, Y, 4, 8, 4, 2, 2))
        s = tl.reshape(tl.permute(s, (0, 1, 6, 2, 3, 4, 5, 7)), (P, 2, 2, Y, 4, 8, 4, 2, 1))
        x = halves(w, tl.broadcast_to(s, w.shape))  # .., row, pair
        # m, y, warp, row, g | p, s high, s low, r, t, pair
        x = tl.permute(x, (8, 3, 4, 9, 5, 0, 2, 7, 1, 6, 10))
    else:  # p, r, y, warp, g, t, s
        w = tl.reshape(words, (P, 2, 2, 4, 8, 4, 4))
        s = tl.reshape(scale, (P, 2, Y, 4, 8, 4, 4))
        x = halves(w, tl.broadcast_to(s, w.shape))
        x = tl.permute(x, (2, 3, 7, 4, 0, 6, 1, 5, 8))
    return tl.reshape(x, (SIZE, UNIT))


@triton.jit
def value_row(m, SIZE: tl.constexpr):
    """The dimension of row m of the transposed values."""
    e = m // 64 % 2 * (SIZE // 64) + m // 128 * 2 + m // 8 % 2
    return m // 16 % 4 * (SIZE // 4) + m % 8 * (SIZE // 32) + e


@triton.jit
def key_place(m):
    """The position of place m of a unit."""
    return m // 64 * 64 + m // 8 % 2 * 32 + m // 16 % 4 * 8 + m % 8


@triton.jit
def _ask(at, count):
    tl.inline_asm_elementwise(
        """{
        .reg .pred one;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 one, thread, 0;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""", "=r,l,r", [at.to(tl.int64), count], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def fetch(codes, scales, start, highest, SIZE: tl.constexpr, UNIT: tl.constexpr):
    """Ask for the unit at `start` < `highest` to come to the chip's cache."""
    if not INTERPRETED:
        thirties = (tl.minimum(highest - start, UNIT) + 31) // 32
        _ask(codes + start.to(tl.int64) * (SIZE // 4), thirties * (32 * SIZE))
        _ask(scales + start.to(tl.int64) * (SIZE // 32), thirties * (2 * SIZE))


@triton.jit
def _low_part(x, high):
    return (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _queries(
    q,
    q_stride,
    rows,
    head,
    tile,
    scale,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BEGIN: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Queries of a tile, scaled: float16 [SIZE, (column, part)] in the order of a key's places."""
    i = tl.arange(0, 2 * COLUMNS)
    d = key_column(BEGIN + tl.arange(0, COUNT))[None, :]
    c = tile * COLUMNS + i // 2
    row = c // GROUP
    at = row * q_stride + (head * GROUP + c % GROUP) * SIZE
    x = tl.load(q + at[:, None] + d, mask=(row < rows)[:, None] & (d >= 0), other=0.0) * scale
    high = x.to(tl.float16)
    is_high = tl.broadcast_to((i % 2 == 0)[:, None], high.shape)
    return tl.trans(tl.where(is_high, high, _low_part(x, high)))


@triton.jit
def _added(x, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the columns of [N, COLUMNS], by halves."""
    if N > 1:
        return _added(tl.sum(tl.reshape(x, (2, N // 2, COLUMNS)), 0), N // 2, COLUMNS)
    else:
        return tl.reshape(x, (COLUMNS,))


@triton.jit(do_not_specialize=["rows", "layer", "first_row", "of_rows"])
def split_q8_kernel(
    q, q_stride, run, partial, sums, rows, layer, first_row, of_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr, UNIT: tl.constexpr, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr, EIGHT: tl.constexpr,
    FIRST: tl.constexpr, EARLY: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """As `triton_impl.split_kernel`."""
    release_next()
    tile, program, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(run + WORD_POSITION).to(tl.int32)
    query = position + first_row  # of the first row
    lowest = lowest_key(run, query, WINDOW)
    highest = end_key(query + rows - 1, position + of_rows, CAUSAL, WINDOW)
    first = lowest // UNIT
    first += (program + PROGRAMS - first % PROGRAMS) % PROGRAMS
    units = (highest + UNIT - 1) // UNIT
    plane = layer * KV_HEADS + head
    keys, key_scales = q8_plane(run, WORD_KEYS, plane)
    values, value_scales = q8_plane(run, WORD_VALUES, plane)
    keys, values = _as_words(keys), _as_words(values)
    asked = tl.where(tile == 0, units, 0)  # tiles share what comes
    for turn in tl.static_range(FIRST):
        unit = first + (turn + (1 if EARLY else 0)) * PROGRAMS
        if unit < asked:
            fetch(keys, key_scales, unit * UNIT, highest, SIZE, UNIT)
            fetch(values, value_scales, unit * UNIT, highest, SIZE, UNIT)
    start = first * UNIT + lowest * 0
    if EARLY:  # what earlier steps wrote may be loaded before the launch before this one is done
        old = tl.where(start + UNIT <= position, highest, start)
        kw, ks, ks2 = load_keys(keys, key_scales, start, old, SIZE, UNIT, EIGHT)
        vw, vs = load_values(values, value_scales, start, old, SIZE, UNIT, EIGHT)
    await_inputs()
    if first < units:
        if AHEAD:
            if EARLY:
                if start + UNIT > position:
                    kw, ks, ks2 = load_keys(keys, key_scales, start, highest, SIZE, UNIT, EIGHT)
                    vw, vs = load_values(values, value_scales, start, highest, SIZE, UNIT, EIGHT)
            else:
                kw, ks, ks2 = load_keys(keys, key_scales, start, highest, SIZE, UNIT, EIGHT)
                vw, vs = load_values(values, value_scales, start, highest, SIZE, UNIT, EIGHT)
        if PIECES == 2:
            x0 = _queries(q, q_stride, rows, head, tile, scale, GROUP, SIZE, COLUMNS, 0, SIZE // 2)
            x1 = _queries(
                q, q_stride, rows, head, tile, scale, GROUP, SIZE, COLUMNS, SIZE // 2, SIZE // 2
            )
        else:
            x = _queries(q, q_stride, rows, head, tile, scale, GROUP, SIZE, COLUMNS, 0, SIZE)
        c = tile * COLUMNS + tl.arange(0, COLUMNS)
        stands = query + c // GROUP
        low = lowest_key(run, stands, WINDOW)
        end = end_key(stands, position + of_rows, CAUSAL, WINDOW)
        top = tl.full((COLUMNS,), float("-inf"), tl.float32)
        total = tl.zeros((UNIT, COLUMNS), tl.float32)
        mixed = tl.zeros((SIZE, 2 * COLUMNS), tl.float32)
        place = key_place(tl.arange(0, UNIT))
        for unit in range(first, units, PROGRAMS):
            start = unit * UNIT + lowest * 0  # a tensor, under the interpreter too
            if not AHEAD:
                kw, ks, ks2 = load_keys(keys, key_scales, start, highest, SIZE, UNIT, EIGHT)
                vw, vs = load_values(values, value_scales, start, highest, SIZE, UNIT, EIGHT)
            key = key_halves(kw, ks, ks2, SIZE, UNIT, EIGHT)
            if AHEAD:
                kw, ks, ks2 = load_keys(
                    keys, key_scales, start + PROGRAMS * UNIT, highest, SIZE, UNIT, EIGHT
                )
            if PIECES == 2:
                k0, k1 = tl.split(tl.permute(tl.reshape(key, (UNIT, 2, SIZE // 2)), (0, 2, 1)))
                parts = tl.dot(k0, x0, tl.zeros((UNIT, 2 * COLUMNS), tl.float32))
                parts = tl.dot(k1, x1, parts)
            else:
                parts = tl.dot(key, x, tl.zeros((UNIT, 2 * COLUMNS), tl.float32))
            scores = tl.sum(tl.reshape(parts, (UNIT, COLUMNS, 2)), 2)
            at = start + place
            seen = (at[:, None] >= low[None, :]) & (at[:, None] < end[None, :])
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(top - base)[None, :]
            weight = tl.exp2(scores - base[None, :])
            total = tl.fma(total, tl.broadcast_to(shrink, total.shape), weight)
            high = weight.to(tl.float16)
            both = tl.reshape(tl.join(high, _low_part(weight, high)), (UNIT, 2 * COLUMNS))
            value = value_halves(vw, vs, SIZE, UNIT, EIGHT)
            if AHEAD:
                vw, vs = load_values(
                    values, value_scales, start + PROGRAMS * UNIT, highest, SIZE, UNIT, EIGHT
                )
            shrinks = tl.reshape(tl.join(shrink, shrink), (1, 2 * COLUMNS))
            mixed = tl.dot(value, both, mixed * shrinks)
            top = higher
        total = _added(total, UNIT, COLUMNS)
        mixed = tl.sum(tl.reshape(mixed, (SIZE, COLUMNS, 2)), 2)
        row = c // GROUP
        at = (row * KV_HEADS * GROUP + head * GROUP + c % GROUP) * PROGRAMS + program
        mine = row < rows
        d = value_row(tl.arange(0, SIZE), SIZE)
        target = partial + at.to(tl.int64)[None, :] * SIZE + d[:, None]
        tl.store(target, mixed, mask=mine[None, :] & (d >= 0)[:, None])
        tl.store(sums + 2 * at, top, mask=mine)
        tl.store(sums + 2 * at + 1, total, mask=mine)


UNIT = 64  # positions
SPLIT_PROGRAMS = 2  # of a multiprocessor
FEW_QUERIES = 8
FEW, MANY = (
    (8, True, 1),
    (16, False, 2),
)  # columns of a tile, whether loads go to registers, stages where not


def record_split_q8(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, context: int, first_row: int, of_rows: int,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    """Record the partial results: where they and their sums are, and what the merge must know of them."""
    group = shape.heads // shape.kv_heads
    at_once = -(-SPLIT_PROGRAMS * recorder.owner.sms // shape.kv_heads)
    programs = power_of_two(at_once // 2 + 1)  # the largest power of two that fits
    results = recorder.row_block * shape.heads * programs
    partial = recorder.scratch("attention", results * shape.head_size)
    sums = recorder.scratch("attention sums", 2 * results)
    common: dict[str, Any] = {
        "SIZE": shape.head_size, "CAUSAL": shape.causal, "WINDOW": shape.window, "UNIT": UNIT, "PROGRAMS": programs,
    }  # fmt: skip
    queries = recorder.rows * group
    columns, ahead, stages = FEW if queries <= FEW_QUERIES else MANY
    recorder.launch(
        split_q8_kernel, (-(-queries // columns), min(programs, -(-context // UNIT)), shape.kv_heads),
        q.array, stride_of(q.array), params.array, partial, sums, recorder.rows, shape.layer, first_row, of_rows,
        shape.head_size**-0.5 * LOG2_E,
        KV_HEADS=shape.kv_heads, GROUP=group, COLUMNS=columns, AHEAD=ahead, EIGHT=False, FIRST=0, EARLY=False, PIECES=1,
        num_warps=4, num_stages=stages, overlap=True, **common, **EXACT,
    )  # fmt: skip
    return partial, sums, {**common, "PADDED": shape.head_size}
