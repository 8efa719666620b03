"""GPU form of `gated_linear`: a program has a few outputs of gate and up; int8 blocks are a launch of their own."""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.gated_linear.triton_rows import record_rows
from sparkinfer.kernels.linear.triton_impl import (
    EXACT,
    LATE_INPUTS,
    Tile,
    choose_tile,
    constants,
    input_views,
    linear_kernel,
    processors,
    reads_late,
    stride_of,
)
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.linear.triton_wide import record_wide_gated
from sparkinfer.kernels.quantise.triton_impl import record as record_quantise
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import load_parts, rows_gated, rows_product

BLOCK = 32
ROWS = 16  # that a program computes at most


@triton.jit(do_not_specialize=["rows", "unit", "block"])
def gated_kernel(
    x, xf, x_stride, rows, block, unit, gate, gate_total, gate_groups, up, up_total, up_groups, out, out_stride,
    ONE: tl.constexpr, SAME: tl.constexpr, LATE: tl.constexpr, WARPS: tl.constexpr,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    GF: tl.constexpr, GG: tl.constexpr, GB: tl.constexpr, GCHUNKS: tl.constexpr, GEVEN: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr,
    UF: tl.constexpr, UG: tl.constexpr, UB: tl.constexpr, UCHUNKS: tl.constexpr, UEVEN: tl.constexpr,
):  # fmt: skip
    release_next()
    N: tl.constexpr = GF // GG * GB
    first = tl.program_id(0) * N
    row = first.to(tl.int64)
    g = load_parts(
        gate, gate_total, row, gate_groups, unit, GBITS, GMODE, GF, GG, GB, GCHUNKS, GEVEN
    )
    u = load_parts(up, up_total, row, up_groups, unit, UBITS, UMODE, UF, UG, UB, UCHUNKS, UEVEN)
    await_inputs()
    start = tl.program_id(1) * block
    count = tl.minimum(block, rows - start)
    rows_gated(
        g, u, x + start * x_stride, xf + start * x_stride, x_stride, count, gate_groups, up_groups, unit,
        out + start * out_stride + first, out_stride, ONE, SAME, LATE,
        GBITS, GMODE, GZERO, GF, GG, GB, GCHUNKS, GEVEN, UBITS, UMODE, UZERO, UF, UG, UB, UCHUNKS, UEVEN, WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["unit"])
def linear_gated_kernel(
    lx, lxf, lx_stride, lgroups, w, total, lout, lout_stride, programs,
    x, xf, x_stride, unit, gate, gate_total, gate_groups, up, up_total, up_groups, out, out_stride,
    SAME: tl.constexpr, LATE: tl.constexpr, LLATE: tl.constexpr,
    LBITS: tl.constexpr, LMODE: tl.constexpr, LZERO: tl.constexpr,
    LF: tl.constexpr, LG: tl.constexpr, LB: tl.constexpr, LCHUNKS: tl.constexpr, LEVEN: tl.constexpr,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    GF: tl.constexpr, GG: tl.constexpr, GB: tl.constexpr, GCHUNKS: tl.constexpr, GEVEN: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr,
    UF: tl.constexpr, UG: tl.constexpr, UB: tl.constexpr, UCHUNKS: tl.constexpr, UEVEN: tl.constexpr,
):  # fmt: skip
    """A product and a gated product of the same row: neither reads what the other writes.

    The weights are small, so each row has programs of its own: they wait less than a loop, the weights come from L2.
    """
    release_next()
    pid = tl.program_id(0)
    r = tl.program_id(1)
    if pid < programs:
        LN: tl.constexpr = LF // LG * LB
        row = pid.to(tl.int64) * LN
        raw = load_parts(w, total, row, lgroups, unit, LBITS, LMODE, LF, LG, LB, LCHUNKS, LEVEN)
        await_inputs()
        rows_product(
            raw, lx + r * lx_stride, lxf + r * lx_stride, lx_stride, 1, lgroups, unit,
            lout + r * lout_stride + row + tl.arange(0, LN), lout_stride,
            False, True, LLATE, LBITS, LMODE, LZERO, LF, LG, LB, LCHUNKS, LEVEN,
        )  # fmt: skip
    else:
        N: tl.constexpr = GF // GG * GB
        first = (pid - programs) * N
        row = first.to(tl.int64)
        g = load_parts(
            gate, gate_total, row, gate_groups, unit, GBITS, GMODE, GF, GG, GB, GCHUNKS, GEVEN
        )
        u = load_parts(up, up_total, row, up_groups, unit, UBITS, UMODE, UF, UG, UB, UCHUNKS, UEVEN)
        await_inputs()
        rows_gated(
            g, u, x + r * x_stride, xf + r * x_stride, x_stride, 1, gate_groups, up_groups, unit,
            out + r * out_stride + first + tl.arange(0, N), out_stride, True, SAME, LATE,
            GBITS, GMODE, GZERO, GF, GG, GB, GCHUNKS, GEVEN, UBITS, UMODE, UZERO, UF, UG, UB, UCHUNKS, UEVEN,
        )  # fmt: skip


