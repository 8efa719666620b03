"""Products of a window of at most 16 rows on the integer tensor cores: the cost hardly depends on the rows.

A warp takes 16 outputs. For each of its groups of 32 columns one `mma` of 16 outputs x 32 columns x 8 rows gives exact
integer dots, which are scaled and added in float32. The warps of a program share the groups of the same
outputs: warp w takes groups w, w + WARPS, ...

Tensors here are [T] with T the threads of the program: element t lies in thread t. Lane l = t % 32 holds what the
instruction wants there. With q = l // 4 and p = l % 4, that is of the weight outputs q and q + 8, codes 4p to 4p + 3 of
either half of the group; of the input row q, the same codes; of the result outputs q, q, q + 8, q + 8 and rows 2p,
2p + 1, 2p, 2p + 1.

Row exactness: columns of the instruction do not mix; a result is one chain of explicit operations over a warp's groups,
then a sum over the warps, the same for every number of rows and every row.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import INTERPRETED, dp4a, half_of, signed_byte

OUTPUTS = 16
ROWS = 8  # of one instruction


@triton.jit
def mma32(a0, a1, a2, a3, b0, b1, WARPS: tl.constexpr):
    """Exact dots of a group, four int32 [T]: a0, a1 are outputs q, q + 8 of the low half, a2, a3 of the high."""
    if INTERPRETED:
        c0, c1 = _dots(a0, b0, a2, b1, WARPS)
        c2, c3 = _dots(a1, b0, a3, b1, WARPS)
        return c0, c1, c2, c3
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 z;
            mov.b32 z, 0;
            mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {z, z, z, z};
            }""",
            "=r,=r,=r,=r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def mma16(a0, a1, b0, WARPS: tl.constexpr):
    """As `mma32` for one half of a group."""
    if INTERPRETED:
        none = tl.zeros_like(a0)
        c0, c1 = _dots(a0, b0, none, none, WARPS)
        c2, c3 = _dots(a1, b0, none, none, WARPS)
        return c0, c1, c2, c3
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 z;
            mov.b32 z, 0;
            mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {z, z, z, z};
            }""",
            "=r,=r,=r,=r,r,r,r",
            [a0, a1, b0],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def _dots(low, b_low, high, b_high, WARPS: tl.constexpr):
    """What the instruction computes for the outputs q, for the interpreter: rows 2p and 2p + 1, int32 [T] each."""
    dots = _half_dots(low, b_low, WARPS) + _half_dots(high, b_high, WARPS)
    even, odd = tl.split(tl.reshape(dots, [WARPS, 8, 4, 2]))
    return tl.reshape(even, [WARPS * 32]), tl.reshape(odd, [WARPS * 32])


@triton.jit
def _half_dots(a, b, WARPS: tl.constexpr):
    """int32 [warp, q, row] of words [T] of outputs and of rows."""
    left = tl.broadcast_to(tl.reshape(a, [WARPS, 8, 1, 4]), [WARPS, 8, 8, 4])
    right = tl.broadcast_to(tl.reshape(b, [WARPS, 1, 8, 4]), [WARPS, 8, 8, 4])
    return tl.sum(dp4a(left, right, tl.zeros_like(left)), 3)


@triton.jit
def _masked(pointer, live, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=live, other=0)


@triton.jit
def window_load(
    w, total, row, n, p, g, groups, live, BITS: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """What a thread needs of group g [T] of output row + n: main words (8 bits: two), extra words, scales."""
    MAIN: tl.constexpr = 8 if BITS == 8 else 4
    EXTRA: tl.constexpr = 1 if BITS == 5 else 2 if BITS == 6 else 0
    at = w + row * (groups * MAIN)
    first = _masked(at + n * (groups * MAIN) + g * 4 + p, live, EVEN)
    second, third = first, first
    if BITS == 8:
        second = _masked(at + n * (groups * MAIN) + groups * 4 + g * 4 + p, live, EVEN)
    plane = w + total.to(tl.int64) * (groups * MAIN)
    if EXTRA > 0:
        at = plane + row * (groups * EXTRA)
        second = _masked(at + n * (groups * EXTRA) + g, live, EVEN)
        if EXTRA > 1:
            third = _masked(at + n * (groups * EXTRA) + groups + g, live, EVEN)
    plane += total.to(tl.int64) * (groups * EXTRA)
    if MODE == 1:
        word = _masked(plane + row * groups + n * groups + g, live, EVEN)
    else:
        at = plane.to(tl.pointer_type(tl.int16)) + row * groups
        word = _masked(at + n * groups + g, live, EVEN).to(tl.int32)
        plane += (total // 2).to(tl.int64) * groups
    pair = word
    if MODE >= 2:
        blocks = groups // 8
        pair = _masked(plane + row * blocks + n * blocks + g // 8, live, EVEN)
    return first, second, third, word, pair


@triton.jit
def window_words(raw, p, BITS: tl.constexpr):
    """Signed bytes of the low and the high half of a group (6 bits: 4 (q - 32)), int32 [T] each."""
    q, a, b, _, _ = raw
    if BITS == 8:
        return q, a
    elif BITS == 6:
        low = ((q << 2) & 0x3C3C3C3C) | ((a << (6 - 2 * p)) & -0x3F3F3F40)
        high = ((q >> 2) & 0x3C3C3C3C) | ((b << (6 - 2 * p)) & -0x3F3F3F40)
        return low, high
    else:
        low = q & 0x0F0F0F0F
        high = (q >> 4) & 0x0F0F0F0F
        if BITS == 5:
            low = low | ((a << (4 - p)) & 0x10101010)
            high = high | ((a >> p) & 0x10101010)
        return low, high


@triton.jit
def input_words(
    x, xf, x_stride, first, rows, q, p, g, groups, live, SUMS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Words of row q of the low and high half; scales and scaled sums of rows 2p and 2p + 1; [T] each.

    Rows from `rows` on are read as the last one: their results are not stored.
    """
    at = x + tl.minimum(first + q, rows - 1) * x_stride + g * 8 + p
    low, high = _masked(at, live, EVEN), _masked(at + 4, live, EVEN)
    even = xf + tl.minimum(first + 2 * p, rows - 1) * x_stride + g
    odd = xf + tl.minimum(first + 2 * p + 1, rows - 1) * x_stride + g
    d0, d1 = _masked(even, live, EVEN), _masked(odd, live, EVEN)
    s0, s1 = d0, d1
    if SUMS:
        s0, s1 = _masked(even + groups, live, EVEN), _masked(odd + groups, live, EVEN)
    return low, high, d0, d1, s0, s1


