"""Triton form of `gated_delta`; for few rows, a program per value head and block of its columns keeps their state in
registers.

The head's k dimension is cut into four parts, so that sums over it are chains of fused multiply-adds across the parts
and then one reduction inside a warp. Pinned: one machine code for any number of rows, each taken in turn by the same
instructions; the state changes by fma(k, delta, decay * S), in a step as in the commit.
"""

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.errors import ShapeError
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.gated_delta.triton_wide import SMALLEST, record_wide
from sparkinfer.kernels.shapes import RecurrentShape
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    WORD_ADVANCE,
    WORD_COMMIT_ROWS,
    WORD_DECAY_RECORD,
    WORD_DELTA_RECORD,
    WORD_KEY_RECORD,
    WORD_RECURRENT,
    WORD_RECURRENT_NEXT,
    floats_at,
    power_of_two,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

COLUMNS = 16  # of a program
WARPS = 1
COMMIT_PROGRAMS = 2  # a multiprocessor


@triton.jit
def _quarters(source, QUARTER: tl.constexpr):
    """The four parts of a vector, each [QUARTER]."""
    i = tl.arange(0, QUARTER)
    return (
        tl.load(source + i),
        tl.load(source + QUARTER + i),
        tl.load(source + 2 * QUARTER + i),
        tl.load(source + 3 * QUARTER + i),
    )


@triton.jit
def _unit_scale(x0, x1, x2, x3, eps):
    squares = tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0)))
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 0) + eps))


@triton.jit
def decay_of(alpha, bias, rate):
    """exp(rate * softplus(alpha + bias)); log(1 + e) keeps its precision for small e."""
    x = alpha + bias
    e = tl.exp(tl.minimum(x, 30.0))
    sum_ = 1.0 + e
    soft = tl.where(
        sum_ == 1.0, e, tl.log(sum_) * tl.div_rn(e, tl.where(sum_ == 1.0, 1.0, sum_ - 1.0))
    )
    return tl.exp(rate * tl.where(x > 30.0, x, soft))


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def _against(x0, x1, x2, x3, s0, s1, s2, s3):
    """Sum over k of x[k] S[k, columns]."""
    part = x0[:, None] * s0
    part = tl.fma(tl.broadcast_to(x1[:, None], s1.shape), s1, part)
    part = tl.fma(tl.broadcast_to(x2[:, None], s2.shape), s2, part)
    part = tl.fma(tl.broadcast_to(x3[:, None], s3.shape), s3, part)
    return tl.sum(part, 0)


@triton.jit
def moved(s, k, delta):
    return tl.fma(tl.broadcast_to(k[:, None], s.shape), tl.broadcast_to(delta[None, :], s.shape), s)


