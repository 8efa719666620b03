"""CPU form of `rms_norm`: a prologue for few rows, else a phase with one chunk a row."""

import numpy as np

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import (
    fma,
    load,
    load_f32,
    load_i64,
    splat,
    sqrt_scalar,
    store,
    sum_lanes,
)
from sparkinfer.kernels.cpu_activation import activation_args, quantise_row


@inner
def norm_scale(source: int, width: int, eps: float) -> float:
    """What a float32 row is multiplied by to have unit mean square."""
    total = splat(np.float32(0.0))
    for i in range(0, 4 * width, 64):
        value = load(source + i)
        total = fma(value, value, total)
    return np.float32(1.0) / sqrt_scalar(sum_lanes(total) / np.float32(width) + eps)


@inner
def norm_row(source: int, weight: int, target: int, width: int, eps: float) -> None:
    """float32 row at `source` to `target`; both may be the same."""
    scale = splat(norm_scale(source, width, eps))
    for i in range(0, 4 * width, 64):
        store(target + i, load(source + i) * scale * load(weight + i))


@inner
def _row(args: int, row: int, thread: int) -> None:
    width, rows = load_i64(args + 64), load_i64(args + 72)
    target = load_i64(args) + thread * load_i64(args + 8) + row * load_i64(args + 16)
    norm_row(
        load_i64(args + 40) + row * load_i64(args + 48),
        load_i64(args + 56),
        target,
        width,
        load_f32(args + 80),
    )
    if load_i64(args + 24) != 0:
        quantise_row(
            load_i64(args + 24) + thread * load_i64(args + 32), width >> 5, rows, row, target
        )


@job
def norm_job(args: int, chunk: int, thread: int) -> None:
    _row(args, chunk, thread)


@job
def norm_all_job(args: int, chunk: int, thread: int) -> None:
    for row in range(load_i64(args + 72)):
        _row(args, row, thread)


def float_bits(value: float) -> int:
    """A float32 in the low half of an int64 argument."""
    return int(np.float32(value).view(np.uint32))


def record(
    recorder: CpuRecorder, x: Buffer, weight: Buffer, out: Activation, *, eps: float
) -> None:
    assert x.width % 16 == 0 and (out.q8 is None or x.width % 32 == 0), x.width
    rows = recorder.rows
    args = (
        *activation_args(out),
        x.address,
        x.stride,
        weight.address,
        x.width,
        rows,
        float_bits(eps),
    )
    if out.private:
        recorder.prologue(Job(norm_all_job, args, 1))
    else:
        recorder.phase([Job(norm_job, args, rows)])
