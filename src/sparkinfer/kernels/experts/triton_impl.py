"""GPU form of the routed experts: a program computes a few outputs of one slot, a row with one of its experts."""

from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder, q8_views
from sparkinfer.kernels.experts import ExpertBuffers
from sparkinfer.kernels.experts.triton_wide import record_wide_hidden, record_wide_out
from sparkinfer.kernels.gated_linear.triton_impl import (
    BLOCK,
    ROWS,
    blocks_wanted,
    counters,
    paired_tiles,
    same_cut,
)
from sparkinfer.kernels.linear.triton_impl import (
    EXACT,
    JOINED,
    choose_tile,
    constants,
    input_views,
    is_late,
    processors,
    stride_of,
)
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.rms_norm.triton_impl import JOINED as NORM_JOINED
from sparkinfer.kernels.rms_norm.triton_impl import norm_row
from sparkinfer.kernels.route import Routing
from sparkinfer.kernels.route.triton_impl import slots_of
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import (
    load_parts,
    quantise_when_last,
    rows_gated,
    rows_product,
    sigmoid,
)

_COLUMNS = 256  # of a combine program


@triton.jit(do_not_specialize=["unit"])
def hidden_kernel(
    x, xf, x_stride, unit, slot_pairs,
    gate, gate_total, gate_rows, gate_groups, up, up_total, up_rows, up_groups,
    out, out_stride, codes, floats, q_stride, counters, width,
    QUANTISED: tl.constexpr, SAME: tl.constexpr, LATE: tl.constexpr,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    GF: tl.constexpr, GG: tl.constexpr, GB: tl.constexpr, GCHUNKS: tl.constexpr, GEVEN: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr,
    UF: tl.constexpr, UG: tl.constexpr, UB: tl.constexpr, UCHUNKS: tl.constexpr, UEVEN: tl.constexpr,
):  # fmt: skip
    """A part of hidden[slot]. Slots of one expert follow each other: its weights come from memory once."""
    release_next()
    N: tl.constexpr = GF // GG * GB
    first = tl.program_id(0) * N
    slot = tl.program_id(1)
    await_inputs()
    pair = tl.load(slot_pairs + slot)
    expert = (pair & 0xFFFF).to(tl.int64)
    row = expert * gate_rows + first
    g = load_parts(
        gate, gate_total, row, gate_groups, unit, GBITS, GMODE, GF, GG, GB, GCHUNKS, GEVEN
    )
    row = expert * up_rows + first
    u = load_parts(up, up_total, row, up_groups, unit, UBITS, UMODE, UF, UG, UB, UCHUNKS, UEVEN)
    at = (pair >> 16) * x_stride
    rows_gated(
        g, u, x + at, xf + at, x_stride, 1, gate_groups, up_groups, unit,
        out + slot.to(tl.int64) * out_stride + first + tl.arange(0, N), out_stride, True, SAME, LATE,
        GBITS, GMODE, GZERO, GF, GG, GB, GCHUNKS, GEVEN, UBITS, UMODE, UZERO, UF, UG, UB, UCHUNKS, UEVEN,
    )  # fmt: skip
    if QUANTISED:
        groups = width // 32
        place = first // 32
        quantise_when_last(
            counters + slot * groups + place, 32 // N, out, out_stride, codes, floats, q_stride, groups, place,
            slot, 1, 1,
        )  # fmt: skip


