"""Triton form of `delta_net`: for few rows what does not depend on the state first, for all rows at once; then the
state, row by row; then the norm. For many rows its three ops.

`prepare_kernel` convolves a row of one head and brings queries and keys to their length; `core_kernel` keeps COLUMNS
columns of a head's state in registers. With D the decayed state, delta = gate * (v - k D) and the result is
q D + (q k) delta: both sums over the state are taken together. Pinned: one machine code for any number of rows, each
taken by the same instructions; the state changes by fma(k, delta, D), in a step as in the commit.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import EXACT_ROWS, CudaRecorder
from sparkinfer.kernels.conv.triton_impl import record as conv
from sparkinfer.kernels.delta_net import DeltaNet
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.gated_delta.triton_impl import (
    against,
    check_shape,
    decay_of,
    moved,
    quarters,
    sigmoid,
)
from sparkinfer.kernels.gated_delta.triton_impl import record as gated_delta
from sparkinfer.kernels.gated_norm.triton_impl import record as gated_norm
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    WORD_ADVANCE,
    WORD_CONV,
    WORD_CONV_RECORD,
    WORD_DECAY_RECORD,
    WORD_DELTA_RECORD,
    WORD_KEY_RECORD,
    WORD_RECURRENT,
    floats_at,
    power_of_two,
    silu,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

COLUMNS = 16  # of a head's state, of a program
WARPS = 1
TAPS = 4  # of the kernels for few rows; other convolutions go by three ops


@triton.jit
def _taps(weight, stride, channel):
    """The convolution's four weights of each channel, oldest input first."""
    at = weight + channel
    return tl.load(at), tl.load(at + stride), tl.load(at + 2 * stride), tl.load(at + 3 * stride)


@triton.jit
def _convolved(w0, w1, w2, w3, x0, x1, x2, x3, channel):
    """`x0` .. `x3`: rows of inputs, oldest first."""
    y = w0 * tl.load(x0 + channel)
    y = tl.fma(w1, tl.load(x1 + channel), y)
    y = tl.fma(w2, tl.load(x2 + channel), y)
    return silu(tl.fma(w3, tl.load(x3 + channel), y))


@triton.jit
def _input_row(state, x, x_stride, row, channels):
    """Where an input row lies: those before row 0 in the state."""
    if row < 0:
        at = state + (row + 3) * channels
    else:
        at = x + row * x_stride
    return at


