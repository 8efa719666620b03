"""Products for many rows (prefill) on tensor cores: weights are unpacked to float16 in registers, tile by tile.

The float32 input is first written as float16 in the order in which a weight's words give its codes: of every row first
columns 0-15 of all groups, then columns 16-31. Each row is divided by its largest magnitude, and weights are multiplied
by 64, so that float16 neither overflows nor loses small values; the result is multiplied back in float32. The rounding
to float16 (2^-11 of a value) is finer than that of the int8 blocks which few rows are multiplied as.

From `UNPACK_ROWS` rows on a weight is written out as float16 first, once: unpacking costs more than the multiplication
does, and every tile of rows would do it again. Columns then stand in the order of `triton_order`, in which norms leave
their rows. Float weights are multiplied in three products of rounded parts: float16 where a norm left the rows so.

Deterministic: no atomics, one chain over the width per output. Bits may differ from those for few rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.linear.triton_order import (
    ENOUGH,
    both_parts,
    left_rows,
    ordered_buffers,
    ordered_rows,
    record_order,
)
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.triton_halves import unit_row
from sparkinfer.kernels.triton_quant import bound, sigmoid, signed_byte, weight_decode, weight_load

GROUPS = 4  # of 32 columns in a step
OUTPUTS = 128  # of a tile
ROWS = 128  # of a tile
UNPACK_ROWS = 512  # rows from which on a weight is unpacked once
UNPACK_OUTPUTS = 256  # from which on tiles are large (and gate and up are unpacked)
NARROW_ROWS = 64  # of a tile of fewer outputs
STEP = 64  # columns of a step with unpacked weights
PARTS_ROWS, PARTS_OUTPUTS = 64, 128  # of a tile of float weights in two parts
_WEIGHT_SCALE = tl.constexpr(64.0)


@triton.jit
def halve_kernel(x, x_stride, target, target_stride, scales, width, padded, BLOCK: tl.constexpr):
    """One row as float16 in two runs of `padded` / 2 columns, over its largest magnitude; columns past width are 0."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + k, mask=k < width, other=0.0)
    halves = unit_row(value, scales + row)
    place = (k // 32) * 16 + k % 16 + ((k // 16) % 2) * (padded // 2)
    tl.store(target + row.to(tl.int64) * target_stride + place, halves, mask=k < padded)


@triton.jit
def _to_half(words, s, m, MINIMUM: tl.constexpr, G: tl.constexpr, B: tl.constexpr):
    """Signed bytes of words [G, B, 4] times s plus m [G, B], as float16 [B, 16 G]."""
    s3, m3 = s[:, :, None], m[:, :, None]
    b0 = signed_byte(words, 0).to(tl.float32) * s3
    b1 = signed_byte(words, 8).to(tl.float32) * s3
    b2 = signed_byte(words, 16).to(tl.float32) * s3
    b3 = (words >> 24).to(tl.float32) * s3
    if MINIMUM:
        b0, b1, b2, b3 = b0 + m3, b1 + m3, b2 + m3, b3 + m3
    even = tl.join(b0.to(tl.float16), b2.to(tl.float16))
    odd = tl.join(b1.to(tl.float16), b3.to(tl.float16))
    whole = tl.permute(tl.join(even, odd), (1, 0, 2, 3, 4))
    return tl.reshape(whole, [B, G * 16])


@triton.jit
def weight_halves(
    w, total, row, outputs, k, groups, unit,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """B outputs from `row`, G groups from `k`: columns 0-15 and 16-31 of the groups, float16 [B, 16 G], times 64.

    Not EVEN: groups from `groups` on and outputs from `outputs` on are read as zeros.
    """
    g = k + tl.arange(0, G)[:, None]
    n = tl.arange(0, B)[None, :]
    live = (g < groups) & (n < outputs)
    raw = weight_load(w, total, row, n, g, groups, unit, live, BITS, MODE, EVEN)
    lo, hi, s, m, word = weight_decode(raw, BITS, MODE, ZERO)
    s *= _WEIGHT_SCALE
    m *= _WEIGHT_SCALE
    if MODE <= 2:
        MINIMUM: tl.constexpr = MODE > 0 or ZERO > 0
        return _to_half(lo, s, m, MINIMUM, G, B), _to_half(hi, s, m, MINIMUM, G, B)
    else:
        s_lo = s * signed_byte(word, 0).to(tl.float32)
        s_hi = s * signed_byte(word, 8).to(tl.float32)
        m_lo = m * signed_byte(word, 16).to(tl.float32)
        m_hi = m * (word >> 24).to(tl.float32)
        return _to_half(lo, s_lo, m_lo, MODE == 4, G, B), _to_half(hi, s_hi, m_hi, MODE == 4, G, B)


@triton.jit
def input_halves(x, rows, x_stride, k, padded, G: tl.constexpr):
    """The same columns of some rows: float16 [16 G, rows], twice."""
    column = k * 16 + tl.arange(0, 16 * G)[:, None]
    at = x + rows.to(tl.int64)[None, :] * x_stride + column
    return tl.load(at), tl.load(at + padded // 2)


@triton.jit
def wide_kernel(
    x, x_stride, scales, rows, padded, w, total, groups, unit, out, out_stride,
    ADD: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[r, n] (+)= weight[n] . x[r] for a tile of B outputs and M rows."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    first = tl.program_id(1) * B
    row = first.to(tl.int64)
    acc = tl.zeros([B, M], tl.float32)
    for k in range(0, bound(groups), G):
        xlo, xhi = input_halves(x, m, x_stride, k, padded, G)
        lo, hi = weight_halves(
            w, total, row, total - first, k, groups, unit, BITS, MODE, ZERO, G, B, EVEN
        )
        acc = tl.dot(lo, xlo, acc)
        acc = tl.dot(hi, xhi, acc)
    live = m < rows
    scale = tl.load(scales + m, mask=live, other=0.0) * (1.0 / _WEIGHT_SCALE)
    n = first + tl.arange(0, B)
    at = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    there = live[None, :] & (n < total)[:, None]
    result = acc * scale[None, :]
    if ADD:
        result += tl.load(at, mask=there, other=0.0)
    tl.store(at, result, mask=there)


@triton.jit
def wide_gated_kernel(
    x, x_stride, scales, rows, padded, gate, up, total, groups, unit, out, out_stride,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[r, n] = silu(gate[n] . x[r]) * (up[n] . x[r])."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    first = tl.program_id(1) * B
    row = first.to(tl.int64)
    a = tl.zeros([B, M], tl.float32)
    b = tl.zeros([B, M], tl.float32)
    for k in range(0, bound(groups), G):
        xlo, xhi = input_halves(x, m, x_stride, k, padded, G)
        lo, hi = weight_halves(
            gate, total, row, total - first, k, groups, unit, GBITS, GMODE, GZERO, G, B, EVEN
        )
        a = tl.dot(lo, xlo, a)
        a = tl.dot(hi, xhi, a)
        lo, hi = weight_halves(
            up, total, row, total - first, k, groups, unit, UBITS, UMODE, UZERO, G, B, EVEN
        )
        b = tl.dot(lo, xlo, b)
        b = tl.dot(hi, xhi, b)
    live = m < rows
    scale = (tl.load(scales + m, mask=live, other=0.0) * (1.0 / _WEIGHT_SCALE))[None, :]
    a *= scale
    n = first + tl.arange(0, B)
    at = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(at, a * sigmoid(a) * (b * scale), mask=live[None, :] & (n < total)[:, None])


@triton.jit
def wide_float_kernel(
    x, x_stride, rows, inputs, w, padded, total, out, out_stride,
    ADD: tl.constexpr, B: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[r, n] (+)= w[n] . x[r] of float32 rows: three tensor-core products of rounded parts, errors about 1e-6."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * B + tl.arange(0, B)
    live, there = (m < rows)[None, :], (n < total)[:, None]
    acc = tl.zeros([B, M], tl.float32)
    for k in range(0, bound(inputs), STEP):
        column = k + tl.arange(0, STEP)
        a = tl.load(
            w + n.to(tl.int64)[:, None] * padded + column[None, :],
            mask=there & (column < inputs)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            x + m.to(tl.int64)[None, :] * x_stride + column[:, None],
            mask=live & (column < inputs)[:, None], other=0.0,
        )  # fmt: skip
        acc = tl.dot(a.to(tl.float32), b, acc, input_precision="tf32x3")
    at = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    if ADD:
        acc += tl.load(at, mask=live & there, other=0.0)
    tl.store(at, acc, mask=live & there)


@triton.jit
def _three_products(acc, x_high, x_low, w_high, w_low):
    """acc plus a product of numbers in two parts, that of the low parts left out. The sum is taken outside of the
    tensor cores: their own sums lose bits.
    """
    part = tl.dot(x_low, w_high)
    part = tl.dot(x_high, w_low, part)
    return acc + tl.dot(x_high, w_high, part)


@triton.jit
def wide_parts_kernel(
    x_high, x_low, x_scales, rows, w_high, w_low, w_scales, padded, total, out, out_stride,
    ADD: tl.constexpr, M: tl.constexpr, B: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[r, n] (+)= w[n] . x[r] of rows and weights in two float16 parts, errors about 2e-7. REST: so many outputs at
    most come after the last whole tile, with the first one.
    """
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * B + tl.arange(0, B)
    k = tl.arange(0, STEP)
    x_at = tl.minimum(m, rows - 1).to(tl.int64)[:, None] * padded + k[None, :]
    w_at = tl.minimum(n, total - 1).to(tl.int64)[None, :] * padded + k[:, None]
    acc = tl.zeros([M, B], tl.float32)
    if REST > 0:
        late = tl.num_programs(1) * B + tl.arange(0, REST)
        late_at = tl.minimum(late, total - 1).to(tl.int64)[None, :] * padded + k[:, None]
        rest = tl.zeros([M, REST], tl.float32)
    for start in range(0, bound(padded), STEP):
        high, low = tl.load(x_high + x_at + start), tl.load(x_low + x_at + start)
        acc = _three_products(
            acc, high, low, tl.load(w_high + w_at + start), tl.load(w_low + w_at + start)
        )
        if REST > 0:
            rest = _three_products(
                rest, high, low, tl.load(w_high + late_at + start), tl.load(w_low + late_at + start)
            )
    live = m < rows
    scale = tl.load(x_scales + m, mask=live, other=0.0)
    at = out + m.to(tl.int64)[:, None] * out_stride
    there = live[:, None] & (n < total)[None, :]
    acc *= scale[:, None] * tl.load(w_scales + n, mask=n < total, other=0.0)[None, :]
    if ADD:
        acc += tl.load(at + n[None, :], mask=there, other=0.0)
    tl.store(at + n[None, :], acc, mask=there)
    if REST > 0:
        if tl.program_id(1) == 0:
            inside = live[:, None] & (late < total)[None, :]
            factor = tl.load(w_scales + late, mask=late < total, other=0.0)
            rest *= scale[:, None] * factor[None, :]
            if ADD:
                rest += tl.load(at + late[None, :], mask=inside, other=0.0)
            tl.store(at + late[None, :], rest, mask=inside)


@triton.jit
def _placed(x, B: tl.constexpr):
    """Codes (q, w, j, i) of four groups in the order (w, j, q, i)."""
    parts = tl.permute(tl.reshape(x, [B, 4, 4, 2, 2]), (0, 2, 3, 1, 4))
    return tl.reshape(parts, [B, 64])


@triton.jit
def unpack_kernel(
    w, total, groups, unit, target, padded,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of a weight as float16 [total, padded], columns in the order of `triton_order`, times 64."""
    k = tl.program_id(0) * G  # four groups: 128 columns
    first = tl.program_id(1) * B
    lo, hi = weight_halves(
        w, total, first.to(tl.int64), total - first, k, groups, unit, BITS, MODE, ZERO, G, B, EVEN
    )
    n = first + tl.arange(0, B)
    at = target + n.to(tl.int64)[:, None] * padded + (k * 32 + tl.arange(0, 64))[None, :]
    there = (n < total)[:, None]
    tl.store(at, _placed(lo, B), mask=there)
    tl.store(at + 64, _placed(hi, B), mask=there)


@triton.jit
def halves_kernel(
    x, scales, rows, w, padded, total, out, out_stride,
    ADD: tl.constexpr, M: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[r, n] (+)= w[n] . x[r] of float16 rows that fill whole tiles."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * B + tl.arange(0, B)
    k = tl.arange(0, STEP)
    xs = x + m.to(tl.int64)[:, None] * padded + k[None, :]
    ws = w + n.to(tl.int64)[None, :] * padded + k[:, None]
    acc = tl.zeros([M, B], tl.float32)
    for _ in range(0, bound(padded), STEP):
        acc = tl.dot(tl.load(xs), tl.load(ws), acc)
        xs += STEP
        ws += STEP
    live = m < rows
    scale = tl.load(scales + m, mask=live, other=0.0) * (1.0 / _WEIGHT_SCALE)
    at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    there = live[:, None] & (n < total)[None, :]
    result = acc * scale[:, None]
    if ADD:
        result += tl.load(at, mask=there, other=0.0)
    tl.store(at, result, mask=there)


@triton.jit
def halves_gated_kernel(
    x, scales, rows, gate, up, padded, total, out, out_stride,
    M: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[r, n] = silu(gate[n] . x[r]) * (up[n] . x[r])."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * B + tl.arange(0, B)
    k = tl.arange(0, STEP)
    xs = x + m.to(tl.int64)[:, None] * padded + k[None, :]
    place = n.to(tl.int64)[None, :] * padded + k[:, None]
    gs, us = gate + place, up + place
    a = tl.zeros([M, B], tl.float32)
    b = tl.zeros([M, B], tl.float32)
    for _ in range(0, bound(padded), STEP):
        rows_now = tl.load(xs)
        a = tl.dot(rows_now, tl.load(gs), a)
        b = tl.dot(rows_now, tl.load(us), b)
        xs += STEP
        gs += STEP
        us += STEP
    live = m < rows
    scale = (tl.load(scales + m, mask=live, other=0.0) * (1.0 / _WEIGHT_SCALE))[:, None]
    a *= scale
    at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, a * sigmoid(a) * (b * scale), mask=live[:, None] & (n < total)[None, :])


def unpacked(recorder: CudaRecorder, weight: TritonWeight, padded: int, name: str) -> torch.Tensor:
    """Record the float16 form of a weight [outputs to whole tiles, padded]."""
    tall = -(-weight.total // 256) * 256
    target = recorder.scratch(f"float16 {name}", tall * padded, torch.float16)
    outputs = 64
    recorder.launch(
        unpack_kernel, (padded // 32 // GROUPS, -(-weight.total // outputs)),
        weight.words, weight.total, weight.groups, 1, target, padded, **constants(weight), G=GROUPS, B=outputs,
        EVEN=weight.groups % GROUPS == 0 and weight.total % outputs == 0, num_warps=4,
    )  # fmt: skip
    return target


def half_tile(outputs: int, rows: int, sms: int, add: bool) -> tuple[int, int, int, int]:
    """Rows and outputs of a tile, its warps and stages. Results that are added to need registers for what was there."""
    if outputs < UNPACK_OUTPUTS:
        return NARROW_ROWS, 32 if outputs <= 32 else 64, 4, 6
    enough = -(-outputs // 256) * -(-rows // ROWS) * 4 >= 3 * sms
    return (ROWS, 256, 8, 4) if enough and not add else (ROWS, 128, 8, 5)


_FLOATS = {32: torch.float32, 16: torch.float16, 17: torch.bfloat16}


def record_wide_floats(
    recorder: CudaRecorder, x: torch.Tensor, weight: TritonWeight, out: Buffer, add: bool
) -> None:
    """A float weight keeps its precision: a router's choices hang on it."""
    assert out.width >= weight.padded_outputs, (out.width, weight.padded_outputs)
    values = weight.words.view(_FLOATS[weight.form.bits])
    if recorder.rows >= ENOUGH and _record_parts(recorder, x, weight, values, out, add):
        return
    size = 64
    recorder.launch(
        wide_float_kernel, (-(-recorder.rows // size), -(-weight.padded_outputs // size)),
        x, x.stride(0), recorder.rows, weight.inputs, values, weight.groups * weight.form.group, weight.total,
        out.array, out.array.stride(0), ADD=add, B=size, M=size, STEP=32, num_warps=4, num_stages=3,
    )  # fmt: skip


def _record_parts(
    recorder: CudaRecorder, x: torch.Tensor, weight: TritonWeight, values: torch.Tensor, out: Buffer, add: bool
) -> bool:  # fmt: skip
    """The product of rows that a norm left in float16; False: none did."""
    form = left_rows(recorder, x, recorder.rows)
    low = None if form is None else both_parts(recorder, form)
    if form is None or low is None:
        return False
    total, padded = weight.total, form.stride
    high, scales = ordered_buffers(recorder, "float weights", total, padded)
    rest, _ = ordered_buffers(recorder, "float weights, second part", total, padded)
    target = high, rest, padded, scales
    stride = weight.groups * weight.form.group
    record_order(recorder, values, stride, total, weight.inputs, target, low=True)
    wide = min(PARTS_OUTPUTS, max(16, triton.next_power_of_2(total + 1) // 2))
    few = 0 < total % wide <= 16 and total > wide
    recorder.launch(
        wide_parts_kernel, (-(-recorder.rows // PARTS_ROWS), total // wide if few else -(-total // wide)),
        form.halves, low, form.scales, recorder.rows, high, rest, scales, padded, total,
        out.array, out.array.stride(0),
        ADD=add, M=PARTS_ROWS, B=wide, REST=16 if few else 0, STEP=STEP, num_warps=4, num_stages=3,
    )  # fmt: skip
    return True


def halved_input(
    recorder: CudaRecorder, x: torch.Tensor, width: int, rows: int, tile_rows: int, name: str
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Record the float16 form of `rows` rows; returns it (rows padded to whole tiles), the rows' scales, its width."""
    padded = -(-width // (32 * GROUPS)) * 32 * GROUPS
    tall = -(-rows // tile_rows) * tile_rows
    halves = recorder.scratch(f"float16 {name}", tall * padded, torch.float16)
    scales = recorder.scratch(f"row scales {name}", tall, torch.float32)
    recorder.launch(
        halve_kernel, (rows,), x, x.stride(0), halves, padded, scales, width, padded,
        BLOCK=triton.next_power_of_2(padded), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return halves, scales, padded


def tile_of(outputs: int, rows: int, sms: int) -> tuple[int, int]:
    """Outputs and rows of a tile: large ones unless there would be too few. A warp group's product has 64 outputs."""
    tall = ROWS if rows > 64 else 64
    wide = OUTPUTS
    while wide > 64 and -(-outputs // wide) * -(-rows // tall) < sms:
        wide //= 2
    return wide, tall


def constants(weight: TritonWeight, prefix: str = "") -> dict[str, int]:
    form = weight.form
    return {f"{prefix}BITS": form.bits, f"{prefix}MODE": form.mode, f"{prefix}ZERO": form.zero}


def record_wide(
    recorder: CudaRecorder,
    x: torch.Tensor,
    pairs: Sequence[tuple[TritonWeight, Buffer]],
    add: bool,
) -> None:
    """All products of quantised weights with one float32 input [rows, inputs]."""
    rows, inputs = recorder.rows, pairs[0][0].inputs
    unpack = rows >= UNPACK_ROWS
    if unpack:
        form = ordered_rows(recorder, x, inputs, rows, "rows")
        halves, scales, padded = form.halves, form.scales, form.stride
    else:
        halves, scales, padded = halved_input(recorder, x, inputs, rows, ROWS, "rows")
    for weight, out in pairs:
        if unpack:
            halved = unpacked(recorder, weight, padded, "weights")
            tall, wide, warps, stages = half_tile(
                weight.padded_outputs, rows, recorder.owner.sms, add
            )
            recorder.launch(
                halves_kernel, (-(-rows // tall), -(-weight.padded_outputs // wide)),
                halves, scales, rows, halved, padded, weight.total, out.array, out.array.stride(0),
                ADD=add, M=tall, B=wide, STEP=STEP, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            continue
        outputs, tall = tile_of(weight.padded_outputs, rows, recorder.owner.sms)
        assert out.width >= weight.padded_outputs, (out.width, weight.padded_outputs)
        args: tuple[Any, ...] = (
            halves, padded, scales, rows, padded, weight.words, weight.total, weight.groups, 1,
            out.array, out.array.stride(0),
        )  # fmt: skip
        recorder.launch(
            wide_kernel, (-(-rows // tall), -(-weight.padded_outputs // outputs)), *args,
            ADD=add, **constants(weight), G=GROUPS, B=outputs, M=tall,
            EVEN=weight.groups % GROUPS == 0 and weight.total % outputs == 0,
            num_warps=8 if outputs * tall >= 128 * 128 else 4, num_stages=3,
        )  # fmt: skip


def record_wide_gated(
    recorder: CudaRecorder, x: torch.Tensor, gate: TritonWeight, up: TritonWeight, out: torch.Tensor
) -> None:
    """The gated product as float32 rows; whoever reads it as int8 blocks has them written from there."""
    rows = recorder.rows
    if rows >= UNPACK_ROWS and gate.padded_outputs >= UNPACK_OUTPUTS:
        form = ordered_rows(recorder, x, gate.inputs, rows, "rows")
        halves, scales, padded = form.halves, form.scales, form.stride
        first = unpacked(recorder, gate, padded, "weights")
        second = unpacked(recorder, up, padded, "other weights")
        recorder.launch(
            halves_gated_kernel, (-(-rows // ROWS), -(-gate.padded_outputs // 128)),
            halves, scales, rows, first, second, padded, gate.total, out, out.stride(0),
            M=ROWS, B=128, STEP=STEP, num_warps=8, num_stages=4,
        )  # fmt: skip
        return
    halves, scales, padded = halved_input(recorder, x, gate.inputs, rows, ROWS, "rows")
    outputs, tall = tile_of(gate.padded_outputs, rows, recorder.owner.sms)
    outputs = min(outputs, 64)
    recorder.launch(
        wide_gated_kernel, (-(-rows // tall), -(-gate.padded_outputs // outputs)),
        halves, padded, scales, rows, padded, gate.words, up.words, gate.total, gate.groups, 1, out, out.stride(0),
        **constants(gate, "G"), **constants(up, "U"), G=GROUPS, B=outputs, M=tall,
        EVEN=gate.groups % GROUPS == 0 and gate.total % outputs == 0,
        num_warps=8 if outputs * tall >= 64 * 128 else 4, num_stages=3,
    )  # fmt: skip
