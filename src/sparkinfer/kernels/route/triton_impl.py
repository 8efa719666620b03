"""GPU form of `route`: a program a row chooses the experts; for few rows the last of them also writes the table."""

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.route import Routing, routing_words
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import bound

_EXACT = {"enable_fp_fusion": False}
_CHUNK = 1024  # pairs that a wide program looks at in one go


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
def choose(logits, experts, weights, USED: tl.constexpr, PADDED: tl.constexpr, E: tl.constexpr):
    """Ids int32 [PADDED] of the USED largest of a row, largest first, ties to the lower id; writes their softmax."""
    e = tl.arange(0, E)
    k = tl.arange(0, PADDED)
    value = tl.load(logits + e, mask=e < experts, other=float("-inf"))
    key = ordered_bits(value)
    free = e < experts
    chosen = tl.zeros([PADDED], tl.float32) + float("-inf")
    ids = tl.zeros([PADDED], tl.int32) + 0x7FFFFF
    for rank in tl.static_range(USED):
        top = tl.max(tl.where(free, key, -0x80000000), 0)
        best = tl.min(tl.where(free & (key == top), e, E), 0)
        chosen = tl.where(k == rank, float_of(top), chosen)
        ids = tl.where(k == rank, best, ids)
        free = free & (e != best)
    power = tl.exp(chosen - tl.max(chosen, 0))
    tl.store(weights + k, tl.div_rn(power, tl.sum(power, 0)), mask=k < USED)
    return ids


@triton.jit
def write_row_table(ids, table, USED: tl.constexpr, PADDED: tl.constexpr):
    """The table of one row: every chosen expert has one slot, slots in the order of the ids."""
    k = tl.arange(0, PADDED)
    live = k < USED
    slot = tl.sum((ids[:, None] < ids[None, :]).to(tl.int32), 0)
    tl.store(table + k, USED, mask=k == 0)
    tl.store(table + 1 + k, slot.to(tl.int64), mask=live)
    entry = table + 1 + USED + 3 * slot
    tl.store(entry, ids.to(tl.int64), mask=live)
    tl.store(entry + 1, tl.zeros([PADDED], tl.int64) + 1, mask=live)
    tl.store(entry + 2, slot.to(tl.int64), mask=live)
    tl.store(table + 1 + 4 * USED + k, tl.zeros([PADDED], tl.int64), mask=live)


@triton.jit
def write_table(ids, firsts, table, pairs, entries, USED: tl.constexpr, P: tl.constexpr):
    """Slots ordered by expert, then by row: a pair's slot is the number of smaller (expert, pair) keys."""
    STEP: tl.constexpr = 8 if P > 8 else P
    i = tl.arange(0, P)
    live = i < pairs
    mine = tl.load(ids + i, mask=live, other=0x7FFFFF, cache_modifier=".cg")
    slot = tl.zeros([P], tl.int32)
    same = tl.zeros([P], tl.int32)
    earlier = tl.zeros([P], tl.int32)
    for start in range(0, P, STEP):
        j = (start + tl.arange(0, STEP))[:, None]  # summed along the axis that a thread holds
        other = tl.load(ids + j, mask=j < pairs, other=0x7FFFFF, cache_modifier=".cg")
        equal = (other == mine[None, :]) & (j < pairs)
        before = j < i[None, :]
        slot += tl.sum(((other < mine[None, :]) | (equal & before)).to(tl.int32), 0)
        same += tl.sum(equal.to(tl.int32), 0)
        earlier += tl.sum((equal & before).to(tl.int32), 0)
    first = (earlier == 0) & live
    tl.store(firsts + i, first.to(tl.int32), mask=live)
    tl.debug_barrier()
    place = tl.zeros([P], tl.int32)
    for start in range(0, P, STEP):
        j = (start + tl.arange(0, STEP))[:, None]
        other = tl.load(ids + j, mask=j < pairs, other=0x7FFFFF, cache_modifier=".cg")
        head = tl.load(firsts + j, mask=j < pairs, other=0, cache_modifier=".cg")
        place += tl.sum(tl.where(other < mine[None, :], head, 0), 0)
    tl.store(table, tl.sum(first.to(tl.int64), 0))
    tl.store(table + 1 + i, slot.to(tl.int64), mask=live)
    entry = table + 1 + pairs + 3 * place
    tl.store(entry, mine.to(tl.int64), mask=first)
    tl.store(entry + 1, same.to(tl.int64), mask=first)
    tl.store(entry + 2, slot.to(tl.int64), mask=first)
    tl.store(table + 1 + pairs + 3 * entries + slot, (i // USED).to(tl.int64), mask=live)


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    logits, stride, weights, weights_stride, ids, firsts, table, counter, rows, experts,
    USED: tl.constexpr, PADDED: tl.constexpr, E: tl.constexpr, P: tl.constexpr, ONE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    release_next()
    await_inputs()
    row = tl.program_id(0)
    chosen = choose(logits + row * stride, experts, weights + row * weights_stride, USED, PADDED, E)
    if ONE:
        write_row_table(chosen, table, USED, PADDED)
    else:
        k = tl.arange(0, PADDED)
        tl.store(ids + row * USED + k, chosen, mask=k < USED)
        if TABLE:
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == rows - 1:
                pairs = rows * USED
                write_table(ids, firsts, table, pairs, tl.minimum(experts, pairs), USED, P)
                tl.store(counter, 0)


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
    ids, counts, table, pairs, entries, USED: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr
):
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
        base += tl.sum(mine.to(tl.int32), 0)


def record(recorder: CudaRecorder, logits: Buffer, routing: Routing) -> None:
    """Pinned: a row's choice and weights are a program of their own; the table is of integers."""
    rows, used, experts = recorder.rows, routing.used, routing.experts
    assert routing.table.width >= routing_words(rows, used, experts), routing
    pairs, wide = rows * used, recorder.wide
    padded = triton.next_power_of_2(experts)
    ids = recorder.scratch("route ids", pairs, torch.int32)
    table = routing.table.array
    recorder.launch(
        route_kernel, (rows,),
        logits.array, logits.array.stride(0), routing.weights.array, routing.weights.array.stride(0),
        ids, recorder.scratch("route firsts", 256, torch.int32), table,
        recorder.scratch("route counter", 1, torch.int32), rows, experts,
        USED=used, PADDED=triton.next_power_of_2(used), E=padded,
        P=16 if wide else triton.next_power_of_2(pairs), ONE=rows == 1, TABLE=not wide,
        num_warps=1, overlap=True, **_EXACT,
    )  # fmt: skip
    if not wide:
        return
    counts = recorder.scratch("route counts", 2 * padded, torch.int32)
    recorder.launch(
        count_kernel, (experts,), ids, counts, pairs, E=padded, CHUNK=_CHUNK, num_warps=4
    )
    recorder.launch(entries_kernel, (1,), counts, table, pairs, experts, E=padded, num_warps=4)
    recorder.launch(
        slots_kernel, (experts,), ids, counts, table, pairs, min(experts, pairs),
        USED=used, E=padded, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
