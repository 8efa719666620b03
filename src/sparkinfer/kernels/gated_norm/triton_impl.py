"""Triton form of `gated_norm`: a program per row and group of heads that fills whole int8 blocks.

Pinned: a program knows one row only, so a row's bits cannot depend on how many there are.
"""

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.errors import ShapeError
from sparkinfer.kernels.linear.triton_order import (
    ENOUGH,
    SPAN,
    keep_ordered,
    ordered_buffers,
    store_ordered,
)
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    power_of_two,
    q8_args,
    silu,
    store_int8,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

WIDE_HEADS = 4  # of a program, for many rows


@triton.jit
def gated_norm_kernel(
    x, x_stride, gate, gate_stride, weight, out, out_stride, q8, q8_stride, width, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of SIZE columns, together at least 32."""
    release_next()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, SIZE)
    column = head[:, None] * SIZE + i[None, :]
    inside = column < width
    w = tl.load(weight + i)
    await_inputs()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(value * value, 1) / SIZE + eps))
    y = value * scale[:, None] * w[None, :] * silu(g)
    tl.store(out + row * out_stride + column, y, mask=inside)
    if QUANTISED:
        BLOCKS: tl.constexpr = HEADS * SIZE // 32
        y = tl.reshape(y, (BLOCKS, 32))
        column = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[:, None] * 32 + tl.arange(
            0, 32
        )[None, :]
        store_int8(q8 + row * q8_stride, y, column, width, column < width)


@triton.jit
def gated_order_kernel(
    x, x_stride, gate, gate_stride, weight, halves, stride, scales, width, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A whole row, only as products of many rows take it."""
    release_next()
    row = tl.program_id(0)
    k = tl.arange(0, HEADS * SIZE)
    inside = k < width
    w = tl.load(weight + k % SIZE)
    await_inputs()
    value = tl.load(x + row.to(tl.int64) * x_stride + k, mask=inside, other=0.0)
    g = tl.load(gate + row.to(tl.int64) * gate_stride + k, mask=inside, other=0.0)
    heads = tl.reshape(value, [HEADS, SIZE])
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(heads * heads, 1) / SIZE + eps))
    y = tl.reshape(heads * scale[:, None], [HEADS * SIZE]) * w * silu(g)
    store_ordered(row, y, halves, halves, stride, scales, HEADS * SIZE, False)


def record(
    recorder: CudaRecorder, x: Buffer, gate: Buffer, weight: Buffer, out: Activation, *, heads: int, eps: float,
) -> None:  # fmt: skip
    """Raises ShapeError for a head size that is no power of two."""
    size = weight.width
    if size != power_of_two(size):
        raise ShapeError(f"gated_norm on a GPU takes heads of a power of two columns, got {size}")
    width = heads * size
    quantised = out.q8 is not None  # then all readers are
    if recorder.rows >= ENOUGH and quantised and width % SPAN == 0:
        halves, scales = ordered_buffers(recorder, "gated norms", recorder.rows, width)
        recorder.launch(
            gated_order_kernel, (recorder.rows,),
            x.array, stride_of(x.array), gate.array, stride_of(gate.array), weight.array, halves, width, scales,
            width, eps, HEADS=power_of_two(heads), SIZE=size, num_warps=8, overlap=True, **EXACT,
        )  # fmt: skip
        keep_ordered(recorder, out.f32.array, halves, scales, width, only=True)
        return
    group = max(1, 32 // size, WIDE_HEADS if recorder.wide else 1)
    q8, q8_stride = q8_args(out)
    recorder.launch(
        gated_norm_kernel, (recorder.rows, -(-heads // group)),
        x.array, stride_of(x.array), gate.array, stride_of(gate.array), weight.array, out.f32.array,
        stride_of(out.f32.array), q8, q8_stride, heads * size, eps,
        HEADS=group, SIZE=size, QUANTISED=out.q8 is not None, num_warps=1, overlap=True, **EXACT,
    )  # fmt: skip
