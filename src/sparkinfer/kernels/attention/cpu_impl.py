"""CPU form of `attention`: partial results per (split, row block, kv head), then a merge per row and head.

A partial result is head_size floats, the split's maximum and its sum of exponentials (padded to 16 floats).
"""

from typing import Any

import numpy as np

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.compiled import Kernel, family, inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import (
    exp,
    fma,
    load,
    load_f32,
    load_i64,
    max_lanes,
    prefetch,
    splat,
    store,
    store_i64,
)
from sparkinfer.kernels.attention import SPLIT, row_block
from sparkinfer.kernels.attention.cpu_blocks import (
    ISAS,
    WEIGHTS,
    avx2_group,
    portable_group,
    quantise_query,
    softmax,
    vnni512_group,
)
from sparkinfer.kernels.attention.cpu_tiles import score_tile, value_tile
from sparkinfer.kernels.cpu_activation import activation_args, quantise_row
from sparkinfer.kernels.rms_norm.cpu_impl import float_bits
from sparkinfer.kernels.rope.cpu_impl import cache_head, cache_head_blocks, rope_jobs, turn_query
from sparkinfer.kernels.run_params import (
    ATTENTION_CHUNKS,
    FIRST,
    HEAD_BYTES,
    KEYS,
    POSITION,
    VALUES,
    WINDOW_CHUNKS,
)
from sparkinfer.kernels.shapes import Heads

_ZERO, _ONE, _LOW = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_QUERIES = 6  # that share the reads of keys and values


def _loops(wide: int) -> Any:
    """`group` for a cache of float16 (`wide` 0) or float32: only what a job uses is compiled."""
    item = 4 if wide else 2

    @inner
    def scores_of(n, pair, q, keys, values, size, out):  # type: ignore[no-untyped-def]
        """One tile of 16 positions for n = 1..6 queries, or (n = 1..3) a `pair` of tiles."""
        if n == 6:
            score_tile(6, 1, wide, q, keys, values, size, out, SPLIT * 4)
        elif n == 5:
            score_tile(5, 1, wide, q, keys, values, size, out, SPLIT * 4)
        elif n == 4:
            score_tile(4, 1, wide, q, keys, values, size, out, SPLIT * 4)
        elif n == 3 and pair:
            score_tile(3, 2, wide, q, keys, values, size, out, SPLIT * 4)
        elif n == 3:
            score_tile(3, 1, wide, q, keys, values, size, out, SPLIT * 4)
        elif n == 2 and pair:
            score_tile(2, 2, wide, q, keys, values, size, out, SPLIT * 4)
        elif n == 2:
            score_tile(2, 1, wide, q, keys, values, size, out, SPLIT * 4)
        elif pair:
            score_tile(1, 2, wide, q, keys, values, size, out, SPLIT * 4)
        else:
            score_tile(1, 1, wide, q, keys, values, size, out, SPLIT * 4)

    @inner
    def weighted(n, pair, weights, values, row_bytes, low, common, count, out, stride):  # type: ignore[no-untyped-def]
        """16 dimensions (a `pair`, with n = 1..3: 32) of the weighted sum of `count` values, of which all n = 1..6
        queries see low .. common.
        """
        if n == 6:
            value_tile(
                6, 1, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )
        elif n == 5:
            value_tile(
                5, 1, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )
        elif n == 4:
            value_tile(
                4, 1, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )
        elif n == 3 and pair:
            value_tile(
                3, 2, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )
        elif n == 3:
            value_tile(
                3, 1, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )
        elif n == 2 and pair:
            value_tile(
                2, 2, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )
        elif n == 2:
            value_tile(
                2, 1, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )
        elif pair:
            value_tile(
                1, 2, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )
        else:
            value_tile(
                1, 1, wide, weights, SPLIT * 4, values, row_bytes, low, common, count, out, stride
            )

    @inner
    def group(
        n: int, q: int, keys: int, values: int, size: int, bounds: int, scores: int, results: int,
    ) -> None:  # fmt: skip
        """n queries at `q`, one of which at least sees a key of the split. `bounds` holds two int64 a query (it sees
        the split's positions low .. count), `results` a partial result a query.
        """
        begin, low, most, common = SPLIT, 0, 0, SPLIT
        for i in range(n):
            mine, count = load_i64(bounds + 16 * i), load_i64(bounds + 16 * i + 8)
            most = max(most, count)
            common = min(common, max(count, 0))
            if mine < count:
                begin = min(begin, mine)
                low = max(low, mine)
        first, tiles = begin >> 4, (most + 15) >> 4
        result_bytes = (size + 16) * 4
        t = first
        while t < tiles:
            pair = n <= 3 and t + 1 < tiles
            at = t * size * 16 * item
            scores_of(n, pair, q, keys + at, values + at, size, scores + 64 * t)
            t += 2 if pair else 1
        for i in range(n):
            mine, count = load_i64(bounds + 16 * i), load_i64(bounds + 16 * i + 8)
            at = results + i * result_bytes + 4 * size
            softmax(scores + i * SPLIT * 4, mine, count, first, tiles, at)
        common = max(common, low)
        d = 0
        while d < size:
            pair = n <= 3 and d + 16 < size
            weighted(
                n, pair, scores + 4 * begin, values + begin * size * item + d * item, size * item, low - begin,
                common - begin, most - begin, results + 4 * d, result_bytes,
            )  # fmt: skip
            d += 32 if pair else 16

    return group


