"""Products of narrow rows read the int8 blocks that a norm has written, or make them: the same bits."""

import gpu_machine as gpu
import numpy as np
import pytest
from kernel_machine import random_blocks

from sparkinfer.kernels.gated_linear import gated_linear
from sparkinfer.kernels.linear import linear, pack_weight
from sparkinfer.kernels.rms_norm import rms_norm

WIDTH, OUTPUTS = 96, 32


def weight(name, seed):
    return pack_weight(
        gpu.backend(), name, random_blocks(name, OUTPUTS * WIDTH, seed), OUTPUTS, WIDTH
    )


@pytest.mark.parametrize(
    ("rows", "name"), [(3, "Q4_1"), (1, "Q8_0"), (1, "Q4_1"), (16, "Q5_0"), (2, "Q8_0")]
)
def test_made_or_read_blocks_give_the_same_bits(rows, name):
    rng = np.random.default_rng(rows)
    x = gpu.filled(rng.normal(0, 2, (rows, WIDTH)).astype(np.float32))
    factors = gpu.filled(rng.normal(1, 0.2, (1, WIDTH)).astype(np.float32))
    product, gate, up = (weight(name, seed) for seed in range(3))
    found = []
    for written in (True, False):
        recorder = gpu.backend().recorder(rows)
        normed = gpu.blank_activation(rows, WIDTH, quantised=True)
        rms_norm(recorder, x, factors, normed, eps=1e-5)
        assert recorder.blocked == {normed.f32.address}
        if not written:
            recorder.blocked.clear()
        out, hidden = gpu.blank(rows, OUTPUTS), gpu.blank_activation(rows, OUTPUTS, quantised=True)
        gated_linear(recorder, normed, gate, up, hidden)
        linear(recorder, normed, [product], [out])
        late = [step.options["LATE"] for step in recorder.steps if "LATE" in step.options]
        assert late == [not written] * 2
        gpu.run(recorder)
        found.append((gpu.host(out).view(np.int32), gpu.host(hidden.f32).view(np.int32)))
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
