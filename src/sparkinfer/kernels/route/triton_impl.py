"""GPU form of `route`: a warp a row chooses the experts. Few rows have no table: a slot is row x used + rank."""

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.route import Routing, routing_words
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import bound, store_blocks

_EXACT = {"enable_fp_fusion": False}
_WARP_LOGITS = 128  # that a warp loads at once
_CHUNK = 4096  # pairs that a wide program looks at in one go


@triton.jit
def ordered_bits(x):
    """int32 that compare as the floats do; -0.0 equals 0.0, a NaN is the largest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def float_of(bits):
    """What `ordered_bits` was made from."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def choose(
    logits, stride, rows, experts, weights, weights_stride,
    USED: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Ids int32 [R, PADDED] of the USED largest of each row, largest first, ties to the lower id; writes their softmax.

    A row's PIECES x WIDTH logits lie in one warp: 4 of each piece in a lane. The weights are summed rank by rank.
    """
    LOWEST: tl.constexpr = -0x80000000  # no logit's
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    k = tl.arange(0, PADDED)[None, :]
    keys = ()
    for piece in tl.static_range(PIECES):
        e = piece * WIDTH + c
        live = (r < rows) & (e < experts)
        value = tl.load(logits + r * stride + e, mask=live, other=0.0)
        keys = keys + (tl.where(live, ordered_bits(value), LOWEST),)  # noqa: RUF005
    ids = tl.zeros([R, PADDED], tl.int32) + 0x7FFFFF
    tops = ()
    for rank in tl.static_range(USED):
        most = keys[0]
        for piece in tl.static_range(1, PIECES):
            most = tl.maximum(most, keys[piece])
        top = tl.max(most, 1)
        at = tl.where(keys[0] == top[:, None], c, 0x7FFFFF)
        for piece in tl.static_range(1, PIECES):
            at = tl.minimum(at, tl.where(keys[piece] == top[:, None], piece * WIDTH + c, 0x7FFFFF))
        best = tl.min(at, 1)
        rest = ()
        for piece in tl.static_range(PIECES):
            rest = rest + (tl.where(piece * WIDTH + c == best[:, None], LOWEST, keys[piece]),)  # noqa: RUF005
        keys = rest
        ids = tl.where(k == rank, best[:, None], ids)
        tops = tops + (float_of(top),)  # noqa: RUF005
    total = tl.zeros([R], tl.float32)
    powers = ()
    for rank in tl.static_range(USED):
        power = tl.exp(tops[rank] - tops[0])
        total += power
        powers = powers + (power,)  # noqa: RUF005
    row = tl.arange(0, R)
    for rank in tl.static_range(USED):
        place = weights + row * weights_stride + rank
        tl.store(place, tl.div_rn(powers[rank], total), mask=row < rows)
    return ids


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    logits, stride, weights, weights_stride, slot_pairs, experts, rows,
    narrow, narrow_stride, codes, floats, q_stride,
    USED: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The choice of one row of few: which expert each of its slots has.

    BLOCKS: a program more a row makes the BLOCKS int8 blocks of a narrow row that is older than the choice.
    """
    release_next()
    await_inputs()
    pid = tl.program_id(0)
    if pid < rows:
        _route_row(
            pid, logits, stride, weights, weights_stride, slot_pairs, experts, USED, PADDED, WIDTH, PIECES
        )  # fmt: skip
    elif BLOCKS > 0:
        row = pid - rows
        block = tl.arange(0, BLOCKS)
        y = tl.load(narrow + row * narrow_stride + block[:, None] * 32 + tl.arange(0, 32)[None, :])
        place = tl.zeros_like(block) + row
        store_blocks(codes, floats, q_stride, BLOCKS, place, block, y, block >= 0)