_half_group, _wide_group = _loops(0), _loops(1)


@inner
def _lowest(params: int, window: int, query: int) -> int:
    """The first position that a row at position `query` sees; `window` 0: all from FIRST on."""
    lowest = load_i64(params + FIRST)
    if window != 0:
        lowest = max(lowest, query - window + 1)
    return lowest


@inner
def _end(params: int, causal: int, window: int, query: int, total: int) -> int:
    """One past the last position that a row at position `query` of a run of `total` rows sees."""
    if causal:
        return query + 1
    end = load_i64(params + POSITION) + total
    if window != 0:
        end = min(end, query + window)
    return end


@inner
def _cache_split(turning: int, rows: int, head: int, start: int, thread: int, wide: int) -> None:
    """Keys and values of one kv head that the run's rows add to the split at position `start`."""
    position = load_i64(load_i64(turning + 96) + POSITION)
    for row in range(max(0, start - position), min(rows, start + SPLIT - position)):
        cache_head(turning, row, head, thread, wide)


@inner
def _cache_split_blocks(turning: int, rows: int, head: int, start: int, thread: int) -> None:
    """The same in q8_0."""
    position = load_i64(load_i64(turning + 96) + POSITION)
    for row in range(max(0, start - position), min(rows, start + SPLIT - position)):
        cache_head_blocks(turning, row, head, thread)


_VNNI512, _AVX2, _PORTABLE = 1, 2, 3  # instruction sets of a cache in q8_0