@triton.jit(do_not_specialize=["rows", "layer", "window"])
def delta_kernel(
    qkv, qkv_stride, alpha, alpha_stride, beta, beta_stride, rates, biases, run, out, out_stride, rows, layer, window,
    eps, factor, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    release_next()
    QUARTER: tl.constexpr = SIZE // 4
    head = tl.program_id(1)
    key_head = head % KEY_HEADS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, QUARTER)[:, None] * SIZE + column[None, :]
    state = floats_at(run, WORD_RECURRENT) + (layer.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    s0 = tl.load(state + place)
    s1 = tl.load(state + QUARTER * SIZE + place)
    s2 = tl.load(state + 2 * QUARTER * SIZE + place)
    s3 = tl.load(state + 3 * QUARTER * SIZE + place)
    after = floats_at(run, WORD_RECURRENT_NEXT)
    after += (layer.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    advance = tl.load(run + WORD_ADVANCE)
    at = layer.to(tl.int64) * window
    keys = floats_at(run, WORD_KEY_RECORD) + (at * KEY_HEADS + key_head) * SIZE
    deltas = floats_at(run, WORD_DELTA_RECORD) + (at * VALUE_HEADS + head) * SIZE
    decays = floats_at(run, WORD_DECAY_RECORD) + at * VALUE_HEADS + head
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    first_of_head = (advance == 0) & (tl.program_id(0) == 0)
    i = tl.arange(0, QUARTER)
    await_inputs()  # the state is of an earlier run: nothing else in this one writes it
    source = qkv + key_head * SIZE
    q0, q1, q2, q3 = _quarters(source, QUARTER)
    k0, k1, k2, k3 = _quarters(source + KEY_HEADS * SIZE, QUARTER)
    value = tl.load(qkv + (2 * KEY_HEADS + head) * SIZE + column)
    a, b = tl.load(alpha + head), tl.load(beta + head)
    for row in range(rows):
        # The next row's inputs are on their way while this one is computed; the last row asks for itself again.
        next_row = tl.minimum(row + 1, rows - 1).to(tl.int64)
        source = qkv + next_row * qkv_stride + key_head * SIZE
        nq0, nq1, nq2, nq3 = _quarters(source, QUARTER)
        nk0, nk1, nk2, nk3 = _quarters(source + KEY_HEADS * SIZE, QUARTER)
        next_value = tl.load(qkv + next_row * qkv_stride + (2 * KEY_HEADS + head) * SIZE + column)
        next_a, next_b = (
            tl.load(alpha + next_row * alpha_stride + head),
            tl.load(beta + next_row * beta_stride + head),
        )

        scale = _unit_scale(k0, k1, k2, k3, eps)
        k0, k1, k2, k3 = k0 * scale, k1 * scale, k2 * scale, k3 * scale
        scale = _unit_scale(q0, q1, q2, q3, eps) * factor
        q0, q1, q2, q3 = q0 * scale, q1 * scale, q2 * scale, q3 * scale
        decay = decay_of(a, bias, rate)
        s0, s1, s2, s3 = s0 * decay, s1 * decay, s2 * decay, s3 * decay
        delta = sigmoid(b) * (value - _against(k0, k1, k2, k3, s0, s1, s2, s3))
        s0, s1, s2, s3 = (
            moved(s0, k0, delta),
            moved(s1, k1, delta),
            moved(s2, k2, delta),
            moved(s3, k3, delta),
        )
        result = _against(q0, q1, q2, q3, s0, s1, s2, s3)
        tl.store(out + row * out_stride.to(tl.int64) + head * SIZE + column, result)
        if advance == 0:
            tl.store(deltas + row * VALUE_HEADS * SIZE + column, delta)
        if first_of_head:
            tl.store(decays + row * VALUE_HEADS, decay)
            if head < KEY_HEADS:
                record = keys + row * KEY_HEADS * SIZE + i
                tl.store(record, k0)
                tl.store(record + QUARTER, k1)
                tl.store(record + 2 * QUARTER, k2)
                tl.store(record + 3 * QUARTER, k3)
        q0, q1, q2, q3 = nq0, nq1, nq2, nq3
        k0, k1, k2, k3 = nk0, nk1, nk2, nk3
        value, a, b = next_value, next_a, next_b
    if advance != 0:
        tl.store(after + place, s0)
        tl.store(after + QUARTER * SIZE + place, s1)
        tl.store(after + 2 * QUARTER * SIZE + place, s2)
        tl.store(after + 3 * QUARTER * SIZE + place, s3)


@triton.jit(do_not_specialize=["window", "parts"])
def commit_kernel(
    run, window, parts, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A part is COLUMNS columns of one value head of one layer; a program takes one after the other, the next one's
    state on its way meanwhile. So few programs leave room for what runs beside them.
    """
    PER_HEAD: tl.constexpr = SIZE // COLUMNS
    rows = tl.load(run + WORD_COMMIT_ROWS).to(tl.int32)
    live = floats_at(run, WORD_RECURRENT)
    i = tl.arange(0, SIZE)
    lane = tl.arange(0, COLUMNS)
    place = i[:, None] * SIZE + lane[None, :]
    step = tl.num_programs(0)
    part = tl.program_id(0)
    coming = tl.load(live + _part_at(part, PER_HEAD, SIZE, COLUMNS) + place)
    for part in range(tl.program_id(0), parts, step):
        s = coming
        # Past the last one it is loaded again, and not used.
        later = tl.minimum(part + step, parts - 1)
        coming = tl.load(live + _part_at(later, PER_HEAD, SIZE, COLUMNS) + place)
        here = part + step * 0  # the interpreter's loop gives a plain number
        head = here // PER_HEAD % VALUE_HEADS
        layer = (here // (PER_HEAD * VALUE_HEADS)).to(tl.int64)
        column = here % PER_HEAD * COLUMNS + lane
        at = layer * window
        keys = floats_at(run, WORD_KEY_RECORD) + (at * KEY_HEADS + head % KEY_HEADS) * SIZE
        deltas = floats_at(run, WORD_DELTA_RECORD) + (at * VALUE_HEADS + head) * SIZE
        decays = floats_at(run, WORD_DECAY_RECORD) + at * VALUE_HEADS + head
        for row in range(rows):
            k = tl.load(keys + row * KEY_HEADS * SIZE + i)
            delta = tl.load(deltas + row * VALUE_HEADS * SIZE + column)
            s = moved(s * tl.load(decays + row * VALUE_HEADS), k, delta)
        tl.store(live + _part_at(here, PER_HEAD, SIZE, COLUMNS) + place, s)


@triton.jit
def _part_at(part, PER_HEAD: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the first number of a part lies."""
    head = (part // PER_HEAD).to(tl.int64)  # of all layers
    return head * SIZE * SIZE + part % PER_HEAD * COLUMNS


def check_shape(shape: RecurrentShape) -> None:
    """Raises ShapeError for a head size that the kernels cannot take."""
    if shape.head_size < 16 or shape.head_size != power_of_two(shape.head_size):
        raise ShapeError(
            f"gated_delta on a GPU takes a head size that is a power of two from 16 on, got {shape.head_size}"
        )


def record(
    recorder: CudaRecorder, inputs: DeltaInputs, shape: RecurrentShape, layer: int, params: Buffer, out: Buffer,
    eps: float,
) -> None:  # fmt: skip
    """Raises ShapeError for a head size that is no power of two."""
    check_shape(shape)
    if recorder.wide and shape.head_size >= SMALLEST:
        record_wide(recorder, inputs, shape, layer, params, out, eps)
        return
    columns = min(shape.head_size, COLUMNS)
    recorder.launch(
        delta_kernel, (shape.head_size // columns, shape.value_heads),
        inputs.qkv.array, stride_of(inputs.qkv.array), inputs.alpha.array, stride_of(inputs.alpha.array),
        inputs.beta.array, stride_of(inputs.beta.array), inputs.decay_rate.array, inputs.time_bias.array, params.array,
        out.array, stride_of(out.array), recorder.rows, layer, shape.window, eps, shape.head_size**-0.5,
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, SIZE=shape.head_size, COLUMNS=columns,
        num_warps=WARPS, overlap=True, **EXACT,
    )  # fmt: skip


def record_commit(recorder: CudaRecorder, shape: RecurrentShape, params: Buffer) -> None:
    """Raises ShapeError for a head size that is no power of two."""
    check_shape(shape)
    columns = min(shape.head_size, 32)
    parts = shape.head_size // columns * shape.value_heads * shape.layers
    recorder.launch(
        commit_kernel, (min(parts, COMMIT_PROGRAMS * recorder.owner.sms),), params.array, shape.window, parts,
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, SIZE=shape.head_size, COLUMNS=columns,
        num_warps=4, **EXACT,
    )  # fmt: skip
