"""Triton form of `block_conv`: a program per row and block of channels.

Pinned: a chain of fused multiply-adds over the rows back for each value alone.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.block_conv import BlockConv
from sparkinfer.kernels.triton_mixers import EXACT, q8_args, store_int8, stride_of
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

_BLOCKS = 8  # int8 blocks of 32 channels of a program


@triton.jit
def block_conv_kernel(
    x, x_stride, deltas, deltas_stride, base, base_stride, out, out_stride, q8, q8_stride, channels, group,
    TAPS: tl.constexpr, SIDE: tl.constexpr, BLOCKS: tl.constexpr, ADD: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[:, None] * 32 + tl.arange(0, 32)[
        None, :
    ]
    inside = channel < channels
    total = tl.zeros((BLOCKS, 32), tl.float32)
    release_next()
    await_inputs()
    for t in tl.static_range(TAPS):
        there = channel < tl.where(row >= t, channels, 0)  # rows before the first are zero
        place = SIDE * TAPS + t
        delta = tl.load(
            deltas + row * deltas_stride + place * (channels // group) + channel // group,
            mask=there,
            other=0.0,
        )
        weight = tl.load(base + place * base_stride + channel, mask=there, other=0.0) + delta
        total = tl.fma(
            weight, tl.load(x + (row - t) * x_stride + channel, mask=there, other=0.0), total
        )
    target = out + row * out_stride + channel
    if ADD:
        total = tl.load(target, mask=inside, other=0.0) + total
    tl.store(target, total, mask=inside)
    if QUANTISED:
        store_int8(q8 + row * q8_stride, total, channel, channels, inside)


def _launch(
    recorder: CudaRecorder, x: Buffer, deltas: Buffer, conv: BlockConv, out: Activation, side: int
) -> None:
    channels = conv.base.width
    assert channels % conv.group == 0, conv
    q8, q8_stride = q8_args(out)
    constants: dict[str, Any] = {
        "TAPS": conv.taps, "SIDE": side, "BLOCKS": _BLOCKS, "ADD": side == 1, "QUANTISED": out.q8 is not None,
    }  # fmt: skip
    recorder.launch(
        block_conv_kernel, (recorder.rows, -(-channels // (32 * _BLOCKS))),
        x.array, stride_of(x.array), deltas.array, stride_of(deltas.array), conv.base.array,
        stride_of(conv.base.array), out.f32.array, stride_of(out.f32.array), q8, q8_stride, channels, conv.group,
        num_warps=2, overlap=True, **constants, **EXACT,
    )  # fmt: skip


def record(
    recorder: CudaRecorder, x: Buffer, deltas: Buffer, conv: BlockConv, out: Activation
) -> None:
    _launch(recorder, x, deltas, conv, out, 0)


def record_add(
    recorder: CudaRecorder, x: Buffer, deltas: Buffer, conv: BlockConv, out: Buffer
) -> None:
    _launch(recorder, x, deltas, conv, Activation(out, None), 1)
