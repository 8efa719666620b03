"""Routed experts for many rows (prefill) on tensor cores: tiles of outputs x slots of one expert."""

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.experts import ExpertBuffers
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.linear.triton_wide import (
    GROUPS,
    constants,
    halved_input,
    input_halves,
    weight_halves,
)
from sparkinfer.kernels.route import Routing
from sparkinfer.kernels.triton_quant import bound, sigmoid

_SCALE = tl.constexpr(1.0 / 64.0)  # takes back the factor of `weight_halves`
OUTPUTS = 64  # of a tile


@triton.jit
def find_tile(table, tile, pairs, M: tl.constexpr, E: tl.constexpr):
    """The active expert that tile number `tile` belongs to, its first slot and its slots in the tile (0: none left)."""
    index = tl.arange(0, E)
    active = tl.load(table).to(tl.int32)
    entry = table + 1 + pairs + 3 * index
    count = tl.load(entry + 1, mask=index < active, other=0).to(tl.int32)
    tiles = (count + M - 1) // M
    ends = tl.cumsum(tiles, 0)
    here = (ends > tile) & (ends - tiles <= tile)
    which = tl.sum(tl.where(here, index, 0), 0)
    start = tl.sum(tl.where(here, (tile - (ends - tiles)) * M, 0), 0)
    slots = tl.sum(tl.where(here, count, 0), 0)
    at = table + 1 + pairs + 3 * which
    return tl.load(at), tl.load(at + 2).to(tl.int32) + start, tl.minimum(slots - start, M)


@triton.jit
def wide_hidden_kernel(
    x, x_stride, scales, padded, table, pairs, entries, gate, up, total, expert_rows, groups, unit, out, out_stride,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, M: tl.constexpr, E: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, slot, count = find_tile(table, tl.program_id(1), pairs, M, E)
    if count > 0:
        m = tl.arange(0, M)
        live = m < count
        source = tl.load(table + 1 + pairs + 3 * entries + slot + m, mask=live, other=0)
        first = tl.program_id(0) * B
        row = expert * expert_rows + first
        left = expert_rows - first
        a = tl.zeros([B, M], tl.float32)
        b = tl.zeros([B, M], tl.float32)
        for k in range(0, bound(groups), G):
            xlo, xhi = input_halves(x, source, x_stride, k, padded, G)
            lo, hi = weight_halves(
                gate, total, row, left, k, groups, unit, GBITS, GMODE, GZERO, G, B, EVEN
            )
            a = tl.dot(lo, xlo, a)
            a = tl.dot(hi, xhi, a)
            lo, hi = weight_halves(
                up, total, row, left, k, groups, unit, UBITS, UMODE, UZERO, G, B, EVEN
            )
            b = tl.dot(lo, xlo, b)
            b = tl.dot(hi, xhi, b)
        scale = (tl.load(scales + source, mask=live, other=0.0) * _SCALE)[None, :]
        a *= scale
        n = first + tl.arange(0, B)
        at = out + (slot + m).to(tl.int64)[None, :] * out_stride + n[:, None]
        there = live[None, :] & (n < expert_rows)[:, None]
        tl.store(at, a * sigmoid(a) * (b * scale), mask=there)


@triton.jit
def wide_out_kernel(
    x, x_stride, scales, padded, table, pairs, w, total, expert_rows, groups, unit, out, out_stride,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, M: tl.constexpr, E: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, slot, count = find_tile(table, tl.program_id(1), pairs, M, E)
    if count > 0:
        m = tl.arange(0, M)
        live = m < count
        source = tl.where(live, slot + m, slot)
        first = tl.program_id(0) * B
        row = expert * expert_rows + first
        left = expert_rows - first
        acc = tl.zeros([B, M], tl.float32)
        for k in range(0, bound(groups), G):
            xlo, xhi = input_halves(x, source, x_stride, k, padded, G)
            lo, hi = weight_halves(
                w, total, row, left, k, groups, unit, BITS, MODE, ZERO, G, B, EVEN
            )
            acc = tl.dot(lo, xlo, acc)
            acc = tl.dot(hi, xhi, acc)
        scale = (tl.load(scales + source) * _SCALE)[None, :]
        n = first + tl.arange(0, B)
        at = out + (slot + m).to(tl.int64)[None, :] * out_stride + n[:, None]
        tl.store(at, acc * scale, mask=live[None, :] & (n < expert_rows)[:, None])


def _tiles(routing: Routing, rows: int) -> tuple[int, int, int, int]:
    """Pairs, most active experts, slots of a tile and most tiles."""
    pairs = rows * routing.used
    active = min(routing.experts, pairs)
    tall = 64 if pairs >= 32 * active else 32 if pairs >= 16 * active else 16
    return pairs, active, tall, pairs // tall + active


def record_wide_hidden(
    recorder: CudaRecorder,
    x: Activation,
    gate: TritonWeight,
    up: TritonWeight,
    routing: Routing,
    buffers: ExpertBuffers,
) -> None:
    """The hidden rows as float32."""
    pairs, active, tall, tiles = _tiles(routing, recorder.rows)
    halves, scales, padded = halved_input(
        recorder, x.f32.array, gate.inputs, recorder.rows, tall, "rows"
    )
    out, outputs = buffers.hidden.f32.array, min(OUTPUTS, max(16, gate.outputs))
    recorder.launch(
        wide_hidden_kernel, (-(-gate.outputs // outputs), tiles),
        halves, padded, scales, padded, routing.table.array, pairs, active,
        gate.words, up.words, gate.total, gate.padded_outputs, gate.groups, 1, out, out.stride(0),
        **constants(gate, "G"), **constants(up, "U"), G=GROUPS, B=outputs, M=tall,
        E=triton.next_power_of_2(routing.experts), EVEN=_even(gate, outputs),
        num_warps=4, num_stages=3,
    )  # fmt: skip


def record_wide_out(
    recorder: CudaRecorder, down: TritonWeight, routing: Routing, buffers: ExpertBuffers
) -> None:
    pairs, _, tall, tiles = _tiles(routing, recorder.rows)
    halves, scales, padded = halved_input(
        recorder, buffers.hidden.f32.array, down.inputs, pairs, tall, "slots"
    )
    out, outputs = buffers.out.array, 2 * OUTPUTS
    recorder.launch(
        wide_out_kernel, (-(-down.padded_outputs // outputs), tiles),
        halves, padded, scales, padded, routing.table.array, pairs,
        down.words, down.total, down.padded_outputs, down.groups, 1, out, out.stride(0),
        **constants(down), G=GROUPS, B=outputs, M=tall,
        E=triton.next_power_of_2(routing.experts), EVEN=_even(down, outputs),
        num_warps=4, num_stages=3,
    )  # fmt: skip


def _even(weight: TritonWeight, outputs: int) -> bool:
    return weight.groups % GROUPS == 0 and weight.padded_outputs % outputs == 0
