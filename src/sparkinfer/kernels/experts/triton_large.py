"""Routed experts for long prompts: tiles of up to `slots` rows of one expert x outputs, on tensor cores.

A weight's tile is decoded once for all rows of a tile, in pairs of float16 (`triton_halves`). Scales and minima are
rounded to float16 before (2^-12 of a value, as the weight itself is). Gate and up take turns in the outputs of one
product, so a thread has both of a hidden value. The next weights are on their way meanwhile.

The results of the slots are float16 over the largest of their hidden row, which the sum of a row's experts multiplies
back: half of the bytes. Deterministic: no atomics, one chain over the width per output.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder, Launch
from sparkinfer.kernels.experts import ExpertBuffers
from sparkinfer.kernels.experts.triton_wide import find_tile
from sparkinfer.kernels.linear.triton_impl import EXACT, stride_of
from sparkinfer.kernels.linear.triton_order import LARGEST, serves
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.linear.triton_wide import constants
from sparkinfer.kernels.route import Routing
from sparkinfer.kernels.triton_halves import half, pairs, twice, unit_row
from sparkinfer.kernels.triton_quant import (
    INTERPRETED,
    bound,
    sigmoid,
    signed_byte,
    weight_codes,
    weight_load,
    weight_scales,
)

_SCALE = tl.constexpr(1.0 / 64.0)  # takes back the factor of `tile_codes`
_COLUMNS, _SUM_WARPS = 1024, 4  # of a program that sums
_FACTORS = {
    "large_out_kernel": 1.0,
    "left_out_kernel": float(LARGEST.value),
}  # of the scales that each leaves


@dataclass(frozen=True)
class Tile:
    """Rows, outputs (of a gated product: hidden values), groups of 32 columns in a step, warps, stages, registers of a
    thread. A tile of `tail` rows or fewer is computed as one of `tail`, with the weights on the left side.
    """

    slots: int
    outputs: int
    groups: int
    warps: int
    stages: int
    tail: int

    def options(self) -> dict[str, Any]:
        return {
            "M": self.slots, "B": self.outputs, "G": self.groups, "TAIL": self.tail,
            "num_warps": self.warps, "num_stages": self.stages, "maxnreg": _REGISTERS,
        }  # fmt: skip


_REGISTERS = 128  # of a thread: two programs of eight warps on a multiprocessor
HIDDEN = Tile(128, 64, 4, 8, 2, 32)
OUT = Tile(128, 128, 4, 8, 2, 32)
FULL = 48  # slots of an expert, on average, from which on this form is faster


@triton.jit
def tiles_kernel(table, tiles, pairs, M: tl.constexpr, E: tl.constexpr):
    """Expert, first slot and slots of every tile (0 slots: none)."""
    tile = tl.program_id(0)
    expert, slot, count = find_tile(table, tile, pairs, M, E)
    at = tiles + 4 * tile
    tl.store(at, expert.to(tl.int32))
    tl.store(at + 1, slot.to(tl.int32))
    tl.store(at + 2, tl.maximum(count, 0).to(tl.int32))


@triton.jit
def rows_kernel(x, x_stride, target, target_stride, scales, width, padded, BLOCK: tl.constexpr):
    """One row as float16 over its largest magnitude; columns past width are 0."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + k, mask=k < width, other=0.0)
    halves = unit_row(value, scales + row)
    tl.store(target + row * target_stride + k, halves, mask=k < padded)


@triton.jit
def _slow(words, s, m, SHIFT: tl.constexpr):
    byte = signed_byte(words, SHIFT).to(tl.float32)
    return (byte * half(s).to(tl.float32) + half(m).to(tl.float32)).to(tl.float16)


@triton.jit
def to_halves(words, s, m, SIGNED: tl.constexpr, G: tl.constexpr, B: tl.constexpr):
    """float16 [B, 16 G]: signed bytes of words [G, B, 4] times s plus m [G, B] (both rounded to float16 first)."""
    s, m = twice(s)[:, :, None], twice(m)[:, :, None]
    if INTERPRETED:
        even = tl.join(_slow(words, s, m, 0), _slow(words, s, m, 16))
        odd = tl.join(_slow(words, s, m, 8), _slow(words, s, m, 24))
    else:
        low, high = pairs(words, s, m, SIGNED)
        even = tl.join(half(low), half(high))
        odd = tl.join(half(low >> 16), half(high >> 16))
    whole = tl.permute(tl.join(even, odd), (1, 0, 2, 3, 4))
    return tl.reshape(whole, [B, G * 16])