@triton.jit(do_not_specialize=["layer", "window"])
def prepare_kernel(
    x, x_stride, weight, weight_stride, alpha, alpha_stride, beta, beta_stride, rates, biases, run, mixed, mixed_stride,
    gates, layer, window, eps, factor, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One row of the query and key of a key head, or of a value head.

    A row of `gates`: decay and update gate of each value head, query x key of each key head.
    """
    release_next()
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    slot, row = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, SIZE)
    state = floats_at(run, WORD_CONV) + layer.to(tl.int64) * 3 * CHANNELS
    recorded = tl.load(run + WORD_ADVANCE) == 0
    at = layer.to(tl.int64) * window + row
    inputs = floats_at(run, WORD_CONV_RECORD) + at * CHANNELS
    x0, x1 = (
        _input_row(state, x, x_stride, row - 3, CHANNELS),
        _input_row(state, x, x_stride, row - 2, CHANNELS),
    )
    x2, x3 = _input_row(state, x, x_stride, row - 1, CHANNELS), x + row * x_stride
    target = mixed + row * mixed_stride
    gate = gates + row * (2 * VALUE_HEADS + KEY_HEADS)
    if slot < KEY_HEADS:
        q_at = slot * SIZE + i
        k_at = q_at + KEY_HEADS * SIZE
        qw0, qw1, qw2, qw3 = _taps(weight, weight_stride, q_at)
        kw0, kw1, kw2, kw3 = _taps(weight, weight_stride, k_at)
        keys = floats_at(run, WORD_KEY_RECORD) + (at * KEY_HEADS + slot) * SIZE
        await_inputs()
        q = _convolved(qw0, qw1, qw2, qw3, x0, x1, x2, x3, q_at)
        k = _convolved(kw0, kw1, kw2, kw3, x0, x1, x2, x3, k_at)
        q = q * (tl.div_rn(1.0, tl.sqrt_rn(tl.sum(q * q, 0) + eps)) * factor)
        k = k * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(k * k, 0) + eps))
        tl.store(target + q_at, q)
        tl.store(target + k_at, k)
        tl.store(gate + 2 * VALUE_HEADS + slot, tl.sum(q * k, 0))
        if recorded:
            tl.store(keys + i, k)
            tl.store(inputs + q_at, tl.load(x3 + q_at))
            tl.store(inputs + k_at, tl.load(x3 + k_at))
    else:
        head = slot - KEY_HEADS
        v_at = (2 * KEY_HEADS + head) * SIZE + i
        vw0, vw1, vw2, vw3 = _taps(weight, weight_stride, v_at)
        rate, bias = tl.load(rates + head), tl.load(biases + head)
        decays = floats_at(run, WORD_DECAY_RECORD) + at * VALUE_HEADS + head
        await_inputs()
        decay = decay_of(tl.load(alpha + row * alpha_stride + head), bias, rate)
        tl.store(target + v_at, _convolved(vw0, vw1, vw2, vw3, x0, x1, x2, x3, v_at))
        tl.store(gate + head, decay)
        tl.store(gate + VALUE_HEADS + head, sigmoid(tl.load(beta + row * beta_stride + head)))
        if recorded:
            tl.store(decays, decay)
            tl.store(inputs + v_at, tl.load(x3 + v_at))


@triton.jit(do_not_specialize=["rows", "layer", "window"])
def core_kernel(
    x, x_stride, mixed, mixed_stride, gates, run, out, out_stride, rows, layer, window,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, MOVED: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of a value head through all rows; also MOVED channels of the convolution's state."""
    release_next()
    QUARTER: tl.constexpr = SIZE // 4
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    GATES: tl.constexpr = 2 * VALUE_HEADS + KEY_HEADS
    part, head = tl.program_id(0), tl.program_id(1)
    key_head = head % KEY_HEADS
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, QUARTER)[:, None] * SIZE + column[None, :]
    state = floats_at(run, WORD_RECURRENT) + (layer.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    s0 = tl.load(state + place)
    s1 = tl.load(state + QUARTER * SIZE + place)
    s2 = tl.load(state + 2 * QUARTER * SIZE + place)
    s3 = tl.load(state + 3 * QUARTER * SIZE + place)
    advance = tl.load(run + WORD_ADVANCE)
    deltas = (
        floats_at(run, WORD_DELTA_RECORD)
        + (layer.to(tl.int64) * window * VALUE_HEADS + head) * SIZE
    )
    await_inputs()  # the state is of an earlier run: nothing else in this one writes it
    q0, q1, q2, q3 = quarters(mixed + key_head * SIZE, QUARTER)
    k0, k1, k2, k3 = quarters(mixed + (KEY_HEADS + key_head) * SIZE, QUARTER)
    value = tl.load(mixed + (2 * KEY_HEADS + head) * SIZE + column)
    decay, update = tl.load(gates + head), tl.load(gates + VALUE_HEADS + head)
    qk = tl.load(gates + 2 * VALUE_HEADS + key_head)
    for row in range(rows):
        # The next row's inputs are on their way while this one is computed; the last row asks for itself again.
        later = tl.minimum(row + 1, rows - 1)
        source = mixed + later * mixed_stride
        nq0, nq1, nq2, nq3 = quarters(source + key_head * SIZE, QUARTER)
        nk0, nk1, nk2, nk3 = quarters(source + (KEY_HEADS + key_head) * SIZE, QUARTER)
        next_value = tl.load(source + (2 * KEY_HEADS + head) * SIZE + column)
        gate = gates + later * GATES
        next_decay, next_update = tl.load(gate + head), tl.load(gate + VALUE_HEADS + head)
        next_qk = tl.load(gate + 2 * VALUE_HEADS + key_head)

        s0, s1, s2, s3 = s0 * decay, s1 * decay, s2 * decay, s3 * decay
        answer = against(k0, k1, k2, k3, s0, s1, s2, s3)
        result = against(q0, q1, q2, q3, s0, s1, s2, s3)
        delta = update * (value - answer)
        s0, s1 = moved(s0, k0, delta), moved(s1, k1, delta)
        s2, s3 = moved(s2, k2, delta), moved(s3, k3, delta)
        result = tl.fma(delta, tl.zeros_like(delta) + qk, result)
        tl.store(out + row * out_stride + head * SIZE + column, result)
        if advance == 0:
            tl.store(deltas + row * VALUE_HEADS * SIZE + column, delta)
        q0, q1, q2, q3 = nq0, nq1, nq2, nq3
        k0, k1, k2, k3 = nk0, nk1, nk2, nk3
        value, decay, update, qk = next_value, next_decay, next_update, next_qk
    if advance != 0:
        tl.store(state + place, s0)
        tl.store(state + QUARTER * SIZE + place, s1)
        tl.store(state + 2 * QUARTER * SIZE + place, s2)
        tl.store(state + 3 * QUARTER * SIZE + place, s3)
        # Every reader of the convolution's state has ended: it becomes the last three inputs, the oldest first.
        channel = (head * (SIZE // COLUMNS) + part) * MOVED + tl.arange(0, MOVED)
        inside = channel < CHANNELS
        history = floats_at(run, WORD_CONV) + layer.to(tl.int64) * 3 * CHANNELS
        for j in tl.static_range(3):
            kept = tl.load(
                _input_row(history, x, x_stride, rows + j - 3, CHANNELS) + channel, mask=inside
            )
            tl.store(history + j * CHANNELS + channel, kept, mask=inside)


def record(
    recorder: CudaRecorder, net: DeltaNet, x: Buffer, inputs: DeltaInputs, gate: Buffer, params: Buffer,
    unnormed: Buffer, out: Activation,
) -> None:  # fmt: skip
    """Raises ShapeError for a head size that is no power of two."""
    shape = net.shape
    check_shape(shape)
    if recorder.wide or shape.taps != TAPS:
        conv(recorder, x, net.conv_weight, shape, net.layer, params, inputs.qkv)
        gated_delta(recorder, inputs, shape, net.layer, params, unnormed, net.eps)
    else:
        _record_few(recorder, net, x, inputs, params, unnormed)
    gated_norm(recorder, unnormed, gate, net.head_norm, out, heads=shape.value_heads, eps=net.eps)


def _record_few(
    recorder: CudaRecorder,
    net: DeltaNet,
    x: Buffer,
    inputs: DeltaInputs,
    params: Buffer,
    unnormed: Buffer,
) -> None:
    shape = net.shape
    heads, size = shape.value_heads, shape.head_size
    gates = recorder.scratch("delta gates", EXACT_ROWS * (2 * heads + shape.key_heads))
    numbers = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": heads, "SIZE": size}
    recorder.launch(
        prepare_kernel, (shape.key_heads + heads, recorder.rows),
        *pair(x), *pair(net.conv_weight), *pair(inputs.alpha), *pair(inputs.beta), inputs.decay_rate.array,
        inputs.time_bias.array, params.array, *pair(inputs.qkv), gates, net.layer, shape.window, net.eps, size**-0.5,
        num_warps=1, overlap=True, **numbers, **EXACT,
    )  # fmt: skip
    columns = min(size, COLUMNS)
    parts = size // columns
    recorder.launch(
        core_kernel, (parts, heads),
        *pair(x), *pair(inputs.qkv), gates, params.array, *pair(unnormed), recorder.rows, net.layer, shape.window,
        COLUMNS=columns, MOVED=power_of_two(-(-shape.channels // (parts * heads))),
        num_warps=WARPS, overlap=True, **numbers, **EXACT,
    )  # fmt: skip


def pair(buffer: Buffer) -> tuple[Any, int]:
    """The array and its row stride, as kernels take them."""
    return buffer.array, stride_of(buffer.array)
