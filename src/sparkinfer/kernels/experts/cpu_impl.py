"""CPU form of the routed experts: a chunk is a part of the outputs of one active expert."""

import numpy as np

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import GROUP, CpuRecorder, Job
from sparkinfer.backend.simd import exp, fma, load, load_f32, load_i64, splat, store, store_f32
from sparkinfer.kernels.experts import ExpertBuffers
from sparkinfer.kernels.gated_linear.cpu_impl import BLOCK, scratch_for, write_gated
from sparkinfer.kernels.linear.cpu_impl import chunks_of, input_args, run_tiles
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
from sparkinfer.kernels.linear.weights import PackedWeight
from sparkinfer.kernels.route import Routing

_PART_BYTES = 96 * 1024  # weight bytes of a chunk
_COLUMNS = 256  # of a combine chunk
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

# ---- arguments: a weight is 5 words, a routing 4


def _weight_args(recorder: CpuRecorder, weight: PackedWeight) -> tuple[int, ...]:
    """Address, bytes of an expert, bytes of a tile, lanes, and a table of the kernels for 0..8 rows."""
    most = min(GROUP, recorder.rows)
    isa = recorder.owner.isa.name
    kernels = [tile_kernel(weight.format_name, n, isa, weight.lanes) for n in range(1, most + 1)]
    table = recorder.words([0, *kernels, *[0] * (GROUP - most)])
    return weight.address, weight.expert_bytes, weight.tile_bytes, weight.lanes, table


def _routing_args(recorder: CpuRecorder, routing: Routing) -> tuple[int, ...]:
    return routing.table.address, recorder.rows, routing.used, routing.experts


@inner
def _entry(routing: int, index: int) -> int:
    """Address of an active expert's id, number of rows and first slot."""
    return load_i64(routing) + 8 + 8 * load_i64(routing + 8) * load_i64(routing + 16) + 24 * index


@inner
def _row_of(routing: int, slot: int) -> int:
    pairs = load_i64(routing + 8) * load_i64(routing + 16)
    return load_i64(
        load_i64(routing) + 8 + 8 * pairs + 24 * min(load_i64(routing + 24), pairs) + 8 * slot
    )


@inner
def _expert_tiles(
    weight: int, expert: int, tile: int, tiles: int, panel: int, group_stride: int, blocks: int,
    out: int, stride: int, rows: int,
) -> None:  # fmt: skip
    """`tiles` tiles of one expert from `tile` on, for `rows` rows."""
    size, kernels = load_i64(weight + 16), load_i64(weight + 32)
    start = load_i64(weight) + expert * load_i64(weight + 8) + tile * size
    full = load_i64(kernels + 64)
    rest = load_i64(kernels + 8 * (rows & 7))
    run_tiles(
        start, size, panel, group_stride, blocks, out, stride, tiles, rows, full, rest, 0, load_i64(weight + 24),
    )  # fmt: skip


# ---- hidden = silu(gate) * up


@inner
def _copy(target: int, source: int, n_bytes: int) -> None:
    for i in range(0, n_bytes, 4):
        store_f32(target + i, load_f32(source + i))


@inner
def _gather_q8(
    source: int, rows: int, row: int, target: int, count: int, index: int, blocks: int
) -> None:
    """Copy row `row` of a quantised panel of `rows` rows to place `index` of a panel of `count` rows."""
    from_first, to_first = row & -8, index & -8
    from_group, to_group = min(8, rows - from_first), min(8, count - to_first)
    from_row, to_row = row - from_first, index - to_first
    for block in range(blocks):
        a = source + (from_first * blocks + block * from_group) * 48
        b = target + (to_first * blocks + block * to_group) * 48
        _copy(b + 32 * to_row, a + 32 * from_row, 32)
        for offset in range(32, 48, 4):
            store_f32(
                b + offset * to_group + 4 * to_row, load_f32(a + offset * from_group + 4 * from_row)
            )


