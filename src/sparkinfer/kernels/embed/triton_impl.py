"""GPU form of `embed`: a program per row and run of groups expands packed codes."""

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.linear.triton_impl import EXACT, constants, stride_of
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import bound, signed_byte, weight_part

_GROUPS = 32  # of a program


@triton.jit(do_not_specialize=["unit", "first"])
def embed_kernel(
    table, total, groups, unit, run, first, scale, out, out_stride, mask, width,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    release_next()
    await_inputs()
    row = tl.program_id(0)
    token = tl.load(run + first + row)
    there = groups
    if MASK:
        there = tl.where(token < 0, 0, groups)
        size = tl.where(token < 0, width, 0)
        for begin in range(tl.program_id(1) * 1024, bound(size), tl.num_programs(1) * 1024):
            column = begin + tl.arange(0, 1024)
            value = tl.load(mask + column, mask=column < size, other=0.0)
            at = out + row.to(tl.int64) * out_stride + column
            tl.store(at, value * scale, mask=column < size)
        token = tl.maximum(token, 0)
    g = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    n = tl.zeros([1, 1], tl.int32)
    lo, hi, s, m, word = weight_part(
        table, total, token, n, g, groups, unit, g < there, BITS, MODE, ZERO, False
    )
    at = out + row.to(tl.int64) * out_stride
    if BITS > 8:
        V: tl.constexpr = 4 if BITS == 32 else 8
        i = g[:, :, None] * V + tl.arange(0, V)[None, None, :]
        tl.store(at + i, lo.to(tl.float32) * scale, mask=i < there * V)
    else:
        low_scale, high_scale, low_min, high_min = s, s, m, m
        if MODE >= 3:  # a scale per 16
            low_scale = s * signed_byte(word, 0).to(tl.float32)
            high_scale = s * signed_byte(word, 8).to(tl.float32)
        if MODE == 3 or (MODE == 0 and ZERO == 0):
            low_min = tl.zeros_like(s)
            high_min = low_min
        if MODE == 4:
            low_min = m * signed_byte(word, 16).to(tl.float32)
            high_min = m * (word >> 24).to(tl.float32)
        i = g[:, :, None] * 32 + 4 * tl.arange(0, 4)[None, None, :]
        live = (g < there)[:, :, None]
        for b in tl.static_range(4):
            low = signed_byte(lo, 8 * b).to(tl.float32)
            high = signed_byte(hi, 8 * b).to(tl.float32)
            low = tl.fma(
                tl.broadcast_to(low_scale[:, :, None], low.shape), low, low_min[:, :, None]
            )
            high = tl.fma(
                tl.broadcast_to(high_scale[:, :, None], high.shape), high, high_min[:, :, None]
            )
            tl.store(at + i + b, low * scale, mask=live)
            tl.store(at + i + 16 + b, high * scale, mask=live)


def record(
    recorder: CudaRecorder,
    table: TritonWeight,
    run: Buffer,
    first: int,
    out: Buffer,
    scale: float,
    mask: Buffer | None,
) -> None:
    recorder.launch(
        embed_kernel, (recorder.rows, -(-table.groups // _GROUPS)),
        table.words, table.total, table.groups, 1, run.array, first, scale, out.array, stride_of(out.array),
        (out if mask is None else mask).array, table.inputs, GROUPS=_GROUPS, MASK=mask is not None,
        num_warps=1, overlap=True, **constants(table), **EXACT,
    )  # fmt: skip