@family
def _partial_job(wide: int, blocks: int) -> Kernel:
    """`blocks`: 0, or the cache is in q8_0, for this instruction set."""
    item = 1 if blocks else 4 if wide else 2

    @job
    def attention_partial(args, chunk, thread):  # type: ignore[no-untyped-def]
        params, rows = load_i64(args + 24), load_i64(args + 32)
        heads, kv_heads, size = load_i64(args + 48), load_i64(args + 56), load_i64(args + 64)
        causal, window, run_rows = load_i64(args + 104), load_i64(args + 112), load_i64(args + 128)
        head = chunk % kv_heads
        rest = chunk // kv_heads
        block_rows = load_i64(args + 144)
        row_blocks = (rows + block_rows - 1) // block_rows
        position = load_i64(params + POSITION) + load_i64(args + 120)
        block = rest % row_blocks
        split = rest // row_blocks + _lowest(params, window, position) // SPLIT
        per_kv = heads // kv_heads
        start = split * SPLIT
        plane = load_i64(params + HEAD_BYTES)
        offset = (load_i64(args + 40) * kv_heads + head) * plane + start * size * item
        keys, values = load_i64(params + KEYS) + offset, load_i64(params + VALUES) + offset
        scales = plane // 17 * 16 - start * size + (start * size >> 4)  # in q8_0, from the codes
        scratch = load_i64(args + 72) + thread * load_i64(args + 80)
        queries, scores = scratch, scratch + _QUERIES * size * 4
        results = scores + _QUERIES * SPLIT * 4
        bounds = results + _QUERIES * (size + 16) * 4
        quantised = bounds + _QUERIES * 16
        weights = quantised + _QUERIES * size * 4
        total = min(rows - block * block_rows, block_rows) * per_kv
        scale, turning = splat(load_f32(args + 88)), load_i64(args + 136)
        for line in range(0, 16 * size * item, 64):
            prefetch(keys + line)
        if turning != 0:
            if blocks:
                _cache_split_blocks(turning, run_rows, head, start, thread)
            else:
                _cache_split(turning, run_rows, head, start, thread, wide)
        result_bytes = (size + 16) * 4
        splits = load_i64(args + 96)
        for first in range(0, total, _QUERIES):
            n = min(_QUERIES, total - first)
            seen = False
            for i in range(n):
                row = block * block_rows + (first + i) // per_kv
                query_head = head * per_kv + (first + i) % per_kv
                target = queries + i * size * 4
                source = load_i64(args) + row * load_i64(args + 8) + query_head * size * 4
                if turning != 0:
                    turn_query(turning, row + load_i64(args + 120), query_head, target)
                    source = target
                for d in range(0, size * 4, 64):
                    store(target + d, load(source + d) * scale)
                if blocks:
                    quantise_query(target, size, quantised + i * size * 4)
                low = max(_lowest(params, window, position + row) - start, 0)
                count = min(SPLIT, _end(params, causal, window, position + row, run_rows) - start)
                store_i64(bounds + 16 * i, low)
                store_i64(bounds + 16 * i + 8, count)
                seen = seen or low < count
            if not seen:
                continue
            if blocks == _VNNI512:
                vnni512_group(
                    n, quantised, keys, keys + scales, values, values + scales, size, bounds, scores,
                    results, weights,
                )  # fmt: skip
            elif blocks == _AVX2:
                avx2_group(
                    n, quantised, keys, keys + scales, values, values + scales, size, bounds, scores,
                    results, weights,
                )  # fmt: skip
            elif blocks == _PORTABLE:
                portable_group(
                    n, quantised, keys, keys + scales, values, values + scales, size, bounds, scores,
                    results, weights,
                )  # fmt: skip
            elif wide:
                _wide_group(n, queries, keys, values, size, bounds, scores, results)
            else:
                _half_group(n, queries, keys, values, size, bounds, scores, results)
            for i in range(n):
                if load_i64(bounds + 16 * i) < load_i64(bounds + 16 * i + 8):
                    row = block * block_rows + (first + i) // per_kv
                    query_head = head * per_kv + (first + i) % per_kv
                    target = (
                        load_i64(args + 16)
                        + ((row * heads + query_head) * splits + split) * result_bytes
                    )
                    for d in range(0, result_bytes, 64):
                        store(target + d, load(results + i * result_bytes + d))

    return attention_partial


@inner
def _weighted_sum(partial: int, size: int, used: int, target: int) -> float:
    """The sum of `used` partial results in order, each relative to the largest maximum; returns that of their sums."""
    result_bytes = (size + 16) * 4
    peak = load_f32(partial + 4 * size)
    for s in range(1, used):
        peak = max(peak, load_f32(partial + s * result_bytes + 4 * size))
    total = _ZERO
    for s in range(used):
        at = partial + s * result_bytes
        weights = exp(splat(load_f32(at + 4 * size) - peak))
        total = max_lanes(weights) * load_f32(at + 4 * size + 4) + total
        for d in range(0, 4 * size, 64):
            before = load(target + d) if s != 0 else splat(_ZERO)
            store(target + d, fma(weights, load(at + d), before))
    return total


