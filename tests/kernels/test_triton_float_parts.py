"""Products of float weights with rows that a norm left in two float16 parts. Tolerance: 1e-6 of the sum of a
product's magnitudes, as float32 sums have.
"""

import gpu_machine as gpu
import numpy as np
import pytest
import torch
from kernel_machine import same_bits

from sparkinfer.kernels.linear import linear, pack_weight
from sparkinfer.kernels.linear import triton_wide as wide
from sparkinfer.kernels.rms_norm import rms_norm
from sparkinfer.kernels.rms_norm import triton_impl as rms

ROWS, WIDTH, EPS = 70, 256, 1e-6


@pytest.fixture(autouse=True)
def few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(rms, "ENOUGH", ROWS)
    monkeypatch.setattr(wide, "ENOUGH", ROWS)


def rows_with_one_large_column(rng):
    """As a model's rows are: what is small beside it must keep its digits."""
    x = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    x[:, 7] *= 300
    x[5] = 0
    return x


@pytest.mark.parametrize(
    ("outputs", "kind", "add"),
    [(131, "F32", False), (40, "BF16", True), (5, "F32", True), (257, "F32", False), (128, "F16", False)],
)  # fmt: skip
def test_a_router(outputs, kind, add):
    """Whole tiles of outputs, a few more, fewer than one."""
    rng = np.random.default_rng(outputs)
    values = (rng.standard_normal((outputs, WIDTH)) * 0.02).astype(np.float32)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    stored = torch.from_numpy(values).to(dtype)
    weight = pack_weight(
        gpu.backend(), kind, stored.view(torch.uint8).numpy().reshape(-1), outputs, WIDTH
    )
    before = rng.standard_normal((ROWS, weight.padded_outputs)).astype(np.float32)
    x, factor = rows_with_one_large_column(rng), rng.standard_normal((1, WIDTH)).astype(np.float32)
    results = []
    for _ in range(2):
        recorder, normed = (
            gpu.backend().recorder(ROWS),
            gpu.blank_activation(ROWS, WIDTH, quantised=False),
        )
        out = gpu.filled(before)
        rms_norm(recorder, gpu.filled(x), gpu.filled(factor), normed, eps=EPS)
        linear(recorder, normed, [weight], [out], add=add)
        assert recorder.steps[-1].kernel is wide.wide_parts_kernel
        gpu.run(recorder)
        results.append(gpu.host(out)[:, :outputs])
    rows = gpu.host(normed.f32).astype(np.float64)
    wanted = rows @ stored.double().numpy().T + add * before[:, :outputs]
    sizes = np.abs(rows) @ np.abs(stored.double().numpy()).T + add * np.abs(before[:, :outputs])
    assert (np.abs(results[0] - wanted) <= 1e-6 * sizes).all()
    same_bits(*results)


def test_rows_that_changed_after_the_norm():
    """They are read as they are."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((16, WIDTH)).astype(np.float32)
    weight = pack_weight(gpu.backend(), "F32", values.view(np.uint8).reshape(-1), 16, WIDTH)
    recorder, normed = (
        gpu.backend().recorder(ROWS),
        gpu.blank_activation(ROWS, WIDTH, quantised=False),
    )
    x, out = (
        gpu.filled(rng.standard_normal((ROWS, WIDTH)).astype(np.float32)),
        gpu.blank(ROWS, weight.padded_outputs),
    )
    rms_norm(recorder, x, gpu.filled(np.ones((1, WIDTH), np.float32)), normed, eps=EPS)
    linear(recorder, normed, [weight], [normed.f32], add=True)  # it writes where it reads
    linear(recorder, normed, [weight], [out])
    kernels = [step.kernel for step in recorder.steps]
    assert kernels[-1] is wide.wide_float_kernel
    assert wide.wide_parts_kernel in kernels
