"""Triton form of `delta_net`: for few rows one kernel, a program per value head; for many its three ops.

The program keeps the head's state in registers and takes the rows in turn: convolution of the head's query, key and
value channels, the delta rule, norm, gate and int8 blocks. Keys and queries stay as the convolution left them: their
lengths are factors of sums. With k, q of length 1 / a and 1 / b and the state before the row, decayed, D:
delta = gate * (v - a k D) and q S = b (q D) + a b (q k) delta, so one pass over the state serves both sums.
The record of a window holds k and a * delta, whose product with `commit_delta` gives the bits of a step.

Pinned: one machine code for any number of rows, each taken by the same instructions; products and sums stay apart, for
the compiler computes some values twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.conv.triton_impl import record as conv
from sparkinfer.kernels.delta_net import DeltaNet
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.gated_delta.triton_impl import check_shape, decay_of, moved, sigmoid
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
    q8_args,
    silu,
    store_int8,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import INTERPRETED, await_inputs, release_next

WARPS = 4
TAPS = 4  # of the one kernel; other convolutions go by three


@triton.jit
def _taps(weight, stride, channel):
    """The convolution's four weights of each channel, oldest input first."""
    at = weight + channel
    return tl.load(at), tl.load(at + stride), tl.load(at + 2 * stride), tl.load(at + 3 * stride)


@triton.jit
def _history(state, channels, channel):
    """The three inputs before the first row."""
    at = state + channel
    return tl.load(at), tl.load(at + channels), tl.load(at + 2 * channels)


@triton.jit
def _keep_history(state, channels, channel, x0, x1, x2):
    tl.store(state + channel, x0)
    tl.store(state + channels + channel, x1)
    tl.store(state + 2 * channels + channel, x2)


@triton.jit
def _convolved(w0, w1, w2, w3, x0, x1, x2, x3):
    return silu(tl.fma(w3, x3, tl.fma(w2, x2, tl.fma(w1, x1, w0 * x0))))


@triton.jit
def _add_pair(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _sums_of_two(a, b):
    """Sums over the first axis, taken together: they wait for one exchange between warps."""
    if INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0)
    else:
        return tl.reduce((a, b), 0, _add_pair)


@triton.jit
def _sums_of_three(a, b, c):
    if INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)
    else:
        return tl.reduce((a, b, c), 0, _add_three)


