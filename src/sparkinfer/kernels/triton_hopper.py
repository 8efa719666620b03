"""Packed weights as the left side of Hopper's matrix instructions, in Gluon: gate and up together, or one matrix.

A warp group's product takes its left side from registers and its right side from shared memory, and runs beside other
instructions. A weight's codes, read as whole words, are a thread's part of the left side without any exchange between
threads, because columns of the right side's rows stand in the order of `linear/triton_order.py`. So a step of 32
columns is decoded while the one before it is multiplied. Rows come into shared memory by asynchronous copies, in steps
of 64 columns, two steps ahead, and so do a weight's main words, which each thread copies for itself alone: to read them
ahead into registers there are too few of these.

Scales and minima are rounded to float16 before they meet the codes (`triton_halves`), times 64. Sums are float32, one
chain over the width per output: deterministic. Under Triton's interpreter there is no Gluon; `CudaBackend.warpgroups`
tells where these kernels may be used.

Tuples keep what belongs together:
  weight   words of a matrix and its form: BITS, MODE, ZERO as in `triton_quant` (planes: `linear/triton_pack.py`)
  place    rows of its planes, the tile's first one (int64), groups of a row; row [R, 1] from the first one on, group
           [1, 4] of a load and word [1, 1, 4] of a group of each element
  codes    what a thread holds of four groups of it: main words, (extra words, extra words, scales), supers
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparkinfer.kernels.triton_halves import half, pairs, twice

STEP = gl.constexpr(64)  # columns of a copy


@gluon.constexpr_function
def words_layout(rows, warps, alone=False):  # type: ignore[no-untyped-def]
    """Layout of [rows, 4 groups, 4 words] of one of two weights whose rows take turns, eight at a time, as the left
    side needs their codes. alone: of one weight; a thread has rows r and r + 8 of every 16.
    """
    registers = [[0, 0, 1], [0, 0, 2]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    at, warp = 8, []
    if alone:
        registers.append([8, 0, 0])
        at = 16
    while 2 ** len(warp) < warps:
        warp.append([at, 0, 0])
        at *= 2
    while at < rows:
        registers.append([at, 0, 0])
        at *= 2
    return gl.DistributedLinearLayout(registers, lanes, warp, [], [rows, 4, 4])


@gluon.jit
def _float(word):
    """The float16 in the low 16 bits, as float32."""
    return half(word).to(gl.float32)


@gluon.jit
def _signed_byte(word, SHIFT: gl.constexpr):
    return ((word << (24 - SHIFT)) >> 24).to(gl.float32)


@gluon.jit
def load_words(weight, place, k, H: gl.constexpr):
    """Main words of four groups from k on; of 8 bits those of codes 16 H and after."""
    BITS: gl.constexpr = weight[1]
    _, first, groups, row, q, i = place
    MAIN: gl.constexpr = 8 if BITS == 8 else 4
    at = (row * (groups * MAIN) + (q + k) * 4)[:, :, None] + i
    if BITS == 8 and H == 1:
        at += groups * 4
    return gl.load(weight[0] + first * (groups * MAIN) + at)


@gluon.jit
def words_memory(weight, R: gl.constexpr):
    """Shared memory for the main words of twice four groups; of 8 bits codes 16 and after have a plane of their own."""
    L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLANES: gl.constexpr = 2 if weight[1] == 8 else 1
    first = gl.allocate_shared_memory(gl.int32, [PLANES, R, 4, 4], L)
    return first, gl.allocate_shared_memory(gl.int32, [PLANES, R, 4, 4], L)


@gluon.jit
def copy_words(weight, target, place, k):
    """Start the copy of the main words of four groups from k on. No barrier: a thread copies what it will read."""
    BITS: gl.constexpr = weight[1]
    _, first, groups, row, q, i = place
    MAIN: gl.constexpr = 8 if BITS == 8 else 4
    at = weight[0] + first * (groups * MAIN) + ((row * (groups * MAIN) + q * 4)[:, :, None] + i)
    async_copy.async_copy_global_to_shared(target.index(0), at + k * 4)
    if BITS == 8:
        async_copy.async_copy_global_to_shared(target.index(1), at + (k + groups) * 4)


@gluon.jit
def load_rest(weight, place, k):
    """Extra words and scales of four groups from k on."""
    BITS: gl.constexpr = weight[1]
    MODE: gl.constexpr = weight[2]
    total, first, groups, row, q, _ = place
    MAIN: gl.constexpr = 8 if BITS == 8 else 4
    EXTRA: gl.constexpr = 1 if BITS == 5 else 2 if BITS == 6 else 0
    plane = weight[0] + total.to(gl.int64) * (groups * MAIN)
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
def load_super(weight, place, k):
    """Words d, dmin of the 256 columns from group k on."""
    BITS: gl.constexpr = weight[1]
    MODE: gl.constexpr = weight[2]
    total, first, groups, row, q, _ = place
    if MODE >= 2:
        MAIN: gl.constexpr = 8 if BITS == 8 else 4
        EXTRA: gl.constexpr = 1 if BITS == 5 else 2 if BITS == 6 else 0
        plane = weight[0] + total.to(gl.int64) * (groups * (MAIN + EXTRA))
        if MODE == 4:
            plane += total.to(gl.int64) * groups
        else:
            plane += (total // 2).to(gl.int64) * groups
        blocks = groups // 8
        return gl.load(plane + first * blocks + (row * blocks + k // 8) + 0 * q)
    else:
        return row + 0 * q


@gluon.jit
def first_codes(weight, place, words, W: gl.constexpr):
    """Codes of step 0 of the first 256 columns."""
    pair = load_super(weight, place, 0)
    return words[0].index(0).load(W), load_rest(weight, place, 0), pair


@gluon.jit
def load_ahead(weight, place, codes, k, coming, T: gl.constexpr):
    """Extra words, scales and supers of the four groups after those of step T, which is even; `coming` as below."""
    if T == 0:
        return load_rest(weight, place, k + 4), codes[2]
    else:
        return load_rest(weight, place, coming), load_super(weight, place, coming)


@gluon.jit
def codes_after(weight, words, codes, ahead, T: gl.constexpr, W: gl.constexpr):
    """Codes of the step after step T."""
    if T % 2 == 1:
        return words[(T // 2 + 1) % 2].index(0).load(W), ahead[0], ahead[1]
    elif weight[1] == 8:  # the upper codes of the same groups
        return words[T // 2].index(1).load(W), codes[1], codes[2]
    else:
        return codes


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
    return twice(s), twice(m)


@gluon.jit
def decoded(weight, codes, H: gl.constexpr, P: gl.constexpr, R: gl.constexpr):
    """float16 [R, 32]: words 2 P, 2 P + 1 of codes 16 H and after, of four groups."""
    BITS: gl.constexpr = weight[1]
    words, rest, pair = codes
    a, b, word = rest
    early, late = gl.split(gl.permute(gl.reshape(words, [R, 4, 2, 2]), (0, 1, 3, 2)))
    q = early if P == 0 else late
    L: gl.constexpr = q.type.layout
    S: gl.constexpr = gl.SliceLayout(2, L)
    i = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :] + 2 * P
    if BITS == 6:
        more = gl.convert_layout(a if H == 0 else b, S, assert_trivial=True)[:, :, None]
        q = q << 2 if H == 0 else q >> 2
        q = (q & 0x3C3C3C3C) | ((more << (6 - 2 * i)) & -0x3F3F3F40)
    elif BITS != 8:
        q = (q if H == 0 else q >> 4) & 0x0F0F0F0F
        if BITS == 5:
            more = gl.convert_layout(a, S, assert_trivial=True)[:, :, None]
            q = q | ((more << (4 - i) if H == 0 else more >> i) & 0x10101010)
    s, m = _scales(word, pair, H, weight[2], weight[3])
    s = gl.convert_layout(s, S, assert_trivial=True)[:, :, None]
    m = gl.convert_layout(m, S, assert_trivial=True)[:, :, None]
    low, high = pairs(q, s, m, BITS == 6 or BITS == 8)
    first = gl.join(half(low), half(low >> 16))
    second = gl.join(half(high), half(high >> 16))
    both = gl.join(first, second)  # row, group, word, place in a pair, pair
    return gl.reshape(gl.permute(both, (0, 2, 4, 1, 3)), [R, 32])


@gluon.jit
def left_side(weights, codes, H: gl.constexpr, P: gl.constexpr, L: gl.constexpr, M: gl.constexpr):
    """float16 [M, 32]: eight rows of gate, eight of up, in turns."""
    gate = decoded(weights[0], codes[0], H, P, M // 2)
    up = decoded(weights[1], codes[1], H, P, M // 2)
    both = gl.reshape(gl.join(gate, up), [M // 16, 8, 32, 2])
    return gl.convert_layout(gl.reshape(gl.permute(both, (0, 3, 1, 2)), [M, 32]), L)


@gluon.jit
def row_pointers(rows, slot, count, N: gl.constexpr, NW: gl.constexpr):
    """Where the rows of N slots begin, [N, STEP]; beyond `count` the last one again."""
    x, x_stride, rows_of, _ = rows
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    n = gl.minimum(gl.arange(0, N, gl.SliceLayout(1, L)), count - 1) + slot
    n = gl.load(rows_of + n).to(gl.int32)
    return x + ((n * x_stride)[:, None] + gl.arange(0, STEP, gl.SliceLayout(0, L))[None, :])


@gluon.jit
def prepared(rows, slot, count, M: gl.constexpr, N: gl.constexpr, NW: gl.constexpr):
    """Shared memory for four steps of the rows of N slots, where these begin, and their sums."""
    buffers = ()
    for _ in gl.static_range(4):  # apart: of parts of one, the compiler would not know that
        buffer = gl.allocate_shared_memory(gl.float16, [N, STEP], gl.NVMMASharedLayout(128, 16, 2))
        buffers = buffers + (buffer,)  # noqa: RUF005 Triton knows no unpacking
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, N, 16])
    return buffers, row_pointers(rows, slot, count, N, NW), gl.zeros([M, N], gl.float32, A)


@gluon.jit
def copy_rows(shared, at, T: gl.constexpr, k):
    """Start the copy of step T of all rows' 256 columns from group k on."""
    for n in gl.static_range(len(at)):
        async_copy.async_copy_global_to_shared(shared[n][T], at[n] + (k * 32 + T * STEP))
    async_copy.commit_group()