@triton.jit
def _scales(raw, MODE: tl.constexpr, ZERO: tl.constexpr):
    """Scale and (negative) minimum of a group, float32 [T]; mode 3: a quarter of d."""
    _, _, _, word, pair = raw
    if MODE == 0:
        s = half_of(word)
        m = s * (-1.0 * ZERO)
    elif MODE == 1:
        s = half_of(word)
        m = half_of(word >> 16)
    elif MODE == 2:
        s = half_of(pair) * signed_byte(word, 0).to(tl.float32)
        m = (half_of(pair >> 16) * -1.0) * ((word >> 8) & 255).to(tl.float32)
    else:
        s = half_of(pair) * 0.25
        m = s
    return s, m


@triton.jit
def window_step(
    v, one, two, x, p, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """v, four float32 [T], plus the products of one group of outputs q (`one`) and q + 8 (`two`)."""
    v0, v1, v2, v3 = v
    b0, b1, d0, d1, s0, s1 = x
    a0, a2 = window_words(one, p, BITS)
    a1, a3 = window_words(two, p, BITS)
    scale, minimum = _scales(one, MODE, ZERO)
    scale8, minimum8 = _scales(two, MODE, ZERO)
    if MODE == 3:
        c0, c1, c2, c3 = mma16(a0, a1, b0, WARPS)
        e0, e1, e2, e3 = mma16(a2, a3, b1, WARPS)
        lo, hi = signed_byte(one[3], 0), signed_byte(one[3], 8)
        lo8, hi8 = signed_byte(two[3], 0), signed_byte(two[3], 8)
        c0, c1 = c0 * lo + e0 * hi, c1 * lo + e1 * hi
        c2, c3 = c2 * lo8 + e2 * hi8, c3 * lo8 + e3 * hi8
    else:
        c0, c1, c2, c3 = mma32(a0, a1, a2, a3, b0, b1, WARPS)
    v0 = tl.fma(scale * d0, c0.to(tl.float32), v0)
    v1 = tl.fma(scale * d1, c1.to(tl.float32), v1)
    v2 = tl.fma(scale8 * d0, c2.to(tl.float32), v2)
    v3 = tl.fma(scale8 * d1, c3.to(tl.float32), v3)
    if MODE == 1 or MODE == 2 or ZERO > 0:
        v0, v1 = tl.fma(minimum, s0, v0), tl.fma(minimum, s1, v1)
        v2, v3 = tl.fma(minimum8, s0, v2), tl.fma(minimum8, s1, v3)
    return v0, v1, v2, v3


@triton.jit
def window_loads(
    w, total, row, q, p, warp, step, groups,
    BITS: tl.constexpr, MODE: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A run of AHEAD groups of a warp's 16 outputs, on their way."""
    raws = ()
    for c in tl.static_range(AHEAD):
        g = (step * AHEAD + c) * WARPS + warp
        live = g < groups
        one = window_load(w, total, row, q, p, g, groups, live, BITS, MODE, EVEN)
        two = window_load(w, total, row, q + 8, p, g, groups, live, BITS, MODE, EVEN)
        raws = raws + ((one, two),)  # noqa: RUF005
    return raws


@triton.jit
def _window_run(
    v, raws, x, xf, x_stride, first, rows, q, p, warp, step, groups,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    AHEAD: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """v plus the products of a run of groups with rows `first` to `first` + 7."""
    SUMS: tl.constexpr = MODE == 1 or MODE == 2 or ZERO > 0
    inputs = ()
    for c in tl.static_range(AHEAD):
        g = (step * AHEAD + c) * WARPS + warp
        inputs = inputs + (  # noqa: RUF005
            input_words(x, xf, x_stride, first, rows, q, p, g, groups, g < groups, SUMS, EVEN),
        )
    for c in tl.static_range(AHEAD):
        one, two = raws[c]
        v = window_step(v, one, two, inputs[c], p, BITS, MODE, ZERO, WARPS)
    return v


@triton.jit(do_not_specialize=["rows"])
def window_kernel(
    x, xf, x_stride, rows, groups,
    w0, total0, out0, stride0, w1, total1, out1, stride1, first1,
    w2, total2, out2, stride2, first2, w3, total3, out3, stride3, first3,
    COUNT: tl.constexpr, ADD: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[r, n] (+)= weight[n] . x[r] for 16 outputs and BLOCKS x 8 rows. A warp has STEPS runs of AHEAD groups."""
    release_next()
    pid = tl.program_id(0)
    w, total, out, stride = w0, total0, out0, stride0
    first = 0
    if COUNT > 1:
        if pid >= first1:
            w, total, out, stride, first = w1, total1, out1, stride1, first1
    if COUNT > 2:
        if pid >= first2:
            w, total, out, stride, first = w2, total2, out2, stride2, first2
    if COUNT > 3:
        if pid >= first3:
            w, total, out, stride, first = w3, total3, out3, stride3, first3
    row = (pid - first).to(tl.int64) * 16
    t = tl.arange(0, 32 * WARPS)
    q, p, warp = (t % 32) // 4, t % 4, t // 32
    raws = window_loads(w, total, row, q, p, warp, 0, groups, BITS, MODE, AHEAD, WARPS, EVEN)
    await_inputs()
    zero = tl.zeros([32 * WARPS], tl.float32)
    v = (zero, zero, zero, zero)
    u = v
    for step in range(STEPS):
        coming = raws
        if (
            STEPS > 1
        ):  # the next run is on its way while this one is computed; after the last one, the last again
            after = tl.minimum(step + 1, STEPS - 1)
            coming = window_loads(
                w, total, row, q, p, warp, after, groups, BITS, MODE, AHEAD, WARPS, EVEN
            )
        v = _window_run(
            v,
            raws,
            x,
            xf,
            x_stride,
            0,
            rows,
            q,
            p,
            warp,
            step,
            groups,
            BITS,
            MODE,
            ZERO,
            AHEAD,
            WARPS,
            EVEN,
        )
        if BLOCKS > 1:
            u = _window_run(
                u,
                raws,
                x,
                xf,
                x_stride,
                8,
                rows,
                q,
                p,
                warp,
                step,
                groups,
                BITS,
                MODE,
                ZERO,
                AHEAD,
                WARPS,
                EVEN,
            )
        raws = coming
    _store_window(v, out, stride, row, 0, rows, ADD, WARPS)
    if BLOCKS > 1:
        _store_window(u, out, stride, row, 8, rows, ADD, WARPS)


@triton.jit
def _store_window(v, out, stride, row, first, rows, ADD: tl.constexpr, WARPS: tl.constexpr):
    """Sum over the warps and store [output, row]."""
    lane = tl.arange(0, 32)
    for j in tl.static_range(4):
        result = tl.sum(tl.reshape(v[j], [WARPS, 32]), 0)
        n = lane // 4 + 8 * (j // 2)
        r = first + 2 * (lane % 4) + j % 2
        at = out + r * stride + row + n
        live = r < rows
        if ADD:
            result += tl.load(at, mask=live, other=0.0)
        tl.store(at, result, mask=live)


def takes(weight: TritonWeight) -> bool:
    """Weights that have this form: integer codes, scales that do not need sums of 16 inputs, whole tiles of outputs."""
    return weight.quantised and weight.form.mode <= 3 and weight.total % OUTPUTS == 0


def shape_of(weight: TritonWeight) -> dict[str, Any]:
    """Warps, groups a warp has on their way at once, and runs of them: of the weight's width alone."""
    warps = 16 if weight.groups >= 128 else 8
    each = -(-weight.groups // warps)
    most = 4 if weight.form.extra_words and each > 8 else 8  # registers
    ahead = min(most, triton.next_power_of_2(each))
    steps = -(-each // ahead)
    return {
        "STEPS": steps,
        "AHEAD": ahead,
        "WARPS": warps,
        "EVEN": steps * ahead * warps == weight.groups,
    }
