"""CPU form of `greedy_chain`: a phase a slot, whose prologue chooses the id of the slot before.

A chunk takes some ids and leaves its largest value, the sum of exponentials relative to it, and its id.
"""

import numpy as np

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job, Word
from sparkinfer.backend.simd import (
    call_tiles,
    exp,
    keep_below,
    load,
    load_f32,
    load_i64,
    max_lanes,
    maximum,
    splat,
    store,
    store_f32,
    store_i64,
    sum_lanes,
)
from sparkinfer.kernels.cpu_activation import quantise_row
from sparkinfer.kernels.greedy_chain import Links, Picks
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
from sparkinfer.kernels.linear.weights import PackedWeight

_LOW, _ZERO, _ONE = np.float32(-np.inf), np.float32(0.0), np.float32(1.0)
_PIECES = 8  # chunks of a slot
_LEAST = 32  # vectors of 16 ids that are worth a chunk
_PART = 64  # bytes of what a chunk leaves: largest value, sum, id


@inner
def _sum_with_links(args: int, first: int, last: int, thread: int) -> None:
    """What the id before adds to the vectors first .. last, into the scratch row."""
    lanes = load_i64(args + 96)
    per_vector = 16 // lanes
    start = first * per_vector
    end = min(last * per_vector, load_i64(args + 104))
    call_tiles(
        load_i64(args + 88), load_i64(args + 48) + start * load_i64(args + 56),
        load_i64(args + 64) + thread * load_i64(args + 72), load_i64(args + 80),
        load_i64(args + 8) + first * 64, 0, end - start, 0,
    )  # fmt: skip


@job
def piece_job(args: int, chunk: int, thread: int) -> None:
    """The ids of one chunk of one slot."""
    logits, scratch, ids = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    pieces, parts, vectors = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    first, last = vectors * chunk // pieces, vectors * (chunk + 1) // pieces
    linked = load_i64(args + 88) != 0
    if linked:
        _sum_with_links(args, first, last, thread)
    top = splat(_LOW)
    for i in range(first, last):
        value = load(logits + 64 * i)
        if linked:
            value = value + load(scratch + 64 * i)
        if 16 * i + 16 > ids:
            value = keep_below(ids - 16 * i, value, splat(_LOW))
        top = maximum(value, top)
        if linked:
            store(scratch + 64 * i, value)
    peak = max_lanes(top)
    source = scratch if linked else logits
    total = splat(_ZERO)
    for i in range(first, last):
        value = exp(load(source + 64 * i) - splat(peak))
        if 16 * i + 16 > ids:
            value = keep_below(ids - 16 * i, value, splat(_ZERO))
        total = total + value
    best, end = 16 * first, min(16 * last, ids) - 1
    while best < end and load_f32(source + 4 * best) != peak:
        best += 1
    at = parts + _PART * chunk
    store_f32(at, peak)
    store_f32(at + 4, sum_lanes(total))
    store_i64(at + 8, best)


@inner
def _choose(args: int) -> int:
    """The id of the slot whose parts these are; notes it and its probability."""
    parts, pieces = load_i64(args), load_i64(args + 8)
    best, peak = load_i64(parts + 8), load_f32(parts)
    for piece in range(1, pieces):
        value = load_f32(parts + _PART * piece)
        if value > peak:
            peak, best = value, load_i64(parts + _PART * piece + 8)
    total = _ZERO
    for piece in range(pieces):
        at = parts + _PART * piece
        total += load_f32(at + 4) * max_lanes(exp(splat(load_f32(at) - peak)))
    store_i64(load_i64(args + 16), best)
    store_f32(load_i64(args + 24), _ONE / total if total >= _ONE else _ZERO)
    return best


@job
def choose_job(args: int, chunk: int, thread: int) -> None:
    """The end of a chain, and of slots that depend on nothing."""
    _choose(args)


@job
def link_job(args: int, chunk: int, thread: int) -> None:
    """Each thread's input of the next slot's product: of the id before it, or of the first one."""
    source, width = load_i64(args + 32), load_i64(args + 48)
    if load_i64(args) != 0:
        source += _choose(args) * load_i64(args + 40)
    target = load_i64(args + 56) + thread * load_i64(args + 64)
    for i in range(0, 4 * width, 4):
        store_f32(target + i, load_f32(source + i))
    if load_i64(args + 72) != 0:
        quantise_row(load_i64(args + 72) + thread * load_i64(args + 80), width >> 5, 1, 0, target)


def _product_args(recorder: CpuRecorder, links: Links | None) -> tuple[Word, ...]:
    """Weight, tile bytes, input, its distance by thread, blocks, kernel (0: none), lanes, tiles."""
    if links is None:
        return (0,) * 8
    after = links.after
    assert isinstance(after, PackedWeight), after
    source = links.x.q8 if after.quantised else links.x.f32
    assert source is not None and links.x.private, links.x
    isa = recorder.owner.isa.name
    kernel = tile_kernel(after.format_name, 1, isa, after.lanes, reuse=True)
    return (
        after.address, after.tile_bytes, source.address, source.thread_stride, after.blocks, kernel, after.lanes,
        after.tiles,
    )  # fmt: skip


def _link_args(links: Links, before: Buffer) -> tuple[int, ...]:
    """Rows that an id selects from (or the one there is), and where a thread's row goes."""
    x = links.x
    q8 = (
        (x.q8.address, x.q8.thread_stride) if x.q8 is not None and links.after.quantised else (0, 0)
    )
    return before.address, before.stride, before.width, x.f32.address, x.f32.thread_stride, *q8


def record(
    recorder: CpuRecorder, logits: Buffer, ids: int, links: Links | None, out: Picks
) -> None:
    vectors = -(-ids // 16)
    pieces = max(1, min(_PIECES, vectors // _LEAST))
    slots, product = recorder.rows, _product_args(recorder, links)
    parts = recorder.pin(np.zeros((slots * pieces + 1) * _PART, np.uint8))
    parts += -parts % _PART
    scratch = out.scratch.address
    chosen = [
        (parts + _PART * pieces * slot, pieces, out.ids.address + 8 * slot, out.chances.address + 4 * slot)
        for slot in range(slots)
    ]  # fmt: skip
    jobs = [
        Job(
            piece_job,
            (logits.address + slot * logits.stride, scratch, ids, pieces, chosen[slot][0], vectors, *product),
            pieces,
        )
        for slot in range(slots)
    ]  # fmt: skip
    if links is None:
        recorder.phase(jobs)
        recorder.phase([Job(choose_job, args, 1) for args in chosen])
        return
    recorder.prologue(Job(link_job, (0, 0, 0, 0, *_link_args(links, links.first)), 1))
    for slot, piece in enumerate(jobs):
        if slot:
            recorder.prologue(
                Job(link_job, (*chosen[slot - 1], *_link_args(links, links.before)), 1)
            )
        recorder.phase([piece])
    recorder.phase([Job(choose_job, chosen[-1], 1)])
