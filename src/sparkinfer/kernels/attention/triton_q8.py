"""Triton form of `attention` for few rows over a cache of 8 bits (heads of 128 or 256).

Like triton_impl.py: units of positions dealt to a fixed number of programs, queries and weights as two float16 parts
each, then the same merge. A number read is float16(scale x code). Codes lie in the order of a matrix instruction's left
operand (kernels/triton_cache.py), so a thread decodes what it has loaded, 16 bytes at a time, in its registers and the
matrix instruction takes it from there.

Pinned: a column's bits depend on its own query alone: the same chain of matrix instructions whatever the width of the
tile, the same sums in one thread and the same tree over threads.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.attention.triton_masks import LOG2_E, end_key, lowest_key
from sparkinfer.kernels.attention.triton_split import (
    ask,
    in_turn,
    low_part,
    partial_results,
    program_units,
    result_place,
    weigh,
)
from sparkinfer.kernels.shapes import Heads
from sparkinfer.kernels.triton_cache import q8_plane
from sparkinfer.kernels.triton_halves import half
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    WORD_KEYS,
    WORD_VALUES,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import INTERPRETED, await_inputs, release_next

UNIT = tl.constexpr(64)  # positions
# Most queries of a kv head, columns of a tile, stages of its loads, units that are asked for ahead. One stage: the next
# unit comes to registers while this one is computed, which leaves a multiprocessor room for two tiles.
FORMS = ((8, 8, 4, 1), (16, 16, 4, 1), (1 << 30, 16, 1, 3))


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
def _slow(words, scale, SHIFT: tl.constexpr, HIGH: tl.constexpr):
    code = (words >> SHIFT & 0xFF) - 128
    return (code.to(tl.float32) * half(scale >> (16 * HIGH)).to(tl.float32)).to(tl.float16)


@triton.jit
def _halves(words, scale):
    """float16 [.., 2, 2] of words [..]: byte 2 i + j at [i, j], times half j of `scale` (broadcast to [..])."""
    if INTERPRETED:
        even = tl.join(_slow(words, scale, 0, 0), _slow(words, scale, 16, 0))
        odd = tl.join(_slow(words, scale, 8, 1), _slow(words, scale, 24, 1))
    else:
        low, high = _pairs(words, scale)
        even = tl.join(half(low), half(high))
        odd = tl.join(half(low >> 16), half(high >> 16))
    return tl.join(even, odd)


@triton.jit
def _as_words(codes):
    return tl.multiple_of(codes.to(tl.pointer_type(tl.int32), bitcast=True), 16)


@triton.jit
def _load_keys(codes, scales, start, highest, SIZE: tl.constexpr):
    """Words of the codes of UNIT keys as they lie in memory; scales of the first 32 and of the others."""
    i = tl.arange(0, 16 * SIZE)
    there = start + i // (8 * SIZE) * 32 < highest
    words = tl.load(codes + start.to(tl.int64) * (SIZE // 4) + i, mask=there, other=0)
    i = tl.arange(0, SIZE)
    scale = scales + start.to(tl.int64) * (SIZE // 32) + i
    first = tl.load(scale, mask=start + i * 0 < highest, other=0.0)
    second = tl.load(scale + SIZE, mask=start + 32 + i * 0 < highest, other=0.0)
    return words, first, second


@triton.jit
def _twice(scale, SIZE: tl.constexpr):
    """Scales of 32 keys as words of two, [quarter, 128]."""
    s = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.permute(tl.reshape(s | (s << 16), (128, SIZE // 128)), (1, 0))


@triton.jit
def _key_halves(words, first, second, SIZE: tl.constexpr):
    """float16 [UNIT, SIZE]: place 16 w + 8 r + g has position 32 r + 8 w + g of the unit (`_key_place`)."""
    Q: tl.constexpr = SIZE // 128
    w = tl.reshape(words, (2, Q, 2, 4, 8, 4, 4))  # r, quarter, half, warp, g, t, word
    s = tl.permute(tl.join(_twice(first, SIZE), _twice(second, SIZE)), (2, 0, 1))
    s = tl.reshape(s, (2, Q, 1, 4, 8, 4, 1))
    x = _halves(w, tl.broadcast_to(s, w.shape))  # .., high, pair
    x = tl.permute(x, (3, 0, 4, 1, 2, 6, 7, 5, 8))
    return tl.reshape(x, (UNIT, SIZE))


@triton.jit
def _key_column(k):
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
def _load_values(codes, scales, start, highest, SIZE: tl.constexpr):
    """Words of the codes of UNIT positions, and words of two scales [32 positions, thread, 4]."""
    i = tl.arange(0, 16 * SIZE)
    there = start + i // (8 * SIZE) * 32 < highest
    words = tl.load(codes + start.to(tl.int64) * (SIZE // 4) + i, mask=there, other=0)
    i = tl.arange(0, 1024)
    thread = i // 4 % 128
    block = thread // 4 * (SIZE // 32) // 32  # of 32 numbers
    at = i // 512 * (SIZE // 2) + block * 16 + thread % 4 * 4 + i % 4
    at = tl.max_contiguous(tl.multiple_of(at, 4), 4)
    pairs = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    there = start + i // 512 * 32 < highest
    scale = tl.load(pairs + start.to(tl.int64) * (SIZE // 64) + at, mask=there, other=0)
    return words, scale


@triton.jit
def _value_halves(words, scale, SIZE: tl.constexpr):
    """float16 [SIZE, UNIT], transposed; row m is number `_value_row(m)`, a column the place of its key."""
    if SIZE == 256:  # r, s / 2, y, warp, g, t, s % 2, m
        w = tl.reshape(words, (2, 2, 2, 4, 8, 4, 2, 2))
        s = tl.permute(tl.reshape(scale, (2, 4, 8, 4, 2, 2)), (0, 4, 1, 2, 3, 5))
        s = tl.reshape(s, (2, 2, 1, 4, 8, 4, 2, 1))
        x = _halves(w, tl.broadcast_to(s, w.shape))  # .., row, pair
        x = tl.permute(x, (7, 2, 3, 8, 4, 1, 6, 0, 5, 9))
    else:  # r, y, warp, g, t, s
        w = tl.reshape(words, (2, 2, 4, 8, 4, 4))
        s = tl.reshape(scale, (2, 1, 4, 8, 4, 4))
        x = _halves(w, tl.broadcast_to(s, w.shape))
        x = tl.permute(x, (1, 2, 6, 3, 5, 0, 4, 7))
    return tl.reshape(x, (SIZE, UNIT))


@triton.jit
def _value_row(m, SIZE: tl.constexpr):
    """The dimension of row m of the transposed values."""
    e = m // 64 % 2 * (SIZE // 64) + m // 128 * 2 + m // 8 % 2
    return m // 16 % 4 * (SIZE // 4) + m % 8 * (SIZE // 32) + e


@triton.jit
def _key_place(m):
    """The position of place m of a unit."""
    return m // 8 % 2 * 32 + m // 16 * 8 + m % 8


@triton.jit
def _fetch(codes, scales, start, highest, SIZE: tl.constexpr):
    """Ask for the unit at `start` < `highest` to come to the chip's cache."""
    if not INTERPRETED:
        thirties = (tl.minimum(highest - start, UNIT) + 31) // 32
        ask(codes + start.to(tl.int64) * (SIZE // 4), thirties * (32 * SIZE))
        ask(scales + start.to(tl.int64) * (SIZE // 32), thirties * (2 * SIZE))


@triton.jit
def _queries(
    q, q_stride, rows, head, tile, scale, GROUP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Queries of a tile, scaled: float16 [SIZE, (column, part)] in the order of a key's places."""
    i = tl.arange(0, 2 * COLUMNS)
    d = _key_column(tl.arange(0, SIZE))[None, :]
    c = tile * COLUMNS + i // 2
    row = c // GROUP
    at = row * q_stride + (head * GROUP + c % GROUP) * SIZE
    x = tl.load(q + at[:, None] + d, mask=(row < rows)[:, None] & (d >= 0), other=0.0) * scale
    high = x.to(tl.float16)
    is_high = tl.broadcast_to((i % 2 == 0)[:, None], high.shape)
    return tl.trans(tl.where(is_high, high, low_part(x, high)))


@triton.jit
def _added(x, COLUMNS: tl.constexpr):
    """Sums of the columns of [UNIT, COLUMNS]: by halves within a warp, then over the four warps."""
    x = tl.sum(tl.reshape(x, (4, 2, 8, COLUMNS)), 1)
    x = tl.sum(tl.reshape(x, (4, 2, 4, COLUMNS)), 1)
    x = tl.sum(tl.reshape(x, (4, 2, 2, COLUMNS)), 1)
    x = tl.sum(x, 1)
    return tl.sum(x, 0)


@triton.jit
def _in_threads(mixed, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """[SIZE, COLUMNS] in the order of threads, four numbers of a column at a time; their columns and dimensions."""
    E: tl.constexpr = SIZE // 128  # fours of a thread and column
    i = tl.arange(0, SIZE * COLUMNS)
    c = i // (512 * E) * 4 + i // 4 % 4
    d = i // 16 % 32 * (SIZE // 32) + i // 512 % E * 4 + i % 4
    if SIZE == 256:  # m, y, warp, row, g, columns' fours, t
        x = tl.reshape(mixed, (2, 2, 4, 2, 8, COLUMNS // 4, 4))
        x = tl.permute(x, (5, 1, 2, 4, 6, 0, 3))
    else:  # y, warp, row, g, columns' fours, t
        x = tl.reshape(mixed, (2, 4, 2, 8, COLUMNS // 4, 4))
        x = tl.permute(x, (4, 1, 3, 5, 0, 2))
    return tl.reshape(x, (SIZE * COLUMNS,)), c, d


@triton.jit(do_not_specialize=["rows", "layer", "first_row", "of_rows"])
def split_q8_kernel(
    q, q_stride, run, partial, sums, rows, layer, first_row, of_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """As `triton_impl.split_kernel`. AHEAD: the next unit is loaded to registers while this one is computed."""
    release_next()
    tile, program, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position, query, lowest, highest, first, units = program_units(
        run, program, rows, first_row, of_rows, CAUSAL, WINDOW, UNIT, PROGRAMS
    )
    plane = layer * KV_HEADS + head
    keys, key_scales = q8_plane(run, WORD_KEYS, plane)
    values, value_scales = q8_plane(run, WORD_VALUES, plane)
    keys, values = _as_words(keys), _as_words(values)
    asked = tl.where(tile == 0, units, 0)  # tiles share what comes
    for turn in tl.static_range(FIRST):
        unit = first + turn * PROGRAMS
        if unit < asked:
            _fetch(keys, key_scales, unit * UNIT, highest, SIZE)
            _fetch(values, value_scales, unit * UNIT, highest, SIZE)
    await_inputs()
    if first < units:
        if AHEAD:
            start = first * UNIT + lowest * 0
            kw, ks, ks2 = _load_keys(keys, key_scales, start, highest, SIZE)
            vw, vs = _load_values(values, value_scales, start, highest, SIZE)
        x = _queries(q, q_stride, rows, head, tile, scale, GROUP, SIZE, COLUMNS)
        c = tile * COLUMNS + tl.arange(0, COLUMNS)
        stands = query + c // GROUP
        low = lowest_key(run, stands, WINDOW)
        end = end_key(stands, position + of_rows, CAUSAL, WINDOW)
        top = tl.full((COLUMNS,), float("-inf"), tl.float32)
        total = tl.zeros((UNIT, COLUMNS), tl.float32)
        mixed = tl.zeros((SIZE, 2 * COLUMNS), tl.float32)
        place = _key_place(tl.arange(0, UNIT))
        for unit in range(first, units, PROGRAMS):
            start = unit * UNIT + lowest * 0  # a tensor, under the interpreter too
            if not AHEAD:
                kw, ks, ks2 = _load_keys(keys, key_scales, start, highest, SIZE)
                vw, vs = _load_values(values, value_scales, start, highest, SIZE)
            key = _key_halves(kw, ks, ks2, SIZE)
            parts = tl.dot(key, x, tl.zeros((UNIT, 2 * COLUMNS), tl.float32))
            if AHEAD:
                kw, ks, ks2 = _load_keys(keys, key_scales, start + PROGRAMS * UNIT, highest, SIZE)
            scores = tl.sum(tl.reshape(parts, (UNIT, COLUMNS, 2)), 2)
            at = start + place
            top, shrink, weight, total = weigh(scores, at, low, end, top, total)
            high = weight.to(tl.float16)
            both = in_turn(high, low_part(weight, high), UNIT, COLUMNS)
            value = _value_halves(vw, vs, SIZE)
            if AHEAD:
                vw, vs = _load_values(values, value_scales, start + PROGRAMS * UNIT, highest, SIZE)
            mixed = tl.dot(value, both, mixed * in_turn(shrink, shrink, 1, COLUMNS))
        total = _added(total, COLUMNS)
        at = result_place(c, program, head, KV_HEADS, GROUP, PROGRAMS)
        tl.store(sums + 2 * at, top, mask=c // GROUP < rows)
        tl.store(sums + 2 * at + 1, total, mask=c // GROUP < rows)
        mixed = tl.sum(tl.reshape(mixed, (SIZE, COLUMNS, 2)), 2)
        mixed, c, d = _in_threads(mixed, SIZE, COLUMNS)
        c += tile * COLUMNS
        at = result_place(c, program, head, KV_HEADS, GROUP, PROGRAMS)
        at = tl.max_contiguous(tl.multiple_of(at * SIZE + d, 4), 4)
        tl.store(partial + at, mixed, mask=c // GROUP < rows)


def record_split_q8(
    recorder: CudaRecorder, q: Buffer, shape: Heads, params: Buffer, context: int, first_row: int, of_rows: int,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    """Record the partial results: where they and their sums are, and what the merge must know of them."""
    group = shape.heads // shape.kv_heads
    programs, partial, sums = partial_results(recorder, shape, shape.head_size)
    common: dict[str, Any] = {
        "SIZE": shape.head_size, "CAUSAL": shape.causal, "WINDOW": shape.window, "PROGRAMS": programs,
    }  # fmt: skip
    queries = recorder.rows * group
    columns, stages, first = next(form[1:] for form in FORMS if queries <= form[0])
    recorder.launch(
        split_q8_kernel, (-(-queries // columns), min(programs, -(-context // UNIT.value)), shape.kv_heads),
        q.array, stride_of(q.array), params.array, partial, sums, recorder.rows, shape.layer, first_row, of_rows,
        shape.head_size**-0.5 * LOG2_E,
        KV_HEADS=shape.kv_heads, GROUP=group, COLUMNS=columns, AHEAD=stages == 1, FIRST=first,
        num_warps=4, num_stages=stages, overlap=True, **common, **EXACT,
    )  # fmt: skip
    return partial, sums, {**common, "UNIT": UNIT.value, "PADDED": shape.head_size}
