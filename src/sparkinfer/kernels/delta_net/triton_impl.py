"""Triton form of `delta_net`. For few rows: what does not depend on the state, for all rows at once; then the state,
row by row; then norm, gate and int8 blocks, again for all rows. For many rows: its three ops.

`prepare_kernel` convolves a row of a head and brings queries and keys to their length. `core_kernel` keeps eight
columns of a head's state in the registers of each warp, so that no warp waits for another: with D the decayed state,
delta = gate * (v - k D) and the result is q D + (q k) delta; both sums over the state are taken together.
`finish_kernel` also brings the convolution's state to the last inputs: its readers have ended then.

Pinned: every row is taken by the same operations in the same order, the sums over a head by one warp; products and sums
stay apart, for the compiler computes some values twice. The state changes by fma(k, delta, D), in a step as in the
commit. A row's loads have registers of their own for as long as it takes (three rows in turn): a rotation would wait at
its end for all that is on its way. A single row has no loop.
"""

from typing import Any

import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import EXACT_ROWS, CudaRecorder
from sparkinfer.kernels.conv.triton_impl import record as conv
from sparkinfer.kernels.delta_net import DeltaNet
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.gated_delta.triton_impl import check_shape, decay_of, sigmoid
from sparkinfer.kernels.gated_delta.triton_impl import record as gated_delta
from sparkinfer.kernels.gated_norm.triton_impl import record as gated_norm
from sparkinfer.kernels.triton_mixers import (
    EXACT,
    WORD_ADVANCE,
    WORD_CONV,
    WORD_CONV_NEXT,
    WORD_CONV_RECORD,
    WORD_DECAY_RECORD,
    WORD_DELTA_RECORD,
    WORD_KEY_RECORD,
    WORD_RECURRENT,
    WORD_RECURRENT_NEXT,
    floats_at,
    power_of_two,
    q8_args,
    silu,
    store_int8_row,
    stride_of,
)
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

TAPS = 4  # of the kernels for few rows; other convolutions go by three ops
WARPS = 4  # of a program of the core, with COLUMNS columns each
COLUMNS = tl.constexpr(8)
ONE_REGISTERS = 128  # asked for: left alone the assembler takes 72, and loads wait for each other
PARTS = tl.constexpr(16)  # of a head's k dimension, each in registers of its own


@triton.jit
def _taps(weight, stride, channel):
    """The convolution's four weights of each channel, oldest input first."""
    at = weight + channel
    return tl.load(at), tl.load(at + stride), tl.load(at + 2 * stride), tl.load(at + 3 * stride)


@triton.jit
def _input_row(history, x, x_stride, row, channels):
    """Where an input row lies: those before row 0 in the state."""
    if row < 0:
        at = history + (row + 3) * channels
    else:
        at = x + row * x_stride
    return at


@triton.jit
def _inputs(x0, x1, x2, x3, channel):
    return (
        tl.load(x0 + channel),
        tl.load(x1 + channel),
        tl.load(x2 + channel),
        tl.load(x3 + channel),
    )


@triton.jit
def _convolved(w, x):
    return silu(tl.fma(w[3], x[3], tl.fma(w[2], x[2], tl.fma(w[1], x[1], w[0] * x[0]))))


