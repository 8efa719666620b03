"""Triton forms of conv, gated_delta, gated_norm.

Tolerance: 3e-6 (conv, norm), 2e-5 (delta rule) of the largest value.
"""

import gpu_machine as gpu
import gpu_state
import numpy as np
import pytest
from gpu_state import RECORDS, State
from kernel_machine import assert_close, same_bits

from sparkinfer.errors import ShapeError
from sparkinfer.kernels.conv import commit_conv, conv
from sparkinfer.kernels.conv.reference import conv as conv_reference
from sparkinfer.kernels.gated_delta import DeltaInputs, commit_delta, gated_delta
from sparkinfer.kernels.gated_delta.reference import gated_delta as delta_reference
from sparkinfer.kernels.gated_norm import gated_norm
from sparkinfer.kernels.gated_norm.reference import gated_norm as norm_reference
from sparkinfer.kernels.shapes import RecurrentShape

WINDOW, LAYERS, LAYER, EPS = 16, 3, 1, 1e-6
ROWS = (1, 2, 5, 16)


def shape_of(channels=0, taps=4, key_heads=2, value_heads=4, size=16):
    channels = channels or (2 * key_heads + value_heads) * size
    return RecurrentShape(LAYERS, channels, taps, key_heads, value_heads, size, WINDOW)


def run_conv(shape, state, x, weight, advance):
    params = state.params(advance=int(advance))
    source, taps, out = gpu.filled(x), gpu.filled(weight), gpu.blank(*x.shape)
    recorder = gpu_state.recorder(len(x))
    conv(recorder, source, taps, shape, LAYER, params, out)
    gpu.run(recorder)
    return gpu.host(out)


def commit(shape, state, rows):
    recorder, params = gpu_state.recorder(1), state.params(commit_rows=rows)
    commit_conv(recorder, shape, params)
    commit_delta(recorder, shape, params)
    gpu.run(recorder)


@pytest.mark.parametrize(("channels", "taps"), [(48, 4), (528, 4), (144, 2), (64, 7)])
def test_conv(channels, taps):
    shape = shape_of(channels, taps)
    rng = np.random.default_rng(taps)
    x = rng.standard_normal((19, channels)).astype(np.float32)
    weight = rng.standard_normal((taps, channels)).astype(np.float32)
    for rows in (1, 5, 19):
        state, before = State(shape), State(shape).host("conv")
        wanted, after = conv_reference(x[:rows], weight, before[LAYER])
        got = run_conv(shape, state, x[:rows], weight, True)
        assert_close(got, wanted, np.abs(weight).sum(0) * np.abs(x).max(), 3e-6)
        same_bits(state.host("conv")[LAYER], after)
        same_bits(state.host("conv")[[0, 2]], before[[0, 2]])
        single = State(shape)
        alone = [run_conv(shape, single, x[r : r + 1], weight, True) for r in range(rows)]
        same_bits(got, np.concatenate(alone))
        same_bits(state.host("conv"), single.host("conv"))


def delta_inputs(shape, rows, seed=5):
    rng = np.random.default_rng(seed)
    heads = shape.value_heads
    return (
        rng.standard_normal((rows, shape.channels)).astype(np.float32),
        rng.uniform(-3, 3, (rows, heads)).astype(np.float32),
        rng.uniform(-3, 3, (rows, heads)).astype(np.float32),
        -rng.uniform(0.1, 8, (1, heads)).astype(np.float32),
        rng.uniform(-2, 2, (1, heads)).astype(np.float32),
    )


def run_delta(shape, state, inputs, advance):
    rows, params = len(inputs[0]), state.params(advance=int(advance))
    buffers = DeltaInputs(*[gpu.filled(x) for x in inputs])
    out = gpu.blank(rows, shape.value_heads * shape.head_size)
    recorder = gpu_state.recorder(rows)
    gated_delta(recorder, buffers, shape, LAYER, params, out, EPS)
    gpu.run(recorder)
    return gpu.host(out)


