"""Triton form of `gated_norm`: a program per row and group of heads that fills whole int8 blocks.

Pinned: a program knows one row only, so a row's bits cannot depend on how many there are.
"""

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.errors import ShapeError
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


def record(
    recorder: CudaRecorder, x: Buffer, gate: Buffer, weight: Buffer, out: Activation, *, heads: int, eps: float,
) -> None:  # fmt: skip
    """Raises ShapeError for a head size that is no power of two."""
    size = weight.width
    if size != power_of_two(size):
        raise ShapeError(f"gated_norm on a GPU takes heads of a power of two columns, got {size}")
    group = max(1, 32 // size, WIDE_HEADS if recorder.wide else 1)
    q8, q8_stride = q8_args(out)
    recorder.launch(
        gated_norm_kernel, (recorder.rows, -(-heads // group)),
        x.array, stride_of(x.array), gate.array, stride_of(gate.array), weight.array, out.f32.array,
        stride_of(out.f32.array), q8, q8_stride, heads * size, eps,
        HEADS=group, SIZE=size, QUANTISED=out.q8 is not None, num_warps=1, overlap=True, **EXACT,
    )  # fmt: skip
