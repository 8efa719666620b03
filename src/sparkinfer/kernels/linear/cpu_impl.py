"""CPU form of `linear`: each chunk is a run of tiles, taken for all rows while its weights are in cache."""

from collections.abc import Sequence
from typing import Any

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import GROUP, Q8_RECORD, CpuBackend, CpuRecorder, Job, Word
from sparkinfer.backend.simd import call_tiles, load_i64
from sparkinfer.kernels.linear.cpu_tiles import tile_kernel
from sparkinfer.kernels.linear.weights import PackedWeight, pack_weight

# Weight bytes of a chunk: small enough for the last ones to balance; a claim takes many.
_CHUNK_BYTES = 12 * 1024
_MAX_CHUNKS, _MAX_CHUNKS_BESIDE = 256, 1024  # of a product alone in its phase, of one beside others
_CACHE_BYTES = 16 * 1024  # weight bytes that stay in L1 while several row groups pass over them


def tile_functions(weight: PackedWeight, rows: int, isa: str) -> tuple[Word, Word]:
    """The kernels for full groups of 8 rows and for the remaining rows (0 where not needed)."""
    name, lanes, rest = weight.format_name, weight.lanes, rows % GROUP
    return (
        tile_kernel(name, GROUP, isa, lanes) if rows >= GROUP else 0,
        tile_kernel(name, rest, isa, lanes) if rest else 0,
    )


def input_args(x: Activation, weight: PackedWeight) -> tuple[int, int, int]:
    """Address, distance of the threads' copies and distance of the row groups of what `weight` reads."""
    if not weight.quantised:
        return x.f32.address, x.f32.thread_stride, GROUP * x.f32.stride
    assert x.q8 is not None, "a quantised weight needs a quantised activation"
    return x.q8.address, x.q8.thread_stride, GROUP * Q8_RECORD * weight.blocks


def chunks_of(weight: PackedWeight, *, beside: bool = False) -> int:
    """`beside` others in a phase chunks must be of one size: a claim takes a share of their number."""
    most = _MAX_CHUNKS_BESIDE if beside else _MAX_CHUNKS
    return max(1, min(weight.tiles, most, weight.expert_bytes // _CHUNK_BYTES))


@inner
def run_tiles(
    weight: int, tile_bytes: int, panel: int, group_stride: int, blocks: int,
    out: int, stride: int, tiles: int, rows: int, full: int, rest: int, add: int, lanes: int,
) -> None:  # fmt: skip
    """`tiles` tiles for all rows, in batches that stay in the L1 cache when there are several row groups."""
    groups = rows >> 3
    batch = tiles if rows <= 8 else max(1, _CACHE_BYTES // tile_bytes)
    done = 0
    while done < tiles:
        count = min(batch, tiles - done)
        w = weight + done * tile_bytes
        o = out + done * lanes * 4
        p = panel
        for _ in range(groups):
            call_tiles(full, w, p, blocks, o, stride, count, add)
            p += group_stride
            o += stride * 8
        if rest != 0:
            call_tiles(rest, w, p, blocks, o, stride, count, add)
        done += count


@inner
def linear_chunk(args: int, chunk: int, thread: int) -> None:
    """A chunk of a product; `args` are those of `linear_job`."""
    tiles, chunks = load_i64(args + 64), load_i64(args + 72)
    first = tiles * chunk // chunks
    last = tiles * (chunk + 1) // chunks
    tile_bytes, lanes = load_i64(args + 8), load_i64(args + 112)
    run_tiles(
        load_i64(args) + first * tile_bytes, tile_bytes, load_i64(args + 16) + thread * load_i64(args + 24),
        load_i64(args + 32), load_i64(args + 40), load_i64(args + 48) + first * lanes * 4, load_i64(args + 56),
        last - first, load_i64(args + 80), load_i64(args + 88), load_i64(args + 96), load_i64(args + 104), lanes,
    )  # fmt: skip


@job
def linear_job(args: int, chunk: int, thread: int) -> None:
    linear_chunk(args, chunk, thread)


def linear_jobs(
    recorder: CpuRecorder, x: Activation, weight: PackedWeight, out: Buffer, add: bool, beside: bool
) -> Job:
    """The job of one product, alone in its phase or `beside` others."""
    assert out.width >= weight.padded_outputs and not weight.joined, (out.width, weight)
    full, rest = tile_functions(weight, recorder.rows, recorder.owner.isa.name)
    panel, thread_stride, group_stride = input_args(x, weight)
    chunks = chunks_of(weight, beside=beside)
    args = (
        weight.address, weight.tile_bytes, panel, thread_stride, group_stride, weight.blocks,
        out.address, out.stride, weight.tiles, chunks, recorder.rows, full, rest, int(add), weight.lanes,
    )  # fmt: skip
    return Job(linear_job, args, chunks)


def pack(
    backend: CpuBackend, format_name: str, blocks: Any, outputs: int, inputs: int, experts: int
) -> PackedWeight:
    return pack_weight(
        format_name, blocks, outputs, inputs, backend.isa.lanes, backend.arena, experts
    )


def record(
    recorder: CpuRecorder,
    x: Activation,
    weights: Sequence[PackedWeight],
    out: Sequence[Buffer],
    *,
    add: bool,
) -> None:
    beside = len(weights) > 1
    recorder.phase(
        [
            linear_jobs(recorder, x, weight, target, add, beside)
            for weight, target in zip(weights, out, strict=True)
        ]
    )
