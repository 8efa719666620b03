"""Chunks of the delta rule on Hopper, in Gluon: `triton_wide`'s three steps in two launches.

`hopper_chunk_kernel` is its `chunk_kernel` with a left side that stays in registers. `state_kernel` takes 64 columns of
a head's state through all chunks and gives the rows' results as well. It keeps the state transposed: what one product
gives is the left side of the next, in the same registers, so that nothing but what `hopper_chunk_kernel` left comes
through shared memory, copied there while other products run.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.gated_delta.triton_wide import (
    BLOCK,
    CHUNK,
    chunk_buffers,
    chunk_inputs,
    log_decay,
    parts,
    store_parts,
    unit_scale,
)
from sparkinfer.kernels.shapes import RecurrentShape
from sparkinfer.kernels.triton_mixers import WORD_RECURRENT, stride_of

WARPS = 4  # of a program
_NW = gl.constexpr(WARPS)
_WORD = gl.constexpr(int(getattr(WORD_RECURRENT, "value", WORD_RECURRENT)))
COLUMNS = gl.constexpr(64)  # of the state, of a program: what a warp group's product has


@gluon.jit
def split_parts(x, L: gl.constexpr):
    high, low = parts(x)
    return gl.convert_layout(high, L), gl.convert_layout(low, L)


@gluon.jit
def copy_parts(source, row, barrier, high, low, ROWS: gl.constexpr, on):
    """Both parts of a matrix of ROWS rows, which follow each other."""
    tma.async_copy_global_to_shared(source, [row, 0], barrier, high, pred=on)
    tma.async_copy_global_to_shared(source, [row + ROWS, 0], barrier, low, pred=on)


@gluon.jit
def three(acc, a_high, a_low, b_high, b_low):
    acc = warpgroup_mma(a_low, b_high, acc, is_async=True)
    acc = warpgroup_mma(a_high, b_low, acc, is_async=True)
    return warpgroup_mma(a_high, b_high, acc, is_async=True)


@gluon.jit(do_not_specialize=["rows", "layer"])
def state_kernel(
    u, w, keys, queries, inside, scales, decays, run, out, rows, layer,
    KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr, SIZE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """64 columns of one head's state through all chunks and the same columns of the rows' results.

    u [chunk, head, SIZE, CHUNK] float32; w (its sign turned) and keys [chunk, head, 2, CHUNK, SIZE], queries [chunk,
    key head, 2, CHUNK, SIZE] and inside [chunk, head, 2, CHUNK, CHUNK] bfloat16 in two parts. The state is kept
    transposed: what a product gives is the left side of the next one, in the same registers.
    """
    C: gl.constexpr = COLUMNS
    NW: gl.constexpr = _NW
    SA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, SIZE, 16])  # [C, SIZE]
    CA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, CHUNK, 16])  # [C, CHUNK]
    SL: gl.constexpr = gl.DotOperandLayout(0, CA, 2)
    CL: gl.constexpr = gl.DotOperandLayout(0, SA, 2)
    CO: gl.constexpr = gl.DotOperandLayout(0, CA, 2)
    part, head = gl.program_id(0), gl.program_id(1)
    key_head = head % KEY_HEADS
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(4):
        mbarrier.init(bars.index(b), count=1)
    w_high = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], w.layout)
    w_low = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], w.layout)
    q_high = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], w.layout)
    q_low = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], w.layout)
    k_high = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], w.layout)
    k_low = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], w.layout)
    p_high = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], inside.layout)
    p_low = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], inside.layout)
    u_now = gl.allocate_shared_memory(gl.float32, [C, CHUNK], u.layout)
    r_now = gl.allocate_shared_memory(gl.float32, [CHUNK, C], out.layout)
    BIG: gl.constexpr = CHUNK * SIZE * 4
    chunks = (rows + CHUNK - 1) // CHUNK
    state = gl.load(run + _WORD).to(gl.pointer_type(gl.float32), bitcast=True)
    state += (layer.to(gl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    c_s = part * C + gl.arange(0, C, gl.SliceLayout(1, SA))
    d_s = gl.arange(0, SIZE, gl.SliceLayout(0, SA))
    place = d_s[None, :] * SIZE + c_s[:, None]
    i = gl.arange(0, CHUNK, gl.SliceLayout(0, CA))
    on = chunks > 0
    mbarrier.expect(bars.index(0), BIG + C * CHUNK * 4, pred=on)
    tma.async_copy_global_to_shared(u, [head * SIZE + part * C, 0], bars.index(0), u_now, pred=on)
    copy_parts(w, head * 2 * CHUNK, bars.index(0), w_high, w_low, CHUNK, on)
    mbarrier.expect(bars.index(1), BIG, pred=on)
    copy_parts(queries, key_head * 2 * CHUNK, bars.index(1), q_high, q_low, CHUNK, on)
    mbarrier.expect(bars.index(2), BIG, pred=on)
    copy_parts(keys, head * 2 * CHUNK, bars.index(2), k_high, k_low, CHUNK, on)
    mbarrier.expect(bars.index(3), CHUNK * CHUNK * 4, pred=on)
    copy_parts(inside, head * 2 * CHUNK, bars.index(3), p_high, p_low, CHUNK, on)
    s = gl.load(state + place)
    s_high, s_low = split_parts(s, SL)
    for chunk in range(chunks):
        phase = chunk & 1
        on = chunk + 1 < chunks
        then = (chunk + 1) * VALUE_HEADS + head
        here = chunk * VALUE_HEADS + head
        decay = gl.load(decays + here)
        scale = gl.load(scales + here * CHUNK + i)
        mbarrier.wait(bars.index(0), phase, deps=(w_high, w_low, u_now))
        change = three(u_now.load(CA), s_high, s_low, w_high.permute((1, 0)), w_low.permute((1, 0)))
        mbarrier.wait(bars.index(1), phase, deps=(q_high, q_low))
        result = gl.zeros([C, CHUNK], gl.float32, CA)
        result = three(result, s_high, s_low, q_high.permute((1, 0)), q_low.permute((1, 0)))
        change, result = warpgroup_mma_wait(3, deps=[change, result])
        gl.thread_barrier()
        mbarrier.expect(bars.index(0), BIG + C * CHUNK * 4, pred=on)
        tma.async_copy_global_to_shared(
            u, [then * SIZE + part * C, 0], bars.index(0), u_now, pred=on
        )
        copy_parts(w, then * 2 * CHUNK, bars.index(0), w_high, w_low, CHUNK, on)
        c_high, c_low = split_parts(change, CL)
        s = s * decay
        mbarrier.wait(bars.index(2), phase, deps=(k_high, k_low))
        s = three(s, c_high, c_low, k_high, k_low)
        s, result, s_high, s_low = warpgroup_mma_wait(3, deps=[s, result, s_high, s_low])
        gl.thread_barrier()
        mbarrier.expect(bars.index(1), BIG, pred=on)
        copy_parts(
            queries, ((chunk + 1) * KEY_HEADS + key_head) * 2 * CHUNK, bars.index(1), q_high, q_low, CHUNK, on,
        )  # fmt: skip
        result = result * scale[None, :]
        mbarrier.wait(bars.index(3), phase, deps=(p_high, p_low))
        c_high, c_low = gl.convert_layout(c_high, CO), gl.convert_layout(c_low, CO)
        result = three(result, c_high, c_low, p_high.permute((1, 0)), p_low.permute((1, 0)))
        s, result = warpgroup_mma_wait(3, deps=[s, result])
        gl.thread_barrier()
        mbarrier.expect(bars.index(2), BIG, pred=on)
        copy_parts(keys, then * 2 * CHUNK, bars.index(2), k_high, k_low, CHUNK, on)
        s_high, s_low = split_parts(s, SL)
        result, c_high, c_low, s_high, s_low = warpgroup_mma_wait(
            0, deps=[result, c_high, c_low, s_high, s_low]
        )
        gl.thread_barrier()
        mbarrier.expect(bars.index(3), CHUNK * CHUNK * 4, pred=on)
        copy_parts(inside, then * 2 * CHUNK, bars.index(3), p_high, p_low, CHUNK, on)
        tma.store_wait(0)
        gl.thread_barrier()
        r_now.permute((1, 0)).store(result)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [chunk * CHUNK, head * SIZE + part * C], r_now)
    # its address again: kept in registers, a pointer an element, it would push others out
    state = gl.load(run + _WORD).to(gl.pointer_type(gl.float32), bitcast=True)
    state += (layer.to(gl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    gl.store(state + place, s)
    tma.store_wait(0)
    for b in gl.static_range(4):
        mbarrier.invalidate(bars.index(b))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def keep(high_at, low_at, x):
    """Put both parts into shared memory for the next products."""
    high, low = parts(x)
    gl.thread_barrier()
    high_at.store(high)
    low_at.store(low)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def series_end(x, one, high_at, low_at, L: gl.constexpr):
    """(I - x)(I + x^2)(I + x^4); x's parts are in shared memory."""
    x_high, x_low = split_parts(x, L)
    square = three(gl.zeros_like(x), x_high, x_low, high_at, low_at)
    square, x_high, x_low = warpgroup_mma_wait(0, deps=[square, x_high, x_low])
    total = one - x
    keep(high_at, low_at, square)
    t_high, t_low = split_parts(total, L)
    s_high, s_low = split_parts(square, L)
    fourth = three(gl.zeros_like(x), s_high, s_low, high_at, low_at)
    more = three(gl.zeros_like(x), t_high, t_low, high_at, low_at)
    fourth, more, s_high, s_low, t_high, t_low = warpgroup_mma_wait(
        0, deps=[fourth, more, s_high, s_low, t_high, t_low]
    )
    total += more  # outside of the products: their own sums lose bits
    keep(high_at, low_at, fourth)
    t_high, t_low = split_parts(total, L)
    more = three(gl.zeros_like(x), t_high, t_low, high_at, low_at)
    more, t_high, t_low = warpgroup_mma_wait(0, deps=[more, t_high, t_low])
    return total + more


