"""Triton form of `copy_rows`."""

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.triton_mixers import stride_of
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

_COLUMNS = 1024


@triton.jit
def copy_kernel(source, source_stride, out, out_stride, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    release_next()
    await_inputs()
    value = tl.load(source + row * source_stride + column, mask=inside)
    tl.store(out + row * out_stride + column, value, mask=inside)


def record(recorder: CudaRecorder, source: Buffer, out: Buffer) -> None:
    assert source.width == out.width, (source.width, out.width)
    recorder.launch(
        copy_kernel, (recorder.rows, -(-out.width // _COLUMNS)),
        source.array, stride_of(source.array), out.array, stride_of(out.array), out.width,
        COLUMNS=_COLUMNS, overlap=True,
    )  # fmt: skip