def paired_tiles(
    gate: TritonWeight, up: TritonWeight, outputs: int, sms: int, rows: int
) -> tuple[Tile, Tile]:
    """Tiles of gate and up with the same outputs and warps, for `outputs` outputs of each."""
    wide = gate.groups > 64 or up.groups > 64
    most = 4 if rows == 1 and not wide else 2  # decoded codes stay in registers while rows pass by
    first = choose_tile(gate.form, gate.groups, outputs, sms, most=most, words=16)
    second = choose_tile(up.form, up.groups, outputs, sms, most=most, words=16)
    n, warps = max(first.rows, second.rows), max(first.warps, second.warps)
    return _resized(first, min(n, BLOCK), warps), _resized(second, min(n, BLOCK), warps)


def _resized(tile: Tile, rows: int, warps: int) -> Tile:
    lanes = max(tile.lanes, 32 * warps) if tile.groups >= 32 * warps else tile.lanes
    return replace(tile, lanes=lanes, outputs=max(1, rows * tile.groups // lanes), warps=warps)


def blocks_wanted(out: Activation) -> bool:
    """Somebody reads int8 blocks of these rows."""
    return out.q8 is not None and out.f32.width > LATE_INPUTS


def same_cut(gate: TritonWeight, up: TritonWeight, first: Tile, second: Tile) -> bool:
    """Both read the same parts of an input row."""
    shapes = [(t.lanes, t.groups, t.chunks, t.even) for t in (first, second)]
    return shapes[0] == shapes[1] and gate.form.group == up.form.group


def counters(recorder: CudaRecorder, count: int) -> torch.Tensor:
    """Zeroed counters that every kernel leaves at zero."""
    return recorder.scratch("block counters", count, torch.int32)


def record(
    recorder: CudaRecorder, x: Activation, gate: TritonWeight, up: TritonWeight, out: Activation
) -> None:
    """Pinned as `linear`. The float32 result is always written, int8 blocks only of rows that are not narrow.

    Narrow rows become int8 blocks in the kernels that read them (`linear.triton_impl.is_late`).
    """
    assert gate.outputs % BLOCK == 0, gate.outputs
    assert gate.quantised == up.quantised, "gate and up read the same form of the activation"
    rows = recorder.rows
    if recorder.wide and gate.quantised:
        record_wide_gated(recorder, x.f32.array, gate, up, out.f32.array)
        if blocks_wanted(out):
            record_quantise(recorder, out)
        return
    if _joined(recorder, x, gate, up, out):
        return
    first, second = paired_tiles(gate, up, gate.outputs, processors(recorder), rows)
    assert first.rows == second.rows and BLOCK % first.rows == 0, (first, second)
    late = reads_late(recorder, x, gate)
    words, floats = input_views(x, gate, late)
    block = min(rows, ROWS)
    recorder.launch(
        gated_kernel, (gate.outputs // first.rows, -(-rows // block)),
        words, floats, stride_of(words), rows, block, 1,
        gate.words, gate.total, gate.groups, up.words, up.total, up.groups, out.f32.array, stride_of(out.f32.array),
        ONE=rows == 1, SAME=same_cut(gate, up, first, second), LATE=late,
        WARPS=first.warps,
        **constants(gate, "G"), **first.constants("G"), **constants(up, "U"), **second.constants("U"),
        num_warps=first.warps, overlap=True, **EXACT,
    )  # fmt: skip
    if blocks_wanted(out):
        record_quantise(recorder, out)
    else:
        recorder.blocked.discard(out.f32.address)


def _joined(
    recorder: CudaRecorder, x: Activation, gate: TritonWeight, up: TritonWeight, out: Activation
) -> bool:
    """Replace the product recorded just before by one launch of both, if there is one that neither side waits for.

    A model records the router and the shared expert one after the other; both read the normed stream.
    """
    before: Any = recorder.steps[-1] if recorder.steps else None
    rows = recorder.rows
    if getattr(before, "kernel", None) is not linear_kernel or blocks_wanted(out) or rows > ROWS:
        return False
    options = before.options
    lx, lxf, lx_stride, lrows, _, lgroups, _, w, total, lout, lout_stride = before.args[:11]
    apart = lout.data_ptr() != x.f32.address and lx.data_ptr() != out.f32.address
    if options["COUNT"] != 1 or options["ADD"] or lrows != rows or not apart:
        return False
    forms = ("BITS", "MODE", "ZERO", "F", "G", "B", "CHUNKS", "EVEN", "LATE")
    first, second = paired_tiles(gate, up, gate.outputs, processors(recorder), 1)
    programs = before.grid[0]
    recorder.steps.pop()
    if record_rows(recorder, before, *input_views(x, gate), gate, up, out):
        return True
    late = reads_late(recorder, x, gate)
    words, floats = input_views(x, gate, late)
    recorder.launch(
        linear_gated_kernel, (programs + gate.outputs // first.rows, rows),
        lx, lxf, lx_stride, lgroups, w, total, lout, lout_stride, programs,
        words, floats, stride_of(words), 1,
        gate.words, gate.total, gate.groups, up.words, up.total, up.groups, out.f32.array, stride_of(out.f32.array),
        SAME=same_cut(gate, up, first, second), LATE=late,
        **{f"L{name}": options[name] for name in forms},
        **constants(gate, "G"), **first.constants("G"), **constants(up, "U"), **second.constants("U"),
        num_warps=min(first.warps, options["num_warps"]), overlap=True, **EXACT,
    )  # fmt: skip
    return True
