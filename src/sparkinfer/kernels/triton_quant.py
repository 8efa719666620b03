"""Triton building blocks of every matrix product: packed weights to integer codes, exact dots with int8 activations.

A weight lies in memory as `kernels/linear/triton_pack.py` describes it. A program holds a tile of it in registers for
all rows it computes. A tile is [F, B, 4] words of four codes: F walks along the groups of 32 columns (and, when a row
has fewer groups than a warp has lanes, over several runs of outputs), B over outputs. The first axis is the one that
spreads over lanes, so an output's sum ends in shuffles inside a warp, and the activation's words serve all B outputs.

Row exactness: integer dots are exact in any order; the float part of an output is one chain of explicit fused
multiply-adds per lane, then a tree over lanes (`lane_sums`; with several warps `tl.sum` over an axis whose shape and
layout do not depend on the rows). One row, or two at a time in a loop at run time: each has a chain and a tree of its
own. Kernels are launched with `enable_fp_fusion=False`, so the compiler fuses nothing else.

A row's int8 blocks lie in memory as 8-bit weights do: columns 0-15 of every block, then columns 16-31 of every block.
Lanes that take a block each then read without gaps.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# How scales are stored ("modes"): a half per group; half scale and half minimum per group; bytes scale and minimum per
# group with halves d and dmin per 256; two bytes per group (a scale per 16) with d; four bytes (scale, minimum per 16).
HALF, HALF_MIN, BYTES, PAIR, PAIR_MIN = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Form:
    """Packed form of a format. `bits`: 4, 5, 6 or 8 of integer codes; 32, 16, 17 for float32, float16, bfloat16.

    `zero` is subtracted from every code (mode HALF only, by means of the activation's sums).
    """

    bits: int
    mode: int = HALF
    zero: int = 0

    @property
    def quantised(self) -> bool:
        return self.bits <= 8

    @property
    def group(self) -> int:
        """Columns of a group: what 16 or 32 bytes of the main plane hold."""
        return 32 if self.quantised else 4 if self.bits == 32 else 8

    @property
    def main_words(self) -> int:
        """int32 words per group in the main plane."""
        return 8 if self.bits == 8 else 4

    @property
    def extra_words(self) -> int:
        return {5: 1, 6: 2}.get(self.bits, 0)

    @property
    def scale_halves(self) -> int:
        """16-bit items per group in the scale plane."""
        return 0 if not self.quantised else 2 if self.mode in (HALF_MIN, PAIR_MIN) else 1

    @property
    def has_super(self) -> bool:
        """A word (d, dmin) per 256 columns."""
        return self.quantised and self.mode >= BYTES


FORMS = {
    "F32": Form(32),
    "F16": Form(16),
    "BF16": Form(17),
    "Q4_0": Form(4, HALF, 8),
    "Q4_1": Form(4, HALF_MIN),
    "Q5_0": Form(5, HALF, 16),
    "Q5_1": Form(5, HALF_MIN),
    "Q8_0": Form(8, HALF),
    "IQ4_NL": Form(8, HALF),
    "Q4_K": Form(4, BYTES),
    "Q5_K": Form(5, BYTES),
    "IQ4_XS": Form(8, BYTES),
    "Q6_K": Form(6, PAIR),
    "Q2_K": Form(4, PAIR_MIN),
    "Q3_K": Form(4, PAIR_MIN),
}


@triton.jit
def bound(n):
    """A number of turns for `range`: the interpreter's scalars are arrays of one element."""
    if INTERPRETED:
        return n.handle.data.item()
    else:
        return n


@triton.jit
def dp4a(a, b, c, PLAIN: tl.constexpr = False):
    """c + the dot of four signed bytes of a (PLAIN: bytes without signs) and of b."""
    if INTERPRETED:
        out = c
        for s in tl.static_range(4):
            byte = (a >> (8 * s)) & 255 if PLAIN else (a << (24 - 8 * s)) >> 24
            out += byte * ((b << (24 - 8 * s)) >> 24)
        return out
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;" if PLAIN else "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def half_of(word):
    """The float16 in the low 16 bits, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed_byte(word, shift: tl.constexpr):
    return (word << (24 - shift)) >> 24


@triton.jit
def _get(pointer, live, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=live, other=0)


@triton.jit
def weight_load(
    w, total, row, n, g, groups, unit, live,
    BITS: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of a weight as it lies in memory: main words (8 bits: two halves), extra words, scales, supers.

    What a form does not have is a number. Loads only: the tile is on its way when the caller goes on.
    """
    if EVEN:
        live3 = live
    else:
        live3 = live[:, :, None]
    n3, g3 = n[:, :, None], g[:, :, None]
    if BITS > 8:
        V: tl.constexpr = 4 if BITS == 32 else 8
        if BITS == 32:
            at = w.to(tl.pointer_type(tl.float32))
        elif BITS == 16:
            at = w.to(tl.pointer_type(tl.float16))
        else:
            at = w.to(tl.pointer_type(tl.bfloat16))
        at = at + row * (groups * V)
        i = tl.arange(0, V)[None, None, :]
        return _get(at + n3 * (groups * V) + g3 * V + i, live3, EVEN), 0, 0, 0, 0
    else:
        i = tl.arange(0, 4)[None, None, :]
        MAIN: tl.constexpr = 8 if BITS == 8 else 4
        EXTRA: tl.constexpr = 1 if BITS == 5 else 2 if BITS == 6 else 0
        at = w + row * (groups * MAIN)
        q = _get(at + n3 * (groups * MAIN) + g3 * 4 + i, live3, EVEN)
        a, b = 0, 0
        if BITS == 8:
            a = _get(at + n3 * (groups * MAIN) + (groups + g3) * 4 + i, live3, EVEN)
        plane = w + total.to(tl.int64) * (groups * MAIN)
        if EXTRA > 0:
            at = plane + row * (groups * EXTRA)
            a = _get(at + n * (groups * EXTRA) + g * unit, live, EVEN)
            if EXTRA > 1:
                b = _get(at + n * (groups * EXTRA) + groups + g * unit, live, EVEN)
        plane += total.to(tl.int64) * (groups * EXTRA)
        if MODE == 1 or MODE == 4:
            word = _get(plane + row * groups + n * groups + g * unit, live, EVEN)
            plane += total.to(tl.int64) * groups
        else:
            at = plane.to(tl.pointer_type(tl.int16)) + row * groups
            word = _get(at + n * groups + g * unit, live, EVEN)
            plane += (total // 2).to(tl.int64) * groups
        pair = 0
        if MODE >= 2:
            blocks = groups // 8
            pair = _get(plane + row * blocks + n * blocks + g // 8, live, EVEN)
        return q, a, b, word, pair


@triton.jit
def weight_codes(raw, BITS: tl.constexpr):
    """lo and hi int32 [F, B, 4]: codes 0-15 and 16-31 of every group as signed bytes (6 bits: 4 (q - 32))."""
    q, a, b, _, _ = raw
    if BITS == 8:
        return q, a
    else:
        i = tl.arange(0, 4)[None, None, :]
        if BITS == 6:
            # bits 2i, 2i + 1 of a byte of the extra words are the upper two bits of one code, the top one flipped;
            # the byte (code << 2) ^ 128 is 4 (code - 32) as a signed number
            lo = ((q << 2) & 0x3C3C3C3C) | ((a[:, :, None] << (6 - 2 * i)) & -0x3F3F3F40)
            hi = ((q >> 2) & 0x3C3C3C3C) | ((b[:, :, None] << (6 - 2 * i)) & -0x3F3F3F40)
        else:
            lo = q & 0x0F0F0F0F
            hi = (q >> 4) & 0x0F0F0F0F
            if BITS == 5:  # bit i of a byte belongs to lo, bit 4 + i to hi
                lo = lo | ((a[:, :, None] << (4 - i)) & 0x10101010)
                hi = hi | ((a[:, :, None] >> i) & 0x10101010)
        return lo, hi


@triton.jit
def weight_scales(raw, MODE: tl.constexpr, ZERO: tl.constexpr):
    """s and m float32 [F, B] (m is negative: it is added), and packed bytes int32 [F, B] of modes with sub-scales."""
    _, _, _, word, pair = raw
    word = word.to(tl.int32)
    if MODE == 0:
        s = half_of(word)
        m = s * (-1.0 * ZERO)
    elif MODE == 1:
        s = half_of(word)
        m = half_of(word >> 16)
    elif MODE == 2:
        s = half_of(pair) * signed_byte(word, 0).to(tl.float32)
        m = (half_of(pair >> 16) * -1.0) * ((word >> 8) & 255).to(tl.float32)
    elif MODE == 3:
        s = half_of(pair) * 0.25  # the codes are four times too large
        m = s
    else:
        s = half_of(pair)
        m = half_of(pair >> 16) * -1.0
    return s, m, word


@triton.jit
def weight_decode(raw, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr):
    """A loaded tile as `part_dot` takes it. Floats: the values [F, B, V] and dummies."""
    if BITS > 8:
        values, _, _, _, _ = raw
        return values, values, 0.0, 0.0, 0
    else:
        lo, hi = weight_codes(raw, BITS)
        s, m, word = weight_scales(raw, MODE, ZERO)
        return lo, hi, s, m, word


@triton.jit
def weight_part(
    w, total, row, n, g, groups, unit, live,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of a weight, loaded and decoded."""
    raw = weight_load(w, total, row, n, g, groups, unit, live, BITS, MODE, EVEN)
    return weight_decode(raw, BITS, MODE, ZERO)


@triton.jit
def input_part(
    x, xf, g, groups, unit, live, SUMS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr
):
    """What `part_dot` takes of a row: words [F, 1, 4] twice, scales and (SUMS) scaled sums [F, 1]; or floats."""
    if EVEN:
        live3 = live
    else:
        live3 = live[:, :, None]
    if BITS > 8:
        V: tl.constexpr = 4 if BITS == 32 else 8
        i = tl.arange(0, V)[None, None, :]
        values = _get(x.to(tl.pointer_type(tl.float32)) + g[:, :, None] * V + i, live3, EVEN)
        return values, values, 0.0, 0.0
    else:
        i = tl.arange(0, 4)[None, None, :]
        lo = _get(x + g[:, :, None] * 4 + i, live3, EVEN)
        hi = _get(x + groups * 4 + g[:, :, None] * 4 + i, live3, EVEN)
        total = 0.0
        if SUMS:
            total = _get(xf + groups + g * unit, live, EVEN)
        return lo, hi, _get(xf + g * unit, live, EVEN), total


@triton.jit
def four_words(x):
    """The words of the last axis of [F, B, 4], each [F, B]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def dot16(a, x, c, PLAIN: tl.constexpr = False):
    """c [F, B] plus the products of 16 codes: a [F, B, 4] (PLAIN: without signs) and x [F, 1, 4]. One chain: no sums of
    parts.
    """
    a0, a1, a2, a3 = four_words(a)
    x0, x1, x2, x3 = four_words(x)
    c = dp4a(a1, x1, dp4a(a0, x0, c, PLAIN), PLAIN)
    return dp4a(a3, x3, dp4a(a2, x2, c, PLAIN), PLAIN)


@triton.jit
def part_dot(v, part, x, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr):
    """v [F, B] (floats: [F, B, V]) plus, per group, the products of a weight's tile with a row."""
    lo, hi, s, m, word = part
    xlo, xhi, xd, xs = x
    if BITS > 8:
        return tl.fma(lo.to(tl.float32), tl.broadcast_to(xlo, lo.shape), v)
    else:
        none = tl.zeros([lo.shape[0], lo.shape[1]], tl.int32)
        if MODE <= 2:
            dot = dot16(hi, xhi, dot16(lo, xlo, none))
            v = tl.fma(s * xd, dot.to(tl.float32), v)
            if MODE > 0 or ZERO > 0:
                v = tl.fma(m, xs, v)
            return v
        else:
            a = dot16(lo, xlo, none) * signed_byte(word, 0)
            a += dot16(hi, xhi, none) * signed_byte(word, 8)
            v = tl.fma(s * xd, a.to(tl.float32), v)
            if MODE == 4:
                ones = tl.zeros_like(xlo) + 0x01010101
                none = tl.zeros([xlo.shape[0], xlo.shape[1]], tl.int32)
                b = dot16(ones, xlo, none) * signed_byte(word, 16)
                b += dot16(ones, xhi, none) * (word >> 24)
                v = tl.fma(m * xd, b.to(tl.float32), v)
            return v


@triton.jit
def fold_sum(v, F: tl.constexpr, G: tl.constexpr, B: tl.constexpr):
    """Sums over the groups of each run of outputs: [F, B] to [F / G * B], outputs in order."""
    if F == G:
        return tl.sum(v, 0)
    else:
        return tl.reshape(tl.sum(tl.reshape(v, [F // G, G, B]), 1), [F // G * B])


@triton.jit
def tile_rows(F: tl.constexpr, G: tl.constexpr, B: tl.constexpr):
    """Places in a tile: outputs [F, B] (or [1, B]) relative to its first, and groups [F, 1] of the first chunk."""
    f = tl.arange(0, F)[:, None]
    if F == G:
        return tl.arange(0, B)[None, :], f
    else:
        return (f // G) * B + tl.arange(0, B)[None, :], f % G


@triton.jit
def load_parts(
    w, total, row, groups, unit,
    BITS: tl.constexpr, MODE: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The whole width of F / G * B outputs from `row` (int64) on, as a tuple of CHUNKS tiles that are on their way."""
    n, first = tile_rows(F, G, B)
    parts = ()
    for c in tl.static_range(CHUNKS):
        g = first + c * G
        parts = parts + (  # noqa: RUF005 Triton knows no unpacking
            weight_load(w, total, row, n, g, groups, unit, g < groups, BITS, MODE, EVEN),
        )
    return parts


@triton.jit
def decode_parts(
    raw, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr, CHUNKS: tl.constexpr
):
    """What `load_parts` loaded, as `parts_dot` takes it."""
    parts = ()
    for c in tl.static_range(CHUNKS):
        parts = parts + (weight_decode(raw[c], BITS, MODE, ZERO),)  # noqa: RUF005
    return parts


@triton.jit
def input_parts(
    x, xf, groups, unit,
    LATE: tl.constexpr, SUMS: tl.constexpr, BITS: tl.constexpr, F: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
    CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One row of the input, cut as `load_parts` cuts the weight. LATE: its int8 blocks are made here, from float32."""
    _, first = tile_rows(F, G, B)
    parts = ()
    for c in tl.static_range(CHUNKS):
        g = first + c * G
        if LATE:
            parts = parts + (late_part(xf, g, groups, F, EVEN),)  # noqa: RUF005
        else:
            parts = parts + (input_part(x, xf, g, groups, unit, g < groups, SUMS, BITS, EVEN),)  # noqa: RUF005
    return parts


@triton.jit
def late_part(x, g, groups, F: tl.constexpr, EVEN: tl.constexpr):
    """`input_part` of a quantised weight from a row of float32: the same bits as `store_blocks` and reading back."""
    y = _get(x + g * 32 + tl.arange(0, 32)[None, :], g < groups, EVEN).to(tl.float32)
    code, scale, total = int8_blocks(y)
    lo, hi = block_words(code, F)
    return lo[:, None, :], hi[:, None, :], scale[:, None], total[:, None]


@triton.jit
def parts_dot(
    weight, x,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """float32 [F / G * B]: the outputs of one row."""
    return fold_sum(parts_lanes(weight, x, BITS, MODE, ZERO, F, B, CHUNKS), F, G, B)


@triton.jit
def parts_lanes(
    weight, x,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """float32 [F, B]: what `fold_sum` makes outputs of."""
    if BITS > 8:
        v = tl.zeros([F, B, 4 if BITS == 32 else 8], tl.float32)
    else:
        v = tl.zeros([F, B], tl.float32)
    for c in tl.static_range(CHUNKS):
        v = part_dot(v, weight[c], x[c], BITS, MODE, ZERO)
    if BITS > 8:
        v = tl.sum(v, 2)
    return v


@triton.jit
def fold_sums(a, b, F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, JOINT: tl.constexpr):
    """`fold_sum` of two. JOINT: they share the steps of the sum, and the barriers where warps meet; each is added in
    the order of `fold_sum`, since the axis that is summed lies over lanes and warps as before.
    """
    if JOINT and not INTERPRETED:  # numpy's order would depend on the shape
        v = tl.join(a, b)
        if F == G:
            v = tl.sum(v, 0)
        else:
            v = tl.reshape(tl.sum(tl.reshape(v, [F // G, G, B, 2]), 1), [F // G * B, 2])
        return tl.split(v)
    else:
        return fold_sum(a, F, G, B), fold_sum(b, F, G, B)


@triton.jit
def _from_lane(x, lane, STEP: tl.constexpr):
    return tl.gather(x, lane ^ STEP, 0)


@triton.jit
def _halve(values, lane, COUNT: tl.constexpr, STEP: tl.constexpr):
    """COUNT / 2 values: lanes without the bit STEP go on with the first half of the values, others with the second."""
    up = (lane & STEP) != 0
    out = ()
    for i in tl.static_range(COUNT // 2):
        a, b = values[i], values[i + COUNT // 2]
        out = out + (tl.where(up, b, a) + _from_lane(tl.where(up, a, b), lane, STEP),)  # noqa: RUF005
    return out


@triton.jit
def lane_values(v, F: tl.constexpr, B: tl.constexpr):
    """v [F, B] as a tuple of B tensors [32]: each has one element a lane of a warp."""
    if F > 32:
        v = tl.sum(tl.reshape(v, [F // 32, 32, B]), 0)
    if B == 1:
        return (tl.reshape(v, [32]),)
    elif B == 2:
        return tl.split(v)
    elif B == 8:
        even, odd = tl.split(tl.reshape(v, [32, 2, 2, 2]))
        v04, v26 = tl.split(even)
        v15, v37 = tl.split(odd)
        v0, v4 = tl.split(v04)
        v2, v6 = tl.split(v26)
        v1, v5 = tl.split(v15)
        v3, v7 = tl.split(v37)
        return (v0, v1, v2, v3, v4, v5, v6, v7)
    else:
        even, odd = tl.split(tl.reshape(v, [32, 2, 2]))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        return (v0, v1, v2, v3)


@triton.jit
def lane_sums(values, COUNT: tl.constexpr):
    """float32 [32]: lane l has the sum over lanes of value l // (32 / COUNT).

    Each is the tree that adds what lanes 16, 8, 4, 2, 1 apart have, whatever COUNT is: values share the steps of a warp
    instead of each taking all five.
    """
    lane = tl.arange(0, 32)
    if COUNT == 8:
        four = _halve(values, lane, 8, 16)
        two = _halve(four, lane, 4, 8)
        v = _halve(two, lane, 2, 4)[0]
    elif COUNT == 4:
        two = _halve(values, lane, 4, 16)
        v = _halve(two, lane, 2, 8)[0]
        v += _from_lane(v, lane, 4)
    else:
        if COUNT == 2:
            v = _halve(values, lane, 2, 16)[0]
        else:
            v = values[0]
            v += _from_lane(v, lane, 16)
        v += _from_lane(v, lane, 8)
        v += _from_lane(v, lane, 4)
    v += _from_lane(v, lane, 2)
    return v + _from_lane(v, lane, 1)


@triton.jit
def two_rows(
    x, xf, x_stride, r, last, groups, unit,
    LATE: tl.constexpr, SUMS: tl.constexpr, BITS: tl.constexpr, F: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
    CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`input_parts` of rows r and r + 1; past the last row it is the last one again."""
    one = tl.minimum(r, last) * x_stride
    two = tl.minimum(r + 1, last) * x_stride
    return (
        input_parts(x + one, xf + one, groups, unit, LATE, SUMS, BITS, F, G, B, CHUNKS, EVEN),
        input_parts(x + two, xf + two, groups, unit, LATE, SUMS, BITS, F, G, B, CHUNKS, EVEN),
    )


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def scale_of(bits):
    """A block's scale, and its inverse, from the bits of its largest magnitude."""
    top = bits.to(tl.float32, bitcast=True)
    inverse = tl.where(top > 1e-36, tl.div_rn(127.0, top), 0.0)  # 127 over less is infinite
    return tl.div_rn(top, 127.0), inverse


@triton.jit
def int8_blocks(y):
    """Codes int32 [M, 32], scale and scale times sum of codes, float32 [M], of y float32 [M, 32].

    The largest magnitude is found among the bit patterns, where a NaN is larger than any number: it reaches the scale.
    """
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale, inverse = scale_of(tl.max(bits, 1))
    # adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits
    code = (y * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = (code << 24) >> 24  # whatever a NaN gave becomes some byte
    return code, scale, scale * tl.sum(code, 1).to(tl.float32)


@triton.jit
def block_words(code, M: tl.constexpr):
    """The codes of `int8_blocks` as words: of columns 0-15 and 16-31, int32 [M, 4] each."""
    bytes4 = (tl.reshape(code, [M, 8, 4]) & 255) << (8 * tl.arange(0, 4)[None, None, :])
    return tl.split(tl.permute(tl.reshape(tl.sum(bytes4, 2), [M, 2, 4]), (0, 2, 1)))


@triton.jit
def store_blocks(codes, floats, stride, groups, row, block, y, live):
    """Write the int8 blocks y float32 [M, 32]: `row` and `block` say where, int32 [M]; `live` [M] which of them."""
    code, scale, total = int8_blocks(y)
    i = tl.arange(0, 32)[None, :]
    place = block[:, None] * 16 + i % 16 + (i // 16) * (groups * 16)
    at = codes.to(tl.pointer_type(tl.int8)) + row[:, None] * (stride * 4) + place
    tl.store(at, code.to(tl.int8), mask=live[:, None])
    tl.store(floats + row * stride + block, scale, mask=live)
    tl.store(floats + row * stride + groups + block, total, mask=live)


@triton.jit
def store_words(codes, floats, first, groups, code, scale, BLOCKS: tl.constexpr):
    """Write blocks `first` and following of a row of `groups`: the low bytes of code [BLOCKS, 8, 4] as words of four,
    scale [BLOCKS, 1] and its product with the codes' sum.

    Four columns that lie side by side in a thread stay there: nothing goes through shared memory.
    """
    word = tl.sum((code & 255) << (8 * tl.arange(0, 4)[None, None, :]), 2)
    ones = tl.full([BLOCKS, 8], 0x01010101, tl.int32)
    total = scale * tl.sum(dp4a(word, ones, ones * 0), 1, keep_dims=True).to(tl.float32)
    WORDS: tl.constexpr = BLOCKS * 8
    i = tl.arange(0, WORDS)
    block, part = first + i // 8, i % 8
    live = block < groups
    place = block * 4 + part % 4 + part // 4 * (groups * 4)
    tl.store(codes + place, tl.reshape(word, [WORDS]), mask=live)
    live = live & (part == 0)
    scale = tl.reshape(tl.broadcast_to(scale, [BLOCKS, 8]), [WORDS])
    total = tl.reshape(tl.broadcast_to(total, [BLOCKS, 8]), [WORDS])
    tl.store(floats + block, scale, mask=live)
    tl.store(floats + groups + block, total, mask=live)


@triton.jit
def store_row(codes, floats, groups, y, BLOCKS: tl.constexpr):
    """`store_blocks` of one row y [BLOCKS * 32], of which the first `groups` blocks count."""
    y = tl.reshape(y, [BLOCKS, 8, 4])
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale, inverse = scale_of(tl.max(tl.max(bits, 2), 1, keep_dims=True))
    code = (y * inverse[:, :, None] + 12582912.0).to(tl.int32, bitcast=True)  # as in `int8_blocks`
    store_words(codes, floats, 0, groups, code, scale, BLOCKS)


@triton.jit
def quantise_when_last(
    counter, needed, hidden, hidden_stride, codes, floats, stride, groups, block, first, rows,
    MOST: tl.constexpr,
):  # fmt: skip
    """The last of the `needed` programs that wrote a block of 32 columns quantises it: up to MOST rows from `first`.

    Which program is last changes nothing: the values are the same. The counter is left at 0 for the next run.
    """
    tl.debug_barrier()  # all warps have written
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == needed - 1:
        r = tl.arange(0, MOST)
        live = r < rows
        at = hidden + (first + r)[:, None] * hidden_stride + block * 32 + tl.arange(0, 32)[None, :]
        y = tl.load(at, mask=live[:, None], other=0.0, cache_modifier=".cg")
        place = tl.zeros([MOST], tl.int32) + block
        store_blocks(codes, floats, stride, groups, first + r, place, y, live)
        tl.store(counter, 0)


@triton.jit
def rows_product(
    raw, x, xf, x_stride, count, groups, unit, target, stride,
    ADD: tl.constexpr, ONE: tl.constexpr, LATE: tl.constexpr,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr = False, WARPS: tl.constexpr = 0,
):  # fmt: skip
    """Write (ADD: add) the outputs of `count` rows from x on to `target` [F / G * B] and the same places of the rows
    after it.

    Two rows at a time; an odd last one is computed and written twice. AHEAD: the next two are on their way meanwhile.
    WARPS: of the program, whose `target` is the first place only; one warp's values then share the steps of their sums.
    """
    SUMS: tl.constexpr = MODE == 1 or MODE == 2 or ZERO > 0
    LANES: tl.constexpr = (
        not INTERPRETED and WARPS == 1 and F == G and F >= 32 and B <= (8 if ONE else 4)
    )
    N: tl.constexpr = F // G * B
    lane = tl.arange(0, 32)
    if ONE:
        values = input_parts(x, xf, groups, unit, LATE, SUMS, BITS, F, G, B, CHUNKS, EVEN)
        if LANES:
            at = target + lane // (32 // B)
            mine = lane % (32 // B) == 0
        else:
            at = target if WARPS == 0 else target + tl.arange(0, N)
            mine = tl.full([N], True, tl.int1)
        if ADD:
            before = tl.load(at, mask=mine, other=0.0)
        tl.debug_barrier()  # keeps the loads together: the assembler would place each before its use
        weight = decode_parts(raw, BITS, MODE, ZERO, CHUNKS)
        v = parts_lanes(weight, values, BITS, MODE, ZERO, F, B, CHUNKS)
        if LANES:
            y = lane_sums(lane_values(v, F, B), B)
        else:
            y = fold_sum(v, F, G, B)
        if ADD:
            y += before
        tl.store(at, y, mask=mine)
    else:
        last = count - 1
        x0, x1 = two_rows(
            x, xf, x_stride, 0, last, groups, unit, LATE, SUMS, BITS, F, G, B, CHUNKS, EVEN
        )
        place = lane // (32 // (2 * B)) if LANES else lane
        if LANES:
            at = target + place % B
        else:
            at = target if WARPS == 0 else target + tl.arange(0, N)
        mine = lane % (32 // (2 * B)) == 0 if LANES else lane == lane
        if ADD:  # on its way long before it is needed, as the next rows' below
            if LANES:
                before0 = tl.load(at + tl.minimum(place // B, last) * stride, mask=mine, other=0.0)
                before1 = before0
            else:
                before0 = tl.load(at)
                before1 = tl.load(at + tl.minimum(1, last) * stride)
        weight = decode_parts(raw, BITS, MODE, ZERO, CHUNKS)
        for r in range(0, bound(count), 2):
            if AHEAD:
                coming0, coming1 = two_rows(
                    x, xf, x_stride, r + 2, last, groups, unit, LATE, SUMS, BITS, F, G, B, CHUNKS, EVEN
                )  # fmt: skip
            else:
                x0, x1 = two_rows(
                    x, xf, x_stride, r, last, groups, unit, LATE, SUMS, BITS, F, G, B, CHUNKS, EVEN
                )
            if ADD:
                if LANES:
                    later0 = tl.load(
                        at + tl.minimum(r + 2 + place // B, last) * stride, mask=mine, other=0.0
                    )
                    later1 = later0
                else:
                    later0 = tl.load(at + tl.minimum(r + 2, last) * stride)
                    later1 = tl.load(at + tl.minimum(r + 3, last) * stride)
            v0 = parts_lanes(weight, x0, BITS, MODE, ZERO, F, B, CHUNKS)
            v1 = parts_lanes(weight, x1, BITS, MODE, ZERO, F, B, CHUNKS)
            if LANES:
                y = lane_sums(lane_values(v0, F, B) + lane_values(v1, F, B), 2 * B)
                if ADD:
                    y += before0
                tl.store(at + tl.minimum(r + place // B, last) * stride, y, mask=mine)
            else:
                y0, y1 = fold_sums(v0, v1, F, G, B, WARPS > 1)
                if ADD:
                    y0 += before0
                    y1 += before1
                tl.store(at + r * stride, y0)
                tl.store(at + tl.minimum(r + 1, last) * stride, y1)
            if ADD:
                before0, before1 = later0, later1
            if AHEAD:
                x0, x1 = coming0, coming1


@triton.jit
def rows_gated(
    graw, uraw, x, xf, x_stride, count, groups, up_groups, unit, target, stride,
    ONE: tl.constexpr, SAME: tl.constexpr, LATE: tl.constexpr,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    GF: tl.constexpr, GG: tl.constexpr, GB: tl.constexpr, GCHUNKS: tl.constexpr, GEVEN: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr,
    UF: tl.constexpr, UG: tl.constexpr, UB: tl.constexpr, UCHUNKS: tl.constexpr, UEVEN: tl.constexpr,
    WARPS: tl.constexpr = 0,
):  # fmt: skip
    """Write silu(gate) * up of `count` rows as `rows_product` does. SAME: gate and up read a row in the same parts."""
    SUMS: tl.constexpr = (
        GMODE == 1 or GMODE == 2 or UMODE == 1 or UMODE == 2 or GZERO > 0 or UZERO > 0
    )
    WHOLE: tl.constexpr = GF == GG and UF == UG and GB == UB
    LANES: tl.constexpr = (
        not INTERPRETED and WARPS == 1 and WHOLE and GF >= 32 and UF >= 32 and GB <= 4
    )
    N: tl.constexpr = GF // GG * GB
    lane = tl.arange(0, 32)
    if ONE:
        values = input_parts(x, xf, groups, unit, LATE, SUMS, GBITS, GF, GG, GB, GCHUNKS, GEVEN)
        if SAME:
            other = values
        else:
            other = input_parts(
                x, xf, up_groups, unit, LATE, SUMS, UBITS, UF, UG, UB, UCHUNKS, UEVEN
            )
        tl.debug_barrier()  # keeps the loads together: the assembler would place each before its use
        g = decode_parts(graw, GBITS, GMODE, GZERO, GCHUNKS)
        u = decode_parts(uraw, UBITS, UMODE, UZERO, UCHUNKS)
        a = parts_lanes(g, values, GBITS, GMODE, GZERO, GF, GB, GCHUNKS)
        b = parts_lanes(u, other, UBITS, UMODE, UZERO, UF, UB, UCHUNKS)
        if LANES:
            a = lane_sums(lane_values(a, GF, GB), GB)
            b = lane_sums(lane_values(b, UF, UB), UB)
            mine = lane % (32 // GB) == 0
            tl.store(target + lane // (32 // GB), a * sigmoid(a) * b, mask=mine)
        else:
            at = target if WARPS == 0 else target + tl.arange(0, N)
            a = fold_sum(a, GF, GG, GB)
            b = fold_sum(b, UF, UG, UB)
            tl.store(at, a * sigmoid(a) * b)
    else:
        last = count - 1
        g = decode_parts(graw, GBITS, GMODE, GZERO, GCHUNKS)
        u = decode_parts(uraw, UBITS, UMODE, UZERO, UCHUNKS)
        for r in range(0, bound(count), 2):
            x0, x1 = two_rows(
                x, xf, x_stride, r, last, groups, unit, LATE, SUMS, GBITS, GF, GG, GB, GCHUNKS, GEVEN
            )  # fmt: skip
            if SAME:
                z0, z1 = x0, x1
            else:
                z0, z1 = two_rows(
                    x, xf, x_stride, r, last, up_groups, unit, LATE, SUMS, UBITS, UF, UG, UB, UCHUNKS, UEVEN
                )  # fmt: skip
            a0 = parts_lanes(g, x0, GBITS, GMODE, GZERO, GF, GB, GCHUNKS)
            a1 = parts_lanes(g, x1, GBITS, GMODE, GZERO, GF, GB, GCHUNKS)
            b0 = parts_lanes(u, z0, UBITS, UMODE, UZERO, UF, UB, UCHUNKS)
            b1 = parts_lanes(u, z1, UBITS, UMODE, UZERO, UF, UB, UCHUNKS)
            if LANES:
                a = lane_sums(lane_values(a0, GF, GB) + lane_values(a1, GF, GB), 2 * GB)
                b = lane_sums(lane_values(b0, UF, UB) + lane_values(b1, UF, UB), 2 * UB)
                place = lane // (32 // (2 * GB))
                at = target + place % GB + tl.minimum(r + place // GB, last) * stride
                tl.store(at, a * sigmoid(a) * b, mask=lane % (32 // (2 * GB)) == 0)
            else:
                a0, a1 = fold_sums(a0, a1, GF, GG, GB, WARPS > 1)
                b0, b1 = fold_sums(b0, b1, UF, UG, UB, WARPS > 1)
                at = target if WARPS == 0 else target + tl.arange(0, N)
                tl.store(at + r * stride, a0 * sigmoid(a0) * b0)
                tl.store(at + tl.minimum(r + 1, last) * stride, a1 * sigmoid(a1) * b1)