@inner
def _merge_head(partial: int, size: int, used: int, gate: int, target: int) -> None:
    """Combine `used` partial results; `gate` (0: none) is size floats. One alone has the weight 1."""
    source, total = partial, load_f32(partial + 4 * size + 4)
    if used > 1:
        source, total = target, _weighted_sum(partial, size, used, target)
    inverse = splat(_ONE / total)
    for d in range(0, 4 * size, 64):
        value = load(source + d) * inverse
        if gate != 0:
            value = value / (splat(_ONE) + exp(splat(_ZERO) - load(gate + d)))
        store(target + d, value)


@inner
def _merge_row(args: int, row: int, thread: int) -> None:
    params, heads, size, splits = (
        load_i64(args + 48),
        load_i64(args + 56),
        load_i64(args + 64),
        load_i64(args + 72),
    )
    causal, window = load_i64(args + 104), load_i64(args + 112)
    query = load_i64(params + POSITION) + load_i64(args + 120) + row
    first = _lowest(params, window, query) // SPLIT
    used = (_end(params, causal, window, query, load_i64(args + 128)) - 1) // SPLIT + 1 - first
    target = load_i64(args) + thread * load_i64(args + 8) + row * load_i64(args + 16)
    gate = load_i64(args + 88)
    for head in range(heads):
        partial = load_i64(args + 40) + ((row * heads + head) * splits + first) * (size + 16) * 4
        gate_head = gate + row * load_i64(args + 96) + (2 * head + 1) * size * 4 if gate != 0 else 0
        _merge_head(partial, size, used, gate_head, target + head * size * 4)
    if load_i64(args + 24) != 0:
        q8 = load_i64(args + 24) + thread * load_i64(args + 32)
        quantise_row(q8, heads * size >> 5, load_i64(args + 80), row, target)


@job
def merge_job(args: int, chunk: int, thread: int) -> None:
    _merge_row(args, chunk, thread)


@job
def merge_all_job(args: int, chunk: int, thread: int) -> None:
    for row in range(load_i64(args + 80)):
        _merge_row(args, row, thread)


def record(
    recorder: CpuRecorder,
    q: Buffer,
    shape: Heads,
    params: Buffer,
    gate: Buffer | None,
    out: Activation,
    context: int,
    first_row: int,
    of_rows: int,
) -> None:
    rows, size = recorder.rows, shape.head_size
    splits = -(-context // SPLIT)
    result = (size + 16) * 4
    partial = recorder.owner.shared_scratch("attention", rows * shape.heads * splits * result)
    scratch_bytes = _QUERIES * (size * 4 + SPLIT * 4 + result + 16) + 64
    wide, blocks = int(recorder.cache_format == "f32"), 0
    if recorder.cache_format == "q8_0":
        blocks = 1 + ISAS.index(recorder.owner.isa.name)
        scratch_bytes += _QUERIES * (size * 4 + WEIGHTS + 4) + 40
    scratch = recorder.owner.shared_scratch(
        "attention threads", recorder.owner.threads * scratch_bytes
    )
    # With few rows a chunk turns its own queries and keys: in a prologue each thread would do all of them, and write
    # into the same lines as the others.
    turn = recorder.take_prologue(rope_jobs(recorder.cache_format)[1])
    turning = recorder.pin(np.array(turn.args, np.int64)) if turn else 0
    args = (
        q.address, q.stride, partial, params.address, rows, shape.layer, shape.heads, shape.kv_heads, size,
        scratch, scratch_bytes, float_bits(size**-0.5), splits, int(shape.causal), shape.window, first_row, of_rows,
        turning, row_block(rows),
    )  # fmt: skip
    kernel = _partial_job(wide, blocks)
    count = WINDOW_CHUNKS if shape.window else ATTENTION_CHUNKS
    recorder.phase([Job(kernel, args, 1, params.address + count)])
    merge = (
        *activation_args(out), partial, params.address, shape.heads, size, splits, rows,
        gate.address if gate else 0, gate.stride if gate else 0, int(shape.causal), shape.window, first_row, of_rows,
    )  # fmt: skip
    if out.private:
        recorder.prologue(Job(merge_all_job, merge, 1))
    else:
        recorder.phase([Job(merge_job, merge, rows)])
