"""CPU form of `gated_linear`: a chunk is a run of 32-wide blocks of the result, gate and up side by side.

Gate and up that were packed as a pair lie in the order in which they are read.
"""

from typing import Any

import numpy as np

from sparkinfer.backend.base import Activation
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import CpuBackend, CpuRecorder, Job, Word
from sparkinfer.backend.simd import exp, load, load_i64, splat, store
from sparkinfer.kernels.cpu_activation import activation_args, write_q8
from sparkinfer.kernels.linear.cpu_impl import chunks_of, input_args, run_tiles, tile_functions
from sparkinfer.kernels.linear.weights import JOINED, PackedWeight
from sparkinfer.kernels.linear.weights import pack_pair as pack_in_turn

BLOCK = JOINED
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@inner
def silu(x: Any) -> Any:
    return x / (splat(_ONE) + exp(splat(_ZERO) - x))


@inner
def side(
    weight: int, block: int, panel: int, group_stride: int, blocks: int, out: int, rows: int
) -> None:
    """One block of the outputs of the weights described at `weight`, for all rows, 256 bytes a row."""
    tile_bytes, tiles = load_i64(weight + 8), load_i64(weight + 40)
    run_tiles(
        load_i64(weight) + block * tiles * tile_bytes, tile_bytes, panel, group_stride, blocks,
        out, 256, tiles, rows, load_i64(weight + 16), load_i64(weight + 24), 0, load_i64(weight + 32),
    )  # fmt: skip


@inner
def write_gated(
    scratch: int, f32: int, stride: int, q8: int, blocks: int, rows: int, block: int
) -> None:
    """silu(gate) * up of one block for all rows, to float32 rows (`f32` not 0) and int8 blocks (`q8` not 0)."""
    for row in range(rows):
        source = scratch + 256 * row
        y0 = silu(load(source)) * load(source + 128)
        y1 = silu(load(source + 64)) * load(source + 192)
        if q8 != 0:
            write_q8(q8, blocks, rows, row, block, y0, y1)
        else:
            target = f32 + row * stride + block * 128
            store(target, y0)
            store(target + 64, y1)


@job
def gated_job(args: int, chunk: int, thread: int) -> None:
    total, chunks, rows = load_i64(args + 80), load_i64(args + 88), load_i64(args + 96)
    panel = load_i64(args + 40) + thread * load_i64(args + 48)
    group_stride, blocks = load_i64(args + 56), load_i64(args + 64)
    scratch = load_i64(args + 72) + thread * rows * 256
    for block in range(total * chunk // chunks, total * (chunk + 1) // chunks):
        side(args + 104, block, panel, group_stride, blocks, scratch, rows)
        if load_i64(args + 152) != 0:
            side(args + 152, block, panel, group_stride, blocks, scratch + 128, rows)
        write_gated(
            scratch, load_i64(args), load_i64(args + 16), load_i64(args + 24), total, rows, block
        )


def _weight_args(weight: PackedWeight, rows: int, isa: str, outputs: int) -> tuple[Word, ...]:
    """What `side` reads: a block has `outputs` outputs."""
    full, rest = tile_functions(weight, rows, isa)
    tiles = outputs // weight.lanes
    return weight.address, weight.tile_bytes, full, rest, weight.lanes, tiles


def _both_args(
    gate: PackedWeight, up: PackedWeight, rows: int, isa: str
) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    """`side`'s arguments for gate and up; for a pair packed in turn one takes both, and the other is nothing."""
    if not gate.joined:
        return _weight_args(gate, rows, isa, BLOCK), _weight_args(up, rows, isa, BLOCK)
    assert up.array is gate.array and up.address > gate.address, "gate and up of different pairs"
    return _weight_args(gate, rows, isa, 2 * BLOCK), (0,) * 6


def scratch_for(recorder: CpuRecorder, rows: int) -> int:
    """256 bytes a row and thread: 32 gate and 32 up values."""
    return recorder.pin(np.zeros((recorder.owner.threads * rows + 1) * 64, np.float32))


def pack_pair(
    backend: CpuBackend, format_name: str, pair: tuple[Any, Any], outputs: int, inputs: int
) -> tuple[PackedWeight, PackedWeight]:
    return pack_in_turn(format_name, pair, outputs, inputs, backend.isa.lanes, backend.arena)


def record(
    recorder: CpuRecorder, x: Activation, gate: PackedWeight, up: PackedWeight, out: Activation
) -> None:
    assert gate.outputs % BLOCK == 0, gate.outputs
    assert gate.quantised == up.quantised, "gate and up read the same form of the activation"
    rows, isa = recorder.rows, recorder.owner.isa.name
    panel, thread_stride, group_stride = input_args(x, gate)
    total = gate.outputs // BLOCK
    chunks = min(total, 2 * chunks_of(gate))
    first, second = _both_args(gate, up, rows, isa)
    args = (
        *activation_args(out),
        panel, thread_stride, group_stride, gate.blocks, scratch_for(recorder, rows), total, chunks, rows,
        *first, *second,
    )  # fmt: skip
    recorder.phase([Job(gated_job, args, chunks)])