@triton.jit
def slot_product(
    slot_pairs, slot, first, x, xf, x_stride, unit, w, total, expert_rows, groups, out, out_stride,
    LATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[slot] = down_e . hidden[slot], the outputs from `first` on."""
    expert = (tl.load(slot_pairs + slot) & 0xFFFF).to(tl.int64)
    row = expert * expert_rows + first
    raw = load_parts(w, total, row, groups, unit, BITS, MODE, F, G, B, CHUNKS, EVEN)
    at = slot * x_stride
    rows_product(
        raw, x + at, xf + at, x_stride, 1, groups, unit,
        out + slot.to(tl.int64) * out_stride + first + tl.arange(0, F // G * B), out_stride,
        False, True, LATE, BITS, MODE, ZERO, F, G, B, CHUNKS, EVEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["unit"])
def out_kernel(
    x, xf, x_stride, unit, slot_pairs, w, total, expert_rows, groups, out, out_stride,
    LATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    release_next()
    await_inputs()
    slot_product(
        slot_pairs, tl.program_id(1), tl.program_id(0) * (F // G * B), x, xf, x_stride, unit,
        w, total, expert_rows, groups, out, out_stride, LATE, BITS, MODE, ZERO, F, G, B, CHUNKS, EVEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["unit"])
def out_linear_kernel(
    x, xf, x_stride, unit, slot_pairs, w, total, expert_rows, groups, out, out_stride, tiles, programs,
    lx, lxf, lx_stride, lgroups, lw, ltotal, ltiles, lout, lout_stride,
    LATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    LLATE: tl.constexpr, LBITS: tl.constexpr, LMODE: tl.constexpr, LZERO: tl.constexpr,
    LF: tl.constexpr, LG: tl.constexpr, LB: tl.constexpr, LCHUNKS: tl.constexpr, LEVEN: tl.constexpr,
):  # fmt: skip
    """`out_kernel`, and a product that reads none of its results, a row a program: the shared expert's."""
    release_next()
    pid = tl.program_id(0)
    if pid < programs:
        LN: tl.constexpr = LF // LG * LB
        row = (pid % ltiles).to(tl.int64) * LN
        raw = load_parts(lw, ltotal, row, lgroups, unit, LBITS, LMODE, LF, LG, LB, LCHUNKS, LEVEN)
        await_inputs()
        r = pid // ltiles
        rows_product(
            raw, lx + r * lx_stride, lxf + r * lx_stride, lx_stride, 1, lgroups, unit,
            lout + r * lout_stride + row + tl.arange(0, LN), lout_stride,
            False, True, LLATE, LBITS, LMODE, LZERO, LF, LG, LB, LCHUNKS, LEVEN,
        )  # fmt: skip
    else:
        pid -= programs
        await_inputs()
        slot_product(
            slot_pairs, pid // tiles, (pid % tiles) * (F // G * B), x, xf, x_stride, unit,
            w, total, expert_rows, groups, out, out_stride, LATE, BITS, MODE, ZERO, F, G, B, CHUNKS, EVEN,
        )  # fmt: skip


@triton.jit
def combined(
    row, n, live, table, weights, weights_stride, parts, parts_stride, shared, shared_stride, gates, gates_stride,
    out, out_stride, USED: tl.constexpr,
):  # fmt: skip
    """Columns `n` of a row of the stream, with what its experts add; written, too."""
    before = tl.load(out + row * out_stride + n, mask=live, other=0.0)
    common = tl.load(shared + row * shared_stride + n, mask=live, other=0.0)
    total = sigmoid(tl.load(gates + row * gates_stride)) * common
    for rank in tl.static_range(USED):
        weight = tl.load(weights + row * weights_stride + rank)
        slot = tl.load(table + 1 + row * USED + rank)
        value = tl.load(parts + slot * parts_stride + n, mask=live, other=0.0)
        total = tl.fma(tl.zeros_like(value) + weight, value, total)
    result = before + total
    tl.store(out + row * out_stride + n, result, mask=live)
    return result


@triton.jit
def combine_kernel(
    table, weights, weights_stride, parts, parts_stride, shared, shared_stride, gates, gates_stride, out, out_stride,
    width, USED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    release_next()
    await_inputs()
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    combined(
        tl.program_id(0), n, n < width, table, weights, weights_stride, parts, parts_stride, shared, shared_stride,
        gates, gates_stride, out, out_stride, USED,
    )  # fmt: skip


@triton.jit
def combine_norm_kernel(
    table, weights, weights_stride, parts, parts_stride, shared, shared_stride, gates, gates_stride, out, out_stride,
    width, norm, normed, normed_stride, codes, floats, q_stride, eps,
    USED: tl.constexpr, BLOCK: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """`combine_kernel` and the norm that reads its result: a program a row."""
    release_next()
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    live = k < width
    factor = tl.load(norm + k, mask=live, other=0.0)
    await_inputs()
    value = combined(
        row, k, live, table, weights, weights_stride, parts, parts_stride, shared, shared_stride,
        gates, gates_stride, out, out_stride, USED,
    )  # fmt: skip
    value = tl.where(live, value, 0.0)
    norm_row(
        value,
        factor,
        normed + row * normed_stride,
        codes,
        floats,
        q_stride,
        row,
        width,
        eps,
        BLOCK,
        QUANTISED,
    )


def _expected(routing: Routing, outputs: int) -> int:
    """Outputs a launch computes at least, for one row: what the tile is chosen for."""
    return routing.used * outputs


def record_hidden(
    recorder: CudaRecorder,
    x: Activation,
    gate: TritonWeight,
    up: TritonWeight,
    routing: Routing,
    buffers: ExpertBuffers,
) -> None:
    """Pinned as `linear`: a row's result does not depend on the other rows of its expert."""
    assert gate.outputs % BLOCK == 0 and gate.quantised == up.quantised, gate
    if recorder.wide and gate.quantised:
        record_wide_hidden(recorder, x, gate, up, routing, buffers)
        return
    outputs = _expected(routing, gate.outputs)
    first, second = paired_tiles(gate, up, outputs, processors(recorder), 1)
    assert first.rows == second.rows and BLOCK % first.rows == 0, (first, second)
    words, floats = input_views(x, gate)
    hidden, slots = buffers.hidden.f32.array, recorder.rows * routing.used
    codes = scales = hidden
    if blocks_wanted(buffers.hidden):
        codes, scales = q8_views(buffers.hidden.q8)
    recorder.launch(
        hidden_kernel, (gate.outputs // first.rows, slots),
        words, floats, stride_of(words), 1, slots_of(recorder, routing),
        gate.words, gate.total, gate.padded_outputs, gate.groups,
        up.words, up.total, up.padded_outputs, up.groups,
        hidden, stride_of(hidden), codes, scales, stride_of(codes),
        counters(recorder, slots * gate.outputs // BLOCK), gate.outputs,
        QUANTISED=blocks_wanted(buffers.hidden), SAME=same_cut(gate, up, first, second), LATE=is_late(gate),
        **constants(gate, "G"), **first.constants("G"), **constants(up, "U"), **second.constants("U"),
        num_warps=first.warps, overlap=True, **EXACT,
    )  # fmt: skip


def record_out(
    recorder: CudaRecorder, down: TritonWeight, routing: Routing, buffers: ExpertBuffers
) -> None:
    """Pinned as `linear`."""
    if recorder.wide and down.quantised:
        record_wide_out(recorder, down, routing, buffers)
        return
    outputs = _expected(routing, down.padded_outputs)
    tile = choose_tile(down.form, down.groups, outputs, processors(recorder))
    assert down.padded_outputs % tile.rows == 0, (down.padded_outputs, tile)
    words, floats = input_views(buffers.hidden, down)
    out = buffers.out.array
    recorder.launch(
        out_kernel, (down.padded_outputs // tile.rows, recorder.rows * routing.used),
        words, floats, stride_of(words), 1, slots_of(recorder, routing),
        down.words, down.total, down.padded_outputs, down.groups, out, stride_of(out),
        LATE=is_late(down), **constants(down), **tile.constants(), num_warps=tile.warps, overlap=True, **EXACT,
    )  # fmt: skip


def _join_product(recorder: CudaRecorder, x: Activation, weight: TritonWeight, out: Buffer) -> bool:
    """Take a product into the launch of `out_kernel` recorded just before: the shared expert's down projection."""
    before: Any = recorder.steps[-1]
    tiles, slots = before.grid
    options, args = before.options, before.args
    apart = args[9].data_ptr() != x.f32.address and args[0].data_ptr() != out.address
    if recorder.rows > ROWS or not apart:
        return False
    tile = choose_tile(weight.form, weight.groups, weight.total, processors(recorder))
    assert out.width >= weight.padded_outputs, (out.width, weight.padded_outputs)
    words, floats = input_views(x, weight)
    own = weight.total // tile.rows
    programs = own * recorder.rows
    names = ("BITS", "MODE", "ZERO", "F", "G", "B", "CHUNKS", "EVEN", "LATE")
    recorder.steps.pop()
    recorder.launch(
        out_linear_kernel, (programs + tiles * slots,), *args, tiles, programs,
        words, floats, stride_of(words), weight.groups, weight.words, weight.total, own,
        out.array, stride_of(out.array),
        **{name: options[name] for name in names}, LLATE=is_late(weight),
        **constants(weight, "L"), **tile.constants("L"),
        num_warps=min(tile.warps, options["num_warps"]), overlap=True, **EXACT,
    )  # fmt: skip
    return True


JOINED[out_kernel] = _join_product


def record_combine(
    recorder: CudaRecorder,
    routing: Routing,
    buffers: ExpertBuffers,
    shared: Buffer,
    gates: Buffer,
    column: int,
    out: Buffer,
) -> None:
    """Pinned: the shared expert first, then the ranks in order, each with one fused multiply-add."""
    gate: torch.Tensor = gates.array[:, column:]
    arrays = (routing.weights.array, buffers.out.array, shared.array, gate, out.array)
    strided = [part for array in arrays for part in (array, stride_of(array))]
    columns = min(_COLUMNS, triton.next_power_of_2(out.width))
    recorder.launch(
        combine_kernel, (recorder.rows, -(-out.width // columns)),
        routing.table.array, *strided, out.width, USED=routing.used, COLUMNS=columns,
        num_warps=2, overlap=True, **EXACT,
    )  # fmt: skip


def _join_norm(
    recorder: CudaRecorder, x: Buffer, weight: Buffer, out: Activation, eps: float
) -> bool:
    """Take the norm of the stream into the launch of `combine_kernel` just before, which wrote the stream."""
    before: Any = recorder.steps[-1]
    args, width = before.args, x.width
    same = args[9].data_ptr() == x.address and before.grid[0] == recorder.rows
    if not same or args[11] != width or recorder.rows > ROWS:
        return False
    codes = floats = out.f32.array
    if out.q8 is not None:
        assert width % 32 == 0, width
        codes, floats = q8_views(out.q8)
    recorder.steps.pop()
    recorder.launch(
        combine_norm_kernel, (recorder.rows,), *args, weight.array, out.f32.array, stride_of(out.f32.array),
        codes, floats, stride_of(codes), eps,
        USED=before.options["USED"], BLOCK=max(32, triton.next_power_of_2(width)), QUANTISED=out.q8 is not None,
        num_warps=4, overlap=True, **EXACT,
    )  # fmt: skip
    return True


NORM_JOINED[combine_kernel] = _join_norm
