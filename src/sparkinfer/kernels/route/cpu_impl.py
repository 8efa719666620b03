"""CPU form of `route`: one chunk, since the slots of all rows are numbered together."""

import numpy as np

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import exp, load_f32, load_i64, max_lanes, splat, store_f32, store_i64
from sparkinfer.kernels.route import Routing, routing_words

_ZERO = np.float32(0.0)


@inner
def _taken(ids: int, count: int, expert: int) -> bool:
    for i in range(count):
        if load_i64(ids + 8 * i) == expert:
            return True
    return False


@inner
def _choose(logits: int, experts: int, used: int, ids: int, weights: int) -> None:
    """Ids and softmax weights of the `used` largest logits, largest first."""
    for rank in range(used):
        best = -1
        for expert in range(experts):
            better = best < 0 or load_f32(logits + 4 * expert) > load_f32(logits + 4 * best)
            if better and not _taken(ids, rank, expert):
                best = expert
        store_i64(ids + 8 * rank, best)
    top = load_f32(logits + 4 * load_i64(ids))
    total = _ZERO
    for rank in range(used):
        weight = max_lanes(exp(splat(load_f32(logits + 4 * load_i64(ids + 8 * rank)) - top)))
        store_f32(weights + 4 * rank, weight)
        total = total + weight
    for rank in range(used):
        store_f32(weights + 4 * rank, load_f32(weights + 4 * rank) / total)


@job
def route_job(args: int, chunk: int, thread: int) -> None:
    rows, experts, used = load_i64(args + 16), load_i64(args + 24), load_i64(args + 32)
    table, ids = load_i64(args + 40), load_i64(args + 64)
    for row in range(rows):
        logits = load_i64(args) + row * load_i64(args + 8)
        weights = load_i64(args + 48) + row * load_i64(args + 56)
        _choose(logits, experts, used, ids + 8 * row * used, weights)
    slots = table + 8
    active_table = slots + 8 * rows * used
    row_of_slot = active_table + 24 * min(experts, rows * used)
    active, slot = 0, 0
    for expert in range(experts):
        first = slot
        for i in range(rows * used):
            if load_i64(ids + 8 * i) == expert:
                store_i64(slots + 8 * i, slot)
                store_i64(row_of_slot + 8 * slot, i // used)
                slot += 1
        if slot > first:
            entry = active_table + 24 * active
            store_i64(entry, expert)
            store_i64(entry + 8, slot - first)
            store_i64(entry + 16, first)
            active += 1
    store_i64(table, active)


def record(recorder: CpuRecorder, logits: Buffer, routing: Routing) -> None:
    rows = recorder.rows
    assert routing.table.width >= routing_words(rows, routing.used, routing.experts), routing
    ids = recorder.owner.shared_scratch("route ids", 8 * rows * routing.used)
    args = (
        logits.address, logits.stride, rows, routing.experts, routing.used, routing.table.address,
        routing.weights.address, routing.weights.stride, ids,
    )  # fmt: skip
    recorder.phase([Job(route_job, args, 1)])