def rows_of(inputs, part):
    return (*[x[part] for x in inputs[:3]], *inputs[3:])


def delta_wanted(shape, inputs, before):
    rows, size = len(inputs[0]), shape.head_size
    n, heads = shape.key_heads * size, (rows, shape.key_heads, size)
    qkv = inputs[0]
    return delta_reference(
        qkv[:, :n].reshape(heads), qkv[:, n : 2 * n].reshape(heads),
        qkv[:, 2 * n :].reshape(rows, shape.value_heads, size), inputs[1], inputs[2], inputs[3][0], inputs[4][0],
        before, EPS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "size", "rows"),
    [(2, 4, 16, ROWS), (1, 3, 32, ROWS), (2, 2, 128, (1, 3)), (4, 8, 64, (4,))],
)
def test_gated_delta(key_heads, value_heads, size, rows):
    shape = shape_of(0, 4, key_heads, value_heads, size)
    inputs = delta_inputs(shape, 17)
    for count in rows:
        part = rows_of(inputs, slice(0, count))
        state, before = State(shape), State(shape).host("delta")
        wanted, after = delta_wanted(shape, part, before[LAYER])
        got = run_delta(shape, state, part, True)
        assert_close(got, wanted.reshape(count, -1), np.abs(wanted).max(), 2e-5)
        assert_close(state.host("delta")[LAYER], after, np.abs(after).max(), 2e-5)
        same_bits(state.host("delta")[[0, 2]], before[[0, 2]])
        single = State(shape)
        alone = [
            run_delta(shape, single, rows_of(inputs, slice(r, r + 1)), True) for r in range(count)
        ]
        same_bits(got, np.concatenate(alone))
        same_bits(state.host("delta"), single.host("delta"))


MANY = 1e-4  # many rows: products of numbers in three bfloat16 parts


@pytest.mark.parametrize("rows", [17, 64, 130])
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "size"), [(1, 2, 16), (1, 1, 64), (1, 1, 128)]
)
def test_gated_delta_of_many_rows(rows, key_heads, value_heads, size):
    shape = shape_of(0, 4, key_heads, value_heads, size)
    inputs = delta_inputs(shape, rows)
    state = State(shape)
    wanted, after = delta_wanted(shape, inputs, state.host("delta")[LAYER])
    got = run_delta(shape, state, inputs, True)
    assert_close(got, wanted.reshape(rows, -1), np.abs(wanted).max(), MANY)
    assert_close(state.host("delta")[LAYER], after, np.abs(after).max(), MANY)


@pytest.mark.parametrize("kind", ["one key", "two keys", "opposite keys"])
def test_many_rows_of_the_same_key_without_decay(kind):
    """The chunk's triangular system is at its worst: nothing fades, every key answers every other."""
    shape, rows = shape_of(0, 4, 1, 1, 64), 130
    qkv, alpha, beta, rate, bias = delta_inputs(shape, rows)
    keys = {"one key": [1, 1], "two keys": [1, 1], "opposite keys": [1, -1]}[kind]
    qkv[:, 64:128] = np.array(keys, np.float32)[np.arange(rows) % 2, None] * qkv[:1, 64:128]
    if kind == "two keys":
        qkv[::2, 64:128] += 0.1 * qkv[1, :64]
    alpha[:], beta[:], rate[:] = -90, 90, -1
    state = State(shape)
    wanted, after = delta_wanted(shape, (qkv, alpha, beta, rate, bias), state.host("delta")[LAYER])
    got = run_delta(shape, state, (qkv, alpha, beta, rate, bias), True)
    assert_close(got, wanted.reshape(rows, -1), np.abs(wanted).max(), 10 * MANY)
    assert_close(state.host("delta")[LAYER], after, np.abs(after).max(), 10 * MANY)


