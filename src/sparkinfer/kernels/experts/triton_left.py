"""Routed experts for long prompts on Hopper: their packed weights are the left side, decoded into registers.

The down product's rows are short: those of a tile of slots stay in shared memory while the weights of many outputs come
by, straight into registers, and no warp waits for another.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from sparkinfer.backend.base import Activation
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.experts import ExpertBuffers
from sparkinfer.kernels.linear.triton_order import LARGEST, SPAN, ordered_rows
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.linear.triton_wide import constants
from sparkinfer.kernels.route import Routing
from sparkinfer.kernels.triton_hopper import (
    STEP,
    decoded,
    gated_tiles,
    load_rest,
    load_super,
    load_words,
    multiply,
    words_layout,
)

SLOTS = 128  # of a tile
OUTPUTS, WARPS = 128, 8  # of a tile (gate and up together) and a program
REGISTERS = 128  # of a thread: two programs on a multiprocessor
DOWN_OUTPUTS = 128  # that a program of the down product takes at once
PARTS = 4  # of the outputs, programs of a tile of slots
MOST = 512  # columns of a row that stays in shared memory
_SCALE = gl.constexpr(1.0 / (64.0 * getattr(LARGEST, "value", LARGEST)))


@gluon.jit
def left_hidden_kernel(
    x, x_stride, scales, rows_of, tiles, gate, up, total, expert_rows, groups, out, out_stride,
    GBITS: gl.constexpr, GMODE: gl.constexpr, GZERO: gl.constexpr,
    UBITS: gl.constexpr, UMODE: gl.constexpr, UZERO: gl.constexpr,
    M: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """hidden[slot] = silu(gate_e . x) * (up_e . x) for M / 2 values and up to SLOTS slots of an expert."""
    at = tiles + 4 * gl.program_id(1)
    expert, slot, count = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    first = gl.program_id(0) * (M // 2)
    begin = expert.to(gl.int64) * expert_rows + first
    gated_tiles(
        (x, x_stride, rows_of, scales), ((gate, GBITS, GMODE, GZERO), (up, UBITS, UMODE, UZERO)),
        (total, begin, groups), (out, out_stride, first, expert_rows), slot, count, M, NW,
    )  # fmt: skip


def record_left_hidden(
    recorder: CudaRecorder,
    x: Activation,
    gate: TritonWeight,
    up: TritonWeight,
    routing: Routing,
    buffers: ExpertBuffers,
    tiles: tuple[torch.Tensor, int],
) -> None:
    """The hidden rows as float32. tiles: `tile_table` of SLOTS, and how many there are."""
    rows = recorder.rows
    pairs = rows * routing.used
    form = ordered_rows(recorder, x.f32.array, gate.inputs, rows, "rows")
    rows_of = routing.table.array[0, 1 + pairs + 3 * min(routing.experts, pairs) :]
    out = buffers.hidden.f32.array
    recorder.launch(
        left_hidden_kernel, (-(-2 * gate.outputs // OUTPUTS), tiles[1]),
        form.halves, form.stride, form.scales, rows_of, tiles[0],
        gate.words, up.words, gate.total, gate.padded_outputs, gate.groups, out, out.stride(0),
        **constants(gate, "G"), **constants(up, "U"), M=OUTPUTS, NW=WARPS, num_warps=WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip


@gluon.constexpr_function
def pairs_layout(rows, columns, warps):  # type: ignore[no-untyped-def]
    """Layout of results [outputs, slots] with neighbouring outputs side by side in a thread."""
    registers, at = [[1, 0], [0, 1]], 8
    while at < columns:
        registers.append([0, at])
        at *= 2
    warp, at = [], 16
    while 2 ** len(warp) < warps:
        warp.append([at, 0])
        at *= 2
    while at < rows:
        registers.append([at, 0])
        at *= 2
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warp, [], [rows, columns])


@gluon.jit
def store_halves(
    acc, outputs, slot, count, STRIDE: gl.constexpr, M: gl.constexpr, N: gl.constexpr, NW: gl.constexpr
):  # fmt: skip
    out, first = outputs
    L: gl.constexpr = pairs_layout(M, N, NW)
    a = gl.reshape(gl.permute(gl.reshape(acc, [M // 16, 2, 8, N]), (0, 2, 1, 3)), [M, N])
    a = gl.convert_layout((a * _SCALE).to(gl.float16), L, assert_trivial=True)
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    m = gl.arange(0, M, gl.SliceLayout(1, L))
    to = out + (slot.to(gl.int64) * STRIDE + first) + ((n * STRIDE)[None, :] + m[:, None])
    gl.store(to, a, mask=(n < count)[None, :] & (m >= 0)[:, None])


@gluon.jit
def resident_rows(x, x_stride, slot, count, N: gl.constexpr, K: gl.constexpr, NW: gl.constexpr):
    """Start the copy of all K columns of N slots, beyond `count` the last one's again, in steps."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    n = gl.minimum(gl.arange(0, N, gl.SliceLayout(1, L)), count - 1) + slot
    at = x + ((n * x_stride)[:, None] + gl.arange(0, STEP, gl.SliceLayout(0, L))[None, :])
    buffers = ()
    for T in gl.static_range(K // STEP):
        buffer = gl.allocate_shared_memory(gl.float16, [N, STEP], gl.NVMMASharedLayout(128, 16, 2))
        async_copy.async_copy_global_to_shared(buffer, at + T * STEP)
        buffers = buffers + (buffer,)  # noqa: RUF005 Triton knows no unpacking
    return buffers


@gluon.jit
def no_sums(M: gl.constexpr, N: gl.constexpr, NW: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, N, 16])
    return gl.zeros([M, N], gl.float32, L)


