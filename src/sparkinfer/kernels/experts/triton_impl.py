"""GPU form of the routed experts: a program computes a few outputs of one slot, a row with one of its experts.

This is the general form. Quantised experts of usual shapes have a faster one for few rows: `triton_few`.
"""

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder, q8_views
from sparkinfer.kernels.experts import ExpertBuffers, triton_few, triton_large
from sparkinfer.kernels.experts.triton_wide import record_wide_hidden, record_wide_out
from sparkinfer.kernels.gated_linear.triton_impl import (
    BLOCK,
    blocks_wanted,
    counters,
    paired_tiles,
    same_cut,
)
from sparkinfer.kernels.linear.triton_impl import (
    EXACT,
    choose_tile,
    constants,
    input_views,
    is_late,
    processors,
    stride_of,
)
from sparkinfer.kernels.linear.triton_pack import TritonWeight
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


@triton.jit(do_not_specialize=["unit"])
def out_kernel(
    x, xf, x_stride, unit, slot_pairs, w, total, expert_rows, groups, out, out_stride,
    LATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[slot] = down_e . hidden[slot], a few outputs."""
    release_next()
    await_inputs()
    slot = tl.program_id(1)
    first = tl.program_id(0) * (F // G * B)
    expert = (tl.load(slot_pairs + slot) & 0xFFFF).to(tl.int64)
    row = expert * expert_rows + first
    raw = load_parts(w, total, row, groups, unit, BITS, MODE, F, G, B, CHUNKS, EVEN)
    at = slot * x_stride
    rows_product(
        raw, x + at, xf + at, x_stride, 1, groups, unit,
        out + slot.to(tl.int64) * out_stride + first + tl.arange(0, F // G * B), out_stride,
        False, True, LATE, BITS, MODE, ZERO, F, G, B, CHUNKS, EVEN,
    )  # fmt: skip


@triton.jit
def combine_kernel(
    table, weights, weights_stride, parts, parts_stride, shared, shared_stride, gates, gates_stride, out, out_stride,
    width, WIDE: tl.constexpr, USED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns of a row of the stream, with what its experts add. WIDE: the table says which slots are the row's."""
    release_next()
    await_inputs()
    row = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = n < width
    before = tl.load(out + row * out_stride + n, mask=live, other=0.0)
    common = tl.load(shared + row * shared_stride + n, mask=live, other=0.0)
    total = sigmoid(tl.load(gates + row * gates_stride)) * common
    for rank in tl.static_range(USED):
        weight = tl.load(weights + row * weights_stride + rank)
        slot = (row * USED + rank).to(tl.int64)
        if WIDE:
            slot = tl.load(table + 1 + slot)
        value = tl.load(parts + slot * parts_stride + n, mask=live, other=0.0)
        total = tl.fma(tl.zeros_like(value) + weight, value, total)
    tl.store(out + row * out_stride + n, before + total, mask=live)


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
        if triton_large.record_hidden(recorder, x, gate, up, routing, buffers):
            return
        record_wide_hidden(recorder, x, gate, up, routing, buffers)
        return
    if not recorder.wide and triton_few.record_hidden(recorder, x, gate, up, routing, buffers):
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
        if triton_large.record_out(recorder, down, routing, buffers):
            return
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
    triton_few.mark_out(recorder, buffers.hidden, down)


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
    if not recorder.wide and triton_few.record_sum(recorder, routing, shared, gate, out):
        return
    if recorder.wide and triton_large.record_sum(recorder, routing, buffers, shared, gate, out):
        return
    arrays = (routing.weights.array, buffers.out.array, shared.array, gate, out.array)
    strided = [part for array in arrays for part in (array, stride_of(array))]
    columns = min(_COLUMNS, triton.next_power_of_2(out.width))
    recorder.launch(
        combine_kernel, (recorder.rows, -(-out.width // columns)),
        routing.table.array, *strided, out.width, WIDE=recorder.wide, USED=routing.used, COLUMNS=columns,
        num_warps=2, overlap=True, **EXACT,
    )  # fmt: skip
