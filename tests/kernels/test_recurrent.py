"""conv and gated_delta: advance, record and commit. Tolerance: 3e-6 (conv), 2e-5 (delta rule) of the largest value."""

import numpy as np
import pytest
from kernel_machine import assert_close, machine, same_bits

from sparkinfer.kernels.conv import commit_conv, conv
from sparkinfer.kernels.conv.reference import conv as conv_reference
from sparkinfer.kernels.gated_delta import DeltaInputs, commit_delta, gated_delta
from sparkinfer.kernels.gated_delta.reference import gated_delta as delta_reference
from sparkinfer.kernels.shapes import RecurrentShape
from sparkinfer.state.recurrent import RecurrentState

WINDOW, LAYERS, LAYER, EPS = 16, 3, 1, 1e-6
ROWS = (1, 2, 3, 4, 5, 16)
RECORDS = ("conv_record", "key_record", "delta_record", "decay_record")


def shape_of(channels=0, taps=4, key_heads=2, value_heads=4, size=16):
    channels = channels or (2 * key_heads + value_heads) * size
    return RecurrentShape(LAYERS, channels, taps, key_heads, value_heads, size, WINDOW)


def state_of(shape, seed=0):
    """Random live state, NaN records."""
    state, rng = RecurrentState(shape), np.random.default_rng(seed)
    state.conv[:] = rng.standard_normal(state.conv.shape)
    state.delta[:] = 0.3 * rng.standard_normal(state.delta.shape)
    for name in RECORDS:
        getattr(state, name)[:] = np.nan
    return state


def params_of(bench, state, **words):
    return bench.params(
        conv=state.conv.ctypes.data, recurrent=state.delta.ctypes.data,
        conv_record=state.conv_record.ctypes.data, key_record=state.key_record.ctypes.data,
        delta_record=state.delta_record.ctypes.data, decay_record=state.decay_record.ctypes.data,
        **words,
    )  # fmt: skip


def run_conv(shape, state, x, weight, advance, threads=1):
    bench = machine(threads=threads)
    params = params_of(bench, state, advance=int(advance))
    source, taps = bench.filled(x), bench.filled(weight)
    out = bench.blank(*x.shape)
    bench.run(len(x), lambda r: conv(r, source, taps, shape, LAYER, params, out))
    return out.array


def commit(shape, state, rows, threads=1):
    bench = machine(threads=threads)
    params = params_of(bench, state, commit_rows=rows)

    def record(recorder):
        commit_conv(recorder, shape, params)
        commit_delta(recorder, shape, params)

    bench.run(1, record)


@pytest.mark.parametrize(("channels", "taps"), [(48, 4), (528, 4), (1040, 2), (64, 7)])
def test_conv(channels, taps):
    shape = shape_of(channels, taps)
    rng = np.random.default_rng(taps)
    x = rng.standard_normal((17, channels)).astype(np.float32)
    weight = rng.standard_normal((taps, channels)).astype(np.float32)
    for rows in (*ROWS, 17):
        state = state_of(shape)
        wanted, after = conv_reference(x[:rows], weight, state.conv[LAYER])
        got = run_conv(shape, state, x[:rows], weight, True)
        size = np.abs(weight).sum(0) * np.abs(x).max()
        assert_close(got, wanted, size, 3e-6)
        same_bits(state.conv[LAYER], after)
        same_bits(state.conv[[0, 2]], state_of(shape).conv[[0, 2]])
        single = state_of(shape)
        alone = [run_conv(shape, single, x[r : r + 1], weight, True) for r in range(rows)]
        same_bits(got, np.concatenate(alone))
        same_bits(state.conv, single.conv)


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


def run_delta(shape, state, inputs, advance, threads=1):
    bench, rows = machine(threads=threads), len(inputs[0])
    params = params_of(bench, state, advance=int(advance))
    buffers = DeltaInputs(*[bench.filled(x) for x in inputs])
    out = bench.blank(rows, shape.value_heads * shape.head_size)
    bench.run(rows, lambda r: gated_delta(r, buffers, shape, LAYER, params, out, EPS))
    return out.array


