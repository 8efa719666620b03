"""GPU form of `rms_norm`: one program a row, which also writes the row's int8 blocks."""

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder, q8_views
from sparkinfer.kernels.linear.triton_order import (
    ENOUGH,
    SPAN,
    keep_ordered,
    ordered_buffers,
    store_ordered,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import store_row

_EXACT = {"enable_fp_fusion": False}


@triton.jit
def rms_norm_kernel(
    x, x_stride, weight, out, out_stride, codes, floats, q_stride, width, eps,
    BLOCK: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    release_next()
    norm_row(
        tl.program_id(0), x, x_stride, weight, out, out_stride, codes, floats, q_stride, width, eps, BLOCK, QUANTISED
    )  # fmt: skip


@triton.jit
def normed_row(row, x, x_stride, weight, out, out_stride, width, eps, BLOCK: tl.constexpr):
    """A row, written as float32 and returned: what a program does that may start before its inputs are there."""
    k = tl.arange(0, BLOCK)
    live = k < width
    factor = tl.load(weight + k, mask=live, other=0.0)
    await_inputs()
    value = tl.load(x + row * x_stride + k, mask=live, other=0.0)
    mean = tl.div_rn(tl.sum(value * value, 0), 1.0 * width)
    y = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * factor
    tl.store(out + row * out_stride + k, y, mask=live)
    return y


@triton.jit
def norm_row(
    row, x, x_stride, weight, out, out_stride, codes, floats, q_stride, width, eps,
    BLOCK: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """`normed_row`, and its int8 blocks."""
    y = normed_row(row, x, x_stride, weight, out, out_stride, width, eps, BLOCK)
    if QUANTISED:
        store_row(codes + row * q_stride, floats + row * q_stride, width // 32, y, BLOCK // 32)


@triton.jit
def norm_order_kernel(
    x, x_stride, weight, out, out_stride, halves, low, stride, scales, width, eps,
    BLOCK: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """A row as float32, with the bits of `norm_row`, and as products of many rows take it."""
    release_next()
    row = tl.program_id(0)
    y = normed_row(row, x, x_stride, weight, out, out_stride, width, eps, BLOCK)
    store_ordered(row, y, halves, low, stride, scales, BLOCK, LOW)


def record(
    recorder: CudaRecorder, x: Buffer, weight: Buffer, out: Activation, *, eps: float
) -> None:
    """Pinned: the tree of one sum over a row padded to a power of two; a row is a program of its own."""
    width = x.width
    block = max(32, triton.next_power_of_2(width))
    if recorder.rows >= ENOUGH and width % SPAN == 0:
        halves, scales = ordered_buffers(recorder, "norms", recorder.rows, width)
        low, _ = ordered_buffers(recorder, "norms, second part", recorder.rows, width)
        recorder.launch(
            norm_order_kernel, (recorder.rows,),
            x.array, x.array.stride(0), weight.array, out.f32.array, out.f32.array.stride(0),
            halves, low, width, scales, width, eps,
            BLOCK=block, LOW=False, num_warps=min(16, max(4, block // 256)), overlap=True, **_EXACT,
        )  # fmt: skip
        keep_ordered(recorder, out.f32.array, halves, scales, width, low=low)
        return
    codes = floats = out.f32.array
    if out.q8 is not None:
        recorder.blocked.add(out.f32.address)
        assert width % 32 == 0, width
        codes, floats = q8_views(out.q8)
    recorder.launch(
        rms_norm_kernel, (recorder.rows,),
        x.array, x.array.stride(0), weight.array, out.f32.array, out.f32.array.stride(0),
        codes, floats, codes.stride(0), width, eps,
        BLOCK=block, QUANTISED=out.q8 is not None, num_warps=min(16, max(4, block // 256)), overlap=True, **_EXACT,
    )  # fmt: skip