@triton.jit(do_not_specialize=["rows", "layer", "window"])
def net_kernel(
    x, x_stride, weight, weight_stride, alpha, alpha_stride, beta, beta_stride, rates, biases, gate, gate_stride,
    head_norm, run, tickets, out, out_stride, q8, q8_stride, rows, layer, window, eps, factor,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    release_next()
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    head = tl.program_id(0)
    key_head = head % KEY_HEADS
    i = tl.arange(0, SIZE)
    q_at, v_at = key_head * SIZE + i, (2 * KEY_HEADS + head) * SIZE + i
    k_at = q_at + KEY_HEADS * SIZE
    place = i[:, None] * SIZE + i[None, :]
    zeros = tl.zeros((SIZE,), tl.float32)
    state = floats_at(run, WORD_RECURRENT) + (layer.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    history = floats_at(run, WORD_CONV) + layer.to(tl.int64) * 3 * CHANNELS
    s = tl.load(state + place)
    qw0, qw1, qw2, qw3 = _taps(weight, weight_stride, q_at)
    kw0, kw1, kw2, kw3 = _taps(weight, weight_stride, k_at)
    vw0, vw1, vw2, vw3 = _taps(weight, weight_stride, v_at)
    q0, q1, q2 = _history(history, CHANNELS, q_at)
    k0, k1, k2 = _history(history, CHANNELS, k_at)
    v0, v1, v2 = _history(history, CHANNELS, v_at)
    normed = tl.load(head_norm + i)
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    advance = tl.load(run + WORD_ADVANCE)
    at = layer.to(tl.int64) * window
    inputs = floats_at(run, WORD_CONV_RECORD) + at * CHANNELS
    keys = floats_at(run, WORD_KEY_RECORD) + (at * KEY_HEADS + key_head) * SIZE
    deltas = floats_at(run, WORD_DELTA_RECORD) + (at * VALUE_HEADS + head) * SIZE
    decays = floats_at(run, WORD_DECAY_RECORD) + at * VALUE_HEADS + head
    await_inputs()  # the states are of an earlier run: nothing else in this one writes them
    q3, k3, v3 = tl.load(x + q_at), tl.load(x + k_at), tl.load(x + v_at)
    a, b = tl.load(alpha + head), tl.load(beta + head)
    g = tl.load(gate + head * SIZE + i)
    for row in range(rows):
        # The next row's inputs are on their way while this one is computed; the last row asks for itself again.
        later = tl.minimum(row + 1, rows - 1)
        source = x + later * x_stride
        next_q, next_k, next_v = (
            tl.load(source + q_at),
            tl.load(source + k_at),
            tl.load(source + v_at),
        )
        next_a, next_b = (
            tl.load(alpha + later * alpha_stride + head),
            tl.load(beta + later * beta_stride + head),
        )
        next_g = tl.load(gate + later * gate_stride + head * SIZE + i)

        q = _convolved(qw0, qw1, qw2, qw3, q0, q1, q2, q3)
        k = _convolved(kw0, kw1, kw2, kw3, k0, k1, k2, k3)
        v = _convolved(vw0, vw1, vw2, vw3, v0, v1, v2, v3)
        kk, qq, qk = _sums_of_three(k * k, q * q, q * k)
        k_scale = tl.div_rn(1.0, tl.sqrt_rn(kk + eps))
        q_scale = tl.div_rn(1.0, tl.sqrt_rn(qq + eps)) * factor
        decay = decay_of(a, bias, rate)
        s = s * decay
        k_s, q_s = _sums_of_two(k[:, None] * s, q[:, None] * s)
        delta = sigmoid(b) * (tl.fma(k_s, zeros - k_scale, v))
        change = k_scale * delta
        s = moved(s, k, change)
        result = q_scale * tl.fma(change, zeros + qk, q_s)
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(result * result, 0) / SIZE + eps))
        y = result * scale * normed * silu(g)
        tl.store(out + row * out_stride + head * SIZE + i, y)
        if QUANTISED:
            blocks = tl.arange(0, SIZE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
            store_int8(
                q8 + row * q8_stride,
                tl.reshape(y, (SIZE // 32, 32)),
                head * SIZE + blocks,
                VALUE_HEADS * SIZE,
                blocks >= 0,
            )
        if advance == 0:
            tl.store(deltas + row * VALUE_HEADS * SIZE + i, change)
            tl.store(decays + row * VALUE_HEADS, decay)
            tl.store(inputs + row * CHANNELS + v_at, v3)
            if head < KEY_HEADS:
                tl.store(keys + row * KEY_HEADS * SIZE + i, k)
                tl.store(inputs + row * CHANNELS + q_at, q3)
                tl.store(inputs + row * CHANNELS + k_at, k3)
        q0, q1, q2, q3 = q1, q2, q3, next_q
        k0, k1, k2, k3 = k1, k2, k3, next_k
        v0, v1, v2, v3 = v1, v2, v3, next_v
        a, b, g = next_a, next_b, next_g
    if advance != 0:
        tl.store(state + place, s)
        tl.debug_barrier()  # every thread of the program has read its history
        _keep_history(history, CHANNELS, v_at, v0, v1, v2)
        # Heads that share a key head read its history too: the last of them to come here replaces it.
        SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
        if tl.atomic_add(tickets + key_head, 1, sem="acq_rel") == SHARED - 1:
            _keep_history(history, CHANNELS, q_at, q0, q1, q2)
            _keep_history(history, CHANNELS, k_at, k0, k1, k2)
            tl.store(tickets + key_head, 0)


def _fits(recorder: CudaRecorder, net: DeltaNet, out: Activation) -> bool:
    shape = net.shape
    whole_blocks = out.q8 is None or shape.head_size % 32 == 0
    return (
        not recorder.wide
        and shape.taps == TAPS
        and shape.value_heads % shape.key_heads == 0
        and whole_blocks
    )


def record(
    recorder: CudaRecorder, net: DeltaNet, x: Buffer, inputs: DeltaInputs, gate: Buffer, params: Buffer,
    unnormed: Buffer, out: Activation,
) -> None:  # fmt: skip
    """Raises ShapeError for a head size that is no power of two."""
    shape = net.shape
    check_shape(shape)
    if not _fits(recorder, net, out):
        conv(recorder, x, net.conv_weight, shape, net.layer, params, inputs.qkv)
        gated_delta(recorder, inputs, shape, net.layer, params, unnormed, net.eps)
        gated_norm(
            recorder, unnormed, gate, net.head_norm, out, heads=shape.value_heads, eps=net.eps
        )
        return
    strided = [
        part for buffer in (x, net.conv_weight, inputs.alpha, inputs.beta) for part in pair(buffer)
    ]
    recorder.launch(
        net_kernel, (shape.value_heads,),
        *strided, inputs.decay_rate.array, inputs.time_bias.array, *pair(gate), net.head_norm.array, params.array,
        recorder.scratch("delta net tickets", shape.key_heads, torch.int32), *pair(out.f32), *q8_args(out),
        recorder.rows, net.layer, shape.window, net.eps, shape.head_size**-0.5,
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, SIZE=shape.head_size, QUANTISED=out.q8 is not None,
        num_warps=WARPS, overlap=True, **EXACT,
    )  # fmt: skip


def pair(buffer: Buffer) -> tuple[Any, int]:
    """The array and its row stride, as kernels take them."""
    return buffer.array, stride_of(buffer.array)
