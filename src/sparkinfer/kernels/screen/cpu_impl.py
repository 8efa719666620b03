"""CPU form of `screen`: a phase for the coarse product, one for exact logits where they are needed, one that compares.

The exact logits come from the head's own tile kernels, so they have the bits of the whole product. A tile is computed
for all rows of the run when one of them needs it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import GROUP, CpuBackend, CpuRecorder, Job, Word
from sparkinfer.backend.simd import (
    fma,
    keep_below,
    lanes_not_below,
    largest_magnitude,
    load,
    load_f32,
    load_i64,
    load_int8,
    max_lanes,
    maximum,
    splat,
    sqrt_scalar,
    store,
    store_f32,
    store_i32,
    store_i64,
    store_int8,
    sum_lanes,
)
from sparkinfer.kernels.argmax.cpu_impl import merge_job
from sparkinfer.kernels.linear.cpu_impl import input_args, run_tiles, tile_functions
from sparkinfer.kernels.linear.weights import PackedWeight
from sparkinfer.kernels.screen.coarse import LARGEST, Coarse, pack_coarse
from sparkinfer.kernels.screen.cpu_tiles import coarse_kernel, record_bytes

_PART = 16  # bytes a chunk leaves for a row, as `argmax` has them: largest number, 0 or what is no number, place
_CHUNK_BYTES, _MOST_CHUNKS = 48 * 1024, 256  # of the coarse product, as of others
_EXACT_CHUNKS = 64  # a power of two
_SPREAD = 29  # odd: chunks that are claimed one after the other lie far apart, because low ids hold most candidates
_LOW, _ZERO, _INF = np.float32(-np.inf), np.float32(0.0), np.float32(np.inf)
_TINY = np.float32(1e-30)  # more than all underflow of products that are not below 1 / LARGEST
_LEAST, _MOST = np.float32(LARGEST**-2), np.float32(LARGEST**2)
_TOP, _SMALL = np.float32(127), np.float32(1e-36)  # 127 over less than this is infinite
_FIRST_TWO = np.array([1, 1, 0, 0] * 4, np.float32)  # of every four columns
_UP, _MORE, _REST = np.float32(1.0001), np.float32(1.001), np.float32(1e-10)


@inner
def _decode(args: int, row: int, thread: int, target: int) -> None:
    """The activation as the exact product reads it, float32, to `target`."""
    inputs, rows = load_i64(args + 16), load_i64(args + 24)
    source = load_i64(args) + thread * load_i64(args + 8)
    if load_i64(args + 32) == 0:  # floats
        source += row * load_i64(args + 40)
        for i in range(0, inputs, 16):
            store(target + 4 * i, load(source + 4 * i))
        return
    first = row & -8
    group, row = min(8, rows - first), row & 7
    source += first * (inputs >> 5) * 48
    for block in range(inputs >> 5):
        record = source + 48 * group * block
        scale = splat(load_f32(record + 32 * group + 4 * row))
        store(target + 128 * block, load_int8(record + 32 * row) * scale)
        store(target + 128 * block + 64, load_int8(record + 32 * row + 16) * scale)


@inner
def _write_step(record: int, row: int, group: int, source: int, narrow: int, first_two: int) -> Any:
    """64 numbers at `source` as a step of a panel of `group` rows (`cpu_tiles`); the scale."""
    y0, y1, y2, y3 = load(source), load(source + 64), load(source + 128), load(source + 192)
    top = max(largest_magnitude(y0, y1), largest_magnitude(y2, y3))
    scale = top / _TOP
    inverse = splat(_TOP / top) if top > _SMALL else splat(_ZERO)
    codes = record + 64 * row
    store_int8(codes, y0 * inverse)
    store_int8(codes + 16, y1 * inverse)
    store_int8(codes + 32, y2 * inverse)
    store_int8(codes + 48, y3 * inverse)
    total = load_int8(codes) + load_int8(codes + 16) + load_int8(codes + 32) + load_int8(codes + 48)
    zero = -8 * int(sum_lanes(total))
    if narrow:
        low = -8 * int(sum_lanes(total * load(first_two)))
        zero = ((zero - low) << 16) + (low & 0xFFFF)
    store_f32(record + 64 * group + 4 * row, scale)
    store_i32(record + 68 * group + 4 * row, np.int32(zero))
    return scale


@job
def prepare_job(args: int, chunk: int, thread: int) -> None:
    """Each thread's reordered activations, and of every row its part of the bound and of the direction."""
    inputs, rows, order, direction = (
        load_i64(args + 16), load_i64(args + 24), load_i64(args + 48), load_i64(args + 56),
    )  # fmt: skip
    shares, blocks = load_i64(args + 64), (inputs + 63) >> 6
    panel = load_i64(args + 72) + thread * load_i64(args + 80)
    plain = load_i64(args + 88) + thread * load_i64(args + 96)
    narrow, first_two = load_i64(args + 120), load_i64(args + 128)
    turned = plain + 4 * inputs
    for i in range(inputs, 64 * blocks):
        store_f32(turned + 4 * i, _ZERO)
    for row in range(rows):
        _decode(args, row, thread, plain)
        for i in range(inputs):
            store_f32(turned + 4 * i, load_f32(plain + 4 * load_i64(order + 8 * i)))
        along, length, bound = splat(_ZERO), _ZERO, _ZERO
        first = row & -8
        group, place = min(8, rows - first), row & 7
        start = panel + first * (blocks + 1) * 72
        for block in range(blocks + 1):
            last = block == blocks  # the first one again
            source, record = turned + (0 if last else 256 * block), start + 72 * group * block
            scale = splat(_write_step(record, place, group, source, narrow, first_two))
            if last:
                continue
            size, off = splat(_ZERO), splat(_ZERO)
            for part in range(4):
                y = load(source + 64 * part)
                d = y - load_int8(record + 64 * place + 16 * part) * scale
                size, off = fma(y, y, size), fma(d, d, off)
                along = fma(load(direction + 256 * block + 64 * part), y, along)
            square = sum_lanes(size)
            bound += load_f32(shares + 4 * block) * square
            bound += load_f32(shares + 4 * (blocks + block)) * (
                sum_lanes(off) * _MORE + square * _REST
            )
            length += square
        usual = length > _LEAST and length < _MOST
        scalars = load_i64(args + 104) + thread * load_i64(args + 112) + 8 * row
        store_f32(scalars, sqrt_scalar(bound) * _UP if usual else _INF)
        store_f32(scalars + 4, sum_lanes(along))