@triton.jit
def tile_codes(raw, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr):
    """Signed bytes int32 [G, B, 4] of columns 0-15 and 16-31; factor and addend of each, float32 [G, B], times 64."""
    lo, hi = weight_codes(raw, BITS)
    s, m, word = weight_scales(raw, MODE, ZERO)
    s *= 64.0
    m *= 64.0
    if MODE <= 2:
        if MODE == 0 and ZERO == 0:
            m = tl.zeros_like(s)
        return lo, hi, s, m, s, m
    else:
        s_lo = s * signed_byte(word, 0).to(tl.float32)
        s_hi = s * signed_byte(word, 8).to(tl.float32)
        if MODE == 4:
            m_lo = m * signed_byte(word, 16).to(tl.float32)
            m_hi = m * (word >> 24).to(tl.float32)
        else:
            m_lo, m_hi = tl.zeros_like(s), tl.zeros_like(s)
        return lo, hi, s_lo, m_lo, s_hi, m_hi


@triton.jit
def in_order(lo, hi, G: tl.constexpr, B: tl.constexpr):
    """Columns of whole groups: [B, 32 G]."""
    both = tl.join(tl.reshape(lo, [B, G, 16]), tl.reshape(hi, [B, G, 16]))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [B, 32 * G])


@triton.jit
def tile_halves(
    raw,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    ZERO: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
):
    """Columns 0-15 and 16-31 of the groups, float16 [B, 16 G] each, times 64."""
    SIGNED: tl.constexpr = BITS == 6 or BITS == 8
    lo, hi, s_lo, m_lo, s_hi, m_hi = tile_codes(raw, BITS, MODE, ZERO)
    return in_order(
        to_halves(lo, s_lo, m_lo, SIGNED, G, B), to_halves(hi, s_hi, m_hi, SIGNED, G, B), G, B
    )


@triton.jit
def _mixed(a, b, G: tl.constexpr, B: tl.constexpr):
    """Outputs of a and b in turn: [G, 2 B] or [G, 2 B, 4]."""
    if len(a.shape) == 2:
        return tl.reshape(tl.join(a, b), [G, 2 * B])
    else:
        return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 3, 2)), [G, 2 * B, 4])


