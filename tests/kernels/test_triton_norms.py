"""rms_norm and quantise on the GPU's kernels. Tolerance: 1e-6 of the value."""

import numpy as np
import pytest
from gpu_machine import backend, blank_activation, filled, host, int8_blocks, run
from kernel_machine import assert_close, random_rows, same_bits

from sparkinfer.backend.cuda import q8_views
from sparkinfer.kernels.quantise import quantise
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.rms_norm.reference import rms_norm as reference


def normed(x, weight, eps, quantised):
    rows, width = x.shape
    out, recorder = blank_activation(rows, width, quantised=quantised), backend().recorder(rows)
    rms_norm(recorder, filled(x), filled(weight), out, eps=eps)
    run(recorder)
    return out


def assert_blocks(act):
    """The int8 blocks are those of the float32 rows, up to the last bit of a division at a tie."""
    codes, floats = q8_views(act.q8)
    wanted_codes, wanted_floats = int8_blocks(host(act.f32))
    got = codes.cpu().contiguous().numpy().view(np.int8).astype(int)
    assert np.abs(got - wanted_codes).max() <= 1 and (got != wanted_codes).mean() < 0.01
    n = floats.shape[1] // 2
    scales = floats.cpu().numpy()
    assert_close(scales[:, :n], wanted_floats[:, :n], np.abs(wanted_floats[:, :n]), 1e-6)
    sums = got.reshape(len(got), 2, n, 16).sum((1, 3)) * scales[:, :n]
    assert_close(scales[:, n:], sums, np.abs(sums) + 1e-20, 1e-6)


@pytest.mark.parametrize("width", [32, 96, 576])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(width, eps):
    weight, x = random_rows(1, width, seed=1), random_rows(17, width)
    out = normed(x, weight, eps, True)
    wanted = reference(x, weight[0], eps)
    assert_close(host(out.f32), wanted, np.abs(wanted), 1e-6)
    assert_blocks(out)
    for row in (0, 5, 16):
        alone = normed(x[row : row + 1], weight, eps, True)
        same_bits(host(alone.f32)[0], host(out.f32)[row])
        same_bits(host(alone.q8)[0], host(out.q8)[row])


@pytest.mark.parametrize("width", [96, 256])
def test_the_blocks_of_a_norm_are_those_of_its_rows(width):
    """It writes words of four codes, `quantise` bytes."""
    x = random_rows(3, width, scale=4.0)
    x[1, 32:64] = 0
    x[2, 5] = np.nan
    out = normed(x, random_rows(1, width, seed=1), 1e-6, True)
    again = blank_activation(3, width, quantised=True)
    backend().upload(again.f32, host(out.f32))
    recorder = backend().recorder(3)
    quantise(recorder, again)
    run(recorder)
    same_bits(host(out.q8), host(again.q8))


def test_rms_norm_of_a_width_without_int8_blocks_and_of_zeros():
    x, weight = random_rows(3, 48), random_rows(1, 48, seed=1)
    x[1] = 0
    out = host(normed(x, weight, 1e-6, False).f32)
    assert_close(out, reference(x, weight[0], 1e-6), np.abs(out), 1e-6)
    assert not out[1].any()


@pytest.mark.parametrize("width", [32, 2080])
def test_quantise(width):
    act, x, recorder = (
        blank_activation(3, width, quantised=True),
        random_rows(3, width),
        backend().recorder(3),
    )
    backend().upload(act.f32, x)
    quantise(recorder, act)
    run(recorder)
    assert_blocks(act)
    same_bits(host(act.f32), x)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 31, 40])
def test_a_value_that_is_no_number_reaches_the_scale(value, place):
    act, x, recorder = (
        blank_activation(2, 64, quantised=True),
        random_rows(2, 64),
        backend().recorder(2),
    )
    x[1, place] = value
    backend().upload(act.f32, x)
    quantise(recorder, act)
    run(recorder)
    scales = q8_views(act.q8)[1].cpu().numpy()[:, :2]
    assert np.isfinite(scales[0]).all()
    assert not np.isfinite(scales[1, place // 32])


def test_a_block_of_the_smallest_numbers_becomes_zero():
    act, recorder = blank_activation(1, 64, quantised=True), backend().recorder(1)
    x = np.full((1, 64), 1e-38, np.float32)
    x[0, 32:] = 0
    backend().upload(act.f32, x)
    quantise(recorder, act)
    run(recorder)
    codes, floats = q8_views(act.q8)
    assert not codes.cpu().numpy().any() and (floats.cpu().numpy() < 1e-36).all()