@pytest.mark.parametrize("rows", [3, 20])
def test_the_decay_at_its_ends(rows):
    """softplus of large and small sums, and a gate that is shut: no overflow, no NaN."""
    shape = shape_of()
    qkv, alpha, beta, rate, bias = delta_inputs(shape, rows)
    alpha[:] = [[-90, 90, 29.9, 30.1]] * rows
    beta[:] = [[-200, 200, 0, -88]] * rows
    state, inputs = State(shape), (qkv, alpha, beta, rate, np.zeros_like(bias))
    with np.errstate(over="ignore"):
        wanted, after = delta_wanted(shape, inputs, state.host("delta")[LAYER])
    got = run_delta(shape, state, inputs, True)
    tolerance = 2e-5 if rows <= 16 else MANY
    assert_close(got, wanted.reshape(rows, -1), np.abs(wanted).max(), tolerance)
    assert_close(state.host("delta")[LAYER], after, np.abs(after).max(), tolerance)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_recorded_window_leaves_the_state_and_commits_with_the_bits_of_single_steps(rows):
    shape = shape_of(key_heads=2, value_heads=4, size=32)
    inputs = delta_inputs(shape, rows)
    weight = (
        np.random.default_rng(2).standard_normal((shape.taps, shape.channels)).astype(np.float32)
    )
    window, single = State(shape), State(shape)
    outs = run_conv(shape, window, inputs[0], weight, False)
    deltas = run_delta(shape, window, inputs, False)
    kept = [(single.host("conv"), single.host("delta"))]
    same_bits(window.host("conv"), kept[0][0])
    same_bits(window.host("delta"), kept[0][1])
    for r in range(rows):
        same_bits(run_conv(shape, single, inputs[0][r : r + 1], weight, True), outs[r : r + 1])
        one = rows_of(inputs, slice(r, r + 1))
        same_bits(run_delta(shape, single, one, True), deltas[r : r + 1])
        kept.append((single.host("conv"), single.host("delta")))
    others = [i for i in range(LAYERS) if i != LAYER]
    for name in RECORDS:  # layers that recorded nothing commit zeros
        record = getattr(window, name)
        record[others] = 0
        found = window.host(name)[LAYER]
        assert not np.isnan(found[:rows]).any(), name
        assert np.isnan(found[rows:]).all(), name
    before = window.conv.clone(), window.delta.clone()
    for count in {0, 1, rows // 2, rows}:
        window.conv.copy_(before[0])
        window.delta.copy_(before[1])
        commit(shape, window, count)
        same_bits(window.host("conv")[LAYER], kept[count][0][LAYER], f"commit({count})")
        same_bits(window.host("delta")[LAYER], kept[count][1][LAYER], f"commit({count})")


@pytest.mark.parametrize(("heads", "size"), [(2, 16), (3, 32), (2, 128), (6, 16)])
@pytest.mark.parametrize("quantised", [False, True])
def test_gated_norm(heads, size, quantised):
    rng = np.random.default_rng(size)
    for rows in (1, 3, 17):
        x, gate = rng.standard_normal((2, rows, heads, size)).astype(np.float32)
        weight = rng.standard_normal((1, size)).astype(np.float32)
        gate[0, 0, :2] = -100, 100

        def run(part, x=x, gate=gate, weight=weight):
            n = len(x[part])
            out = gpu.blank_activation(n, heads * size, quantised=quantised)
            recorder = gpu_state.recorder(n)
            buffers = [gpu.filled(b.reshape(n, -1)) for b in (x[part], gate[part])]
            gated_norm(recorder, *buffers, gpu.filled(weight), out, heads=heads, eps=EPS)
            gpu.run(recorder)
            return gpu.host(out.f32), out

        got, out = run(slice(0, rows))
        wanted = norm_reference(x, gate, weight[0], EPS).reshape(rows, -1)
        assert_close(got, wanted, np.abs(wanted).max(), 3e-6)
        if quantised:
            gpu_state.assert_quantised(out, got)
        for r in {0, rows - 1}:
            same_bits(run(slice(r, r + 1))[0], got[r : r + 1])


def test_what_the_gpu_forms_do_not_take():
    shape = shape_of(size=48)
    with pytest.raises(ShapeError, match="power of two"):
        commit_delta(gpu_state.recorder(1), shape, State(shape).params())
