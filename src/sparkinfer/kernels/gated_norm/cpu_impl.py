"""CPU form of `gated_norm`: a prologue for few rows, else one chunk a row."""

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import load, load_f32, load_i64, store
from sparkinfer.kernels.cpu_activation import activation_args, quantise_row
from sparkinfer.kernels.gated_linear.cpu_impl import silu
from sparkinfer.kernels.rms_norm.cpu_impl import float_bits, norm_row


@inner
def _row(args: int, row: int, thread: int) -> None:
    heads, width, eps = load_i64(args + 88), load_i64(args + 80), load_f32(args + 96)
    size = width // heads
    source = load_i64(args + 40) + row * load_i64(args + 48)
    gate = load_i64(args + 56) + row * load_i64(args + 64)
    target = load_i64(args) + thread * load_i64(args + 8) + row * load_i64(args + 16)
    for head in range(heads):
        norm_row(source + head * size * 4, load_i64(args + 72), target + head * size * 4, size, eps)
    for i in range(0, width * 4, 64):
        store(target + i, load(target + i) * silu(load(gate + i)))
    if load_i64(args + 24) != 0:
        q8 = load_i64(args + 24) + thread * load_i64(args + 32)
        quantise_row(q8, width >> 5, load_i64(args + 104), row, target)


@job
def gated_norm_job(args: int, chunk: int, thread: int) -> None:
    _row(args, chunk, thread)


@job
def gated_norm_all_job(args: int, chunk: int, thread: int) -> None:
    for row in range(load_i64(args + 104)):
        _row(args, row, thread)


def record(
    recorder: CpuRecorder,
    x: Buffer,
    gate: Buffer,
    weight: Buffer,
    out: Activation,
    *,
    heads: int,
    eps: float,
) -> None:
    rows = recorder.rows
    width = heads * weight.width
    args = (
        *activation_args(out), x.address, x.stride, gate.address, gate.stride, weight.address, width, heads,
        float_bits(eps), rows,
    )  # fmt: skip
    if out.private:
        recorder.prologue(Job(gated_norm_all_job, args, 1))
    else:
        recorder.phase([Job(gated_norm_job, args, rows)])
