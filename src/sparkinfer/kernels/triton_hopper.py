"""Packed weights as the left side of Hopper's matrix instructions, in Gluon: they are decoded into registers.

A warp group's product takes its left side from registers and its right side from shared memory, and runs beside other
instructions. A weight's codes, read as whole words, are a thread's part of the left side without any exchange between
threads, because columns of the right side's rows stand in the order of `linear/triton_order.py`. So a step of 32
columns is decoded while the one before it is multiplied, nothing of a weight goes through shared memory, and rows come
there by asynchronous copies, in steps of 64 columns, two steps ahead.

Codes become float16 two at a time: a byte under the exponent of 1024 is a float16 (1024 + byte), from which 1024 is
taken exactly and which one fused multiply-add scales. Scales and minima are rounded to float16 before, times 64.

Sums are float32, one chain over the width per output: deterministic. Under Triton's interpreter there is no Gluon;
`CudaBackend.warpgroups` tells where these kernels may be used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STEP = gl.constexpr(64)  # columns of a copy


@gluon.constexpr_function
def words_layout(rows, warps, whole):  # type: ignore[no-untyped-def]
    """Layout of [rows, 4 groups, 4 words], as the left side needs their codes. whole: a thread has rows r and r + 8 of
    every 16; else rows of two weights take turns and each is laid out alone.
    """
    registers = [[0, 0, 1], [0, 0, 2]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    at = 8
    if whole:
        registers.append([8, 0, 0])
        at = 16
    warp = []
    while 2 ** len(warp) < warps:
        warp.append([at, 0, 0])
        at *= 2
    while at < rows:
        registers.append([at, 0, 0])
        at *= 2
    return gl.DistributedLinearLayout(registers, lanes, warp, [], [rows, 4, 4])


@gluon.jit
def _pairs(words, s, m, SIGNED: gl.constexpr):
    """Bytes of words times s plus m, which are words of two float16: two words of float16 pairs."""
    if SIGNED:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 u, a, b;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 a, u, 0x64646464, 0x4140;
            prmt.b32 b, u, 0x64646464, 0x4342;
            sub.rn.f16x2 a, a, $5;
            sub.rn.f16x2 b, b, $5;
            fma.rn.f16x2 $0, a, $3, $4;
            fma.rn.f16x2 $1, b, $3, $4;
            }""",
            "=&r,=&r,r,r,r,r", [words, s, m, 0x64806480], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $2, 0x64646464, 0x4140;
            prmt.b32 b, $2, 0x64646464, 0x4342;
            sub.rn.f16x2 a, a, $5;
            sub.rn.f16x2 b, b, $5;
            fma.rn.f16x2 $0, a, $3, $4;
            fma.rn.f16x2 $1, b, $3, $4;
            }""",
            "=&r,=&r,r,r,r,r", [words, s, m, 0x64006400], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def _half(word):
    return word.to(gl.int16).to(gl.float16, bitcast=True)


@gluon.jit
def _float(word):
    """The float16 in the low 16 bits, as float32."""
    return _half(word).to(gl.float32)


@gluon.jit
def _signed_byte(word, SHIFT: gl.constexpr):
    return ((word << (24 - SHIFT)) >> 24).to(gl.float32)


@gluon.jit
def _twice(x):
    """A float32 as two equal float16 of a word."""
    low = x.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return low | (low << 16)


@gluon.jit
def load_super(w, total, first, row, q, k, groups, BITS: gl.constexpr, MODE: gl.constexpr):
    """Words d, dmin of the 256 columns from group k on; planes and modes as in `triton_quant` and `triton_pack`."""
    if MODE >= 2:
        MAIN: gl.constexpr = 8 if BITS == 8 else 4
        EXTRA: gl.constexpr = 1 if BITS == 5 else 2 if BITS == 6 else 0
        plane = w + total.to(gl.int64) * (groups * (MAIN + EXTRA))
        if MODE == 4:
            plane += total.to(gl.int64) * groups
        else:
            plane += (total // 2).to(gl.int64) * groups
        blocks = groups // 8
        return gl.load(plane + first * blocks + (row * blocks + k // 8) + 0 * q)
    else:
        return row + 0 * q


@gluon.jit
def load_words(w, first, row, q, i, k, groups, BITS: gl.constexpr, H: gl.constexpr):
    """Main words of four groups from k on; of 8 bits those of codes 16 H and after. row [R, 1] counts from `first`, a
    row of the plane; q [1, 4], i [1, 1, 4].
    """
    MAIN: gl.constexpr = 8 if BITS == 8 else 4
    place = (row * (groups * MAIN) + (q + k) * 4)[:, :, None] + i
    if BITS == 8 and H == 1:
        place += groups * 4
    return gl.load(w + first * (groups * MAIN) + place)


@gluon.jit
def load_rest(w, total, first, row, q, k, groups, BITS: gl.constexpr, MODE: gl.constexpr):
    """Extra words and scales of four groups from k on."""
    MAIN: gl.constexpr = 8 if BITS == 8 else 4
    EXTRA: gl.constexpr = 1 if BITS == 5 else 2 if BITS == 6 else 0
    plane = w + total.to(gl.int64) * (groups * MAIN)
    a, b = row + 0 * q, row + 0 * q
    if EXTRA > 0:
        at = plane + first * (groups * EXTRA)
        a = gl.load(at + row * (groups * EXTRA) + (q + k))
        if EXTRA > 1:
            b = gl.load(at + row * (groups * EXTRA) + (q + k + groups))
    plane += total.to(gl.int64) * (groups * EXTRA)
    if MODE == 1 or MODE == 4:
        word = gl.load(plane + first * groups + row * groups + (q + k))
    else:
        at = plane.to(gl.pointer_type(gl.int16)) + first * groups
        word = gl.load(at + row * groups + (q + k)).to(gl.int32)
    return a, b, word


@gluon.jit
def _scales(word, pair, H: gl.constexpr, MODE: gl.constexpr, ZERO: gl.constexpr):
    """Factor and addend of codes 16 H and after, times 64, as words of two float16."""
    if MODE == 0:
        s = _float(word) * 64.0
        m = s * (-1.0 * ZERO)
    elif MODE == 1:
        s = _float(word) * 64.0
        m = _float(word >> 16) * 64.0
    elif MODE == 2:
        s = _float(pair) * 64.0 * _signed_byte(word, 0)
        m = _float(pair >> 16) * -64.0 * ((word >> 8) & 255).to(gl.float32)
    elif MODE == 3:
        s = _float(pair) * 16.0 * _signed_byte(word, 8 * H)  # the codes are four times too large
        m = s * 0.0
    else:
        s = _float(pair) * 64.0 * _signed_byte(word, 8 * H)
        if H == 0:
            m = _float(pair >> 16) * -64.0 * _signed_byte(word, 16)
        else:
            m = _float(pair >> 16) * -64.0 * (word >> 24).to(gl.float32)
    return _twice(s), _twice(m)


@gluon.jit
def decoded(
    words, rest, pair, H: gl.constexpr, P: gl.constexpr,
    BITS: gl.constexpr, MODE: gl.constexpr, ZERO: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """float16 [R, 32]: words 2 P, 2 P + 1 of codes 16 H and after, of four groups."""
    a, b, word = rest
    early, late = gl.split(gl.permute(gl.reshape(words, [R, 4, 2, 2]), (0, 1, 3, 2)))
    if P == 0:
        q = early
    else:
        q = late
    L: gl.constexpr = q.type.layout
    S: gl.constexpr = gl.SliceLayout(2, L)
    i = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :] + 2 * P
    if BITS == 6:
        if H == 0:
            more = gl.convert_layout(a, S, assert_trivial=True)[:, :, None]
            q = ((q << 2) & 0x3C3C3C3C) | ((more << (6 - 2 * i)) & -0x3F3F3F40)
        else:
            more = gl.convert_layout(b, S, assert_trivial=True)[:, :, None]
            q = ((q >> 2) & 0x3C3C3C3C) | ((more << (6 - 2 * i)) & -0x3F3F3F40)
    elif BITS != 8:
        if H == 0:
            q = q & 0x0F0F0F0F
        else:
            q = (q >> 4) & 0x0F0F0F0F
        if BITS == 5:
            more = gl.convert_layout(a, S, assert_trivial=True)[:, :, None]
            if H == 0:
                q = q | ((more << (4 - i)) & 0x10101010)
            else:
                q = q | ((more >> i) & 0x10101010)
    s, m = _scales(word, pair, H, MODE, ZERO)
    s = gl.convert_layout(s, S, assert_trivial=True)[:, :, None]
    m = gl.convert_layout(m, S, assert_trivial=True)[:, :, None]
    low, high = _pairs(q, s, m, BITS == 6 or BITS == 8)
    first = gl.join(_half(low), _half(low >> 16))
    both = gl.join(
        first, gl.join(_half(high), _half(high >> 16))
    )  # row, group, word, place in a pair, pair
    return gl.reshape(gl.permute(both, (0, 2, 4, 1, 3)), [R, 32])


@gluon.jit
def left_side(
    words, rest, pair, up_words, up_rest, up_pair, L: gl.constexpr, GATED: gl.constexpr,
    H: gl.constexpr, P: gl.constexpr, BITS: gl.constexpr, MODE: gl.constexpr, ZERO: gl.constexpr,
    UBITS: gl.constexpr, UMODE: gl.constexpr, UZERO: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """float16 [M, 32]; GATED: eight rows of gate, eight of up, in turns."""
    if GATED:
        gate = decoded(words, rest, pair, H, P, BITS, MODE, ZERO, M // 2)
        up = decoded(up_words, up_rest, up_pair, H, P, UBITS, UMODE, UZERO, M // 2)
        both = gl.reshape(gl.join(gate, up), [M // 16, 8, 32, 2])
        result = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [M, 32])
    else:
        result = decoded(words, rest, pair, H, P, BITS, MODE, ZERO, M)
    return gl.convert_layout(result, L)


@gluon.jit
def copy_rows(target, at, more, more_at, k, N1: gl.constexpr):
    async_copy.async_copy_global_to_shared(target, at + k)
    if N1 > 0:
        async_copy.async_copy_global_to_shared(more, more_at + k)
    async_copy.commit_group()


@gluon.jit
def arrived():
    """The older of two copies is there for all warps: a barrier comes with the wait. A fence between copies and matrix
    instructions would wait for the younger copy too; the compiler's own pipelines have none either.
    """
    async_copy.wait_group(1)


@gluon.jit
def row_pointers(
    x, x_stride, rows_of, slot, count, GATHER: gl.constexpr, N: gl.constexpr, NW: gl.constexpr
):
    """Where N rows begin, [N, STEP]; beyond `count` the last one again. GATHER: rows_of has the slots' rows."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    n = gl.minimum(gl.arange(0, N, gl.SliceLayout(1, L)), count - 1) + slot
    if GATHER:
        n = gl.load(rows_of + n).to(gl.int32)
    return x + ((n * x_stride)[:, None] + gl.arange(0, STEP, gl.SliceLayout(0, L))[None, :])


