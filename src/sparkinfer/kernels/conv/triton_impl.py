"""Triton form of `conv`: a program per block of channels and block of rows.

Pinned: a chain of fused multiply-adds over the taps for each value alone.
"""

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.shapes import RecurrentShape
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    WORD_ADVANCE,
    WORD_COMMIT_ROWS,
    WORD_CONV,
    WORD_CONV_NEXT,
    WORD_CONV_RECORD,
    floats_at,
    silu,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

CHANNELS = 128  # of a program
ROWS = 16  # of a program: no fewer than taps - 1, so that only the first block of rows meets the old state


@triton.jit
def _input(state, x, x_stride, at, channels, KEPT: tl.constexpr, channel, inside):
    """The input `at` rows after the oldest one of the state, which holds KEPT rows."""
    if at < KEPT:
        value = tl.load(state + at * channels + channel, mask=inside, other=0.0)
    else:
        value = tl.load(x + (at - KEPT) * x_stride + channel, mask=inside, other=0.0)
    return value


@triton.jit
def _shift(state, x, x_stride, rows, channels, KEPT: tl.constexpr, channel, inside, out):
    """`out`, the state or another, becomes the last KEPT of (state, rows of x). Row j is written after row j + rows was
    read.
    """
    for j in tl.static_range(KEPT):
        value = _input(state, x, x_stride, rows + j, channels, KEPT, channel, inside)
        tl.store(out + j * channels + channel, value, mask=inside)


@triton.jit(do_not_specialize=["rows", "layer", "window"])
def conv_kernel(
    x, x_stride, weight, weight_stride, run, out, out_stride, rows, channels, layer, window,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    release_next()
    KEPT: tl.constexpr = TAPS - 1
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    first = tl.program_id(1) * ROWS
    state = floats_at(run, WORD_CONV) + layer.to(tl.int64) * KEPT * channels
    after = floats_at(run, WORD_CONV_NEXT) + layer.to(tl.int64) * KEPT * channels
    advance = tl.load(run + WORD_ADVANCE)
    record = floats_at(run, WORD_CONV_RECORD) + layer.to(tl.int64) * window * channels
    await_inputs()
    for row in range(first, tl.minimum(first + ROWS, rows)):
        total = tl.zeros((CHANNELS,), tl.float32)
        for t in tl.static_range(TAPS):
            value = _input(
                state, x, x_stride.to(tl.int64), row + t, channels, KEPT, channel, inside
            )
            total = tl.fma(
                tl.load(weight + t * weight_stride + channel, mask=inside, other=0.0), value, total
            )
        tl.store(out + row * out_stride.to(tl.int64) + channel, silu(total), mask=inside)
        if advance == 0:
            value = tl.load(x + row * x_stride.to(tl.int64) + channel, mask=inside)
            tl.store(record + row * channels + channel, value, mask=inside)
    if (first == 0) & (advance != 0):
        tl.debug_barrier()  # another thread of the program may still have to read what is overwritten
        _shift(state, x, x_stride.to(tl.int64), rows, channels, KEPT, channel, inside, after)


@triton.jit(do_not_specialize=["window"])
def commit_kernel(run, channels, window, TAPS: tl.constexpr, CHANNELS: tl.constexpr):
    KEPT: tl.constexpr = TAPS - 1
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    layer = tl.program_id(1).to(tl.int64)
    state = floats_at(run, WORD_CONV) + layer * KEPT * channels
    record = floats_at(run, WORD_CONV_RECORD) + layer * window * channels
    rows = tl.load(run + WORD_COMMIT_ROWS).to(tl.int32)
    inside = channel < channels
    _shift(state, record, channels.to(tl.int64), rows, channels, KEPT, channel, inside, state)


def record(
    recorder: CudaRecorder, x: Buffer, weight: Buffer, shape: RecurrentShape, layer: int, params: Buffer, out: Buffer,
) -> None:  # fmt: skip
    assert shape.taps - 1 <= ROWS, shape
    recorder.launch(
        conv_kernel, (-(-shape.channels // CHANNELS), -(-recorder.rows // ROWS)),
        x.array, stride_of(x.array), weight.array, stride_of(weight.array), params.array, out.array,
        stride_of(out.array), recorder.rows, shape.channels, layer, shape.window,
        TAPS=shape.taps, CHANNELS=CHANNELS, ROWS=ROWS, num_warps=1, overlap=True, **EXACT,
    )  # fmt: skip


def record_commit(recorder: CudaRecorder, shape: RecurrentShape, params: Buffer) -> None:
    recorder.launch(
        commit_kernel, (-(-shape.channels // CHANNELS), shape.layers), params.array, shape.channels, shape.window,
        TAPS=shape.taps, CHANNELS=CHANNELS, num_warps=1,
    )  # fmt: skip