@triton.jit(do_not_specialize=["layer", "window"])
def prepare_kernel(
    x, x_stride, weight, weight_stride, alpha, alpha_stride, beta, beta_stride, rates, biases, run, rows_of, layer,
    window, eps, factor, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One row of the query and key of a key head, or of a value head.

    A row of `rows_of`: query and key of each key head, values of each value head, decay and update gate of each value
    head, query x key of each key head.
    """
    release_next()
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    slot, row = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, SIZE)
    history = floats_at(run, WORD_CONV) + layer.to(tl.int64) * 3 * CHANNELS
    recorded = tl.load(run + WORD_ADVANCE) == 0
    at = layer.to(tl.int64) * window + row
    record = floats_at(run, WORD_CONV_RECORD) + at * CHANNELS
    x0 = _input_row(history, x, x_stride, row - 3, CHANNELS)
    x1 = _input_row(history, x, x_stride, row - 2, CHANNELS)
    x2 = _input_row(history, x, x_stride, row - 1, CHANNELS)
    x3 = x + row * x_stride
    target = rows_of + row * (CHANNELS + 2 * VALUE_HEADS + KEY_HEADS)
    gates = target + CHANNELS
    if slot < KEY_HEADS:
        q_at = slot * SIZE + i
        k_at = q_at + KEY_HEADS * SIZE
        q_taps, k_taps = _taps(weight, weight_stride, q_at), _taps(weight, weight_stride, k_at)
        keys = floats_at(run, WORD_KEY_RECORD) + (at * KEY_HEADS + slot) * SIZE
        await_inputs()
        q_in, k_in = _inputs(x0, x1, x2, x3, q_at), _inputs(x0, x1, x2, x3, k_at)
        q, k = _convolved(q_taps, q_in), _convolved(k_taps, k_in)
        qq, kk, qk = tl.sum(q * q, 0), tl.sum(k * k, 0), tl.sum(q * k, 0)
        q_scale = tl.div_rn(1.0, tl.sqrt_rn(qq + eps)) * factor
        k_scale = tl.div_rn(1.0, tl.sqrt_rn(kk + eps))
        q, k = q * q_scale, k * k_scale
        tl.store(target + slot * 2 * SIZE + i, q)
        tl.store(target + slot * 2 * SIZE + SIZE + i, k)
        tl.store(gates + 2 * VALUE_HEADS + slot, qk * q_scale * k_scale)
        if recorded:
            tl.store(keys + i, k)
            tl.store(record + q_at, q_in[3])
            tl.store(record + k_at, k_in[3])
    else:
        head = slot - KEY_HEADS
        v_at = (2 * KEY_HEADS + head) * SIZE + i
        v_taps = _taps(weight, weight_stride, v_at)
        rate, bias = tl.load(rates + head), tl.load(biases + head)
        decays = floats_at(run, WORD_DECAY_RECORD) + at * VALUE_HEADS + head
        await_inputs()
        v_in = _inputs(x0, x1, x2, x3, v_at)
        a = tl.load(alpha + row * alpha_stride + head)
        b = tl.load(beta + row * beta_stride + head)
        decay = decay_of(a, bias, rate)
        tl.store(gates + 2 * head, decay)
        tl.store(gates + 2 * head + 1, sigmoid(b))
        tl.store(target + v_at, _convolved(v_taps, v_in))
        if recorded:
            tl.store(decays, decay)
            tl.store(record + v_at, v_in[3])


@triton.jit
def _load_parts(at, DISTANCE: tl.constexpr):
    found = (tl.load(at),)
    for j in tl.static_range(1, PARTS):
        found = found + (tl.load(at + j * DISTANCE),)  # noqa: RUF005
    return found


@triton.jit
def _store_parts(at, DISTANCE: tl.constexpr, s):
    for j in tl.static_range(PARTS):
        tl.store(at + j * DISTANCE, s[j])


@triton.jit
def _spread(x, s):
    return tl.broadcast_to(x[:, None, None], s.shape)


@triton.jit
def _against(x, s):
    """Sum over k of x[k] S[k, groups, columns], for every k: four chains over the parts, then one sum in the warp."""
    a = _spread(x[0], s[0]) * s[0]
    b = _spread(x[1], s[1]) * s[1]
    c = _spread(x[2], s[2]) * s[2]
    d = _spread(x[3], s[3]) * s[3]
    for j in tl.static_range(4, PARTS, 4):
        a = tl.fma(_spread(x[j], s[j]), s[j], a)
        b = tl.fma(_spread(x[j + 1], s[j]), s[j + 1], b)
        c = tl.fma(_spread(x[j + 2], s[j]), s[j + 2], c)
        d = tl.fma(_spread(x[j + 3], s[j]), s[j + 3], d)
    return tl.broadcast_to(tl.sum((a + b) + (c + d), 0)[None, :, :], s[0].shape)


@triton.jit
def _step(s, k, delta, decay):
    """decay S + k delta."""
    found = (tl.fma(_spread(k[0], s[0]), delta, s[0] * decay),)
    for j in tl.static_range(1, PARTS):
        found = found + (tl.fma(_spread(k[j], s[j]), delta, s[j] * decay),)  # noqa: RUF005
    return found


@triton.jit
def _row(
    rows_of, row, rows, head, column, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """A prepared row: query and key in parts, values of the columns, decay, update gate, query x key.

    Past the last one it is asked for again.
    """
    K: tl.constexpr = SIZE // PARTS
    STRIDE: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE + 2 * VALUE_HEADS + KEY_HEADS
    source = rows_of + tl.minimum(row, rows - 1) * STRIDE
    at = source + head % KEY_HEADS * 2 * SIZE + tl.arange(0, K)
    q, k = _load_parts(at, K), _load_parts(at + SIZE, K)
    value = tl.load(source + (2 * KEY_HEADS + head) * SIZE + column)
    gates = source + (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    decay, update = tl.load(gates + 2 * head), tl.load(gates + 2 * head + 1)
    return q, k, value, decay, update, tl.load(gates + 2 * VALUE_HEADS + head % KEY_HEADS)


@triton.jit
def _through(given, s, row, out, out_stride, deltas, WIDTH: tl.constexpr, first, recorded):
    """The state after a row, whose result and delta are written."""
    q, k, value, decay, update, qk = given
    answer, result = _against(k, s) * decay, _against(q, s) * decay
    delta = update * (value - answer)
    s = _step(s, k, delta, decay)
    result = tl.fma(delta, tl.zeros_like(delta) + qk, result)
    tl.store(out + row * out_stride, result, mask=first)
    tl.store(deltas + row * WIDTH, delta, mask=recorded)
    return s


@triton.jit(do_not_specialize=["rows", "layer", "window"])
def core_kernel(
    rows_of, run, out, out_stride, rows, layer, window,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """GROUPS x COLUMNS columns of a value head through all rows, COLUMNS of them a warp.

    Tensors are [k, group, column]: eight k and eight columns (two a thread) in a warp for a head of 128.
    """
    release_next()
    K: tl.constexpr = SIZE // PARTS
    part, head = tl.program_id(0), tl.program_id(1)
    k_of = tl.arange(0, K)[:, None, None]
    column = (part * GROUPS + tl.arange(0, GROUPS)[None, :, None]) * COLUMNS
    column = column + tl.arange(0, COLUMNS)[None, None, :] + k_of * 0
    first = (k_of + column * 0) == 0
    place = k_of * SIZE + column
    # Known to be of 8 bytes only: then a thread takes two columns, and sums over k need three exchanges in a warp.
    state = tl.multiple_of(tl.load(run + WORD_RECURRENT).to(tl.pointer_type(tl.float32)), 8)
    state += (layer.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    after = tl.multiple_of(tl.load(run + WORD_RECURRENT_NEXT).to(tl.pointer_type(tl.float32)), 8)
    after += (layer.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    s = _load_parts(state + place, K * SIZE)
    advance = tl.load(run + WORD_ADVANCE)
    deltas = floats_at(run, WORD_DELTA_RECORD)
    deltas += (layer.to(tl.int64) * window * VALUE_HEADS + head) * SIZE + column
    out += head * SIZE + column
    recorded = first & (tl.zeros_like(column) + advance.to(tl.int32) == 0)
    await_inputs()  # the state is of an earlier run: nothing else in this one writes it
    a = _row(rows_of, 0, rows, head, column, KEY_HEADS, VALUE_HEADS, SIZE)
    if ONE:
        s = _through(a, s, 0, out, out_stride, deltas, VALUE_HEADS * SIZE, first, recorded)
    else:
        # Two rows are on their way while one is computed.
        b = _row(rows_of, 1, rows, head, column, KEY_HEADS, VALUE_HEADS, SIZE)
        for row in range(0, rows, 3):
            c = _row(rows_of, row + 2, rows, head, column, KEY_HEADS, VALUE_HEADS, SIZE)
            s = _through(a, s, row, out, out_stride, deltas, VALUE_HEADS * SIZE, first, recorded)
            if row + 1 < rows:
                a = _row(rows_of, row + 3, rows, head, column, KEY_HEADS, VALUE_HEADS, SIZE)
                s = _through(
                    b, s, row + 1, out, out_stride, deltas, VALUE_HEADS * SIZE, first, recorded
                )
            if row + 2 < rows:
                b = _row(rows_of, row + 4, rows, head, column, KEY_HEADS, VALUE_HEADS, SIZE)
                s = _through(
                    c, s, row + 2, out, out_stride, deltas, VALUE_HEADS * SIZE, first, recorded
                )
    if advance != 0:
        _store_parts(after + place, K * SIZE, s)


@triton.jit(do_not_specialize=["rows", "layer"])
def finish_kernel(
    source, source_stride, gate, gate_stride, head_norm, out, out_stride, q8, q8_stride, run, x, x_stride, rows, layer,
    eps, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, MOVED: tl.constexpr,
    QUANTISED: tl.constexpr,
):  # fmt: skip
    """One row of a value head. Those of row 0 also move MOVED channels of the convolution's state each."""
    release_next()
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    head, row = tl.program_id(0), tl.program_id(1)
    at = head * SIZE + tl.arange(0, SIZE)
    weight = tl.load(head_norm + tl.arange(0, SIZE))
    moves = (row == 0) & (tl.load(run + WORD_ADVANCE) != 0)
    channel = head * MOVED + tl.arange(0, MOVED)
    moved = channel < tl.where(moves, CHANNELS, 0)
    history = floats_at(run, WORD_CONV) + layer.to(tl.int64) * 3 * CHANNELS
    after = floats_at(run, WORD_CONV_NEXT) + layer.to(tl.int64) * 3 * CHANNELS
    await_inputs()
    # It becomes the last three inputs, the oldest first.
    x0 = _input_row(history, x, x_stride, rows - 3, CHANNELS)
    x1 = _input_row(history, x, x_stride, rows - 2, CHANNELS)
    x2 = _input_row(history, x, x_stride, rows - 1, CHANNELS)
    kept0 = tl.load(x0 + channel, mask=moved)
    kept1 = tl.load(x1 + channel, mask=moved)
    kept2 = tl.load(x2 + channel, mask=moved)
    y = tl.load(source + row * source_stride + at)
    g = tl.load(gate + row * gate_stride + at)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(y * y, 0) / SIZE + eps))
    y = y * scale * weight * silu(g)
    tl.store(out + row * out_stride + at, y)
    if QUANTISED:
        BLOCKS: tl.constexpr = SIZE // 32
        store_int8_row(q8 + row * q8_stride, y, head * BLOCKS, VALUE_HEADS * SIZE, BLOCKS)
    if moves:
        tl.debug_barrier()  # every thread of the program has read what is overwritten
        tl.store(after + channel, kept0, mask=moved)
        tl.store(after + CHANNELS + channel, kept1, mask=moved)
        tl.store(after + 2 * CHANNELS + channel, kept2, mask=moved)


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
    heads, size = shape.value_heads, shape.head_size
    if not _fits(recorder, net, out):
        conv(recorder, x, net.conv_weight, shape, net.layer, params, inputs.qkv)
        gated_delta(recorder, inputs, shape, net.layer, params, unnormed, net.eps)
        gated_norm(recorder, unnormed, gate, net.head_norm, out, heads=heads, eps=net.eps)
        return
    rows_of = recorder.scratch(
        "delta rows", EXACT_ROWS * (shape.channels + 2 * heads + shape.key_heads)
    )
    numbers = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": heads, "SIZE": size}
    recorder.launch(
        prepare_kernel, (shape.key_heads + heads, recorder.rows),
        *pair(x), *pair(net.conv_weight), *pair(inputs.alpha), *pair(inputs.beta), inputs.decay_rate.array,
        inputs.time_bias.array, params.array, rows_of, net.layer, shape.window, net.eps, size**-0.5,
        num_warps=1, overlap=True, **numbers, **EXACT,
    )  # fmt: skip
    warps, one = min(size // COLUMNS.value, WARPS), recorder.rows == 1
    room = {"maxnreg": ONE_REGISTERS} if one and not recorder.owner.interpreted else {}
    recorder.launch(
        core_kernel, (size // (warps * COLUMNS.value), heads),
        rows_of, params.array, *pair(unnormed), recorder.rows, net.layer, shape.window,
        GROUPS=warps, ONE=one, num_warps=warps, overlap=True, **numbers, **room, **EXACT,
    )  # fmt: skip
    recorder.launch(
        finish_kernel, (heads, recorder.rows),
        *pair(unnormed), *pair(gate), net.head_norm.array, *pair(out.f32), *q8_args(out), params.array, *pair(x),
        recorder.rows, net.layer, net.eps, MOVED=power_of_two(-(-shape.channels // heads)),
        QUANTISED=out.q8 is not None, num_warps=1, overlap=True, **numbers, **EXACT,
    )  # fmt: skip


def pair(buffer: Buffer) -> tuple[Any, int]:
    """The array and its row stride, as kernels take them."""
    return buffer.array, stride_of(buffer.array)