@gluon.jit
def half_codes(weight, place, k):
    """Codes of four groups from k on."""
    return (
        load_words(weight, place, k, 0),
        load_rest(weight, place, k),
        load_super(weight, place, k),
    )


@gluon.jit
def half_step(sums, a, b, weight, codes, shared, T: gl.constexpr, L: gl.constexpr, M: gl.constexpr):
    """Step T of the rows, with codes of its half of the groups: its first half is decoded in a, and b is free."""
    sums = multiply(a, b, shared, T, 0, sums)
    b = gl.convert_layout(decoded(weight, codes, T % 2, 1, M), L)
    return multiply(b, a, shared, T, 1, sums), b


@gluon.jit
def upper_codes(weight, place, codes, k):
    """Codes for the second step of four groups: of 8 bits they have words of their own."""
    if weight[1] == 8:
        return load_words(weight, place, k, 1), codes[1], codes[2]
    else:
        return codes


@gluon.jit
def down_tile(
    rows, weight, planes, outputs, slot, count, turns, STRIDE: gl.constexpr, M: gl.constexpr, NS: gl.constexpr,
    K: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """`turns` times M outputs of as many slots as the powers of two NS are together."""
    x, x_stride = rows
    total, begin, groups = planes
    out, first = outputs
    W: gl.constexpr = words_layout(M, NW, True)
    Q: gl.constexpr = gl.SliceLayout(2, W)
    m = gl.arange(0, M, gl.SliceLayout(1, Q))
    row = ((m & -16) + 2 * (m & 7) + ((m >> 3) & 1))[
        :, None
    ]  # outputs 2 r, 2 r + 1 in rows r, r + 8
    q = gl.arange(0, 4, gl.SliceLayout(0, Q))[None, :]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, W)))[None, None, :]
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, NS[0], 16])
    L: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    shared, done = (), 0
    for n in gl.static_range(len(NS)):
        shared = shared + (resident_rows(x, x_stride, slot + done, count - done, NS[n], K, NW),)  # noqa: RUF005
        done += NS[n]
    async_copy.commit_group()
    place = (total, begin, groups, row, q, i)
    codes, others = half_codes(weight, place, 0), half_codes(weight, place, 4)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    for turn in range(turns):
        sums = ()
        for n in gl.static_range(len(NS)):
            sums = sums + (no_sums(M, NS[n], NW),)  # noqa: RUF005
        here = (total, begin, groups, row, q, i)
        a = gl.convert_layout(decoded(weight, codes, 0, 0, M), L)
        b = a
        for span in gl.static_range(K // 256):
            k = 8 * span
            after, coming = here, k + 8
            if span == K // 256 - 1:  # the next outputs
                after, coming = (
                    (total, begin + gl.where(turn + 1 < turns, M, 0), groups, row, q, i),
                    0,
                )
            codes1 = upper_codes(weight, here, codes, k)
            sums, b = half_step(sums, a, b, weight, codes, shared, 4 * span, L, M)
            a = gl.convert_layout(decoded(weight, codes1, 1, 0, M), L)
            sums, b = half_step(sums, a, b, weight, codes1, shared, 4 * span + 1, L, M)
            codes = half_codes(weight, after, coming)
            a = gl.convert_layout(decoded(weight, others, 0, 0, M), L)
            codes1 = upper_codes(weight, here, others, k + 4)
            sums, b = half_step(sums, a, b, weight, others, shared, 4 * span + 2, L, M)
            a = gl.convert_layout(decoded(weight, codes1, 1, 0, M), L)
            sums, b = half_step(sums, a, b, weight, codes1, shared, 4 * span + 3, L, M)
            others = half_codes(weight, after, coming + 4)
            if span < K // 256 - 1:
                a = gl.convert_layout(decoded(weight, codes, 0, 0, M), L)
        sums = warpgroup_mma_wait(0, deps=sums + (b,))  # noqa: RUF005
        done = 0
        for n in gl.static_range(len(NS)):
            store_halves(sums[n], (out, first), slot + done, count - done, STRIDE, M, NS[n], NW)
            done += NS[n]
        begin += M
        first += M


@gluon.jit
def down_tiles(
    rows, weight, planes, outputs, slot, count, turns, STRIDE: gl.constexpr, M: gl.constexpr, K: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Up to 128 slots, as 32, 64, 96 or 128."""
    if count > 96:
        down_tile(rows, weight, planes, outputs, slot, count, turns, STRIDE, M, (128,), K, NW)
    elif count > 64:
        down_tile(rows, weight, planes, outputs, slot, count, turns, STRIDE, M, (64, 32), K, NW)
    elif count > 32:
        down_tile(rows, weight, planes, outputs, slot, count, turns, STRIDE, M, (64,), K, NW)
    elif count > 0:
        down_tile(rows, weight, planes, outputs, slot, count, turns, STRIDE, M, (32,), K, NW)


@gluon.jit
def left_out_kernel(
    x, x_stride, tiles, w, total, expert_rows, groups, turns, out, scales,
    BITS: gl.constexpr, MODE: gl.constexpr, ZERO: gl.constexpr, STRIDE: gl.constexpr, M: gl.constexpr, K: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """out[slot] = down_e . hidden[slot] over the largest of the hidden row: turns x M outputs of up to SLOTS slots of
    an expert. `scales`, LARGEST of which are that magnitude, are for the sum.
    """
    at = tiles + 4 * gl.program_id(1)
    expert, slot, count = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    first = gl.program_id(0) * (M * turns)
    down_tiles(
        (x, x_stride), (w, BITS, MODE, ZERO), (total, expert.to(gl.int64) * expert_rows + first, groups), (out, first),
        slot, count, turns, STRIDE, M, K, NW,
    )  # fmt: skip


def fits_down(down: TritonWeight) -> bool:
    """Whether the rows fit in shared memory, and the outputs whole tiles."""
    inputs = down.groups * 32
    return inputs <= MOST and inputs % SPAN == 0 and down.padded_outputs % DOWN_OUTPUTS == 0


def record_left_out(
    recorder: CudaRecorder,
    down: TritonWeight,
    routing: Routing,
    buffers: ExpertBuffers,
    tiles: tuple[torch.Tensor, int],
) -> None:
    """The slots' results as `triton_large.record_out` leaves them. tiles: as above."""
    slots = recorder.rows * routing.used
    form = ordered_rows(recorder, buffers.hidden.f32.array, down.inputs, slots, "slots")
    out = buffers.out.array.view(torch.float16)
    turns = down.padded_outputs // DOWN_OUTPUTS
    parts = next(n for n in (PARTS, 2, 1) if turns % n == 0)
    recorder.launch(
        left_out_kernel, (parts, tiles[1]),
        form.halves, form.stride, tiles[0], down.words, down.total, down.padded_outputs, down.groups, turns // parts,
        out, form.scales,
        **constants(down), STRIDE=out.stride(0), M=DOWN_OUTPUTS, K=down.groups * 32, NW=WARPS, num_warps=WARPS,
    )  # fmt: skip