@triton.jit
def pair_halves(
    graw, uraw,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The same of two weights whose outputs take turns: float16 [2 B, 16 G] each."""
    SIGNED: tl.constexpr = GBITS == 6 or GBITS == 8 or UBITS == 6 or UBITS == 8
    lo, hi, s_lo, m_lo, s_hi, m_hi = tile_codes(graw, GBITS, GMODE, GZERO)
    ulo, uhi, us_lo, um_lo, us_hi, um_hi = tile_codes(uraw, UBITS, UMODE, UZERO)
    first = to_halves(
        _mixed(lo, ulo, G, B), _mixed(s_lo, us_lo, G, B), _mixed(m_lo, um_lo, G, B), SIGNED, G, 2 * B,
    )  # fmt: skip
    second = to_halves(
        _mixed(hi, uhi, G, B), _mixed(s_hi, us_hi, G, B), _mixed(m_hi, um_hi, G, B), SIGNED, G, 2 * B,
    )  # fmt: skip
    return in_order(first, second, G, 2 * B)


@triton.jit
def load_tile(
    w, total, row, left, k, groups,
    BITS: tl.constexpr, MODE: tl.constexpr, G: tl.constexpr, B: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    g = k + tl.arange(0, G)[:, None]
    n = tl.arange(0, B)[None, :]
    return weight_load(w, total, row, n, g, groups, 1, (g < groups) & (n < left), BITS, MODE, EVEN)


@triton.jit
def gated_tile(
    x, x_stride, scales, rows_of, gate, up, total, expert_rows, groups, out, out_stride, expert, slot, count,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, M)
    live = m < count
    source = tl.load(rows_of + slot + m, mask=live, other=0)
    first = tl.program_id(0) * B
    row = expert.to(tl.int64) * expert_rows + first
    left = expert_rows - first
    column = tl.arange(0, 32 * G)
    if LEFT:
        at = x + source[None, :] * x_stride + column[:, None]
        acc = tl.zeros([2 * B, M], tl.float32)
    else:
        at = x + source[:, None] * x_stride + column[None, :]
        acc = tl.zeros([M, 2 * B], tl.float32)
    graw = load_tile(gate, total, row, left, 0, groups, GBITS, GMODE, G, B, EVEN)
    uraw = load_tile(up, total, row, left, 0, groups, UBITS, UMODE, G, B, EVEN)
    for k in range(0, bound(groups), G):
        x_now = tl.load(at + k * 32)
        w_now = pair_halves(graw, uraw, GBITS, GMODE, GZERO, UBITS, UMODE, UZERO, G, B)
        coming = tl.minimum(k + G, (groups - 1) // G * G)
        graw = load_tile(gate, total, row, left, coming, groups, GBITS, GMODE, G, B, EVEN)
        uraw = load_tile(up, total, row, left, coming, groups, UBITS, UMODE, G, B, EVEN)
        if LEFT:
            acc = tl.dot(w_now, x_now, acc)
        else:
            acc = tl.dot(x_now, tl.trans(w_now), acc)
    scale = (tl.load(scales + source, mask=live, other=0.0) * _SCALE)[:, None]
    if LEFT:
        acc = tl.trans(acc)
    a, b = tl.split(tl.reshape(acc, [M, B, 2]))
    a *= scale
    n = first + tl.arange(0, B)
    to = out + (slot + m).to(tl.int64)[:, None] * out_stride + n[None, :]
    inside = live[:, None] & (n < expert_rows)[None, :]
    tl.store(to, a * sigmoid(a) * (b * scale), mask=inside)


@triton.jit
def large_hidden_kernel(
    x, x_stride, scales, rows_of, tiles, gate, up, total, expert_rows, groups, out, out_stride,
    GBITS: tl.constexpr, GMODE: tl.constexpr, GZERO: tl.constexpr,
    UBITS: tl.constexpr, UMODE: tl.constexpr, UZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """hidden[slot] = silu(gate_e . x) * (up_e . x) for up to M slots of an expert and B outputs."""
    at = tiles + 4 * tl.program_id(1)
    expert, slot, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if count > TAIL:
        gated_tile(
            x, x_stride, scales, rows_of, gate, up, total, expert_rows, groups, out, out_stride, expert, slot, count,
            GBITS, GMODE, GZERO, UBITS, UMODE, UZERO, G, B, M, EVEN, False,
        )  # fmt: skip
    elif count > 0:
        gated_tile(
            x, x_stride, scales, rows_of, gate, up, total, expert_rows, groups, out, out_stride, expert, slot, count,
            GBITS, GMODE, GZERO, UBITS, UMODE, UZERO, G, B, TAIL, EVEN, True,
        )  # fmt: skip


@triton.jit
def plain_tile(
    x, x_stride, w, total, expert_rows, groups, out, out_stride, expert, slot, count,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, M)
    live = m < count
    source = (slot + tl.where(live, m, 0)).to(tl.int64)
    first = tl.program_id(0) * B
    row = expert.to(tl.int64) * expert_rows + first
    left = expert_rows - first
    column = tl.arange(0, 32 * G)
    if LEFT:
        at = x + source[None, :] * x_stride + column[:, None]
        acc = tl.zeros([B, M], tl.float32)
    else:
        at = x + source[:, None] * x_stride + column[None, :]
        acc = tl.zeros([M, B], tl.float32)
    raw = load_tile(w, total, row, left, 0, groups, BITS, MODE, G, B, EVEN)
    for k in range(0, bound(groups), G):
        x_now = tl.load(at + k * 32)
        w_now = tile_halves(raw, BITS, MODE, ZERO, G, B)
        coming = tl.minimum(k + G, (groups - 1) // G * G)
        raw = load_tile(w, total, row, left, coming, groups, BITS, MODE, G, B, EVEN)
        if LEFT:
            acc = tl.dot(w_now, x_now, acc)
        else:
            acc = tl.dot(x_now, tl.trans(w_now), acc)
    n = first + tl.arange(0, B)
    to = (slot + m).to(tl.int64) * out_stride
    result = (acc * _SCALE).to(tl.float16)
    if LEFT:
        inside = live[None, :] & (n < expert_rows)[:, None]
        tl.store(out + to[None, :] + n[:, None], result, mask=inside)
    else:
        inside = live[:, None] & (n < expert_rows)[None, :]
        tl.store(out + to[:, None] + n[None, :], result, mask=inside)


@triton.jit
def large_out_kernel(
    x, x_stride, tiles, w, total, expert_rows, groups, out, out_stride, scales,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    G: tl.constexpr, B: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """out[slot] = down_e . hidden[slot] over the largest of the hidden row, which `scales` holds for the sum."""
    at = tiles + 4 * tl.program_id(1)
    expert, slot, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if count > TAIL:
        plain_tile(
            x, x_stride, w, total, expert_rows, groups, out, out_stride, expert, slot, count,
            BITS, MODE, ZERO, G, B, M, EVEN, False,
        )  # fmt: skip
    elif count > 0:
        plain_tile(
            x, x_stride, w, total, expert_rows, groups, out, out_stride, expert, slot, count,
            BITS, MODE, ZERO, G, B, TAIL, EVEN, True,
        )  # fmt: skip


@triton.jit
def large_sum_kernel(
    table, weights, weights_stride, parts, parts_stride, scales, shared, shared_stride, gates, gates_stride,
    out, out_stride, width, FACTOR: tl.constexpr, USED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns of a row of the stream, with what its experts add: their float16 rows times their slots' scales, FACTOR
    times.
    """
    row = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = n < width
    before = tl.load(out + row * out_stride + n, mask=live, other=0.0)
    common = tl.load(shared + row * shared_stride + n, mask=live, other=0.0)
    total = sigmoid(tl.load(gates + row * gates_stride)) * common
    for rank in tl.static_range(USED):
        slot = tl.load(table + 1 + row * USED + rank)
        weight = tl.load(weights + row * weights_stride + rank) * (tl.load(scales + slot) * FACTOR)
        value = tl.load(parts + slot * parts_stride + n, mask=live, other=0.0).to(tl.float32)
        total = tl.fma(tl.zeros_like(value) + weight, value, total)
    tl.store(out + row * out_stride + n, before + total, mask=live)


def tile_table(recorder: CudaRecorder, routing: Routing, slots: int) -> tuple[torch.Tensor, int]:
    """Record what every tile computes; returns it and the most tiles there are."""
    pairs = recorder.rows * routing.used
    count = pairs // slots + min(routing.experts, pairs)
    tiles = recorder.scratch(f"expert tiles of {slots}", 4 * count, torch.int32)
    recorder.launch(
        tiles_kernel, (count,), routing.table.array, tiles, pairs,
        M=slots, E=triton.next_power_of_2(routing.experts), num_warps=4,
    )  # fmt: skip
    return tiles, count


def rows_in_order(
    recorder: CudaRecorder, x: torch.Tensor, width: int, rows: int, step: int, name: str
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Record the float16 form of rows, columns in order; returns it, its stride and the rows' largest magnitudes."""
    padded = -(-width // step) * step
    halves = recorder.scratch(f"float16 {name} in order", rows * padded, torch.float16)
    scales = recorder.scratch(f"row scales {name} in order", rows)
    recorder.launch(
        rows_kernel, (rows,), x, stride_of(x), halves, padded, scales, width, padded,
        BLOCK=triton.next_power_of_2(padded), num_warps=4 if width > 1024 else 2, enable_fp_fusion=False,
    )  # fmt: skip
    return halves, padded, scales


def fits(recorder: CudaRecorder, weight: TritonWeight, routing: Routing, tile: Tile) -> bool:
    """Whether an expert has enough slots on average, and enough outputs for a tile and columns for a step."""
    pairs = recorder.rows * routing.used
    enough = pairs >= FULL * min(routing.experts, pairs)
    wide = weight.outputs >= tile.outputs and weight.groups >= tile.groups
    return weight.quantised and enough and wide


def _even(weight: TritonWeight, tile: Tile) -> bool:
    return weight.groups % tile.groups == 0 and weight.padded_outputs % tile.outputs == 0


def record_hidden(
    recorder: CudaRecorder,
    x: Activation,
    gate: TritonWeight,
    up: TritonWeight,
    routing: Routing,
    buffers: ExpertBuffers,
) -> bool:
    """Record the hidden rows as float32; False: the experts or slots are not for this form."""
    tile, rows = HIDDEN, recorder.rows
    if not fits(recorder, gate, routing, tile):
        return False
    if serves(recorder, gate, up):
        from sparkinfer.kernels.experts import triton_left as left  # Gluon is not everywhere

        tiles = tile_table(recorder, routing, left.SLOTS)
        left.record_left_hidden(recorder, x, gate, up, routing, buffers, tiles)
        return True
    pairs = rows * routing.used
    halves, stride, scales = rows_in_order(
        recorder, x.f32.array, gate.inputs, rows, 32 * tile.groups, "rows"
    )
    tiles, count = tile_table(recorder, routing, tile.slots)
    rows_of = routing.table.array[0, 1 + pairs + 3 * min(routing.experts, pairs) :]
    out = buffers.hidden.f32.array
    recorder.launch(
        large_hidden_kernel, (-(-gate.outputs // tile.outputs), count),
        halves, stride, scales, rows_of, tiles,
        gate.words, up.words, gate.total, gate.padded_outputs, gate.groups, out, stride_of(out),
        **constants(gate, "G"), **constants(up, "U"), EVEN=_even(gate, tile), **tile.options(),
    )  # fmt: skip
    return True


def record_out(
    recorder: CudaRecorder, down: TritonWeight, routing: Routing, buffers: ExpertBuffers
) -> bool:
    """Record the slots' results, float16 in the first halves of the buffer's rows; False as `record_hidden`."""
    tile = OUT
    if not fits(recorder, down, routing, tile):
        return False
    if serves(recorder, down):
        from sparkinfer.kernels.experts import triton_left as left  # Gluon is not everywhere

        if left.fits_down(down):
            tiles = tile_table(recorder, routing, left.SLOTS)
            left.record_left_out(recorder, down, routing, buffers, tiles)
            return True
    halves, stride, scales = rows_in_order(
        recorder, buffers.hidden.f32.array, down.inputs, recorder.rows * routing.used, 32 * tile.groups, "slots"
    )  # fmt: skip
    tiles, count = tile_table(recorder, routing, tile.slots)
    out = buffers.out.array.view(torch.float16)
    recorder.launch(
        large_out_kernel, (-(-down.padded_outputs // tile.outputs), count),
        halves, stride, tiles, down.words, down.total, down.padded_outputs, down.groups, out, stride_of(out), scales,
        **constants(down), EVEN=_even(down, tile), **tile.options(),
    )  # fmt: skip
    return True


def record_sum(
    recorder: CudaRecorder,
    routing: Routing,
    buffers: ExpertBuffers,
    shared: Buffer,
    gate: torch.Tensor,
    out: Buffer,
) -> bool:
    """Record the sum of a row's experts if their results are `record_out`'s; False: they are not.

    The shared expert first, then the ranks in order, each with one fused multiply-add.
    """
    parts = buffers.out.array
    last = next((step for step in reversed(recorder.steps) if _touches(step, parts)), None)
    if not isinstance(last, Launch) or last.kernel.fn.__name__ not in _FACTORS:
        return False
    halves, scales, weights = parts.view(torch.float16), last.args[-1], routing.weights.array
    arrays = (shared.array, gate, out.array)
    strided = [part for array in arrays for part in (array, stride_of(array))]
    columns = min(_COLUMNS, triton.next_power_of_2(out.width))
    recorder.launch(
        large_sum_kernel, (recorder.rows, -(-out.width // columns)),
        routing.table.array, weights, stride_of(weights), halves, stride_of(halves), scales, *strided, out.width,
        FACTOR=_FACTORS[last.kernel.fn.__name__], USED=routing.used, COLUMNS=columns, num_warps=_SUM_WARPS, **EXACT,
    )  # fmt: skip
    return True


def _touches(step: Any, array: torch.Tensor) -> bool:
    return isinstance(step, Launch) and any(
        isinstance(arg, torch.Tensor) and arg.data_ptr() == array.data_ptr() for arg in step.args
    )
