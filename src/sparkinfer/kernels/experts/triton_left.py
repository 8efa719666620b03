"""Routed experts for long prompts on Hopper: their packed weights are the left side, decoded into registers."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparkinfer.backend.base import Activation
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.experts import ExpertBuffers
from sparkinfer.kernels.linear.triton_order import ordered_rows
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.linear.triton_wide import constants
from sparkinfer.kernels.route import Routing
from sparkinfer.kernels.triton_hopper import gated_tiles

SLOTS = 128  # of a tile
OUTPUTS, WARPS = 128, 8  # of a tile (gate and up together) and a program
REGISTERS = 128  # of a thread: two programs on a multiprocessor


@gluon.jit
def left_hidden_kernel(
    x, x_stride, scales, rows_of, tiles, gate, up, total, expert_rows, groups, out, out_stride,
    GBITS: gl.constexpr, GMODE: gl.constexpr, GZERO: gl.constexpr,
    UBITS: gl.constexpr, UMODE: gl.constexpr, UZERO: gl.constexpr,
    M: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """hidden[slot] = silu(gate_e . x) * (up_e . x) for M / 2 values and up to SLOTS slots of an expert."""
    at = tiles + 4 * gl.program_id(1)
    expert, slot, count = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    first = gl.program_id(0) * (M // 2)
    begin = expert.to(gl.int64) * expert_rows + first
    gated_tiles(
        (x, x_stride, rows_of, scales), ((gate, GBITS, GMODE, GZERO), (up, UBITS, UMODE, UZERO)),
        (total, begin, groups), (out, out_stride, first, expert_rows), slot, count, M, NW,
    )  # fmt: skip


def record_left_hidden(
    recorder: CudaRecorder,
    x: Activation,
    gate: TritonWeight,
    up: TritonWeight,
    routing: Routing,
    buffers: ExpertBuffers,
    tiles: tuple[torch.Tensor, int],
) -> None:
    """The hidden rows as float32. tiles: `tile_table` of SLOTS, and how many there are."""
    rows = recorder.rows
    pairs = rows * routing.used
    form = ordered_rows(recorder, x.f32.array, gate.inputs, rows, "rows")
    rows_of = routing.table.array[0, 1 + pairs + 3 * min(routing.experts, pairs) :]
    out = buffers.hidden.f32.array
    recorder.launch(
        left_hidden_kernel, (-(-2 * gate.outputs // OUTPUTS), tiles[1]),
        form.halves, form.stride, form.scales, rows_of, tiles[0],
        gate.words, up.words, gate.total, gate.padded_outputs, gate.groups, out, out.stride(0),
        **constants(gate, "G"), **constants(up, "U"), M=OUTPUTS, NW=WARPS, num_warps=WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip
