"""CPU form of `conv`: a chunk is a range of channels, for all rows."""

import numpy as np

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import fma, load, load_i64, splat, store
from sparkinfer.kernels.gated_linear.cpu_impl import silu
from sparkinfer.kernels.run_params import ADVANCE, COMMIT_ROWS, CONV, CONV_RECORD
from sparkinfer.kernels.shapes import RecurrentShape

_CHANNELS = 512  # of a chunk
_ZERO = np.float32(0.0)


@inner
def _shift(
    state: int, row_bytes: int, inputs: int, input_stride: int, rows: int, kept: int
) -> None:
    """16 channels: the state becomes the last `kept` of (state, rows)."""
    for j in range(kept):
        source = rows + j
        value = (
            load(state + source * row_bytes)
            if source < kept
            else load(inputs + (source - kept) * input_stride)
        )
        store(state + j * row_bytes, value)


@job
def conv_job(args: int, chunk: int, thread: int) -> None:
    params, rows = load_i64(args + 48), load_i64(args + 56)
    channels, taps, layer, window = (
        load_i64(args + 64),
        load_i64(args + 72),
        load_i64(args + 80),
        load_i64(args + 88),
    )
    row_bytes = channels * 4
    kept = taps - 1
    state = load_i64(params + CONV) + layer * kept * row_bytes
    record = load_i64(params + CONV_RECORD) + layer * window * row_bytes
    advance = load_i64(params + ADVANCE)
    x, x_stride, out, out_stride = (
        load_i64(args),
        load_i64(args + 8),
        load_i64(args + 32),
        load_i64(args + 40),
    )
    weight, weight_stride = load_i64(args + 16), load_i64(args + 24)
    first = chunk * _CHANNELS
    for c in range(4 * first, 4 * min(channels, first + _CHANNELS), 64):
        for row in range(rows):
            total = splat(_ZERO)
            for t in range(taps):
                source = row + t
                if source < kept:
                    value = load(state + source * row_bytes + c)
                else:
                    value = load(x + (source - kept) * x_stride + c)
                total = fma(load(weight + t * weight_stride + c), value, total)
            store(out + row * out_stride + c, silu(total))
        if advance:
            _shift(state + c, row_bytes, x + c, x_stride, rows, kept)
        else:
            for row in range(rows):
                store(record + row * row_bytes + c, load(x + row * x_stride + c))


@job
def commit_conv_job(args: int, layer: int, thread: int) -> None:
    params, channels, kept, window = (
        load_i64(args),
        load_i64(args + 8),
        load_i64(args + 16),
        load_i64(args + 24),
    )
    row_bytes = channels * 4
    state = load_i64(params + CONV) + layer * kept * row_bytes
    record = load_i64(params + CONV_RECORD) + layer * window * row_bytes
    for c in range(0, row_bytes, 64):
        _shift(state + c, row_bytes, record + c, row_bytes, load_i64(params + COMMIT_ROWS), kept)


def record(
    recorder: CpuRecorder,
    x: Buffer,
    weight: Buffer,
    shape: RecurrentShape,
    layer: int,
    params: Buffer,
    out: Buffer,
) -> None:
    assert shape.channels % 16 == 0, shape
    args = (
        x.address, x.stride, weight.address, weight.stride, out.address, out.stride, params.address, recorder.rows,
        shape.channels, shape.taps, layer, shape.window,
    )  # fmt: skip
    recorder.phase([Job(conv_job, args, -(-shape.channels // _CHANNELS))])


def record_commit(recorder: CpuRecorder, shape: RecurrentShape, params: Buffer) -> None:
    args = (params.address, shape.channels, shape.taps - 1, shape.window)
    recorder.phase([Job(commit_conv_job, args, shape.layers)])
