"""rms_norm, gated_norm and copy_rows. Tolerance: 1e-6 of the value (3e-6 with the gate's exponential)."""

import numpy as np
import pytest
from kernel_machine import assert_close, assert_quantised, codes_of, machine, random_rows, same_bits

from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.gated_norm import gated_norm
from sparkinfer.kernels.gated_norm.reference import gated_norm as gated_reference
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.rms_norm.reference import rms_norm as reference

ROWS = (1, 2, 8, 9, 16, 17, 64)


def run_norm(bench, x, weight, eps, quantised, private):
    rows, width = x.shape
    out = bench.blank_activation(rows, width, quantised=quantised, private=private)
    source, scale, copy = bench.filled(x), bench.filled(weight), bench.blank(rows, width)

    def record(recorder):
        rms_norm(recorder, source, scale, out, eps=eps)
        copy_rows(recorder, source, copy)  # a prologue needs a phase

    bench.run(rows, record)
    same_bits(copy.array, x)
    return out


@pytest.mark.parametrize("width", [32, 96, 576])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(width, eps):
    bench, weight = machine(), random_rows(1, width, seed=1)
    x = random_rows(64, width)
    alone = [run_norm(bench, x[r : r + 1], weight, eps, False, False).f32.array for r in range(64)]
    for rows in ROWS:
        for private in (False, True):
            out = run_norm(bench, x[:rows], weight, eps, True, private)
            wanted = reference(x[:rows], weight[0], eps)
            assert_close(out.f32.array, wanted, np.abs(wanted), 1e-6)
            same_bits(out.f32.array, np.concatenate(alone[:rows]))
            assert_quantised(out, out.f32.array)


def test_rms_norm_of_a_width_without_int8_blocks_and_of_zeros():
    bench = machine()
    x = random_rows(3, 48)
    x[1] = 0
    weight = random_rows(1, 48, seed=1)
    out = run_norm(bench, x, weight, 1e-6, False, False).f32.array
    assert_close(out, reference(x, weight[0], 1e-6), np.abs(out), 1e-6)
    assert not out[1].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 31, 40])
def test_a_value_that_is_no_number_reaches_the_int8_form(value, place):
    """A NaN must not become a finite code: the scale of its block says that something is wrong."""
    bench = machine()
    x = random_rows(2, 64, seed=3)
    x[1, place] = value
    gate = np.full((2, 64), 20, np.float32)  # silu(20) = 20: the norm of each head of 32 values
    out = bench.blank_activation(2, 64, quantised=True)
    ones = bench.filled(np.ones((1, 32), np.float32))
    source, gates = bench.filled(x), bench.filled(gate)
    bench.run(2, lambda r: gated_norm(r, source, gates, ones, out, heads=2, eps=1e-6))
    values, scales = codes_of(out, 2, 64)
    block = slice(place // 32 * 32, place // 32 * 32 + 32)
    assert np.isfinite(values[0]).all()
    assert np.isnan(values[1, block] * scales[1, block]).any()


def run_gated(bench, x, gate, weight, heads, quantised, private):
    rows, width = x.shape
    out = bench.blank_activation(rows, width, quantised=quantised, private=private)
    buffers = [bench.filled(v) for v in (x, gate, weight)]
    copy = bench.blank(rows, width)

    def record(recorder):
        gated_norm(recorder, *buffers, out, heads=heads, eps=1e-6)
        copy_rows(recorder, buffers[0], copy)

    bench.run(rows, record)
    return out


@pytest.mark.parametrize(("heads", "size"), [(4, 16), (2, 128), (3, 32)])
def test_gated_norm(heads, size):
    bench, width = machine(), heads * size
    x, gate = random_rows(17, width), random_rows(17, width, seed=1)
    weight = random_rows(1, size, seed=2)
    quantised = width % 32 == 0
    alone = [
        run_gated(bench, x[r : r + 1], gate[r : r + 1], weight, heads, False, False).f32.array
        for r in range(17)
    ]
    for rows in (1, 2, 8, 9, 17):
        wanted = gated_reference(
            x[:rows].reshape(rows, heads, size), gate[:rows].reshape(rows, heads, size), weight[0],
            1e-6,
        ).reshape(rows, width)  # fmt: skip
        for private in (False, True):
            out = run_gated(bench, x[:rows], gate[:rows], weight, heads, quantised, private)
            assert_close(out.f32.array, wanted, np.abs(wanted), 3e-6)
            same_bits(out.f32.array, np.concatenate(alone[:rows]))
            if quantised:
                assert_quantised(out, out.f32.array)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_copy_rows(rows):
    bench, x = machine(), random_rows(rows, 80)
    source, out = bench.filled(x), bench.blank(rows, 80)
    bench.run(rows, lambda r: copy_rows(r, source, out))
    same_bits(out.array, x)


def test_a_block_of_the_smallest_numbers_becomes_zero():
    bench, weight = machine(), np.full((1, 64), 1e-38, np.float32)
    weight[0, ::2] = 0
    out = run_norm(bench, np.ones((1, 64), np.float32), weight, 1e-6, True, False)
    values, scales = codes_of(out, 1, 64)
    assert not values.any() and (scales < 1e-36).all()
