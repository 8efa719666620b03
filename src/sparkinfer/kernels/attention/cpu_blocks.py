"""Attention of one kv head over keys and values in q8_0 (layout: `kernels.rope.cpu_blocks`), for 1 to 6 queries.

Products are of integers. A query has a 16-bit number for each dimension and a scale for each block of them; a tile of
32 weights times the scales of their values has 16-bit numbers and a scale for each block. Sums over a block of 32 are
exact, hence the same on every machine; the blocks follow each other in one chain of fused multiply-adds a query.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from sparkinfer.backend.compiled import inner
from sparkinfer.backend.instructions import NOTHING, VECTOR, WORD, instruction
from sparkinfer.backend.simd import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    call_llvm,
    constant_vector,
    exp,
    fma,
    fma_value,
    keep_below,
    largest_magnitude,
    load,
    load_half,
    load_i64,
    load_value,
    loop_over,
    max_lanes,
    maximum,
    offset,
    prefetch_value,
    splat,
    splat_value,
    store,
    store_f32,
    store_value,
    sum_lanes,
    variable,
    vector,
)
from sparkinfer.kernels.attention import SPLIT

ISAS = ("vnni512", "avx2", "portable")
_ZERO, _ONE, _LOW = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
# What a sum of zero is to be multiplied with so that the product leaves any other number as it is.
_NEGATIVE_ZERO = np.float32(-0.0)
_TOP = np.float32(32767.0)
_LEAST = np.float32(1e-33)  # 32767 over less than this is infinite
_ROUNDED = 12582912.0  # added to a number below 2^22, the low bits are the nearest integer
WEIGHTS = 64  # bytes of a query's weights of 32 positions


class _Pairs:
    """Products of pairs: 16 lanes as one or two vectors, of the size that the instruction set has."""

    def __init__(self, builder: ir.IRBuilder, isa: str) -> None:
        self.b, self.isa = builder, isa
        self.lanes = 8 if isa == "avx2" else LANES
        self.parts = LANES // self.lanes

    def codes(self, address: ir.Value, part: int) -> ir.Value:
        """The two codes of each lane as 16-bit numbers."""
        address = self.b.add(address, ir.Constant(I64, part * 2 * self.lanes))
        value = load_value(self.b, address, vector(I8, 2 * self.lanes))
        return self.b.sext(value, vector(I16, 2 * self.lanes))

    def factor(self, address: ir.Value) -> ir.Value:
        """A pair of 16-bit numbers in every lane."""
        pair = splat_value(self.b, load_value(self.b, address, I32, 4), self.lanes)
        return self.b.bitcast(pair, vector(I16, 2 * self.lanes))

    def dot(self, total: ir.Value, codes: ir.Value, factor: ir.Value) -> ir.Value:
        """`total` and the sum of both products of each lane."""
        b, kind = self.b, vector(I32, self.lanes)
        if self.isa == "avx2":
            return b.add(total, call_llvm(b, "llvm.x86.avx2.pmadd.wd", kind, [codes, factor]))
        codes, factor = b.bitcast(codes, kind), b.bitcast(factor, kind)
        if self.isa == "vnni512":
            return call_llvm(b, "llvm.x86.avx512.vpdpwssd.512", kind, [total, codes, factor])
        half = constant_vector(I32, self.lanes, 16)
        for move in (lambda x: b.ashr(b.shl(x, half), half), lambda x: b.ashr(x, half)):
            total = b.add(total, b.mul(move(codes), move(factor)))
        return total

    def chains(self, count: int, zero: ir.Constant) -> list[ir.Value]:
        found = [variable(self.b, zero.type) for _ in range(count)]
        self.clear(found, zero)
        return found

    def clear(self, chains: list[ir.Value], zero: ir.Constant) -> None:
        for chain in chains:
            self.b.store(zero, chain)

    def integers(self) -> ir.Constant:
        return constant_vector(I32, self.lanes, 0)

    def floats(self, value: ir.Value) -> ir.Value:
        return self.b.sitofp(value, vector(F32, self.lanes))


@instruction(NOTHING, *[WORD] * 7, literals=2)
def _score_blocks(
    b: Any, n: int, isa: int, q: Any, keys: Any, scales: Any, size: Any, values: Any, out: Any, stride: Any,
) -> None:  # fmt: skip
    """out[i, 0..15] = q[i] . keys[0..15] for `n` rows of 16-bit numbers, 4 `size` bytes apart, that are followed
    by their scales. Asks for the next keys and for the `values` of these positions.
    """
    pairs = _Pairs(b, ISAS[isa])
    zero = constant_vector(F32, pairs.lanes, 0.0)
    totals = pairs.chains(n * pairs.parts, zero)
    sums = pairs.chains(n * pairs.parts, pairs.integers())
    row_bytes = b.mul(size, ir.Constant(I64, 4))
    tile_bytes = b.mul(size, ir.Constant(I64, 16))
    q_scales = offset(b, q, size, 2)

    def step(block: ir.Value, pair: ir.Value) -> None:
        at = offset(b, offset(b, keys, block, 512), pair, 32)
        codes = [pairs.codes(at, part) for part in range(pairs.parts)]
        source = offset(b, offset(b, q, block, 64), pair, 4)
        for i in range(n):
            factor = pairs.factor(offset(b, source, i, row_bytes))
            for part in range(pairs.parts):
                chain = sums[i * pairs.parts + part]
                b.store(pairs.dot(b.load(chain), codes[part], factor), chain)

    with loop_over(b, b.lshr(size, ir.Constant(I64, 5))) as block:
        pairs.clear(sums, pairs.integers())
        with loop_over(b, ir.Constant(I64, 8)) as index:
            for base in (b.add(keys, tile_bytes), values):
                prefetch_value(b, offset(b, offset(b, base, block, 512), index, 64), 3)
            for odd in range(2):
                step(block, b.add(b.shl(index, ir.Constant(I64, 1)), ir.Constant(I64, odd)))
        for part in range(pairs.parts):
            at = offset(b, scales, block, 32)
            half = load_value(b, offset(b, at, part, 2 * pairs.lanes), vector(F16, pairs.lanes), 2)
            scale = b.fpext(half, vector(F32, pairs.lanes))
            for i in range(n):
                place = i * pairs.parts + part
                own = load_value(b, offset(b, offset(b, q_scales, i, row_bytes), block, 4), F32, 4)
                both = b.fmul(scale, splat_value(b, own, pairs.lanes))
                value = pairs.floats(b.load(sums[place]))
                b.store(fma_value(b, value, both, b.load(totals[place])), totals[place])
    for place, total in enumerate(totals):
        at = offset(b, offset(b, out, place // pairs.parts, stride), place % pairs.parts, 32)
        store_value(b, at, b.load(total), 4)


@instruction(NOTHING, *[WORD] * 5, literals=3)
def _value_blocks(
    b: Any, n: int, halves: int, isa: int, weights: Any, factors: Any, codes: Any, out: Any, stride: Any,
) -> None:  # fmt: skip
    """out[i, 0..] += factors[i] * sum over 32 positions of weights[i, t] * codes[t, 0..] for 16 or (`halves` 2) 32
    dimensions of a block. Weights are 16-bit numbers, `WEIGHTS` bytes a query; factors float32.
    """
    pairs = _Pairs(b, ISAS[isa])
    parts = pairs.parts * halves
    sums = pairs.chains(n * parts, pairs.integers())

    def step(pair: ir.Value) -> None:
        row = offset(b, codes, pair, 64)
        values = [pairs.codes(row, part) for part in range(parts)]
        for i in range(n):
            factor = pairs.factor(offset(b, b.add(weights, ir.Constant(I64, i * WEIGHTS)), pair, 4))
            for part in range(parts):
                chain = sums[i * parts + part]
                b.store(pairs.dot(b.load(chain), values[part], factor), chain)

    with loop_over(b, ir.Constant(I64, 8)) as index:
        for odd in range(2):
            step(b.add(b.shl(index, ir.Constant(I64, 1)), ir.Constant(I64, odd)))
    kind = vector(F32, pairs.lanes)
    for i in range(n):
        factor = splat_value(
            b, load_value(b, b.add(factors, ir.Constant(I64, 4 * i)), F32, 4), pairs.lanes
        )
        for part in range(parts):
            at = offset(b, offset(b, out, i, stride), part, 4 * pairs.lanes)
            value = pairs.floats(b.load(sums[i * parts + part]))
            store_value(b, at, fma_value(b, value, factor, load_value(b, at, kind, 4)), 4)


@instruction(NOTHING, WORD, VECTOR)
def _store_int16(b: Any, address: Any, value: Any) -> None:
    """16 float32 below 2^15, rounded to the nearest even integer; what is no number becomes anything."""
    bits = b.fadd(value, constant_vector(F32, LANES, _ROUNDED))
    words = b.trunc(b.bitcast(bits, vector(I32, LANES)), vector(I16, LANES))
    store_value(b, address, words, 4)


@inner
def quantise_query(source: int, size: int, target: int) -> None:
    """`size` floats as 16-bit numbers, followed by a scale for each 32."""
    for block in range(size >> 5):
        y0, y1 = load(source + 128 * block), load(source + 128 * block + 64)
        top = largest_magnitude(y0, y1)
        inverse = _TOP / top if top > _LEAST else _ZERO
        _store_int16(target + 64 * block, y0 * splat(inverse))
        _store_int16(target + 64 * block + 32, y1 * splat(inverse))
        store_f32(target + 2 * size + 4 * block, top / _TOP)


@inner
def _quantise_weights(
    n: int, source: int, stride: int, scales: int, target: int, factors: int
) -> None:
    """32 weights of each of n queries times the scales of their values, and what these numbers are to be multiplied
    with. Where all are zero that is -0, which changes nothing.
    """
    s0, s1 = load_half(scales), load_half(scales + 32)
    for i in range(n):
        u0, u1 = load(source + i * stride) * s0, load(source + i * stride + 64) * s1
        top = largest_magnitude(u0, u1)
        inverse, factor = _ZERO, top / _TOP
        if top > _LEAST:
            inverse = _TOP / top
        elif top <= _LEAST:
            factor = _NEGATIVE_ZERO
        _store_int16(target + WEIGHTS * i, u0 * splat(inverse))
        _store_int16(target + WEIGHTS * i + 32, u1 * splat(inverse))
        store_f32(factors + 4 * i, factor)


@inner
def softmax(scores: int, low: int, count: int, first: int, tiles: int, result: int) -> None:
    """Exponentials of the scores low .. count in place (zero elsewhere in the tiles first .. tiles); writes maximum
    and sum at `result`. A score that is no number makes the sum none.
    """
    top, lost = splat(_LOW), splat(_ZERO)
    begin, end = max(first, (low + 15) >> 4), min(tiles, count >> 4)  # tiles seen as a whole
    for t in range(first, tiles):
        value = load(scores + 64 * t)
        if t < begin or t >= end:
            value = keep_below(low - 16 * t, splat(_LOW), value)
            value = keep_below(count - 16 * t, value, splat(_LOW))
            store(scores + 64 * t, value)
            value = keep_below(low - 16 * t, splat(_ZERO), value)
            value = keep_below(count - 16 * t, value, splat(_ZERO))
        lost = fma(value, splat(_ZERO), lost)
        top = maximum(top, load(scores + 64 * t))
    peak = max_lanes(top)
    total = splat(_ZERO)
    for t in range(first, tiles):
        value = exp(load(scores + 64 * t) - splat(peak))
        if t < begin or t >= end:
            value = keep_below(low - 16 * t, splat(_ZERO), value)
            value = keep_below(count - 16 * t, value, splat(_ZERO))
        store(scores + 64 * t, value)
        total = total + value
    store_f32(result, peak)
    store_f32(result + 4, sum_lanes(total + lost))


def _loops(isa: int) -> Any:
    """`group` for an instruction set: only what a job uses is compiled."""

    @inner
    def scores_of(n, q, keys, scales, size, values, out):  # type: ignore[no-untyped-def]
        """One tile of 16 positions for n = 1..6 queries."""
        if n == 6:
            _score_blocks(6, isa, q, keys, scales, size, values, out, SPLIT * 4)
        elif n == 5:
            _score_blocks(5, isa, q, keys, scales, size, values, out, SPLIT * 4)
        elif n == 4:
            _score_blocks(4, isa, q, keys, scales, size, values, out, SPLIT * 4)
        elif n == 3:
            _score_blocks(3, isa, q, keys, scales, size, values, out, SPLIT * 4)
        elif n == 2:
            _score_blocks(2, isa, q, keys, scales, size, values, out, SPLIT * 4)
        else:
            _score_blocks(1, isa, q, keys, scales, size, values, out, SPLIT * 4)

    @inner
    def weighted(n, weights, factors, codes, out, stride):  # type: ignore[no-untyped-def]
        """A block of 32 dimensions of 32 positions."""
        if n == 6:
            _value_blocks(6, 1, isa, weights, factors, codes, out, stride)
            _value_blocks(6, 1, isa, weights, factors, codes + 32, out + 64, stride)
        elif n == 5:
            _value_blocks(5, 1, isa, weights, factors, codes, out, stride)
            _value_blocks(5, 1, isa, weights, factors, codes + 32, out + 64, stride)
        elif n == 4:
            _value_blocks(4, 1, isa, weights, factors, codes, out, stride)
            _value_blocks(4, 1, isa, weights, factors, codes + 32, out + 64, stride)
        elif n == 3:
            _value_blocks(3, 2, isa, weights, factors, codes, out, stride)
        elif n == 2:
            _value_blocks(2, 2, isa, weights, factors, codes, out, stride)
        else:
            _value_blocks(1, 2, isa, weights, factors, codes, out, stride)

    @inner
    def group(
        n: int, q: int, keys: int, key_scales: int, values: int, value_scales: int, size: int, bounds: int,
        scores: int, results: int, weights: int,
    ) -> None:  # fmt: skip
        """n quantised queries at `q`, one of which at least sees a key of the split. `bounds` holds two int64 a query
        (it sees the split's positions low .. count), `results` a partial result a query.
        """
        begin, most = SPLIT, 0
        for i in range(n):
            mine, count = load_i64(bounds + 16 * i), load_i64(bounds + 16 * i + 8)
            most = max(most, count)
            if mine < count:
                begin = min(begin, mine)
        first, tiles = begin >> 5 << 1, (most + 31) >> 5 << 1
        result_bytes = (size + 16) * 4
        for t in range(first, tiles):
            scores_of(
                n, q, keys + t * size * 16, key_scales + t * size, size, values + t * size * 16,
                scores + 64 * t,
            )  # fmt: skip
        for i in range(n):
            mine, count = load_i64(bounds + 16 * i), load_i64(bounds + 16 * i + 8)
            at = results + i * result_bytes
            softmax(scores + i * SPLIT * 4, mine, count, first, tiles, at + 4 * size)
            for d in range(0, 4 * size, 64):
                store(at + d, splat(_ZERO))
        factors = weights + n * WEIGHTS
        for t in range(first >> 1, tiles >> 1):
            for block in range(size >> 5):
                scale_at = value_scales + t * size * 2 + 64 * block
                _quantise_weights(n, scores + 128 * t, SPLIT * 4, scale_at, weights, factors)
                codes = values + t * size * 32 + 1024 * block
                weighted(n, weights, factors, codes, results + 128 * block, result_bytes)

    return group


vnni512_group, avx2_group, portable_group = (_loops(isa) for isa in range(len(ISAS)))