@job
def coarse_job(args: int, chunk: int, thread: int) -> None:
    """A chunk of the coarse product, and its largest number in every row."""
    weight, tile_bytes, lanes, tiles = (
        load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24),
    )  # fmt: skip
    rows, out, stride = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48)
    units, chunks, outputs = load_i64(args + 56), load_i64(args + 64), load_i64(args + 72)
    panel = load_i64(args + 80) + thread * load_i64(args + 88)
    scalars = load_i64(args + 128) + thread * load_i64(args + 136)
    along, parts, kept = load_i64(args + 144), load_i64(args + 152), load_i64(args + 160)
    first, last = units * chunk // chunks, units * (chunk + 1) // chunks
    each = 16 // lanes
    count = min(last * each, tiles) - first * each
    run_tiles(
        weight + first * each * tile_bytes, tile_bytes, panel, load_i64(args + 96), load_i64(args + 104),
        out + 64 * first, stride, count, rows, load_i64(args + 112), load_i64(args + 120), 0, lanes,
    )  # fmt: skip
    for row in range(rows):
        target, share = out + row * stride, splat(load_f32(scalars + 8 * row + 4))
        top = splat(_LOW)
        for i in range(first, last):
            value = fma(load(along + 64 * i), share, load(target + 64 * i))
            if 16 * i + 16 > outputs:
                value = keep_below(outputs - 16 * i, value, splat(_LOW))
            store(target + 64 * i, value)
            top = maximum(value, top)
        peak = max_lanes(top)
        place, end = 16 * first, min(16 * last, outputs) - 1
        while place < end and load_f32(target + 4 * place) != peak:
            place += 1
        part = parts + (row * chunks + chunk) * _PART
        store_f32(part, peak)
        store_i64(part + 8, place)
        if chunk == 0:
            store_f32(kept + 4 * row, load_f32(scalars + 8 * row))