def rows_of(inputs, part):
    return (*[x[part] for x in inputs[:3]], *inputs[3:])


def plain(shape, delta):
    """[heads, n (k), n (v)] of the state's slices of 16 columns."""
    n = shape.head_size
    return delta.transpose(0, 2, 1, 3).reshape(shape.value_heads, n, n)


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "size"), [(2, 4, 16), (1, 3, 32), (2, 2, 128), (4, 8, 64)]
)
def test_gated_delta(key_heads, value_heads, size):
    shape = shape_of(0, 4, key_heads, value_heads, size)
    inputs = delta_inputs(shape, 17)
    for rows in (*ROWS, 17):
        part, n = rows_of(inputs, slice(0, rows)), key_heads * size
        state = state_of(shape)
        qkv = part[0]
        wanted, after = delta_reference(
            qkv[:, :n].reshape(rows, key_heads, size), qkv[:, n : 2 * n].reshape(rows, key_heads, size),
            qkv[:, 2 * n :].reshape(rows, value_heads, size), part[1], part[2], part[3][0], part[4][0],
            plain(shape, state.delta[LAYER]), EPS,
        )  # fmt: skip
        got = run_delta(shape, state, part, True)
        assert_close(got, wanted.reshape(rows, -1), np.abs(wanted).max(), 2e-5)
        assert_close(plain(shape, state.delta[LAYER]), after, np.abs(after).max(), 2e-5)
        same_bits(state.delta[[0, 2]], state_of(shape).delta[[0, 2]])
        single = state_of(shape)
        alone = [
            run_delta(shape, single, rows_of(inputs, slice(r, r + 1)), True) for r in range(rows)
        ]
        same_bits(got, np.concatenate(alone))
        same_bits(state.delta, single.delta)


def test_the_decay_at_its_ends():
    """softplus of large and small sums, and a gate that is shut: no overflow, no NaN."""
    shape = shape_of()
    qkv, alpha, beta, rate, bias = delta_inputs(shape, 3)
    alpha[:] = [[-90, 90, 29.9, 30.1]] * 3
    beta[:] = [[-200, 200, 0, -88]] * 3
    state, bias = state_of(shape), np.zeros_like(bias)
    got = run_delta(shape, state, (qkv, alpha, beta, rate, bias), True)
    assert np.isfinite(got).all() and np.isfinite(state.delta).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
def test_a_recorded_window_leaves_the_state_and_commits_with_the_bits_of_single_steps(
    rows, threads
):
    shape = shape_of(key_heads=2, value_heads=4, size=32)
    inputs = delta_inputs(shape, rows)
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((shape.taps, shape.channels)).astype(np.float32)
    window = state_of(shape)
    outs = run_conv(shape, window, inputs[0], weight, False, threads)
    deltas = run_delta(shape, window, inputs, False, threads)
    before = state_of(shape)
    same_bits(window.conv, before.conv)
    same_bits(window.delta, before.delta)
    single = state_of(shape)
    kept = [single.copy()]
    for r in range(rows):
        same_bits(run_conv(shape, single, inputs[0][r : r + 1], weight, True), outs[r : r + 1])
        one = rows_of(inputs, slice(r, r + 1))
        same_bits(run_delta(shape, single, one, True), deltas[r : r + 1])
        kept.append(single.copy())
    others = [i for i in range(LAYERS) if i != LAYER]
    for name in RECORDS:  # layers that recorded nothing commit zeros
        record = getattr(window, name)
        record[others] = 0
        assert not np.isnan(record[LAYER, :rows]).any(), name
        assert np.isnan(record[LAYER, rows:]).all(), name
    for count in range(rows + 1):
        window.put(before.copy())
        commit(shape, window, count, threads)
        same_bits(window.conv[LAYER], kept[count][0][LAYER], f"commit({count})")
        same_bits(window.delta[LAYER], kept[count][1][LAYER], f"commit({count})")