@job
def hidden_job(args: int, chunk: int, thread: int) -> None:
    routing, gate, up = args + 112, args + 144, args + 184
    parts, blocks, quantised = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    rows, entry = load_i64(routing + 8), _entry(routing, chunk // parts)
    expert, count, first = load_i64(entry), load_i64(entry + 8), load_i64(entry + 16)
    panel, row_bytes = load_i64(args) + thread * load_i64(args + 8), load_i64(args + 16)
    if rows > 1:
        gathered = load_i64(args + 48) + thread * rows * row_bytes
        for i in range(count):
            row = _row_of(routing, first + i)
            if quantised:
                _gather_q8(panel, rows, row, gathered, count, i, blocks)
            else:
                _copy(gathered + i * row_bytes, panel + row * row_bytes, row_bytes)
        panel = gathered
    total, scratch = load_i64(args + 56), load_i64(args + 64) + thread * rows * 256
    hidden, stride, q8 = load_i64(args + 72), load_i64(args + 88), load_i64(args + 96)
    target = q8 + first * total * 48 if q8 != 0 else 0
    tiles, part = BLOCK // load_i64(gate + 24), chunk % parts
    for block in range(total * part // parts, total * (part + 1) // parts):
        tile = block * tiles
        _expert_tiles(gate, expert, tile, tiles, panel, 8 * row_bytes, blocks, scratch, 256, count)
        _expert_tiles(
            up, expert, tile, tiles, panel, 8 * row_bytes, blocks, scratch + 128, 256, count
        )
        write_gated(scratch, hidden + first * stride, stride, target, total, count, block)


def record_hidden(
    recorder: CpuRecorder,
    x: Activation,
    gate: PackedWeight,
    up: PackedWeight,
    routing: Routing,
    buffers: ExpertBuffers,
) -> None:
    assert gate.outputs % BLOCK == 0 and gate.quantised == up.quantised, gate
    rows, threads = recorder.rows, recorder.owner.threads
    panel, thread_stride, group_stride = input_args(x, gate)
    row_bytes = group_stride // GROUP
    total = gate.outputs // BLOCK
    parts = max(1, min(total, (gate.expert_bytes + up.expert_bytes) // _PART_BYTES))
    gathered = recorder.owner.shared_scratch("expert rows", threads * rows * row_bytes + 64)
    hidden = buffers.hidden
    args = (
        panel, thread_stride, row_bytes, parts, gate.blocks, int(gate.quantised), gathered, total,
        scratch_for(recorder, rows), hidden.f32.address, 0, hidden.f32.stride, hidden.q8.address if hidden.q8 else 0, 0,
        *_routing_args(recorder, routing), *_weight_args(recorder, gate), *_weight_args(recorder, up),
    )  # fmt: skip
    recorder.phase([Job(hidden_job, args, parts, routing.table.address)])


# ---- out = down @ hidden


@job
def out_job(args: int, chunk: int, thread: int) -> None:
    routing, down = args + 56, args + 88
    parts, row_bytes, blocks = load_i64(args), load_i64(args + 16), load_i64(args + 24)
    entry = _entry(routing, chunk // parts)
    expert, count, first = load_i64(entry), load_i64(entry + 8), load_i64(entry + 16)
    tiles, part, stride = load_i64(args + 48), chunk % parts, load_i64(args + 40)
    tile, last = tiles * part // parts, tiles * (part + 1) // parts
    out = load_i64(args + 32) + first * stride + tile * load_i64(down + 24) * 4
    panel = load_i64(args + 8) + first * row_bytes
    _expert_tiles(down, expert, tile, last - tile, panel, 8 * row_bytes, blocks, out, stride, count)


def record_out(
    recorder: CpuRecorder, down: PackedWeight, routing: Routing, buffers: ExpertBuffers
) -> None:
    panel, thread_stride, group_stride = input_args(buffers.hidden, down)
    assert thread_stride == 0, "the threads share the hidden rows"
    parts = chunks_of(down, beside=True)  # of the size of the shared expert's, beside them
    args = (
        parts, panel, group_stride // GROUP, down.blocks, buffers.out.address, buffers.out.stride, down.tiles,
        *_routing_args(recorder, routing), *_weight_args(recorder, down),
    )  # fmt: skip
    recorder.phase([Job(out_job, args, parts, routing.table.address)])


# ---- the weighted sum


@job
def combine_job(args: int, chunk: int, thread: int) -> None:
    routing = args + 96
    columns, width = load_i64(args), load_i64(args + 8)
    row, part = chunk // columns, chunk % columns
    used = load_i64(routing + 16)
    slots = load_i64(routing) + 8 + 8 * row * used
    weights = load_i64(args + 16) + row * load_i64(args + 24)
    results, stride = load_i64(args + 32), load_i64(args + 40)
    shared = load_i64(args + 48) + row * load_i64(args + 56)
    x = load_i64(args + 64) + row * load_i64(args + 72)
    gate = splat(load_f32(load_i64(args + 80) + row * load_i64(args + 88)))
    gate = splat(_ONE) / (splat(_ONE) + exp(splat(_ZERO) - gate))
    for i in range(4 * part * _COLUMNS, 4 * min(width, (part + 1) * _COLUMNS), 64):
        total = gate * load(shared + i)
        for rank in range(used):
            weight = splat(load_f32(weights + 4 * rank))
            total = fma(weight, load(results + load_i64(slots + 8 * rank) * stride + i), total)
        store(x + i, load(x + i) + total)


def record_combine(
    recorder: CpuRecorder,
    routing: Routing,
    buffers: ExpertBuffers,
    shared: Buffer,
    gates: Buffer,
    column: int,
    out: Buffer,
) -> None:
    columns = -(-out.width // _COLUMNS)
    args = (
        columns, out.width, routing.weights.address, routing.weights.stride, buffers.out.address, buffers.out.stride,
        shared.address, shared.stride, out.address, out.stride, gates.address + 4 * column, gates.stride,
        *_routing_args(recorder, routing),
    )  # fmt: skip
    recorder.phase([Job(combine_job, args, columns * recorder.rows)])
