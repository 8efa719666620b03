"""CPU form of `gated_delta`: unit keys and queries first, then a chunk per value head and 16 columns of its state."""

import math

import numpy as np

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.compiled import inner, job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import (
    fma,
    load,
    load_f32,
    load_i64,
    splat,
    sqrt_scalar,
    store,
    store_f32,
    sum_lanes,
)
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.rms_norm.cpu_impl import float_bits
from sparkinfer.kernels.run_params import (
    ADVANCE,
    COMMIT_ROWS,
    DECAY_RECORD,
    DELTA_RECORD,
    KEY_RECORD,
    RECURRENT,
)
from sparkinfer.kernels.shapes import RecurrentShape

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@inner
def _unit(source: int, target: int, size: int, eps: float, factor: float) -> None:
    total = splat(_ZERO)
    for i in range(0, 4 * size, 64):
        value = load(source + i)
        total = fma(value, value, total)
    scale = splat(factor / sqrt_scalar(sum_lanes(total) + eps))
    for i in range(0, 4 * size, 64):
        store(target + i, load(source + i) * scale)


@inner
def _decay(alpha: float, bias: float, rate: float) -> float:
    """exp(rate * softplus(alpha + bias)), in float64 and rounded once."""
    x = np.float64(alpha + bias)
    soft = x if x > 30.0 else math.log1p(math.exp(x))
    return np.float32(math.exp(np.float64(rate) * soft))


@inner
def _prepare_row(args: int, row: int) -> None:
    """Unit q and k of every key head, decay and update gate of every value head."""
    key_heads, value_heads, size = load_i64(args + 136), load_i64(args + 144), load_i64(args + 152)
    eps, factor = load_f32(args + 160), load_f32(args + 168)
    source = load_i64(args) + row * load_i64(args + 8)
    unit = load_i64(args + 64) + row * load_i64(args + 72)
    for head in range(2 * key_heads):
        _unit(
            source + head * size * 4,
            unit + head * size * 4,
            size,
            eps,
            factor if head < key_heads else _ONE,
        )
    alpha = load_i64(args + 16) + row * load_i64(args + 24)
    beta = load_i64(args + 32) + row * load_i64(args + 40)
    gates = load_i64(args + 80) + row * load_i64(args + 88)
    for head in range(value_heads):
        rate, bias = (
            load_f32(load_i64(args + 48) + 4 * head),
            load_f32(load_i64(args + 56) + 4 * head),
        )
        store_f32(gates + 4 * head, _decay(load_f32(alpha + 4 * head), bias, rate))
        gate = 1.0 / (1.0 + math.exp(-np.float64(load_f32(beta + 4 * head))))
        store_f32(gates + 4 * (value_heads + head), np.float32(gate))


@job
def prepare_job(args: int, chunk: int, thread: int) -> None:
    _prepare_row(args, chunk)


@job
def prepare_all_job(args: int, chunk: int, thread: int) -> None:
    for row in range(load_i64(args + 128)):
        _prepare_row(args, row)


@inner
def _update(
    state: int, target: int, size: int, decay: float, key: int, query: int, value: int, gate: float, delta: int,
    out: int,
) -> None:  # fmt: skip
    """One row on 16 columns: read the state at `state`, write it at `target`, the 16 deltas and outputs beside."""
    d = splat(decay)
    a0 = splat(_ZERO)
    a1 = splat(_ZERO)
    a2 = splat(_ZERO)
    a3 = splat(_ZERO)
    for k in range(0, size, 4):
        s = state + 64 * k
        a0 = fma(splat(load_f32(key + 4 * k)), d * load(s), a0)
        a1 = fma(splat(load_f32(key + 4 * k + 4)), d * load(s + 64), a1)
        a2 = fma(splat(load_f32(key + 4 * k + 8)), d * load(s + 128), a2)
        a3 = fma(splat(load_f32(key + 4 * k + 12)), d * load(s + 192), a3)
    change = splat(gate) * (load(value) - ((a0 + a1) + (a2 + a3)))
    store(delta, change)
    a0 = splat(_ZERO)
    a1 = splat(_ZERO)
    a2 = splat(_ZERO)
    a3 = splat(_ZERO)
    for k in range(0, size, 4):
        s = state + 64 * k
        t = target + 64 * k
        s0 = fma(splat(load_f32(key + 4 * k)), change, d * load(s))
        s1 = fma(splat(load_f32(key + 4 * k + 4)), change, d * load(s + 64))
        s2 = fma(splat(load_f32(key + 4 * k + 8)), change, d * load(s + 128))
        s3 = fma(splat(load_f32(key + 4 * k + 12)), change, d * load(s + 192))
        store(t, s0)
        store(t + 64, s1)
        store(t + 128, s2)
        store(t + 192, s3)
        a0 = fma(splat(load_f32(query + 4 * k)), s0, a0)
        a1 = fma(splat(load_f32(query + 4 * k + 4)), s1, a1)
        a2 = fma(splat(load_f32(query + 4 * k + 8)), s2, a2)
        a3 = fma(splat(load_f32(query + 4 * k + 12)), s3, a3)
    store(out, (a0 + a1) + (a2 + a3))