@triton.jit
def _route_row(
    row, logits, stride, weights, weights_stride, slot_pairs, experts,
    USED: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    chosen = choose(
        logits + row * stride, stride, 1, experts, weights + row * weights_stride, weights_stride,
        USED, PADDED, 1, WIDTH, PIECES,
    )  # fmt: skip
    k = tl.arange(0, PADDED)[None, :]
    tl.store(slot_pairs + row * USED + k, chosen | (row << 16), mask=k < USED)


@triton.jit
def choose_kernel(
    logits, stride, weights, weights_stride, ids, experts,
    USED: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The choice of one row of many."""
    row = tl.program_id(0)
    chosen = choose(
        logits + row * stride, stride, 1, experts, weights + row * weights_stride, weights_stride,
        USED, PADDED, 1, WIDTH, PIECES,
    )  # fmt: skip
    k = tl.arange(0, PADDED)[None, :]
    tl.store(ids + row * USED + k, chosen, mask=k < USED)


@triton.jit
def count_kernel(ids, counts, pairs, E: tl.constexpr, CHUNK: tl.constexpr):
    """counts[e], counts[E + e]: pairs that chose this program's expert, pairs that chose one with a lower id."""
    e = tl.program_id(0)
    own = tl.zeros([CHUNK], tl.int32)
    lower = tl.zeros([CHUNK], tl.int32)
    for start in range(0, bound(pairs), CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(ids + j, mask=j < pairs, other=0x7FFFFF)
        own += (other == e).to(tl.int32)
        lower += (other < e).to(tl.int32)
    tl.store(counts + e, tl.sum(own, 0))
    tl.store(counts + E + e, tl.sum(lower, 0))


@triton.jit
def entries_kernel(counts, table, pairs, experts, E: tl.constexpr):
    """The entries of the active experts, in order."""
    e = tl.arange(0, E)
    live = e < experts
    count = tl.load(counts + e, mask=live, other=0)
    first = tl.load(counts + E + e, mask=live, other=0)
    active = count > 0
    place = tl.cumsum(active.to(tl.int32), 0) - 1
    entry = table + 1 + pairs + 3 * place
    tl.store(table, tl.sum(active.to(tl.int64), 0))
    tl.store(entry, e.to(tl.int64), mask=active)
    tl.store(entry + 1, count.to(tl.int64), mask=active)
    tl.store(entry + 2, first.to(tl.int64), mask=active)


@triton.jit
def slots_kernel(
    ids, counts, table, slot_pairs, pairs, entries, USED: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Number the slots of this program's expert."""
    e = tl.program_id(0)
    base = tl.load(counts + E + e)
    rows_of = table + 1 + pairs + 3 * entries
    for start in range(0, bound(pairs), CHUNK):
        j = start + tl.arange(0, CHUNK)
        mine = (tl.load(ids + j, mask=j < pairs, other=0x7FFFFF) == e) & (j < pairs)
        slot = base + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(table + 1 + j, slot.to(tl.int64), mask=mine)
        tl.store(rows_of + slot, (j // USED).to(tl.int64), mask=mine)
        tl.store(slot_pairs + slot, e | ((j // USED) << 16), mask=mine)
        base += tl.sum(mine.to(tl.int32), 0)


def slots_of(recorder: CudaRecorder, routing: Routing) -> torch.Tensor:
    """int32 per slot: its expert in the low 16 bits, its row above. The last routing's only."""
    rows = max(16, recorder.rows)
    assert rows < 1 << 15 and routing.experts <= 1 << 16, (rows, routing.experts)
    return recorder.scratch("slot pairs", rows * routing.used, torch.int32)


def record(recorder: CudaRecorder, logits: Buffer, routing: Routing) -> None:
    """Pinned: a row's choice is made by its own warp, its weights are summed rank by rank; the table is of integers.

    Few rows: the table is not written, `slots_of` tells all.
    """
    rows, used, experts = recorder.rows, routing.used, routing.experts
    assert routing.table.width >= routing_words(rows, used, experts), routing
    pairs, padded = rows * used, triton.next_power_of_2(experts)
    table, weights = routing.table.array, routing.weights.array
    strided = (logits.array, logits.array.stride(0), weights, weights.stride(0))
    width = min(_WARP_LOGITS, padded)
    shape = {
        "USED": used,
        "PADDED": triton.next_power_of_2(used),
        "WIDTH": width,
        "PIECES": padded // width,
    }
    if not recorder.wide:
        recorder.launch(
            route_kernel, (rows,), *strided, slots_of(recorder, routing), experts, rows,
            logits.array, 0, logits.array, logits.array, 0, **shape, BLOCKS=0, num_warps=1, overlap=True, **_EXACT,
        )  # fmt: skip
        return
    ids = recorder.scratch("route ids", pairs, torch.int32)
    counts = recorder.scratch("route counts", 2 * padded, torch.int32)
    recorder.launch(choose_kernel, (rows,), *strided, ids, experts, **shape, num_warps=1, **_EXACT)
    recorder.launch(
        count_kernel, (experts,), ids, counts, pairs, E=padded, CHUNK=_CHUNK, num_warps=4
    )
    recorder.launch(entries_kernel, (1,), counts, table, pairs, experts, E=padded, num_warps=4)
    recorder.launch(
        slots_kernel, (experts,), ids, counts, table, slots_of(recorder, routing), pairs, min(experts, pairs),
        USED=used, E=padded, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