@inner
def _exact(args: int, tile: int, thread: int) -> int:
    """The exact logits of a tile for all rows, 16 numbers a row, at the address returned."""
    tile_bytes, lanes = load_i64(args + 8), load_i64(args + 16)
    result = load_i64(args + 72) + thread * load_i64(args + 80)
    run_tiles(
        load_i64(args) + tile * tile_bytes, tile_bytes, load_i64(args + 24) + thread * load_i64(args + 32),
        load_i64(args + 40), load_i64(args + 48), result, 64, 1, load_i64(args + 88),
        load_i64(args + 56), load_i64(args + 64), 0, lanes,
    )  # fmt: skip
    return result


@job
def bar_job(args: int, chunk: int, thread: int) -> None:
    """Of every row the exact logit of the output that the coarse product likes best: no smaller one is the largest."""
    head, rows, lanes = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    parts, chunks = load_i64(args + 24), load_i64(args + 32)
    bars = load_i64(args + 40) + thread * load_i64(args + 48)
    for row in range(rows):
        peak, place = _LOW, load_i64(parts + row * chunks * _PART + 8)
        for index in range(row * chunks, (row + 1) * chunks):
            value = load_f32(parts + index * _PART)
            if value > peak:
                peak, place = value, load_i64(parts + index * _PART + 8)
        values = _exact(head, place // lanes, thread)
        store_f32(bars + 4 * row, load_f32(values + 64 * row + 4 * (place % lanes)))


@inner
def _judge(
    values: int, tile: int, lanes: int, rows: int, outputs: int, parts: int, chunks: int
) -> None:
    """Compare a tile's exact logits with the largest so far; tiles come in order."""
    first = tile * lanes
    count = min(lanes, outputs - first)
    for row in range(rows):
        part = parts + row * chunks * _PART
        peak, strange = load_f32(part), load_f32(part + 4)
        for lane in range(count):
            value = load_f32(values + 64 * row + 4 * lane)
            strange += value - value
            if value > peak:
                peak = value
                store_i64(part + 8, first + lane)
        store_f32(part, peak)
        store_f32(part + 4, strange)


@job
def exact_job(args: int, chunk: int, thread: int) -> None:
    """Exact logits of a chunk's tiles that hold an output whose upper bound is not below the bar in some row."""
    head, rows, lanes = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    bars = load_i64(args + 40) + thread * load_i64(args + 48)
    coarse, stride, slack = load_i64(args + 56), load_i64(args + 64), load_i64(args + 72)
    kept, units, outputs = load_i64(args + 80), load_i64(args + 88), load_i64(args + 96)
    parts, chunks, counts = load_i64(args + 104), load_i64(args + 112), load_i64(args + 120)
    chunk = chunk * _SPREAD & (chunks - 1)
    parts += chunk * _PART
    for row in range(rows):
        store_f32(parts + row * chunks * _PART, _LOW)
        store_f32(parts + row * chunks * _PART + 4, _ZERO)
        store_i64(parts + row * chunks * _PART + 8, outputs - 1)
    found = 0
    for unit in range(units * chunk // chunks, units * (chunk + 1) // chunks):
        lane_bits, factor = 0, load(slack + 64 * unit)
        for row in range(rows):
            value = load(coarse + row * stride + 64 * unit)
            upper = fma(factor, splat(load_f32(kept + 4 * row)), value) + splat(_TINY)
            lane_bits |= lanes_not_below(upper, splat(load_f32(bars + 4 * row)))
        tile = unit * 16 // lanes
        while lane_bits != 0:
            if lane_bits & ((1 << lanes) - 1) and tile * lanes < outputs:
                values = _exact(head, tile, thread)
                _judge(values, tile, lanes, rows, outputs, parts, chunks)
                found += lanes
            lane_bits >>= lanes
            tile += 1
    store_i64(counts + 8 * chunk, found)


@job
def total_job(args: int, chunk: int, thread: int) -> None:
    """Count what was done."""
    counts, totals = load_i64(args), load_i64(args + 16)
    found = 0
    for index in range(load_i64(args + 8)):
        found += load_i64(counts + 8 * index)
    store_i64(totals, load_i64(totals) + 1)
    store_i64(totals + 8, load_i64(totals + 8) + load_i64(args + 24))
    store_i64(totals + 16, load_i64(totals + 16) + found)


def pack(
    backend: CpuBackend,
    rows: Callable[[int, int], NDArray[np.float32]],
    outputs: int,
    inputs: int,
    norm: NDArray[np.float32],
) -> Coarse | None:
    return pack_coarse(rows, outputs, inputs, norm, backend.isa.lanes, backend.arena)


class _Memory:
    """What a tape needs of its own: numbers for all threads, and buffers with a copy for each."""

    def __init__(self, recorder: CpuRecorder) -> None:
        self._recorder = recorder

    def shared(self, words: int) -> int:
        return self._recorder.pin(np.zeros(words, np.int64))

    def private(self, rows: int, width: int, dtype: Any = np.float32) -> tuple[int, int]:
        """Address and distance of the threads' copies."""
        buffer = self._recorder.owner.buffer(rows, width, dtype, private=True)
        self._recorder.pin(buffer.array)
        return buffer.address, buffer.thread_stride

    def fixed(self, array: NDArray[Any]) -> int:
        return self._recorder.pin(array)

    def words(self, values: tuple[Word, ...]) -> int:
        return self._recorder.words(values)


def record(
    recorder: CpuRecorder,
    x: Activation,
    head: PackedWeight,
    coarse: Coarse,
    bounds: Buffer,
    out: Buffer,
    totals: Buffer,
    n_vocab: int,
) -> None:
    rows, isa, memory = recorder.rows, recorder.owner.isa.name, _Memory(recorder)
    inputs, steps, lanes = head.inputs, coarse.steps, coarse.lanes
    assert head.lanes == lanes and n_vocab == head.outputs, (head.lanes, n_vocab)
    before = recorder.waiting()
    panel, panel_stride = memory.private(rows, steps * record_bytes(1), np.uint8)
    scalars = memory.private(1, 2 * rows)
    source, source_stride, group_stride = input_args(x, head)
    prepare = (
        source, source_stride, inputs, rows, int(head.quantised), x.f32.stride, memory.fixed(coarse.order),
        memory.fixed(coarse.direction), memory.fixed(coarse.shares), panel, panel_stride,
        *memory.private(2, inputs + 64), *scalars, int(isa == "avx2"), memory.fixed(_FIRST_TWO),
    )  # fmt: skip
    units = -(-n_vocab // 16)
    chunks = max(1, min(units, _MOST_CHUNKS, coarse.tiles.nbytes // _CHUNK_BYTES))
    full, rest = (coarse_kernel(n, isa, lanes) if n else 0 for n in (rows >> 3 and 8, rows & 7))
    parts, kept = memory.shared(rows * chunks * _PART // 8), memory.shared(rows)
    recorder.prologue(Job(prepare_job, prepare, 1))
    first = (
        memory.fixed(coarse.tiles), coarse.tiles.shape[1], lanes, len(coarse.tiles), rows, bounds.address,
        bounds.stride, units, chunks, n_vocab, panel, panel_stride, record_bytes(GROUP) * steps, steps,
        full, rest, *scalars, memory.fixed(coarse.along), parts, kept,
    )  # fmt: skip
    recorder.phase([Job(coarse_job, first, chunks)])
    for entry in before:
        recorder.prologue(entry)
    product = memory.words(
        (head.address, head.tile_bytes, head.lanes, source, source_stride, group_stride, head.blocks,
         *tile_functions(head, rows, isa), *memory.private(rows, 16), rows)
    )  # fmt: skip
    pieces = min(_EXACT_CHUNKS, 1 << (units.bit_length() - 1))
    found, counts = memory.shared(rows * pieces * _PART // 8), memory.shared(pieces)
    second = (
        product, rows, head.lanes, parts, chunks, *memory.private(1, rows), bounds.address, bounds.stride,
        memory.fixed(coarse.slack), kept, units, n_vocab, found, pieces, counts,
    )  # fmt: skip
    recorder.prologue(Job(bar_job, second, 1))
    recorder.phase([Job(exact_job, second, pieces)])
    recorder.phase(
        [
            Job(merge_job, (found, pieces, out.address, out.stride), rows),
            Job(total_job, (counts, pieces, totals.address, rows), 1),
        ]
    )