@job
def delta_job(args: int, chunk: int, thread: int) -> None:
    params, layer, window, rows = (
        load_i64(args + 104),
        load_i64(args + 112),
        load_i64(args + 120),
        load_i64(args + 128),
    )
    key_heads, value_heads, size = load_i64(args + 136), load_i64(args + 144), load_i64(args + 152)
    slices = size // 16
    head, part = chunk // slices, chunk % slices
    key_head = head % key_heads
    live = load_i64(params + RECURRENT) + ((layer * value_heads + head) * slices + part) * size * 64
    advance = load_i64(params + ADVANCE)
    target = live if advance else load_i64(args + 176) + thread * size * 64
    column = (head * size + part * 16) * 4
    qkv, stride = load_i64(args), load_i64(args + 8)
    keys = load_i64(params + KEY_RECORD) + layer * window * key_heads * size * 4
    deltas = load_i64(params + DELTA_RECORD) + layer * window * value_heads * size * 4
    decays = load_i64(params + DECAY_RECORD) + layer * window * value_heads * 4
    spare = load_i64(args + 184) + thread * 64
    state = live
    for row in range(rows):
        unit = load_i64(args + 64) + row * load_i64(args + 72)
        query, key = unit + key_head * size * 4, unit + (key_heads + key_head) * size * 4
        value = qkv + row * stride + 2 * key_heads * size * 4 + column
        gates = load_i64(args + 80) + row * load_i64(args + 88)
        decay, gate = load_f32(gates + 4 * head), load_f32(gates + 4 * (value_heads + head))
        delta = spare if advance else deltas + row * value_heads * size * 4 + column
        out = load_i64(args + 96) + row * load_i64(args + 192) + column
        _update(state, target, size, decay, key, query, value, gate, delta, out)
        state = target
        if not advance and part == 0:
            store_f32(decays + (row * value_heads + head) * 4, decay)
            if head < key_heads:
                for i in range(0, size * 4, 64):
                    store(keys + (row * key_heads + head) * size * 4 + i, load(key + i))


@job
def commit_delta_job(args: int, chunk: int, thread: int) -> None:
    params, window = load_i64(args), load_i64(args + 8)
    key_heads, value_heads, size = load_i64(args + 16), load_i64(args + 24), load_i64(args + 32)
    slices = size // 16
    part, rest = chunk % slices, chunk // slices
    head, layer = rest % value_heads, rest // value_heads
    state = load_i64(params + RECURRENT) + chunk * size * 64
    keys = (
        load_i64(params + KEY_RECORD) + (layer * window * key_heads + head % key_heads) * size * 4
    )
    deltas = (
        load_i64(params + DELTA_RECORD)
        + (layer * window * value_heads + head) * size * 4
        + part * 64
    )
    decays = load_i64(params + DECAY_RECORD) + (layer * window * value_heads + head) * 4
    for row in range(load_i64(params + COMMIT_ROWS)):
        d = splat(load_f32(decays + row * value_heads * 4))
        change = load(deltas + row * value_heads * size * 4)
        key = keys + row * key_heads * size * 4
        for k in range(size):
            at = state + 64 * k
            store(at, fma(splat(load_f32(key + 4 * k)), change, d * load(at)))


def record(
    recorder: CpuRecorder,
    inputs: DeltaInputs,
    shape: RecurrentShape,
    layer: int,
    params: Buffer,
    out: Buffer,
    eps: float,
) -> None:
    assert shape.head_size % 16 == 0, shape
    owner, rows = recorder.owner, recorder.rows
    unit_stride = 8 * shape.key_heads * shape.head_size
    gate_stride = 8 * shape.value_heads
    unit = owner.shared_scratch("delta unit", rows * unit_stride)
    gates = owner.shared_scratch("delta gates", rows * gate_stride)
    working = owner.shared_scratch("delta state", owner.threads * shape.head_size * 64)
    spare = owner.shared_scratch("delta spare", owner.threads * 64)
    args = (
        inputs.qkv.address, inputs.qkv.stride, inputs.alpha.address, inputs.alpha.stride,
        inputs.beta.address, inputs.beta.stride, inputs.decay_rate.address, inputs.time_bias.address,
        unit, unit_stride, gates, gate_stride, out.address, params.address, layer, shape.window, rows,
        shape.key_heads, shape.value_heads, shape.head_size,
        float_bits(eps), float_bits(shape.head_size**-0.5), working, spare, out.stride,
    )  # fmt: skip
    if recorder.prefers_prologue:
        recorder.prologue(Job(prepare_all_job, args, 1))
    else:
        recorder.phase([Job(prepare_job, args, rows)])
    recorder.phase([Job(delta_job, args, shape.value_heads * shape.head_size // 16)])


def record_commit(recorder: CpuRecorder, shape: RecurrentShape, params: Buffer) -> None:
    args = (params.address, shape.window, shape.key_heads, shape.value_heads, shape.head_size)
    chunks = shape.layers * shape.value_heads * shape.head_size // 16
    recorder.phase([Job(commit_delta_job, args, chunks)])