@gluon.jit
def store_tile(
    acc, scales, rows_of, out, out_stride, first, left, slot, count,
    GATHER: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, SCALED: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    parts = gl.reshape(acc, [M // 16, 2, 8, N])
    if GATED:
        a, b = gl.split(gl.permute(parts, (0, 2, 3, 1)))
        a, b = gl.reshape(a, [M // 2, N]), gl.reshape(b, [M // 2, N])
        OUTPUTS: gl.constexpr = M // 2
    else:
        a = gl.reshape(gl.permute(parts, (0, 2, 1, 3)), [M, N])
        b = a
        OUTPUTS: gl.constexpr = M
    L: gl.constexpr = a.type.layout
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    live = n < count
    if SCALED:
        source = slot + n
        if GATHER:
            source = gl.load(rows_of + source, mask=live, other=0).to(gl.int32)
        scale = (gl.load(scales + source, mask=live, other=0.0) * 0.015625)[None, :]
        a = a * scale
        if GATED:
            a = a * (1.0 / (1.0 + gl.exp(-a))) * (b * scale)
    else:
        a = a * 0.015625
    m = gl.arange(0, OUTPUTS, gl.SliceLayout(1, L))
    to = out + ((slot + n).to(gl.int64) * out_stride)[None, :] + (first + m)[:, None]
    inside = live[None, :] & (m < left)[:, None]
    if ADD:
        a += gl.load(to, mask=inside, other=0.0)
    gl.store(to, a.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def multiply(a, before, x, more, P: gl.constexpr, acc, acc1, N1: gl.constexpr):
    """Start acc += a . x for columns 32 P to 32 P + 31 of a step (and acc1 of `more` rows); the product before it has
    ended then, and its left side may be overwritten.
    """
    acc = warpgroup_mma(a, x.slice(32 * P, 32, 1).permute((1, 0)), acc, is_async=True)
    if N1 > 0:
        L1: gl.constexpr = gl.DotOperandLayout(0, acc1.type.layout, 2)
        right = more.slice(32 * P, 32, 1).permute((1, 0))
        acc1 = warpgroup_mma(gl.convert_layout(a, L1), right, acc1, is_async=True)
        acc, acc1, before = warpgroup_mma_wait(2, deps=[acc, acc1, before])
    else:
        acc, before = warpgroup_mma_wait(1, deps=[acc, before])
    return acc, acc1


@gluon.jit
def tile(
    x, x_stride, scales, rows_of, w, up, total, begin, left, first, groups, out, out_stride, slot, count,
    GATHER: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, SCALED: gl.constexpr,
    BITS: gl.constexpr, MODE: gl.constexpr, ZERO: gl.constexpr, UBITS: gl.constexpr, UMODE: gl.constexpr,
    UZERO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, N1: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """M outputs (GATED: M / 2 values of two weights) of N rows, and of N1 more (a power of two as N is).

    begin (int64): the planes' row that the tile starts with, `left` rows of the matrix from there on; first: its column
    of `out`. slot, count: its rows of x and `out`; GATHER: `rows_of` has the rows of x instead. SCALED: results are
    multiplied by the rows' scales. A product of two float16 numbers of magnitude 1 is 64 here.
    """
    R: gl.constexpr = M // 2 if GATED else M
    W: gl.constexpr = words_layout(R, NW, not GATED)
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, N, 16])
    L: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    P: gl.constexpr = gl.SliceLayout(2, W)
    m = gl.arange(0, R, gl.SliceLayout(1, P))
    if not GATED:  # outputs 2 r and 2 r + 1 stand in rows r and r + 8: a thread has both
        m = (m & -16) + 2 * (m & 7) + ((m >> 3) & 1)
    row = gl.minimum(m, left - 1)[:, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, P))[None, :]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, W)))[None, None, :]
    XS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x0 = gl.allocate_shared_memory(gl.float16, [N, STEP], XS)
    x1 = gl.allocate_shared_memory(gl.float16, [N, STEP], XS)
    x2 = gl.allocate_shared_memory(gl.float16, [N, STEP], XS)
    x3 = gl.allocate_shared_memory(gl.float16, [N, STEP], XS)
    at = row_pointers(x, x_stride, rows_of, slot, count, GATHER, N, NW)
    acc = gl.zeros([M, N], gl.float32, A)
    if N1 > 0:
        y0 = gl.allocate_shared_memory(gl.float16, [N1, STEP], XS)
        y1 = gl.allocate_shared_memory(gl.float16, [N1, STEP], XS)
        y2 = gl.allocate_shared_memory(gl.float16, [N1, STEP], XS)
        y3 = gl.allocate_shared_memory(gl.float16, [N1, STEP], XS)
        more_at = row_pointers(x, x_stride, rows_of, slot + N, count - N, GATHER, N1, NW)
        A1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, N1, 16])
        acc1 = gl.zeros([M, N1], gl.float32, A1)
    else:
        y0, y1, y2, y3, more_at, acc1 = x0, x1, x2, x3, at, 0
    copy_rows(x0, at, y0, more_at, 0, N1)
    copy_rows(x1, at, y1, more_at, 64, N1)
    u, up_rest, up_pair = 0, 0, 0
    pair = load_super(w, total, begin, row, q, 0, groups, BITS, MODE)
    v = load_words(w, begin, row, q, i, 0, groups, BITS, 0)
    rest = load_rest(w, total, begin, row, q, 0, groups, BITS, MODE)
    if GATED:
        up_pair = load_super(up, total, begin, row, q, 0, groups, UBITS, UMODE)
        u = load_words(up, begin, row, q, i, 0, groups, UBITS, 0)
        up_rest = load_rest(up, total, begin, row, q, 0, groups, UBITS, UMODE)
    a = left_side(
        v, rest, pair, u, up_rest, up_pair, L, GATED, 0, 0, BITS, MODE, ZERO, UBITS, UMODE, UZERO, M
    )
    b = a
    for k in range(0, groups, 8):
        coming = gl.minimum(k + 8, groups - 8)
        # first quarter
        v1, u1 = v, u
        if BITS == 8:
            v1 = load_words(w, begin, row, q, i, k, groups, BITS, 1)
        if GATED and UBITS == 8:
            u1 = load_words(up, begin, row, q, i, k, groups, UBITS, 1)
        arrived()
        acc, acc1 = multiply(a, b, x0, y0, 0, acc, acc1, N1)
        copy_rows(x2, at, y2, more_at, k * 32 + 128, N1)
        b = left_side(
            v,
            rest,
            pair,
            u,
            up_rest,
            up_pair,
            L,
            GATED,
            0,
            1,
            BITS,
            MODE,
            ZERO,
            UBITS,
            UMODE,
            UZERO,
            M,
        )
        acc, acc1 = multiply(b, a, x0, y0, 1, acc, acc1, N1)
        a = left_side(
            v1,
            rest,
            pair,
            u1,
            up_rest,
            up_pair,
            L,
            GATED,
            1,
            0,
            BITS,
            MODE,
            ZERO,
            UBITS,
            UMODE,
            UZERO,
            M,
        )
        # second quarter
        v2 = load_words(w, begin, row, q, i, k + 4, groups, BITS, 0)
        rest2 = load_rest(w, total, begin, row, q, k + 4, groups, BITS, MODE)
        u2, up_rest2 = u1, up_rest
        if GATED:
            u2 = load_words(up, begin, row, q, i, k + 4, groups, UBITS, 0)
            up_rest2 = load_rest(up, total, begin, row, q, k + 4, groups, UBITS, UMODE)
        arrived()
        acc, acc1 = multiply(a, b, x1, y1, 0, acc, acc1, N1)
        copy_rows(x3, at, y3, more_at, k * 32 + 192, N1)
        b = left_side(
            v1,
            rest,
            pair,
            u1,
            up_rest,
            up_pair,
            L,
            GATED,
            1,
            1,
            BITS,
            MODE,
            ZERO,
            UBITS,
            UMODE,
            UZERO,
            M,
        )
        acc, acc1 = multiply(b, a, x1, y1, 1, acc, acc1, N1)
        a = left_side(
            v2,
            rest2,
            pair,
            u2,
            up_rest2,
            up_pair,
            L,
            GATED,
            0,
            0,
            BITS,
            MODE,
            ZERO,
            UBITS,
            UMODE,
            UZERO,
            M,
        )
        # third quarter
        v3, u3 = v2, u2
        if BITS == 8:
            v3 = load_words(w, begin, row, q, i, k + 4, groups, BITS, 1)
        if GATED and UBITS == 8:
            u3 = load_words(up, begin, row, q, i, k + 4, groups, UBITS, 1)
        arrived()
        acc, acc1 = multiply(a, b, x2, y2, 0, acc, acc1, N1)
        copy_rows(x0, at, y0, more_at, coming * 32, N1)
        b = left_side(
            v2,
            rest2,
            pair,
            u2,
            up_rest2,
            up_pair,
            L,
            GATED,
            0,
            1,
            BITS,
            MODE,
            ZERO,
            UBITS,
            UMODE,
            UZERO,
            M,
        )
        acc, acc1 = multiply(b, a, x2, y2, 1, acc, acc1, N1)
        a = left_side(
            v3,
            rest2,
            pair,
            u3,
            up_rest2,
            up_pair,
            L,
            GATED,
            1,
            0,
            BITS,
            MODE,
            ZERO,
            UBITS,
            UMODE,
            UZERO,
            M,
        )
        # fourth quarter
        v = load_words(w, begin, row, q, i, coming, groups, BITS, 0)
        rest = load_rest(w, total, begin, row, q, coming, groups, BITS, MODE)
        pair2 = load_super(w, total, begin, row, q, coming, groups, BITS, MODE)
        up_pair2 = up_pair
        if GATED:
            u = load_words(up, begin, row, q, i, coming, groups, UBITS, 0)
            up_rest = load_rest(up, total, begin, row, q, coming, groups, UBITS, UMODE)
            up_pair2 = load_super(up, total, begin, row, q, coming, groups, UBITS, UMODE)
        arrived()
        acc, acc1 = multiply(a, b, x3, y3, 0, acc, acc1, N1)
        copy_rows(x1, at, y1, more_at, coming * 32 + 64, N1)
        b = left_side(
            v3,
            rest2,
            pair,
            u3,
            up_rest2,
            up_pair,
            L,
            GATED,
            1,
            1,
            BITS,
            MODE,
            ZERO,
            UBITS,
            UMODE,
            UZERO,
            M,
        )
        acc, acc1 = multiply(b, a, x3, y3, 1, acc, acc1, N1)
        pair, up_pair = pair2, up_pair2
        a = left_side(
            v,
            rest,
            pair,
            u,
            up_rest,
            up_pair,
            L,
            GATED,
            0,
            0,
            BITS,
            MODE,
            ZERO,
            UBITS,
            UMODE,
            UZERO,
            M,
        )
    async_copy.wait_group(0)
    if N1 > 0:
        acc, acc1, b = warpgroup_mma_wait(0, deps=[acc, acc1, b])
    else:
        acc, b = warpgroup_mma_wait(0, deps=[acc, b])
    store_tile(
        acc,
        scales,
        rows_of,
        out,
        out_stride,
        first,
        left,
        slot,
        count,
        GATHER,
        GATED,
        ADD,
        SCALED,
        M,
        N,
    )
    if N1 > 0:
        store_tile(
            acc1,
            scales,
            rows_of,
            out,
            out_stride,
            first,
            left,
            slot + N,
            count - N,
            GATHER,
            GATED,
            ADD,
            SCALED,
            M,
            N1,
        )
