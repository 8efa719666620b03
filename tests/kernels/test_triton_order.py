"""Rows as products for many rows take them: what norms leave. Tolerance: a float16's rounding of the largest."""

import gpu_machine as gpu
import numpy as np
import pytest
from kernel_machine import random_rows, same_bits

from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.gated_norm import gated_norm
from sparkinfer.kernels.gated_norm import triton_impl as gated
from sparkinfer.kernels.gated_norm.reference import gated_norm as gated_reference
from sparkinfer.kernels.linear.triton_order import Ordered, ordered_rows
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.rms_norm import triton_impl as rms
from sparkinfer.kernels.rms_norm.reference import rms_norm as reference

ROWS, WIDTH, EPS = 70, 512, 1e-6


@pytest.fixture(autouse=True)
def few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(rms, "ENOUGH", ROWS)
    monkeypatch.setattr(gated, "ENOUGH", ROWS)


def columns(width: int) -> np.ndarray:
    """The column that stands at each place."""
    p = np.arange(width)
    inside = ((p // 64) % 2) * 16 + ((p // 16) % 4) * 4 + ((p // 8) % 2) * 2 + p % 2
    return (p // 128) * 128 + ((p // 2) % 4) * 32 + inside


def rows_of(form: Ordered) -> np.ndarray:
    """The rows that it stands for."""
    count = form.rows * form.stride
    halves = form.halves[:count].view(form.rows, form.stride).float().cpu().numpy()
    out = np.empty_like(halves)
    out[:, columns(form.stride)] = halves
    return out * form.scales[: form.rows].cpu().numpy()[:, None]


def assert_rows(form: Ordered, wanted: np.ndarray) -> None:
    top = np.abs(wanted).max(1, keepdims=True)
    assert (np.abs(rows_of(form) - wanted) <= top * 2.0**-11).all()


def recorder() -> CudaRecorder:
    return gpu.backend().recorder(ROWS)


def test_places_are_a_permutation():
    assert sorted(columns(WIDTH)) == list(range(WIDTH))


def test_rows_that_nobody_ordered():
    x, tape = random_rows(ROWS, WIDTH), recorder()
    x[3] = 0
    form = ordered_rows(tape, gpu.filled(x).array, WIDTH, ROWS, "test")
    gpu.run(tape)
    assert_rows(form, x)


def test_a_norm_leaves_its_rows_and_has_the_bits_of_the_plain_one(monkeypatch):
    x, weight = random_rows(ROWS, WIDTH), random_rows(1, WIDTH, seed=1)
    out, tape = gpu.blank_activation(ROWS, WIDTH, quantised=True), recorder()
    rms_norm(tape, gpu.filled(x), gpu.filled(weight), out, eps=EPS)
    form = ordered_rows(tape, out.f32.array, WIDTH, ROWS, "test")
    assert len(tape.steps) == 1
    gpu.run(tape)
    assert_rows(form, reference(x, weight[0], EPS))
    monkeypatch.setattr(rms, "ENOUGH", ROWS + 1)
    plain, tape = gpu.blank_activation(ROWS, WIDTH, quantised=True), recorder()
    rms_norm(tape, gpu.filled(x), gpu.filled(weight), plain, eps=EPS)
    gpu.run(tape)
    same_bits(gpu.host(plain.f32), gpu.host(out.f32))


def test_what_wrote_the_rows_since_makes_the_other_form_stale():
    x, weight = random_rows(ROWS, WIDTH), random_rows(1, WIDTH, seed=1)
    out, tape = gpu.blank_activation(ROWS, WIDTH, quantised=True), recorder()
    rms_norm(tape, gpu.filled(x), gpu.filled(weight), out, eps=EPS)
    first = ordered_rows(tape, out.f32.array, WIDTH, ROWS, "test")
    rms_norm(tape, gpu.filled(2 * x + 1), gpu.filled(weight), out, eps=EPS)
    second = ordered_rows(tape, out.f32.array, WIDTH, ROWS, "test")
    assert first.step == 1 and second.step == 2 and len(tape.steps) == 2
    gpu.run(tape)
    assert_rows(second, reference(2 * x + 1, weight[0], EPS))


def test_a_gated_norm_leaves_only_its_rows():
    heads, size = 4, 128
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((2, ROWS, heads, size)).astype(np.float32)
    weight = rng.standard_normal((1, size)).astype(np.float32)
    out, tape = gpu.blank_activation(ROWS, heads * size, quantised=True), recorder()
    buffers = [gpu.filled(b.reshape(ROWS, -1)) for b in (x, gate)]
    gated_norm(tape, *buffers, gpu.filled(weight), out, heads=heads, eps=EPS)
    form = ordered_rows(tape, out.f32.array, heads * size, ROWS, "test")
    gpu.run(tape)
    assert_rows(form, gated_reference(x, gate, weight[0], EPS).reshape(ROWS, -1))