@gluon.jit
def product(a, right, acc):
    L: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    if L != a.type.layout:
        a = gl.convert_layout(a, L)
    return warpgroup_mma(a, right, acc, is_async=True)


@gluon.jit
def multiply(a, before, shared, T: gl.constexpr, P: gl.constexpr, sums):
    """Start sums += a . rows for columns 32 P to 32 P + 31 of step T; the product before it has ended then, and its
    left side may be overwritten.
    """
    started = ()
    for n in gl.static_range(len(sums)):
        right = shared[n][T].slice(32 * P, 32, 1).permute((1, 0))
        started = started + (product(a, right, sums[n]),)  # noqa: RUF005 Triton knows no unpacking
    done = warpgroup_mma_wait(len(sums), deps=started + (before,))  # noqa: RUF005
    return done[: len(sums)]


@gluon.jit
def step(
    sums, a, b, weights, place, codes, ahead, words, shared, at, k, coming,
    T: gl.constexpr, L: gl.constexpr, W: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Step T of the 256 columns from group k on: its first half is decoded in a, and b is free. Decode the second half
    and the next step's first, and ask for what comes: the rows of two steps on, and once its last code is decoded, what
    follows in the place of a step's words.

    The older of two copies is there for all warps: a barrier comes with the wait. A fence between copies and matrix
    instructions would wait for the younger copy too; the compiler's own pipelines have none either.
    """
    if T % 2 == 0:
        ahead = (
            load_ahead(weights[0], place, codes[0], k, coming, T),
            load_ahead(weights[1], place, codes[1], k, coming, T),
        )
    async_copy.wait_group(1)
    sums = multiply(a, b, shared, T, 0, sums)
    if T % 2 == 0:
        copy_rows(shared, at, (T + 2) % 4, k if T < 2 else coming)
    b = left_side(weights, codes, T % 2, 1, L, M)
    if T % 2 == 1:
        after = gl.minimum(k + 6 + 2 * T, place[2] - 4)
        copy_words(weights[0], words[0][T // 2], place, after)
        copy_words(weights[1], words[1][T // 2], place, after)
        copy_rows(shared, at, (T + 2) % 4, k if T < 2 else coming)
    sums = multiply(b, a, shared, T, 1, sums)
    codes = (
        codes_after(weights[0], words[0], codes[0], ahead[0], T, W),
        codes_after(weights[1], words[1], codes[1], ahead[1], T, W),
    )
    return sums, left_side(weights, codes, (T + 1) % 2, 0, L, M), b, codes, ahead


@gluon.jit
def store_tile(acc, rows, outputs, slot, count, M: gl.constexpr, N: gl.constexpr):
    _, _, rows_of, scales = rows
    out, out_stride, first, left = outputs
    parts = gl.reshape(acc, [M // 16, 2, 8, N])
    a, b = gl.split(gl.permute(parts, (0, 2, 3, 1)))
    a, b = gl.reshape(a, [M // 2, N]), gl.reshape(b, [M // 2, N])
    L: gl.constexpr = a.type.layout
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    live = n < count
    source = gl.load(rows_of + (slot + n), mask=live, other=0).to(gl.int32)
    scale = (gl.load(scales + source, mask=live, other=0.0) * 0.015625)[None, :]
    a = a * scale
    a = a * (1.0 / (1.0 + gl.exp(-a))) * (b * scale)
    m = gl.arange(0, M // 2, gl.SliceLayout(1, L))
    to = out + ((slot + n).to(gl.int64) * out_stride)[None, :] + (first + m)[:, None]
    gl.store(to, a.to(out.dtype.element_ty), mask=live[None, :] & (m < left)[:, None])


@gluon.jit
def gated_tile(
    rows, weights, planes, outputs, slot, count, M: gl.constexpr, NS: gl.constexpr, NW: gl.constexpr
):  # fmt: skip
    """silu(gate . x) * (up . x): M / 2 values of as many slots as the powers of two NS are together.

    A product of two float16 numbers of magnitude 1 is 64 here.
    """
    total, begin, groups = planes
    out, out_stride, first, width = outputs
    left = width - first
    W: gl.constexpr = words_layout(M // 2, NW)
    Q: gl.constexpr = gl.SliceLayout(2, W)
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, NS[0], 16])
    L: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    row = gl.minimum(gl.arange(0, M // 2, gl.SliceLayout(1, Q)), left - 1)[:, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, Q))[None, :]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, W)))[None, None, :]
    place = (total, begin, groups, row, q, i)
    shared, at, sums, done = (), (), (), 0
    for n in gl.static_range(len(NS)):
        buffers, pointers, zeros = prepared(rows, slot + done, count - done, M, NS[n], NW)
        shared, at, sums = shared + (buffers,), at + (pointers,), sums + (zeros,)  # noqa: RUF005
        done += NS[n]
    words = (words_memory(weights[0], M // 2), words_memory(weights[1], M // 2))
    copy_words(weights[0], words[0][0], place, 0)
    copy_words(weights[1], words[1][0], place, 0)
    async_copy.commit_group()
    copy_rows(shared, at, 0, 0)
    copy_words(weights[0], words[0][1], place, 4)
    copy_words(weights[1], words[1][1], place, 4)
    copy_rows(shared, at, 1, 0)
    async_copy.wait_group(2)
    codes = (
        first_codes(weights[0], place, words[0], W),
        first_codes(weights[1], place, words[1], W),
    )
    ahead = ((codes[0][1], codes[0][2]), (codes[1][1], codes[1][2]))
    a = left_side(weights, codes, 0, 0, L, M)
    b = a
    for k in range(0, groups, 8):
        coming = gl.minimum(k + 8, groups - 8)
        for T in gl.static_range(4):
            sums, a, b, codes, ahead = step(
                sums, a, b, weights, place, codes, ahead, words, shared, at, k, coming, T, L, W, M
            )
    async_copy.wait_group(0)
    sums = warpgroup_mma_wait(0, deps=sums + (b,))  # noqa: RUF005
    done = 0
    for n in gl.static_range(len(NS)):
        outputs = (out, out_stride, first, left)
        store_tile(sums[n], rows, outputs, slot + done, count - done, M, NS[n])
        done += NS[n]


@gluon.jit
def gated_tiles(
    rows, weights, planes, outputs, slot, count, M: gl.constexpr, NW: gl.constexpr
):  # fmt: skip
    """Up to 128 slots, as 32, 64, 96 or 128: where experts are used unevenly, most tiles are not full.

    rows: x, its stride, which of its rows each slot has (from `slot` on `count` of them), the rows' scales.
    weights: gate and up. planes: rows of theirs, the first one of the tile (int64), groups of a row.
    outputs: the slots' rows of values, their stride, the tile's first column, columns.
    """
    if count > 96:
        gated_tile(rows, weights, planes, outputs, slot, count, M, (128,), NW)
    elif count > 64:
        gated_tile(rows, weights, planes, outputs, slot, count, M, (64, 32), NW)
    elif count > 32:
        gated_tile(rows, weights, planes, outputs, slot, count, M, (64,), NW)
    elif count > 0:
        gated_tile(rows, weights, planes, outputs, slot, count, M, (32,), NW)
