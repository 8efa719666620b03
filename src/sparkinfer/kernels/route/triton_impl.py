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
_LANES = 32
_ROWS, _WARPS = 32, 8  # of a program that numbers slots


@triton.jit
def ordered_bits(x):
    """int32 that compare as the floats do; -0.0 equals 0.0, a NaN is the largest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def float_of(bits):
    """What `ordered_bits` was made from."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


def exchanges(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs of places, the first to have the larger, that order `count` values, a power of two (Batcher's odd-even
    merge sort).
    """
    found = []
    run = 1
    while run < count:
        step = run
        while step:
            for start in range(step % run, count - step, 2 * step):
                for a in range(start, min(start + step, count - step)):
                    if a // (2 * run) == (a + step) // (2 * run):
                        found.append((a, a + step))
            step //= 2
        run *= 2
    return tuple(found)


@triton.jit
def _with_two(values, A: tl.constexpr, a, B: tl.constexpr, b):
    """The tuple with two of its places taken by others."""
    out = ()
    for i in tl.static_range(len(values)):
        if i == A:
            out = out + (a,)  # noqa: RUF005
        elif i == B:
            out = out + (b,)  # noqa: RUF005
        else:
            out = out + (values[i],)  # noqa: RUF005
    return out


@triton.jit
def _exchanged(keys, ids, A: tl.constexpr, B: tl.constexpr):
    """The larger key at A, the smaller at B; of equal ones that with the lower id at A."""
    a, b, i, j = keys[A], keys[B], ids[A], ids[B]
    swap = (b > a) | ((b == a) & (j < i))
    keys = _with_two(keys, A, tl.maximum(a, b), B, tl.minimum(a, b))
    return keys, _with_two(ids, A, tl.where(swap, j, i), B, tl.where(swap, i, j))


@triton.jit
def _in_order(keys, ids, PAIRS: tl.constexpr):
    """What each lane has, the largest key first."""
    for pair in tl.static_range(len(PAIRS)):
        keys, ids = _exchanged(keys, ids, PAIRS[pair][0], PAIRS[pair][1])
    return keys, ids


@triton.jit
def _moved_up(values, taken, LAST: tl.constexpr, COUNT: tl.constexpr):
    """The first COUNT places of a tuple, without the first value where it was taken."""
    out = ()
    for i in tl.static_range(min(COUNT, len(values))):
        if i + 1 < len(values):
            out = out + (tl.where(taken, values[i + 1], values[i]),)  # noqa: RUF005
        else:
            out = out + (tl.where(taken, LAST, values[i]),)  # noqa: RUF005
    return out


@triton.jit
def choose(
    logits, stride, rows, experts, weights, weights_stride,
    USED: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Ids int32 [R, PADDED] of the USED largest of each row, largest first, ties to the lower id; writes their softmax.

    A row's logits lie in one warp, WIDTH of each piece side by side. A lane has its own in order, so that a rank looks
    at the first of each lane. The weights are summed rank by rank.
    """
    LOWEST: tl.constexpr = -0x80000000  # no logit's
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    k = tl.arange(0, PADDED)[None, :]
    keys, ids = (), ()
    for piece in tl.static_range(PIECES):
        e = piece * WIDTH + c
        live = (r < rows) & (e < experts)
        value = tl.load(logits + r * stride + e, mask=live, other=0.0)
        keys = keys + (tl.where(live, ordered_bits(value), LOWEST),)  # noqa: RUF005
        ids = ids + (e + r * 0,)  # noqa: RUF005
    keys, ids = _in_order(keys, ids, PAIRS)
    chosen = tl.zeros([R, PADDED], tl.int32)
    powers = tl.zeros([R, PADDED], tl.float32)
    total = tl.zeros([R, 1], tl.float32)
    largest = total
    for rank in tl.static_range(USED):
        top = tl.max(keys[0], 1, keep_dims=True)
        best = tl.min(tl.where(keys[0] == top, ids[0], 0x7FFFFF), 1, keep_dims=True)
        if rank == 0:
            largest = float_of(top)
        power = tl.exp(float_of(top) - largest)
        total += power
        powers = tl.where(k == rank, power, powers)
        chosen = tl.where(k == rank, best, chosen)
        if rank + 1 < USED:
            # The lane that had it goes on with its next; as many places count as there are ranks left.
            taken = ids[0] == best
            keys = _moved_up(keys, taken, LOWEST, USED - rank - 1)
            ids = _moved_up(ids, taken, 0x7FFFFF, USED - rank - 1)
    shares = tl.div_rn(powers, tl.broadcast_to(total, [R, PADDED]))
    row = tl.arange(0, R)[:, None]
    tl.store(weights + row * weights_stride + k, shares, mask=(k < USED) & (row < rows))
    return chosen


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    logits, stride, weights, weights_stride, slot_pairs, experts, rows,
    narrow, narrow_stride, codes, floats, q_stride,
    USED: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The choice of one row of few: which expert each of its slots has.

    BLOCKS: a program more a row makes the BLOCKS int8 blocks of a narrow row that is older than the choice.
    """
    release_next()
    await_inputs()
    pid = tl.program_id(0)
    if pid < rows:
        _route_row(
            pid, logits, stride, weights, weights_stride, slot_pairs, experts, USED, PADDED, WIDTH, PIECES, PAIRS
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
    USED: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    chosen = choose(
        logits + row * stride, stride, 1, experts, weights + row * weights_stride, weights_stride,
        USED, PADDED, 1, WIDTH, PIECES, PAIRS,
    )  # fmt: skip
    k = tl.arange(0, PADDED)[None, :]
    tl.store(slot_pairs + row * USED + k, chosen | (row << 16), mask=k < USED)


@triton.jit
def choose_kernel(
    logits, stride, weights, weights_stride, ids, experts,
    USED: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The choice of one row of many."""
    row = tl.program_id(0)
    chosen = choose(
        logits + row * stride, stride, 1, experts, weights + row * weights_stride, weights_stride,
        USED, PADDED, 1, WIDTH, PIECES, PAIRS,
    )  # fmt: skip
    k = tl.arange(0, PADDED)[None, :]
    tl.store(ids + row * USED + k, chosen, mask=k < USED)


@triton.jit
def _chosen(ids, r, rows, USED: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr):
    """1 where a row chose an expert: int32 [ROWS, E]."""
    e = tl.arange(0, E)
    chosen = tl.zeros([ROWS, E], tl.int32)
    for k in tl.static_range(USED):
        one = tl.load(ids + r * USED + k, mask=r < rows, other=0x7FFFFF)
        chosen += (one[:, None] == e[None, :]).to(tl.int32)
    return chosen


@triton.jit
def count_kernel(ids, counts, rows, USED: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr):
    """counts[program, e]: how many of the program's rows chose expert e."""
    block = tl.program_id(0)
    chosen = _chosen(ids, block * ROWS + tl.arange(0, ROWS), rows, USED, E, ROWS)
    tl.store(counts + block * E + tl.arange(0, E), tl.sum(chosen, 0))


@triton.jit
def slots_kernel(
    ids, counts, table, slot_pairs, rows, pairs, blocks, entries,
    USED: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Number the slots of this program's rows, by expert and then by row. The first program writes the entries of the
    active experts, in order.
    """
    block = tl.program_id(0)
    e, i = tl.arange(0, E), tl.arange(0, ROWS)
    total = tl.zeros([E], tl.int32)
    before = tl.zeros([E], tl.int32)
    for start in range(0, bound(blocks), ROWS):
        b = start + i
        count = tl.load(counts + b[:, None] * E + e[None, :], mask=(b < blocks)[:, None], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((b < block)[:, None], count, 0), 0)
    first = tl.cumsum(total, 0) - total
    r = block * ROWS + i
    live = r < rows
    chosen = _chosen(ids, r, rows, USED, E, ROWS)
    place = tl.cumsum(chosen, 0) - chosen + (first + before)[None, :]
    rows_of = table + 1 + pairs + 3 * entries
    for k in tl.static_range(USED):
        one = tl.load(ids + r * USED + k, mask=live, other=0x7FFFFF)
        slot = tl.sum(tl.where(one[:, None] == e[None, :], place, 0), 1)
        tl.store(table + 1 + r * USED + k, slot.to(tl.int64), mask=live)
        tl.store(rows_of + slot, r.to(tl.int64), mask=live)
        tl.store(slot_pairs + slot, one | (r << 16), mask=live)
    if block == 0:
        active = total > 0
        entry = table + 1 + pairs + 3 * (tl.cumsum(active.to(tl.int32), 0) - 1)
        tl.store(table, tl.sum(active.to(tl.int64), 0))
        tl.store(entry, e.to(tl.int64), mask=active)
        tl.store(entry + 1, total.to(tl.int64), mask=active)
        tl.store(entry + 2, first.to(tl.int64), mask=active)


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
    width = min(_LANES, padded)
    shape = {
        "USED": used,
        "PADDED": triton.next_power_of_2(used),
        "WIDTH": width,
        "PIECES": padded // width,
        "PAIRS": exchanges(padded // width),
    }
    if not recorder.wide:
        recorder.launch(
            route_kernel, (rows,), *strided, slots_of(recorder, routing), experts, rows,
            logits.array, 0, logits.array, logits.array, 0, **shape, BLOCKS=0, num_warps=1, overlap=True, **_EXACT,
        )  # fmt: skip
        return
    blocks = -(-rows // _ROWS)
    ids = recorder.scratch("route ids", pairs, torch.int32)
    counts = recorder.scratch("route counts", blocks * padded, torch.int32)
    sizes = {"USED": used, "E": padded, "ROWS": _ROWS, "num_warps": _WARPS}
    recorder.launch(choose_kernel, (rows,), *strided, ids, experts, **shape, num_warps=1, **_EXACT)
    recorder.launch(count_kernel, (blocks,), ids, counts, rows, **sizes)
    recorder.launch(
        slots_kernel, (blocks,), ids, counts, table, slots_of(recorder, routing), rows, pairs, blocks,
        min(experts, pairs), **sizes,
    )  # fmt: skip
