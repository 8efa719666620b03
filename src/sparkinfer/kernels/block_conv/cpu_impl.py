"""CPU form of `block_conv`: a prologue for few rows where the result is a new one, else one chunk a row."""

import numpy as np

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import fma, load, load_f32, load_i64, splat, store
from sparkinfer.kernels.block_conv import BlockConv
from sparkinfer.kernels.cpu_activation import activation_args, quantise_row


@inner
def _conv_row(args: int, row: int, target: int, add: int) -> None:
    """One row; `args` holds x, its stride, deltas, their stride, base, its stride, taps, group, channels."""
    taps, group, channels = load_i64(args + 48), load_i64(args + 56), load_i64(args + 64)
    groups = channels // group
    x, stride = load_i64(args), load_i64(args + 8)
    deltas = load_i64(args + 16) + row * load_i64(args + 24)
    base, base_stride = load_i64(args + 32), load_i64(args + 40)
    for c in range(0, channels, 16):
        total = splat(np.float32(0.0))
        for t in range(min(taps, row + 1)):
            delta = splat(load_f32(deltas + 4 * (t * groups + c // group)))
            weight = load(base + t * base_stride + 4 * c) + delta
            total = fma(weight, load(x + (row - t) * stride + 4 * c), total)
        if add:
            total = load(target + 4 * c) + total
        store(target + 4 * c, total)


@inner
def _activation_row(args: int, row: int, thread: int) -> None:
    target = load_i64(args) + thread * load_i64(args + 8) + row * load_i64(args + 16)
    _conv_row(args + 48, row, target, 0)
    if load_i64(args + 24) != 0:
        q8 = load_i64(args + 24) + thread * load_i64(args + 32)
        quantise_row(q8, load_i64(args + 112) >> 5, load_i64(args + 40), row, target)


@job
def conv_job(args: int, chunk: int, thread: int) -> None:
    _activation_row(args, chunk, thread)


@job
def conv_all_job(args: int, chunk: int, thread: int) -> None:
    for row in range(load_i64(args + 40)):
        _activation_row(args, row, thread)


@job
def conv_add_job(args: int, chunk: int, thread: int) -> None:
    _conv_row(args, chunk, load_i64(args + 72) + chunk * load_i64(args + 80), 1)


def _args(x: Buffer, deltas: Buffer, conv: BlockConv, side: int) -> tuple[int, ...]:
    channels = conv.base.width
    assert conv.group % 16 == 0 and channels % conv.group == 0 and x.thread_stride == 0, conv
    first = side * conv.taps * (channels // conv.group)
    return (
        x.address, x.stride, deltas.address + 4 * first, deltas.stride,
        conv.base.address + side * conv.taps * conv.base.stride, conv.base.stride, conv.taps, conv.group, channels,
    )  # fmt: skip


def record(
    recorder: CpuRecorder, x: Buffer, deltas: Buffer, conv: BlockConv, out: Activation
) -> None:
    args = (*activation_args(out), recorder.rows, *_args(x, deltas, conv, 0))
    if out.private:
        recorder.prologue(Job(conv_all_job, args, 1))
    else:
        recorder.phase([Job(conv_job, args, recorder.rows)])


def record_add(
    recorder: CpuRecorder, x: Buffer, deltas: Buffer, conv: BlockConv, out: Buffer
) -> None:
    args = (*_args(x, deltas, conv, 1), out.address, out.stride)
    recorder.phase([Job(conv_add_job, args, recorder.rows)])