@gluon.jit
def rows_of(source, stride, row, rows, SIZE: gl.constexpr, L: gl.constexpr):
    at = (
        source
        + row.to(gl.int64)[:, None] * stride
        + gl.arange(0, SIZE, gl.SliceLayout(0, L))[None, :]
    )
    return gl.load(at, mask=(row < rows)[:, None], other=0.0)


@gluon.jit(do_not_specialize=["rows"])
def hopper_chunk_kernel(
    qkv, qkv_stride, alpha, alpha_stride, beta, beta_stride, rates, biases, u, w, keys, queries, inside, scales, decays,
    rows, eps, factor, KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr, SIZE: gl.constexpr, CHUNK: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    NW: gl.constexpr = _NW
    LD: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [NW, 1], [1, 0])
    VL: gl.constexpr = gl.BlockedLayout([2], [32], [NW], [0])
    CA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, CHUNK, 16])  # [CHUNK, CHUNK]
    BA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, SIZE, 16])  # [CHUNK, SIZE]
    L: gl.constexpr = gl.DotOperandLayout(0, CA, 2)
    BL: gl.constexpr = gl.DotOperandLayout(0, BA, 2)
    SH: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    chunk, head = gl.program_id(0), gl.program_id(1)
    key_head = head % KEY_HEADS
    k_high = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], SH)
    k_low = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], SH)
    q_high = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], SH)
    q_low = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, SIZE], SH)
    # decays
    r_v = chunk * CHUNK + gl.arange(0, CHUNK, VL)
    mine = r_v < rows
    log = log_decay(
        gl.load(alpha + r_v * alpha_stride + head, mask=mine, other=0.0),
        gl.load(biases + head),
        gl.load(rates + head),
    )
    log = gl.where(mine, log, 0.0).to(gl.float64)
    total = gl.associative_scan(log, 0, add)
    last = gl.sum(log, 0)
    gate = gl.load(beta + r_v * beta_stride + head, mask=mine, other=0.0)
    gate = gl.where(mine, 1.0 / (1.0 + gl.exp(-gate)), 0.0)
    place_v = (chunk * VALUE_HEADS + head).to(gl.int64) * CHUNK + gl.arange(0, CHUNK, VL)
    gl.store(scales + place_v, gl.exp(total.to(gl.float32)))
    gl.store(decays + chunk * VALUE_HEADS + head, gl.exp(last.to(gl.float32)))
    # keys and queries
    RL: gl.constexpr = gl.SliceLayout(1, LD)
    i_l = gl.arange(0, CHUNK, RL)
    row = chunk * CHUNK + i_l
    d_l = gl.arange(0, SIZE, gl.SliceLayout(0, LD))
    k = rows_of(qkv + (KEY_HEADS + key_head) * SIZE, qkv_stride, row, rows, SIZE, LD)
    k = k * unit_scale(k, eps)[:, None]
    high, low = parts(k)
    k_high.store(high)
    k_low.store(low)
    fade = gl.convert_layout(gl.exp((last - total).to(gl.float32)), RL)
    here = (chunk * VALUE_HEADS + head).to(gl.int64)
    both = (here * 2 * CHUNK + i_l)[:, None] * SIZE + d_l[None, :]
    store_parts(keys + both, k * fade[:, None], CHUNK * SIZE)
    q = rows_of(qkv + key_head * SIZE, qkv_stride, row, rows, SIZE, LD)
    q = q * (unit_scale(q, eps) * factor)[:, None]
    high, low = parts(q)
    q_high.store(high)
    q_low.store(low)
    if head < KEY_HEADS:
        at = (
            queries
            + ((chunk * KEY_HEADS + head).to(gl.int64) * 2 * CHUNK + i_l)[:, None] * SIZE
            + d_l[None, :]
        )
        gl.store(at, high)
        gl.store(at + CHUNK * SIZE, low)
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, CA)
    k_across, k_below = k_high.permute((1, 0)), k_low.permute((1, 0))
    answers = three(zero, k_high, k_low, k_across, k_below)
    inner = three(zero, q_high, q_low, k_across, k_below)
    i, j = gl.arange(0, CHUNK, gl.SliceLayout(1, CA)), gl.arange(0, CHUNK, gl.SliceLayout(0, CA))
    t_i = gl.convert_layout(total, gl.SliceLayout(1, CA))
    t_j = gl.convert_layout(total, gl.SliceLayout(0, CA))
    g_i = gl.convert_layout(gate, gl.SliceLayout(1, CA))
    lower = i[:, None] >= j[None, :]
    ratio = gl.where(
        lower, gl.exp(gl.where(lower, t_i[:, None] - t_j[None, :], 0.0).to(gl.float32)), 0.0
    )
    answers, inner = warpgroup_mma_wait(0, deps=[answers, inner])
    store_parts(
        inside + (here * 2 * CHUNK + i)[:, None] * CHUNK + j[None, :], inner * ratio, CHUNK * CHUNK
    )
    a = gl.where(i[:, None] > j[None, :], g_i[:, None] * answers * ratio, 0.0)
    # the inverse: buffers of the queries are free
    far_high = q_high._reinterpret(gl.bfloat16, [2, CHUNK, CHUNK], SH).index(0)
    far_low = q_low._reinterpret(gl.bfloat16, [2, CHUNK, CHUNK], SH).index(0)
    at_high = q_high._reinterpret(gl.bfloat16, [2, CHUNK, CHUNK], SH).index(1)
    at_low = q_low._reinterpret(gl.bfloat16, [2, CHUNK, CHUNK], SH).index(1)
    one = gl.where(i[:, None] == j[None, :], 1.0, 0.0)
    near = gl.where((i // BLOCK)[:, None] == (j // BLOCK)[None, :], a, 0.0)
    keep(far_high, far_low, a - near)
    keep(at_high, at_low, near)
    block = series_end(near, one, at_high, at_low, L)
    b_high, b_low = split_parts(block, L)
    outer = three(zero, b_high, b_low, far_high, far_low)
    outer, b_high, b_low = warpgroup_mma_wait(0, deps=[outer, b_high, b_low])
    keep(far_high, far_low, block)
    keep(at_high, at_low, outer)
    outer = series_end(outer, one, at_high, at_low, L)
    o_high, o_low = split_parts(outer, L)
    t = three(zero, o_high, o_low, far_high, far_low)
    t, o_high, o_low = warpgroup_mma_wait(0, deps=[t, o_high, o_low])
    # results
    v = rows_of(qkv + (2 * KEY_HEADS + head) * SIZE, qkv_stride, row, rows, SIZE, LD)
    keep(q_high, q_low, v)
    g_j = gl.convert_layout(gate, gl.SliceLayout(0, CA))
    by_gate = t * g_j[None, :]
    t_high, t_low = split_parts(by_gate, BL)
    wide = gl.zeros([CHUNK, SIZE], gl.float32, BA)
    values = three(wide, t_high, t_low, q_high, q_low)
    x_high, x_low = split_parts(by_gate * (-1.0 * gl.exp(t_j.to(gl.float32)))[None, :], BL)
    values, t_high, t_low = warpgroup_mma_wait(0, deps=[values, t_high, t_low])
    keys_out = three(wide, x_high, x_low, k_high, k_low)
    i_b, d_b = gl.arange(0, CHUNK, gl.SliceLayout(1, BA)), gl.arange(0, SIZE, gl.SliceLayout(0, BA))
    gl.store(u + here * CHUNK * SIZE + d_b[None, :] * CHUNK + i_b[:, None], values)
    keys_out, x_high, x_low = warpgroup_mma_wait(0, deps=[keys_out, x_high, x_low])
    store_parts(w + (here * 2 * CHUNK + i_b)[:, None] * SIZE + d_b[None, :], keys_out, CHUNK * SIZE)


def record_hopper(
    recorder: CudaRecorder, inputs: DeltaInputs, shape: RecurrentShape, layer: int, params: Buffer, out: Buffer,
    eps: float,
) -> None:  # fmt: skip
    """As `triton_wide.record_wide`, for heads of 128 columns."""
    rows, heads, size = recorder.rows, shape.value_heads, shape.head_size
    chunks = -(-rows // CHUNK)
    places, half = chunks * CHUNK, torch.bfloat16
    u, w, keys, scales, decays = chunk_buffers(recorder, shape)
    queries = recorder.scratch("delta queries", 2 * places * shape.key_heads * size, half)
    inside = recorder.scratch("delta inside parts", 2 * places * heads * CHUNK, half)
    numbers = {
        "KEY_HEADS": shape.key_heads, "VALUE_HEADS": heads, "SIZE": size, "CHUNK": CHUNK, "num_warps": WARPS,
    }  # fmt: skip
    recorder.launch(
        hopper_chunk_kernel, (chunks, heads),
        *chunk_inputs(inputs), u, w, keys, queries, inside, scales, decays, rows, eps, size**-0.5,
        BLOCK=BLOCK, **numbers,
    )  # fmt: skip
    big, small = [CHUNK, size], [CHUNK, CHUNK]
    width = out.array.shape[1]
    target = TensorDescriptor(
        out.array, [rows, width], [stride_of(out.array), 1], [CHUNK, 64], _swizzled(out.array)
    )
    recorder.release()  # the state keeps half of the multiprocessors
    recorder.launch(
        state_kernel, (size // 64, heads),
        _tiles(u, CHUNK, small), _tiles(w, size, big), _tiles(keys, size, big), _tiles(queries, size, big),
        _tiles(inside, CHUNK, small), scales, decays, params.array, target, rows, layer, **numbers,
    )  # fmt: skip


def _swizzled(array: torch.Tensor) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, array.element_size() * 8, 2)


def _tiles(array: torch.Tensor, width: int, tile: list[int]) -> TensorDescriptor:
    """Scratch memory as rows of `width` of which tiles are copied."""
    rows = max(array.numel() // width, 1)
    return TensorDescriptor(array, [rows, width], [width, 1], tile, _swizzled(array))
